//! Prepare and commit: transfers where the worker copies, in the pool or pickled.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvtier_core::Namespace;
use kvtier_core::cache::{Extent, ReadLease, Reservation, ReserveRequest, Staged};
use kvtier_core::prompt::Prompt;
use kvtier_device::Direction;
use kvtier_error::Error;
use kvtier_l1::L1Allocator;
use kvtier_memory::AccessError;
use kvtier_proto::key::CacheKey;
use kvtier_proto::pickle::{self, Limits, PickledTensor, TensorToWrite, WriteError};
use kvtier_proto::request::{ABORT_STORE, InstanceId};
use kvtier_proto::response::{
    PickledHit, PrepareRetrieve, PrepareStore, Response, Slot, StoreTarget,
};

use super::super::instances::{EngineDrivenLayout, Instance, Mode};
use super::super::payload::{LeasedChunks, Payload};
use super::super::{Answer, Caller};
use super::prepared::{Finish, Grant, TransferId};
use super::staging::{Charge, WorkerShare};
use super::traced::Moved;
use super::worker_range::{GroupLease, WorkerRange};
use super::{Transfers, is_trouble, reason};

const DEVICE: &str = "cpu";

/// A transfer of a worker that copies by itself.
struct WorkerCopy<'a> {
    instance: Arc<Instance>,
    key: &'a CacheKey<'a, Prompt>,
    range: WorkerRange,
    /// Of its objects.
    namespace: Arc<Namespace>,
    /// When it was asked for.
    started: Duration,
}

impl WorkerCopy<'_> {
    /// The worker's objects, and whether its data travels pickled.
    fn worker(&self) -> (&EngineDrivenLayout, &AtomicBool) {
        match &self.instance.mode {
            Mode::EngineDriven { layout, pickles } => (layout, pickles),
            Mode::LmcacheDriven { .. } => unreachable!("checked when the transfer was made"),
        }
    }

    fn layout(&self) -> &EngineDrivenLayout {
        self.worker().0
    }

    fn id(&self, direction: Direction) -> TransferId {
        let last = self.range.chunks.end.checked_sub(1);
        let last_hash = last.map(|last| self.key.tokens.hashes[last]);
        TransferId::new(direction, self.instance.id, self.key, last_hash)
    }

    fn slot(&self, extent: Extent) -> Slot<'_> {
        Slot {
            offset: extent.offset,
            length: extent.len,
            shape: self.layout().shape.as_slice().into(),
            dtype: self.layout().dtype.name().into(),
        }
    }

    /// All chunks of its range.
    fn moved(&self, chunks: usize) -> Moved {
        Moved {
            chunks,
            bytes: chunks as u64 * self.layout().object_bytes,
        }
    }

    fn objects(&self) -> [ReserveRequest<'_>; 1] {
        [ReserveRequest {
            namespace: &self.namespace,
            hashes: &self.key.tokens.hashes[self.range.chunks.clone()],
            len: self.layout().object_bytes,
        }]
    }
}

impl Transfers {
    /// The transfer that a worker asks for; if there is none, the reason, for the metrics.
    fn worker_copy<'a>(
        &self,
        operation: &'static str,
        key: &'a CacheKey<'a, Prompt>,
        id: InstanceId,
    ) -> Result<WorkerCopy<'a>, &'static str> {
        let now = self.context.now();
        let instance = self.context.instances.get(id);
        let instance = instance.filter(|instance| instance.patience(now).is_ok());
        let instance = instance.ok_or("unknown_instance")?;
        instance.seen(now);
        let range = match &instance.mode {
            Mode::EngineDriven { .. } => self.worker_range(&instance, key),
            Mode::LmcacheDriven { .. } => Err(Error::refused(
                "the instance is registered for lmcache-driven transfers; allowed: store and retrieve",
            )),
        };
        let range = range.map_err(|error| {
            let request = key.request_id;
            tracing::debug!(request, instance = id.0, %error, "{operation} refused");
            "bad_key"
        })?;
        let layout = instance.layout.fingerprint;
        Ok(WorkerCopy {
            namespace: range.scope.namespace(range.kv_rank, 0, layout),
            instance,
            key,
            range,
            started: now,
        })
    }

    /// Whether a worker gets slots in the pool.
    fn has_pool(&self, copy: &WorkerCopy<'_>) -> bool {
        self.context.l1.arena.shm_name().is_some() && !copy.worker().1.load(Ordering::Relaxed)
    }

    /// Memory for those chunks of a range that are not resident.
    ///
    /// # Errors
    /// The reason for the metrics.
    fn stage_range(
        &self,
        operation: &'static str,
        copy: &WorkerCopy<'_>,
    ) -> Result<(Reservation<L1Allocator>, Charge), &'static str> {
        let (instance, key) = (&copy.instance, copy.key);
        let staged = self.stage(instance, key, &copy.range, &copy.objects(), None);
        staged.map_err(|error| {
            if is_trouble(&error) {
                let (request, instance) = (key.request_id, instance.id.0);
                tracing::warn!(request, instance, %error, "{operation} failed");
            }
            reason(&error, Direction::Store)
        })
    }

    /// Begins a transfer. If one is in flight, or the instance has just left on another connection, it is refused: no
    /// COMMIT would release its grant.
    fn grant(
        &self,
        instance: &Arc<Instance>,
        id: &TransferId,
        grant: Grant,
    ) -> Result<(), &'static str> {
        if !self.prepared.begin(id.clone(), grant, self.context.now()) {
            return Err("under_way");
        }
        let known = self.context.instances.get(instance.id);
        if known.is_none_or(|known| !Arc::ptr_eq(&known, instance)) {
            // Its worker has not received the memory yet.
            drop(self.prepared.finish(id));
            return Err("unknown_instance");
        }
        Ok(())
    }

    /// Reserves slots for the chunks that are not resident; none at all for a worker that will send its data.
    pub fn prepare_store(&self, key: &CacheKey<'_, Prompt>, id: InstanceId) -> Answer {
        let started = self.context.now();
        // Empty lists are the one "no" a worker understands here: it sends nothing and commits nothing.
        self.try_prepare_store(key, id).unwrap_or_else(|reason| {
            self.trace_refused(Direction::Store, key, id, started, reason);
            store_target(Some(StoreTarget::default())).because(reason)
        })
    }

    fn try_prepare_store(
        &self,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
    ) -> Result<Answer, &'static str> {
        let copy = self.worker_copy("prepare_store", key, id)?;
        if !self.has_pool(&copy) {
            return Ok(store_target(None));
        }
        let transfer_id = copy.id(Direction::Store);
        if self.prepared.is_granted(&transfer_id) {
            return Err("under_way");
        }
        let (reservation, charge) = self.stage_range("prepare_store", &copy)?;
        if reservation.is_empty() {
            // No commit follows.
            self.pin(&copy.range, &copy.objects());
            self.trace_copy(Direction::Store, &copy, copy.started, Ok(copy.moved(0)));
            return Ok(store_target(Some(StoreTarget::default())));
        }
        self.context.metrics.store(DEVICE, false);
        let staged = reservation.staged().iter();
        let answer = store_target(Some(StoreTarget {
            slots: reservation.extents().map(|it| copy.slot(it)).collect(),
            chunk_indices: staged.map(|staged| staged.position.into()).collect(),
        }));
        reservation.grant();
        let grant = Grant::Store(reservation, charge);
        self.grant(&copy.instance, &transfer_id, grant)?;
        Ok(answer)
    }

    /// Commits a store: without data the slots that the worker has written, else its pickled chunks.
    pub fn commit_store(&self, key: &CacheKey<'_, Prompt>, id: InstanceId, data: &[u8]) -> Answer {
        let started = self.context.now();
        let committed = match self.worker_copy("commit_store", key, id) {
            Err(reason) => {
                self.trace_refused(Direction::Store, key, id, started, reason);
                Err(reason)
            }
            Ok(copy) => {
                let granted = self.prepared.finish(&copy.id(Direction::Store));
                let started = match &granted {
                    Finish::Last(_, since) => *since,
                    _ => copy.started,
                };
                let committed = match data {
                    [] => self.commit_slots(&copy, granted),
                    // The slots stay unwritten.
                    ABORT_STORE => Err("aborted"),
                    data => {
                        drop(granted);
                        self.commit_pickled(&copy, data)
                    }
                };
                self.trace_copy(Direction::Store, &copy, started, committed);
                committed
            }
        };
        match committed {
            Ok(_) => Answer::from(Response::Bool(true)),
            Err(reason) => Answer::from(Response::Bool(false)).because(reason),
        }
    }

    /// The worker has written its slots.
    fn commit_slots(&self, copy: &WorkerCopy<'_>, granted: Finish) -> Result<Moved, &'static str> {
        let Finish::Last(Grant::Store(reservation, _charge), _) = granted else {
            return Err("not_prepared");
        };
        let moved = copy.moved(reservation.len());
        self.commit_written(copy, reservation, |_| true);
        Ok(moved)
    }

    fn trace_copy(
        &self,
        direction: Direction,
        copy: &WorkerCopy<'_>,
        started: Duration,
        moved: Result<Moved, &'static str>,
    ) {
        let (range, instance) = (&copy.range, &copy.instance);
        self.trace(
            direction,
            copy.key.request_id,
            range,
            instance,
            started,
            moved,
        );
    }

    /// Commits what is written of a reservation; returns the number of objects that are not.
    fn commit_written(
        &self,
        copy: &WorkerCopy<'_>,
        reservation: Reservation<L1Allocator>,
        is_written: impl Fn(&Staged) -> bool,
    ) -> usize {
        let mut staged = self.to_write_behind(&reservation);
        staged.retain(&is_written);
        let tokens = reservation.len() * copy.range.chunk_size.get();
        let objects = copy.objects();
        let committed = self.commit(&copy.range, reservation, &objects, is_written);
        self.admitted(&copy.range, committed.inserted, &objects, &staged);
        self.context.metrics.store(DEVICE, true);
        tracing::debug!(request = copy.key.request_id, tokens, "committed a store");
        committed.aborted
    }

    /// The worker sends all chunks of its range pickled.
    fn commit_pickled(&self, copy: &WorkerCopy<'_>, data: &[u8]) -> Result<Moved, &'static str> {
        let (request, instance) = (copy.key.request_id, copy.instance.id.0);
        let tensors = pickle::read_tensors(data, &Limits::default()).map_err(|error| {
            tracing::warn!(request, instance, %error, "commit_store: the data was refused");
            "bad_data"
        })?;
        if self.has_pool(copy) {
            copy.worker().1.store(true, Ordering::Relaxed);
            tracing::info!(
                instance,
                "this worker cannot map the pool; its data travels pickled from now on"
            );
        }
        self.context.metrics.store(DEVICE, false);
        let (reservation, _charge) = self.stage_range("commit_store", copy)?;
        // The chunks whose bytes are in place; a position of the range has at most one staged object.
        let mut written = vec![false; copy.range.chunks.len()];
        let layout = copy.layout();
        let fits = |tensor: &&PickledTensor<'_>| {
            tensor.dtype == layout.dtype && tensor.shape == layout.shape
        };
        for staged in reservation.staged() {
            let position = staged.position as usize;
            if let Some(tensor) = tensors.get(position).filter(fits) {
                written[position] = self.write(tensor, staged.extent).is_ok();
            }
        }
        let wanted = reservation.len();
        let is_written = |staged: &Staged| written[staged.position as usize];
        match self.commit_written(copy, reservation, is_written) {
            0 => Ok(copy.moved(wanted)),
            missing => {
                tracing::warn!(
                    request,
                    instance,
                    missing,
                    wanted,
                    "commit_store: some chunks were missing or had another shape or dtype than registered"
                );
                Err("bad_data")
            }
        }
    }

    fn write(&self, tensor: &PickledTensor<'_>, extent: Extent) -> Result<(), AccessError> {
        let mut at = 0;
        let mut result = Ok(());
        tensor.for_each_run(|run| {
            if result.is_ok() {
                result = self.context.l1.arena.write(extent, at, run);
                at += run.len() as u64;
            }
        });
        result
    }

    /// Leases the chunks of a range, and answers with their slots or their bytes.
    pub fn prepare_retrieve(
        &self,
        caller: Caller,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
    ) -> Answer {
        let started = self.context.now();
        let prepared = match self.refused_retrieves.is_refusing(caller.connection) {
            true => Err("not_held"),
            false => self.try_prepare_retrieve(key, id),
        };
        prepared.unwrap_or_else(|reason| {
            self.trace_refused(Direction::Retrieve, key, id, started, reason);
            Answer::from(Response::PrepareRetrieve(PrepareRetrieve::miss())).because(reason)
        })
    }

    fn try_prepare_retrieve(
        &self,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
    ) -> Result<Answer, &'static str> {
        let copy = self
            .worker_copy("prepare_retrieve", key, id)
            .inspect_err(|_| self.release_refused(id, key))?;
        let metrics = &self.context.metrics;
        metrics.retrieve(DEVICE, false);
        let range = &copy.range;
        let leases = self
            .lease(&copy.instance, key, range)
            .filter(|leases| leases.iter().any(|group| !group.chunks.is_empty()));
        // From here on the transfer has leases of its own, or will not happen.
        self.release(id, key, range);
        let transfer_id = copy.id(Direction::Retrieve);
        let missed = |reason| {
            self.prepared.missed(&transfer_id);
            reason
        };
        let leases = leases.ok_or_else(|| {
            metrics.not_found("l1_retrieve", key.model_name, range.chunks.len() as u64);
            missed("not_held")
        })?;
        let charge = self.lease_staged(&copy, &leases);
        let charge = charge.ok_or_else(|| missed("staging_full"))?;
        self.count_loaded(range);
        let extents = leases.iter().flat_map(|group| group.lease.extents());
        if self.has_pool(&copy) {
            let answer = Answer::from(Response::PrepareRetrieve(PrepareRetrieve {
                success: true,
                data: (&[][..]).into(),
                slots: Some(extents.map(|extent| copy.slot(*extent)).collect()),
            }));
            let leases: Vec<_> = leases.into_iter().map(|group| group.lease).collect();
            leases.iter().for_each(ReadLease::grant);
            let grant = Grant::Retrieve(leases, vec![charge]);
            self.grant(&copy.instance, &transfer_id, grant)
                .map_err(missed)?;
            return Ok(answer);
        }
        match self.pickled(copy.layout(), leases, charge) {
            Ok(Some(payload)) => {
                metrics.retrieve(DEVICE, true);
                let moved = copy.moved(range.chunks.len());
                self.trace_copy(Direction::Retrieve, &copy, copy.started, Ok(moved));
                Ok(Answer {
                    payload: Some(payload),
                    ..Answer::nothing()
                })
            }
            Ok(None) => {
                tracing::warn!(
                    request = key.request_id,
                    "prepare_retrieve: the chunks are 4 GiB or more pickled, which no message holds"
                );
                Err("too_large")
            }
            Err(error) => {
                tracing::warn!(request = key.request_id, %error, "prepare_retrieve failed");
                Err("retrieve_failed")
            }
        }
    }

    /// Charges what a retrieve leases to the staging budget; `None` if it may not.
    fn lease_staged(&self, copy: &WorkerCopy<'_>, leases: &[GroupLease]) -> Option<Charge> {
        let cache = &self.context.l1.cache;
        let extents = leases.iter().flat_map(|group| group.lease.extents());
        let bytes = cache.footprint(extents.map(|extent| extent.len));
        let worker = WorkerShare::of(&copy.instance, &copy.range);
        self.staging
            .lease(&worker, bytes, || cache.stats().leased_bytes)
    }

    /// The answer with the chunks pickled, leased until it is sent; `None` if they are too large for a frame.
    fn pickled(
        &self,
        layout: &EngineDrivenLayout,
        leases: Vec<GroupLease>,
        charge: Charge,
    ) -> Result<Option<Payload>, PickleError> {
        let leases: Vec<_> = leases.into_iter().map(|group| group.lease).collect();
        let extents: Vec<_> = leases
            .iter()
            .flat_map(ReadLease::extents)
            .copied()
            .collect();
        let form = TensorToWrite {
            dtype: layout.dtype,
            shape: &layout.shape,
        };
        let Some(hit) = PickledHit::new(&vec![form; extents.len()])? else {
            return Ok(None);
        };
        let arena = &self.context.l1.arena;
        for extent in &extents {
            if form.byte_len() != Some(extent.len as usize) {
                return Err(PickleError::Length(extent.len));
            }
            // The thread that sends them must not wait for the disk, nor meet lost pages in the middle of a frame.
            arena.populate(*extent)?;
        }
        let chunks = LeasedChunks {
            arena: Arc::clone(arena),
            places: hit.places.into_iter().zip(extents).collect(),
            leases,
            charge,
        };
        Ok(Some(Payload::with_chunks(hit.text, chunks)))
    }

    /// Ends a retrieve. The answer is whether no other request had the memory until now. LMCache's server always answers yes, and
    /// its worker ignores the answer.
    pub fn commit_retrieve(&self, key: &CacheKey<'_, Prompt>, id: InstanceId) -> Answer {
        let started = self.context.now();
        let copy = match self.worker_copy("commit_retrieve", key, id) {
            Ok(copy) => copy,
            Err(reason) => {
                self.trace_refused(Direction::Retrieve, key, id, started, reason);
                return Answer::from(Response::Bool(false)).because(reason);
            }
        };
        let was_held = match self.prepared.finish(&copy.id(Direction::Retrieve)) {
            Finish::Last(_, since) => {
                self.context.metrics.retrieve(DEVICE, true);
                let moved = copy.moved(copy.range.chunks.len());
                self.trace_copy(Direction::Retrieve, &copy, since, Ok(moved));
                true
            }
            Finish::Earlier => {
                self.context.metrics.retrieve(DEVICE, true);
                true
            }
            Finish::Abandoned => true,
            // Pickled data needs no commit. A worker commits after a miss too, which is no failure, but no yes either.
            Finish::Unknown => !self.has_pool(&copy),
        };
        Answer::from(Response::Bool(was_held))
    }
}

fn store_target(target: Option<StoreTarget<'_>>) -> Answer {
    Answer::from(Response::PrepareStore(PrepareStore { target }))
}

/// Why chunks could not be pickled.
#[derive(Debug, thiserror::Error)]
enum PickleError {
    #[error(transparent)]
    Form(#[from] WriteError),
    #[error("a chunk of {0} bytes has another length than registered")]
    Length(u64),
    #[error(transparent)]
    Memory(#[from] AccessError),
}
