//! Results of the requests of one row.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use hdrhistogram::Histogram;

use super::report::Report;

/// Longest latency that is distinguished: an hour.
const MAX_NANOS: u64 = 3_600_000_000_000;

/// Recorder of latencies and failures.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    /// In nanoseconds, with three digits.
    latencies: Histogram<u64>,
    /// Time in all measured requests.
    busy: Duration,
    pub(crate) bytes: u64,
    pub(crate) failed: u64,
    mismatched: u64,
    first_failure: Option<String>,
}

impl Default for Recorder {
    fn default() -> Self {
        let latencies = Histogram::new_with_bounds(1, MAX_NANOS, 3);
        Self {
            latencies: latencies.expect("the bounds and digits are allowed"),
            busy: Duration::ZERO,
            bytes: 0,
            failed: 0,
            mismatched: 0,
            first_failure: None,
        }
    }
}

impl Recorder {
    /// Records a request that succeeded.
    pub(crate) fn success(&mut self, latency: Duration, bytes: u64) {
        self.latencies
            .saturating_record((latency.as_nanos() as u64).max(1));
        self.busy += latency;
        self.bytes += bytes;
    }

    /// Records a request that was answered, and failed.
    pub(crate) fn failure(&mut self, why: impl FnOnce() -> String) {
        self.failed += 1;
        self.first_failure.get_or_insert_with(why);
    }

    /// Records a chunk that was retrieved with wrong bytes.
    pub(crate) fn mismatch(&mut self, why: impl FnOnce() -> String) {
        self.mismatched += 1;
        self.first_failure.get_or_insert_with(why);
    }

    /// Requests that succeeded.
    pub(crate) fn count(&self) -> u64 {
        self.latencies.len()
    }

    /// Adds the records of another client.
    pub(crate) fn add(&mut self, other: Self) {
        // Cannot fail: all have the same bounds.
        let _ = self.latencies.add(&other.latencies);
        self.busy += other.busy;
        self.bytes += other.bytes;
        self.failed += other.failed;
        self.mismatched += other.mismatched;
        self.first_failure = self.first_failure.take().or(other.first_failure);
    }

    /// The row, for clients that ran for `wall`, without the warm-up.
    pub(crate) fn row(&self, name: impl Into<String>, wall: Duration) -> Row {
        let count = self.latencies.len();
        let at = |quantile| self.latencies.value_at_quantile(quantile) as f64 / 1000.0;
        let latency = (count > 0).then(|| Latency {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: self.latencies.max() as f64 / 1000.0,
            mean: self.latencies.mean() / 1000.0,
        });
        let gb = self.bytes as f64 / 1e9;
        Row {
            name: name.into(),
            count,
            failed: self.failed,
            mismatched: self.mismatched,
            latency_us: latency,
            per_second: rate(count as f64, wall),
            gb_per_second: (self.bytes > 0).then(|| rate(gb, self.busy)).flatten(),
            first_failure: self.first_failure.clone(),
            facts: BTreeMap::new(),
        }
    }
}

fn rate(amount: f64, span: Duration) -> Option<f64> {
    let seconds = span.as_secs_f64();
    (seconds > 0.0 && amount > 0.0).then(|| amount / seconds)
}

/// The middle one of these values, or between the two in the middle; none of none.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (below, above) = (values.len().saturating_sub(1) / 2, values.len() / 2);
    Some(f64::midpoint(*values.get(below)?, *values.get(above)?))
}

/// Results of requests that are looked up, retrieved and stored.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunOutcome {
    pub(crate) lookups: Recorder,
    pub(crate) retrieves: Recorder,
    pub(crate) stores: Recorder,
    pub(crate) asked_tokens: u64,
    pub(crate) hit_tokens: u64,
}

impl RunOutcome {
    /// Adds the results of other requests.
    pub(crate) fn add(&mut self, other: Self) {
        self.lookups.add(other.lookups);
        self.retrieves.add(other.retrieves);
        self.stores.add(other.stores);
        self.asked_tokens += other.asked_tokens;
        self.hit_tokens += other.hit_tokens;
    }

    /// Adds a row per operation.
    pub(crate) fn report(
        &self,
        report: &mut Report,
        wall: Duration,
        name: impl Fn(&str) -> String,
    ) {
        report.add(self.lookups.row(name("lookup"), wall));
        report.add(self.retrieves.row(name("retrieve"), wall));
        report.add(self.stores.row(name("store"), wall));
    }

    /// Share of the tokens that hit.
    pub(crate) fn hit_rate(&self) -> f64 {
        self.hit_tokens as f64 / (self.asked_tokens as f64).max(1.0)
    }
}

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Latency {
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
    pub(crate) mean: f64,
}

/// One row of the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Name of the measurement.
    pub(crate) name: String,
    /// Requests that succeeded.
    pub(crate) count: u64,
    /// Requests that failed.
    pub(crate) failed: u64,
    /// Chunks with wrong bytes.
    pub(crate) mismatched: u64,
    /// Latencies; none if nothing was measured.
    pub(crate) latency_us: Option<Latency>,
    /// Requests per second of wall time, of all clients together, including cleanup.
    pub(crate) per_second: Option<f64>,
    /// 10^9 chunk bytes per second spent in requests.
    pub(crate) gb_per_second: Option<f64>,
    /// The first failure.
    pub(crate) first_failure: Option<String>,
    /// Further numbers of this row, by name.
    pub(crate) facts: BTreeMap<String, f64>,
}

impl Row {
    /// A row of facts only.
    pub(crate) fn of_facts(name: impl Into<String>) -> Self {
        Recorder::default().row(name, Duration::ZERO)
    }

    /// A number that was added.
    pub(crate) fn get(&self, name: &str) -> Option<f64> {
        self.facts.get(name).copied()
    }

    /// Adds a number.
    pub(crate) fn fact(mut self, name: &str, value: f64) -> Self {
        self.facts.insert(name.to_owned(), value);
        self
    }
}
