//! What a cache remembers of objects that it does not have.

use crate::cache_support::*;
use kvtier_core::cache::{Cache, CacheConfig, Loss, LossCause};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::quota::{Grant, QuotaConfig, QuotaMode};
use std::time::Duration;

fn put(cache: &Cache<FirstFit>, salt: &str, chunks: std::ops::Range<u32>) -> usize {
    store(cache, namespace(0, salt), &hashes(chunks), 1)
}

fn losses(cache: &Cache<FirstFit>, salt: &str, chunks: std::ops::Range<u32>) -> Vec<Option<Loss>> {
    let asked = [(namespace(0, salt), &hashes(chunks)[..])];
    cache.losses(&asked).remove(0)
}

fn causes(
    cache: &Cache<FirstFit>,
    salt: &str,
    chunks: std::ops::Range<u32>,
) -> Vec<Option<LossCause>> {
    losses(cache, salt, chunks)
        .into_iter()
        .map(|loss| loss.map(|loss| loss.cause))
        .collect()
}

#[test]
fn evictions_are_remembered_with_cause_and_time() {
    let cache = cache(10);
    put(&cache, "", 0..10);
    put(&cache, "", 10..12);
    // The last chunk of a batch is the oldest.
    let space = Some(LossCause::Space);
    assert_eq!(causes(&cache, "", 7..12), [None, space, space, None, None]);
    assert_eq!(
        cache
            .evict(NOW + Duration::from_secs(5), u64::MAX, 1)
            .objects,
        1
    );
    let later = NOW + Duration::from_secs(7);
    cache.touch(later, [namespace(0, "")], &hashes(0..1));
    let at_watermark = losses(&cache, "", 7..8)[0];
    let expected = Loss {
        cause: LossCause::Watermark,
        ago: Duration::from_secs(2),
    };
    assert_eq!(at_watermark, Some(expected));
    // The same chunk of another tenant was never there.
    assert_eq!(causes(&cache, "other", 7..9), [None, None]);
    assert_eq!(cache.losses_since(), None);
}

#[test]
fn last_loss_of_an_object_counts_although_its_namespace_has_ended() {
    let cache = cache(4);
    put(&cache, "", 0..4);
    put(&cache, "", 4..5);
    put(&cache, "", 3..4);
    assert_eq!(cache.clear(false).objects, 4);
    assert_eq!(cache.stats().namespaces, 0);
    assert_eq!(causes(&cache, "", 3..4), [Some(LossCause::Removed)]);
    put(&cache, "", 3..4);
    cache.unload(namespace(0, ""), &hashes(3..4));
    assert_eq!(causes(&cache, "", 3..4), [Some(LossCause::Removed)]);
    put(&cache, "", 9..10);
    cache.unload(namespace(0, ""), &hashes(9..10));
    assert_eq!(causes(&cache, "", 9..10), [None]);
}

#[test]
fn quotas_are_causes_of_evictions_and_refusals() {
    let with = |mode| {
        let config = CacheConfig {
            eviction: EvictionKind::IsolatedLru,
            quotas: QuotaConfig {
                mode,
                ..QuotaConfig::default()
            },
            ..CacheConfig::default()
        };
        let cache = Cache::new(FirstFit::new(20, 1), config);
        let limit = Some(2);
        let grant = Grant { limit, reserved: 0 };
        cache.set_grant("a", Some(grant));
        cache
    };
    let quota = Some(LossCause::Quota);
    // Its own limit.
    let strict = with(QuotaMode::Strict);
    put(&strict, "a", 0..2);
    put(&strict, "a", 5..6);
    assert_eq!(causes(&strict, "a", 0..2), [None, quota]);
    let held = strict.lease(NOW, namespace(0, "a"), &[hash(0), hash(5)]);
    assert!(held.is_some());
    assert_eq!(put(&strict, "a", 7..8), 0);
    let refused = Some(LossCause::RefusedQuota);
    assert_eq!(causes(&strict, "a", 7..8), [refused]);
    // Another tenant's store, which evicts from tenants over quota first.
    let soft = with(QuotaMode::Soft);
    put(&soft, "a", 0..5);
    put(&soft, "b", 0..16);
    assert_eq!(causes(&soft, "a", 3..5), [None, quota]);
    assert!(soft.evict_over_quota(NOW, 1).objects == 1);
    assert_eq!(causes(&soft, "a", 3..5), [quota, quota]);
    // Leased objects leave no space.
    let full = cache(2);
    put(&full, "", 0..2);
    let held = full.lease(NOW, namespace(0, ""), &hashes(0..2));
    assert_eq!(put(&full, "", 2..3), 0);
    assert!(held.is_some());
    assert_eq!(causes(&full, "", 2..3), [Some(LossCause::RefusedSpace)]);
}

#[test]
fn refused_request_is_remembered_by_its_first_chunk() {
    let cache = cache(2);
    put(&cache, "", 0..2);
    put(&cache, "b", 0..1);
    assert_eq!(causes(&cache, "", 1..2), [Some(LossCause::Space)]);
    let held = [("", 0..1), ("b", 0..1)]
        .map(|(salt, chunks)| cache.lease(NOW, namespace(0, salt), &hashes(chunks)));
    assert!(held.iter().all(Option::is_some));
    // As often as an engine repeats it.
    for _ in 0..1 << 10 {
        assert_eq!(put(&cache, "", 0..1 << 7), 0);
    }
    let refused = Some(LossCause::RefusedSpace);
    assert_eq!(causes(&cache, "", 0..4), [None, refused, None, None]);
    assert_eq!(cache.losses_since(), None, "nothing is overwritten");
}

#[test]
fn oldest_losses_are_forgotten() {
    let cache = cache(1);
    const REMEMBERED: u32 = 1 << 16;
    put(&cache, "", 0..1);
    for chunk in 1..=REMEMBERED {
        put(&cache, "", chunk..chunk + 1);
    }
    let space = Some(LossCause::Space);
    assert_eq!(causes(&cache, "", 0..1), [space]);
    assert_eq!(cache.losses_since(), None);
    put(&cache, "", REMEMBERED + 1..REMEMBERED + 2);
    assert_eq!(causes(&cache, "", 0..2), [None, space]);
    assert_eq!(
        causes(&cache, "", REMEMBERED..REMEMBERED + 1),
        [space],
        "the latest"
    );
    assert_eq!(cache.losses_since(), Some(Duration::ZERO));
}
