//! Lookups: what of a prompt is here, held until its workers have read it.

use std::sync::Arc;
use std::time::Duration;

use kvtier_core::cache::Counted;
use kvtier_core::hashing::lookup_chunks;
use kvtier_core::object_key::KeyScope;
use kvtier_core::prefetch::Cell;
use kvtier_core::prompt::Prompt;
use kvtier_core::{ChunkHash, GroupRow};
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::JobRef;
use kvtier_proto::response::Response;
use tokio::sync::watch;

use super::instances::Instance;
use super::layout::ModelLayout;
use super::lookups::{HeldLookup, LookupResult, PrefetchedLookup};
use super::{Answer, Caller, Engine, Reply};
use kvtier_config::PrefetchPolicy;
use kvtier_tiers::{L2, PrefetchRequest, Prefetched};

/// Most workers that may read one object; LMCache clamps there too.
const MAX_READERS: i64 = 128;

/// Longest request id and model name, bytes. They are remembered for as long as a request or an object lives.
const MAX_NAME_BYTES: usize = 1024;

/// Refuses names that are too long to be kept.
pub(super) fn check_names<T>(key: &CacheKey<'_, T>) -> Result<(), String> {
    for (field, name) in [
        ("request_id", key.request_id),
        ("model_name", key.model_name),
    ] {
        check_name(field, name)?;
    }
    Ok(())
}

/// The same for one name.
pub(super) fn check_name(field: &str, name: &str) -> Result<(), String> {
    if name.len() > MAX_NAME_BYTES {
        return Err(format!(
            "{field} has {} bytes; allowed: at most {MAX_NAME_BYTES}",
            name.len()
        ));
    }
    Ok(())
}

impl Engine {
    /// Looks a prompt up and holds what it finds. The answer says only that it was done; the result is asked for.
    pub(super) fn lookup(
        &self,
        caller: Caller,
        key: &CacheKey<'_, Prompt>,
        tp_size: i64,
    ) -> Answer {
        if let Err(error) = check_names(key) {
            return self.refused_lookup(caller, key, &error);
        }
        let scope = match self.scope(key) {
            Ok(scope) => scope,
            Err(error) => return self.refused_lookup(caller, key, &error),
        };
        let readers = match key.readers(tp_size) {
            readers if readers >= 1 => readers.min(MAX_READERS),
            readers => {
                let error = format!("num_kv_readers is {readers}; allowed: at least 1");
                return self.refused_lookup(caller, key, &error);
            }
        };
        let model = scope.model_name();
        let workers = scope.workers();
        let Some(instances) = self.instances.of_workers(model, key.world_size, workers) else {
            self.metrics
                .early_exit(model, scope.cache_salt(), "no_gpu_context");
            self.found_nothing(caller, key.request_id, scope);
            return Answer::nothing();
        };
        if let Some(unserved) = instances
            .iter()
            .flatten()
            .find_map(|instance| instance.unserved)
        {
            self.metrics
                .early_exit(model, scope.cache_salt(), unserved.name());
            self.found_nothing(caller, key.request_id, scope);
            return Answer::nothing();
        }
        let tokens = key.tokens.token_count;
        if !self.chunk_sizes.is_proven(caller, tokens as u64, key.end) {
            self.metrics.unproven_lookups.inc();
            self.found_nothing(caller, key.request_id, scope);
            return Answer::nothing();
        }
        let chunks = lookup_chunks(self.chunk_size, tokens, 0, key.end);
        let hashes = &key.tokens.hashes[chunks.clone()];
        if hashes.is_empty() {
            self.metrics
                .early_exit(model, scope.cache_salt(), "empty_chunk_hashes");
            self.found_nothing(caller, key.request_id, scope);
            return Answer::nothing();
        }
        let rows = rows(&scope, &instances);
        let now = self.now();
        let found = self.l1.cache.lookup(now, &rows, hashes);
        let tokens = |chunks: usize| (chunks * self.chunk_size.get()) as u64;
        let held = found.lease.held() as u64;
        self.metrics.lookup(
            model,
            scope.cache_salt(),
            tokens(hashes.len()),
            tokens(found.hit_chunks),
            held,
        );
        if found.hit_chunks > 0 {
            tracing::debug!(
                request = key.request_id,
                "Prefetch request completed (L1+L2): {held}/{} retained keys ({held} L1, 0 L2)",
                hashes.len() * rows.len(),
            );
        }
        let prefetch = self
            .l2
            .as_ref()
            .filter(|_| found.hit_chunks < hashes.len())
            .map(|l2| {
                let request = PrefetchRequest {
                    scope: scope.clone(),
                    rows,
                    hashes: hashes.into(),
                    counted: found.counted,
                };
                (Arc::clone(l2), request)
            });
        let lookup = HeldLookup {
            connection: caller.connection,
            hashes: hashes[..found.hit_chunks].into(),
            loaded: Vec::new(),
            hit_chunks: found.hit_chunks,
            lease: found.lease,
            // At most 128.
            readers: u16::try_from(readers).unwrap_or(u16::MAX),
            until_end: !caller.release.notices_failed_retrieves(),
            created: now,
            scope,
        };
        match prefetch {
            None => self.lookups.insert(key.request_id, lookup),
            Some((l2, request)) => self.prefetch(l2, key.request_id, lookup, request),
        }
        Answer::nothing()
    }

    /// Asks the tiers for what L1 lacks; the result of the lookup waits for it.
    fn prefetch(
        &self,
        l2: Arc<L2>,
        request_id: &str,
        lookup: HeldLookup,
        request: PrefetchRequest,
    ) {
        let (done, pending) = watch::channel(());
        let (in_l1, chunk_size) = (lookup.hit_chunks, self.chunk_size.get());
        let keys_in_l1 = lookup.lease.held();
        let serial = self.lookups.insert_pending(request_id, lookup, pending);
        let (lookups, metrics) = (Arc::clone(&self.lookups), Arc::clone(&self.metrics));
        let (request, request_id) = (Arc::new(request), Box::<str>::from(request_id));
        let handle = l2.handle().clone();
        handle.spawn(async move {
            // If the lookup was abandoned, the other end is dropped.
            let Prefetched { lookup, loaded } = l2.prefetch(&request, || done.is_closed()).await;
            tracing::debug!(
                request = &*request_id,
                chunks = lookup.hit_chunks,
                loaded = loaded.len(),
                "a prefetch has ended"
            );
            let from_tiers = lookup.hit_chunks.saturating_sub(in_l1);
            let scope = &request.scope;
            metrics.prefetched(
                scope.model_name(),
                scope.cache_salt(),
                (from_tiers * chunk_size) as u64,
                lookup.lease.held().saturating_sub(keys_in_l1) as u64,
            );
            let hashes = request.hashes[..lookup.hit_chunks].into();
            let result = PrefetchedLookup {
                hit_chunks: lookup.hit_chunks,
                hashes,
                lease: lookup.lease,
                loaded,
            };
            lookups.complete(&request_id, serial, result);
            // Wakes the waiting requests.
            drop(done);
        });
    }

    /// Notes a lookup that had nothing to ask for. Its result is 0, whatever an earlier lookup of the request or one of
    /// another engine under the same id has found.
    fn found_nothing(&self, caller: Caller, request_id: &str, scope: KeyScope) {
        let now = self.now();
        let lookup = HeldLookup {
            scope,
            connection: caller.connection,
            hashes: Arc::default(),
            hit_chunks: 0,
            lease: self.l1.cache.lookup(now, &Arc::default(), &[]).lease,
            loaded: Vec::new(),
            readers: 1,
            until_end: false,
            created: now,
        };
        self.lookups.insert(request_id, lookup);
    }

    /// A lookup that names nothing that could be here: its result is 0, and no earlier one of its request.
    fn refused_lookup(
        &self,
        caller: Caller,
        key: &CacheKey<'_, Prompt>,
        error: &dyn std::fmt::Display,
    ) -> Answer {
        tracing::debug!(request = key.request_id, %error, "lookup refused");
        self.lookups.forget(key.request_id, caller.connection);
        Answer::nothing().because("bad_key")
    }

    /// The result of a lookup in chunks, once; 0 for one that is unknown, nothing for one that is not there yet.
    pub(super) fn lookup_result(&self, caller: Caller, job: JobRef<'_>) -> Answer {
        match job {
            JobRef::Request(request_id) => {
                result_answer(self.lookups.take_result(request_id, caller.connection))
            }
            // A number is the answer of a lookup that was never served.
            JobRef::Job(_) => Answer::from(Response::Int(0)),
        }
    }

    /// The same, once it is there; nothing if it does not come within `timeout`.
    pub(super) fn wait_lookup_result(
        &self,
        caller: Caller,
        job: JobRef<'_>,
        timeout: Duration,
        reply: Reply,
    ) {
        let JobRef::Request(request_id) = job else {
            return reply.answer(self.lookup_result(caller, job));
        };
        let result = self.lookups.take_result(request_id, caller.connection);
        // Only what the tiers are asked for is ever pending.
        let (mut pending, runtime) = match (result, &self.l2) {
            (LookupResult::Pending(pending), Some(l2)) => (pending, l2.handle().clone()),
            (result, _) => return reply.answer(result_answer(result)),
        };
        let Some(reply) = reply.later() else { return };
        let (lookups, request_id) = (Arc::clone(&self.lookups), Box::<str>::from(request_id));
        let mut stopped = self.waits_ended.subscribe();
        runtime.spawn(async move {
            tokio::select! {
                // Nothing is ever sent: the other end is dropped when the result is there.
                _ = tokio::time::timeout(timeout, pending.changed()) => {}
                _ = stopped.wait_for(|stopped| *stopped) => {}
            }
            drop(pending);
            reply.answer(result_answer(
                lookups.take_result(&request_id, caller.connection),
            ));
        });
    }

    /// The scheduler does not need these chunks.
    pub(super) fn free_lookup(&self, caller: Caller, key: &CacheKey<'_, Prompt>) -> Answer {
        match self.scope(key) {
            Ok(scope) => {
                let chunks =
                    lookup_chunks(self.chunk_size, key.tokens.token_count, key.start, key.end);
                self.lookups
                    .free(key.request_id, caller.connection, &scope, chunks);
                Answer::nothing()
            }
            Err(error) => {
                tracing::debug!(request = key.request_id, %error, "free_lookup_locks refused");
                Answer::nothing().because("bad_key")
            }
        }
    }

    /// A request ended: its chunks count as used just now, and what it still held is released.
    pub(super) fn end_session(&self, caller: Caller, request_id: &str) -> Answer {
        let now = self.now();
        for lookup in self.lookups.end(request_id, caller.connection) {
            for row in lookup.lease.rows().iter() {
                self.l1.cache.touch(now, &row.namespace, &lookup.hashes);
            }
            self.unload(lookup);
        }
        Answer::nothing()
    }

    /// Takes out of L1 what was loaded for a lookup that has ended, where the policy says so.
    fn unload(&self, lookup: HeldLookup) {
        let HeldLookup {
            hashes,
            loaded,
            lease,
            ..
        } = lookup;
        let leaves = |l2: &&Arc<L2>| l2.config().prefetch_policy == PrefetchPolicy::Default;
        if self.l2.as_ref().is_none_or(|l2| !leaves(&l2)) {
            return;
        }
        let rows = Arc::clone(lease.rows());
        // Released first, so that nothing holds them.
        drop(lease);
        for Cell { row, chunk } in loaded {
            let (Some(row), Some(hash)) = (rows.get(row), hashes.get(chunk)) else {
                continue;
            };
            self.l1
                .cache
                .remove(&row.namespace, std::slice::from_ref(hash), false);
        }
    }
}

/// The rows of a lookup: rank after rank, object groups within.
fn rows(scope: &KeyScope, instances: &[Vec<Arc<Instance>>]) -> Arc<[GroupRow]> {
    let rows = scope
        .kv_ranks()
        .zip(instances)
        .flat_map(|(kv_rank, layouts)| {
            layouts.iter().flat_map(move |instance| {
                let ModelLayout {
                    groups,
                    fingerprint,
                    ..
                } = &instance.layout;
                groups.iter().map(move |group| GroupRow {
                    namespace: scope.namespace(kv_rank, group.id, *fingerprint),
                    window: group.window,
                    object_bytes: group.object_bytes,
                })
            })
        });
    rows.collect()
}

/// Request to prefetch all that the prompt has, of every row.
pub(super) fn prefetch_request(
    scope: &KeyScope,
    instances: &[Vec<Arc<Instance>>],
    hashes: &[ChunkHash],
    counted: Counted,
) -> PrefetchRequest {
    PrefetchRequest {
        scope: scope.clone(),
        rows: rows(scope, instances),
        hashes: hashes.into(),
        counted,
    }
}

fn result_answer(result: LookupResult) -> Answer {
    let chunks = match result {
        LookupResult::Pending(_) => return Answer::nothing(),
        LookupResult::Unknown => 0,
        LookupResult::Hit(chunks) => chunks,
    };
    Answer::from(Response::Int(i64::try_from(chunks).unwrap_or(i64::MAX)))
}
