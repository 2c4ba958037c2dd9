//! Errors of an object or a backend.

use kvtier_memory::AccessError;

use crate::redact;

/// Kind of an error, as far as callers act differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The backend has no such object. Not a failure: a miss.
    NotFound,
    /// The object under this key is not what was stored: wrong length, checksum, layout or tenant.
    Corrupt,
    /// The disk or the tier is full. Stores may work again later.
    Full,
    /// The tenant is at its limit. Stores may work again later.
    OverQuota,
    /// No answer in time.
    Deadline,
    /// Too many calls in flight: this one was not sent. Others are answered.
    Busy,
    /// The backend does not answer or refuses all calls; the next one may succeed.
    Unavailable,
    /// The backend refused this one call; it would refuse it again.
    Refused,
    /// The object is there but cannot be read now. It may be intact.
    Unreadable,
    /// The memory in L1 could not be read or written.
    Memory,
    /// The adapter does not support the call.
    Unsupported,
}

impl ErrorKind {
    /// Whether the same call may succeed a moment later.
    #[must_use]
    pub fn is_transient(self) -> bool {
        matches!(self, Self::Deadline | Self::Busy | Self::Unavailable)
    }

    /// Returns the kind's name in logs and metric labels.
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

impl From<AccessError> for L2Error {
    fn from(error: AccessError) -> Self {
        Self::new(ErrorKind::Memory, error.to_string())
    }
}

/// Error of an adapter: its kind and one line that names what was tried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct L2Error {
    kind: ErrorKind,
    message: String,
}

impl L2Error {
    /// Returns an error with one line that names what was tried; secrets in it are redacted.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: redact::text(&message.into()),
        }
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}
