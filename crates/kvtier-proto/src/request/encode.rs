//! Requests to payload frames, for clients and tests.

use super::Request;
use crate::generation::OperationSpec;
use crate::key::TokenWriter;

/// A request that the row's generation cannot express.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct EncodeError {
    /// What does not fit.
    pub message: String,
}

impl<T: TokenWriter> Request<'_, T> {
    /// Encodes the payload frames of this request by a row of its operation.
    ///
    /// Fails when the row belongs to another operation, or the row's generation has no room for a value.
    pub fn encode(&self, spec: &OperationSpec) -> Result<Vec<Vec<u8>>, EncodeError> {
        Err(EncodeError {
            message: format!("{} is not encoded yet", spec.operation),
        })
    }
}
