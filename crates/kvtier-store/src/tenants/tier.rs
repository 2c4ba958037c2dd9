//! A tier as seen by what limits its tenants.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvtier_core::cache::SaltUsage;
use kvtier_core::quota::Grant;
use kvtier_observe::metrics::TenantSource;

/// A tier that enforces quotas.
pub trait QuotaTier: TenantSource + Send + Sync {
    /// Sets what a tenant is granted; `None` leaves it the default.
    fn set_grant(&self, salt: &str, grant: Option<Grant>);

    /// Sets the limit of tenants without a grant; `None` = unlimited.
    fn set_default_limit(&self, limit: Option<u64>);

    /// Evicts what exceeds quotas. Returns the number of objects; a tier that evicts in the background only begins, and
    /// returns 0.
    fn enforce(&self) -> usize;

    /// What it counts of each of these tenants, as long as it knows it, and the tenant's bytes, those being written and
    /// deleted included. All of them under one hold of its lock.
    fn usages(&self, salts: &[&str]) -> Vec<(Option<SaltUsage>, u64)>;

    /// Bytes per tenant that were evicted and are not deleted yet.
    fn deleting(&self) -> BTreeMap<Arc<str>, u64>;
}
