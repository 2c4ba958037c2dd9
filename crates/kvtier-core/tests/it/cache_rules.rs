//! The cache's rules, one test each.

use crate::cache_support::*;
use kvtier_core::cache::{Cache, CacheConfig, KeyOutcome, ReserveError, ReserveRequest};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::{GroupRow, Namespace, ObjectKey};
use std::sync::Arc;
use std::time::Duration;

fn row(group: u32, window: Option<u32>) -> GroupRow {
    crate::cache_support::row(group, "", window)
}

fn reserved_count(outcomes: &[KeyOutcome]) -> usize {
    let reserved = |outcome: &&KeyOutcome| matches!(outcome, KeyOutcome::Reserved(_));
    outcomes.iter().filter(reserved).count()
}

#[test]
fn an_object_is_found_only_once_committed() {
    let cache = cache(100);
    let keys = hashes(0..3);
    let reserved = cache
        .reserve(NOW, &request(namespace(0, ""), &keys, 10))
        .unwrap();
    assert_eq!(reserved_count(&reserved.outcomes), 3);
    assert_eq!(reserved.reservation.extents().len(), 3);
    assert!(resident(&cache, namespace(0, ""), 3).is_empty());
    assert_eq!(cache.stats().staged_bytes, 30);

    let committed = reserved.reservation.commit(NOW);
    assert_eq!((committed.inserted, committed.inserted_bytes), (3, 30));
    assert_eq!(resident(&cache, namespace(0, ""), 3), [0, 1, 2]);
    let stats = cache.stats();
    assert_eq!(
        (stats.staged_objects, stats.objects, stats.bytes),
        (0, 3, 30)
    );
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn a_dropped_reservation_is_an_abort() {
    let cache = cache(100);
    drop(cache.reserve(NOW, &request(namespace(0, ""), &hashes(0..3), 10)));
    let stats = cache.stats();
    assert_eq!(
        (stats.used_bytes, stats.aborted_total, stats.namespaces),
        (0, 3, 0)
    );
}

#[test]
fn first_commit_wins_over_dead_writer() {
    let cache = cache(100);
    let keys = hashes(0..1);
    let first = cache
        .reserve(NOW, &request(namespace(0, ""), &keys, 10))
        .unwrap();
    let second = cache
        .reserve(NOW, &request(namespace(0, ""), &keys, 10))
        .unwrap();
    assert_eq!(reserved_count(&second.outcomes), 1);
    let winner = second.reservation.staged()[0].extent;
    assert_eq!(second.reservation.commit(NOW).inserted, 1);
    assert_eq!(first.reservation.commit(NOW).duplicates, 1);
    let lease = cache.lease(NOW, namespace(0, ""), &keys).unwrap();
    assert_eq!(lease.extents(), [winner]);
    let stats = cache.stats();
    assert_eq!((stats.used_bytes, stats.duplicates_total), (10, 1));
}

#[test]
fn commit_subset_aborts_the_rest() {
    let cache = cache(100);
    let keys = hashes(0..4);
    let reserved = cache
        .reserve(NOW, &request(namespace(0, ""), &keys, 10))
        .unwrap();
    let even = |staged: &kvtier_core::cache::StagedObject| staged.position.is_multiple_of(2);
    let committed = reserved.reservation.commit_subset(NOW, even);
    assert_eq!((committed.inserted, committed.aborted), (2, 2));
    assert_eq!(resident(&cache, namespace(0, ""), 4), [0, 2]);
    assert_eq!(cache.usage().used_bytes, 20);
}

#[test]
fn commit_leased_holds_objects_another_committed_first() {
    let cache = cache(20);
    let keys = hashes(0..2);
    let late = cache
        .reserve(NOW, &request(namespace(0, ""), &keys[..1], 10))
        .unwrap();
    let early = cache
        .reserve(NOW, &request(namespace(0, ""), &keys[..1], 10))
        .unwrap();
    let first = early.reservation.staged()[0].extent;
    assert_eq!(early.reservation.commit(NOW).inserted, 1);
    let (committed, lease) = late.reservation.commit_leased(NOW);
    assert_eq!((committed.inserted, committed.duplicates), (0, 1));
    assert_eq!(lease.extents(), [first]);
    assert_eq!(cache.evict(NOW, u64::MAX, 10).objects, 0);
    drop(lease);
    assert_eq!(cache.evict(NOW, u64::MAX, 10).objects, 1);
}

#[test]
fn resident_keys_survive_evictions_of_their_batch() {
    let cache = cache(40);
    store(&cache, namespace(0, ""), &hashes(0..2), 10);
    store(&cache, namespace(0, ""), &hashes(8..10), 10);
    // Chunks 0 and 1 are the oldest, but the store is of their own tail.
    let reserved = cache
        .reserve(NOW, &request(namespace(0, ""), &hashes(0..5), 10))
        .unwrap();
    assert_eq!(reserved.outcomes[..2], [KeyOutcome::AlreadyResident; 2]);
    assert_eq!(reserved_count(&reserved.outcomes[2..4]), 2);
    assert_eq!(reserved.outcomes[4], KeyOutcome::NoMemory);
    assert_eq!(reserved.reservation.commit(NOW).inserted, 2);
    assert_eq!(resident(&cache, namespace(0, ""), 10), [0, 1, 2, 3]);
    let stats = cache.stats();
    assert_eq!((stats.refused_total, stats.evicted_objects_total), (1, 2));
}

// proves: docs/compare.md#l1-in-host-memory
// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn full_cache_evicts_by_bytes_within_the_call() {
    let cache = cache(100);
    store(&cache, namespace(0, ""), &hashes(0..10), 10);
    assert_eq!(store(&cache, namespace(0, ""), &hashes(20..21), 35), 1);
    // The last chunks of the prefix went, as many as 35 bytes take.
    assert_eq!(resident(&cache, namespace(0, ""), 10), [0, 1, 2, 3, 4, 5]);
    let stats = cache.stats();
    assert_eq!(
        (stats.evicted_objects_total, stats.evicted_bytes_total),
        (4, 40)
    );
}

#[test]
fn fragmentation_evicts_a_run_and_refuses_nothing() {
    let cache = cache(100);
    store(&cache, namespace(0, ""), &hashes(0..10), 10);
    // Every second one is younger, so the holes are between them.
    let young: Vec<_> = (0..10).step_by(2).map(hash).collect();
    cache.touch(NOW, [namespace(0, "")], &young);
    assert_eq!(cache.evict(NOW, 50, 100).objects, 5);
    assert_eq!(cache.usage().used_bytes, 50);
    assert_eq!(store(&cache, namespace(0, ""), &hashes(20..21), 20), 1);
    // One of those between two holes.
    assert_eq!(resident(&cache, namespace(0, ""), 10).len(), 4);
}

#[test]
fn oversized_batch_evicts_nothing() {
    let cache = cache(100);
    store(&cache, namespace(0, ""), &hashes(0..5), 10);
    for len in [101, u64::MAX] {
        let reserved = cache
            .reserve(NOW, &request(namespace(0, ""), &hashes(20..21), len))
            .unwrap();
        assert_eq!(reserved.outcomes, [KeyOutcome::NoMemory]);
    }
    // 90 bytes would fit the capacity, but 20 of it are leased.
    let lease = cache.lease(NOW, namespace(0, ""), &hashes(0..2)).unwrap();
    assert_eq!(store(&cache, namespace(0, ""), &hashes(20..21), 90), 0);
    assert_eq!(cache.stats().objects, 5);
    drop(lease);
    assert_eq!(store(&cache, namespace(0, ""), &hashes(20..21), 90), 1);
}

#[test]
fn empty_object_is_refused_without_side_effects() {
    let cache = cache(100);
    let keys = hashes(0..2);
    let requests = [
        request(namespace(0, ""), &keys, 10)[0],
        request(namespace(1, ""), &keys, 0)[0],
    ];
    let error = cache.reserve(NOW, &requests).unwrap_err();
    assert_eq!(error, ReserveError::EmptyObject { request: 1 });
    assert!(error.to_string().contains("request 1"), "{error}");
    assert_eq!(cache.stats().used_bytes, 0);
}

// proves: docs/compare.md#l1-in-host-memory
#[test]
fn noop_never_evicts() {
    let cache = cache_with(30, EvictionKind::Noop);
    assert_eq!(store(&cache, namespace(0, ""), &hashes(0..5), 10), 3);
    assert_eq!(store(&cache, namespace(0, ""), &hashes(5..6), 10), 0);
    assert_eq!(cache.evict(NOW, u64::MAX, usize::MAX).objects, 0);
    assert_eq!(resident(&cache, namespace(0, ""), 10), [0, 1, 2]);
}

#[test]
fn lookup_leases_only_what_each_row_needs() {
    let cache = cache(1000);
    let keys = hashes(0..6);
    store(&cache, namespace(0, ""), &keys[..5], 10);
    store(&cache, namespace(1, ""), &keys[2..6], 10);
    store(&cache, namespace(2, ""), &keys[3..4], 10);
    let rows = [row(0, None), row(1, Some(2)), row(2, Some(1))].into();
    let found = cache.lookup(NOW, &rows, &keys);
    assert_eq!(found.hit_chunks, 4);
    let leased: Vec<_> = (0..3).map(|row| found.lease.leased(row)).collect();
    assert_eq!(leased, [Some(0..4), Some(2..4), Some(3..4)]);
    assert_eq!(found.lease.held(), 7);
    assert_eq!(cache.stats().leased_objects, 7);
    // What is not leased goes; what is leased stays.
    assert_eq!(cache.evict(NOW, u64::MAX, 100).objects, 3);
    drop(found);
    let stats = cache.stats();
    assert_eq!((stats.leased_objects, stats.objects), (0, 7));
    assert_eq!((stats.lookups_total, stats.requested_chunks_total), (1, 6));
    assert_eq!(stats.hit_chunks_total, 4);
}

#[test]
fn a_miss_holds_nothing() {
    let cache = cache(1000);
    let keys = hashes(0..6);
    store(&cache, namespace(0, ""), &keys, 10);
    for rows in [
        vec![row(0, None), row(7, None)],
        vec![row(0, None), row(7, Some(1))],
        vec![],
    ] {
        let found = cache.lookup(NOW, &rows.into(), &keys);
        assert_eq!((found.hit_chunks, found.lease.held()), (0, 0));
        assert_eq!(cache.stats().leased_objects, 0);
    }
    assert_eq!(cache.lookup(NOW, &[row(0, None)].into(), &[]).hit_chunks, 0);
}

#[test]
fn namespaces_are_isolated_in_every_field() {
    let cache = cache(1000);
    let keys = hashes(0..1);
    let own = namespace(0, "a");
    store(&cache, own, &keys, 10);
    let other =
        |model, rank, layout| Arc::new(Namespace::new(model, rank, 0, layout, "a").unwrap());
    let (model, rank) = (own.model_name(), own.kv_rank());
    assert_eq!(other(&**model, rank, 0), *own);
    for other in [
        namespace(0, "").clone(),
        namespace(0, "b").clone(),
        namespace(1, "a").clone(),
        other(model, rank + 1, 0),
        other("some/mode", rank, 0),
        other(model, rank, 1),
    ] {
        assert!(cache.lease(NOW, &other, &keys).is_none(), "{other:?}");
    }
    assert!(cache.lease(NOW, own, &keys).is_some());
}

// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn claim_outlives_lookup_and_releases_are_counted() {
    let cache = cache(100);
    let keys = hashes(0..4);
    store(&cache, namespace(0, ""), &keys, 10);
    let mut lookup = cache.lookup(NOW, &[row(0, None)].into(), &keys);
    let claim = lookup.lease.claim(0, 1..3).unwrap();
    assert_eq!(claim.len(), 2);
    assert_eq!(
        claim.extents(),
        cache
            .lease(NOW, namespace(0, ""), &keys[1..3])
            .unwrap()
            .extents()
    );
    assert_eq!(lookup.lease.release_range(0..1, 0..2), 2);
    assert_eq!(lookup.lease.release_range(0..9, 0..2), 0);
    assert_eq!(lookup.lease.held(), 2);
    assert!(lookup.lease.claim(0, 1..3).is_none(), "chunk 1 is released");
    assert!(lookup.lease.claim(0, 2..5).is_none(), "there is no chunk 4");
    assert!(lookup.lease.claim(1, 2..3).is_none(), "there is no row 1");
    assert!(lookup.lease.claim(0, 2..2).unwrap().is_empty());
    drop(lookup);
    assert_eq!(cache.stats().leased_objects, 2);
    drop(claim);
    assert_eq!(cache.stats().leased_objects, 0);
}

#[test]
fn released_prefix_is_evicted_from_its_end() {
    let cache = cache(100);
    let keys = hashes(0..3);
    store(&cache, namespace(0, ""), &keys, 10);
    store(&cache, namespace(1, ""), &keys, 10);
    drop(cache.lookup(NOW, &[row(0, None), row(1, None)].into(), &keys));
    for left in [2, 1, 0] {
        assert_eq!(cache.evict(NOW, 20, 2).objects, 2);
        for group in [0, 1] {
            let expected: Vec<_> = (0..left).collect();
            assert_eq!(resident(&cache, namespace(group, ""), 3), expected);
        }
    }
}

#[test]
fn release_and_touch_renew_an_object() {
    let cache = cache(100);
    for n in 0..3 {
        store(&cache, namespace(0, ""), &hashes(n..n + 1), 10);
    }
    drop(cache.lease(NOW, namespace(0, ""), &hashes(0..1)));
    assert_eq!(cache.touch(NOW, [namespace(0, "")], &hashes(1..2)), 1);
    assert_eq!(cache.touch(NOW, [namespace(0, "")], &hashes(7..9)), 0);
    cache.evict(NOW, 1, 1);
    assert_eq!(resident(&cache, namespace(0, ""), 3), [0, 1]);
    cache.evict(NOW, 1, 1);
    assert_eq!(resident(&cache, namespace(0, ""), 3), [1]);
}

#[test]
fn renewed_chunks_are_younger_and_not_used() {
    for eviction in [EvictionKind::Lru, EvictionKind::Arc] {
        let cache = cache_with(100, eviction);
        store(&cache, namespace(0, ""), &hashes(0..2), 10);
        store(&cache, namespace(0, ""), &hashes(2..4), 10);
        let lease = cache.lease(NOW, namespace(0, ""), &hashes(3..4));
        cache.renew(NOW, [namespace(0, "")], &hashes(0..9));
        cache.evict(NOW, 1, 1);
        assert_eq!(resident(&cache, namespace(0, ""), 9), [0, 1, 3]);
        // ARC evicts what was used again behind what was not.
        store(&cache, namespace(0, ""), &hashes(4..5), 10);
        cache.evict(NOW, 11, 2);
        assert_eq!(resident(&cache, namespace(0, ""), 9), [3, 4]);
        drop(lease);
    }
}

#[test]
fn leased_objects_stay_unless_forced_their_memory_always() {
    let cache = cache(100);
    let keys = hashes(0..2);
    store(&cache, namespace(0, ""), &keys, 10);
    let one = cache.lease(NOW, namespace(0, ""), &keys[..1]).unwrap();
    let two = cache.lease(NOW, namespace(0, ""), &keys[..1]).unwrap();
    let removed = cache.remove(namespace(0, ""), &hashes(0..3), false);
    assert_eq!((removed.objects, removed.kept, removed.missing), (1, 1, 1));
    let removed = cache.remove(namespace(0, ""), &keys[..1], true);
    assert_eq!((removed.objects, removed.bytes), (1, 10));
    assert!(resident(&cache, namespace(0, ""), 2).is_empty());
    let stats = cache.stats();
    assert_eq!((stats.doomed_objects, stats.doomed_bytes), (1, 10));
    assert_eq!((stats.leased_objects, stats.used_bytes), (0, 10));

    // The key can be stored again meanwhile; the old bytes stay where they are.
    store(&cache, namespace(0, ""), &keys[..1], 20);
    let new = cache.lease(NOW, namespace(0, ""), &keys[..1]).unwrap();
    assert_ne!(new.extents(), one.extents());
    drop(one);
    assert_eq!(cache.usage().used_bytes, 30);
    drop(two);
    assert_eq!(cache.usage().used_bytes, 20);
    assert_eq!(cache.stats().accounting_errors, 0);
}

#[test]
fn clear_keeps_leased_objects_and_reservations() {
    let cache = cache(100);
    store(&cache, namespace(0, ""), &hashes(0..3), 10);
    let lease = cache.lease(NOW, namespace(0, ""), &hashes(1..2)).unwrap();
    let reserved = cache
        .reserve(NOW, &request(namespace(0, ""), &hashes(5..6), 10))
        .unwrap();
    let cleared = cache.clear(false);
    assert_eq!((cleared.objects, cleared.bytes, cleared.kept), (2, 20, 1));
    assert_eq!(cache.clear(true).objects, 1);
    assert_eq!(reserved.reservation.commit(NOW).inserted, 1);
    drop(lease);
    assert_eq!(resident(&cache, namespace(0, ""), 6), [5]);
    assert_eq!(cache.usage().used_bytes, 10);
}

#[test]
fn names_and_tenants_end_with_last_object() {
    let cache = cache(100);
    store(&cache, namespace(0, "a"), &hashes(0..2), 10);
    store(&cache, namespace(1, "a"), &hashes(0..1), 10);
    store(&cache, namespace(0, "b"), &hashes(0..1), 5);
    let usage = cache.salt_usage("a").unwrap();
    assert_eq!((&*usage.salt, usage.objects, usage.bytes), ("a", 3, 30));
    let first = cache.salts(0, 1);
    let second = cache.salts(first.next.unwrap(), 1);
    assert_eq!(&*second.entries[0].salt, "b");
    assert_eq!(second.next, None);
    assert_eq!((cache.stats().namespaces, cache.stats().salts), (3, 2));
    let first = cache.namespaces(0, 2);
    let last = cache.namespaces(first.next.unwrap(), 2);
    let namespaces: Vec<_> = first.entries.iter().chain(&last.entries).collect();
    assert_eq!(
        namespaces,
        [namespace(0, "a"), namespace(1, "a"), namespace(0, "b")]
    );
    assert_eq!(last.next, None);

    cache.remove(namespace(0, "a"), &hashes(0..2), false);
    cache.remove(namespace(1, "a"), &hashes(0..2), false);
    assert_eq!(cache.salt_usage("a"), None);
    assert_eq!((cache.stats().namespaces, cache.stats().salts), (1, 1));
    cache.clear(false);
    assert_eq!(cache.salts(0, 10).entries, []);
}

#[test]
fn refused_store_leaves_no_namespace() {
    let cache = cache(10);
    assert_eq!(store(&cache, namespace(0, "a"), &hashes(0..1), 11), 0);
    assert_eq!((cache.stats().namespaces, cache.stats().salts), (0, 0));
}

#[test]
fn objects_lists_full_keys_in_pages() {
    let cache = cache(100_000);
    store(&cache, namespace(3, "tenant"), &hashes(0..1500), 7);
    let lease = cache
        .lease(NOW, namespace(3, "tenant"), &hashes(0..1))
        .unwrap();
    let (mut from, mut listed) = (0, Vec::new());
    loop {
        let page = cache.objects(from, 400);
        assert!(page.entries.len() <= 400);
        listed.extend(page.entries);
        match page.next {
            Some(next) => from = next,
            None => break,
        }
    }
    drop(lease);
    assert_eq!(listed.len(), 1500);
    assert!(
        listed
            .iter()
            .all(|o| o.namespace == *namespace(3, "tenant") && o.bytes == 7)
    );
    assert_eq!(listed.iter().map(|o| o.leases).sum::<u32>(), 1);
    listed.sort_by_key(|object| object.chunk_hash);
    listed.dedup_by_key(|object| object.chunk_hash);
    assert_eq!(listed.len(), 1500);
}

#[test]
fn key_requested_twice_is_stored_once() {
    let cache = cache(100);
    let keys = [hash(1), hash(1)];
    let requests = [ReserveRequest {
        namespace: namespace(0, ""),
        hashes: &keys,
        len: 10,
    }; 2];
    let reserved = cache.reserve(NOW, &requests).unwrap();
    assert_eq!(reserved.reservation.len(), 4);
    let committed = reserved.reservation.commit(NOW);
    assert_eq!((committed.inserted, committed.duplicates), (1, 3));
    assert_eq!(cache.usage().used_bytes, 10);
}

#[test]
fn victim_idle_time_counts_from_last_use() {
    let cache = cache(100);
    store(&cache, namespace(0, ""), &hashes(0..1), 10);
    let lease = cache.lease(Duration::from_secs(50), namespace(0, ""), &hashes(0..1));
    drop(lease);
    cache.evict(Duration::from_secs(80), 1, 1);
    assert_eq!(cache.stats().last_evicted_idle_seconds, 30);
}

#[test]
fn eviction_names_are_those_of_the_configuration() {
    assert_eq!("LRU".parse(), Ok(EvictionKind::Lru));
    assert_eq!("noop".parse(), Ok(EvictionKind::Noop));
    for name in ["IsolatedLRU", "isolatedlru", "UserLRU"] {
        assert_eq!(name.parse(), Ok(EvictionKind::IsolatedLru));
    }
    assert_eq!("arc".parse(), Ok(EvictionKind::Arc));
    let error = "FIFO".parse::<EvictionKind>().unwrap_err();
    assert!(error.to_string().contains("FIFO"), "{error}");
}

#[test]
fn evicted_objects_are_reported_once() {
    for report_evicted in [false, true] {
        let cache = Cache::new(
            FirstFit::new(100, 1),
            CacheConfig {
                report_evicted,
                ..CacheConfig::default()
            },
        );
        let keys = hashes(0..3);
        for key in &keys {
            let one = std::slice::from_ref(key);
            let reserved = cache
                .reserve(NOW, &request(namespace(0, "t"), one, 50))
                .unwrap();
            let _ = reserved.reservation.commit(NOW);
        }
        let evicted = cache.take_evicted();
        if report_evicted {
            assert_eq!(evicted.len(), 1);
            assert_eq!((evicted[0].chunk_hash, evicted[0].bytes), (keys[0], 50));
            assert_eq!(evicted[0].namespace, *namespace(0, "t"));
        }
        assert_eq!(evicted.is_empty(), !report_evicted);
        assert_eq!(cache.take_evicted(), []);
    }
}

#[test]
fn object_is_held_in_whichever_layout_it_has() {
    let cache = cache(100);
    let layout = |layout, salt| Arc::new(Namespace::new("m", 1, 0, layout, salt).unwrap());
    let (first, second) = (layout(7, "a"), layout(8, "a"));
    for (namespace, keys) in [(&first, 0..1), (&second, 1..2), (&layout(9, "b"), 2..3)] {
        let reserved = cache.reserve(NOW, &request(namespace, &hashes(keys), 10));
        let _ = reserved.unwrap().reservation.commit(NOW);
    }
    let held = |number| {
        let key = ObjectKey::of(&first, hash(number));
        cache.hold_any_layout(NOW, &key)
    };
    let (namespace, lease) = held(1).unwrap();
    assert_eq!((namespace, lease.len()), (second, 1));
    assert_eq!(cache.stats().leased_objects, 1);
    assert_eq!(held(0).unwrap().0, first);
    assert!(held(2).is_none() && held(3).is_none());
}
