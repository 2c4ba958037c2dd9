//! The time of the connections' deadlines.

use std::time::{Duration, Instant};

/// Most time that counts between two readings; the front end reads it at least once a second.
const MAX_STEP: Duration = Duration::from_secs(2);

/// A clock that stands still while the process does not run: stopped by a signal, a debugger, or with its machine. What
/// clients sent meanwhile is read before any deadline ends.
pub struct Clock {
    now: Instant,
    /// The system's time at the last reading.
    read: Instant,
}

impl Clock {
    /// Starts now.
    pub fn start() -> Self {
        let now = Instant::now();
        Self { now, read: now }
    }

    /// Time at the last reading.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Reads the system's time.
    pub fn advance(&mut self) {
        let time = Instant::now();
        self.now += time.duration_since(self.read).min(MAX_STEP);
        self.read = time;
    }

    /// Puts the clock forward.
    #[cfg(test)]
    pub fn skip(&mut self, time: Duration) {
        self.now += time;
    }

    /// Makes the next reading come `time` later, as after a stop of the process.
    #[cfg(test)]
    pub fn stop_process_for(&mut self, time: Duration) {
        self.read -= time;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_of_the_process_counts_for_one_step() {
        let mut clock = Clock::start();
        let start = clock.now();
        clock.stop_process_for(Duration::from_secs(1));
        clock.advance();
        let passed = clock.now() - start;
        assert!((Duration::from_secs(1)..=MAX_STEP).contains(&passed));
        clock.stop_process_for(Duration::from_secs(3600));
        clock.advance();
        assert_eq!(clock.now() - start, passed + MAX_STEP);
    }
}
