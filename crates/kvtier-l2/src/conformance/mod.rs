//! The suite that every adapter must pass, wherever it is kept.
//!
//! Give [`run`] something that makes empty backing stores, and each store a way to open the adapter on it:
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
//! The suite knows nothing of how an adapter works inside, and waits for nothing but its answers. An adapter is run as it
//! is and in its guards; it needs a tokio runtime of which time is not paused.
//!
//! Its memory is hostile in the way that L1 is: as soon as the last hold of a buffer is dropped, its bytes become garbage
//! and then another buffer's. An adapter that reads or writes a moment too long is seen by its bytes.

mod bed;
mod cases;
mod memory;
mod objects;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use kvtier_core::object_key::ObjectKey;

use crate::adapter::{Adapter, BoxFuture};

pub use bed::poll_once;
pub use memory::Memory;
pub use objects::{content, object, object_with};

use bed::Bed;

/// Longest time for one case. None of them waits for time to pass, so this only ends those that hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// A backing store: a directory, a bucket, a server.
///
/// A closure that makes a future of an opened adapter is one.
pub trait Subject: Send + Sync + 'static {
    /// Opens the adapter on the store, which may hold objects. Earlier ones were closed.
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>>;

    /// Harms what is stored under `key`, behind the adapter's back. `false` when it cannot do this.
    fn damage(&self, key: &ObjectKey, how: Damage) -> bool {
        let _ = (key, how);
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

/// What may happen to stored bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// One bit of them is another one.
    Flip,
    /// The last ones are missing.
    Truncate,
    /// There are more behind them.
    Extend,
    /// All are missing, yet there is something under their name.
    Empty,
    /// Nothing is there any more.
    Remove,
}

impl Damage {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Flip,
        Self::Truncate,
        Self::Extend,
        Self::Empty,
        Self::Remove,
    ];
}

/// What each case found, by its name.
#[derive(Debug)]
pub struct Report(Vec<(&'static str, Result<(), String>)>);

impl Report {
    /// The names of all cases that were run.
    pub fn cases(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|(name, _)| *name)
    }

    /// The cases that failed, and why.
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
/// When a case failed, with the report.
pub async fn run<S: Subject>(make: impl FnMut() -> S) {
    let report = check(make).await;
    assert!(report.failed().next().is_none(), "\n{report}");
}

/// [`run`] that gives its findings back.
pub async fn check<S: Subject>(make: impl FnMut() -> S) -> Report {
    check_some(make, |_| true).await
}

/// [`check`] of the cases whose names are `chosen`.
pub async fn check_some<S: Subject>(
    mut make: impl FnMut() -> S,
    chosen: impl Fn(&str) -> bool,
) -> Report {
    let mut results = Vec::new();
    for case in cases::ALL.iter().filter(|case| chosen(case.name)) {
        let work = tokio::spawn((case.run)(Bed::new(Arc::new(make()))));
        let abort = work.abort_handle();
        let result = match tokio::time::timeout(PATIENCE, work).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(message(error)),
            Err(_) => {
                abort.abort();
                Err(format!("did not end within {} s", PATIENCE.as_secs()))
            }
        };
        results.push((case.name, result));
    }
    Report(results)
}

/// What a panic says.
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
