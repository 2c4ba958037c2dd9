//! Messages: a request as frames, and the reply in the frames that answer it.

use std::time::Instant;

use kvtier_proto::frames::{OperationId, ReplyFrames};
use kvtier_proto::generation::Generation;
use kvtier_proto::key::TokenWriter;
use kvtier_proto::operation::Operation;
use kvtier_proto::request::Request;
use kvtier_proto::response::{Response, ResponseKind};
use kvtier_proto::wire;

use crate::error::ClientError;

/// A request, encoded except for its number.
#[derive(Clone)]
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
        let mut message = self.frames;
        message.insert(0, uid_frame(uid));
        message
    }

    /// The message that allows one more batch of the stream with this number.
    pub fn acknowledgement(uid: u64) -> Vec<Vec<u8>> {
        vec![uid_frame(uid), Vec::new(), b"ack".to_vec()]
    }
}

fn uid_frame(uid: u64) -> Vec<u8> {
    let mut frame = Vec::with_capacity(9);
    wire::write_uint(&mut frame, uid);
    frame
}

/// A message from the server that carries the number of a request.
pub(crate) struct Incoming {
    pub uid: u64,
    frames: Vec<Vec<u8>>,
    received: Instant,
}

impl Incoming {
    /// None for frames that are no reply.
    pub fn parse(frames: Vec<Vec<u8>>) -> Option<Self> {
        let received = Instant::now();
        let reply = ReplyFrames::parse(frames.iter().map(Vec::as_slice)).ok()?;
        let uid = reply.uid_number().ok()?;
        Some(Self {
            uid,
            frames,
            received,
        })
    }

    /// The reply to a request for `operation`, whose response is of `kind`.
    pub fn into_reply(
        mut self,
        operation: Operation,
        kind: ResponseKind,
    ) -> Result<ClientReply, ClientError> {
        check_operation(&self.frames[1], operation)?;
        Ok(ClientReply {
            ticket: Ticket {
                uid: self.uid,
                operation,
            },
            kind,
            payload: (self.frames.len() > 2).then(|| self.frames.swap_remove(2)),
            received: self.received,
        })
    }
}

/// Checks that a reply's operation frame is that of the request; any other text is the server's error message.
fn check_operation(frame: &[u8], asked: Operation) -> Result<(), ClientError> {
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

/// A request in flight; [`Connection::receive`](crate::Connection::receive) takes its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "the reply is kept for Connection::receive; Connection::forget drops it"]
pub struct Ticket {
    pub(crate) uid: u64,
    pub(crate) operation: Operation,
}

impl Ticket {
    /// The request's operation.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.operation
    }
}

/// The reply to one request.
pub struct ClientReply {
    ticket: Ticket,
    kind: ResponseKind,
    payload: Option<Vec<u8>>,
    received: Instant,
}

impl ClientReply {
    /// The request it answers.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// The request's operation.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.ticket.operation
    }

    /// When it was taken from the socket; for pipelined requests this may be long before it was received by the caller.
    #[must_use]
    pub fn received(&self) -> Instant {
        self.received
    }

    /// The raw response; none for "nothing".
    #[must_use]
    pub fn payload(&self) -> Option<&[u8]> {
        self.payload.as_deref()
    }

    /// The typed response.
    ///
    /// # Errors
    /// [`ClientError::Reply`].
    pub fn response(&self) -> Result<Response<'_>, ClientError> {
        Response::decode(self.kind, self.payload()).map_err(|source| ClientError::Reply {
            operation: self.ticket.operation,
            source,
        })
    }
}

impl std::fmt::Debug for ClientReply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply")
            .field("ticket", &self.ticket)
            .field("bytes", &self.payload().map(<[u8]>::len))
            .finish_non_exhaustive()
    }
}
