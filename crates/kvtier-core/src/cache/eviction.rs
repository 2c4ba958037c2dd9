//! Eviction: frees memory for stores and for background passes.
//!
//! Victims of a store, in this order:
//!
//! 1. objects of tenants over quota, the storing tenant first
//! 2. objects that the policy names, as far as the shares of other tenants allow it
//! 3. objects of the storing tenant
//!
//! Pinned objects are victims only where no others are found: see `pins.rs`. A tenant over quota all of whose objects are pinned is
//! passed over by stores, and loses them in the background.

use super::losses::LossCause;
use super::refusal::Refusal;
use super::run::{cheapest_run, pinned_run};
use super::slab::SlotState;
use super::state::CacheState;
use super::tenant::Tenant;
use super::{Evicted, Extent, ExtentAllocator};

/// Tenants over quota that one store examines; if all their objects are leased, it goes on to other tenants.
const OVER_QUOTA_EXAMINED: usize = 4;

/// Part of the memory (1/16) that may stay free for objects of different sizes: while less is free, victims that are
/// smaller than the object are evicted in policy order, and smaller objects use the holes between them.
const SPARE_PART: u64 = 16;

/// Most such victims per object, before a run is evicted.
const MAX_SMALL_VICTIMS: usize = 64;

/// Memory that an object needs, which a tenant stores.
#[derive(Clone, Copy)]
pub(super) struct MemoryDemand {
    pub(super) tenant: u32,
    /// Bytes that a strict limit allows the tenant beside the object; `u64::MAX` if it is unknown or there is none.
    pub(super) kept: u64,
    pub(super) bytes: u64,
    /// The part of the memory to use, if possible.
    pub(super) near: Option<u32>,
    /// How many more objects the caller is likely to store.
    pub(super) more: usize,
    /// Slot of the object.
    pub(super) owner: u32,
}

impl MemoryDemand {
    /// Allocates the memory, evicting other objects for it.
    ///
    /// # Errors
    /// The reason. Nothing was evicted.
    pub(super) fn allocate(
        mut self,
        state: &mut CacheState<impl ExtentAllocator>,
    ) -> Result<Extent, Refusal> {
        let capacity = state.allocator.capacity();
        let taken = state.allocator.footprint(self.bytes);
        // No eviction frees these: if too little remains beside them, evicting is in vain.
        let fixed = state.counters.staged.bytes + state.counters.doomed.bytes + state.leased.bytes;
        if taken > capacity.saturating_sub(fixed) || self.bytes > state.allocator.largest() {
            return Err(Refusal::Memory);
        }
        self.kept = strictly_kept(state, self.tenant, taken)?;
        let extent = self.by_victims(state)?;
        while self.is_over(state)
            && let Some(own) = state.own_victim(self.tenant)
        {
            if state.is_kept(own) {
                state.allocator.free(extent);
                return Err(Refusal::Quota);
            }
            warm_up(state, Some(self.tenant), self.more + 1);
            state.evict_slot(own, LossCause::Quota);
        }
        Ok(extent)
    }

    /// Allocates, evicting in policy order while the next victim is as large as the object.
    #[inline]
    fn by_victims(self, state: &mut CacheState<impl ExtentAllocator>) -> Result<Extent, Refusal> {
        let capacity = state.allocator.capacity();
        loop {
            if self.bytes <= capacity.saturating_sub(state.allocator.used())
                && let Some(extent) = match self.near {
                    Some(part) => state.allocator.allocate_near(self.bytes, part, self.owner),
                    None => state.allocator.allocate(self.bytes, self.owner),
                }
            {
                return Ok(extent);
            }
            match self.next_victim(state)? {
                Some(victim) if self.is_enough(state, victim) => {
                    let cause = self.cause(state);
                    state.evict_slot(victim, cause)
                }
                // Free space elsewhere is used before the tenant's own objects, and before smaller ones, are evicted.
                victim => {
                    let extent = self
                        .near
                        .and_then(|_| state.allocator.allocate(self.bytes, self.owner));
                    return match extent {
                        Some(extent) => Ok(extent),
                        None => self.by_run(state, victim),
                    };
                }
            };
        }
    }

    /// Allocates where the next victim is smaller than the object, the tenant's own, or pinned. Small victims are evicted in policy
    /// order only if there is a run to fall back on, and only while little is free; after that the obstacle is
    /// fragmentation, and the run is evicted. So nothing is evicted for an object that is refused.
    #[cold]
    fn by_run(
        self,
        state: &mut CacheState<impl ExtentAllocator>,
        mut victim: Option<u32>,
    ) -> Result<Extent, Refusal> {
        let capacity = state.allocator.capacity();
        let (mut run, mut small_victims) = (None, 0);
        loop {
            let cause = self.cause(state);
            let next = victim.or_else(|| state.policy.victim_of(self.tenant));
            if next.is_some_and(|next| state.is_kept(next)) {
                return Err(Refusal::Memory);
            }
            if let Some(next) = next.filter(|next| self.is_enough(state, *next)) {
                state.evict_slot(next, cause);
            } else {
                if run.is_none() {
                    let over = self.is_over(state).then_some(self.tenant);
                    let over = over.or_else(|| over_quota_for(state, self.tenant));
                    let found =
                        next.and_then(|_| cheapest_run(state, self.tenant, self.bytes, over));
                    let found = found.or_else(|| pinned_run(state, self.tenant, self.bytes));
                    run = Some(found.ok_or(Refusal::Memory)?);
                }
                let free = capacity.saturating_sub(state.allocator.used());
                let is_spare_free = free >= self.bytes.saturating_add(capacity / SPARE_PART);
                let is_next = !is_spare_free && small_victims < MAX_SMALL_VICTIMS;
                // The run may need all that may be evicted of a reserved share.
                let Some(next) = next.filter(|next| is_next && !has_share(state, *next)) else {
                    for member in run.unwrap_or_default() {
                        // Some of them may have been evicted already.
                        if state.slab.at(member).state() == SlotState::Resident {
                            state.evict_slot(member, cause);
                        }
                    }
                    let extent = state.allocator.allocate(self.bytes, self.owner);
                    return extent.ok_or(Refusal::Memory);
                };
                small_victims += 1;
                state.evict_slot(next, cause);
            }
            if let Some(extent) = state.allocator.allocate(self.bytes, self.owner) {
                return Ok(extent);
            }
            victim = self.next_victim(state)?;
        }
    }

    /// The next victim for a store of this tenant, except for objects that only this tenant may evict.
    ///
    /// # Errors
    /// It is of the prompt that is being stored.
    #[inline(always)]
    fn next_victim(
        self,
        state: &mut CacheState<impl ExtentAllocator>,
    ) -> Result<Option<u32>, Refusal> {
        let is_over = self.is_over(state);
        warm_up(state, is_over.then_some(self.tenant), self.more + 1);
        let victim = if is_over {
            state.own_victim(self.tenant)
        } else {
            victim_for(state, self.tenant)
        };
        match victim {
            Some(victim) if state.is_kept(victim) => Err(Refusal::Memory),
            victim => Ok(victim),
        }
    }

    /// Whether evicting this object alone frees a range that is large enough, or helps to where bytes are only counted.
    fn is_enough(self, state: &CacheState<impl ExtentAllocator>, victim: u32) -> bool {
        state.footprint(victim) >= state.allocator.footprint(self.bytes)
            || !state.allocator.is_addressed()
    }

    /// Whether the tenant has more bytes than a strict limit allows it.
    fn is_over(self, state: &CacheState<impl ExtentAllocator>) -> bool {
        let tenant = || state.namespaces.tenants.get(self.tenant);
        self.kept < u64::MAX && tenant().map_or(0, Tenant::bytes) > self.kept
    }

    /// Why the store evicts, unless its victim's tenant is over quota.
    fn cause(self, state: &CacheState<impl ExtentAllocator>) -> LossCause {
        if self.is_over(state) {
            LossCause::Quota
        } else {
            LossCause::Space
        }
    }
}

/// Bytes that a strict limit allows a tenant beside an object that takes `bytes` bytes; `u64::MAX` without one.
fn strictly_kept(
    state: &CacheState<impl ExtentAllocator>,
    tenant: u32,
    bytes: u64,
) -> Result<u64, Refusal> {
    let Some(limit) = state.namespaces.tenants.strict_limit(tenant) else {
        return Ok(u64::MAX);
    };
    let kept = limit.checked_sub(bytes).ok_or(Refusal::Quota)?;
    let Some(storing) = state.namespaces.tenants.get(tenant) else {
        return Ok(kept);
    };
    let fixed = storing.bytes() - storing.evictable();
    let is_over = storing.bytes() > kept;
    if fixed > kept || is_over && state.own_victim(tenant).is_none() {
        return Err(Refusal::Quota);
    }
    Ok(kept)
}

/// Whether an object's tenant has a reserved share.
fn has_share(state: &CacheState<impl ExtentAllocator>, victim: u32) -> bool {
    let tenant = state.namespaces.tenant_of(state.slab.at(victim).namespace);
    let tenant = state.namespaces.tenants.get(tenant);
    tenant.is_some_and(|tenant| tenant.unreserved().is_some())
}

/// The next victim for a store of this tenant, before its own objects.
fn victim_for(state: &mut CacheState<impl ExtentAllocator>, tenant: u32) -> Option<u32> {
    match over_quota_for(state, tenant) {
        Some(over) => state.policy.victim_of(over),
        None => state.policy.victim(),
    }
}

/// The tenant over quota to evict from for a store of this tenant: this one first.
fn over_quota_for(state: &CacheState<impl ExtentAllocator>, tenant: u32) -> Option<u32> {
    let tenants = &state.namespaces.tenants;
    if tenants.over().is_empty() {
        return None;
    }
    let own = tenants.get(tenant).is_some_and(|tenant| tenant.is_over());
    let own = own.then_some(tenant);
    let others = tenants
        .over()
        .iter()
        .rev()
        .take(OVER_QUOTA_EXAMINED)
        .copied();
    let mut over = own.into_iter().chain(others);
    over.find(|tenant| state.policy.victim_of(*tenant).is_some())
}

/// See [`super::Cache::evict_over_quota`].
pub(super) fn evict_over_quota(
    state: &mut CacheState<impl ExtentAllocator>,
    max_objects: usize,
) -> Evicted {
    let mut evicted = Evicted::default();
    // Tenants whose objects are all leased are skipped.
    let mut skipped = 0;
    while evicted.objects < max_objects && skipped < max_objects {
        let over = state.namespaces.tenants.over();
        let Some(&tenant) = over
            .len()
            .checked_sub(1 + skipped)
            .and_then(|at| over.get(at))
        else {
            break;
        };
        match state.own_victim(tenant) {
            Some(victim) => {
                evicted.bytes += state.evict_slot(victim, LossCause::Quota);
                evicted.objects += 1;
            }
            None => skipped += 1,
        }
    }
    evicted
}

/// See [`super::Cache::evict`].
pub(super) fn evict(
    state: &mut CacheState<impl ExtentAllocator>,
    bytes_wanted: u64,
    max_objects: usize,
) -> Evicted {
    let mut evicted = Evicted::default();
    state.warm.left = 0;
    while evicted.bytes < bytes_wanted && evicted.objects < max_objects {
        warm_up(state, None, max_objects - evicted.objects);
        let Some(victim) = state.policy.victim() else {
            break;
        };
        evicted.bytes += state.evict_slot(victim, LossCause::Watermark);
        evicted.objects += 1;
    }
    evicted
}

/// Fetches the victims of this eviction and those after it, unless they were.
fn warm_up(state: &mut CacheState<impl ExtentAllocator>, tenant: Option<u32>, likely: usize) {
    if state.warm.left > 0 {
        state.warm.left -= 1;
        return;
    }
    let policy = &mut *state.policy;
    let (warm, slab, index) = (&mut state.warm, &state.slab, &state.index);
    warm.fetch(policy, slab, index, tenant, likely);
}
