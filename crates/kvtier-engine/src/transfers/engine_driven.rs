//! Prepare and commit: transfers where the worker copies, in the pool or pickled.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_core::Namespace;
use kvtier_core::cache::{Extent, Reservation, ReserveRequest};
use kvtier_core::prompt::Prompt;
use kvtier_error::{Error, Result};
use kvtier_proto::key::CacheKey;
use kvtier_proto::pickle::{self, Limits, PickledTensor, TensorToWrite};
use kvtier_proto::request::{ABORT_STORE, InstanceId};
use kvtier_proto::response::{
    PrepareRetrieve, PrepareStore, Response, Slot, StoreTarget, prepare_retrieve_hit,
};

use super::super::instances::{EngineDrivenLayout, Instance, Mode};
use super::super::{Answer, Caller};
use super::prepared::{Finish, Grant, Kind, TransferId};
use super::staging::{Charge, WorkerShare};
use super::worker_range::{GroupLease, WorkerRange};
use super::{Transfers, is_logged};
use kvtier_l1::L1Allocator;

const DEVICE: &str = "cpu";

/// A worker that copies by itself, and what its key names.
struct Transfer {
    instance: Arc<Instance>,
    range: WorkerRange,
    /// Of its objects.
    namespace: Arc<Namespace>,
}

impl Transfer {
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
}

impl Transfers {
    /// The instance that asks for a transfer, and the range; if there is none, the reason, for the metrics.
    fn transfer(
        &self,
        operation: &'static str,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
    ) -> Result<Transfer, &'static str> {
        let instance = self.context.instances.get(id).ok_or("unknown_instance")?;
        instance.seen(self.context.now());
        let range = match &instance.mode {
            Mode::EngineDriven { .. } => self.worker_range(&instance, key),
            Mode::LmcacheDriven { .. } => Err(Error::refused(
                "the instance is registered for lmcache-driven transfers; allowed: store and retrieve",
            )),
        };
        match range {
            Ok(range) => {
                let layout = instance.layout.fingerprint;
                Ok(Transfer {
                    namespace: range.scope.namespace(range.kv_rank, 0, layout),
                    instance,
                    range,
                })
            }
            Err(error) => {
                let error = error.to_string();
                tracing::debug!(
                    request = key.request_id,
                    instance = id.0,
                    error,
                    "{operation} refused"
                );
                Err("bad_key")
            }
        }
    }

    /// Whether a worker gets slots in the pool.
    fn has_pool(&self, transfer: &Transfer) -> bool {
        self.context.l1.arena.shm_name().is_some() && !transfer.worker().1.load(Ordering::Relaxed)
    }

    fn id(
        kind: Kind,
        instance: InstanceId,
        key: &CacheKey<'_, Prompt>,
        range: &WorkerRange,
    ) -> TransferId {
        let last = range
            .chunks
            .end
            .checked_sub(1)
            .map(|last| key.tokens.hashes[last]);
        TransferId::new(kind, instance, key, last)
    }

    fn slot(layout: &EngineDrivenLayout, extent: Extent) -> Slot<'_> {
        Slot {
            offset: extent.offset,
            length: extent.len,
            shape: layout.shape.as_slice().into(),
            dtype: layout.dtype.name().into(),
        }
    }

    /// The objects of a range.
    fn objects<'a>(key: &'a CacheKey<'_, Prompt>, transfer: &'a Transfer) -> ReserveRequest<'a> {
        ReserveRequest {
            namespace: &transfer.namespace,
            hashes: &key.tokens.hashes[transfer.range.chunks.clone()],
            len: transfer.layout().object_bytes,
        }
    }

    /// Memory for those chunks of a range that are not resident.
    ///
    /// # Errors
    /// The reason for the metrics.
    fn stage_range(
        &self,
        operation: &'static str,
        key: &CacheKey<'_, Prompt>,
        transfer: &Transfer,
    ) -> Result<(Reservation<L1Allocator>, Charge), &'static str> {
        let (instance, range) = (&transfer.instance, &transfer.range);
        let staged = self.stage(instance, key, range, &[Self::objects(key, transfer)], None);
        staged.map_err(|error| {
            if is_logged(&error) {
                let (request, instance) = (key.request_id, instance.id.0);
                let error = error.to_string();
                tracing::warn!(request, instance, error, "{operation} failed");
            }
            error.kind().label("store_failed")
        })
    }

    /// Begins a transfer. If one is in flight, or the instance has just left on another connection, it is refused: no
    /// COMMIT would release its grant.
    fn begin_transfer(
        &self,
        instance: &Arc<Instance>,
        id: TransferId,
        grant: Grant,
    ) -> Result<(), &'static str> {
        if !self.prepared.begin(id.clone(), grant, self.context.now()) {
            return Err("under_way");
        }
        let known = self.context.instances.get(instance.id);
        if known.is_none_or(|known| !Arc::ptr_eq(&known, instance)) {
            // Its worker has not received the memory yet.
            drop(self.prepared.finish(&id));
            return Err("unknown_instance");
        }
        Ok(())
    }

    pub fn prepare_store(&self, key: &CacheKey<'_, Prompt>, id: InstanceId) -> Answer {
        // Empty lists are the one "no" a worker understands here: it sends nothing and commits nothing.
        self.try_prepare_store(key, id)
            .unwrap_or_else(|reason| store_target(Some(StoreTarget::default())).because(reason))
    }

    /// Slots for the chunks that are not resident; none at all for a worker that will send its data.
    fn try_prepare_store(
        &self,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
    ) -> Result<Answer, &'static str> {
        let transfer = self.transfer("prepare_store", key, id)?;
        if !self.has_pool(&transfer) {
            return Ok(store_target(None));
        }
        let transfer_id = Self::id(Kind::Store, id, key, &transfer.range);
        if self.prepared.is_granted(&transfer_id) {
            return Err("under_way");
        }
        let (reservation, charge) = self.stage_range("prepare_store", key, &transfer)?;
        if reservation.is_empty() {
            return Ok(store_target(Some(StoreTarget::default())));
        }
        self.context.metrics.store(DEVICE, false);
        let slots = reservation
            .extents()
            .map(|extent| Self::slot(transfer.layout(), extent));
        let positions = reservation
            .staged()
            .iter()
            .map(|staged| u64::from(staged.position));
        let answer = store_target(Some(StoreTarget {
            slots: slots.collect(),
            chunk_indices: positions.collect(),
        }));
        let grant = Grant::Store(reservation, charge);
        self.begin_transfer(&transfer.instance, transfer_id, grant)?;
        Ok(answer)
    }

    pub fn commit_store(&self, key: &CacheKey<'_, Prompt>, id: InstanceId, data: &[u8]) -> Answer {
        let verdict = self
            .transfer("commit_store", key, id)
            .and_then(|transfer| match data {
                [] => self.commit_slots(key, &transfer),
                ABORT_STORE => {
                    drop(
                        self.prepared
                            .finish(&Self::id(Kind::Store, id, key, &transfer.range)),
                    );
                    Err("aborted")
                }
                data => self.commit_pickled(key, &transfer, data),
            });
        match verdict {
            Ok(()) => Answer::from(Response::Bool(true)),
            Err(reason) => Answer::from(Response::Bool(false)).because(reason),
        }
    }

    /// The worker has written its slots.
    fn commit_slots(
        &self,
        key: &CacheKey<'_, Prompt>,
        transfer: &Transfer,
    ) -> Result<(), &'static str> {
        let transfer_id = Self::id(Kind::Store, transfer.instance.id, key, &transfer.range);
        let finished = self.prepared.finish(&transfer_id);
        let Finish::Last(Grant::Store(reservation, _charge)) = finished else {
            return Err("not_prepared");
        };
        let staged = self.to_write_behind(&reservation);
        let tokens = reservation.len() * self.context.chunk_size.get();
        let inserted = reservation.commit(self.context.now()).inserted;
        let objects = [Self::objects(key, transfer)];
        self.admitted(&transfer.range, inserted, &objects, &staged);
        self.context.metrics.store(DEVICE, true);
        tracing::debug!(request = key.request_id, tokens, "committed a store");
        Ok(())
    }

    /// The worker sends all chunks of its range pickled.
    fn commit_pickled(
        &self,
        key: &CacheKey<'_, Prompt>,
        transfer: &Transfer,
        data: &[u8],
    ) -> Result<(), &'static str> {
        let instance = &transfer.instance;
        // The slots that its PREPARE was granted stay unwritten.
        let transfer_id = Self::id(Kind::Store, instance.id, key, &transfer.range);
        drop(self.prepared.finish(&transfer_id));
        let tensors = pickle::read_tensors(data, &Limits::default()).map_err(|error| {
            tracing::warn!(request = key.request_id, instance = instance.id.0, %error, "commit_store: the data was refused");
            "bad_data"
        })?;
        if self.has_pool(transfer) {
            transfer.worker().1.store(true, Ordering::Relaxed);
            tracing::info!(
                instance = instance.id.0,
                "this worker cannot map the pool; its data travels pickled from now on"
            );
        }
        self.context.metrics.store(DEVICE, false);
        let (reservation, _charge) = self.stage_range("commit_store", key, transfer)?;
        // The chunks whose bytes are in place; a position of the range has at most one staged object.
        let mut written = vec![false; transfer.range.chunks.len()];
        for staged in reservation.staged() {
            let position = staged.position as usize;
            let fits = |tensor: &&PickledTensor<'_>| {
                tensor.dtype == transfer.layout().dtype && tensor.shape == transfer.layout().shape
            };
            let Some(tensor) = tensors.get(position).filter(fits) else {
                continue;
            };
            written[position] = self.write(tensor, staged.extent).is_ok();
        }
        let wanted = reservation.len();
        let mut staged = self.to_write_behind(&reservation);
        staged.retain(|staged| written[staged.position as usize]);
        let tokens = self.context.chunk_size.get() * wanted;
        let committed = reservation.commit_subset(self.context.now(), |staged| {
            written[staged.position as usize]
        });
        let objects = [Self::objects(key, transfer)];
        self.admitted(&transfer.range, committed.inserted, &objects, &staged);
        self.context.metrics.store(DEVICE, true);
        tracing::debug!(
            request = key.request_id,
            tokens,
            "committed a pickled store"
        );
        if committed.aborted > 0 {
            tracing::warn!(
                request = key.request_id,
                instance = instance.id.0,
                missing = committed.aborted,
                wanted,
                "commit_store: some chunks were missing or had another shape or dtype than registered"
            );
            return Err("bad_data");
        }
        Ok(())
    }

    fn write(
        &self,
        tensor: &PickledTensor<'_>,
        extent: Extent,
    ) -> Result<(), kvtier_memory::AccessError> {
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

    pub fn prepare_retrieve(
        &self,
        caller: Caller,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
    ) -> Answer {
        let prepared = match self.refused_retrieves.is_refusing(caller.connection) {
            true => Err("not_held"),
            false => self.try_prepare_retrieve(key, id),
        };
        prepared.unwrap_or_else(|reason| {
            Answer::from(Response::PrepareRetrieve(PrepareRetrieve::miss())).because(reason)
        })
    }

    fn try_prepare_retrieve(
        &self,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
    ) -> Result<Answer, &'static str> {
        let transfer = self
            .transfer("prepare_retrieve", key, id)
            .inspect_err(|_| self.release_refused(id, key))?;
        self.context.metrics.retrieve(DEVICE, false);
        let range = &transfer.range;
        let held = self
            .lease(&transfer.instance, key, range)
            .filter(|held| held.iter().any(|held| !held.chunks.is_empty()));
        // From here on the transfer has leases of its own, or will not happen.
        self.release(id, key, range);
        let chunks = range.chunks.len() as u64;
        let transfer_id = Self::id(Kind::Retrieve, id, key, range);
        let missed = |reason| {
            self.prepared.missed(&transfer_id);
            reason
        };
        let held = held.ok_or_else(|| {
            self.context
                .metrics
                .not_found("l1_retrieve", key.model_name, chunks);
            missed("not_held")
        })?;
        let charge = self
            .lease_staged(&transfer, &held)
            .ok_or_else(|| missed("staging_full"))?;
        self.context.metrics.loaded(
            key.model_name,
            range.scope.cache_salt(),
            range.worker,
            chunks,
        );
        if self.has_pool(&transfer) {
            let extents = held.iter().flat_map(|held| held.lease.extents());
            let slots = extents
                .map(|extent| Self::slot(transfer.layout(), *extent))
                .collect();
            let answer = Answer::from(Response::PrepareRetrieve(PrepareRetrieve {
                success: true,
                data: (&[][..]).into(),
                slots: Some(slots),
            }));
            let leases = held.into_iter().map(|held| held.lease).collect();
            let grant = Grant::Retrieve(leases, vec![charge]);
            self.begin_transfer(&transfer.instance, transfer_id.clone(), grant)
                .map_err(missed)?;
            return Ok(answer);
        }
        match self.pickled(transfer.layout(), &held) {
            Ok(Some(payload)) => {
                self.context.metrics.retrieve(DEVICE, true);
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
                let error = error.to_string();
                tracing::warn!(request = key.request_id, error, "prepare_retrieve failed");
                Err("retrieve_failed")
            }
        }
    }

    /// What a retrieve takes of the staging budget.
    fn lease_staged(&self, transfer: &Transfer, held: &[GroupLease]) -> Option<Charge> {
        let extents = held.iter().flat_map(|held| held.lease.extents());
        let bytes = self
            .context
            .l1
            .cache
            .footprint(extents.map(|extent| extent.len));
        let worker = WorkerShare::of(&transfer.instance, &transfer.range);
        let leased_bytes = || self.context.l1.cache.stats().leased_bytes;
        self.staging.lease(&worker, bytes, leased_bytes)
    }

    /// The answer with the chunks pickled, copied once from the arena into the frame.
    fn pickled(&self, layout: &EngineDrivenLayout, held: &[GroupLease]) -> Result<Option<Vec<u8>>> {
        let extents: Vec<_> = held.iter().flat_map(|held| held.lease.extents()).collect();
        let tensors: Vec<_> = extents
            .iter()
            .map(|_| TensorToWrite {
                dtype: layout.dtype,
                shape: &layout.shape,
            })
            .collect();
        let size = pickle::written_size(&tensors).map_err(Error::refused)?;
        prepare_retrieve_hit(size, |out| {
            pickle::write_tensors_into(out, &tensors, |index, out| {
                let extent = *extents[index];
                self.context
                    .l1
                    .arena
                    .read_into(extent, 0, extent.len, out)
                    .map_err(|error| PickleError(error.to_string()))
            })
        })
        .map_err(|PickleError(error)| Error::refused(error))
    }

    /// Whether the worker has read what it asked for: no other request had the memory until now. LMCache's server
    /// always answers yes, and its worker ignores the answer.
    pub fn commit_retrieve(&self, key: &CacheKey<'_, Prompt>, id: InstanceId) -> Answer {
        let transfer = match self.transfer("commit_retrieve", key, id) {
            Ok(transfer) => transfer,
            Err(reason) => return Answer::from(Response::Bool(false)).because(reason),
        };
        let transfer_id = Self::id(Kind::Retrieve, id, key, &transfer.range);
        let was_held = match self.prepared.finish(&transfer_id) {
            Finish::Last(_) | Finish::Earlier => {
                self.context.metrics.retrieve(DEVICE, true);
                true
            }
            Finish::Abandoned => true,
            // Pickled data needs no commit. A worker commits after a miss too, which is no failure, but no yes either.
            Finish::Unknown => !self.has_pool(&transfer),
        };
        Answer::from(Response::Bool(was_held))
    }
}

fn store_target(target: Option<StoreTarget<'_>>) -> Answer {
    Answer::from(Response::PrepareStore(PrepareStore { target }))
}

/// Carries both errors of writing a pickle.
struct PickleError(String);

impl From<pickle::WriteError> for PickleError {
    fn from(error: pickle::WriteError) -> Self {
        Self(error.to_string())
    }
}
