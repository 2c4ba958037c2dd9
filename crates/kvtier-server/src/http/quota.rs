//! Routes about what tenants may have: LMCache's, with more to tell and stricter about which tenants there can be.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{self, OriginalUri, Path};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use kvtier_core::cache::SaltUsage;
use kvtier_core::object_key::check_cache_salt;
use serde_json::{Map, Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::audit::{Told, told};
use super::payload::Payload;
use super::query::Query;
use super::quota_body::{Wanted, clip, gib, parse_many};
use super::{Api, ApiError, State, apart};
use kvtier_config::Limit;
use kvtier_engine::Engine;
use kvtier_error::ErrorKind;
use kvtier_tenants::{Changes, Entry, InTier, Look};

/// How the tenant without a salt is called in paths and answers.
const DEFAULT: &str = "_default";

/// How the one is called whose salt is really that. No salt has an `@`.
const CALLED_DEFAULT: &str = "@_default";

/// Largest body of `PUT /quota`, bytes: more than 300 for each of 100,000 tenants.
const BODY_LIMIT: usize = 32 << 20;

/// The routes; the older design has the same below `/api`.
pub(super) fn quota_routes() -> OpenApiRouter<Arc<Api>> {
    let routes = || {
        OpenApiRouter::new()
            .routes(routes!(list, put_all))
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
    // LMCache has no route for it.
    if name.contains('/') {
        return Err(ApiError::Detail(StatusCode::NOT_FOUND, "Not Found".into()));
    }
    tenant(engine(api)?, &name).map_err(bad)
}

/// The tenant that a path or a body names.
fn tenant(engine: &Engine, name: &str) -> Result<String, String> {
    let salt = match name {
        DEFAULT => return Ok(String::new()),
        CALLED_DEFAULT => DEFAULT,
        "" => {
            return Err(format!(
                "cache_salt: give {DEFAULT} for requests without one"
            ));
        }
        name => {
            check_cache_salt(name).map_err(|error| error.to_string())?;
            name
        }
    };
    Ok(engine.salts().of_operator(salt).into_owned())
}

fn shown(salt: &str) -> &str {
    match salt {
        "" => DEFAULT,
        DEFAULT => CALLED_DEFAULT,
        salt => salt,
    }
}

/// Makes changes, all or none; says how many of the entries were there before.
async fn change(api: &State, changes: Changes, what: &'static str) -> Result<usize, ApiError> {
    let quotas = Arc::clone(engine(api)?.quotas());
    let outcome = apart(move || {
        let salts: Vec<_> = changes.iter().map(|(salt, _)| Arc::clone(salt)).collect();
        let outcome = quotas.change_all(changes);
        if outcome.is_ok() {
            let (persisted, tenants) = (quotas.is_persistent(), quotas.table().len());
            tracing::info!(persisted, tenants, changed = salts.len(), "{what}");
            for salt in salts {
                tracing::debug!(%salt, "{what}");
            }
        }
        outcome
    });
    outcome.await?.map_err(|refused| {
        let status = match refused.kind() {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        error(status, refused.to_string())
    })
}

/// An answer to a change, and what the audit line says of it. It tells what LMCache's does not have to: that a restart
/// forgets the change.
fn answer(api: &State, did: String, mut answer: Value) -> Result<Told, ApiError> {
    let quotas = engine(api)?.quotas();
    if !quotas.is_persistent() {
        answer["persisted"] = json!(false);
    }
    if !quotas.places().iter().any(|place| place.isolates) {
        answer["enforced"] = json!(false);
    }
    Ok(told(did, answer))
}

/// Sets what many tenants may have, each in place of what it might have before: all of them, or none.
///
/// Body: what `GET /quota` answers, `{"users": {"alice": {"limit_gb": 1.5}}}`, with `reserved_gb` and `tiers` as for one
/// tenant. Tenants that are not named keep what they have.
#[utoipa::path(put, path = "/quota", request_body = Value, responses(
    (status = 200, description = "Set, and how many", body = Value),
    (status = 400, description = "What is not allowed, with the tenant and the key; nothing was changed", body = Value),
    (status = 413, description = "The body is too large", body = String),
    (status = 500, description = "The file could not be written; nothing was changed", body = Value),
    (status = 503, description = "The engine is not there yet", body = Value),
))]
async fn put_all(api: State, body: Payload<BODY_LIMIT>) -> Result<Told, ApiError> {
    let engine = Arc::clone(engine(&api)?);
    let changes = body.read(move |bytes| changes(&engine, bytes));
    let changes = changes.await?.map_err(bad)?;
    let set = changes.len();
    change(&api, changes, "tenants' quotas were set").await?;
    let did = format!("{set} quotas set");
    answer(&api, did, json!({ "set": set, "status": "ok" }))
}

/// The changes of a body for many tenants.
fn changes(engine: &Engine, bytes: &[u8]) -> Result<Changes, String> {
    let quotas = engine.quotas();
    let mut named: BTreeMap<Arc<str>, Entry> = BTreeMap::new();
    for (name, entry) in parse_many(bytes, quotas.places())? {
        let told = |what: String| format!("users.{}: {what}", clip(&name));
        let salt = tenant(engine, &name).map_err(told)?;
        quotas
            .check(&entry)
            .map_err(|error| told(error.to_string()))?;
        // A salt, and its hash.
        if named.insert(salt.into(), entry).is_some() {
            return Err(told("this tenant is there twice, under two names".into()));
        }
    }
    let some = |(salt, entry)| (salt, Some(entry));
    Ok(named.into_iter().map(some).collect())
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
    body: Payload,
) -> Result<Told, ApiError> {
    let salt = salt(&api, path)?;
    let engine = Arc::clone(engine(&api)?);
    let wanted = body.read(move |bytes| Wanted::parse(bytes, engine.quotas().places()));
    let Wanted { entry, limit_gb } = wanted.await?.map_err(bad)?;
    let did =
        serde_json::to_string(&entry).map_or_else(|_| "set".into(), |set| format!("set to {set}"));
    let changes = vec![(salt.as_str().into(), Some(entry))];
    change(&api, changes, "a tenant's quota was set").await?;
    let told = json!({ "cache_salt": shown(&salt), "limit_gb": limit_gb, "status": "ok" });
    answer(&api, did, told)
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
async fn delete(api: State, path: Result<Path<String>, PathRejection>) -> Result<Told, ApiError> {
    let salt = salt(&api, path)?;
    let changes = vec![(salt.as_str().into(), None)];
    let status = match change(&api, changes, "a tenant's quota was removed").await? {
        0 => "not_found",
        _ => "removed",
    };
    let told = json!({ "cache_salt": shown(&salt), "status": status });
    answer(&api, status.to_owned(), told)
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

/// `page_size` of these tenants, in full; without a size all of them, in brief.
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
    let tiers = look.tenant(salt);
    let mut told = head(look, salt, &tiers);
    let own = |tier: &InTier<'_>| {
        let own = own(look, salt, tier);
        (!own.is_empty()).then(|| (tier.place.name.to_string(), Value::Object(own)))
    };
    let own: Map<_, _> = tiers.iter().filter_map(own).collect();
    if !own.is_empty() {
        told.insert("tiers".into(), Value::Object(own));
    }
    // Or its limit of 0 would be taken for one.
    if look.table().get(salt).is_none() {
        told.insert("exists".into(), json!(false));
    }
    told
}

/// What a tenant was granted for one tier alone, as it is set.
fn own(look: &Look<'_>, salt: &str, tier: &InTier<'_>) -> Map<String, Value> {
    let entry = look.table().get(salt);
    let own = entry.and_then(|entry| entry.tiers.get(&*tier.place.name));
    let Some(own) = own else { return Map::new() };
    let limit = own.limit.map(|limit| ("limit_gb".into(), limit_gb(limit)));
    let reserved = own
        .reserved
        .map(|bytes| ("reserved_gb".into(), json!(gib(bytes))));
    limit.into_iter().chain(reserved).collect()
}

fn limit_gb(limit: Limit) -> Value {
    limit
        .0
        .map_or_else(|| json!("unlimited"), |bytes| json!(gib(bytes)))
}

fn head(look: &Look<'_>, salt: &str, tiers: &[InTier<'_>]) -> Map<String, Value> {
    let entry = look.table().get(salt);
    let below: u64 = tiers.iter().skip(1).map(|tier| tier.bytes).sum();
    let limit = entry.map_or_else(|| json!(0.0), |entry| limit_gb(entry.limit));
    let mut told = Map::from_iter([
        ("limit_gb".to_owned(), limit),
        ("current_usage_gb".to_owned(), json!(gib(below))),
    ]);
    // So that what a listing has can be set again.
    if let Some(entry) = entry.filter(|entry| entry.reserved > 0) {
        told.insert("reserved_gb".into(), json!(gib(entry.reserved)));
    }
    told
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
        let mut here = own(look, salt, tier);
        here.extend(in_tier(tier));
        by_tier.insert(tier.place.name.to_string(), Value::Object(here));
    }
    told.insert("tiers".into(), Value::Object(by_tier));
    told.insert("requested_chunks".into(), json!(requested));
    told.insert("hit_chunks".into(), json!(hit));
    let rate = (requested > 0).then(|| hit as f64 / requested as f64);
    told.insert("hit_rate".into(), json!(rate));
    told
}

fn in_tier(tier: &InTier<'_>) -> [(String, Value); 10] {
    let count = |count: fn(&SaltUsage) -> u64| json!(tier.usage.as_ref().map_or(0, count));
    let is_over = tier.usage.as_ref().is_some_and(|usage| usage.over_quota);
    [
        ("limit_bytes", json!(tier.grant.limit)),
        ("reserved_bytes", json!(tier.grant.reserved)),
        ("enforced", json!(tier.place.isolates)),
        ("usage_bytes", json!(tier.bytes)),
        ("objects", count(|usage| usage.objects)),
        ("over_quota", json!(is_over)),
        ("refused_over_quota", count(|usage| usage.over_quota_total)),
        ("refused_no_room", count(|usage| usage.refused_total)),
        (
            "evicted_objects",
            count(|usage| usage.evicted_objects_total),
        ),
        ("evicted_bytes", count(|usage| usage.evicted_bytes_total)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
}

/// Redirect of LMCache for a path with a slash at its end.
async fn without_slash(OriginalUri(uri): OriginalUri) -> Response {
    let path = uri.path().trim_end_matches('/');
    let query = uri
        .query()
        .map_or(String::new(), |query| format!("?{query}"));
    let place = [(header::LOCATION, format!("{path}{query}"))];
    (StatusCode::TEMPORARY_REDIRECT, place).into_response()
}
