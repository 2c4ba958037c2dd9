//! What happened between two samples.

use super::sample::Sample;

/// Prefix of a histogram's series.
const DURATION: &str = "kvtier_request_duration_seconds";

/// Counters of one interval, per second.
pub(super) struct Rates<'a> {
    before: &'a Sample,
    after: &'a Sample,
    seconds: f64,
}

/// Answers to one operation.
pub(super) struct Operation {
    pub(super) name: String,
    pub(super) per_second: f64,
    /// Seconds, at most; none without answers in the interval.
    pub(super) p50: Option<f64>,
    pub(super) p99: Option<f64>,
}

impl<'a> Rates<'a> {
    pub(super) fn between(before: &'a Sample, after: &'a Sample) -> Self {
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        Self {
            before,
            after,
            seconds: seconds.max(0.001),
        }
    }

    fn difference(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let after = self.after.sum(name, labels);
        match after - self.before.sum(name, labels) {
            difference if difference < 0.0 => after,
            difference => difference,
        }
    }

    /// Growth of a counter per second. A counter that has become less belongs to another process, and began at 0.
    pub(super) fn per_second(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.difference(name, labels) / self.seconds
    }

    /// Growth of one counter as a part of another's; none if that did not grow.
    pub(super) fn part(&self, of: &str, all: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let all = self.difference(all, labels);
        (all > 0.0).then(|| (self.difference(of, labels) / all).clamp(0.0, 1.0))
    }

    /// The operations that were answered, most of all first.
    pub(super) fn operations(&self) -> Vec<Operation> {
        let names = self.after.values(&format!("{DURATION}_count"), "operation");
        let operation = |name: String| Operation {
            per_second: self.per_second(&format!("{DURATION}_count"), &[("operation", &name)]),
            p50: self.quantile(&name, 0.5),
            p99: self.quantile(&name, 0.99),
            name,
        };
        let mut found: Vec<_> = names.into_iter().map(operation).collect();
        found.retain(|operation| operation.per_second > 0.0);
        found.sort_by(|a, b| b.per_second.total_cmp(&a.per_second));
        found
    }

    /// The least bound of the histogram below which this part of the answers was.
    fn quantile(&self, operation: &str, part: f64) -> Option<f64> {
        let name = format!("{DURATION}_bucket");
        let bound = |le: &String| Some((le.parse::<f64>().ok()?, le.clone()));
        let bounds = self.after.values(&name, "le");
        let mut bounds: Vec<_> = bounds.iter().filter_map(bound).collect();
        bounds.sort_by(|a, b| a.0.total_cmp(&b.0));
        let below = |le: &str| self.difference(&name, &[("operation", operation), ("le", le)]);
        let all = below(&bounds.last()?.1);
        if all <= 0.0 {
            return None;
        }
        let found = bounds.iter().find(|(_, le)| below(le) >= part * all)?;
        Some(found.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::{Sample, sample};
    use super::*;
    use serde_json::json;
    use std::time::Duration;

    fn later(seconds: u64, metrics: &str) -> Sample {
        let mut sample = sample(json!({}), metrics);
        sample.at += Duration::from_secs(seconds);
        sample
    }

    #[test]
    fn counters_become_rates_and_quantiles() {
        let text = |count: [u32; 3], hit: u32, asked: u32| {
            let buckets = [("0.001", count[0]), ("0.01", count[1]), ("+Inf", count[2])];
            let buckets = buckets.map(|(le, count)| {
                format!("{DURATION}_bucket{{operation=\"lookup\",le=\"{le}\"}} {count}\n")
            });
            buckets.concat()
                + &format!(
                    "{DURATION}_count{{operation=\"lookup\"}} {}\nhit {hit}\nasked {asked}\n",
                    count[2]
                )
        };
        let before = later(0, &text([10, 10, 10], 5, 10));
        let after = later(2, &text([70, 108, 110], 85, 110));
        let rates = Rates::between(&before, &after);
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        let found = rates.operations();
        assert_eq!(found.len(), 1);
        assert!((found[0].per_second - 100.0 / seconds).abs() < 1e-9);
        assert_eq!(
            (found[0].p50, found[0].p99),
            (Some(0.001), Some(f64::INFINITY))
        );
        assert_eq!(rates.part("hit", "asked", &[]), Some(0.8));
        // A server that was started again: everything is new.
        let rates = Rates::between(&after, &before);
        assert!(rates.part("hit", "asked", &[]) == Some(0.5));
        assert_eq!(rates.part("hit", "nothing", &[]), None);
    }
}
