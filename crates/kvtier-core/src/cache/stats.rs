//! Statistics of the cache.

use super::ExtentAllocator;
use super::clock::TICKS_PER_SECOND;
use super::state::CacheState;
use super::tenant::{Tenant, Tenants};
use crate::quota::Grant;
use std::sync::Arc;

/// Snapshot of all counters, taken at one moment.
///
/// Totals count from the cache's creation. Bytes include the allocator's rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of the allocator in all.
    pub capacity_bytes: u64,
    /// Bytes allocated.
    pub used_bytes: u64,
    /// Resident objects.
    pub objects: u64,
    /// Bytes of resident objects.
    pub bytes: u64,
    /// Objects reserved and not yet committed or aborted.
    pub staged_objects: u64,
    /// Bytes of those.
    pub staged_bytes: u64,
    /// Resident objects with at least one lease.
    pub leased_objects: u64,
    /// Bytes of those.
    pub leased_bytes: u64,
    /// Resident objects with pins, leased or not.
    pub pinned_objects: u64,
    /// Bytes of those.
    pub pinned_bytes: u64,
    /// Objects removed by force while leased; their memory is freed with the last lease.
    pub doomed_objects: u64,
    /// Bytes of those.
    pub doomed_bytes: u64,
    /// Objects that may be evicted now.
    pub evictable_objects: u64,
    /// Namespaces with at least one object.
    pub namespaces: u64,
    /// Tenants with at least one object or a grant.
    pub salts: u64,
    /// Lookups so far.
    pub lookups_total: u64,
    /// Chunks that lookups requested.
    pub requested_chunks_total: u64,
    /// Chunks of the prefixes that lookups found.
    pub hit_chunks_total: u64,
    /// Objects evicted, by `reserve` or by `evict`.
    pub evicted_objects_total: u64,
    /// Bytes of those.
    pub evicted_bytes_total: u64,
    /// Seconds since its last use of the object evicted last.
    pub last_evicted_idle_seconds: u64,
    /// Keys a `reserve` found no memory for.
    pub refused_total: u64,
    /// Keys a `reserve` refused because of the tenant's limit.
    pub over_quota_total: u64,
    /// Objects that were not pinned because a share did not allow it.
    pub pins_refused_total: u64,
    /// Tenants over quota now.
    pub over_quota_salts: u64,
    /// Staged objects that became resident.
    pub committed_total: u64,
    /// Staged objects that were dropped at commit, because another reservation of the key had been first.
    pub duplicates_total: u64,
    /// Staged objects that were aborted.
    pub aborted_total: u64,
    /// Objects removed by `remove` or `clear`.
    pub removed_total: u64,
    /// Accounting errors of counters and leases: bugs in the cache. 0 in a healthy one.
    pub accounting_errors: u64,
    /// Bytes of bookkeeping: slots, index, eviction order, interned names, recent evictions and events, the allocator's excluded.
    pub bookkeeping_bytes: u64,
}

/// Used and total capacity, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes allocated.
    pub used_bytes: u64,
    /// Bytes of pinned objects.
    pub pinned_bytes: u64,
    /// Bytes in all.
    pub capacity_bytes: u64,
}

/// Usage of one tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaltUsage {
    /// The cache salt; empty for none.
    pub salt: Arc<str>,
    /// Resident objects.
    pub objects: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// Bytes reserved and not yet committed.
    pub staged_bytes: u64,
    /// All its bytes as limits count them: also those being written, and removed ones that are still leased.
    pub counted_bytes: u64,
    /// The operator's grant; `None` = the default applies.
    pub grant: Option<Grant>,
    /// Whether it is over quota and being evicted from.
    pub over_quota: bool,
    /// Chunks that its lookups requested. A tenant with neither objects nor a grant is removed with its counts; so for
    /// all counts below.
    pub requested_chunks_total: u64,
    /// Chunks of the prefixes that its lookups found.
    pub hit_chunks_total: u64,
    /// Objects that became resident.
    pub committed_objects_total: u64,
    /// Bytes of those.
    pub committed_bytes_total: u64,
    /// Objects evicted.
    pub evicted_objects_total: u64,
    /// Bytes of those.
    pub evicted_bytes_total: u64,
    /// Keys a `reserve` found no memory for.
    pub refused_total: u64,
    /// Keys a `reserve` refused because of the limit.
    pub over_quota_total: u64,
}

/// Page of a long list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// The entries of this page.
    pub entries: Vec<T>,
    /// What to pass to get the next page; `None` after the last one. Entries inserted or removed between two calls may be
    /// seen or missed.
    pub next: Option<u32>,
}

impl SaltUsage {
    /// Usage of the tenant of this name.
    pub(super) fn find(tenants: &Tenants, salt: &str) -> Option<Self> {
        tenants.get(tenants.find(salt)?).map(Self::of)
    }

    pub(super) fn of(tenant: &Tenant) -> Self {
        let (counters, totals) = (&tenant.counters, &tenant.totals);
        Self {
            salt: Arc::clone(&tenant.name),
            objects: counters.resident.objects,
            bytes: counters.resident.bytes,
            staged_bytes: counters.staged.bytes,
            counted_bytes: tenant.bytes(),
            grant: tenant.grant,
            over_quota: tenant.is_over(),
            requested_chunks_total: totals.requested_chunks,
            hit_chunks_total: totals.hit_chunks,
            committed_objects_total: totals.committed.objects,
            committed_bytes_total: totals.committed.bytes,
            evicted_objects_total: totals.evicted.objects,
            evicted_bytes_total: totals.evicted.bytes,
            refused_total: totals.refused,
            over_quota_total: totals.over_quota,
        }
    }
}

impl Stats {
    pub(super) fn of(state: &CacheState<impl ExtentAllocator>) -> Self {
        let (counters, totals) = (&state.counters, &state.totals);
        let bookkeeping = state.slab.bookkeeping_bytes()
            + state.index.bookkeeping_bytes()
            + state.policy.bookkeeping_bytes()
            + state.pinned.pins.bookkeeping_bytes()
            + state.namespaces.bookkeeping_bytes()
            + state.losses.bookkeeping_bytes()
            + state
                .events
                .as_ref()
                .map_or(0, |log| log.bookkeeping_bytes());
        Self {
            capacity_bytes: state.allocator.capacity(),
            used_bytes: state.allocator.used(),
            objects: counters.resident.objects,
            bytes: counters.resident.bytes,
            staged_objects: counters.staged.objects,
            staged_bytes: counters.staged.bytes,
            leased_objects: state.leased.objects,
            leased_bytes: state.leased.bytes,
            pinned_objects: state.pinned.tally.objects,
            pinned_bytes: state.pinned.tally.bytes,
            doomed_objects: counters.doomed.objects,
            doomed_bytes: counters.doomed.bytes,
            evictable_objects: state.policy.len() as u64,
            namespaces: state.namespaces.len() as u64,
            salts: state.namespaces.tenants.len() as u64,
            lookups_total: totals.lookups,
            requested_chunks_total: totals.requested_chunks,
            hit_chunks_total: totals.hit_chunks,
            evicted_objects_total: totals.evicted.objects,
            evicted_bytes_total: totals.evicted.bytes,
            last_evicted_idle_seconds: u64::from(totals.last_evicted_idle_ticks / TICKS_PER_SECOND),
            refused_total: totals.refused,
            over_quota_total: totals.over_quota,
            pins_refused_total: state.pinned.refused,
            over_quota_salts: state.namespaces.tenants.over().len() as u64,
            committed_total: totals.committed,
            duplicates_total: totals.duplicates,
            aborted_total: totals.aborted,
            removed_total: totals.removed,
            accounting_errors: state.accounting_errors,
            bookkeeping_bytes: bookkeeping as u64,
        }
    }
}
