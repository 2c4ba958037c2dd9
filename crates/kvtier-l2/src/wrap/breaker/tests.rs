//! Tests of the state machine with a manual clock.

use std::time::{Duration, Instant};

use super::CallVerdict::{Answered, Failed};
use super::*;

fn guards() -> Guards {
    Guards {
        breaker_failures: 3,
        ..Guards::default()
    }
}

/// A breaker and its manual clock.
struct Clocked {
    breaker: Breaker,
    now: Instant,
}

impl Clocked {
    fn new() -> Self {
        Self {
            breaker: Breaker::new(guards()),
            now: Instant::now(),
        }
    }

    fn pass(&mut self, seconds: f64) {
        self.now += Duration::from_secs_f64(seconds);
    }

    fn admit(&mut self) -> Result<Admission, Duration> {
        self.breaker.admit(self.now)
    }

    fn finish(
        &mut self,
        admission: Admission,
        verdict: Option<CallVerdict>,
    ) -> Option<BreakerChange> {
        self.breaker.finish(admission, verdict, self.now)
    }

    /// A call that is let through with this admission, and ends so.
    fn call(
        &mut self,
        admission: Admission,
        verdict: Option<CallVerdict>,
    ) -> Option<BreakerChange> {
        assert_eq!(self.admit(), Ok(admission));
        self.finish(admission, verdict)
    }

    fn opened() -> Self {
        let mut clocked = Self::new();
        clocked.call(Admission::Ordinary, Some(Failed));
        clocked.call(Admission::Ordinary, Some(Failed));
        let change = clocked.call(Admission::Ordinary, Some(Failed));
        assert_eq!(change, Some(BreakerChange::Opened(guards().breaker_pause)));
        clocked
    }

    fn report(&self) -> Value {
        self.breaker.report(self.now)
    }
}

#[test]
fn opens_after_consecutive_failures_only() {
    let mut clocked = Clocked::new();
    for _ in 0..5 {
        assert_eq!(clocked.call(Admission::Ordinary, Some(Failed)), None);
        assert_eq!(clocked.call(Admission::Ordinary, Some(Failed)), None);
        assert_eq!(clocked.call(Admission::Ordinary, None), None);
        assert_eq!(clocked.report()["failures"], 2);
        assert_eq!(clocked.call(Admission::Ordinary, Some(Answered)), None);
        assert_eq!(clocked.report()["failures"], 0);
    }
    assert_eq!(clocked.report()["state"], "closed");
    assert_eq!(Clocked::opened().report()["state"], "open");
}

#[test]
fn refuses_while_open_with_remaining_pause() {
    let mut clocked = Clocked::opened();
    clocked.pass(0.25);
    assert_eq!(clocked.admit(), Err(Duration::from_millis(750)));
    assert_eq!(clocked.breaker.refused, 1);
    assert_eq!(clocked.breaker.opened, 1);
    assert!(!clocked.breaker.is_closed());
}

#[test]
fn one_probe_decides() {
    let mut clocked = Clocked::opened();
    clocked.pass(1.0);
    assert_eq!(clocked.report()["state"], "half_open");
    assert_eq!(clocked.admit(), Ok(Admission::Probe));
    assert_eq!(clocked.report()["state"], "half_open");
    assert_eq!(clocked.admit(), Err(Duration::ZERO));
    assert_eq!(
        clocked.finish(Admission::Probe, Some(Answered)),
        Some(BreakerChange::Closed)
    );
    assert_eq!(clocked.report()["state"], "closed");
    assert_eq!(clocked.call(Admission::Ordinary, Some(Failed)), None);
}

#[test]
fn pause_doubles_up_to_its_maximum_and_resets() {
    let mut clocked = Clocked::opened();
    for seconds in [2, 4, 5, 5] {
        clocked.pass(10.0);
        let change = clocked.call(Admission::Probe, Some(Failed));
        assert_eq!(
            change,
            Some(BreakerChange::Opened(Duration::from_secs(seconds)))
        );
    }
    clocked.pass(10.0);
    clocked.call(Admission::Probe, Some(Answered));
    clocked.call(Admission::Ordinary, Some(Failed));
    clocked.call(Admission::Ordinary, Some(Failed));
    let change = clocked.call(Admission::Ordinary, Some(Failed));
    assert_eq!(change, Some(BreakerChange::Opened(guards().breaker_pause)));
    assert_eq!(clocked.breaker.opened, 6);
}

#[test]
fn abandoned_probe_is_repeated() {
    let mut clocked = Clocked::opened();
    clocked.pass(1.0);
    assert_eq!(clocked.call(Admission::Probe, None), None);
    assert_eq!(
        clocked.call(Admission::Probe, Some(Answered)),
        Some(BreakerChange::Closed)
    );
}

#[test]
fn calls_from_before_it_opened_change_nothing() {
    let mut clocked = Clocked::opened();
    for verdict in [Some(Answered), Some(Failed), None] {
        assert_eq!(clocked.finish(Admission::Ordinary, verdict), None);
        assert_eq!(clocked.report()["state"], "open");
    }
    clocked.pass(1.0);
    assert_eq!(clocked.admit(), Ok(Admission::Probe));
    for verdict in [Some(Answered), Some(Failed), None] {
        assert_eq!(clocked.finish(Admission::Ordinary, verdict), None);
        assert_eq!(clocked.admit(), Err(Duration::ZERO));
    }
}

#[test]
fn named_cause_is_bounded() {
    let breaker = Mutex::new(Breaker::new(Guards {
        breaker_failures: 1,
        ..guards()
    }));
    let error = L2Error::new(ErrorKind::Unavailable, "x".repeat(10_000));
    let admitted = Admitted::new(&breaker).ok().unwrap();
    admitted.finish(&[Err::<(), _>(error)], "test", ());
    let refused = Admitted::new(&breaker).err().unwrap();
    let cause = format!("({}...)", "x".repeat(CAUSE_CHARS));
    assert!(refused.contains(&cause), "{refused}");
}
