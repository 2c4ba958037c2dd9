//! Deadlines of transfers: once the worker that asked has timed out, its transfer is refused.

use std::time::{Duration, Instant};

use kvtier_common::error::{Error, Result};
use kvtier_proto::deadline;
use kvtier_proto::key::CacheKey;
use rustix::time::{ClockId, clock_gettime};

/// Deadline of the worker that asked, if its request names one: after it, the pages may belong to another request.
///
/// # Errors
/// One line, when that has passed.
pub fn of<T>(key: &CacheKey<'_, T>) -> Result<Option<Instant>> {
    let deadline = deadline::decode(key.request_configs);
    here(deadline, Instant::now, || {
        let time = clock_gettime(ClockId::Monotonic);
        // It starts at nought and never goes back.
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    })
}

/// Our own clock is read first: a pause before the other is read makes the deadline earlier, never later.
fn here(
    deadline: Option<Duration>,
    own: impl FnOnce() -> Instant,
    monotonic: impl FnOnce() -> Duration,
) -> Result<Option<Instant>> {
    let now = own();
    let left = left(deadline, monotonic())?;
    Ok(left.and_then(|left| now.checked_add(left)))
}

/// Time until the deadline; both arguments are in the time of the system's monotonic clock.
fn left(deadline: Option<Duration>, now: Duration) -> Result<Option<Duration>> {
    let left = deadline.map(|deadline| deadline.checked_sub(now));
    match left {
        Some(None) => Err(Error::refused(
            "it is past the deadline that the worker gave",
        )),
        left => Ok(left.flatten()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_between_clocks_makes_deadline_earlier() {
        let start = Instant::now();
        // Both clocks show this, and each reading is followed by a pause of 3 s.
        let time = std::cell::Cell::new(Duration::from_secs(10));
        let read = || time.replace(time.get() + Duration::from_secs(3));
        let deadline = Some(Duration::from_secs(20));
        let here = here(deadline, || start + read(), read).unwrap();
        assert_eq!(here, Some(start + Duration::from_secs(17)));
    }

    #[test]
    fn only_a_deadline_that_has_passed_is_refused() {
        let at = Duration::from_secs;
        assert_eq!(left(Some(at(7)), at(5)), Ok(Some(at(2))));
        assert_eq!(left(Some(at(5)), at(5)), Ok(Some(at(0))));
        assert_eq!(left(None, at(5)), Ok(None));
        assert!(left(Some(at(4)), at(5)).is_err());
    }
}
