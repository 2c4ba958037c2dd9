//! Hand-overs from one tier to another one of the same backend.

use kvtier_core::ChunkHash;
use kvtier_l2::tier::{OBJECT_BYTES, TierHandOver};

use super::*;

/// A tier of four objects.
fn of_four(memory: &Arc<TestAdapter>) -> Tier {
    tier(memory, Some(4))
}

async fn take(memory: &Arc<TestAdapter>, handed: TierHandOver) -> Tier {
    let next = of_four(memory);
    let index = next.adopt_state(handed).unwrap();
    assert!(next.is_recovering());
    next.recover_handed(index, &AtomicBool::new(false)).await;
    next
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
    let handed = before.hand_over().unwrap();
    assert_eq!(handed.objects.len(), 4 * OBJECT_BYTES);
    assert_eq!(OBJECT_BYTES, ChunkHash::LEN + 12);
    let next = take(&memory, handed).await;
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
    let handed = before.hand_over().unwrap();
    let next = take(&memory, handed).await;
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
    let index = next.adopt_state(handed).unwrap();
    // Before the other one has released the backend, nothing is deleted.
    assert!(memory.contains(&key(1, "")));
    assert_eq!(next.usage().total_bytes_used, SIZE);
    next.recover_handed(index, &AtomicBool::new(false)).await;
    assert!(!memory.contains(&key(1, "")));
    let found = next.lookup(vec![spec(&key(4, ""), LEN)]).await.unwrap();
    assert!(found[0].is_some());
    assert_eq!(memory.items(Operation::Lookup), asked + 1);
    assert_accounting(&next, &memory);
}

#[tokio::test]
async fn index_of_another_tier_is_refused() {
    let (memory, bytes) = (Arc::new(listing_adapter()), Bytes::new());
    let before = of_four(&memory);
    before.recover(&AtomicBool::new(false)).await;
    store(&before, &bytes, 1..=2).await;
    let refused = |change: fn(&mut TierHandOver)| {
        let mut handed = before.hand_over().unwrap();
        change(&mut handed);
        let error = of_four(&memory).adopt_state(handed).err().unwrap();
        error.to_string()
    };
    let short = refused(|handed| handed.objects.truncate(9));
    let unknown = refused(|handed| handed.objects[0] = 9);
    for told in [short, unknown] {
        let expected = "memory-0: objects of its index are missing or have no namespace";
        assert!(told.contains(expected), "{told}");
    }
}
