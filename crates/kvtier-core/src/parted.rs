//! A table from hashes to numbers that never makes anybody wait while it grows.

use hashbrown::HashTable;

/// The table is split into this many parts by the hash's top bits. A part that is full grows alone, so no call ever
/// waits for a move of the whole table.
const PARTS: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Low half of the hash: spares most looks at wrong numbers, and all of them when a part grows.
    tag: u32,
    number: u32,
}

/// Numbers by the hashes of what they stand for. Things are compared by the caller, who has them.
#[derive(Debug)]
pub(crate) struct Parted {
    parts: Vec<HashTable<Entry>>,
}

impl Default for Parted {
    fn default() -> Self {
        Self {
            parts: (0..PARTS).map(|_| HashTable::new()).collect(),
        }
    }
}

/// Spreads a tag over the bits the table looks at: the low ones for the place, the top seven for the quick compare.
fn spread(tag: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(tag)
}

fn part(hash: u64) -> usize {
    (hash >> 56) as usize
}

impl Parted {
    /// The number among those with this hash that `is_it` accepts.
    pub(crate) fn find(&self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let tag = hash as u32;
        self.parts[part(hash)]
            .find(spread(tag), |entry| entry.tag == tag && is_it(entry.number))
            .map(|entry| entry.number)
    }

    /// Adds a number; the caller knows that its thing is not there.
    pub(crate) fn insert(&mut self, hash: u64, number: u32) {
        let tag = hash as u32;
        let entry = Entry { tag, number };
        self.parts[part(hash)].insert_unique(spread(tag), entry, |entry| spread(entry.tag));
    }

    /// Takes the number out that `is_it` accepts among those with this hash.
    pub(crate) fn remove(&mut self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let tag = hash as u32;
        let found = self.parts[part(hash)]
            .find_entry(spread(tag), |entry| entry.tag == tag && is_it(entry.number));
        Some(found.ok()?.remove().0.number)
    }

    pub(crate) fn len(&self) -> usize {
        self.parts.iter().map(HashTable::len).sum()
    }

    pub(crate) fn bookkeeping_bytes(&self) -> usize {
        let tables: usize = self.parts.iter().map(HashTable::allocation_size).sum();
        tables + PARTS * size_of::<HashTable<Entry>>()
    }
}
