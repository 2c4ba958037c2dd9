//! Stores: memory is staged for their objects, and committed when it is written; then write-behind to the tiers.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_core::cache::{
    ChunkTokens, Committed, KeyOutcome, Reservation, ReserveOptions, ReserveRequest,
    ReservedPrompt, StagedObject,
};
use kvtier_core::{ChunkHash, GroupRow, Namespace};
use kvtier_device::{ChunkCopy, ChunkRequest, Transfer};
use kvtier_store::l1::L1Allocator;
use kvtier_store::tiers::StoredPrompt;

use super::super::blend::Blend;
use super::super::context::Context;
use super::super::instances::{GroupLayout, Instance, ModelLayout};
use super::Transfers;
use super::staging::{Charge, WorkerShare};
use super::traced::TransferVolume;
use super::worker_range::WorkerRange;

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

/// Objects that a store writes, as far as they are not resident.
#[derive(Clone)]
pub(super) struct StorePlan {
    /// Hashes of the chunks of the prompt, up to the last that the store names.
    pub prompt: Arc<[ChunkHash]>,
    /// Tokens of the range, if its chunks are to be announced.
    pub tokens: Option<Arc<ChunkTokens>>,
    pub groups: Vec<GroupChunks>,
    /// Part of L1 that is preferred.
    pub near: Option<u32>,
    /// Most pieces that may follow the next one.
    pub further_pieces: u32,
}

/// A store whose bytes are being written. Dropped without a commit, its objects never become readable.
pub(super) struct StagedStore {
    pub plan: StorePlan,
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
    pub transfer: Transfer,
    /// All that the store has.
    pub plan: StorePlan,
    /// What the pieces so far have moved.
    pub moved: TransferVolume,
}

impl StorePlan {
    /// Reserves memory for those of these objects that are not resident, in the order of the prompt, as far as the staging
    /// budget allows. What it refuses is counted as refused unless it may be staged as one of its further pieces.
    ///
    /// # Errors
    /// The budget allows none of those that are missing.
    pub(super) fn stage(
        self,
        transfers: &Transfers,
        instance: &Instance,
        range: &WorkerRange,
    ) -> Result<StagedStore> {
        let requests: Vec<_> = self.groups.iter().map(GroupChunks::request).collect();
        let context = &*transfers.context;
        let worker = WorkerShare::of(instance, range.worker);
        let salt = range.scope.cache_salt();
        let cache = &context.l1.cache;
        let object_bytes = cache.footprint(requests.iter().map(|request| request.len));
        // What the other workers have of the prompt is worth as much as what this one stores.
        let rows = range.rows(context);
        let reserved_prompt = ReservedPrompt {
            rows: &rows,
            hashes: &self.prompt,
            prefix: 0,
        };
        let reserve = |max_bytes| {
            let options = ReserveOptions {
                near: self.near,
                max_staged_bytes: Some(max_bytes),
                has_further_pieces: self.further_pieces > 0,
                prompt: Some(reserved_prompt),
            };
            let reserved = cache.reserve_with(context.now(), &requests, &options);
            let reserved = reserved.map_err(Error::refused)?;
            let bytes = reserved.bytes;
            Ok::<_, Error>((reserved, bytes))
        };
        let (mut reserved, charge) =
            transfers
                .staging
                .stage(&worker, salt, object_bytes, reserve)?;
        let is_over = reserved.outcomes.contains(&KeyOutcome::OverStaging);
        let is_empty = reserved.reservation.is_empty();
        let has_remainder = is_over && !is_empty && self.further_pieces > 0;
        if has_remainder {
            reserved
                .outcomes
                .retain(|it| *it != KeyOutcome::OverStaging);
        }
        context.metrics.reserved(
            "l1_store",
            range.scope.model_name(),
            salt,
            &reserved.outcomes,
        );
        if is_over && !has_remainder {
            transfers.staging.warn(&worker, object_bytes);
            if is_empty {
                let message = "staged and not committed bytes are at the limit";
                return Err(Error::new(ErrorKind::StagingFull, message));
            }
        }
        drop(requests);
        Ok(StagedStore {
            plan: self,
            reservation: reserved.reservation,
            charge,
            has_remainder,
        })
    }
}

impl StorePlan {
    /// Announces the chunks of its range that are hits by now, stored by it or by others.
    pub(super) fn announce(&self, context: &Context, range: &WorkerRange) {
        if let Some(tokens) = &self.tokens {
            let hashes = &self.prompt[range.chunks.clone()];
            let rows = range.rows(context);
            context.l1.cache.announce(&rows, hashes, tokens);
            if let (Some(blend), 0) = (&context.blend, range.worker) {
                self.register(context, blend, range, &rows, &tokens.tokens);
            }
        }
    }
}

impl StorePlan {
    /// Registers those chunks of its range as segments that the cache has.
    fn register(
        &self,
        context: &Context,
        blend: &Blend,
        range: &WorkerRange,
        rows: &[GroupRow],
        tokens: &[u32],
    ) {
        let size = range.chunk_size.get();
        let scope = Blend::scope(rows, &range.scope, range.chunk_size);
        let hashes = &self.prompt[range.chunks.clone()];
        let Some(first) = rows
            .iter()
            .find(|row| row.namespace.kv_rank() == range.kv_rank)
        else {
            return;
        };
        let resident = context.l1.cache.contains(&first.namespace, hashes);
        let mut end = 0;
        for run in resident.chunk_by(|one, next| one == next) {
            let start = end;
            end += run.len();
            if run[0] {
                let (hashes, tokens) = (&hashes[start..end], &tokens[start * size..end * size]);
                let (segments, first) = (&blend.segments, range.chunks.start + start);
                segments.register(&scope, size, first, hashes, tokens);
            }
        }
    }
}

impl StagedStore {
    /// Copies from the engine's pages into the staged extents.
    pub(super) fn copies(&self) -> Vec<ChunkCopy> {
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
        self.plan.groups[staged.request as usize].chunks[staged.position as usize]
    }

    /// Whether its groups have every staged object.
    pub(super) fn is_of_its_groups(&self) -> bool {
        self.reservation.staged().iter().all(|staged| {
            let group = self.plan.groups.get(staged.request as usize);
            group.is_some_and(|group| group.chunks.len() > staged.position as usize)
        })
    }

    /// Chunks with an object to write, each counted once, and the bytes of those objects.
    pub(super) fn moved(&self) -> TransferVolume {
        let staged = self.reservation.staged();
        let mut chunks: Vec<_> = staged.iter().map(|staged| self.chunk(staged)).collect();
        chunks.sort_unstable();
        chunks.dedup();
        TransferVolume {
            chunks: chunks.len(),
            bytes: staged.iter().map(|staged| staged.extent.len).sum(),
        }
    }

    /// Commits what is written of a store, from here on readable, here and in the tiers. What is resident of the prompt in
    /// front of it stays younger in the eviction order.
    pub(super) fn commit(
        self,
        context: &Context,
        range: &WorkerRange,
        is_written: impl Fn(&StagedObject) -> bool,
    ) -> Committed {
        let staged = self.reservation.staged().iter();
        let staged = staged.filter(|it| context.l2.is_some() && is_written(it));
        let staged: Vec<_> = staged.copied().collect();
        let requests: Vec<_> = self.plan.groups.iter().map(GroupChunks::request).collect();
        let first = self.reservation.staged().iter().map(|it| self.chunk(it));
        let first = range.chunks.start + first.min().unwrap_or(0);
        let reservation = match range.keep_seconds {
            Some(0) => self.reservation.evict_first(),
            _ => self.reservation,
        };
        let committed = reservation.commit_subset(context.now(), is_written);
        self.plan.announce(context, range);
        range.pin(context, &requests);
        if first > 0 {
            let namespaces = requests.iter().map(|request| request.namespace);
            let (cache, now) = (&context.l1.cache, context.now());
            cache.renew(now, namespaces, &self.plan.prompt);
        }
        admitted(
            context,
            range,
            committed.inserted,
            self.plan.prompt,
            &requests,
            &staged,
        );
        committed
    }
}

impl StoreRemainder {
    /// Stages the next piece of a store whose earlier pieces are committed; `None` if the budget has nothing for it.
    pub(super) fn next_piece(
        &mut self,
        transfers: &Transfers,
        instance: &Instance,
        range: &WorkerRange,
    ) -> Option<(Transfer, StagedStore)> {
        self.plan.further_pieces -= 1;
        let store = self.plan.clone().stage(transfers, instance, range);
        let store = store.ok().filter(|store| !store.reservation.is_empty())?;
        let transfer = Transfer {
            chunks: store.copies(),
            ..self.transfer.clone()
        };
        Some((transfer, store))
    }
}

/// Counts what a commit of these requests has inserted, and stores what was committed in the tiers too.
fn admitted(
    context: &Context,
    range: &WorkerRange,
    inserted: usize,
    prompt: Arc<[ChunkHash]>,
    requests: &[ReserveRequest<'_>],
    committed: &[StagedObject],
) {
    let Context { l2, metrics, .. } = context;
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
