//! Lines of the log that a damaged or broken backend could cause as often as it is asked.

use std::time::Duration;

use parking_lot::Mutex;

/// How often such a line is written.
const EVERY: Duration = Duration::from_secs(60);

/// Lets a line through once a minute, and counts the others. One for each kind.
#[derive(Debug, Default)]
pub(super) struct Warned(Mutex<Said>);

#[derive(Debug, Default)]
struct Said {
    next: Option<Duration>,
    left_out: u64,
}

impl Said {
    fn is_due(&self, now: Duration) -> bool {
        self.next.is_none_or(|next| now >= next)
    }
}

impl Warned {
    /// Whether the line is to be written: how many were left out since the last one.
    pub(super) fn due(&self, now: Duration) -> Option<u64> {
        let mut said = self.0.lock();
        if !said.is_due(now) {
            said.left_out += 1;
            return None;
        }
        said.next = Some(now + EVERY);
        Some(std::mem::take(&mut said.left_out))
    }

    /// How many were left out, when it is time to say so though nothing happens any more.
    pub(super) fn rest(&self, now: Duration) -> Option<u64> {
        let mut said = self.0.lock();
        if said.left_out == 0 || !said.is_due(now) {
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
    fn the_first_is_told_and_how_many_came_after() {
        let warned = Warned::default();
        let start = Duration::from_secs(7);
        assert_eq!(warned.rest(start), None);
        assert_eq!(warned.due(start), Some(0));
        for _ in 0..3 {
            assert_eq!(
                (warned.due(start), warned.rest(start + EVERY / 2)),
                (None, None)
            );
        }
        assert_eq!(warned.rest(start + EVERY), Some(3));
        assert_eq!(warned.rest(start + 2 * EVERY), None);
        assert_eq!(warned.due(start + 2 * EVERY), Some(0));
        assert_eq!(warned.due(start + 2 * EVERY), None);
        assert_eq!(warned.due(start + 3 * EVERY), Some(1));
    }
}
