//! A request as frames, and what a reply to it must look like.

use kvtier_proto::frames::OperationId;
use kvtier_proto::generation::Generation;
use kvtier_proto::key::TokenWriter;
use kvtier_proto::operation::Operation;
use kvtier_proto::request::Request;
use kvtier_proto::response::ResponseKind;
use kvtier_proto::wire;

use crate::error::ClientError;

/// A request that is encoded but for its number.
pub(crate) struct Outgoing {
    pub operation: Operation,
    pub kind: ResponseKind,
    /// Operation and payloads.
    frames: Vec<Vec<u8>>,
}

impl Outgoing {
    /// Encodes a request as LMCache 0.5.6 does.
    pub fn encode<T: TokenWriter>(request: &Request<'_, T>) -> Result<Self, ClientError> {
        let operation = request.operation();
        let spec = Generation::G6
            .spec(operation)
            .ok_or_else(|| ClientError::Unexpected {
                operation,
                message: "is no operation of LMCache 0.5.6".to_owned(),
            })?;
        let payloads = request
            .encode(spec)
            .map_err(|source| ClientError::Encode { operation, source })?;
        let mut frames = Vec::with_capacity(1 + payloads.len());
        frames.push(spec.id().encode());
        frames.extend(payloads);
        Ok(Self {
            operation,
            kind: spec.response,
            frames,
        })
    }

    /// The message of the request with this number.
    pub fn into_message(self, uid: u64) -> Vec<Vec<u8>> {
        let mut uid_frame = Vec::with_capacity(9);
        wire::write_uint(&mut uid_frame, uid);
        let mut message = self.frames;
        message.insert(0, uid_frame);
        message
    }
}

/// The reply's op frame must mean what was asked; any other text is the server's error message.
pub(crate) fn check_op(frame: &[u8], asked: Operation) -> Result<(), ClientError> {
    let number = Generation::G6
        .spec(asked)
        .and_then(|spec| spec.number)
        .map(i64::from);
    match OperationId::decode(frame) {
        Ok(OperationId::Name(name)) if name == asked.name() => Ok(()),
        Ok(OperationId::Number(id)) if Some(id) == number => Ok(()),
        Ok(OperationId::Name(text)) => Err(ClientError::Server {
            operation: asked,
            message: text.to_owned(),
        }),
        Ok(OperationId::Number(id)) => Err(ClientError::Unexpected {
            operation: asked,
            message: format!("the reply is to operation {id}"),
        }),
        Err(source) => Err(ClientError::Reply {
            operation: asked,
            source,
        }),
    }
}
