//! A transfer that a worker copies by itself: what its key names, and what it may have.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvtier_core::cache::Extent;
use kvtier_core::prompt::Prompt;
use kvtier_core::window::needed;
use kvtier_device::Direction;
use kvtier_proto::inline::InlineForm;
use kvtier_proto::key::CacheKey;
use kvtier_proto::response::ChunkSlot;

use super::super::instances::{EngineDrivenLayout, Instance, Mode};
use super::prepared::{Grant, TransferId};
use super::skipped::Skipped;
use super::staging::{Charge, WorkerShare};
use super::store::{GroupChunks, StagedStore, StorePlan};
use super::traced::{TransferVolume, trace};
use super::worker_range::{GroupLease, WorkerRange};
use super::{Transfers, is_trouble, reason};

pub(super) const DEVICE: &str = "cpu";

/// A transfer of a worker that copies by itself.
pub(super) struct WorkerCopy<'a> {
    pub transfers: &'a Transfers,
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

    pub(super) fn id(&self, direction: Direction) -> TransferId {
        let last = self.range.chunks.end.checked_sub(1);
        let last_hash = last.map(|last| self.key.tokens.hashes[last]);
        TransferId::new(direction, self.instance.id, self.key, last_hash)
    }

    pub(super) fn slot(&self, group: u32, extent: Extent) -> ChunkSlot<'_> {
        let group = &self.layout().groups[group as usize];
        ChunkSlot {
            offset: extent.offset,
            length: extent.len,
            shape: group.shape.as_slice().into(),
            dtype: group.dtype.name().into(),
        }
    }

    /// What a retrieve of its range moves.
    pub(super) fn retrieved(&self) -> TransferVolume {
        let bytes = self.instance.layout.groups.iter().map(|group| {
            let window = group.window.filter(|_| !self.key.tokens.is_object_keys);
            let chunks = needed(window, self.range.chunks.end);
            let chunks = chunks.len().min(self.range.chunks.len()) as u64;
            chunks * group.object_bytes
        });
        TransferVolume {
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
    pub(super) fn unskipped(&self, skipped: &Skipped) -> Vec<GroupChunks> {
        let count = self.range.chunks.len();
        let chunks = self.group_chunks(|group| Ok::<_, Infallible>(skipped.written(group, count)));
        chunks.unwrap_or_else(|never| match never {})
    }

    /// Whether the worker gets slots in the pool.
    pub(super) fn has_pool(&self) -> bool {
        let arena = &self.transfers.context.l1.arena;
        arena.shm_name().is_some() && !self.worker().1.load(Ordering::Relaxed)
    }

    /// The store of these chunks, in one piece and this number of further ones at most.
    pub(super) fn plan(&self, groups: Vec<GroupChunks>, further_pieces: u32) -> StorePlan {
        StorePlan {
            prompt: self.range.prompt(self.key),
            tokens: self.key.tokens.chunk_tokens(self.range.chunks.clone()),
            groups,
            near: None,
            further_pieces,
        }
    }

    /// Memory for those of these chunks that are not resident.
    ///
    /// # Errors
    /// The reason for the metrics.
    pub(super) fn stage(
        &self,
        operation: &'static str,
        groups: Vec<GroupChunks>,
        further_pieces: u32,
    ) -> Result<StagedStore, &'static str> {
        let instance = &self.instance;
        if let Some(unserved) = instance.unserved {
            return Err(unserved.name());
        }
        let plan = self.plan(groups, further_pieces);
        let staged = plan.stage(self.transfers, instance, &self.range);
        staged.map_err(|error| {
            if is_trouble(&error) {
                let (request, instance) = (self.key.request_id, instance.id.0);
                tracing::warn!(request, instance, %error, "{operation} failed");
            }
            reason(&error, Direction::Store)
        })
    }

    /// Begins a transfer. If one is in flight, or the instance has just left on another connection, it is refused: no
    /// COMMIT would release its grant.
    pub(super) fn grant(&self, id: &TransferId, grant: Grant) -> Result<(), &'static str> {
        let (context, prepared) = (&self.transfers.context, &self.transfers.prepared);
        if !prepared.begin(id.clone(), grant, context.now()) {
            return Err("under_way");
        }
        let known = context.instances.get(self.instance.id);
        if known.is_none_or(|known| !Arc::ptr_eq(&known, &self.instance)) {
            // Its worker has not received the memory yet.
            drop(prepared.finish(id));
            return Err("unknown_instance");
        }
        Ok(())
    }

    /// Counts and logs a store that was committed.
    pub(super) fn stored(&self, moved: TransferVolume) {
        let tokens = moved.chunks * self.range.chunk_size.get();
        self.transfers.context.metrics.store(DEVICE, true);
        tracing::debug!(request = self.key.request_id, tokens, "committed a store");
    }

    /// Charges what a retrieve leases to the staging budget; `None` if it may not.
    pub(super) fn charge(&self, leases: &[GroupLease]) -> Option<Charge> {
        let cache = &self.transfers.context.l1.cache;
        let extents = leases.iter().flat_map(|group| group.lease.extents());
        let bytes = cache.footprint(extents.map(|extent| extent.len));
        let worker = WorkerShare::of(&self.instance, self.range.worker);
        let staging = &self.transfers.staging;
        staging.lease(&worker, bytes, || cache.stats().leased_bytes)
    }

    /// Records its end: what it has moved, or why it failed.
    pub(super) fn trace(
        &self,
        direction: Direction,
        started: Duration,
        moved: Result<TransferVolume, &'static str>,
    ) {
        let (context, request_id) = (&self.transfers.context, self.key.request_id);
        let (range, instance) = (&self.range, &self.instance);
        trace(
            context, direction, request_id, range, instance, started, moved,
        );
    }
}
