//! Transfers that come too late for whoever asked.

use std::time::SystemTime;

use kvtier_proto::deadline;
use kvtier_proto::key::CacheKey;

/// When the worker that asked gives up, if it said so: behind that, the pages may be somebody else's.
#[derive(Clone, Copy)]
pub(super) struct Deadline(Option<SystemTime>);

impl Deadline {
    /// The one that a key carries.
    pub(super) fn of<T>(key: &CacheKey<'_, T>) -> Self {
        Self(deadline::decode(key.request_configs))
    }

    /// Refuses what is past it.
    pub(super) fn check(self) -> Result<(), String> {
        self.check_at(SystemTime::now())
    }

    fn check_at(self, now: SystemTime) -> Result<(), String> {
        match self.0 {
            Some(deadline) if deadline < now => {
                Err("it is past the deadline that the worker gave".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Takes one step after another, and begins none that is past it.
    pub(super) fn each<T>(
        self,
        steps: impl IntoIterator<Item = T>,
        take: impl FnMut(T) -> Result<(), String>,
    ) -> Result<(), String> {
        self.each_by(SystemTime::now, steps, take)
    }

    fn each_by<T>(
        self,
        clock: impl Fn() -> SystemTime,
        steps: impl IntoIterator<Item = T>,
        mut take: impl FnMut(T) -> Result<(), String>,
    ) -> Result<(), String> {
        steps.into_iter().try_for_each(|step| {
            self.check_at(clock())?;
            take(step)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    /// Steps taken of five that take a second each, and whether that was all.
    fn steps_until(deadline: Option<Duration>) -> (usize, bool) {
        let now = Cell::new(UNIX_EPOCH);
        let mut taken = 0;
        let end = Deadline(deadline.map(|after| UNIX_EPOCH + after)).each_by(
            || now.get(),
            0..5,
            |_| {
                taken += 1;
                now.set(now.get() + Duration::from_secs(1));
                Ok(())
            },
        );
        (taken, end.is_ok())
    }

    #[test]
    fn a_deadline_that_passes_on_the_way_ends_it() {
        assert_eq!(steps_until(Some(Duration::from_millis(2500))), (3, false));
    }

    #[test]
    fn all_steps_are_taken_before_it_or_without_one() {
        assert_eq!(steps_until(Some(Duration::from_secs(4))), (5, true));
        assert_eq!(steps_until(None), (5, true));
    }
}
