//! Adaptive replacement: objects used once and objects used again, balanced by what was missed.
//!
//! After N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003), whose lists T1, T2,
//! B1 and B2 are here `once`, `again`, `once_gone` and `again_gone`. Differences, the first two as in LMCache 0.5.6:
//! nobody says how many objects fit, so the capacity is the most there ever were; a victim is chosen without knowing
//! for whom; and each of the two lists of keys may be as long as the capacity, whatever the others hold.
//!
//! Objects are counted, not bytes: an object of any size is one.

mod ghosts;
#[cfg(test)]
mod tests;

use super::{Candidate, EvictionPolicy, Lru};
use crate::block_vec::BlockVec;
use ghosts::Ghosts;

/// What is remembered of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// No object had it yet.
    Never,
    /// A new object, not used yet.
    New,
    /// A new object that was here before, not used yet.
    Returned,
    /// The object, leased or not, belongs to those used once.
    Once,
    /// To those used again.
    Again,
}

/// Four lists: 17 bytes a slot, and about 30 for each of the keys of objects that left, at most two a slot.
#[derive(Debug, Default)]
pub struct Adaptive {
    once: Lru,
    again: Lru,
    /// Keys of those evicted from `once`.
    once_gone: Ghosts,
    /// Keys of those evicted from `again`.
    again_gone: Ghosts,
    /// How long `once` should be: 0 to `capacity`. It changes by fractions.
    target: f64,
    uses: BlockVec<Use, 4096>,
    /// Slots that ever had an object; as slots are reused, the most objects there ever were.
    capacity: usize,
}

impl Adaptive {
    fn used(&self, slot: u32) -> Use {
        self.uses.get(slot).copied().unwrap_or(Use::Never)
    }

    fn set(&mut self, slot: u32, used: Use) {
        self.uses.grow_to(slot, || Use::Never);
        if std::mem::replace(&mut self.uses[slot], used) == Use::Never {
            self.capacity += 1;
        }
    }

    /// Whether the key is one of an object that was evicted. It is forgotten, and those of its kind get more room: the
    /// more, the fewer of that kind are remembered.
    fn recall(&mut self, key: u64) -> bool {
        let (once, again) = (self.once_gone.len() as f64, self.again_gone.len() as f64);
        if self.once_gone.forget(key) {
            self.target += (again / once).max(1.0);
        } else if self.again_gone.forget(key) {
            self.target -= (once / again).max(1.0);
        } else {
            return false;
        }
        self.target = self.target.clamp(0.0, self.capacity as f64);
        true
    }

    /// How many of those used once leave before any of those used again.
    fn once_first(&self) -> usize {
        let len = self.once.len();
        (len + 1).saturating_sub(self.target as usize).min(len)
    }

    /// The order of a list whose objects must be of this kind.
    fn checked(&self, list: &Lru, kind: Use) -> Result<Vec<u32>, String> {
        let order = list.order()?;
        match order.iter().find(|&&slot| self.used(slot) != kind) {
            None => Ok(order),
            Some(&slot) => Err(format!(
                "slot {slot}, used {:?}, is in the list of {kind:?}",
                self.used(slot)
            )),
        }
    }
}

impl EvictionPolicy for Adaptive {
    fn name(&self) -> &'static str {
        super::EvictionKind::Arc.name()
    }

    fn admit(&mut self, candidate: Candidate, key: u64) {
        let used = match self.recall(key) {
            true => Use::Returned,
            false => Use::New,
        };
        self.set(candidate.slot, used);
    }

    fn evicted(&mut self, candidate: Candidate, key: u64) {
        match self.used(candidate.slot) {
            Use::Once => self.once_gone.remember(key, self.capacity),
            Use::Again => self.again_gone.remember(key, self.capacity),
            Use::Never | Use::New | Use::Returned => {}
        }
    }

    fn insert(&mut self, candidate: Candidate, was_used: bool) {
        match (self.used(candidate.slot), was_used) {
            (Use::Never | Use::New, _) | (Use::Once, false) => {
                self.set(candidate.slot, Use::Once);
                self.once.insert(candidate, was_used);
            }
            (Use::Returned | Use::Again, _) | (Use::Once, true) => {
                self.set(candidate.slot, Use::Again);
                self.again.insert(candidate, was_used);
            }
        }
    }

    fn withdraw(&mut self, candidate: Candidate) {
        self.once.withdraw(candidate);
        self.again.withdraw(candidate);
    }

    fn touch(&mut self, candidate: Candidate) {
        let before = self.len();
        self.withdraw(candidate);
        if self.len() < before {
            self.insert(candidate, true);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        let once = self.once.victim();
        match self.once_first() {
            0 => self.again.victim().or(once),
            _ => once,
        }
    }

    fn upcoming(&self, _: Option<u32>, limit: usize, slots: &mut Vec<u32>) {
        let limit = limit.min(self.len());
        let once_first = self.once_first().min(limit);
        let end = slots.len() + limit;
        self.once.upcoming(None, once_first, slots);
        self.again.upcoming(None, end - slots.len(), slots);
        // The others used once: those that came first are passed over.
        let (at, left) = (slots.len(), end - slots.len());
        if left > 0 {
            self.once.upcoming(None, once_first + left, slots);
            slots.drain(at..at + once_first);
        }
    }

    fn len(&self) -> usize {
        self.once.len() + self.again.len()
    }

    fn order(&self) -> Result<Vec<u32>, String> {
        for ghosts in [&self.once_gone, &self.again_gone] {
            ghosts.check(self.capacity)?;
        }
        let mut order = self.checked(&self.once, Use::Once)?;
        let last = order.split_off(self.once_first());
        order.extend(self.checked(&self.again, Use::Again)?);
        order.extend(last);
        Ok(order)
    }

    fn bookkeeping_bytes(&self) -> usize {
        self.once.bookkeeping_bytes()
            + self.again.bookkeeping_bytes()
            + self.once_gone.bookkeeping_bytes()
            + self.again_gone.bookkeeping_bytes()
            + self.uses.bookkeeping_bytes()
    }
}
