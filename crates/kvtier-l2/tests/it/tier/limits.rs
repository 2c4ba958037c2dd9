//! Strict limits hold in the backend, whatever fails; eviction after a restart.

use std::collections::BTreeMap;

use super::deletes::begin;
use super::*;
use kvtier_core::quota::Grant;
use kvtier_core::random::SplitMix64;
use kvtier_l2::tier::TierLease;

fn tier_of(
    memory: &Arc<TestAdapter>,
    mode: QuotaMode,
    limit: Option<u64>,
    all: Option<u64>,
) -> Tier {
    let config = TierConfig {
        name: "memory-0".into(),
        capacity_bytes: all.map(|objects| objects * SIZE),
        eviction: Some(TierEviction {
            policy: EvictionKind::IsolatedLru,
            trigger_watermark: 1.0,
            eviction_ratio: 0.2,
        }),
        quota_mode: mode,
        quota_default: limit.map(|objects| objects * SIZE),
        reserve_bytes: 0,
    };
    Tier::new(Arc::clone(memory) as _, config)
}

/// Returns a tier with a strict limit of `limit` objects per tenant.
fn strict(memory: &Arc<TestAdapter>, limit: u64) -> Tier {
    tier_of(memory, QuotaMode::Strict, Some(limit), None)
}

async fn store_of(
    tier: &Tier,
    bytes: &Bytes,
    salt: &str,
    numbers: impl IntoIterator<Item = u8>,
) -> Vec<Result<Stored, ErrorKind>> {
    let items = numbers
        .into_iter()
        .map(|number| bytes.to_store(&key(number, salt), LEN));
    let results = tier.store(items.collect()).await.into_iter();
    results
        .map(|result| result.map_err(|error| error.kind()))
        .collect()
}

async fn find(tier: &Tier, salt: &str, number: u8) -> Option<TierLease> {
    let mut found = tier.lookup(vec![spec(&key(number, salt), LEN)]).await;
    found.as_mut().unwrap().remove(0)
}

fn has(memory: &TestAdapter, salt: &str) -> Vec<u8> {
    (0..100)
        .filter(|number| memory.contains(&key(*number, salt)))
        .collect()
}

/// Returns a backend with objects of an earlier run, the least recently used first.
fn with_old<'a>(objects: impl IntoIterator<Item = (u8, &'a str)>) -> Arc<TestAdapter> {
    let memory = listing_adapter();
    memory.always(Operation::Recover, Some(Step::Wait));
    for ((number, salt), used_at) in objects.into_iter().zip(1..) {
        memory.put(&key(number, salt), LEN, used_at);
    }
    Arc::new(memory)
}

fn open_recovery(memory: &TestAdapter) {
    memory.gate.add_permits(1);
}

async fn recover(tier: &Tier) {
    tier.recover(&AtomicBool::new(false)).await;
}

#[tokio::test]
async fn strict_limit_deletes_victims_before_writing() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = strict(&memory, 3);
    for numbers in [0..3, 3..6, 6..7] {
        let stored = store_of(&tier, &bytes, "a", numbers).await;
        assert!(stored.iter().all(Result::is_ok));
    }
    assert_eq!(has(&memory, "a").len(), 3);
    assert_eq!(memory.peak_bytes("a"), 3 * SIZE);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn failed_delete_counts_for_its_tenant_only() {
    for kind in [ErrorKind::Unavailable, ErrorKind::Deadline] {
        let (memory, bytes) = (test_adapter(), Bytes::new());
        let tier = strict(&memory, 3);
        store_of(&tier, &bytes, "a", 0..3).await;
        memory.always(Operation::Delete, Some(Step::Fail(kind)));
        for number in 3..9 {
            let refused = store_of(&tier, &bytes, "a", [number]).await;
            assert_eq!(refused, [Err(ErrorKind::OverQuota)]);
            assert_accounting(&tier, &memory);
        }
        // No more than the first had to leave.
        assert_eq!((memory.bytes(), tier.usage().objects), (3 * SIZE, 2));
        let stored = store_of(&tier, &bytes, "b", 0..3).await;
        assert!(stored.iter().all(Result::is_ok));
        memory.always(Operation::Delete, None);
        assert!(store_of(&tier, &bytes, "a", [9]).await[0].is_ok());
        assert_eq!(memory.peak_bytes("a"), 3 * SIZE);
        assert_accounting(&tier, &memory);
    }
}

#[tokio::test]
async fn batch_over_strict_limit_is_stored_in_part() {
    let (memory, bytes) = (test_adapter(), Bytes::new());
    let tier = strict(&memory, 3);
    store_of(&tier, &bytes, "a", 0..2).await;
    memory.refuse(&key(0, "a"));
    memory.refuse(&key(1, "a"));
    let written = Ok(Stored::Written(SIZE));
    let over = Err(ErrorKind::OverQuota);
    assert_eq!(
        store_of(&tier, &bytes, "a", 2..5).await,
        [written, over, over]
    );
    assert_eq!(has(&memory, "a"), [0, 1, 2]);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn delete_by_name_counts_until_answered() {
    let memory = test_adapter();
    memory.always(Operation::Delete, Some(Step::Wait));
    let bytes = Bytes::new();
    let tier = strict(&memory, 1);
    store_of(&tier, &bytes, "a", [0]).await;
    let mut deleting = std::pin::pin!(tier.delete(vec![key(0, "a")], false));
    begin(deleting.as_mut()).await;
    assert_accounting(&tier, &memory);
    let mut storing = std::pin::pin!(store_of(&tier, &bytes, "a", [1]));
    begin(storing.as_mut()).await;
    assert_eq!(has(&memory, "a"), [0]);
    memory.gate.add_permits(10);
    let (deleted, stored) = tokio::join!(deleting, storing);
    assert_eq!(
        (deleted, stored[0].is_ok()),
        (vec![Ok(Deleted::Removed)], true)
    );
    assert_eq!(memory.peak_bytes("a"), SIZE);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn pending_delete_found_over_limit_is_still_deleted() {
    let (memory, bytes) = (shared_adapter(), Bytes::new());
    let tier = strict(&memory, 2);
    store_of(&tier, &bytes, "a", [0]).await;
    store_of(&tier, &bytes, "a", [1]).await;
    memory.always(Operation::Delete, Some(Step::Fail(ErrorKind::Unavailable)));
    // The first one leaves, and the index is filled by what is held.
    store_of(&tier, &bytes, "a", [2]).await;
    memory.put(&key(3, "a"), LEN, 0);
    let held = (find(&tier, "a", 1).await, find(&tier, "a", 3).await);
    assert_eq!(tier.usage().objects, 2);
    assert!(find(&tier, "a", 0).await.is_some());
    assert_accounting(&tier, &memory);
    memory.always(Operation::Delete, None);
    tier.evict().await;
    assert_eq!(has(&memory, "a"), [1, 3]);
    assert_accounting(&tier, &memory);
    drop(held);
}

#[tokio::test]
async fn strict_limit_holds_from_first_store_after_restart() {
    let (memory, bytes) = (with_old((0..3).map(|number| (number, "a"))), Bytes::new());
    let tier = strict(&memory, 3);
    let resume = async {
        tokio::task::yield_now().await;
        assert_eq!(memory.items(Operation::Store), 0);
        open_recovery(&memory);
    };
    let storing = store_of(&tier, &bytes, "a", 10..12);
    let (stored, (), ()) = tokio::join!(storing, recover(&tier), resume);
    assert!(stored.iter().all(Result::is_ok));
    assert_eq!(has(&memory, "a"), [2, 10, 11]);
    assert_eq!(memory.peak_bytes("a"), 3 * SIZE);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn no_eviction_before_recovery_knows_the_oldest() {
    for mode in [QuotaMode::Soft, QuotaMode::Strict] {
        let memory = with_old((0..8).map(|number| (number, "a")));
        let tier = tier_of(&memory, mode, Some(4), None);
        let uses = async {
            for number in 0..4 {
                assert!(find(&tier, "a", number).await.is_some());
            }
            // The limit sinks, and a pass is due.
            let limit = Some(3 * SIZE);
            tier.set_grant("a", Some(Grant { limit, reserved: 0 }));
            tier.evict_over_quota().await;
            assert_eq!(tier.usage().objects, 4);
            let limit = Some(4 * SIZE);
            tier.set_grant("a", Some(Grant { limit, reserved: 0 }));
            open_recovery(&memory);
        };
        tokio::join!(recover(&tier), uses);
        tier.evict_over_quota().await;
        match mode {
            QuotaMode::Strict => assert_eq!(has(&memory, "a"), [0, 1, 2, 3]),
            // Below the watermark.
            QuotaMode::Soft => assert_eq!(has(&memory, "a"), [1, 2, 3]),
        }
        assert_accounting(&tier, &memory);
    }
}

#[tokio::test]
async fn changed_default_limit_holds_from_then_on() {
    let (memory, bytes) = (shared_adapter(), Bytes::new());
    let tier = tier_of(&memory, QuotaMode::Strict, None, None);
    assert!(
        store_of(&tier, &bytes, "a", 0..5)
            .await
            .iter()
            .all(Result::is_ok)
    );
    tier.set_default_limit(Some(2 * SIZE));
    tier.evict_over_quota().await;
    assert_eq!(has(&memory, "a"), [3, 4]);
    store_of(&tier, &bytes, "b", 10..13).await;
    assert_eq!(has(&memory, "b").len(), 2);
    tier.set_default_limit(None);
    assert!(
        store_of(&tier, &bytes, "a", 5..9)
            .await
            .iter()
            .all(Result::is_ok)
    );
    assert_eq!(has(&memory, "a").len(), 6);
    assert_accounting(&tier, &memory);
}

#[tokio::test]
async fn recovery_over_capacity_keeps_reserved_shares() {
    let (a, b) = (
        (0..10).map(|number| (number, "a")),
        (0..20).map(|number| (number, "b")),
    );
    for old in [
        a.clone().chain(b.clone()).collect(),
        b.chain(a).collect::<Vec<_>>(),
    ] {
        let memory = with_old(old);
        open_recovery(&memory);
        let tier = tier_of(&memory, QuotaMode::Soft, None, Some(20));
        let (limit, reserved) = (None, 10 * SIZE);
        tier.set_grant("a", Some(Grant { limit, reserved }));
        recover(&tier).await;
        assert_eq!(has(&memory, "a"), (0..10).collect::<Vec<_>>());
        assert_eq!(has(&memory, "b"), (10..20).collect::<Vec<_>>());
        assert_accounting(&tier, &memory);
    }
}

#[tokio::test]
async fn recovery_over_strict_limit_keeps_the_youngest() {
    for policy in [EvictionKind::IsolatedLru, EvictionKind::Noop] {
        let memory = with_old((0..5).map(|number| (number, "a")));
        open_recovery(&memory);
        let mut config = strict(&memory, 2).config().clone();
        config.eviction = Some(TierEviction {
            policy,
            ..TierEviction::default()
        });
        let tier = Tier::new(Arc::clone(&memory) as _, config);
        recover(&tier).await;
        assert_eq!(has(&memory, "a"), [3, 4]);
        assert_accounting(&tier, &memory);
    }
}

#[tokio::test(start_paused = true)]
async fn objects_missing_in_failed_listing_are_not_older() {
    let memory = with_old([(0, "a"), (1, "a")]);
    open_recovery(&memory);
    memory.script(Operation::Recover, [Step::Fail(ErrorKind::Unavailable)]);
    let tier = tier_of(&memory, QuotaMode::Soft, None, Some(2));
    let later = async {
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        assert!(matches!(tier.recovery(), Recovery::Failed(_)));
        memory.put(&key(2, "a"), LEN, 3);
    };
    tokio::join!(recover(&tier), later);
    assert_eq!(has(&memory, "a"), [1, 2]);
    assert_accounting(&tier, &memory);
}

/// Random keys and failures.
struct Random(SplitMix64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.below(bound)
    }

    fn key(&mut self) -> kvtier_core::ObjectKey {
        let salt = ["a", "b"][self.below(2) as usize];
        key(self.below(12) as u8, salt)
    }

    fn failure(&mut self) -> Option<ErrorKind> {
        let failures = [Some(ErrorKind::Unavailable), Some(ErrorKind::Deadline)];
        failures.get(self.below(5) as usize).copied().flatten()
    }
}

#[tokio::test]
async fn strict_limit_holds_in_random_histories() {
    const LIMITS: [(&str, u64); 2] = [("a", 4), ("b", 2)];
    const CAPACITY: u64 = 5;
    let bytes = Bytes::new();
    let (mut written, mut refused) = (0, 0);
    for seed in 0..100 {
        let mut random = Random(SplitMix64::new(seed));
        let memory = Arc::new(adapter_with(Capabilities {
            list: true,
            shared: seed % 2 == 0,
            ..Capabilities::default()
        }));
        let start = async || {
            let all = (seed % 3 == 0).then_some(CAPACITY);
            let tier = tier_of(&memory, QuotaMode::Strict, None, all);
            for (salt, limit) in LIMITS {
                let limit = Some(limit * SIZE);
                tier.set_grant(salt, Some(Grant { limit, reserved: 0 }));
            }
            recover(&tier).await;
            tier
        };
        let mut tier = start().await;
        let mut held = Vec::new();
        for step in 0..80 {
            let what = random.below(16);
            match what {
                0..7 => {
                    let mut batch = || {
                        let many = 1 + random.below(3);
                        let keys = (0..many).map(|_| random.key());
                        keys.map(|key| bytes.to_store(&key, LEN)).collect()
                    };
                    let batches = (batch(), batch(), batch());
                    let (a, b, c) = tokio::join!(
                        tier.store(batches.0),
                        tier.store(batches.1),
                        tier.store(batches.2)
                    );
                    for result in a.into_iter().chain(b).chain(c) {
                        match result {
                            Ok(_) => written += 1,
                            Err(error) => {
                                refused += u64::from(error.kind() == ErrorKind::OverQuota);
                            }
                        }
                    }
                }
                7 | 8 => {
                    let keys: Vec<_> = (0..3).map(|_| random.key()).collect();
                    let objects = keys.iter().map(|key| spec(key, LEN)).collect();
                    held.extend(tier.lookup(objects).await.unwrap().into_iter().flatten());
                }
                9 => held.clear(),
                10 => {
                    let keys = vec![random.key(), random.key()];
                    tier.delete(keys, random.below(2) == 0).await;
                }
                11 => tier.evict().await,
                12 => tier.evict_over_quota().await,
                13 => memory.always(Operation::Delete, random.failure().map(Step::Fail)),
                14 => memory.always(
                    Operation::Store,
                    (random.below(4) == 0).then_some(Step::Late),
                ),
                _ => {
                    held.clear();
                    tier = start().await;
                }
            }
            for (salt, limit) in LIMITS {
                let peak = memory.peak_bytes(salt);
                assert!(
                    memory.bytes_of(salt).max(peak) <= limit * SIZE,
                    "seed {seed}, step {step}, kind {what}: {salt} has had {peak}"
                );
            }
            let is_bounded = seed % 3 == 0;
            assert!(
                !is_bounded || memory.bytes() <= CAPACITY * SIZE,
                "seed {seed}"
            );
            assert_eq!(tier.stats().accounting_errors, 0);
        }
        held.clear();
        memory.always(Operation::Delete, None);
        tier.evict().await;
        let usage = tier.usage().bytes_by_cache_salt;
        let counted: BTreeMap<_, _> = usage.iter().map(|(salt, b)| (&**salt, *b)).collect();
        for (salt, _) in LIMITS {
            let is = memory.bytes_of(salt);
            assert_eq!(
                counted.get(salt).copied().unwrap_or_default(),
                is,
                "seed {seed}"
            );
        }
    }
    assert!(written > 1000 && refused > 100, "{written}, {refused}");
}

#[tokio::test]
async fn strict_limit_holds_while_a_store_waits() {
    let memory = test_adapter();
    for operation in [Operation::Delete, Operation::Store] {
        memory.always(operation, Some(Step::Wait));
    }
    memory.gate.add_permits(1);
    let bytes = Bytes::new();
    let tier = tier_of(&memory, QuotaMode::Strict, Some(3), Some(3));
    store_of(&tier, &bytes, "a", 0..3).await;
    let used = || {
        let all = (tier.stats().used_bytes, tier.usage().total_bytes_used);
        let of_tenant = (
            tier.usages(&["a"])[0].1,
            tier.usage().bytes_by_cache_salt.get("a").copied(),
        );
        assert_eq!(all, (3 * SIZE, 3 * SIZE));
        assert_eq!(of_tenant, (3 * SIZE, Some(3 * SIZE)));
    };
    used();
    // Waits for the delete of an older one, then for its own write.
    let mut storing = std::pin::pin!(store_of(&tier, &bytes, "a", [3]));
    begin(storing.as_mut()).await;
    used();
    memory.gate.add_permits(1);
    begin(storing.as_mut()).await;
    used();
    memory.gate.add_permits(1);
    assert!(storing.await[0].is_ok());
    used();
}
