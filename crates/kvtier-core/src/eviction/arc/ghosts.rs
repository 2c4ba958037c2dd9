//! The keys of objects that left, as far as they are remembered.

use super::super::{Candidate, EvictionPolicy, Lru};
use hashbrown::HashTable;

/// No number.
const NONE: u32 = u32::MAX;

/// Keys live in blocks of this many, so that growing never moves what is there.
const BLOCK: usize = 4096;

/// The table is split into this many parts by the key's top bits. A part that is full grows alone, so no call ever
/// waits for a move of the whole table.
const PARTS: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Low half of the key: spares a look at the key itself when a part grows.
    tag: u32,
    number: u32,
}

/// Spreads a tag over the bits the table looks at: the low ones for the place, the top seven for the quick compare.
fn spread(tag: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(tag)
}

fn part(key: u64) -> usize {
    (key >> 56) as usize
}

/// Keys, each with a number, in the order in which they came. A key is a hash already: two objects with the same one
/// count as one object, which costs no more than a wrong guess.
#[derive(Debug)]
pub(super) struct Ghosts {
    /// By number; for a free number, the next free one.
    keys: Vec<Box<[u64; BLOCK]>>,
    /// Numbers below this one have been handed out at least once.
    known: u32,
    first_free: u32,
    parts: Vec<HashTable<Entry>>,
    /// Of the numbers in use; the next to be forgotten first.
    order: Lru,
}

impl Default for Ghosts {
    fn default() -> Self {
        Self {
            keys: Vec::new(),
            known: 0,
            first_free: NONE,
            parts: (0..PARTS).map(|_| HashTable::new()).collect(),
            order: Lru::default(),
        }
    }
}

fn candidate(number: u32) -> Candidate {
    Candidate {
        slot: number,
        salt: 0,
    }
}

impl Ghosts {
    /// Remembers a key as the youngest; of more than `most` keys the oldest is forgotten. `most` never falls.
    pub(super) fn remember(&mut self, key: u64, most: usize) {
        self.forget(key);
        if self.len() >= most
            && let Some(oldest) = self.order.victim()
        {
            self.forget(self.key(oldest));
        }
        let number = self.take(key);
        self.order.insert(candidate(number), false);
        let tag = key as u32;
        let table = &mut self.parts[part(key)];
        table.insert_unique(spread(tag), Entry { tag, number }, |entry| {
            spread(entry.tag)
        });
    }

    /// Says whether the key was remembered; it no longer is.
    pub(super) fn forget(&mut self, key: u64) -> bool {
        let tag = key as u32;
        let keys = &self.keys;
        let found = self.parts[part(key)].find_entry(spread(tag), |entry| {
            entry.tag == tag && *at(keys, entry.number) == key
        });
        let Ok(found) = found else { return false };
        let (Entry { number, .. }, _) = found.remove();
        self.order.withdraw(candidate(number));
        *self.key_mut(number) = u64::from(self.first_free);
        self.first_free = number;
        true
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// A number for a key.
    fn take(&mut self, key: u64) -> u32 {
        let number = self.first_free;
        if number != NONE {
            self.first_free = std::mem::replace(self.key_mut(number), key) as u32;
            return number;
        }
        let number = self.known;
        self.known += 1;
        if number as usize == self.keys.len() * BLOCK {
            self.keys.push(Box::new([0; BLOCK]));
        }
        *self.key_mut(number) = key;
        number
    }

    fn key(&self, number: u32) -> u64 {
        *at(&self.keys, number)
    }

    fn key_mut(&mut self, number: u32) -> &mut u64 {
        &mut self.keys[number as usize / BLOCK][number as usize % BLOCK]
    }

    /// The keys, the next to be forgotten first; an error that says what is wrong when there are more than `most`, or
    /// the structure is damaged.
    pub(super) fn check(&self, most: usize) -> Result<Vec<u64>, String> {
        let mut keys = Vec::with_capacity(self.len());
        for number in self.order.order()? {
            let key = self.key(number);
            let tag = key as u32;
            let entry = self.parts[part(key)].find(spread(tag), |entry| entry.number == number);
            if entry.is_none_or(|entry| entry.tag != tag) {
                return Err(format!("gone key {key:x} has no entry for {number}"));
            }
            keys.push(key);
        }
        let entries: usize = self.parts.iter().map(HashTable::len).sum();
        if keys.len() > most || entries != keys.len() {
            return Err(format!(
                "{} gone keys of at most {most} have {entries} entries",
                keys.len()
            ));
        }
        Ok(keys)
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        let tables: usize = self.parts.iter().map(HashTable::allocation_size).sum();
        tables
            + PARTS * size_of::<HashTable<Entry>>()
            + self.keys.len() * BLOCK * size_of::<u64>()
            + self.order.bookkeeping_bytes()
    }
}

/// A free function, for while the table is borrowed.
fn at(keys: &[Box<[u64; BLOCK]>], number: u32) -> &u64 {
    &keys[number as usize / BLOCK][number as usize % BLOCK]
}
