//! What the tiers look like from outside.

use kvtier_l2::redact;
use kvtier_l2::tier::{Recovery, Tier};
use serde_json::{Map, Value, json};

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

    /// The tiers in the shape of LMCache 0.5.6's `/status`, with more keys.
    pub fn adapters_status(&self) -> Vec<Value> {
        (0..self.tiers.len())
            .map(|tier| redact::value(&Value::Object(self.adapter_status(tier))))
            .collect()
    }

    /// The eviction of the tiers that have any.
    pub fn eviction_status(&self) -> Vec<Value> {
        let tiers = self.tiers.iter().filter_map(|tier| {
            let (eviction, stats) = (tier.config().eviction?, tier.stats());
            let capacity = tier.config().capacity_bytes.unwrap_or(0);
            Some(json!({
                "adapter": tier.name(),
                "eviction_policy": eviction.policy.name(),
                "trigger_watermark": eviction.trigger_watermark,
                "eviction_ratio": eviction.eviction_ratio,
                "current_usage": usage_fraction(stats.used_bytes, capacity),
                "total_bytes_used": stats.used_bytes,
                "total_capacity_bytes": capacity,
                // A count only: there may be a hundred thousand tenants.
                "num_cache_salt_buckets": stats.salts,
                "num_over_quota_buckets": stats.over_quota_salts,
                "over_quota_refusals": stats.over_quota_total,
            }))
        });
        tiers.collect()
    }

    fn tier_readings(&self, number: usize) -> TierReadings {
        let tier = &self.tiers[number];
        count_evicted(tier, self.calls.metrics());
        let (stats, counters) = (tier.stats(), tier.counters());
        let (stores, status) = (self.stores.of_tier(number), tier.adapter().status());
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
            quarantined: status["quarantined_files"].as_u64().unwrap_or(0),
            accounting_errors: stats.accounting_errors,
            guards: TierCall::ALL
                .iter()
                .map(|call| guard(&status, *call))
                .collect(),
        }
    }

    fn adapter_status(&self, number: usize) -> Map<String, Value> {
        let tier = &self.tiers[number];
        let (stats, counters) = (tier.stats(), tier.counters());
        let capacity = tier.config().capacity_bytes.unwrap_or(0);
        let recovery = match tier.recovery() {
            Recovery::Running => json!({ "state": "running" }),
            Recovery::Done(found) => json!({
                "state": "done", "objects": found.objects, "bytes": found.bytes, "removed": found.removed,
                "foreign": found.foreign,
            }),
            Recovery::Failed(error) => json!({ "state": "failed", "error": error.to_string() }),
        };
        let mut status = match tier.adapter().status() {
            Value::Object(status) => status,
            _ => Map::new(),
        };
        let kind = tier.adapter().kind();
        let class = CLASSES.iter().find(|(name, _)| *name == kind);
        let stores = self.stores.of_tier(number);
        let [_, loads_in_flight, stores_in_flight] = self.calls.of_tier(number);
        for (key, value) in [
            ("type", json!(class.map_or(kind, |(_, class)| class))),
            ("type_name", json!(kind)),
            ("name", json!(tier.name())),
            ("stored_object_count", json!(stats.objects)),
            ("locked_key_count", json!(stats.leased_objects)),
            ("current_size_bytes", json!(stats.used_bytes)),
            ("max_capacity_bytes", json!(capacity)),
            (
                "usage_fraction",
                json!(usage_fraction(stats.used_bytes, capacity)),
            ),
            ("cache_salt_count", json!(stats.salts)),
            ("is_full", json!(tier.is_full())),
            (
                "last_store_error",
                json!(tier.last_store_error().map(|error| error.to_string())),
            ),
            ("recovery", recovery),
            ("pending_objects", json!(stores.queued_objects)),
            ("pending_bytes", json!(stores.queued_bytes)),
            ("dropped_objects", json!(stores.dropped_objects)),
            ("stores_in_flight", json!(stores_in_flight)),
            ("loads_in_flight", json!(loads_in_flight)),
            ("store_failures", json!(counters.store_failures.get())),
            ("load_failures", json!(counters.load_failures.get())),
            ("unverified_objects", json!(counters.unverified.get())),
        ] {
            status.insert(key.into(), value);
        }
        status
    }
}

/// Used part of the capacity; -1 when there is no bound.
fn usage_fraction(used: u64, capacity: u64) -> f64 {
    match capacity {
        0 => -1.0,
        capacity => used as f64 / capacity as f64,
    }
}

/// What a guarded adapter says of its guards; nothing of those it does not have.
fn guard(status: &Value, call: TierCall) -> GuardReadings {
    let breaker = &status["breaker"][call.name()];
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    GuardReadings {
        is_open: breaker["state"]
            .as_str()
            .is_some_and(|state| state != "closed"),
        opened: number(&breaker["opened"]),
        refused: number(&breaker["refused"]),
        late: number(&status["late_calls"][call.name()]),
        retried: number(&status["retried_items"][call.name()]),
    }
}

/// Counts what a tier has evicted since the last time.
pub fn count_evicted(tier: &Tier, metrics: &Metrics) {
    for (salt, objects) in tier.take_evicted_by_salt() {
        metrics.l2.evicted(&salt, objects);
    }
}
