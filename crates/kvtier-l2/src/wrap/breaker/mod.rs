//! Circuit breaker: pauses calls to a backend that does not answer.
//!
//! No other lock is acquired inside of the mutex around a breaker.

#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::time::{Duration, Instant};

use kvtier_common::sync::{Mutex, OutageLog};
use serde_json::{Value, json};

use super::Guards;
use crate::config::clip_to;
use crate::error::{ErrorKind, L2Error};

/// Interval of log lines about calls that are paused: some nodes of a backend may answer while others do not.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Characters of an error that the refusals name.
const CAUSE_CHARS: usize = 300;

/// State of the backend as the results of a call show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallVerdict {
    /// The backend answered, possibly with errors.
    Answered,
    /// All items failed with errors of a backend that does not answer.
    Failed,
}

#[derive(Debug, Clone, Copy)]
enum BreakerState {
    /// All calls pass; this many consecutive ones have failed.
    Closed { failures: u32 },
    /// No call passes before `until`; the first one after it is a probe.
    Open { until: Instant, pause: Duration },
    /// A probe is in flight, and no other call passes.
    Probing { pause: Duration },
}

/// Role of an admitted call, to be ended by [`Breaker::finish`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Admission {
    /// A call while the breaker is closed.
    Ordinary,
    /// The call that tests whether the backend answers again.
    Probe,
}

/// Transition of a breaker at the end of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BreakerChange {
    /// The breaker opened for this duration.
    Opened(Duration),
    Closed,
}

/// Circuit breaker: after consecutive failures no call is sent for a pause, then a probe that closes or reopens it.
///
/// There is one per class of calls: lookups that are answered from memory say nothing about a disk that does not load.
#[derive(Debug)]
pub(super) struct Breaker {
    guards: Guards,
    state: BreakerState,
    opened: u64,
    refused: u64,
    log: OutageLog<()>,
    /// Error of the last failed call.
    cause: String,
}

impl Breaker {
    /// Returns a closed breaker.
    pub(super) fn new(guards: Guards) -> Self {
        Self {
            guards,
            state: BreakerState::Closed { failures: 0 },
            opened: 0,
            refused: 0,
            log: OutageLog::new(LOG_INTERVAL),
            cause: String::new(),
        }
    }

    /// Decides whether a call may be sent at `now`. An error is the duration until the next one is.
    fn admit(&mut self, now: Instant) -> Result<Admission, Duration> {
        let wait = match self.state {
            BreakerState::Closed { .. } => return Ok(Admission::Ordinary),
            BreakerState::Open { until, pause } if until <= now => {
                self.state = BreakerState::Probing { pause };
                return Ok(Admission::Probe);
            }
            BreakerState::Open { until, .. } => until - now,
            BreakerState::Probing { .. } => Duration::ZERO,
        };
        self.refused += 1;
        Err(wait)
    }

    /// Ends an admitted call at `now`; without a verdict it was abandoned.
    fn finish(
        &mut self,
        admission: Admission,
        verdict: Option<CallVerdict>,
        now: Instant,
    ) -> Option<BreakerChange> {
        match (self.state, admission, verdict) {
            (BreakerState::Probing { .. }, Admission::Probe, Some(CallVerdict::Answered)) => {
                self.state = BreakerState::Closed { failures: 0 };
                Some(BreakerChange::Closed)
            }
            (BreakerState::Probing { pause }, Admission::Probe, Some(CallVerdict::Failed)) => {
                let pause = pause.saturating_mul(2).min(self.guards.breaker_pause_max);
                Some(self.open(pause, now))
            }
            (BreakerState::Probing { pause }, Admission::Probe, None) => {
                // It has no result: the next call is the probe.
                self.state = BreakerState::Open { until: now, pause };
                None
            }
            (BreakerState::Closed { failures }, Admission::Ordinary, Some(verdict)) => {
                let failures = match verdict {
                    CallVerdict::Answered => 0,
                    CallVerdict::Failed => failures.saturating_add(1),
                };
                self.state = BreakerState::Closed { failures };
                let opens =
                    verdict == CallVerdict::Failed && failures >= self.guards.breaker_failures;
                opens.then(|| self.open(self.guards.breaker_pause, now))
            }
            // Calls from before it opened change nothing.
            _ => None,
        }
    }

    fn open(&mut self, pause: Duration, now: Instant) -> BreakerChange {
        self.opened += 1;
        self.state = BreakerState::Open {
            until: now + pause,
            pause,
        };
        BreakerChange::Opened(pause)
    }

    /// Whether it is closed.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.state, BreakerState::Closed { .. })
    }

    /// Returns its part of the status; it is `half_open` if a probe is in flight or next.
    pub(super) fn report(&self, now: Instant) -> Value {
        let (state, failures) = match self.state {
            BreakerState::Closed { failures } => ("closed", failures),
            BreakerState::Open { until, .. } if until > now => ("open", 0),
            BreakerState::Open { .. } | BreakerState::Probing { .. } => ("half_open", 0),
        };
        json!({
            "state": state,
            "failures": failures,
            "opened": self.opened,
            "refused": self.refused,
        })
    }
}

/// An admitted call in flight. If it is dropped unfinished, it was abandoned.
pub(super) struct Admitted<'a> {
    breaker: &'a Mutex<Breaker>,
    admission: Admission,
}

impl<'a> Admitted<'a> {
    /// Admits a call, or returns why it is not sent.
    pub(super) fn new(breaker: &'a Mutex<Breaker>) -> Result<Self, String> {
        let mut locked = breaker.lock();
        match locked.admit(now()) {
            Ok(admission) => Ok(Self { breaker, admission }),
            Err(wait) => Err(format!(
                "not sent, as earlier calls failed ({}); the next try is in {} ms",
                locked.cause,
                wait.as_millis()
            )),
        }
    }

    /// Ends the call. `adapter` and `lane` are for the log.
    pub(super) fn finish<T>(self, results: &[Result<T, L2Error>], adapter: &str, lane: impl Debug) {
        let verdict = verdict(results);
        let error = results.iter().find_map(|result| result.as_ref().err());
        let cause = error.filter(|_| verdict == Some(CallVerdict::Failed));
        let cause = cause.map(|error| clip_to(&error.to_string(), CAUSE_CHARS));
        let now = now();
        let mut breaker = self.breaker.lock();
        if let Some(cause) = cause {
            breaker.cause = cause;
        }
        let change = breaker.finish(self.admission, verdict, now);
        let is_logged = match change {
            Some(BreakerChange::Opened(_)) => breaker.log.failed((), now),
            Some(BreakerChange::Closed) => breaker.log.succeeded(),
            None => false,
        };
        drop(breaker);
        std::mem::forget(self);
        match change.filter(|_| is_logged) {
            Some(BreakerChange::Opened(pause)) => tracing::warn!(
                adapter,
                ?lane,
                "backend does not answer; calls paused for {} ms",
                pause.as_millis()
            ),
            Some(BreakerChange::Closed) => {
                tracing::info!(adapter, ?lane, "backend answers again; calls resumed")
            }
            None => {}
        }
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        self.breaker.lock().finish(self.admission, None, now());
    }
}

/// Returns the state of the backend, `None` if it was not called.
fn verdict<T>(results: &[Result<T, L2Error>]) -> Option<CallVerdict> {
    let all = |test: fn(ErrorKind) -> bool| {
        let one = |result: &Result<T, L2Error>| matches!(result, Err(error) if test(error.kind()));
        results.iter().all(one)
    };
    if all(|kind| kind == ErrorKind::Busy) {
        None
    } else if all(ErrorKind::is_transient) {
        Some(CallVerdict::Failed)
    } else {
        Some(CallVerdict::Answered)
    }
}

/// The time of the runtime, which tests can pause.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
