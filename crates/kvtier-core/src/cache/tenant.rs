//! Tenants: the bytes, grants and quota state of each.

use super::counters::{Counters, Tally};
use super::interner::{Interner, name_bytes};
use crate::quota::{Grant, Marks, QuotaConfig, QuotaMode};
use crate::violation::Violation;
use foldhash::quality::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

/// `over_at` of a tenant that is not over quota.
const NOT_OVER: u32 = u32::MAX;

/// Counts of one tenant since it was inserted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TenantTotals {
    pub(super) requested_chunks: u64,
    pub(super) hit_chunks: u64,
    pub(super) committed: Tally,
    pub(super) evicted: Tally,
    pub(super) refused: u64,
    pub(super) over_quota: u64,
}

/// A tenant with objects or a grant.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) name: Arc<str>,
    namespaces: u32,
    pub(super) counters: Counters,
    /// Bytes of the largest object since it last had none.
    largest: u64,
    pub(super) totals: TenantTotals,
    pub(super) grant: Option<Grant>,
    limit: Option<u64>,
    marks: Marks,
    /// Index in the list of tenants over quota.
    over_at: u32,
    /// Bytes of resident objects with leases.
    pub(super) leased: u64,
    /// Bytes of resident objects with pins, leased or not.
    pub(super) pinned: u64,
    /// Whether others may not evict more of it, as passed to the policy.
    protected: bool,
}

impl Tenant {
    /// All its bytes, also those being written, and removed ones that are still leased.
    pub(super) fn bytes(&self) -> u64 {
        let Counters {
            staged,
            resident,
            doomed,
        } = &self.counters;
        staged.bytes + resident.bytes + doomed.bytes
    }

    pub(super) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Bytes that may be evicted: those of resident objects without leases, pinned ones too.
    pub(super) fn evictable(&self) -> u64 {
        self.counters.resident.bytes.saturating_sub(self.leased)
    }

    /// Whether its limit allows it `bytes` more staged bytes. It may always have one staged object.
    pub(super) fn may_stage(&self, bytes: u64) -> bool {
        let staged = self.counters.staged.bytes;
        self.limit
            .is_none_or(|limit| staged == 0 || staged.saturating_add(bytes) <= limit)
    }

    /// Bytes of its resident objects beyond its reserved share; `None` without one.
    pub(super) fn unreserved(&self) -> Option<u64> {
        let reserved = self.grant.map_or(0, |grant| grant.reserved);
        (reserved > 0).then(|| self.counters.resident.bytes.saturating_sub(reserved))
    }

    /// Whether others may evict any of its objects.
    fn spares(&self) -> bool {
        let reserved = self.grant.map_or(0, |grant| grant.reserved);
        reserved == 0 || self.counters.resident.bytes >= reserved.saturating_add(self.largest)
    }

    /// Updates whether it is protected from others; returns the new value if it changed.
    fn protect(&mut self) -> Option<bool> {
        let protected = !self.spares();
        (std::mem::replace(&mut self.protected, protected) != protected).then_some(protected)
    }

    /// Whether `bytes` bytes take it over quota or back below.
    fn crosses_mark(&self, bytes: u64) -> bool {
        if self.is_over() {
            bytes <= self.marks.low
        } else {
            bytes > self.marks.high
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.over_at != NOT_OVER
    }
}

/// All tenants. One without a grant is removed with its last namespace.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    seed: RandomState,
    known: Interner<Tenant>,
    config: QuotaConfig,
    /// Tenants over quota, in no order.
    over: Vec<u32>,
    name_bytes: usize,
}

impl Tenants {
    pub(super) fn new(config: QuotaConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    pub(super) fn find(&self, name: &str) -> Option<u32> {
        self.known
            .find(self.seed.hash_one(name), |tenant| &*tenant.name == name)
    }

    pub(super) fn get(&self, number: u32) -> Option<&Tenant> {
        self.known.get(number)
    }

    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut Tenant> {
        self.known.get_mut(number)
    }

    fn find_or_insert(&mut self, name: &str) -> u32 {
        if let Some(number) = self.find(name) {
            return number;
        }
        let limit = self.config.default_limit;
        let tenant = Tenant {
            name: Arc::from(name),
            namespaces: 0,
            counters: Counters::default(),
            largest: 0,
            totals: TenantTotals::default(),
            grant: None,
            limit,
            marks: self.config.marks(Grant { limit, reserved: 0 }),
            over_at: NOT_OVER,
            leased: 0,
            pinned: 0,
            protected: false,
        };
        self.name_bytes += name_bytes(name);
        let seed = &self.seed;
        let rehash = |tenant: &Tenant| seed.hash_one(&*tenant.name);
        self.known.insert(seed.hash_one(name), tenant, rehash)
    }

    /// Adds a namespace to a tenant, inserted if it is unknown. Returns its number and its name.
    pub(super) fn open(&mut self, name: &Arc<str>) -> (u32, Arc<str>) {
        let number = self.find_or_insert(name);
        let mut name = Arc::clone(name);
        if let Some(tenant) = self.get_mut(number) {
            tenant.namespaces += 1;
            name = Arc::clone(&tenant.name);
        }
        (number, name)
    }

    /// Removes a namespace of a tenant.
    pub(super) fn close(&mut self, number: u32, errors: &mut u64) {
        let Some(tenant) = self.get_mut(number) else {
            *errors += 1;
            return;
        };
        tenant.namespaces -= 1;
        if tenant.namespaces == 0 && tenant.counters != Counters::default() {
            *errors += 1;
        }
        self.remove_if_idle(number);
    }

    fn remove_if_idle(&mut self, number: u32) {
        let idle = |tenant: &&Tenant| tenant.namespaces == 0 && tenant.grant.is_none();
        let Some(tenant) = self.get(number).filter(idle) else {
            return;
        };
        let hash = self.seed.hash_one(&*tenant.name);
        self.name_bytes -= name_bytes(&tenant.name);
        self.remove_over(number);
        self.known.remove(hash, number);
    }

    /// Sets or removes a grant. Returns the tenant and whether it is protected, if that changed. Removing the grant of an
    /// unknown tenant changes nothing.
    pub(super) fn set_grant(&mut self, name: &str, grant: Option<Grant>) -> Option<(u32, bool)> {
        let number = match grant {
            Some(_) => self.find_or_insert(name),
            None => self.find(name)?,
        };
        let tenant = self.known.get_mut(number)?;
        tenant.grant = grant;
        let protected = tenant.protect();
        self.apply_limit(number);
        self.remove_if_idle(number);
        Some((number, protected?))
    }

    /// Changes how limits are enforced; limits of tenants without a grant follow.
    pub(super) fn configure(&mut self, change: impl FnOnce(&mut QuotaConfig)) {
        change(&mut self.config);
        for number in 0..self.known.entries.len() as u32 {
            self.apply_limit(number);
        }
    }

    /// Sets a tenant's limit and marks by its grant, or by the default.
    fn apply_limit(&mut self, number: u32) {
        let Some(tenant) = self.known.get_mut(number) else {
            return;
        };
        let holds = tenant.grant.unwrap_or(Grant {
            limit: self.config.default_limit,
            reserved: 0,
        });
        tenant.limit = holds.limit;
        tenant.marks = self.config.marks(holds);
        self.update_over(number);
    }

    pub(super) fn config(&self) -> QuotaConfig {
        self.config
    }

    /// Applies `change` to the counters of a tenant for an object of `bytes` bytes. Returns whether the tenant is
    /// protected, if that changed.
    ///
    /// # Errors
    /// The tenant is unknown.
    pub(super) fn count(
        &mut self,
        number: u32,
        bytes: u64,
        change: impl FnOnce(&mut Counters),
    ) -> Result<Option<bool>, ()> {
        let tenant = self.known.get_mut(number).ok_or(())?;
        change(&mut tenant.counters);
        let all = tenant.bytes();
        tenant.largest = match all {
            0 => 0,
            _ => tenant.largest.max(bytes),
        };
        let protected = tenant.protect();
        if tenant.crosses_mark(all) {
            self.update_over(number);
        }
        Ok(protected)
    }

    /// Updates the list of tenants over quota after a tenant's bytes or limits changed.
    fn update_over(&mut self, number: u32) {
        let Some(tenant) = self.known.get_mut(number) else {
            return;
        };
        if tenant.crosses_mark(tenant.bytes()) {
            if tenant.is_over() {
                self.remove_over(number);
            } else {
                tenant.over_at = self.over.len() as u32;
                self.over.push(number);
            }
        }
    }

    fn remove_over(&mut self, number: u32) {
        let Some(tenant) = self.known.get_mut(number).filter(|t| t.is_over()) else {
            return;
        };
        let at = std::mem::replace(&mut tenant.over_at, NOT_OVER);
        self.over.swap_remove(at as usize);
        if let Some(&moved) = self.over.get(at as usize)
            && let Some(moved) = self.known.get_mut(moved)
        {
            moved.over_at = at;
        }
    }

    /// The tenants over quota, in no order.
    pub(super) fn over(&self) -> &[u32] {
        &self.over
    }

    /// The limit that a tenant's stores must not exceed.
    pub(super) fn strict_limit(&self, number: u32) -> Option<u64> {
        match self.config.mode {
            QuotaMode::Soft => None,
            QuotaMode::Strict => self.get(number)?.limit,
        }
    }

    /// The tenants with their numbers, from one number on.
    pub(super) fn from(&self, from: u32) -> impl Iterator<Item = (u32, &Tenant)> {
        let entries = self.known.entries.iter().zip(0..).skip(from as usize);
        entries.filter_map(|(tenant, number)| Some((number, tenant.as_ref()?)))
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// Checks the list of tenants over quota.
    pub(super) fn check(&self) -> Result<(), Violation> {
        for (at, &number) in self.over.iter().enumerate() {
            let place = self.get(number).map(|tenant| tenant.over_at as usize);
            if place != Some(at) {
                return Err(Violation(format!(
                    "tenant {number} is at {at} of the list but has {place:?}"
                )));
            }
        }
        for (number, tenant) in self.from(0) {
            let bytes = tenant.bytes();
            let is_listed = self.over.get(tenant.over_at as usize) == Some(&number);
            let wrong = tenant.crosses_mark(bytes) || tenant.is_over() != is_listed;
            let wrong = wrong || tenant.protected == tenant.spares();
            if wrong || (tenant.namespaces == 0 && tenant.grant.is_none()) {
                return Err(Violation(format!(
                    "tenant {number} has {bytes} bytes: {tenant:?}"
                )));
            }
        }
        Ok(())
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        self.known.bookkeeping_bytes() + self.over.capacity() * size_of::<u32>() + self.name_bytes
    }
}
