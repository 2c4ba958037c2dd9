//! Routes about single objects of L1 and of the tiers: lists and deletions.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use axum::http::StatusCode;
use axum::{Extension, extract};
use kvtier_core::ObjectKey;
use kvtier_core::object_key::{EncodedObjectKey, ForeignKey};
use kvtier_l2::ErrorKind;
use kvtier_l2::tier::{Deleted, Tier};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::audit::{Audited, Begun, audited};
use super::body::{TierName, required};
use super::payload::Payload;
use super::query::Query;
use super::quota_body::clip;
use super::{ApiError, ApiState, DetailBody, JsonAnswer, detail, engine, run_blocking, run_change};
use kvtier_common::error::Error;
use kvtier_engine::Engine;
use kvtier_store::tiers::{Cursor, L2};

/// Most keys of one deletion.
const MAX_KEYS: usize = 10_000;

/// Keys that a tier is asked to delete at once.
const DELETE_SLICE: usize = 1000;

/// Name of L1 where an adapter is named.
const L1: &str = "l1";

/// The tiers below L1.
fn tiers(engine: &Engine) -> Result<&Arc<L2>, ApiError> {
    let none = || detail(StatusCode::SERVICE_UNAVAILABLE, "no L2 adapters configured");
    engine.l2().ok_or_else(none)
}

/// The tier that is called so, or the first one of that type.
fn named(l2: &L2, name: &str) -> Result<usize, ApiError> {
    let tiers = l2.tiers();
    let by_name = tiers.iter().position(|tier| tier.name() == name);
    by_name
        .or_else(|| tiers.iter().position(|tier| tier.adapter().kind() == name))
        .ok_or_else(|| {
            let text = format!("no L2 adapter with type_name='{}'", clip(name));
            detail(StatusCode::NOT_FOUND, text)
        })
}

/// The tiers below L1.
#[derive(Serialize, ToSchema)]
pub(super) struct Adapters {
    /// One entry per tier, in the order in which they are asked.
    adapters: Vec<AdapterEntry>,
}

/// A tier.
#[derive(Serialize, ToSchema)]
struct AdapterEntry {
    /// Position of the tier.
    index: usize,
    /// Type of the tier in the configuration, such as `fs`.
    type_name: &'static str,
    /// Name of the tier, such as `fs-0`.
    name: String,
    /// Always `l2`.
    tier: &'static str,
    /// Whether it is asked first.
    primary: bool,
    /// Always `false`.
    reconfigurable: bool,
}

/// The adapters of the tiers below L1, in their order; the first one is asked first.
#[utoipa::path(get, path = "/config/adapters", responses(
    (status = 200, description = "The adapters; none without tiers", body = Adapters),
    (status = 503, description = "The engine is not there yet", body = DetailBody),
))]
pub(super) async fn adapters(api: ApiState) -> Result<JsonAnswer<Adapters>, ApiError> {
    let l2 = engine(&api)?.l2();
    let adapters = l2.iter().flat_map(|l2| l2.tiers()).enumerate();
    let adapters = adapters.map(|(index, tier)| AdapterEntry {
        index,
        type_name: tier.adapter().kind(),
        name: tier.name().to_owned(),
        tier: "l2",
        primary: index == 0,
        reconfigurable: false,
    });
    Ok(JsonAnswer(Adapters {
        adapters: adapters.collect(),
    }))
}

/// A page of the objects of a tier.
#[derive(Serialize, ToSchema)]
pub(super) struct ObjectPage {
    /// Type of the tier, or `l1`.
    adapter: &'static str,
    /// Name of the tier, or `l1`.
    name: String,
    /// Whether other servers use the tier too.
    shared: bool,
    /// The objects.
    entries: Vec<ObjectEntry>,
    /// Token of the next page; `null` at the end.
    next_page_token: Option<String>,
}

/// An object.
#[derive(Serialize, ToSchema)]
struct ObjectEntry {
    /// Key of the object.
    #[schema(value_type = Key)]
    key: EncodedObjectKey,
    /// Size of the object there, bytes.
    size_bytes: u64,
    /// Readers of the object; only in L1.
    #[serde(skip_serializing_if = "Option::is_none")]
    leases: Option<u32>,
    /// Last use or write of the object as far as the tier knows, seconds since 1970; only below L1.
    #[serde(skip_serializing_if = "Option::is_none")]
    used_at: Option<u64>,
}

/// The objects of one tier or of L1, some at a time, in no particular order.
#[utoipa::path(get, path = "/cache/objects",
    params(
        ("tier" = Option<String>, Query, description = "`l2` (default) or `l1`"),
        ("adapter" = Option<String>, Query, description = "Type or name of the tier, such as `fs` or `fs-0`; the first one by default"),
        ("model_name" = Option<String>, Query, description = "Only objects of this model"),
        ("page_size" = Option<i64>, Query, description = "Most objects of the answer, 1 to 5000; 500 by default"),
        ("page_token" = Option<String>, Query, description = "`next_page_token` of the answer before"),
    ),
    responses(
        (status = 200, description = "A page, which may have fewer objects than asked for and yet a next one", body = ObjectPage),
        (status = 400, description = "That tier cannot be listed, or the token is not of this listing", body = DetailBody),
        (status = 404, description = "There is no such adapter", body = DetailBody),
        (status = 422, description = "A parameter is not allowed", body = DetailBody),
        (status = 503, description = "There are no adapters, or the adapter cannot be listed", body = DetailBody),
    ))]
pub(super) async fn list(
    api: ApiState,
    extract::Query(query): extract::Query<HashMap<String, String>>,
) -> Result<JsonAnswer<ObjectPage>, ApiError> {
    let query = Query(query);
    let tier = query.one_of("tier", &TierName::ALL, "l2")?;
    let most = query.int("page_size", 1..=5000, 500)?;
    let most = usize::try_from(most).unwrap_or_default();
    let engine = Arc::clone(engine(&api)?);
    let model = query.text("model_name").map(str::to_owned);
    let token = query.text("page_token");
    match tier {
        "l1" => {
            let from = token.map(|token| read_token(L1, token)).transpose()?;
            run_blocking(move || list_l1(&engine, from, model.as_deref(), most)).await?
        }
        "l2" => {
            let l2 = tiers(&engine)?;
            let number = query
                .text("adapter")
                .map_or(Ok(0), |name| named(l2, name))?;
            let tier = Arc::clone(&l2.tiers()[number]);
            let from = token.map(|token| read_token(tier.name(), token));
            list_tier(l2, number, tier, from.transpose()?, model, most).await
        }
        _ => Err(detail(
            StatusCode::BAD_REQUEST,
            format!("tier '{tier}' not supported; only 'l2' and 'l1'"),
        )),
    }
    .map(JsonAnswer)
}

fn list_l1(
    engine: &Engine,
    from: Option<Cursor>,
    model: Option<&str>,
    most: usize,
) -> Result<ObjectPage, ApiError> {
    let from = match from.and_then(|from| from.position) {
        Some(position) => position.parse().map_err(|_| bad_token(&position))?,
        None => 0,
    };
    let (objects, next) = engine.admin().list_objects(from, model, most);
    let entries = objects.into_iter().map(|object| {
        let key = EncodedObjectKey {
            chunk_hash_hex: hex::encode(object.chunk_hash.as_bytes()),
            model_name: object.namespace.model_name().to_string(),
            kv_rank: object.namespace.kv_rank(),
            object_group_id: object.namespace.object_group_id(),
            cache_salt: object.namespace.cache_salt().to_string(),
        };
        ObjectEntry {
            key,
            size_bytes: object.bytes,
            leases: Some(object.leases),
            used_at: None,
        }
    });
    let next = next.map(|next| Cursor {
        position: Some(next.to_string()),
        after: None,
    });
    Ok(ObjectPage {
        adapter: L1,
        name: L1.to_owned(),
        shared: false,
        entries: entries.collect(),
        next_page_token: next.map(|next| token(L1, &next)),
    })
}

async fn list_tier(
    l2: &L2,
    number: usize,
    tier: Arc<Tier>,
    from: Option<Cursor>,
    model: Option<String>,
    most: usize,
) -> Result<ObjectPage, ApiError> {
    let kind = tier.adapter().kind();
    if !tier.adapter().capabilities().list {
        let text = format!("L2 adapter '{kind}' does not support listing: it keeps no names");
        return Err(detail(StatusCode::SERVICE_UNAVAILABLE, text));
    }
    let continued = from.is_some();
    let page = l2
        .list(number, from.unwrap_or_default(), model, most)
        .await
        .map_err(|error| match error.kind() {
            ErrorKind::Refused if continued => bad_token(&error.to_string()),
            _ => detail(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("L2 adapter '{}' cannot be listed: {error}", tier.name()),
            ),
        })?;
    let entries = page.objects.iter().map(|object| ObjectEntry {
        key: EncodedObjectKey::from(object.key.text()),
        size_bytes: object.bytes,
        leases: None,
        used_at: Some(object.used_at),
    });
    let config = l2.config();
    let config = config.adapters.get(number);
    Ok(ObjectPage {
        adapter: kind,
        name: tier.name().to_owned(),
        shared: config.is_some_and(|adapter| adapter.shared),
        entries: entries.collect(),
        next_page_token: page.next.map(|next| token(tier.name(), &next)),
    })
}

/// Position at which a listing goes on, as a text for its client.
fn token(name: &str, cursor: &Cursor) -> String {
    hex::encode(json!([name, cursor.position, cursor.after]).to_string())
}

fn read_token(name: &str, token: &str) -> Result<Cursor, ApiError> {
    let read = || {
        let (listing, position, after): (String, Option<String>, Option<String>) =
            serde_json::from_slice(&hex::decode(token).ok()?).ok()?;
        (listing == name).then_some(Cursor { position, after })
    };
    read().ok_or_else(|| bad_token(token))
}

fn bad_token(what: &str) -> ApiError {
    let text = format!("page_token is not one that this listing gave (got '{what}')");
    detail(StatusCode::BAD_REQUEST, text)
}

/// Objects to delete.
#[derive(Deserialize, ToSchema)]
struct Deletion {
    /// At most 10,000 keys.
    keys: Vec<Key>,
    /// `l1`, `l2` (default) or `all`.
    #[serde(default = "TierName::l2")]
    #[schema(value_type = Option<String>)]
    tier: TierName,
    /// Whether objects that are being read are deleted too; `false` by default.
    force: Option<bool>,
    /// Type or name of the tier; every tier by default.
    adapter: Option<String>,
}

/// Key of an object, as `GET /cache/objects` has it.
#[derive(Deserialize, ToSchema)]
#[serde(expecting = "an object")]
struct Key {
    /// Hash of the chunk in hexadecimal digits.
    chunk_hash_hex: String,
    /// The model.
    model_name: String,
    /// World size and rank, packed.
    #[schema(minimum = 0)]
    kv_rank: i64,
    /// The object group; 0 by default.
    object_group_id: Option<i64>,
    /// The tenant; none by default.
    cache_salt: Option<String>,
}

impl Key {
    /// The key of one of our objects; `None` for a hash of another length, since no object has it.
    fn decode(self) -> Result<Option<ObjectKey>, Error> {
        let (rank, group) = (self.kv_rank, self.object_group_id.unwrap_or(0));
        let range = |name, allowed, value| {
            Error::refused(format!("{name} must be {allowed} (got {value})"))
        };
        let key = ForeignKey::try_from(EncodedObjectKey {
            chunk_hash_hex: self.chunk_hash_hex,
            model_name: self.model_name,
            kv_rank: u64::try_from(rank).map_err(|_| range("kv_rank", "at least 0", rank))?,
            object_group_id: u32::try_from(group)
                .map_err(|_| range("object_group_id", "between 0 and 4294967295", group))?,
            cache_salt: self.cache_salt.unwrap_or_default(),
        });
        Ok(ObjectKey::try_from(key.map_err(Error::refused)?).ok())
    }
}

/// Result of a deletion.
#[derive(Default, Serialize, ToSchema)]
#[schema(as = Outcome)]
pub(super) struct DeleteOutcome {
    /// Objects that were there and were removed, once per tier.
    deleted: usize,
    /// Objects that stayed because they are being read.
    skipped: usize,
    /// Whether no tier failed.
    ok: bool,
    /// Outcome by tier.
    by_tier: BTreeMap<String, TierOutcome>,
    /// The first failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Result of a deletion in one tier.
#[derive(Default, Serialize, ToSchema)]
struct TierOutcome {
    /// Objects that were there and were removed.
    deleted: usize,
    /// Objects that stayed because they are being read.
    skipped: usize,
    /// Objects that the tier failed to delete.
    failed: usize,
}

/// Deletes objects from L1, from the tiers or from both.
///
/// Without `adapter` they are deleted in every tier.
#[utoipa::path(delete, path = "/cache/objects", request_body = Deletion, responses(
    (status = 200, description = "Deleted, but for objects that are being read; a tier may have failed", body = DeleteOutcome),
    (status = 400, description = "A key that no object can have, or too many of them; nothing was deleted", body = DetailBody),
    (status = 404, description = "There is no such adapter", body = DetailBody),
    (status = 422, description = "Body of the wrong shape", body = DetailBody),
    (status = 503, description = "There are no adapters; nothing was deleted", body = DetailBody),
))]
pub(super) async fn delete(
    api: ApiState,
    Extension(begun): Extension<Begun>,
    body: Payload,
) -> Result<Audited<DeleteOutcome>, ApiError> {
    let engine = Arc::clone(engine(&api)?);
    let read = body.read(|bytes| {
        let mut request: Deletion = required(bytes)?;
        let keys = keys(std::mem::take(&mut request.keys))?;
        Ok::<_, ApiError>((request, Arc::new(keys)))
    });
    let (request, keys) = read.await??;
    let (tier, force) = (request.tier.0, request.force.unwrap_or(false));
    // Before anything is deleted.
    let in_tiers: Vec<_> = match &request.adapter {
        _ if tier == "l1" => Vec::new(),
        None => (0..tiers(&engine)?.tiers().len()).collect(),
        Some(name) => vec![named(tiers(&engine)?, name)?],
    };
    let did = format!("{} keys in {tier}, force {force}", keys.len());
    begun.set(&did);
    let outcome = run_change(async move {
        let mut outcome = DeleteOutcome::default();
        if tier != "l2" {
            let (engine, keys) = (Arc::clone(&engine), Arc::clone(&keys));
            let removed = run_blocking(move || engine.admin().delete_objects(&keys, force)).await?;
            let counts = TierOutcome {
                deleted: removed.objects,
                skipped: removed.kept,
                failed: 0,
            };
            outcome.add(L1, counts);
        }
        for tier in in_tiers {
            outcome.delete(tiers(&engine)?, tier, &keys, force).await?;
        }
        outcome.ok = outcome.error.is_none();
        Ok::<_, ApiError>(outcome)
    });
    let outcome = outcome.await??;
    let did = format!("{did}: {}", json!(outcome.by_tier));
    Ok(audited(did, outcome))
}

/// Checks and decodes the keys of a deletion.
fn keys(keys: Vec<Key>) -> Result<Vec<ObjectKey>, ApiError> {
    let bad = |text| detail(StatusCode::BAD_REQUEST, text);
    if keys.len() > MAX_KEYS {
        let got = keys.len();
        let text = format!("too many keys in a single request (limit={MAX_KEYS}, got={got})");
        return Err(bad(text));
    }
    let keys = keys.into_iter().enumerate().map(|(index, key)| {
        let key = key.decode();
        key.map_err(|error| bad(format!("keys[{index}]: {error}")))
    });
    let keys: Vec<_> = keys.collect::<Result<_, _>>()?;
    Ok(keys.into_iter().flatten().collect())
}

impl DeleteOutcome {
    fn add(&mut self, name: &str, counts: TierOutcome) {
        self.deleted += counts.deleted;
        self.skipped += counts.skipped;
        self.by_tier.insert(name.to_owned(), counts);
    }

    async fn delete(
        &mut self,
        l2: &L2,
        number: usize,
        keys: &[ObjectKey],
        force: bool,
    ) -> Result<(), ApiError> {
        let mut counts = TierOutcome::default();
        let tier = &l2.tiers()[number];
        for slice in keys.chunks(DELETE_SLICE) {
            let results = l2.delete(number, slice.to_vec(), force).await;
            for result in results
                .map_err(|error| detail(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?
            {
                match result {
                    Ok(Deleted::Removed) => counts.deleted += 1,
                    Ok(Deleted::Kept) => counts.skipped += 1,
                    Ok(Deleted::Absent) => {}
                    Err(error) => {
                        counts.failed += 1;
                        let text = || format!("{}: {error}", tier.name());
                        self.error.get_or_insert_with(text);
                    }
                }
            }
        }
        self.add(tier.name(), counts);
        Ok(())
    }
}
