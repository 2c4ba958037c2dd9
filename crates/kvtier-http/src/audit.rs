//! One line in the log, of target `audit`, for each request that may change something: the caller, the change, and how it
//! ended.

use std::sync::{Arc, OnceLock};

use axum::RequestExt as _;
use axum::extract::{MatchedPath, RawPathParams, Request};
use axum::http::{Method, StatusCode};
use axum::response::Response;
use axum::{Extension, extract};
use kvtier_core::object_key::ShownSalt;

use super::JsonAnswer;
use super::access::Caller;

/// Longest method that is logged in full; no honest client sends a longer one.
const METHOD: usize = 16;

/// What a request did, in a handler's words and without salts in clear; goes into its answer.
#[derive(Debug, Clone)]
pub(super) struct Did(String);

/// An answer with what was done, for the line of its request.
pub(super) type Audited<T> = (Extension<Did>, JsonAnswer<T>);

/// Answer of a request that is audited.
pub(super) fn audited<T>(did: String, answer: T) -> Audited<T> {
    (Extension(Did(did)), JsonAnswer(answer))
}

/// What a request is about to do, in its handler's words: it goes on if its client disconnects, and then there is no answer.
#[derive(Debug, Clone, Default)]
pub(super) struct Begun(Arc<OnceLock<String>>);

impl Begun {
    /// Takes note of it, once.
    pub(super) fn set(&self, what: &str) {
        let _ = self.0.set(what.to_owned());
    }
}

/// A name that must not be in the log in clear, such as a salt.
pub(super) fn hidden(name: &str) -> String {
    ShownSalt(name).to_string()
}

/// The line; written when this is dropped, which also happens when the client has gone meanwhile.
pub(super) struct AuditEntry {
    caller: Caller,
    method: Method,
    route: String,
    names: String,
    status: Option<StatusCode>,
    begun: Begun,
    did: String,
}

impl AuditEntry {
    /// For a request that is about to be handled.
    pub(super) async fn of(request: &mut Request, caller: Caller) -> Self {
        let path = request.extensions().get::<MatchedPath>();
        // A path that is no route may be anything.
        let route = path.map_or("(none)", MatchedPath::as_str).to_owned();
        let names = request.extract_parts::<RawPathParams>().await;
        let names = names.as_ref().map_or_else(|_| String::new(), names_of);
        let begun = Begun::default();
        request.extensions_mut().insert(begun.clone());
        Self {
            caller,
            method: request.method().clone(),
            route,
            names,
            status: None,
            begun,
            did: String::new(),
        }
    }

    /// Takes note of the answer.
    pub(super) fn end(mut self, answer: &Response) {
        self.status = Some(answer.status());
        if let Some(Did(text)) = answer.extensions().get() {
            self.did.clone_from(text);
        }
    }
}

fn names_of(names: &extract::RawPathParams) -> String {
    let names = names
        .iter()
        .map(|(key, value)| format!("{key}={}", hidden(value)));
    names.collect::<Vec<_>>().join(" ")
}

impl Drop for AuditEntry {
    fn drop(&mut self) {
        let method = self.method.as_str();
        let begun = self.begun.0.get().filter(|_| self.status.is_none());
        tracing::info!(
            target: "audit",
            who = self.caller.name,
            role = self.caller.role.as_str(),
            peer = self.caller.peer,
            method = method.get(..METHOD).unwrap_or(method),
            route = self.route,
            names = self.names,
            status = self.status.map_or(0, |status| status.as_u16()),
            did = begun.unwrap_or(&self.did),
            "{}",
            match self.status {
                Some(status) if status.is_success() => "done",
                Some(_) => "refused or failed",
                None => "the client did not wait for the end",
            }
        );
    }
}
