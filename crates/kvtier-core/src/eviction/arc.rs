//! ARC: objects used once (T1) and objects used again (T2), balanced by the misses on keys evicted from each (B1, B2).
//!
//! After N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003). Differences, the
//! first two as in LMCache 0.5.6:
//!
//! * the number of objects that fit is unknown, so the capacity `c` is the most there ever were
//! * a victim is chosen without knowing the object it is evicted for
//! * B1 and B2 may each be as long as the capacity, independent of the other lists
//!
//! Objects are counted, not bytes: an object of any size counts one.

mod ghosts;
#[cfg(test)]
mod tests;

use super::{Candidate, EvictionPolicy, Lru};
use crate::block_vec::BlockVec;
use crate::violation::Violation;
use ghosts::Ghosts;

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArcState {
    /// Not used by any object yet.
    Unused,
    /// Has a new object, in no list yet.
    New,
    /// Has a new object whose key was in B1 or B2, in no list yet.
    Returned,
    /// Has an object of T1, leased or not.
    T1,
    /// Has an object of T2, leased or not.
    T2,
}

/// ARC policy. Its four lists take 17 bytes per slot, and about 30 per key in B1 and B2, which have at most two
/// keys per slot.
#[derive(Debug, Default)]
pub struct ArcPolicy {
    /// Objects used once.
    t1: Lru,
    /// Objects used again.
    t2: Lru,
    /// Keys evicted from T1.
    b1: Ghosts,
    /// Keys evicted from T2.
    b2: Ghosts,
    /// Target length of T1, the paper's `p`: 0 to `capacity`. It changes by fractions.
    target: f64,
    slots: BlockVec<ArcState, 4096>,
    /// Slots that ever had an object; as slots are reused, the most objects there ever were. The paper's `c`.
    capacity: usize,
}

impl ArcPolicy {
    fn state(&self, slot: u32) -> ArcState {
        self.slots.get(slot).copied().unwrap_or(ArcState::Unused)
    }

    fn set(&mut self, slot: u32, state: ArcState) {
        self.slots.grow_to(slot, || ArcState::Unused);
        if std::mem::replace(&mut self.slots[slot], state) == ArcState::Unused {
            self.capacity += 1;
        }
    }

    /// Removes a key from B1 or B2 and adapts the target in favour of its list: the more, the shorter that list is. Returns
    /// whether the key was in one of them.
    fn adapt(&mut self, key: u64) -> bool {
        let (b1, b2) = (self.b1.len() as f64, self.b2.len() as f64);
        if self.b1.remove(key) {
            self.target += (b2 / b1).max(1.0);
        } else if self.b2.remove(key) {
            self.target -= (b1 / b2).max(1.0);
        } else {
            return false;
        }
        self.target = self.target.clamp(0.0, self.capacity as f64);
        true
    }

    /// Number of objects of T1 that are evicted before any of T2.
    fn t1_first(&self) -> usize {
        let len = self.t1.len();
        (len + 1).saturating_sub(self.target as usize).min(len)
    }

    /// The order of a list whose slots must be in this state.
    fn checked(&self, list: &Lru, kind: ArcState) -> Result<Vec<u32>, Violation> {
        let order = list.order()?;
        match order.iter().find(|&&slot| self.state(slot) != kind) {
            None => Ok(order),
            Some(&slot) => Err(Violation(format!(
                "slot {slot}, in state {:?}, is in the list of {kind:?}",
                self.state(slot)
            ))),
        }
    }
}

impl EvictionPolicy for ArcPolicy {
    fn name(&self) -> &'static str {
        super::EvictionKind::Arc.name()
    }

    fn admit(&mut self, candidate: Candidate, key: u64) {
        let state = if self.adapt(key) {
            ArcState::Returned
        } else {
            ArcState::New
        };
        self.set(candidate.slot, state);
    }

    fn evicted(&mut self, candidate: Candidate, key: u64) {
        match self.state(candidate.slot) {
            ArcState::T1 => self.b1.insert(key, self.capacity),
            ArcState::T2 => self.b2.insert(key, self.capacity),
            ArcState::Unused | ArcState::New | ArcState::Returned => {}
        }
    }

    fn insert(&mut self, candidate: Candidate, was_used: bool) {
        match (self.state(candidate.slot), was_used) {
            (ArcState::Unused | ArcState::New, _) | (ArcState::T1, false) => {
                self.set(candidate.slot, ArcState::T1);
                self.t1.insert(candidate, was_used);
            }
            (ArcState::Returned | ArcState::T2, _) | (ArcState::T1, true) => {
                self.set(candidate.slot, ArcState::T2);
                self.t2.insert(candidate, was_used);
            }
        }
    }

    /// Among the objects used once, whose number the policy goes on to choose.
    fn insert_first(&mut self, candidate: Candidate) {
        self.remove(candidate);
        self.set(candidate.slot, ArcState::T1);
        self.t1.insert_first(candidate);
    }

    fn remove(&mut self, candidate: Candidate) {
        self.t1.remove(candidate);
        self.t2.remove(candidate);
    }

    fn touch(&mut self, candidate: Candidate) {
        let before = self.len();
        self.remove(candidate);
        if self.len() < before {
            self.insert(candidate, true);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        let t1 = self.t1.victim();
        match self.t1_first() {
            0 => self.t2.victim().or(t1),
            _ => t1,
        }
    }

    fn upcoming(&self, _: Option<u32>, limit: usize, slots: &mut Vec<u32>) {
        let limit = limit.min(self.len());
        let t1_first = self.t1_first().min(limit);
        let end = slots.len() + limit;
        self.t1.upcoming(None, t1_first, slots);
        self.t2.upcoming(None, end - slots.len(), slots);
        // The rest of T1, without those taken above.
        let (at, left) = (slots.len(), end - slots.len());
        if left > 0 {
            self.t1.upcoming(None, t1_first + left, slots);
            slots.drain(at..at + t1_first);
        }
    }

    fn len(&self) -> usize {
        self.t1.len() + self.t2.len()
    }

    fn order(&self) -> Result<Vec<u32>, Violation> {
        for ghosts in [&self.b1, &self.b2] {
            ghosts.check(self.capacity)?;
        }
        let mut order = self.checked(&self.t1, ArcState::T1)?;
        let last = order.split_off(self.t1_first());
        order.extend(self.checked(&self.t2, ArcState::T2)?);
        order.extend(last);
        Ok(order)
    }

    fn bookkeeping_bytes(&self) -> usize {
        self.t1.bookkeeping_bytes()
            + self.t2.bookkeeping_bytes()
            + self.b1.bookkeeping_bytes()
            + self.b2.bookkeeping_bytes()
            + self.slots.bookkeeping_bytes()
    }
}
