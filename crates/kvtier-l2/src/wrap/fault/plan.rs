//! What the rules do to one call.

use std::time::Duration;

use super::rule::{Dice, Harm, Operation, Wrong};
use crate::error::{ErrorKind, L2Error};

/// What happens to one object.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fault {
    Fail(ErrorKind),
    /// With a random number.
    Harm(Harm, u64),
}

/// What happens to one call.
#[derive(Debug)]
pub(super) struct Plan {
    pub stalls: bool,
    /// Until it is made.
    pub before: Duration,
    /// From then until it is answered.
    pub after: Duration,
    /// What happens to each of its objects.
    pub objects: Vec<Option<Fault>>,
    /// The error that all of it fails with.
    pub whole: Option<ErrorKind>,
}

impl Plan {
    /// Asks the rules in their order; what one of them struck the next ones do not see.
    pub(super) fn new(rules: &[Dice], operation: Operation, objects: usize) -> Self {
        let mut plan = Self {
            stalls: false,
            before: Duration::ZERO,
            after: Duration::ZERO,
            objects: vec![None; objects],
            whole: None,
        };
        for dice in rules.iter().filter(|dice| dice.rule.is_about(operation)) {
            // The others do not see what comes to nothing.
            if plan.stalls {
                break;
            }
            let strikes = || dice.strikes().is_some();
            match dice.rule.wrong {
                Wrong::Stall => plan.stalls |= strikes(),
                Wrong::Delay(wait) if strikes() => plan.before += wait.of(objects),
                Wrong::Late(wait) if strikes() => plan.after += wait.of(objects),
                Wrong::Delay(_) | Wrong::Late(_) => {}
                Wrong::Fail(kind) if fails_whole(operation, kind) => {
                    if plan.whole.is_none() && strikes() {
                        plan.whole = Some(kind);
                    }
                }
                _ if plan.whole.is_some() => {}
                Wrong::Fail(kind) => plan.each(dice, |_| Fault::Fail(kind)),
                Wrong::Harm(harm) => plan.each(dice, |draw| Fault::Harm(harm, draw)),
            }
        }
        plan
    }

    fn each(&mut self, dice: &Dice, fault: impl Fn(u64) -> Fault) {
        for object in self.objects.iter_mut().filter(|object| object.is_none()) {
            *object = dice.strikes().map(&fault);
        }
    }

    /// The items that are asked for.
    pub(super) fn asked<T>(&self, items: Vec<T>) -> Vec<T> {
        let faults = self.objects.iter().zip(items);
        let asked = faults.filter(|(fault, _)| !matches!(fault, Some(Fault::Fail(_))));
        asked.map(|(_, item)| item).collect()
    }

    /// What happens to the bytes of each item that is asked for.
    pub(super) fn harms(&self) -> Vec<Option<(Harm, u64)>> {
        let harm = |fault: Option<Fault>| match fault {
            Some(Fault::Harm(harm, draw)) => Some((harm, draw)),
            _ => None,
        };
        self.asked(self.objects.iter().copied().map(harm).collect())
    }

    /// The answers for all items, given those for the items that were asked for.
    pub(super) fn answers<T>(
        &self,
        asked: Vec<Result<T, L2Error>>,
        operation: &str,
    ) -> Vec<Result<T, L2Error>> {
        let mut asked = asked.into_iter();
        let one = |fault: &Option<Fault>| match fault {
            Some(Fault::Fail(kind)) => Err(error(*kind, operation)),
            _ => asked.next().unwrap_or_else(|| {
                let line = "fault_inject: the adapter gave no result";
                Err(L2Error::new(ErrorKind::Refused, line))
            }),
        };
        self.objects.iter().map(one).collect()
    }
}

/// Whether an operation has one answer for all of its objects.
fn fails_whole(operation: Operation, kind: ErrorKind) -> bool {
    match operation {
        Operation::Store | Operation::Load | Operation::Delete => false,
        Operation::Lookup => kind != ErrorKind::NotFound,
        Operation::List | Operation::Free => true,
    }
}

/// The error of what fails on purpose.
pub(super) fn error(kind: ErrorKind, operation: &str) -> L2Error {
    let line = format!(
        "fault_inject: this {operation} fails on purpose ({})",
        kind.name()
    );
    L2Error::new(kind, line)
}
