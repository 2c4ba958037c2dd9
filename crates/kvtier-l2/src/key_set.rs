//! Keys of objects that a later store has to replace.
//!
//! The mutex guards their digests; no other lock is acquired inside.

use std::collections::HashSet;

use kvtier_common::sync::Mutex;
use kvtier_core::object_key::ObjectKey;

use crate::object::key_digest;

/// Keys that are remembered.
const MAX_KEYS: usize = 65_536;

/// A bounded set of keys; those beyond its bound are not remembered.
#[derive(Debug, Default)]
pub struct KeySet {
    digests: Mutex<HashSet<u128>>,
}

impl KeySet {
    /// Remembers a key.
    pub fn insert(&self, key: &ObjectKey) {
        let digest = key_digest(key);
        let mut digests = self.digests.lock();
        if digests.len() < MAX_KEYS {
            digests.insert(digest);
        }
    }

    /// Whether no key is remembered.
    pub fn is_empty(&self) -> bool {
        self.digests.lock().is_empty()
    }

    /// Whether a key is remembered.
    pub fn contains(&self, key: &ObjectKey) -> bool {
        let digests = self.digests.lock();
        // Usually there is none, and nothing to hash.
        !digests.is_empty() && digests.contains(&key_digest(key))
    }

    /// Returns whether it was there.
    pub fn remove(&self, key: &ObjectKey) -> bool {
        let mut digests = self.digests.lock();
        !digests.is_empty() && digests.remove(&key_digest(key))
    }
}
