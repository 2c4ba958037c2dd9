//! The checksums that are remembered.

use std::collections::HashMap;
use std::fmt;

use parking_lot::Mutex;

/// What an object is known by: the digest of its key, and the checksum of everything that it has to be.
pub(super) type Known = (u128, u128);

/// Checksums by key digest, of the objects that were stored or loaded last; the others are forgotten.
///
/// Two halves: the new one takes what is put or asked for, and once it is full becomes the old one, whose rest is
/// forgotten. So an entry costs what it costs in one hash table, and nothing is kept in order: 32 bytes and one of
/// control, in a table that is between 7/16 and 7/8 full, hence 38 to 76 bytes.
pub struct Sums {
    bound: usize,
    /// The new half, the old half. Locked once for each batch.
    halves: Mutex<[HashMap<u128, u128>; 2]>,
}

impl Sums {
    /// For at most `bound` objects, one more if that is odd; memory is taken as they come.
    #[must_use]
    pub fn new(bound: usize) -> Self {
        Self {
            bound,
            halves: Mutex::default(),
        }
    }

    /// How many are remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.halves.lock().iter().map(HashMap::len).sum()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn bound(&self) -> usize {
        self.bound
    }

    /// What is remembered of each, which now is among those asked for last.
    pub(super) fn get(&self, keys: &[u128]) -> Vec<Option<u128>> {
        let mut halves = self.halves.lock();
        let mut one = |key: &u128| {
            if let Some(sum) = halves[0].get(key) {
                return Some(*sum);
            }
            let sum = halves[1].remove(key)?;
            self.put_in(&mut halves, (*key, sum));
            Some(sum)
        };
        keys.iter().map(&mut one).collect()
    }

    /// What was remembered of each, and is not any more.
    pub(super) fn take(&self, keys: &[u128]) -> Vec<Option<u128>> {
        let mut halves = self.halves.lock();
        let mut one = |key| halves[0].remove(key).or_else(|| halves[1].remove(key));
        keys.iter().map(&mut one).collect()
    }

    /// Remembers these.
    pub(super) fn put(&self, all: impl IntoIterator<Item = Known>) {
        let mut halves = self.halves.lock();
        for known in all {
            halves[1].remove(&known.0);
            self.put_in(&mut halves, known);
        }
    }

    /// Forgets these, unless they became others.
    pub(super) fn forget(&self, all: impl IntoIterator<Item = Known>) {
        let mut halves = self.halves.lock();
        for (key, sum) in all {
            for half in halves.iter_mut() {
                if half.get(&key) == Some(&sum) {
                    half.remove(&key);
                }
            }
        }
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

impl fmt::Debug for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (len, bound) = (self.len(), self.bound);
        write!(f, "Sums({len} of {bound})")
    }
}
