//! Data of the events of `GET /ui/events`, and the answer of `GET /tenants`.

use std::collections::BTreeMap;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::Health;
use crate::api::devices::ByDirection;
use crate::api::quota::Tenant;
use crate::api::rates::OperationRate;
use crate::api::status::Status;

/// Milliseconds since 1970, as in [`DashboardTick::at`] and [`LogLine::at`].
pub fn unix_millis() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

/// What a viewer needs once: the data of the event `history`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct DashboardHistory {
    /// Name of the caller's token; `null` if the server has no tokens.
    pub caller: Option<String>,
    /// `read` or `admin`.
    pub role: String,
    /// Seconds between two points.
    pub interval_seconds: f64,
    /// Most points.
    pub capacity: usize,
    /// Number of the latest point, counted from 1 since the start; 0 before the first.
    pub sequence: u64,
    /// Points of the last hour by the name of their series, the oldest first; `null` where there is no value.
    pub series: BTreeMap<String, Vec<Option<f32>>>,
}

/// State of a server at one moment: the data of the event `tick`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct DashboardTick {
    /// Milliseconds since 1970.
    pub at: u64,
    /// Number of the latest point of the history.
    pub sequence: u64,
    /// Newest point of the history, by the name of its series.
    pub point: BTreeMap<String, Option<f32>>,
    /// Health, as in `GET /healthcheck`.
    pub health: Health,
    /// Status, as in `GET /status`, without repeated fields and the layers of workers; `null` before the engine is there.
    pub status: Option<Status>,
    /// What happened in the last interval; `null` before the second reading.
    pub traffic: Option<Traffic>,
    /// The latest lookups, the latest first.
    pub lookups: Vec<RecentLookup>,
    /// The latest warnings and errors of the log, the latest first.
    pub warnings: Vec<LogLine>,
}

/// What happened in an interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Traffic {
    /// Length of the interval.
    pub seconds: f64,
    /// Tokens found of those that lookups asked for, 0 to 1; `null` if they asked for none.
    pub hit_rate: Option<f64>,
    /// Tokens that lookups asked for, per second.
    pub requested_tokens: f64,
    /// Tokens that they found in L1, per second.
    pub hit_tokens_l1: f64,
    /// Tokens that the tiers added to those, per second.
    pub hit_tokens_l2: f64,
    /// Lookups.
    pub lookups: OperationRate,
    /// Stores, by either way.
    pub stores: OperationRate,
    /// Retrieves, by either way.
    pub retrieves: OperationRate,
    /// The operations that were answered, most of all first.
    pub operations: Vec<OperationRate>,
    /// Requests that got their operation's "no".
    pub refused: Vec<Refusals>,
    /// Lookups that asked for nothing.
    pub early_exits: Vec<Refusals>,
    /// Objects evicted from L1 since the start.
    pub l1_evicted_objects: f64,
    /// Bytes evicted from L1, per second.
    pub l1_evicted_bytes: f64,
    /// Traffic of each tier, by its name.
    pub tiers: BTreeMap<String, TierTraffic>,
    /// Bytes copied between each GPU and L1 per second, by its ordinal.
    pub gpus: BTreeMap<String, ByDirection<f64>>,
}

/// Refused requests of one reason.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Refusals {
    /// The operation; empty for lookups that asked for nothing.
    pub operation: String,
    /// The reason, as in the metrics.
    pub reason: String,
    /// Number of refusals since the start.
    pub total: f64,
    /// Number of refusals per second.
    pub per_second: f64,
}

/// Traffic of a tier, per second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct TierTraffic {
    /// Stored bytes.
    pub stored_bytes: f64,
    /// Loaded bytes.
    pub loaded_bytes: f64,
    /// Evicted bytes.
    pub evicted_bytes: f64,
    /// Objects evicted since the start.
    pub evicted_objects: f64,
    /// Objects whose store or load failed.
    pub failures: f64,
    /// Objects found of those that it was asked about, 0 to 1; `null` if it was not asked.
    pub hit_rate: Option<f64>,
}

/// A lookup of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RecentLookup {
    /// When it was asked, seconds ago.
    pub seconds_ago: u64,
    /// Full name of its model.
    pub model_name: String,
    /// Tenant, as `GET /quota` calls it.
    pub cache_salt: String,
    /// Tokens asked for, in whole chunks.
    pub tokens: u64,
    /// Tokens found.
    pub hit_tokens: u64,
    /// Why nothing was looked for; `null` if it was.
    pub refused: Option<String>,
    /// What became of the first chunk that was missing, in words; `null` if none was.
    pub missing: Option<String>,
}

/// A line of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct LogLine {
    /// Milliseconds since 1970.
    pub at: u64,
    /// `WARN` or `ERROR`.
    pub level: String,
    /// Part of the server.
    pub target: String,
    /// Message and fields.
    pub text: String,
}

/// Some of the tenants, in an order: the answer of `GET /tenants`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct TenantList {
    /// Tenants that have a quota or objects.
    pub total: usize,
    /// Number of tenants that match the request.
    pub matching: usize,
    /// The tenants from `offset` on, at most `limit`, with their names in `cache_salt`.
    pub tenants: Vec<Tenant>,
}
