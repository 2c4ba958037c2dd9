//! The index: from a key's fingerprint to its slot.

use crate::hashing::ChunkHash;
use crate::sharded::Sharded;
use std::hash::{BuildHasher, Hasher};

/// A key's hash under this index's own secret seed, so that a client cannot aim at one shard or one chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fingerprint(u64);

/// Slots of resident objects. The caller has the slots and compares keys.
#[derive(Debug, Default)]
pub(super) struct Index {
    slots: Sharded,
    seed: foldhash::quality::RandomState,
}

impl Index {
    pub(super) fn fingerprint(&self, namespace: u32, hash: &ChunkHash) -> Fingerprint {
        let mut hasher = self.seed.build_hasher();
        // Word by word: quicker than the hasher's loop for byte strings of any length.
        let (words, _) = hash.0.as_chunks::<8>();
        for word in words {
            hasher.write_u64(u64::from_le_bytes(*word));
        }
        hasher.write_u32(namespace);
        Fingerprint(hasher.finish())
    }

    /// The slot among those with this fingerprint that `matches` accepts.
    pub(super) fn find(&self, key: Fingerprint, matches: impl FnMut(u32) -> bool) -> Option<u32> {
        self.slots.find(key.0, matches)
    }

    /// Inserts a slot whose key is not in the index.
    pub(super) fn insert(&mut self, key: Fingerprint, slot: u32) {
        self.slots.insert(key.0, slot);
    }

    /// Removes a slot; returns whether it was there.
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
