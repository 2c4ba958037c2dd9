//! One request on its way through a pool: decode, handle, reply.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use kvtier_proto::generation::{Generation, OperationSpec, Release, Resolved};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::Request;
use kvtier_proto::response::{Response, ResponseKind};

use super::client::Peer;
use super::lanes::Turn;
use super::limits::{JOB_BYTES, SMALL_REPLY, answers_much};
use super::outbox::{Outbox, Reply};
use crate::budget::Charge;
use crate::engine::{Answer, Begin, Caller, Engine, Handled, Responder};
use crate::health::Health;
use kvtier_l2::RateLimited;

/// A request whose frames are still undecoded.
pub struct Job {
    /// Who asks.
    pub peer: Arc<Peer>,
    /// The request's uid frame.
    pub uid: Vec<u8>,
    /// The request's operation frame.
    pub op: Vec<u8>,
    /// The payload frames; token ids and pickled data stay in them to the end.
    pub payloads: Vec<Vec<u8>>,
    /// Bytes of the payload frames.
    pub bytes: u64,
    /// Those bytes in the budget of its connection, if it, or its answer, has to wait.
    pub charge: Option<Charge>,
    /// The row of the table that the request is read by.
    pub resolved: Resolved,
    /// Whether its client survives a text in place of the operation's frame.
    pub takes_text: bool,
    /// When its message was taken from the socket.
    pub received: Instant,
}

/// Payload bytes up to which a request may be served by the thread that owns the socket. About a thousand token ids:
/// some ten microseconds to decode and hash, less than handing it to another thread and back costs.
const QUICK_BYTES: u64 = 4096;

/// What serves requests.
pub struct Server {
    /// The cache.
    pub engine: Arc<Engine>,
    /// Where a panic is noted.
    pub health: Arc<Health>,
    /// Where answers go.
    pub outbox: Outbox,
    /// Shared by every request whose answer is to come.
    unanswered: Arc<()>,
}

impl Job {
    /// Whether serving it takes microseconds at most: little to decode, and an operation that copies no KV data, maps no
    /// memory and walks no long list.
    pub fn is_quick(&self) -> bool {
        matches!(
            self.spec().operation,
            Operation::Lookup
                | Operation::QueryPrefetchStatus
                | Operation::WaitPrefetchStatus
                | Operation::FreeLookupLocks
                | Operation::PrepareStore
                | Operation::CommitStore
                | Operation::CommitRetrieve
        ) && self.bytes <= QUICK_BYTES
    }

    /// The operation's table row.
    fn spec(&self) -> &'static OperationSpec {
        self.resolved.spec
    }

    /// The message it came as.
    pub fn into_frames(self) -> Vec<Vec<u8>> {
        [self.uid, self.op]
            .into_iter()
            .chain(self.payloads)
            .collect()
    }

    fn caller(&self) -> Caller {
        Caller {
            connection: self.peer.id,
            release: self.resolved.release,
            knows_chunk_size: self.resolved.knows_chunk_size,
        }
    }
}

impl Server {
    /// Not serving anything yet.
    pub fn new(engine: Arc<Engine>, health: Arc<Health>, outbox: Outbox) -> Self {
        Self {
            engine,
            health,
            outbox,
            unanswered: Arc::default(),
        }
    }

    /// Whether there are requests whose answer is to come and that no pool holds.
    pub fn has_unanswered(&self) -> bool {
        Arc::strong_count(&self.unanswered) > 1
    }

    /// Serves a request and sends its answer through the outbox. Its lane goes on then, or when what the request needs
    /// is done.
    pub fn run(self: &Arc<Self>, job: Job, turn: Turn<Job>) {
        let mut turn = Some(turn);
        for reply in self.answer(job, &mut turn) {
            self.outbox.send(reply);
        }
    }

    /// Serves a request. Whatever happens, there is an answer; a stream has two messages, and an answer that has to wait
    /// goes through the outbox when it is there. The turn is taken by one that nothing may pass.
    pub fn answer(
        self: &Arc<Self>,
        job: Job,
        turn: &mut Option<Turn<Job>>,
    ) -> impl Iterator<Item = Reply> + use<> {
        let handled = catch_unwind(AssertUnwindSafe(|| self.serve(&job)))
            .unwrap_or_else(|_| self.panicked(&job).into());
        let refused = |job: Job| {
            let (operation, kind) = (job.spec().operation, job.spec().response);
            self.replies(job, Answer::refusal(operation, kind, "queue_full"))
        };
        let now = match handled {
            Handled::Now(answer) => Some(self.replies(job, answer)),
            Handled::Later(begin) => self.later(job, begin, None).map(refused),
            Handled::InTurn(begin) => self.later(job, begin, turn.take()).map(refused),
        };
        now.into_iter().flatten()
    }

    /// Begins what a request waits for; gives it back when too much waits already.
    pub(super) fn later(
        self: &Arc<Self>,
        mut job: Job,
        begin: Begin,
        turn: Option<Turn<Job>>,
    ) -> Option<Job> {
        if job.charge.is_none() {
            // It was served as it came, and is kept from here on.
            job.charge = job.peer.requests.take(job.bytes + JOB_BYTES);
        }
        if job.charge.is_none() {
            return Some(job);
        }
        let responder = self.responder(job, turn);
        // A panic drops the responder, which says so.
        let _ = catch_unwind(AssertUnwindSafe(|| begin(responder)));
        None
    }

    /// Sends the answer to a job when it is there, and ends the turn.
    fn responder(self: &Arc<Self>, job: Job, turn: Option<Turn<Job>>) -> Responder {
        let (server, unanswered) = (Arc::clone(self), Arc::clone(&self.unanswered));
        Responder::new(move |answer| {
            let answer = answer.unwrap_or_else(|| match std::thread::panicking() {
                true => server.panicked(&job),
                // At the end, when what it waited for ends too.
                false => Answer::refusal(job.spec().operation, job.spec().response, "given_up"),
            });
            for reply in server.replies(job, answer) {
                server.outbox.send(reply);
            }
            drop((unanswered, turn));
        })
    }

    /// Notes a panic, which has been printed, and gives the answer to the request that met it.
    fn panicked(&self, job: &Job) -> Answer {
        let operation = job.spec().operation;
        // State under a lock may be half changed, so the health says it for good.
        self.health.poison(operation.name());
        self.engine.metrics().handler_panics.inc();
        Answer::refusal(operation, job.spec().response, "panic")
    }

    /// Answers with the operation's "no", without serving.
    pub fn refuse(
        self: &Arc<Self>,
        job: Job,
        reason: &'static str,
    ) -> impl Iterator<Item = Reply> + use<> {
        let answer = Answer::refusal(job.spec().operation, job.spec().response, reason);
        self.replies(job, answer)
    }

    fn serve(&self, job: &Job) -> Handled {
        let spec = job.spec();
        // The readings of generations differ, and so may the answers they take: but for those without a payload.
        if !job.resolved.certain && spec.response != ResponseKind::Nothing {
            return Answer::nothing().because("uncertain_generation").into();
        }
        if job.resolved.generation != Generation::G6 {
            return self.serve_older(job);
        }
        if answers_much(spec.operation) && job.peer.replies.is_full() {
            return Answer::refusal(spec.operation, spec.response, "replies_unread").into();
        }
        let payloads: Vec<&[u8]> = job.payloads.iter().map(Vec::as_slice).collect();
        match Request::decode(spec, &payloads, &mut self.engine.prompt_reader()) {
            Ok(request) => self.engine.handle(job.caller(), &request),
            Err(error) => {
                static LOG_LIMIT: RateLimited = RateLimited::per_second();
                if let Some(left_out) = LOG_LIMIT.permit(Instant::now()) {
                    let operation = spec.operation.name();
                    tracing::warn!(operation, %error, left_out, "a request could not be decoded");
                }
                Answer::refusal_with(spec.operation, spec.response, "undecodable", &error).into()
            }
        }
    }

    /// A client of a generation that is recognised and not served yet: it gets the "no" of each operation, so that it
    /// runs without a cache instead of waiting.
    fn serve_older(&self, job: &Job) -> Handled {
        let spec = job.spec();
        match spec.operation {
            Operation::GetChunkSize => self.engine.handle(job.caller(), &Request::GetChunkSize),
            Operation::Ping => self.engine.ping_of_unserved(job.caller()).into(),
            operation => Answer::refusal(operation, spec.response, "older_generation").into(),
        }
    }

    fn replies(self: &Arc<Self>, job: Job, answer: Answer) -> impl Iterator<Item = Reply> + use<> {
        let reported = match answer.refused {
            Some(_) => self.report(job, answer),
            None => Some((job, answer)),
        };
        reported
            .map(|(job, answer)| self.frames(job, answer))
            .into_iter()
            .flatten()
    }

    /// Gives back a "no", unless the client would not notice or not survive it: then its next ping says so.
    fn report(&self, job: Job, answer: Answer) -> Option<(Job, Answer)> {
        let caller = job.caller();
        if caller.release != Release::Before0_5_5 {
            return Some((job, answer));
        }
        let held = match job.spec().operation {
            Operation::PrepareRetrieve => {
                // What is held needs no memory of the request, and keeps neither its connection nor the server.
                let outbox = self.outbox.clone();
                let replies: Vec<_> = self.frames(job, answer).collect();
                Some(Responder::new(move |_| {
                    replies.into_iter().for_each(|reply| outbox.send(reply));
                }))
            }
            Operation::Store if !lacks_event(&answer) => return Some((job, answer)),
            Operation::Store | Operation::Retrieve => {
                let reason = answer.refused.unwrap_or_default();
                self.engine
                    .metrics()
                    .refused(job.spec().operation.name(), reason);
                None
            }
            _ => return Some((job, answer)),
        };
        self.engine.refuse_by_ping(caller, held);
        None
    }

    /// The messages of an answer.
    fn frames(&self, job: Job, answer: Answer) -> impl Iterator<Item = Reply> + use<> {
        let operation = job.spec().operation.name();
        let metrics = self.engine.metrics();
        if let Some(reason) = answer.refused {
            metrics.refused(operation, reason);
        }
        metrics.answered(operation, job.received.elapsed());
        let Job { peer, uid, op, .. } = job;
        let (op, payload) = match answer.error.filter(|_| job.takes_text) {
            Some(text) => (error_frame(&text), None),
            None => (op, answer.payload),
        };
        let end = answer.ends_stream.then(|| Reply {
            connection: peer.id,
            uid: uid.clone(),
            op: op.clone(),
            payload: None,
            charge: None,
        });
        let charge = payload
            .as_ref()
            .filter(|payload| payload.len() > SMALL_REPLY)
            .map(|payload| peer.replies.take_anyway(payload.len() as u64));
        std::iter::once(Reply {
            connection: peer.id,
            uid,
            op,
            payload,
            charge,
        })
        .chain(end)
    }
}

/// Whether it is the "no" of a transfer without an event, which clients up to 0.5.4 on a GPU do not survive.
fn lacks_event(answer: &Answer) -> bool {
    answer.payload == Response::transfer(&[][..], false).encode()
}

/// An error text as an operation frame. Texts repeat what clients sent, so they are cut.
pub fn error_frame(text: &str) -> Vec<u8> {
    const SHOWN: usize = 500;
    let end = text.char_indices().nth(SHOWN).map(|(end, _)| end);
    let mut frame = Vec::new();
    kvtier_proto::wire::write_str(&mut frame, &text[..end.unwrap_or(text.len())]);
    frame
}
