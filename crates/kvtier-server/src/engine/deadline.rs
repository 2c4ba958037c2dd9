//! Transfers that come too late for whoever asked.

use std::time::{Duration, Instant};

use kvtier_proto::deadline;
use kvtier_proto::key::CacheKey;
use rustix::time::{ClockId, clock_gettime};

/// When the worker that asked gives up, if it said so: behind that, the pages may be somebody else's.
///
/// # Errors
/// One line, when that has passed.
pub(super) fn of<T>(key: &CacheKey<'_, T>) -> Result<Option<Instant>, String> {
    let time = clock_gettime(ClockId::Monotonic);
    // It starts at nought and never goes back.
    let now = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
    let left = left(deadline::decode(key.request_configs), now)?;
    Ok(left.and_then(|left| Instant::now().checked_add(left)))
}

/// Both in the time of the system's monotonic clock.
fn left(deadline: Option<Duration>, now: Duration) -> Result<Option<Duration>, String> {
    let left = deadline.map(|deadline| deadline.checked_sub(now));
    match left {
        Some(None) => Err("it is past the deadline that the worker gave".to_owned()),
        left => Ok(left.flatten()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_deadline_that_has_passed_is_refused() {
        let at = Duration::from_secs;
        assert_eq!(left(Some(at(7)), at(5)), Ok(Some(at(2))));
        assert_eq!(left(Some(at(5)), at(5)), Ok(Some(at(0))));
        assert_eq!(left(None, at(5)), Ok(None));
        assert!(left(Some(at(4)), at(5)).is_err());
    }
}
