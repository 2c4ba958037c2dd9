//! Errors of the library.

use std::fmt;

/// Why NIXL cannot be used, or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NixlError {
    /// The library cannot be loaded.
    #[error(
        "NIXL's library {library} cannot be loaded: {tried}. Install it, for instance by `pip install nixl-cu12`, and give its path, \
         or the site-packages directory that it is in"
    )]
    Library {
        /// What was to be loaded.
        library: String,
        /// Each path, and what was wrong with it.
        tried: String,
    },
    /// The backend cannot be used.
    #[error(
        "NIXL in {library} has no backend {backend:?} that starts with these parameters: {code}. Its backends are in the directory \
         plugins beside the library, or in NIXL_PLUGIN_DIR"
    )]
    Backend {
        /// The library.
        library: String,
        /// The backend's name.
        backend: String,
        /// NIXL's answer.
        code: Code,
    },
    /// A call failed.
    #[error("NIXL cannot {action}: {code}")]
    Call {
        /// What was called.
        action: &'static str,
        /// NIXL's answer.
        code: Code,
    },
    /// The arena has no such memory.
    #[error(transparent)]
    Memory(#[from] kvtier_memory::AccessError),
    /// The file ends before the last byte that was to be moved.
    #[error("the file has only {0} bytes")]
    Short(u64),
    /// The system cannot say how long the file is.
    #[error("cannot stat the file: {0}")]
    Stat(#[from] rustix::io::Errno),
    /// A name or parameter that the library does not take.
    #[error("{0:?} has the character NUL in it")]
    Text(String),
}

/// Status of a call: 0 is success, 1 is in progress, others are errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub i32);

impl Code {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const IN_PROGRESS: Self = Self(1);
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            0 => "success",
            1 => "in progress",
            -1 => "invalid parameter",
            -2 => "error of the backend",
            -3 => "invalid state",
            -4 => "exception",
            -6 => "not found",
            _ => "unknown error",
        };
        write!(f, "{name} ({})", self.0)
    }
}
