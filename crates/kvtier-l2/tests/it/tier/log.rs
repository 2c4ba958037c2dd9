//! Log lines of a corrupt or failing backend.

use std::sync::atomic::AtomicUsize;

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::*;

/// Counts lines.
#[derive(Clone, Default)]
struct Lines(Arc<AtomicUsize>);

impl Lines {
    fn take(&self) -> usize {
        self.0.swap(0, Ordering::Relaxed)
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn many_corrupt_objects_are_one_log_line() {
    let (memory, bytes) = (shared_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    for number in 0..100 {
        memory.put(&key(number, ""), LEN + 1, 0);
    }
    let lines = Lines::default();
    let _here = tracing::subscriber::set_default(lines.clone());
    for number in 0..100 {
        let loaded = tier.load(vec![bytes.to_load(&key(number, ""), LEN)]).await;
        assert_eq!(loaded[0].as_ref().unwrap_err().kind(), ErrorKind::Corrupt);
    }
    assert_eq!(lines.take(), 1);
    assert_eq!(tier.counters().load_failures.get()["corrupt"], 100);
}

#[tokio::test]
async fn many_failed_deletes_are_one_log_line() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, Some(1));
    store(&tier, &bytes, [1]).await;
    memory.always(Operation::Delete, Some(Step::Fail(ErrorKind::Refused)));
    let lines = Lines::default();
    let _here = tracing::subscriber::set_default(lines.clone());
    for _ in 0..100 {
        let refused = store(&tier, &bytes, [2]).await;
        assert_eq!(refused, [Err(ErrorKind::Full)]);
        tier.evict().await;
    }
    // The other one is about the lack of space.
    assert_eq!(lines.take(), 2);
}
