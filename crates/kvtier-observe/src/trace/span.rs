//! Spans and their ids.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_core::random::SplitMix64;

/// Id of a trace, never all zero.
pub type TraceId = [u8; 16];

/// Id of a span, never all zero.
pub type SpanId = [u8; 8];

/// Source of ids: a sequence of its own per process.
pub struct Ids {
    seed: u64,
    next: AtomicU64,
}

impl Ids {
    pub fn new() -> Self {
        // Its keys are the standard library's own source of random numbers.
        let seed = RandomState::new().build_hasher().finish();
        Self {
            seed,
            next: AtomicU64::new(0),
        }
    }

    pub fn span(&self) -> SpanId {
        let number = SplitMix64::nth(self.seed, self.next.fetch_add(1, Ordering::Relaxed));
        number.max(1).to_be_bytes()
    }

    pub fn trace(&self) -> TraceId {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.span());
        id[8..].copy_from_slice(&self.span());
        id
    }
}

/// A finished span.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    pub trace: TraceId,
    pub id: SpanId,
    pub parent: Option<SpanId>,
    /// Whether the parent is in another process.
    pub is_parent_remote: bool,
    pub name: &'static str,
    /// Nanoseconds since 1970.
    pub start: u64,
    /// End, nanoseconds since 1970.
    pub end: u64,
    pub attributes: Vec<(&'static str, Value)>,
    /// Why the work failed.
    pub failure: Option<&'static str>,
}

/// Value of an attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Text(Arc<str>),
    Int(i64),
    Double(f64),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl From<&Arc<str>> for Value {
    fn from(text: &Arc<str>) -> Self {
        Self::Text(Arc::clone(text))
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Double(number)
    }
}

impl Value {
    /// A number as text, which LMCache's spans have wherever their session's do not.
    pub fn as_text<N: ToString>(number: N) -> Self {
        Self::Text(number.to_string().into())
    }
}
