//! What happened between two readings of the metrics.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::series::{Metrics, Series};

/// Prefix of a histogram's series.
const DURATION: &str = "kvtier_request_duration_seconds";

/// Counters of one interval, per second.
pub struct Rates<'a> {
    before: &'a Metrics,
    after: &'a Metrics,
    seconds: f64,
    /// Answers by operation: how many were below each bound.
    answers: BTreeMap<&'a str, Vec<(f64, f64)>>,
}

/// Answers to one operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct OperationRate {
    /// Name of the operation.
    pub name: String,
    /// Answers per second.
    pub per_second: f64,
    /// The bound of the histogram below which half of the answers were, seconds; `null` without answers, or above the last
    /// bound.
    pub p50: Option<f64>,
    /// Bound of the histogram below which 99 of 100 answers were, seconds; `null` as for `p50`.
    pub p99: Option<f64>,
}

impl<'a> Rates<'a> {
    /// Rates of the interval between two readings.
    pub fn between(before: &'a Metrics, after: &'a Metrics) -> Self {
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        Self {
            before,
            after,
            seconds: seconds.max(0.001),
            answers: answers(before, after),
        }
    }

    /// Length of the interval.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Growth of a counter. One that has become less belongs to another process, and began at 0.
    fn difference(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        grown(self.before.sum(name, labels), self.after.sum(name, labels))
    }

    /// Growth of a counter per second.
    pub fn per_second(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.difference(name, labels) / self.seconds
    }

    /// Growth of one counter as a part of another's; none if that did not grow.
    pub fn part(&self, of: &str, all: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let all = self.difference(all, labels);
        (all > 0.0).then(|| (self.difference(of, labels) / all).clamp(0.0, 1.0))
    }

    /// Tokens found of those that lookups asked for; none if they asked for none.
    pub fn hit_rate(&self) -> Option<f64> {
        let (hit, asked) = (
            "lmcache_mp_lookup_hit_tokens_total",
            "lmcache_mp_lookup_requested_tokens_total",
        );
        self.part(hit, asked, &[])
    }

    /// The operations that were answered, most of all first.
    pub fn operations(&self) -> Vec<OperationRate> {
        let names = self.answers.keys();
        let mut found: Vec<_> = names.map(|name| self.operation(name, &[name])).collect();
        found.retain(|operation| operation.per_second > 0.0);
        found.sort_by(|a, b| b.per_second.total_cmp(&a.per_second));
        found
    }

    /// Several operations as one of this name.
    pub fn operation(&self, name: &str, operations: &[&str]) -> OperationRate {
        let mut bounds = BTreeMap::<u64, f64>::new();
        let parts = operations.iter().filter_map(|name| self.answers.get(name));
        for (bound, count) in parts.flatten() {
            // Bounds are not negative, so their bits have their order.
            *bounds.entry(bound.to_bits()).or_default() += count;
        }
        let all = bounds.values().next_back().copied().unwrap_or_default();
        let quantile = |part: f64| {
            let mut bounds = bounds.iter().filter(|_| all > 0.0);
            let found = bounds.find(|(_, count)| **count >= part * all)?;
            Some(f64::from_bits(*found.0))
        };
        OperationRate {
            name: name.to_owned(),
            per_second: all / self.seconds,
            p50: quantile(0.5),
            p99: quantile(0.99),
        }
    }
}

fn grown(before: f64, after: f64) -> f64 {
    match after - before {
        difference if difference < 0.0 => after,
        difference => difference,
    }
}

/// By operation how many answers of the interval took no longer than each bound.
fn answers<'a>(before: &'a Metrics, after: &'a Metrics) -> BTreeMap<&'a str, Vec<(f64, f64)>> {
    fn key(series: &Series) -> Option<(&str, &str)> {
        Some((series.label("operation")?, series.label("le")?))
    }
    let name = format!("{DURATION}_bucket");
    let known = before.series(&name).iter();
    let known: HashMap<_, _> = known
        .filter_map(|series| Some((key(series)?, series.value)))
        .collect();
    let mut answers = BTreeMap::<_, Vec<_>>::new();
    for series in after.series(&name) {
        let Some((operation, bound)) = key(series) else {
            continue;
        };
        let Ok(le) = bound.parse::<f64>() else {
            continue;
        };
        let before = known.get(&(operation, bound)).copied().unwrap_or(0.0);
        let bounds = answers.entry(operation).or_default();
        bounds.push((le, grown(before, series.value)));
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn text(operation: &str, count: [u32; 3]) -> String {
        let buckets = [("0.001", count[0]), ("0.01", count[1]), ("+Inf", count[2])];
        let buckets = buckets.map(|(le, count)| {
            format!("{DURATION}_bucket{{operation=\"{operation}\",le=\"{le}\"}} {count}\n")
        });
        buckets.concat()
    }

    #[test]
    fn counters_become_rates_and_quantiles() {
        let text = |count, hit: u32, asked: u32| {
            text("lookup", count) + &format!("hit {hit}\nasked {asked}\n")
        };
        let now = Instant::now();
        let read = |after, text: &str| Metrics::parse(now + after, text, &[""]);
        let before = read(Duration::ZERO, &text([10, 10, 10], 5, 10));
        let after = read(Duration::from_secs(2), &text([70, 108, 110], 85, 110));
        let rates = Rates::between(&before, &after);
        let found = rates.operations();
        assert_eq!(found.len(), 1);
        assert_eq!(
            found[0],
            OperationRate {
                name: "lookup".into(),
                per_second: 50.0,
                p50: Some(0.001),
                p99: Some(f64::INFINITY),
            }
        );
        assert_eq!(rates.part("hit", "asked", &[]), Some(0.8));
        // A server that was started again: everything is new.
        let rates = Rates::between(&after, &before);
        assert!(rates.part("hit", "asked", &[]) == Some(0.5));
        assert_eq!(rates.part("hit", "nothing", &[]), None);
    }

    #[test]
    fn operations_are_one_distribution_together() {
        let now = Instant::now();
        let before = Metrics::parse(now, "", &[""]);
        let both = text("store", [1, 1, 1]) + &text("commit_store", [0, 99, 99]);
        let after = Metrics::parse(now + Duration::from_secs(10), &both, &[""]);
        let rates = Rates::between(&before, &after);
        let stores = rates.operation("stores", &["store", "commit_store", "absent"]);
        assert_eq!((stores.p50, stores.p99), (Some(0.01), Some(0.01)));
        assert_eq!(stores.per_second, 10.0);
        let none = rates.operation("retrieves", &["retrieve"]);
        assert_eq!((none.per_second, none.p50, none.p99), (0.0, None, None));
    }
}
