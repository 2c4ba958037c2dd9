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
        let request = match with_list(bytes) {
            Some(request) => request,
            None => required(bytes)?,
        };
        let matched = engine.admin().match_prefix(&request, view_of(role));
        matched.map(JsonAnswer).map_err(refusal)
    });
    matched.await?
}

/// Parses a prompt whose ids are a list of small integers, in a third of the time that serde takes; `None` for any other body.
fn with_list(bytes: &[u8]) -> Option<ExplainRequest> {
    // Nothing else has it but a key with a quote inside, and such a key is unknown to serde.
    const NAME: &[u8] = br#""token_ids":"#;
    let start = bytes.windows(NAME.len()).position(|it| it == NAME)? + NAME.len();
    let start = start + usize::from(bytes.get(start) == Some(&b' '));
    let list = bytes[start..].strip_prefix(b"[")?;
    let (ids, end) = small_integers(list)?;
    let rest = [&bytes[..=start], &list[end..]].concat();
    let mut request: ExplainRequest = required(&rest).ok()?;
    request.token_ids = ids;
    Some(request)
}

/// Parses the integers of a list in front of its bracket; returns where this is.
fn small_integers(list: &[u8]) -> Option<(Vec<u32>, usize)> {
    let (mut ids, mut at) = (Vec::with_capacity(list.len() / 6), 0);
    loop {
        let (start, mut id) = (at, 0);
        while let Some(digit @ b'0'..=b'9') = list.get(at) {
            if at - start == 9 {
                return None;
            }
            id = 10 * id + u32::from(digit - b'0');
            at += 1;
        }
        if at == start || at - start > 1 && list[start] == b'0' {
            return None;
        }
        ids.push(id);
        match list.get(at)? {
            b']' => return Some((ids, at)),
            b',' => at += 1 + usize::from(list.get(at + 1) == Some(&b' ')),
            _ => return None,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_integers_are_read_as_serde_reads_them() {
        for body in [
            r#"{"model_name":"m","token_ids":[0,1,123456789]}"#,
            r#"{"token_ids": [12, 3], "model_name": "\"token_ids\":[4]", "chunk_size": 16}"#,
        ] {
            let parsed: ExplainRequest = serde_json::from_str(body).unwrap();
            assert_eq!(with_list(body.as_bytes()), Some(parsed));
        }
    }

    #[test]
    fn other_bodies_are_left_to_serde() {
        for list in [
            "[]",
            "[01]",
            "[-1]",
            "[1.0]",
            "[1e2]",
            "[1,]",
            "[,1]",
            "[1 ]",
            "[1234567890]",
            "[1",
            "[1}",
            "\"AAAAAQ==\"",
        ] {
            let body = format!(r#"{{"model_name":"m","token_ids":{list}}}"#);
            assert_eq!(with_list(body.as_bytes()), None, "{list}");
        }
        for body in [
            r#"{"token_ids":[1],"token_ids":[2],"model_name":"m"}"#,
            r#"{"model_name":"m","x":{"token_ids":[1]}}"#,
            r#"{"model_name":"token_ids":[1]}"#,
            r#"{"model_name":"m","a\"token_ids":[1]}"#,
            r#"{"model_name":"m","a\"token_ids\":[1]":1}"#,
            r#"{"token_ids":[1]}"#,
        ] {
            assert_eq!(with_list(body.as_bytes()), None, "{body}");
        }
    }
}
