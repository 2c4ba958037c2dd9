//! What the requests of a connection have in common: the client's release, order, and memory.

use std::sync::Arc;

use kvtier_proto::generation::Candidates;

use super::lanes::Lane;
use super::limits::{self, REPLY_SHARE};
use super::request::Job;
use crate::budget::{Budget, Charge};

/// The part of a client that jobs and replies carry around.
pub struct Peer {
    /// Number of the connection since start; never used twice.
    pub id: u64,
    /// Bytes of its requests that wait.
    pub requests: Arc<Budget>,
    /// Bytes of large replies to it that the system has not taken yet.
    pub replies: Arc<Budget>,
}

/// The client of a connection, from its first request on.
pub struct Client {
    /// What jobs and replies know of it.
    pub peer: Arc<Peer>,
    /// Generations of the protocol it can still be of.
    pub candidates: Candidates,
    /// Messages whose operation is not certain and whose answer depends on it, until a later one decides.
    pub undecided: Vec<Undecided>,
    /// Requests whose order among themselves matters: transfers and registrations.
    pub transfers: Arc<Lane<Job>>,
    /// Everything else.
    pub control: Arc<Lane<Job>>,
    /// Whether the log has said that this client is too old.
    pub told_off: bool,
}

/// A message that waits for the generation of its client.
pub struct Undecided {
    /// Its frames.
    pub frames: Vec<Vec<u8>>,
    /// Its bytes in the budget of its connection.
    pub _charge: Charge,
}

/// Memory that all clients share: half of the requests' and [`REPLY_SHARE`] of the replies' for each.
pub struct Budgets {
    requests: Arc<Budget>,
    replies: Arc<Budget>,
}

impl Budgets {
    /// For requests of `request_bytes` together.
    pub fn new(request_bytes: u64) -> Self {
        Self {
            requests: Budget::new(request_bytes),
            replies: limits::reply_budget(),
        }
    }

    /// The client of connection `id`.
    pub fn client(&self, id: u64) -> Client {
        Client {
            peer: Arc::new(Peer {
                id,
                requests: self.requests.share(self.requests.limit() / 2),
                replies: self.replies.share(REPLY_SHARE),
            }),
            candidates: Candidates::default(),
            undecided: Vec::new(),
            transfers: Arc::default(),
            control: Arc::default(),
            told_off: false,
        }
    }
}
