//! What tenants may have without a quota of their own, and which tiers see to it.

use std::path::PathBuf;
use std::sync::Arc;

use kvtier_common::error::{Error, Result};
use kvtier_core::quota::QuotaMode;

use super::flags::ServerArgs;
use super::values::QuotaModeName;
use crate::limit::Limit;

/// How limits are meant, and where they are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaSettings {
    /// What a limit means.
    pub mode: QuotaMode,
    /// What tenants without a quota of their own may have.
    pub default_limit: Limit,
    /// The value of `--quota-file`; without one they are in the state directory.
    pub file: Option<PathBuf>,
}

impl QuotaSettings {
    pub(super) fn of(args: &ServerArgs) -> Self {
        Self {
            mode: match args.quota_mode {
                QuotaModeName::Soft => QuotaMode::Soft,
                QuotaModeName::Strict => QuotaMode::Strict,
            },
            default_limit: args.quota_default,
            file: args.quota_file.clone(),
        }
    }

    /// The mode's name in the configuration.
    pub fn mode_name(&self) -> &'static str {
        match self.mode {
            QuotaMode::Soft => "soft",
            QuotaMode::Strict => "strict",
        }
    }
}

/// A tier as far as quotas are concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierPlace {
    /// `l1`, or the name of the tier below it, such as `fs-0`.
    pub name: Arc<str>,
    /// Whether its eviction keeps tenants apart; without, quotas have no effect there.
    pub isolates: bool,
    /// Bytes that it holds at most.
    pub capacity: Option<u64>,
    /// Directory of the tier, or its type where it has none; `None` for L1.
    pub location: Option<String>,
}

impl TierPlace {
    /// Checks that `bytes` can be reserved here.
    ///
    /// # Errors
    /// If the capacity is smaller; the error has the capacity.
    pub fn check_reserved(&self, bytes: u128) -> Result<()> {
        match self.capacity {
            Some(capacity) if self.isolates && bytes > u128::from(capacity) => {
                Err(Error::refused(format!(
                    "{}: {} reserved for all tenants together is more than the {} it has",
                    self.name,
                    Limit(Some(u64::try_from(bytes).unwrap_or(u64::MAX))),
                    Limit(Some(capacity))
                )))
            }
            _ => Ok(()),
        }
    }
}
