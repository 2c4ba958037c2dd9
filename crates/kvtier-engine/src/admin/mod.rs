//! Administration: what operators ask for over HTTP, and the work that belongs to no request.
//!
//! | state | guarded by |
//! | --- | --- |
//! | [`PrefetchJobs`] | its mutex; nothing is taken inside |
//! | the quotas of tenants | [`Quotas`]' own lock; the locks of the tiers are taken inside |
//! | bytes of L1 that are pre-faulted | atomic |

mod checksums;
mod explain;
mod prefetch_jobs;
#[cfg(test)]
mod quota_tests;
mod status;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvtier_common::error::Result;
use kvtier_config::Change;
use kvtier_core::cache::{Removed, ResidentObject};
use kvtier_core::{ChunkHash, ObjectKey};
use kvtier_memory::PrefaultEnd;
use kvtier_observe::api::{ExplainRequest, Load, PrefixMatch, Status};
use kvtier_observe::metrics::Readings;
use kvtier_observe::metrics::TenantSource;
use kvtier_proto::request::InstanceId;
use kvtier_proto::session::SessionAction;
use kvtier_store::tenants::Quotas;

use super::context::Context;
use super::lookups::Lookups;
use super::sessions::{self, SessionResult};
use super::transfers::Transfers;
use super::workers::Workers;
pub use checksums::ChecksumError;
use explain::Explanations;
pub use explain::{ExplainError, TenantView};
use prefetch_jobs::PrefetchJobs;
pub use prefetch_jobs::{PrefetchError, PrefetchJob, PrefetchResult};

/// Objects evicted under one hold of the cache's lock: about a fifth of a millisecond.
const EVICTION_SLICE: usize = 1024;

/// Namespaces or objects that are examined per hold of the cache's lock.
const SLICE: usize = 1024;

/// Slots that one listing examines, once it has an object.
const MAX_EXAMINED: usize = 100_000;

/// Pause of the prefault while requests come, and the most of them after a step and in all: pages that are not touched yet cost
/// stores more than the prefault does.
const PREFAULT_PAUSE: Duration = Duration::from_millis(1);
const MAX_PREFAULT_PAUSES: usize = 4;
const ALL_PREFAULT_PAUSES: usize = 60_000;

/// The service of administration.
pub struct Admin {
    context: Arc<Context>,
    workers: Arc<Workers>,
    transfers: Arc<Transfers>,
    lookups: Arc<Lookups>,
    pub(super) quotas: Arc<Quotas>,
    /// Prompts that are loaded before a request asks for them.
    pub prefetch_jobs: PrefetchJobs,
    /// Reasons of misses.
    pub explanations: Explanations,
    prefaulted: AtomicU64,
}

impl Admin {
    pub(crate) fn new(
        context: &Arc<Context>,
        workers: &Arc<Workers>,
        transfers: &Arc<Transfers>,
        lookups: &Arc<Lookups>,
        quotas: Quotas,
    ) -> Self {
        Self {
            context: Arc::clone(context),
            workers: Arc::clone(workers),
            transfers: Arc::clone(transfers),
            lookups: Arc::clone(lookups),
            quotas: Arc::new(quotas),
            prefetch_jobs: PrefetchJobs::new(context, lookups),
            explanations: Explanations::new(context, lookups),
            prefaulted: AtomicU64::new(0),
        }
    }

    /// Returns how much of a prompt a lookup would find, and the server's load, for a router. Counts as no use.
    ///
    /// # Errors
    /// See [`ExplainError`].
    pub fn match_prefix(
        &self,
        request: &ExplainRequest,
        view: TenantView,
    ) -> std::result::Result<PrefixMatch, ExplainError> {
        let usage = self.context.l1.cache.usage();
        let load = Load {
            active_sessions: self.lookups.held.len() as u64,
            pending_transfers: self.transfers.prepared.counts().0 as u64,
            memory_usage_ratio: usage.used_bytes as f64 / usage.capacity_bytes.max(1) as f64,
        };
        self.explanations.match_prefix(request, view, load)
    }

    /// Does this to what only this session of an agent needs, until its next turn.
    ///
    /// # Errors
    /// [`PrefetchError::UnknownSession`], or [`PrefetchError::NoTiers`] to demote to.
    pub fn act_on_session(
        &self,
        cache_salt: &str,
        session: &str,
        action: SessionAction,
    ) -> std::result::Result<SessionResult, PrefetchError> {
        let context = &*self.context;
        if action == SessionAction::Demote && context.l2.is_none() {
            return Err(PrefetchError::NoTiers);
        }
        let salt = context.salts.of_operator(cache_salt);
        let done = sessions::act(context, &salt, session, action);
        done.ok_or_else(|| PrefetchError::UnknownSession(session.into()))
    }

    /// Drops the objects of L1 that have no lease, or all of them.
    pub fn clear(&self, force: bool) -> Removed {
        let removed = self.context.l1.cache.clear(force);
        tracing::info!(
            objects = removed.objects,
            bytes = removed.bytes,
            kept = removed.kept,
            force,
            "cleared L1"
        );
        removed
    }

    /// At most `limit` objects of L1, of one model or of all, and the `from` of the next part. `from` is 0 at first.
    pub fn list_objects(
        &self,
        from: u32,
        model: Option<&str>,
        limit: usize,
    ) -> (Vec<ResidentObject>, Option<u32>) {
        let (mut objects, mut next, mut left) = (Vec::new(), Some(from), MAX_EXAMINED);
        // A page is empty only at the end.
        while let Some(from) =
            next.filter(|_| objects.len() < limit && (left > 0 || objects.is_empty()))
        {
            let slots = SLICE.min(limit - objects.len());
            left = left.saturating_sub(slots);
            let page = self.context.l1.cache.objects(from, slots);
            let of_model = |object: &ResidentObject| {
                model.is_none_or(|model| **object.namespace.model_name() == *model)
            };
            objects.extend(page.entries.into_iter().filter(of_model));
            next = page.next;
        }
        (objects, next)
    }

    /// Removes objects from L1, of any layout: those without a lease, or all of them with `force`.
    pub fn delete_objects(&self, keys: &[ObjectKey], force: bool) -> Removed {
        let mut by_namespace: HashMap<_, Vec<ChunkHash>> = HashMap::new();
        for key in keys {
            let hashes = by_namespace.entry(key.namespace()).or_default();
            hashes.push(key.chunk_hash());
        }
        let (mut sum, mut next) = (Removed::default(), Some(0));
        while let Some(from) = next {
            let page = self.context.l1.cache.namespaces(from, SLICE);
            for namespace in &page.entries {
                if let Some(hashes) = by_namespace.get(&namespace.without_layout()) {
                    let removed = self.context.l1.cache.remove(namespace, hashes, force);
                    sum.objects += removed.objects;
                    sum.bytes += removed.bytes;
                    sum.kept += removed.kept;
                }
            }
            next = page.next;
        }
        tracing::info!(
            asked = keys.len(),
            objects = sum.objects,
            kept = sum.kept,
            force,
            "deleted from L1"
        );
        sum
    }

    /// Reads the file of `--config` again and applies it; returns what has changed. Reloads run one at a time: the caller sees
    /// to that.
    ///
    /// # Errors
    /// As [`ServerConfig::read_again`](kvtier_config::ServerConfig::read_again), or a tier cannot have another capacity; then
    /// nothing has changed.
    pub fn reload(&self) -> Result<Vec<Change>> {
        let before = self.context.config();
        let (after, changes) = before.read_again()?;
        if changes.is_empty() {
            return Ok(changes);
        }
        let l2 = self.context.l2.as_ref().zip(after.l2.as_ref());
        if let Some((l2, config)) = l2 {
            l2.check_config(config)?;
            let reserved = self.quotas.set_capacities(after.places());
            reserved.map_err(|what| what.context("l2-adapter").hint("no flag was changed"))?;
            l2.set_config(config.clone());
        }
        let (watermark, ratio) = (after.eviction_trigger_watermark, after.eviction_ratio);
        let default_limit = after.quotas.default_limit;
        // Before limits are enforced, and before the next background pass.
        self.context.l1.cache.configure_quotas(|quotas| {
            quotas.watermark = watermark;
            quotas.ratio = ratio;
        });
        *self.context.config.write() = Arc::new(after);
        if default_limit != before.quotas.default_limit {
            self.quotas.set_default_limit(default_limit);
        }
        Ok(changes)
    }

    /// MD5 in hex of the blocks of each chunk: one list over all layers, or one list per layer.
    ///
    /// The bytes are those LMCache hashes: for each layer in order the selected blocks, contiguous, with bfloat16 widened
    /// to float32.
    ///
    /// # Errors
    /// An unknown worker, one whose pages we do not see, or values that are not allowed.
    pub fn checksums(
        &self,
        instance: i64,
        block_ids: &[i64],
        chunk_size: i64,
        layerwise: bool,
    ) -> Result<Vec<Vec<String>>, ChecksumError> {
        let known = self
            .context
            .instances
            .get(InstanceId(instance))
            .ok_or(ChecksumError::UnknownInstance(instance))?;
        let Some(memory) = known.pages() else {
            return Err(ChecksumError::NotSupported(format!(
                "instance_id {instance} copies by itself; its pages are not ours to read"
            )));
        };
        checksums::checksums(&**memory, block_ids, chunk_size, layerwise)
    }

    /// Names of the tiers that fail.
    pub fn failed_tiers(&self) -> Vec<String> {
        let l2 = self.context.l2.as_ref();
        l2.map_or_else(Vec::new, |l2| l2.failed_tiers())
    }

    /// What operators should know although the server is healthy. Open to all, so without names of files or tenants.
    pub fn warnings(&self) -> Vec<String> {
        let full = self.context.l2.iter().flat_map(|l2| l2.full_tiers());
        let full = full.map(|tier| format!("tier {tier} is full: objects are not stored there"));
        let clients = self.context.client_warnings.current(self.context.now());
        let withheld = self.transfers.is_much_withheld();
        let withheld = withheld.then(|| {
            "more than an eighth of L1 is withheld for clients that did not commit it".to_owned()
        });
        full.chain(withheld).chain(clients).collect()
    }

    /// The whole state.
    pub fn status(&self, healthy: bool) -> Status {
        status::status(self, healthy)
    }

    /// Figures for `/metrics`.
    pub fn readings(&self) -> Readings {
        let Context {
            l1, l2, devices, ..
        } = &*self.context;
        let stats = l1.cache.stats();
        let prompts = self.lookups.prompts.stats();
        let (lookups, unread) = self.lookups.held.counts();
        let l2 = l2.as_ref();
        let stores = l2.map(|l2| l2.store_counts()).unwrap_or_default();
        let tiers = l2.map_or_else(Vec::new, |l2| l2.readings());
        let tier_errors: u64 = tiers.iter().map(|tier| tier.accounting_errors).sum();
        Readings {
            capacity_bytes: stats.capacity_bytes,
            used_bytes: stats.used_bytes,
            staged_bytes: stats.staged_bytes,
            staging_limit_bytes: self.transfers.staging.limit(),
            withheld_bytes: self.transfers.prepared.counts().2,
            kv_events: l1.cache.event_log().map_or(0, |log| log.depth as u64),
            largest_free_bytes: l1.largest_free(),
            objects: stats.objects,
            leased_objects: stats.leased_objects,
            pinned_object_bytes: stats.pinned_bytes,
            pins_refused: stats.pins_refused_total,
            prefaulted_bytes: self.prefaulted.load(Ordering::Relaxed),
            sessions: lookups as u64,
            agent_sessions: self.context.sessions.counts().0 as u64,
            blend_segments: self
                .context
                .blend
                .as_ref()
                .map_or(0, |blend| blend.segments.stats().segments)
                as u64,
            unread_lookups: unread as u64,
            instances: self.context.instances.len() as u64,
            gpus: devices.figures(),
            pinned_bytes: devices.pinned_bytes(),
            evicted_objects: stats.evicted_objects_total,
            evicted_bytes: stats.evicted_bytes_total,
            accounting_errors: stats.accounting_errors + tier_errors,
            prompt_chunks_known: prompts.chunks_known,
            prompt_chunks_hashed: prompts.chunks_hashed,
            l2_prefetches: l2.map_or([0; 3], |l2| l2.prefetches()),
            l2_queued_bytes: stores.queued_bytes,
            l2_dropped_objects: stores.dropped_objects,
            l2_loading_objects: l2.map_or(0, |l2| l2.loading() as u64),
            tiers,
        }
    }

    /// All metrics in Prometheus' text format.
    pub fn scrape(&self) -> String {
        self.explanations.count_misses();
        let tiers = self.quotas.tiers();
        let tiers: Vec<_> = tiers.map(|tier| tier as &dyn TenantSource).collect();
        let limit = usize::from(self.context.config().tenants.tenant_metrics);
        let metrics = &self.context.metrics;
        let _read = metrics.tenants.read(limit, &tiers);
        metrics.encode(&self.readings())
    }

    /// Ends pins whose time is over, and evicts objects of tenants over quota, and what is above the watermark.
    pub(crate) fn evict(&self) {
        let cache = &self.context.l1.cache;
        while cache.end_pins(self.context.now(), EVICTION_SLICE) == EVICTION_SLICE {}
        let over_quota = self.quotas.enforce_l1();
        if over_quota > 0 {
            tracing::debug!(objects = over_quota, "evicted from tenants over quota");
        }
        let Context { l1, metrics, .. } = &*self.context;
        let config = self.context.config();
        metrics.eviction_ticks.inc();
        let usage = l1.cache.usage();
        // This eviction frees neither what stores have staged nor what is pinned, so the watermark and the ratio are of the rest.
        let kept = self.transfers.staging.staged_bytes() + usage.pinned_bytes;
        let used = usage.used_bytes.saturating_sub(kept) as f64;
        let capacity = usage.capacity_bytes.saturating_sub(kept) as f64;
        if used < capacity * config.eviction_trigger_watermark {
            return;
        }
        let mut wanted = (used * config.eviction_ratio) as u64;
        let mut total = 0;
        while wanted > 0 {
            let now = self.context.now();
            let evicted = l1.cache.evict(now, wanted, EVICTION_SLICE);
            if evicted.objects == 0 {
                break;
            }
            total += evicted.objects;
            wanted = wanted.saturating_sub(evicted.bytes);
        }
        if total > 0 {
            metrics.eviction_triggered.inc();
            tracing::debug!(objects = total, "evicted down from the watermark");
        }
    }

    /// Touches all of L1, so that no store pays for a page's first use. `requests` is the number of requests so far: while they
    /// come, it pauses after each step.
    pub fn prefault(&self, stop: &AtomicBool, requests: impl Fn() -> u64) {
        // Requests come first, but not by the lowest priority: populating pages holds the lock of the address space, for which all
        // others would wait while this thread is not scheduled. On Linux a nice value belongs to the thread; being refused one changes
        // nothing.
        let _ = rustix::process::nice(10);
        let (mut seen, mut pauses) = (requests(), 0);
        let arena = &self.context.l1.arena;
        let result = arena.prefault(arena.whole(), stop, |progress| {
            self.prefaulted.store(progress.done, Ordering::Relaxed);
            for _ in 0..MAX_PREFAULT_PAUSES {
                let now = requests();
                let is_idle = now == std::mem::replace(&mut seen, now);
                if is_idle || pauses == ALL_PREFAULT_PAUSES || stop.load(Ordering::Relaxed) {
                    break;
                }
                pauses += 1;
                std::thread::sleep(PREFAULT_PAUSE);
            }
        });
        match result {
            Ok(PrefaultEnd::Complete) => tracing::info!("L1 is pre-faulted"),
            Ok(PrefaultEnd::Stopped { .. }) => {}
            Err(error) => {
                tracing::warn!(%error, "L1 could not be pre-faulted; first stores will be slower")
            }
        }
    }
}
