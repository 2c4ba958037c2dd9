//! Linked lists over one table of links: a slot is in at most one of them, and is removed without a search.

use crate::block_vec::BlockVec;
use crate::violation::Violation;

/// End of a list.
pub(super) const NONE: u32 = u32::MAX;
/// `older` of a slot that is in no list.
const OUT: u32 = u32::MAX - 1;

/// The neighbours of a slot, and a fact that its list keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link<F> {
    older: u32,
    newer: u32,
    pub(super) fact: F,
}

/// One list, from the oldest to the newest.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    pub(super) oldest: u32,
    pub(super) newest: u32,
    /// The newest of those inserted to be evicted first: they are the oldest of the list.
    pub(super) newest_first: u32,
    pub(super) len: usize,
}

impl Default for List {
    fn default() -> Self {
        Self {
            oldest: NONE,
            newest: NONE,
            newest_first: NONE,
            len: 0,
        }
    }
}

impl List {
    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }
}

/// The links of all slots: 8 bytes each, plus the fact.
#[derive(Debug, Default)]
pub(super) struct Links<F> {
    links: BlockVec<Link<F>, 4096>,
}

impl<F: Copy + Default> Links<F> {
    pub(super) fn grow_to(&mut self, slot: u32) {
        self.links.grow_to(slot, || Link {
            older: OUT,
            newer: NONE,
            fact: F::default(),
        });
    }

    /// The fact of a slot that is in a list.
    pub(super) fn get(&self, slot: u32) -> Option<F> {
        let link = self.links.get(slot)?;
        (link.older != OUT).then_some(link.fact)
    }

    pub(super) fn contains(&self, slot: u32) -> bool {
        self.get(slot).is_some()
    }

    /// Removes a slot from its list.
    pub(super) fn unlink(&mut self, list: &mut List, slot: u32) {
        let link = &mut self.links[slot];
        let (older, newer) = (link.older, link.newer);
        link.older = OUT;
        if list.newest_first == slot {
            list.newest_first = older;
        }
        match older {
            NONE => list.oldest = newer,
            _ => self.links[older].newer = newer,
        }
        match newer {
            NONE => list.newest = older,
            _ => self.links[newer].older = older,
        }
        list.len -= 1;
    }

    /// Appends a slot that is in no list, as the newest.
    pub(super) fn push(&mut self, list: &mut List, slot: u32, fact: F) {
        let older = std::mem::replace(&mut list.newest, slot);
        self.links[slot] = Link {
            older,
            newer: NONE,
            fact,
        };
        match older {
            NONE => list.oldest = slot,
            _ => self.links[older].newer = slot,
        }
        list.len += 1;
    }

    /// Inserts a slot that is in no list, behind those inserted so before and in front of all others.
    pub(super) fn push_first(&mut self, list: &mut List, slot: u32, fact: F) {
        let older = std::mem::replace(&mut list.newest_first, slot);
        let newer = match older {
            NONE => std::mem::replace(&mut list.oldest, slot),
            _ => std::mem::replace(&mut self.links[older].newer, slot),
        };
        self.links[slot] = Link { older, newer, fact };
        match newer {
            NONE => list.newest = slot,
            _ => self.links[newer].older = slot,
        }
        list.len += 1;
    }

    /// The slots from this one on, oldest first.
    pub(super) fn from(&self, slot: Option<u32>) -> impl Iterator<Item = u32> {
        std::iter::successors(slot, |&slot| {
            let newer = self.links.get(slot)?.newer;
            (newer != NONE).then_some(newer)
        })
    }

    /// The slots of a list, newest first.
    pub(super) fn newest_first(&self, list: &List) -> impl Iterator<Item = u32> {
        let newest = (list.newest != NONE).then_some(list.newest);
        std::iter::successors(newest, |&slot| {
            let older = self.links.get(slot)?.older;
            (older != NONE).then_some(older)
        })
    }

    /// The slots of a list and their facts, oldest first.
    ///
    /// # Errors
    /// A description of the damage to the list.
    pub(super) fn check(&self, list: &List) -> Result<Vec<(F, u32)>, Violation> {
        let mut slots = Vec::with_capacity(list.len);
        let (mut before, mut at) = (NONE, list.oldest);
        while at != NONE {
            let link = self.links.get(at);
            let link =
                link.ok_or_else(|| Violation(format!("slot {at} is in the list but has no link")))?;
            if link.older != before {
                let older = link.older;
                return Err(Violation(format!(
                    "slot {at} follows {before} but points back to {older}"
                )));
            }
            if slots.len() == list.len {
                return Err(Violation(format!(
                    "the list holds more than its {} slots",
                    list.len
                )));
            }
            slots.push((link.fact, at));
            (before, at) = (at, link.newer);
        }
        if slots.len() != list.len || before != list.newest {
            return Err(Violation(format!(
                "the list ends at {before} after {} slots; expected {} after {}",
                slots.len(),
                list.newest,
                list.len
            )));
        }
        let first = list.newest_first;
        if first != NONE && !slots.iter().any(|(_, slot)| *slot == first) {
            return Err(Violation(format!(
                "slot {first}, inserted as first, is not in the list"
            )));
        }
        Ok(slots)
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        self.links.bookkeeping_bytes()
    }
}
