//! What tenants have and may have, tier by tier.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvtier_core::cache::{Page, SaltUsage};
use kvtier_core::quota::Grant;

use kvtier_config::Place;

use crate::{QuotaTier, Quotas, Table};

/// Tenants asked for under one hold of a lock.
const PAGE: usize = 1024;

/// A look at the tenants. The table is that of one moment, what they have is asked for one by one.
pub struct Look<'a> {
    quotas: &'a Quotas,
    table: Arc<Table>,
    /// Bytes per tenant that each tier has evicted and not deleted yet.
    deleting: Vec<BTreeMap<Arc<str>, u64>>,
}

/// A tenant in one tier.
#[derive(Debug, Clone)]
pub struct InTier<'a> {
    /// The tier.
    pub place: &'a Place,
    /// What holds there: its entry, or the default.
    pub grant: Grant,
    /// Its bytes, those being written and those being deleted included; not those that wait until others are deleted.
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
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// A tenant in each tier, L1 first.
    pub fn tenant(&self, salt: &str) -> Vec<InTier<'_>> {
        let entry = self.table.get(salt);
        let default = Grant {
            limit: self.quotas.default_limit().0,
            reserved: 0,
        };
        let in_tier = |(place, tier): (_, &dyn QuotaTier)| {
            let (usage, bytes) = tier.tenant(salt);
            InTier {
                place,
                grant: entry.map_or(default, |entry| entry.of_tier(&place.name)),
                bytes,
                usage,
            }
        };
        let places = self.quotas.places().iter();
        places.zip(self.quotas.tiers()).map(in_tier).collect()
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
