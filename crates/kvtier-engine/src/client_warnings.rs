//! Warnings about clients whose release is not served, for the log, health probes and `/status`.
//!
//! A warning stands while a client that caused it is connected, and [`WARNING_TTL`] longer: such a client may end at once, and be
//! started again and again.
//!
//! The mutex guards the warnings; no other lock is acquired inside.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvtier_common::sync::Mutex;

/// Time that a warning stands without its clients.
const WARNING_TTL: Duration = Duration::from_secs(600);

/// Most warnings at once; a further one takes the place of the oldest one without a client, or else of the oldest.
const MAX_WARNINGS: usize = 16;

/// Most warnings that one connection causes: it leaves some to others.
const MAX_OF_CONNECTION: usize = 2;

/// Most connections of one warning. Further ones end unnoticed.
const MAX_CONNECTIONS: usize = 1024;

struct Warning {
    connections: BTreeSet<u64>,
    /// When a client last caused it, or the last of its connections ended.
    last: Duration,
}

/// What becomes of a warning that a client causes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Insertion {
    New,
    /// New, in the place of another.
    Replaced,
    /// Known: the warning stands already.
    Known,
    /// Not noted, since the connection has caused as many as one may.
    LeftOut,
}

/// The warnings by their texts.
#[derive(Default)]
pub struct ClientWarnings {
    warnings: Mutex<BTreeMap<String, Warning>>,
}

impl ClientWarnings {
    /// Notes that a client causes a warning.
    pub fn insert(&self, connection: u64, text: &str, now: Duration) -> Insertion {
        let mut warnings = self.warnings.lock();
        warnings.retain(|_, warning| stands(warning, now));
        let is_new = !warnings.contains_key(text);
        let own = warnings.values();
        let own = own.filter(|warning| warning.connections.contains(&connection));
        if is_new && own.count() >= MAX_OF_CONNECTION {
            return Insertion::LeftOut;
        }
        let is_full = warnings.len() >= MAX_WARNINGS;
        let rank = |warning: &Warning| (!warning.connections.is_empty(), warning.last);
        let oldest = warnings.iter().min_by_key(|(_, warning)| rank(warning));
        let replaced = oldest
            .filter(|_| is_new && is_full)
            .map(|(text, _)| text.clone());
        let removed = replaced.and_then(|text| warnings.remove(&text));
        let warning = warnings.entry(text.to_owned()).or_insert(Warning {
            connections: BTreeSet::new(),
            last: now,
        });
        warning.last = now;
        if warning.connections.len() < MAX_CONNECTIONS {
            warning.connections.insert(connection);
        }
        match removed {
            Some(_) => Insertion::Replaced,
            None if is_new => Insertion::New,
            None => Insertion::Known,
        }
    }

    /// Forgets a connection that has ended.
    pub fn forget(&self, connection: u64, now: Duration) {
        for warning in self.warnings.lock().values_mut() {
            if warning.connections.remove(&connection) {
                warning.last = now;
            }
        }
    }

    /// The texts of the warnings that stand.
    pub fn current(&self, now: Duration) -> Vec<String> {
        let warnings = self.warnings.lock();
        let standing = warnings.iter().filter(|(_, warning)| stands(warning, now));
        standing.map(|(text, _)| text.clone()).collect()
    }
}

fn stands(warning: &Warning, now: Duration) -> bool {
    !warning.connections.is_empty() || now.saturating_sub(warning.last) < WARNING_TTL
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    // proves: docs/clients.md#releases-that-are-not-served
    #[test]
    fn warning_stands_while_client_is_connected_and_for_a_time() {
        let warnings = ClientWarnings::default();
        assert_eq!(warnings.insert(1, "a", SECOND), Insertion::New);
        assert_eq!(warnings.insert(2, "a", SECOND), Insertion::Known);
        warnings.forget(1, SECOND);
        assert_eq!(warnings.current(10 * WARNING_TTL), ["a"]);
        warnings.forget(2, 10 * WARNING_TTL);
        assert_eq!(warnings.current(11 * WARNING_TTL - SECOND), ["a"]);
        assert_eq!(warnings.current(11 * WARNING_TTL), [""; 0]);
        let inserted = warnings.insert(3, "a", 11 * WARNING_TTL);
        assert_eq!(inserted, Insertion::New);
    }

    #[test]
    fn warnings_are_bounded() {
        let warnings = ClientWarnings::default();
        for number in 0..MAX_WARNINGS {
            let connection = (number / MAX_OF_CONNECTION) as u64;
            let inserted = warnings.insert(connection, &number.to_string(), SECOND);
            assert_eq!(inserted, Insertion::New);
            if number % MAX_OF_CONNECTION == 1 {
                let third = warnings.insert(connection, "its third", SECOND);
                assert_eq!(third, Insertion::LeftOut);
            }
        }
        // Its client goes on.
        assert_eq!(warnings.insert(0, "0", 2 * SECOND), Insertion::Known);
        let inserted = warnings.insert(100, "more", 3 * SECOND);
        assert_eq!(inserted, Insertion::Replaced);
        let current = warnings.current(3 * SECOND);
        assert_eq!(current.len(), MAX_WARNINGS);
        for (text, stands) in [("0", true), ("more", true), ("1", false), ("2", true)] {
            assert_eq!(current.iter().any(|it| it == text), stands, "{text}");
        }
        // One without a client goes first, however late that ended.
        warnings.forget(1, 4 * SECOND);
        for (text, left) in [("a", ["2", "3"]), ("b", ["3", "4"])] {
            let inserted = warnings.insert(101, text, 5 * SECOND);
            assert_eq!(inserted, Insertion::Replaced);
            let current = warnings.current(5 * SECOND);
            assert!(!current.iter().any(|it| it == left[0]));
            assert!(current.iter().any(|it| it == left[1]));
        }
        for connection in 0..2 * MAX_CONNECTIONS as u64 {
            warnings.insert(connection, "0", SECOND);
        }
        let warnings = warnings.warnings.lock();
        assert_eq!(warnings["0"].connections.len(), MAX_CONNECTIONS);
    }
}
