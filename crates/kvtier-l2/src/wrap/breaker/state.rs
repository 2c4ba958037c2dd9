//! When calls pass and when they do not: a state machine that is told the time.

use std::time::{Duration, Instant};

use super::super::call::Verdict;

/// When a breaker opens and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Failed calls, one after another, that open it.
    pub failures: u32,
    /// How long it stays open at first.
    pub pause: Duration,
    /// How long it stays open at most: the pause doubles with each probe that fails.
    pub pause_max: Duration,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// All calls pass; so many in a row have failed.
    Closed { failures: u32 },
    /// No call passes until then; the next one after that is a probe.
    Open { until: Instant, pause: Duration },
    /// A probe is under way, and no other call passes.
    Probing { pause: Duration },
}

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It is made.
    Pass(Ticket),
    /// It is not made; the next one may, in so long.
    Refused(Duration),
}

/// A call that was let through, to be settled by [`Breaker::settle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ticket {
    /// One of many.
    Ordinary,
    /// The one that finds out whether the backend answers again.
    Probe,
}

/// What a breaker did when a call was settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It opened, for so long.
    Opened(Duration),
    /// It closed.
    Closed,
}

/// A circuit breaker: after a row of failed calls none is made for a while, then one that decides.
#[derive(Debug)]
pub struct Breaker {
    rule: Rule,
    state: State,
    opened: u64,
    refused: u64,
}

impl Breaker {
    /// A closed one.
    #[must_use]
    pub fn new(rule: Rule) -> Self {
        Self {
            rule,
            state: State::Closed { failures: 0 },
            opened: 0,
            refused: 0,
        }
    }

    /// Whether a call may be made at `now`.
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

    /// A call that was let through has ended at `now`; without a verdict it was given up.
    pub fn settle(
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
                // It told nothing: the next call probes instead.
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
            // Calls from before it opened come too late to change anything.
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

    /// `closed`, `open`, or `half_open` when the next call or one under way is a probe.
    #[must_use]
    pub fn state_name(&self, now: Instant) -> &'static str {
        match self.state {
            State::Closed { .. } => "closed",
            State::Open { until, .. } if until > now => "open",
            State::Open { .. } | State::Probing { .. } => "half_open",
        }
    }

    /// Whether calls pass.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }

    /// Failed calls in a row, while it is closed.
    #[must_use]
    pub fn failures(&self) -> u32 {
        match self.state {
            State::Closed { failures } => failures,
            _ => 0,
        }
    }

    /// How often it opened.
    #[must_use]
    pub fn opened(&self) -> u64 {
        self.opened
    }

    /// How many calls it refused.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }
}
