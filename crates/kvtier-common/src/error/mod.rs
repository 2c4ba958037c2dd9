//! The error type of the server: a kind for code, and one line for people.
//!
//! Metric labels, HTTP codes and exit codes derive from the kind, never from the text. Second tiers have their own type,
//! `kvtier_l2::L2Error`. This module knows nothing of what fails.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

/// Kind of an error, as far as callers act differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// A value, a file or a request is not allowed; it would be refused again.
    Invalid,
    /// Another process has the address, the name or the file.
    InUse,
    /// The machine lacks memory, threads or a device.
    Unavailable,
    /// The system could not read, write or open something.
    Io,
    /// A worker has as many transfers in flight as it may have.
    LaneFull,
    /// Staged bytes are at their limit.
    StagingFull,
    /// No lookup permits the retrieve.
    NotHeld,
}

impl ErrorKind {
    /// Metric label, or `other` for a kind without a label of its own.
    #[must_use]
    pub fn label(self, other: &'static str) -> &'static str {
        match self {
            Self::LaneFull => "lane_full",
            Self::StagingFull => "staging_full",
            Self::NotHeld => "not_held",
            Self::Invalid | Self::InUse | Self::Unavailable | Self::Io => other,
        }
    }
}

/// Result of what fails with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of the server. Its text is one line: `CONTEXT: MESSAGE: SOURCE; HINT`.
#[derive(Debug, Clone)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    /// Innermost first.
    context: Vec<String>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
    hint: Option<String>,
}

impl Error {
    /// Returns an error with this message.
    pub fn new(kind: ErrorKind, message: impl fmt::Display) -> Self {
        Self {
            kind,
            message: message.to_string(),
            context: Vec::new(),
            source: None,
            hint: None,
        }
    }

    /// Returns a refusal, [`ErrorKind::Invalid`], with this message or the text of this error.
    pub fn refused(message: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Returns the refusal of the value of a field; `allowed` begins with "give".
    pub fn invalid(
        field: impl fmt::Display,
        value: impl fmt::Display,
        allowed: impl fmt::Display,
    ) -> Self {
        Self::refused(format!("{field}: {value} is not allowed; {allowed}"))
    }

    /// Returns an error of the system while `what` was done; its kind is that of the system's error.
    pub fn io(what: impl fmt::Display, error: impl Into<io::Error>) -> Self {
        Self::from(error.into()).context(what)
    }

    /// Names what the error is about, before all that names it already.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.context.push(context.to_string());
        self
    }

    /// Adds the cause, behind the message.
    #[must_use]
    pub fn source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// Adds what to do about it, at the end of the line.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    /// Rewrites the whole line, for example without secrets; the source is dropped with it.
    #[must_use]
    pub fn map_text(self, rewrite: impl FnOnce(&str) -> String) -> Self {
        Self::new(self.kind, rewrite(&self.to_string()))
    }

    /// Kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for context in self.context.iter().rev() {
            write!(f, "{context}: ")?;
        }
        f.write_str(&self.message)?;
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        match &self.hint {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

impl StdError for Error {
    /// The text has the source already: reports that print the chain continue behind it.
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref()?.source()
    }
}

/// The kind and the text of the system's error.
impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::AddrInUse => ErrorKind::InUse,
            io::ErrorKind::OutOfMemory => ErrorKind::Unavailable,
            _ => ErrorKind::Io,
        };
        Self::new(kind, error)
    }
}

/// Errors are equal if their kinds and texts are.
impl PartialEq for Error {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind && self.to_string() == other.to_string()
    }
}

#[cfg(test)]
mod tests;
