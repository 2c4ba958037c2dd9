//! What is around every adapter, so that none has it inside: see [`guard`].
//!
//! A guard is written once for all calls (`call`) and made an adapter by one type (`guarded`). Decisions that depend
//! on time are apart from it, as functions that are told the time.

mod breaker;
mod call;
pub mod checksum;
mod deadline;
pub mod fault;
mod guarded;
mod limit;
mod retry;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use crate::Adapter;
use breaker::Breakers;
use call::PerLane;
use checksum::{Checksums, Sums};
use deadline::Deadline;
use guarded::around;
use limit::Limit;
use retry::Retry;

pub use breaker::{Admission, Breaker, Change, Rule, Ticket};
pub use call::{Lane, Verdict};
pub use retry::{back_off, random};

/// What bounds each call of an adapter. The keys of a configuration say what each one means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guards {
    /// Longest wait for a lookup, a page of a listing, or how much room there is.
    pub lookup_timeout: Duration,
    /// Longest wait for a load.
    pub load_timeout: Duration,
    /// Longest wait for a store, a delete or the closing.
    pub store_timeout: Duration,
    /// Calls of one lane under way at once.
    pub max_in_flight: u32,
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
    /// Objects whose checksums are remembered where the adapter has none; 0 is none.
    pub checksums: usize,
    /// What cannot be compared with a checksum is not there.
    pub require_checksum: bool,
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
            checksums: 1_000_000,
            require_checksum: false,
            jitter_seed: 0,
        }
    }
}

/// `adapter` with its guards around it. Its calls need a tokio runtime with time.
///
/// From the outside in, each for the sake of what is inside of it:
/// 1. The *breaker* sees what the caller would see: calls that failed for good, retries and deadlines included. While it
///    is open nothing below is touched, and the answer is [`Unavailable`](crate::ErrorKind::Unavailable) at once.
/// 2. The *deadline* bounds all the rest together, pausing between retries too. Its clock stands while the call waits for a
///    place. That may take as long once more, and ends in [`Busy`](crate::ErrorKind::Busy), which tells nothing about the
///    backend, if others were answered meanwhile.
/// 3. *Retries* never begin while an earlier attempt still has the buffers: an adapter that answered is done with them,
///    and a call that was given up is not tried again. A pause holds no place.
/// 4. The *limit* is next to the adapter and its checksums, so it counts what the adapter really does, also for callers
///    that are gone.
/// 5. *Checksums* are around an adapter that does not verify. They are innermost: there each answer passes, also those that
///    nobody waits for any more, so what is remembered is what the adapter did; the bytes of a load are compared while its
///    place and its buffers are still held, within its deadline; and bytes that are wrong are no failure of a backend, so
///    neither retries nor the breaker have to see them. An object that is found out is deleted in its load's place.
///
/// A caller that does not wait until the deadline hides from the breaker that there was no answer; so let it wait longer.
///
/// After a [`Deadline`](crate::ErrorKind::Deadline) the call's buffers may still be in use. They are kept in place by
/// their holds; whoever tries elsewhere takes other ones.
#[must_use]
pub fn guard(adapter: Arc<dyn Adapter>, guards: &Guards) -> Arc<dyn Adapter> {
    let checked = match adapter.capabilities().verifies {
        false if guards.checksums > 0 || guards.require_checksum => {
            let sums = Arc::new(Sums::new(guards.checksums));
            Arc::new(Checksums::new(adapter, sums, guards.require_checksum))
        }
        _ => adapter,
    };
    let mut guarded = around(Limit::new(guards.max_in_flight), checked);
    if guards.retries > 0 {
        let retry = Retry::new(guards.retries, guards.retry_pause, guards.jitter_seed);
        guarded = around(retry, guarded);
    }
    let times = PerLane {
        lookup: guards.lookup_timeout,
        load: guards.load_timeout,
        store: guards.store_timeout,
    };
    guarded = around(Deadline::new(times), guarded);
    if guards.breaker_failures > 0 {
        let rule = Rule {
            failures: guards.breaker_failures,
            pause: guards.breaker_pause,
            pause_max: guards.breaker_pause_max,
        };
        guarded = around(Breakers::new(rule), guarded);
    }
    guarded
}
