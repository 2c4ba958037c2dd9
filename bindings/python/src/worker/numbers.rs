//! The numbers by which the server knows a worker.
//!
//! Each registration has one of its own. What was asked for under an earlier one may still be on its way through the
//! server, on a connection that is lost: it must find nobody.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

use kvtier_client::{Client as Native, ClientError, InstanceId};

use super::{Core, Mode, Registered, introduce};

/// Numbers of one worker.
pub struct Numbers {
    next: InstanceId,
    /// Those that a server may know.
    known: Vec<InstanceId>,
    has_stopped: bool,
}

impl Numbers {
    /// The first registration has the number `first`; later ones have random ones.
    pub fn new(first: i64) -> Self {
        Self {
            next: InstanceId(first),
            known: Vec::new(),
            has_stopped: false,
        }
    }

    /// The number of a registration that is being tried.
    fn tried(&mut self) -> InstanceId {
        if !self.known.contains(&self.next) {
            self.known.push(self.next);
        }
        self.next
    }

    /// It has succeeded: transfers may use this number, so the next registration must not.
    fn used(&mut self) {
        // 62 bits that nobody else draws: every new state has other keys, and no other worker hashes this number.
        let random = RandomState::new().hash_one(self.next.0) >> 2;
        self.next = InstanceId(random.cast_signed());
    }
}

impl Core {
    /// Tells the server about this worker under a new number, and takes the earlier ones back; the pages stay as they
    /// are.
    pub fn register(&self, client: &Native) -> Result<(), ClientError> {
        let mut numbers = self.numbers.lock();
        if numbers.has_stopped {
            return Ok(());
        }
        // Nothing goes by an earlier registration meanwhile.
        *self.registered.lock() = None;
        loop {
            let connections = client.connections();
            introduce(client)?;
            let instance = numbers.tried();
            let pool = match self.mode {
                Mode::Engine => self.register_engine_driven(client, instance)?,
                Mode::Server => self.register_server_driven(client, instance)?,
            };
            // In this order: lookups are answered for a model that has a worker.
            self.leave(client, &mut numbers, Some(instance))?;
            // A connection that came meanwhile, the first one for instance, may have another server.
            if connections == client.connections() {
                numbers.used();
                client.set_instance(Some(instance));
                *self.registered.lock() = Some(Arc::new(Registered {
                    instance,
                    connections,
                    pool,
                }));
                return Ok(());
            }
        }
    }

    /// Has the server forget this worker's numbers but for `kept`. When it has answered, it touches no pages for them.
    ///
    /// Whoever answers at the server's address is the server that was asked, or one that came when that one had ended.
    fn leave(
        &self,
        client: &Native,
        numbers: &mut Numbers,
        kept: Option<InstanceId>,
    ) -> Result<(), ClientError> {
        while let Some(at) = numbers.known.iter().position(|known| Some(*known) != kept) {
            let instance = numbers.known[at];
            match self.mode {
                Mode::Engine => client.unregister_engine_driven(instance).join()?,
                Mode::Server => client.unregister_kv_cache(instance).join()?,
            }
            numbers.known.swap_remove(at);
            self.handed.has_left(instance);
            self.finish_free();
        }
        Ok(())
    }

    /// Registers anew, soon, unless that has happened since `instance` was the worker's number: the server may keep
    /// something for it, or be at its pages, and does not say so.
    pub fn renew(&self, instance: InstanceId) {
        let mut registered = self.registered.lock();
        if registered
            .as_ref()
            .is_some_and(|known| known.instance == instance)
        {
            *registered = None;
            drop(registered);
            self.client.recover_again();
        }
    }

    /// Unregisters for good, and waits until the server has let go of all pages.
    pub fn stop(&self) {
        let mut numbers = self.numbers.lock();
        numbers.has_stopped = true;
        *self.registered.lock() = None;
        let client = &self.client;
        client.set_instance(None);
        client.on_recover(client.connections(), Box::new(|_| Ok(())));
        // Whatever comes of it: the server also notices by itself.
        let _ = self.leave(client, &mut numbers, None);
        numbers.known.clear();
        drop(numbers);
        self.wait_for_pages();
    }
}
