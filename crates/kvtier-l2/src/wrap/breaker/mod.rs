//! A backend that does not answer is left alone for a while.

mod state;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

pub use state::{Admission, Breaker, Change, Rule, Ticket};

use super::call::{Answer, Call, PerLane, Verdict};
use super::guarded::Guard;
use crate::adapter::Adapter;
use crate::error::{ErrorKind, L2Error};

/// One breaker a lane: lookups that are answered from memory say nothing about a disk that does not load.
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

/// A call under way. Dropped without having been settled, it was given up.
struct Pass<'a> {
    breaker: &'a Mutex<Breaker>,
    ticket: Ticket,
    settled: bool,
}

impl Pass<'_> {
    fn settle(mut self, verdict: Option<Verdict>) -> Option<Change> {
        self.settled = true;
        let now = Instant::now().into_std();
        self.breaker.lock().settle(self.ticket, verdict, now)
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if !self.settled {
            let now = Instant::now().into_std();
            self.breaker.lock().settle(self.ticket, None, now);
        }
    }
}

impl Guard for Breakers {
    async fn run<C: Call>(&self, inner: &Arc<dyn Adapter>, call: C) -> C::Answer {
        let items = call.items();
        if items == 0 {
            // Tells nothing about the backend, so it neither needs an admission nor is a probe.
            return call.send(&**inner).await;
        }
        let breaker = &self.lanes[C::LANE];
        let admission = breaker.lock().admit(Instant::now().into_std());
        let ticket = match admission {
            Admission::Pass(ticket) => ticket,
            Admission::Refused(wait) => {
                let line = format!(
                    "{}: not tried, as those before were not answered; the next try is in {} ms",
                    C::title(&**inner, items),
                    wait.as_millis()
                );
                return C::Answer::failed(items, L2Error::new(ErrorKind::Unavailable, line));
            }
        };
        let pass = Pass {
            breaker,
            ticket,
            settled: false,
        };
        let answer = call.send(&**inner).await;
        let (adapter, lane) = (inner.kind(), C::LANE);
        match pass.settle(answer.verdict()) {
            Some(Change::Opened(pause)) => tracing::warn!(
                adapter,
                ?lane,
                "it does not answer; not asked again for {} ms",
                pause.as_millis()
            ),
            Some(Change::Closed) => tracing::info!(adapter, ?lane, "it answers again"),
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
