//! Pins: for a time, which the request that stored or hit them chose, objects are not in the eviction order.
//!
//! Clients choose, so pinned bytes are bounded, of all and of each tenant with a limit ([`CacheConfig::max_pinned_share`]), and
//! pinned objects are victims where no others are found: the cheapest run with them for a store, and for a tenant's limit those of its own
//! whose pins end first.
//!
//! [`CacheConfig::max_pinned_share`]: super::CacheConfig::max_pinned_share

use super::clock::{TICKS_PER_SECOND, ticks};
use super::counters::Tally;
use super::tenant::Tenant;
use crate::eviction::Candidate;
use crate::eviction::pins::Pins;
use std::time::Duration;

/// When pins set now end, in ticks: no earlier than after `time`.
pub(super) fn deadline(now: Duration, time: Duration) -> u32 {
    let seconds = u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
    let time = seconds.saturating_mul(TICKS_PER_SECOND).saturating_add(1);
    ticks(now).saturating_add(time)
}

/// Pinned objects, leased or not.
#[derive(Debug)]
pub(super) struct PinnedObjects {
    max_share: f64,
    pub(super) pins: Pins,
    pub(super) tally: Tally,
    /// Pins that the shares did not allow.
    pub(super) refused: u64,
}

impl PinnedObjects {
    pub(super) fn new(max_share: f64) -> Self {
        Self {
            max_share,
            pins: Pins::default(),
            tally: Tally::default(),
            refused: 0,
        }
    }

    /// Counts a new pin, or its refusal if the shares of `capacity` bytes and of the tenant's limit do not allow it. Returns
    /// whether it was counted.
    pub(super) fn add(&mut self, capacity: u64, tenant: Option<&mut Tenant>, bytes: u64) -> bool {
        let share = |bytes: u64| (bytes as f64 * self.max_share) as u64;
        let within = |limit: u64, pinned: u64| pinned.saturating_add(bytes) <= share(limit);
        let is_within = within(capacity, self.tally.bytes);
        let tenant = tenant.filter(|tenant| {
            let limit = tenant.limit();
            is_within && limit.is_none_or(|limit| within(limit, tenant.pinned))
        });
        let Some(tenant) = tenant else {
            self.refused += 1;
            return false;
        };
        self.tally.add(bytes);
        tenant.pinned += bytes;
        true
    }

    /// Removes a pin. Counts an error if it was never added.
    pub(super) fn remove(
        &mut self,
        candidate: Candidate,
        tenant: Option<&mut Tenant>,
        bytes: u64,
        errors: &mut u64,
    ) {
        self.pins.remove(candidate);
        self.tally.sub(bytes, errors);
        match tenant.and_then(|tenant| Some((tenant.pinned.checked_sub(bytes)?, tenant))) {
            Some((pinned, tenant)) => tenant.pinned = pinned,
            None => *errors += 1,
        }
    }
}
