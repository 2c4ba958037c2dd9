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
use super::slab::{ObjectSlot, SlotState};
use super::state::{CacheState, MAX_WARM};
use super::tenant::Tenant;
use super::{Evicted, Extent, ExtentAllocator, ResidentObject};
use crate::quota::Grant;
use std::hint::black_box;
use std::sync::Arc;

/// Tenants over quota that one store examines; if all their objects are leased, it goes on to other tenants.
const OVER_QUOTA_EXAMINED: usize = 4;

/// Part of the memory (1/16) that may stay free for objects of different sizes: while less is free, victims that are
/// smaller than the object are evicted in policy order, and smaller objects use the holes between them.
const SPARE_PART: u64 = 16;

/// Most such victims per object, before a run is evicted.
const MAX_SMALL_VICTIMS: usize = 64;

impl<A: ExtentAllocator> CacheState<A> {
    /// Allocates memory for one object of slot `owner`, evicting others for it: in the part `near` if there is one. `more`
    /// is how many more objects the caller is likely to store.
    ///
    /// # Errors
    /// The reason. Nothing was evicted.
    pub(super) fn allocate(
        &mut self,
        namespace: u32,
        bytes: u64,
        near: Option<u32>,
        more: usize,
        owner: u32,
    ) -> Result<Extent, Refusal> {
        let tenant = self.namespaces.tenant_of(namespace);
        let capacity = self.allocator.capacity();
        let taken = self.allocator.footprint(bytes);
        // No eviction frees these: if too little remains beside them, evicting is in vain.
        let fixed = self.counters.staged.bytes + self.counters.doomed.bytes + self.leased.bytes;
        if taken > capacity.saturating_sub(fixed) || bytes > self.allocator.largest() {
            return Err(Refusal::Memory);
        }
        let kept = self.strictly_kept(tenant, taken)?;
        let extent = self.allocate_by_victims(tenant, kept, bytes, near, more, owner)?;
        while self.is_over(tenant, kept)
            && let Some(own) = self.own_victim(tenant)
        {
            if self.is_kept(own) {
                self.allocator.free(extent);
                return Err(Refusal::Quota);
            }
            self.warm_up(Some(tenant), more + 1);
            self.evict_slot(own, LossCause::Quota);
        }
        Ok(extent)
    }

    /// Bytes that a strict limit allows a tenant beside an object that takes `bytes` bytes; `u64::MAX` without one.
    fn strictly_kept(&self, tenant: u32, bytes: u64) -> Result<u64, Refusal> {
        let Some(limit) = self.namespaces.tenants.strict_limit(tenant) else {
            return Ok(u64::MAX);
        };
        let kept = limit.checked_sub(bytes).ok_or(Refusal::Quota)?;
        let Some(storing) = self.namespaces.tenants.get(tenant) else {
            return Ok(kept);
        };
        let fixed = storing.bytes() - storing.evictable();
        let is_over = storing.bytes() > kept;
        if fixed > kept || is_over && self.own_victim(tenant).is_none() {
            return Err(Refusal::Quota);
        }
        Ok(kept)
    }

    /// Allocates, evicting in policy order while the next victim is as large as the object.
    #[inline]
    fn allocate_by_victims(
        &mut self,
        tenant: u32,
        kept: u64,
        bytes: u64,
        near: Option<u32>,
        more: usize,
        owner: u32,
    ) -> Result<Extent, Refusal> {
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
            match self.next_victim(tenant, kept, more)? {
                Some(victim) if self.is_enough(victim, bytes) => {
                    let cause = self.cause(tenant, kept);
                    self.evict_slot(victim, cause)
                }
                // Free space elsewhere is used before the tenant's own objects, and before smaller ones, are evicted.
                victim => {
                    let extent = near.and_then(|_| self.allocator.allocate(bytes, owner));
                    return match extent {
                        Some(extent) => Ok(extent),
                        None => self.allocate_by_run(tenant, kept, bytes, more, owner, victim),
                    };
                }
            };
        }
    }

    /// Allocates where the next victim is smaller than the object, the tenant's own, or pinned. Small victims are evicted in policy
    /// order only if there is a run to fall back on, and only while little is free; after that the obstacle is
    /// fragmentation, and the run is evicted. So nothing is evicted for an object that is refused.
    #[cold]
    fn allocate_by_run(
        &mut self,
        tenant: u32,
        kept: u64,
        bytes: u64,
        more: usize,
        owner: u32,
        mut victim: Option<u32>,
    ) -> Result<Extent, Refusal> {
        let capacity = self.allocator.capacity();
        let (mut run, mut small_victims) = (None, 0);
        loop {
            let cause = self.cause(tenant, kept);
            let next = victim.or_else(|| self.policy.victim_of(tenant));
            if next.is_some_and(|next| self.is_kept(next)) {
                return Err(Refusal::Memory);
            }
            if let Some(next) = next.filter(|next| self.is_enough(*next, bytes)) {
                self.evict_slot(next, cause);
            } else {
                if run.is_none() {
                    let over = self.is_over(tenant, kept).then_some(tenant);
                    let found = next.and_then(|_| self.cheapest_run(tenant, bytes, over));
                    let found = found.or_else(|| self.pinned_run(tenant, bytes));
                    run = Some(found.ok_or(Refusal::Memory)?);
                }
                let free = capacity.saturating_sub(self.allocator.used());
                let is_spare_free = free >= bytes.saturating_add(capacity / SPARE_PART);
                let is_next = !is_spare_free && small_victims < MAX_SMALL_VICTIMS;
                // The run may need all that may be evicted of a reserved share.
                let Some(next) = next.filter(|next| is_next && !self.has_share(*next)) else {
                    for member in run.unwrap_or_default() {
                        // Some of them may have been evicted already.
                        if self.slab.at(member).state() == SlotState::Resident {
                            self.evict_slot(member, cause);
                        }
                    }
                    let extent = self.allocator.allocate(bytes, owner);
                    return extent.ok_or(Refusal::Memory);
                };
                small_victims += 1;
                self.evict_slot(next, cause);
            }
            if let Some(extent) = self.allocator.allocate(bytes, owner) {
                return Ok(extent);
            }
            victim = self.next_victim(tenant, kept, more)?;
        }
    }

    /// The next victim for a store of this tenant, except for objects that only this tenant may evict.
    ///
    /// # Errors
    /// It is of the prompt that is being stored.
    #[inline(always)]
    fn next_victim(&mut self, tenant: u32, kept: u64, more: usize) -> Result<Option<u32>, Refusal> {
        let is_over = self.is_over(tenant, kept);
        self.warm_up(is_over.then_some(tenant), more + 1);
        let victim = if is_over {
            self.own_victim(tenant)
        } else {
            self.victim_for(tenant)
        };
        match victim {
            Some(victim) if self.is_kept(victim) => Err(Refusal::Memory),
            victim => Ok(victim),
        }
    }

    /// Whether an object is of the prompt that is being stored, as far as its chunk says.
    #[inline]
    pub(super) fn is_kept(&self, number: u32) -> bool {
        let prompt = self.kept_prompt.as_ref();
        prompt.is_some_and(|prompt| prompt.contains(&self.slab.at(number).hash))
    }

    /// Whether evicting this object alone frees a range of `bytes` bytes, or helps to where bytes are only counted.
    fn is_enough(&self, victim: u32, bytes: u64) -> bool {
        self.footprint(victim) >= self.allocator.footprint(bytes) || !self.allocator.is_addressed()
    }

    /// Whether an object's tenant has a reserved share.
    fn has_share(&self, victim: u32) -> bool {
        let tenant = self.namespaces.tenant_of(self.slab.at(victim).namespace);
        let tenant = self.namespaces.tenants.get(tenant);
        tenant.is_some_and(|tenant| tenant.unreserved().is_some())
    }

    /// Whether a tenant has more than `kept` bytes, which a strict limit allows it.
    fn is_over(&self, tenant: u32, kept: u64) -> bool {
        kept < u64::MAX && self.namespaces.tenants.get(tenant).map_or(0, Tenant::bytes) > kept
    }

    /// The next victim for a store of this tenant, before its own objects.
    fn victim_for(&mut self, tenant: u32) -> Option<u32> {
        match self.over_quota_for(tenant) {
            Some(over) => self.policy.victim_of(over),
            None => self.policy.victim(),
        }
    }

    /// The tenant over quota to evict from for a store of this tenant: this one first.
    pub(super) fn over_quota_for(&self, tenant: u32) -> Option<u32> {
        let tenants = &self.namespaces.tenants;
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
        over.find(|tenant| self.policy.victim_of(*tenant).is_some())
    }

    /// See [`super::Cache::set_grant`].
    pub(super) fn set_grant(&mut self, tenant: &str, grant: Option<Grant>) {
        if let Some((number, protected)) = self.namespaces.tenants.set_grant(tenant, grant) {
            self.policy.protect(number, protected);
        }
    }

    /// See [`super::Cache::evict_over_quota`].
    pub(super) fn evict_over_quota(&mut self, max_objects: usize) -> Evicted {
        let mut evicted = Evicted::default();
        // Tenants whose objects are all leased are skipped.
        let mut skipped = 0;
        while evicted.objects < max_objects && skipped < max_objects {
            let over = self.namespaces.tenants.over();
            let Some(&tenant) = over
                .len()
                .checked_sub(1 + skipped)
                .and_then(|at| over.get(at))
            else {
                break;
            };
            match self.own_victim(tenant) {
                Some(victim) => {
                    evicted.bytes += self.evict_slot(victim, LossCause::Quota);
                    evicted.objects += 1;
                }
                None => skipped += 1,
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
            evicted.bytes += self.evict_slot(victim, LossCause::Watermark);
            evicted.objects += 1;
        }
        evicted
    }

    /// Touches the memory that this eviction and those after it will need, once for several of them, so that their cache
    /// misses overlap.
    fn warm_up(&mut self, tenant: Option<u32>, likely: usize) {
        if self.warm > 0 {
            self.warm -= 1;
            return;
        }
        self.warm = likely.clamp(1, MAX_WARM) - 1;
        if self.warm == 0 {
            return;
        }
        self.upcoming.clear();
        if tenant.is_none() {
            // This chooses the tenant to evict from.
            self.policy.victim();
        }
        self.policy
            .upcoming(tenant, self.warm + 1, &mut self.upcoming);
        for &number in &self.upcoming {
            let slot = self.slab.at(number);
            let key = self.index.fingerprint(slot.namespace, &slot.hash);
            black_box(self.index.find(key, |found| found == number));
        }
    }

    /// Why a store of this tenant evicts, unless its victim's tenant is over quota.
    fn cause(&self, tenant: u32, kept: u64) -> LossCause {
        if self.is_over(tenant, kept) {
            LossCause::Quota
        } else {
            LossCause::Space
        }
    }

    /// Evicts one object; returns the bytes that it took. Of a tenant over quota, that is the cause.
    fn evict_slot(&mut self, number: u32, mut cause: LossCause) -> u64 {
        let bytes = self.footprint(number);
        let slot = self.slab.at(number);
        let ObjectSlot {
            hash, namespace, ..
        } = *slot;
        let object_bytes = slot.extent.len;
        self.totals.last_evicted_idle_ticks = self.clock - slot.used_at.min(self.clock);
        let candidate = self.candidate(number, slot);
        if let Some(evicted) = &mut self.evicted
            && let Some(namespace) = self.namespaces.get(namespace)
        {
            evicted.push(ResidentObject {
                chunk_hash: hash,
                namespace: Arc::clone(namespace),
                bytes: object_bytes,
                leases: 0,
            });
        }
        if let Some(tenant) = self.namespaces.tenants.get_mut(candidate.tenant) {
            tenant.totals.evicted.add(bytes);
            if tenant.is_over() {
                cause = LossCause::Quota;
            }
        }
        self.totals.evicted.add(bytes);
        let identity = self.namespaces.identity(namespace, &hash);
        self.losses.record(identity, self.clock, cause);
        self.remove_object(number);
        self.policy.evicted(candidate, identity);
        bytes
    }
}
