//! Instance ids of a worker.
//!
//! Each registration has its own. Requests of an earlier registration may still be in flight on a lost connection; the
//! server must not serve them any more.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use kvtier_client::InstanceId;

/// Instance ids of one worker.
pub struct InstanceIds {
    next: InstanceId,
    /// Ids that a server may know.
    known: Vec<InstanceId>,
    pub has_stopped: bool,
}

impl InstanceIds {
    /// The first registration has the id `first`; later ones have random ids.
    pub fn new(first: i64) -> Self {
        Self {
            next: InstanceId(first),
            known: Vec::new(),
            has_stopped: false,
        }
    }

    /// The id of a registration that is about to be sent.
    pub fn next(&mut self) -> InstanceId {
        if !self.known.contains(&self.next) {
            self.known.push(self.next);
        }
        self.next
    }

    /// Retires the id for registrations: this one has succeeded, and transfers may use it.
    pub fn registered(&mut self) {
        // 62 bits, unique in practice: every new state has other keys, and no other worker hashes this id.
        let random = RandomState::new().hash_one(self.next.0) >> 2;
        self.next = InstanceId(random.cast_signed());
    }

    /// An id other than `kept` that a server may know.
    pub fn any_except(&self, kept: Option<InstanceId>) -> Option<InstanceId> {
        self.known.iter().copied().find(|id| Some(*id) != kept)
    }

    /// Removes an id that the server has unregistered.
    pub fn remove(&mut self, id: InstanceId) {
        self.known.retain(|known| *known != id);
    }

    /// Removes all ids.
    pub fn clear(&mut self) {
        self.known.clear();
    }
}
