//! Routes that load a prompt from the tiers into L1 before an engine asks for it.

use axum::extract::Path;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::audit::{Audited, audited, hidden};
use super::body::{TierName, required};
use super::payload::Payload;
use super::{ApiError, ApiState, DetailBody, JsonAnswer, detail, engine};
use kvtier_engine::{Engine, PrefetchError, PrefetchJob};

/// Largest body: as many tokens as are allowed, of ten digits each, with space for commas and blanks.
pub(super) const BODY_LIMIT: usize = 16 << 20;

/// A prompt to load.
#[derive(Deserialize, ToSchema)]
struct PrefetchRequest {
    /// Model of the prompt.
    model_name: String,
    /// Workers of the engine.
    world_size: i64,
    /// The prompt; at most 1,000,000 token ids.
    token_ids: Vec<u32>,
    /// The tenant; none by default.
    cache_salt: Option<String>,
    /// Tokens per chunk of the engine; may be left out if all workers of the model have the same.
    chunk_size: Option<u32>,
    /// Only `l2`.
    #[serde(default = "TierName::l2")]
    #[schema(value_type = Option<String>)]
    source_tier: TierName,
    /// Only `l1`.
    #[serde(default = "TierName::l1")]
    #[schema(value_type = Option<String>)]
    target_tier: TierName,
}

/// A submitted prefetch.
#[derive(Serialize, ToSchema)]
pub(super) struct Submitted {
    /// Id of the prefetch for `GET /cache/prefetches/{request_id}`; absent if there is nothing to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
    /// Chunks of the prompt.
    chunks: usize,
    /// `submitted`, or `noop` for less than a chunk.
    status: &'static str,
}

/// Begins to load what the tiers have of a prompt into L1, for all ranks and object groups of a model.
///
/// Nothing stays leased: loaded objects may be evicted like all others.
#[utoipa::path(post, path = "/cache/prefetches", request_body = PrefetchRequest, responses(
    (status = 202, description = "Begun, or nothing to do because there is no whole chunk", body = Submitted),
    (status = 400, description = "A value is not allowed", body = DetailBody),
    (status = 422, description = "Body of the wrong shape", body = DetailBody),
    (status = 429, description = "Too many are pending", body = DetailBody),
    (status = 503, description = "No worker is registered for the model, or there are no adapters", body = DetailBody),
))]
pub(super) async fn submit(
    api: ApiState,
    body: Payload<BODY_LIMIT>,
) -> Result<(StatusCode, Audited<Submitted>), ApiError> {
    let engine = std::sync::Arc::clone(engine(&api)?);
    let (begun, what) = body.read(move |bytes| begin(&engine, bytes)).await??;
    let (status, request_id, chunks) = match begun {
        None => ("noop", None, 0),
        Some((request_id, chunks)) => ("submitted", Some(request_id), chunks),
    };
    let answer = Submitted {
        request_id,
        chunks,
        status,
    };
    let did = format!("{what}: {status:?}");
    Ok((StatusCode::ACCEPTED, audited(did, answer)))
}

/// Begins the prefetch of a body; returns its id and chunks unless there is nothing to do, and its description for the log.
fn begin(engine: &Engine, bytes: &[u8]) -> Result<(Option<(String, usize)>, String), ApiError> {
    let request: PrefetchRequest = required(bytes)?;
    let (model_name, token_ids) = (&request.model_name, &request.token_ids);
    let cache_salt = request.cache_salt.as_deref().unwrap_or_default();
    let (source, target) = (request.source_tier.0, request.target_tier.0);
    if (source, target) != ("l2", "l1") {
        let text =
            format!("unsupported prefetch direction '{source}'->'{target}'; only 'l2'->'l1'");
        return Err(detail(StatusCode::BAD_REQUEST, text));
    }
    let what = format!(
        "{} tokens, model {model_name:?}, salt {}",
        token_ids.len(),
        hidden(cache_salt)
    );
    let jobs = &engine.admin().prefetch_jobs;
    let begun = jobs.start(
        model_name,
        request.world_size,
        cache_salt,
        token_ids,
        request.chunk_size,
    );
    let begun = begun.map(|begun| (begun, what));
    begun.map_err(|error| refused(&error))
}

/// The answer to a prefetch that was not begun.
pub(super) fn refused(error: &PrefetchError) -> ApiError {
    let status = match error {
        PrefetchError::NoLayout { .. }
        | PrefetchError::NotServed { .. }
        | PrefetchError::NoTiers => StatusCode::SERVICE_UNAVAILABLE,
        PrefetchError::Key(_)
        | PrefetchError::TooManyTokens(_)
        | PrefetchError::ChunkSize { .. } => StatusCode::BAD_REQUEST,
        PrefetchError::UnknownSession(_) => StatusCode::NOT_FOUND,
        PrefetchError::TooManyPending => StatusCode::TOO_MANY_REQUESTS,
    };
    detail(status, error.to_string())
}

/// State of a prefetch.
#[derive(Serialize, ToSchema)]
pub(super) struct Prefetch {
    /// Id of the prefetch.
    request_id: String,
    /// `pending` or `completed`.
    status: &'static str,
    /// Result of the prefetch, once it is completed.
    #[serde(flatten)]
    result: Option<PrefetchResult>,
}

/// Result of a prefetch.
#[derive(Serialize, ToSchema)]
struct PrefetchResult {
    /// Objects that a lookup of the prompt would find in L1.
    found_keys: usize,
    /// Objects of the whole prompt.
    total_keys: usize,
    /// Chunks of the prefix in L1.
    chunks: usize,
    /// Objects that were loaded.
    loaded_keys: usize,
}

/// State of a prefetch. Available for ten minutes after its end.
#[utoipa::path(get, path = "/cache/prefetches/{request_id}",
    params(("request_id" = String, Path, description = "`request_id` of the answer of `POST /cache/prefetches`")),
    responses(
        (status = 200, description = "`pending`, or `completed` with what is in L1 now", body = Prefetch),
        (status = 404, description = "Never begun, or forgotten by now", body = DetailBody),
        (status = 503, description = "The engine is not there yet", body = DetailBody),
    ))]
pub(super) async fn result(
    api: ApiState,
    Path(request_id): Path<String>,
) -> Result<JsonAnswer<Prefetch>, ApiError> {
    let unknown = || {
        let text = format!(
            "unknown prefetch request_id='{request_id}' (already completed or never submitted)"
        );
        detail(StatusCode::NOT_FOUND, text)
    };
    let state = engine(&api)?
        .admin()
        .prefetch_jobs
        .get(&request_id)
        .ok_or_else(unknown)?;
    let (status, result) = match state {
        PrefetchJob::Pending => ("pending", None),
        PrefetchJob::Done(done) => {
            let result = PrefetchResult {
                found_keys: done.found_keys,
                total_keys: done.total_keys,
                chunks: done.found_chunks,
                loaded_keys: done.loaded_keys,
            };
            ("completed", Some(result))
        }
    };
    Ok(JsonAnswer(Prefetch {
        request_id,
        status,
        result,
    }))
}
