//! The text of `/metrics`.

use std::sync::Arc;

use kvtier_core::cache::{Cache, Page, SaltUsage, Stats};
use kvtier_l2::tier::Tier;

use super::Engine;
use super::memory::L1Allocator;
use crate::metrics::TenantSource;

impl TenantSource for Cache<L1Allocator> {
    fn name(&self) -> &str {
        "l1"
    }

    fn tenants(&self, from: u32, limit: usize) -> Page<SaltUsage> {
        self.salts(from, limit)
    }

    fn stats_with(&self, salts: &[Arc<str>]) -> (Stats, Vec<Option<SaltUsage>>) {
        Cache::stats_with(self, salts)
    }
}

impl TenantSource for Tier {
    fn name(&self) -> &str {
        Tier::name(self)
    }

    fn tenants(&self, from: u32, limit: usize) -> Page<SaltUsage> {
        Tier::tenants(self, from, limit)
    }

    fn stats_with(&self, salts: &[Arc<str>]) -> (Stats, Vec<Option<SaltUsage>>) {
        Tier::stats_with(self, salts)
    }
}

impl Engine {
    /// All metrics in Prometheus' text format.
    pub fn scrape(&self) -> String {
        let below = self.l2().map_or(&[][..], |l2| l2.tiers());
        let l1: &dyn TenantSource = &self.l1.cache;
        let below = below.iter().map(|tier| &**tier as &dyn TenantSource);
        let tiers: Vec<_> = std::iter::once(l1).chain(below).collect();
        let most = usize::from(self.config.tenants.tenant_metrics);
        let _read = self.metrics.tenants.read(most, &tiers);
        self.metrics.encode(&self.readings())
    }
}
