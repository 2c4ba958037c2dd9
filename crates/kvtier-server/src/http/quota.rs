//! Routes about what tenants may have: LMCache's, with more to tell and stricter about which tenants there can be.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::PathRejection;
use axum::extract::{self, OriginalUri, Path};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use kvtier_core::object_key::check_cache_salt;
use serde_json::{Map, Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::query::Query;
use super::quota_body::{Wanted, gib};
use super::{Api, ApiError, State, apart};
use crate::engine::Engine;
use crate::quota::{ChangeError, InTier, Look, Quotas};

/// How the tenant without a salt is called in paths and answers. A salt of this name cannot be addressed.
const DEFAULT: &str = "_default";

/// The routes; the older design has the same below `/api`.
pub(super) fn quota_routes() -> OpenApiRouter<Arc<Api>> {
    let routes = || {
        OpenApiRouter::new()
            .routes(routes!(list))
            .routes(routes!(get, put, delete))
            .route("/quota/", any(without_slash))
            .route("/quota/{salt}/", any(without_slash))
    };
    routes().nest("/api", routes())
}

fn error(status: StatusCode, text: impl Into<String>) -> ApiError {
    ApiError::Error(status, text.into())
}

fn bad(text: impl Into<String>) -> ApiError {
    error(StatusCode::BAD_REQUEST, text)
}

fn engine(api: &State) -> Result<&Arc<Engine>, ApiError> {
    let none = || error(StatusCode::SERVICE_UNAVAILABLE, "engine not initialized");
    api.engine.get().ok_or_else(none)
}

/// The tenant that a path names.
fn salt(api: &State, path: Result<Path<String>, PathRejection>) -> Result<String, ApiError> {
    let Path(name) = path.map_err(|_| bad("cache_salt: it is not UTF-8"))?;
    match name.as_str() {
        DEFAULT => return Ok(String::new()),
        // LMCache has no route for it.
        name if name.contains('/') => {
            return Err(ApiError::Detail(StatusCode::NOT_FOUND, "Not Found".into()));
        }
        _ => {}
    }
    check_cache_salt(&name).map_err(|error| bad(error.to_string()))?;
    Ok(engine(api)?.salts().of_operator(&name).into_owned())
}

fn shown(salt: &str) -> &str {
    match salt {
        "" => DEFAULT,
        salt => salt,
    }
}

/// Every change of a quota ends here.
fn changed(what: &str, salt: &str, quotas: &Quotas) {
    let (persisted, tenants) = (quotas.is_persistent(), quotas.table().len());
    tracing::info!(persisted, tenants, "{what}");
    tracing::debug!(salt, "{what}");
}

/// Changes an entry; says whether there was one.
async fn change(
    api: &State,
    salt: &str,
    wanted: Option<Wanted>,
    what: &'static str,
) -> Result<bool, ApiError> {
    let quotas = Arc::clone(engine(api)?.quotas());
    let salt = salt.to_owned();
    let outcome = apart(move || {
        let entry = wanted.map(|wanted| wanted.entry);
        let outcome = quotas.change(&salt, entry);
        if outcome.is_ok() {
            changed(what, &salt, &quotas);
        }
        outcome
    });
    outcome.await?.map_err(|refused| {
        let status = match refused {
            ChangeError::Refused(_) => StatusCode::BAD_REQUEST,
            ChangeError::NotWritten(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        error(status, refused.to_string())
    })
}

/// An answer to a change. It tells what LMCache's does not have to: that a restart forgets the change.
fn answer(api: &State, mut answer: Value) -> Result<Json<Value>, ApiError> {
    if !engine(api)?.quotas().is_persistent() {
        answer["persisted"] = json!(false);
    }
    Ok(Json(answer))
}

/// Sets what a tenant may have, in place of what it might have before.
///
/// Body: `{"limit_gb": 1.5}`, GiB, or `"unlimited"`. Also `"reserved_gb"`, and `"tiers": {"fs-0": {"limit_gb": 10, "reserved_gb": 1}}`.
#[utoipa::path(put, path = "/quota/{salt}", request_body = Value,
    params(("salt" = String, Path, description = "The cache salt; `_default` for requests without")),
    responses(
        (status = 200, description = "Set", body = Value),
        (status = 400, description = "No tenant can have this salt, or the body is not allowed", body = Value),
        (status = 500, description = "The file could not be written; nothing was changed", body = Value),
        (status = 503, description = "The engine is not there yet", body = Value),
    ))]
async fn put(
    api: State,
    path: Result<Path<String>, PathRejection>,
    bytes: Bytes,
) -> Result<Json<Value>, ApiError> {
    let salt = salt(&api, path)?;
    let wanted = Wanted::parse(&bytes, engine(&api)?.quotas().places()).map_err(bad)?;
    let limit = wanted.limit_gb.clone();
    change(&api, &salt, Some(wanted), "a tenant's quota was set").await?;
    let told = json!({ "cache_salt": shown(&salt), "limit_gb": limit, "status": "ok" });
    answer(&api, told)
}

/// Takes away what a tenant was granted, so that the default holds.
#[utoipa::path(delete, path = "/quota/{salt}",
    params(("salt" = String, Path, description = "The cache salt; `_default` for requests without")),
    responses(
        (status = 200, description = "`removed`, or `not_found`", body = Value),
        (status = 400, description = "No tenant can have this salt", body = Value),
        (status = 500, description = "The file could not be written; nothing was changed", body = Value),
        (status = 503, description = "The engine is not there yet", body = Value),
    ))]
async fn delete(
    api: State,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let salt = salt(&api, path)?;
    let status = match change(&api, &salt, None, "a tenant's quota was removed").await? {
        true => "removed",
        false => "not_found",
    };
    let told = json!({ "cache_salt": shown(&salt), "status": status });
    answer(&api, told)
}

/// What a tenant has and may have, in all and in each tier. Any tenant that can be: `exists` says whether it has a quota.
#[utoipa::path(get, path = "/quota/{salt}",
    params(("salt" = String, Path, description = "The cache salt; `_default` for requests without")),
    responses(
        (status = 200, description = "The tenant", body = Value),
        (status = 400, description = "No tenant can have this salt", body = Value),
        (status = 503, description = "The engine is not there yet", body = Value),
    ))]
async fn get(
    api: State,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let salt = salt(&api, path)?;
    let quotas = Arc::clone(engine(&api)?.quotas());
    let told = apart(move || {
        let look = quotas.look();
        let mut told = whole(&look, &salt);
        told.insert("cache_salt".into(), json!(shown(&salt)));
        told.insert("persisted".into(), json!(quotas.is_persistent()));
        Value::Object(told)
    });
    Ok(Json(told.await?))
}

/// The tenants that have a quota.
///
/// Without parameters as LMCache answers, all of them. Pages tell of each tenant what `GET /quota/{salt}` tells.
#[utoipa::path(get, path = "/quota",
    params(
        ("page_size" = Option<i64>, Query, description = "Most tenants of the answer, 1 to 5000; without, all"),
        ("page_token" = Option<String>, Query, description = "`next_page_token` of the answer before"),
        ("all" = Option<bool>, Query, description = "`true`: also tenants that have objects and no quota; `false` by default"),
    ),
    responses(
        (status = 200, description = "The tenants", body = Value),
        (status = 400, description = "The token is none of ours", body = Value),
        (status = 422, description = "A parameter is not allowed", body = Value),
        (status = 503, description = "The engine is not there yet", body = Value),
    ))]
async fn list(
    api: State,
    extract::Query(query): extract::Query<HashMap<String, String>>,
) -> Result<Json<Value>, ApiError> {
    let query = Query::from(query);
    let page_size = match query.text("page_size") {
        None => None,
        Some(_) => usize::try_from(query.int("page_size", 1..=5000, 0)?).ok(),
    };
    let behind = query.text("page_token").map(read_token).transpose()?;
    let all = query.one_of("all", &["true", "false"], "false")? == "true";
    let quotas = Arc::clone(engine(&api)?.quotas());
    let told = apart(move || {
        let look = quotas.look();
        let behind = behind.as_deref();
        match all {
            false => page(&look, look.table().behind(behind), page_size),
            true => {
                use std::ops::Bound::{Excluded, Unbounded};
                let known = look.known();
                let from = behind.map_or(Unbounded, Excluded);
                page(&look, known.range::<str, _>((from, Unbounded)), page_size)
            }
        }
    });
    Ok(Json(told.await?))
}

/// So many of these tenants: in short without a number, wholly with one.
fn page<'a>(
    look: &Look<'_>,
    mut salts: impl Iterator<Item = &'a Arc<str>>,
    page_size: Option<usize>,
) -> Value {
    let tell = match page_size {
        None => brief,
        Some(_) => whole,
    };
    let (mut users, mut last) = (Map::new(), None);
    for salt in salts.by_ref().take(page_size.unwrap_or(usize::MAX)) {
        users.insert(shown(salt).to_owned(), Value::Object(tell(look, salt)));
        last = Some(salt);
    }
    let mut told = json!({ "users": users });
    if page_size.is_some() {
        let last = salts.next().and(last);
        told["next_page_token"] = json!(last.map(|salt| token(salt)));
    }
    told
}

fn token(salt: &str) -> String {
    format!("s{}", hex::encode(salt))
}

fn read_token(token: &str) -> Result<String, ApiError> {
    let salt = token
        .strip_prefix('s')
        .and_then(|hex| hex::decode(hex).ok());
    salt.and_then(|salt| String::from_utf8(salt).ok())
        .ok_or_else(|| bad("page_token: it is none that this listing gave"))
}

/// LMCache's part, with what all tiers below L1 have of a tenant together.
fn brief(look: &Look<'_>, salt: &str) -> Map<String, Value> {
    head(look, salt, &look.tenant(salt))
}

fn head(look: &Look<'_>, salt: &str, tiers: &[InTier<'_>]) -> Map<String, Value> {
    let limit = look.table().get(salt).map(|entry| entry.limit.0);
    let limit = match limit {
        Some(None) => json!("unlimited"),
        Some(Some(bytes)) => json!(gib(bytes)),
        None => json!(0.0),
    };
    let below: u64 = tiers.iter().skip(1).map(|tier| tier.bytes).sum();
    Map::from_iter([
        ("limit_gb".to_owned(), limit),
        ("current_usage_gb".to_owned(), json!(gib(below))),
    ])
}

/// All there is to tell of a tenant.
fn whole(look: &Look<'_>, salt: &str) -> Map<String, Value> {
    let tiers = look.tenant(salt);
    let mut told = head(look, salt, &tiers);
    let entry = look.table().get(salt);
    told.insert("exists".into(), json!(entry.is_some()));
    let (mut by_tier, mut requested, mut hit) = (Map::new(), 0, 0);
    for tier in &tiers {
        let usage = tier.usage.as_ref();
        requested += usage.map_or(0, |usage| usage.requested_chunks_total);
        hit += usage.map_or(0, |usage| usage.hit_chunks_total);
        by_tier.insert(tier.place.name.to_string(), in_tier(tier));
    }
    told.insert("tiers".into(), Value::Object(by_tier));
    told.insert("requested_chunks".into(), json!(requested));
    told.insert("hit_chunks".into(), json!(hit));
    let rate = (requested > 0).then(|| hit as f64 / requested as f64);
    told.insert("hit_rate".into(), json!(rate));
    told
}

fn in_tier(tier: &InTier<'_>) -> Value {
    let count =
        |count: fn(&kvtier_core::cache::SaltUsage) -> u64| tier.usage.as_ref().map_or(0, count);
    json!({
        "limit_bytes": tier.grant.limit,
        "reserved_bytes": tier.grant.reserved,
        "enforced": tier.place.isolates,
        "usage_bytes": tier.bytes,
        "objects": count(|usage| usage.objects),
        "over_quota": tier.usage.as_ref().is_some_and(|usage| usage.over_quota),
        "refused_over_quota": count(|usage| usage.over_quota_total),
        "refused_no_room": count(|usage| usage.refused_total),
        "evicted_objects": count(|usage| usage.evicted_objects_total),
        "evicted_bytes": count(|usage| usage.evicted_bytes_total),
    })
}

/// Where LMCache sends whoever asks with a slash at the end.
async fn without_slash(OriginalUri(uri): OriginalUri) -> Response {
    let path = uri.path().trim_end_matches('/');
    let query = uri
        .query()
        .map_or(String::new(), |query| format!("?{query}"));
    let place = [(header::LOCATION, format!("{path}{query}"))];
    (StatusCode::TEMPORARY_REDIRECT, place).into_response()
}
