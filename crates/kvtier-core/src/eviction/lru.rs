//! LRU: the least recently used object is evicted first.

use super::list::{Links, List};
use super::{Candidate, EvictionPolicy};
use crate::violation::Violation;

/// LRU policy: one list.
#[derive(Debug, Default)]
pub struct Lru {
    links: Links<()>,
    list: List,
}

impl EvictionPolicy for Lru {
    fn name(&self) -> &'static str {
        "LRU"
    }

    fn insert(&mut self, candidate: Candidate, _: bool) {
        let slot = candidate.slot;
        self.links.grow_to(slot);
        if self.links.contains(slot) {
            self.links.unlink(&mut self.list, slot);
        }
        self.links.push(&mut self.list, slot, ());
    }

    fn insert_first(&mut self, candidate: Candidate) {
        let slot = candidate.slot;
        self.links.grow_to(slot);
        if self.links.contains(slot) {
            self.links.unlink(&mut self.list, slot);
        }
        self.links.push_first(&mut self.list, slot, ());
    }

    fn remove(&mut self, candidate: Candidate) {
        if self.links.contains(candidate.slot) {
            self.links.unlink(&mut self.list, candidate.slot);
        }
    }

    fn touch(&mut self, candidate: Candidate) {
        let slot = candidate.slot;
        let is_last = slot == self.list.newest && slot != self.list.newest_first;
        if !is_last && self.links.contains(slot) {
            self.links.unlink(&mut self.list, slot);
            self.links.push(&mut self.list, slot, ());
        }
    }

    fn victim(&mut self) -> Option<u32> {
        self.list.oldest()
    }

    fn upcoming(&self, _: Option<u32>, limit: usize, slots: &mut Vec<u32>) {
        slots.extend(self.links.from(self.list.oldest()).take(limit));
    }

    fn len(&self) -> usize {
        self.list.len
    }

    fn order(&self) -> Result<Vec<u32>, Violation> {
        let slots = self.links.check(&self.list)?;
        Ok(slots.into_iter().map(|(_, slot)| slot).collect())
    }

    fn bookkeeping_bytes(&self) -> usize {
        self.links.bookkeeping_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(slot: u32) -> Candidate {
        Candidate { slot, tenant: 0 }
    }

    // proves: docs/compare.md#l1-in-host-memory
    #[test]
    fn oldest_is_victim_and_touch_makes_young() {
        let mut lru = Lru::default();
        for slot in [3, 1, 9000] {
            lru.insert(candidate(slot), false);
        }
        assert_eq!(lru.order().unwrap(), [3, 1, 9000]);
        lru.touch(candidate(3));
        assert_eq!(lru.victim(), Some(1));
        lru.remove(candidate(9000));
        assert_eq!(lru.order().unwrap(), [1, 3]);
        assert_eq!(lru.len(), 2);
        for (limit, expected) in [(9, &[1, 3][..]), (1, &[1]), (0, &[])] {
            let mut upcoming = Vec::new();
            lru.upcoming(None, limit, &mut upcoming);
            assert_eq!(upcoming, expected);
        }
    }

    #[test]
    fn inserted_as_first_go_first_until_touched() {
        let mut lru = Lru::default();
        lru.insert_first(candidate(7));
        lru.touch(candidate(7));
        lru.insert(candidate(1), false);
        for slot in [9, 8] {
            lru.insert_first(candidate(slot));
        }
        assert_eq!(lru.order().unwrap(), [9, 8, 7, 1]);
        lru.remove(candidate(8));
        lru.insert_first(candidate(6));
        lru.touch(candidate(9));
        assert_eq!(lru.order().unwrap(), [6, 7, 1, 9]);
        lru.remove(candidate(6));
        lru.insert_first(candidate(5));
        assert_eq!(lru.order().unwrap(), [5, 7, 1, 9]);
    }

    #[test]
    fn unknown_slots_are_ignored() {
        let mut lru = Lru::default();
        lru.remove(candidate(70_000));
        lru.touch(candidate(5));
        assert!(lru.is_empty());
        assert_eq!(lru.victim(), None);
        lru.insert(candidate(5), false);
        lru.remove(candidate(5));
        lru.remove(candidate(5));
        assert!(lru.is_empty());
        assert_eq!(lru.order().unwrap(), Vec::<u32>::new());
    }
}
