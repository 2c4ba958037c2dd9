//! State of a worker: its registration, and its transfers until Python takes their results.
//!
//! `instance_ids` guards the ids of a worker's registrations, and is held during one; `finished` guards the results that Python
//! has not taken, and is held while the next release of pages is looked up; other locks are acquired inside both.
//! `registered` guards the registration, `unread` the stores whose pages are not completely read; both have none inside.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_client::{Client as Native, InstanceId, Prompt, Scope, SharedPool};
use kvtier_common::sync::{Condvar, Mutex};
use kvtier_proto::key_settings::KeySettings;

use super::geometry::Geometry;
use super::instance_ids::InstanceIds;
use super::server_transfers::ServerTransfers;

/// Side that copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The worker itself, to and from the server's pool, or in messages.
    Engine,
    /// The server, from and to the engine's pages.
    Server,
}

/// A store or a retrieve that was submitted.
pub struct Transfer {
    /// The caller's number for it.
    pub id: u64,
    pub is_store: bool,
    pub prompt: Prompt,
    pub range: Range<u64>,
    pub request_id: String,
    pub cache_salt: String,
    /// One list per group.
    pub block_ids: Vec<Vec<i64>>,
    /// Tokens at the start of the range whose pages must not be written.
    pub skip: u64,
    pub event: Vec<u8>,
    pub deadline: Instant,
    /// How long what a store writes is to be kept; `None` as the server's eviction policy does.
    pub keep_seconds: Option<u32>,
    /// The agent's session that a store belongs to.
    pub session: Option<String>,
}

/// A transfer that has ended.
pub struct FinishedTransfers {
    pub id: u64,
    pub outcome: Result<Done, String>,
}

/// Result of a transfer that has succeeded.
#[derive(Default)]
pub struct Done {
    /// The device event after which the copy is complete.
    pub event: Vec<u8>,
    /// Positions, in the range of a store, of the chunks that the server took; `None` if the server does not say.
    pub chunks: Option<Vec<u64>>,
}

/// The current registration.
pub struct Registered {
    pub instance: InstanceId,
    /// The scope of its keys, with the chunk size if the registration names one; without a salt.
    pub scope: Scope,
    /// [`Native::connections`] at its time: later ones lead to a server that may not know it.
    pub connections: u64,
    pub pool: SharedPool,
}

impl Registered {
    /// The scope of a transfer's keys; `deadline` is in the time of the monotonic clock.
    pub fn scope_of(&self, transfer: &Transfer, deadline: Option<Duration>) -> Scope {
        let settings = KeySettings {
            deadline,
            keep_seconds: transfer.keep_seconds,
            session: transfer.session.as_deref(),
            ..KeySettings::default()
        };
        let scope = self.scope.clone().with_salt(transfer.cache_salt.clone());
        scope.with_settings(settings)
    }
}

/// Shared by the Python object and the threads.
pub struct Core {
    pub client: Native,
    /// Model and world; each registration adds its chunk size.
    pub scope: Scope,
    pub worker_id: u32,
    pub instance_ids: Mutex<InstanceIds>,
    pub mode: Mode,
    pub chunk_tokens: u64,
    pub force_pickle: bool,
    pub geometry: Geometry,
    pub registered: Mutex<Option<Arc<Registered>>>,
    pub server_transfers: ServerTransfers,
    pub finished: Mutex<Vec<FinishedTransfers>>,
    /// Signals that `finished` or `server_transfers` has changed.
    pub changed: Condvar,
    /// Stores whose pages this process has not completely read, and whether it is reading them.
    pub unread: Mutex<HashMap<u64, bool>>,
}

impl Core {
    /// The registration, if it is one with the server that is connected now.
    pub fn current(&self) -> Option<Arc<Registered>> {
        let registered = self.registered.lock().clone()?;
        self.is_current(&registered).then_some(registered)
    }

    /// Whether a registration is one with the server that is connected now.
    pub fn is_current(&self, registered: &Registered) -> bool {
        registered.connections == self.client.connections()
    }

    /// Removes the registration of `instance`, if it is the current one, and registers again soon: the server may
    /// keep something for it, or use its pages, without telling.
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

    /// Finishes a transfer.
    pub fn finish(&self, id: u64, outcome: Result<Done, String>) {
        self.unread.lock().remove(&id);
        self.finished.lock().push(FinishedTransfers { id, outcome });
        self.changed.notify_all();
    }

    /// Finishes the unanswered transfers whose pages are released.
    pub fn finish_released(&self) {
        for (id, error) in self.server_transfers.take_released() {
            self.finish(id, Err(error));
        }
    }

    /// Marks a transfer as failed without an answer; it finishes when its pages are released.
    pub fn unanswered(&self, id: u64, error: String) {
        self.server_transfers.unanswered(id, error);
        // Waiting threads compute their next wake-up again.
        drop(self.finished.lock());
        self.changed.notify_all();
    }

    /// Waits for a finished transfer, up to `until`.
    pub fn wait_for_finished(&self, until: Instant) {
        loop {
            self.finish_released();
            let mut finished = self.finished.lock();
            if !finished.is_empty() || Instant::now() >= until {
                return;
            }
            let next = self
                .server_transfers
                .next_release()
                .map_or(until, |next| next.min(until));
            self.changed.wait_until(&mut finished, next);
        }
    }

    /// Waits until the server has released all pages, at the latest a moment after the last deadline.
    pub fn wait_for_pages(&self) {
        loop {
            self.finish_released();
            let mut finished = self.finished.lock();
            if self.server_transfers.is_empty() {
                return;
            }
            match self.server_transfers.next_release() {
                Some(next) => drop(self.changed.wait_until(&mut finished, next)),
                None => self.changed.wait(&mut finished),
            }
        }
    }
}
