//! Limit of the calls in flight per lane.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use super::call::{Answer, Call, PerLane};
use super::deadline::Clock;
use super::guarded::Guard;
use crate::adapter::Adapter;
use crate::error::{ErrorKind, L2Error};

/// Guard that passes calls to the adapter in the order of their arrival.
///
/// Each call runs on a task of its own, which holds a permit until the adapter has answered, also after its caller stopped
/// waiting. So a stalled adapter holds the buffers of at most this many calls, and one that panics or answers for the
/// wrong number of items affects only its own call.
pub(super) struct Limit {
    calls: u32,
    lanes: PerLane<Lane>,
}

struct Lane {
    permits: Arc<Semaphore>,
    waiting: AtomicU64,
    /// Number of calls answered.
    answered: Arc<AtomicU64>,
}

/// Counts one waiting call until it is dropped; its clock is paused meanwhile.
struct Waiting<'a>(&'a AtomicU64);

impl<'a> Waiting<'a> {
    fn new(lane: &'a Lane) -> Self {
        lane.waiting.fetch_add(1, Ordering::Relaxed);
        Clock::pause(&lane.answered);
        Self(&lane.waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
        Clock::resume();
    }
}

impl Limit {
    /// Returns a limit of `calls` per lane.
    pub(super) fn new(calls: u32) -> Self {
        Self {
            calls,
            lanes: PerLane::new(|_| Lane {
                permits: Arc::new(Semaphore::new(calls as usize)),
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
        let Ok(permit) = lane.permits.clone().acquire_owned().await else {
            return failed(ErrorKind::Unavailable, "it is closed");
        };
        drop(waiting);
        let (adapter, answered) = (inner.clone(), lane.answered.clone());
        let work = tokio::spawn(async move {
            let answer = call.send(&*adapter).await;
            answered.fetch_add(1, Ordering::Relaxed);
            drop(permit);
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
            let free = lane.permits.available_permits() as u64;
            json!({
                "in_flight": u64::from(self.calls).saturating_sub(free),
                "waiting": lane.waiting.load(Ordering::Relaxed),
            })
        });
        status.insert("calls".into(), calls);
    }

    /// Waits for the calls in flight and refuses later ones.
    async fn close(&self, inner: &Arc<dyn Adapter>) {
        for lane in self.lanes.iter() {
            // Fails if it was closed before.
            let _all = lane.permits.acquire_many(self.calls).await;
            lane.permits.close();
        }
        inner.close().await;
    }
}
