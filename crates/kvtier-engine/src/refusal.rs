//! Why transfers are refused.

use super::instances::Unserved;

/// Why a transfer is answered with "no", in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Its worker has as many transfers in flight as it may have.
    #[error("{0}")]
    Busy(String),
    /// Staged bytes are at their limit.
    #[error("staged and not committed bytes are at the limit")]
    Staging,
    /// No lookup permits the retrieve.
    #[error("no lookup of its request has found these chunks, or they were evicted")]
    NotHeld,
    /// Its worker is registered without a cache.
    #[error("{}", .0.name())]
    Unserved(Unserved),
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
    /// The label of the metrics; `failed` is that of transfers that failed.
    pub fn reason(&self, failed: &'static str) -> &'static str {
        match self {
            Self::Busy(_) => "lane_full",
            Self::Staging => "staging_full",
            Self::NotHeld => "not_held",
            Self::Unserved(unserved) => unserved.name(),
            Self::Failed(_) => failed,
        }
    }

    /// Whether each is logged. A miss is no trouble; a full budget and a worker without a cache have log lines of their own.
    pub fn is_trouble(&self) -> bool {
        matches!(self, Self::Busy(_) | Self::Failed(_))
    }
}
