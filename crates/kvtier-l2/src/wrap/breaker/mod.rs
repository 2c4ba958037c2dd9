//! Circuit breaker: pauses calls to a backend that does not answer.
//!
//! The mutex of a lane guards the state of its breaker; no other lock is acquired inside.

mod state;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use kvtier_sync::Mutex;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

pub use state::{Admission, Breaker, Change, Rule, Ticket};

use super::call::{Answer, Call, PerLane, Verdict};
use super::guarded::Guard;
use crate::adapter::Adapter;
use crate::error::{ErrorKind, L2Error};

/// One breaker per lane: lookups that are answered from memory say nothing about a disk that does not load.
pub(super) struct Breakers {
    lanes: PerLane<Mutex<Breaker>>,
}

impl Breakers {
    pub(super) fn new(rule: Rule) -> Self {
        Self {
            lanes: PerLane::new(|_| Mutex::new(Breaker::new(rule))),
        }
    }
}

/// An admitted call in flight. If it is dropped unfinished, it was abandoned.
struct Admitted<'a> {
    breaker: &'a Mutex<Breaker>,
    ticket: Ticket,
    is_finished: bool,
}

impl Admitted<'_> {
    fn finish(mut self, verdict: Option<Verdict>) -> Option<Change> {
        self.is_finished = true;
        let now = Instant::now().into_std();
        self.breaker.lock().finish(self.ticket, verdict, now)
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            let now = Instant::now().into_std();
            self.breaker.lock().finish(self.ticket, None, now);
        }
    }
}

impl Guard for Breakers {
    async fn run<C: Call>(&self, inner: &Arc<dyn Adapter>, call: C) -> C::Answer {
        let items = call.items();
        if items == 0 {
            // It says nothing about the backend, so it needs no admission and is no probe.
            return call.send(&**inner).await;
        }
        let breaker = &self.lanes[C::LANE];
        let admission = breaker.lock().admit(Instant::now().into_std());
        let ticket = match admission {
            Admission::Pass(ticket) => ticket,
            Admission::Refused(wait) => {
                let line = format!(
                    "{}: not sent, as earlier calls were not answered; the next try is in {} ms",
                    C::title(&**inner, items),
                    wait.as_millis()
                );
                return C::Answer::failed(items, L2Error::new(ErrorKind::Unavailable, line));
            }
        };
        let admitted = Admitted {
            breaker,
            ticket,
            is_finished: false,
        };
        let answer = call.send(&**inner).await;
        let (adapter, lane) = (inner.kind(), C::LANE);
        match admitted.finish(answer.verdict()) {
            Some(Change::Opened(pause)) => tracing::warn!(
                adapter,
                ?lane,
                "backend does not answer; calls paused for {} ms",
                pause.as_millis()
            ),
            Some(Change::Closed) => {
                tracing::info!(adapter, ?lane, "backend answers again; calls resumed")
            }
            None => {}
        }
        answer
    }

    fn report(&self, status: &mut Map<String, Value>) {
        let now = Instant::now().into_std();
        let lanes = self.lanes.to_json(|breaker| {
            let breaker = breaker.lock();
            json!({
                "state": breaker.state_name(now),
                "failures": breaker.failures(),
                "opened": breaker.opened(),
                "refused": breaker.refused(),
            })
        });
        status.insert("breaker".into(), lanes);
        if !self.lanes.iter().all(|breaker| breaker.lock().is_closed()) {
            status.insert("is_healthy".into(), false.into());
        }
    }
}
