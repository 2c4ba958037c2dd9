//! Errors of clients.

use std::time::Duration;

use kvtier_memory::{AccessError, SegmentError};
use kvtier_proto::operation::Operation;
use kvtier_proto::pickle::WriteError;
use kvtier_proto::request::EncodeError;
use kvtier_proto::wire::DecodeError;

/// A failed call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The address is invalid.
    #[error("cannot connect to {endpoint}: {message}")]
    Connect {
        /// The server's address.
        endpoint: String,
        /// What is wrong with it, and what is allowed.
        message: String,
    },
    /// Too many requests wait for the server to take them.
    #[error("{operation}: {limit} requests wait to be sent to {endpoint}, which is the limit")]
    Unsent {
        /// The request's operation.
        operation: Operation,
        /// The server's address.
        endpoint: String,
        /// Limit of unsent requests.
        limit: usize,
    },
    /// No reply within the deadline: the server is down, busy, or does not answer such a request.
    #[error(
        "{operation}: no reply from {endpoint} within {waited:?}{}",
        no_connection.as_ref().map(|why| format!("; no connection: {why}")).unwrap_or_default()
    )]
    Timeout {
        /// The request's operation.
        operation: Operation,
        /// The server's address.
        endpoint: String,
        /// Time waited for the reply.
        waited: Duration,
        /// Each address that the last attempt to connect has tried, and why it failed; none while there is a connection.
        no_connection: Option<String>,
    },
    /// The server answers, and has no result within the deadline: it waits for a second tier.
    #[error(
        "{operation}: {endpoint} has no result within {waited:?}, since it waits for a second tier; what that tier has is loaded \
         all the same, for the next request"
    )]
    Pending {
        /// The request's operation.
        operation: Operation,
        /// The server's address.
        endpoint: String,
        /// Time waited for the result.
        waited: Duration,
    },
    /// The connection was lost before the reply: the server may have served the request, or not.
    #[error("{operation}: the connection to {endpoint} was lost before the reply")]
    Disconnected {
        /// The request's operation.
        operation: Operation,
        /// The server's address.
        endpoint: String,
    },
    /// The server stopped answering heartbeats before the reply.
    #[error("{operation}: {endpoint} has stopped answering")]
    Degraded {
        /// The request's operation.
        operation: Operation,
        /// The server's address.
        endpoint: String,
    },
    /// The process is a fork of the one that made the client, which has its threads.
    #[error("{operation}: used after fork; make another client in this process")]
    Forked {
        /// The request's operation.
        operation: Operation,
    },
    /// The client was closed before the reply.
    #[error("{operation}: the client was closed")]
    Closed {
        /// The request's operation.
        operation: Operation,
    },
    /// The client's I/O thread has panicked, which is a bug: the client cannot be used any more.
    #[error("{operation}: the client's I/O thread panicked, which is a bug; make another client")]
    Broken {
        /// The request's operation.
        operation: Operation,
    },
    /// The result was taken before, or cancelled.
    #[error("{operation}: the result was taken before, or cancelled")]
    Cancelled {
        /// The request's operation.
        operation: Operation,
    },
    /// Too many requests are in flight.
    #[error("{operation}: {limit} requests are in flight, which is the limit")]
    TooMany {
        /// The request's operation.
        operation: Operation,
        /// Limit of requests in flight.
        limit: usize,
    },
    /// The system refused a thread or a descriptor.
    #[error("the client cannot be started: {source}")]
    System {
        /// The error of the system.
        source: std::io::Error,
    },
    /// The server answered with an error text.
    #[error("{operation}: the server says: {message}")]
    Server {
        /// The request's operation.
        operation: Operation,
        /// The server's text.
        message: String,
    },
    /// The reply is no response of the operation.
    #[error("{operation}: the reply cannot be read: {source}")]
    Reply {
        /// The request's operation.
        operation: Operation,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// The reply is well formed, and invalid.
    #[error("{operation}: {message}")]
    Unexpected {
        /// The request's operation.
        operation: Operation,
        /// What is wrong, and what was expected.
        message: String,
    },
    /// The server answered "no" where success was needed.
    #[error("{operation}: the server refused it")]
    Refused {
        /// The request's operation.
        operation: Operation,
    },
    /// The request cannot be expressed in the protocol.
    #[error("{operation}: {source}")]
    Encode {
        /// The request's operation.
        operation: Operation,
        /// What cannot be expressed.
        source: EncodeError,
    },
    /// The ticket's reply was received before, or the ticket belongs to another connection.
    #[error("no request with uid {uid} is waiting for a reply on this connection")]
    UnknownTicket {
        /// The request's number.
        uid: u64,
    },
    /// An argument is invalid.
    #[error("{field}: {message}")]
    Argument {
        /// Name of the argument.
        field: &'static str,
        /// Value of the argument, and what is allowed.
        message: String,
    },
    /// The server's shared pool cannot be used.
    #[error("shared pool {name:?}: {message}")]
    Pool {
        /// Name of the pool, as sent by the server.
        name: String,
        /// What is wrong.
        message: String,
    },
    /// The worker's own segment could not be created.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// Bytes of the worker's own segment could not be read or written.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The worker abandoned a transfer before it was complete.
    #[error("{reason}")]
    Abandoned {
        /// Why.
        reason: String,
    },
    /// Chunks could not be pickled.
    #[error("{operation}: {source}", operation = Operation::CommitStore)]
    Pickle {
        /// Why.
        #[from]
        source: WriteError,
    },
}

impl ClientError {
    /// Why a server cannot be used although it answers; none if it did not answer.
    #[must_use]
    pub fn obstacle(&self) -> Option<String> {
        match self {
            Self::Timeout { .. }
            | Self::Pending { .. }
            | Self::Disconnected { .. }
            | Self::Degraded { .. }
            | Self::Closed { .. } => None,
            _ => Some(self.to_string()),
        }
    }
}
