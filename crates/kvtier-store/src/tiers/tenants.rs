//! Quotas of the tiers.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::tenants::QuotaTier;
use kvtier_core::cache::{Page, SaltUsage, Stats};
use kvtier_core::quota::Grant;
use kvtier_l2::tier::Tier;
use kvtier_observe::metrics::TenantSource;
use tokio::sync::Notify;

/// The tenants of one tier.
pub(super) struct TierTenants {
    pub(super) tier: Arc<Tier>,
    /// Wakes the tier's eviction.
    pub(super) quotas_changed: Arc<Notify>,
}

impl TenantSource for TierTenants {
    fn name(&self) -> &str {
        self.tier.name()
    }

    fn tenants(&self, from: u32, limit: usize) -> Page<SaltUsage> {
        self.tier.tenants(from, limit)
    }

    fn stats_with(&self, salts: &[Arc<str>]) -> (Stats, Vec<Option<SaltUsage>>) {
        self.tier.stats_with(salts)
    }
}

impl QuotaTier for TierTenants {
    fn set_grant(&self, salt: &str, grant: Option<Grant>) {
        self.tier.set_grant(salt, grant);
    }

    fn set_default_limit(&self, limit: Option<u64>) {
        self.tier.set_default_limit(limit);
    }

    fn enforce(&self) -> usize {
        self.quotas_changed.notify_one();
        0
    }

    fn usages(&self, salts: &[&str]) -> Vec<(Option<SaltUsage>, u64)> {
        self.tier.usages(salts)
    }

    fn deleting(&self) -> BTreeMap<Arc<str>, u64> {
        self.tier.deleting_by_salt()
    }
}
