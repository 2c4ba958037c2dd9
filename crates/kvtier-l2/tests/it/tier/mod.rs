//! A tier around a scripted backend: accounting, eviction, recovery.

mod deletes;
mod limits;
mod log;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use self::support::{
    Bytes, OVERHEAD, adapter_with, key, listing_adapter, shared_adapter, spec, test_adapter,
};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::quota::QuotaMode;
use kvtier_l2::testing::{Operation, Step, TestAdapter};
use kvtier_l2::tier::{Deleted, Recovery, Tier, TierConfig, TierEviction};
use kvtier_l2::{Capabilities, ErrorKind, Stored};

const LEN: u64 = 84;
/// Bytes of one object in the backend.
const SIZE: u64 = LEN + OVERHEAD;

const NOOP: TierEviction = TierEviction {
    policy: EvictionKind::Noop,
    trigger_watermark: 0.8,
    eviction_ratio: 0.2,
};

fn tier(memory: &Arc<TestAdapter>, objects: Option<u64>) -> Tier {
    tier_with(memory, objects, None, 0)
}

fn tier_with(
    memory: &Arc<TestAdapter>,
    objects: Option<u64>,
    eviction: Option<TierEviction>,
    reserve_bytes: u64,
) -> Tier {
    let config = TierConfig {
        name: "memory-0".into(),
        capacity_bytes: objects.map(|objects| objects * SIZE),
        eviction,
        quota_mode: QuotaMode::Soft,
        quota_default: None,
        reserve_bytes,
    };
    Tier::new(Arc::clone(memory) as _, config)
}

async fn store(
    tier: &Tier,
    bytes: &Bytes,
    numbers: impl IntoIterator<Item = u8>,
) -> Vec<Result<Stored, ErrorKind>> {
    let items = numbers
        .into_iter()
        .map(|number| bytes.to_store(&key(number, ""), LEN))
        .collect();
    let results = tier.store(items).await.into_iter();
    results
        .map(|result| result.map_err(|error| error.kind()))
        .collect()
}

#[tokio::test]
async fn buffer_of_another_length_is_not_written() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    let mut item = bytes.to_store(&key(1, ""), LEN);
    item.from = bytes.buffer(LEN - 1);
    let results = tier
        .store(vec![bytes.to_store(&key(2, ""), LEN), item])
        .await;
    assert!(results[0].is_ok());
    let refused = results[1].as_ref().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
    assert_eq!(memory.store_keys(), [key(2, "")]);
    assert_accounting(&tier, &memory);
}

/// Checks that the tenants' bytes sum to the total, and that this is what the backend holds.
fn assert_accounting(tier: &Tier, memory: &TestAdapter) {
    let usage = tier.usage();
    let sum: u64 = usage.bytes_by_cache_salt.values().sum();
    assert_eq!(sum, usage.total_bytes_used);
    assert_eq!(usage.total_bytes_used, memory.bytes());
    assert!(usage.bytes_by_cache_salt.values().all(|bytes| *bytes > 0));
    assert_eq!(tier.stats().accounting_errors, 0);
}

#[tokio::test]
async fn object_stored_again_counts_once() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    for round in 0..3 {
        let results = store(&tier, &bytes, [1, 2]).await;
        let expected = match round {
            0 => Stored::Written(SIZE),
            _ => Stored::AlreadyThere(SIZE),
        };
        assert_eq!(results, [Ok(expected), Ok(expected)]);
        assert_eq!(tier.usage().total_bytes_used, 2 * SIZE);
    }
    assert_eq!(memory.items(Operation::Store), 2);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn key_twice_in_batch_counts_once() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    assert!(store(&tier, &bytes, [1, 1]).await.iter().all(Result::is_ok));
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn failed_item_fails_alone_and_counts_nothing() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    memory.refuse(&key(2, ""));
    let tier = tier(&memory, None);
    let results = store(&tier, &bytes, [1, 2, 3]).await;
    let written = Ok(Stored::Written(SIZE));
    assert_eq!(results, [written, Err(ErrorKind::Refused), written]);
    assert_eq!(tier.last_store_error().unwrap().to_string(), "refused");
    store(&tier, &bytes, [4]).await;
    assert_eq!(tier.last_store_error(), None);
    assert_eq!(tier.counters().store_failures.get()["refused"], 1);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn tenant_bytes_sum_to_total_after_deletes() {
    let (memory, bytes) = (shared_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    let keys = [key(1, "a"), key(1, "b"), key(2, "a")];
    let items = keys.iter().map(|key| bytes.to_store(key, LEN)).collect();
    tier.store(items).await;
    // One of another writer, one that does not exist, one twice.
    memory.put(&key(9, "c"), LEN, 0);
    let asked = [&key(9, "c"), &key(8, "d"), &keys[0], &keys[0]];
    let deleted = tier
        .delete(asked.into_iter().cloned().collect(), false)
        .await;
    let deleted: Vec<_> = deleted.into_iter().map(Result::unwrap).collect();
    assert_eq!(
        deleted,
        [
            Deleted::Removed,
            Deleted::Absent,
            Deleted::Removed,
            Deleted::Absent
        ]
    );
    assert_accounting(&tier, &memory);
    let usage = tier.usage();
    assert_eq!(usage.bytes_by_cache_salt.len(), 2);
    assert_eq!(
        (
            &*usage.bytes_by_cache_salt.keys().next().unwrap().clone(),
            usage.objects
        ),
        ("a", 2)
    );
}

#[tokio::test]
async fn deleted_object_is_not_counted_after_the_answer() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    store(&tier, &bytes, [1]).await;
    tier.delete(vec![key(1, "")], false).await;
    assert_eq!(tier.usage().total_bytes_used, 0);
    assert!(!memory.contains(&key(1, "")));
}

#[tokio::test]
async fn counted_bytes_are_the_written_ones() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    memory.surplus_bytes.store(5, Ordering::Relaxed);
    let tier = tier(&memory, None);
    assert_eq!(
        store(&tier, &bytes, [1]).await,
        [Ok(Stored::Written(SIZE + 5))]
    );
    assert_eq!(tier.usage().total_bytes_used, SIZE + 5);
}

#[tokio::test]
async fn items_over_capacity_in_batch_are_not_counted() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier_with(&memory, Some(2), Some(NOOP), 0);
    let results = store(&tier, &bytes, [1, 2, 3, 4]).await;
    assert_eq!(results[2..], [Err(ErrorKind::Full), Err(ErrorKind::Full)]);
    assert_eq!(memory.bytes(), 2 * SIZE);
    assert!(tier.is_full());
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn usage_fraction_is_negative_if_unbounded() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let unbounded = tier(&memory, None);
    assert_eq!(unbounded.usage().usage_fraction(), -1.0);
    assert!(!unbounded.usage().supports_global_eviction());
    let bounded = tier(&memory, Some(4));
    assert_eq!(bounded.usage().usage_fraction(), 0.0);
    // Twice an object that was never there.
    bounded.delete(vec![key(1, ""), key(1, "")], false).await;
    assert_eq!(bounded.usage().usage_fraction(), 0.0);
    store(&bounded, &bytes, [1]).await;
    assert_eq!(bounded.usage().usage_fraction(), 0.25);
    assert_accounting(&bounded, &memory);
}

#[tokio::test]
async fn full_tier_evicts_lru_before_writing() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, Some(3));
    for number in 1..=3 {
        store(&tier, &bytes, [number]).await;
    }
    drop(tier.lookup(vec![spec(&key(1, ""), LEN)]).await.unwrap());
    assert!(store(&tier, &bytes, [4]).await[0].is_ok());
    assert_eq!(memory.delete_keys(), [key(2, "")]);
    assert_eq!(memory.bytes(), 3 * SIZE);
    assert_eq!(tier.counters().evicted_objects.get(), 1);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn leased_object_is_neither_evicted_nor_deleted() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, Some(2));
    for number in 1..=2 {
        store(&tier, &bytes, [number]).await;
    }
    let held = tier
        .lookup(vec![spec(&key(1, ""), LEN), spec(&key(7, ""), LEN)])
        .await
        .unwrap();
    assert!(held[0].is_some() && held[1].is_none());
    assert!(store(&tier, &bytes, [3]).await[0].is_ok());
    assert!(memory.contains(&key(1, "")) && !memory.contains(&key(2, "")));
    let delete = async |number, force| {
        let mut deleted = tier.delete(vec![key(number, "")], force).await;
        deleted.remove(0).unwrap()
    };
    assert_eq!(delete(1, false).await, Deleted::Kept);
    drop(held);
    assert_eq!(delete(1, false).await, Deleted::Removed);
    // Unless it is forced.
    let held = tier.lookup(vec![spec(&key(3, ""), LEN)]).await.unwrap();
    assert!(held[0].is_some());
    assert_eq!(delete(3, true).await, Deleted::Removed);
    drop(held);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn object_with_failed_delete_still_counts() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    store(&tier, &bytes, [1, 2]).await;
    memory.refuse(&key(1, ""));
    let keys = vec![key(1, ""), key(2, ""), key(3, "")];
    let deleted = tier.delete(keys, false).await;
    assert_eq!(deleted[0].as_ref().unwrap_err().kind(), ErrorKind::Refused);
    assert_eq!(deleted[1..], [Ok(Deleted::Removed), Ok(Deleted::Absent)]);
    assert_eq!(tier.usage().objects, 1);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn eviction_pass_evicts_from_watermark_by_bytes() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let eviction = TierEviction {
        trigger_watermark: 0.8,
        eviction_ratio: 0.5,
        ..TierEviction::default()
    };
    let tier = tier_with(&memory, Some(10), Some(eviction), 0);
    store(&tier, &bytes, 0..7).await;
    tier.evict().await;
    assert_eq!(memory.bytes(), 7 * SIZE, "below the watermark");
    store(&tier, &bytes, 7..8).await;
    tier.evict().await;
    assert_eq!(memory.bytes(), 4 * SIZE);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn lowered_capacity_evicts_in_pass_and_in_store() {
    for stores in [false, true] {
        let (memory, bytes) = (test_adapter(), Bytes::new());
        let tier = tier(&memory, Some(10));
        store(&tier, &bytes, 0..10).await;
        tier.set_limits(Some(4 * SIZE), None);
        assert_eq!(tier.usage().total_capacity_bytes, 4 * SIZE);
        assert_eq!(memory.bytes(), 10 * SIZE, "nothing is evicted at once");
        if stores {
            let written = Ok(Stored::Written(SIZE));
            assert_eq!(store(&tier, &bytes, 10..12).await, [written, written]);
        } else {
            tier.evict().await;
        }
        let left = if stores { 8..12 } else { 6..10 };
        assert!(
            left.into_iter()
                .all(|number| memory.contains(&key(number, "")))
        );
        assert_eq!(memory.bytes(), 4 * SIZE);
        assert_accounting(&tier, &memory);
    }
}

/// Each of them begins while others have evicted a part.
#[tokio::test]
async fn several_stores_evict_a_surplus_once() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, Some(8000));
    for tenant in 0..32 {
        let key = |number| key(number, &tenant.to_string());
        let items = (0..250).map(|number| bytes.to_store(&key(number), LEN));
        let stored = tier.store(items.collect()).await;
        assert!(stored.iter().all(Result::is_ok));
    }
    tier.set_limits(Some(2000 * SIZE), None);
    memory.always(Operation::Delete, Some(Step::Wait));
    let mut first = std::pin::pin!(store(&tier, &bytes, [1]));
    let mut second = std::pin::pin!(store(&tier, &bytes, [2]));
    deletes::begin(first.as_mut()).await;
    deletes::begin(second.as_mut()).await;
    memory.gate.add_permits(100);
    tokio::join!(first, second);
    tier.evict().await;
    assert_eq!(memory.bytes(), 2000 * SIZE);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn raised_capacity_takes_stores_at_once() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, Some(2));
    store(&tier, &bytes, 0..2).await;
    tier.set_limits(Some(4 * SIZE), None);
    assert!(store(&tier, &bytes, 2..4).await.iter().all(Result::is_ok));
    assert_eq!(memory.bytes(), 4 * SIZE);
    assert!(memory.delete_keys().is_empty());
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn changed_watermark_holds_from_next_pass() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let eviction = TierEviction {
        trigger_watermark: 1.0,
        ..TierEviction::default()
    };
    let tier = tier_with(&memory, Some(10), Some(eviction), 0);
    store(&tier, &bytes, 0..8).await;
    let changed = TierEviction {
        trigger_watermark: 0.7,
        eviction_ratio: 0.5,
        ..eviction
    };
    tier.set_limits(Some(10 * SIZE), Some(changed));
    assert_eq!(tier.eviction(), Some(changed));
    tier.evict().await;
    assert_eq!(memory.bytes(), 4 * SIZE);
    // Leased objects stay, and count.
    let held = tier.lookup((4..8).map(|number| spec(&key(number, ""), LEN)).collect());
    let held = held.await.unwrap();
    tier.set_limits(Some(SIZE), Some(changed));
    tier.evict().await;
    assert_eq!(store(&tier, &bytes, [9]).await, [Err(ErrorKind::Full)]);
    assert_eq!(tier.stats().used_bytes, 4 * SIZE);
    drop(held);
    assert!(store(&tier, &bytes, [9]).await[0].is_ok());
    assert_eq!(memory.bytes(), SIZE);
    assert_accounting(&tier, &memory);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn disk_smaller_than_capacity_evicts_the_oldest() {
    for capacity in [Some(100), None] {
        for reports_disk in [true, false] {
            let (memory, bytes) = (test_adapter(), Bytes::new());
            *memory.disk_bytes.lock() = Some(10 * SIZE);
            memory.reports_disk.store(reports_disk, Ordering::Relaxed);
            let tier = tier(&memory, capacity);
            for number in 0..30 {
                let stored = store(&tier, &bytes, [number]).await;
                assert_eq!(stored, [Ok(Stored::Written(SIZE))], "{number}");
            }
            assert!(memory.bytes() > 5 * SIZE && !tier.is_full());
            let is_there = |number| memory.contains(&key(number, ""));
            assert!((25..30).all(is_there) && !(0..20).any(is_there));
            // Another program takes half of the disk.
            *memory.disk_bytes.lock() = Some(memory.bytes());
            assert!(store(&tier, &bytes, 30..33).await.iter().all(Result::is_ok));
            assert_accounting(&tier, &memory);
        }
    }
}

#[tokio::test]
async fn full_disk_evicts_nothing_by_policy_noop() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    *memory.disk_bytes.lock() = Some(2 * SIZE);
    let tier = tier_with(&memory, None, Some(NOOP), 0);
    store(&tier, &bytes, 0..2).await;
    assert_eq!(store(&tier, &bytes, [2]).await, [Err(ErrorKind::Full)]);
    assert!(tier.is_full() && memory.delete_keys().is_empty());
}

/// A quota that counts deleted bytes until minutes later, or a backend that refuses deletes.
// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn backend_that_stays_full_is_not_emptied() {
    for case in 0..6 {
        let (reports_disk, fails, owns_space) = (case % 2 == 0, case >= 2, case >= 4);
        let memory = Arc::new(adapter_with(Capabilities {
            owns_space,
            ..Capabilities::default()
        }));
        let bytes = Bytes::new();
        let tier = tier(&memory, None);
        store(&tier, &bytes, 0..100).await;
        if reports_disk {
            *memory.free_bytes.lock() = Some(0);
        }
        memory.always(Operation::Store, Some(Step::Fail(ErrorKind::Full)));
        let refuse = fails.then_some(Step::Fail(ErrorKind::Unavailable));
        memory.always(Operation::Delete, refuse);
        for number in 100..200 {
            let refused = store(&tier, &bytes, [number]).await;
            assert_eq!(refused, [Err(ErrorKind::Full)]);
        }
        assert!(tier.stats().objects >= 98, "{}", tier.stats().objects);
        assert_accounting(&tier, &memory);
    }
}

#[tokio::test]
async fn reserve_that_cannot_be_reached_evicts_nothing() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier_with(&memory, None, None, 200 * SIZE);
    store(&tier, &bytes, 0..100).await;
    memory.reports_disk.store(true, Ordering::Relaxed);
    *memory.disk_bytes.lock() = Some(memory.bytes() + SIZE);
    for number in 100..120 {
        let refused = store(&tier, &bytes, [number]).await;
        assert_eq!(refused, [Err(ErrorKind::Full)]);
    }
    assert_eq!(memory.bytes(), 100 * SIZE);
    assert_accounting(&tier, &memory);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn full_disk_suspends_only_stores_until_space() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier_with(&memory, None, Some(NOOP), 1000);
    *memory.free_bytes.lock() = Some(1000 + SIZE);
    let results = store(&tier, &bytes, [1, 2]).await;
    assert_eq!(results, [Ok(Stored::Written(SIZE)), Err(ErrorKind::Full)]);
    *memory.free_bytes.lock() = Some(1000);
    assert_eq!(
        store(&tier, &bytes, [2, 1]).await,
        [Err(ErrorKind::Full), Ok(Stored::AlreadyThere(SIZE))]
    );
    assert!(tier.is_full());
    assert!(tier.load(vec![bytes.to_load(&key(1, ""), LEN)]).await[0].is_ok());
    *memory.free_bytes.lock() = Some(1 << 20);
    assert!(store(&tier, &bytes, [2]).await[0].is_ok());
    assert!(!tier.is_full());
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn unknown_free_space_refuses_stores() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    memory.always(Operation::FreeBytes, Some(Step::Fail(ErrorKind::Deadline)));
    let late = [Err(ErrorKind::Deadline), Err(ErrorKind::Deadline)];
    assert_eq!(store(&tier, &bytes, [1, 2]).await, late);
    assert_eq!(tier.counters().store_failures.get()["deadline"], 2);
    memory.always(Operation::FreeBytes, None);
    assert!(store(&tier, &bytes, [1, 2]).await.iter().all(Result::is_ok));
    assert_accounting(&tier, &memory);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn foreign_stores_are_adopted_and_foreign_deletes_noticed() {
    let (memory, bytes) = (shared_adapter(), Bytes::new());
    let tier = tier(&memory, Some(4));
    memory.put(&key(1, "t"), LEN, 0);
    let found = tier.lookup(vec![spec(&key(1, "t"), LEN)]).await.unwrap();
    assert!(found[0].is_some());
    drop(found);
    assert_accounting(&tier, &memory);
    memory.clear();
    let loaded = tier.load(vec![bytes.to_load(&key(1, "t"), LEN)]).await;
    assert_eq!(loaded[0].as_ref().unwrap_err().kind(), ErrorKind::NotFound);
    assert_accounting(&tier, &memory);
    assert!(store(&tier, &bytes, [1]).await[0].is_ok());
}

#[tokio::test]
async fn indexed_object_needs_no_backend_lookup() {
    let (memory, bytes) = (shared_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    store(&tier, &bytes, 0..10).await;
    let objects = (0..11).map(|number| spec(&key(number, ""), LEN)).collect();
    let found = tier.lookup(objects).await.unwrap();
    assert_eq!(found.iter().flatten().count(), 10);
    assert_eq!(memory.items(Operation::Lookup), 1);
    // A backend without other writers needs no lookup.
    let alone = test_adapter();
    let tier = self::tier(&alone, None);
    assert!(tier.lookup(vec![spec(&key(1, ""), LEN)]).await.unwrap()[0].is_none());
    assert_eq!(alone.items(Operation::Lookup), 0);
}

#[tokio::test]
async fn corrupt_object_is_stored_again() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    store(&tier, &bytes, [1]).await;
    memory.put(&key(1, ""), 3, 0);
    let loaded = tier.load(vec![bytes.to_load(&key(1, ""), LEN)]).await;
    assert_eq!(loaded[0].as_ref().unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(store(&tier, &bytes, [1]).await, [Ok(Stored::Written(SIZE))]);
    assert!(tier.load(vec![bytes.to_load(&key(1, ""), LEN)]).await[0].is_ok());
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn refused_object_is_stored_again() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = tier(&memory, None);
    store(&tier, &bytes, [1]).await;
    memory.refuse(&key(1, ""));
    let loaded = tier.load(vec![bytes.to_load(&key(1, ""), LEN)]).await;
    assert_eq!(loaded[0].as_ref().unwrap_err().kind(), ErrorKind::Refused);
    memory.accept_all();
    assert_eq!(store(&tier, &bytes, [1]).await, [Ok(Stored::Written(SIZE))]);
    assert_accounting(&tier, &memory);
}

fn with_recovery(objects: u8) -> Arc<TestAdapter> {
    let memory = listing_adapter();
    memory.always(Operation::Recover, Some(Step::Wait));
    for number in 0..objects {
        // Higher numbers were used earlier.
        memory.put(&key(number, "t"), LEN, 1000 - u64::from(number));
    }
    Arc::new(memory)
}

#[tokio::test]
async fn old_objects_are_served_during_recovery() {
    let (memory, bytes) = (with_recovery(3), Bytes::new());
    let tier = Arc::new(tier(&memory, None));
    let stop = AtomicBool::new(false);
    let adopt = tier.recover(&stop);
    let serve = async {
        let found = tier.lookup(vec![spec(&key(1, "t"), LEN)]).await.unwrap();
        assert!(found[0].is_some() && tier.is_recovering());
        assert!(tier.load(vec![bytes.to_load(&key(1, "t"), LEN)]).await[0].is_ok());
        memory.gate.add_permits(1);
    };
    tokio::join!(adopt, serve);
    assert!(matches!(tier.recovery(), Recovery::Done(found) if found.objects == 3));
    assert_eq!(tier.usage().objects, 3);
    assert_accounting(&tier, &memory);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn capacity_holds_from_first_store_after_restart() {
    let (memory, bytes) = (with_recovery(4), Bytes::new());
    let tier = Arc::new(tier(&memory, Some(4)));
    let stop = AtomicBool::new(false);
    let storing = store(&tier, &bytes, [9]);
    let release = async {
        // The store waits for the recovery.
        tokio::task::yield_now().await;
        assert_eq!(memory.items(Operation::Store), 0);
        memory.gate.add_permits(1);
    };
    let (stored, (), ()) = tokio::join!(storing, tier.recover(&stop), release);
    assert!(stored[0].is_ok());
    assert_eq!(memory.bytes(), 4 * SIZE);
    // The least recently used one was evicted.
    assert_eq!(memory.delete_keys(), [key(3, "t")]);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn recovery_over_capacity_evicts_the_oldest() {
    let memory = with_recovery(5);
    memory.gate.add_permits(1);
    let tier = tier(&memory, Some(2));
    tier.recover(&AtomicBool::new(false)).await;
    assert_eq!(memory.bytes(), 2 * SIZE);
    assert!(memory.contains(&key(0, "t")) && memory.contains(&key(1, "t")));
    assert_accounting(&tier, &memory);
}

#[tokio::test(start_paused = true)]
async fn failed_recovery_is_retried_and_stores_refused() {
    for failure in [Some(ErrorKind::Unavailable), None] {
        let (memory, bytes) = (with_recovery(4), Bytes::new());
        memory.gate.add_permits(1);
        let step = failure.map_or(Step::Panic, Step::Fail);
        memory.script(Operation::Recover, std::iter::repeat_n(step, 10));
        let tier = tier(&memory, Some(4));
        let began = tokio::time::Instant::now();
        let stop = AtomicBool::new(false);
        let check = async {
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
            let refused = store(&tier, &bytes, [9]).await;
            assert_eq!(refused, [Err(ErrorKind::Unavailable)]);
            let Recovery::Failed(error) = tier.recovery() else {
                panic!("{:?}", tier.recovery());
            };
            assert!(
                error.to_string().ends_with("the next try is in 1 s"),
                "{error}"
            );
            assert!(tier.is_recovering());
        };
        tokio::join!(tier.recover(&stop), check);
        // 1, 2, 4, 8, 16, 32 and then four times 60 seconds.
        assert_eq!(began.elapsed().as_secs(), 63 + 4 * 60);
        assert!(matches!(tier.recovery(), Recovery::Done(found) if found.objects == 4));
        assert!(store(&tier, &bytes, [9]).await[0].is_ok());
        assert_eq!(memory.bytes(), 4 * SIZE);
        assert_accounting(&tier, &memory);
    }
}

#[tokio::test(start_paused = true)]
async fn stopped_recovery_releases_waiting_stores() {
    // During a try, and between two tries.
    for fails in [false, true] {
        let (memory, bytes) = (with_recovery(4), Bytes::new());
        let step = fails.then_some(Step::Fail(ErrorKind::Refused));
        memory.script(Operation::Recover, step);
        let tier = tier(&memory, Some(4));
        let stop = AtomicBool::new(false);
        let later = async {
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
            stop.store(true, Ordering::Relaxed);
        };
        let ((), (), stored) = tokio::join!(tier.recover(&stop), later, store(&tier, &bytes, [9]));
        assert_eq!(stored, [Err(ErrorKind::Unavailable)]);
        let again = store(&tier, &bytes, [9]).await;
        assert_eq!(again, [Err(ErrorKind::Unavailable)]);
        assert!(matches!(tier.recovery(), Recovery::Failed(_)));
    }
}

#[test]
fn recovery_sorts_on_a_blocking_thread() {
    let (memory, threads) = (with_recovery(4), Arc::new(AtomicU64::new(0)));
    memory.gate.add_permits(1);
    let started = Arc::clone(&threads);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .on_thread_start(move || {
            started.fetch_add(1, Ordering::Relaxed);
        })
        .build()
        .unwrap();
    let tier = tier(&memory, Some(4));
    let before = threads.load(Ordering::Relaxed);
    runtime.block_on(tier.recover(&AtomicBool::new(false)));
    assert_eq!(threads.load(Ordering::Relaxed) - before, 1);
    assert_eq!(tier.usage().objects, 4);
}

#[tokio::test]
async fn object_used_during_recovery_is_younger() {
    let memory = with_recovery(5);
    let tier = tier(&memory, Some(2));
    let stop = AtomicBool::new(false);
    let uses = async {
        // The one that was used longest ago before the start.
        let found = tier.lookup(vec![spec(&key(4, "t"), LEN)]).await.unwrap();
        assert!(found[0].is_some());
        drop(found);
        memory.gate.add_permits(1);
    };
    tokio::join!(tier.recover(&stop), uses);
    assert!(memory.contains(&key(4, "t")) && memory.contains(&key(0, "t")));
    assert_eq!(memory.bytes(), 2 * SIZE);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn read_only_tier_changes_nothing() {
    let memory = adapter_with(Capabilities {
        read_only: true,
        shared: true,
        list: true,
        ..Capabilities::default()
    });
    let (memory, bytes) = (Arc::new(memory), Bytes::new());
    for number in 1..=4 {
        memory.put(&key(number, "t"), LEN, number.into());
    }
    let eviction = Some(TierEviction::default());
    // A capacity below the stored bytes.
    let tier = tier_with(&memory, Some(1), eviction, 0);
    tier.recover(&AtomicBool::new(false)).await;
    tier.evict().await;
    let unsupported = Err(ErrorKind::Unsupported);
    assert_eq!(store(&tier, &bytes, [9]).await, [unsupported]);
    let deleted = tier.delete(vec![key(1, "t")], true).await;
    assert_eq!(
        deleted[0].as_ref().unwrap_err().kind(),
        ErrorKind::Unsupported
    );
    for number in 1..=4 {
        let found = tier.lookup(vec![spec(&key(number, "t"), LEN)]).await;
        assert!(found.unwrap()[0].is_some());
        let loaded = tier.load(vec![bytes.to_load(&key(number, "t"), LEN)]).await;
        assert!(loaded[0].is_ok());
    }
    assert_eq!(memory.bytes(), 4 * SIZE);
    assert_eq!(memory.items(Operation::Store), 0);
    assert!(memory.delete_keys().is_empty());
    assert_eq!(tier.last_store_error(), None);
}
