//! What checks of the bookkeeping find.

/// A place where the bookkeeping contradicts itself, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);
