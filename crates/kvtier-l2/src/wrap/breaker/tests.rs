//! Tests of the state machine with a manual clock.

use std::time::{Duration, Instant};

use super::super::call::Verdict::{Answered, Failed};
use super::*;

const RULE: Rule = Rule {
    failures: 3,
    pause: Duration::from_secs(1),
    pause_max: Duration::from_secs(5),
};

/// A breaker and its manual clock.
struct Clocked {
    breaker: Breaker,
    now: Instant,
}

impl Clocked {
    fn new() -> Self {
        Self {
            breaker: Breaker::new(RULE),
            now: Instant::now(),
        }
    }

    fn pass(&mut self, seconds: f64) {
        self.now += Duration::from_secs_f64(seconds);
    }

    fn admit(&mut self) -> Admission {
        self.breaker.admit(self.now)
    }

    fn finish(&mut self, ticket: Ticket, verdict: Option<Verdict>) -> Option<Change> {
        self.breaker.finish(ticket, verdict, self.now)
    }

    /// A call that is let through with this ticket, and ends so.
    fn call(&mut self, ticket: Ticket, verdict: Option<Verdict>) -> Option<Change> {
        assert_eq!(self.admit(), Admission::Pass(ticket));
        self.finish(ticket, verdict)
    }

    fn opened() -> Self {
        let mut clocked = Self::new();
        clocked.call(Ticket::Ordinary, Some(Failed));
        clocked.call(Ticket::Ordinary, Some(Failed));
        let change = clocked.call(Ticket::Ordinary, Some(Failed));
        assert_eq!(change, Some(Change::Opened(RULE.pause)));
        clocked
    }

    fn name(&self) -> &'static str {
        self.breaker.state_name(self.now)
    }
}

#[test]
fn opens_after_consecutive_failures_only() {
    let mut clocked = Clocked::new();
    for _ in 0..5 {
        assert_eq!(clocked.call(Ticket::Ordinary, Some(Failed)), None);
        assert_eq!(clocked.call(Ticket::Ordinary, Some(Failed)), None);
        assert_eq!(clocked.call(Ticket::Ordinary, None), None);
        assert_eq!(clocked.breaker.failures(), 2);
        assert_eq!(clocked.call(Ticket::Ordinary, Some(Answered)), None);
        assert_eq!(clocked.breaker.failures(), 0);
    }
    assert_eq!(clocked.name(), "closed");
    assert_eq!(Clocked::opened().name(), "open");
}

#[test]
fn refuses_while_open_with_remaining_pause() {
    let mut clocked = Clocked::opened();
    clocked.pass(0.25);
    assert_eq!(
        clocked.admit(),
        Admission::Refused(Duration::from_millis(750))
    );
    assert_eq!(clocked.breaker.refused(), 1);
    assert_eq!(clocked.breaker.opened(), 1);
    assert!(!clocked.breaker.is_closed());
}

#[test]
fn one_probe_decides() {
    let mut clocked = Clocked::opened();
    clocked.pass(1.0);
    assert_eq!(clocked.name(), "half_open");
    assert_eq!(clocked.admit(), Admission::Pass(Ticket::Probe));
    assert_eq!(clocked.name(), "half_open");
    assert_eq!(clocked.admit(), Admission::Refused(Duration::ZERO));
    assert_eq!(
        clocked.finish(Ticket::Probe, Some(Answered)),
        Some(Change::Closed)
    );
    assert_eq!(clocked.name(), "closed");
    assert_eq!(clocked.call(Ticket::Ordinary, Some(Failed)), None);
}

#[test]
fn pause_doubles_up_to_its_maximum_and_resets() {
    let mut clocked = Clocked::opened();
    for seconds in [2, 4, 5, 5] {
        clocked.pass(10.0);
        let change = clocked.call(Ticket::Probe, Some(Failed));
        assert_eq!(change, Some(Change::Opened(Duration::from_secs(seconds))));
    }
    clocked.pass(10.0);
    clocked.call(Ticket::Probe, Some(Answered));
    clocked.call(Ticket::Ordinary, Some(Failed));
    clocked.call(Ticket::Ordinary, Some(Failed));
    let change = clocked.call(Ticket::Ordinary, Some(Failed));
    assert_eq!(change, Some(Change::Opened(RULE.pause)));
    assert_eq!(clocked.breaker.opened(), 6);
}

#[test]
fn abandoned_probe_is_repeated() {
    let mut clocked = Clocked::opened();
    clocked.pass(1.0);
    assert_eq!(clocked.call(Ticket::Probe, None), None);
    assert_eq!(
        clocked.call(Ticket::Probe, Some(Answered)),
        Some(Change::Closed)
    );
}

#[test]
fn calls_from_before_it_opened_change_nothing() {
    let mut clocked = Clocked::opened();
    for verdict in [Some(Answered), Some(Failed), None] {
        assert_eq!(clocked.finish(Ticket::Ordinary, verdict), None);
        assert_eq!(clocked.name(), "open");
    }
    clocked.pass(1.0);
    assert_eq!(clocked.admit(), Admission::Pass(Ticket::Probe));
    for verdict in [Some(Answered), Some(Failed), None] {
        assert_eq!(clocked.finish(Ticket::Ordinary, verdict), None);
        assert_eq!(clocked.admit(), Admission::Refused(Duration::ZERO));
    }
}

#[test]
fn named_cause_is_bounded() {
    let breakers = Breakers::new(Rule {
        failures: 1,
        ..RULE
    });
    let error = L2Error::new(ErrorKind::Unavailable, "x".repeat(10_000));
    let admitted = breakers.admit(Lane::Store).ok().unwrap();
    admitted.finish(&vec![Err::<(), _>(error)]);
    let refused = breakers.admit(Lane::Store).err().unwrap();
    let cause = format!("({}...)", "x".repeat(CAUSE_CHARS));
    assert!(refused.contains(&cause), "{refused}");
}
