//! What happened to the requests of one row.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Longest latency that is told apart, in nanoseconds: an hour.
const LONGEST: u64 = 3_600_000_000_000;

/// Latencies and failures, while they happen.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    /// Nanoseconds, to three digits.
    latencies: Histogram<u64>,
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
            latencies: Histogram::new_with_bounds(1, LONGEST, 3)
                .expect("the bounds and digits are allowed"),
            busy: Duration::ZERO,
            bytes: 0,
            failed: 0,
            mismatched: 0,
            first_failure: None,
        }
    }

    /// A request that did what it should.
    pub(crate) fn success(&mut self, latency: Duration, bytes: u64) {
        self.latencies
            .saturating_record((latency.as_nanos() as u64).max(1));
        self.busy += latency;
        self.bytes += bytes;
    }

    /// A request that was answered, but did not do what it should.
    pub(crate) fn failure(&mut self, why: impl FnOnce() -> String) {
        self.failed += 1;
        self.first_failure.get_or_insert_with(why);
    }

    /// A chunk that came back with other bytes.
    pub(crate) fn mismatch(&mut self, why: impl FnOnce() -> String) {
        self.mismatched += 1;
        self.first_failure.get_or_insert_with(why);
    }

    /// Adds what another client recorded.
    pub(crate) fn add(&mut self, other: Self) {
        self.latencies += other.latencies;
        self.busy += other.busy;
        self.bytes += other.bytes;
        self.failed += other.failed;
        self.mismatched += other.mismatched;
        self.first_failure = self.first_failure.take().or(other.first_failure);
    }

    /// The row, for clients that ran for `wall`, without the warm-up.
    pub(crate) fn row(&self, name: impl Into<String>, wall: Duration) -> Row {
        let micros = |nanos: u64| nanos as f64 / 1000.0;
        let at = |quantile| micros(self.latencies.value_at_quantile(quantile));
        let some = !self.latencies.is_empty();
        let latency = some.then(|| Latency {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: micros(self.latencies.max()),
            mean: self.latencies.mean() / 1000.0,
        });
        let gb = self.bytes as f64 / 1e9;
        Row {
            name: name.into(),
            count: self.latencies.len(),
            failed: self.failed,
            mismatched: self.mismatched,
            latency_us: latency,
            per_second: rate(self.latencies.len() as f64, wall),
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
    /// What was measured.
    pub(crate) name: String,
    /// Requests that did what they should.
    pub(crate) count: u64,
    /// Requests that did not.
    pub(crate) failed: u64,
    /// Chunks with wrong bytes.
    pub(crate) mismatched: u64,
    /// Latencies; none when nothing was measured.
    pub(crate) latency_us: Option<Latency>,
    /// Requests a second of wall time, all clients together, cleaning up included.
    pub(crate) per_second: Option<f64>,
    /// Chunk bytes in 10^9 for each second spent in requests.
    pub(crate) gb_per_second: Option<f64>,
    /// What the first failure was.
    pub(crate) first_failure: Option<String>,
    /// Other numbers of this row, by name.
    pub(crate) facts: BTreeMap<String, f64>,
}

impl Row {
    /// A row of facts only.
    pub(crate) fn of_facts(name: impl Into<String>) -> Self {
        Recorder::new().row(name, Duration::ZERO)
    }

    /// The same with one more number.
    pub(crate) fn fact(mut self, name: &str, value: f64) -> Self {
        self.facts.insert(name.to_owned(), value);
        self
    }
}
