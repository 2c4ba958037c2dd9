//! Quotas of L1.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::tenants::QuotaTier;
use kvtier_core::cache::{Cache, Page, SaltUsage, Stats};
use kvtier_core::quota::Grant;
use kvtier_observe::metrics::TenantSource;

use crate::l1::{Clock, L1Allocator};

/// Objects evicted under one hold of the cache's lock.
const SLICE: usize = 1024;

/// The tenants of L1.
pub struct L1Tenants {
    /// Cache with the tenants' objects.
    pub cache: Cache<L1Allocator>,
    /// Clock for evictions.
    pub clock: Arc<Clock>,
}

impl TenantSource for L1Tenants {
    fn name(&self) -> &str {
        "l1"
    }

    fn tenants(&self, from: u32, limit: usize) -> Page<SaltUsage> {
        self.cache.salts(from, limit)
    }

    fn stats_with(&self, salts: &[Arc<str>]) -> (Stats, Vec<Option<SaltUsage>>) {
        self.cache.stats_with(salts)
    }
}

impl QuotaTier for L1Tenants {
    fn set_grant(&self, salt: &str, grant: Option<Grant>) {
        self.cache.set_grant(salt, grant);
    }

    fn set_default_limit(&self, limit: Option<u64>) {
        self.cache
            .configure_quotas(|quotas| quotas.default_limit = limit);
    }

    fn enforce(&self) -> usize {
        let mut total = 0;
        loop {
            match self.cache.evict_over_quota(self.clock.now(), SLICE).objects {
                0 => return total,
                evicted => total += evicted,
            }
        }
    }

    fn usages(&self, salts: &[&str]) -> Vec<(Option<SaltUsage>, u64)> {
        let usages = self.cache.stats_with(salts).1.into_iter();
        let with_bytes = |usage: Option<SaltUsage>| {
            let bytes = usage.as_ref().map_or(0, |usage| usage.counted_bytes);
            (usage, bytes)
        };
        usages.map(with_bytes).collect()
    }

    fn deleting(&self) -> BTreeMap<Arc<str>, u64> {
        // What is evicted is free at once.
        BTreeMap::new()
    }
}
