//! Listings, accounting and persistence.

use std::collections::BTreeMap;
use std::sync::Mutex;

use kvtier_core::object_key::ObjectKey;

use super::super::context::{TestContext, keys, name};
use super::super::object;
use crate::adapter::{Listed, Stored};
use crate::object::ObjectSpec;

fn some(count: u64) -> Vec<ObjectSpec> {
    (0..count)
        .map(|number| object(number, 1 + number * 1000))
        .collect()
}

/// Listings are complete with pages of any size.
pub(super) async fn a_listing_in_pages_is_complete(context: TestContext) {
    let adapter = context.open().await;
    if !adapter.capabilities().list {
        return;
    }
    assert!(
        context.list(&*adapter, 10).await.is_empty(),
        "before a store"
    );
    let objects: Vec<_> = (0..200).map(|number| object(number, 100)).collect();
    context.store(&*adapter, &objects).await;
    for limit in [1, 7, 200, 1000, usize::MAX] {
        let listed = context.list(&*adapter, limit).await;
        let missing = objects
            .iter()
            .find(|object| !listed.contains_key(&object.key));
        assert_eq!(missing, None, "pages of {limit}");
        assert_eq!(listed.len(), objects.len(), "pages of {limit}");
    }
    let page = adapter.list(None, 10).await.expect("a page");
    assert!(
        page.objects.len() < 200 && page.next.is_some(),
        "a limit of 10 of 200 gives all"
    );
}

/// Cursors are untrusted input.
pub(super) async fn odd_cursors_are_harmless(context: TestContext) {
    let adapter = context.open().await;
    if !adapter.capabilities().list {
        return;
    }
    context.store(&*adapter, &some(3)).await;
    let long = "x".repeat(100_000);
    for cursor in [
        "",
        "0",
        "-1",
        "18446744073709551616",
        "../..",
        "\0",
        "\u{ff}ü",
        &long,
    ] {
        // An error or a page: both are an answer.
        let _ = adapter.list(Some(cursor.to_owned()), 10).await;
    }
    assert_eq!(context.list(&*adapter, 10).await.len(), 3);
}

/// A store, a second one, a lookup and a listing report the same bytes, and a delete frees them.
pub(super) async fn bytes_agree_at_every_step(context: TestContext) {
    let adapter = context.open().await;
    let objects = some(20);
    let mut expected = BTreeMap::new();
    for object in &objects {
        let one = std::slice::from_ref(object);
        let stored = context.store(&*adapter, one).await[0];
        let Stored::Written(bytes) = stored else {
            panic!("the first store of {}: {stored:?}", name(object));
        };
        let least = object.len.min(adapter.size_of(object.len));
        assert!(bytes >= least, "{bytes} bytes of {}", name(object));
        assert_eq!(adapter.size_of(object.len), bytes, "{}", name(object));
        assert_eq!(
            context.lookup(&*adapter, one).await,
            [Some(bytes)],
            "{}",
            name(object)
        );
        expected.insert(object.key.clone(), bytes);
        let listed = bytes_listed(&context, &*adapter).await;
        assert_eq!(listed.unwrap_or_else(|| expected.clone()), expected);
    }
    for (object, stored) in objects.iter().zip(context.store(&*adapter, &objects).await) {
        assert_eq!(
            stored,
            Stored::AlreadyThere(expected[&object.key]),
            "the second store of {}",
            name(object)
        );
    }
    if !adapter.capabilities().delete {
        return;
    }
    for object in &objects[5..15] {
        let deleted = adapter.delete(vec![object.key.clone()]).await;
        assert_eq!(deleted, [Ok(true)], "delete of {}", name(object));
        expected.remove(&object.key);
        let listed = bytes_listed(&context, &*adapter).await;
        assert_eq!(listed.unwrap_or_else(|| expected.clone()), expected);
    }
}

async fn bytes_listed(
    context: &TestContext,
    adapter: &dyn crate::Adapter,
) -> Option<BTreeMap<ObjectKey, u64>> {
    if !adapter.capabilities().list {
        return None;
    }
    let listed = context.list(adapter, 6).await;
    Some(
        listed
            .into_iter()
            .map(|(key, listed)| (key, listed.bytes))
            .collect(),
    )
}

/// Closed and opened again, objects are served without a recovery.
pub(super) async fn reopens_what_was_stored(context: TestContext) {
    let objects = some(10);
    let adapter = context.open().await;
    let stored = context.store(&*adapter, &objects).await;
    adapter.close().await;
    drop(adapter);
    let adapter = context.open().await;
    let found = context.lookup(&*adapter, &objects).await;
    let expected: Vec<_> = stored.iter().map(|stored| Some(stored.bytes())).collect();
    assert_eq!(found, expected, "a lookup after opening it again");
    context.load_all(&*adapter, &objects).await;
    for (object, stored) in objects.iter().zip(context.store(&*adapter, &objects).await) {
        let there = matches!(stored, Stored::AlreadyThere(_));
        assert!(there, "{}: {stored:?}", name(object));
    }
    if adapter.capabilities().delete {
        let deleted = adapter.delete(keys(&objects[..5])).await;
        assert!(
            deleted.iter().all(|result| *result == Ok(true)),
            "{deleted:?}"
        );
        adapter.close().await;
        let adapter = context.open().await;
        let found = context.lookup(&*adapter, &objects).await;
        let there = found.iter().map(Option::is_some);
        assert!(
            there.eq((0..10).map(|at| at >= 5)),
            "after a delete: {found:?}"
        );
    }
}

/// A recovery returns each object once, with its bytes.
pub(super) async fn recovers_what_was_stored(context: TestContext) {
    let objects = some(50);
    let adapter = context.open().await;
    if !adapter.capabilities().list {
        return;
    }
    let stored = context.store(&*adapter, &objects).await;
    adapter.close().await;
    drop(adapter);
    let adapter = context.open().await;
    let found = Mutex::new(Vec::new());
    let tell = |part: Vec<Listed>| {
        found.lock().expect("no panic").extend(part);
        true
    };
    let recovered = adapter.recover(&tell).await.expect("a recovery");
    let found = found.into_inner().expect("no panic");
    let listed: BTreeMap<_, _> = found
        .iter()
        .map(|listed| (listed.key.clone(), listed.bytes))
        .collect();
    let each = objects.iter().zip(&stored);
    let expected: BTreeMap<_, _> = each
        .map(|(object, stored)| (object.key.clone(), stored.bytes()))
        .collect();
    assert_eq!(listed, expected, "what it listed");
    assert_eq!(found.len(), objects.len(), "objects listed");
    assert_eq!(recovered.objects, 50, "{recovered:?}");
    assert_eq!(
        recovered.bytes,
        expected.values().sum::<u64>(),
        "{recovered:?}"
    );
    assert_eq!(
        (recovered.removed, recovered.foreign),
        (0, 0),
        "{recovered:?}"
    );
    context.load_all(&*adapter, &objects).await;
}

/// A recovery stops on request.
pub(super) async fn recovery_stops_when_requested(context: TestContext) {
    let adapter = context.open().await;
    if !adapter.capabilities().list {
        return;
    }
    context.store(&*adapter, &some(30)).await;
    adapter.close().await;
    let adapter = context.open().await;
    let calls = Mutex::new(0);
    let tell = |_| {
        *calls.lock().expect("no panic") += 1;
        false
    };
    adapter.recover(&tell).await.expect("a recovery");
    assert_eq!(calls.into_inner().expect("no panic"), 1, "calls");
}

/// Objects come, go and are read during a recovery.
pub(super) async fn recovers_while_used(context: TestContext) {
    let adapter = context.open().await;
    if !adapter.capabilities().list {
        return;
    }
    let (old, new) = (
        some(40),
        (100..140)
            .map(|number| object(number, 3000))
            .collect::<Vec<_>>(),
    );
    context.store(&*adapter, &old).await;
    adapter.close().await;
    let adapter = context.open().await;
    let found = Mutex::new(Vec::new());
    let tell = |part: Vec<Listed>| {
        found.lock().expect("no panic").extend(part);
        true
    };
    let recovery = adapter.recover(&tell);
    let work = async {
        for (old, new) in old.chunks(10).zip(new.chunks(10)) {
            context.store(&*adapter, new).await;
            context.load_all(&*adapter, old).await;
            context.load_all(&*adapter, new).await;
        }
    };
    let (recovered, ()) = tokio::join!(recovery, work);
    recovered.expect("a recovery");
    let found = found.into_inner().expect("no panic");
    let missing = old
        .iter()
        .find(|object| !found.iter().any(|listed| listed.key == object.key));
    assert_eq!(missing, None, "objects from before");
    context.load_all(&*adapter, &old).await;
    context.load_all(&*adapter, &new).await;
}
