//! How adapters are configured: LMCache's `--l2-adapter` JSON, or the same keys as a TOML table.
//!
//! One object an adapter: its `type`, the common keys of [`COMMON`], and the keys of its type. Keys, meanings and defaults
//! are LMCache 0.5.6's where it has them; what it does not have bounds what an adapter may do to those who wait for it.
//! A key that nobody knows is refused, which LMCache would ignore.

mod common;
mod error;
pub(crate) mod json;
mod key;
mod options;

pub use common::{COMMON, EVICTION, EvictionConfig};
pub use error::ConfigError;
pub(crate) use key::one_of;
pub use key::{Fallback, Interval, Key, Shape};
pub use options::{FromSetting, Options};

pub(crate) use common::{Common, refuse_rest};
pub(crate) use error::clip;

use kvtier_core::eviction::EvictionKind;

use crate::wrap::Guards;

/// Bytes of one "GB" of a configuration: LMCache's sizes are GiB under that name.
pub const GIB: u64 = 1 << 30;

/// A checked configuration of one adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// Its type.
    pub kind: &'static str,
    /// What its tier is called, if not by its type and number.
    pub name: Option<String>,
    /// Other processes may store and delete there.
    pub shared: bool,
    /// What was stored is kept when the server stops. Adapters that always keep it ignore this, as LMCache's do.
    pub persist_enabled: bool,
    /// When and how it is emptied ahead of need; with `None` only stores make room.
    pub eviction: Option<EvictionConfig>,
    /// What bounds each call.
    pub guards: Guards,
    /// The keys of its type.
    pub options: Options,
    /// What its user should know, each one line.
    pub warnings: Vec<String>,
}

impl AdapterConfig {
    /// Bytes its objects may take, as `max_capacity_gb` or `max_size_gb` says, or that of the adapter inside, which holds
    /// them; `None` is no bound, as of what is only read.
    #[must_use]
    pub fn capacity_bytes(&self) -> Option<u64> {
        let own = ["max_capacity_gb", "max_size_gb"]
            .into_iter()
            .find(|key| self.options.find::<f64>(key).is_some());
        let Some(key) = own else {
            return self.options.find::<&Self>("inner")?.capacity_bytes();
        };
        let is_read_only = self.options.find("read_only").unwrap_or(false);
        Some(self.options.gib(key)).filter(|bytes| *bytes > 0 && !is_read_only)
    }

    /// Whether what is to be emptied from a share of the capacity on has no capacity. Quotas need none.
    pub(crate) fn never_fills(&self) -> bool {
        let by_share = |eviction: &EvictionConfig| {
            !matches!(
                eviction.policy,
                EvictionKind::IsolatedLru | EvictionKind::Noop
            )
        };
        self.eviction.as_ref().is_some_and(by_share) && self.capacity_bytes().is_none()
    }
}
