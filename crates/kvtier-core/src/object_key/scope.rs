//! The scope of a request's key.

use super::{KeyError, Namespace, check_cache_salt, check_model_name, kv_rank};
use std::ops::Range;
use std::sync::Arc;

/// Most workers that share a model's KV.
///
/// A rank packs the worker into eight bits. Beyond that two workers can get the same rank, and one would read the bytes
/// of the other; LMCache does not check it.
pub const MAX_WORLD_SIZE: u32 = 256;

/// Scope of a request: a model, a tenant, and one worker or all of them.
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

    /// The workers in scope.
    pub fn workers(&self) -> Range<u32> {
        self.workers.clone()
    }

    /// Returns the scope with all workers of the world.
    pub fn of_all_workers(&self) -> Self {
        Self {
            workers: 0..self.world_size,
            ..self.clone()
        }
    }

    /// Ranks of the workers in scope, in worker order.
    pub fn kv_ranks(&self) -> impl ExactSizeIterator<Item = u64> + Clone + use<> {
        let world_size = self.world_size;
        self.workers
            .clone()
            .map(move |worker| kv_rank(world_size, worker))
    }

    /// The namespace of one rank, object group and layout. Shares this scope's strings.
    pub fn namespace(&self, kv_rank: u64, object_group_id: u32, layout: u64) -> Arc<Namespace> {
        Arc::new(Namespace::of_checked(
            &self.model_name,
            kv_rank,
            object_group_id,
            layout,
            &self.cache_salt,
        ))
    }
}
