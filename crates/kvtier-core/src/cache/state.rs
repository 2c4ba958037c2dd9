//! The state machine behind the lock: its parts, and the steps every operation is made of.

use super::counters::{Counters, Tally, Totals};
use super::index::Index;
use super::room::{NoRoom, WARM};
use super::slab::{Slab, Slot, SlotRef, SlotState};
use super::space::Spaces;
use super::{CacheConfig, Extent, ExtentAllocator, ResidentObject};
use crate::eviction::{Candidate, EvictionPolicy};
use crate::hashing::ChunkHash;
use std::time::Duration;

/// Ticks of the cache's clock in a second; a `u32` of them lasts 13 years.
pub(super) const TICKS_PER_SECOND: u32 = 10;

/// Everything the cache knows. Every method is one step under the lock.
#[derive(Debug)]
pub(super) struct State<A> {
    pub(super) allocator: A,
    pub(super) slab: Slab,
    pub(super) index: Index,
    pub(super) spaces: Spaces,
    pub(super) policy: Box<dyn EvictionPolicy>,
    pub(super) counters: Counters,
    /// Resident objects with leases.
    pub(super) leased: Tally,
    pub(super) totals: Totals,
    pub(super) accounting_errors: u64,
    /// The latest time told, in ticks; releases come without a time of their own.
    pub(super) clock: u32,
    /// How many of the next victims have been fetched from memory already.
    pub(super) warm: usize,
    pub(super) upcoming: Vec<u32>,
    /// Where the next search for a run begins, in bytes from the arena's start.
    pub(super) hand: u64,
    /// Evicted and not asked for yet; `None` where nobody asks.
    pub(super) evicted: Option<Vec<ResidentObject>>,
}

impl<A: ExtentAllocator> State<A> {
    pub(super) fn new(allocator: A, config: CacheConfig) -> Self {
        Self {
            allocator,
            slab: Slab::default(),
            index: Index::default(),
            spaces: Spaces::new(config.quotas),
            policy: config.eviction.build(),
            counters: Counters::default(),
            leased: Tally::default(),
            totals: Totals::default(),
            accounting_errors: 0,
            clock: 0,
            warm: 0,
            upcoming: Vec::with_capacity(WARM),
            hand: 0,
            evicted: config.report_evicted.then(Vec::new),
        }
    }

    /// Moves the clock on; it never goes back.
    pub(super) fn tell_time(&mut self, now: Duration) {
        let ticks = now.as_secs() * u64::from(TICKS_PER_SECOND)
            + u64::from(now.subsec_millis() / (1000 / TICKS_PER_SECOND));
        self.clock = self.clock.max(u32::try_from(ticks).unwrap_or(u32::MAX));
    }

    /// The resident object of this key.
    pub(super) fn find(&self, space: u32, hash: &ChunkHash) -> Option<u32> {
        self.index
            .find(self.index.fingerprint(space, hash), |number| {
                let slot = self.slab.at(number);
                slot.hash == *hash && slot.space == space
            })
    }

    pub(super) fn candidate(&self, number: u32, slot: &Slot) -> Candidate {
        Candidate {
            slot: number,
            salt: self.spaces.salt_of(slot.space),
        }
    }

    /// Bytes that an object takes, rounding included.
    pub(super) fn footprint(&self, number: u32) -> u64 {
        self.allocator.footprint(self.slab.at(number).extent.len)
    }

    /// A lease that counts as a use.
    pub(super) fn pin(&mut self, number: u32) -> SlotRef {
        self.slab.at_mut(number).note_use();
        self.hold(number)
    }

    /// One more lease on an object that is resident, or that is leased already.
    pub(super) fn hold(&mut self, number: u32) -> SlotRef {
        let slot = self.slab.at_mut(number);
        let reference = SlotRef {
            slot: number,
            generation: slot.generation(),
        };
        slot.used_at = self.clock;
        match slot.leases.checked_add(1) {
            Some(leases) => slot.leases = leases,
            // Cannot be counted: the object will leave early or never; either way it shows.
            None => self.accounting_errors += 1,
        }
        if slot.leases == 1 && slot.state() == SlotState::Resident {
            let bytes = self.footprint(number);
            self.leased.add(bytes);
            let candidate = self.candidate(number, self.slab.at(number));
            self.count_leased(candidate.salt, |leased| leased.checked_add(bytes));
            self.policy.withdraw(candidate);
        }
        reference
    }

    /// One lease less. With the last one a resident object joins the eviction order as the youngest, and a doomed
    /// one gives its memory back.
    pub(super) fn unpin(&mut self, reference: SlotRef) {
        let number = reference.slot;
        if self.slab.get(reference).is_none_or(|slot| slot.leases == 0) {
            self.accounting_errors += 1;
            return;
        }
        let slot = self.slab.at_mut(number);
        slot.leases -= 1;
        if slot.leases > 0 {
            return;
        }
        slot.used_at = self.clock;
        if slot.state() == SlotState::Resident {
            let bytes = self.footprint(number);
            self.leased.sub(bytes, &mut self.accounting_errors);
            let was_used = self.slab.at_mut(number).take_use();
            let candidate = self.candidate(number, self.slab.at(number));
            self.count_leased(candidate.salt, |leased| leased.checked_sub(bytes));
            self.policy.insert(candidate, was_used);
        } else {
            self.give_back(number);
        }
    }

    fn count_leased(&mut self, salt: u32, change: impl FnOnce(u64) -> Option<u64>) {
        let tenant = self.spaces.tenants.get_mut(salt);
        match tenant.and_then(|tenant| Some((change(tenant.leased)?, tenant))) {
            Some((leased, tenant)) => tenant.leased = leased,
            None => self.accounting_errors += 1,
        }
    }

    /// Counts a use of a resident object.
    pub(super) fn touch(&mut self, number: u32) {
        let slot = self.slab.at_mut(number);
        slot.used_at = self.clock;
        if slot.leases > 0 {
            slot.note_use();
            return;
        }
        let candidate = self.candidate(number, self.slab.at(number));
        self.policy.touch(candidate);
    }

    /// Moves bytes from one tally to another, in the sums and for the tenant. `None` stands for free memory.
    fn account(&mut self, space: u32, bytes: u64, from: SlotState, to: SlotState) {
        let errors = &mut self.accounting_errors;
        let mut apply = |counters: &mut Counters| {
            match from {
                SlotState::Free => {}
                SlotState::Staged => counters.staged.sub(bytes, errors),
                SlotState::Resident => counters.resident.sub(bytes, errors),
                SlotState::Doomed => counters.doomed.sub(bytes, errors),
            }
            match to {
                SlotState::Free => {}
                SlotState::Staged => counters.staged.add(bytes),
                SlotState::Resident => counters.resident.add(bytes),
                SlotState::Doomed => counters.doomed.add(bytes),
            }
        };
        apply(&mut self.counters);
        let salt = self.spaces.salt_of(space);
        match self.spaces.tenants.count(salt, bytes, apply) {
            Ok(None) => {}
            Ok(Some(protected)) => self.policy.protect(salt, protected),
            Err(()) => self.accounting_errors += 1,
        }
    }

    /// A private object with memory of its own, evicting what must leave for it; see [`allocate`](Self::allocate).
    pub(super) fn stage(
        &mut self,
        space: u32,
        hash: ChunkHash,
        bytes: u64,
        near: Option<u32>,
        more: usize,
    ) -> Result<(Extent, SlotRef), NoRoom> {
        let nowhere = Extent { offset: 0, len: 0 };
        let reference = self.slab.take(hash, space, nowhere).ok_or(NoRoom::Memory)?;
        let number = reference.slot;
        let extent = self
            .allocate(space, bytes, near, more, number)
            .inspect_err(|_| self.slab.give_back(number))?;
        self.slab.at_mut(number).extent = extent;
        self.spaces.add_user(space);
        let taken = self.allocator.footprint(bytes);
        self.account(space, taken, SlotState::Free, SlotState::Staged);
        Ok((extent, reference))
    }

    /// Ends the life of an object that is in no index and no order, and frees its memory.
    pub(super) fn give_back(&mut self, number: u32) {
        let slot = self.slab.at(number);
        let (space, extent, state) = (slot.space, slot.extent, slot.state());
        self.account(space, self.footprint(number), state, SlotState::Free);
        self.allocator.free(extent);
        self.slab.give_back(number);
        self.spaces.drop_user(space, &mut self.accounting_errors);
    }

    /// A staged object, if the reference is still one.
    fn staged(&mut self, reference: SlotRef) -> bool {
        let slot = self.slab.get(reference);
        let is_staged = slot.is_some_and(|slot| slot.state() == SlotState::Staged);
        if !is_staged {
            self.accounting_errors += 1;
        }
        is_staged
    }

    /// Gives up a staged object.
    pub(super) fn abort(&mut self, reference: SlotRef) {
        if self.staged(reference) {
            self.totals.aborted += 1;
            self.give_back(reference.slot);
        }
    }

    /// Makes a staged object resident, or frees it if its key is resident already. Gives the key's resident slot,
    /// and whether it is the staged one.
    pub(super) fn admit(&mut self, reference: SlotRef) -> Option<(u32, bool)> {
        if !self.staged(reference) {
            return None;
        }
        let number = reference.slot;
        let slot = self.slab.at(number);
        let (space, hash, bytes) = (slot.space, slot.hash, self.footprint(number));
        if let Some(first) = self.find(space, &hash) {
            self.totals.duplicates += 1;
            self.give_back(number);
            self.touch(first);
            return Some((first, false));
        }
        self.totals.committed += 1;
        self.account(space, bytes, SlotState::Staged, SlotState::Resident);
        let key = self.index.fingerprint(space, &hash);
        self.index.insert(key, number);
        let slot = self.slab.at_mut(number);
        slot.set_state(SlotState::Resident);
        slot.used_at = self.clock;
        let candidate = self.candidate(number, self.slab.at(number));
        if let Some(tenant) = self.spaces.tenants.get_mut(candidate.salt) {
            tenant.totals.committed.add(bytes);
        }
        let identity = self.spaces.identity(space, &hash);
        self.policy.admit(candidate, identity);
        self.policy.insert(candidate, false);
        Some((number, true))
    }

    /// Takes a resident object out of the cache. Its memory goes now, or with its last lease. Gives its bytes.
    pub(super) fn take_out(&mut self, number: u32) -> u64 {
        let slot = self.slab.at(number);
        let (space, bytes, leases) = (slot.space, self.footprint(number), slot.leases);
        let key = self.index.fingerprint(space, &slot.hash);
        let candidate = self.candidate(number, slot);
        if !self.index.remove(key, number) {
            self.accounting_errors += 1;
        }
        if leases == 0 {
            self.policy.withdraw(candidate);
            self.give_back(number);
        } else {
            self.leased.sub(bytes, &mut self.accounting_errors);
            self.count_leased(candidate.salt, |leased| leased.checked_sub(bytes));
            self.account(space, bytes, SlotState::Resident, SlotState::Doomed);
            self.slab.at_mut(number).set_state(SlotState::Doomed);
        }
        bytes
    }
}
