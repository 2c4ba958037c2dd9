//! Pins, and objects that are evicted first, one rule a test; `cache_model.rs` has all of them together.

use crate::cache_support::*;
use kvtier_core::cache::{Cache, CacheConfig, ReserveRequest};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::quota::{Grant, QuotaConfig, QuotaMode};
use std::ops::Range;
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);

/// A cache of 100 bytes, up to a half of them pinned.
fn cache(eviction: EvictionKind) -> Cache<FirstFit> {
    let config = CacheConfig {
        eviction,
        max_pinned_share: 0.5,
        quotas: QuotaConfig {
            mode: QuotaMode::Strict,
            ..QuotaConfig::default()
        },
        check_invariants_every: 1,
        ..CacheConfig::default()
    };
    Cache::new(FirstFit::new(100, 1), config)
}

fn put(cache: &Cache<FirstFit>, salt: &str, chunks: Range<u32>) -> usize {
    store(cache, namespace(0, salt), &hashes(chunks), 1)
}

fn pin(cache: &Cache<FirstFit>, salt: &str, chunks: Range<u32>) {
    let request = ReserveRequest {
        namespace: namespace(0, salt),
        hashes: &hashes(chunks),
        len: 1,
    };
    cache.pin(NOW, &[request], MINUTE);
}

fn has(cache: &Cache<FirstFit>, salt: &str) -> Vec<u32> {
    resident(cache, namespace(0, salt), 200)
}

fn ended(cache: &Cache<FirstFit>, now: Duration) -> usize {
    cache.end_pins(now, 3)
}

#[test]
fn every_policy_keeps_what_is_pinned() {
    for eviction in [
        EvictionKind::Lru,
        EvictionKind::IsolatedLru,
        EvictionKind::Arc,
    ] {
        let cache = cache(eviction);
        put(&cache, "", 0..10);
        pin(&cache, "", 0..5);
        assert_eq!(put(&cache, "", 100..195), 95);
        assert_eq!(has(&cache, "")[..5], [0, 1, 2, 3, 4], "{eviction:?}");
        cache.evict(NOW, 100, 1000);
        assert_eq!(has(&cache, ""), [0, 1, 2, 3, 4], "{eviction:?}");
        assert_eq!(
            ended(&cache, NOW + MINUTE),
            0,
            "not before its time is over"
        );
        let after = NOW + MINUTE + Duration::from_millis(100);
        assert_eq!([0; 3].map(|_| ended(&cache, after)), [3, 2, 0]);
        assert_eq!(cache.stats().pinned_bytes, 0);
        cache.evict(NOW, 100, 1000);
        assert!(has(&cache, "").is_empty(), "{eviction:?}");
    }
}

#[test]
fn ended_pins_lose_the_last_chunk_first() {
    let cache = cache(EvictionKind::Lru);
    put(&cache, "", 0..5);
    pin(&cache, "", 0..5);
    assert_eq!(cache.stats().pinned_bytes, 5);
    ended(&cache, NOW + 2 * MINUTE);
    ended(&cache, NOW + 2 * MINUTE);
    cache.evict(NOW, 2, 2);
    assert_eq!(has(&cache, ""), [0, 1, 2]);
}

#[test]
fn use_of_pinned_object_counts_when_its_pin_ends() {
    let cache = cache(EvictionKind::Arc);
    put(&cache, "", 0..20);
    pin(&cache, "", 0..10);
    drop(cache.lease(NOW, namespace(0, ""), &hashes(0..10)));
    // Written to another tier meanwhile: no use.
    drop(cache.hold(NOW, namespace(0, ""), &hashes(0..10)));
    cache.end_pins(NOW + 2 * MINUTE, 100);
    put(&cache, "", 100..190);
    assert_eq!(has(&cache, "")[..10], Vec::from_iter(0..10));
}

#[test]
fn tenant_over_its_limit_loses_pins_last() {
    let cache = cache(EvictionKind::IsolatedLru);
    let limit = |bytes| Grant {
        limit: Some(bytes),
        reserved: 0,
    };
    cache.set_grant("a", Some(limit(20)));
    put(&cache, "a", 0..20);
    pin(&cache, "a", 0..20);
    assert_eq!(cache.stats().pinned_bytes, 10, "half of its limit");
    assert_eq!(cache.stats().pins_refused_total, 10);
    cache.set_grant("a", Some(limit(15)));
    cache.evict_over_quota(NOW, 1000);
    assert_eq!(
        (cache.stats().pinned_bytes, has(&cache, "a").len()),
        (10, 15)
    );
    cache.set_grant("a", Some(limit(5)));
    assert_eq!(put(&cache, "a", 100..102), 2);
    assert_eq!(has(&cache, "a"), [0, 1, 2, 100, 101]);
}

#[test]
fn store_evicts_pinned_objects_where_there_are_no_others() {
    let cache = cache(EvictionKind::Lru);
    put(&cache, "", 0..50);
    pin(&cache, "", 0..50);
    put(&cache, "", 50..100);
    let reading = cache.lease(NOW, namespace(0, ""), &hashes(50..100));
    assert_eq!(put(&cache, "", 100..101), 1);
    assert_eq!(cache.stats().pinned_bytes, 49);
    // A larger one: those in its place, and no others.
    assert_eq!(store(&cache, namespace(1, ""), &hashes(0..1), 30), 1);
    assert_eq!(cache.stats().pinned_bytes, 20);
    assert_eq!(store(&cache, namespace(1, ""), &hashes(1..2), 51), 0);
    assert_eq!(cache.stats().pinned_bytes, 20);
    drop(reading);
}

#[test]
fn refused_store_evicts_no_pinned_object() {
    let cache = cache(EvictionKind::Lru);
    put(&cache, "", 0..100);
    // Each is between two that are leased.
    for chunk in 0..50 {
        pin(&cache, "", 2 * chunk..2 * chunk + 1);
    }
    let leased: Vec<_> = (0..50)
        .map(|chunk| cache.lease(NOW, namespace(0, ""), &hashes(2 * chunk + 1..2 * chunk + 2)))
        .collect();
    assert_eq!(store(&cache, namespace(1, ""), &hashes(0..1), 2), 0);
    assert_eq!(cache.stats().pinned_bytes, 50);
    drop(leased);
}

#[test]
fn tenant_with_reserved_share_evicts_its_own_pinned_objects() {
    let cache = cache(EvictionKind::IsolatedLru);
    let share = |bytes| Grant {
        limit: None,
        reserved: bytes,
    };
    cache.set_grant("a", Some(share(50)));
    put(&cache, "a", 0..50);
    pin(&cache, "a", 0..50);
    put(&cache, "b", 0..50);
    let reading = cache.lease(NOW, namespace(0, "b"), &hashes(0..50));
    assert_eq!(put(&cache, "b", 100..101), 0, "they are not its own");
    assert_eq!(put(&cache, "a", 100..101), 1);
    assert_eq!(cache.stats().pinned_bytes, 49);
    drop(reading);
}

#[test]
fn forgotten_objects_have_no_pins() {
    let cache = cache(EvictionKind::Lru);
    put(&cache, "", 0..10);
    pin(&cache, "", 0..10);
    let keys = hashes(0..10);
    assert_eq!(
        cache.unload(namespace(0, ""), &keys).kept,
        10,
        "a tier has them: to save memory"
    );
    let reading = cache.lease(NOW, namespace(0, ""), &keys[..2]);
    assert_eq!(cache.remove(namespace(0, ""), &keys[..4], true).objects, 4);
    assert_eq!(cache.stats().pinned_bytes, 6);
    drop(reading);
    cache.clear(true);
    assert_eq!(cache.stats().pinned_bytes, 0);
    assert_eq!(cache.end_pins(NOW + 2 * MINUTE, 100), 0);
}

#[test]
fn evicted_first_stays_so_until_it_is_used() {
    for eviction in [
        EvictionKind::Lru,
        EvictionKind::IsolatedLru,
        EvictionKind::Arc,
    ] {
        let cache = cache(eviction);
        put(&cache, "", 0..5);
        let request = ReserveRequest {
            namespace: namespace(0, ""),
            hashes: &hashes(10..15),
            len: 1,
        };
        let reserved = cache.reserve(NOW, &[request]).unwrap();
        let _ = reserved.reservation.evict_first().commit(NOW);
        put(&cache, "", 5..10);
        // Written to another tier meanwhile: no use.
        drop(cache.hold(NOW, namespace(0, ""), &hashes(10..15)));
        drop(cache.lease(NOW, namespace(0, ""), &hashes(10..11)));
        cache.evict(NOW, 2, 2);
        assert_eq!(has(&cache, "")[10..], [10, 11, 12], "{eviction:?}");
        cache.evict(NOW, 3, 3);
        let left: Vec<_> = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10].into();
        assert_eq!(has(&cache, ""), left, "{eviction:?}");
    }
}
