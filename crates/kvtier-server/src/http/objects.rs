//! Routes about single objects: which there are, in L1 and in the tiers, and away with them.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract;
use axum::http::StatusCode;
use kvtier_core::ObjectKey;
use kvtier_core::object_key::{EncodedObjectKey, ForeignKey};
use kvtier_l2::ErrorKind;
use kvtier_l2::tier::{Deleted, Tier};
use serde_json::{Map, Value, json};

use super::audit::{Told, told};
use super::body::Body;
use super::payload::Payload;
use super::query::Query;
use super::quota_body::clip;
use super::{ApiError, State, TIERS, apart, engine};
use kvtier_engine::Engine;
use kvtier_tiers::{Cursor, L2};

/// Most keys of one deletion.
const MAX_KEYS: usize = 10_000;

/// Keys that a tier is asked to delete at once.
const DELETE_SLICE: usize = 1000;

/// Name of L1 where an adapter is named.
const L1: &str = "l1";

fn detail(status: StatusCode, text: impl Into<String>) -> ApiError {
    ApiError::Detail(status, text.into())
}

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

/// The adapters of the tiers below L1, in their order; the first one is asked first.
#[utoipa::path(get, path = "/config/adapters", responses(
    (status = 200, description = "The adapters; none without tiers", body = Value),
    (status = 503, description = "The engine is not there yet", body = Value),
))]
pub(super) async fn adapters(api: State) -> Result<Json<Value>, ApiError> {
    let l2 = engine(&api)?.l2();
    let adapters = l2.iter().flat_map(|l2| l2.tiers()).enumerate();
    let adapters = adapters.map(|(index, tier)| {
        json!({
            "index": index, "type_name": tier.adapter().kind(), "name": tier.name(), "tier": "l2",
            "primary": index == 0, "reconfigurable": false,
        })
    });
    Ok(Json(json!({ "adapters": adapters.collect::<Vec<_>>() })))
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
        (status = 200, description = "A page, which may have fewer objects than asked for and yet a next one", body = Value),
        (status = 400, description = "That tier cannot be listed, or the token is none of ours", body = Value),
        (status = 404, description = "There is no such adapter", body = Value),
        (status = 422, description = "A parameter is not allowed", body = Value),
        (status = 503, description = "There are no adapters, or the adapter cannot be listed", body = Value),
    ))]
pub(super) async fn list(
    api: State,
    extract::Query(query): extract::Query<HashMap<String, String>>,
) -> Result<Json<Value>, ApiError> {
    let query = Query::from(query);
    let tier = query.one_of("tier", &TIERS, "l2")?;
    let most = query.int("page_size", 1..=5000, 500)?;
    let most = usize::try_from(most).unwrap_or_default();
    let engine = Arc::clone(engine(&api)?);
    let model = query.text("model_name").map(str::to_owned);
    let token = query.text("page_token");
    match tier {
        "l1" => {
            let from = token.map(|token| read_token(L1, token)).transpose()?;
            apart(move || list_l1(&engine, from, model.as_deref(), most)).await?
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
    .map(Json)
}

fn list_l1(
    engine: &Engine,
    from: Option<Cursor>,
    model: Option<&str>,
    most: usize,
) -> Result<Value, ApiError> {
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
        json!({ "key": key, "size_bytes": object.bytes, "leases": object.leases })
    });
    let next = next.map(|next| Cursor {
        position: Some(next.to_string()),
        after: None,
    });
    Ok(json!({
        "adapter": L1, "name": L1, "shared": false, "entries": entries.collect::<Vec<_>>(),
        "next_page_token": next.map(|next| token(L1, &next)),
    }))
}

async fn list_tier(
    l2: &L2,
    number: usize,
    tier: Arc<Tier>,
    from: Option<Cursor>,
    model: Option<String>,
    most: usize,
) -> Result<Value, ApiError> {
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
    let entries = page.objects.iter().map(|object| {
        let key = EncodedObjectKey::from(object.key.text());
        json!({ "key": key, "size_bytes": object.bytes, "used_at": object.used_at })
    });
    Ok(json!({
        "adapter": kind,
        "name": tier.name(),
        "shared": l2.config().adapters.get(number).is_some_and(|adapter| adapter.shared),
        "entries": entries.collect::<Vec<_>>(),
        "next_page_token": page.next.map(|next| token(tier.name(), &next)),
    }))
}

/// Where a listing goes on, as a text for its client.
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

/// Takes objects away, from L1, from the tiers or from both.
///
/// Body: `{"keys": [key ...], "tier": "l2", "force": false, "adapter": null}`; a key as `GET /cache/objects` gives it.
/// Without `adapter` every tier is meant.
#[utoipa::path(delete, path = "/cache/objects", request_body = Value, responses(
    (status = 200, description = "What went, what was kept because somebody reads it, and whether all tiers did their part", body = Value),
    (status = 400, description = "A key that no object can have, or too many of them; nothing was deleted", body = Value),
    (status = 404, description = "There is no such adapter", body = Value),
    (status = 422, description = "Body of the wrong shape", body = Value),
    (status = 503, description = "There are no adapters; nothing was deleted", body = Value),
))]
pub(super) async fn delete(api: State, body: Payload) -> Result<Told, ApiError> {
    let engine = Arc::clone(engine(&api)?);
    let request = body.read(Deletion::parse).await??;
    // Before anything is deleted.
    let in_tiers: Vec<_> = match &request.adapter {
        _ if request.tier == "l1" => Vec::new(),
        None => (0..tiers(&engine)?.tiers().len()).collect(),
        Some(name) => vec![named(tiers(&engine)?, name)?],
    };
    let (keys, force) = (Arc::new(request.keys), request.force);
    let mut outcome = Outcome::default();
    if request.tier != "l2" {
        let (engine, keys) = (Arc::clone(&engine), Arc::clone(&keys));
        let removed = apart(move || engine.admin().delete_objects(&keys, force)).await?;
        outcome.count(L1, removed.objects, removed.kept, 0);
    }
    for tier in in_tiers {
        outcome.delete(tiers(&engine)?, tier, &keys, force).await?;
    }
    let answer = outcome.answer();
    let did = format!(
        "{} keys in {}, force {force}: {}",
        keys.len(),
        request.tier,
        answer["by_tier"]
    );
    Ok(told(did, answer))
}

/// What a client wants gone.
struct Deletion {
    keys: Vec<ObjectKey>,
    tier: &'static str,
    force: bool,
    adapter: Option<String>,
}

impl Deletion {
    fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::required(bytes)?;
        let tier = body.one_of("tier", &TIERS, "l2")?;
        let force = body.bool("force", false)?;
        let adapter = body.optional_text("adapter")?.map(str::to_owned);
        let keys = body.objects("keys", |keys| match keys {
            0..=MAX_KEYS => Ok(()),
            keys => Err(detail(
                StatusCode::BAD_REQUEST,
                format!("too many keys in a single request (limit={MAX_KEYS}, got={keys})"),
            )),
        })?;
        let key = |(index, body): (usize, &Body)| {
            let refuse =
                |error: String| detail(StatusCode::BAD_REQUEST, format!("keys[{index}]: {error}"));
            let key = ForeignKey::try_from(read_key(body, refuse)?)
                .map_err(|error| refuse(error.to_string()))?;
            // A hash of another length is that of no object of ours, so there is nothing to delete.
            Ok(ObjectKey::try_from(key).ok())
        };
        let keys: Result<Vec<_>, ApiError> = keys.iter().enumerate().map(key).collect();
        Ok(Self {
            keys: keys?.into_iter().flatten().collect(),
            tier,
            force,
            adapter,
        })
    }
}

fn read_key(
    body: &Body,
    refuse: impl Fn(String) -> ApiError,
) -> Result<EncodedObjectKey, ApiError> {
    let chunk_hash_hex = body.text("chunk_hash_hex")?.to_owned();
    let model_name = body.text("model_name")?.to_owned();
    let (rank, group) = (
        body.required_int("kv_rank")?,
        body.int("object_group_id", 0)?,
    );
    let cache_salt = body.optional_text("cache_salt")?.unwrap_or_default();
    Ok(EncodedObjectKey {
        chunk_hash_hex,
        model_name,
        kv_rank: u64::try_from(rank)
            .map_err(|_| refuse(format!("kv_rank must be at least 0 (got {rank})")))?,
        object_group_id: u32::try_from(group).map_err(|_| {
            let most = u32::MAX;
            refuse(format!(
                "object_group_id must be between 0 and {most} (got {group})"
            ))
        })?,
        cache_salt: cache_salt.to_owned(),
    })
}

/// What came of a deletion.
#[derive(Default)]
struct Outcome {
    deleted: usize,
    skipped: usize,
    by_tier: Map<String, Value>,
    error: Option<String>,
}

impl Outcome {
    fn count(&mut self, name: &str, deleted: usize, skipped: usize, failed: usize) {
        self.deleted += deleted;
        self.skipped += skipped;
        let counts = json!({ "deleted": deleted, "skipped": skipped, "failed": failed });
        self.by_tier.insert(name.to_owned(), counts);
    }

    async fn delete(
        &mut self,
        l2: &L2,
        number: usize,
        keys: &[ObjectKey],
        force: bool,
    ) -> Result<(), ApiError> {
        let (mut deleted, mut skipped, mut failed) = (0, 0, 0);
        let tier = &l2.tiers()[number];
        for slice in keys.chunks(DELETE_SLICE) {
            let results = l2.delete(number, slice.to_vec(), force).await;
            for result in results
                .map_err(|error| detail(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?
            {
                match result {
                    Ok(Deleted::Removed) => deleted += 1,
                    Ok(Deleted::Kept) => skipped += 1,
                    Ok(Deleted::Absent) => {}
                    Err(error) => {
                        failed += 1;
                        let text = || format!("{}: {error}", tier.name());
                        self.error.get_or_insert_with(text);
                    }
                }
            }
        }
        self.count(tier.name(), deleted, skipped, failed);
        Ok(())
    }

    fn answer(self) -> Value {
        let mut answer = json!({
            "deleted": self.deleted, "skipped": self.skipped, "ok": self.error.is_none(), "by_tier": self.by_tier,
        });
        if let Some(error) = self.error {
            answer["error"] = error.into();
        }
        answer
    }
}
