//! What tenants may have without a quota of their own, and which tiers see to it.

use std::path::PathBuf;
use std::sync::Arc;

use kvtier_common::error::{Error, Result};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::quota::QuotaMode;

use super::ServerConfig;
use super::flags::ServerArgs;
use super::l2::{is_read_only, location};
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
pub struct Place {
    /// `l1`, or the name of the tier below it, such as `fs-0`.
    pub name: Arc<str>,
    /// Whether its eviction keeps tenants apart; without, quotas have no effect there.
    pub isolates: bool,
    /// Bytes that it holds at most.
    pub capacity: Option<u64>,
    /// Directory of the tier, or its type where it has none; `None` for L1.
    pub location: Option<String>,
}

impl Place {
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

/// Advice on the setting that isolates tenants.
const HOW: &str = "set --eviction-policy IsolatedLRU, or \"eviction\": {\"eviction_policy\": \"IsolatedLRU\"} in an --l2-adapter";

impl ServerConfig {
    /// The tiers, L1 first.
    pub fn places(&self) -> Vec<Place> {
        let isolates = |kind: EvictionKind| kind.build().isolates();
        let l1 = Place {
            name: "l1".into(),
            isolates: isolates(self.eviction_policy.kind()),
            capacity: Some(self.l1_bytes),
            location: None,
        };
        let adapters = self.l2.iter().flat_map(|l2| &l2.adapters);
        let below = adapters.map(|adapter| Place {
            name: adapter.tier().into(),
            // Nothing leaves what is only read.
            isolates: !is_read_only(adapter)
                && adapter
                    .eviction
                    .is_some_and(|eviction| isolates(eviction.policy)),
            capacity: adapter.capacity_bytes(),
            location: Some(location(adapter)),
        });
        std::iter::once(l1).chain(below).collect()
    }

    fn isolates(&self) -> bool {
        self.places().iter().any(|place| place.isolates)
    }

    /// Refuses strict limits that no tier would enforce.
    pub(super) fn check_quotas(self) -> Result<Self> {
        if self.quotas.mode == QuotaMode::Strict && !self.isolates() {
            Err(Error::refused(format!(
                "--quota-mode strict: no tier keeps tenants apart; {HOW}"
            )))
        } else {
            Ok(self)
        }
    }

    /// What does not do what it looks like.
    pub fn quota_warning(&self) -> Option<String> {
        let quotas = &self.quotas;
        let without_effect = || {
            let limits = quotas.default_limit.0.map(|_| "--quota-default");
            let file = quotas.file.as_ref().map(|_| "--quota-file");
            Some(format!(
                "{}: quotas have no effect, since no tier keeps tenants apart; {HOW}",
                limits.or(file)?
            ))
        };
        if self.isolates() {
            match (&quotas.file, &self.state.base) {
                (None, Err(why)) => Some(format!(
                    "quotas that are set over HTTP end with this process: {why}, and no --quota-file"
                )),
                _ => None,
            }
        } else {
            without_effect()
        }
    }
}
