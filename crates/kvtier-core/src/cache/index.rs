//! From a key's fingerprint to its slot.

use crate::hashing::ChunkHash;
use hashbrown::HashTable;
use std::hash::{BuildHasher, Hasher};

/// The table is split into this many parts by the fingerprint's top bits. A part that is full grows alone, so no
/// call ever waits for a move of the whole index.
const PARTS: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Low half of the fingerprint: spares most looks into wrong slots, and all of them when a part grows.
    tag: u32,
    slot: u32,
}

/// A key's hash under this index's own secret seed, so that nobody can aim at one part or one chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fingerprint(u64);

/// Slots of resident objects. Keys are compared by the caller, who has the slots.
#[derive(Debug)]
pub(super) struct Index {
    parts: Vec<HashTable<Entry>>,
    seed: foldhash::quality::RandomState,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            parts: (0..PARTS).map(|_| HashTable::new()).collect(),
            seed: foldhash::quality::RandomState::default(),
        }
    }
}

/// Spreads a tag over the bits the table looks at: the low ones for the place, the top seven for the quick compare.
fn spread(tag: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(tag)
}

impl Index {
    pub(super) fn fingerprint(&self, space: u32, hash: &ChunkHash) -> Fingerprint {
        let mut hasher = self.seed.build_hasher();
        // Word by word: quicker than the hasher's loop for byte strings of any length.
        let (words, _) = hash.0.as_chunks::<8>();
        for word in words {
            hasher.write_u64(u64::from_le_bytes(*word));
        }
        hasher.write_u32(space);
        Fingerprint(hasher.finish())
    }

    /// The slot among those with this fingerprint that `is_it` accepts.
    pub(super) fn find(&self, key: Fingerprint, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let tag = key.0 as u32;
        self.parts[(key.0 >> 56) as usize]
            .find(spread(tag), |entry| entry.tag == tag && is_it(entry.slot))
            .map(|entry| entry.slot)
    }

    /// Adds a slot; the caller knows that its key is not there.
    pub(super) fn insert(&mut self, key: Fingerprint, slot: u32) {
        let tag = key.0 as u32;
        self.parts[(key.0 >> 56) as usize].insert_unique(
            spread(tag),
            Entry { tag, slot },
            |entry| spread(entry.tag),
        );
    }

    /// Takes a slot out; says whether it was there.
    pub(super) fn remove(&mut self, key: Fingerprint, slot: u32) -> bool {
        let tag = key.0 as u32;
        self.parts[(key.0 >> 56) as usize]
            .find_entry(spread(tag), |entry| entry.slot == slot)
            .map(|found| found.remove())
            .is_ok()
    }

    pub(super) fn len(&self) -> usize {
        self.parts.iter().map(HashTable::len).sum()
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        let tables: usize = self.parts.iter().map(HashTable::allocation_size).sum();
        tables + PARTS * size_of::<HashTable<Entry>>()
    }
}
