//! Copies by the server: a store from a worker's pages into the arena, a retrieve from the arena into them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_common::sync::Mutex;
use kvtier_config::GpuReply;
use kvtier_core::ChunkHash;
use kvtier_core::prompt::Prompt;
use kvtier_device::{BlockTable, ChunkCopy, ChunkRequest, DeviceError, Direction, Transfer};
use kvtier_observe::metrics::Metrics;
use kvtier_proto::generation::Release;
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::InstanceId;
use kvtier_proto::response::Response;

use super::super::instances::{CopyGuard, Instance};
use super::super::{Caller, EngineAnswer, Reply};
use super::store::{GroupChunks, MAX_FURTHER_PIECES, StagedStore, StorePlan, StoreRemainder};
use super::traced::{TransferVolume, trace, trace_refused};
use super::worker_range::{GroupLease, WorkerRange};
use super::{Transfers, deadline, is_trouble, reason};

/// A request for a copy by the server.
pub(super) struct CopyRequest<'a> {
    pub transfers: &'a Arc<Transfers>,
    pub direction: Direction,
    pub caller: Caller,
    pub instance: InstanceId,
    pub key: &'a CacheKey<'a, Prompt>,
    pub block_ids: &'a [Vec<i64>],
    pub event: &'a [u8],
    /// Tokens at the start of a retrieve that are not copied.
    pub skip_tokens: i64,
    pub started: Duration,
}

/// A transfer whose bytes are being copied: what its end needs.
struct InFlightCopy {
    /// Dropped before the guard, behind which the pages may be closed.
    work: TransferWork,
    request_id: Box<str>,
    started: Duration,
    event: Vec<u8>,
    release: Release,
    range: WorkerRange,
    guard: CopyGuard,
    transfers: Arc<Transfers>,
}

/// What follows the end of a copy.
enum TransferOutcome {
    Answer(EngineAnswer),
    /// The next piece of a store.
    Piece(Box<(Transfer, InFlightCopy)>),
}

/// The memory of a transfer in flight.
enum TransferWork {
    /// Store, with what its further pieces need, if it has had more than one or may have.
    Store(StagedStore, Option<Box<StoreRemainder>>),
    Retrieve {
        /// Keeps the bytes from eviction until they are copied.
        _leases: Vec<GroupLease>,
        /// Counts it.
        _retrieving: Arc<()>,
    },
}

impl CopyRequest<'_> {
    /// Serves it.
    pub(super) fn serve(&self, reply: Reply) {
        let context = &*self.transfers.context;
        let (instances, metrics) = (&context.instances, &context.metrics);
        let refused = |event: &[u8], reason| {
            if self.direction == Direction::Retrieve {
                WorkerRange::release_refused(self.transfers, self.instance, self.key);
            }
            let (direction, started) = (self.direction, self.started);
            trace_refused(context, direction, self.key, self.instance, started, reason);
            EngineAnswer::from(Response::transfer(event, false)).because(reason)
        };
        let Some(instance) = instances.get(self.instance) else {
            return reply.answer(refused(&[], "unknown_instance"));
        };
        instance.seen(self.started);
        match self.direction {
            Direction::Store => metrics.store(instance.device(), false),
            Direction::Retrieve => metrics.retrieve(instance.device(), false),
        }
        let request_id = self.key.request_id;
        let failed = |error| failed(metrics, self.direction, &instance, request_id, &error);
        let planned = match (self.direction, instance.unserved) {
            (Direction::Store, Some(unserved)) => {
                count_end(metrics, Direction::Store, &instance);
                Err(unserved.name())
            }
            (Direction::Store, None) => self.plan_store(&instance).map_err(failed),
            (Direction::Retrieve, _) => self.plan_retrieve(&instance).map_err(failed),
        };
        match planned {
            Ok((transfer, in_flight)) => in_flight.start(transfer, reply),
            Err(reason) => {
                let event = instance.answer_event(self.event, self.caller.release);
                reply.answer(refused(event, reason));
            }
        }
    }

    /// Checks the request. Returns the transfer, still without chunks, the range, and the guard of the pages.
    fn begin(&self, instance: &Arc<Instance>) -> Result<(Transfer, WorkerRange, CopyGuard)> {
        let guard = instance.copying()?;
        let patience = instance.patience(self.started)?;
        let patience = patience.and_then(|left| Instant::now().checked_add(left));
        let deadline = deadline::of(self.key)?.into_iter().chain(patience).min();
        let range = WorkerRange::of_worker(&self.transfers.context, instance, self.key)?;
        let layout = guard.pages().layout();
        let blocks = BlockTable::check(layout, self.block_ids, range.chunks.len())
            .map_err(Error::refused)?;
        let transfer = Transfer {
            arena: Arc::clone(&self.transfers.context.l1.arena),
            blocks,
            chunks: Vec::new(),
            direction: self.direction,
            deadline,
            event: self.event.to_vec(),
        };
        Ok((transfer, range, guard))
    }

    /// Whether the client of the request has yet to notice a refused retrieve.
    fn is_refusing(&self) -> bool {
        let refused = &self.transfers.refused_retrieves;
        refused.is_refusing(self.caller.connection)
    }

    /// Reserves memory for the chunks that are not resident, and plans the copies into it.
    fn plan_store(&self, instance: &Arc<Instance>) -> Result<(Transfer, InFlightCopy)> {
        let (mut transfer, range, guard) = self.begin(instance)?;
        if self.is_refusing() {
            let message = "the client drops its stores until it is healthy again";
            return Err(Error::new(ErrorKind::NotHeld, message));
        }
        let prompt = range.prompt(self.key);
        let hashes = &prompt[range.chunks.clone()];
        let groups = self.group_chunks(&guard, &range, hashes, &transfer.blocks);
        let near = self
            .transfers
            .context
            .l1
            .part_near(guard.pages().numa_node());
        let plan = StorePlan {
            prompt,
            tokens: self.key.tokens.chunk_tokens(range.chunks.clone()),
            groups,
            near,
            further_pieces: MAX_FURTHER_PIECES,
        };
        let store = plan.stage(self.transfers, instance, &range)?;
        let remainder = store.has_remainder.then(|| StoreRemainder {
            transfer: transfer.clone(),
            plan: store.plan.clone(),
            moved: TransferVolume::default(),
        });
        transfer.chunks = store.copies();
        let work = TransferWork::Store(store, remainder.map(Box::new));
        Ok((transfer, self.in_flight(work, range, guard)))
    }

    /// The chunks of the range that each object group has data for, and their hashes.
    fn group_chunks(
        &self,
        guard: &CopyGuard,
        range: &WorkerRange,
        hashes: &[ChunkHash],
        blocks: &BlockTable,
    ) -> Vec<GroupChunks> {
        let null_block_id = self.transfers.context.config().null_block_id;
        let (layout, model) = (guard.pages().layout(), &guard.instance().layout);
        let groups = model.groups.iter().map(|group| {
            let has_data =
                |chunk: &usize| blocks.has_data(layout, group.id as usize, *chunk, null_block_id);
            let chunks = (0..hashes.len()).filter(has_data).collect();
            GroupChunks::new(range, model, group, hashes, chunks)
        });
        groups.collect()
    }

    /// Leases what the range needs, and plans the copies.
    fn plan_retrieve(&self, instance: &Arc<Instance>) -> Result<(Transfer, InFlightCopy)> {
        let (transfers, key, skip_tokens) = (self.transfers, self.key, self.skip_tokens);
        // Counted first: a ping is only refused while none is counted.
        let retrieving = instance.retrieving();
        if self.is_refusing() {
            return Err(not_held());
        }
        let (mut transfer, range, guard) = self.begin(instance)?;
        let skip_tokens = u64::try_from(skip_tokens).map_err(|_| {
            Error::refused(format!(
                "skip_first_n_tokens is {skip_tokens}; allowed: at least 0"
            ))
        })?;
        let leases = if range.chunks.is_empty() {
            Vec::new()
        } else {
            range.lease(transfers, instance, key).ok_or_else(|| {
                let chunks = range.chunks.len() as u64;
                let metrics = &transfers.context.metrics;
                metrics.not_found("l1_retrieve", key.model_name, chunks);
                not_held()
            })?
        };
        // From here on the transfer has leases of its own, and is not refused.
        range.release(&transfers.lookups, instance.id, key);
        for group in &leases {
            let extents = group.lease.extents().iter().zip(group.chunks.clone());
            transfer
                .chunks
                .extend(extents.map(|(extent, chunk)| ChunkCopy {
                    request: ChunkRequest {
                        object_group: group.object_group as usize,
                        chunk: chunk - range.chunks.start,
                        skip_tokens,
                    },
                    extent: *extent,
                }));
        }
        let work = TransferWork::Retrieve {
            _leases: leases,
            _retrieving: retrieving,
        };
        Ok((transfer, self.in_flight(work, range, guard)))
    }

    /// The transfer in flight with this memory.
    fn in_flight(&self, work: TransferWork, range: WorkerRange, guard: CopyGuard) -> InFlightCopy {
        InFlightCopy {
            work,
            request_id: self.key.request_id.into(),
            started: self.started,
            event: self.event.to_vec(),
            release: self.caller.release,
            range,
            guard,
            transfers: Arc::clone(self.transfers),
        }
    }
}

impl InFlightCopy {
    /// Starts a transfer, which answers its request: at its end, or with `--gpu-reply event` when the device has it.
    fn start(self, transfer: Transfer, mut reply: Reply) {
        if !reply.later() {
            // From its answer on the client may use the pages again.
            return drop((transfer, self));
        }
        self.run(transfer, reply);
    }

    /// Runs a transfer, or a piece of a store and all that follow.
    fn run(self, transfer: Transfer, reply: Reply) {
        let pages = Arc::clone(self.guard.pages());
        let has_remainder =
            matches!(&self.work, TransferWork::Store(store, _) if store.has_remainder);
        // With a deadline the client asks whether the transfer has ended, which only its end tells.
        let is_answered_at_end = self.transfers.context.config().gpu.gpu_reply == GpuReply::Done
            || transfer.deadline.is_some()
            || has_remainder;
        if is_answered_at_end {
            let done = move |moved| match self.finish(moved) {
                TransferOutcome::Answer(answer) => reply.answer(answer),
                TransferOutcome::Piece(piece) => {
                    let (transfer, in_flight) = *piece;
                    in_flight.run(transfer, reply);
                }
            };
            return pages.transfer(transfer, Box::new(done));
        }
        // The first of the two takes it.
        let reply = Arc::new(Mutex::new(Some(reply)));
        let early = Arc::clone(&reply);
        let submitted = move |event: &[u8]| {
            let reply = early.lock().take();
            if let Some(reply) = reply {
                reply.answer(EngineAnswer::from(Response::transfer(event, true)));
            }
        };
        let done = move |moved| {
            // Nothing follows: it has no remainder.
            let TransferOutcome::Answer(answer) = self.finish(moved) else {
                return;
            };
            let reply = reply.lock().take();
            match reply {
                Some(reply) => reply.answer(answer),
                // Its end has been logged. A store that failed is not readable; the pages of a retrieve are wrong, and
                // all that the worker has is the event.
                None if answer.refused.is_some() => {
                    tracing::error!("a transfer failed after it was answered (--gpu-reply event)");
                }
                None => {}
            }
        };
        pages.transfer_with_event(transfer, Box::new(submitted), Box::new(done));
    }

    /// Finishes a transfer whose bytes are in place, or never will be. Earlier pieces of a store stay committed.
    fn finish(self, moved: Result<u64, DeviceError>) -> TransferOutcome {
        let context = &*self.transfers.context;
        let (instance, range) = (self.guard.instance(), &self.range);
        let request_id = &*self.request_id;
        let event = instance.answer_event(&self.event, self.release);
        let direction = match self.work {
            TransferWork::Store(..) => Direction::Store,
            TransferWork::Retrieve { .. } => Direction::Retrieve,
        };
        let moved = moved.map_err(|error| Error::refused(error.to_string()));
        // What it read may be another request's by then.
        let moved = moved.and_then(|bytes| match direction {
            Direction::Store if self.guard.is_dropped() => Err(Error::new(
                ErrorKind::NotHeld,
                "the client dropped the store meanwhile",
            )),
            _ => Ok(bytes),
        });
        let trace = |moved| {
            let started = self.started;
            trace(
                context, direction, request_id, range, instance, started, moved,
            );
        };
        let bytes = match moved {
            Ok(bytes) => bytes,
            Err(error) => {
                let reason = failed(&context.metrics, direction, instance, request_id, &error);
                trace(Err(reason));
                let answer = EngineAnswer::from(Response::transfer(event, false)).because(reason);
                return TransferOutcome::Answer(answer);
            }
        };
        let (has, moved) = match self.work {
            TransferWork::Store(store, remainder) => {
                let chunks = store.moved().chunks;
                let mut moved = TransferVolume { chunks, bytes };
                let has_remainder = store.has_remainder;
                store.commit(context, range, |_| true);
                if let Some(mut remainder) = remainder {
                    remainder.moved += moved;
                    moved = remainder.moved;
                    let next = has_remainder
                        .then(|| remainder.next_piece(&self.transfers, instance, range));
                    if let Some((transfer, store)) = next.flatten() {
                        let work = TransferWork::Store(store, Some(remainder));
                        let in_flight = InFlightCopy { work, ..self };
                        return TransferOutcome::Piece(Box::new((transfer, in_flight)));
                    }
                }
                ("Stored", moved)
            }
            TransferWork::Retrieve { .. } => {
                let chunks = range.count_loaded(&context.metrics);
                ("Retrieved", TransferVolume { chunks, bytes })
            }
        };
        count_end(&context.metrics, direction, instance);
        trace(Ok(moved));
        let tokens = moved.chunks * range.chunk_size.get();
        let seconds = (context.now() - self.started).as_secs_f64();
        tracing::info!(
            request = request_id,
            "{has} {tokens} tokens in {seconds:.6} seconds"
        );
        TransferOutcome::Answer(EngineAnswer::from(Response::transfer(event, true)))
    }
}

/// Logs and counts a transfer that failed, or was refused after it was counted as begun. Returns its metric label.
pub(super) fn failed(
    metrics: &Metrics,
    direction: Direction,
    instance: &Instance,
    request: &str,
    error: &Error,
) -> &'static str {
    if is_trouble(error) {
        let (instance, name) = (instance.id.0, direction.name());
        tracing::warn!(request, instance, %error, "{name} failed");
    }
    count_end(metrics, direction, instance);
    reason(error, direction)
}

pub(super) fn count_end(metrics: &Metrics, direction: Direction, instance: &Instance) {
    match direction {
        Direction::Store => metrics.store(instance.device(), true),
        Direction::Retrieve => metrics.retrieve(instance.device(), true),
    }
}

pub(super) fn not_held() -> Error {
    let message = "no lookup of its request has found these chunks, or they were evicted";
    Error::new(ErrorKind::NotHeld, message)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::super::super::Engine;
    use super::super::super::ReplyTarget;
    use super::super::super::testing::{CALLER, TestPages, engine, key};
    use super::*;

    const ID: InstanceId = InstanceId(7);

    /// A store of no chunks by the registered worker.
    fn plan_empty_store(engine: &Engine) -> (Transfer, InFlightCopy) {
        let instance = engine.context.instances.get(ID).unwrap();
        let request = CopyRequest {
            transfers: &engine.transfers,
            direction: Direction::Store,
            caller: CALLER,
            instance: ID,
            key: &key(0..0),
            block_ids: &[Vec::new()],
            event: b"",
            skip_tokens: 0,
            started: Duration::ZERO,
        };
        request.plan_store(&instance).unwrap()
    }

    /// The answers to a store without chunks, in order. One is expected.
    fn answers(reply: &str, fails: bool, deadline: Option<Instant>) -> Vec<Option<EngineAnswer>> {
        let engine = engine(&["--gpu-reply", reply]);
        let pages = TestPages {
            fails,
            ..TestPages::new(16)
        };
        pages.register(&engine, ID.0);
        let (planned, in_flight) = plan_empty_store(&engine);
        let transfer = Transfer {
            deadline,
            ..planned
        };
        let (answers, receiver) = mpsc::channel();
        let reply = Reply::new(move |answer| answers.send(answer).unwrap());
        in_flight.start(transfer, reply);
        receiver.iter().collect()
    }

    #[test]
    fn a_transfer_has_one_answer_whenever_it_is_given() {
        let ok = |event: &[u8]| EngineAnswer::from(Response::transfer(event, true));
        let failed =
            || EngineAnswer::from(Response::transfer(&[][..], false)).because("store_failed");
        assert_eq!(answers("done", false, None), [Some(ok(b""))]);
        assert_eq!(answers("done", true, None), [Some(failed())]);
        assert_eq!(answers("event", false, None), [Some(ok(b"event"))]);
        assert_eq!(
            answers("event", true, Some(Instant::now())),
            [Some(failed())]
        );
        // The answer was sent before the failure.
        assert_eq!(answers("event", true, None), [Some(ok(b"event"))]);
    }

    /// A target that has no capacity for deferred answers. Notes whether the worker was drained when it was answered.
    struct Full {
        instance: Arc<Instance>,
        was_drained: Arc<AtomicBool>,
    }

    impl ReplyTarget for Full {
        fn send(self: Box<Self>, answer: Option<EngineAnswer>) {
            assert_eq!(answer, None);
            let was_drained = self.instance.is_drained();
            self.was_drained.store(was_drained, Ordering::Relaxed);
        }

        fn defer(&mut self) -> bool {
            false
        }
    }

    #[test]
    fn refused_deferral_drops_the_transfer_before_its_answer() {
        let engine = engine(&[]);
        TestPages::new(16).register(&engine, ID.0);
        let (transfer, in_flight) = plan_empty_store(&engine);
        let instance = Arc::clone(in_flight.guard.instance());
        instance.stop();
        assert!(!instance.is_drained());
        let was_drained = Arc::default();
        let target = Full {
            instance,
            was_drained: Arc::clone(&was_drained),
        };
        in_flight.start(transfer, Reply::new(target));
        assert!(was_drained.load(Ordering::Relaxed));
    }
}
