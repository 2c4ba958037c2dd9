//! Pauses before a lost connection is tried again.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::Duration;

/// The longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Pauses that double up to [`MAX_PAUSE`], each shortened at random by up to half, so that the clients of a server do not
/// all reconnect in the same moment.
pub(crate) struct Backoff {
    first: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration) -> Self {
        let first = first.clamp(Duration::from_millis(1), MAX_PAUSE);
        Self { first, next: first }
    }

    /// Starts again with the first pause, after a connection that was of use.
    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }

    /// The pause before the next try.
    pub(crate) fn pause(&mut self) -> Duration {
        // Every new state has other keys.
        let random = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
        self.pause_by(random)
    }

    fn pause_by(&mut self, random: f64) -> Duration {
        let whole = self.next;
        self.next = (whole * 2).min(MAX_PAUSE);
        whole.mul_f64(1.0 - random / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(pauses: impl IntoIterator<Item = Duration>) -> Vec<u128> {
        pauses.into_iter().map(|pause| pause.as_millis()).collect()
    }

    #[test]
    fn pauses_double_up_to_the_limit_until_reset() {
        let mut backoff = Backoff::new(Duration::from_millis(100));
        let mut next = |count: usize| millis((0..count).map(|_| backoff.pause_by(0.0)));
        assert_eq!(next(6), [100, 200, 400, 800, 1000, 1000]);
        backoff.reset();
        assert_eq!(millis([backoff.pause_by(0.0)]), [100]);
    }

    #[test]
    fn pauses_are_shortened_by_up_to_half() {
        let mut backoff = Backoff::new(MAX_PAUSE);
        assert_eq!(
            millis([0.0, 0.5, 1.0].map(|random| backoff.pause_by(random))),
            [1000, 750, 500]
        );
        let drawn: std::collections::HashSet<_> = (0..10).map(|_| backoff.pause()).collect();
        assert!(drawn.len() > 1);
    }
}
