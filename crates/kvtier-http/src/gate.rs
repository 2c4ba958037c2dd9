//! Decides, before anything else looks at a request, whether it may be answered.
//!
//! Reading (GET and HEAD, and questions that are too long for a GET) takes any token, everything else an admin's; so a
//! new route is closed unless it only reads. Open are `/healthcheck`, for probes that carry no token, and the files of the
//! dashboard, which hold nothing of the server. Without tokens, every client on loopback may do everything.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use kvtier_common::sync::RateLimited;

use super::{audit, detail, origin, ui};
use crate::access::{Access, Caller, Role};

/// The path that takes no token, and no turn.
pub(super) const OPEN: &str = "/healthcheck";

/// Paths whose POST only reads.
const QUESTIONS: [&str; 2] = ["/cache/explain", "/prefix/match"];

/// Address that a request came from; every connection adds it to its requests.
#[derive(Clone, Copy)]
pub(super) struct Peer(pub(super) SocketAddr);

/// What the gate knows.
pub(super) struct Gate {
    access: Arc<Access>,
    /// Refusals of requests without a known token: a client that tries many should not fill the log.
    refusals: RateLimited,
}

impl Gate {
    pub(super) fn new(access: Arc<Access>) -> Arc<Self> {
        Arc::new(Self {
            access,
            refusals: RateLimited::per_second(),
        })
    }

    /// Returns the caller, or the answer that refuses.
    fn admit(&self, request: &Request) -> Result<Caller, Box<Response>> {
        let peer = request.extensions().get();
        let peer = peer.map_or_else(|| "-".to_owned(), |Peer(address)| address.to_string());
        let needed = needed(request);
        let Some(tokens) = self.access.tokens() else {
            let reads = is_read(request.method());
            let foreign = origin::foreign(request.headers(), self.access.host(), !reads);
            return match foreign {
                Some(reason) => Err(refuse(StatusCode::FORBIDDEN, reason).into()),
                None => Ok(Caller {
                    name: "anybody".into(),
                    role: Role::Admin,
                    peer,
                }),
            };
        };
        let presented = presented(request.headers());
        let Some(token) = presented.and_then(|presented| tokens.find(presented)) else {
            if let Some(suppressed) = self.refusals.permit(Instant::now()) {
                tracing::warn!(target: "audit", requests = suppressed + 1, last = peer, "refused: no token that is known");
            }
            return Err(unauthorized(request.headers().contains_key(header::AUTHORIZATION)).into());
        };
        let caller = Caller {
            name: token.name.clone(),
            role: token.role,
            peer,
        };
        if token.role >= needed {
            return Ok(caller);
        }
        tracing::warn!(
            target: "audit",
            who = caller.name, role = caller.role.as_str(), peer = caller.peer, "refused: that takes the role admin"
        );
        let reason = format!(
            "the token of {:?} only reads; that takes one with the role admin",
            caller.name
        );
        Err(challenged(
            refuse(StatusCode::FORBIDDEN, &reason),
            "Bearer realm=\"kvtier\", error=\"insufficient_scope\"",
        )
        .into())
    }
}

/// The layer around all routes, unknown ones included.
pub(super) async fn gate(
    State(gate): State<Arc<Gate>>,
    mut request: Request,
    next: Next,
) -> Response {
    let reads = needed(&request) == Role::Read;
    let path = request.uri().path();
    let is_open = reads && (path == OPEN || ui::is_asset(path));
    if is_open && gate.access.tokens().is_some() {
        return next.run(request).await;
    }
    let caller = match gate.admit(&request) {
        Ok(caller) => caller,
        Err(refused) => return *refused,
    };
    request.extensions_mut().insert(caller.role);
    request.extensions_mut().insert(caller.clone());
    if reads {
        return next.run(request).await;
    }
    let entry = audit::AuditEntry::of(&mut request, caller).await;
    let answer = next.run(request).await;
    entry.end(&answer);
    answer
}

fn needed(request: &Request) -> Role {
    let is_question = request.method() == Method::POST && QUESTIONS.contains(&request.uri().path());
    if is_question || is_read(request.method()) {
        Role::Read
    } else {
        Role::Admin
    }
}

fn is_read(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

/// The token of a request that has exactly one.
fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return None;
    };
    let (scheme, token) = value.as_bytes().split_at_checked("Bearer ".len())?;
    scheme
        .eq_ignore_ascii_case(b"Bearer ")
        .then(|| token.trim_ascii())
}

fn refuse(status: StatusCode, reason: &str) -> Response {
    detail(status, reason).into_response()
}

fn challenged(mut answer: Response, challenge: &'static str) -> Response {
    let value = HeaderValue::from_static(challenge);
    answer.headers_mut().insert(header::WWW_AUTHENTICATE, value);
    answer
}

fn unauthorized(tried: bool) -> Response {
    let (reason, challenge) = if tried {
        (
            "that is no token known here; give one as Authorization: Bearer TOKEN",
            "Bearer realm=\"kvtier\", error=\"invalid_token\"",
        )
    } else {
        (
            "a token is needed: Authorization: Bearer TOKEN",
            "Bearer realm=\"kvtier\"",
        )
    };
    challenged(refuse(StatusCode::UNAUTHORIZED, reason), challenge)
}
