//! Records of finished work, from the threads that serve requests.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvtier_core::object_key::KeyScope;

use super::span::SpanId;
use super::traceparent::TraceParent;

/// A request of an engine, from its lookup to its end. Requests of two models or tenants are never the same.
#[derive(Debug)]
pub struct TracedSession {
    /// The engine's request.
    pub request_id: Box<str>,
    /// Model of the session.
    pub model_name: Arc<str>,
    /// Tenant of the session, as listings and metrics name it.
    pub cache_salt: Arc<str>,
    /// The span of the engine's side, if the client names one; not part of the identity.
    pub parent: Option<TraceParent>,
}

impl TracedSession {
    /// The session of a request.
    pub fn new(request_id: &str, scope: &KeyScope, parent: Option<TraceParent>) -> Self {
        Self {
            request_id: request_id.into(),
            model_name: Arc::clone(scope.model_name()),
            cache_salt: Arc::clone(scope.cache_salt()),
            parent,
        }
    }

    fn identity(&self) -> (&str, &str, &str) {
        (&self.request_id, &self.model_name, &self.cache_salt)
    }
}

impl PartialEq for TracedSession {
    fn eq(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for TracedSession {}

impl Hash for TracedSession {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}

/// Work that has ended.
#[derive(Debug)]
pub struct TraceRecord {
    pub session: Arc<TracedSession>,
    pub took: Duration,
    pub ended: SystemTime,
    pub work: RecordedWork,
}

/// The kinds of work.
#[derive(Debug)]
pub enum RecordedWork {
    /// The lookup with this span waits for the tiers: its session may end before it.
    Wait(SpanId),
    Lookup(SpanId, LookupResult),
    /// Call of a tier for the lookup with this span.
    TierCall(SpanId, TierSpan),
    Transfer(Transfer),
    /// The end of the session.
    End,
}

/// Result of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LookupResult {
    /// Tokens asked for, in whole chunks.
    pub requested_tokens: u64,
    /// Chunks found.
    pub found_chunks: u64,
    /// Tokens found in L1.
    pub l1_hit_tokens: u64,
    /// Tokens that the tiers added.
    pub l2_hit_tokens: u64,
    /// Objects found in L1.
    pub l1_hit_keys: u64,
    /// Objects that the tiers added.
    pub l2_hit_keys: u64,
    /// Why no key was asked for, as the metrics name it; empty if keys were.
    pub early_exit_reason: &'static str,
}

/// Calls of tiers for a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierWork {
    /// Whether objects are there.
    Lookup,
    /// Objects into L1.
    Load,
}

/// A call of a tier.
#[derive(Debug, Clone)]
pub struct TierSpan {
    /// Kind of the tier's work.
    pub work: TierWork,
    /// The tier.
    pub tier: Arc<str>,
    /// Objects of the call.
    pub objects: u64,
    /// Objects that were found or loaded; none if the tier did not answer.
    pub succeeded: Option<u64>,
    /// Bytes that were loaded.
    pub bytes: u64,
}

/// Kinds of transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferKind {
    /// From an engine into L1.
    Store,
    /// From L1 into an engine.
    Retrieve,
}

/// A store or a retrieve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// Kind of the transfer.
    pub kind: TransferKind,
    /// Device that the engine's pages are on.
    pub device: &'static str,
    /// Id of the worker.
    pub engine_id: i64,
    /// Chunks that were moved.
    pub chunks: u64,
    /// Tokens of the transfer.
    pub tokens: u64,
    /// Bytes that were moved.
    pub bytes: u64,
    /// Why it failed, as the metrics name it.
    pub failure: Option<&'static str>,
}
