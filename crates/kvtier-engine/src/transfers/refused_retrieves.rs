//! Refused retrieves of clients that do not notice a "no".
//!
//! Up to LMCache 0.5.4 a retrieve that was answered "no" is only logged: its blocks count as loaded, and the engine
//! computes on what they contain. The one thing such a client acts on is a ping answered "no": it is unhealthy then,
//! reports every retrieve that has no answer with its blocks in error, and the engine computes them. So
//! 1. the retrieve is not answered; where the worker waits for the answer (engine-driven), it is held;
//! 2. until the client is healthy again no other retrieve of its connection begins, since it drops those too and may
//!    hand their blocks to other requests;
//! 3. as soon as no copy into the worker's pages runs, its pings are answered "no", [`REFUSED_PINGS`] times;
//! 4. what is held is answered [`NOTICE_DELAY`] after the first of them, by when the client has taken note.
//!
//! A client's pings travel on the connection of its requests, so a connection stands for a worker here, whether it is
//! registered or not. The mutex guards the table; answers are sent after it is released, and no other lock is
//! acquired inside.

use std::collections::HashMap;
use std::time::Duration;

use kvtier_common::sync::Mutex;

use super::super::Reply;

/// Pings answered "no". The client asks again one heartbeat after each, so that it is unhealthy for two heartbeats: the
/// engine's step in which a held request was answered ends within them.
const REFUSED_PINGS: u8 = 2;

/// Time from the first "no" to the answer of what is held. The client needs microseconds to take note of a ping.
const NOTICE_DELAY: Duration = Duration::from_millis(500);

/// Age of a refusal that no ping came for.
const ABANDONED_AFTER: Duration = Duration::from_secs(600);

/// Connections known at most; beyond it the client's own deadline is what ends a refused retrieve.
const MAX_CONNECTIONS: usize = 16_384;

/// Held answers of one connection at most. A worker waits for each before it asks for the next.
const MAX_HELD: usize = 64;

struct RefusedConnection {
    since: Duration,
    /// When the first ping was answered "no", and how many were.
    noticed: Option<Duration>,
    pings: u8,
    held: Vec<Reply>,
}

/// The connections whose retrieves are refused.
#[derive(Default)]
pub struct RefusedRetrieves {
    by_connection: Mutex<HashMap<u64, RefusedConnection>>,
}

impl RefusedRetrieves {
    /// Refuses a retrieve, and every other one of its connection until the client is healthy again. Answers `held` once
    /// the client has noticed.
    pub fn add(&self, connection: u64, held: Option<Reply>, now: Duration) {
        let mut by_connection = self.by_connection.lock();
        if by_connection.len() >= MAX_CONNECTIONS && !by_connection.contains_key(&connection) {
            drop(by_connection);
            return drop(held);
        }
        let refusal = by_connection
            .entry(connection)
            .or_insert(RefusedConnection {
                since: now,
                noticed: None,
                pings: 0,
                held: Vec::new(),
            });
        // The client sent it while it was healthy: it needs another "no".
        (refusal.since, refusal.noticed, refusal.pings) = (now, None, 0);
        if refusal.held.len() < MAX_HELD {
            refusal.held.extend(held);
        } else {
            // Its answer is sent at once, outside of the lock.
            drop(by_connection);
            drop(held);
        }
    }

    /// Whether no retrieve of this connection may begin.
    pub fn is_refusing(&self, connection: u64) -> bool {
        self.by_connection.lock().contains_key(&connection)
    }

    /// Whether a ping of this connection is answered "no". `is_copying` is whether bytes are being copied into the
    /// worker's pages: until the copy ends, these must not be handed to other requests.
    pub fn refuses_ping(
        &self,
        connection: u64,
        is_copying: impl FnOnce() -> bool,
        now: Duration,
    ) -> bool {
        let mut by_connection = self.by_connection.lock();
        let Some(refusal) = by_connection.get_mut(&connection) else {
            return false;
        };
        if refusal.noticed.is_none() && is_copying() {
            return false;
        }
        if refusal.pings == REFUSED_PINGS && refusal.held.is_empty() {
            by_connection.remove(&connection);
            return false;
        }
        refusal.noticed.get_or_insert(now);
        refusal.pings = (refusal.pings + 1).min(REFUSED_PINGS);
        true
    }

    /// Whether answers are held.
    pub fn holds_answers(&self) -> bool {
        let by_connection = self.by_connection.lock();
        by_connection
            .values()
            .any(|refusal| !refusal.held.is_empty())
    }

    /// Forgets a connection that has ended, with its pings and what it would be answered.
    pub fn forget(&self, connection: u64) {
        let refusal = self.by_connection.lock().remove(&connection);
        // Outside of the lock: what is held is sent.
        drop(refusal);
    }

    /// Connections that are known.
    #[cfg(any(test, feature = "testing"))]
    pub fn len(&self) -> usize {
        self.by_connection.lock().len()
    }

    /// Takes the held answers whose clients have taken note, and forgets clients that never pinged.
    pub fn due(&self, now: Duration) -> Vec<Reply> {
        let mut due = Vec::new();
        self.by_connection.lock().retain(|_, refusal| {
            let abandoned = now.saturating_sub(refusal.since) > ABANDONED_AFTER;
            let noticed = refusal.noticed.is_some_and(|at| now >= at + NOTICE_DELAY);
            if abandoned || noticed {
                due.append(&mut refusal.held);
            }
            !abandoned
        });
        due
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    // proves: docs/clients.md#refused-retrieves-up-to-054
    #[test]
    fn refused_retrieve_turns_two_pings_into_no() {
        let refusals = RefusedRetrieves::default();
        let ping = |now| refusals.refuses_ping(7, || false, now * SECOND);
        assert!(!ping(0));
        refusals.add(7, None, SECOND);
        assert!(refusals.is_refusing(7) && !refusals.is_refusing(8));
        assert!(!refusals.refuses_ping(8, || false, SECOND));
        assert_eq!([2, 3, 4].map(ping), [true, true, false]);
        assert!(!refusals.is_refusing(7));
    }

    #[test]
    fn running_copies_delay_the_no() {
        let refusals = RefusedRetrieves::default();
        refusals.add(7, None, SECOND);
        assert!(!refusals.refuses_ping(7, || true, 2 * SECOND));
        assert!(refusals.is_refusing(7));
        assert!(refusals.refuses_ping(7, || false, 3 * SECOND));
    }

    // proves: docs/clients.md#refused-retrieves-up-to-054
    #[test]
    fn held_answer_follows_the_noticed_no() {
        let refusals = RefusedRetrieves::default();
        let answered = Arc::new(AtomicUsize::new(0));
        let held = || {
            let answered = Arc::clone(&answered);
            Some(Reply::new(move |_| {
                answered.fetch_add(1, Ordering::Relaxed);
            }))
        };
        refusals.add(7, held(), SECOND);
        // Not without a ping.
        drop(refusals.due(5 * SECOND));
        assert_eq!(answered.load(Ordering::Relaxed), 0);
        assert!(refusals.refuses_ping(7, || false, 6 * SECOND));
        drop(refusals.due(6 * SECOND));
        assert_eq!(answered.load(Ordering::Relaxed), 0);
        // A healthy ping never comes before the answer.
        assert!([7, 8, 9].map(|now| refusals.refuses_ping(7, || false, now * SECOND)) == [true; 3]);
        drop(refusals.due(9 * SECOND));
        assert_eq!(answered.load(Ordering::Relaxed), 1);
        assert!(!refusals.refuses_ping(7, || false, 10 * SECOND));
        // The client of another never pings again.
        refusals.add(8, held(), 10 * SECOND);
        drop(refusals.due(10 * SECOND + ABANDONED_AFTER + SECOND));
        assert_eq!(answered.load(Ordering::Relaxed), 2);
        assert!(!refusals.is_refusing(8));
    }
}
