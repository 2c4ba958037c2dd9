//! Times of a cache: ticks since one fixed moment.

use std::time::Duration;

/// Ticks of the cache's clock per second; a `u32` of them lasts 13 years.
pub(super) const TICKS_PER_SECOND: u32 = 10;

/// A time in ticks.
pub(super) fn ticks(time: Duration) -> u32 {
    let ticks = time.as_secs() * u64::from(TICKS_PER_SECOND)
        + u64::from(time.subsec_millis() / (1000 / TICKS_PER_SECOND));
    u32::try_from(ticks).unwrap_or(u32::MAX)
}
