//! A store: the server copies from a worker's pages into the arena; then write-behind to the tiers.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_core::cache::{Committed, Reservation, ReserveRequest, StagedObject};
use kvtier_core::{ChunkHash, Namespace};
use kvtier_device::{BlockTable, ChunkCopy, ChunkRequest, Transfer};
use kvtier_store::l1::L1Allocator;
use kvtier_store::tiers::StoredPrompt;

use super::super::context::Context;
use super::super::instances::{CopyGuard, GroupLayout, Instance, ModelLayout};
use super::staging::Charge;
use super::traced::Moved;
use super::worker_range::WorkerRange;
use super::{CopyRequest, InFlight, TransferWork, Transfers};

/// The chunks of a range that one object group has data for.
#[derive(Clone)]
pub(super) struct GroupChunks {
    namespace: Arc<Namespace>,
    object_bytes: u64,
    /// Positions in the range.
    chunks: Vec<usize>,
    /// Hashes of `chunks`, in the same order.
    hashes: Vec<ChunkHash>,
}

impl GroupChunks {
    /// Objects of `chunks`, positions in the range, whose hashes are `hashes`.
    pub(super) fn new(
        range: &WorkerRange,
        model: &ModelLayout,
        group: &GroupLayout,
        hashes: &[ChunkHash],
        chunks: Vec<usize>,
    ) -> Self {
        Self {
            namespace: range
                .scope
                .namespace(range.kv_rank, group.id, model.fingerprint),
            object_bytes: group.object_bytes,
            hashes: chunks.iter().map(|chunk| hashes[*chunk]).collect(),
            chunks,
        }
    }

    pub(super) fn request(&self) -> ReserveRequest<'_> {
        ReserveRequest {
            namespace: &self.namespace,
            hashes: &self.hashes,
            len: self.object_bytes,
        }
    }
}

/// A store whose bytes are being written. Dropped without a commit, its objects never become readable.
pub(super) struct StagedStore {
    /// Hashes of the chunks of the prompt, up to the last that the store names.
    pub prompt: Arc<[ChunkHash]>,
    pub groups: Vec<GroupChunks>,
    pub reservation: Reservation<L1Allocator>,
    pub charge: Charge,
    /// Whether the budget has refused chunks that another piece may store.
    pub has_remainder: bool,
}

/// Most pieces of a store after the first. A worker alone may stage 7/32 of L1, so five fill it.
pub(super) const MAX_FURTHER_PIECES: u32 = 7;

/// Part of a store that further pieces may store.
pub(super) struct StoreRemainder {
    /// Transfer without chunks.
    transfer: Transfer,
    prompt: Arc<[ChunkHash]>,
    /// All that the store has.
    groups: Vec<GroupChunks>,
    near: Option<u32>,
    /// What the pieces so far have moved.
    pub moved: Moved,
    further_pieces: u32,
}

impl StagedStore {
    /// Copies from the engine's pages into the staged extents.
    fn copies(&self) -> Vec<ChunkCopy> {
        let copies = self.reservation.staged().iter().map(|staged| ChunkCopy {
            request: ChunkRequest {
                object_group: staged.request as usize,
                chunk: self.chunk(staged),
                skip_tokens: 0,
            },
            extent: staged.extent,
        });
        copies.collect()
    }

    /// Position in the range of a staged object's chunk.
    pub(super) fn chunk(&self, staged: &StagedObject) -> usize {
        self.groups[staged.request as usize].chunks[staged.position as usize]
    }

    /// Whether its groups have every staged object.
    pub(super) fn is_of_its_groups(&self) -> bool {
        self.reservation.staged().iter().all(|staged| {
            let group = self.groups.get(staged.request as usize);
            group.is_some_and(|group| group.chunks.len() > staged.position as usize)
        })
    }

    /// Chunks with an object to write, each counted once, and the bytes of those objects.
    pub(super) fn moved(&self) -> Moved {
        let staged = self.reservation.staged();
        let mut chunks: Vec<_> = staged.iter().map(|staged| self.chunk(staged)).collect();
        chunks.sort_unstable();
        chunks.dedup();
        Moved {
            chunks: chunks.len(),
            bytes: staged.iter().map(|staged| staged.extent.len).sum(),
        }
    }
}

impl Transfers {
    /// Reserves memory for the chunks that are not resident, and plans the copies into it.
    pub(super) fn plan_store(
        &self,
        request: &CopyRequest<'_>,
        instance: &Arc<Instance>,
    ) -> Result<(Transfer, InFlight)> {
        let (mut transfer, range, guard) = self.begin(request, instance)?;
        let connection = request.caller.connection;
        if self.refused_retrieves.is_refusing(connection) {
            let message = "the client drops its stores until it is healthy again";
            return Err(Error::new(ErrorKind::NotHeld, message));
        }
        let prompt = range.prompt(request.key);
        let hashes = &prompt[range.chunks.clone()];
        let groups = self.group_chunks(&guard, &range, hashes, &transfer.blocks);
        let near = self.context.l1.part_near(guard.pages().numa_node());
        let store = self.stage(instance, &range, prompt, groups, near, MAX_FURTHER_PIECES)?;
        let remainder = store.has_remainder.then(|| StoreRemainder {
            transfer: transfer.clone(),
            prompt: Arc::clone(&store.prompt),
            groups: store.groups.clone(),
            near,
            moved: Moved::default(),
            further_pieces: MAX_FURTHER_PIECES,
        });
        transfer.chunks = store.copies();
        let work = TransferWork::Store(store, remainder.map(Box::new));
        let in_flight = request.in_flight(work, range, guard);
        Ok((transfer, in_flight))
    }

    /// Stages the next piece of a store whose earlier pieces are committed; `None` if the budget has nothing for it.
    pub(super) fn next_piece(
        &self,
        instance: &Instance,
        range: &WorkerRange,
        remainder: &mut StoreRemainder,
    ) -> Option<(Transfer, StagedStore)> {
        remainder.further_pieces -= 1;
        let (prompt, groups) = (Arc::clone(&remainder.prompt), remainder.groups.clone());
        let store = self.stage(
            instance,
            range,
            prompt,
            groups,
            remainder.near,
            remainder.further_pieces,
        );
        let store = store.ok().filter(|store| !store.reservation.is_empty())?;
        let transfer = Transfer {
            chunks: store.copies(),
            ..remainder.transfer.clone()
        };
        Some((transfer, store))
    }

    /// The chunks of the range that each object group has data for, and their hashes.
    fn group_chunks(
        &self,
        guard: &CopyGuard,
        range: &WorkerRange,
        hashes: &[ChunkHash],
        blocks: &BlockTable,
    ) -> Vec<GroupChunks> {
        let null_block_id = self.context.config().null_block_id;
        let (layout, model) = (guard.pages().layout(), &guard.instance().layout);
        let groups = model.groups.iter().map(|group| {
            let has_data =
                |chunk: &usize| blocks.has_data(layout, group.id as usize, *chunk, null_block_id);
            let chunks = (0..hashes.len()).filter(has_data).collect();
            GroupChunks::new(range, model, group, hashes, chunks)
        });
        groups.collect()
    }

    /// Commits what is written of a store, from here on readable, here and in the tiers. What is resident of the prompt in
    /// front of it stays younger in the eviction order.
    pub(super) fn commit_staged(
        &self,
        range: &WorkerRange,
        store: StagedStore,
        is_written: impl Fn(&StagedObject) -> bool,
    ) -> Committed {
        let mut staged = self.to_write_behind(&store.reservation);
        staged.retain(&is_written);
        let requests: Vec<_> = store.groups.iter().map(GroupChunks::request).collect();
        let first = store.reservation.staged().iter().map(|it| store.chunk(it));
        let first = range.chunks.start + first.min().unwrap_or(0);
        let committed = self.commit(range, store.reservation, &requests, is_written);
        if first > 0 {
            let namespaces = requests.iter().map(|request| request.namespace);
            let (cache, now) = (&self.context.l1.cache, self.context.now());
            cache.renew(now, namespaces, &store.prompt);
        }
        self.admitted(range, committed.inserted, store.prompt, &requests, &staged);
        committed
    }

    /// Commits what is written of a reservation for these requests; its objects are kept as its client asked.
    fn commit(
        &self,
        range: &WorkerRange,
        reservation: Reservation<L1Allocator>,
        requests: &[ReserveRequest<'_>],
        is_written: impl Fn(&StagedObject) -> bool,
    ) -> Committed {
        let reservation = match range.keep_seconds {
            Some(0) => reservation.evict_first(),
            _ => reservation,
        };
        let committed = reservation.commit_subset(self.context.now(), is_written);
        self.pin(range, requests);
        committed
    }

    /// Pins the objects of these requests, if the client asked for it.
    pub(super) fn pin(&self, range: &WorkerRange, requests: &[ReserveRequest<'_>]) {
        if let Some(seconds @ 1..) = range.keep_seconds {
            let time = Duration::from_secs(seconds.into());
            self.context
                .l1
                .cache
                .pin(self.context.now(), requests, time);
        }
    }

    /// The objects of a reservation that the tiers will want; none without a tier.
    fn to_write_behind(&self, reservation: &Reservation<L1Allocator>) -> Vec<StagedObject> {
        match &self.context.l2 {
            Some(_) => reservation.staged().to_vec(),
            None => Vec::new(),
        }
    }

    /// Counts what a commit of these requests has inserted, and stores what was committed in the tiers too.
    fn admitted(
        &self,
        range: &WorkerRange,
        inserted: usize,
        prompt: Arc<[ChunkHash]>,
        requests: &[ReserveRequest<'_>],
        committed: &[StagedObject],
    ) {
        let Context { l2, metrics, .. } = &*self.context;
        metrics.admitted(range.scope.cache_salt(), inserted as u64);
        let Some(l2) = l2 else { return };
        let namespaces = requests.iter().map(|request| request.namespace);
        let prompt = StoredPrompt::new(namespaces, prompt);
        for (request, number) in requests.iter().zip(0..) {
            let of_request = committed.iter().filter(|staged| staged.request == number);
            let hashes: Vec<_> = of_request
                .map(|staged| request.hashes[staged.position as usize])
                .collect();
            l2.store(&prompt, request.namespace, &hashes, request.len);
        }
    }
}
