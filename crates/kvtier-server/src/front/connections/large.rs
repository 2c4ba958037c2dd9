//! Large messages: their turns, and the memory that all connections hold.
//!
//! | while | large messages |
//! | --- | --- |
//! | they arrive | are read behind everything else, the oldest first, [`ROUND_BYTES`] per round in all |
//! | half of the bound is held | wait, but for the oldest ones that hold a quarter; those that stall are closed |
//!
//! Beyond the bound the connection that costs most is closed. The oldest large message counts in neither, so that it gets through
//! however large it is.

use std::time::{Duration, Instant};

use kvtier_common::sync::RateLimited;

use super::super::connection::{Closed, Large, SCRATCH_BYTES, TURN_BYTES};
use super::super::poll::Interest;
use super::{ConnectionEvent, Connections};

/// Bytes read per round, beyond a buffer's worth of each connection without a large message. Other clients wait for that
/// much at most. A turn of them is for large messages, which other traffic would starve.
pub const ROUND_BYTES: usize = 4 * TURN_BYTES;

/// Time after which a large message stalls if nothing more of it has arrived.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

impl Connections {
    /// Allows a round's bytes, and lets the next paused connection be read if there is memory for it.
    pub(super) fn begin_round(&mut self) {
        self.round_bytes = ROUND_BYTES;
        let next = self.paused.first().copied();
        if let Some(next) = next.filter(|next| !self.has_to_wait(next)) {
            self.paused.remove(&next);
            self.watch_for_reading(next.1, true);
        }
    }

    /// Whether a large message waits for older ones.
    fn has_to_wait(&self, large: &Large) -> bool {
        if self.bounded_bytes() <= self.bounds.held_bytes / 2 {
            return false;
        }
        let mut left = self.bounds.held_bytes / 4;
        let others = self.large.iter().skip(1);
        // Few: each one holds more than a turn.
        let mut going_on = others.take_while(|(_, id)| {
            let held = self.open.get(id).map_or(0, |of| of.counted_bytes);
            left.checked_sub(held).map(|less| left = less).is_some()
        });
        self.large.first() != Some(large) && !going_on.any(|other| other == large)
    }

    /// Bytes that all connections hold, but for the oldest large message.
    pub fn bounded_bytes(&self) -> usize {
        let oldest = self.large.first();
        let oldest = oldest.and_then(|(_, id)| self.open.get(id));
        self.held_bytes - oldest.map_or(0, |oldest| oldest.counted_bytes)
    }

    /// Pauses a connection whose large message has to wait; returns whether it did.
    pub(super) fn pause(&mut self, id: u64) -> bool {
        let large = self.open.get(&id).and_then(|connection| connection.large);
        let Some(large) = large.filter(|large| self.has_to_wait(large)) else {
            return false;
        };
        self.paused.insert(large);
        self.watch_for_reading(id, false);
        true
    }

    /// Watches a connection for reading, or no longer.
    pub(super) fn watch_for_reading(&mut self, id: u64, read: bool) {
        if let Some(connection) = self.open.get(&id) {
            let interest = connection.interest;
            self.watch(id, Interest { read, ..interest });
        }
    }

    /// Moves the connections with large messages behind all others, the oldest message first.
    pub(super) fn put_large_last(&self, happened: &mut [ConnectionEvent]) {
        if self.large.is_empty() {
            return;
        }
        happened.sort_by_key(|what| match what {
            ConnectionEvent::Readable(id) => self.open.get(id).and_then(|of| of.large),
            ConnectionEvent::Wake | ConnectionEvent::Undecided(_) => None,
        });
    }

    /// Most bytes that may be read from a connection now; none if it has to wait for the next round.
    pub(super) fn turn_bytes(&self, id: u64) -> Option<usize> {
        let (reserved, least) = match self.open.get(&id)?.large {
            Some(_) => (0, 0),
            None => (TURN_BYTES, SCRATCH_BYTES),
        };
        let left = self.round_bytes.saturating_sub(reserved);
        Some(left.min(TURN_BYTES).max(least)).filter(|bytes| *bytes > 0)
    }

    /// Counts what a connection holds. While all hold too much together, the one that costs most is closed: an attack
    /// that keeps memory pays for its time, and one that is quick for its bytes.
    pub(super) fn count(&mut self, id: u64) {
        let Some(connection) = self.open.get_mut(&id) else {
            return;
        };
        let bytes = connection.held_bytes();
        self.held_bytes -= std::mem::replace(&mut connection.counted_bytes, bytes);
        self.held_bytes += bytes;
        let large = connection.large_since().map(|since| (since, id));
        let before = std::mem::replace(&mut connection.large, large);
        if before != large {
            before.map(|before| self.large.remove(&before));
            self.large.extend(large);
        }
        while self.bounded_bytes() > self.bounds.held_bytes {
            let oldest = self.large.first().map(|(_, id)| *id);
            let Some(dearest) = self.dearest(oldest) else {
                return;
            };
            self.close(dearest, Closed::Memory);
        }
    }

    /// The connection whose bytes cost most, but for `spared`.
    fn dearest(&self, spared: Option<u64>) -> Option<u64> {
        let now = self.clock.now();
        let holders = self.open.iter();
        let holders = holders.filter(|(id, of)| of.counted_bytes > 0 && spared != Some(**id));
        let dearest = holders.max_by_key(|(id, of)| (of.held_cost(now), **id));
        dearest.map(|(id, _)| *id)
    }

    /// Closes the connection whose bytes cost most, after the system had no memory for another one.
    pub(super) fn free_memory(&mut self) {
        static LOG_LIMIT: RateLimited = RateLimited::per_second();
        if let Some(suppressed_lines) = LOG_LIMIT.permit(Instant::now()) {
            tracing::warn!(
                held_bytes = self.held_bytes,
                suppressed_lines,
                "out of memory for a client's message; closing its connection and the one that holds most"
            );
        }
        if let Some(dearest) = self.dearest(None) {
            self.close(dearest, Closed::Memory);
        }
    }

    /// Closes the connections whose large messages stall while others wait for them.
    pub(super) fn end_stalled(&mut self, now: Instant) {
        if self.paused.is_empty() {
            return;
        }
        let is_stalled = |(_, id): &&Large| {
            let connection = self.open.get(id);
            connection.is_some_and(|of| of.silence(now) >= STALL_TIMEOUT && !of.has_input())
        };
        let stalled: Vec<_> = self.large.iter().filter(is_stalled).copied().collect();
        for (_, id) in stalled {
            self.close(id, Closed::Memory);
        }
    }
}
