//! What happened in an interval, and the point of the history that it becomes.

use std::collections::BTreeMap;
use std::time::Instant;

use kvtier_observe::api::{
    ByDirection, Metrics, OperationRate, Rates, Refusals, TierTraffic, Traffic,
};
use kvtier_observe::metrics::{Readings, TierReadings};

use super::history::{Point, SERIES};

/// Operations of each kind, by either transfer mode.
const LOOKUPS: [&str; 1] = ["lookup"];
const STORES: [&str; 2] = ["store", "commit_store"];
const RETRIEVES: [&str; 2] = ["retrieve", "prepare_retrieve"];

/// Last bound of the histograms, seconds: what is above it is drawn there.
const LAST_BOUND: f64 = 10.0;

/// Counters of the tiers at one moment.
#[derive(Default)]
pub(super) struct Tiers {
    at: Option<Instant>,
    by_name: BTreeMap<String, Tier>,
}

#[derive(Clone, Copy, Default)]
struct Tier {
    stored_bytes: u64,
    loaded_bytes: u64,
    evicted_bytes: u64,
    evicted_objects: u64,
    failures: u64,
    looked_up: u64,
    found: u64,
}

impl Tiers {
    pub(super) fn of(at: Instant, tiers: &[TierReadings]) -> Self {
        let counted = |tier: &TierReadings| {
            let failures = tier.store_failures.iter().chain(&tier.load_failures);
            let counters = Tier {
                stored_bytes: tier.stored_bytes,
                loaded_bytes: tier.loaded_bytes,
                evicted_bytes: tier.evicted_bytes,
                evicted_objects: tier.evicted_objects,
                failures: failures.map(|(_, count)| count).sum(),
                looked_up: tier.looked_up,
                found: tier.found,
            };
            (tier.name.clone(), counters)
        };
        Self {
            at: Some(at),
            by_name: tiers.iter().map(counted).collect(),
        }
    }

    /// What happened since then.
    pub(super) fn since(&self, before: &Self) -> BTreeMap<String, TierTraffic> {
        let span = self.at.zip(before.at);
        let seconds = span.map_or(0.0, |(now, then)| now.duration_since(then).as_secs_f64());
        let seconds = seconds.max(0.001);
        let traffic = |(name, now): (&String, &Tier)| {
            let then = before.by_name.get(name).copied().unwrap_or_default();
            let grown = |count: fn(&Tier) -> u64| count(now).saturating_sub(count(&then)) as f64;
            let looked_up = grown(|tier| tier.looked_up);
            let traffic = TierTraffic {
                stored_bytes: grown(|tier| tier.stored_bytes) / seconds,
                loaded_bytes: grown(|tier| tier.loaded_bytes) / seconds,
                evicted_bytes: grown(|tier| tier.evicted_bytes) / seconds,
                evicted_objects: now.evicted_objects as f64,
                failures: grown(|tier| tier.failures) / seconds,
                hit_rate: (looked_up > 0.0).then(|| grown(|tier| tier.found) / looked_up),
            };
            (name.clone(), traffic)
        };
        self.by_name.iter().map(traffic).collect()
    }
}

/// The traffic of an interval that ended with these counters.
pub(super) fn of(
    rates: &Rates<'_>,
    now: &Metrics,
    tiers: BTreeMap<String, TierTraffic>,
) -> Traffic {
    let per_second = |name: &str| rates.per_second(name, &[]);
    let kind = |name: &str, operations: &[&str], finished: &str| OperationRate {
        // Also those that were answered by neither.
        per_second: per_second(finished),
        ..rates.operation(name, operations)
    };
    Traffic {
        seconds: rates.seconds(),
        hit_rate: rates.hit_rate(),
        requested_tokens: per_second("lmcache_mp_lookup_requested_tokens_total"),
        hit_tokens_l1: per_second("lmcache_mp_lookup_hit_l1_tokens_total"),
        hit_tokens_l2: per_second("lmcache_mp_lookup_hit_l2_tokens_total"),
        lookups: rates.operation("lookups", &LOOKUPS),
        stores: kind("stores", &STORES, "lmcache_mp_num_finished_stores_total"),
        retrieves: kind(
            "retrieves",
            &RETRIEVES,
            "lmcache_mp_num_finished_retrieves_total",
        ),
        operations: rates.operations(),
        refused: refusals(rates, now, "kvtier_refused_requests_total", "operation"),
        early_exits: refusals(
            rates,
            now,
            "lmcache_mp_lookup_early_exit_requests_total",
            "",
        ),
        l1_evicted_objects: now.sum("kvtier_l1_evicted_chunks_total", &[]),
        l1_evicted_bytes: per_second("kvtier_l1_evicted_bytes_total"),
        tiers,
        gpus: gpus(rates, now),
    }
}

/// Refusals by reason, and by what this label says; the most frequent ones first.
fn refusals(rates: &Rates<'_>, now: &Metrics, name: &str, by: &str) -> Vec<Refusals> {
    let mut found = BTreeMap::new();
    for series in now.series(name) {
        let reason = series.label("reason").unwrap_or_default();
        let key = (series.label(by).unwrap_or_default(), reason);
        *found.entry(key).or_insert(0.0) += series.value;
    }
    let refusals = |((operation, reason), total): ((&str, &str), f64)| {
        let mut labels = vec![("reason", reason)];
        labels.extend((!operation.is_empty()).then_some((by, operation)));
        Refusals {
            operation: operation.to_owned(),
            reason: reason.to_owned(),
            total,
            per_second: rates.per_second(name, &labels),
        }
    };
    let mut found: Vec<_> = found.into_iter().map(refusals).collect();
    found.sort_by(|a, b| b.total.total_cmp(&a.total));
    found
}

fn gpus(rates: &Rates<'_>, now: &Metrics) -> BTreeMap<String, ByDirection<f64>> {
    let name = "kvtier_gpu_copied_bytes_total";
    let gpus = now.values(name, "gpu").into_iter();
    let moved = |gpu: String| {
        let rate = |direction| rates.per_second(name, &[("gpu", &gpu), ("direction", direction)]);
        let both = ByDirection {
            store: rate("store"),
            retrieve: rate("retrieve"),
        };
        (gpu, both)
    };
    gpus.map(moved).collect()
}

/// The point of the history, of the traffic of its interval and the readings at its end.
pub(super) fn point(traffic: Option<&Traffic>, readings: &Readings) -> Point {
    let none = Traffic::default();
    let known = traffic.unwrap_or(&none);
    let value = |name: &str| -> Option<f64> {
        let tiers = known.tiers.values();
        let latency = |bound: Option<f64>| bound.map(|bound| bound.min(LAST_BOUND));
        let counted = match name {
            "l1_used_bytes" => return Some(readings.used_bytes as f64),
            "l2_queued_bytes" => return Some(readings.l2_queued_bytes as f64),
            "hit_rate" => known.hit_rate?,
            "requested_tokens" => known.requested_tokens,
            "lookups" => known.lookups.per_second,
            "lookup_p50" => latency(known.lookups.p50)?,
            "lookup_p99" => latency(known.lookups.p99)?,
            "stores" => known.stores.per_second,
            "store_p50" => latency(known.stores.p50)?,
            "store_p99" => latency(known.stores.p99)?,
            "retrieves" => known.retrieves.per_second,
            "retrieve_p50" => latency(known.retrieves.p50)?,
            "retrieve_p99" => latency(known.retrieves.p99)?,
            "l1_evicted_bytes" => known.l1_evicted_bytes,
            "l2_stored_bytes" => tiers.map(|tier| tier.stored_bytes).sum(),
            "l2_loaded_bytes" => tiers.map(|tier| tier.loaded_bytes).sum(),
            "refused" => known.refused.iter().map(|it| it.per_second).sum(),
            _ => return None,
        };
        traffic.map(|_| counted)
    };
    SERIES.map(|name| value(name).map_or(f32::NAN, |value| value as f32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_has_a_value() {
        let traffic = Traffic {
            hit_rate: Some(0.5),
            lookups: OperationRate {
                p50: Some(0.001),
                p99: Some(f64::INFINITY),
                ..OperationRate::default()
            },
            ..Traffic::default()
        };
        let quantiles = OperationRate {
            p50: Some(0.1),
            p99: Some(0.2),
            ..OperationRate::default()
        };
        let traffic = Traffic {
            stores: quantiles.clone(),
            retrieves: quantiles,
            ..traffic
        };
        let readings = Readings {
            used_bytes: 7,
            ..Readings::default()
        };
        let full = point(Some(&traffic), &readings);
        let named = |name| SERIES.iter().position(|known| *known == name).unwrap();
        assert!(full.iter().all(|value| value.is_finite()), "{full:?}");
        assert_eq!(full[named("lookup_p99")], 10.0);
        // Before the second reading there are only gauges.
        let first = point(None, &readings);
        let known = first.iter().filter(|value| value.is_finite());
        assert_eq!(known.copied().collect::<Vec<_>>(), [7.0, 0.0]);
    }

    #[test]
    fn tiers_count_from_the_reading_before() {
        let tier = |stored_bytes, looked_up, found| TierReadings {
            name: "fs-0".into(),
            stored_bytes,
            looked_up,
            found,
            store_failures: vec![("full", stored_bytes)],
            ..TierReadings::default()
        };
        let start = Instant::now();
        let before = Tiers::of(start, &[tier(10, 4, 4)]);
        let after = Tiers::of(
            start + std::time::Duration::from_secs(2),
            &[tier(110, 14, 9)],
        );
        let traffic = &after.since(&before)["fs-0"];
        assert_eq!((traffic.stored_bytes, traffic.failures), (50.0, 50.0));
        assert_eq!(traffic.hit_rate, Some(0.5));
        assert_eq!(before.since(&after)["fs-0"].hit_rate, None);
    }
}
