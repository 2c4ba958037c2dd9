//! Accounting: one tally per state of an object's memory.

/// Objects and the bytes they take, rounding included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) objects: u64,
    pub(super) bytes: u64,
}

impl Tally {
    pub(super) fn add(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
    }

    /// Subtracts one object. Counts an error, and stays at zero, if it was never added.
    pub(super) fn sub(&mut self, bytes: u64, errors: &mut u64) {
        match (self.objects.checked_sub(1), self.bytes.checked_sub(bytes)) {
            (Some(objects), Some(bytes)) => *self = Self { objects, bytes },
            _ => {
                *errors += 1;
                self.objects = self.objects.saturating_sub(1);
                self.bytes = self.bytes.saturating_sub(bytes);
            }
        }
    }
}

/// Tallies by state. Every object with memory is in exactly one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) staged: Tally,
    pub(super) resident: Tally,
    pub(super) doomed: Tally,
}

/// Counts since the cache was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) lookups: u64,
    pub(super) requested_chunks: u64,
    pub(super) hit_chunks: u64,
    pub(super) evicted: Tally,
    pub(super) last_evicted_idle_ticks: u32,
    pub(super) refused: u64,
    pub(super) over_quota: u64,
    pub(super) committed: u64,
    pub(super) duplicates: u64,
    pub(super) aborted: u64,
    pub(super) removed: u64,
}
