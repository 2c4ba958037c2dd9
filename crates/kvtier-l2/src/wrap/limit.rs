//! Only so many calls of a lane are under way at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use super::call::{Answer, Call, PerLane};
use super::deadline::Clock;
use super::guarded::Guard;
use crate::adapter::Adapter;
use crate::error::{ErrorKind, L2Error};

/// Lets calls to the adapter, in the order they came.
///
/// Each call runs on a task of its own that holds its place until the adapter has answered, also when nobody waits for
/// it any more. So a stalled adapter holds the buffers of at most this many calls, however many gave it up; and one that
/// panics, or answers for another number of items than it was asked for, harms only its own call.
pub(super) struct Limit {
    calls: u32,
    lanes: PerLane<Lane>,
}

struct Lane {
    places: Arc<Semaphore>,
    waiting: AtomicU64,
    /// Calls that were answered.
    answered: Arc<AtomicU64>,
}

/// Counts one who waits, as long as it lives; meanwhile its clock stands.
struct Waiting<'a>(&'a AtomicU64);

impl<'a> Waiting<'a> {
    fn new(lane: &'a Lane) -> Self {
        lane.waiting.fetch_add(1, Ordering::Relaxed);
        Clock::stop(&lane.answered);
        Self(&lane.waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
        Clock::go_on();
    }
}

impl Limit {
    /// At most `calls` in each lane.
    pub(super) fn new(calls: u32) -> Self {
        Self {
            calls,
            lanes: PerLane::new(|_| Lane {
                places: Arc::new(Semaphore::new(calls as usize)),
                waiting: AtomicU64::new(0),
                answered: Arc::default(),
            }),
        }
    }
}

impl Guard for Limit {
    async fn run<C: Call>(&self, inner: &Arc<dyn Adapter>, call: C) -> C::Answer {
        let items = call.items();
        let failed = |kind, what: &str| {
            let line = format!("{}: {what}", C::title(&**inner, items));
            C::Answer::failed(items, L2Error::new(kind, line))
        };
        let lane = &self.lanes[C::LANE];
        let waiting = Waiting::new(lane);
        let Ok(place) = lane.places.clone().acquire_owned().await else {
            return failed(ErrorKind::Unavailable, "it is closed");
        };
        drop(waiting);
        let (adapter, answered) = (inner.clone(), lane.answered.clone());
        let work = tokio::spawn(async move {
            let answer = call.send(&*adapter).await;
            answered.fetch_add(1, Ordering::Relaxed);
            drop(place);
            answer
        });
        match work.await {
            Ok(answer) if answer.fits(items) => answer,
            Ok(_) => failed(ErrorKind::Refused, "it answered for another number of them"),
            Err(error) if error.is_panic() => failed(ErrorKind::Refused, "it panicked"),
            Err(_) => failed(ErrorKind::Unavailable, "the runtime ends"),
        }
    }

    fn report(&self, status: &mut Map<String, Value>) {
        let calls = self.lanes.to_json(|lane| {
            let free = lane.places.available_permits() as u64;
            json!({
                "in_flight": u64::from(self.calls).saturating_sub(free),
                "waiting": lane.waiting.load(Ordering::Relaxed),
            })
        });
        status.insert("calls".into(), calls);
    }

    /// Waits for the calls under way, and refuses those to come.
    async fn close(&self, inner: &Arc<dyn Adapter>) {
        for lane in self.lanes.iter() {
            // Fails when it was closed before.
            let _all = lane.places.acquire_many(self.calls).await;
            lane.places.close();
        }
        inner.close().await;
    }
}
