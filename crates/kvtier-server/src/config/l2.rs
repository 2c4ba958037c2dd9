//! The tiers below L1, and how they are used.

use std::time::Duration;

use kvtier_l2::{AdapterConfig, Registry};

/// What becomes of an object of L1 once every tier has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum StorePolicy {
    /// It stays until it is evicted.
    Default,
    /// It leaves L1.
    SkipL1,
}

/// What becomes of an object that was loaded into L1, once its request has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PrefetchPolicy {
    /// It leaves L1, as LMCache's policy of this name has it.
    Default,
    /// It stays until it is evicted.
    Retain,
}

/// The tiers, the first one asked first, and how they are used.
#[derive(Debug, Clone)]
pub struct L2Config {
    /// The adapters.
    pub adapters: Vec<AdapterConfig>,
    /// See [`StorePolicy`].
    pub store_policy: StorePolicy,
    /// See [`PrefetchPolicy`].
    pub prefetch_policy: PrefetchPolicy,
    /// Lookups that may ask the tiers at the same time; the others wait.
    pub prefetch_max_in_flight: usize,
    /// How long a lookup asks the tiers what they have, waiting included.
    pub lookup_timeout: Duration,
    /// How long a lookup waits for what is being loaded.
    pub load_timeout: Duration,
    /// How long a stop waits for what is not stored yet.
    pub drain_timeout: Duration,
    /// Bytes of L1 that may wait for each tier to store them.
    pub store_queue_bytes: u64,
    /// Bytes of L1 that may be loaded into at the same time.
    pub load_bytes: u64,
    /// Bytes that a tier leaves free of the disk it is on.
    pub min_free_bytes: u64,
}

/// Checks the adapters; warnings of theirs are logged at the start.
///
/// # Errors
/// One line that names the flag, the key, the value and what is allowed.
pub(super) fn adapters(specs: &[String]) -> Result<Vec<AdapterConfig>, String> {
    let registry = Registry::built_in();
    specs
        .iter()
        .map(|spec| {
            registry
                .parse_json(spec)
                .map_err(|error| format!("--l2-adapter: {error}"))
        })
        .collect()
}
