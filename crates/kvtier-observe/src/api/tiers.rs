//! Tiers below L1 in the answer of `GET /status`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::status::EvictionStatus;

/// One tier. Further fields are those of its type, such as `base_path`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct TierStatus {
    /// Whether the adapter works and its breakers are closed.
    pub is_healthy: bool,
    /// LMCache's name of its type, such as `FSL2Adapter`.
    pub r#type: String,
    /// Type of the tier in the configuration, such as `fs`.
    pub type_name: Option<String>,
    /// Name of the tier, such as `fs-0`.
    pub name: Option<String>,
    /// Objects.
    pub stored_object_count: Option<u64>,
    /// Objects being loaded.
    pub locked_key_count: u64,
    /// Bytes of its objects.
    pub current_size_bytes: Option<u64>,
    /// Limit of these bytes; 0 is none.
    pub max_capacity_bytes: u64,
    /// Quotient of the two; -1 without a limit.
    pub usage_fraction: f64,
    /// Tenants.
    pub cache_salt_count: u64,
    /// Whether the last store found no space; loads continue.
    pub is_full: bool,
    /// Cause, if the adapter does not work; else `null`.
    pub error: Option<String>,
    /// The last error of a store; `null` without one.
    pub last_store_error: Option<String>,
    /// Adoption of the objects from before the start.
    pub recovery: Option<Recovery>,
    /// Objects waiting to be stored.
    pub pending_objects: u64,
    /// Bytes of the objects that wait or are being stored.
    pub pending_bytes: u64,
    /// Objects that were not stored because the queue was full.
    pub dropped_objects: u64,
    /// Batches being stored.
    pub stores_in_flight: u64,
    /// Batches being loaded.
    pub loads_in_flight: u64,
    /// Objects whose store failed since the start, by reason.
    pub store_failures: BTreeMap<String, u64>,
    /// Objects whose load failed since the start, by reason.
    pub load_failures: BTreeMap<String, u64>,
    /// Objects loaded without a checksum since the start.
    pub unverified_objects: u64,
    /// Whether nothing is stored or deleted there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// How files are read and written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_engine: Option<String>,
    /// Files that were found corrupt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quarantined_files: Option<u64>,
    /// Whether calls pass, by `lookup`, `load` and `store`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub breaker: BTreeMap<String, BreakerStatus>,
    /// Calls of the adapter, by the same.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub calls: BTreeMap<String, CallsInFlight>,
    /// Calls without an answer in time since the start, by the same.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub late_calls: BTreeMap<String, u64>,
    /// Calls that did not leave the queue in time although others were answered, by the same.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub crowded_calls: BTreeMap<String, u64>,
    /// Objects that were retried, by the same.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub retried_items: BTreeMap<String, u64>,
    /// Transformations of its objects, in the order of a store.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub serde: Vec<SerdeStatus>,
    /// Fields of its type.
    #[serde(flatten)]
    pub more: BTreeMap<String, Value>,
}

impl TierStatus {
    /// Why it failed, as far as it says; `None` for a healthy one.
    #[must_use]
    pub fn cause(&self) -> Option<&str> {
        let cause = self.error.as_deref().or(self.last_store_error.as_deref());
        cause.filter(|_| !self.is_healthy)
    }
}

/// A transformation of the objects of a tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct SerdeStatus {
    /// Type of the transformation in the configuration.
    pub r#type: String,
    /// Bytes of stored objects before it.
    pub stored_bytes: u64,
    /// Bytes of stored objects behind the transformation.
    pub transformed_bytes: u64,
    /// Processor time of stores and loads.
    pub cpu_seconds: f64,
    /// Objects that it could not transform.
    pub store_failures: u64,
    /// Loaded objects that are not what was stored.
    pub corrupt_loads: u64,
    /// Loaded objects that it cannot read with this configuration.
    pub refused_loads: u64,
    /// Fields of its type.
    #[serde(flatten)]
    pub more: BTreeMap<String, Value>,
}

/// Adoption of the objects that a tier had before the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum Recovery {
    /// Running, or about to.
    Running,
    /// All objects of the backend are known.
    Done {
        /// Objects found.
        #[serde(default)]
        objects: u64,
        /// Bytes of the objects that were found.
        #[serde(default)]
        bytes: u64,
        /// Removed leftovers of interrupted writes.
        #[serde(default)]
        removed: u64,
        /// Entries that are not kvtier's, which are kept.
        #[serde(default)]
        foreign: u64,
    },
    /// Recovery failed and is retried.
    Failed {
        /// Cause, and when it is retried.
        #[serde(default)]
        error: String,
    },
    /// A state of a newer server.
    #[serde(other)]
    Unknown,
}

/// Breaker of one kind of call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct BreakerStatus {
    /// `closed` if calls pass.
    pub state: String,
    /// Failures in a row.
    pub failures: u64,
    /// Times it opened.
    pub opened: u64,
    /// Calls it refused.
    pub refused: u64,
}

/// Calls of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct CallsInFlight {
    /// Calls in flight.
    pub in_flight: u64,
    /// Calls in the queue.
    pub waiting: u64,
}

/// Eviction of one tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct TierEvictionStatus {
    /// Name of the tier.
    pub adapter: String,
    /// The policy and what it has evicted.
    #[serde(flatten)]
    pub eviction: EvictionStatus,
}
