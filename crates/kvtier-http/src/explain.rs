//! Routes about where a prompt is: how much of it, for routers, and why a lookup misses.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{FromRequest as _, Request};
use axum::http::StatusCode;
use kvtier_engine::{ExplainError, TenantView};
use kvtier_observe::api::{ExplainRequest, Explanation, PrefixMatch};
use tokio::sync::Semaphore;

use super::access::Role;
use super::body::required;
use super::payload::{Payload, is_small};
use super::prefetches::BODY_LIMIT;
use super::{ApiError, ApiState, DetailBody, JsonAnswer, detail, engine, run_blocking};

/// An explanation reads what the cache remembers, so one runs at a time.
static EXPLANATIONS: Semaphore = Semaphore::const_new(1);

/// Large bodies are received one at a time: those that wait for their turn would take the budget of all routes. Not the turn
/// itself, which a slow client would keep from small bodies.
static LARGE_BODY: Semaphore = Semaphore::const_new(1);

/// Explains where each chunk of a prompt is, and why a lookup of it would miss.
///
/// Changes nothing, so a token that reads may ask. Only an admin learns what is stored under another salt.
#[utoipa::path(post, path = "/cache/explain", request_body = ExplainRequest, responses(
    (status = 200, description = "Where the chunks are", body = Explanation),
    (status = 400, description = "A value is not allowed, or must be given", body = DetailBody),
    (status = 422, description = "Body of the wrong shape", body = DetailBody),
    (status = 503, description = "The engine is not there yet", body = DetailBody),
))]
pub(super) async fn explain(
    api: ApiState,
    Extension(role): Extension<Role>,
    request: Request,
) -> Result<JsonAnswer<Explanation>, ApiError> {
    // Never closed, like the other.
    let alone = if is_small(request.body()) {
        None
    } else {
        LARGE_BODY.acquire().await.ok()
    };
    let body = Payload::<BODY_LIMIT>::from_request(request, &api).await?;
    let engine = Arc::clone(engine(&api)?);
    // Before the body is parsed: a waiting body counts in the budget, its values do not.
    let turn = EXPLANATIONS.acquire().await;
    let request: ExplainRequest = body.read(required).await??;
    drop(alone);
    let view = view_of(role);
    let explained = run_blocking(move || {
        // Held until the end, also after the client has disconnected.
        let _turn = turn;
        engine.admin().explanations.explain(&request, view)
    });
    explained.await?.map(JsonAnswer).map_err(refusal)
}

/// How much of a prompt L1 and the tiers have, and the load of the server, for a router.
///
/// Changes nothing, so a token that reads may ask. Leases nothing and asks no backend of a tier.
#[utoipa::path(post, path = "/prefix/match", request_body = ExplainRequest, responses(
    (status = 200, description = "What a lookup would find", body = PrefixMatch),
    (status = 400, description = "A value is not allowed, or must be given", body = DetailBody),
    (status = 422, description = "Body of the wrong shape", body = DetailBody),
    (status = 503, description = "The engine is not there yet", body = DetailBody),
))]
pub(super) async fn match_prefix(
    api: ApiState,
    Extension(role): Extension<Role>,
    body: Payload<BODY_LIMIT>,
) -> Result<JsonAnswer<PrefixMatch>, ApiError> {
    let engine = Arc::clone(engine(&api)?);
    let matched = body.read(move |bytes| {
        let request: ExplainRequest = required(bytes)?;
        let matched = engine.admin().match_prefix(&request, view_of(role));
        matched.map(JsonAnswer).map_err(refusal)
    });
    matched.await?
}

fn view_of(role: Role) -> TenantView {
    match role {
        Role::Read => TenantView::One,
        Role::Admin => TenantView::All,
    }
}

fn refusal(error: ExplainError) -> ApiError {
    detail(StatusCode::BAD_REQUEST, error.to_string())
}
