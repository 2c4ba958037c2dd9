//! Requests in flight: at most `max`, fewer while the backend asks for less.
//!
//! The mutex guards the limit; a permit is acquired outside of it. Permits above the limit are in use by requests from before
//! it was lowered, and are not returned to the semaphore.

use std::sync::Arc;

use kvtier_common::sync::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What a request is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum S3Class {
    /// An object that is stored, loaded or deleted. These have three quarters of the limit, so that lookups do not wait
    /// behind all of them.
    #[default]
    Objects,
    /// Lookups, listings, probes.
    Keys,
}

/// The limit of one backend.
pub(super) struct Limit {
    objects: Arc<Semaphore>,
    permits: Arc<Semaphore>,
    max: usize,
    state: Mutex<LimitState>,
}

struct LimitState {
    limit: usize,
    /// Permits that are still to be removed.
    excess: usize,
    /// Counts how often the limit was halved.
    halvings: u64,
}

/// Permission for one request.
pub(super) struct Permit<'a> {
    of: &'a Limit,
    #[expect(dead_code, reason = "held until the end of the request")]
    object: Option<OwnedSemaphorePermit>,
    permit: Option<OwnedSemaphorePermit>,
    halvings: u64,
}

impl Limit {
    pub(super) fn new(max: usize) -> Self {
        let max = max.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            objects: Arc::new(Semaphore::new((max * 3 / 4).max(1))),
            permits: Arc::new(Semaphore::new(max)),
            max,
            state: Mutex::new(LimitState {
                limit: max,
                excess: 0,
                halvings: 0,
            }),
        }
    }

    /// Waits for a permit.
    pub(super) async fn acquire(&self, class: S3Class) -> Permit<'_> {
        // The semaphores are never closed.
        let object = match class {
            S3Class::Objects => Arc::clone(&self.objects).acquire_owned().await.ok(),
            S3Class::Keys => None,
        };
        let permit = Arc::clone(&self.permits).acquire_owned().await.ok();
        let halvings = self.state.lock().halvings;
        Permit {
            of: self,
            object,
            permit,
            halvings,
        }
    }

    /// The limit, and the requests in flight.
    pub(super) fn now(&self) -> (usize, usize) {
        let state = self.state.lock();
        let in_use = (state.limit + state.excess).saturating_sub(self.permits.available_permits());
        (state.limit, in_use)
    }
}

impl Permit<'_> {
    /// The backend has answered: one more request may be in flight.
    pub(super) fn succeeded(&self) {
        let mut state = self.of.state.lock();
        if state.limit < self.of.max {
            state.limit += 1;
            if state.excess > 0 {
                state.excess -= 1;
            } else {
                self.of.permits.add_permits(1);
            }
        }
    }

    /// The backend is overloaded: half of the requests may be in flight. Of the requests of one burst, one counts.
    pub(super) fn overloaded(&self) {
        let mut state = self.of.state.lock();
        if state.halvings != self.halvings {
            return;
        }
        state.halvings += 1;
        let removed = state.limit - state.limit.div_ceil(2);
        state.limit -= removed;
        let idle = self.of.permits.forget_permits(removed);
        state.excess += removed - idle;
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = self.of.state.lock();
        if state.excess > 0
            && let Some(permit) = self.permit.take()
        {
            state.excess -= 1;
            permit.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lookups_do_not_wait_behind_all_objects() {
        let limit = Limit::new(4);
        let mut objects = Vec::new();
        for _ in 0..3 {
            objects.push(limit.acquire(S3Class::Objects).await);
        }
        let fourth = kvtier_l2::conformance::poll_once(limit.acquire(S3Class::Objects)).await;
        assert!(fourth.is_none());
        let key = kvtier_l2::conformance::poll_once(limit.acquire(S3Class::Keys)).await;
        assert!(key.is_some());
        drop(objects);
        assert_eq!(limit.now(), (4, 1));
    }

    #[tokio::test]
    async fn limit_halves_once_per_burst_and_grows_by_one_per_success() {
        let limit = Limit::new(8);
        let permits = [
            limit.acquire(S3Class::Keys).await,
            limit.acquire(S3Class::Keys).await,
            limit.acquire(S3Class::Keys).await,
        ];
        permits.iter().for_each(Permit::overloaded);
        assert_eq!(limit.now(), (4, 3));
        for (expected, left) in [(2, 4), (1, 4), (1, 4)] {
            let permit = limit.acquire(S3Class::Keys).await;
            permit.overloaded();
            assert_eq!(limit.now(), (expected, left));
            drop(permit);
            if limit.now().1 >= limit.now().0 {
                break;
            }
        }
        let (lowest, _) = limit.now();
        drop(permits);
        assert_eq!(limit.now(), (lowest, 0));
        for more in 1..=20 {
            let permit = limit.acquire(S3Class::Keys).await;
            assert_eq!(limit.now().1, 1);
            permit.succeeded();
            assert_eq!(limit.now().0, (lowest + more).min(8));
        }
        let all = [(); 8].map(|()| limit.permits.clone().try_acquire_owned().unwrap());
        assert!(limit.permits.clone().try_acquire_owned().is_err());
        drop(all);
    }
}
