//! Usage of single tenants in a tier.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvtier_core::cache::{Page, SaltUsage, Stats};

use super::Tier;

impl Tier {
    /// Returns the usage that the index has of one tenant, `None` for an unknown one, and the bytes that the backend may
    /// hold of it, as in [`Tier::stats`].
    pub fn tenant(&self, salt: &str) -> (Option<SaltUsage>, u64) {
        let (usage, beside) = self.states.read(Some(salt), || self.index.salt_usage(salt));
        let indexed = usage.as_ref().map_or(0, |usage| usage.counted_bytes);
        (usage, beside.held(indexed))
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
