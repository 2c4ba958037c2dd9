//! What the requests of a connection have in common: the client's release, order, and memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use kvtier_proto::generation::Candidates;
use kvtier_proto::operation::Operation;

use super::lanes::LaneQueue;
use super::limits::{
    self, JOB_BYTES, MAX_UNDECIDED, MAX_UNDECIDED_BYTES, REPLY_SHARE, UNDECIDED_PART,
};
use super::names::{LookupNumbers, RandomIds, WorkerNames};
use super::request::RequestJob;
use kvtier_common::sync::budget::Budget;
use kvtier_engine::Engine;

/// The part of a client that its jobs carry around. The engine forgets the connection with the last of them.
pub struct Peer {
    /// Number of the connection since start; never used twice.
    pub id: u64,
    /// Bytes of its requests that wait.
    pub requests: Arc<Budget>,
    /// Bytes of large replies to it that the system has not taken yet.
    pub replies: Arc<Budget>,
    /// Workers of the client, if they are named by process ids.
    pub workers: WorkerNames,
    /// Lookups of the client, if its release asks for results by number.
    pub lookups: LookupNumbers,
    /// Tokens per chunk, once they were negotiated: its requests do not repeat them.
    pub chunk_tokens: OnceLock<u32>,
    is_closed: AtomicBool,
    engine: Weak<Engine>,
}

impl Peer {
    /// Notes that the connection has ended. Its requests may still wait for their turn.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.lose_workers();
    }

    /// Notes in the engine that no client can name the workers of the connection any more.
    pub fn lose_workers(&self) {
        let workers = self.workers.own();
        if let Some(engine) = self.engine.upgrade().filter(|_| !workers.is_empty()) {
            engine.lose_workers(&workers);
        }
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.upgrade() {
            engine.forget_connection(self.id);
        }
    }
}

/// The client of a connection, from its first request on.
pub struct Client {
    /// What jobs and replies know of it.
    pub peer: Arc<Peer>,
    /// Generations of the protocol it can still be of.
    pub candidates: Candidates,
    /// Bytes of the undecided requests of all clients.
    undecided_bytes: Arc<Budget>,
    /// Requests whose operation is not certain and whose answer depends on it, until a later one decides.
    pub undecided: Option<Undecided>,
    /// Requests whose order among themselves matters: transfers and registrations.
    pub transfers: Arc<LaneQueue<RequestJob>>,
    /// Everything else.
    pub control: Arc<LaneQueue<RequestJob>>,
    /// Work of its longest lookup.
    longest_lookup: u64,
    /// Whether the log has its release, if that is an old one.
    pub is_logged: bool,
}

/// Requests that wait for the generation of their client.
pub struct Undecided {
    /// When the first of them came.
    pub since: Instant,
    /// In the order they came.
    pub jobs: Vec<RequestJob>,
}

impl Client {
    /// The work of a request that is `work` by what it names. The end of a session names no chunk, and releases all that its
    /// lookup has found.
    pub fn work(&mut self, operation: Operation, work: u64) -> u64 {
        match operation {
            Operation::Lookup => {
                self.longest_lookup = self.longest_lookup.max(work);
                work
            }
            Operation::EndSession => work.max(self.longest_lookup),
            _ => work,
        }
    }

    /// Whether none of its requests waits or runs.
    pub fn is_idle(&self) -> bool {
        self.transfers.is_idle() && self.control.is_idle()
    }

    /// Keeps a request until a later one shows the generation, and gives it back if too much waits.
    pub fn defer(&mut self, mut job: RequestJob, now: Instant) -> Option<RequestJob> {
        let waiting = self
            .undecided
            .as_ref()
            .map_or(0, |waiting| waiting.jobs.len());
        let sender = &mut job.sender;
        if waiting < MAX_UNDECIDED && sender.bytes <= MAX_UNDECIDED_BYTES {
            sender.charge = self.undecided_bytes.take(sender.bytes + JOB_BYTES);
        }
        if sender.charge.is_none() {
            return Some(job);
        }
        let undecided = self.undecided.get_or_insert_with(|| Undecided {
            since: now,
            jobs: Vec::new(),
        });
        undecided.jobs.push(job);
        None
    }
}

/// Memory that all clients share: half of the requests' and [`REPLY_SHARE`] of the replies' for each.
pub struct Budgets {
    requests: Arc<Budget>,
    replies: Arc<Budget>,
    /// A part of the requests', since these wait for long.
    undecided: Arc<Budget>,
    worker_ids: Arc<RandomIds>,
    engine: Weak<Engine>,
}

impl Budgets {
    /// For requests of `request_bytes` together, to this engine.
    pub fn new(request_bytes: u64, engine: Weak<Engine>) -> Self {
        let requests = Budget::new(request_bytes);
        Self {
            engine,
            worker_ids: Arc::default(),
            undecided: requests.share(request_bytes / UNDECIDED_PART),
            requests,
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
                workers: WorkerNames::new(Arc::clone(&self.worker_ids)),
                is_closed: AtomicBool::new(false),
                lookups: LookupNumbers::default(),
                chunk_tokens: OnceLock::new(),
                engine: Weak::clone(&self.engine),
            }),
            candidates: Candidates::default(),
            undecided_bytes: Arc::clone(&self.undecided),
            undecided: None,
            transfers: Arc::default(),
            control: Arc::default(),
            longest_lookup: 0,
            is_logged: false,
        }
    }
}
