//! Wrappers around every adapter: see [`guard`].
//!
//! Decisions of a breaker, and pauses, are functions with the time as an argument.

mod breaker;
pub mod checksum;
pub mod fault;
mod guarded;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use crate::Adapter;
use checksum::{ChecksumCache, Checksums};
use guarded::Guarded;

/// Limits of the calls of an adapter, as configured by the common keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guards {
    /// Deadline of a lookup, a page of a listing, or the free bytes.
    pub lookup_timeout: Duration,
    /// Deadline of a load.
    pub load_timeout: Duration,
    /// Deadline of a store, a delete or the closing.
    pub store_timeout: Duration,
    /// Calls in flight per class: lookups, loads, stores.
    pub max_in_flight: u32,
    /// Retries of items with a transient error.
    pub retries: u32,
    /// Pause before the first retry.
    pub retry_pause: Duration,
    /// Consecutive unanswered calls of a class that open its breaker; 0 is never.
    pub breaker_failures: u32,
    /// First pause of an open breaker.
    pub breaker_pause: Duration,
    /// Longest pause of an open breaker.
    pub breaker_pause_max: Duration,
    /// Checksums kept for an adapter that does not verify; 0 is none.
    pub checksums: usize,
    /// Objects without a checksum to compare with are misses.
    pub require_checksum: bool,
    /// Seed of the jitter of the pauses, so that servers can differ. Not a key.
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
            breaker_pause_max: Duration::from_secs(5),
            checksums: 1_000_000,
            require_checksum: false,
            jitter_seed: 0,
        }
    }
}

/// Returns `adapter` with its guards around it. Its calls need a tokio runtime with time.
///
/// From the outside in:
/// 1. The *breaker* sees the final results, after retries and deadlines. While it is open, calls fail at once with
///    [`Unavailable`](crate::ErrorKind::Unavailable).
/// 2. The *deadline* bounds everything below, pauses between retries included. Its clock is paused while the call is
///    queued at the limit. The queue has the same deadline again; it ends in [`Busy`](crate::ErrorKind::Busy), which
///    does not count against the backend, if other calls were answered meanwhile.
/// 3. *Retries* start only after an answer, when the adapter no longer uses the buffers; a call that timed out is not
///    retried. A pause holds no permit of the limit.
/// 4. The *limit* is next to the adapter and its checksums, so it counts the work of the adapter, also for callers that no
///    longer wait.
/// 5. *Checksums* are around an adapter that does not verify. They are innermost, where they see each answer, also those
///    after a timeout; loaded bytes are compared within the deadline, while the permit and the buffers are held. Wrong
///    bytes are no failure of a backend: neither retries nor the breaker see them. A corrupt object is deleted under the
///    permit of its load.
///
/// Transformations (`serde`) are between the limit and the checksums, which are those of the transformed bytes.
///
/// A caller that stops waiting before the deadline hides from the breaker that there was no answer, so its own timeout has
/// to be longer.
///
/// After a [`Deadline`](crate::ErrorKind::Deadline) the call's buffers may still be in use. Their holds keep them in
/// place; a retry elsewhere uses other buffers.
#[must_use]
pub fn guard(adapter: Arc<dyn Adapter>, guards: &Guards) -> Arc<dyn Adapter> {
    limited(checked(adapter, guards), guards)
}

/// Returns `adapter` with the innermost of its guards.
pub(crate) fn checked(adapter: Arc<dyn Adapter>, guards: &Guards) -> Arc<dyn Adapter> {
    match adapter.capabilities().verifies {
        false if guards.checksums > 0 || guards.require_checksum => {
            let sums = Arc::new(ChecksumCache::new(guards.checksums));
            Arc::new(Checksums::new(adapter, sums, guards.require_checksum))
        }
        _ => adapter,
    }
}

/// Returns `adapter` with its other guards.
pub(crate) fn limited(adapter: Arc<dyn Adapter>, guards: &Guards) -> Arc<dyn Adapter> {
    Arc::new(Guarded::new(adapter, guards))
}
