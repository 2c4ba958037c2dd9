//! Dropped calls, and closing.

use tokio::task::JoinSet;

use super::super::context::{TestContext, keys, name, polls};
use super::super::memory::bytes;
use super::super::object;
use crate::error::ErrorKind;
use crate::object::ObjectSpec;

fn some(first: u64) -> Vec<ObjectSpec> {
    let sizes = [100, 4096, 70_000, 1 << 18];
    (first..)
        .zip(sizes)
        .map(|(number, len)| object(number, len))
        .collect()
}

/// Each object of a dropped store is there with all its bytes, or not at all. Its memory is not read after its hold is
/// dropped, which makes garbage of it here.
pub(super) async fn dropped_stores_leave_all_or_nothing(context: TestContext) {
    let adapter = context.open().await;
    for round in 0..40 {
        let objects = some(round as u64 * 10);
        let call = adapter.store(context.store_items(&objects));
        polls(call, round % 8).await;
        context.memory.until_unused().await;
        for (object, result) in objects.iter().zip(context.load(&*adapter, &objects).await) {
            let kind = result.err().map(|error| error.kind());
            let fine = matches!(kind, None | Some(ErrorKind::NotFound));
            assert!(fine, "load of {}: {kind:?}", name(object));
        }
        context.store(&*adapter, &objects).await;
        context.load_all(&*adapter, &objects).await;
    }
}

/// Buffers of a dropped load are not written after their holds are dropped.
pub(super) async fn dropped_loads_release_their_buffers(context: TestContext) {
    let adapter = context.open().await;
    let objects = some(0);
    context.store(&*adapter, &objects).await;
    for round in 0..40 {
        let call = adapter.load(context.load_items(&objects));
        polls(call, round % 8).await;
        context.memory.until_unused().await;
        // The same memory, reused.
        let marks: Vec<_> = objects
            .iter()
            .map(|object| {
                context
                    .memory
                    .filled(&vec![round as u8; object.len as usize])
            })
            .collect();
        context.load_all(&*adapter, &objects).await;
        for mark in marks {
            let unharmed = bytes(&mark).iter().all(|byte| *byte == round as u8);
            assert!(unharmed, "a load wrote to a buffer after dropping its hold");
        }
    }
}

/// Lookups, deletes and listings.
pub(super) async fn dropped_calls_do_no_harm(context: TestContext) {
    let adapter = context.open().await;
    let can = adapter.capabilities();
    let objects = some(0);
    context.store(&*adapter, &objects).await;
    for times in 0..8 {
        polls(adapter.lookup(objects.clone()), times).await;
        polls(adapter.list(None, 2), times).await;
    }
    context.load_all(&*adapter, &objects).await;
    for times in (0..8).filter(|_| can.delete) {
        polls(adapter.delete(keys(&objects)), times).await;
        for (object, result) in objects.iter().zip(context.load(&*adapter, &objects).await) {
            let kind = result.err().map(|error| error.kind());
            let fine = matches!(kind, None | Some(ErrorKind::NotFound));
            assert!(fine, "load of {}: {kind:?}", name(object));
        }
    }
    // A dropped delete may still be executed, so these are other keys.
    let others = some(100);
    context.store(&*adapter, &others).await;
    context.load_all(&*adapter, &others).await;
}

/// Closing finishes or refuses calls in flight, and later calls are answered.
pub(super) async fn close_waits_for_work(context: TestContext) {
    let adapter = context.open().await;
    let batches: Vec<_> = (0..8).map(|batch| some(batch * 10)).collect();
    let mut tasks = JoinSet::new();
    for objects in &batches {
        let (adapter, items) = (adapter.clone(), context.store_items(objects));
        let objects = objects.clone();
        tasks.spawn(async move { (objects, adapter.store(items).await) });
    }
    // Some have started by then, some have not.
    for _ in 0..4 {
        tokio::task::yield_now().await;
    }
    adapter.close().await;
    let results = tasks.join_all().await;
    context.memory.until_unused().await;

    let one = some(1000);
    assert!(
        adapter
            .store(context.store_items(&one))
            .await
            .iter()
            .all(Result::is_err),
        "store after close"
    );
    assert!(
        adapter
            .load(context.load_items(&one))
            .await
            .iter()
            .all(Result::is_err),
        "load after close"
    );
    let _ = adapter.lookup(one.clone()).await;
    assert!(!context.memory.is_used(), "calls after close hold buffers");
    adapter.close().await;

    let again = context.open().await;
    for (objects, stored) in results {
        let loaded = context.load(&*again, &objects).await;
        for ((object, stored), loaded) in objects.iter().zip(stored).zip(loaded) {
            let kind = loaded.err().map(|error| error.kind());
            let fine = match stored {
                Ok(_) => kind.is_none(),
                Err(_) => matches!(kind, None | Some(ErrorKind::NotFound)),
            };
            assert!(
                fine,
                "store of {}: {stored:?}, load: {kind:?}",
                name(object)
            );
        }
    }
}
