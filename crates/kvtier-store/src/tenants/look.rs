//! What tenants have and may have, tier by tier.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvtier_core::cache::{Page, SaltUsage};
use kvtier_core::quota::Grant;

use kvtier_config::TierPlace;

use crate::tenants::{Quotas, TenantTable};

/// Tenants read under one hold of a lock: lookups wait for it.
const PAGE: usize = 256;

/// A look at the tenants. The table is that of one moment, what they have is read page by page.
pub struct Look<'a> {
    quotas: &'a Quotas,
    table: Arc<TenantTable>,
    /// Bytes per tenant that each tier has evicted and not deleted yet.
    deleting: Vec<BTreeMap<Arc<str>, u64>>,
}

/// A tenant in one tier.
#[derive(Debug, Clone)]
pub struct InTier<'a> {
    /// The tier.
    pub place: &'a TierPlace,
    /// What holds there: its entry, or the default.
    pub grant: Grant,
    /// Bytes of the tenant, also those being written or deleted; not those that wait until others are deleted.
    pub bytes: u64,
    /// What the tier counts of it, as long as it knows the tenant.
    pub usage: Option<SaltUsage>,
}

impl<'a> Look<'a> {
    pub(super) fn new(quotas: &'a Quotas, deleting: Vec<BTreeMap<Arc<str>, u64>>) -> Self {
        let table = quotas.table();
        Self {
            quotas,
            table,
            deleting,
        }
    }
}

impl Look<'_> {
    /// The table.
    pub fn table(&self) -> &TenantTable {
        &self.table
    }

    /// A tenant in each tier, L1 first.
    pub fn tenant(&self, salt: &str) -> Vec<InTier<'_>> {
        self.page(&[salt]).pop().unwrap_or_default()
    }

    /// Each of these tenants in each tier, L1 first.
    pub fn tenants<'a>(&'a self, salts: &'a [&'a str]) -> impl Iterator<Item = Vec<InTier<'a>>> {
        salts.chunks(PAGE).flat_map(|page| self.page(page))
    }

    fn page(&self, salts: &[&str]) -> Vec<Vec<InTier<'_>>> {
        let default = Grant {
            limit: self.quotas.default_limit().0,
            reserved: 0,
        };
        let usages = self.quotas.tiers().map(|tier| tier.usages(salts));
        let mut usages: Vec<_> = usages.map(Vec::into_iter).collect();
        let tenant = |salt: &&str| {
            let entry = self.table.get(salt);
            let places = self.quotas.places().iter().zip(&mut usages);
            let in_tier = places.map(|(place, usages)| {
                let (usage, bytes) = usages.next().unwrap_or_default();
                InTier {
                    place,
                    grant: entry.map_or(default, |entry| entry.of_tier(&place.name)),
                    bytes,
                    usage,
                }
            });
            in_tier.collect()
        };
        salts.iter().map(tenant).collect()
    }

    /// All tenants that have an entry or anything anywhere, in order.
    pub fn known(&self) -> BTreeSet<Arc<str>> {
        let mut known: BTreeSet<_> = self
            .table
            .iter()
            .map(|(salt, _)| Arc::clone(salt))
            .collect();
        let mut add = |page: &dyn Fn(u32) -> Page<SaltUsage>| {
            let mut from = Some(0);
            while let Some(start) = from {
                let page = page(start);
                known.extend(page.entries.into_iter().map(|usage| usage.salt));
                from = page.next;
            }
        };
        for tier in self.quotas.tiers() {
            add(&|from| tier.tenants(from, PAGE));
        }
        for deleting in &self.deleting {
            known.extend(deleting.keys().cloned());
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kvtier_config::ServerConfig;
    use kvtier_core::cache::Stats;

    use super::*;
    use crate::tenants::{Opened, QuotaTier, Salts};
    use kvtier_observe::metrics::TenantSource;

    /// A tier whose tenants have as many bytes as their names; counts how often its lock would be acquired.
    struct Counting(Arc<AtomicUsize>);

    impl TenantSource for Counting {
        fn name(&self) -> &str {
            "l1"
        }

        fn tenants(&self, _: u32, _: usize) -> Page<SaltUsage> {
            Page {
                entries: Vec::new(),
                next: None,
            }
        }

        fn stats_with(&self, _: &[Arc<str>]) -> (Stats, Vec<Option<SaltUsage>>) {
            (Stats::default(), Vec::new())
        }
    }

    impl QuotaTier for Counting {
        fn set_grant(&self, _: &str, _: Option<Grant>) {}

        fn set_default_limit(&self, _: Option<u64>) {}

        fn enforce(&self) -> usize {
            0
        }

        fn usages(&self, salts: &[&str]) -> Vec<(Option<SaltUsage>, u64)> {
            self.0.fetch_add(1, Ordering::Relaxed);
            assert!(salts.len() <= PAGE);
            salts.iter().map(|salt| (None, salt.len() as u64)).collect()
        }

        fn deleting(&self) -> BTreeMap<Arc<str>, u64> {
            BTreeMap::new()
        }
    }

    // proves: docs/operate.md#dashboard
    #[test]
    fn many_tenants_are_read_page_by_page() {
        let config = ServerConfig::from_flags(&["--l1-size-gb", "0.01"]).unwrap();
        let opened = Opened::open(&config, None, &Salts::of(None)).unwrap();
        let locked = Arc::new(AtomicUsize::new(0));
        let quotas = Quotas::new(opened, vec![Box::new(Counting(Arc::clone(&locked)))]);
        let names: Vec<_> = (0..3 * PAGE + 1).map(|length| "x".repeat(length)).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let look = quotas.look();
        for (length, tiers) in (0..).zip(look.tenants(&names)) {
            assert_eq!(tiers[0].bytes, length);
        }
        assert_eq!(locked.load(Ordering::Relaxed), 4);
        assert_eq!(look.tenant("xx")[0].bytes, 2);
    }
}
