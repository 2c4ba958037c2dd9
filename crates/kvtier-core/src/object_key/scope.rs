//! From a request's key to the objects it means.

use super::{KeyError, ObjectKey, check_cache_salt, check_model_name, kv_rank};
use crate::hashing::ChunkHash;
use std::ops::Range;
use std::sync::Arc;

/// Most workers that share a model's KV.
///
/// A rank packs the worker into eight bits. Beyond that two workers can get the same rank, and one would read the
/// other's bytes; LMCache does not check it.
pub const MAX_WORLD_SIZE: u32 = 256;

/// Whose objects a request means: a model, a tenant, and one worker or all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyScope {
    model_name: Arc<str>,
    cache_salt: Arc<str>,
    world_size: u32,
    workers: Range<u32>,
}

impl KeyScope {
    /// The scope of a request's key. Without a worker (a scheduler's key) it spans all workers of the world.
    ///
    /// A worker at or above the world size is accepted, as LMCache does: it only names other objects.
    pub fn new(
        model_name: &str,
        cache_salt: &str,
        world_size: u32,
        worker_id: Option<u32>,
    ) -> Result<Self, KeyError> {
        check_model_name(model_name)?;
        check_cache_salt(cache_salt)?;
        if !(1..=MAX_WORLD_SIZE).contains(&world_size) {
            return Err(KeyError::WorldSize(world_size));
        }
        let workers = match worker_id {
            None => 0..world_size,
            Some(worker) if worker < MAX_WORLD_SIZE => worker..worker + 1,
            Some(worker) => return Err(KeyError::WorkerId(worker)),
        };
        let (model_name, cache_salt) = (model_name.into(), cache_salt.into());
        Ok(Self {
            model_name,
            cache_salt,
            world_size,
            workers,
        })
    }

    /// The model's name.
    pub fn model_name(&self) -> &Arc<str> {
        &self.model_name
    }

    /// The tenant; empty for none.
    pub fn cache_salt(&self) -> &Arc<str> {
        &self.cache_salt
    }

    /// Workers that share the model's KV.
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// The workers meant.
    pub fn workers(&self) -> Range<u32> {
        self.workers.clone()
    }

    /// The ranks meant, in worker order.
    pub fn kv_ranks(&self) -> impl ExactSizeIterator<Item = u64> + Clone + use<> {
        let world_size = self.world_size;
        self.workers
            .clone()
            .map(move |worker| kv_rank(world_size, worker))
    }

    /// The rows of a lookup, as (object group, rank): group after group, ranks within.
    pub fn rows(&self, object_groups: &[u32]) -> impl Iterator<Item = (u32, u64)> {
        object_groups
            .iter()
            .flat_map(|&group| self.kv_ranks().map(move |rank| (group, rank)))
    }

    /// The keys of one object group: chunk after chunk, ranks within.
    pub fn object_keys(
        &self,
        object_group_id: u32,
        hashes: &[ChunkHash],
    ) -> impl Iterator<Item = ObjectKey> {
        hashes.iter().flat_map(move |&hash| {
            self.kv_ranks()
                .map(move |rank| self.object_key(hash, rank, object_group_id))
        })
    }

    /// The key of one object. Shares this scope's strings.
    pub fn object_key(
        &self,
        chunk_hash: ChunkHash,
        kv_rank: u64,
        object_group_id: u32,
    ) -> ObjectKey {
        ObjectKey {
            chunk_hash,
            model_name: Arc::clone(&self.model_name),
            kv_rank,
            object_group_id,
            cache_salt: Arc::clone(&self.cache_salt),
        }
    }
}
