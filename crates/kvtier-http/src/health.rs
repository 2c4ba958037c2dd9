//! Whether the server serves: readiness, and components that a panic has poisoned.
//!
//! The mutex guards the list of failed components; no other lock is acquired inside.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvtier_common::sync::Mutex;

/// Readiness of the server. Poisoning is for good: a component whose thread panicked is not trusted again.
#[derive(Debug, Default)]
pub struct Health {
    ready: AtomicBool,
    stopping: AtomicBool,
    /// Rounds of housekeeping so far.
    rounds: AtomicU64,
    /// Guards the list of failed components, nothing else.
    poisoned: Mutex<Vec<String>>,
}

impl Health {
    /// Requests are being served.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Release);
    }

    /// The server is shutting down.
    pub fn set_stopping(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// A round of housekeeping is done.
    pub fn count_round(&self) {
        self.rounds.fetch_add(1, Ordering::Relaxed);
    }

    /// Rounds of housekeeping so far; while the server works, the number grows every second.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// A component failed and does not work as it should any more.
    pub fn poison(&self, component: &str) {
        let mut poisoned = self.poisoned.lock();
        if !poisoned.iter().any(|known| known == component) {
            poisoned.push(component.to_string());
        }
    }

    /// Why the server is not healthy; `None` when it is.
    pub fn reason(&self) -> Option<String> {
        if self.stopping.load(Ordering::Acquire) {
            return Some("shutting down".into());
        }
        if !self.ready.load(Ordering::Acquire) {
            return Some("engine not initialized".into());
        }
        let poisoned = self.poisoned.lock();
        (!poisoned.is_empty()).then(|| format!("failed components: {}", poisoned.join(", ")))
    }
}
