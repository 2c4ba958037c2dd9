//! Adopting what was there before the start, in the background.
//!
//! Meanwhile everything is served: what the index does not know yet is asked for. Only stores of a tier whose capacity or
//! limits hold strictly wait, since nobody knows how much room there is. Where it fails they are refused, and it is tried
//! again until it succeeds. Nothing is evicted while it runs: the oldest are not known.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use kvtier_core::cache::{Cache, ReadLease};
use kvtier_core::quota::QuotaMode;
use kvtier_core::{ChunkHash, Namespace};
use parking_lot::Mutex;
use tokio::time::sleep;

use super::budget::Budget;
use super::{Adopted, Listed, Tier};
use crate::adapter::Recovered;
use crate::error::{ErrorKind, L2Error};

/// Objects taken into the index between looks at the stop flag.
const SLICE: usize = 1024;

/// The first pause after a failure; it doubles with each one, up to the second.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// How often the stop flag is looked at by whoever only waits.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How far the adoption is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recovery {
    /// Under way, or about to begin.
    Running,
    /// All that was there is known.
    Done(Recovered),
    /// It could not be finished, and the error says when it is tried again. Until it succeeds, nothing is stored where a
    /// capacity or limits hold strictly; elsewhere what was found until then is known.
    Failed(L2Error),
}

/// What ends the adoption early.
enum Ended {
    Stopped,
    Failed(L2Error),
}

impl Tier {
    /// Looks through the backend and adopts what is there: sizes, tenants, and the order of last use. What fails is tried
    /// again.
    ///
    /// To be run once, as a task of its own; `stop` ends it early.
    pub async fn recover(&self, stop: &AtomicBool) {
        if !self.is_recovering() {
            return;
        }
        let mut pause = PAUSE;
        loop {
            let ended = tokio::select! {
                ended = self.recover_once(stop) => ended,
                () = until_stopped(stop) => Err(Ended::Stopped),
            };
            let error = match ended {
                Ok(recovered) => {
                    tracing::info!(
                        tier = self.name(),
                        objects = recovered.objects,
                        bytes = recovered.bytes,
                        removed = recovered.removed,
                        foreign = recovered.foreign,
                        "adopted what was stored before the start"
                    );
                    self.recovery.send_replace(Recovery::Done(recovered));
                    return;
                }
                Err(Ended::Failed(error)) => error,
                Err(Ended::Stopped) => return self.give_up(),
            };
            let line = format!("{error}; the next try is in {} s", pause.as_secs());
            tracing::warn!(tier = self.name(), error = %line, "what was stored before the start is not wholly known");
            let failed = L2Error::new(error.kind(), line);
            self.recovery.send_replace(Recovery::Failed(failed));
            tokio::select! {
                () = sleep(pause) => {}
                () = until_stopped(stop) => return self.give_up(),
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn give_up(&self) {
        let message = "it was stopped before it knew what was stored before the start";
        let stopped = L2Error::new(ErrorKind::Unavailable, message);
        self.recovery.send_replace(Recovery::Failed(stopped));
    }

    async fn recover_once(&self, stop: &AtomicBool) -> Result<Recovered, Ended> {
        let listed = Mutex::new(Vec::new());
        let found = |objects: Vec<Listed>| {
            listed.lock().extend(objects);
            !stop.load(Ordering::Relaxed)
        };
        let result = {
            let mut recover = self.adapter.recover(&found);
            // One that panics would never be tried again.
            std::future::poll_fn(|context| {
                let poll = AssertUnwindSafe(|| recover.as_mut().poll(context));
                let panicked = || L2Error::new(ErrorKind::Unavailable, "the adapter panicked");
                catch_unwind(poll).unwrap_or_else(|_| Poll::Ready(Err(panicked())))
            })
            .await
        };
        // Who leaves for whom is not chosen before all is known.
        if result.is_ok() || !self.is_strict() {
            self.adopt_all(listed.into_inner(), stop).await?;
        }
        result.map_err(Ended::Failed)
    }

    /// Adopts in the order of last use. Where not all has room, the index decides by its own rules who leaves, but nothing
    /// that is known already does: it is younger than all that was there before.
    async fn adopt_all(&self, objects: Vec<Listed>, stop: &AtomicBool) -> Result<(), Ended> {
        let known = self.hold_known().await;
        let (index, may_evict) = (self.index.clone(), self.may_evict());
        // There may be millions of them, and lookups want this thread.
        let sorted = tokio::task::spawn_blocking(move || sorted(&index, objects, may_evict)).await;
        let objects = sorted.map_err(|error| {
            Ended::Failed(L2Error::new(ErrorKind::Unavailable, error.to_string()))
        })?;
        for slice in objects.chunks(SLICE) {
            if stop.load(Ordering::Relaxed) {
                return Err(Ended::Stopped);
            }
            for object in slice {
                let leaves = match self.adopt(&object.key, object.bytes) {
                    Adopted::OverQuota => true,
                    Adopted::NoRoom => may_evict,
                    Adopted::Known | Adopted::Leaving => false,
                };
                if leaves {
                    // Others may have found it by now.
                    let entry = || {
                        let is_new = is_new(&self.index, object);
                        Vec::from_iter(is_new.then(|| (object.key.clone(), object.bytes)))
                    };
                    self.condemned.add(entry);
                }
            }
            self.condemn_evicted();
            tokio::task::yield_now().await;
        }
        for held in known {
            drop(held);
            tokio::task::yield_now().await;
        }
        // What fails is tried again by whoever needs room.
        let _ = self.delete_condemned().await;
        Ok(())
    }

    /// Whether it does not know yet all that was there before the start.
    pub fn is_recovering(&self) -> bool {
        !matches!(*self.recovery.borrow(), Recovery::Done(_))
    }

    /// Whether its capacity or limits hold strictly.
    pub(super) fn is_strict(&self) -> bool {
        let has_limits = self.config.quota_mode == QuotaMode::Strict;
        has_limits || self.config.capacity_bytes.is_some()
    }

    /// Whether it is looking for the first time, or about to.
    pub(super) fn is_looking(&self) -> bool {
        *self.recovery.borrow() == Recovery::Running
    }

    /// How far the adoption is.
    pub fn recovery(&self) -> Recovery {
        self.recovery.borrow().clone()
    }

    /// Waits until it is known what was there before the start.
    pub(super) async fn recovered(&self) -> Result<(), L2Error> {
        let mut recovery = self.recovery.subscribe();
        let ended = recovery.wait_for(|recovery| *recovery != Recovery::Running);
        match &*ended.await.map_err(|_| unknown("it ended"))? {
            Recovery::Failed(error) => Err(unknown(error)),
            _ => Ok(()),
        }
    }

    /// Holds on all that the index has. Given back one after the other, they make it the youngest.
    async fn hold_known(&self) -> Vec<ReadLease<Budget>> {
        let (mut held, mut from) = (Vec::new(), 0);
        loop {
            let page = self.index.objects(from, SLICE);
            let mut by_namespace = BTreeMap::<_, Vec<_>>::new();
            // A lease gives back its last one first.
            for object in page.entries.into_iter().rev() {
                let hashes = by_namespace.entry(object.namespace).or_default();
                hashes.push(object.chunk_hash);
            }
            for (namespace, hashes) in &by_namespace {
                self.hold(namespace, hashes, &mut held);
            }
            match page.next {
                Some(next) => from = next,
                None => return held,
            }
            tokio::task::yield_now().await;
        }
    }

    /// Holds on those that are still there.
    fn hold(&self, namespace: &Namespace, hashes: &[ChunkHash], held: &mut Vec<ReadLease<Budget>>) {
        match self.index.hold(self.now(), namespace, hashes) {
            Some(lease) => held.push(lease),
            None if hashes.len() > 1 => {
                let (left, right) = hashes.split_at(hashes.len() / 2);
                self.hold(namespace, left, held);
                self.hold(namespace, right, held);
            }
            None => {}
        }
    }
}

/// Those that are new, in the order of last use; the other way round where nothing leaves for them.
fn sorted(index: &Cache<Budget>, mut objects: Vec<Listed>, may_evict: bool) -> Vec<Listed> {
    objects.retain(|object| is_new(index, object));
    objects.sort_unstable_by_key(|object| object.used_at);
    if !may_evict {
        objects.reverse();
    }
    objects
}

fn is_new(index: &Cache<Budget>, object: &Listed) -> bool {
    let hash = object.key.chunk_hash();
    !index.contains(object.key.namespace(), &[hash])[0]
}

fn unknown(why: impl std::fmt::Display) -> L2Error {
    let message = format!("nobody knows how much room there is: {why}");
    L2Error::new(ErrorKind::Unavailable, message)
}

async fn until_stopped(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        sleep(LOOK_EVERY).await;
    }
}
