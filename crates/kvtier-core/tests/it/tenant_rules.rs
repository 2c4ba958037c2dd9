//! Limits and shares of tenants, one rule a test; `cache_model.rs` has all of them together.

use crate::cache_support::*;
use kvtier_core::cache::{Cache, CacheConfig, KeyOutcome};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::quota::{Grant, QuotaConfig, QuotaMode};

const CAPACITY: u64 = 100;

fn tenants(mode: QuotaMode, default_limit: Option<u64>) -> Cache<FirstFit> {
    aligned_tenants(mode, default_limit, 1)
}

fn aligned_tenants(mode: QuotaMode, default_limit: Option<u64>, align: u64) -> Cache<FirstFit> {
    let config = CacheConfig {
        eviction: EvictionKind::IsolatedLru,
        quotas: QuotaConfig {
            mode,
            default_limit,
            ..QuotaConfig::default()
        },
        check_invariants_every: 1,
        ..CacheConfig::default()
    };
    Cache::new(FirstFit::new(CAPACITY, align), config)
}

fn limit(bytes: u64) -> Option<Grant> {
    Some(Grant {
        limit: Some(bytes),
        reserved: 0,
    })
}

fn share(bytes: u64) -> Option<Grant> {
    Some(Grant {
        limit: None,
        reserved: bytes,
    })
}

/// Stores chunks of one byte each.
fn put(cache: &Cache<FirstFit>, salt: &str, chunks: std::ops::Range<u32>) -> usize {
    store(cache, namespace(0, salt), &hashes(chunks), 1)
}

fn has(cache: &Cache<FirstFit>, salt: &str) -> Vec<u32> {
    resident(cache, namespace(0, salt), 200)
}

fn bytes(cache: &Cache<FirstFit>, salt: &str) -> u64 {
    cache
        .salt_usage(salt)
        .map_or(0, |usage| usage.counted_bytes)
}

#[test]
fn strict_limit_evicts_the_tenant_s_own_objects() {
    let cache = tenants(QuotaMode::Strict, None);
    cache.set_grant("a", limit(10));
    assert_eq!(put(&cache, "b", 0..20), 20);
    assert_eq!(put(&cache, "a", 0..10), 10);
    assert_eq!(put(&cache, "a", 50..53), 3);
    assert_eq!(bytes(&cache, "a"), 10);
    assert_eq!(has(&cache, "a"), [0, 1, 2, 3, 4, 5, 6, 50, 51, 52]);
    assert_eq!(has(&cache, "b").len(), 20);
    assert_eq!(cache.stats().over_quota_total, 0);
}

#[test]
fn limit_counts_objects_rounded_to_the_alignment() {
    let cache = aligned_tenants(QuotaMode::Strict, None, 4);
    cache.set_grant("a", limit(10));
    // One byte each, which takes four.
    assert_eq!(put(&cache, "a", 0..5), 2);
    assert_eq!((has(&cache, "a").len(), bytes(&cache, "a")), (2, 8));
}

#[test]
fn background_pass_counts_objects_rounded_to_the_alignment() {
    let cache = aligned_tenants(QuotaMode::Soft, None, 4);
    put(&cache, "a", 0..20);
    let evicted = cache.evict(NOW, 8, 100);
    assert_eq!((evicted.objects, evicted.bytes), (2, 8));
}

#[test]
fn strict_limit_counts_writes_and_reads_in_flight() {
    let cache = tenants(QuotaMode::Strict, None);
    cache.set_grant("a", limit(10));
    put(&cache, "a", 0..4);
    let reading = cache.lease(NOW, namespace(0, "a"), &hashes(0..4)).unwrap();
    let writing = cache
        .reserve(NOW, &request(namespace(0, "a"), &hashes(10..18), 1))
        .unwrap();
    let refused = writing.outcomes.iter();
    let refused = refused.filter(|outcome| **outcome == KeyOutcome::OverQuota);
    assert_eq!((refused.count(), bytes(&cache, "a")), (2, 10));
    let usage = cache.salt_usage("a").unwrap();
    assert_eq!((usage.over_quota_total, usage.refused_total), (2, 0));
    drop((reading, writing));
    assert_eq!(put(&cache, "a", 10..18), 8);
    assert_eq!(bytes(&cache, "a"), 10);
}

#[test]
fn object_above_strict_limit_evicts_nothing() {
    let cache = tenants(QuotaMode::Strict, None);
    cache.set_grant("a", limit(10));
    put(&cache, "a", 0..10);
    let large = cache
        .reserve(NOW, &request(namespace(0, "a"), &hashes(50..51), 11))
        .unwrap();
    assert_eq!(large.outcomes, [KeyOutcome::OverQuota]);
    assert_eq!(has(&cache, "a").len(), 10);
}

#[test]
fn soft_limit_is_enforced_by_pass_on_its_tenant_only() {
    let cache = tenants(QuotaMode::Soft, None);
    cache.set_grant("a", limit(10));
    put(&cache, "b", 0..20);
    assert_eq!(put(&cache, "a", 0..15), 15);
    assert!(cache.salt_usage("a").unwrap().over_quota);
    let evicted = cache.evict_over_quota(NOW, 1000);
    // From 0.8 of 10 on it is over quota, until a fifth of that is evicted.
    assert_eq!((evicted.objects, bytes(&cache, "a")), (9, 6));
    assert_eq!(has(&cache, "a"), [0, 1, 2, 3, 4, 5]);
    assert_eq!(has(&cache, "b").len(), 20);
    assert!(!cache.salt_usage("a").unwrap().over_quota);
    assert_eq!(cache.evict_over_quota(NOW, 1000).objects, 0);
}

#[test]
fn below_its_watermark_a_tenant_loses_nothing() {
    let cache = tenants(QuotaMode::Soft, None);
    cache.set_grant("a", limit(10));
    put(&cache, "a", 0..7);
    assert_eq!(cache.evict_over_quota(NOW, 1000).objects, 0);
    put(&cache, "a", 7..8);
    assert_eq!(cache.evict_over_quota(NOW, 1000).objects, 2);
}

#[test]
fn the_default_limit_has_three_meanings() {
    let cases = [
        (QuotaMode::Soft, None, 20),
        (QuotaMode::Soft, Some(0), 0),
        (QuotaMode::Soft, Some(10), 6),
        (QuotaMode::Strict, None, 20),
        (QuotaMode::Strict, Some(0), 0),
        (QuotaMode::Strict, Some(10), 10),
    ];
    for (mode, default_limit, left) in cases {
        let cache = tenants(mode, default_limit);
        cache.set_grant("listed", limit(1000));
        for salt in ["listed", "", "unlisted"] {
            put(&cache, salt, 0..20);
        }
        cache.evict_over_quota(NOW, 1000);
        let now = ["listed", "", "unlisted"].map(|salt| bytes(&cache, salt));
        assert_eq!(now, [20, left, left], "{mode:?} {default_limit:?}");
    }
}

#[test]
fn changed_default_holds_for_tenants_without_a_grant() {
    for (mode, left, half) in [(QuotaMode::Soft, 6, 4), (QuotaMode::Strict, 10, 10)] {
        let cache = tenants(mode, None);
        cache.set_grant("listed", limit(1000));
        for salt in ["listed", "unlisted"] {
            put(&cache, salt, 0..20);
        }
        cache.configure_quotas(|quotas| quotas.default_limit = Some(10));
        assert_eq!(bytes(&cache, "unlisted"), 20, "nothing is evicted at once");
        cache.evict_over_quota(NOW, 1000);
        // A tenant that comes afterwards.
        put(&cache, "new", 0..20);
        cache.evict_over_quota(NOW, 1000);
        let now = ["listed", "unlisted", "new"].map(|salt| bytes(&cache, salt));
        assert_eq!(now, [20, left, left], "{mode:?}");
        // Soft limits depend on watermark and ratio.
        cache.configure_quotas(|quotas| (quotas.watermark, quotas.ratio) = (0.5, 0.2));
        cache.evict_over_quota(NOW, 1000);
        assert_eq!(bytes(&cache, "new"), half, "{mode:?}");
        cache.configure_quotas(|quotas| quotas.default_limit = None);
        assert_eq!(cache.evict_over_quota(NOW, 1000).objects, 0);
        assert_eq!(put(&cache, "new", 100..130), 30, "{mode:?}");
        assert_eq!(cache.evict_over_quota(NOW, 1000).objects, 0);
    }
}

#[test]
fn lowered_limit_is_enforced_by_next_pass() {
    for mode in [QuotaMode::Soft, QuotaMode::Strict] {
        let cache = tenants(mode, None);
        put(&cache, "a", 0..50);
        cache.set_grant("a", limit(5));
        assert_eq!(bytes(&cache, "a"), 50);
        while cache.evict_over_quota(NOW, 7).objects > 0 {}
        assert!(bytes(&cache, "a") <= 5, "{mode:?}");
        cache.set_grant("a", None);
        assert_eq!(put(&cache, "a", 100..150), 50);
        assert_eq!(cache.evict_over_quota(NOW, 1000).objects, 0);
    }
}

#[test]
fn tenant_over_quota_pays_for_stores_of_others() {
    let cache = tenants(QuotaMode::Soft, None);
    cache.set_grant("greedy", limit(30));
    put(&cache, "steady", 0..40);
    put(&cache, "greedy", 0..60);
    // The cache is full, and the steady tenant's objects are the oldest.
    assert_eq!(put(&cache, "new", 0..30), 30);
    assert_eq!(has(&cache, "steady").len(), 40);
    assert_eq!(bytes(&cache, "greedy"), 30);
}

#[test]
fn only_its_tenant_can_evict_a_share() {
    let cache = tenants(QuotaMode::Soft, None);
    cache.set_grant("a", share(40));
    put(&cache, "a", 0..50);
    put(&cache, "b", 0..50);
    // Its objects are the oldest, yet only those beyond the share may be evicted, and then the guest's own.
    assert_eq!(put(&cache, "b", 100..150), 50);
    assert_eq!(bytes(&cache, "a"), 40);
    assert_eq!(put(&cache, "b", 50..100), 50);
    assert_eq!(bytes(&cache, "a"), 40);
    // A share is no limit, and what its tenant needs it may take from itself.
    let hold = cache
        .lease(NOW, namespace(0, "b"), &hashes(50..100))
        .unwrap();
    assert_eq!(put(&cache, "a", 100..130), 30);
    drop(hold);
    assert!(bytes(&cache, "a") >= 40);
}

#[test]
fn the_watermark_pass_spares_shares() {
    let cache = tenants(QuotaMode::Soft, None);
    cache.set_grant("a", share(40));
    put(&cache, "a", 0..50);
    put(&cache, "b", 0..50);
    let evicted = cache.evict(NOW, CAPACITY, 1000);
    assert_eq!(evicted.objects, 60);
    assert_eq!((bytes(&cache, "a"), bytes(&cache, "b")), (40, 0));
    assert_eq!(cache.evict(NOW, CAPACITY, 1000).objects, 0);
    cache.set_grant("a", None);
    assert_eq!(cache.evict(NOW, CAPACITY, 1000).objects, 40);
}

#[test]
fn tenant_is_known_while_holding_objects_or_grants() {
    let cache = tenants(QuotaMode::Soft, None);
    cache.set_grant("granted", limit(10));
    put(&cache, "guest", 0..3);
    assert_eq!(cache.stats().salts, 2);
    cache.clear(false);
    assert!(cache.salt_usage("guest").is_none());
    assert!(cache.salt_usage("granted").is_some());
    cache.set_grant("granted", None);
    cache.set_grant("unknown", None);
    assert_eq!((cache.stats().salts, cache.stats().namespaces), (0, 0));
}

#[test]
fn counts_of_tenants_add_up() {
    let cache = tenants(QuotaMode::Strict, Some(30));
    for (salt, chunks) in [("a", 0..50), ("b", 0..20), ("c", 0..60), ("a", 60..70)] {
        put(&cache, salt, chunks);
        let row = row(0, salt, None);
        drop(cache.lookup(NOW, &[row.clone()].into(), &hashes(0..40)));
    }
    let (stats, page) = (cache.stats(), cache.salts(0, 10));
    let sum = |part: fn(&kvtier_core::cache::SaltUsage) -> u64| -> u64 {
        page.entries.iter().map(part).sum()
    };
    assert_eq!(page.next, None);
    assert_eq!(sum(|usage| usage.bytes), stats.bytes);
    assert_eq!(
        sum(|usage| usage.evicted_objects_total),
        stats.evicted_objects_total
    );
    assert_eq!(
        sum(|usage| usage.evicted_bytes_total),
        stats.evicted_bytes_total
    );
    assert_eq!(sum(|usage| usage.over_quota_total), stats.over_quota_total);
    assert_eq!(sum(|usage| usage.refused_total), stats.refused_total);
    assert_eq!(
        sum(|usage| usage.committed_objects_total),
        stats.committed_total
    );
    assert_eq!(sum(|usage| usage.hit_chunks_total), stats.hit_chunks_total);
    assert_eq!(
        sum(|usage| usage.requested_chunks_total),
        stats.requested_chunks_total
    );
    assert!(stats.hit_chunks_total > 0 && stats.evicted_objects_total > 0);
}

#[test]
fn second_lookup_counts_only_additional_chunks() {
    let row = row(0, "a", None);
    // Known at the first look, or only since something was brought.
    for known in [3, 0] {
        let cache = tenants(QuotaMode::Soft, None);
        put(&cache, "a", 0..known);
        let first = cache.lookup(NOW, &[row.clone()].into(), &hashes(0..10));
        assert_eq!(first.counted.for_tenant, known > 0);
        put(&cache, "a", known..8);
        let second = cache.lookup_again(NOW, &[row.clone()].into(), &hashes(0..10), first.counted);
        assert_eq!((first.hit_chunks, second.hit_chunks), (known as usize, 8));
        let usage = cache.salt_usage("a").unwrap();
        let counted = (usage.requested_chunks_total, usage.hit_chunks_total);
        assert_eq!(counted, (10, 8));
        let stats = cache.stats();
        assert_eq!(stats.lookups_total, 1);
        let counted = (stats.requested_chunks_total, stats.hit_chunks_total);
        assert_eq!(counted, (10, 8));
    }
}

#[test]
fn a_soft_limit_never_takes_a_share() {
    let cache = tenants(QuotaMode::Soft, None);
    let grant = Grant {
        limit: Some(50),
        reserved: 50,
    };
    cache.set_grant("a", Some(grant));
    put(&cache, "a", 0..50);
    assert_eq!(cache.evict_over_quota(NOW, 1000).objects, 0);
    put(&cache, "b", 0..50);
    put(&cache, "b", 50..100);
    assert_eq!(bytes(&cache, "a"), 50);
    put(&cache, "a", 50..55);
    assert!(cache.evict_over_quota(NOW, 1000).objects > 0);
    assert_eq!(bytes(&cache, "a"), 50);
}

#[test]
fn staged_bytes_do_not_count_for_a_share() {
    let cache = tenants(QuotaMode::Soft, None);
    cache.set_grant("a", share(30));
    put(&cache, "a", 0..30);
    let writing = cache
        .reserve(NOW, &request(namespace(0, "a"), &hashes(100..120), 1))
        .unwrap();
    put(&cache, "b", 0..50);
    assert_eq!(put(&cache, "b", 50..100), 50);
    drop(writing);
    assert_eq!(bytes(&cache, "a"), 30);
}

#[test]
fn refused_store_evicts_nothing() {
    let cache = tenants(QuotaMode::Strict, None);
    cache.set_grant("a", limit(20));
    put(&cache, "a", 0..20);
    let reading = cache.lease(NOW, namespace(0, "a"), &hashes(0..15)).unwrap();
    let large = cache
        .reserve(NOW, &request(namespace(0, "a"), &hashes(50..51), 6))
        .unwrap();
    assert_eq!(large.outcomes, [KeyOutcome::OverQuota]);
    assert_eq!(bytes(&cache, "a"), 20);
    drop(reading);
}
