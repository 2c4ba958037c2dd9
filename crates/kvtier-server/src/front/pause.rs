//! Pauses of the front end, and what it hands over in one.

use std::os::fd::OwnedFd;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};
use kvtier_error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// All connections, for the next process. Their sockets and bytes are beside it, in the same order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontState {
    pub(super) next_connection: u64,
    pub(super) connections: Vec<ConnectionState>,
}

/// A connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConnectionState {
    pub(super) id: u64,
    pub(super) is_greeted: bool,
    pub(super) is_ready: bool,
    pub(super) knows_ping: bool,
    /// Milliseconds.
    pub(super) ttl: Option<u64>,
    /// Bytes of messages that were read and not served.
    pub(super) input: usize,
    /// Bytes that its client has not got.
    pub(super) output: usize,
    pub(super) client: Option<ClientState>,
}

/// What is known of a client that has sent a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientState {
    pub generations: u8,
    pub release: u8,
    pub knows_chunk_size: bool,
    pub last_query: Option<u64>,
    pub may_have_worker: bool,
    pub longest_lookup: u64,
    pub is_logged: bool,
}

/// What the next process receives of the front end.
#[derive(Default)]
pub struct FrontHandOver {
    /// What is known of them.
    pub state: FrontState,
    /// One per connection.
    pub sockets: Vec<OwnedFd>,
    /// Input and output of each connection.
    pub bytes: Vec<u8>,
}

impl FrontState {
    /// Number of connections.
    pub fn count(&self) -> usize {
        self.connections.len()
    }
}

/// The next process has the connections: they are never touched again.
pub(super) struct HandedOver;

/// Request for a pause.
pub struct PauseRequest {
    pub(super) until: Instant,
    pub(super) paused: Sender<Result<FrontHandOver>>,
    pub(super) outcome: Receiver<HandedOver>,
}

/// A paused front end, which goes on when this is dropped.
pub struct Paused {
    /// What it would hand over.
    pub front: FrontHandOver,
    outcome: Sender<HandedOver>,
}

impl Paused {
    /// Ends the front end: the next process has its connections.
    pub fn hand_over(self) {
        let _ = self.outcome.send(HandedOver);
    }
}

/// Asks for pauses, from another thread.
#[derive(Clone)]
pub struct Pauses(Sender<PauseRequest>);

impl Pauses {
    /// Both ends.
    pub fn new() -> (Self, Receiver<PauseRequest>) {
        let (sender, receiver) = bounded(1);
        (Self(sender), receiver)
    }

    /// Pauses the front end when all requests that it has read are answered. `wake` wakes its thread.
    ///
    /// # Errors
    /// What is still in flight at `until`, or that the front end has ended.
    pub fn pause(&self, until: Instant, wake: impl FnOnce()) -> Result<Paused> {
        let (paused, front) = bounded(1);
        let (sender, outcome) = bounded(1);
        let request = PauseRequest {
            until,
            paused,
            outcome,
        };
        let ended = || cannot("the server is stopping");
        self.0.send(request).map_err(|_| ended())?;
        wake();
        let front = front.recv().map_err(|_| ended())??;
        Ok(Paused {
            front,
            outcome: sender,
        })
    }
}

pub(super) fn cannot(what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, what)
}
