//! Prepare and commit: transfers where the worker copies, in the pool or inside messages.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvtier_common::error::Error;
use kvtier_core::cache::{Extent, ReadLease};
use kvtier_core::prompt::Prompt;
use kvtier_core::window::needed;
use kvtier_device::Direction;
use kvtier_proto::inline::InlineForm;
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::{ABORT_STORE, InstanceId};
use kvtier_proto::response::{
    ChunkSlot, PrepareRetrieve, PrepareStore, Response, SlotGroups, StoreTarget,
};

use super::super::instances::{EngineDrivenLayout, Instance, Mode};
use super::super::{Caller, EngineAnswer};
use super::prepared::{Finish, Grant, TransferId};
use super::skipped::Skipped;
use super::staging::{Charge, WorkerShare};
use super::store::{GroupChunks, StagedStore};
use super::traced::Moved;
use super::worker_range::{GroupLease, WorkerRange};
use super::{Transfers, is_trouble, reason};

pub(super) const DEVICE: &str = "cpu";

/// A transfer of a worker that copies by itself.
pub(super) struct WorkerCopy<'a> {
    pub instance: Arc<Instance>,
    pub key: &'a CacheKey<'a, Prompt>,
    pub range: WorkerRange,
    /// When it was asked for.
    pub started: Duration,
}

impl WorkerCopy<'_> {
    /// The worker's objects, whether its data travels inside messages, and in which form.
    pub(super) fn worker(&self) -> (&EngineDrivenLayout, &AtomicBool, InlineForm) {
        match &self.instance.mode {
            Mode::EngineDriven {
                layout,
                pickles,
                form,
            } => (layout, pickles, *form),
            Mode::LmcacheDriven { .. } => unreachable!("checked when the transfer was made"),
        }
    }

    pub(super) fn layout(&self) -> &EngineDrivenLayout {
        self.worker().0
    }

    fn id(&self, direction: Direction) -> TransferId {
        let last = self.range.chunks.end.checked_sub(1);
        let last_hash = last.map(|last| self.key.tokens.hashes[last]);
        TransferId::new(direction, self.instance.id, self.key, last_hash)
    }

    fn slot(&self, group: u32, extent: Extent) -> ChunkSlot<'_> {
        let group = &self.layout().groups[group as usize];
        ChunkSlot {
            offset: extent.offset,
            length: extent.len,
            shape: group.shape.as_slice().into(),
            dtype: group.dtype.name().into(),
        }
    }

    /// What a retrieve of its range moves.
    pub(super) fn retrieved(&self) -> Moved {
        let bytes = self.instance.layout.groups.iter().map(|group| {
            let chunks = needed(group.window, self.range.chunks.end);
            let chunks = chunks.len().min(self.range.chunks.len()) as u64;
            chunks * group.object_bytes
        });
        Moved {
            chunks: self.range.chunks.len(),
            bytes: bytes.sum(),
        }
    }

    /// Chunks of its range per group; `chunks` returns those of one group, by its number.
    ///
    /// # Errors
    /// Objects of `chunks`.
    pub(super) fn group_chunks<E>(
        &self,
        mut chunks: impl FnMut(usize) -> Result<Vec<usize>, E>,
    ) -> Result<Vec<GroupChunks>, E> {
        let model = &self.instance.layout;
        let hashes = &self.key.tokens.hashes[self.range.chunks.clone()];
        let groups = model.groups.iter().enumerate().map(|(number, group)| {
            let chunks = chunks(number)?;
            Ok(GroupChunks::new(&self.range, model, group, hashes, chunks))
        });
        groups.collect()
    }

    /// Chunks of its range per group, without those that the worker skips.
    fn unskipped(&self, skipped: &Skipped) -> Vec<GroupChunks> {
        let count = self.range.chunks.len();
        let chunks = self.group_chunks(|group| Ok::<_, Infallible>(skipped.written(group, count)));
        chunks.unwrap_or_else(|never| match never {})
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
        Ok(WorkerCopy {
            instance,
            key,
            range,
            started: now,
        })
    }

    /// Whether a worker gets slots in the pool.
    pub(super) fn has_pool(&self, copy: &WorkerCopy<'_>) -> bool {
        self.context.l1.arena.shm_name().is_some() && !copy.worker().1.load(Ordering::Relaxed)
    }

    /// Memory for those of these chunks that are not resident.
    ///
    /// # Errors
    /// The reason for the metrics.
    pub(super) fn stage_chunks(
        &self,
        operation: &'static str,
        copy: &WorkerCopy<'_>,
        groups: Vec<GroupChunks>,
        further_pieces: u32,
    ) -> Result<StagedStore, &'static str> {
        let (instance, key) = (&copy.instance, copy.key);
        if let Some(unserved) = instance.unserved {
            return Err(unserved.name());
        }
        let prompt = copy.range.prompt(key);
        let staged = self.stage(instance, &copy.range, prompt, groups, None, further_pieces);
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

    /// Reserves slots for the chunks that are not resident and not skipped; none at all for a worker that will send its data.
    pub fn prepare_store(
        &self,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
        skipped: &[Vec<i64>],
    ) -> EngineAnswer {
        let started = self.context.now();
        // Empty lists are the one "no" a worker understands here: it sends nothing and commits nothing.
        let prepared = self.try_prepare_store(key, id, skipped);
        prepared.unwrap_or_else(|reason| {
            self.trace_refused(Direction::Store, key, id, started, reason);
            let instance = self.context.instances.get(id);
            let is_grouped = instance.is_some_and(|instance| instance.layout.groups.len() > 1);
            store_target(Some(no_slots(is_grouped))).because(reason)
        })
    }

    fn try_prepare_store(
        &self,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
        skipped: &[Vec<i64>],
    ) -> Result<EngineAnswer, &'static str> {
        let copy = self.worker_copy("prepare_store", key, id)?;
        if !self.has_pool(&copy) {
            return Ok(store_target(None));
        }
        let transfer_id = copy.id(Direction::Store);
        if self.prepared.is_granted(&transfer_id) {
            return Err("under_way");
        }
        let (groups, count) = (copy.layout().groups.len(), copy.range.chunks.len());
        let skipped = Skipped::new(skipped, groups, count).ok_or("bad_data")?;
        // The worker copies, and commits once.
        let store = self.stage_chunks("prepare_store", &copy, copy.unskipped(&skipped), 0)?;
        let mut target = no_slots(copy.layout().is_grouped());
        if store.reservation.is_empty() {
            // No commit follows.
            let requests: Vec<_> = store.groups.iter().map(GroupChunks::request).collect();
            self.pin(&copy.range, &requests);
            let moved = Ok(store.moved());
            self.trace_copy(Direction::Store, &copy, copy.started, moved);
            return Ok(store_target(Some(target)));
        }
        self.context.metrics.store(DEVICE, false);
        for staged in store.reservation.staged() {
            target.slots.push(copy.slot(staged.request, staged.extent));
            target.chunk_indices.push(store.chunk(staged) as u64);
            if let Some(group_ids) = &mut target.group_ids {
                group_ids.push(staged.request.into());
            }
        }
        let answer = store_target(Some(target));
        let StagedStore {
            reservation,
            charge,
            ..
        } = store;
        reservation.grant(copy.started);
        let grant = Grant::Store(reservation, charge, skipped);
        self.grant(&copy.instance, &transfer_id, grant)?;
        Ok(answer)
    }

    /// Commits a store: without data the slots that the worker has written, else the chunks that it sends.
    pub fn commit_store(
        &self,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
        data: &[u8],
    ) -> EngineAnswer {
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
                        self.commit_inline(&copy, data)
                    }
                };
                self.trace_copy(Direction::Store, &copy, started, committed);
                committed
            }
        };
        match committed {
            Ok(_) => EngineAnswer::from(Response::Bool(true)),
            Err(reason) => EngineAnswer::from(Response::Bool(false)).because(reason),
        }
    }

    /// The worker has written its slots.
    fn commit_slots(&self, copy: &WorkerCopy<'_>, granted: Finish) -> Result<Moved, &'static str> {
        let Finish::Last(Grant::Store(reservation, charge, skipped), _) = granted else {
            return Err("not_prepared");
        };
        let store = StagedStore {
            prompt: copy.range.prompt(copy.key),
            groups: copy.unskipped(&skipped),
            reservation,
            charge,
            has_remainder: false,
        };
        // Its worker is registering again with another layout, and the grant is not abandoned yet.
        if !store.is_of_its_groups() {
            return Err("not_prepared");
        }
        let moved = store.moved();
        self.commit_staged(&copy.range, store, |_| true);
        self.stored(copy, moved);
        Ok(moved)
    }

    pub(super) fn trace_copy(
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

    /// Counts and logs a store that was committed.
    pub(super) fn stored(&self, copy: &WorkerCopy<'_>, moved: Moved) {
        let tokens = moved.chunks * copy.range.chunk_size.get();
        self.context.metrics.store(DEVICE, true);
        tracing::debug!(request = copy.key.request_id, tokens, "committed a store");
    }

    /// Leases the chunks of a range, and answers with their slots or their bytes.
    pub fn prepare_retrieve(
        &self,
        caller: Caller,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
    ) -> EngineAnswer {
        let started = self.context.now();
        let prepared = if self.refused_retrieves.is_refusing(caller.connection) {
            Err("not_held")
        } else {
            self.try_prepare_retrieve(key, id)
        };
        prepared.unwrap_or_else(|reason| {
            self.trace_refused(Direction::Retrieve, key, id, started, reason);
            EngineAnswer::from(Response::PrepareRetrieve(PrepareRetrieve::miss())).because(reason)
        })
    }

    fn try_prepare_retrieve(
        &self,
        key: &CacheKey<'_, Prompt>,
        id: InstanceId,
    ) -> Result<EngineAnswer, &'static str> {
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
        if !self.has_pool(&copy) {
            return self.inline_answer(&copy, leases, charge);
        }
        let mut groups = SlotGroups::default();
        let mut slots = Vec::new();
        for group in &leases {
            let chunks = group.chunks.clone();
            for (extent, chunk) in group.lease.extents().iter().zip(chunks) {
                slots.push(copy.slot(group.object_group, *extent));
                groups.group_ids.push(group.object_group.into());
                let chunk = chunk - range.chunks.start;
                groups.chunk_indices.push(chunk as u64);
            }
        }
        let answer = EngineAnswer::from(Response::PrepareRetrieve(PrepareRetrieve {
            success: true,
            data: (&[][..]).into(),
            slots: Some(slots),
            groups: copy.layout().is_grouped().then_some(groups),
        }));
        let leases: Vec<_> = leases.into_iter().map(|group| group.lease).collect();
        leases.iter().for_each(ReadLease::grant);
        let grant = Grant::Retrieve(leases, vec![charge]);
        self.grant(&copy.instance, &transfer_id, grant)
            .map_err(missed)?;
        Ok(answer)
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

    /// Ends a retrieve. The answer is whether no other request had the memory until now. LMCache's server always answers yes, and
    /// its worker ignores the answer.
    pub fn commit_retrieve(&self, key: &CacheKey<'_, Prompt>, id: InstanceId) -> EngineAnswer {
        let started = self.context.now();
        let copy = match self.worker_copy("commit_retrieve", key, id) {
            Ok(copy) => copy,
            Err(reason) => {
                self.trace_refused(Direction::Retrieve, key, id, started, reason);
                return EngineAnswer::from(Response::Bool(false)).because(reason);
            }
        };
        let was_held = match self.prepared.finish(&copy.id(Direction::Retrieve)) {
            Finish::Last(_, since) => {
                self.context.metrics.retrieve(DEVICE, true);
                let moved = Ok(copy.retrieved());
                self.trace_copy(Direction::Retrieve, &copy, since, moved);
                true
            }
            Finish::Earlier => {
                self.context.metrics.retrieve(DEVICE, true);
                true
            }
            Finish::Abandoned => true,
            // Data that was sent needs no commit. A worker commits after a miss too, which is no failure, but no yes either.
            Finish::Unknown => !self.has_pool(&copy),
        };
        EngineAnswer::from(Response::Bool(was_held))
    }
}

fn store_target(target: Option<StoreTarget<'_>>) -> EngineAnswer {
    EngineAnswer::from(Response::PrepareStore(PrepareStore { target }))
}

/// The answer that nothing is to be written.
fn no_slots(is_grouped: bool) -> StoreTarget<'static> {
    StoreTarget {
        group_ids: is_grouped.then(Vec::new),
        ..StoreTarget::default()
    }
}
