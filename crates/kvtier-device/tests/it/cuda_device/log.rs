//! Subscriber that counts the device's log lines.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static LINES: AtomicU64 = AtomicU64::new(0);
static PANICS: AtomicBool = AtomicBool::new(false);

/// Counts lines of the device, from the first call on.
pub fn hear() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Lines).unwrap());
}

pub fn lines() -> u64 {
    LINES.load(Ordering::Relaxed)
}

/// Makes the next log line panic.
pub fn panic_once() {
    hear();
    PANICS.store(true, Ordering::Relaxed);
}

struct Lines;

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("kvtier_device")
    }
    fn event(&self, _: &tracing::Event<'_>) {
        LINES.fetch_add(1, Ordering::Relaxed);
        assert!(!PANICS.swap(false, Ordering::Relaxed), "as a test has it");
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}
