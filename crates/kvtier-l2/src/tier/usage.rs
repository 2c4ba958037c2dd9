//! Usage of a tier as operators and quotas see it.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Snapshot of a tier's usage.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AdapterUsage {
    /// Bytes of its objects in the backend, including those being written.
    pub total_bytes_used: u64,
    /// Capacity in bytes; 0 is unbounded.
    pub total_capacity_bytes: u64,
    /// Objects.
    pub objects: u64,
    /// Bytes by cache salt; no entry is 0.
    pub bytes_by_cache_salt: BTreeMap<Arc<str>, u64>,
}

impl AdapterUsage {
    /// Used fraction of the capacity; -1 if unbounded.
    #[must_use]
    pub fn usage_fraction(&self) -> f64 {
        if self.supports_global_eviction() {
            self.total_bytes_used as f64 / self.total_capacity_bytes as f64
        } else {
            -1.0
        }
    }

    /// Whether eviction across tenants is possible, which needs a capacity.
    #[must_use]
    pub fn supports_global_eviction(&self) -> bool {
        self.total_capacity_bytes > 0
    }
}
