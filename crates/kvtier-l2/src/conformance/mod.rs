//! Conformance suite of adapters, built-in or external.
//!
//! [`run`] needs a function that makes empty backing stores; each one opens the adapter on itself:
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use kvtier_l2::{Adapter, conformance};
//! # fn open(path: &std::path::Path) -> Arc<dyn Adapter> { unimplemented!() }
//! # fn new_directory() -> std::path::PathBuf { unimplemented!() }
//! # async fn test() {
//! conformance::run(|| {
//!     let directory = new_directory();
//!     move || {
//!         let directory = directory.clone();
//!         async move { open(&directory) }
//!     }
//! })
//! .await;
//! # }
//! ```
//!
//! The suite knows nothing of the internals of an adapter and waits only for its answers. It needs a tokio runtime whose
//! time is not paused.
//!
//! Its memory is reused as L1's is: once the last hold of a buffer is dropped, its bytes become garbage and then those of
//! another buffer, which shows an adapter that reads or writes too late.

mod calls;
mod cases;
mod context;
mod evicting;
mod memory;
mod objects;
mod scoped;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use kvtier_core::object_key::ObjectKey;

use crate::adapter::{Adapter, BoxFuture, Capabilities};

pub use calls::{kinds, load, store};
pub use context::poll_once;
pub use evicting::evicted_by_the_backend_leaves_the_index;
pub use memory::Memory;
pub use objects::{content, object, object_with};
pub use scoped::{Cleanup, Scoped};

use context::TestContext;

/// Timeout of one case. No case waits for time to pass, so it only ends those that hang.
const CASE_TIMEOUT: Duration = Duration::from_secs(120);

/// Backing store: a directory, a bucket, a server.
///
/// Implemented for closures that return a future of an opened adapter.
pub trait Subject: Send + Sync + 'static {
    /// Opens the adapter on the store, which may hold objects. Earlier ones were closed.
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>>;

    /// Damages the object of `key` without the adapter. Returns `false` if that is not possible.
    fn damage(&self, key: &ObjectKey, how: Damage) -> bool {
        let _ = (key, how);
        false
    }

    /// Whether the store reorganises itself, so that a listing may have an object again on a later page.
    fn may_list_twice(&self) -> bool {
        false
    }
}

impl<F, Opened> Subject for F
where
    F: Fn() -> Opened + Send + Sync + 'static,
    Opened: Future<Output = Arc<dyn Adapter>> + Send + 'static,
{
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        Box::pin(self())
    }
}

/// Damage of stored bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// One bit is flipped.
    Flip,
    /// The last bytes are missing.
    Truncate,
    /// There are additional bytes behind them.
    Extend,
    /// All bytes are missing, but the object exists.
    Empty,
    /// The object does not exist any more.
    Remove,
}

impl Damage {
    /// All kinds of damage.
    pub const ALL: [Self; 5] = [
        Self::Flip,
        Self::Truncate,
        Self::Extend,
        Self::Empty,
        Self::Remove,
    ];

    /// Damages bytes; those of a removed object do not exist.
    pub fn apply(self, bytes: &mut Vec<u8>) {
        match self {
            Self::Flip => {
                let at = bytes.len() / 3;
                bytes[at] ^= 0x10;
            }
            Self::Truncate => drop(bytes.pop()),
            Self::Extend => bytes.push(1),
            Self::Empty | Self::Remove => bytes.clear(),
        }
    }
}

/// Results of the cases by name.
#[derive(Debug)]
pub struct Report(Vec<(&'static str, Result<(), String>)>);

impl Report {
    /// Returns the names of all cases that were run.
    pub fn cases(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|(name, _)| *name)
    }

    /// Returns the failed cases with their messages.
    pub fn failed(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0
            .iter()
            .filter_map(|(name, result)| Some((*name, result.as_ref().err()?.as_str())))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, result) in &self.0 {
            match result {
                Ok(()) => writeln!(f, "ok      {name}")?,
                Err(why) => writeln!(f, "FAILED  {name}: {why}")?,
            }
        }
        Ok(())
    }
}

/// Runs all cases, each with a new, empty store from `make`.
///
/// # Panics
/// If a case failed, with the report.
pub async fn run<S: Subject>(make: impl FnMut() -> S) {
    let report = check(make).await;
    assert!(report.failed().next().is_none(), "\n{report}");
}

/// Runs all cases and returns the report.
pub async fn check<S: Subject>(make: impl FnMut() -> S) -> Report {
    check_some(make, |_| true).await
}

/// Runs the cases whose names are `chosen`.
pub async fn check_some<S: Subject>(
    mut make: impl FnMut() -> S,
    chosen: impl Fn(&str) -> bool,
) -> Report {
    let mut results = Vec::new();
    for case in cases::ALL.iter().filter(|case| chosen(case.name)) {
        let work = tokio::spawn((case.run)(TestContext::new(Arc::new(make()))));
        let abort = work.abort_handle();
        let result = match tokio::time::timeout(CASE_TIMEOUT, work).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(message(error)),
            Err(_) => {
                abort.abort();
                Err(format!("did not end within {} s", CASE_TIMEOUT.as_secs()))
            }
        };
        results.push((case.name, result));
    }
    Report(results)
}

/// Returns the names of all cases, in their order.
pub fn names() -> impl Iterator<Item = &'static str> {
    cases::ALL.iter().map(|case| case.name)
}

/// Returns why a case says nothing about a subject with these capabilities whose stored bytes the suite cannot damage, if it does not.
#[must_use]
pub fn skipped(case: &str, can: Capabilities) -> Option<&'static str> {
    match case {
        "a_listing_in_pages_is_complete"
        | "odd_cursors_are_harmless"
        | "recovers_what_was_stored"
        | "recovery_stops_when_requested"
        | "recovers_while_used" => (!can.list).then_some("it cannot list"),
        "delete_while_loading" => (!can.delete).then_some("it cannot delete"),
        "damaged_objects_are_never_ok"
        | "damage_while_closed_is_never_ok"
        | "damaged_objects_can_be_stored_again" => {
            Some("the suite cannot damage what is stored there")
        }
        "other_layouts_are_never_ok" => {
            (!can.verifies).then_some("it keeps no metadata, so layouts are not told apart")
        }
        _ => None,
    }
}

/// Returns the message of a panic.
fn message(error: tokio::task::JoinError) -> String {
    let Ok(panic) = error.try_into_panic() else {
        return "was cancelled".into();
    };
    match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(text), _) => text.clone(),
        (_, Some(text)) => (*text).into(),
        _ => "panicked".into(),
    }
}
