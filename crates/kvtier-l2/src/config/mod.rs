//! How adapters are configured: LMCache's `--l2-adapter` JSON, or the same keys as a TOML table.
//!
//! One object an adapter: its `type`, the common keys of [`COMMON`], and the keys of its type. Keys, meanings and defaults
//! are LMCache 0.5.6's where it has them; what it does not have bounds what an adapter may do to those who wait for it.
//! A key that nobody knows is refused, which LMCache would ignore.

mod common;
mod error;
mod key;
mod options;

pub use common::{COMMON, EVICTION, EvictionConfig};
pub use error::ConfigError;
pub use key::{Fallback, Interval, Key, Shape};
pub use options::{FromSetting, Options};

pub(crate) use common::{Common, refuse_rest};
pub(crate) use error::clip;

use crate::wrap::Guards;

/// Bytes of one "GB" of a configuration: LMCache's sizes are GiB under that name.
pub const GIB: u64 = 1 << 30;

/// A checked configuration of one adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// Its type.
    pub kind: &'static str,
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
    /// Bytes its objects may take, as `max_capacity_gb` or `max_size_gb` says; `None` is no bound.
    #[must_use]
    pub fn capacity_bytes(&self) -> Option<u64> {
        ["max_capacity_gb", "max_size_gb"]
            .into_iter()
            .find(|key| self.options.find::<f64>(key).is_some())
            .map(|key| self.options.gib(key))
            .filter(|bytes| *bytes > 0)
    }
}
