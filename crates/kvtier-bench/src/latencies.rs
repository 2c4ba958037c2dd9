//! Latencies of one operation.

use std::time::Duration;

use hdrhistogram::Histogram;

/// Longest latency that is distinguished: an hour.
const MAX_NANOS: u64 = 3_600_000_000_000;

/// A histogram of latencies in nanoseconds, with three digits.
#[derive(Debug, Clone)]
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    pub(crate) fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, MAX_NANOS, 3);
        Self(histogram.expect("the bounds and digits are allowed"))
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        self.0.saturating_record((latency.as_nanos() as u64).max(1));
    }

    pub(crate) fn add(&mut self, other: &Self) {
        // Cannot fail: all have the same bounds.
        let _ = self.0.add(&other.0);
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    /// The latency at a quantile, in microseconds.
    pub(crate) fn micros_at(&self, quantile: f64) -> f64 {
        micros(self.0.value_at_quantile(quantile))
    }

    /// The longest latency, in microseconds.
    pub(crate) fn max_micros(&self) -> f64 {
        micros(self.0.max())
    }

    /// The mean latency, in microseconds.
    pub(crate) fn mean_micros(&self) -> f64 {
        self.0.mean() / 1000.0
    }
}

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1000.0
}
