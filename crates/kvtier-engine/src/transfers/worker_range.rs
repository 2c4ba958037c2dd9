//! The objects and chunks that a worker's key names, and the leases that a transfer of them takes.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvtier_common::error::{Error, Result};
use kvtier_core::cache::{ReadLease, ReserveRequest};
use kvtier_core::hashing::store_chunks;
use kvtier_core::object_key::KeyScope;
use kvtier_core::prompt::Prompt;
use kvtier_core::window::needed;
use kvtier_core::{ChunkHash, GroupRow};
use kvtier_observe::metrics::Metrics;
use kvtier_proto::keep_seconds;
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::InstanceId;

use super::super::context::Context;
use super::super::instances::{GroupLayout, Instance};
use super::super::lookups::Lookups;
use super::Transfers;
use kvtier_store::l1::L1Allocator;

/// The objects and chunks that a worker's key names.
pub struct WorkerRange {
    pub scope: KeyScope,
    pub kv_rank: u64,
    pub worker: u32,
    pub chunks: Range<usize>,
    /// Tokens per chunk.
    pub chunk_size: NonZeroUsize,
    /// How long what a store of it writes is to be kept; `None` as the eviction policy does.
    pub keep_seconds: Option<u32>,
}

/// A lease on the chunks of one object group that a transfer needs.
pub struct GroupLease {
    pub object_group: u32,
    /// Counted from the prompt's start.
    pub chunks: Range<usize>,
    pub lease: ReadLease<L1Allocator>,
}

impl WorkerRange {
    /// Hashes of its key's prompt, up to the last chunk of the range.
    pub(super) fn prompt(&self, key: &CacheKey<'_, Prompt>) -> Arc<[ChunkHash]> {
        key.tokens.hashes[..self.chunks.end].into()
    }

    /// The rows of a lookup of its prompt; none if its workers are unknown.
    pub(super) fn rows(&self, context: &Context) -> Arc<[GroupRow]> {
        context.rows(&self.scope, self.chunk_size)
    }

    /// Checks the key of a registered worker's transfer.
    pub(super) fn of_worker(
        context: &Context,
        instance: &Instance,
        key: &CacheKey<'_, Prompt>,
    ) -> Result<Self> {
        let range = Self::of_key(context, key)?;
        let registered = instance.layout.chunk_tokens;
        if range.chunk_size.get() as u64 != registered {
            return Err(Error::refused(format!(
                "the key is in chunks of {} tokens; allowed: {registered}, as the worker registered",
                range.chunk_size
            )));
        }
        if let Some(other) = context.instances.learn(instance, range.worker) {
            tracing::warn!(
                instance = instance.id.0,
                other = other.id.0,
                model = ?instance.model_name,
                worker = range.worker,
                "two workers of this number have different KV layouts (such as block sizes): they share no cache, and a \
                 lookup finds only what both have stored; give their engines different model names"
            );
        }
        let end = range.chunks.end;
        context.sessions.extend(key, &range.scope, end);
        Ok(range)
    }

    /// What the key of a worker's transfer names.
    fn of_key(context: &Context, key: &CacheKey<'_, Prompt>) -> Result<Self> {
        let worker = key
            .worker_id
            .ok_or_else(|| Error::refused("worker_id is nil; allowed: the number of a worker"))?;
        let scope = context.short_scope(key)?;
        let (chunk_size, tokens) = (key.tokens.chunk_size, key.tokens.token_count);
        let chunks =
            store_chunks(chunk_size, tokens, key.start, key.end).map_err(Error::refused)?;
        Ok(Self {
            scope,
            kv_rank: kvtier_core::kv_rank(key.world_size, worker),
            worker,
            chunks,
            chunk_size,
            keep_seconds: keep_seconds::decode(key.request_configs),
        })
    }

    /// Releases what a request's lookup holds of the range for its worker.
    pub(super) fn release(
        &self,
        lookups: &Lookups,
        instance: InstanceId,
        key: &CacheKey<'_, Prompt>,
    ) {
        // A find leases until its session ends.
        if key.tokens.is_object_keys {
            return;
        }
        lookups.held.release(
            instance,
            key.request_id,
            &self.scope,
            self.kv_rank,
            &key.tokens.hashes,
            self.chunks.clone(),
        );
    }

    /// Finishes a refused retrieve: its worker will not read what the lookup holds for it. An engine computes what it
    /// could not retrieve, and LMCache's server releases it too. A worker that asks again receives what is still there,
    /// since the lookup still permits it.
    pub(super) fn release_refused(
        transfers: &Transfers,
        instance: InstanceId,
        key: &CacheKey<'_, Prompt>,
    ) {
        if let Ok(range) = Self::of_key(&transfers.context, key) {
            range.release(&transfers.lookups, instance, key);
        }
    }

    /// Leases of its own for a transfer, one per object group: all that the range needs, or nothing.
    ///
    /// The lookup of the request must have found the range for a worker of this layout. Objects that are named by their keys need
    /// no lookup.
    pub(super) fn lease(
        &self,
        transfers: &Transfers,
        instance: &Instance,
        key: &CacheKey<'_, Prompt>,
    ) -> Option<Vec<GroupLease>> {
        if instance.unserved.is_some() {
            return None;
        }
        let hashes = &key.tokens.hashes;
        let layout = instance.layout.fingerprint;
        let namespaces = if key.tokens.is_object_keys {
            let groups = instance.layout.groups.iter();
            let namespace =
                |group: &GroupLayout| self.scope.namespace(self.kv_rank, group.id, layout);
            groups.map(namespace).collect()
        } else {
            transfers.lookups.held.grant(
                key.request_id,
                &self.scope,
                self.kv_rank,
                layout,
                hashes,
                self.chunks.clone(),
            )?
        };
        let groups = namespaces.iter().map(|namespace| {
            let id = namespace.object_group_id();
            let window = instance
                .layout
                .groups
                .iter()
                .find(|group| group.id == id)?
                .window;
            // An object that is named by its key is needed whatever the window.
            let window = window.filter(|_| !key.tokens.is_object_keys);
            let chunks = needed(window, self.chunks.end);
            let chunks = chunks.start.max(self.chunks.start)..self.chunks.end;
            let lease = transfers.context.l1.cache.lease(
                transfers.context.now(),
                namespace,
                &hashes[chunks.clone()],
            )?;
            Some(GroupLease {
                object_group: id,
                chunks,
                lease,
            })
        });
        groups.collect()
    }

    /// Pins the objects of these requests, if the client asked for it.
    pub(super) fn pin(&self, context: &Context, requests: &[ReserveRequest<'_>]) {
        if let Some(seconds @ 1..) = self.keep_seconds {
            let time = Duration::from_secs(seconds.into());
            context.l1.cache.pin(context.now(), requests, time);
        }
    }

    /// Counts its chunks as loaded; returns their number.
    pub(super) fn count_loaded(&self, metrics: &Metrics) -> usize {
        let (scope, chunks) = (&self.scope, self.chunks.len());
        metrics.loaded(
            scope.model_name(),
            scope.cache_salt(),
            self.worker,
            chunks as u64,
        );
        chunks
    }
}
