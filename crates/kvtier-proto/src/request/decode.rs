//! Payload frames to requests.

use super::Request;
use crate::generation::OperationSpec;
use crate::key::TokenReader;
use crate::wire::DecodeError;

impl<'a, T> Request<'a, T> {
    /// Decodes the payload frames of a request by its row.
    ///
    /// Fails for a wrong number of frames and for frames that are not what the row says.
    pub fn decode<R: TokenReader<Output = T>>(
        spec: &OperationSpec,
        payloads: &[&'a [u8]],
        tokens: &mut R,
    ) -> Result<Self, DecodeError> {
        let _ = (payloads, tokens);
        Err(DecodeError::new(format!(
            "{} is not decoded yet",
            spec.operation
        )))
    }
}
