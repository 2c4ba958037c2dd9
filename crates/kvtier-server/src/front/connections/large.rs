//! Large messages: their turns, and the memory that all connections hold.
//!
//! | while | large messages |
//! | --- | --- |
//! | they arrive | are read behind everything else, the oldest first, [`ROUND_BYTES`] per round in all |
//! | half of the bound is held | wait, but for the oldest ones that hold a quarter; those that stall are closed |
//!
//! Beyond the bound the connection that costs most is closed. The oldest large message counts in neither, so that it gets through
//! however large it is.

use std::collections::{BTreeMap, BTreeSet};

use super::super::connection::{Connection, Large, SCRATCH_BYTES, TURN_BYTES};

/// Bytes read per round, beyond a buffer's worth of each connection without a large message. Other clients wait for that
/// much at most. A turn of them is for large messages, which other traffic would starve.
pub const ROUND_BYTES: usize = 4 * TURN_BYTES;

/// What all connections hold, and the large messages that are incomplete.
#[derive(Default)]
pub(super) struct HeldMemory {
    /// The bound of what they hold together.
    limit: usize,
    pub(super) held_bytes: usize,
    /// Large messages, the oldest first, and the bytes that their connections hold.
    large: BTreeMap<Large, usize>,
    /// Large messages that are not read until there is memory.
    paused: BTreeSet<Large>,
    /// Bytes that may still be read in this round.
    round_bytes: usize,
}

impl HeldMemory {
    /// Nothing yet, and at most `limit` bytes but for the oldest large message.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    /// Allows a round's bytes. Returns the next paused connection, to be read again, if there is memory for it.
    pub(super) fn begin_round(&mut self) -> Option<u64> {
        self.round_bytes = ROUND_BYTES;
        let next = self.paused.first().copied();
        let next = next.filter(|next| !self.has_to_wait(next))?;
        self.paused.remove(&next);
        Some(next.1)
    }

    /// Whether a large message waits for older ones.
    fn has_to_wait(&self, large: &Large) -> bool {
        if self.bounded_bytes() <= self.limit / 2 {
            return false;
        }
        let mut left = self.limit / 4;
        let others = self.large.iter().skip(1);
        // Few: each one holds more than a turn.
        let mut going_on = others
            .take_while(|(_, held)| left.checked_sub(**held).map(|less| left = less).is_some());
        let oldest = self.large.first_key_value();
        oldest.is_none_or(|(oldest, _)| oldest != large)
            && !going_on.any(|(other, _)| other == large)
    }

    /// Bytes that all connections hold, but for the oldest large message.
    pub(super) fn bounded_bytes(&self) -> usize {
        self.held_bytes - self.large.first_key_value().map_or(0, |(_, held)| *held)
    }

    /// The connection with the oldest large message.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.large.first_key_value().map(|((_, id), _)| *id)
    }

    /// The connections with large messages, if some wait for others.
    pub(super) fn awaited(&self) -> impl Iterator<Item = u64> {
        let large = self.large.keys().filter(|_| !self.paused.is_empty());
        large.map(|(_, id)| *id)
    }

    /// Pauses a large message that has to wait; returns whether it did.
    pub(super) fn pause(&mut self, large: Option<Large>) -> bool {
        let waiting = large.filter(|large| self.has_to_wait(large));
        self.paused.extend(waiting);
        waiting.is_some()
    }

    /// Most bytes that may be read now from a connection with or without a large message; none if it has to wait for the next
    /// round.
    pub(super) fn turn_bytes(&self, is_large: bool) -> Option<usize> {
        let (reserved, least) = if is_large {
            (0, 0)
        } else {
            (TURN_BYTES, SCRATCH_BYTES)
        };
        let left = self.round_bytes.saturating_sub(reserved);
        Some(left.min(TURN_BYTES).max(least)).filter(|bytes| *bytes > 0)
    }

    /// Counts bytes that were read in this round from a connection with or without a large message.
    pub(super) fn count_read(&mut self, bytes: usize, is_large: bool) {
        let least = if is_large { 0 } else { TURN_BYTES };
        self.round_bytes = self.round_bytes.saturating_sub(bytes).max(least);
    }

    /// Counts what a connection holds.
    pub(super) fn count(&mut self, id: u64, connection: &mut Connection) {
        let bytes = connection.held_bytes();
        self.held_bytes -= std::mem::replace(&mut connection.counted_bytes, bytes);
        self.held_bytes += bytes;
        let large = connection.large_since().map(|since| (since, id));
        let before = std::mem::replace(&mut connection.large, large);
        if let Some(before) = before.filter(|_| before != large) {
            self.large.remove(&before);
        }
        self.large.extend(large.map(|large| (large, bytes)));
    }

    /// Counts a connection no longer.
    pub(super) fn remove(&mut self, connection: &Connection) {
        self.held_bytes -= connection.counted_bytes;
        if let Some(large) = &connection.large {
            self.large.remove(large);
            self.paused.remove(large);
        }
    }
}
