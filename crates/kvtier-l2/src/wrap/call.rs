//! Calls and answers as values, so that a guard is written once for all of them.

use std::ops::Index;

use kvtier_core::object_key::ObjectKey;
use serde_json::{Map, Value};

use crate::adapter::{Adapter, BoxFuture, ListPage, Loaded, Stored};
use crate::error::{ErrorKind, L2Error};
use crate::object::{LoadItem, ObjectSpec, StoreItem};

/// Class of calls that are bounded and counted together. Calls of one lane never wait for those of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Lookups, listings, and the free bytes.
    Lookup,
    /// Loads.
    Load,
    /// Stores and deletes.
    Store,
}

/// One value per lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PerLane<T> {
    /// For [`Lane::Lookup`].
    pub lookup: T,
    /// For [`Lane::Load`].
    pub load: T,
    /// For [`Lane::Store`].
    pub store: T,
}

impl<T> PerLane<T> {
    /// Returns the values of `make`.
    pub(super) fn new(mut make: impl FnMut(Lane) -> T) -> Self {
        Self {
            lookup: make(Lane::Lookup),
            load: make(Lane::Load),
            store: make(Lane::Store),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        [&self.lookup, &self.load, &self.store].into_iter()
    }

    /// Returns an object with one value per lane.
    pub(super) fn to_json(&self, value: impl Fn(&T) -> Value) -> Value {
        let mut map = Map::new();
        map.insert("lookup".into(), value(&self.lookup));
        map.insert("load".into(), value(&self.load));
        map.insert("store".into(), value(&self.store));
        Value::Object(map)
    }
}

impl<T> Index<Lane> for PerLane<T> {
    type Output = T;

    fn index(&self, lane: Lane) -> &T {
        match lane {
            Lane::Lookup => &self.lookup,
            Lane::Load => &self.load,
            Lane::Store => &self.store,
        }
    }
}

/// State of the backend as an answer shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The backend answered, possibly with errors.
    Answered,
    /// All items failed with errors of a backend that does not answer.
    Failed,
}

/// A call of an adapter.
pub(super) trait Call: Clone + Send + Sync + 'static {
    type Answer: Answer;
    const LANE: Lane;
    /// For messages: "a load of 3 objects".
    const NAME: &'static str;

    /// Number of items in the answer.
    fn items(&self) -> usize;

    fn send(self, to: &dyn Adapter) -> BoxFuture<'_, Self::Answer>;

    /// Returns the call for the items at these positions only.
    fn only(&self, positions: &[usize]) -> Self;

    /// Returns its name in messages.
    fn title(adapter: &dyn Adapter, items: usize) -> String {
        let plural = if items == 1 { "" } else { "s" };
        format!(
            "{}: {} of {items} object{plural}",
            adapter.kind(),
            Self::NAME
        )
    }
}

/// Answer to a call.
pub(super) trait Answer: Send + 'static {
    /// Returns an answer in which all items have this error.
    fn failed(items: usize, error: L2Error) -> Self;

    /// Whether it answers for `items` items.
    fn fits(&self, items: usize) -> bool;

    /// Returns the positions of items with a transient error. What was not sent, while others are answered, is for the caller
    /// to send again.
    fn transient(&self) -> Vec<usize>;

    /// Replaces the items at these positions by the answer to [`Call::only`].
    fn patch(&mut self, positions: &[usize], by: Self);

    /// Returns the state of the backend, `None` if it was not called.
    fn verdict(&self) -> Option<Verdict>;

    /// Returns the error of the first failed item.
    fn error(&self) -> Option<&L2Error>;
}

impl<T: Send + 'static> Answer for Vec<Result<T, L2Error>> {
    fn failed(items: usize, error: L2Error) -> Self {
        (0..items).map(|_| Err(error.clone())).collect()
    }

    fn fits(&self, items: usize) -> bool {
        self.len() == items
    }

    fn transient(&self) -> Vec<usize> {
        (0..self.len())
            .filter(|&at| is_transient(&self[at]) && !is_busy(&self[at]))
            .collect()
    }

    fn patch(&mut self, positions: &[usize], by: Self) {
        for (&at, item) in positions.iter().zip(by) {
            self[at] = item;
        }
    }

    fn verdict(&self) -> Option<Verdict> {
        if self.iter().all(is_busy) {
            return None;
        }
        Some(if self.iter().all(is_transient) {
            Verdict::Failed
        } else {
            Verdict::Answered
        })
    }

    fn error(&self) -> Option<&L2Error> {
        self.iter().find_map(|item| item.as_ref().err())
    }
}

fn is_transient<T>(result: &Result<T, L2Error>) -> bool {
    matches!(result, Err(error) if error.kind().is_transient())
}

fn is_busy<T>(result: &Result<T, L2Error>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::Busy)
}

/// Answer to a call as a whole.
pub(super) trait Whole: Send + 'static {
    fn fits(&self, items: usize) -> bool;
}

impl Whole for Vec<Option<u64>> {
    fn fits(&self, items: usize) -> bool {
        self.len() == items
    }
}

impl Whole for Option<u64> {
    fn fits(&self, _: usize) -> bool {
        true
    }
}

impl Whole for ListPage {
    fn fits(&self, _: usize) -> bool {
        true
    }
}

impl<T: Whole> Answer for Result<T, L2Error> {
    fn failed(_: usize, error: L2Error) -> Self {
        Err(error)
    }

    fn fits(&self, items: usize) -> bool {
        self.as_ref().map_or(true, |whole| whole.fits(items))
    }

    fn transient(&self) -> Vec<usize> {
        // It fails as a whole, which position 0 stands for.
        Vec::from_iter(is_transient(self).then_some(0))
    }

    fn patch(&mut self, _: &[usize], by: Self) {
        *self = by;
    }

    fn verdict(&self) -> Option<Verdict> {
        (!is_busy(self)).then(|| {
            if is_transient(self) {
                Verdict::Failed
            } else {
                Verdict::Answered
            }
        })
    }

    fn error(&self) -> Option<&L2Error> {
        self.as_ref().err()
    }
}

fn pick<T: Clone>(items: &[T], positions: &[usize]) -> Vec<T> {
    positions.iter().map(|&at| items[at].clone()).collect()
}

macro_rules! batch_call {
    ($name:ident, $item:ty, $answer:ty, $lane:ident, $method:ident, $title:literal) => {
        #[derive(Clone)]
        pub(super) struct $name(pub Vec<$item>);

        impl Call for $name {
            type Answer = $answer;
            const LANE: Lane = Lane::$lane;
            const NAME: &'static str = $title;

            fn items(&self) -> usize {
                self.0.len()
            }

            fn send(self, to: &dyn Adapter) -> BoxFuture<'_, $answer> {
                to.$method(self.0)
            }

            fn only(&self, positions: &[usize]) -> Self {
                Self(pick(&self.0, positions))
            }
        }
    };
}

batch_call!(
    StoreCall,
    StoreItem,
    Vec<Result<Stored, L2Error>>,
    Store,
    store,
    "store"
);
batch_call!(
    LoadCall,
    LoadItem,
    Vec<Result<Loaded, L2Error>>,
    Load,
    load,
    "load"
);
batch_call!(
    DeleteCall,
    ObjectKey,
    Vec<Result<bool, L2Error>>,
    Store,
    delete,
    "delete"
);

#[derive(Clone)]
pub(super) struct LookupCall(pub Vec<ObjectSpec>);

impl Call for LookupCall {
    type Answer = Result<Vec<Option<u64>>, L2Error>;
    const LANE: Lane = Lane::Lookup;
    const NAME: &'static str = "lookup";

    fn items(&self) -> usize {
        self.0.len()
    }

    fn send(self, to: &dyn Adapter) -> BoxFuture<'_, Self::Answer> {
        to.lookup(self.0)
    }

    fn only(&self, _: &[usize]) -> Self {
        self.clone()
    }
}

#[derive(Clone)]
pub(super) struct ListCall {
    pub from: Option<String>,
    pub limit: usize,
}

impl Call for ListCall {
    type Answer = Result<ListPage, L2Error>;
    const LANE: Lane = Lane::Lookup;
    const NAME: &'static str = "list";

    fn items(&self) -> usize {
        self.limit
    }

    fn send(self, to: &dyn Adapter) -> BoxFuture<'_, Self::Answer> {
        to.list(self.from, self.limit)
    }

    fn only(&self, _: &[usize]) -> Self {
        self.clone()
    }
}

/// Call for the free bytes.
#[derive(Clone)]
pub(super) struct FreeCall;

impl Call for FreeCall {
    type Answer = Result<Option<u64>, L2Error>;
    const LANE: Lane = Lane::Lookup;
    const NAME: &'static str = "free bytes";

    fn items(&self) -> usize {
        1
    }

    fn send(self, to: &dyn Adapter) -> BoxFuture<'_, Self::Answer> {
        to.free_bytes()
    }

    fn only(&self, _: &[usize]) -> Self {
        Self
    }
}
