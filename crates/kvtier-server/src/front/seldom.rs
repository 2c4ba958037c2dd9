//! Log lines that clients can cause as often as they like.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How often such a line is written.
const EVERY: Duration = Duration::from_secs(1);

/// Lets a line of the log through once a second. One for each place in the code, so that no kind hides another.
pub struct Seldom(Mutex<Said>);

struct Said {
    next: Option<Instant>,
    left_out: u64,
}

impl Seldom {
    /// Lets the first one through.
    pub const fn new() -> Self {
        Self(Mutex::new(Said {
            next: None,
            left_out: 0,
        }))
    }

    /// Whether the line is to be written: how many were left out since the last one.
    pub fn due(&self, now: Instant) -> Option<u64> {
        let mut said = self.0.lock();
        if said.next.is_some_and(|next| now < next) {
            said.left_out += 1;
            return None;
        }
        said.next = Some(now + EVERY);
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
            assert_eq!(seldom.due(start + EVERY / 2), None);
        }
        assert_eq!(seldom.due(start + EVERY), Some(3));
        assert_eq!(seldom.due(start + 3 * EVERY), Some(0));
    }
}
