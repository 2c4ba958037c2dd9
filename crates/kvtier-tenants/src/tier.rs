//! A tier as seen by what counts and limits its tenants.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvtier_core::cache::{Page, SaltUsage, Stats};
use kvtier_core::quota::Grant;

/// A tier that counts per tenant.
pub trait TenantSource {
    /// `l1`, or the name of the tier below it.
    fn name(&self) -> &str;

    /// Tenants of the tier, one page of at most `limit` from `from` on.
    fn tenants(&self, from: u32, limit: usize) -> Page<SaltUsage>;

    /// What it counts in all and of these tenants, at one moment.
    fn stats_with(&self, salts: &[Arc<str>]) -> (Stats, Vec<Option<SaltUsage>>);
}

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
