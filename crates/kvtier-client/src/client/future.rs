//! Futures: results of requests that are in flight.
//!
//! The mutex guards the result; no other lock is acquired inside.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_common::sync::{Condvar, Mutex, MutexGuard};

use kvtier_proto::operation::Operation;

use crate::error::ClientError;

/// The result of one request: polled ([`Future::try_take`]), waited for ([`Future::wait`], [`Future::join`]), or
/// cancelled ([`Future::cancel`]).
///
/// It is completed at the request's deadline at the latest, whatever the server does: with the response, or with the
/// error that explains why there is none. Dropping it leaves the request in flight.
#[derive(Debug)]
#[must_use = "the result is lost with it; Future::forget drops it on purpose"]
pub struct Future<T> {
    slot: Arc<FutureSlot<T>>,
    operation: Operation,
}

/// The place of the result, shared by a future and its promise.
#[derive(Debug)]
struct FutureSlot<T> {
    state: Mutex<FutureState<T>>,
    arrived: Condvar,
}

#[derive(Debug)]
enum FutureState<T> {
    Waiting,
    Arrived(Result<T, ClientError>),
    /// Taken, or cancelled.
    Over,
}

/// The other end of a [`Future`]. Dropping it without a result completes the future with [`ClientError::Closed`].
#[derive(Debug)]
pub(super) struct Promise<T> {
    slot: Arc<FutureSlot<T>>,
    operation: Operation,
    kept: bool,
}

/// Returns a promise and its future.
pub(super) fn channel<T>(operation: Operation) -> (Promise<T>, Future<T>) {
    let slot = Arc::new(FutureSlot {
        state: Mutex::new(FutureState::Waiting),
        arrived: Condvar::new(),
    });
    let promise = Promise {
        slot: Arc::clone(&slot),
        operation,
        kept: false,
    };
    (promise, Future { slot, operation })
}

impl<T> Promise<T> {
    /// Completes the future, unless it was cancelled.
    pub(super) fn keep(mut self, result: Result<T, ClientError>) {
        self.kept = true;
        self.slot.fill(result);
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        if !self.kept {
            self.slot.fill(Err(ClientError::Closed {
                operation: self.operation,
            }));
        }
    }
}

impl<T> FutureSlot<T> {
    fn fill(&self, result: Result<T, ClientError>) {
        let mut state = self.state.lock();
        if matches!(*state, FutureState::Waiting) {
            *state = FutureState::Arrived(result);
            drop(state);
            self.arrived.notify_all();
        }
    }
}

impl<T> Future<T> {
    /// The request's operation.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// Whether [`Future::try_take`] would return a result. Never waits.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(*self.slot.state.lock(), FutureState::Arrived(_))
    }

    /// Takes the result if it has arrived; only one call returns it. Never waits.
    #[must_use]
    pub fn try_take(&self) -> Option<Result<T, ClientError>> {
        take(&mut self.slot.state.lock())
    }

    /// Takes the result, waiting up to `timeout` for it; none if it has not arrived by then, or was taken before.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<Result<T, ClientError>> {
        take(&mut self.arrival(timeout))
    }

    /// Waits up to `timeout` for the result without taking it, so several threads can wait.
    pub fn wait_ready(&self, timeout: Duration) {
        drop(self.arrival(timeout));
    }

    fn arrival(&self, timeout: Duration) -> MutexGuard<'_, FutureState<T>> {
        let deadline = Instant::now() + timeout;
        let mut state = self.slot.state.lock();
        while matches!(*state, FutureState::Waiting) {
            if self
                .slot
                .arrived
                .wait_until(&mut state, deadline)
                .timed_out()
            {
                break;
            }
        }
        state
    }

    /// Waits for the result, which arrives at the request's deadline at the latest.
    ///
    /// # Errors
    /// The request's error; [`ClientError::Cancelled`] if the result was taken before.
    pub fn join(self) -> Result<T, ClientError> {
        let mut state = self.slot.state.lock();
        while matches!(*state, FutureState::Waiting) {
            self.slot.arrived.wait(&mut state);
        }
        take(&mut state).unwrap_or(Err(ClientError::Cancelled {
            operation: self.operation,
        }))
    }

    /// Drops the result; the request stays in flight.
    pub fn forget(self) {
        drop(self);
    }

    /// Cancels the future: the result is dropped when it arrives. The server may still serve the request.
    pub fn cancel(self) {
        *self.slot.state.lock() = FutureState::Over;
    }
}

fn take<T>(state: &mut FutureState<T>) -> Option<Result<T, ClientError>> {
    match state {
        FutureState::Waiting => None,
        FutureState::Arrived(_) | FutureState::Over => {
            match std::mem::replace(state, FutureState::Over) {
                FutureState::Arrived(result) => Some(result),
                _ => None,
            }
        }
    }
}
