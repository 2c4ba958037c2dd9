//! Callers that do not wait, and the end.

use tokio::task::JoinSet;

use super::super::bed::{Bed, keys, name, polls};
use super::super::memory::bytes;
use super::super::object;
use crate::error::ErrorKind;
use crate::object::ObjectSpec;

fn some(first: u64) -> Vec<ObjectSpec> {
    let sizes = [100, 4096, 70_000, 1 << 20];
    (first..)
        .zip(sizes)
        .map(|(number, len)| object(number, len))
        .collect()
}

/// Each object of a store that was given up is there with all its bytes, or not at all. Its memory is left alone as soon
/// as it is let go of, which here makes garbage of it.
pub(super) async fn dropped_stores_leave_all_or_nothing(bed: Bed) {
    let adapter = bed.open().await;
    for round in 0..40 {
        let objects = some(round as u64 * 10);
        let call = adapter.store(bed.store_items(&objects));
        polls(call, round % 8).await;
        bed.memory.until_unused().await;
        for (object, result) in objects.iter().zip(bed.load(&*adapter, &objects).await) {
            let kind = result.err().map(|error| error.kind());
            let fine = matches!(kind, None | Some(ErrorKind::NotFound));
            assert!(fine, "load of {}: {kind:?}", name(object));
        }
        bed.store(&*adapter, &objects).await;
        bed.load_all(&*adapter, &objects).await;
    }
}

/// Once the buffers of a load that was given up are let go of, nothing is written to them any more.
pub(super) async fn dropped_loads_let_go_of_their_buffers(bed: Bed) {
    let adapter = bed.open().await;
    let objects = some(0);
    bed.store(&*adapter, &objects).await;
    for round in 0..40 {
        let call = adapter.load(bed.load_items(&objects));
        polls(call, round % 8).await;
        bed.memory.until_unused().await;
        // The same memory, now somebody else's.
        let marks: Vec<_> = objects
            .iter()
            .map(|object| bed.memory.filled(&vec![round as u8; object.len as usize]))
            .collect();
        bed.load_all(&*adapter, &objects).await;
        for mark in marks {
            let unharmed = bytes(&mark).iter().all(|byte| *byte == round as u8);
            assert!(unharmed, "a load wrote to a buffer that it had let go of");
        }
    }
}

/// Lookups, deletes and listings.
pub(super) async fn dropped_calls_do_no_harm(bed: Bed) {
    let adapter = bed.open().await;
    let can = adapter.capabilities();
    let objects = some(0);
    bed.store(&*adapter, &objects).await;
    for times in 0..8 {
        polls(adapter.lookup(objects.clone()), times).await;
        polls(adapter.list(None, 2), times).await;
    }
    bed.load_all(&*adapter, &objects).await;
    for times in (0..8).filter(|_| can.delete) {
        polls(adapter.delete(keys(&objects)), times).await;
        for (object, result) in objects.iter().zip(bed.load(&*adapter, &objects).await) {
            let kind = result.err().map(|error| error.kind());
            let fine = matches!(kind, None | Some(ErrorKind::NotFound));
            assert!(fine, "load of {}: {kind:?}", name(object));
        }
    }
    // A delete that was given up may still come, but before one that is asked for later: these are others.
    let others = some(100);
    bed.store(&*adapter, &others).await;
    bed.load_all(&*adapter, &others).await;
}

/// What was begun is done or refused when the adapter is closed, and what comes later is answered.
pub(super) async fn close_waits_for_work(bed: Bed) {
    let adapter = bed.open().await;
    let batches: Vec<_> = (0..8).map(|batch| some(batch * 10)).collect();
    let mut tasks = JoinSet::new();
    for objects in &batches {
        let (adapter, items) = (adapter.clone(), bed.store_items(objects));
        let objects = objects.clone();
        tasks.spawn(async move { (objects, adapter.store(items).await) });
    }
    // Some have begun by then, some have not.
    for _ in 0..4 {
        tokio::task::yield_now().await;
    }
    adapter.close().await;
    let results = tasks.join_all().await;
    bed.memory.until_unused().await;

    let one = some(1000);
    assert!(
        adapter
            .store(bed.store_items(&one))
            .await
            .iter()
            .all(Result::is_err),
        "store after close"
    );
    assert!(
        adapter
            .load(bed.load_items(&one))
            .await
            .iter()
            .all(Result::is_err),
        "load after close"
    );
    let _ = adapter.lookup(one.clone()).await;
    assert!(!bed.memory.is_used(), "calls after close hold buffers");
    adapter.close().await;

    let again = bed.open().await;
    for (objects, stored) in results {
        let loaded = bed.load(&*again, &objects).await;
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
