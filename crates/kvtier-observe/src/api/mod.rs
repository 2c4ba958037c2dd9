//! Bodies of the HTTP API: types that the server fills and its commands read. Names of fields are those of LMCache 0.5.6
//! where it has the field; the comments become the descriptions of `GET /openapi.json`.
//!
//! A reader ([`from_value`]) ignores unknown fields, and one that is missing or of another type has its default. So a command works with an older or newer server,
//! and with LMCache's own. A field that is an `Option` without `null` in its comment is absent there.
//!
//! What clients of the API make of its answers is here too where several do: [`Metrics`] reads the text of `/metrics` again,
//! [`Rates`] is what happened between two of them.
//!
//! The module never knows how a value is found or shown.

mod dashboard;
mod devices;
mod explanation;
mod quota;
mod rates;
mod read;
mod reload;
mod series;
mod status;
mod tiers;

pub use dashboard::{
    DashboardHistory, DashboardTick, LogLine, RecentLookup, Refusals, TenantList, TierTraffic,
    Traffic, unix_millis,
};
pub use devices::{
    ByDirection, CudaStatus, DevicesStatus, Gpu, GpuState, Gpus, MovedBytes, Pinning,
};
pub use explanation::{
    ChunkRun, ExplainRequest, ExplainedLookup, ExplainedRow, Explanation, Load, PrefixMatch,
};
pub use quota::{
    Activity, Limit, NewQuota, NewTierQuota, QuotaChange, Tenant, TenantInTier, TenantPage,
    TierUsage, Unlimited,
};
pub use rates::{OperationRate, Rates};
pub use read::from_value;
pub use reload::{ChangedFlag, Reloaded};
pub use series::{Metrics, MetricsReader, Series};
pub use status::{
    AgentSessionsStatus, BlendStatus, EngineDrivenInstance, EvictionStatus, KernelGroup,
    KvCacheLayout, KvEvents, L1EvictionStatus, L1Status, L2EvictionStatus, LmcacheDrivenInstance,
    MemoryPart, PeerPortStatus, PrefetchStatus, QuotaStatus, RequestPortStatus, StateStatus,
    Status, StorageManagerStatus, StoreStatus, WorkerLiveness,
};
pub use tiers::{
    BreakerStatus, CallsInFlight, Recovery, SerdeStatus, TierEvictionStatus, TierStatus,
};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Readiness of a server: the answer of `GET /healthcheck`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Health {
    /// `healthy`, or `unhealthy`.
    pub status: String,
    /// Cause, if the server is unhealthy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Names of the tiers that fail, as in `/status`; absent if all work. They do not make the server unhealthy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failed_tiers: Vec<String>,
    /// What operators should know although the server is healthy, one sentence each; absent if there is nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}
