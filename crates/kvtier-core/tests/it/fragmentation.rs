//! Objects of different sizes in one arena: what is evicted for a store that no free range fits.

use crate::cache_support::*;
use kvtier_core::cache::{Cache, CacheConfig, KeyOutcome, ReadLease, ReserveOptions};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::quota::Grant;
use std::time::Duration;

/// Fills a cache with objects of this size.
fn filled(objects: u32, len: u64) -> Cache<FirstFit> {
    let cache = cache(u64::from(objects) * len);
    assert_eq!(
        store(&cache, namespace(0, ""), &hashes(0..objects), len),
        objects as usize
    );
    cache
}

fn lease(cache: &Cache<FirstFit>, object: u32) -> ReadLease<FirstFit> {
    let lease = cache.lease(NOW, namespace(0, ""), &[hash(object)]);
    lease.unwrap()
}

/// Stores one object of another group.
fn store_one(cache: &Cache<FirstFit>, object: u32, len: u64) -> bool {
    store(cache, namespace(1, ""), &[hash(object)], len) == 1
}

fn evicted(cache: &Cache<FirstFit>) -> u64 {
    cache.stats().evicted_objects_total
}

// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn large_store_between_leases_evicts_nothing_in_vain() {
    let cache = filled(2000, 1);
    // Walls of one object with 249 in between.
    let leases: Vec<_> = (0..8).map(|wall| lease(&cache, wall * 250)).collect();
    assert!(!store_one(&cache, 0, 250));
    assert_eq!((evicted(&cache), cache.stats().objects), (0, 2000));
    assert_eq!(cache.stats().refused_total, 1);
    // Up to 64 in policy order, and then a run.
    assert!(store_one(&cache, 0, 249));
    assert!((249..=249 + 64).contains(&evicted(&cache)));
    // With one wall less there are 499 between two.
    drop(leases.into_iter().nth(4));
    assert!(store_one(&cache, 1, 400));
    assert!(evicted(&cache) <= 249 + 64 + 400 + 64);
}

// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn models_of_different_sizes_evict_what_they_need() {
    let cache = filled(120, 2);
    for large in 0..30 {
        assert!(store_one(&cache, large, 8));
        assert_eq!(evicted(&cache), u64::from(large + 1) * 4);
    }
    // The reverse: evicting a large one frees memory for four small ones.
    assert_eq!(store(&cache, namespace(0, ""), &hashes(200..204), 2), 4);
    assert_eq!(evicted(&cache), 121);
}

// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn scattered_leases_leave_no_hole_and_nothing_is_evicted() {
    let cache = filled(120, 2);
    let mut leases: Vec<_> = (0..120)
        .step_by(4)
        .map(|wall| lease(&cache, wall))
        .collect();
    assert!(!store_one(&cache, 0, 8));
    assert_eq!(evicted(&cache), 0);
    // Victims in policy order until a sixteenth is free, and then the run.
    drop(leases.pop());
    assert!(store_one(&cache, 0, 8));
    assert!((4..=16).contains(&evicted(&cache)));
}

#[test]
fn run_is_chosen_among_idle_objects() {
    let cache = filled(16, 1);
    let later = NOW + Duration::from_secs(100);
    let _walls: Vec<_> = (0..16).step_by(5).map(|wall| lease(&cache, wall)).collect();
    // Of the three runs of four, the first two were used again.
    cache.touch(later, [namespace(0, "")], &hashes(0..11));
    assert!(store_one(&cache, 0, 4));
    let left = resident(&cache, namespace(0, ""), 16);
    assert_eq!(left, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15]);
}

#[test]
fn refused_batch_searches_once_and_keeps_what_is_resident() {
    let cache = filled(40, 1);
    let _walls: Vec<_> = (0..40).step_by(4).map(|wall| lease(&cache, wall)).collect();
    let keys = hashes(0..5);
    let reserved = cache
        .reserve(NOW, &request(namespace(1, ""), &keys, 4))
        .unwrap();
    assert_eq!(reserved.outcomes, [KeyOutcome::NoMemory; 5]);
    assert_eq!((evicted(&cache), cache.stats().refused_total), (0, 5));
}

#[test]
fn run_leaves_a_reserved_share_whole() {
    let cache = cache_with(16, EvictionKind::IsolatedLru);
    let grant = Grant {
        limit: None,
        reserved: 8,
    };
    cache.set_grant("kept", Some(grant));
    assert_eq!(store(&cache, namespace(0, "kept"), &hashes(0..10), 1), 10);
    assert_eq!(store(&cache, namespace(0, "other"), &hashes(0..6), 1), 6);
    // The last two of the kept ones and six of the other's adjoin.
    assert_eq!(store(&cache, namespace(1, "other"), &[hash(0)], 9), 0);
    assert_eq!(evicted(&cache), 0);
    assert_eq!(store(&cache, namespace(1, "other"), &[hash(0)], 8), 1);
    assert_eq!(resident(&cache, namespace(0, "kept"), 10).len(), 8);
}

/// Found by the model: without a victim left, the run was forgotten.
#[test]
fn run_is_evicted_when_no_victim_is_left_in_order() {
    let cache = cache_with(28, EvictionKind::IsolatedLru);
    assert_eq!(store(&cache, namespace(0, ""), &hashes(0..1), 1), 1);
    assert_eq!(store(&cache, namespace(0, "a"), &hashes(0..6), 1), 6);
    assert_eq!(store(&cache, namespace(1, ""), &hashes(0..3), 7), 3);
    let grant = Grant {
        limit: None,
        reserved: 17,
    };
    cache.set_grant("", Some(grant));
    // Those of "a" alone free enough, and so is the small one of the other with them, but no victim in order.
    assert_eq!(store(&cache, namespace(1, "a"), &hashes(0..1), 7), 1);
    assert!(evicted(&cache) <= 7);
}

#[test]
fn strict_tenant_refused_for_memory_keeps_its_objects() {
    let config = CacheConfig {
        eviction: EvictionKind::IsolatedLru,
        quotas: kvtier_core::quota::QuotaConfig {
            mode: kvtier_core::quota::QuotaMode::Strict,
            default_limit: Some(10),
            ..Default::default()
        },
        check_invariants_every: 1,
        ..CacheConfig::default()
    };
    let cache = Cache::new(FirstFit::new(16, 1), config);
    for tenant in ["a", "b"] {
        assert_eq!(store(&cache, namespace(0, tenant), &hashes(0..8), 1), 8);
    }
    let _wall = cache.lease(NOW, namespace(0, "a"), &hashes(4..5)).unwrap();
    let _other = cache.lease(NOW, namespace(0, "b"), &hashes(0..4)).unwrap();
    assert_eq!(store(&cache, namespace(1, "a"), &[hash(0)], 5), 0);
    assert_eq!(evicted(&cache), 0);
}

fn staged_at_most(bytes: u64) -> ReserveOptions<'static> {
    ReserveOptions {
        max_staged_bytes: Some(bytes),
        ..ReserveOptions::default()
    }
}

#[test]
fn staged_bytes_respect_call_bound_and_tenant_limit() {
    let cache = cache_with(100, EvictionKind::IsolatedLru);
    let grant = Grant {
        limit: Some(30),
        reserved: 0,
    };
    cache.set_grant("a", Some(grant));
    let reserve = |tenant, keys: std::ops::Range<u32>, max_bytes| {
        let keys = hashes(keys);
        let requests = request(namespace(0, tenant), &keys, 10);
        cache
            .reserve_with(NOW, &requests, &staged_at_most(max_bytes))
            .unwrap()
    };
    let held = reserve("a", 0..5, 1000);
    assert_eq!(held.outcomes[3..], [KeyOutcome::OverQuota; 2]);
    assert_eq!(held.reservation.len(), 3);
    let bounded = reserve("b", 0..5, 25);
    assert_eq!(bounded.outcomes[2..], [KeyOutcome::OverStaging; 3]);
    assert_eq!(bounded.reservation.len(), 2);
    // Once they are committed, a soft limit takes more, and eviction brings the tenant back.
    held.reservation.commit(NOW);
    assert_eq!(reserve("a", 5..7, 1000).reservation.len(), 2);
    assert_eq!(cache.stats().evicted_objects_total, 0);
}
