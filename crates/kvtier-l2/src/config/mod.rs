//! Configuration of adapters: LMCache's `--l2-adapter` JSON, or the same keys as a TOML table.
//!
//! One object per adapter: its `type`, the common keys of [`COMMON`], and the keys of its type. Keys, meanings and defaults
//! are those of LMCache 0.5.6 if it has them; the others mostly limit the calls of an adapter. Unknown keys are refused,
//! which LMCache ignores.

mod common;
mod error;
pub mod json;
mod key;
mod options;
mod transform;

pub use common::{COMMON, EVICTION, EvictionConfig, MAX_CAPACITY_GB};
pub use error::ConfigError;
pub(crate) use key::refuse_rest;
pub use key::{ALLOWED_PATH, Fallback, Interval, Key, Shape, WITHOUT_EFFECT, is_path, one_of};
pub use options::{FromSetting, Options};
pub use transform::SerdeConfig;
pub(crate) use transform::{AESGCM_KEYS, COMPRESS_KEYS, FP8_KEYS, SerdeKind};

pub(crate) use common::Common;
pub(crate) use error::{clip, clip_to};

use kvtier_core::eviction::EvictionKind;

use crate::wrap::Guards;

/// Bytes per "GB" of a configuration: LMCache's sizes are GiB under that name.
pub const GIB: u64 = 1 << 30;

/// A checked configuration of one adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// Adapter type, the `type` in a configuration.
    pub kind: &'static str,
    /// Name of its tier; `None` within another adapter, or where a configuration has one adapter only.
    pub name: Option<String>,
    /// Other processes may store and delete there.
    pub shared: bool,
    /// Stored objects are kept when the server stops. Adapters that always keep them ignore this, as LMCache's do.
    pub persist_enabled: bool,
    /// Transformations of its objects, in the order of a store.
    pub serde: Vec<SerdeConfig>,
    /// Eviction ahead of demand; with `None` only stores evict.
    pub eviction: Option<EvictionConfig>,
    /// Limits of its calls.
    pub guards: Guards,
    /// The keys of its type.
    pub options: Options,
    /// Warnings for its user, one line each.
    pub warnings: Vec<String>,
}

impl AdapterConfig {
    /// What log lines, metrics and limits call its tier.
    #[must_use]
    pub fn tier(&self) -> &str {
        self.name.as_deref().unwrap_or(self.kind)
    }

    /// Capacity by `max_capacity_gb` or `max_size_gb`, its own or that of the adapter inside; `None` is unbounded, as is a
    /// read-only adapter.
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

    /// Whether eviction is configured without a capacity to take a fraction of. Quotas need none.
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
