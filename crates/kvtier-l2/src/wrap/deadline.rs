//! No call is waited for longer than its lane's time, once it has a place.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};

use super::call::{Answer, Call, PerLane};
use super::guarded::Guard;
use crate::adapter::Adapter;
use crate::error::{ErrorKind, L2Error};

tokio::task_local! {
    /// Of the call that is being made.
    static CLOCK: Arc<Clock>;
}

/// A call's time, which stands while the call waits for a place: a busy backend is not a late one.
#[derive(Default)]
pub(super) struct Clock {
    waits: Mutex<Waits>,
    goes_on: Notify,
}

#[derive(Default)]
struct Waits {
    /// How long those lasted that have ended.
    sum: Duration,
    now: Option<Wait>,
}

struct Wait {
    since: Instant,
    /// How many calls were answered in all, and by then.
    answered: Arc<AtomicU64>,
    before: u64,
}

impl Clock {
    /// The call begins to wait for a place; `answered` counts those who leave one.
    pub(super) fn stop(answered: &Arc<AtomicU64>) {
        let wait = || Wait {
            since: Instant::now(),
            answered: Arc::clone(answered),
            before: answered.load(Ordering::Relaxed),
        };
        // Without a deadline there is no clock.
        let _ = CLOCK.try_with(|clock| clock.waits.lock().now = Some(wait()));
    }

    pub(super) fn go_on() {
        let _ = CLOCK.try_with(|clock| {
            let mut waits = clock.waits.lock();
            if let Some(wait) = waits.now.take() {
                waits.sum += wait.since.elapsed();
                clock.goes_on.notify_one();
            }
        });
    }

    /// When a call that began then is late, or has waited for too long: both may take `time`.
    fn until(&self, began: Instant, time: Duration) -> Instant {
        let waits = self.waits.lock();
        match &waits.now {
            None => began + waits.sum + time,
            Some(wait) => wait.since + time.saturating_sub(waits.sum),
        }
    }

    /// Whether it waits while others are answered.
    fn is_crowded(&self) -> bool {
        let waits = self.waits.lock();
        let is_moving = |wait: &Wait| wait.answered.load(Ordering::Relaxed) != wait.before;
        waits.now.as_ref().is_some_and(is_moving)
    }
}

/// Gives a call up when its time is over. Its work may go on without anybody waiting: its result is dropped, and it
/// holds its buffers until it ends.
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
                () = clock.goes_on.notified() => {}
                () = sleep_until(clock.until(began, time)) => {
                    // It may have begun to wait since.
                    if clock.until(began, time) <= Instant::now() {
                        break;
                    }
                }
            }
        }
        let (kind, count, what) = match clock.is_crowded() {
            true => (
                ErrorKind::Busy,
                &self.crowded,
                "no place among the calls under way",
            ),
            // Where no place becomes free, nothing is answered.
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
                "closing it takes longer than {} ms; not waiting any more",
                self.times.store.as_millis()
            );
        }
    }
}
