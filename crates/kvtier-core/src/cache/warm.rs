//! The metadata of the next victims, fetched from memory ahead of their evictions.

use super::index::Index;
use super::slab::Slab;
use crate::eviction::EvictionPolicy;
use std::hint::black_box;

/// Most victims fetched at once.
const MAX_WARM: usize = 32;

/// The next victims.
#[derive(Debug)]
pub(super) struct WarmVictims {
    /// How many of them were fetched already.
    left: usize,
    upcoming: Vec<u32>,
}

impl WarmVictims {
    pub(super) fn new() -> Self {
        Self {
            left: 0,
            upcoming: Vec::with_capacity(MAX_WARM),
        }
    }

    /// Forgets what was fetched: other victims follow.
    pub(super) fn clear(&mut self) {
        self.left = 0;
    }

    /// Takes the next one, if it was fetched.
    #[inline]
    pub(super) fn take(&mut self) -> bool {
        let is_warm = self.left > 0;
        self.left -= usize::from(is_warm);
        is_warm
    }

    /// Touches the memory that this eviction and those after it will need, once for several of them, so that their cache
    /// misses overlap.
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
