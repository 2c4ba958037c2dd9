//! The engine's time: every deadline and age is measured by it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time since the engine was made, or the first of those whose L1 it goes on with: the system's monotonic clock, and what a
/// test has skipped.
#[derive(Debug)]
pub struct Clock {
    started: Instant,
    /// Age of L1 then.
    before: Duration,
    /// Nanoseconds.
    skipped: AtomicU64,
}

impl Clock {
    /// Starts now, with an L1 of this age.
    pub fn start(before: Duration) -> Self {
        Self {
            started: Instant::now(),
            before,
            skipped: AtomicU64::new(0),
        }
    }

    /// The time.
    pub fn now(&self) -> Duration {
        self.before + self.uptime()
    }

    /// Time since the engine was made.
    pub fn uptime(&self) -> Duration {
        self.started.elapsed() + Duration::from_nanos(self.skipped.load(Ordering::Relaxed))
    }

    /// Puts the clock forward, so that tests need not wait for what takes minutes.
    pub fn skip(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.skipped.fetch_add(nanos, Ordering::Relaxed);
    }
}
