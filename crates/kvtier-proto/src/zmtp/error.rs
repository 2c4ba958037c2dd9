//! Errors that end a session.

/// A violation of the protocol or of a bound, or a lack of memory, after which the connection must be closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The first bytes are not those of a versioned ZMTP greeting.
    #[error("the peer does not speak ZMTP 3")]
    Signature,
    /// An older protocol.
    #[error("the peer speaks ZMTP {0}; allowed: 3 and later")]
    Version(u8),
    /// A mechanism other than NULL.
    #[error("the peer's mechanism is {0:?}; allowed: \"NULL\"")]
    Mechanism(String),
    /// A socket type that cannot talk to ours.
    #[error("the peer's socket type is {found:?}; allowed: {}", allowed.join(", "))]
    SocketType {
        /// The peer's.
        found: String,
        /// Socket types that are allowed.
        allowed: &'static [&'static str],
    },
    /// Reserved bits of a frame's flags are set, or a command has more parts.
    #[error("a frame has the flags {0:#04x}; allowed: MORE or COMMAND, with or without LONG")]
    Flags(u8),
    /// A message or another command before READY.
    #[error("the peer sent {0} in the place of READY")]
    Handshake(&'static str),
    /// A malformed command.
    #[error("malformed command: {0}")]
    Command(&'static str),
    /// The peer refused the handshake.
    #[error("the peer refused the connection: {0:?}")]
    Refused(String),
    /// More bytes than the caller allows.
    #[error("{what} has {bytes} bytes; allowed: at most {limit}")]
    TooLarge {
        /// Frame, message, command or handshake.
        what: &'static str,
        /// Claimed or received size.
        bytes: u64,
        /// The bound.
        limit: u64,
    },
    /// The system has no memory for a frame that is arriving.
    #[error("out of memory: a frame that is arriving needs {bytes} bytes")]
    OutOfMemory {
        /// Size to which its body would have grown.
        bytes: usize,
    },
}
