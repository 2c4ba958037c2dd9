//! From a key's fingerprint to its slot.

use crate::hashing::ChunkHash;
use crate::parted::Parted;
use std::hash::{BuildHasher, Hasher};

/// A key's hash under this index's own secret seed, so that nobody can aim at one part or one chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fingerprint(u64);

/// Slots of resident objects. Keys are compared by the caller, who has the slots.
#[derive(Debug, Default)]
pub(super) struct Index {
    slots: Parted,
    seed: foldhash::quality::RandomState,
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
    pub(super) fn find(&self, key: Fingerprint, is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        self.slots.find(key.0, is_it)
    }

    /// Adds a slot; the caller knows that its key is not there.
    pub(super) fn insert(&mut self, key: Fingerprint, slot: u32) {
        self.slots.insert(key.0, slot);
    }

    /// Takes a slot out; says whether it was there.
    pub(super) fn remove(&mut self, key: Fingerprint, slot: u32) -> bool {
        self.slots.remove(key.0, |found| found == slot).is_some()
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        self.slots.bookkeeping_bytes()
    }
}
