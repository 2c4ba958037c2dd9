//! Which generation does a connection speak?
//!
//! An adapter's first request is always get_chunk_size, whose number differs in each generation, so a
//! fresh connection is decided at once. A connection that came back after a restart of the server starts
//! with whatever was due; then each request narrows the set of generations that could have sent it.

use super::{Generation, OperationSpec};
use crate::frames::OperationId;

/// The generations a connection may still speak.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Candidates(u8);

/// What a request turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resolved {
    /// The generation it is read as; the only one left if [`Resolved::certain`].
    pub generation: Generation,
    /// The row of its table.
    pub spec: &'static OperationSpec,
    /// Whether every generation still possible reads it as the same operation.
    pub certain: bool,
}

/// Why a request fits none of the generations still possible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unresolved {
    /// No generation has this number or name.
    #[error("operation {id} is unknown to clients of {releases}")]
    UnknownOperation {
        /// The number or name.
        id: String,
        /// The releases that were possible.
        releases: String,
    },
    /// The number of payload frames fits no row.
    #[error("operation {id} does not have {found} payloads, allowed are {allowed}")]
    PayloadCount {
        /// The number or name.
        id: String,
        /// Payload frames of the request.
        found: usize,
        /// Payload frames it may have.
        allowed: String,
    },
}
