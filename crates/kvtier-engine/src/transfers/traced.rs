//! Spans of transfers.

use std::ops::AddAssign;
use std::time::Duration;

use kvtier_core::object_key::KeyScope;
use kvtier_core::prompt::Prompt;
use kvtier_device::Direction;
use kvtier_observe::trace::{TracedSession, Transfer, TransferKind};
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::InstanceId;

use super::super::context::Context;
use super::super::instances::Instance;
use super::worker_range::WorkerRange;

/// What a transfer has moved.
#[derive(Clone, Copy, Default)]
pub(super) struct TransferVolume {
    pub chunks: usize,
    pub bytes: u64,
}

impl AddAssign for TransferVolume {
    fn add_assign(&mut self, other: Self) {
        self.chunks += other.chunks;
        self.bytes += other.bytes;
    }
}

/// Records a transfer of this range that has ended just now: what it has moved, or why it failed.
pub(super) fn trace(
    context: &Context,
    direction: Direction,
    request_id: &str,
    range: &WorkerRange,
    instance: &Instance,
    started: Duration,
    moved: Result<TransferVolume, &'static str>,
) {
    if !context.tracer.is_on() {
        return;
    }
    let chunk_size = range.chunk_size.get();
    let transfer = |TransferVolume { chunks, bytes }| Transfer {
        chunks: chunks as u64,
        tokens: (chunks * chunk_size) as u64,
        bytes,
        ..failed(direction, instance.id, instance.device(), None)
    };
    let transfer = moved.map_or_else(
        |reason| failed(direction, instance.id, instance.device(), Some(reason)),
        transfer,
    );
    record(context, request_id, &range.scope, started, transfer);
}

/// Records a transfer that was refused just now, before its range was known.
pub(super) fn trace_refused(
    context: &Context,
    direction: Direction,
    key: &CacheKey<'_, Prompt>,
    instance: InstanceId,
    started: Duration,
    reason: &'static str,
) {
    if !context.tracer.is_on() {
        return;
    }
    // Names that are too long to be kept are in no trace.
    if let Ok(scope) = context.short_scope(key) {
        let known = context.instances.get(instance);
        let device = known.map_or("", |instance| instance.device());
        let transfer = failed(direction, instance, device, Some(reason));
        record(context, key.request_id, &scope, started, transfer);
    }
}

fn record(
    context: &Context,
    request_id: &str,
    scope: &KeyScope,
    started: Duration,
    transfer: Transfer,
) {
    let took = context.now().saturating_sub(started);
    let session = TracedSession::new(request_id, scope, None);
    context.tracer.transfer(session, took, transfer);
}

/// A transfer that has moved nothing.
fn failed(
    direction: Direction,
    instance: InstanceId,
    device: &'static str,
    failure: Option<&'static str>,
) -> Transfer {
    Transfer {
        kind: match direction {
            Direction::Store => TransferKind::Store,
            Direction::Retrieve => TransferKind::Retrieve,
        },
        device,
        engine_id: instance.0,
        chunks: 0,
        tokens: 0,
        bytes: 0,
        failure,
    }
}
