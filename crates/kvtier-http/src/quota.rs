//! Routes about quotas of tenants: LMCache's, with more fields, and stricter about the names of tenants.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use axum::Extension;
use axum::extract::rejection::PathRejection;
use axum::extract::{self, Path};
use axum::http::StatusCode;
use kvtier_core::cache::SaltUsage;
use kvtier_core::object_key::check_cache_salt;
use kvtier_observe::api::{
    Activity, NewQuota, NewTierQuota, QuotaChange, Tenant, TenantInTier, TenantPage, TierUsage,
};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::access::Role;
use super::audit::{Audited, audited};
use super::payload::Payload;
use super::query::Query;
use super::quota_body::{Wanted, clip, gib, parse_many};
use super::{
    Api, ApiError, ApiState, DetailBody, ErrorBody, JsonAnswer, NO_ENGINE, detail, error,
    run_blocking, status_of,
};
use kvtier_common::error::Error;
use kvtier_config::Limit;
use kvtier_engine::Engine;
use kvtier_store::tenants::{Changes, InTier, Look, TenantEntry};

/// How the tenant without a salt is called in paths and answers.
const DEFAULT: &str = "_default";

/// How the one is called whose salt is really that. No salt has an `@`.
const CALLED_DEFAULT: &str = "@_default";

/// Largest body of `PUT /quota`, bytes: more than 300 for each of 100,000 tenants.
const BODY_LIMIT: usize = 32 << 20;

/// The routes.
pub(super) fn quota_routes() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::new()
        .routes(routes!(list, put_all))
        .routes(routes!(get, put, delete))
}

fn failure(failed: Error) -> ApiError {
    error(status_of(failed.kind()), failed.to_string())
}

fn engine(api: &ApiState) -> Result<&Arc<Engine>, ApiError> {
    let none = || error(StatusCode::SERVICE_UNAVAILABLE, NO_ENGINE);
    api.engine.get().ok_or_else(none)
}

/// The tenant that a path names.
fn salt(
    api: &ApiState,
    role: Role,
    path: Result<Path<String>, PathRejection>,
) -> Result<String, ApiError> {
    let Path(name) = path.map_err(|_| failure(Error::refused("cache_salt: it is not UTF-8")))?;
    // LMCache has no route for it.
    if name.contains('/') {
        return Err(detail(StatusCode::NOT_FOUND, "Not Found"));
    }
    tenant(engine(api)?, role, &name).map_err(failure)
}

/// The tenant that a path or a body names.
fn tenant(engine: &Engine, role: Role, name: &str) -> Result<String, Error> {
    let salt = match name {
        DEFAULT => return Ok(String::new()),
        "" => {
            return Err(Error::refused(format!(
                "cache_salt: give {DEFAULT} for requests without one"
            )));
        }
        name => engine.salts().names.salt(name),
    };
    check_cache_salt(&salt).map_err(Error::refused)?;
    let salt = match role {
        Role::Read => engine.salts().of_reader(&salt)?,
        Role::Admin => engine.salts().of_operator(&salt),
    };
    Ok(salt.into_owned())
}

/// The tenant in paths and answers.
pub(super) fn shown<'a>(engine: &Engine, salt: &'a str) -> Cow<'a, str> {
    match salt {
        "" => DEFAULT.into(),
        DEFAULT => CALLED_DEFAULT.into(),
        salt => engine.salts().names.name(salt),
    }
}

/// Makes changes, all or none; says how many of the entries were there before.
async fn change(api: &ApiState, changes: Changes, what: &'static str) -> Result<usize, ApiError> {
    let engine = engine(api)?;
    let names = &engine.salts().names;
    let mut set = changes.iter().filter(|(_, entry)| entry.is_some());
    if let Some((salt, _)) = set.find(|(salt, _)| names.has_prefix_twice(salt)) {
        return Err(failure(Error::refused(format!(
            "cache_salt: {} has the --tenant-prefix; allowed: the name behind it",
            names.name(salt)
        ))));
    }
    let quotas = Arc::clone(engine.quotas());
    let outcome = run_blocking(move || {
        let salts: Vec<_> = changes.iter().map(|(salt, _)| Arc::clone(salt)).collect();
        let is_set = changes.iter().any(|(_, entry)| entry.is_some());
        let outcome = quotas.change_all(changes);
        let is_changed = |existed: &usize| is_set || *existed > 0;
        if outcome.as_ref().is_ok_and(is_changed) {
            let (persisted, tenants) = (quotas.is_persistent(), quotas.table().len());
            tracing::info!(persisted, tenants, changed = salts.len(), "{what}");
            for salt in salts {
                tracing::debug!(%salt, "{what}");
            }
        }
        outcome
    });
    outcome.await?.map_err(failure)
}

/// The answer to a change, with its audit line. Beyond LMCache's it reports a change that a restart loses, or that has no
/// effect.
fn changed(
    api: &ApiState,
    did: String,
    mut change: QuotaChange,
) -> Result<Audited<QuotaChange>, ApiError> {
    let quotas = engine(api)?.quotas();
    let is_enforced = quotas.places().iter().any(|place| place.isolates);
    change.persisted = (!quotas.is_persistent()).then_some(false);
    change.enforced = (!is_enforced).then_some(false);
    Ok(audited(did, change))
}

/// Sets the quotas of many tenants, replacing the previous ones: all of them, or none.
///
/// The body has the form of the answer of `GET /quota`: quotas by tenant in `users`. Fields that only a listing has are
/// ignored, and so are tenants that do not exist. Tenants that are not named keep their quotas.
#[utoipa::path(put, path = "/quota", request_body = HashMap<String, HashMap<String, NewQuota>>, responses(
    (status = 200, description = "Set", body = QuotaChange),
    (status = 400, description = "A value is not allowed; names the tenant and the key; nothing was changed", body = ErrorBody),
    (status = 413, description = "The body is too large", body = DetailBody),
    (status = 500, description = "The file could not be written; nothing was changed", body = ErrorBody),
    (status = 503, description = "The engine is not there yet", body = ErrorBody),
))]
async fn put_all(
    api: ApiState,
    body: Payload<BODY_LIMIT>,
) -> Result<Audited<QuotaChange>, ApiError> {
    let engine = Arc::clone(engine(&api)?);
    let changes = body.read(move |bytes| changes(&engine, bytes));
    let changes = changes.await?.map_err(failure)?;
    let set = changes.len();
    change(&api, changes, "tenants' quotas were set").await?;
    let answer = QuotaChange {
        set: Some(set),
        status: "ok".into(),
        ..QuotaChange::default()
    };
    changed(&api, format!("{set} quotas set"), answer)
}

/// The changes of a body for many tenants.
fn changes(engine: &Engine, bytes: &[u8]) -> Result<Changes, Error> {
    let quotas = engine.quotas();
    let mut named: BTreeMap<Arc<str>, TenantEntry> = BTreeMap::new();
    for (name, entry) in parse_many(bytes, quotas.places())? {
        let named_error = |error: Error| error.context(format!("users.{}", clip(&name)));
        let salt = tenant(engine, Role::Admin, &name).map_err(named_error)?;
        quotas.check(&entry).map_err(named_error)?;
        // A salt, and its hash.
        if named.insert(salt.into(), entry).is_some() {
            let twice = Error::refused("this tenant is there twice, under two names");
            return Err(named_error(twice));
        }
    }
    let some = |(salt, entry)| (salt, Some(entry));
    Ok(named.into_iter().map(some).collect())
}

/// Sets a tenant's quota, replacing the previous one.
#[utoipa::path(put, path = "/quota/{salt}", request_body = NewQuota,
    params(("salt" = String, Path, description = "The cache salt; `_default` for requests without")),
    responses(
        (status = 200, description = "Set", body = QuotaChange),
        (status = 400, description = "No tenant can have this salt, or the body is not allowed", body = ErrorBody),
        (status = 500, description = "The file could not be written; nothing was changed", body = ErrorBody),
        (status = 503, description = "The engine is not there yet", body = ErrorBody),
    ))]
async fn put(
    api: ApiState,
    path: Result<Path<String>, PathRejection>,
    body: Payload,
) -> Result<Audited<QuotaChange>, ApiError> {
    let salt = salt(&api, Role::Admin, path)?;
    let places = Arc::clone(engine(&api)?);
    let wanted = body.read(move |bytes| Wanted::parse(bytes, places.quotas().places()));
    let Wanted { entry, limit_gb } = wanted.await?.map_err(failure)?;
    let did =
        serde_json::to_string(&entry).map_or_else(|_| "set".into(), |set| format!("set to {set}"));
    let changes = vec![(salt.as_str().into(), Some(entry))];
    change(&api, changes, "a tenant's quota was set").await?;
    let answer = QuotaChange {
        cache_salt: Some(shown(engine(&api)?, &salt).into_owned()),
        limit_gb: Some(limit_gb),
        status: "ok".into(),
        ..QuotaChange::default()
    };
    changed(&api, did, answer)
}

/// Removes a tenant's quota, so that the default applies.
#[utoipa::path(delete, path = "/quota/{salt}",
    params(("salt" = String, Path, description = "The cache salt; `_default` for requests without")),
    responses(
        (status = 200, description = "`removed`, or `not_found`", body = QuotaChange),
        (status = 400, description = "No tenant can have this salt", body = ErrorBody),
        (status = 500, description = "The file could not be written; nothing was changed", body = ErrorBody),
        (status = 503, description = "The engine is not there yet", body = ErrorBody),
    ))]
async fn delete(
    api: ApiState,
    path: Result<Path<String>, PathRejection>,
) -> Result<Audited<QuotaChange>, ApiError> {
    let salt = salt(&api, Role::Admin, path)?;
    let changes = vec![(salt.as_str().into(), None)];
    let status = match change(&api, changes, "a tenant's quota was removed").await? {
        0 => "not_found",
        _ => "removed",
    };
    let answer = QuotaChange {
        cache_salt: Some(shown(engine(&api)?, &salt).into_owned()),
        status: status.to_owned(),
        ..QuotaChange::default()
    };
    changed(&api, status.to_owned(), answer)
}

/// Usage and limits of any tenant that there can be; `exists` is whether it has a quota.
#[utoipa::path(get, path = "/quota/{salt}",
    params(("salt" = String, Path, description = "The cache salt; `_default` for requests without")),
    responses(
        (status = 200, description = "The tenant", body = Tenant),
        (status = 400, description = "No tenant can have this salt", body = ErrorBody),
        (status = 503, description = "The engine is not there yet", body = ErrorBody),
    ))]
async fn get(
    api: ApiState,
    Extension(role): Extension<Role>,
    path: Result<Path<String>, PathRejection>,
) -> Result<JsonAnswer<Tenant>, ApiError> {
    let salt = salt(&api, role, path)?;
    let engine = Arc::clone(engine(&api)?);
    let tenant = run_blocking(move || Tenant {
        cache_salt: Some(shown(&engine, &salt).into_owned()),
        persisted: Some(engine.quotas().is_persistent()),
        ..whole(&engine.quotas().look(), &salt)
    });
    tenant.await.map(JsonAnswer)
}

/// The tenants that have a quota.
///
/// Without parameters as LMCache answers, all of them. Pages have all fields of `GET /quota/{salt}` for each tenant.
#[utoipa::path(get, path = "/quota",
    params(
        ("page_size" = Option<i64>, Query, description = "Most tenants of the answer, 1 to 5000; without, all"),
        ("page_token" = Option<String>, Query, description = "`next_page_token` of the answer before"),
        ("all" = Option<bool>, Query, description = "`true`: also tenants that have objects and no quota; `false` by default"),
    ),
    responses(
        (status = 200, description = "The tenants", body = TenantPage),
        (status = 400, description = "The token is not of this listing", body = ErrorBody),
        (status = 422, description = "A parameter is not allowed", body = DetailBody),
        (status = 503, description = "The engine is not there yet", body = ErrorBody),
    ))]
async fn list(
    api: ApiState,
    extract::Query(query): extract::Query<HashMap<String, String>>,
) -> Result<JsonAnswer<TenantPage>, ApiError> {
    let query = Query(query);
    let page_size = match query.text("page_size") {
        None => None,
        Some(_) => usize::try_from(query.int("page_size", 1..=5000, 0)?).ok(),
    };
    let behind = query.text("page_token").map(read_token).transpose()?;
    let all = query.one_of("all", &["true", "false"], "false")? == "true";
    let engine = Arc::clone(engine(&api)?);
    let page = run_blocking(move || {
        let look = engine.quotas().look();
        let behind = behind.as_deref();
        if all {
            use std::ops::Bound::{Excluded, Unbounded};
            let known = look.known();
            let from = behind.map_or(Unbounded, Excluded);
            page(
                &engine,
                &look,
                known.range::<str, _>((from, Unbounded)),
                page_size,
            )
        } else {
            page(&engine, &look, look.table().behind(behind), page_size)
        }
    });
    page.await.map(JsonAnswer)
}

/// `page_size` of these tenants, in full; without a size all of them, in brief.
fn page<'a>(
    engine: &Engine,
    look: &Look<'_>,
    mut salts: impl Iterator<Item = &'a Arc<str>>,
    page_size: Option<usize>,
) -> TenantPage {
    let tenant = match page_size {
        None => brief,
        Some(_) => whole,
    };
    let (mut users, mut last) = (BTreeMap::new(), None);
    for salt in salts.by_ref().take(page_size.unwrap_or(usize::MAX)) {
        users.insert(shown(engine, salt).into_owned(), tenant(look, salt));
        last = Some(salt);
    }
    let next_page_token = page_size.map(|_| {
        let last = salts.next().and(last);
        last.map(|salt| token(salt))
    });
    TenantPage {
        users,
        next_page_token,
    }
}

fn token(salt: &str) -> String {
    format!("s{}", hex::encode(salt))
}

fn read_token(token: &str) -> Result<String, ApiError> {
    let salt = token
        .strip_prefix('s')
        .and_then(|hex| hex::decode(hex).ok());
    salt.and_then(|salt| String::from_utf8(salt).ok())
        .ok_or_else(|| failure(Error::refused("page_token: it is not of this listing")))
}

/// LMCache's fields, with the usage of all tiers below L1 together.
fn brief(look: &Look<'_>, salt: &str) -> Tenant {
    let tiers = look.tenant(salt);
    let own = tiers.iter().filter_map(|tier| {
        let own = own(look, salt, tier)?;
        Some((
            tier.place.name.to_string(),
            TenantInTier { own, usage: None },
        ))
    });
    Tenant {
        tiers: own.collect(),
        // Without it the limit of 0 would be mistaken for one.
        exists: look.table().get(salt).is_none().then_some(false),
        ..head(look, salt, &tiers)
    }
}

/// The quota of a tenant for one tier alone, as it is set.
fn own(look: &Look<'_>, salt: &str, tier: &InTier<'_>) -> Option<NewTierQuota> {
    let own = look.table().get(salt)?.tiers.get(&*tier.place.name)?;
    Some(NewTierQuota {
        limit_gb: own.limit.map(limit_gb),
        reserved_gb: own.reserved.map(gib),
    })
}

fn limit_gb(limit: Limit) -> kvtier_observe::api::Limit {
    kvtier_observe::api::Limit::new(limit.0.map(gib))
}

fn head(look: &Look<'_>, salt: &str, tiers: &[InTier<'_>]) -> Tenant {
    let entry = look.table().get(salt);
    let below: u64 = tiers.iter().skip(1).map(|tier| tier.bytes).sum();
    // So that the entries of a listing can be set again.
    let reserved = entry.map_or(0, |entry| entry.reserved);
    Tenant {
        limit_gb: entry.map_or_else(Default::default, |entry| limit_gb(entry.limit)),
        current_usage_gb: gib(below),
        reserved_gb: (reserved > 0).then(|| gib(reserved)),
        ..Tenant::default()
    }
}

/// All fields of a tenant.
pub(super) fn whole(look: &Look<'_>, salt: &str) -> Tenant {
    let tiers = look.tenant(salt);
    let sum = |count: fn(&SaltUsage) -> u64| {
        let usages = tiers.iter().filter_map(|tier| tier.usage.as_ref());
        usages.map(count).sum()
    };
    let requested_chunks: u64 = sum(|usage| usage.requested_chunks_total);
    let hit_chunks: u64 = sum(|usage| usage.hit_chunks_total);
    let by_tier = tiers.iter().map(|tier| {
        let own = own(look, salt, tier).unwrap_or_default();
        let usage = Some(in_tier(tier));
        (tier.place.name.to_string(), TenantInTier { own, usage })
    });
    Tenant {
        exists: Some(look.table().get(salt).is_some()),
        activity: Some(Activity {
            requested_chunks,
            hit_chunks,
            hit_rate: (requested_chunks > 0).then(|| hit_chunks as f64 / requested_chunks as f64),
        }),
        tiers: by_tier.collect(),
        ..head(look, salt, &tiers)
    }
}

fn in_tier(tier: &InTier<'_>) -> TierUsage {
    let count = |count: fn(&SaltUsage) -> u64| tier.usage.as_ref().map_or(0, count);
    TierUsage {
        limit_bytes: tier.grant.limit,
        reserved_bytes: tier.grant.reserved,
        enforced: tier.place.isolates,
        usage_bytes: tier.bytes,
        objects: count(|usage| usage.objects),
        over_quota: tier.usage.as_ref().is_some_and(|usage| usage.over_quota),
        refused_over_quota: count(|usage| usage.over_quota_total),
        refused_no_space: count(|usage| usage.refused_total),
        evicted_objects: count(|usage| usage.evicted_objects_total),
        evicted_bytes: count(|usage| usage.evicted_bytes_total),
    }
}
