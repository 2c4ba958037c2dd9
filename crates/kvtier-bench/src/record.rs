//! Results of the requests of one row.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::latencies::Latencies;

/// Recorder of latencies and failures.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    latencies: Latencies,
    /// Time in all measured requests.
    busy: Duration,
    bytes: u64,
    failed: u64,
    mismatched: u64,
    first_failure: Option<String>,
}

impl Recorder {
    pub(crate) fn new() -> Self {
        Self {
            latencies: Latencies::new(),
            busy: Duration::ZERO,
            bytes: 0,
            failed: 0,
            mismatched: 0,
            first_failure: None,
        }
    }

    /// Records a request that succeeded.
    pub(crate) fn success(&mut self, latency: Duration, bytes: u64) {
        self.latencies.record(latency);
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

    /// Adds the records of another client.
    pub(crate) fn add(&mut self, other: Self) {
        self.latencies.add(&other.latencies);
        self.busy += other.busy;
        self.bytes += other.bytes;
        self.failed += other.failed;
        self.mismatched += other.mismatched;
        self.first_failure = self.first_failure.take().or(other.first_failure);
    }

    /// The row, for clients that ran for `wall`, without the warm-up.
    pub(crate) fn row(&self, name: impl Into<String>, wall: Duration) -> Row {
        let count = self.latencies.count();
        let at = |quantile| self.latencies.micros_at(quantile);
        let latency = (count > 0).then(|| Latency {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: self.latencies.max_micros(),
            mean: self.latencies.mean_micros(),
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
        Recorder::new().row(name, Duration::ZERO)
    }

    /// Adds a number.
    pub(crate) fn fact(mut self, name: &str, value: f64) -> Self {
        self.facts.insert(name.to_owned(), value);
        self
    }
}
