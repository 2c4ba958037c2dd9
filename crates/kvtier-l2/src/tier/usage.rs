//! What a tier holds, as operators and quotas see it.

use std::collections::BTreeMap;
use std::sync::Arc;

/// A snapshot; it does not change any more.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AdapterUsage {
    /// Bytes its objects take in the backend, those being written included.
    pub total_bytes_used: u64,
    /// Bytes it may use; 0 is "no bound".
    pub total_capacity_bytes: u64,
    /// Objects.
    pub objects: u64,
    /// Bytes by cache salt; no entry is 0.
    pub bytes_by_cache_salt: BTreeMap<Arc<str>, u64>,
}

impl AdapterUsage {
    /// Used part of the capacity; -1 when there is no bound: nothing to evict by.
    #[must_use]
    pub fn usage_fraction(&self) -> f64 {
        if self.supports_global_eviction() {
            self.total_bytes_used as f64 / self.total_capacity_bytes as f64
        } else {
            -1.0
        }
    }

    /// Whether eviction over all tenants can work: only with a bound.
    #[must_use]
    pub fn supports_global_eviction(&self) -> bool {
        self.total_capacity_bytes > 0
    }
}
