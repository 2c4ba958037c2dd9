//! One connection, kept by a task of its own: it connects, serves calls by a [`Pipe`], and connects again when that has
//! ended.
//!
//! The mutex guards why the connection is down; no other lock is acquired inside.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use kvtier_common::sync::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

use super::command::{Commands, RespReply};
use super::endpoint::Endpoint;
use super::pipe::Pipe;
use kvtier_l2::{
    ErrorKind, L2Error,
    backoff::{REFUSED_PAUSE, pause},
};

/// Commands and where their replies go.
pub(super) struct ConnectionCall {
    pub(super) commands: Commands,
    pub(super) answer: oneshot::Sender<Result<Vec<RespReply>, L2Error>>,
}

impl ConnectionCall {
    /// Bytes that it moves.
    pub(super) fn size(&self) -> u64 {
        self.commands.len() + self.commands.expected_bytes()
    }
}

const UP: u8 = 1;
const DOWN: u8 = 2;

/// What others see of a connection.
#[derive(Default)]
pub(super) struct ConnectionState {
    /// `CONNECTING` only during the first attempt: calls wait for that one.
    stage: AtomicU8,
    /// Bytes of the calls that it has.
    load: AtomicU64,
    /// Why it is down.
    error: Mutex<Option<L2Error>>,
}

impl ConnectionState {
    pub(super) fn is_up(&self) -> bool {
        self.stage.load(Ordering::Acquire) == UP
    }

    pub(super) fn is_down(&self) -> bool {
        self.stage.load(Ordering::Acquire) == DOWN
    }

    pub(super) fn error(&self) -> Option<L2Error> {
        self.error.lock().clone()
    }

    pub(super) fn load(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// Answers a call of `size`.
    pub(super) fn end(
        &self,
        size: u64,
        answer: oneshot::Sender<Result<Vec<RespReply>, L2Error>>,
        result: Result<Vec<RespReply>, L2Error>,
    ) {
        self.load.fetch_sub(size, Ordering::Relaxed);
        // The caller may wait no longer.
        let _ = answer.send(result);
    }

    fn set(&self, error: Option<L2Error>) {
        let stage = if error.is_some() { DOWN } else { UP };
        *self.error.lock() = error;
        self.stage.store(stage, Ordering::Release);
    }
}

/// Nothing is sent to a task that has ended, whatever ended it.
struct Ended(Arc<ConnectionState>);

impl Drop for Ended {
    fn drop(&mut self) {
        let ended = L2Error::new(ErrorKind::Unavailable, "the connection has ended");
        self.0.set(Some(ended));
    }
}

/// A connection, or the attempts to make one. Its task ends when this is dropped and all calls have ended.
pub(super) struct Connection {
    calls: mpsc::UnboundedSender<ConnectionCall>,
    pub(super) state: Arc<ConnectionState>,
}

impl Connection {
    /// Starts to connect. To be called within a tokio runtime.
    pub(super) fn open(endpoint: Arc<Endpoint>) -> (Self, tokio::task::JoinHandle<()>) {
        let (calls, taken) = mpsc::unbounded_channel();
        let state = Arc::new(ConnectionState::default());
        let task = tokio::spawn(run(endpoint, Arc::clone(&state), taken));
        (Self { calls, state }, task)
    }

    /// Sends a call behind those that it has.
    pub(super) fn send(&self, call: ConnectionCall) {
        self.state.load.fetch_add(call.size(), Ordering::Relaxed);
        // Fails only if the task has panicked: then the answer is dropped, which its receiver notices.
        let _ = self.calls.send(call);
    }
}

async fn run(
    endpoint: Arc<Endpoint>,
    state: Arc<ConnectionState>,
    mut calls: mpsc::UnboundedReceiver<ConnectionCall>,
) {
    let _ended = Ended(Arc::clone(&state));
    // Servers that lost their connections at once come back at different times.
    let seed = RandomState::new().hash_one(0);
    let mut failures: u64 = 0;
    let mut is_logged = false;
    // Calls that came before the connection.
    let mut queued = VecDeque::new();
    loop {
        let connecting = timeout(endpoint.options.connection_timeout, endpoint.connect());
        tokio::pin!(connecting);
        let connected = loop {
            tokio::select! {
                connected = &mut connecting => break connected,
                call = calls.recv(), if !calls.is_closed() || queued.is_empty() => match call {
                    Some(call) => queued.push_back(call),
                    None if queued.is_empty() => return,
                    None => {}
                },
            }
        };
        // With the calls that fail by it, unless no call notices.
        let (error, failed) = match connected {
            Ok(Ok(stream)) => {
                if failures > 0 {
                    endpoint.log_return();
                }
                (failures, is_logged) = (0, false);
                state.set(None);
                let mut pipe = Pipe::new(&endpoint, &state, stream);
                match pipe.serve(&mut queued, &mut calls).await {
                    Ok(()) => return,
                    Err(error) => {
                        // Later calls are not sent here any more.
                        state.set(Some(error.clone()));
                        let failed = pipe.fail(&error);
                        // One that is idle may be closed by its server at any time. If that has ended, the next attempt fails.
                        let is_idle = failed == 0 && error.kind() == ErrorKind::Unavailable;
                        (error, (!is_idle).then_some(failed))
                    }
                }
            }
            Ok(Err(error)) => (error, Some(queued.len())),
            Err(_) => {
                let limit = endpoint.options.connection_timeout;
                let message = format!("{}: not connected within {limit:?}", endpoint.name());
                let error = L2Error::new(ErrorKind::Unavailable, message);
                (error, Some(queued.len()))
            }
        };
        state.set(Some(error.clone()));
        if let Some(failed) = failed.filter(|_| !is_logged) {
            endpoint.log_loss(&error, failed);
            is_logged = true;
        }
        let pause = match error.kind() {
            ErrorKind::Refused => REFUSED_PAUSE,
            _ => pause(seed, failures),
        };
        failures += 1;
        let until = Instant::now() + pause;
        for call in queued.drain(..) {
            refuse(&state, call, &error);
        }
        loop {
            tokio::select! {
                () = sleep_until(until) => break,
                call = calls.recv() => match call {
                    Some(call) => refuse(&state, call, &error),
                    None => return,
                },
            }
        }
    }
}

fn refuse(state: &ConnectionState, call: ConnectionCall, error: &L2Error) {
    state.end(call.size(), call.answer, Err(error.clone()));
}
