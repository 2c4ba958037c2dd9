//! Log lines that clients can cause as often as they like.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How often such a line is written, where nothing else is said.
const INTERVAL: Duration = Duration::from_secs(1);

/// Lets a line of the log through once per interval. One for each place in the code, so that no kind hides another.
pub struct Seldom {
    interval: Duration,
    said: Mutex<Said>,
}

struct Said {
    next: Option<Instant>,
    left_out: u64,
}

impl Seldom {
    /// Once a second.
    pub const fn new() -> Self {
        Self::every(INTERVAL)
    }

    /// Once per `interval`.
    pub const fn every(interval: Duration) -> Self {
        Self {
            interval,
            said: Mutex::new(Said {
                next: None,
                left_out: 0,
            }),
        }
    }

    /// Whether the line is to be written: how many were left out since the last one.
    pub fn due(&self, now: Instant) -> Option<u64> {
        let mut said = self.said.lock();
        if said.next.is_some_and(|next| now < next) {
            said.left_out += 1;
            return None;
        }
        said.next = Some(now + self.interval);
        Some(std::mem::take(&mut said.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_a_second_and_the_others_are_counted() {
        let seldom = Seldom::new();
        let start = Instant::now();
        assert_eq!(seldom.due(start), Some(0));
        for _ in 0..3 {
            assert_eq!(seldom.due(start + INTERVAL / 2), None);
        }
        assert_eq!(seldom.due(start + INTERVAL), Some(3));
        assert_eq!(seldom.due(start + 3 * INTERVAL), Some(0));
    }
}
