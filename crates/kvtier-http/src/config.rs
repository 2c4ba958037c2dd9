//! Routes of the configuration.

use axum::http::StatusCode;
use kvtier_observe::api::Reloaded;
use serde_json::Value;

use super::audit::{Audited, audited};
use super::{
    ApiError, ApiState, DetailBody, ErrorBody, JsonAnswer, NO_ENGINE, detail, error, run_blocking,
    status_of,
};

/// The configuration: every flag with its value, secrets hidden.
#[utoipa::path(get, path = "/config", responses(
    (status = 200, description = "Flags by section", body = std::collections::HashMap<String, Value>),
    (status = 503, description = "The engine is not there yet", body = ErrorBody),
))]
pub(super) async fn config(api: ApiState) -> Result<JsonAnswer<Value>, ApiError> {
    let none = || error(StatusCode::SERVICE_UNAVAILABLE, "configs not initialized");
    let engine = api.engine.get().ok_or_else(none)?;
    Ok(JsonAnswer(engine.config().shown.clone()))
}

/// Reads the file of `--config`, tokens and certificate again, as SIGHUP does. If the file is invalid, or changes flags that
/// need a restart, none of its flags changes.
#[utoipa::path(post, path = "/config/reload", responses(
    (status = 200, description = "Applied", body = Reloaded),
    (status = 400, description = "A file is invalid, or that of --config changes flags that need a restart", body = DetailBody),
    (status = 409, description = "Another reload is running", body = DetailBody),
    (status = 500, description = "A file cannot be read", body = DetailBody),
    (status = 503, description = "The engine is not there yet", body = DetailBody),
))]
pub(super) async fn reload(api: ApiState) -> Result<Audited<Reloaded>, ApiError> {
    let none = || detail(StatusCode::SERVICE_UNAVAILABLE, NO_ENGINE);
    let reload = api.reload.get().cloned().ok_or_else(none)?;
    let outcome = run_blocking(move || reload()).await?;
    let reloaded = outcome.map_err(|error| detail(status_of(error.kind()), error.to_string()))?;
    let flags: Vec<_> = reloaded
        .changed
        .iter()
        .map(|change| change.flag.as_str())
        .collect();
    Ok(audited(format!("changed [{}]", flags.join(", ")), reloaded))
}
