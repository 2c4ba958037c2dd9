//! Finds: which of some objects are in L1 or the tiers, leased until the session of their request ends.

use std::sync::Arc;
use std::time::Duration;

use kvtier_core::cache::{Counted, Lookup};
use kvtier_core::object_key::KeyScope;
use kvtier_core::window::ChunkBitmap;
use kvtier_core::{ChunkHash, GroupRow};
use kvtier_proto::response::Response;
use kvtier_store::l1::L1Allocator;
use kvtier_store::tiers::{L2, PrefetchRequest, Prefetched};
use tokio::sync::watch;

use super::super::EngineAnswer;
use super::super::context::Context;
use super::held::{HeldLookup, HeldLookups, HeldSegments};

/// The objects that a request asks for by their keys.
pub(super) struct ObjectFind {
    pub context: Arc<Context>,
    pub held: Arc<HeldLookups>,
    pub connection: u64,
    pub request_id: Box<str>,
    pub scope: KeyScope,
    pub rows: Arc<[GroupRow]>,
    pub hashes: Arc<[ChunkHash]>,
    /// Tokens that each object stands for.
    pub chunk_size: usize,
}

impl ObjectFind {
    /// Leases what L1 has of the objects.
    pub(super) fn in_l1(&self, before: Option<Counted>) -> (ChunkBitmap, Lookup<L1Allocator>) {
        let cache = &self.context.l1.cache;
        let (found, lookup) = cache.find(self.context.now(), &self.rows, &self.hashes, before);
        if let (true, Some(l2)) = (lookup.may_be_unstored, &self.context.l2) {
            let leased = self.hashes.iter().enumerate();
            let leased = leased.filter(|(position, _)| found.get(*position));
            let leased: Vec<_> = leased.map(|(_, hash)| *hash).collect();
            l2.store_again(&lookup.lease, &leased);
        }
        (found, lookup)
    }

    /// Counts what L1 had.
    pub(super) fn count(&self, lookup: &Lookup<L1Allocator>) {
        let (model, salt) = (self.scope.model_name(), self.scope.cache_salt());
        let tokens = |objects: usize| (objects * self.chunk_size) as u64;
        let (asked, hit) = (tokens(self.hashes.len()), tokens(lookup.hit_chunks));
        let held = lookup.lease.held() as u64;
        self.context.metrics.lookup(model, salt, asked, hit, held);
    }

    /// Holds what was found for the request, until its session ends; returns the serial of the lookup. With `pending` the tiers are
    /// still to be asked.
    pub(super) fn hold(
        &self,
        lookup: Lookup<L1Allocator>,
        pending: Option<watch::Receiver<()>>,
    ) -> u64 {
        let held = HeldLookup {
            connection: self.connection,
            prompt: Arc::clone(&self.hashes),
            hit_chunks: lookup.hit_chunks,
            loaded: Vec::new(),
            lease: lookup.lease,
            readers: 1,
            until_end: false,
            at_end: None,
            segments: HeldSegments::Unknown,
            created: self.context.now(),
            scope: self.scope.clone(),
        };
        self.held.insert(&self.request_id, held, pending)
    }

    /// What the tiers are asked for.
    pub(super) fn prefetch_request(&self, counted: Counted) -> Arc<PrefetchRequest> {
        Arc::new(PrefetchRequest {
            scope: self.scope.clone(),
            rows: Arc::clone(&self.rows),
            hashes: Arc::clone(&self.hashes),
            is_object_keys: true,
            tokens: None,
            counted,
            span: None,
        })
    }

    /// Loads what L1 lacks from the tiers, for at most `timeout`, and finds again. What comes later is in L1 for the next request. If
    /// the session of the request has ended meanwhile, nothing is held.
    pub(super) async fn in_tiers(
        &self,
        l2: Arc<L2>,
        before: FoundBefore,
        timeout: Duration,
    ) -> EngineAnswer {
        let request = self.prefetch_request(before.counted);
        let fetch = l2.handle().spawn({
            let l2 = Arc::clone(&l2);
            async move { l2.fetch(&request).await }
        });
        let fetched = tokio::time::timeout(timeout, fetch).await;
        let (loaded, _holds) = fetched.map(Result::unwrap_or_default).unwrap_or_default();
        let (found, lookup) = self.in_l1(Some(before.counted));
        let more = lookup.hit_chunks.saturating_sub(before.hit_objects);
        let keys = lookup.lease.held().saturating_sub(before.held);
        let (model, salt) = (self.scope.model_name(), self.scope.cache_salt());
        let tokens = (more * self.chunk_size) as u64;
        let metrics = &self.context.metrics;
        metrics.prefetched(model, salt, tokens, keys as u64);
        let prefetched = Prefetched { lookup, loaded };
        self.held
            .complete(&self.request_id, before.serial, 0, prefetched);
        self.answer(&found)
    }

    /// Returns which objects were found: that is the result, for which there is no question.
    pub(super) fn answer(&self, found: &ChunkBitmap) -> EngineAnswer {
        let mut bits = vec![0; self.hashes.len().div_ceil(8)];
        for position in (0..self.hashes.len()).filter(|position| found.get(*position)) {
            bits[position / 8] |= 1 << (position % 8);
        }
        let _ = self.held.take_outcome(&self.request_id, self.connection);
        EngineAnswer::from(Response::Bits(bits.into()))
    }
}

/// What a find had from L1 before it asked the tiers.
pub(super) struct FoundBefore {
    pub serial: u64,
    pub counted: Counted,
    pub hit_objects: usize,
    pub held: usize,
}
