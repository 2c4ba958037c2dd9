//! Store and retrieve where we copy between a worker's pages and the arena.

use std::ops::Range;

use kvtier_core::ChunkHash;
use kvtier_core::cache::{Reservation, ReserveRequest, Staged};
use kvtier_core::hashing::store_chunks;
use kvtier_core::object_key::KeyScope;
use kvtier_core::prompt::Prompt;
use kvtier_core::window::needed;
use kvtier_device::{BlockTable, ChunkRequest, Direction, EngineMemory};
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::{Retrieve, Store};
use kvtier_proto::response::Response;

use super::deadline::Deadline;
use super::instances::{Instance, Mode};
use super::lookup::{check_names, space};
use super::memory::{L1Allocator, to_memory};
use super::{Answer, Engine};

const DEVICE: &str = "cpu";

/// What a worker's key names: whose objects, and which chunks.
pub(super) struct WorkerRange {
    pub scope: KeyScope,
    pub kv_rank: u64,
    pub worker: u32,
    pub chunks: Range<usize>,
}

impl Engine {
    /// Checks the key of a registered worker's transfer.
    pub(super) fn worker_range(
        &self,
        instance: &Instance,
        key: &CacheKey<'_, Prompt>,
    ) -> Result<WorkerRange, String> {
        let range = self.key_range(key)?;
        if let Some(other) = self.instances.learn(instance, range.worker) {
            tracing::warn!(
                instance = instance.id.0,
                other = other.id.0,
                model = %instance.model_name,
                worker = range.worker,
                "two workers of this number have different KV layouts; they do not share a cache, and lookups see that of \
                 the newer one"
            );
        }
        Ok(range)
    }

    /// What the key of a worker's transfer names.
    fn key_range(&self, key: &CacheKey<'_, Prompt>) -> Result<WorkerRange, String> {
        check_names(key)?;
        let worker = key
            .worker_id
            .ok_or("worker_id is nil; allowed: the number of a worker")?;
        let scope = self.scope(key).map_err(|error| error.to_string())?;
        let chunks = store_chunks(self.chunk_size, key.tokens.token_count, key.start, key.end)
            .map_err(|error| error.to_string())?;
        let kv_rank = kvtier_core::kv_rank(key.world_size, worker);
        Ok(WorkerRange {
            scope,
            kv_rank,
            worker,
            chunks,
        })
    }

    pub(super) fn store(&self, store: &Store<'_, Prompt>) -> Answer {
        let Some(instance) = self.instances.get(store.instance) else {
            return Answer::from(Response::transfer(&[][..], false)).because("unknown_instance");
        };
        let started = self.now();
        instance.seen(started);
        self.metrics.store(DEVICE, false);
        let verdict = self.try_store(&instance, store);
        self.metrics.store(DEVICE, true);
        let answer = Answer::from(Response::transfer(store.event_handle, verdict.is_ok()));
        match verdict {
            Ok(tokens) => {
                let seconds = (self.now() - started).as_secs_f64();
                tracing::info!(
                    request = store.key.request_id,
                    "Stored {tokens} tokens in {seconds:.6} seconds"
                );
                answer
            }
            Err(error) => {
                tracing::warn!(request = store.key.request_id, instance = store.instance.0, %error, "store failed");
                answer.because("store_failed")
            }
        }
    }

    /// Copies the chunks that are not here yet, and gives the number of their tokens.
    fn try_store(&self, instance: &Instance, store: &Store<'_, Prompt>) -> Result<usize, String> {
        let (memory, range) = self.pages_and_range(instance, &store.key)?;
        let layout = memory.layout();
        let blocks = BlockTable::check(layout, &store.block_ids, range.chunks.len())
            .map_err(|error| error.to_string())?;
        // Which chunks of the range each object group has data for, and their hashes.
        let present: Vec<(Vec<usize>, Vec<ChunkHash>)> = instance
            .layout
            .groups
            .iter()
            .map(|group| {
                let has_data = |chunk: &usize| {
                    blocks.has_data(layout, group.id as usize, *chunk, self.config.null_block_id)
                };
                let chunks: Vec<_> = (0..range.chunks.len()).filter(has_data).collect();
                let hashes = chunks
                    .iter()
                    .map(|chunk| store.key.tokens.hashes[range.chunks.start + chunk])
                    .collect();
                (chunks, hashes)
            })
            .collect();
        let requests: Vec<_> = instance
            .layout
            .groups
            .iter()
            .zip(&present)
            .map(|(group, (_, hashes))| ReserveRequest {
                space: space(
                    &range.scope,
                    range.kv_rank,
                    group.id,
                    instance.layout.fingerprint,
                ),
                hashes,
                len: group.object_bytes,
            })
            .collect();
        let reserved = self
            .l1
            .cache
            .reserve(self.now(), &requests)
            .map_err(|error| error.to_string())?;
        let key = &store.key;
        self.metrics.reserved(
            "l1_store",
            key.model_name,
            range.scope.cache_salt(),
            &reserved.outcomes,
        );
        for staged in reserved.reservation.staged() {
            let request = ChunkRequest {
                object_group: staged.request as usize,
                chunk: present[staged.request as usize].0[staged.position as usize],
                skip_tokens: 0,
            };
            // A failed copy drops the reservation: nothing half-written becomes readable.
            memory
                .copy(
                    &blocks,
                    request,
                    &self.l1.arena,
                    to_memory(staged.extent),
                    Direction::Store,
                )
                .map_err(|error| error.to_string())?;
        }
        // A chunk counts once, however many groups it has.
        let mut stored = vec![false; range.chunks.len()];
        for staged in reserved.reservation.staged() {
            let (chunks, _) = &present[staged.request as usize];
            stored[chunks[staged.position as usize]] = true;
        }
        // What was copied after the deadline may be the KV of other tokens.
        Deadline::of(&store.key).check()?;
        let staged = self.to_write_behind(&reserved.reservation);
        let committed = reserved.reservation.commit(self.now());
        self.metrics
            .admitted(range.scope.cache_salt(), committed.inserted as u64);
        self.write_behind(&range.scope, &requests, &staged);
        Ok(stored.into_iter().filter(|stored| *stored).count() * self.chunk_size.get())
    }

    /// The objects of a reservation that the tiers will want; none without a tier.
    pub(super) fn to_write_behind(&self, reservation: &Reservation<L1Allocator>) -> Vec<Staged> {
        match self.l2() {
            Some(_) => reservation.staged().to_vec(),
            None => Vec::new(),
        }
    }

    /// What was committed of these requests is stored in the tiers too.
    pub(super) fn write_behind(
        &self,
        scope: &KeyScope,
        requests: &[ReserveRequest<'_>],
        committed: &[Staged],
    ) {
        let Some(l2) = self.l2() else { return };
        for (request, number) in requests.iter().zip(0..) {
            let of_request = committed.iter().filter(|staged| staged.request == number);
            let hashes: Vec<_> = of_request
                .map(|staged| request.hashes[staged.position as usize])
                .collect();
            l2.store(scope, &request.space, &hashes, request.len);
        }
    }

    /// The pages of a worker that lets us copy, and what its key names.
    fn pages_and_range<'i>(
        &self,
        instance: &'i Instance,
        key: &CacheKey<'_, Prompt>,
    ) -> Result<(&'i dyn EngineMemory, WorkerRange), String> {
        let Mode::LmcacheDriven { memory, .. } = &instance.mode else {
            return Err("the instance is registered for engine-driven transfers; allowed: prepare and commit".into());
        };
        Deadline::of(key).check()?;
        Ok((memory.as_ref(), self.worker_range(instance, key)?))
    }

    pub(super) fn retrieve(&self, retrieve: &Retrieve<'_, Prompt>) -> Answer {
        let key = &retrieve.key;
        let Some(instance) = self.instances.get(retrieve.instance) else {
            // This worker will not read its share; holding it would only block eviction.
            if let Ok(range) = self.key_range(key) {
                self.settle(key, &range);
            }
            return Answer::from(Response::transfer(&[][..], false)).because("unknown_instance");
        };
        let started = self.now();
        instance.seen(started);
        self.metrics.retrieve(DEVICE, false);
        let verdict = self.try_retrieve(&instance, retrieve);
        self.metrics.retrieve(DEVICE, true);
        let answer = Answer::from(Response::transfer(retrieve.event_handle, verdict.is_ok()));
        match verdict {
            Ok(tokens) => {
                let seconds = (self.now() - started).as_secs_f64();
                tracing::info!(
                    request = key.request_id,
                    "Retrieved {tokens} tokens in {seconds:.6} seconds"
                );
                answer
            }
            Err(RetrieveError::NotHeld) => answer.because("not_held"),
            Err(RetrieveError::Failed(error)) => {
                tracing::warn!(
                    request = key.request_id,
                    instance = retrieve.instance.0,
                    error,
                    "retrieve failed"
                );
                answer.because("retrieve_failed")
            }
        }
    }

    fn try_retrieve(
        &self,
        instance: &Instance,
        retrieve: &Retrieve<'_, Prompt>,
    ) -> Result<usize, RetrieveError> {
        let key = &retrieve.key;
        let (memory, range) = self.pages_and_range(instance, key)?;
        let blocks = BlockTable::check(memory.layout(), &retrieve.block_ids, range.chunks.len())
            .map_err(|error| error.to_string())?;
        let skip = u64::try_from(retrieve.skip_first_n_tokens).map_err(|_| {
            format!(
                "skip_first_n_tokens is {}; allowed: at least 0",
                retrieve.skip_first_n_tokens
            )
        })?;
        if range.chunks.is_empty() {
            return Ok(0);
        }
        let held = self.hold(instance, key, &range).ok_or_else(|| {
            self.metrics
                .not_found("l1_retrieve", key.model_name, range.chunks.len() as u64);
            RetrieveError::NotHeld
        })?;
        let chunks = held.iter().flat_map(|held| {
            let extents = held.lease.extents().iter().zip(held.chunks.clone());
            extents.map(|(extent, chunk)| (held.object_group, *extent, chunk))
        });
        let copied = Deadline::of(key).each(chunks, |(object_group, extent, chunk)| {
            let request = ChunkRequest {
                object_group: object_group as usize,
                chunk: chunk - range.chunks.start,
                skip_tokens: skip,
            };
            memory
                .copy(
                    &blocks,
                    request,
                    &self.l1.arena,
                    to_memory(extent),
                    Direction::Retrieve,
                )
                .map(drop)
                .map_err(|error| error.to_string())
        });
        self.settle(key, &range);
        copied?;
        self.metrics.loaded(
            key.model_name,
            range.scope.cache_salt(),
            range.worker,
            range.chunks.len() as u64,
        );
        Ok(range.chunks.len() * self.chunk_size.get())
    }

    /// The worker of a range is done with what its request's lookup holds of it.
    pub(super) fn settle(&self, key: &CacheKey<'_, Prompt>, range: &WorkerRange) {
        self.lookups.settle(
            key.request_id,
            &range.scope,
            range.kv_rank,
            &key.tokens.hashes,
            range.chunks.clone(),
        );
    }

    /// Leases of its own for a transfer, one an object group: all that the range needs, or nothing.
    ///
    /// The lookup of the request must have found the range for a worker of this layout.
    pub(super) fn hold(
        &self,
        instance: &Instance,
        key: &CacheKey<'_, Prompt>,
        range: &WorkerRange,
    ) -> Option<Vec<Held>> {
        let hashes = &key.tokens.hashes;
        let grant = self.lookups.grant(
            key.request_id,
            &range.scope,
            range.kv_rank,
            hashes,
            range.chunks.clone(),
        )?;
        if grant.layout != instance.layout.fingerprint {
            return None;
        }
        let groups = grant.object_groups.iter().map(|id| {
            let window = instance
                .layout
                .groups
                .iter()
                .find(|group| group.id == *id)?
                .window;
            let chunks = needed(window, range.chunks.end);
            let chunks = chunks.start.max(range.chunks.start)..range.chunks.end;
            let space = space(&range.scope, range.kv_rank, *id, grant.layout);
            let lease = self
                .l1
                .cache
                .pin(self.now(), &space, &hashes[chunks.clone()])?;
            Some(Held {
                object_group: *id,
                chunks,
                lease,
            })
        });
        groups.collect()
    }
}

/// A lease on the chunks of one object group that a transfer needs.
pub(super) struct Held {
    pub object_group: u32,
    /// Counted from the prompt's start.
    pub chunks: Range<usize>,
    pub lease: kvtier_core::cache::ReadLease<super::memory::L1Allocator>,
}

enum RetrieveError {
    /// No lookup found these chunks for this request, or they are gone.
    NotHeld,
    Failed(String),
}

impl From<String> for RetrieveError {
    fn from(error: String) -> Self {
        RetrieveError::Failed(error)
    }
}
