//! Periodic work: workers that ended or fell silent, expired lookups and transfers, tenants over quota, and the low
//! watermark.
//!
//! No request depends on it: `reserve` evicts by itself, and every release has its own request. It only limits how long
//! abandoned memory stays.

use std::sync::Arc;
use std::time::Duration;

use kvtier_memory::PrefaultEnd;

use super::Engine;
use super::instances::{Instance, Mode};

/// How often [`Engine::housekeep`] wants to be called.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// Objects evicted under one hold of the cache's lock: about a fifth of a millisecond.
const EVICTION_SLICE: usize = 1024;

impl Engine {
    /// One round.
    pub fn housekeep(&self) {
        let now = self.now();
        self.reap(now);
        self.let_go(self.instances.forget_left());
        self.expire(now);
        let over_quota = self.quotas.enforce_l1();
        if over_quota > 0 {
            tracing::debug!(
                objects = over_quota,
                "evicted from tenants that had too much"
            );
        }
        self.evict();
    }

    /// Takes every worker and scheduler for alive: the process itself was stopped, and what they have sent is not read yet.
    pub fn forgive_silence(&self) {
        let now = self.now();
        self.instances.all_seen(now);
        let mut pings = self.scheduler_pings.lock();
        pings.values_mut().for_each(|last| *last = now);
    }

    fn reap(&self, now: Duration) {
        let ended = self.instances.take_ended();
        self.abandon(ended, now, "a worker's process has ended");
        let Some(timeout) = self.config.worker_reap_timeout else {
            return;
        };
        let silent = self
            .instances
            .reap(now, timeout, self.config.registration_grace);
        self.abandon(silent, now, "a worker fell silent and was taken for dead");
        let mut dead = std::collections::HashSet::new();
        self.scheduler_pings.lock().retain(|connection, last| {
            let alive = now.saturating_sub(*last) <= timeout;
            if !alive {
                dead.insert(*connection);
            }
            alive
        });
        if !dead.is_empty() {
            let released = self
                .lookups
                .sweep(|lookup| dead.contains(&lookup.connection));
            if released > 0 {
                tracing::warn!(
                    lookups = released,
                    "a scheduler fell silent; its lookups were released"
                );
            }
        }
    }

    fn abandon(&self, instances: Vec<Arc<Instance>>, now: Duration, why: &str) {
        for instance in &instances {
            instance.stop();
            // It may only be stopped and wake up again, so memory it may still write stays away for a while.
            let transfers = self
                .transfers
                .abandon(instance.id, now + self.config.write_ttl);
            self.metrics.reaped_instances.inc();
            tracing::warn!(
                instance = instance.id.0,
                model = ?instance.model_name,
                transfers,
                "{why}"
            );
            if let Mode::LmcacheDriven { memory, .. } = &instance.mode {
                for removed in memory.remove_orphans() {
                    match removed {
                        Ok(name) => {
                            tracing::info!(name, "removed the shared memory of a dead worker")
                        }
                        Err(error) => {
                            tracing::debug!(%error, "the shared memory of a dead worker stays")
                        }
                    }
                }
            }
            self.release_unreadable(instance);
        }
        self.let_go(instances);
    }

    fn expire(&self, now: Duration) {
        // Dropped, each is answered.
        drop(self.refusals.due(now));
        if let Some(limit) = now.checked_sub(self.config.read_ttl) {
            let released = self.lookups.release_older(limit);
            if released > 0 {
                self.metrics.expired_lookups.inc_by(released as u64);
                tracing::info!(objects = released, "lookups that nobody read were released");
            }
        }
        if let Some(limit) = now.checked_sub(self.config.session_ttl) {
            self.lookups.sweep(|lookup| lookup.created < limit);
        }
        let abandoned = self.transfers.expire(self.config.write_ttl, now);
        if abandoned > 0 {
            self.metrics.expired_transfers.inc_by(abandoned as u64);
            tracing::warn!(
                transfers = abandoned,
                "transfers were prepared and never committed; given up"
            );
        }
    }

    fn evict(&self) {
        self.metrics.eviction_ticks.inc();
        let usage = self.l1.cache.usage();
        // No eviction frees what stores have staged, so the watermark and the ratio are of the rest.
        let staged = self.staging.staged_bytes();
        let used = usage.used_bytes.saturating_sub(staged) as f64;
        let capacity = usage.capacity_bytes.saturating_sub(staged) as f64;
        if used < capacity * self.config.eviction_trigger_watermark {
            return;
        }
        let mut wanted = (used * self.config.eviction_ratio) as u64;
        let mut total = 0;
        while wanted > 0 {
            let evicted = self.l1.cache.evict(self.now(), wanted, EVICTION_SLICE);
            if evicted.objects == 0 {
                break;
            }
            total += evicted.objects;
            wanted = wanted.saturating_sub(evicted.bytes);
        }
        if total > 0 {
            self.metrics.eviction_triggered.inc();
            tracing::debug!(objects = total, "evicted down from the watermark");
        }
    }

    /// Whether pages of the arena were lost: another process truncated the pool, or its file system is full.
    pub fn lost_memory(&self) -> bool {
        self.l1.arena.poisoned().is_some()
    }

    /// Why a GPU is of no use to this process any more, if one is.
    pub fn broken_gpu(&self) -> Option<String> {
        self.devices.broken()
    }

    /// Touches all of L1, so that no store pays for a page's first use.
    pub fn prefault(&self, stop: &std::sync::atomic::AtomicBool) {
        // Requests come first. On Linux a nice value belongs to the thread; being refused one changes nothing.
        let _ = rustix::process::nice(10);
        let result = self.l1.arena.prefault(stop, |progress| {
            self.prefaulted
                .store(progress.done, std::sync::atomic::Ordering::Relaxed);
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
