//! Rules of injected faults: kind, operation and frequency.

use std::iter;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvtier_core::random::SplitMix64;
use serde_json::{Value, json};

use crate::config::{ConfigError, Fallback, Interval, Key, Options, Shape, one_of};
use crate::error::ErrorKind;

/// Operation of an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Stores.
    Store,
    /// Lookups.
    Lookup,
    /// Loads.
    Load,
    /// Deletes.
    Delete,
    /// Listings, and the recovery after a start.
    List,
    /// The free bytes.
    Free,
}

/// Corruption of the bytes of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Corruption {
    /// The second half is not stored, or is loaded with other bytes.
    Short,
    /// An additional byte is stored.
    Long,
    /// One bit is flipped.
    Corrupt,
}

/// Delay that depends only on the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wait {
    /// Per call.
    pub call: Duration,
    /// Per object of a call.
    pub object: Duration,
}

/// Longest delay of a call.
const MAX_DELAY: Duration = Duration::from_millis(MAX_DELAY_MS as u64);
const MAX_DELAY_MS: i64 = 60 * 60 * 1000;

impl Wait {
    /// Returns the delay of a call of `objects` objects.
    pub(super) fn of(self, objects: usize) -> Duration {
        let objects = u32::try_from(objects).unwrap_or(u32::MAX);
        let whole = self
            .call
            .saturating_add(self.object.saturating_mul(objects));
        whole.min(MAX_DELAY)
    }
}

/// Kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Objects are not sent and fail with this error. In a lookup, `NotFound` is a miss; other errors fail all of it.
    Fail(ErrorKind),
    /// Calls are sent later.
    Delay(Wait),
    /// Calls are sent at once and answered later.
    Late(Wait),
    /// Calls are never sent, and answered when the adapter is closed.
    Stall,
    /// Objects are corrupted.
    Corruption(Corruption),
}

/// Rule of one injected fault.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// Affected operation; `None` is each one for which the fault is possible.
    pub operation: Option<Operation>,
    /// Kind of the fault.
    pub fault: Fault,
    /// Number of events that pass first.
    pub after: u64,
    /// Period among those that follow, at least 1.
    pub every: u64,
    /// Probability for those, above 0, at most 1.
    pub rate: f64,
    /// Number of faults after which it ends.
    pub limit: Option<u64>,
}

impl Rule {
    /// Returns a rule that always applies.
    #[must_use]
    pub fn new(operation: Option<Operation>, fault: Fault) -> Self {
        Self {
            operation,
            fault,
            after: 0,
            every: 1,
            rate: 1.0,
            limit: None,
        }
    }

    fn is_possible(fault: Fault, operation: Operation) -> bool {
        use Operation::{Delete, Load, Lookup, Store};
        match fault {
            Fault::Fail(ErrorKind::NotFound) => matches!(operation, Lookup | Load | Delete),
            Fault::Corruption(Corruption::Long) => operation == Store,
            Fault::Corruption(Corruption::Short | Corruption::Corrupt) => {
                matches!(operation, Store | Load)
            }
            _ => true,
        }
    }

    /// Whether it applies to this operation.
    pub(super) fn is_about(&self, operation: Operation) -> bool {
        let meant = self.operation.is_none_or(|meant| meant == operation);
        meant && Self::is_possible(self.fault, operation)
    }
}

const OPERATIONS: &[(&str, Operation)] = &[
    ("store", Operation::Store),
    ("lookup", Operation::Lookup),
    ("load", Operation::Load),
    ("delete", Operation::Delete),
    ("list", Operation::List),
    ("free", Operation::Free),
];

const ERRORS: &[ErrorKind] = &[
    ErrorKind::Unavailable,
    ErrorKind::NotFound,
    ErrorKind::Corrupt,
    ErrorKind::Full,
    ErrorKind::Deadline,
    ErrorKind::Busy,
    ErrorKind::Refused,
];

/// Keys of a rule.
pub(super) const KEYS: &[Key] = &[
    Key::of(
        "kind",
        Shape::OneOf(&["fail", "delay", "late", "stall", "short", "long", "corrupt"]),
        "fail: the object fails and is not sent. delay: the call is sent later. late: it is answered later. stall: it is not answered until the adapter \
         closes. short, long, corrupt: the object lacks its second half, has one byte more, has one bit flipped",
    )
    .required(),
    Key::of(
        "operation",
        Shape::OneOf(&["any", "store", "lookup", "load", "delete", "list", "free"]),
        "Affected operation; any is each that the fault is possible for. list is also the recovery after a start, free the query of the free bytes",
    )
    .or(Fallback::Text("any")),
    Key::of(
        "error",
        Shape::OneOf(&[
            "unavailable",
            "not_found",
            "corrupt",
            "full",
            "deadline",
            "busy",
            "refused",
        ]),
        "For fail: the error, unset is unavailable. not_found is a miss; with other errors a lookup fails for all its objects",
    ),
    Key::integer("delay_ms", 0, MAX_DELAY_MS, "For delay and late: the delay per call").unit("ms"),
    Key::integer(
        "object_delay_ms",
        0,
        MAX_DELAY_MS,
        "For delay and late: the additional delay per object of the call; an hour at most in all",
    )
    .unit("ms"),
    Key::integer("after", 0, i64::MAX, "Number of calls or objects that pass first").or(Fallback::Integer(0)),
    Key::integer("every", 1, i64::MAX, "Only every n-th of those that follow").or(Fallback::Integer(1)),
    Key::number(
        "rate",
        Interval::above(0.0).up_to(1.0),
        "Only this fraction of those, drawn from seed: the same ones in each run with the same calls",
    )
    .or(Fallback::Number(1.0)),
    Key::integer("limit", 1, i64::MAX, "Number of faults after which the rule ends; unset is unlimited"),
];

impl Rule {
    pub(super) fn parse(options: &Options) -> Result<Self, ConfigError> {
        let kind: &str = options.get("kind");
        let wait = || Wait {
            call: Duration::from_millis(options.find("delay_ms").unwrap_or(0)),
            object: Duration::from_millis(options.find("object_delay_ms").unwrap_or(0)),
        };
        let error = |name: Option<&str>| {
            let mut known = ERRORS.iter();
            let found = known.find(|kind| Some(kind.name()) == name);
            found.copied().unwrap_or(ErrorKind::Unavailable)
        };
        let fault = match kind {
            "delay" => Fault::Delay(wait()),
            "late" => Fault::Late(wait()),
            "stall" => Fault::Stall,
            "short" => Fault::Corruption(Corruption::Short),
            "long" => Fault::Corruption(Corruption::Long),
            "corrupt" => Fault::Corruption(Corruption::Corrupt),
            _ => Fault::Fail(error(options.find("error"))),
        };
        let waits = match fault {
            Fault::Delay(wait) | Fault::Late(wait) => Some(wait),
            _ => None,
        };
        if !matches!(fault, Fault::Fail(_)) && options.find::<&str>("error").is_some() {
            return Err(
                options.refuse("error", &format!("none with kind {kind:?}, only with fail"))
            );
        }
        for key in ["delay_ms", "object_delay_ms"] {
            if waits.is_none() && options.find::<i64>(key).is_some() {
                let allowed = format!("none with kind {kind:?}, only with delay and late");
                return Err(options.refuse(key, &allowed));
            }
        }
        if waits == Some(Wait::default()) {
            let allowed = format!("a time above 0 with kind {kind:?}, here or as object_delay_ms");
            return Err(options.refuse("delay_ms", &allowed));
        }
        let name: &str = options.get("operation");
        let operation = OPERATIONS.iter().find(|(known, _)| *known == name);
        let operation = operation.map(|(_, operation)| *operation);
        if operation.is_some_and(|operation| !Self::is_possible(fault, operation)) {
            let possible = OPERATIONS
                .iter()
                .filter(|(_, operation)| Self::is_possible(fault, *operation));
            let possible: Vec<_> = iter::once("any")
                .chain(possible.map(|(name, _)| *name))
                .collect();
            let error = match fault {
                Fault::Fail(kind) => format!(" and error {:?}", kind.name()),
                _ => String::new(),
            };
            let allowed = format!("{} with kind {kind:?}{error}", one_of(&possible));
            return Err(options.refuse("operation", &allowed));
        }
        Ok(Self {
            operation,
            fault,
            after: options.get("after"),
            every: options.get("every"),
            rate: options.get("rate"),
            limit: options.find("limit"),
        })
    }
}

/// A rule and its counters. Nothing depends on time, so the same calls in the same order have the same faults.
#[derive(Debug)]
pub(super) struct RuleState {
    pub rule: Rule,
    seed: u64,
    seen: AtomicU64,
    done: AtomicU64,
}

impl RuleState {
    /// Returns the state of a rule; `place` is its position among those of the same seed.
    pub(super) fn new(rule: Rule, seed: i64, place: u64) -> Self {
        Self {
            rule,
            seed: SplitMix64::nth(seed.cast_unsigned(), place),
            seen: AtomicU64::new(0),
            done: AtomicU64::new(0),
        }
    }

    /// Returns a random number if the next event has the fault.
    pub(super) fn strikes(&self) -> Option<u64> {
        let rule = &self.rule;
        let number = self.seen.fetch_add(1, Ordering::Relaxed);
        let turn = number.checked_sub(rule.after)? + 1;
        let drawn = SplitMix64::nth(self.seed, number);
        let hit = turn.is_multiple_of(rule.every.max(1))
            && (rule.rate >= 1.0 || (drawn as f64) < rule.rate * u64::MAX as f64);
        let one_more = |done| {
            rule.limit
                .is_none_or(|limit| done < limit)
                .then_some(done + 1)
        };
        let counted = hit.then(|| {
            self.done
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
        });
        // Other bits than those of the decision.
        matches!(counted, Some(Ok(_))).then(|| SplitMix64::nth(drawn, 0))
    }

    /// Returns its part of `/status`.
    pub(super) fn report(&self) -> Value {
        let kind = match self.rule.fault {
            Fault::Fail(_) => "fail",
            Fault::Delay(_) => "delay",
            Fault::Late(_) => "late",
            Fault::Stall => "stall",
            Fault::Corruption(Corruption::Short) => "short",
            Fault::Corruption(Corruption::Long) => "long",
            Fault::Corruption(Corruption::Corrupt) => "corrupt",
        };
        let mut names = OPERATIONS.iter();
        let name = names.find(|(_, operation)| Some(*operation) == self.rule.operation);
        json!({
            "kind": kind,
            "operation": name.map_or("any", |(name, _)| *name),
            "seen": self.seen.load(Ordering::Relaxed),
            "faults": self.done.load(Ordering::Relaxed),
        })
    }
}
