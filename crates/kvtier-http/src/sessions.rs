//! The route that acts on what an agent's session needs, between two of its turns.

use std::sync::Arc;

use axum::http::StatusCode;
use kvtier_engine::{Engine, MAX_SESSION_BYTES, SessionAction};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::audit::{Audited, audited, hidden};
use super::body::{not_allowed, required};
use super::payload::Payload;
use super::{ApiError, ApiState, DetailBody, detail, engine, prefetches, run_blocking};

/// What an orchestrator asks for a session.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SessionRequest {
    /// Name of the session, as `kvtier.session` of its requests.
    session: String,
    /// `release`, `demote` or `prefetch`.
    #[schema(value_type = String)]
    action: Action,
    /// The tenant; none by default.
    #[serde(default)]
    cache_salt: String,
}

/// An action of the route; none is a prefetch.
struct Action(Option<SessionAction>);

impl<'de> Deserialize<'de> for Action {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        let name = String::deserialize(reader)?;
        match SessionAction::from_name(&name) {
            None if name != "prefetch" => Err(D::Error::custom(format_args!(
                "{name:?}, expected release, demote, prefetch"
            ))),
            action => Ok(Self(action)),
        }
    }
}

/// What was done, or begun.
#[derive(Serialize, ToSchema)]
pub(super) struct SessionAnswer {
    /// `done`, or `submitted` for a prefetch.
    status: &'static str,
    /// Chunks of the session's last prompt.
    chunks: usize,
    /// Chunks that no other session needs; absent for a prefetch, which loads all.
    #[serde(skip_serializing_if = "Option::is_none")]
    own_chunks: Option<usize>,
    /// Objects that are evicted first from now on, or that have left L1.
    #[serde(skip_serializing_if = "Option::is_none")]
    objects: Option<usize>,
    /// Id of the prefetch for `GET /cache/prefetches/{request_id}`.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
}

/// Releases, demotes or prefetches what the last prompt of an agent's session needs.
///
/// Objects that other remembered sessions need, and those that are leased or pinned, are neither released nor demoted.
#[utoipa::path(post, path = "/cache/sessions", request_body = SessionRequest, responses(
    (status = 200, description = "Released or demoted", body = SessionAnswer),
    (status = 202, description = "The prefetch has begun", body = SessionAnswer),
    (status = 400, description = "A value is not allowed", body = DetailBody),
    (status = 404, description = "No such session is remembered", body = DetailBody),
    (status = 422, description = "Body of the wrong shape", body = DetailBody),
    (status = 429, description = "Too many prefetches are pending", body = DetailBody),
    (status = 503, description = "No worker is registered for the model, or there are no adapters", body = DetailBody),
))]
pub(super) async fn act(
    api: ApiState,
    body: Payload,
) -> Result<(StatusCode, Audited<SessionAnswer>), ApiError> {
    let engine = Arc::clone(engine(&api)?);
    let request = body.read(required::<SessionRequest>).await??;
    let name = request.action.0.map_or("prefetch", SessionAction::name);
    let did = format!(
        "{name} session {}, salt {}",
        hidden(&request.session),
        hidden(&request.cache_salt)
    );
    let answer = run_blocking(move || done(&engine, &request)).await??;
    let code = match answer.request_id {
        Some(_) => StatusCode::ACCEPTED,
        None => StatusCode::OK,
    };
    Ok((code, audited(did, answer)))
}

fn done(engine: &Engine, request: &SessionRequest) -> Result<SessionAnswer, ApiError> {
    let SessionRequest {
        session,
        action,
        cache_salt,
    } = request;
    if session.is_empty() || session.len() > MAX_SESSION_BYTES {
        let value = format!("{session:?}");
        let allowed = format!("1 to {MAX_SESSION_BYTES} bytes");
        let text = not_allowed("session", &value, &allowed);
        return Err(detail(StatusCode::BAD_REQUEST, text));
    }
    let admin = engine.admin();
    match action.0 {
        Some(action) => {
            let done = admin.act_on_session(cache_salt, session, action);
            let done = done.map_err(|error| prefetches::refused(&error))?;
            Ok(SessionAnswer {
                status: "done",
                chunks: done.chunks,
                own_chunks: Some(done.own_chunks),
                objects: Some(done.objects),
                request_id: None,
            })
        }
        None => {
            let begun = admin.prefetch_jobs.start_session(cache_salt, session);
            let (request_id, chunks) = begun.map_err(|error| prefetches::refused(&error))?;
            Ok(SessionAnswer {
                status: "submitted",
                chunks,
                own_chunks: None,
                objects: None,
                request_id: Some(request_id),
            })
        }
    }
}
