//! The work of a request, by which it is served at once or queued, and the answer to one that no table knows.

use std::time::Instant;

use kvtier_proto::frames::{OperationId, RequestFrames};
use kvtier_proto::generation::{Field, Generation, Resolved, Unresolved};
use kvtier_proto::key::KeyHead;
use kvtier_proto::operation::Operation;

use super::client::Client;
use super::outbox::Outgoing;
use super::request::{RequestJob, RequestServer, error_frame};
use super::warnings;
use kvtier_common::sync::RateLimited;
use kvtier_engine::{Engine, EngineAnswer};

/// Work up to which this thread serves a quick request itself, while other clients wait for it and while none do. To hand
/// one over to another thread and back costs about 50 us.
///
/// The unit is a byte of a prompt that is decoded and hashed: 64 KiB, some 16,000 token ids, take 200 us, or 15 us if the
/// prompt is remembered.
pub(super) const QUICK_WORK: u64 = 64 << 10;
pub(super) const QUICK_WORK_ALONE: u64 = 256 << 10;

/// Work per object key that is looked up, leased or released, by the instructions of both.
const WORK_PER_OBJECT: u64 = 20;

/// Whether an operation takes microseconds for a short prompt: it copies no KV data and maps no memory.
pub(super) fn is_quick(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Lookup
            | Operation::Find
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
pub(super) fn work(engine: &Engine, job: &RequestJob) -> u64 {
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

/// Logs the release of a client that is not of the newest generation.
pub(super) fn log_older_client(resolved: &Resolved, suppressed_lines: u64) {
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
pub(super) fn unresolved(
    server: &RequestServer,
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
