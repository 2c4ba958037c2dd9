//! Capacity and reserve hold whatever fails, is late, or runs concurrently.

use std::future::{Future, poll_fn};
use std::task::Poll;

use super::*;

/// Polls a future until it waits; it must not end.
pub async fn begin(future: std::pin::Pin<&mut impl Future>) {
    let mut future = future;
    for _ in 0..10 {
        poll_fn(|context| {
            assert!(future.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn pending_delete_counts_until_deleted() {
    for kind in [ErrorKind::Unavailable, ErrorKind::Deadline] {
        let (memory, bytes) = (test_adapter(), Bytes::new());
        let tier = tier(&memory, Some(3));
        store(&tier, &bytes, 1..=3).await;
        memory.always(Operation::Delete, Some(Step::Fail(kind)));
        for number in 4..=9 {
            let full = store(&tier, &bytes, [number]).await;
            assert_eq!(full, [Err(ErrorKind::Full)]);
            assert_accounting(&tier, &memory);
        }
        assert_eq!(tier.counters().evicted_objects.get(), 0);
        // An eviction pass ends at a failed delete.
        tier.evict().await;
        assert_eq!((memory.bytes(), tier.usage().objects), (3 * SIZE, 2));
        memory.always(Operation::Delete, None);
        assert_eq!(store(&tier, &bytes, [4]).await, [Ok(Stored::Written(SIZE))]);
        assert_eq!(memory.delete_keys(), [key(1, "")]);
        assert_eq!(memory.bytes(), 3 * SIZE);
        assert_eq!(tier.counters().evicted_objects.get(), 1);
        assert_accounting(&tier, &memory);
    }
}

#[tokio::test]
async fn eviction_pass_ends_at_failed_delete_and_resumes() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let eviction = TierEviction {
        trigger_watermark: 0.5,
        eviction_ratio: 0.25,
        ..TierEviction::default()
    };
    let tier = tier_with(&memory, Some(10), Some(eviction), 0);
    store(&tier, &bytes, 0..8).await;
    memory.always(Operation::Delete, Some(Step::Fail(ErrorKind::Unavailable)));
    for _ in 0..5 {
        tier.evict().await;
        assert_eq!(tier.usage().objects, 6);
        assert_accounting(&tier, &memory);
    }
    memory.always(Operation::Delete, None);
    tier.evict().await;
    assert_accounting(&tier, &memory);
    assert_eq!(
        tier.counters().evicted_bytes.get(),
        8 * SIZE - memory.bytes()
    );
    assert!(memory.bytes() < 6 * SIZE);
}

#[tokio::test]
async fn eviction_of_dropped_caller_is_still_deleted() {
    let memory = test_adapter();
    memory.always(Operation::Delete, Some(Step::Wait));
    let bytes = Bytes::new();
    let tier = tier(&memory, Some(3));
    store(&tier, &bytes, 1..=3).await;
    {
        let mut dropped = std::pin::pin!(store(&tier, &bytes, [4]));
        begin(dropped.as_mut()).await;
    }
    assert_accounting(&tier, &memory);
    memory.gate.add_permits(10);
    assert!(store(&tier, &bytes, [5]).await[0].is_ok());
    assert_eq!(
        (memory.bytes(), memory.contains(&key(1, ""))),
        (3 * SIZE, false)
    );
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn delete_of_dropped_caller_counts_until_deleted() {
    let memory = test_adapter();
    memory.always(Operation::Delete, Some(Step::Wait));
    let bytes = Bytes::new();
    let tier = tier(&memory, None);
    store(&tier, &bytes, 1..=2).await;
    {
        let mut dropped = std::pin::pin!(tier.delete(vec![key(1, "")], false));
        begin(dropped.as_mut()).await;
    }
    assert_accounting(&tier, &memory);
    memory.gate.add_permits(10);
    tier.evict().await;
    assert_eq!(memory.bytes(), SIZE);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn store_waits_for_delete_in_flight() {
    for by_name in [false, true] {
        let memory = test_adapter();
        memory.always(Operation::Delete, Some(Step::Wait));
        let bytes = Bytes::new();
        let tier = tier(&memory, Some(3));
        store(&tier, &bytes, 1..=3).await;
        let deleting = async {
            if by_name {
                drop(tier.delete(vec![key(1, "")], false).await)
            } else {
                drop(store(&tier, &bytes, [4]).await)
            }
        };
        let mut deleting = std::pin::pin!(deleting);
        begin(deleting.as_mut()).await;
        let mut storing = std::pin::pin!(store(&tier, &bytes, [1]));
        begin(storing.as_mut()).await;
        memory.gate.add_permits(10);
        let ((), stored) = tokio::join!(deleting, storing);
        assert_eq!(stored, [Ok(Stored::Written(SIZE))]);
        assert!(memory.contains(&key(1, "")));
        assert_eq!(memory.bytes(), 3 * SIZE);
        assert_accounting(&tier, &memory);
    }
}

#[tokio::test]
async fn store_cancels_pending_delete() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, Some(3));
    store(&tier, &bytes, 1..=3).await;
    memory.always(Operation::Delete, Some(Step::Fail(ErrorKind::Unavailable)));
    store(&tier, &bytes, [4]).await;
    // The index still has free capacity for it.
    assert!(store(&tier, &bytes, [1]).await[0].is_ok());
    assert_accounting(&tier, &memory);
    // The delete is pending again if the store fails.
    store(&tier, &bytes, [4]).await;
    memory.refuse(&key(2, ""));
    assert_eq!(store(&tier, &bytes, [2]).await, [Err(ErrorKind::Refused)]);
    assert_accounting(&tier, &memory);
    memory.accept_all();
    memory.always(Operation::Delete, None);
    tier.evict().await;
    assert_eq!(memory.delete_keys(), [key(2, "")]);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn late_delete_refuses_store_until_deleted() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, Some(3));
    store(&tier, &bytes, 1..=3).await;
    memory.always(Operation::Delete, Some(Step::Fail(ErrorKind::Deadline)));
    store(&tier, &bytes, [4]).await;
    assert_eq!(
        store(&tier, &bytes, [1]).await,
        [Err(ErrorKind::Unavailable)]
    );
    memory.always(Operation::Delete, None);
    tier.evict().await;
    assert_eq!(store(&tier, &bytes, [1]).await, [Ok(Stored::Written(SIZE))]);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn lookup_cancels_pending_delete() {
    let (memory, bytes) = (shared_adapter(), Bytes::new());
    let tier = tier(&memory, Some(3));
    store(&tier, &bytes, 1..=3).await;
    memory.always(Operation::Delete, Some(Step::Fail(ErrorKind::Unavailable)));
    store(&tier, &bytes, [4]).await;
    let found = tier.lookup(vec![spec(&key(1, ""), LEN)]).await.unwrap();
    assert!(found[0].is_some());
    memory.always(Operation::Delete, None);
    tier.evict().await;
    assert!(memory.contains(&key(1, "")));
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn late_store_counts() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    memory.always(Operation::Store, Some(Step::Late));
    let tier = tier(&memory, Some(3));
    for number in 1..=6 {
        let late = store(&tier, &bytes, [number]).await;
        assert_eq!(late, [Err(ErrorKind::Deadline)]);
        assert!(memory.bytes() <= 3 * SIZE);
        assert_accounting(&tier, &memory);
    }
    // A load detects one that is not there.
    memory.clear();
    for number in 4..=6 {
        let loaded = tier.load(vec![bytes.to_load(&key(number, ""), LEN)]).await;
        assert_eq!(loaded[0].as_ref().unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn late_store_is_indeterminate() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, Some(3));
    let asked = || memory.items(Operation::Store);
    let found = async |number| {
        let found = tier.lookup(vec![spec(&key(number, ""), LEN)]).await;
        found.unwrap()[0].is_some()
    };
    memory.always(Operation::Store, Some(Step::Late));
    store(&tier, &bytes, [1, 2]).await;
    memory.clear();
    // The store of one never arrived ...
    let late = [Err(ErrorKind::Deadline)];
    assert_eq!(store(&tier, &bytes, [2]).await, late);
    assert_eq!(asked(), 3);
    // ... so it is not found, and the other one is.
    assert!(!found(1).await && found(2).await);
    assert_eq!(memory.items(Operation::Lookup), 2);
    memory.always(Operation::Store, None);
    for written in [Stored::Written(SIZE), Stored::AlreadyThere(SIZE)] {
        assert_eq!(store(&tier, &bytes, [1]).await, [Ok(written)]);
        assert!(found(1).await && found(2).await);
    }
    // From then on the backend is not called.
    assert_eq!((asked(), memory.items(Operation::Lookup)), (4, 2));
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn late_delete_is_indeterminate() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    store(&tier, &bytes, [1]).await;
    memory.always(Operation::Delete, Some(Step::Fail(ErrorKind::Deadline)));
    assert!(tier.delete(vec![key(1, "")], false).await[0].is_err());
    memory.clear();
    assert_eq!(store(&tier, &bytes, [1]).await, [Ok(Stored::Written(SIZE))]);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn store_of_dropped_caller_counts() {
    let memory = test_adapter();
    memory.always(Operation::Store, Some(Step::Wait));
    let bytes = Bytes::new();
    let tier = tier(&memory, Some(3));
    {
        let mut dropped = std::pin::pin!(store(&tier, &bytes, [1]));
        begin(dropped.as_mut()).await;
    }
    assert_eq!(tier.usage().objects, 1);
    let found = tier.lookup(vec![spec(&key(1, ""), LEN)]).await.unwrap();
    assert!(found[0].is_none(), "the backend has not confirmed it");
}

#[tokio::test]
async fn concurrent_batches_keep_the_disk_reserve() {
    let memory = test_adapter();
    memory.always(Operation::Store, Some(Step::Wait));
    let bytes = Bytes::new();
    let tier = tier_with(&memory, None, None, 1000);
    *memory.free_bytes.lock() = Some(1000 + SIZE);
    let mut first = std::pin::pin!(store(&tier, &bytes, [1]));
    begin(first.as_mut()).await;
    let second = store(&tier, &bytes, [2]).await;
    assert_eq!(second, [Err(ErrorKind::Full)]);
    memory.gate.add_permits(10);
    assert!(first.await[0].is_ok());
    assert!(store(&tier, &bytes, [3]).await[0].is_ok());
    assert_accounting(&tier, &memory);
}
