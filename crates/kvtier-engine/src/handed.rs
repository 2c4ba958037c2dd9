//! Values of a hand-over in a form that another release reads.

use std::time::Duration;

/// Milliseconds of a time.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
