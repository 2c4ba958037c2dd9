//! Counters of a tier, all monotonic.
//!
//! The mutex guards the failures by kind; no other lock is acquired inside.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_common::sync::Mutex;

use crate::error::ErrorKind;

/// Monotonic counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// Returns its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Failure counters by kind.
#[derive(Debug, Default)]
pub struct Failures(Mutex<BTreeMap<&'static str, u64>>);

impl Failures {
    pub(super) fn add(&self, kind: ErrorKind) {
        *self.0.lock().entry(kind.name()).or_default() += 1;
    }

    /// Returns the count of each kind that occurred.
    pub fn get(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().clone()
    }

    /// Returns the sum of all kinds.
    pub fn sum(&self) -> u64 {
        self.0.lock().values().sum()
    }
}

/// The counters of one tier.
#[derive(Debug, Default)]
pub struct TierCounters {
    /// Objects written.
    pub stored_objects: Counter,
    /// Bytes written, as the backend counts them.
    pub stored_bytes: Counter,
    /// Objects that were not written because they were there already.
    pub already_there: Counter,
    /// Objects that could not be written.
    pub store_failures: Failures,
    /// Objects looked up.
    pub looked_up: Counter,
    /// Objects found.
    pub found: Counter,
    /// Objects read.
    pub loaded_objects: Counter,
    /// Bytes read.
    pub loaded_bytes: Counter,
    /// Objects read without a checksum to compare with.
    pub unverified: Counter,
    /// Objects that could not be read or were corrupt.
    pub load_failures: Failures,
    /// Objects evicted.
    pub evicted_objects: Counter,
    /// Bytes evicted.
    pub evicted_bytes: Counter,
}
