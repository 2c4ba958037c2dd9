//! Administration: what operators ask for over HTTP, and the work that belongs to no request.
//!
//! | state | guarded by |
//! | --- | --- |
//! | [`PrefetchJobs`] | its mutex; nothing is taken inside |
//! | the quotas of tenants | [`Quotas`]' own lock; the locks of the tiers are taken inside |
//! | bytes of L1 that are pre-faulted | atomic |

mod checksums;
mod explain;
mod objects;
mod prefetch_jobs;
#[cfg(test)]
mod quota_tests;
mod reload;
mod status;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvtier_core::cache::Removed;
use kvtier_memory::PrefaultEnd;
use kvtier_observe::metrics::Readings;
use kvtier_observe::metrics::TenantSource;
use kvtier_store::tenants::Quotas;

use super::context::Context;
use super::lookups::Lookups;
use super::transfers::Transfers;
use super::workers::Workers;
pub use checksums::ChecksumError;
pub use explain::{ExplainError, TenantView};
use prefetch_jobs::PrefetchJobs;
pub use prefetch_jobs::{PrefetchError, PrefetchJob, PrefetchResult};

/// Objects evicted under one hold of the cache's lock: about a fifth of a millisecond.
const EVICTION_SLICE: usize = 1024;

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
    quotas: Arc<Quotas>,
    /// Shared with the tasks that load.
    pub(super) prefetch_jobs: Arc<PrefetchJobs>,
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
            prefetch_jobs: Arc::default(),
            prefaulted: AtomicU64::new(0),
        }
    }

    /// Limits and shares of tenants.
    pub(crate) fn quotas(&self) -> &Arc<Quotas> {
        &self.quotas
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
            largest_free_bytes: l1.largest_free(),
            objects: stats.objects,
            leased_objects: stats.leased_objects,
            pinned_object_bytes: stats.pinned_bytes,
            pins_refused: stats.pins_refused_total,
            prefaulted_bytes: self.prefaulted.load(Ordering::Relaxed),
            sessions: lookups as u64,
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
        self.count_misses();
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
