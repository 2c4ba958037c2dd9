//! Status and readings of the tiers.

use std::collections::BTreeMap;

use kvtier_api::{EvictionStatus, Recovery, TierEvictionStatus, TierStatus};
use kvtier_l2::redact;
use kvtier_l2::tier::{Failures, Tier};

use super::L2;
use kvtier_metrics::{GuardReadings, Metrics, TierCall, TierReadings};

/// Types whose name in LMCache 0.5.6's `/status` is another one than in its configuration.
const CLASSES: [(&str, &str); 4] = [
    ("fs", "FSL2Adapter"),
    ("fs_native", "FSNativeL2Adapter"),
    ("mock", "MockL2Adapter"),
    ("fault_inject", "FaultInjectL2Adapter"),
];

impl L2 {
    /// Prefetches by their phase, as [`kvtier_metrics::PrefetchPhase::ALL`].
    pub fn prefetches(&self) -> [u64; 3] {
        self.calls.phases()
    }

    /// Batches being stored, all tiers together.
    pub fn storing(&self) -> u64 {
        let of_tier = |tier| self.calls.of_tier(tier)[TierCall::Store as usize];
        (0..self.tiers.len()).map(of_tier).sum()
    }

    /// Figures of each tier.
    pub fn readings(&self) -> Vec<TierReadings> {
        (0..self.tiers.len())
            .map(|tier| self.tier_readings(tier))
            .collect()
    }

    /// State of each tier.
    pub fn adapters_status(&self) -> Vec<TierStatus> {
        (0..self.tiers.len())
            .map(|tier| self.tier_status(tier))
            .collect()
    }

    /// Eviction of the tiers that evict.
    pub fn eviction_status(&self) -> Vec<TierEvictionStatus> {
        let tiers = self.tiers.iter().filter_map(|tier| {
            let (eviction, stats) = (tier.config().eviction?, tier.stats());
            let capacity = tier.config().capacity_bytes.unwrap_or(0);
            Some(TierEvictionStatus {
                adapter: tier.name().to_owned(),
                eviction: EvictionStatus {
                    eviction_policy: eviction.policy.name().to_owned(),
                    trigger_watermark: Some(eviction.trigger_watermark),
                    eviction_ratio: eviction.eviction_ratio,
                    current_usage: usage_fraction(stats.used_bytes, capacity),
                    total_bytes_used: stats.used_bytes,
                    total_capacity_bytes: capacity,
                    // A count only: there may be a hundred thousand tenants.
                    num_cache_salt_buckets: stats.salts,
                    num_over_quota_buckets: stats.over_quota_salts,
                    over_quota_refusals: stats.over_quota_total,
                },
            })
        });
        tiers.collect()
    }

    fn tier_readings(&self, number: usize) -> TierReadings {
        let tier = &self.tiers[number];
        count_evicted(tier, self.calls.metrics());
        let (stats, counters) = (tier.stats(), tier.counters());
        let (stores, status) = (self.stores.of_tier(number), of_adapter(tier));
        TierReadings {
            name: tier.name().to_owned(),
            used_bytes: stats.used_bytes,
            capacity_bytes: tier.config().capacity_bytes.unwrap_or(0),
            objects: stats.objects,
            is_full: tier.is_full(),
            is_recovering: tier.is_recovering(),
            is_read_only: tier.is_read_only(),
            queued_objects: stores.queued_objects,
            queued_bytes: stores.queued_bytes,
            dropped_objects: stores.dropped_objects,
            dropped_bytes: stores.dropped_bytes,
            calls: self.calls.of_tier(number),
            loading_bytes: self.calls.loading_bytes(number),
            stored_objects: counters.stored_objects.get(),
            stored_bytes: counters.stored_bytes.get(),
            already_there: counters.already_there.get(),
            store_failures: counters.store_failures.get().into_iter().collect(),
            looked_up: counters.looked_up.get(),
            found: counters.found.get(),
            loaded_objects: counters.loaded_objects.get(),
            loaded_bytes: counters.loaded_bytes.get(),
            unverified: counters.unverified.get(),
            load_failures: counters.load_failures.get().into_iter().collect(),
            evicted_objects: counters.evicted_objects.get(),
            evicted_bytes: counters.evicted_bytes.get(),
            quarantined: status.quarantined_files.unwrap_or(0),
            accounting_errors: stats.accounting_errors,
            guards: TierCall::ALL
                .iter()
                .map(|call| guard(&status, *call))
                .collect(),
        }
    }

    fn tier_status(&self, number: usize) -> TierStatus {
        let tier = &self.tiers[number];
        let (stats, counters) = (tier.stats(), tier.counters());
        let capacity = tier.config().capacity_bytes.unwrap_or(0);
        let recovery = match tier.recovery() {
            kvtier_l2::tier::Recovery::Running => Recovery::Running,
            kvtier_l2::tier::Recovery::Done(found) => Recovery::Done {
                objects: found.objects,
                bytes: found.bytes,
                removed: found.removed,
                foreign: found.foreign,
            },
            kvtier_l2::tier::Recovery::Failed(error) => Recovery::Failed {
                error: redact::text(&error.to_string()),
            },
        };
        let kind = tier.adapter().kind();
        let class = CLASSES.iter().find(|(name, _)| *name == kind);
        let stores = self.stores.of_tier(number);
        let [_, loads_in_flight, stores_in_flight] = self.calls.of_tier(number);
        let failures = |failures: &Failures| {
            let failures = failures.get().into_iter();
            failures
                .map(|(kind, times)| (kind.to_owned(), times))
                .collect()
        };
        let last_store_error = tier.last_store_error();
        TierStatus {
            r#type: class.map_or(kind, |(_, class)| class).to_owned(),
            type_name: Some(kind.to_owned()),
            name: Some(redact::text(tier.name())),
            stored_object_count: Some(stats.objects),
            locked_key_count: stats.leased_objects,
            current_size_bytes: Some(stats.used_bytes),
            max_capacity_bytes: capacity,
            usage_fraction: usage_fraction(stats.used_bytes, capacity),
            cache_salt_count: stats.salts,
            is_full: tier.is_full(),
            last_store_error: last_store_error.map(|error| redact::text(&error.to_string())),
            recovery: Some(recovery),
            pending_objects: stores.queued_objects,
            pending_bytes: stores.queued_bytes,
            dropped_objects: stores.dropped_objects,
            stores_in_flight,
            loads_in_flight,
            store_failures: failures(&counters.store_failures),
            load_failures: failures(&counters.load_failures),
            unverified_objects: counters.unverified.get(),
            ..of_adapter(tier)
        }
    }
}

/// The adapter's own part of a tier's status, without secrets.
fn of_adapter(tier: &Tier) -> TierStatus {
    let status = redact::value(&tier.adapter().status());
    // A field with another type than that of all adapters is left out.
    kvtier_api::from_value(status).unwrap_or_default()
}

/// Used part of the capacity; -1 when there is no bound.
fn usage_fraction(used: u64, capacity: u64) -> f64 {
    match capacity {
        0 => -1.0,
        capacity => used as f64 / capacity as f64,
    }
}

/// Readings of the guards that an adapter has.
fn guard(status: &TierStatus, call: TierCall) -> GuardReadings {
    let breaker = status.breaker.get(call.name());
    let count = |counts: &BTreeMap<String, u64>| counts.get(call.name()).copied().unwrap_or(0);
    GuardReadings {
        is_open: breaker.is_some_and(|breaker| breaker.state != "closed"),
        opened: breaker.map_or(0, |breaker| breaker.opened),
        refused: breaker.map_or(0, |breaker| breaker.refused),
        late: count(&status.late_calls),
        retried: count(&status.retried_items),
    }
}

/// Counts what a tier has evicted since the last time.
pub fn count_evicted(tier: &Tier, metrics: &Metrics) {
    for (salt, objects) in tier.take_evicted_by_salt() {
        metrics.l2.evicted(&salt, objects);
    }
}
