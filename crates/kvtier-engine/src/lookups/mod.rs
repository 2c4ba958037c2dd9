//! Lookups: the prefix of a prompt that is in L1 or the tiers, leased until its workers have read it.
//!
//! | state | guarded by |
//! | --- | --- |
//! | [`HeldLookups`]: lookups in flight and what they lease | its mutex; the cache's lock is taken inside it |
//! | [`ChunkSizes`] of reconnected clients; when schedulers last pinged; [`PromptMemory`]; [`RecentLookups`] | a mutex each; nothing is taken inside |
//!
//! A lookup is `pending` while the tiers are asked, `unread` until its result was asked for, and known until its session ends.

mod announced;
mod chunk_sizes;
mod find;
mod held;
mod recent;
mod segments;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvtier_common::error::{Error, Result};
use kvtier_common::sync::Mutex;
use kvtier_config::{PrefetchPolicy, hash_seed};
use kvtier_core::hashing::{ChunkHasher, lookup_chunks};
use kvtier_core::object_key::KeyScope;
use kvtier_core::prefetch::Cell;
use kvtier_core::prompt::{Prompt, PromptMemory};
use kvtier_core::{ChunkHash, GroupRow, Namespace};
use kvtier_observe::trace::{LookupResult, TraceParent, TracedSession};
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::{JobRef, MatchedSegment};
use kvtier_proto::response::{Response, UnifiedLookup};
use kvtier_proto::{keep_seconds, peer, skip_load, traceparent};
use kvtier_store::tiers::{L2, PrefetchRequest};
use tokio::sync::watch;

use super::blend::Blend;
use super::context::Context;
use super::instances::{Instance, Unserved, gcd, rows};
use super::sessions;
use super::{Caller, EngineAnswer, Reply};
use chunk_sizes::{ChunkSizes, LookupRange};
use find::{FoundBefore, ObjectFind};
pub use held::FoundSegments;
use held::{HeldLookup, HeldLookups, HeldSegments, LookupOutcome, SegmentsOutcome};
pub use recent::{RecentLookup, RecentLookups};
use segments::SegmentFind;

/// Most workers that may read one object; LMCache clamps there too.
const MAX_READERS: i64 = 128;

/// Bytes for remembered prompts. 16 MiB hold the token ids of about 4 million tokens, the prompts of some hundred
/// requests in flight.
const PROMPT_MEMORY_BYTES: usize = 16 << 20;

/// The service of lookups.
pub struct Lookups {
    context: Arc<Context>,
    /// Shared with the tasks that ask the tiers.
    pub held: Arc<HeldLookups>,
    pub prompts: PromptMemory,
    pub chunk_sizes: ChunkSizes,
    /// Shared with the tasks that ask the tiers.
    pub recent: Arc<RecentLookups>,
    /// When each scheduler's connection last pinged. Bounded by forgetting the dead ones.
    scheduler_pings: Mutex<HashMap<u64, Duration>>,
    /// Whether requests that wait for a tier are answered with what is known.
    waits_ended: watch::Sender<bool>,
}

impl Lookups {
    pub fn new(context: &Arc<Context>) -> Self {
        let seed = hash_seed();
        let hasher = ChunkHasher::new(context.config().hash_algorithm, context.chunk_size, &seed);
        Self {
            held: Arc::default(),
            prompts: PromptMemory::new(hasher, PROMPT_MEMORY_BYTES),
            chunk_sizes: ChunkSizes::new(context.chunk_size, context.state.as_ref().ok()),
            recent: Arc::default(),
            scheduler_pings: Mutex::default(),
            waits_ended: watch::Sender::new(false),
            context: Arc::clone(context),
        }
    }

    /// Looks a prompt up and leases what it finds. The answer does not contain the result, which is asked for.
    pub fn lookup(&self, caller: Caller, key: &CacheKey<'_, Prompt>, tp_size: i64) -> EngineAnswer {
        match self.try_lookup(caller, key, tp_size) {
            Ok(()) => EngineAnswer::nothing(),
            // No object can have such a key: the result is 0, whatever an earlier lookup of the request has found.
            Err(error) => {
                tracing::debug!(request = key.request_id, %error, "lookup refused");
                self.held.forget(key.request_id, caller.connection);
                EngineAnswer::nothing().because("bad_key")
            }
        }
    }

    fn try_lookup(&self, caller: Caller, key: &CacheKey<'_, Prompt>, tp_size: i64) -> Result<()> {
        let Context { l1, l2, tracer, .. } = &*self.context;
        let scope = self.context.short_scope(key)?;
        let readers = self.readers(key, tp_size);
        if readers < 1 {
            return Err(Error::refused(format!(
                "num_kv_readers is {readers}; allowed: at least 1"
            )));
        }
        // One that was refused has none: no request follows from it.
        let span = tracer.lookup(|| {
            let parent = traceparent::decode(key.request_configs).and_then(TraceParent::parse);
            TracedSession::new(key.request_id, &scope, parent)
        });
        // A lookup of nothing is held too. Its result is 0, whatever an earlier lookup of the request or one of another
        // engine under the same id has found.
        let wanted = self.wanted(caller, key, &scope);
        let refused = wanted.as_ref().err().copied();
        let (rows, chunks) = wanted.unwrap_or_default();
        // One worker's rows do not tell whether the others have a chunk.
        let known = key.worker_id.is_none().then(|| chunks.clone());
        let (covered, hashes) = (chunks.start, &key.tokens.hashes[chunks]);
        let now = self.context.now();
        let mut found = l1.cache.lookup(now, &rows, hashes);
        if let Some(time) = pin_time(key) {
            found.lease.pin(now, time);
        }
        if found.may_be_unstored
            && let Some(l2) = l2
        {
            l2.store_again(&found.lease, hashes);
        }
        found.lease.shift(covered);
        let tokens = |chunks: usize| (chunks * key.tokens.chunk_size.get()) as u64;
        let (asked, hit) = (tokens(hashes.len()), tokens(found.hit_chunks));
        let outcome = RecentLookup {
            at: now,
            model_name: Arc::clone(scope.model_name()),
            cache_salt: Arc::clone(scope.cache_salt()),
            first: hashes.first().and(key.tokens.hashes.first()).copied(),
            tokens: asked,
            hit_tokens: hit,
            missing: first_missing(&rows, hashes, found.hit_chunks),
            refused,
        };
        if !hashes.is_empty() {
            let (model, salt) = (scope.model_name(), scope.cache_salt());
            let held = found.lease.held() as u64;
            self.context.metrics.lookup(model, salt, asked, hit, held);
            if hit > 0 {
                tracing::debug!(
                    request = key.request_id,
                    "Prefetch request completed (L1+L2): {held}/{} retained keys ({held} L1, 0 L2)",
                    hashes.len() * rows.len()
                );
            }
        }
        let counted = found.counted;
        let prompt = key.tokens.hashes[..covered + hashes.len()].into();
        let lookup = HeldLookup {
            connection: caller.connection,
            at_end: self.context.sessions.begin(key, &scope, &prompt),
            segments: HeldSegments::Unknown,
            prompt,
            hit_chunks: covered + found.hit_chunks,
            loaded: Vec::new(),
            lease: found.lease,
            // At most 128.
            readers: u16::try_from(readers).unwrap_or(u16::MAX),
            until_end: !caller.release.notices_failed_retrieves(),
            created: now,
            scope,
        };
        match l2 {
            Some(l2) if found.hit_chunks < hashes.len() => {
                let tokens = known.and_then(|chunks| key.tokens.chunk_tokens(chunks));
                let request = PrefetchRequest {
                    scope: lookup.scope.clone(),
                    rows,
                    hashes: hashes.into(),
                    is_object_keys: false,
                    tokens,
                    counted,
                    span,
                };
                if let Some(host) = peer::decode(key.request_configs) {
                    l2.prefer(host);
                }
                let l2 = Arc::clone(l2);
                self.prefetch(l2, key, covered, lookup, request, outcome);
            }
            _ => {
                if let Some(span) = span {
                    span.end(LookupResult {
                        found_chunks: found.hit_chunks as u64,
                        l1_hit_keys: lookup.lease.held() as u64,
                        ..traced(&outcome)
                    });
                }
                self.recent.push(outcome);
                self.held.insert(key.request_id, lookup, None);
            }
        }
        Ok(())
    }

    /// Workers that will read each object of a key. Engines up to vLLM 0.19 understate them for MLA, where several ranks share
    /// an object, so what such a client does not say is more than it can have: its leases end with the session.
    fn readers(&self, key: &CacheKey<'_, Prompt>, tp_size: i64) -> i64 {
        let readers = key.readers(tp_size).min(MAX_READERS);
        let is_mla = || {
            let (model, world_size) = (key.model_name.into(), key.world_size);
            self.context
                .instances
                .any_of(&model, world_size, Instance::is_mla)
        };
        match key.num_kv_readers {
            None if readers == 1 && is_mla() => MAX_READERS,
            _ => readers,
        }
    }

    /// The rows and chunks that a lookup is for. The chunks in front of them are those that its engine has itself, as clients
    /// from 0.5.7 on say.
    ///
    /// # Errors
    /// Its client cannot have any; the reason is counted.
    fn wanted(
        &self,
        caller: Caller,
        key: &CacheKey<'_, Prompt>,
        scope: &KeyScope,
    ) -> Result<(Arc<[GroupRow]>, Range<usize>), &'static str> {
        let metrics = &self.context.metrics;
        let model = scope.model_name();
        let early_exit = |reason| {
            metrics.early_exit(model, scope.cache_salt(), reason);
            Err(reason)
        };
        let instances = match self.workers(key, scope) {
            Ok(instances) => instances,
            Err(reason) => return early_exit(reason),
        };
        // After a restart its workers are unknown, and each retrieve would wait for a refused ping.
        let is_served = |it: &Instance| it.is_again || it.releases == caller.releases;
        if !caller.knows_chunk_size
            && caller.registers_again != Some(true)
            && !self
                .context
                .instances
                .any_of(model, key.world_size, is_served)
        {
            return early_exit("not_registered_again");
        }
        let tokens = key.tokens.token_count;
        let range = LookupRange {
            tokens: tokens as u64,
            end: key.end,
            block: block_tokens(&instances, key.tokens.chunk_size),
        };
        // A client that names its chunk size has it.
        if key.chunk_tokens.is_none() && !self.chunk_sizes.is_proven(caller, range) {
            metrics.unproven_lookups.inc();
            return Err("unproven_chunk_size");
        }
        let chunks = lookup_chunks(key.tokens.chunk_size, tokens, 0, key.end);
        if chunks.is_empty() {
            return early_exit("empty_chunk_hashes");
        }
        if skip_load::decode(key.request_configs) {
            return early_exit("load_policy_recompute");
        }
        let covered = key.start / key.tokens.chunk_size.get() as u64;
        let covered = usize::try_from(covered).unwrap_or(usize::MAX);
        Ok((rows(scope, &instances), covered.min(chunks.end)..chunks.end))
    }

    /// Workers whose objects a key names, rank by rank.
    ///
    /// # Errors
    /// There are none, or none that is served; the reason.
    fn workers(
        &self,
        key: &CacheKey<'_, Prompt>,
        scope: &KeyScope,
    ) -> Result<Vec<Vec<Arc<Instance>>>, &'static str> {
        let instances = self.context.instances.of_workers(
            scope.model_name(),
            key.world_size,
            scope.workers(),
            key.tokens.chunk_size,
        );
        let instances = instances.ok_or("no_gpu_context")?;
        match unserved(&instances) {
            Some(unserved) => Err(unserved.name()),
            None => Ok(instances),
        }
    }

    /// Finds objects by their keys and leases them until the session of the request ends. What L1 lacks comes from the tiers, as
    /// far as it comes within `timeout`.
    pub fn find(
        &self,
        caller: Caller,
        key: &CacheKey<'_, Prompt>,
        timeout: Duration,
        mut reply: Reply,
    ) {
        let find = if key.tokens.is_object_keys {
            self.object_find(caller, key)
        } else {
            Err("bad_key")
        };
        let find = match find {
            Ok(find) => find,
            Err(reason) => {
                self.held.forget(key.request_id, caller.connection);
                let nothing = EngineAnswer::from(Response::Bits(Cow::default()));
                return reply.answer(nothing.because(reason));
            }
        };
        let (found, lookup) = find.in_l1(None);
        find.count(&lookup);
        let l2 = self.context.l2.as_ref();
        let l2 = l2.filter(|_| lookup.hit_chunks < find.hashes.len() && !timeout.is_zero());
        let Some(l2) = l2.cloned() else {
            find.hold(lookup, None);
            return reply.answer(find.answer(&found));
        };
        if !reply.later() {
            return;
        }
        let (done, pending) = watch::channel(());
        let (counted, hit_objects) = (lookup.counted, lookup.hit_chunks);
        let before = FoundBefore {
            counted,
            hit_objects,
            held: lookup.lease.held(),
            serial: find.hold(lookup, Some(pending)),
        };
        let handle = l2.handle().clone();
        let mut stopped = self.waits_ended.subscribe();
        handle.spawn(async move {
            tokio::select! {
                answer = find.in_tiers(l2, before, timeout) => reply.answer(answer),
                _ = stopped.wait_for(|stopped| *stopped) => {}
            }
            drop(done);
        });
    }

    fn object_find(
        &self,
        caller: Caller,
        key: &CacheKey<'_, Prompt>,
    ) -> Result<ObjectFind, &'static str> {
        let scope = self.context.short_scope(key).map_err(|_| "bad_key")?;
        let workers = self.workers(key, &scope).inspect_err(|reason| {
            let (model, salt) = (scope.model_name(), scope.cache_salt());
            self.context.metrics.early_exit(model, salt, reason);
        })?;
        Ok(ObjectFind {
            context: Arc::clone(&self.context),
            held: Arc::clone(&self.held),
            connection: caller.connection,
            request_id: key.request_id.into(),
            rows: rows(&scope, &workers),
            scope,
            hashes: key.tokens.hashes.as_slice().into(),
            chunk_size: key.tokens.chunk_size.get(),
        })
    }

    /// Asks the tiers for what L1 lacks; the result of the lookup waits for it.
    fn prefetch(
        &self,
        l2: Arc<L2>,
        key: &CacheKey<'_, Prompt>,
        covered: usize,
        lookup: HeldLookup,
        request: PrefetchRequest,
        mut outcome: RecentLookup,
    ) {
        let (request_id, chunk_size) = (key.request_id, key.tokens.chunk_size);
        let pin = pin_time(key);
        let (done, pending) = watch::channel(());
        let in_l1 = lookup.hit_chunks - covered;
        let keys_in_l1 = lookup.lease.held();
        if let Some(span) = &request.span {
            span.wait();
        }
        let serial = self.held.insert(request_id, lookup, Some(pending));
        let (held, context) = (Arc::clone(&self.held), Arc::clone(&self.context));
        let recent = Arc::clone(&self.recent);
        let (request, request_id) = (Arc::new(request), Box::<str>::from(request_id));
        let handle = l2.handle().clone();
        handle.spawn(async move {
            // If the lookup was abandoned, the other end is dropped.
            let prefetched = l2.prefetch(&request, || done.is_closed()).await;
            let found = &prefetched.lookup;
            if let Some(time) = pin {
                found.lease.pin(context.now(), time);
            }
            tracing::debug!(
                request = &*request_id,
                chunks = found.hit_chunks,
                loaded = prefetched.loaded.len(),
                "a prefetch has ended"
            );
            let from_tiers = found.hit_chunks.saturating_sub(in_l1);
            let (tokens, keys) = (
                (from_tiers * chunk_size.get()) as u64,
                found.lease.held().saturating_sub(keys_in_l1) as u64,
            );
            let (model, salt) = (request.scope.model_name(), request.scope.cache_salt());
            context.metrics.prefetched(model, salt, tokens, keys);
            if let Some(span) = &request.span {
                span.clone().end(LookupResult {
                    found_chunks: found.hit_chunks as u64,
                    l2_hit_tokens: tokens,
                    l1_hit_keys: keys_in_l1 as u64,
                    l2_hit_keys: keys,
                    ..traced(&outcome)
                });
            }
            outcome.hit_tokens = (found.hit_chunks * chunk_size.get()) as u64;
            outcome.missing = first_missing(&request.rows, &request.hashes, found.hit_chunks);
            recent.push(outcome);
            held.complete(&request_id, serial, covered, prefetched);
            // Wakes the waiting requests.
            drop(done);
        });
    }

    /// The result of a lookup in chunks, once; 0 for one that is unknown, nothing for one that is pending.
    pub fn result(&self, caller: Caller, job: JobRef<'_>) -> EngineAnswer {
        match job {
            JobRef::Request(request_id) => {
                outcome_answer(self.held.take_outcome(request_id, caller.connection))
            }
            // A number that no lookup has, or whose lookup has ended.
            JobRef::Job(_) => EngineAnswer::from(Response::Int(0)),
        }
    }

    /// A lookup and its result in one request, which is repeated while the tiers are asked: the lookup of a client that blends. With
    /// `--engine-type blend` its result also has chunks of other prompts that stand behind the prefix; else such a client has
    /// the prefix.
    pub fn unified(
        &self,
        caller: Caller,
        key: &CacheKey<'_, Prompt>,
        tp_size: i64,
    ) -> EngineAnswer {
        let (id, connection) = (key.request_id, caller.connection);
        let outcome = || self.held.outcome(id, connection);
        let mut refused = None;
        let known = if self.held.is_of(id, connection, &key.tokens.hashes) {
            outcome()
        } else {
            LookupOutcome::Unknown
        };
        let found = match known {
            LookupOutcome::Unknown => {
                refused = self.lookup(caller, key, tp_size).refused;
                outcome()
            }
            known => known,
        };
        let chunks = match found {
            LookupOutcome::Pending(_) => return EngineAnswer::nothing(),
            LookupOutcome::Unknown => 0,
            LookupOutcome::Hit(chunks) => chunks,
        };
        let size = key.tokens.chunk_size.get();
        let int = |tokens: usize| i64::try_from(tokens).unwrap_or(i64::MAX);
        let Some(found) = self.segments(caller, key, chunks * size) else {
            return EngineAnswer::nothing();
        };
        let _ = self.held.take_outcome(key.request_id, caller.connection);
        let segments = found.matches.iter().map(|segment| MatchedSegment {
            old_start: int(segment.old_start),
            old_end: int(segment.old_start + size),
            start: int(segment.start),
            end: int(segment.start + size),
            hash: segment.hash.as_bytes().to_vec().into(),
        });
        let answer = UnifiedLookup {
            prefix_coverage_tokens: int(chunks * size),
            non_prefix_segments: segments.collect(),
            segmented_prefix_segments: Vec::new(),
        };
        EngineAnswer {
            refused,
            ..EngineAnswer::from(Response::UnifiedLookup(answer))
        }
    }

    /// The segments behind the prefix of a lookup whose result is known; nothing while the tiers are asked.
    fn segments(
        &self,
        caller: Caller,
        key: &CacheKey<'_, Prompt>,
        prefix: usize,
    ) -> Option<Arc<FoundSegments>> {
        let Some(blend) = &self.context.blend else {
            return Some(Arc::default());
        };
        let (serial, alive) = match self.held.segments(key.request_id, caller.connection) {
            SegmentsOutcome::Unknown(serial, alive) => (serial, alive),
            SegmentsOutcome::Pending => return None,
            SegmentsOutcome::Found(found) => return Some(found),
        };
        let Ok(find) = self.object_find(caller, key) else {
            return Some(Arc::default());
        };
        let (tokens, chunk_size) = (&key.tokens.tokens[..], key.tokens.chunk_size);
        let end = usize::try_from(key.end).unwrap_or(usize::MAX);
        let scope = Blend::scope(&find.rows, &find.scope, chunk_size);
        let tokens = &tokens[..end.min(tokens.len())];
        let matches = blend.find(&self.context.metrics, &scope, chunk_size, tokens, prefix);
        if matches.is_empty() {
            return Some(Arc::default());
        }
        let hashes = matches.iter().map(|segment| segment.hash).collect();
        let segments = SegmentFind {
            find: ObjectFind { hashes, ..find },
            blend: Arc::clone(blend),
            scope,
            matches,
            serial,
            _alive: alive,
        };
        segments.run()
    }

    /// Result of a lookup without taking it: the next question receives it again.
    pub fn hits(&self, caller: Caller, job: JobRef<'_>) -> EngineAnswer {
        match job {
            JobRef::Request(request_id) => {
                outcome_answer(self.held.outcome(request_id, caller.connection))
            }
            JobRef::Job(_) => EngineAnswer::from(Response::Int(0)),
        }
    }

    /// [`Lookups::result`], once it is there; nothing if it does not come within `timeout`.
    pub fn wait_result(
        &self,
        caller: Caller,
        job: JobRef<'_>,
        timeout: Duration,
        mut reply: Reply,
    ) {
        let JobRef::Request(request_id) = job else {
            return reply.answer(self.result(caller, job));
        };
        let outcome = self.held.take_outcome(request_id, caller.connection);
        // Only a lookup that asks the tiers is ever pending.
        let (mut pending, runtime) = match (outcome, &self.context.l2) {
            (LookupOutcome::Pending(pending), Some(l2)) => (pending, l2.handle().clone()),
            (outcome, _) => return reply.answer(outcome_answer(outcome)),
        };
        if !reply.later() {
            return;
        }
        let (held, request_id) = (Arc::clone(&self.held), Box::<str>::from(request_id));
        let mut stopped = self.waits_ended.subscribe();
        runtime.spawn(async move {
            tokio::select! {
                // Nothing is ever sent: the other end is dropped when the result is there.
                _ = tokio::time::timeout(timeout, pending.changed()) => {}
                _ = stopped.wait_for(|stopped| *stopped) => {}
            }
            drop(pending);
            let outcome = held.take_outcome(&request_id, caller.connection);
            reply.answer(outcome_answer(outcome));
        });
    }

    /// Answers the requests that wait for a result, now and from now on, with what is known by then.
    pub fn end_waits(&self) {
        self.waits_ended.send_replace(true);
    }

    /// Frees chunks that the scheduler does not need.
    pub fn free(&self, caller: Caller, key: &CacheKey<'_, Prompt>) -> EngineAnswer {
        match self.context.scope(key) {
            Ok(scope) => {
                let tokens = key.tokens.token_count;
                let chunks = lookup_chunks(key.tokens.chunk_size, tokens, key.start, key.end);
                self.held
                    .free(key.request_id, caller.connection, &scope, chunks);
                EngineAnswer::nothing()
            }
            Err(error) => {
                tracing::debug!(request = key.request_id, %error, "free_lookup_locks refused");
                EngineAnswer::nothing().because("bad_key")
            }
        }
    }

    /// Ends a request: the chunks of its prompt, those that it stored too, count as used just now, and what it still held is
    /// released.
    pub fn end_session(&self, caller: Caller, request_id: &str) -> EngineAnswer {
        let now = self.context.now();
        for mut lookup in self.held.end(request_id, caller.connection) {
            let session = || TracedSession::new(request_id, &lookup.scope, None);
            self.context.tracer.end(session);
            let namespaces = lookup.lease.rows().iter().map(|row| &row.namespace);
            self.context.l1.cache.touch(now, namespaces, &lookup.prompt);
            let salt = Arc::clone(lookup.scope.cache_salt());
            let at_end = lookup.at_end.take();
            self.unload(lookup);
            if let Some(at_end) = at_end {
                sessions::end(&self.context, &salt, &at_end);
            }
        }
        EngineAnswer::nothing()
    }

    /// If the prefetch policy says so, removes from L1 what was loaded for a lookup that has ended.
    fn unload(&self, lookup: HeldLookup) {
        let Context { l1, l2, .. } = &*self.context;
        let is_kept = |l2: &Arc<L2>| l2.config().prefetch_policy != PrefetchPolicy::Default;
        if l2.as_ref().is_none_or(is_kept) {
            return;
        }
        let HeldLookup {
            prompt,
            loaded,
            lease,
            ..
        } = lookup;
        let rows = Arc::clone(lease.rows());
        // Released first, so that nothing holds them.
        drop(lease);
        for Cell { row, chunk } in loaded {
            if let (Some(row), Some(hash)) = (rows.get(row), prompt.get(chunk)) {
                let hash = std::slice::from_ref(hash);
                l1.cache.unload(&row.namespace, hash);
            }
        }
    }

    /// Notes a scheduler's ping.
    pub fn scheduler_pinged(&self, connection: u64) {
        self.held.heard(connection);
        // Without a timeout they would never be forgotten.
        if self.context.config().worker_reap_timeout.is_some() {
            let now = self.context.now();
            self.scheduler_pings.lock().insert(connection, now);
        }
    }

    /// Notes a sign of life of all schedulers.
    pub fn forgive_silence(&self, now: Duration) {
        let mut pings = self.scheduler_pings.lock();
        pings.values_mut().for_each(|last| *last = now);
    }

    /// Releases what has expired: lookups of schedulers that fell silent, that were not read, and of sessions that did not end.
    pub fn expire(&self, now: Duration) {
        let config = self.context.config();
        if let Some(timeout) = config.worker_reap_timeout {
            let is_dead = |_: &u64, last: &mut Duration| now.saturating_sub(*last) > timeout;
            let mut pings = self.scheduler_pings.lock();
            let dead: HashSet<_> = pings.extract_if(is_dead).map(|(id, _)| id).collect();
            drop(pings);
            let is_of_dead = |lookup: &HeldLookup| dead.contains(&lookup.connection);
            if !dead.is_empty() {
                let released = self.held.remove_where(is_of_dead);
                if released > 0 {
                    tracing::warn!(
                        lookups = released,
                        "a scheduler fell silent; its lookups were released"
                    );
                }
            }
        }
        if let Some(limit) = now.checked_sub(config.read_ttl) {
            let released = self.held.release_older(limit);
            if released > 0 {
                self.context.metrics.expired_lookups.inc_by(released as u64);
                tracing::info!(
                    objects = released,
                    "lookups expired unread; their leases were released"
                );
            }
        }
        if let Some(limit) = now.checked_sub(config.session_ttl) {
            self.held.remove_where(|lookup| lookup.created < limit);
        }
    }
}

/// Greatest common divisor of the tokens of all these workers' blocks; 1 if these chunks are no whole blocks.
fn block_tokens(instances: &[Vec<Arc<Instance>>], chunk_size: NonZeroUsize) -> u64 {
    let blocks = instances.iter().flatten().map(|it| it.block_tokens());
    let block = blocks.fold(0, gcd);
    let is_whole = block > 0 && (chunk_size.get() as u64).is_multiple_of(block);
    if is_whole { block } else { 1 }
}

/// Result of a lookup in L1, for its span.
fn traced(outcome: &RecentLookup) -> LookupResult {
    LookupResult {
        requested_tokens: outcome.tokens,
        l1_hit_tokens: outcome.hit_tokens,
        early_exit_reason: outcome.refused.unwrap_or_default(),
        ..LookupResult::default()
    }
}

/// The chunk behind a hit, in the namespace of the first row.
fn first_missing(
    rows: &[GroupRow],
    hashes: &[ChunkHash],
    hit_chunks: usize,
) -> Option<(Arc<Namespace>, ChunkHash)> {
    let missing = hashes.get(hit_chunks)?;
    Some((Arc::clone(&rows.first()?.namespace), *missing))
}

/// Why lookups of these instances find nothing, if they do not.
pub fn unserved(instances: &[Vec<Arc<Instance>>]) -> Option<Unserved> {
    let mut all = instances.iter().flatten();
    all.find_map(|instance| instance.unserved)
}

/// How long a lookup pins what it finds; `None` if its client did not ask for it.
fn pin_time(key: &CacheKey<'_, Prompt>) -> Option<Duration> {
    let seconds = keep_seconds::decode(key.request_configs)?;
    (seconds > 0).then(|| Duration::from_secs(seconds.into()))
}

fn outcome_answer(outcome: LookupOutcome) -> EngineAnswer {
    let chunks = match outcome {
        LookupOutcome::Pending(_) => return EngineAnswer::nothing(),
        LookupOutcome::Unknown => 0,
        LookupOutcome::Hit(chunks) => chunks,
    };
    EngineAnswer::from(Response::Int(i64::try_from(chunks).unwrap_or(i64::MAX)))
}
