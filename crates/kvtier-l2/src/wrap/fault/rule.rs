//! Which calls and objects go wrong, in which way, and how often.

use std::iter;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::config::{ConfigError, Fallback, Interval, Key, Options, Shape, one_of};
use crate::error::ErrorKind;
use crate::wrap::random;

/// What an adapter is asked for.
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
    /// How much room there is.
    Free,
}

/// What happens to the bytes of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harm {
    /// The second half is missing: it is not stored, or other bytes are loaded for it.
    Short,
    /// One byte more is stored.
    Long,
    /// One bit is flipped.
    Corrupt,
}

/// A time that does not depend on the machine, so that it can be read off a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wait {
    /// For each call.
    pub call: Duration,
    /// For each of its objects.
    pub object: Duration,
}

/// No call waits longer than this.
const LONGEST: Duration = Duration::from_millis(LONGEST_MS as u64);
const LONGEST_MS: i64 = 60 * 60 * 1000;

impl Wait {
    /// For a call of so many objects.
    pub(super) fn of(self, objects: usize) -> Duration {
        let objects = u32::try_from(objects).unwrap_or(u32::MAX);
        let whole = self
            .call
            .saturating_add(self.object.saturating_mul(objects));
        whole.min(LONGEST)
    }
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    /// Objects are not asked for, and answered with this. Not found is a miss of a lookup; any other error fails it
    /// whole.
    Fail(ErrorKind),
    /// Calls are made later.
    Delay(Wait),
    /// Calls are made at once and answered later.
    Late(Wait),
    /// Calls are never made, and not answered before the adapter is closed.
    Stall,
    /// Objects are harmed.
    Harm(Harm),
}

/// One fault of an adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// Of what; `None` is everything that `wrong` is possible for.
    pub operation: Option<Operation>,
    /// What goes wrong.
    pub wrong: Wrong,
    /// It begins after so many.
    pub after: u64,
    /// Every so many of those that follow, at least 1.
    pub every: u64,
    /// Part of those, above 0, at most 1.
    pub rate: f64,
    /// It ends after so many faults.
    pub limit: Option<u64>,
}

impl Rule {
    /// Always.
    #[must_use]
    pub fn new(operation: Option<Operation>, wrong: Wrong) -> Self {
        Self {
            operation,
            wrong,
            after: 0,
            every: 1,
            rate: 1.0,
            limit: None,
        }
    }

    fn is_possible(wrong: Wrong, operation: Operation) -> bool {
        use Operation::{Delete, Load, Lookup, Store};
        match wrong {
            Wrong::Fail(ErrorKind::NotFound) => matches!(operation, Lookup | Load | Delete),
            Wrong::Harm(Harm::Long) => operation == Store,
            Wrong::Harm(Harm::Short | Harm::Corrupt) => matches!(operation, Store | Load),
            _ => true,
        }
    }

    /// Whether it is about this.
    pub(super) fn is_about(&self, operation: Operation) -> bool {
        let meant = self.operation.is_none_or(|meant| meant == operation);
        meant && Self::is_possible(self.wrong, operation)
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

/// The keys of a rule.
pub(super) const KEYS: &[Key] = &[
    Key::of(
        "kind",
        Shape::OneOf(&["fail", "delay", "late", "stall", "short", "long", "corrupt"]),
        "What goes wrong: an object is not asked for and fails; a call is made later, or answered later, or never answered \
         until the adapter is closed; an object lacks its second half, has a byte more, has one bit flipped",
    )
    .required(),
    Key::of(
        "operation",
        Shape::OneOf(&["any", "store", "lookup", "load", "delete", "list", "free"]),
        "Of what; any is each one that it is possible for. list is also the recovery after a start, free is how much room \
         there is",
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
        "For fail: with which error, unset is unavailable. not_found is a miss; a lookup with another one fails whole",
    ),
    Key::integer("delay_ms", 0, LONGEST_MS, "For delay and late: how long").unit("ms"),
    Key::integer(
        "object_delay_ms",
        0,
        LONGEST_MS,
        "For delay and late: how long for each object of the call on top; all together an hour at most",
    )
    .unit("ms"),
    Key::integer("after", 0, i64::MAX, "So many pass first").or(Fallback::Integer(0)),
    Key::integer("every", 1, i64::MAX, "Only each so-many-th of those after").or(Fallback::Integer(1)),
    Key::number(
        "rate",
        Interval::above(0.0).up_to(1.0),
        "Only this part of those, drawn from seed: the same ones in each run with the same calls",
    )
    .or(Fallback::Number(1.0)),
    Key::integer("limit", 1, i64::MAX, "So many faults, then no more; unset is no end"),
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
        let wrong = match kind {
            "delay" => Wrong::Delay(wait()),
            "late" => Wrong::Late(wait()),
            "stall" => Wrong::Stall,
            "short" => Wrong::Harm(Harm::Short),
            "long" => Wrong::Harm(Harm::Long),
            "corrupt" => Wrong::Harm(Harm::Corrupt),
            _ => Wrong::Fail(error(options.find("error"))),
        };
        let waits = match wrong {
            Wrong::Delay(wait) | Wrong::Late(wait) => Some(wait),
            _ => None,
        };
        if !matches!(wrong, Wrong::Fail(_)) && options.find::<&str>("error").is_some() {
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
        if operation.is_some_and(|operation| !Self::is_possible(wrong, operation)) {
            let possible = OPERATIONS
                .iter()
                .filter(|(_, operation)| Self::is_possible(wrong, *operation));
            let possible: Vec<_> = iter::once("any")
                .chain(possible.map(|(name, _)| *name))
                .collect();
            let error = match wrong {
                Wrong::Fail(kind) => format!(" and error {:?}", kind.name()),
                _ => String::new(),
            };
            let allowed = format!("{} with kind {kind:?}{error}", one_of(&possible));
            return Err(options.refuse("operation", &allowed));
        }
        Ok(Self {
            operation,
            wrong,
            after: options.get("after"),
            every: options.get("every"),
            rate: options.get("rate"),
            limit: options.find("limit"),
        })
    }
}

/// A rule and what it has done. Nothing of it depends on time, so the same calls in the same order meet the same
/// faults.
#[derive(Debug)]
pub(super) struct Dice {
    pub rule: Rule,
    seed: u64,
    seen: AtomicU64,
    done: AtomicU64,
}

impl Dice {
    /// `place` is that of the rule among others of the same seed.
    pub(super) fn new(rule: Rule, seed: i64, place: u64) -> Self {
        Self {
            rule,
            seed: random(seed.cast_unsigned(), place),
            seen: AtomicU64::new(0),
            done: AtomicU64::new(0),
        }
    }

    /// Whether the next one goes wrong; a random number for what happens to it.
    pub(super) fn strikes(&self) -> Option<u64> {
        let rule = &self.rule;
        let number = self.seen.fetch_add(1, Ordering::Relaxed);
        let turn = number.checked_sub(rule.after)? + 1;
        let drawn = random(self.seed, number);
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
        // Other bits than those that decided.
        matches!(counted, Some(Ok(_))).then(|| random(drawn, 0))
    }

    /// For `/status`.
    pub(super) fn report(&self) -> Value {
        let kind = match self.rule.wrong {
            Wrong::Fail(_) => "fail",
            Wrong::Delay(_) => "delay",
            Wrong::Late(_) => "late",
            Wrong::Stall => "stall",
            Wrong::Harm(Harm::Short) => "short",
            Wrong::Harm(Harm::Long) => "long",
            Wrong::Harm(Harm::Corrupt) => "corrupt",
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
