//! What single tenants have in a tier.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvtier_core::cache::{Page, SaltUsage, Stats};

use super::Tier;

impl Tier {
    /// What the index counts of one tenant, `None` for one it does not know; and the bytes that the backend may hold of
    /// it, as in [`Tier::stats`].
    pub fn tenant(&self, salt: &str) -> (Option<SaltUsage>, u64) {
        let (usage, leaving) = self
            .condemned
            .beside(Some(salt), || self.index.salt_usage(salt));
        let counted = usage.as_ref().map_or(0, |usage| usage.counted_bytes);
        let bytes = (counted + leaving).saturating_sub(self.unsent.bytes(Some(salt)));
        (usage, bytes)
    }

    /// What the index counts of all and of some tenants: [`Cache::stats_with`].
    ///
    /// [`Cache::stats_with`]: kvtier_core::cache::Cache::stats_with
    pub fn stats_with<S: AsRef<str>>(&self, salts: &[S]) -> (Stats, Vec<Option<SaltUsage>>) {
        self.index.stats_with(salts)
    }

    /// The tenants that have anything or a grant: [`Cache::salts`].
    ///
    /// [`Cache::salts`]: kvtier_core::cache::Cache::salts
    pub fn tenants(&self, from: u32, limit: usize) -> Page<SaltUsage> {
        self.index.salts(from, limit)
    }

    /// Bytes that the index gave up and the backend has not deleted yet, by cache salt.
    pub fn leaving_by_salt(&self) -> BTreeMap<Arc<str>, u64> {
        self.condemned.by_salt()
    }
}
