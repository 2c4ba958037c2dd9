//! Log lines of outages that may begin and end with every request: a backend one of whose nodes is down fails and answers
//! in turn.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// Decides which begins and ends of outages are logged: the begin of each kind of failure once per interval, and an end only
/// after a begin that was logged. A failure that lasts beyond the interval is logged even if its begin was not.
#[derive(Debug)]
pub struct OutageLog<K> {
    interval: Duration,
    /// When each kind was last logged.
    lines: HashMap<K, Instant>,
    /// The kind logged last, since the last end that was.
    logged: Option<K>,
}

impl<K: Copy + Eq + Hash> OutageLog<K> {
    /// Returns a log without an outage.
    #[must_use]
    pub fn new(interval: Duration) -> Self {
        Self {
            interval,
            lines: HashMap::new(),
            logged: None,
        }
    }

    /// Whether a failure is to be logged. Call it for each.
    pub fn failed(&mut self, kind: K, now: Instant) -> bool {
        if self.logged == Some(kind) {
            return false;
        }
        let last = self.lines.get(&kind);
        if last.is_some_and(|last| now < *last + self.interval) {
            return false;
        }
        self.lines.insert(kind, now);
        self.logged = Some(kind);
        true
    }

    /// Whether the end of the outage is to be logged. Call it for each success.
    pub fn succeeded(&mut self) -> bool {
        self.logged.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(60);

    #[test]
    fn an_outage_has_one_line_for_its_begin_and_one_for_its_end() {
        let (mut log, now) = (OutageLog::new(INTERVAL), Instant::now());
        assert!(!log.succeeded(), "no outage");
        assert!(log.failed("down", now));
        assert!(!log.failed("down", now + 2 * INTERVAL), "it lasts");
        assert!(log.succeeded());
        assert!(!log.succeeded());
    }

    #[test]
    fn one_that_comes_and_goes_is_logged_once_per_interval() {
        let (mut log, now) = (OutageLog::new(INTERVAL), Instant::now());
        assert!(log.failed("down", now) && log.succeeded());
        let soon = now + INTERVAL / 2;
        assert!(!log.failed("down", soon) && !log.succeeded());
        assert!(log.failed("full", soon), "another kind");
        assert!(!log.failed("down", soon), "in turn with it");
        assert!(!log.failed("full", soon));
        assert!(log.failed("down", now + INTERVAL), "and lasts");
        assert!(log.succeeded());
    }
}
