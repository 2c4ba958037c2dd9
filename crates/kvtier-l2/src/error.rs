//! What can go wrong with an object or a backend.

use crate::redact;

/// Kinds of errors, as far as callers act differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The backend has no such object. Not a failure: a miss.
    NotFound,
    /// There is an object under this key, and it is not what was stored: wrong length, checksum, layout or tenant.
    Corrupt,
    /// No room: the disk or the tier is full. Storing may work again later.
    Full,
    /// The tenant's limit leaves no room. Storing may work again later.
    OverQuota,
    /// No answer in time.
    Deadline,
    /// So many calls are under way that it was not asked. It answers others.
    Busy,
    /// The backend does not answer, or refuses all: the next call may succeed.
    Unavailable,
    /// The backend refused this one call; it would refuse it again.
    Refused,
    /// The object is there and cannot be read now. It may be whole.
    Unreadable,
    /// The memory in L1 could not be read or written.
    Memory,
    /// The adapter cannot do that.
    Unsupported,
}

impl ErrorKind {
    /// Whether the same call may succeed a moment later.
    #[must_use]
    pub fn is_transient(self) -> bool {
        matches!(self, Self::Deadline | Self::Busy | Self::Unavailable)
    }

    /// For logs and metric labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Corrupt => "corrupt",
            Self::Full => "full",
            Self::OverQuota => "over_quota",
            Self::Deadline => "deadline",
            Self::Busy => "busy",
            Self::Unavailable => "unavailable",
            Self::Refused => "refused",
            Self::Unreadable => "unreadable",
            Self::Memory => "memory",
            Self::Unsupported => "unsupported",
        }
    }
}

/// An error of an adapter: its kind, and one line with what was tried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct L2Error {
    kind: ErrorKind,
    message: String,
}

impl L2Error {
    /// An error with one line that names what was tried; secrets in it are hidden.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: redact::text(&message.into()),
        }
    }

    /// What kind it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}
