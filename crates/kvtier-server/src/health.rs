//! Whether the server serves: readiness, and components that a panic has poisoned.
//!
//! The mutex guards the list of failed components; no other lock is acquired inside.

use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_sync::Mutex;

/// Readiness of the server. Poisoning is for good: a component whose thread panicked is not trusted again.
#[derive(Debug, Default)]
pub struct Health {
    ready: AtomicBool,
    stopping: AtomicBool,
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
