//! Pins: for a time, which the request that stored or hit them chose, objects are not in the eviction order.
//!
//! Clients choose, so pinned bytes are bounded, of all and of each tenant with a limit ([`CacheConfig::max_pinned_share`]), and
//! pinned objects are victims where no others are found: the cheapest run with them for a store, and for a tenant's limit those of its own
//! whose pins end first.
//!
//! [`CacheConfig::max_pinned_share`]: super::CacheConfig::max_pinned_share

use super::ExtentAllocator;
use super::slab::SlotState;
use super::state::{CacheState, TICKS_PER_SECOND, ticks};
use std::time::Duration;

/// Pinned objects of a tenant over its limit that are examined for one that is not leased.
const OWN_EXAMINED: usize = 4096;

/// When pins set now end, in ticks: no earlier than after `time`.
pub(super) fn deadline(now: Duration, time: Duration) -> u32 {
    let seconds = u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
    let time = seconds.saturating_mul(TICKS_PER_SECOND).saturating_add(1);
    ticks(now).saturating_add(time)
}

impl<A: ExtentAllocator> CacheState<A> {
    /// Pins a resident object until a deadline, or extends its pin. Counts a refusal if the shares do not allow it.
    pub(super) fn pin(&mut self, number: u32, deadline: u32) {
        let slot = self.slab.at(number);
        if slot.state() != SlotState::Resident || !self.policy.evicts() {
            return;
        }
        let candidate = self.candidate(number, slot);
        match self.pins.deadline(number) {
            Some(known) if known >= deadline => return,
            Some(_) => self.pins.remove(candidate),
            None => {
                let bytes = self.footprint(number);
                if !self.may_pin(candidate.tenant, bytes) {
                    self.totals.pins_refused += 1;
                    return;
                }
                self.pinned.add(bytes);
                if let Some(tenant) = self.namespaces.tenants.get_mut(candidate.tenant) {
                    tenant.pinned += bytes;
                }
                self.slab.at_mut(number).pin();
                self.policy.remove(candidate);
            }
        }
        self.pins.insert(candidate, deadline);
    }

    /// Whether the shares allow this tenant to pin `bytes` more.
    fn may_pin(&self, tenant: u32, bytes: u64) -> bool {
        let share = |bytes: u64| (bytes as f64 * self.max_pinned_share) as u64;
        let Some(tenant) = self.namespaces.tenants.get(tenant) else {
            return false;
        };
        let within = |limit: u64, pinned: u64| pinned.saturating_add(bytes) <= share(limit);
        within(self.allocator.capacity(), self.pinned.bytes)
            && tenant
                .limit()
                .is_none_or(|limit| within(limit, tenant.pinned))
    }

    /// Removes an object's pin without inserting it into the eviction order.
    #[cold]
    pub(super) fn take_pin(&mut self, number: u32) {
        let bytes = self.footprint(number);
        let candidate = self.candidate(number, self.slab.at(number));
        self.pins.remove(candidate);
        self.slab.at_mut(number).unpin();
        self.pinned.sub(bytes, &mut self.accounting_errors);
        let tenant = self.namespaces.tenants.get_mut(candidate.tenant);
        match tenant.and_then(|tenant| Some((tenant.pinned.checked_sub(bytes)?, tenant))) {
            Some((pinned, tenant)) => tenant.pinned = pinned,
            None => self.accounting_errors += 1,
        }
    }

    /// Ends an object's pin: unless it is leased, it joins the eviction order as if it was used now.
    fn end_pin(&mut self, number: u32) {
        self.take_pin(number);
        let slot = self.slab.at_mut(number);
        if slot.leases == 0 {
            let was_used = slot.take_use();
            let candidate = self.candidate(number, self.slab.at(number));
            self.policy.insert(candidate, was_used);
        }
    }

    /// See [`super::Cache::end_pins`].
    pub(super) fn end_pins(&mut self, tick: u32, limit: usize) -> usize {
        for ended in 0..limit {
            match self.pins.first_until(tick) {
                Some(number) => self.end_pin(number),
                None => return ended,
            }
        }
        limit
    }

    /// The next victim of a tenant whose limit demands one: pinned if there is no other.
    // A store of a tenant within its limit does not pay for it.
    #[inline(never)]
    pub(super) fn own_victim(&self, tenant: u32) -> Option<u32> {
        let victim = self.policy.victim_of(tenant);
        victim.or_else(|| self.own_pinned(tenant))
    }

    #[cold]
    fn own_pinned(&self, tenant: u32) -> Option<u32> {
        let pinned = self.policy.isolates().then(|| self.pins.of(tenant))?;
        let mut examined = pinned.take(OWN_EXAMINED);
        examined.find(|number| self.slab.at(*number).leases == 0)
    }
}
