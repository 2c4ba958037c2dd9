//! Time without the pauses of the process: connections' deadlines and silence of workers are measured by it.

use std::time::{Duration, Instant};

/// A clock that stands still while the process does not run: stopped by a signal, a debugger, or with its machine.
pub struct Clock {
    now: Instant,
    /// The system's time at the last reading.
    read: Instant,
    /// Most time that counts between two readings.
    max_step: Duration,
}

impl Clock {
    /// Starts now. The clock has to be read more often than once per `max_step`.
    pub fn start(max_step: Duration) -> Self {
        let now = Instant::now();
        Self {
            now,
            read: now,
            max_step,
        }
    }

    /// Time at the last reading.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Reads the system's time; returns whether the process did not run for more than a step.
    pub fn advance(&mut self) -> bool {
        let time = Instant::now();
        let step = time.duration_since(self.read);
        self.now += step.min(self.max_step);
        self.read = time;
        step > self.max_step
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
        let max_step = Duration::from_secs(2);
        let mut clock = Clock::start(max_step);
        let start = clock.now();
        clock.stop_process_for(Duration::from_secs(1));
        assert!(!clock.advance());
        let passed = clock.now() - start;
        assert!((Duration::from_secs(1)..=max_step).contains(&passed));
        clock.stop_process_for(Duration::from_secs(3600));
        assert!(clock.advance());
        assert_eq!(clock.now() - start, passed + max_step);
    }
}
