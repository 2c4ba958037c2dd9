//! What can go wrong for a client.

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
    /// The address is none, or the socket could not be made.
    #[error("cannot connect to {endpoint}: {source}")]
    Connect {
        /// The server's address.
        endpoint: String,
        /// What ZMQ said.
        source: zmq::Error,
    },
    /// The request did not leave, or the socket broke while waiting.
    #[error("{operation} to {endpoint}: {source}")]
    Socket {
        /// What was asked.
        operation: Operation,
        /// The server's address.
        endpoint: String,
        /// What ZMQ said.
        source: zmq::Error,
    },
    /// No reply within the deadline: the server is down, busy, or does not answer such a request.
    #[error("{operation}: no reply from {endpoint} within {waited:?}")]
    Timeout {
        /// What was asked.
        operation: Operation,
        /// The server's address.
        endpoint: String,
        /// How long the reply was waited for.
        waited: Duration,
    },
    /// The connection was lost before the reply: the server may have done what was asked, or not.
    #[error("{operation}: the connection to {endpoint} was lost before the reply")]
    Disconnected {
        /// What was asked.
        operation: Operation,
        /// The server's address.
        endpoint: String,
    },
    /// The server stopped answering heartbeats before the reply.
    #[error("{operation}: {endpoint} has stopped answering")]
    Degraded {
        /// What was asked.
        operation: Operation,
        /// The server's address.
        endpoint: String,
    },
    /// The process is a fork of the one that made the client, which has its threads.
    #[error("{operation}: used after fork; make another client in this process")]
    Forked {
        /// What was to be asked.
        operation: Operation,
    },
    /// The client was closed before the reply.
    #[error("{operation}: the client was closed")]
    Closed {
        /// What was asked.
        operation: Operation,
    },
    /// The client's own thread has panicked, which is a bug: the client is of no use any more.
    #[error("{operation}: the client's I/O thread panicked, which is a bug; make another client")]
    Broken {
        /// What was asked.
        operation: Operation,
    },
    /// The result was taken before, or given up.
    #[error("{operation}: the result was taken before, or given up")]
    Cancelled {
        /// What was asked.
        operation: Operation,
    },
    /// Too many requests are under way already.
    #[error("{operation}: {limit} requests are under way, which is the limit")]
    TooMany {
        /// What was to be asked.
        operation: Operation,
        /// Most requests that may be.
        limit: usize,
    },
    /// The system refused a thread or a descriptor.
    #[error("the client cannot be started: {source}")]
    System {
        /// What the system said.
        source: std::io::Error,
    },
    /// The server answered with an error text.
    #[error("{operation}: the server says: {message}")]
    Server {
        /// What was asked.
        operation: Operation,
        /// The server's words.
        message: String,
    },
    /// The reply is not what the operation returns.
    #[error("{operation}: the reply cannot be read: {source}")]
    Reply {
        /// What was asked.
        operation: Operation,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// The reply is well formed and still makes no sense.
    #[error("{operation}: {message}")]
    Unexpected {
        /// What was asked.
        operation: Operation,
        /// What is wrong, and what was expected.
        message: String,
    },
    /// The server's soft "no" where success was needed.
    #[error("{operation}: the server refused it")]
    Refused {
        /// What was asked.
        operation: Operation,
    },
    /// The request has something in it that the protocol cannot say.
    #[error("{operation}: {source}")]
    Encode {
        /// What was to be asked.
        operation: Operation,
        /// What does not fit.
        source: EncodeError,
    },
    /// The ticket's reply was taken already, or belongs to another connection.
    #[error("no request with uid {uid} is waiting for a reply on this connection")]
    UnknownTicket {
        /// The request's number.
        uid: u64,
    },
    /// An argument that cannot be meant.
    #[error("{field}: {message}")]
    Argument {
        /// Which argument.
        field: &'static str,
        /// Its value, and what is allowed.
        message: String,
    },
    /// The server's shared pool cannot be used.
    #[error("shared pool {name:?}: {message}")]
    Pool {
        /// Its name, as the server told it.
        name: String,
        /// What is wrong.
        message: String,
    },
    /// The worker's own segment could not be made.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// Bytes of the worker's own segment could not be read or written.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// Chunks could not be pickled.
    #[error("{operation}: {source}", operation = Operation::CommitStore)]
    Pickle {
        /// Why.
        #[from]
        source: WriteError,
    },
}

impl ClientError {
    /// What prevents the use of a server that answers; none where it did not answer.
    #[must_use]
    pub fn obstacle(&self) -> Option<String> {
        match self {
            Self::Timeout { .. }
            | Self::Disconnected { .. }
            | Self::Degraded { .. }
            | Self::Closed { .. } => None,
            _ => Some(self.to_string()),
        }
    }
}
