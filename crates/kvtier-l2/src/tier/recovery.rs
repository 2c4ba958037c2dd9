//! Adopting what was there before the start, in the background.
//!
//! Meanwhile everything is served: what the index does not know yet is asked for. Only stores of a bounded tier wait,
//! since nobody knows how much room there is.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::{Listed, Tier};
use crate::adapter::Recovered;
use crate::error::L2Error;

/// Objects taken into the index between looks at the stop flag.
const SLICE: usize = 1024;

/// How far the adoption is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recovery {
    /// Under way, or about to begin.
    Running,
    /// All that was there is known.
    Done(Recovered),
    /// It could not be finished; what was found until then is known.
    Failed(L2Error),
}

impl Tier {
    /// Looks through the backend and adopts what is there: sizes, tenants, and the order of last use.
    ///
    /// To be run once, as a task of its own; `stop` ends it early.
    pub async fn recover(&self, stop: &AtomicBool) {
        if !self.is_recovering() {
            return;
        }
        let listed = Mutex::new(Vec::new());
        let found = |objects: Vec<Listed>| {
            listed.lock().extend(objects);
            !stop.load(Ordering::Relaxed)
        };
        let result = self.adapter.recover(&found).await;
        let mut objects = listed.into_inner();
        // What was used meanwhile is younger than all of them.
        let known = self.known();
        objects.sort_unstable_by_key(|object| object.used_at);
        for slice in objects.chunks(SLICE) {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            for object in slice {
                self.adopt(&object.key, object.bytes);
            }
            // What fails is tried again by whoever needs room.
            let _ = self.delete_condemned().await;
            tokio::task::yield_now().await;
        }
        for object in known {
            let space = object.space.as_space();
            self.index.touch(self.now(), &space, &[object.chunk_hash]);
        }
        let recovery = match result {
            Ok(recovered) => {
                tracing::info!(
                    tier = self.name(),
                    objects = recovered.objects,
                    bytes = recovered.bytes,
                    removed = recovered.removed,
                    foreign = recovered.foreign,
                    "adopted what was stored before the start"
                );
                Recovery::Done(recovered)
            }
            Err(error) => {
                tracing::warn!(tier = self.name(), %error, "what was stored before the start is not wholly known");
                Recovery::Failed(error)
            }
        };
        self.recovery.send_replace(recovery);
    }

    /// Whether it does not know yet what was there before the start.
    pub fn is_recovering(&self) -> bool {
        *self.recovery.borrow() == Recovery::Running
    }

    /// How far the adoption is.
    pub fn recovery(&self) -> Recovery {
        self.recovery.borrow().clone()
    }

    pub(super) async fn recovered(&self) {
        // The sender is a part of this tier.
        let _ = self
            .recovery
            .subscribe()
            .wait_for(|recovery| *recovery != Recovery::Running)
            .await;
    }

    fn known(&self) -> Vec<kvtier_core::cache::ResidentObject> {
        let (mut known, mut from) = (Vec::new(), 0);
        loop {
            let page = self.index.objects(from, SLICE);
            known.extend(page.entries);
            match page.next {
                Some(next) => from = next,
                None => return known,
            }
        }
    }
}
