//! Why transfers are refused.

/// Why a transfer is answered with "no", in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Its worker has as many transfers in flight as it may have.
    #[error("{0}")]
    Busy(String),
    /// Staged bytes are at their limit.
    #[error("staged and not committed bytes are at the limit")]
    Staging,
    /// It is a retrieve.
    #[error("no lookup of its request has found these chunks, or they are gone")]
    NotHeld,
    /// It cannot be done, or could not.
    #[error("{0}")]
    Failed(String),
}

impl From<String> for Refusal {
    fn from(error: String) -> Self {
        Self::Failed(error)
    }
}

impl Refusal {
    /// For the metrics, given what is said of those that failed.
    pub fn reason(&self, failed: &'static str) -> &'static str {
        match self {
            Self::Busy(_) => "lane_full",
            Self::Staging => "staging_full",
            Self::NotHeld => "not_held",
            Self::Failed(_) => failed,
        }
    }
}
