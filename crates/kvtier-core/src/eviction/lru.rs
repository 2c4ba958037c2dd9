//! The least recently used object leaves first.

use super::{Candidate, EvictionPolicy};

/// End of the list.
const NONE: u32 = u32::MAX;
/// `older` of a slot that is not in the list.
const OUT: u32 = u32::MAX - 1;

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

/// Links live in blocks of this many slots, so that growing never moves what is there.
const BLOCK: usize = 4096;

/// One list through a dense table of links, 8 bytes a slot.
#[derive(Debug)]
pub struct Lru {
    blocks: Vec<Box<[Link; BLOCK]>>,
    oldest: u32,
    newest: u32,
    len: usize,
}

impl Default for Lru {
    fn default() -> Self {
        Self {
            blocks: Vec::new(),
            oldest: NONE,
            newest: NONE,
            len: 0,
        }
    }
}

impl Lru {
    fn link(&mut self, slot: u32) -> &mut Link {
        &mut self.blocks[slot as usize / BLOCK][slot as usize % BLOCK]
    }

    fn get(&self, slot: u32) -> Option<Link> {
        let block = self.blocks.get(slot as usize / BLOCK)?;
        Some(block[slot as usize % BLOCK])
    }

    fn contains(&self, slot: u32) -> bool {
        self.get(slot).is_some_and(|link| link.older != OUT)
    }

    fn unlink(&mut self, slot: u32) {
        let link = self.link(slot);
        let Link { older, newer } = *link;
        link.older = OUT;
        match older {
            NONE => self.oldest = newer,
            _ => self.link(older).newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.link(newer).older = older,
        }
        self.len -= 1;
    }

    fn push(&mut self, slot: u32) {
        let older = self.newest;
        *self.link(slot) = Link { older, newer: NONE };
        match older {
            NONE => self.oldest = slot,
            _ => self.link(older).newer = slot,
        }
        self.newest = slot;
        self.len += 1;
    }
}

impl EvictionPolicy for Lru {
    fn name(&self) -> &'static str {
        "LRU"
    }

    fn insert(&mut self, candidate: Candidate, _: bool) {
        let slot = candidate.slot;
        while slot as usize / BLOCK >= self.blocks.len() {
            let out = Link {
                older: OUT,
                newer: NONE,
            };
            self.blocks.push(Box::new([out; BLOCK]));
        }
        if self.contains(slot) {
            self.unlink(slot);
        }
        self.push(slot);
    }

    fn withdraw(&mut self, candidate: Candidate) {
        if self.contains(candidate.slot) {
            self.unlink(candidate.slot);
        }
    }

    fn touch(&mut self, candidate: Candidate) {
        if candidate.slot != self.newest && self.contains(candidate.slot) {
            self.unlink(candidate.slot);
            self.push(candidate.slot);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    fn upcoming(&self, _: Option<u32>, limit: usize, slots: &mut Vec<u32>) {
        let mut next = (self.oldest != NONE).then_some(self.oldest);
        for _ in 0..limit {
            let Some(slot) = next else { return };
            slots.push(slot);
            next = self.get(slot).map(|link| link.newer);
            next = next.filter(|&newer| newer != NONE);
        }
    }

    fn len(&self) -> usize {
        self.len
    }

    fn order(&self) -> Result<Vec<u32>, String> {
        let mut order = Vec::with_capacity(self.len);
        let mut before = NONE;
        let mut at = self.oldest;
        while at != NONE {
            let link = self
                .get(at)
                .ok_or_else(|| format!("slot {at} is in the list but has no link"))?;
            if link.older != before {
                return Err(format!(
                    "slot {at} follows {before} but points back to {}",
                    link.older
                ));
            }
            if order.len() == self.len {
                return Err(format!("the list holds more than its {} slots", self.len));
            }
            order.push(at);
            (before, at) = (at, link.newer);
        }
        if order.len() != self.len || before != self.newest {
            return Err(format!(
                "the list ends at {before} after {} slots; expected {} after {}",
                order.len(),
                self.newest,
                self.len
            ));
        }
        Ok(order)
    }

    fn bookkeeping_bytes(&self) -> usize {
        self.blocks.len() * BLOCK * size_of::<Link>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(slot: u32) -> Candidate {
        Candidate { slot, salt: 0 }
    }

    #[test]
    fn the_oldest_leaves_first_and_a_touch_makes_young() {
        let mut lru = Lru::default();
        for slot in [3, 1, 9000] {
            lru.insert(candidate(slot), false);
        }
        assert_eq!(lru.order().unwrap(), [3, 1, 9000]);
        lru.touch(candidate(3));
        assert_eq!(lru.victim(), Some(1));
        lru.withdraw(candidate(9000));
        assert_eq!(lru.order().unwrap(), [1, 3]);
        assert_eq!(lru.len(), 2);
        for (limit, expected) in [(9, &[1, 3][..]), (1, &[1]), (0, &[])] {
            let mut upcoming = Vec::new();
            lru.upcoming(None, limit, &mut upcoming);
            assert_eq!(upcoming, expected);
        }
    }

    #[test]
    fn unknown_slots_are_ignored() {
        let mut lru = Lru::default();
        lru.withdraw(candidate(70_000));
        lru.touch(candidate(5));
        assert!(lru.is_empty());
        assert_eq!(lru.victim(), None);
        lru.insert(candidate(5), false);
        lru.withdraw(candidate(5));
        lru.withdraw(candidate(5));
        assert!(lru.is_empty());
        assert_eq!(lru.order().unwrap(), Vec::<u32>::new());
    }
}
