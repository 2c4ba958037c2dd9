//! The cap and the reserve hold whatever fails, is late, or comes at the same time.

use std::future::{Future, poll_fn};
use std::task::Poll;

use super::*;

/// Lets a future run until it waits; it must not end.
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
async fn what_cannot_be_deleted_counts_until_it_is() {
    for kind in [ErrorKind::Unavailable, ErrorKind::Deadline] {
        let (memory, bytes) = (Arc::new(Memory::default()), Bytes::new());
        let tier = tier(&memory, Some(3));
        store(&tier, &bytes, 1..=3).await;
        *memory.no_delete.lock() = Some(kind);
        for number in 4..=9 {
            let full = store(&tier, &bytes, [number]).await;
            assert_eq!(full, [Err(ErrorKind::Full)]);
            assert_books(&tier, &memory);
        }
        assert_eq!(tier.counters().evicted_objects.get(), 0);
        // No pass goes on where a delete failed.
        tier.evict().await;
        assert_eq!((memory.bytes(), tier.usage().objects), (3 * SIZE, 2));
        *memory.no_delete.lock() = None;
        assert_eq!(store(&tier, &bytes, [4]).await, [Ok(Stored::Written(SIZE))]);
        assert_eq!(*memory.deleted.lock(), [key(1, "")]);
        assert_eq!(memory.bytes(), 3 * SIZE);
        assert_eq!(tier.counters().evicted_objects.get(), 1);
        assert_books(&tier, &memory);
    }
}

#[tokio::test]
async fn a_pass_ends_where_a_delete_fails_and_the_next_one_begins_there() {
    let (memory, bytes) = (Arc::new(Memory::default()), Bytes::new());
    let eviction = TierEviction {
        trigger_watermark: 0.5,
        eviction_ratio: 0.25,
        ..TierEviction::default()
    };
    let tier = tier_with(&memory, Some(10), Some(eviction), 0);
    store(&tier, &bytes, 0..8).await;
    *memory.no_delete.lock() = Some(ErrorKind::Unavailable);
    for _ in 0..5 {
        tier.evict().await;
        assert_eq!(tier.usage().objects, 6);
        assert_books(&tier, &memory);
    }
    *memory.no_delete.lock() = None;
    tier.evict().await;
    assert_books(&tier, &memory);
    assert_eq!(
        tier.counters().evicted_bytes.get(),
        8 * SIZE - memory.bytes()
    );
    assert!(memory.bytes() < 6 * SIZE);
}

#[tokio::test]
async fn what_a_dropped_caller_evicted_is_still_deleted() {
    let memory = Arc::new(Memory {
        delete_gate: Some(Semaphore::new(0)),
        ..Memory::default()
    });
    let bytes = Bytes::new();
    let tier = tier(&memory, Some(3));
    store(&tier, &bytes, 1..=3).await;
    {
        let mut dropped = std::pin::pin!(store(&tier, &bytes, [4]));
        begin(dropped.as_mut()).await;
    }
    assert_books(&tier, &memory);
    memory.delete_gate.as_ref().unwrap().add_permits(10);
    assert!(store(&tier, &bytes, [5]).await[0].is_ok());
    assert_eq!((memory.bytes(), memory.has(&key(1, ""))), (3 * SIZE, false));
    assert_books(&tier, &memory);
}

#[tokio::test]
async fn what_a_dropped_caller_was_deleting_by_name_counts_until_it_is_gone() {
    let memory = Arc::new(Memory {
        delete_gate: Some(Semaphore::new(0)),
        ..Memory::default()
    });
    let bytes = Bytes::new();
    let tier = tier(&memory, None);
    store(&tier, &bytes, 1..=2).await;
    {
        let mut dropped = std::pin::pin!(tier.delete(vec![key(1, "")], false));
        begin(dropped.as_mut()).await;
    }
    assert_books(&tier, &memory);
    memory.delete_gate.as_ref().unwrap().add_permits(10);
    tier.evict().await;
    assert_eq!(memory.bytes(), SIZE);
    assert_books(&tier, &memory);
}

#[tokio::test]
async fn a_key_is_not_stored_while_it_is_being_deleted() {
    for by_name in [false, true] {
        let memory = Arc::new(Memory {
            delete_gate: Some(Semaphore::new(0)),
            ..Memory::default()
        });
        let bytes = Bytes::new();
        let tier = tier(&memory, Some(3));
        store(&tier, &bytes, 1..=3).await;
        let deleting = async {
            match by_name {
                true => drop(tier.delete(vec![key(1, "")], false).await),
                false => drop(store(&tier, &bytes, [4]).await),
            }
        };
        let mut deleting = std::pin::pin!(deleting);
        begin(deleting.as_mut()).await;
        let mut storing = std::pin::pin!(store(&tier, &bytes, [1]));
        begin(storing.as_mut()).await;
        memory.delete_gate.as_ref().unwrap().add_permits(10);
        let ((), stored) = tokio::join!(deleting, storing);
        assert_eq!(stored, [Ok(Stored::Written(SIZE))]);
        assert!(memory.has(&key(1, "")));
        assert_eq!(memory.bytes(), 3 * SIZE);
        assert_books(&tier, &memory);
    }
}

#[tokio::test]
async fn what_was_evicted_and_not_deleted_yet_is_spared_when_it_is_stored_again() {
    let (memory, bytes) = (Arc::new(Memory::default()), Bytes::new());
    let tier = tier(&memory, Some(3));
    store(&tier, &bytes, 1..=3).await;
    *memory.no_delete.lock() = Some(ErrorKind::Unavailable);
    store(&tier, &bytes, [4]).await;
    // Its place in the index is still free.
    assert!(store(&tier, &bytes, [1]).await[0].is_ok());
    assert_books(&tier, &memory);
    // One that fails to be stored is still to be deleted.
    store(&tier, &bytes, [4]).await;
    memory.refuse(&key(2, ""));
    assert_eq!(store(&tier, &bytes, [2]).await, [Err(ErrorKind::Refused)]);
    assert_books(&tier, &memory);
    memory.refused.lock().clear();
    *memory.no_delete.lock() = None;
    tier.evict().await;
    assert_eq!(*memory.deleted.lock(), [key(2, "")]);
    assert_books(&tier, &memory);
}

#[tokio::test]
async fn what_may_still_be_deleted_is_not_stored_before_it_is() {
    let (memory, bytes) = (Arc::new(Memory::default()), Bytes::new());
    let tier = tier(&memory, Some(3));
    store(&tier, &bytes, 1..=3).await;
    *memory.no_delete.lock() = Some(ErrorKind::Deadline);
    store(&tier, &bytes, [4]).await;
    assert_eq!(
        store(&tier, &bytes, [1]).await,
        [Err(ErrorKind::Unavailable)]
    );
    *memory.no_delete.lock() = None;
    tier.evict().await;
    assert_eq!(store(&tier, &bytes, [1]).await, [Ok(Stored::Written(SIZE))]);
    assert_books(&tier, &memory);
}

#[tokio::test]
async fn what_is_to_be_deleted_is_spared_when_it_is_found() {
    let (memory, bytes) = (Arc::new(Memory::shared()), Bytes::new());
    let tier = tier(&memory, Some(3));
    store(&tier, &bytes, 1..=3).await;
    *memory.no_delete.lock() = Some(ErrorKind::Unavailable);
    store(&tier, &bytes, [4]).await;
    let found = tier.lookup(vec![spec(&key(1, ""), LEN)]).await.unwrap();
    assert!(found[0].is_some());
    *memory.no_delete.lock() = None;
    tier.evict().await;
    assert!(memory.has(&key(1, "")));
    assert_books(&tier, &memory);
}

#[tokio::test]
async fn a_store_that_is_not_answered_in_time_counts() {
    let (memory, bytes) = (Arc::new(Memory::default()), Bytes::new());
    memory.late.store(true, Ordering::Relaxed);
    let tier = tier(&memory, Some(3));
    for number in 1..=6 {
        let late = store(&tier, &bytes, [number]).await;
        assert_eq!(late, [Err(ErrorKind::Deadline)]);
        assert!(memory.bytes() <= 3 * SIZE);
        assert_books(&tier, &memory);
    }
    // If it is not there after all, a load tells.
    memory.objects.lock().clear();
    for number in 4..=6 {
        let loaded = tier.load(vec![bytes.to_load(&key(number, ""), LEN)]).await;
        assert_eq!(loaded[0].as_ref().unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert_books(&tier, &memory);
}

#[tokio::test]
async fn what_was_stored_too_late_is_not_taken_for_stored() {
    let (memory, bytes) = (Arc::new(Memory::default()), Bytes::new());
    let tier = tier(&memory, Some(3));
    let asked = || memory.stores.load(Ordering::Relaxed);
    let found = async |number| {
        let found = tier.lookup(vec![spec(&key(number, ""), LEN)]).await;
        found.unwrap()[0].is_some()
    };
    memory.late.store(true, Ordering::Relaxed);
    store(&tier, &bytes, [1, 2]).await;
    memory.objects.lock().clear();
    // Neither one that never came ...
    let late = [Err(ErrorKind::Deadline)];
    assert_eq!(store(&tier, &bytes, [2]).await, late);
    assert_eq!(asked(), 3);
    // ... is found, and one that did come is.
    assert!(!found(1).await && found(2).await);
    assert_eq!(memory.lookups.load(Ordering::Relaxed), 2);
    memory.late.store(false, Ordering::Relaxed);
    for written in [Stored::Written(SIZE), Stored::AlreadyThere(SIZE)] {
        assert_eq!(store(&tier, &bytes, [1]).await, [Ok(written)]);
        assert!(found(1).await && found(2).await);
    }
    // From then on nobody is asked.
    assert_eq!((asked(), memory.lookups.load(Ordering::Relaxed)), (4, 2));
    assert_books(&tier, &memory);
}

#[tokio::test]
async fn what_was_deleted_too_late_is_not_taken_for_stored() {
    let (memory, bytes) = (Arc::new(Memory::default()), Bytes::new());
    let tier = tier(&memory, None);
    store(&tier, &bytes, [1]).await;
    *memory.no_delete.lock() = Some(ErrorKind::Deadline);
    assert!(tier.delete(vec![key(1, "")], false).await[0].is_err());
    memory.objects.lock().clear();
    assert_eq!(store(&tier, &bytes, [1]).await, [Ok(Stored::Written(SIZE))]);
    assert_books(&tier, &memory);
}

#[tokio::test]
async fn a_store_whose_caller_has_gone_counts() {
    let memory = Arc::new(Memory {
        store_gate: Some(Semaphore::new(0)),
        ..Memory::default()
    });
    let bytes = Bytes::new();
    let tier = tier(&memory, Some(3));
    {
        let mut dropped = std::pin::pin!(store(&tier, &bytes, [1]));
        begin(dropped.as_mut()).await;
    }
    assert_eq!(tier.usage().objects, 1);
    let found = tier.lookup(vec![spec(&key(1, ""), LEN)]).await.unwrap();
    assert!(found[0].is_none(), "nobody has said that it is there");
}

#[tokio::test]
async fn batches_at_the_same_time_keep_the_reserve_together() {
    let memory = Arc::new(Memory {
        store_gate: Some(Semaphore::new(0)),
        ..Memory::default()
    });
    let bytes = Bytes::new();
    let tier = tier_with(&memory, None, None, 1000);
    memory.bounded.store(true, Ordering::Relaxed);
    memory.free.store(1000 + SIZE, Ordering::Relaxed);
    let mut first = std::pin::pin!(store(&tier, &bytes, [1]));
    begin(first.as_mut()).await;
    let second = store(&tier, &bytes, [2]).await;
    assert_eq!(second, [Err(ErrorKind::Full)]);
    memory.store_gate.as_ref().unwrap().add_permits(10);
    assert!(first.await[0].is_ok());
    assert!(store(&tier, &bytes, [3]).await[0].is_ok());
    assert_books(&tier, &memory);
}
