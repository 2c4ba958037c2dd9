//! Errors of the CUDA driver.

/// The result codes that this crate tests for; all others are only shown.
pub mod code {
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const INVALID_VALUE: i32 = 1;
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// `CUDA_ERROR_INVALID_CONTEXT`: for example, no context is current, or a process opened its own handle.
    pub const INVALID_CONTEXT: i32 = 201;
    /// `CUDA_ERROR_NOT_READY`: not an error, but "not yet".
    pub const NOT_READY: i32 = 600;
    /// `CUDA_ERROR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: i32 = 801;
}

/// A driver call that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver library does not exist or cannot be loaded.
    #[error("the CUDA driver library {library} cannot be loaded: {why}")]
    Library {
        /// Path or name of the library.
        library: String,
        /// Message of the dynamic linker.
        why: String,
    },
    /// The library lacks a function, because it is older than the function.
    #[error("the CUDA driver has no function {function}")]
    Missing {
        /// Name of the function.
        function: &'static str,
    },
    /// The configured executor does not work.
    #[error("the executor {name} cannot be used on this GPU: {why}")]
    Executor {
        /// Name of the executor.
        name: &'static str,
        /// Result of the trial.
        why: String,
    },
    /// Not an error, but "not yet"; too frequent to format a text each time.
    #[error("{function}: not ready")]
    NotReady {
        /// Name of the function.
        function: &'static str,
    },
    /// The driver returned an error code.
    #[error("{function}: {name} ({code})")]
    Call {
        /// Name of the function.
        function: &'static str,
        /// The driver's result code, never 0.
        code: i32,
        /// The driver's name and description of the code.
        name: String,
    },
}

impl CudaError {
    /// The driver's result code, if the driver was called.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Call { code, .. } => Some(*code),
            Self::NotReady { .. } => Some(code::NOT_READY),
            Self::Library { .. } | Self::Missing { .. } | Self::Executor { .. } => None,
        }
    }

    /// Whether the context is lost: every later call fails with the same code. The manual says of these errors that the
    /// process must be restarted. Started work may still write for a moment, and its state cannot be queried.
    pub fn ends_context(&self) -> bool {
        matches!(
            self.code(),
            Some(214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721)
        )
    }

    /// Appends details to the message of a [`CudaError::Call`].
    pub(super) fn with_details(mut self, details: &str) -> Self {
        if let Self::Call { name, .. } = &mut self
            && !details.is_empty()
        {
            name.push_str("; ");
            name.push_str(details);
        }
        self
    }
}
