//! Routes that only read: `/`, health, status, versions, metrics.

use axum::Json;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use kvtier_observe::api::{Health, Status};
use serde::Serialize;
use utoipa::ToSchema;

use super::{Api, ApiError, ApiState, ErrorBody, JsonAnswer, NO_ENGINE, error, run_blocking};

/// The release of LMCache whose HTTP API this one answers like; clients compare it.
const LMCACHE_RELEASE: &str = "0.5.6";

/// The service.
#[derive(Serialize, ToSchema)]
pub(super) struct Service {
    /// Always `ok`.
    status: &'static str,
    /// Name of the API.
    service: &'static str,
}

/// Answers while the port is open, whatever the state of the server.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The service is there", body = Service)))]
pub(super) async fn root() -> JsonAnswer<Service> {
    JsonAnswer(Service {
        status: "ok",
        service: "kvtier HTTP API",
    })
}

/// True readiness: 200 when requests are served and no component has failed, 503 with the reason otherwise. A tier that
/// fails is named and changes nothing else, since L1 serves without it.
#[utoipa::path(get, path = "/healthcheck", responses(
    (status = 200, description = "Serving", body = Health),
    (status = 503, description = "Not serving; `reason` has the cause", body = Health),
))]
pub(super) async fn healthcheck(api: ApiState) -> (StatusCode, JsonAnswer<Health>) {
    let health = health(&api);
    let code = match health.reason {
        None => StatusCode::OK,
        Some(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    (code, JsonAnswer(health))
}

/// The server's health.
pub(super) fn health(api: &Api) -> Health {
    let reason = api.health.reason();
    let status = match reason {
        None => "healthy",
        Some(_) => "unhealthy",
    };
    let engine = api.engine.get();
    Health {
        status: status.to_owned(),
        reason,
        failed_tiers: engine.map_or_else(Vec::new, |engine| engine.admin().failed_tiers()),
        warnings: engine.map_or_else(Vec::new, |engine| engine.admin().warnings()),
    }
}

/// Everything about the server's state, in the shape of LMCache's `/status`.
#[utoipa::path(get, path = "/status", responses(
    (status = 200, description = "State of the server", body = Status),
    (status = 503, description = "The engine is not there yet", body = ErrorBody),
))]
pub(super) async fn status(api: ApiState) -> Result<JsonAnswer<Status>, ApiError> {
    let is_healthy = api.health.reason().is_none();
    let none = || error(StatusCode::SERVICE_UNAVAILABLE, NO_ENGINE);
    let engine = api.engine.get().cloned().ok_or_else(none)?;
    run_blocking(move || engine.admin().status(is_healthy))
        .await
        .map(JsonAnswer)
}

/// Version of this server.
#[utoipa::path(get, path = "/version", responses((status = 200, description = "Version of kvtier", body = String)))]
pub(super) async fn version() -> Json<String> {
    Json(format!(
        "{}+kvtier.{}",
        LMCACHE_RELEASE,
        env!("CARGO_PKG_VERSION")
    ))
}

/// Release of LMCache whose protocol and API are served.
#[utoipa::path(get, path = "/lmc_version", responses((status = 200, description = "Release of LMCache", body = String)))]
pub(super) async fn release() -> Json<&'static str> {
    Json(LMCACHE_RELEASE)
}

/// Metrics in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", responses((status = 200, description = "Prometheus text", body = String)))]
pub(super) async fn metrics(api: ApiState) -> Response {
    let Some(engine) = api.engine.get().cloned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "engine not initialized\n").into_response();
    };
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match run_blocking(move || engine.admin().scrape()).await {
        Ok(text) => ([(header::CONTENT_TYPE, kind)], text).into_response(),
        Err(failed) => failed.into_response(),
    }
}
