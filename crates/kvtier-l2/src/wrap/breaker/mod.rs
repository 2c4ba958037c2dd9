//! Circuit breaker: pauses calls to a backend that does not answer.
//!
//! The mutex of a lane guards the state of its breaker, the last error, and which of its changes were logged; no other lock is
//! acquired inside.

mod state;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use kvtier_common::sync::{Mutex, OutageLog};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

pub use state::{Admission, Breaker, Change, Rule, Ticket};

use super::call::{Answer, Call, Lane, PerLane, Verdict};
use super::guarded::Guard;
use crate::adapter::Adapter;
use crate::config::clip_to;
use crate::error::{ErrorKind, L2Error};

/// Interval of log lines about calls that are paused: some nodes of a backend may answer while others do not.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Characters of an error that the refusals name.
const CAUSE_CHARS: usize = 300;

/// One breaker per lane: lookups that are answered from memory say nothing about a disk that does not load.
pub(super) struct Breakers {
    lanes: PerLane<Mutex<LaneState>>,
}

struct LaneState {
    breaker: Breaker,
    log: OutageLog<()>,
    /// Error of the last failed call.
    cause: String,
}

impl Breakers {
    pub(super) fn new(rule: Rule) -> Self {
        Self {
            lanes: PerLane::new(|_| {
                Mutex::new(LaneState {
                    breaker: Breaker::new(rule),
                    log: OutageLog::new(LOG_INTERVAL),
                    cause: String::new(),
                })
            }),
        }
    }

    /// Admits a call, or returns why it is not sent.
    fn admit(&self, lane: Lane) -> Result<Admitted<'_>, String> {
        let lane = &self.lanes[lane];
        let mut state = lane.lock();
        match state.breaker.admit(Instant::now().into_std()) {
            Admission::Pass(ticket) => Ok(Admitted {
                lane,
                ticket,
                is_finished: false,
            }),
            Admission::Refused(wait) => Err(format!(
                "not sent, as earlier calls failed ({}); the next try is in {} ms",
                state.cause,
                wait.as_millis()
            )),
        }
    }
}

/// An admitted call in flight. If it is dropped unfinished, it was abandoned.
struct Admitted<'a> {
    lane: &'a Mutex<LaneState>,
    ticket: Ticket,
    is_finished: bool,
}

impl Admitted<'_> {
    /// Returns a change that is to be logged.
    fn finish(mut self, answer: &impl Answer) -> Option<Change> {
        self.is_finished = true;
        let verdict = answer.verdict();
        let failure = answer
            .error()
            .filter(|_| verdict == Some(Verdict::Failed))
            .map(|error| clip_to(&error.to_string(), CAUSE_CHARS));
        let now = Instant::now().into_std();
        let mut lane = self.lane.lock();
        if let Some(cause) = failure {
            lane.cause = cause;
        }
        let change = lane.breaker.finish(self.ticket, verdict, now)?;
        let is_logged = match change {
            Change::Opened(_) => lane.log.failed((), now),
            Change::Closed => lane.log.succeeded(),
        };
        is_logged.then_some(change)
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            let now = Instant::now().into_std();
            let mut lane = self.lane.lock();
            lane.breaker.finish(self.ticket, None, now);
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
        let admitted = match self.admit(C::LANE) {
            Ok(admitted) => admitted,
            Err(reason) => {
                let line = format!("{}: {reason}", C::title(&**inner, items));
                return C::Answer::failed(items, L2Error::new(ErrorKind::Unavailable, line));
            }
        };
        let answer = call.send(&**inner).await;
        let (adapter, lane) = (inner.kind(), C::LANE);
        match admitted.finish(&answer) {
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
        let lanes = self.lanes.to_json(|lane| {
            let breaker = &lane.lock().breaker;
            json!({
                "state": breaker.state_name(now),
                "failures": breaker.failures(),
                "opened": breaker.opened(),
                "refused": breaker.refused(),
            })
        });
        status.insert("breaker".into(), lanes);
        if !self
            .lanes
            .iter()
            .all(|lane| lane.lock().breaker.is_closed())
        {
            status.insert("is_healthy".into(), false.into());
        }
    }
}
