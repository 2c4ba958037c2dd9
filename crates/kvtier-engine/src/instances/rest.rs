//! Transfers that touch a worker's pages, and their limit. An instance that has left is drained when the last of them
//! has ended; a caller can wait for that.

use std::sync::Arc;
use std::time::Instant;

use kvtier_device::EngineMemory;
use kvtier_sync::{Condvar, Mutex};

use super::super::refusal::Refusal;
use super::Instance;

/// Transfers of one worker that may be in flight: as many as a lane queues for a worker whose bytes are copied in turn.
/// An engine has as many as it has requests that start or end within a few steps.
pub(in super::super) const MAX_IN_FLIGHT: usize = 4096;

/// Requests that may wait for the last copies of one instance: each keeps a thread that others need.
pub(super) const MAX_WAITING: usize = 2;

/// Whether an instance rests, to be waited for.
pub(super) struct Rest {
    pub(super) pages: Mutex<Pages>,
    /// Told when the last copy has ended.
    rests: Condvar,
}

/// Whether an instance's pages may be touched, and by how many transfers they are.
pub(super) struct Pages {
    pub(super) stay: bool,
    pub(super) copying: usize,
    pub(super) waiting: usize,
}

impl Rest {
    /// Of a worker that has just registered.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            pages: Mutex::new(Pages {
                stay: true,
                copying: 0,
                waiting: 0,
            }),
            rests: Condvar::new(),
        })
    }

    /// Counts one more transfer.
    ///
    /// # Errors
    /// If the instance has left and its pages may belong to another request, or if there are too many.
    pub(super) fn count(self: &Arc<Self>) -> Result<Counted, Refusal> {
        let mut pages = self.pages.lock();
        if !pages.stay {
            return Err(String::from("the instance has left meanwhile").into());
        }
        if pages.copying >= MAX_IN_FLIGHT {
            return Err(Refusal::Busy(format!(
                "{MAX_IN_FLIGHT} transfers of this worker are under way; no more are allowed"
            )));
        }
        pages.copying += 1;
        Ok(Counted {
            rest: Arc::clone(self),
        })
    }

    /// Has no transfer begin any more.
    pub(super) fn stop(&self) {
        self.pages.lock().stay = false;
    }

    /// Waits until no transfer is left, or until then, or not at all where too many wait already; gives how many are left.
    pub(super) fn wait(&self, until: Instant) -> usize {
        let mut pages = self.pages.lock();
        if pages.copying > 0 && pages.waiting < MAX_WAITING {
            pages.waiting += 1;
            let running = |pages: &mut Pages| pages.copying > 0;
            self.rests.wait_while_until(&mut pages, running, until);
            pages.waiting -= 1;
        }
        pages.copying
    }

    /// It was stopped, and no transfer is left.
    pub(super) fn is_at_rest(&self) -> bool {
        let pages = self.pages.lock();
        !pages.stay && pages.copying == 0
    }
}

/// One of the transfers that are counted in [`Pages::copying`].
pub(super) struct Counted {
    rest: Arc<Rest>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut pages = self.rest.pages.lock();
        pages.copying -= 1;
        if pages.copying == 0 {
            self.rest.rests.notify_all();
        }
    }
}

/// Guard held while an instance's pages are copied. The removal of the instance waits for it.
pub struct Copying {
    pub(super) memory: Arc<dyn EngineMemory>,
    pub(super) instance: Arc<Instance>,
    // The last field: the waiting thread must be the last owner of the pages, which closes them.
    pub(super) _counted: Counted,
}

impl Copying {
    /// Whose pages.
    pub fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// The pages.
    pub fn pages(&self) -> Arc<dyn EngineMemory> {
        Arc::clone(&self.memory)
    }
}
