//! Allowance: how often something may happen that takes time and serves no request.

use std::time::{Duration, Instant};

/// A number of events per second; as many may come at once.
///
/// What exceeds it is forgotten within a second after the last event.
#[derive(Debug)]
pub struct Allowance {
    per_second: u32,
    /// Events that count, and since when they have not been forgotten.
    counted: u32,
    since: Instant,
}

impl Allowance {
    /// No event yet.
    pub fn new(per_second: u32, now: Instant) -> Self {
        Self {
            per_second,
            counted: 0,
            since: now,
        }
    }

    /// Counts events.
    pub fn count(&mut self, events: u64, now: Instant) {
        self.forget(now);
        let most = 2 * self.per_second;
        let events = u32::try_from(events).unwrap_or(most);
        self.counted = self.counted.saturating_add(events).min(most);
    }

    /// Whether there were more than allowed.
    pub fn is_exceeded(&mut self, now: Instant) -> bool {
        self.forget(now);
        self.counted > self.per_second
    }

    fn forget(&mut self, now: Instant) {
        if self.counted == 0 {
            self.since = now;
            return;
        }
        let passed = now.duration_since(self.since).as_micros();
        let forgotten = passed * u128::from(self.per_second) / 1_000_000;
        if forgotten == 0 {
            return;
        }
        self.counted = self
            .counted
            .saturating_sub(u32::try_from(forgotten).unwrap_or(u32::MAX));
        // The rest of the time counts for the next event.
        let used = forgotten * 1_000_000 / u128::from(self.per_second);
        self.since += Duration::from_micros(u64::try_from(used).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_beyond_the_rate_are_exceeding_until_time_has_passed() {
        let start = Instant::now();
        let after = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut allowance = Allowance::new(100, start);
        allowance.count(100, start);
        assert!(!allowance.is_exceeded(start));
        allowance.count(1, start);
        assert!(allowance.is_exceeded(after(9)));
        assert!(!allowance.is_exceeded(after(10)));
        // At this rate it never is.
        for event in 10..1000 {
            allowance.count(1, after(10 * event));
            assert!(!allowance.is_exceeded(after(10 * event + 9)), "{event}");
        }
        // However many there were, they are forgotten.
        allowance.count(u64::MAX, after(10_000));
        assert!(allowance.is_exceeded(after(10_900)));
        assert!(!allowance.is_exceeded(after(11_000)));
    }
}
