//! Status and readings of the tiers.

use std::collections::BTreeMap;

use kvtier_l2::redact;
use kvtier_l2::tier::{Failures, Tier};
use kvtier_observe::api::{EvictionStatus, Recovery, TierEvictionStatus, TierStatus};

use super::L2;
use kvtier_observe::metrics::{GuardReadings, Metrics, SerdeReadings, TierCall, TierReadings};

/// Types whose name in LMCache 0.5.6's `/status` is another one than in its configuration.
const CLASSES: [(&str, &str); 4] = [
    ("fs", "FSL2Adapter"),
    ("fs_native", "FSNativeL2Adapter"),
    ("mock", "MockL2Adapter"),
    ("fault_inject", "FaultInjectL2Adapter"),
];

/// Eviction of a tier, if it evicts.
pub(super) fn eviction(tier: &Tier) -> Option<TierEvictionStatus> {
    let (eviction, stats) = (tier.eviction()?, tier.stats());
    let capacity = tier.capacity_bytes().unwrap_or(0);
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
}

/// Figures of a tier.
pub(super) fn readings(l2: &L2, number: usize) -> TierReadings {
    let tier = &l2.tiers[number];
    count_evicted(tier, l2.calls.metrics());
    let (stats, counters) = (tier.stats(), tier.counters());
    let (stores, status) = (l2.stores.of_tier(number), of_adapter(tier));
    TierReadings {
        name: tier.name().to_owned(),
        used_bytes: stats.used_bytes,
        capacity_bytes: tier.capacity_bytes().unwrap_or(0),
        objects: stats.objects,
        is_healthy: status.is_healthy,
        is_full: tier.is_full(),
        is_recovering: tier.is_recovering(),
        is_read_only: tier.is_read_only(),
        queued_objects: stores.queued_objects,
        queued_bytes: stores.queued_bytes,
        dropped_objects: stores.dropped_objects,
        dropped_bytes: stores.dropped_bytes,
        calls: l2.calls.of_tier(number),
        loading_bytes: l2.calls.loading_bytes(number),
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
        serdes: serdes(&status),
    }
}

/// State of a tier.
pub(super) fn status(l2: &L2, number: usize) -> TierStatus {
    let tier = &l2.tiers[number];
    let (stats, counters) = (tier.stats(), tier.counters());
    let capacity = tier.capacity_bytes().unwrap_or(0);
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
    let stores = l2.stores.of_tier(number);
    let [_, loads_in_flight, stores_in_flight] = l2.calls.of_tier(number);
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

/// The adapter's own part of a tier's status, without secrets.
pub(super) fn of_adapter(tier: &Tier) -> TierStatus {
    let status = redact::value(&tier.adapter().status());
    // A field with another type than that of all adapters is left out.
    kvtier_observe::api::from_value(status).unwrap_or_default()
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

/// Readings of the transformations that a tier has, added up per type.
fn serdes(status: &TierStatus) -> Vec<SerdeReadings> {
    let mut readings: Vec<SerdeReadings> = Vec::new();
    for serde in &status.serde {
        let at = readings.iter().position(|it| it.name == serde.r#type);
        let at = at.unwrap_or_else(|| {
            readings.push(SerdeReadings {
                name: serde.r#type.clone(),
                ..SerdeReadings::default()
            });
            readings.len() - 1
        });
        let of_type = &mut readings[at];
        of_type.original_bytes += serde.stored_bytes;
        of_type.stored_bytes += serde.transformed_bytes;
        of_type.cpu_seconds += serde.cpu_seconds;
        of_type.store_failures += serde.store_failures;
        of_type.load_failures += serde.corrupt_loads + serde.refused_loads;
    }
    readings
}

/// Counts what a tier has evicted since the last time.
pub fn count_evicted(tier: &Tier, metrics: &Metrics) {
    for (salt, objects) in tier.take_evicted_by_salt() {
        metrics.l2.evicted(&salt, objects);
    }
}

#[cfg(test)]
mod tests {
    use kvtier_core::quota::QuotaMode;
    use kvtier_l2::tier::TierConfig;
    use kvtier_observe::api::SerdeStatus;

    use super::*;

    #[test]
    fn transformations_are_read_by_type() {
        let part = |kind: &str, refused_loads: u64| SerdeStatus {
            r#type: kind.to_owned(),
            stored_bytes: 100,
            transformed_bytes: 60,
            cpu_seconds: 0.5,
            store_failures: 1,
            corrupt_loads: 2,
            refused_loads,
            ..SerdeStatus::default()
        };
        let status = TierStatus {
            serde: vec![part("compress", 0), part("aesgcm", 3), part("aesgcm", 4)],
            ..TierStatus::default()
        };
        let once = SerdeReadings {
            name: "compress".into(),
            original_bytes: 100,
            stored_bytes: 60,
            cpu_seconds: 0.5,
            store_failures: 1,
            load_failures: 2,
        };
        let twice = SerdeReadings {
            name: "aesgcm".into(),
            original_bytes: 200,
            stored_bytes: 120,
            cpu_seconds: 1.0,
            store_failures: 2,
            load_failures: 11,
        };
        assert_eq!(serdes(&status), [once, twice]);
    }

    #[test]
    fn status_of_transformations_has_the_fields_that_are_read() {
        let registry = kvtier_l2::testing::registry();
        let config = r#"{"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1, "serde": {"type": "compress"}}"#;
        let config = registry.parse_json(config).unwrap();
        let tier = TierConfig {
            name: "mock-0".into(),
            capacity_bytes: None,
            eviction: None,
            quota_mode: QuotaMode::Soft,
            quota_default: None,
            reserve_bytes: 0,
        };
        let tier = Tier::new(registry.open(&config).unwrap(), tier);
        let status = of_adapter(&tier);
        let kinds: Vec<_> = status.serde.iter().map(|serde| &*serde.r#type).collect();
        assert_eq!(kinds, ["compress"]);
        // What is read by its own field is not left over.
        let left: Vec<_> = status.serde[0].more.keys().map(String::as_str).collect();
        for field in [
            "stored_bytes",
            "transformed_bytes",
            "cpu_seconds",
            "refused_loads",
        ] {
            assert!(!left.contains(&field), "{left:?}");
        }
    }
}
