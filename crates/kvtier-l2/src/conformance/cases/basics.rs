//! Basic calls.

use super::super::context::{TestContext, keys, name};
use super::super::object;
use crate::error::{ErrorKind, L2Error};
use crate::object::{LoadItem, StoreItem};

/// Store, lookup, load and delete of some objects.
pub(super) async fn round_trip(context: TestContext) {
    let adapter = context.open().await;
    let objects: Vec<_> = (0..5).map(|number| object(number, 4096)).collect();
    assert_eq!(context.lookup(&*adapter, &objects).await, [None; 5]);
    for (object, loaded) in objects.iter().zip(context.load(&*adapter, &objects).await) {
        let kind = loaded.as_ref().err().map(L2Error::kind);
        let what = || format!("before: {}: {:?}", name(object), loaded.as_ref().err());
        assert_eq!(kind, Some(ErrorKind::NotFound), "{}", what());
    }
    context.store(&*adapter, &objects).await;
    let found = context.lookup(&*adapter, &objects).await;
    assert!(
        found.iter().all(Option::is_some),
        "after a store: {found:?}"
    );
    context.load_all(&*adapter, &objects).await;
    if !adapter.capabilities().delete {
        return;
    }
    let deleted = adapter.delete(keys(&objects[1..4])).await;
    assert_eq!(deleted, [Ok(true), Ok(true), Ok(true)]);
    let found = context.lookup(&*adapter, &objects).await;
    let there: Vec<_> = found.iter().map(Option::is_some).collect();
    assert_eq!(there, [true, false, false, false, true]);
    let loaded = context.load(&*adapter, &objects).await;
    let there: Vec<_> = loaded.iter().map(Result::is_ok).collect();
    assert_eq!(there, [true, false, false, false, true]);
    let deleted = adapter.delete(keys(&objects[2..])).await;
    assert_eq!(deleted, [Ok(false), Ok(false), Ok(true)]);
    context.store(&*adapter, &objects).await;
    context.load_all(&*adapter, &objects).await;
}

/// Status and kind.
pub(super) async fn tells_what_it_is(context: TestContext) {
    let adapter = context.open().await;
    let status = adapter.status();
    assert_eq!(status["type"], adapter.kind(), "{status}");
    assert_eq!(status["is_healthy"], true, "{status}");
}

/// Unsupported calls are answered.
pub(super) async fn without_a_capability_it_says_so(context: TestContext) {
    let adapter = context.open().await;
    let one = [object(0, 4096)];
    context.store(&*adapter, &one).await;
    let can = adapter.capabilities();
    let listed = adapter.list(None, 10).await;
    let kind = listed.err().map(|error| error.kind());
    assert_eq!(kind, (!can.list).then_some(ErrorKind::Unsupported), "list");
    let deleted = adapter.delete(keys(&one)).await;
    let kinds: Vec<_> = deleted
        .into_iter()
        .map(|result| result.err().map(|error| error.kind()))
        .collect();
    assert_eq!(
        kinds,
        [(!can.delete).then_some(ErrorKind::Unsupported)],
        "delete"
    );
}

/// One batch has objects of all sizes.
pub(super) async fn mixed_sizes_in_one_batch(context: TestContext) {
    let adapter = context.open().await;
    let sizes = [
        1,
        7,
        511,
        512,
        4095,
        4096,
        4097,
        65_536,
        65_537,
        1 << 20,
        (1 << 20) + 13,
        (4 << 20) - 1,
    ];
    let objects: Vec<_> = (0..)
        .zip(sizes)
        .map(|(number, len)| object(number, len))
        .collect();
    context.store(&*adapter, &objects).await;
    context.load_all(&*adapter, &objects).await;
    let backwards: Vec<_> = objects.iter().rev().cloned().collect();
    context.load_all(&*adapter, &backwards).await;
}

/// Empty batches have empty answers.
pub(super) async fn empty_batches(context: TestContext) {
    let adapter = context.open().await;
    assert!(adapter.store(Vec::new()).await.is_empty());
    assert!(context.lookup(&*adapter, &[]).await.is_empty());
    assert!(adapter.load(Vec::new()).await.is_empty());
    assert!(adapter.delete(Vec::new()).await.is_empty());
}

/// Memory that cannot be read or written, and objects that are not there, among good ones.
pub(super) async fn a_bad_item_fails_alone(context: TestContext) {
    let adapter = context.open().await;
    let objects: Vec<_> = (0..5).map(|number| object(number, 10_000)).collect();
    let mut items = context.store_items(&objects);
    items[2] = StoreItem {
        object: objects[2].clone(),
        from: context.memory.outside(objects[2].len),
    };
    let stored = adapter.store(items).await;
    let stored: Vec<_> = stored.iter().map(Result::is_ok).collect();
    assert_eq!(
        stored,
        [true, true, false, true, true],
        "store with bad memory"
    );
    let there: Vec<_> = context.lookup(&*adapter, &objects).await;
    let there: Vec<_> = there.iter().map(Option::is_some).collect();
    assert_eq!(there, [true, true, false, true, true], "lookup after it");

    let mut items = context.load_items(&objects);
    items[0] = LoadItem {
        object: objects[0].clone(),
        to: context.memory.outside(objects[0].len),
    };
    let loaded = adapter.load(items).await;
    let loaded: Vec<_> = loaded.iter().map(Result::is_ok).collect();
    assert_eq!(
        loaded,
        [false, true, false, true, true],
        "load with bad memory and a miss"
    );

    context.store(&*adapter, &objects).await;
    context.load_all(&*adapter, &objects).await;
}

/// Many keys in one lookup, and batches far larger than any number of workers.
pub(super) async fn ten_thousand_keys(context: TestContext) {
    let adapter = context.open().await;
    let objects: Vec<_> = (0..10_000)
        .map(|number| object(number, 64 + number % 7))
        .collect();
    let stored: Vec<_> = objects.iter().step_by(4).cloned().collect();
    for batch in stored.chunks(1250) {
        context.store(&*adapter, batch).await;
    }
    let found = context.lookup(&*adapter, &objects).await;
    let there = found.iter().map(Option::is_some);
    assert!(there.eq((0..10_000).map(|at| at % 4 == 0)), "lookup");
    for batch in stored.chunks(1250) {
        context.load_all(&*adapter, batch).await;
    }
    if adapter.capabilities().list {
        assert_eq!(context.list(&*adapter, 1000).await.len(), 2500, "list");
    }
    if adapter.capabilities().delete {
        for batch in stored.chunks(1250) {
            let deleted = adapter.delete(keys(batch)).await;
            let mut kept = deleted.iter().filter(|result| **result != Ok(true));
            assert_eq!(kept.next(), None, "delete");
        }
        let found = context.lookup(&*adapter, &stored).await;
        assert_eq!(found.iter().flatten().count(), 0, "lookup after the delete");
    }
}
