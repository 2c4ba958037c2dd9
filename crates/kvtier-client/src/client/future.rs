//! The result of a request that is still to come.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use kvtier_proto::operation::Operation;

use crate::error::ClientError;

/// The result of one request: asked for without waiting ([`Future::try_take`]), waited for ([`Future::wait`],
/// [`Future::join`]), or given up ([`Future::cancel`]).
///
/// It is completed at the request's deadline at the latest, whatever the server does: with the response, or with the
/// error that says why there is none. Dropping it leaves the request on its way.
#[derive(Debug)]
#[must_use = "the result is lost with it; Future::forget says that nobody wants it"]
pub struct Future<T> {
    slot: Arc<Slot<T>>,
    operation: Operation,
}

/// Where a result arrives.
#[derive(Debug)]
struct Slot<T> {
    state: Mutex<State<T>>,
    arrived: Condvar,
}

#[derive(Debug)]
enum State<T> {
    Waiting,
    Arrived(Result<T, ClientError>),
    /// Taken, or given up.
    Over,
}

/// The other end of a [`Future`]. Dropped without a result it completes with [`ClientError::Closed`].
#[derive(Debug)]
pub(super) struct Promise<T> {
    slot: Arc<Slot<T>>,
    operation: Operation,
    kept: bool,
}

/// A future and its promise.
pub(super) fn channel<T>(operation: Operation) -> (Promise<T>, Future<T>) {
    let slot = Arc::new(Slot {
        state: Mutex::new(State::Waiting),
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
    /// Completes the future, unless it was given up.
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

impl<T> Slot<T> {
    fn fill(&self, result: Result<T, ClientError>) {
        let mut state = self.state.lock();
        if matches!(*state, State::Waiting) {
            *state = State::Arrived(result);
            drop(state);
            self.arrived.notify_all();
        }
    }
}

impl<T> Future<T> {
    /// What was asked.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// Whether [`Future::try_take`] would give something. Never waits.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(*self.slot.state.lock(), State::Arrived(_))
    }

    /// Takes the result if it is there; it is given once. Never waits.
    #[must_use]
    pub fn try_take(&self) -> Option<Result<T, ClientError>> {
        take(&mut self.slot.state.lock())
    }

    /// Takes the result, waiting up to `patience` for it; none when it is not there by then, or was taken before.
    #[must_use]
    pub fn wait(&self, patience: Duration) -> Option<Result<T, ClientError>> {
        take(&mut self.arrival(patience))
    }

    /// Waits up to `patience` for the result, which stays to be taken: for several threads that want to see it.
    pub fn wait_ready(&self, patience: Duration) {
        drop(self.arrival(patience));
    }

    fn arrival(&self, patience: Duration) -> MutexGuard<'_, State<T>> {
        let deadline = Instant::now() + patience;
        let mut state = self.slot.state.lock();
        while matches!(*state, State::Waiting) {
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

    /// Waits for the result, which is there at the request's deadline at the latest.
    ///
    /// # Errors
    /// What the request failed with; [`ClientError::Cancelled`] when the result was taken before.
    pub fn join(self) -> Result<T, ClientError> {
        let mut state = self.slot.state.lock();
        while matches!(*state, State::Waiting) {
            self.slot.arrived.wait(&mut state);
        }
        take(&mut state).unwrap_or(Err(ClientError::Cancelled {
            operation: self.operation,
        }))
    }

    /// Lets the request take its course; nobody wants the result.
    pub fn forget(self) {
        drop(self);
    }

    /// Gives the result up: it is dropped when it comes. The server may still do what it was asked.
    pub fn cancel(self) {
        *self.slot.state.lock() = State::Over;
    }
}

fn take<T>(state: &mut State<T>) -> Option<Result<T, ClientError>> {
    match state {
        State::Waiting => None,
        State::Arrived(_) | State::Over => match std::mem::replace(state, State::Over) {
            State::Arrived(result) => Some(result),
            _ => None,
        },
    }
}
