//! No call is waited for longer than its lane's time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::time::timeout;

use super::call::{Answer, Call, PerLane};
use super::guarded::Guard;
use crate::adapter::Adapter;
use crate::error::{ErrorKind, L2Error};

/// Gives a call up when its time is over. Its work may go on without anybody waiting: its result is dropped, and it
/// holds its buffers until it ends.
pub(super) struct Deadline {
    times: PerLane<Duration>,
    late: PerLane<AtomicU64>,
}

impl Deadline {
    pub(super) fn new(times: PerLane<Duration>) -> Self {
        Self {
            times,
            late: PerLane::default(),
        }
    }
}

impl Guard for Deadline {
    async fn run<C: Call>(&self, inner: &Arc<dyn Adapter>, call: C) -> C::Answer {
        let (items, time) = (call.items(), self.times[C::LANE]);
        if let Ok(answer) = timeout(time, call.send(&**inner)).await {
            return answer;
        }
        self.late[C::LANE].fetch_add(1, Ordering::Relaxed);
        let line = format!(
            "{}: no answer within {} ms",
            C::title(&**inner, items),
            time.as_millis()
        );
        C::Answer::failed(items, L2Error::new(ErrorKind::Deadline, line))
    }

    fn report(&self, status: &mut Map<String, Value>) {
        let late = self
            .late
            .to_json(|late| late.load(Ordering::Relaxed).into());
        status.insert("late_calls".into(), late);
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
