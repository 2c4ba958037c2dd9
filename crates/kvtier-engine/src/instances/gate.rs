//! Gate: counts the copies of a worker's pages, refuses new ones once it is closed, and can be waited for until it is drained.
//!
//! The mutex guards their number, and whether it is closed; no other lock is acquired inside.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_common::sync::{Condvar, Mutex};
use kvtier_device::EngineMemory;

use super::Instance;

/// Transfers of one worker that may be in flight: as many as a lane queues for a worker whose bytes are copied in turn.
/// An engine has as many as it has requests that start or end within a few steps.
const MAX_IN_FLIGHT: usize = 4096;

/// Requests that may wait for the last copies of one instance: each keeps a thread that others need.
pub(super) const MAX_WAITING: usize = 2;

/// The gate of one instance. The mutex guards the counts.
#[derive(Default)]
pub(super) struct Gate {
    pub(super) state: Mutex<GateState>,
    /// Notified when the last transfer has ended.
    drained: Condvar,
}

#[derive(Default)]
pub(super) struct GateState {
    pub(super) is_closed: bool,
    pub(super) in_flight: usize,
    pub(super) waiting: usize,
}

impl Gate {
    /// Counts one more transfer until the guard is dropped.
    ///
    /// # Errors
    /// If the instance has left and its pages may belong to another request, or if there are too many.
    pub(super) fn enter(self: &Arc<Self>) -> Result<GateGuard> {
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(Error::refused("the instance has left meanwhile"));
        }
        if state.in_flight >= MAX_IN_FLIGHT {
            let limit = format!("{MAX_IN_FLIGHT} transfers of this worker are in flight");
            let error = Error::new(ErrorKind::LaneFull, limit);
            return Err(error.hint("no more are allowed"));
        }
        state.in_flight += 1;
        Ok(GateGuard(Arc::clone(self)))
    }

    /// Lets no transfer in from now on.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
    }

    /// Waits until no transfer is left or `until` has come; not at all if [`MAX_WAITING`] callers wait already. Returns the number
    /// of transfers that are left.
    pub(super) fn wait(&self, until: Instant) -> usize {
        let mut state = self.state.lock();
        if state.in_flight > 0 && state.waiting < MAX_WAITING {
            state.waiting += 1;
            let running = |state: &mut GateState| state.in_flight > 0;
            self.drained.wait_while_until(&mut state, running, until);
            state.waiting -= 1;
        }
        state.in_flight
    }

    /// Whether it is closed and no transfer is left.
    pub(super) fn is_drained(&self) -> bool {
        let state = self.state.lock();
        state.is_closed && state.in_flight == 0
    }
}

/// One transfer of [`GateState::in_flight`].
pub(super) struct GateGuard(Arc<Gate>);

impl Drop for GateGuard {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.in_flight -= 1;
        if state.in_flight == 0 {
            self.0.drained.notify_all();
        }
    }
}

/// Guard held while an instance's pages are copied. The removal of the instance waits for it.
pub struct CopyGuard {
    pub(super) memory: Arc<dyn EngineMemory>,
    pub(super) instance: Arc<Instance>,
    pub(super) dropped_stores: u64,
    // The last field: the waiting thread must be the last owner of the pages, which closes them.
    pub(super) _guard: GateGuard,
}

impl CopyGuard {
    /// The instance.
    pub fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// Whether the client has dropped its stores in flight since then.
    pub fn is_dropped(&self) -> bool {
        self.instance.dropped_stores.load(Ordering::Acquire) != self.dropped_stores
    }

    /// Pages of the instance.
    pub fn pages(&self) -> &Arc<dyn EngineMemory> {
        &self.memory
    }
}
