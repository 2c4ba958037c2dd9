//! Ghosts: keys of evicted objects (B1 and B2).

use super::super::{Candidate, EvictionPolicy, Lru};
use crate::block_vec::BlockVec;
use crate::sharded::Sharded;
use crate::violation::Violation;

/// End of the free list.
const NONE: u32 = u32::MAX;

/// Keys, each with a number, in the order of insertion. A key is a hash: two objects with the same one count as one
/// object, which costs at most a wrong guess.
#[derive(Debug)]
pub(super) struct Ghosts {
    /// Keys by number; a free number holds the next free one.
    keys: BlockVec<u64, 4096>,
    /// Numbers below this one were used at least once.
    known: u32,
    first_free: u32,
    numbers: Sharded,
    /// Order of the numbers in use; the next to be removed first.
    order: Lru,
}

impl Default for Ghosts {
    fn default() -> Self {
        Self {
            keys: BlockVec::default(),
            known: 0,
            first_free: NONE,
            numbers: Sharded::default(),
            order: Lru::default(),
        }
    }
}

fn candidate(number: u32) -> Candidate {
    Candidate {
        slot: number,
        tenant: 0,
    }
}

impl Ghosts {
    /// Inserts a key as the youngest; of more than `most` keys the oldest is removed. `most` never falls.
    pub(super) fn insert(&mut self, key: u64, most: usize) {
        self.remove(key);
        if self.len() >= most
            && let Some(oldest) = self.order.victim()
        {
            self.remove(self.keys[oldest]);
        }
        let number = self.take(key);
        self.order.insert(candidate(number), false);
        self.numbers.insert(key, number);
    }

    /// Removes a key; returns whether it was present.
    pub(super) fn remove(&mut self, key: u64) -> bool {
        let keys = &self.keys;
        let found = self.numbers.remove(key, |number| keys[number] == key);
        let Some(number) = found else { return false };
        self.order.remove(candidate(number));
        self.keys[number] = u64::from(self.first_free);
        self.first_free = number;
        true
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Takes a number for a key.
    fn take(&mut self, key: u64) -> u32 {
        let number = self.first_free;
        if number != NONE {
            self.first_free = std::mem::replace(&mut self.keys[number], key) as u32;
            return number;
        }
        let number = self.known;
        self.known += 1;
        self.keys.grow_to(number, || 0);
        self.keys[number] = key;
        number
    }

    /// The keys, the next to be removed first.
    ///
    /// # Errors
    /// There are more than `most` keys, or the structure is damaged.
    pub(super) fn check(&self, most: usize) -> Result<Vec<u64>, Violation> {
        let mut keys = Vec::with_capacity(self.len());
        for number in self.order.order()? {
            let key = self.keys[number];
            if self.numbers.find(key, |found| found == number).is_none() {
                return Err(Violation(format!(
                    "ghost key {key:x} has no entry for {number}"
                )));
            }
            keys.push(key);
        }
        let entries = self.numbers.len();
        if keys.len() > most || entries != keys.len() {
            return Err(Violation(format!(
                "{} ghost keys of at most {most} have {entries} entries",
                keys.len()
            )));
        }
        Ok(keys)
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        self.numbers.bookkeeping_bytes()
            + self.keys.bookkeeping_bytes()
            + self.order.bookkeeping_bytes()
    }
}
