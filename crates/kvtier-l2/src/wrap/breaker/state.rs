//! State machine of a circuit breaker, with the time as an argument.

use std::time::{Duration, Instant};

use super::super::call::Verdict;

/// When a breaker opens, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Consecutive failed calls that open it.
    pub failures: u32,
    /// First pause.
    pub pause: Duration,
    /// Longest pause; the pause doubles with each failed probe.
    pub pause_max: Duration,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// All calls pass; this many consecutive ones have failed.
    Closed { failures: u32 },
    /// No call passes before `until`; the first one after it is a probe.
    Open { until: Instant, pause: Duration },
    /// A probe is in flight, and no other call passes.
    Probing { pause: Duration },
}

/// Decision about a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// The call is sent.
    Pass(Ticket),
    /// The call is not sent; the duration until the next one is.
    Refused(Duration),
}

/// An admitted call, to be ended by [`Breaker::finish`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ticket {
    /// A call while the breaker is closed.
    Ordinary,
    /// The call that tests whether the backend answers again.
    Probe,
}

/// Transition of a breaker at the end of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The breaker opened for this duration.
    Opened(Duration),
    /// The breaker closed.
    Closed,
}

/// Circuit breaker: after consecutive failures no call is sent for a pause, then a probe that closes or reopens it.
#[derive(Debug)]
pub struct Breaker {
    rule: Rule,
    state: State,
    opened: u64,
    refused: u64,
}

impl Breaker {
    /// Returns a closed breaker.
    #[must_use]
    pub fn new(rule: Rule) -> Self {
        Self {
            rule,
            state: State::Closed { failures: 0 },
            opened: 0,
            refused: 0,
        }
    }

    /// Decides whether a call may be sent at `now`.
    pub fn admit(&mut self, now: Instant) -> Admission {
        let wait = match self.state {
            State::Closed { .. } => return Admission::Pass(Ticket::Ordinary),
            State::Open { until, pause } if until <= now => {
                self.state = State::Probing { pause };
                return Admission::Pass(Ticket::Probe);
            }
            State::Open { until, .. } => until - now,
            State::Probing { .. } => Duration::ZERO,
        };
        self.refused += 1;
        Admission::Refused(wait)
    }

    /// Ends an admitted call at `now`; without a verdict it was abandoned.
    pub fn finish(
        &mut self,
        ticket: Ticket,
        verdict: Option<Verdict>,
        now: Instant,
    ) -> Option<Change> {
        match (self.state, ticket, verdict) {
            (State::Probing { .. }, Ticket::Probe, Some(Verdict::Answered)) => {
                self.state = State::Closed { failures: 0 };
                Some(Change::Closed)
            }
            (State::Probing { pause }, Ticket::Probe, Some(Verdict::Failed)) => {
                let pause = pause.saturating_mul(2).min(self.rule.pause_max);
                Some(self.open(pause, now))
            }
            (State::Probing { pause }, Ticket::Probe, None) => {
                // It has no result: the next call is the probe.
                self.state = State::Open { until: now, pause };
                None
            }
            (State::Closed { .. }, Ticket::Ordinary, Some(Verdict::Answered)) => {
                self.state = State::Closed { failures: 0 };
                None
            }
            (State::Closed { failures }, Ticket::Ordinary, Some(Verdict::Failed)) => {
                let failures = failures.saturating_add(1);
                if failures >= self.rule.failures {
                    return Some(self.open(self.rule.pause, now));
                }
                self.state = State::Closed { failures };
                None
            }
            // Calls from before it opened change nothing.
            _ => None,
        }
    }

    fn open(&mut self, pause: Duration, now: Instant) -> Change {
        self.opened += 1;
        self.state = State::Open {
            until: now + pause,
            pause,
        };
        Change::Opened(pause)
    }

    /// Returns `closed`, `open`, or `half_open` if a probe is in flight or next.
    #[must_use]
    pub fn state_name(&self, now: Instant) -> &'static str {
        match self.state {
            State::Closed { .. } => "closed",
            State::Open { until, .. } if until > now => "open",
            State::Open { .. } | State::Probing { .. } => "half_open",
        }
    }

    /// Whether it is closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }

    /// Consecutive failed calls while it is closed.
    #[must_use]
    pub fn failures(&self) -> u32 {
        match self.state {
            State::Closed { failures } => failures,
            _ => 0,
        }
    }

    /// Number of times it opened.
    #[must_use]
    pub fn opened(&self) -> u64 {
        self.opened
    }

    /// Number of calls it refused.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }
}
