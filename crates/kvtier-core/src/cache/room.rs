//! Making room: who has to leave for whom.
//!
//! For a store: tenants that have too much first, the storing one before all; then what the policy names, where others'
//! shares allow it; at last what the storing tenant has itself.

use super::reservation::KeyOutcome;
use super::slab::{Slot, SlotState};
use super::state::State;
use super::tenant::Tenant;
use super::{Evicted, Extent, ExtentAllocator, ResidentObject};
use crate::quota::Grant;
use std::hint::black_box;

/// Victims fetched at once.
pub(super) const WARM: usize = 32;

/// Tenants with too much that one store looks at; with all of them leased, it goes on to others.
const OVER_LOOKED_AT: usize = 4;

/// Part of the memory (1/16) that may stay free for objects of unlike sizes: while less is free, victims that are smaller
/// than the object leave in policy order, and the holes between them are of use to smaller objects.
const SPARE_PART: u64 = 16;

/// Such victims of one object at most, before a run is evicted.
const MAX_SMALL_VICTIMS: usize = 64;

/// Why an object gets no memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum NoRoom {
    /// There is none, and nothing to evict.
    Memory,
    /// The tenant's limit.
    Quota,
    /// What its writer may have uncommitted.
    Staging,
}

impl<A: ExtentAllocator> State<A> {
    /// Memory for one object, which is to be `owner`'s, evicting what must leave for it: in the part `near` if there is
    /// one. `more` is how many more the caller is likely to want.
    ///
    /// # Errors
    /// Nothing was evicted then.
    pub(super) fn allocate(
        &mut self,
        space: u32,
        bytes: u64,
        near: Option<u32>,
        more: usize,
        owner: u32,
    ) -> Result<Extent, NoRoom> {
        let salt = self.spaces.salt_of(space);
        let capacity = self.allocator.capacity();
        let taken = self.allocator.footprint(bytes);
        // What no eviction moves: if this leaves too little, evicting is in vain.
        let fixed = self.counters.staged.bytes + self.counters.doomed.bytes + self.leased.bytes;
        if taken > capacity.saturating_sub(fixed) || bytes > self.allocator.largest() {
            return Err(NoRoom::Memory);
        }
        let kept = self.strictly_kept(salt, taken)?;
        let extent = self.make_hole(salt, kept, bytes, near, more, owner)?;
        while self.is_over(salt, kept)
            && let Some(own) = self.policy.victim_of(salt)
        {
            self.warm_up(Some(salt), more + 1);
            self.evict_slot(own);
        }
        Ok(extent)
    }

    /// Bytes that a strict limit leaves a tenant beside an object that takes `bytes` bytes; `u64::MAX` without one.
    fn strictly_kept(&self, salt: u32, bytes: u64) -> Result<u64, NoRoom> {
        let Some(limit) = self.spaces.tenants.strict_limit(salt) else {
            return Ok(u64::MAX);
        };
        let kept = limit.checked_sub(bytes).ok_or(NoRoom::Quota)?;
        let Some(tenant) = self.spaces.tenants.get(salt) else {
            return Ok(kept);
        };
        let fixed = tenant.bytes() - tenant.evictable();
        let is_over = tenant.bytes() > kept;
        if fixed > kept || is_over && self.policy.victim_of(salt).is_none() {
            return Err(NoRoom::Quota);
        }
        Ok(kept)
    }

    /// Allocates, evicting in policy order while the next victim is as large as the object.
    #[inline]
    fn make_hole(
        &mut self,
        salt: u32,
        kept: u64,
        bytes: u64,
        near: Option<u32>,
        more: usize,
        owner: u32,
    ) -> Result<Extent, NoRoom> {
        let capacity = self.allocator.capacity();
        loop {
            if bytes <= capacity.saturating_sub(self.allocator.used())
                && let Some(extent) = match near {
                    Some(part) => self.allocator.allocate_near(bytes, part, owner),
                    None => self.allocator.allocate(bytes, owner),
                }
            {
                return Ok(extent);
            }
            match self.next_victim(salt, kept, more) {
                Some(victim) if self.is_enough(victim, bytes) => self.evict_slot(victim),
                // Free space elsewhere goes before what the tenant has itself, and before what is smaller.
                victim => {
                    let extent = near.and_then(|_| self.allocator.allocate(bytes, owner));
                    return match extent {
                        Some(extent) => Ok(extent),
                        None => self.make_hole_of_many(salt, kept, bytes, more, owner, victim),
                    };
                }
            };
        }
    }

    /// Allocates where the next victim is smaller than the object, or the tenant's own. Small victims leave in policy
    /// order only if there is a run to fall back on, and only while little is free: then fragmentation is the obstacle,
    /// and the run is evicted. So nothing is evicted for an object that is refused.
    #[cold]
    fn make_hole_of_many(
        &mut self,
        salt: u32,
        kept: u64,
        bytes: u64,
        more: usize,
        owner: u32,
        mut victim: Option<u32>,
    ) -> Result<Extent, NoRoom> {
        let capacity = self.allocator.capacity();
        let (mut run, mut small_victims) = (None, 0);
        loop {
            let next = victim.or_else(|| self.policy.victim_of(salt));
            if let Some(next) = next.filter(|next| self.is_enough(*next, bytes)) {
                self.evict_slot(next);
            } else {
                if run.is_none() {
                    next.ok_or(NoRoom::Memory)?;
                    let over = self.is_over(salt, kept).then_some(salt);
                    run = Some(self.cheapest_run(salt, bytes, over)?);
                }
                let free = capacity.saturating_sub(self.allocator.used());
                let is_roomy = free >= bytes.saturating_add(capacity / SPARE_PART);
                let is_next = !is_roomy && small_victims < MAX_SMALL_VICTIMS;
                // The run may count on all that may leave of a reserved share.
                let Some(next) = next.filter(|next| is_next && !self.has_share(*next)) else {
                    for member in run.unwrap_or_default() {
                        // Some of them may have been victims already.
                        if self.slab.at(member).state() == SlotState::Resident {
                            self.evict_slot(member);
                        }
                    }
                    let extent = self.allocator.allocate(bytes, owner);
                    return extent.ok_or(NoRoom::Memory);
                };
                small_victims += 1;
                self.evict_slot(next);
            }
            if let Some(extent) = self.allocator.allocate(bytes, owner) {
                return Ok(extent);
            }
            victim = self.next_victim(salt, kept, more);
        }
    }

    /// The next object to leave for a store of this tenant, but for what only it may evict.
    fn next_victim(&mut self, salt: u32, kept: u64, more: usize) -> Option<u32> {
        let is_over = self.is_over(salt, kept);
        self.warm_up(is_over.then_some(salt), more + 1);
        match is_over {
            true => self.policy.victim_of(salt),
            false => self.victim_for(salt),
        }
    }

    /// Whether the eviction of this object alone makes a hole of `bytes` bytes, or brings one nearer where bytes are only
    /// counted.
    fn is_enough(&self, victim: u32, bytes: u64) -> bool {
        self.footprint(victim) >= self.allocator.footprint(bytes) || !self.allocator.is_addressed()
    }

    /// Whether an object's tenant has a reserved share.
    fn has_share(&self, victim: u32) -> bool {
        let salt = self.spaces.salt_of(self.slab.at(victim).space);
        let tenant = self.spaces.tenants.get(salt);
        tenant.is_some_and(|tenant| tenant.unreserved().is_some())
    }

    /// Whether a tenant has more than these bytes, which a strict limit leaves it.
    fn is_over(&self, salt: u32, kept: u64) -> bool {
        kept < u64::MAX && self.spaces.tenants.get(salt).map_or(0, Tenant::bytes) > kept
    }

    /// Counts a refusal.
    pub(super) fn refuse(&mut self, space: u32, why: NoRoom) -> KeyOutcome {
        let salt = self.spaces.salt_of(space);
        let tenant = self.spaces.tenants.get_mut(salt);
        match why {
            NoRoom::Memory => {
                self.totals.refused += 1;
                if let Some(tenant) = tenant {
                    tenant.totals.refused += 1;
                }
                KeyOutcome::NoMemory
            }
            NoRoom::Quota => {
                self.totals.over_quota += 1;
                if let Some(tenant) = tenant {
                    tenant.totals.over_quota += 1;
                }
                KeyOutcome::OverQuota
            }
            NoRoom::Staging => KeyOutcome::OverStaging,
        }
    }

    /// Who leaves next for a store of this tenant, before what others' shares leave it.
    fn victim_for(&mut self, salt: u32) -> Option<u32> {
        match self.over_quota_for(salt) {
            Some(over) => self.policy.victim_of(over),
            None => self.policy.victim(),
        }
    }

    /// The tenant over its quota that loses objects first for a store of this tenant: itself before all.
    pub(super) fn over_quota_for(&self, salt: u32) -> Option<u32> {
        let tenants = &self.spaces.tenants;
        if tenants.over().is_empty() {
            return None;
        }
        let own = tenants.get(salt).is_some_and(|tenant| tenant.is_over());
        let own = own.then_some(salt);
        let others = tenants.over().iter().rev().take(OVER_LOOKED_AT).copied();
        let mut over = own.into_iter().chain(others);
        over.find(|salt| self.policy.victim_of(*salt).is_some())
    }

    /// See [`super::Cache::set_grant`].
    pub(super) fn set_grant(&mut self, salt: &str, grant: Option<Grant>) {
        if let Some((number, protected)) = self.spaces.tenants.set_grant(salt, grant) {
            self.policy.protect(number, protected);
        }
    }

    /// See [`super::Cache::evict_over_quota`].
    pub(super) fn evict_over_quota(&mut self, max_objects: usize) -> Evicted {
        let mut evicted = Evicted::default();
        // Those whose objects are all leased are passed over.
        let mut passed_over = 0;
        while evicted.objects < max_objects && passed_over < max_objects {
            let over = self.spaces.tenants.over();
            let Some(&salt) = over
                .len()
                .checked_sub(1 + passed_over)
                .and_then(|at| over.get(at))
            else {
                break;
            };
            match self.policy.victim_of(salt) {
                Some(victim) => {
                    evicted.bytes += self.evict_slot(victim);
                    evicted.objects += 1;
                }
                None => passed_over += 1,
            }
        }
        evicted
    }

    /// See [`super::Cache::evict`].
    pub(super) fn evict(&mut self, bytes_wanted: u64, max_objects: usize) -> Evicted {
        let mut evicted = Evicted::default();
        self.warm = 0;
        while evicted.bytes < bytes_wanted && evicted.objects < max_objects {
            self.warm_up(None, max_objects - evicted.objects);
            let Some(victim) = self.policy.victim() else {
                break;
            };
            evicted.bytes += self.evict_slot(victim);
            evicted.objects += 1;
        }
        evicted
    }

    /// Before an eviction: touches what it and the ones to come will need, once for a number of them. They stay one by
    /// one; only their waits for memory overlap.
    fn warm_up(&mut self, salt: Option<u32>, likely: usize) {
        if self.warm > 0 {
            self.warm -= 1;
            return;
        }
        self.warm = likely.clamp(1, WARM) - 1;
        if self.warm == 0 {
            return;
        }
        self.upcoming.clear();
        if salt.is_none() {
            // Who loses is chosen there.
            self.policy.victim();
        }
        self.policy
            .upcoming(salt, self.warm + 1, &mut self.upcoming);
        for &number in &self.upcoming {
            let slot = self.slab.at(number);
            let key = self.index.fingerprint(slot.space, &slot.hash);
            black_box(self.index.find(key, |found| found == number));
        }
    }

    /// Evicts one object; returns the bytes that it took.
    fn evict_slot(&mut self, number: u32) -> u64 {
        let bytes = self.footprint(number);
        let slot = self.slab.at(number);
        let Slot { hash, space, .. } = *slot;
        let object_bytes = slot.extent.len;
        self.totals.last_evicted_idle_ticks = self.clock - slot.used_at.min(self.clock);
        let candidate = self.candidate(number, slot);
        if let Some(evicted) = &mut self.evicted
            && let Some(space) = self.spaces.owned(space)
        {
            evicted.push(ResidentObject {
                chunk_hash: hash,
                space,
                bytes: object_bytes,
                leases: 0,
            });
        }
        if let Some(tenant) = self.spaces.tenants.get_mut(candidate.salt) {
            tenant.totals.evicted.add(bytes);
        }
        self.totals.evicted.add(bytes);
        let identity = self.spaces.identity(space, &hash);
        self.take_out(number);
        self.policy.evicted(candidate, identity);
        bytes
    }
}
