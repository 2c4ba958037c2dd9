//! Faults of one call, as the rules decide them.

use std::time::Duration;

use super::rule::{Corruption, Fault, Operation, RuleState};
use crate::error::{ErrorKind, L2Error};

/// Fault of one object.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum ObjectFault {
    Fail(ErrorKind),
    /// With the random number that chooses the bit.
    Corruption(Corruption, u64),
}

/// Faults of one call.
#[derive(Debug)]
pub(super) struct Plan {
    pub stalls: bool,
    /// Delay before it is sent.
    pub before: Duration,
    /// Delay before it is answered.
    pub after: Duration,
    /// Fault per object.
    pub objects: Vec<Option<ObjectFault>>,
    /// Error of the whole call.
    pub whole: Option<ErrorKind>,
}

impl Plan {
    /// Applies the rules in order; an object with a fault is not seen by later rules.
    pub(super) fn new(rules: &[RuleState], operation: Operation, objects: usize) -> Self {
        let mut plan = Self {
            stalls: false,
            before: Duration::ZERO,
            after: Duration::ZERO,
            objects: vec![None; objects],
            whole: None,
        };
        for rule in rules.iter().filter(|rule| rule.rule.is_about(operation)) {
            // Later rules do not see a call that stalls.
            if plan.stalls {
                break;
            }
            let strikes = || rule.strikes().is_some();
            match rule.rule.fault {
                Fault::Stall => plan.stalls |= strikes(),
                Fault::Delay(wait) if strikes() => plan.before += wait.of(objects),
                Fault::Late(wait) if strikes() => plan.after += wait.of(objects),
                Fault::Delay(_) | Fault::Late(_) => {}
                Fault::Fail(kind) if fails_whole(operation, kind) => {
                    if plan.whole.is_none() && strikes() {
                        plan.whole = Some(kind);
                    }
                }
                _ if plan.whole.is_some() => {}
                Fault::Fail(kind) => plan.each(rule, |_| ObjectFault::Fail(kind)),
                Fault::Corruption(corruption) => {
                    plan.each(rule, |draw| ObjectFault::Corruption(corruption, draw))
                }
            }
        }
        plan
    }

    fn each(&mut self, rule: &RuleState, fault: impl Fn(u64) -> ObjectFault) {
        for object in self.objects.iter_mut().filter(|object| object.is_none()) {
            *object = rule.strikes().map(&fault);
        }
    }

    /// Returns the items that are sent.
    pub(super) fn sent<T>(&self, items: Vec<T>) -> Vec<T> {
        let faults = self.objects.iter().zip(items);
        let sent = faults.filter(|(fault, _)| !matches!(fault, Some(ObjectFault::Fail(_))));
        sent.map(|(_, item)| item).collect()
    }

    /// Returns the corruption of each item that is sent.
    pub(super) fn corruptions(&self) -> Vec<Option<(Corruption, u64)>> {
        let corruption = |fault: Option<ObjectFault>| match fault {
            Some(ObjectFault::Corruption(corruption, draw)) => Some((corruption, draw)),
            _ => None,
        };
        self.sent(self.objects.iter().copied().map(corruption).collect())
    }

    /// Returns the answers for all items, given those for the items that were sent.
    pub(super) fn answers<T>(
        &self,
        answers: Vec<Result<T, L2Error>>,
        operation: &str,
    ) -> Vec<Result<T, L2Error>> {
        let mut answers = answers.into_iter();
        let one = |fault: &Option<ObjectFault>| match fault {
            Some(ObjectFault::Fail(kind)) => Err(error(*kind, operation)),
            _ => answers.next().unwrap_or_else(|| {
                let line = "fault_inject: the adapter gave no result";
                Err(L2Error::new(ErrorKind::Refused, line))
            }),
        };
        self.objects.iter().map(one).collect()
    }
}

/// Whether the error fails all objects of a call.
fn fails_whole(operation: Operation, kind: ErrorKind) -> bool {
    match operation {
        Operation::Store | Operation::Load | Operation::Delete => false,
        Operation::Lookup => kind != ErrorKind::NotFound,
        Operation::List | Operation::Free => true,
    }
}

/// Error of an injected failure.
pub(super) fn error(kind: ErrorKind, operation: &str) -> L2Error {
    let line = format!(
        "fault_inject: this {operation} fails on purpose ({})",
        kind.name()
    );
    L2Error::new(kind, line)
}
