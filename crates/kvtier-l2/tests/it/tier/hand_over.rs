//! Hand-overs from one tier to another one of the same backend.

use kvtier_core::ChunkHash;
use kvtier_l2::tier::{IndexHandOver, OBJECT_BYTES};
use tokio::sync::oneshot;

use super::*;

/// A tier of four objects.
fn of_four(memory: &Arc<TestAdapter>) -> Tier {
    tier(memory, Some(4))
}

/// The next tier, with everything.
async fn take(memory: &Arc<TestAdapter>, before: &Tier) -> Tier {
    let next = of_four(memory);
    next.adopt_state(before.hand_over().unwrap()).unwrap();
    assert!(next.is_recovering());
    recover(&next, Some(before.index_hand_over())).await;
    next
}

/// Recovers a tier by an index, which may not arrive.
async fn recover(tier: &Tier, index: Option<IndexHandOver>) {
    let (sender, receiver) = oneshot::channel();
    match index {
        Some(index) => sender.send(index).unwrap(),
        None => drop(sender),
    }
    tier.recover_handed(receiver, &AtomicBool::new(false)).await;
}

#[tokio::test]
async fn index_keeps_its_order_without_a_scan() {
    let (memory, bytes) = (Arc::new(listing_adapter()), Bytes::new());
    let before = of_four(&memory);
    before.recover(&AtomicBool::new(false)).await;
    for number in 1..=4 {
        assert!(store(&before, &bytes, [number]).await[0].is_ok());
    }
    // The first one was used last.
    drop(before.lookup(vec![spec(&key(1, ""), LEN)]).await.unwrap());
    let scans = memory.items(Operation::Recover);
    assert_eq!(before.index_hand_over().objects.len(), 4 * OBJECT_BYTES);
    assert_eq!(OBJECT_BYTES, ChunkHash::LEN + 12);
    let next = take(&memory, &before).await;
    assert!(matches!(next.recovery(), Recovery::Done(found) if found.objects == 4));
    assert_eq!(memory.items(Operation::Recover), scans);
    assert_eq!(next.usage(), before.usage());
    for (number, oldest) in [(5, 2), (6, 3), (7, 4), (8, 1)] {
        assert!(store(&next, &bytes, [number]).await[0].is_ok());
        assert_eq!(memory.delete_keys().last(), Some(&key(oldest, "")));
    }
    assert_accounting(&next, &memory);
}

#[tokio::test]
async fn unfinished_recovery_is_repeated() {
    let memory = Arc::new(listing_adapter());
    memory.put(&key(7, ""), LEN, 1);
    let before = of_four(&memory);
    let next = take(&memory, &before).await;
    assert_eq!(memory.items(Operation::Recover), 1);
    assert_eq!(next.usage().objects, 1);
}

#[tokio::test]
async fn pending_deletes_and_indeterminate_keys_are_handed_over() {
    let (memory, bytes) = (Arc::new(listing_adapter()), Bytes::new());
    let before = of_four(&memory);
    before.recover(&AtomicBool::new(false)).await;
    store(&before, &bytes, 1..=3).await;
    memory.script(Operation::Store, [Step::Late]);
    assert_eq!(
        store(&before, &bytes, [4]).await,
        [Err(ErrorKind::Deadline)]
    );
    memory.always(Operation::Delete, Some(Step::Fail(ErrorKind::Unavailable)));
    assert!(store(&before, &bytes, [5]).await[0].is_err());
    assert!(memory.contains(&key(1, "")), "its delete has failed");
    let handed = before.hand_over().unwrap();
    memory.always(Operation::Delete, None);
    let asked = memory.items(Operation::Lookup);
    let next = of_four(&memory);
    next.adopt_state(handed).unwrap();
    // Before the other one has released the backend, nothing is deleted.
    assert!(memory.contains(&key(1, "")));
    assert_eq!(next.usage().total_bytes_used, SIZE);
    recover(&next, Some(before.index_hand_over())).await;
    assert!(!memory.contains(&key(1, "")));
    let found = next.lookup(vec![spec(&key(4, ""), LEN)]).await.unwrap();
    assert!(found[0].is_some());
    assert_eq!(memory.items(Operation::Lookup), asked + 1);
    assert_accounting(&next, &memory);
}

/// The backend is listed instead.
#[tokio::test]
async fn index_that_is_damaged_or_does_not_arrive_is_not_used() {
    let (memory, bytes) = (Arc::new(listing_adapter()), Bytes::new());
    let before = of_four(&memory);
    before.recover(&AtomicBool::new(false)).await;
    store(&before, &bytes, 1..=2).await;
    let changed = |change: fn(&mut Vec<u8>)| {
        let mut index = before.index_hand_over();
        change(&mut index.objects);
        Some(index)
    };
    let short = changed(|objects| objects.truncate(9));
    let one_less = changed(|objects| objects.truncate(OBJECT_BYTES));
    let unknown = changed(|objects| objects[0] = 9);
    for index in [short, one_less, unknown, None] {
        let next = of_four(&memory);
        next.adopt_state(before.hand_over().unwrap()).unwrap();
        let scans = memory.items(Operation::Recover);
        recover(&next, index).await;
        assert_eq!(memory.items(Operation::Recover), scans + 1);
        assert_eq!(next.usage(), before.usage());
    }
}

/// Another hand-over, or a scan, begins behind it.
#[tokio::test]
async fn index_is_waited_for_until_the_tier_stops() {
    let memory = Arc::new(listing_adapter());
    let before = of_four(&memory);
    before.recover(&AtomicBool::new(false)).await;
    let next = Arc::new(of_four(&memory));
    next.adopt_state(before.hand_over().unwrap()).unwrap();
    let (_sender, receiver) = oneshot::channel();
    let stop = Arc::new(AtomicBool::new(false));
    let (tier, stopped) = (Arc::clone(&next), Arc::clone(&stop));
    let recovery = tokio::spawn(async move { tier.recover_handed(receiver, &stopped).await });
    while next.work().try_write().is_ok() {
        tokio::task::yield_now().await;
    }
    assert!(next.is_recovering());
    stop.store(true, Ordering::Relaxed);
    recovery.await.unwrap();
    assert!(matches!(next.recovery(), Recovery::Failed(_)));
}
