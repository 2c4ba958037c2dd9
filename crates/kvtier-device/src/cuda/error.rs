//! What can go wrong between the driver and us.

/// A call of the driver that did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver's library is not there, or is no such library.
    #[error("the CUDA driver library {library} cannot be loaded: {why}")]
    Library {
        /// Path or name that was tried.
        library: String,
        /// What the dynamic linker says.
        why: String,
    },
    /// The library lacks a function: it is older than the function.
    #[error("the CUDA driver has no function {function}")]
    Missing {
        /// Name of the function.
        function: &'static str,
    },
    /// A way of copying that was demanded and does not work.
    #[error("the executor {name} cannot be used on this GPU: {why}")]
    Executor {
        /// Which.
        name: &'static str,
        /// What it did when it was tried.
        why: String,
    },
    /// Not an error, but "not yet"; said so often that it is no text to be made each time.
    #[error("{function}: not ready")]
    NotReady {
        /// Name of the function.
        function: &'static str,
    },
    /// The driver refused.
    #[error("{function}: {name} ({code})")]
    Call {
        /// Name of the function.
        function: &'static str,
        /// The driver's number, never 0.
        code: i32,
        /// The driver's name for it and what it adds to that.
        name: String,
    },
}

impl CudaError {
    /// The driver's number, where the driver was asked.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Call { code, .. } => Some(*code),
            Self::NotReady { .. } => Some(super::driver::code::NOT_READY),
            Self::Library { .. } | Self::Missing { .. } | Self::Executor { .. } => None,
        }
    }

    /// Whether the driver has given up the context: it takes no more work, and every later call says the same. These are
    /// the errors of which the manual says that the process must be started anew. What had been begun may still move for
    /// a moment, and nobody can be asked.
    pub fn ends_context(&self) -> bool {
        matches!(
            self.code(),
            Some(214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721)
        )
    }

    /// Adds what else is known about a refusal.
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
