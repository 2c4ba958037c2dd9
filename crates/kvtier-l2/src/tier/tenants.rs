//! Usage of single tenants in a tier.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvtier_core::cache::{Page, SaltUsage, Stats};

use super::Tier;
use super::key_states::Beside;

impl Tier {
    /// Returns the usage that the index has of each tenant, `None` for an unknown one, and the bytes that the backend may
    /// hold of it, as in [`Tier::stats`].
    pub fn usages(&self, salts: &[&str]) -> Vec<(Option<SaltUsage>, u64)> {
        let (usages, beside) = self
            .states
            .read_each(salts, || self.index.stats_with(salts).1);
        let held = |(usage, beside): (Option<SaltUsage>, Beside)| {
            let indexed = usage.as_ref().map_or(0, |usage| usage.counted_bytes);
            (usage, beside.held(indexed))
        };
        usages.into_iter().zip(beside).map(held).collect()
    }

    /// Returns the statistics of the index and the usage of some tenants: [`Cache::stats_with`].
    ///
    /// [`Cache::stats_with`]: kvtier_core::cache::Cache::stats_with
    pub fn stats_with<S: AsRef<str>>(&self, salts: &[S]) -> (Stats, Vec<Option<SaltUsage>>) {
        self.index.stats_with(salts)
    }

    /// Returns the tenants with objects or a grant: [`Cache::salts`].
    ///
    /// [`Cache::salts`]: kvtier_core::cache::Cache::salts
    pub fn tenants(&self, from: u32, limit: usize) -> Page<SaltUsage> {
        self.index.salts(from, limit)
    }

    /// Bytes that were evicted and are not deleted yet, by cache salt.
    pub fn deleting_by_salt(&self) -> BTreeMap<Arc<str>, u64> {
        self.states.deleting_by_salt()
    }
}
