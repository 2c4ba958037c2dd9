//! What the front end remembers of each connection.
//!
//! A ROUTER socket never says that a peer has gone, and a client that reconnects comes back under a new routing id. So
//! connections are forgotten by idleness, oldest first, and nothing that matters hangs on one: leases belong to
//! requests and instances.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_proto::generation::Candidates;

use super::lanes::Lane;
use super::limits::REPLY_SHARE;
use super::request::Job;
use crate::budget::{Budget, Charge};

/// Connections kept at most. A vLLM engine has one for its scheduler and one for each worker.
const MAX_CONNECTIONS: usize = 65_536;

/// Idle time after which a connection is forgotten when its turn comes. Clients ping every few seconds.
const IDLE: Duration = Duration::from_secs(3600);

/// The part of a connection that jobs and replies carry around.
pub struct Peer {
    /// Number of the connection since start; never used twice.
    pub id: u64,
    /// Routing id of the socket, the first frame of every message to it.
    pub routing_id: Box<[u8]>,
    /// Bytes of its requests that wait.
    pub requests: Arc<Budget>,
    /// Bytes of large replies to it that the system has not taken yet.
    pub replies: Arc<Budget>,
}

/// One client socket.
pub struct Connection {
    /// What jobs and replies know of it.
    pub peer: Arc<Peer>,
    /// Generations of the protocol its client can still be of.
    pub candidates: Candidates,
    /// Messages whose operation is not certain and whose answer depends on it, until a later one decides.
    pub undecided: Vec<Undecided>,
    /// Requests whose order among themselves matters: transfers and registrations.
    pub transfers: Arc<Lane<Job>>,
    /// Everything else.
    pub control: Arc<Lane<Job>>,
    /// Whether the log has said that this client is too old.
    pub told_off: bool,
    last_seen: Instant,
}

/// A message that waits for the generation of its client, routing id first.
pub struct Undecided {
    /// Its frames.
    pub frames: Vec<zmq::Message>,
    /// Its bytes in the budget of its connection.
    pub _charge: Charge,
}

/// All connections, by routing id.
pub struct Connections {
    by_routing_id: HashMap<Box<[u8]>, Connection>,
    requests: Arc<Budget>,
    replies: Arc<Budget>,
    next_id: u64,
    next_sweep: Option<Instant>,
}

impl Connections {
    /// None yet. Each gets a share of these budgets: half of the one for requests, [`REPLY_SHARE`] of the one for replies.
    pub fn new(requests: Arc<Budget>, replies: Arc<Budget>) -> Self {
        Self {
            by_routing_id: HashMap::new(),
            requests,
            replies,
            next_id: 0,
            next_sweep: None,
        }
    }

    /// The connection of this routing id; a new one if it is unknown.
    pub fn get(&mut self, routing_id: &[u8], now: Instant) -> &mut Connection {
        self.sweep(now);
        if !self.by_routing_id.contains_key(routing_id) {
            let peer = Arc::new(Peer {
                id: self.next_id,
                routing_id: routing_id.into(),
                requests: self.requests.share(self.requests.limit() / 2),
                replies: self.replies.share(REPLY_SHARE),
            });
            self.next_id += 1;
            let connection = Connection {
                peer,
                candidates: Candidates::default(),
                undecided: Vec::new(),
                transfers: Arc::default(),
                control: Arc::default(),
                told_off: false,
                last_seen: now,
            };
            self.by_routing_id.insert(routing_id.into(), connection);
        }
        let connection = self
            .by_routing_id
            .get_mut(routing_id)
            .expect("inserted above");
        connection.last_seen = now;
        connection
    }

    /// Forgets idle connections, at most once a minute, and the longest idle ones when there are too many.
    fn sweep(&mut self, now: Instant) {
        let full = self.by_routing_id.len() >= MAX_CONNECTIONS;
        if !full && self.next_sweep.is_some_and(|next| now < next) {
            return;
        }
        self.next_sweep = Some(now + Duration::from_secs(60));
        let mut keep_since = now.checked_sub(IDLE);
        if full {
            // Half of them at once, so that a flood of short connections does not sweep for each one.
            let mut seen: Vec<_> = self
                .by_routing_id
                .values()
                .map(|connection| connection.last_seen)
                .collect();
            let middle = seen.len() / 2;
            keep_since = Some(*seen.select_nth_unstable(middle).1);
        }
        let Some(keep_since) = keep_since else { return };
        self.by_routing_id.retain(|_, connection| {
            connection.last_seen > keep_since
                || !connection.transfers.is_idle()
                || !connection.control.is_idle()
        });
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.by_routing_id.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections() -> Connections {
        Connections::new(Budget::new(0), Budget::new(0))
    }

    #[test]
    fn idle_connections_are_forgotten_and_ids_never_reused() {
        let mut connections = connections();
        let start = Instant::now();
        let first = connections.get(b"one", start).peer.id;
        let second = connections.get(b"two", start + IDLE).peer.id;
        assert_ne!(first, second);
        connections.get(b"two", start + IDLE + Duration::from_secs(61));
        assert_eq!(connections.len(), 1);
        assert!(
            connections
                .get(b"one", start + IDLE + Duration::from_secs(62))
                .peer
                .id
                > second
        );
    }

    #[test]
    fn a_flood_of_connections_is_bounded() {
        let mut connections = connections();
        let start = Instant::now();
        for index in 0..MAX_CONNECTIONS as u64 + 10 {
            connections.get(&index.to_le_bytes(), start + Duration::from_nanos(index));
        }
        assert!(connections.len() <= MAX_CONNECTIONS);
        assert!(connections.len() >= MAX_CONNECTIONS / 2 - 1);
    }
}
