//! The metadata of the next victims, fetched from memory ahead of their evictions.

use super::index::Index;
use super::slab::Slab;
use crate::eviction::EvictionPolicy;
use std::hint::black_box;

/// Most victims fetched at once.
const MAX_WARM: usize = 32;

/// The next victims.
#[derive(Debug, Default)]
pub(super) struct WarmVictims {
    /// How many of them were fetched already; 0 makes the next eviction fetch again.
    pub(super) left: usize,
    upcoming: Vec<u32>,
}

impl WarmVictims {
    /// Touches the memory that the next evictions will need, `likely` of them, so that their cache misses overlap.
    pub(super) fn fetch(
        &mut self,
        policy: &mut dyn EvictionPolicy,
        slab: &Slab,
        index: &Index,
        tenant: Option<u32>,
        likely: usize,
    ) {
        self.left = likely.clamp(1, MAX_WARM) - 1;
        if self.left == 0 {
            return;
        }
        self.upcoming.clear();
        if tenant.is_none() {
            // This chooses the tenant to evict from.
            policy.victim();
        }
        policy.upcoming(tenant, self.left + 1, &mut self.upcoming);
        for &number in &self.upcoming {
            let slot = slab.at(number);
            let key = index.fingerprint(slot.namespace, &slot.hash);
            black_box(index.find(key, |found| found == number));
        }
    }
}
