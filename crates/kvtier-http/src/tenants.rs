//! The route that lists tenants in an order, some at a time.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use axum::extract;
use axum::http::StatusCode;
use kvtier_core::cache::SaltUsage;
use kvtier_observe::api::{Tenant, TenantList};
use kvtier_store::tenants::InTier;

use super::query::Query;
use super::quota::{shown, whole};
use super::{
    ApiError, ApiState, DetailBody, ErrorBody, JsonAnswer, NO_ENGINE, error, run_blocking,
};

/// What tenants are sorted by.
const KEYS: [&str; 6] = [
    "name",
    "usage",
    "share",
    "hit_rate",
    "requested_chunks",
    "refused",
];

/// Most tenants of an answer.
const LIMIT: i64 = 500;

/// Tenants that have a quota or objects, in an order.
///
/// Each has all fields of `GET /quota/{salt}`.
#[utoipa::path(get, path = "/tenants",
    params(
        ("sort" = Option<String>, Query, description = "`usage` (bytes in all tiers, by default), `share` (the fullest tier's part of its limit), `hit_rate`, `requested_chunks`, `refused` (objects that were not stored) or `name`"),
        ("order" = Option<String>, Query, description = "`desc` or `asc`; by default `asc` for names and `desc` for the rest"),
        ("search" = Option<String>, Query, description = "Only tenants whose names contain this, in any case"),
        ("offset" = Option<i64>, Query, description = "Tenants to leave out at the start; 0 by default"),
        ("limit" = Option<i64>, Query, description = "Most tenants of the answer, 1 to 500; 50 by default"),
    ),
    responses(
        (status = 200, description = "The tenants", body = TenantList),
        (status = 422, description = "A parameter is not allowed", body = DetailBody),
        (status = 503, description = "The engine is not there yet", body = ErrorBody),
    ))]
pub(super) async fn tenants(
    api: ApiState,
    extract::Query(query): extract::Query<HashMap<String, String>>,
) -> Result<JsonAnswer<TenantList>, ApiError> {
    let query = Query(query);
    let sort = query.one_of("sort", &KEYS, "usage")?;
    let usual = if sort == "name" { "asc" } else { "desc" };
    let is_descending = query.one_of("order", &["asc", "desc"], usual)? == "desc";
    let search = query.text("search").unwrap_or_default().to_lowercase();
    let offset = query.int("offset", 0..=i64::from(u32::MAX), 0)?;
    let limit = query.int("limit", 1..=LIMIT, 50)?;
    let none = || error(StatusCode::SERVICE_UNAVAILABLE, NO_ENGINE);
    let engine = Arc::clone(api.engine.get().ok_or_else(none)?);
    let list = run_blocking(move || {
        let look = engine.quotas().look();
        let known = look.known();
        let matching = known.iter().map(|salt| &**salt);
        let mut matching: Vec<_> = matching
            .filter(|salt| shown(&engine, salt).to_lowercase().contains(&search))
            .collect();
        matching.sort_by_cached_key(|salt| engine.salts().names.name(salt));
        let keys: Vec<_> = match sort {
            "name" => vec![0.0; matching.len()],
            _ => look.tenants(&matching).map(|it| key(&it, sort)).collect(),
        };
        let mut matching: Vec<_> = keys.into_iter().zip(matching).collect();
        // Names are in order already.
        matching.sort_by(|(a, _), (b, _)| {
            if is_descending {
                b.total_cmp(a)
            } else {
                a.total_cmp(b)
            }
        });
        if sort == "name" && is_descending {
            matching.reverse();
        }
        let (offset, limit) = (
            usize::try_from(offset).unwrap_or(usize::MAX),
            usize::try_from(limit).unwrap_or(0),
        );
        let tenants = matching.iter().skip(offset).take(limit);
        let tenant = |(_, salt): &(f64, &str)| Tenant {
            cache_salt: Some(shown(&engine, salt).into_owned()),
            ..whole(&look, salt)
        };
        TenantList {
            total: known.len(),
            matching: matching.len(),
            tenants: tenants.map(tenant).collect(),
        }
    });
    list.await.map(JsonAnswer)
}

/// What a tenant is sorted by.
fn key(tiers: &[InTier<'_>], sort: &str) -> f64 {
    let sum = |count: fn(&SaltUsage) -> u64| {
        let usages = tiers.iter().filter_map(|tier| tier.usage.as_ref());
        usages.map(count).sum::<u64>() as f64
    };
    let requested = || sum(|usage| usage.requested_chunks_total);
    match sort {
        "share" => tiers
            .iter()
            .map(share)
            .max_by(f64::total_cmp)
            .unwrap_or(0.0),
        // Behind those without a hit.
        "hit_rate" => match requested().partial_cmp(&0.0) {
            Some(Ordering::Greater) => sum(|usage| usage.hit_chunks_total) / requested(),
            _ => -1.0,
        },
        "requested_chunks" => requested(),
        "refused" => sum(|usage| usage.over_quota_total + usage.refused_total),
        _ => tiers.iter().map(|tier| tier.bytes as f64).sum(),
    }
}

/// The used part of a limit that has an effect.
fn share(tier: &InTier<'_>) -> f64 {
    let limit = tier.grant.limit.filter(|_| tier.place.isolates);
    limit.map_or(0.0, |limit| tier.bytes as f64 / limit.max(1) as f64)
}
