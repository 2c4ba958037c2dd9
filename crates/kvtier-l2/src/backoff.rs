//! Pauses between attempts to connect.

use std::time::Duration;

use kvtier_core::random::SplitMix64;

/// Pause after the first failed attempt, and the longest one; each is shortened at random by up to half.
pub const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Pause after a backend has refused its client: another attempt would be refused too, until its cause is corrected.
pub const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// The pause before another attempt, behind `attempts` failed ones in a row. Clients with other seeds come back at other times.
pub fn pause(seed: u64, attempts: u64) -> Duration {
    let longest = FIRST_PAUSE
        .saturating_mul(1 << attempts.min(16))
        .min(MAX_PAUSE);
    let random = SplitMix64::nth(seed, attempts) % 512;
    longest - longest.mul_f64(random as f64 / 1024.0)
}
