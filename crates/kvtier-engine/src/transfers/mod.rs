//! Transfers: stores and retrieves, copied by the server or by the worker itself.
//!
//! | state | guarded by |
//! | --- | --- |
//! | [`PreparedTransfers`]: memory granted by PREPARE until its COMMIT | its mutex; the budget's is taken inside |
//! | [`StagingBudget`]: bytes reserved for stores, and leased to retrieves between PREPARE and COMMIT | its mutex; the cache's lock is taken inside |
//! | [`RefusedRetrieves`]: connections whose next pings are refused | its mutex; nothing is taken inside |
//!
//! A transfer that the server copies is in no table: its [`InFlight`] owns the guard of the pages and the reservation or the
//! leases, and ends them when it is dropped.

mod deadline;
mod engine_driven;
mod inline;
mod prepared;
mod refused_retrieves;
mod retrieve;
mod skipped;
mod staging;
mod store;
mod traced;
mod worker_range;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_common::sync::Mutex;
use kvtier_config::GpuReply;
use kvtier_core::cache::GrantOrigin;
use kvtier_core::prompt::Prompt;
use kvtier_device::{BlockTable, DeviceError, Direction, Transfer};
use kvtier_proto::generation::Release;
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::{InstanceId, Retrieve, Store};
use kvtier_proto::response::Response;

use super::context::Context;
use super::instances::{CopyGuard, Instance};
use super::lookups::Lookups;
use super::{Caller, EngineAnswer, Reply};
pub use prepared::Grant;
use prepared::{GRANT_TTLS, PreparedTransfers};
use refused_retrieves::RefusedRetrieves;
pub use skipped::Skipped;
pub use staging::Charge;
use staging::StagingBudget;
use store::{StagedStore, StoreRemainder};
use traced::Moved;
use worker_range::{GroupLease, WorkerRange};

/// The service of transfers.
pub struct Transfers {
    context: Arc<Context>,
    lookups: Arc<Lookups>,
    pub prepared: PreparedTransfers,
    pub staging: Arc<StagingBudget>,
    pub refused_retrieves: RefusedRetrieves,
    /// Whether the log says that much memory is withheld.
    is_much_withheld: AtomicBool,
}

/// A request for a copy by the server.
struct CopyRequest<'a> {
    direction: Direction,
    caller: Caller,
    instance: InstanceId,
    key: &'a CacheKey<'a, Prompt>,
    block_ids: &'a [Vec<i64>],
    event: &'a [u8],
    /// Tokens at the start of a retrieve that are not copied.
    skip_tokens: i64,
    started: Duration,
}

/// A transfer whose bytes are being copied: what its end needs.
struct InFlight {
    /// Dropped before the guard, behind which the pages may be closed.
    work: TransferWork,
    request_id: Box<str>,
    started: Duration,
    event: Vec<u8>,
    release: Release,
    range: WorkerRange,
    guard: CopyGuard,
}

/// What follows the end of a copy.
enum TransferOutcome {
    Answer(EngineAnswer),
    /// The next piece of a store.
    Piece(Box<(Transfer, InFlight)>),
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

impl Drop for Transfers {
    /// The end of the server frees nothing in the ledger: for the next one, clients may still copy.
    fn drop(&mut self) {
        self.context.l1.cache.detach_ledger();
    }
}

impl Transfers {
    pub fn new(context: &Arc<Context>, lookups: &Arc<Lookups>) -> Self {
        Self {
            prepared: PreparedTransfers::default(),
            staging: Arc::new(StagingBudget::new(context.l1.staging_limit())),
            refused_retrieves: RefusedRetrieves::default(),
            is_much_withheld: AtomicBool::new(false),
            lookups: Arc::clone(lookups),
            context: Arc::clone(context),
        }
    }

    /// Abandons the prepared transfers of an instance that has left, was replaced or fell silent; returns their number. Its
    /// process may only be stopped and wake up again, so memory that it may still write is quarantined for one more write TTL.
    pub fn abandon(&self, instance: InstanceId) -> usize {
        let until = self.context.now() + self.context.config().write_ttl;
        self.prepared.abandon(instance, until)
    }

    /// Abandons transfers that were not committed in time, and answers what is held for refused retrieves.
    pub fn expire(&self, now: Duration) {
        // Dropped, each is answered.
        drop(self.refused_retrieves.due(now));
        let abandoned = self.prepared.expire(self.context.config().write_ttl, now);
        if abandoned > 0 {
            let metrics = &self.context.metrics;
            metrics.expired_transfers.inc_by(abandoned as u64);
            tracing::warn!(
                transfers = abandoned,
                "transfers were prepared and not committed in time; abandoned"
            );
        }
        let arena = &self.context.l1.arena;
        let is_unreachable = self.prepared.has_inherited() && arena.is_alone();
        if self.prepared.expire_inherited(now, is_unreachable) {
            tracing::info!("memory that clients of the server before may have copied is free");
            arena.trim();
        }
        self.warn_of_withheld();
    }

    /// Logs once that more than an eighth of L1 is withheld: half of what may be staged.
    fn warn_of_withheld(&self) {
        let (_, transfers, bytes) = self.prepared.counts();
        let is_much = bytes > self.staging.limit() / 2;
        if is_much && !self.is_much_withheld.load(Ordering::Relaxed) {
            tracing::warn!(
                transfers,
                bytes,
                limit_bytes = self.staging.limit(),
                "clients did not commit what they were granted of L1; withholding more than an eighth of it, and stores have the \
                 rest of the limit, until the clients commit or end, or --l1-write-ttl-seconds passes twice"
            );
        }
        self.is_much_withheld.store(is_much, Ordering::Relaxed);
    }

    /// Whether more than an eighth of L1 was withheld when it was last counted.
    pub fn is_much_withheld(&self) -> bool {
        self.is_much_withheld.load(Ordering::Relaxed)
    }

    /// Quarantines what clients of the earlier process may still copy, as grants of instances that have left.
    pub fn inherit(&self) {
        let Some((memory, objects)) = self.context.l1.heritage.take() else {
            return;
        };
        let cache = &self.context.l1.cache;
        let until =
            |origin: &GrantOrigin| origin.granted_at + self.context.config().write_ttl * GRANT_TTLS;
        let charge = |origin: &GrantOrigin, direction, bytes| {
            self.staging.inherit(&origin.namespace, direction, bytes)
        };
        let stores = memory.by_grant().into_iter().map(|(origin, memory)| {
            let bytes = cache.footprint(memory.extents().map(|extent| extent.len));
            let charge = charge(&origin, Direction::Store, bytes);
            (
                until(&origin),
                Grant::Store(memory, charge, Skipped::default()),
            )
        });
        let retrieves = objects.by_grant().into_iter().map(|(origin, lease)| {
            let bytes = cache.footprint(lease.extents().iter().map(|extent| extent.len));
            let charge = charge(&origin, Direction::Retrieve, bytes);
            (until(&origin), Grant::Retrieve(vec![lease], vec![charge]))
        });
        self.prepared.inherit(stores.chain(retrieves));
    }

    /// Serves a store.
    pub fn store(self: &Arc<Self>, caller: Caller, store: &Store<'_, Prompt>, reply: Reply) {
        let request = CopyRequest {
            direction: Direction::Store,
            caller,
            instance: store.instance,
            key: &store.key,
            block_ids: &store.block_ids,
            event: store.event_handle,
            skip_tokens: 0,
            started: self.context.now(),
        };
        self.copy(&request, reply);
    }

    /// Serves a retrieve.
    pub fn retrieve(
        self: &Arc<Self>,
        caller: Caller,
        retrieve: &Retrieve<'_, Prompt>,
        reply: Reply,
    ) {
        let request = CopyRequest {
            direction: Direction::Retrieve,
            caller,
            instance: retrieve.instance,
            key: &retrieve.key,
            block_ids: &retrieve.block_ids,
            event: retrieve.event_handle,
            skip_tokens: retrieve.skip_first_n_tokens,
            started: self.context.now(),
        };
        self.copy(&request, reply);
    }

    fn copy(self: &Arc<Self>, request: &CopyRequest<'_>, reply: Reply) {
        let Context {
            instances, metrics, ..
        } = &*self.context;
        let refused = |event: &[u8], reason| {
            if request.direction == Direction::Retrieve {
                self.release_refused(request.instance, request.key);
            }
            let CopyRequest {
                direction,
                instance,
                key,
                started,
                ..
            } = *request;
            self.trace_refused(direction, key, instance, started, reason);
            EngineAnswer::from(Response::transfer(event, false)).because(reason)
        };
        let Some(instance) = instances.get(request.instance) else {
            return reply.answer(refused(&[], "unknown_instance"));
        };
        instance.seen(request.started);
        match request.direction {
            Direction::Store => metrics.store(instance.device(), false),
            Direction::Retrieve => metrics.retrieve(instance.device(), false),
        }
        let request_id = request.key.request_id;
        let failed = |error| self.failed(request.direction, &instance, request_id, &error);
        let planned = match (request.direction, instance.unserved) {
            (Direction::Store, Some(unserved)) => {
                self.count_end(Direction::Store, &instance);
                Err(unserved.name())
            }
            (Direction::Store, None) => self.plan_store(request, &instance).map_err(failed),
            (Direction::Retrieve, _) => self.plan_retrieve(request, &instance).map_err(failed),
        };
        match planned {
            Ok((transfer, in_flight)) => self.start(transfer, in_flight, reply),
            Err(reason) => {
                let event = instance.answer_event(request.event, request.caller.release);
                reply.answer(refused(event, reason));
            }
        }
    }

    /// Checks a request for a copy. Returns the transfer, still without chunks, the range, and the guard of the pages.
    fn begin(
        &self,
        request: &CopyRequest<'_>,
        instance: &Arc<Instance>,
    ) -> Result<(Transfer, WorkerRange, CopyGuard)> {
        let guard = instance.copying()?;
        let patience = instance.patience(request.started)?;
        let patience = patience.and_then(|left| Instant::now().checked_add(left));
        let deadline = deadline::of(request.key)?.into_iter().chain(patience).min();
        let range = self.worker_range(instance, request.key)?;
        let layout = guard.pages().layout();
        let blocks = BlockTable::check(layout, request.block_ids, range.chunks.len())
            .map_err(Error::refused)?;
        let transfer = Transfer {
            arena: Arc::clone(&self.context.l1.arena),
            blocks,
            chunks: Vec::new(),
            direction: request.direction,
            deadline,
            event: request.event.to_vec(),
        };
        Ok((transfer, range, guard))
    }

    /// Starts a transfer, which answers its request: at its end, or with `--gpu-reply event` when the device has it.
    fn start(self: &Arc<Self>, transfer: Transfer, in_flight: InFlight, mut reply: Reply) {
        if !reply.later() {
            // From its answer on the client may use the pages again.
            return drop((transfer, in_flight));
        }
        self.run(transfer, in_flight, reply);
    }

    /// Runs a transfer, or a piece of a store and all that follow.
    fn run(self: &Arc<Self>, transfer: Transfer, in_flight: InFlight, reply: Reply) {
        let pages = Arc::clone(in_flight.guard.pages());
        let transfers = Arc::clone(self);
        let has_remainder =
            matches!(&in_flight.work, TransferWork::Store(store, _) if store.has_remainder);
        // With a deadline the client asks whether the transfer has ended, which only its end tells.
        let is_answered_at_end = self.context.config().gpu.gpu_reply == GpuReply::Done
            || transfer.deadline.is_some()
            || has_remainder;
        if is_answered_at_end {
            let done = move |moved| match transfers.finish(in_flight, moved) {
                TransferOutcome::Answer(answer) => reply.answer(answer),
                TransferOutcome::Piece(piece) => {
                    let (transfer, in_flight) = *piece;
                    transfers.run(transfer, in_flight, reply);
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
            let TransferOutcome::Answer(answer) = transfers.finish(in_flight, moved) else {
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
    fn finish(&self, in_flight: InFlight, moved: Result<u64, DeviceError>) -> TransferOutcome {
        let (instance, range) = (in_flight.guard.instance(), &in_flight.range);
        let request_id = &*in_flight.request_id;
        let event = instance.answer_event(&in_flight.event, in_flight.release);
        let direction = match in_flight.work {
            TransferWork::Store(..) => Direction::Store,
            TransferWork::Retrieve { .. } => Direction::Retrieve,
        };
        let moved = moved.map_err(|error| Error::refused(error.to_string()));
        // What it read may be another request's by then.
        let moved = moved.and_then(|bytes| match direction {
            Direction::Store if in_flight.guard.is_dropped() => Err(Error::new(
                ErrorKind::NotHeld,
                "the client dropped the store meanwhile",
            )),
            _ => Ok(bytes),
        });
        let trace = |moved| {
            let started = in_flight.started;
            self.trace(direction, request_id, range, instance, started, moved);
        };
        let bytes = match moved {
            Ok(bytes) => bytes,
            Err(error) => {
                let reason = self.failed(direction, instance, request_id, &error);
                trace(Err(reason));
                let answer = EngineAnswer::from(Response::transfer(event, false)).because(reason);
                return TransferOutcome::Answer(answer);
            }
        };
        let (has, moved) = match in_flight.work {
            TransferWork::Store(store, remainder) => {
                let chunks = store.moved().chunks;
                let mut moved = Moved { chunks, bytes };
                let has_remainder = store.has_remainder;
                self.commit_staged(range, store, |_| true);
                if let Some(mut remainder) = remainder {
                    remainder.moved += moved;
                    moved = remainder.moved;
                    let next =
                        has_remainder.then(|| self.next_piece(instance, range, &mut remainder));
                    if let Some((transfer, store)) = next.flatten() {
                        let work = TransferWork::Store(store, Some(remainder));
                        let in_flight = InFlight { work, ..in_flight };
                        return TransferOutcome::Piece(Box::new((transfer, in_flight)));
                    }
                }
                ("Stored", moved)
            }
            TransferWork::Retrieve { .. } => {
                let chunks = self.count_loaded(range);
                ("Retrieved", Moved { chunks, bytes })
            }
        };
        self.count_end(direction, instance);
        trace(Ok(moved));
        let tokens = moved.chunks * range.chunk_size.get();
        let seconds = (self.context.now() - in_flight.started).as_secs_f64();
        tracing::info!(
            request = request_id,
            "{has} {tokens} tokens in {seconds:.6} seconds"
        );
        TransferOutcome::Answer(EngineAnswer::from(Response::transfer(event, true)))
    }

    /// Logs and counts a transfer that failed, or was refused after it was counted as begun. Returns its metric label.
    fn failed(
        &self,
        direction: Direction,
        instance: &Instance,
        request: &str,
        error: &Error,
    ) -> &'static str {
        if is_trouble(error) {
            let (instance, name) = (instance.id.0, direction.name());
            tracing::warn!(request, instance, %error, "{name} failed");
        }
        self.count_end(direction, instance);
        reason(error, direction)
    }

    fn count_end(&self, direction: Direction, instance: &Instance) {
        match direction {
            Direction::Store => self.context.metrics.store(instance.device(), true),
            Direction::Retrieve => self.context.metrics.retrieve(instance.device(), true),
        }
    }
}

impl CopyRequest<'_> {
    /// The transfer in flight with this memory.
    fn in_flight(&self, work: TransferWork, range: WorkerRange, guard: CopyGuard) -> InFlight {
        InFlight {
            work,
            request_id: self.key.request_id.into(),
            started: self.started,
            event: self.event.to_vec(),
            release: self.caller.release,
            range,
            guard,
        }
    }
}

/// The metric label of a transfer that is answered with "no".
fn reason(error: &Error, direction: Direction) -> &'static str {
    error.kind().label(match direction {
        Direction::Store => "store_failed",
        Direction::Retrieve => "retrieve_failed",
    })
}

/// Whether each such error is logged. A miss is no trouble; a full budget has a log line of its own.
fn is_trouble(error: &Error) -> bool {
    !matches!(error.kind(), ErrorKind::StagingFull | ErrorKind::NotHeld)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::super::Engine;
    use super::super::ReplyTarget;
    use super::super::testing::{CALLER, TestPages, engine, key};
    use super::*;

    const ID: InstanceId = InstanceId(7);

    /// A store of no chunks by the registered worker.
    fn plan_empty_store(engine: &Engine) -> (Transfer, InFlight) {
        let instance = engine.context.instances.get(ID).unwrap();
        let request = CopyRequest {
            direction: Direction::Store,
            caller: CALLER,
            instance: ID,
            key: &key(0..0),
            block_ids: &[Vec::new()],
            event: b"",
            skip_tokens: 0,
            started: Duration::ZERO,
        };
        engine.transfers.plan_store(&request, &instance).unwrap()
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
        engine.transfers.start(transfer, in_flight, reply);
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
        engine
            .transfers
            .start(transfer, in_flight, Reply::new(target));
        assert!(was_drained.load(Ordering::Relaxed));
    }
}
