//! Log lines that a client or a broken backend could cause with every request.
//!
//! The mutex guards when a line was last logged; no other lock is acquired inside.

use std::time::{Duration, Instant};

use super::Mutex;

/// Rate limit of one log line: permits it once per interval and counts the suppressed ones. Each line has its own, so
/// that none hides another.
#[derive(Debug)]
pub struct RateLimited {
    interval: Duration,
    state: Mutex<LogWindow>,
}

#[derive(Debug)]
struct LogWindow {
    next: Option<Instant>,
    suppressed: u64,
}

impl LogWindow {
    fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }
}

impl RateLimited {
    /// Returns a limit of one line per `interval`.
    #[must_use]
    pub const fn new(interval: Duration) -> Self {
        let state = LogWindow {
            next: None,
            suppressed: 0,
        };
        Self {
            interval,
            state: Mutex::new(state),
        }
    }

    /// Returns a limit of one line per second.
    #[must_use]
    pub const fn per_second() -> Self {
        Self::new(Duration::from_secs(1))
    }

    /// Returns how many lines were suppressed since the last one if the line may be written; otherwise counts it as
    /// suppressed.
    pub fn permit(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        if !state.is_due(now) {
            state.suppressed += 1;
            return None;
        }
        state.next = Some(now + self.interval);
        Some(std::mem::take(&mut state.suppressed))
    }

    /// Returns how many lines were suppressed since the last one, if there are any and a line is due. For periodic use, so
    /// that the last of them are logged too.
    pub fn take_suppressed(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        if state.suppressed == 0 || !state.is_due(now) {
            return None;
        }
        state.next = Some(now + self.interval);
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(60);

    #[test]
    fn line_is_permitted_once_per_interval() {
        let limit = RateLimited::new(INTERVAL);
        let start = Instant::now();
        assert_eq!(limit.permit(start), Some(0));
        for _ in 0..3 {
            assert_eq!(limit.permit(start + INTERVAL / 2), None);
        }
        assert_eq!(limit.permit(start + INTERVAL), Some(3));
        assert_eq!(limit.permit(start + 3 * INTERVAL), Some(0));
    }

    #[test]
    fn suppressed_lines_are_taken_once_when_due() {
        let limit = RateLimited::new(INTERVAL);
        let start = Instant::now();
        assert_eq!(limit.take_suppressed(start), None);
        assert_eq!(limit.permit(start), Some(0));
        for _ in 0..3 {
            let later = start + INTERVAL / 2;
            assert_eq!(
                (limit.permit(start), limit.take_suppressed(later)),
                (None, None)
            );
        }
        assert_eq!(limit.take_suppressed(start + INTERVAL), Some(3));
        assert_eq!(limit.take_suppressed(start + 2 * INTERVAL), None);
        assert_eq!(limit.permit(start + 2 * INTERVAL), Some(0));
        assert_eq!(limit.permit(start + 2 * INTERVAL), None);
        assert_eq!(limit.permit(start + 3 * INTERVAL), Some(1));
    }
}
