//! Bodies of the routes below `/quota`.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

/// Bytes that a tenant may have, in GiB.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Limit {
    /// At most this, GiB.
    Gib(f64),
    /// No limit.
    Unlimited(Unlimited),
}

impl Default for Limit {
    fn default() -> Self {
        Self::Gib(0.0)
    }
}

impl Limit {
    /// The limit of `gib` GiB; `None` is unlimited.
    #[must_use]
    pub fn new(gib: Option<f64>) -> Self {
        gib.map_or(Self::Unlimited(Unlimited::Unlimited), Self::Gib)
    }
}

/// The word for no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unlimited {
    /// No limit.
    Unlimited,
}

/// Quota of a tenant: the body of `PUT /quota/{salt}`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NewQuota {
    /// Most that the tenant may have in each tier: GiB, or a text such as `512MiB` or `unlimited`.
    #[schema(required = true)]
    pub limit_gb: Limit,
    /// Share of each tier that other tenants cannot evict: GiB, or a text such as `1GiB`.
    pub reserved_gb: f64,
    /// Values for single tiers that differ, by `l1` or the tier's name.
    pub tiers: BTreeMap<String, NewTierQuota>,
}

/// Quota of a tenant in one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct NewTierQuota {
    /// Most that the tenant may have there, as for all tiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_gb: Option<Limit>,
    /// Reserved share in this tier, as for all tiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_gb: Option<f64>,
}

/// Result of a change.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct QuotaChange {
    /// The tenant; `_default` is that of requests without a salt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// The limit that was set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_gb: Option<Limit>,
    /// Number of quotas that were set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub set: Option<usize>,
    /// `ok`, `removed` or `not_found`.
    pub status: String,
    /// `false` if a restart loses the change; else absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persisted: Option<bool>,
    /// `false` if no tier enforces quotas; else absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enforced: Option<bool>,
}

/// Usage and limits of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Tenant {
    /// The tenant; `_default` is that of requests without a salt. Absent in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Limit in each tier; 0.0 without a quota.
    pub limit_gb: Limit,
    /// GiB in all tiers below L1 together.
    pub current_usage_gb: f64,
    /// Share of each tier that other tenants cannot evict, GiB; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_gb: Option<f64>,
    /// Whether the tenant has a quota; in lists without pages only if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exists: Option<bool>,
    /// Whether a restart keeps the quotas. Absent in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persisted: Option<bool>,
    /// Lookups of the tenant. Absent in lists without pages.
    #[serde(flatten)]
    pub activity: Option<Activity>,
    /// Each tier; in lists without pages those with a quota of their own.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tiers: BTreeMap<String, TenantInTier>,
}

/// Lookups of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Activity {
    /// Chunks that lookups asked for.
    pub requested_chunks: u64,
    /// Chunks of the prefixes that they found, in L1 or loaded from the tiers below.
    pub hit_chunks: u64,
    /// Quotient of the two; `null` without any.
    pub hit_rate: Option<f64>,
}

/// Usage and limits of a tenant in one tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct TenantInTier {
    /// What was set for this tier alone.
    #[serde(flatten)]
    pub own: NewTierQuota,
    /// Usage. Absent in lists without pages.
    #[serde(flatten)]
    pub usage: Option<TierUsage>,
}

/// Usage of a tenant in one tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct TierUsage {
    /// Limit in force, bytes; `null` is unlimited.
    pub limit_bytes: Option<u64>,
    /// Share in force, bytes.
    pub reserved_bytes: u64,
    /// Whether the quota has any effect there.
    pub enforced: bool,
    /// Bytes, including those being written and being deleted.
    pub usage_bytes: u64,
    /// Objects.
    pub objects: u64,
    /// Whether the tenant is over quota, and eviction is bringing it back.
    pub over_quota: bool,
    /// Objects that were not stored because of the limit.
    pub refused_over_quota: u64,
    /// Objects that were not stored because there was no space.
    #[serde(rename = "refused_no_room")]
    pub refused_no_space: u64,
    /// Objects evicted to free space, or because of the limit.
    pub evicted_objects: u64,
    /// Bytes of the evicted objects.
    pub evicted_bytes: u64,
}

/// Tenants: the answer of `GET /quota`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct TenantPage {
    /// The tenants by name.
    pub users: BTreeMap<String, Tenant>,
    /// Token of the next page, `null` at the end. Absent without pages.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub next_page_token: Option<Option<String>>,
}

/// Reads a field that may be `null`, and may be absent.
fn present<'de, D: Deserializer<'de>>(reader: D) -> Result<Option<Option<String>>, D::Error> {
    Option::deserialize(reader).map(Some)
}
