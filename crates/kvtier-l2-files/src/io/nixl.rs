//! Bytes moved by NIXL, whose backends may use other ways to a disk than system calls.
//!
//! Only the bytes of objects are its part. What stands behind them in files, files that it fails to move, and the second
//! attempts of stores and loads are POSIX calls, which also tell why a file cannot be moved: NIXL does not.
//!
//! If a transfer does not end, its memory is lost, and all others are POSIX calls from then on: one per thread is lost at most.
//!
//! The mutex guards the agents that no thread uses; no other lock is acquired inside.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::nixl::{Agent, Library, NixlError, NixlOutcome};
use kvtier_common::sync::Mutex;
use serde_json::{Value, json};

use super::{Engine, FileWork, Posix, done, transfer};
use kvtier_common::sync::RateLimited;

/// Interval of the line about failures.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// NIXL as it is configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NixlOptions {
    /// NIXL's library, or a directory that it is in; `None` is where it is installed.
    pub library: Option<PathBuf>,
    /// NIXL backend.
    pub backend: String,
    /// Parameters of the backend.
    pub params: BTreeMap<String, String>,
}

impl Default for NixlOptions {
    /// The backend of all file systems.
    fn default() -> Self {
        Self {
            library: None,
            backend: "POSIX".into(),
            params: BTreeMap::new(),
        }
    }
}

/// I/O engine of NIXL: one agent per thread, one transfer at a time.
pub(crate) struct Nixl {
    library: Arc<Library>,
    options: NixlOptions,
    /// Agents that no thread uses now.
    agents: Mutex<Vec<Agent>>,
    /// Transfers that it has ended, and those that were left to system calls.
    moved: AtomicU64,
    failed: AtomicU64,
    /// A transfer did not end.
    is_abandoned: AtomicBool,
    log: RateLimited,
}

impl Nixl {
    /// # Errors
    /// If the library cannot be loaded, or has no such backend.
    pub(crate) fn new(options: &NixlOptions) -> Result<Self, NixlError> {
        let library = Library::load(options.library.as_deref())?;
        let first = Agent::start(&library, &options.backend, &options.params)?;
        Ok(Self {
            library,
            options: options.clone(),
            agents: Mutex::new(vec![first]),
            moved: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            is_abandoned: AtomicBool::new(false),
            log: RateLimited::new(LOG_INTERVAL),
        })
    }

    /// The backend and where the library is.
    pub(crate) fn description(&self) -> String {
        let (backend, path) = (&self.options.backend, self.library.path().display());
        format!("backend {backend} of {path}")
    }

    fn take(&self) -> Option<Agent> {
        if self.is_abandoned.load(Ordering::Relaxed) {
            return None;
        }
        let kept = self.agents.lock().pop();
        kept.or_else(|| {
            Agent::start(&self.library, &self.options.backend, &self.options.params)
                .inspect_err(|error| self.fail(error))
                .ok()
        })
    }

    fn fail(&self, error: &dyn std::fmt::Display) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed_lines) = self.log.permit(Instant::now()) {
            let backend = &self.options.backend;
            tracing::warn!(%error, backend, suppressed_lines, "NIXL failed; the file is moved with plain system calls");
        }
    }
}

impl Nixl {
    fn abandon(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        if !self.is_abandoned.swap(true, Ordering::Relaxed) {
            let backend = &self.options.backend;
            tracing::error!(
                backend,
                "a transfer of NIXL does not end; its memory is lost until a restart, and files are moved with plain system calls"
            );
        }
    }
}

impl Engine for Nixl {
    fn name(&self) -> &'static str {
        if self.is_abandoned.load(Ordering::Relaxed) {
            "posix"
        } else {
            "nixl"
        }
    }

    fn status(&self) -> Option<Value> {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Some(json!({
            "backend": self.options.backend,
            "library": self.library.path(),
            "transfers": count(&self.moved),
            "failed_transfers": count(&self.failed),
        }))
    }

    fn run(&self, work: &mut dyn FileWork) {
        while let Some(mut agent) = self.take() {
            loop {
                let Some(one) = work.next() else {
                    self.agents.lock().push(agent);
                    return;
                };
                let number = one.number;
                match agent.run(transfer(one)) {
                    NixlOutcome::Ended(mut ended, moved) => {
                        let moved = match moved {
                            Ok(()) => {
                                self.moved.fetch_add(1, Ordering::Relaxed);
                                ended.extent.len
                            }
                            Err(error) => {
                                self.fail(&error);
                                0
                            }
                        };
                        let moved = ended.finish(moved);
                        done(work, ended, moved);
                    }
                    NixlOutcome::Lost => {
                        self.abandon();
                        work.lost(number);
                        // It still has that transfer.
                        std::mem::forget(agent);
                        break;
                    }
                }
            }
        }
        Posix.run(work);
    }
}
