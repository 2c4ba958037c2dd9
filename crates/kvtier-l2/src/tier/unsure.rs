//! Objects in the index of which nobody knows whether they are in the backend: their last store or delete was not
//! answered. They count, and nothing is concluded from that; whoever wants one asks the backend.

use std::collections::HashSet;

use kvtier_core::object_key::ObjectKey;
use parking_lot::Mutex;

/// See the module. No more of them than the index has.
#[derive(Debug, Default)]
pub(super) struct Unsure(Mutex<HashSet<ObjectKey>>);

impl Unsure {
    pub(super) fn add(&self, key: &ObjectKey) {
        self.0.lock().insert(key.clone());
    }

    /// It is known by now, or the index has given it up.
    pub(super) fn settle(&self, key: &ObjectKey) {
        self.0.lock().remove(key);
    }

    pub(super) fn has(&self, key: &ObjectKey) -> bool {
        self.0.lock().contains(key)
    }
}
