//! What becomes of a message: it is served at once, queued in a lane, or refused.

use std::sync::Arc;
use std::time::Instant;

use kvtier_proto::frames::{ClientMessage, OperationId, RequestFrames};
use kvtier_proto::generation::{Field, Generation, Resolved, Unresolved};
use kvtier_proto::key::KeyHead;
use kvtier_proto::operation::{Lane as LaneKind, Operation};
use kvtier_proto::response::ResponseKind;
use kvtier_proto::wire::DecodeError;

use super::client::Client;
use super::limits::{self, MAX_HEAD};
use super::names::lookup_number;
use super::outbox::Outgoing;
use super::request::{Job, RequestSender, Server, error_frame};
use super::serve::Front;
use super::warnings;
use kvtier_common::sync::RateLimited;
use kvtier_engine::{Engine, EngineAnswer};

/// Work up to which this thread serves a quick request itself, while other clients wait for it and while none do. To hand
/// one over to another thread and back costs about 50 us.
///
/// The unit is a byte of a prompt that is decoded and hashed: 64 KiB, some 16,000 token ids, take 200 us, or 15 us if the
/// prompt is remembered.
const QUICK_WORK: u64 = 64 << 10;
const QUICK_WORK_ALONE: u64 = 256 << 10;

/// Work per object key that is looked up, leased or released, by the instructions of both.
const WORK_PER_OBJECT: u64 = 20;

/// Whether an operation takes microseconds for a short prompt: it copies no KV data and maps no memory.
fn is_quick(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Lookup
            | Operation::QueryPrefetchStatus
            | Operation::WaitPrefetchStatus
            | Operation::FreeLookupLocks
            | Operation::EndSession
            | Operation::PrepareStore
            | Operation::CommitStore
            | Operation::CommitRetrieve
    )
}

/// The work of a request, at most: its bytes, and what it does per object key.
fn work(engine: &Engine, job: &Job) -> u64 {
    // Too much for this thread whatever it names: it does not even read the name.
    if job.sender.bytes > QUICK_WORK_ALONE {
        return job.sender.bytes;
    }
    let has_key = matches!(job.sender.spec().payloads.first(), Some(Field::Key(_)));
    let objects = match job.payloads.first() {
        Some(key) if has_key => KeyHead::peek(key).map_or(u64::MAX, |key| engine.objects(&key)),
        _ => 0,
    };
    job.sender
        .bytes
        .saturating_add(objects.saturating_mul(WORK_PER_OBJECT))
}

impl Front {
    /// Serves a message of connection `id`, or queues it.
    pub(super) fn take(&mut self, id: u64, frames: Vec<Vec<u8>>) {
        let received = Instant::now();
        let head: usize = frames.iter().take(2).map(Vec::len).sum();
        let parsed = match head {
            0..=MAX_HEAD => ClientMessage::parse(frames.iter().map(Vec::as_slice)),
            _ => Err(DecodeError::new(format!(
                "uid and op have at most {MAX_HEAD} bytes"
            ))),
        };
        let message = match parsed {
            Ok(ClientMessage::Request(request)) => request,
            // No stream stays open here: the only one ends with its first batch.
            Ok(ClientMessage::Stream { .. }) => {
                return self.connections.count_strays(id, frames.len());
            }
            Err(error) => {
                self.connections.count_strays(id, frames.len());
                self.server.engine.metrics().malformed_messages.inc();
                static LOG_LIMIT: RateLimited = RateLimited::per_second();
                if let Some(suppressed_lines) = LOG_LIMIT.permit(received) {
                    tracing::debug!(%error, suppressed_lines, "a message that is no request was dropped");
                }
                return;
            }
        };
        static LOG_LIMIT: RateLimited = RateLimited::per_second();
        let now = self.connections.now();
        let Some(client) = self.connections.client(id, || self.budgets.client(id)) else {
            // It sent a message and ended.
            return;
        };
        let resolved = match client.candidates.resolve(&message, &[Generation::G6]) {
            Ok(resolved) => resolved,
            Err(error) => {
                let reply = unresolved(&self.server, client, &message, &error, received);
                if let Some(reply) = reply {
                    // Behind what was answered before.
                    self.server.outbox.send(reply);
                }
                self.connections.count_strays(id, frames.len());
                return;
            }
        };
        let decided = resolved
            .is_decided
            .then(|| client.undecided.take())
            .flatten();
        if resolved.generation != Generation::G6
            && resolved.is_decided
            && !std::mem::replace(&mut client.is_logged, true)
            && let Some(suppressed_lines) = LOG_LIMIT.permit(received)
        {
            log_older_client(&resolved, suppressed_lines);
        }
        let mut frames = frames.into_iter();
        let (Some(uid), Some(op)) = (frames.next(), frames.next()) else {
            return;
        };
        let payloads: Vec<_> = frames.collect();
        let bytes = payloads.iter().map(|payload| payload.len() as u64).sum();
        let is_numbered = (resolved.spec.operation, resolved.spec.response)
            == (Operation::Lookup, ResponseKind::Int);
        let lookup_number = is_numbered.then(|| lookup_number(self.server.first_number, &uid));
        let mut job = Job {
            sender: RequestSender {
                peer: Arc::clone(&client.peer),
                uid,
                op,
                bytes,
                charge: None,
                resolved,
                lookup_number,
                received,
            },
            payloads,
        };
        if resolved.needs_decision {
            match client.defer(job, now) {
                None => return,
                Some(refused) => job = refused,
            }
        }
        for earlier in decided.into_iter().flat_map(|waiting| waiting.jobs) {
            self.take(id, earlier.into_frames());
        }
        let operation = resolved.spec.operation;
        if operation.lane() != LaneKind::Inline {
            self.connections.keep(id);
        }
        let Some(client) = self.connections.client(id, || self.budgets.client(id)) else {
            return;
        };
        if bytes > limits::max_payload(operation) {
            return self.refuse(job, "request_too_large");
        }
        let work = if is_quick(operation) {
            client.work(operation, work(&self.server.engine, &job))
        } else {
            u64::MAX
        };
        let (pool, lane) = match operation.lane() {
            LaneKind::Inline => return self.serve_now(job),
            LaneKind::Transfer => (&self.transfers, &client.transfers),
            LaneKind::Control => (&self.control, &client.control),
        };
        // Only this thread puts jobs into lanes, so an idle one stays idle and no order is broken.
        let quick_work = if self.is_alone {
            QUICK_WORK_ALONE
        } else {
            QUICK_WORK
        };
        if work <= quick_work && lane.is_idle() {
            return self.serve_now(job);
        }
        if !job.sender.take_memory() {
            return self.refuse(job, "queue_full");
        }
        if let Err(job) = pool.push(lane, job) {
            self.refuse(job, "lane_full");
        }
    }

    /// Answers the requests of a connection that wait for the generation of its client, as far as that goes without it.
    pub(super) fn answer_undecided(&mut self, id: u64) {
        let client = self.connections.client(id, || self.budgets.client(id));
        let undecided = client.and_then(|client| client.undecided.take());
        for job in undecided.into_iter().flat_map(|waiting| waiting.jobs) {
            self.serve_now(job);
        }
    }

    fn serve_now(&mut self, job: Job) {
        self.server.serve(job, None);
    }

    /// Answers with the operation's "no" a request that would take too much memory.
    fn refuse(&mut self, job: Job, reason: &'static str) {
        static LOG_LIMIT: RateLimited = RateLimited::per_second();
        if let Some(suppressed_lines) = LOG_LIMIT.permit(job.sender.received) {
            tracing::warn!(
                operation = job.sender.spec().operation.name(),
                bytes = job.sender.bytes,
                reason,
                suppressed_lines,
                "a client's request was refused"
            );
        }
        self.server.refuse(job.sender, reason);
    }
}

/// Logs the release of a client that is not of the newest generation.
fn log_older_client(resolved: &Resolved, suppressed_lines: u64) {
    let releases = resolved.releases();
    if resolved.knows_chunk_size || resolved.generation > Generation::G2 {
        tracing::info!(
            suppressed_lines,
            "a client of LMCache {releases} connected; pictures are not part of its keys: docs/identity.md"
        );
        return;
    }
    tracing::warn!(
        suppressed_lines,
        "a client of LMCache {releases} reconnected; releases up to 0.4.4 do not register again, so restart its engine if it \
         has no hits from now on"
    );
}

/// A request that no table knows is answered too, so that no caller waits for ever: a client that takes a text learns
/// why, others get the operation's "no", or their own frames back. Nothing answers a frame that names no operation.
fn unresolved(
    server: &Server,
    client: &Client,
    message: &RequestFrames<'_>,
    error: &Unresolved,
    received: Instant,
) -> Option<Outgoing> {
    server.engine.metrics().malformed_messages.inc();
    static LOG_LIMIT: RateLimited = RateLimited::per_second();
    if let Some(suppressed_lines) = LOG_LIMIT.permit(received) {
        tracing::debug!(%error, suppressed_lines, "a request that no table knows");
    }
    if let Some(text) = warnings::unresolved(error) {
        server.engine.warn_of_client(client.peer.id, &text);
    }
    let candidates = client.candidates;
    let id = OperationId::decode(message.op).ok();
    // A client that calls by name is of a release that takes a text, unless its connection has proved otherwise.
    let takes_text = candidates.release().takes_text_op()
        || matches!(id, Some(OperationId::Name(_))) && candidates.contains(Generation::G6);
    // A known operation with the wrong payloads still has its own "no", in the newest form its client may know.
    let known = id.and_then(|id| {
        let rows = candidates.iter().filter_map(|own| own.rows(id).next());
        rows.last()
    });
    let answer = match known {
        // No value: its adapter computes with it and fails at once. Any other answer ends its receiving, and it waits for ever.
        _ if matches!(error, Unresolved::TooOld { .. }) => EngineAnswer::nothing(),
        Some(spec) => {
            EngineAnswer::refusal_with(spec.operation, spec.response, "payload_count", error)
        }
        None => EngineAnswer::error(error.to_string(), "unknown_operation"),
    };
    let (op, payload) = match answer.error {
        Some(text) if takes_text => (error_frame(&text), None),
        _ if id.is_none() => return None,
        _ => (message.op.to_vec(), answer.payload),
    };
    Some(Outgoing {
        connection: client.peer.id,
        uid: message.uid.to_vec(),
        op,
        payload,
        charge: None,
    })
}
