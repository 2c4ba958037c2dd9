//! Cache of checksums, and those of stores in flight.
//!
//! The mutex guards both; no other lock is acquired inside.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use kvtier_common::sync::Mutex;

/// Digest of a key, and the checksum of its object.
pub(super) type Known = (u128, u128);

/// Checksums by key digest of the objects that were stored or loaded last.
///
/// It has two halves. Entries that are inserted or read go into the new one. When that is full, it becomes the old one, and
/// what the old one had is dropped. This needs no list of use: an entry takes 32 bytes and one of control in a table
/// that is 7/16 to 7/8 full, 38 to 76 bytes.
///
/// Checksums of stores in flight are kept beside them, bounded by the items in flight. Until a store is answered, the
/// backend may have the earlier bytes or the new ones.
pub struct ChecksumCache {
    bound: usize,
    /// Locked once per batch.
    state: Mutex<ChecksumTable>,
}

#[derive(Default)]
struct ChecksumTable {
    /// The new half, the old half.
    halves: [HashMap<u128, u128>; 2],
    /// Per key one checksum per store in flight.
    in_flight: HashMap<u128, Vec<u128>>,
}

/// Possible checksums of one key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Expected {
    /// Checksum of the last store or load.
    pub known: Option<u128>,
    /// Checksums of stores in flight.
    pub in_flight: Vec<u128>,
}

impl Expected {
    /// Whether nothing is known of the key.
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_none() && self.in_flight.is_empty()
    }

    /// Whether bytes with this checksum were stored or are being stored.
    pub(super) fn allows(&self, sum: u128) -> bool {
        self.known == Some(sum) || self.in_flight.contains(&sum)
    }
}

/// Outcome of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChecksumVerdict {
    /// The backend has the new bytes, or may have them and no other checksum is known.
    Stored,
    /// The backend has the earlier bytes.
    Unchanged,
}

/// Stores in flight. Those without an outcome when this is dropped may have been executed: their checksums are kept.
pub(super) struct InFlight {
    sums: Arc<ChecksumCache>,
    stores: Vec<Known>,
}

impl InFlight {
    /// Ends all stores with their outcomes in order; those without one may have been executed.
    pub(super) fn finish(mut self, outcomes: impl IntoIterator<Item = ChecksumVerdict>) {
        let stores = std::mem::take(&mut self.stores);
        let unknown = std::iter::repeat(ChecksumVerdict::Stored);
        let outcomes = outcomes.into_iter().chain(unknown);
        self.sums.end(stores.into_iter().zip(outcomes));
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let stores = std::mem::take(&mut self.stores);
        if !stores.is_empty() {
            self.sums.end(
                stores
                    .into_iter()
                    .map(|store| (store, ChecksumVerdict::Stored)),
            );
        }
    }
}

impl ChecksumCache {
    /// Returns a cache of at most `bound` objects, rounded up to an even number; memory is allocated as needed.
    #[must_use]
    pub fn new(bound: usize) -> Self {
        Self {
            bound,
            state: Mutex::default(),
        }
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.state.lock().halves.iter().map(HashMap::len).sum()
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn bound(&self) -> usize {
        self.bound
    }

    /// Returns the possible checksums per key and marks them as used.
    pub(super) fn get(&self, keys: &[u128]) -> Vec<Expected> {
        let mut state = self.state.lock();
        let mut one = |key: &u128| Expected {
            known: self.touch(&mut state.halves, *key),
            in_flight: state.in_flight.get(key).cloned().unwrap_or_default(),
        };
        keys.iter().map(&mut one).collect()
    }

    /// Adds stores that are about to start, unless the bound is 0.
    pub(super) fn start(self: &Arc<Self>, stores: Vec<Known>) -> InFlight {
        if self.bound > 0 {
            let mut state = self.state.lock();
            for (key, sum) in &stores {
                state.in_flight.entry(*key).or_default().push(*sum);
            }
        }
        InFlight {
            sums: Arc::clone(self),
            stores,
        }
    }

    fn end(&self, stores: impl IntoIterator<Item = (Known, ChecksumVerdict)>) {
        let mut state = self.state.lock();
        let ChecksumTable { halves, in_flight } = &mut *state;
        for ((key, sum), outcome) in stores {
            if let Some(sums) = in_flight.get_mut(&key) {
                if let Some(at) = sums.iter().position(|other| *other == sum) {
                    sums.swap_remove(at);
                }
                if sums.is_empty() {
                    in_flight.remove(&key);
                }
            }
            if outcome == ChecksumVerdict::Stored {
                halves[1].remove(&key);
                self.put_in(halves, (key, sum));
            }
        }
    }

    /// Removes these entries unless their checksum has changed.
    pub(super) fn forget(&self, all: impl IntoIterator<Item = Known>) {
        let mut state = self.state.lock();
        for (key, sum) in all {
            for half in &mut state.halves {
                if half.get(&key) == Some(&sum) {
                    half.remove(&key);
                }
            }
        }
    }

    /// Returns the checksum of a key and moves it to the new half.
    fn touch(&self, halves: &mut [HashMap<u128, u128>; 2], key: u128) -> Option<u128> {
        if let Some(sum) = halves[0].get(&key) {
            return Some(*sum);
        }
        let sum = halves[1].remove(&key)?;
        self.put_in(halves, (key, sum));
        Some(sum)
    }

    fn put_in(&self, halves: &mut [HashMap<u128, u128>; 2], (key, sum): Known) {
        if self.bound == 0 {
            return;
        }
        let [new, old] = halves;
        if new.len() >= self.bound.div_ceil(2) && !new.contains_key(&key) {
            *old = std::mem::take(new);
        }
        new.insert(key, sum);
    }
}

impl fmt::Debug for ChecksumCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (len, bound) = (self.len(), self.bound);
        write!(f, "ChecksumCache({len} of {bound})")
    }
}
