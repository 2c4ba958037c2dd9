//! The full identity of a stored object, and how it is derived from a request's key.

use crate::hashing::ChunkHash;
use std::sync::Arc;

/// Packs world size and worker number as LMCache 0.5.6 does with `local` equal to `global`:
/// `(world_size << 24) | (worker << 16) | (world_size << 8) | worker`.
///
/// Nothing is masked: from 256 workers on, the numbers run into each other, exactly as they do in LMCache.
pub fn kv_rank(world_size: u32, worker: u32) -> u64 {
    kv_rank_parts(world_size, worker, world_size, worker)
}

/// [`kv_rank`] with the local numbers given apart.
pub fn kv_rank_parts(
    world_size: u32,
    global_rank: u32,
    local_world_size: u32,
    local_rank: u32,
) -> u64 {
    u64::from(world_size) << 24
        | u64::from(global_rank) << 16
        | u64::from(local_world_size) << 8
        | u64::from(local_rank)
}

/// What one stored object is: one chunk, of one model, on one rank, for one object group and one tenant.
///
/// All fields take part in equality.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    chunk_hash: ChunkHash,
    model_name: Arc<str>,
    kv_rank: u64,
    object_group_id: u32,
    cache_salt: Arc<str>,
}

impl ObjectKey {
    /// The chunk's hash.
    pub fn chunk_hash(&self) -> ChunkHash {
        self.chunk_hash
    }

    /// The model's name as the engine gave it.
    pub fn model_name(&self) -> &Arc<str> {
        &self.model_name
    }

    /// World size and rank, packed; see [`kv_rank`].
    pub fn kv_rank(&self) -> u64 {
        self.kv_rank
    }

    /// The object group, 0 unless groups are stored apart.
    pub fn object_group_id(&self) -> u32 {
        self.object_group_id
    }

    /// The tenant; empty for none.
    pub fn cache_salt(&self) -> &Arc<str> {
        &self.cache_salt
    }
}
