//! Routes that load a prompt from the tiers into L1 before an engine asks for it.

use axum::Json;
use axum::extract::Path;
use axum::http::StatusCode;
use serde_json::{Value, json};

use super::audit::{Told, hidden, told};
use super::body::Body;
use super::payload::Payload;
use super::{ApiError, State, TIERS, engine};
use kvtier_engine::{Engine, PrefetchError, PrefetchJob};

/// Largest body: as many tokens as are allowed, of ten digits each, with space for commas and blanks.
const BODY_LIMIT: usize = 16 << 20;

/// Bytes that they may take parsed.
const PARSED: usize = 48 << 20;

/// Begins to load what the tiers have of a prompt into L1, for all ranks and object groups of a model.
///
/// Body: `{"model_name": str, "world_size": int, "token_ids": [int], "cache_salt": "", "source_tier": "l2", "target_tier":
/// "l1"}`. Nothing stays leased: what is loaded may be evicted like everything else.
#[utoipa::path(post, path = "/cache/prefetches", request_body = Value, responses(
    (status = 202, description = "Begun, or nothing to do because there is no whole chunk", body = Value),
    (status = 400, description = "A value is not allowed", body = Value),
    (status = 422, description = "Body of the wrong shape", body = Value),
    (status = 429, description = "Too many are under way", body = Value),
    (status = 503, description = "No worker is registered for the model, or there are no adapters", body = Value),
))]
pub(super) async fn submit(
    api: State,
    body: Payload<BODY_LIMIT>,
) -> Result<(StatusCode, Told), ApiError> {
    let engine = std::sync::Arc::clone(engine(&api)?);
    let (begun, what) = body.read(move |bytes| begin(&engine, bytes)).await??;
    let answer = match begun {
        None => json!({ "chunks": 0, "status": "noop" }),
        Some((request_id, chunks)) => {
            json!({ "request_id": request_id, "chunks": chunks, "status": "submitted" })
        }
    };
    let did = format!("{what}: {}", answer["status"]);
    Ok((StatusCode::ACCEPTED, told(did, answer)))
}

/// The request, unless there is nothing to do, and what it is about.
fn begin(engine: &Engine, bytes: &[u8]) -> Result<(Option<(String, usize)>, String), ApiError> {
    let body = Body::required_within(bytes, PARSED)?;
    let model_name = body.text("model_name")?;
    let world_size = body.required_int("world_size")?;
    let token_ids = body.token_ids("token_ids")?;
    let cache_salt = body.optional_text("cache_salt")?.unwrap_or_default();
    let source = body.one_of("source_tier", &TIERS, "l2")?;
    let target = body.one_of("target_tier", &TIERS, "l1")?;
    if (source, target) != ("l2", "l1") {
        return Err(ApiError::Detail(
            StatusCode::BAD_REQUEST,
            format!("unsupported prefetch direction '{source}'->'{target}'; only 'l2'->'l1'"),
        ));
    }
    let what = format!(
        "{} tokens, model {model_name:?}, salt {}",
        token_ids.len(),
        hidden(cache_salt)
    );
    let admin = engine.admin();
    let begun = admin.start_prefetch(model_name, world_size, cache_salt, &token_ids);
    begun.map(|begun| (begun, what)).map_err(|error| {
        let status = match error {
            PrefetchError::NoLayout { .. }
            | PrefetchError::NotServed { .. }
            | PrefetchError::NoTiers => StatusCode::SERVICE_UNAVAILABLE,
            PrefetchError::Key(_) | PrefetchError::TooManyTokens(_) => StatusCode::BAD_REQUEST,
            PrefetchError::TooManyPending => StatusCode::TOO_MANY_REQUESTS,
        };
        ApiError::Detail(status, error.to_string())
    })
}

/// What came of a prefetch. May be asked for again for ten minutes after it was completed.
#[utoipa::path(get, path = "/cache/prefetches/{request_id}",
    params(("request_id" = String, Path, description = "As `POST /cache/prefetches` gave it")),
    responses(
        (status = 200, description = "`pending`, or `completed` with what is in L1 now", body = Value),
        (status = 404, description = "Never begun, or forgotten by now", body = Value),
        (status = 503, description = "The engine is not there yet", body = Value),
    ))]
pub(super) async fn result(
    api: State,
    Path(request_id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    match engine(&api)?.admin().prefetch_job(&request_id) {
        None => Err(ApiError::Detail(
            StatusCode::NOT_FOUND,
            format!(
                "unknown prefetch request_id='{request_id}' (already completed or never submitted)"
            ),
        )),
        Some(PrefetchJob::Pending) => Ok(Json(
            json!({ "request_id": request_id, "status": "pending" }),
        )),
        Some(PrefetchJob::Done(done)) => Ok(Json(json!({
            "request_id": request_id,
            "status": "completed",
            "found_keys": done.found_keys,
            "total_keys": done.total_keys,
            "chunks": done.found_chunks,
            "loaded_keys": done.loaded_keys,
        }))),
    }
}
