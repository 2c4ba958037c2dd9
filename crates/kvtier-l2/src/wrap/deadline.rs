//! Deadline of each call, which runs once the call has a permit.
//!
//! The mutex guards the time in which the backend answered no call; no other lock is acquired inside.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvtier_common::sync::Mutex;
use serde_json::{Map, Value};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};

use super::call::{Answer, Call, PerLane};
use super::guarded::Guard;
use crate::adapter::Adapter;
use crate::error::{ErrorKind, L2Error};

tokio::task_local! {
    /// Clock of the current call.
    static CLOCK: Arc<Clock>;
}

/// Clock of a call, which is paused while the call waits for a permit: a busy backend is not a late one.
#[derive(Default)]
pub(super) struct Clock {
    waits: Mutex<Waits>,
    resumed: Notify,
}

#[derive(Default)]
struct Waits {
    /// Time of all waits that have ended.
    sum: Duration,
    now: Option<Wait>,
}

struct Wait {
    since: Instant,
    /// Calls answered so far, and at the start of the wait.
    answered: Arc<AtomicU64>,
    before: u64,
}

impl Clock {
    /// Pauses the clock, as the call waits for a permit; `answered` counts the calls that release one.
    pub(super) fn pause(answered: &Arc<AtomicU64>) {
        let wait = || Wait {
            since: Instant::now(),
            answered: Arc::clone(answered),
            before: answered.load(Ordering::Relaxed),
        };
        // Without a deadline there is no clock.
        let _ = CLOCK.try_with(|clock| clock.waits.lock().now = Some(wait()));
    }

    /// Resumes the clock, as the call has its permit.
    pub(super) fn resume() {
        let _ = CLOCK.try_with(|clock| {
            let mut waits = clock.waits.lock();
            if let Some(wait) = waits.now.take() {
                waits.sum += wait.since.elapsed();
                clock.resumed.notify_one();
            }
        });
    }

    /// Returns when a call times out, or its wait for a permit: both may take `time`.
    fn expires_at(&self, began: Instant, time: Duration) -> Instant {
        let waits = self.waits.lock();
        match &waits.now {
            None => began + waits.sum + time,
            Some(wait) => wait.since + time.saturating_sub(waits.sum),
        }
    }

    /// Whether it waits for a permit while others are answered.
    fn is_crowded(&self) -> bool {
        let waits = self.waits.lock();
        let is_moving = |wait: &Wait| wait.answered.load(Ordering::Relaxed) != wait.before;
        waits.now.as_ref().is_some_and(is_moving)
    }
}

/// Guard that stops waiting for a call at its deadline. The work may continue: its result is dropped, and it holds its
/// buffers until it ends.
pub(super) struct Deadline {
    times: PerLane<Duration>,
    late: PerLane<AtomicU64>,
    crowded: PerLane<AtomicU64>,
}

impl Deadline {
    pub(super) fn new(times: PerLane<Duration>) -> Self {
        Self {
            times,
            late: PerLane::default(),
            crowded: PerLane::default(),
        }
    }
}

impl Guard for Deadline {
    async fn run<C: Call>(&self, inner: &Arc<dyn Adapter>, call: C) -> C::Answer {
        let (items, time) = (call.items(), self.times[C::LANE]);
        let (began, clock) = (Instant::now(), Arc::new(Clock::default()));
        let mut work = pin!(CLOCK.scope(Arc::clone(&clock), call.send(&**inner)));
        loop {
            tokio::select! {
                biased;
                answer = &mut work => return answer,
                () = clock.resumed.notified() => {}
                () = sleep_until(clock.expires_at(began, time)) => {
                    // The clock may have been paused meanwhile.
                    if clock.expires_at(began, time) <= Instant::now() {
                        break;
                    }
                }
            }
        }
        let (kind, count, what) = match clock.is_crowded() {
            true => (
                ErrorKind::Busy,
                &self.crowded,
                "no permit among the calls in flight",
            ),
            // If no permit was released, no call was answered.
            false => (ErrorKind::Deadline, &self.late, "no answer"),
        };
        count[C::LANE].fetch_add(1, Ordering::Relaxed);
        let line = format!(
            "{}: {what} within {} ms",
            C::title(&**inner, items),
            time.as_millis()
        );
        C::Answer::failed(items, L2Error::new(kind, line))
    }

    fn report(&self, status: &mut Map<String, Value>) {
        let late = self
            .late
            .to_json(|late| late.load(Ordering::Relaxed).into());
        status.insert("late_calls".into(), late);
        let crowded = self
            .crowded
            .to_json(|crowded| crowded.load(Ordering::Relaxed).into());
        status.insert("crowded_calls".into(), crowded);
    }

    async fn close(&self, inner: &Arc<dyn Adapter>) {
        if timeout(self.times.store, inner.close()).await.is_err() {
            tracing::warn!(
                adapter = inner.kind(),
                "closing it takes longer than {} ms; continuing without it",
                self.times.store.as_millis()
            );
        }
    }
}
