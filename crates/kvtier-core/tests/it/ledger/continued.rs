//! Order of use and usage of tenants, as if the process had not ended.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvtier_core::Namespace;
use kvtier_core::cache::Cache;
use kvtier_core::eviction::EvictionKind;

use super::{SALTS, Shared, keys, recorded, resident, restored, space};
use crate::cache_support::{FirstFit, hash, request};

#[test]
fn eviction_goes_on_in_the_order_of_use() {
    for eviction in [EvictionKind::Lru, EvictionKind::IsolatedLru] {
        let words = Shared::default();
        let cache = recorded(&words, eviction);
        let store = |seconds, salt: usize, numbers: std::ops::Range<u32>| {
            let now = Duration::from_secs(seconds);
            let wanted: Vec<_> = numbers.map(hash).collect();
            let reserved = cache
                .reserve(now, &request(space(salt), &wanted, 2))
                .unwrap();
            reserved.reservation.commit(now);
        };
        store(1, 0, 0..3);
        store(2, 1, 3..4);
        store(3, 0, 4..5);
        // A use is known within 6.4 seconds.
        cache.touch(Duration::from_secs(20), [space(0)], &[hash(1)]);
        let order = |cache: &Cache<FirstFit>| {
            let mut order = Vec::new();
            let mut left: BTreeSet<_> = resident(cache);
            while !left.is_empty() {
                cache.evict(Duration::from_secs(30), 1, 1);
                let now = resident(cache);
                order.extend(left.difference(&now).copied());
                left = now;
            }
            order
        };
        let memory = words.memory();
        let (again, _restored) = restored(&memory, eviction);
        // The end of a prefix goes first.
        let expected = [(0, 2), (0, 0), (1, 3), (0, 4), (0, 1)];
        assert_eq!(order(&again), expected, "{eviction:?}");
        assert_eq!(
            order(&cache),
            expected,
            "{eviction:?}: as without a restart"
        );
    }
}

#[test]
fn usage_of_tenants_is_exact_from_the_start() {
    let words = Shared::default();
    let cache = recorded(&words, EvictionKind::IsolatedLru);
    let now = Duration::from_secs(1);
    for (salt, len) in [(0, 3), (1, 8), (2, 5)] {
        let wanted = [hash(salt as u32)];
        let reserved = cache
            .reserve(now, &request(space(salt), &wanted, len))
            .unwrap();
        reserved.reservation.commit(now);
    }
    // The third is in the course of a store.
    let wanted = [hash(9)];
    let staged = cache
        .reserve(now, &request(space(2), &wanted, 6))
        .unwrap()
        .reservation;
    staged.grant(now);
    cache.remove(space(1), &[hash(1)], false);
    let usage = |cache: &Cache<FirstFit>| {
        let (stats, salts) = cache.stats_with(&SALTS);
        let salts = salts
            .into_iter()
            .map(|usage| usage.map(|usage| (usage.bytes, usage.staged_bytes, usage.objects)));
        (stats.used_bytes, stats.objects, salts.collect::<Vec<_>>())
    };
    let before = usage(&cache);
    assert_eq!(before.0, 4 + 6 + 6);
    let memory = words.memory();
    let (again, restored) = restored(&memory, EvictionKind::IsolatedLru);
    assert_eq!(usage(&again), before);
    assert_eq!((restored.objects, restored.bytes), (2, 10));
    assert_eq!(restored.withheld.len(), 1);
    drop(restored);
    assert_eq!(
        usage(&again).0,
        10,
        "memory of a client that is done is free"
    );
    drop(staged);
}

/// An object whose namespace or record has no words is not recorded, and no later process sees words of others there.
#[test]
fn unrecorded_objects_are_counted_and_absent() {
    let words = Shared::default();
    let cache = recorded(&words, EvictionKind::Lru);
    let long = Arc::new(Namespace::new("m".repeat(3000), 0, 0, 0, "").unwrap());
    let now = Duration::from_secs(1);
    let wanted = [hash(1)];
    let store = |space: &Arc<Namespace>| {
        cache
            .reserve(now, &request(space, &wanted, 4))
            .unwrap()
            .reservation
            .commit(now);
    };
    store(space(0));
    cache.clear(true);
    store(&long);
    assert_eq!(cache.unrecorded(), 1);
    cache.touch(Duration::from_secs(100), [&long], &wanted);
    let memory = words.memory();
    assert_eq!(keys(&memory), []);
}
