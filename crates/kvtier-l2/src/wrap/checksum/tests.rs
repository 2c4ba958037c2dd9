use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::conformance::{Damage, Memory, content, object};
use crate::mock::{MemoryStore, Mock};
use crate::testing;
use crate::wrap::fault::{Corruption, Fault, Faulty, Operation, Pattern, Rule, Wait};

const CORRUPT: Option<ErrorKind> = Some(ErrorKind::Corrupt);
const NOT_FOUND: Option<ErrorKind> = Some(ErrorKind::NotFound);

struct TestContext {
    memory: Memory,
    store: Arc<MemoryStore>,
}

impl TestContext {
    fn new() -> Self {
        Self {
            memory: Memory::new(1 << 20),
            store: Arc::new(MemoryStore::new(1 << 20)),
        }
    }

    fn mock(&self) -> Arc<dyn Adapter> {
        Arc::new(Mock::new(self.store.clone(), 1e11))
    }

    fn open(&self, bound: usize, required: bool) -> Checksums {
        Checksums::new(self.mock(), Arc::new(ChecksumCache::new(bound)), required)
    }

    async fn store(&self, to: &dyn Adapter, numbers: std::ops::Range<u64>) -> Vec<Stored> {
        let item = |number| {
            let object = object(number, 100);
            let from = self.memory.filled(&content(&object));
            StoreItem { object, from }
        };
        let stored = to.store(numbers.map(item).collect()).await;
        stored.into_iter().map(Result::unwrap).collect()
    }

    /// How each load ended. What is `Ok` has the right bytes.
    async fn load(
        &self,
        from: &dyn Adapter,
        objects: &[ObjectSpec],
    ) -> Vec<Result<Loaded, L2Error>> {
        let item = |object: &ObjectSpec| LoadItem {
            object: object.clone(),
            to: self.memory.buffer(object.len),
        };
        let items: Vec<_> = objects.iter().map(item).collect();
        let buffers: Vec<_> = items.iter().map(|item| item.to.clone()).collect();
        let results = from.load(items).await;
        for ((object, to), result) in objects.iter().zip(buffers).zip(&results) {
            let mut bytes = Vec::new();
            to.read_into(0, object.len, &mut bytes).unwrap();
            assert!(result.is_err() || bytes == content(object), "{object:?}");
        }
        results
    }
}

fn objects(numbers: std::ops::Range<u64>) -> Vec<ObjectSpec> {
    numbers.map(|number| object(number, 100)).collect()
}

fn kinds<T>(results: &[Result<T, L2Error>]) -> Vec<Option<ErrorKind>> {
    let kind = |result: &Result<T, L2Error>| result.as_ref().err().map(L2Error::kind);
    results.iter().map(kind).collect()
}

fn verified(results: &[Result<Loaded, L2Error>]) -> Vec<bool> {
    let loaded = results.iter().map(|result| result.as_ref().unwrap());
    loaded.map(|loaded| loaded.verified).collect()
}

#[tokio::test]
async fn damage_is_found_counted_and_deleted() {
    let context = TestContext::new();
    let adapter = context.open(100, false);
    let objects = objects(0..3);
    context.store(&adapter, 0..3).await;
    assert_eq!(verified(&context.load(&adapter, &objects).await), [true; 3]);
    assert!(context.store.damage(&objects[1].key, Damage::Flip));
    let loaded = context.load(&adapter, &objects).await;
    assert_eq!(kinds(&loaded), [None, CORRUPT, None]);
    let line = loaded[1].as_ref().unwrap_err().to_string();
    assert!(line.ends_with("has other bytes than were stored"), "{line}");
    assert_eq!(context.store.used(), (2, 200));
    assert_eq!(
        adapter.status()["checksums"],
        json!({
            "remembered": 2, "bound": 100,
            "verified_loads": 5, "unverified_loads": 0, "corrupt_loads": 1,
        })
    );
    context.store(&adapter, 1..2).await;
    assert_eq!(verified(&context.load(&adapter, &objects).await), [true; 3]);
}

#[tokio::test]
async fn unknown_object_is_unverified_or_replaced() {
    let context = TestContext::new();
    context.store(&*context.mock(), 0..2).await;
    let trusting = context.open(100, false);
    let loaded = context.load(&trusting, &objects(0..1)).await;
    assert_eq!(verified(&loaded), [false]);
    assert_eq!(trusting.status()["checksums"]["unverified_loads"], 1);
    // The bytes that are there need not be those that were to be stored.
    context.store(&trusting, 0..1).await;
    assert_eq!(
        verified(&context.load(&trusting, &objects(0..1)).await),
        [false]
    );

    let strict = context.open(100, true);
    assert_eq!(strict.lookup(objects(0..1)).await, Ok(vec![None]));
    assert_eq!(
        kinds(&context.load(&strict, &objects(0..1)).await),
        [NOT_FOUND]
    );
    assert_eq!(context.store(&strict, 0..1).await, [Stored::Written(100)]);
    assert_eq!(
        context.store(&strict, 0..1).await,
        [Stored::AlreadyThere(100)]
    );
    assert_eq!(strict.lookup(objects(0..1)).await, Ok(vec![Some(100)]));
    assert_eq!(
        verified(&context.load(&strict, &objects(0..1)).await),
        [true]
    );
}

#[tokio::test]
async fn object_already_there_keeps_its_checksum() {
    let context = TestContext::new();
    let adapter = context.open(100, false);
    context.store(&adapter, 0..1).await;
    // What an engine computes again has other bytes.
    let other = StoreItem {
        object: object(0, 100),
        from: context.memory.filled(&[7; 100]),
    };
    assert_eq!(
        adapter.store(vec![other]).await,
        [Ok(Stored::AlreadyThere(100))]
    );
    assert_eq!(
        verified(&context.load(&adapter, &objects(0..1)).await),
        [true]
    );
}

#[tokio::test]
async fn corrupt_object_that_cannot_be_deleted_never_passes() {
    let context = TestContext::new();
    let no_delete = Rule::new(Some(Operation::Delete), Fault::Fail(ErrorKind::Unavailable));
    let faulty = Faulty::new(context.mock(), Pattern::default(), vec![no_delete]);
    let adapter = Checksums::new(Arc::new(faulty), Arc::new(ChecksumCache::new(100)), false);
    context.store(&adapter, 0..1).await;
    context.store.damage(&object(0, 100).key, Damage::Flip);
    for _ in 0..3 {
        assert_eq!(
            kinds(&context.load(&adapter, &objects(0..1)).await),
            [CORRUPT]
        );
        assert_eq!(
            context.store(&adapter, 0..1).await,
            [Stored::AlreadyThere(100)]
        );
    }
}

/// A mock with these rules between it and its checksums.
fn with_rules(context: &TestContext, rules: Vec<Rule>) -> Checksums {
    let faulty = Faulty::new(context.mock(), Pattern::default(), rules);
    Checksums::new(Arc::new(faulty), Arc::new(ChecksumCache::new(100)), false)
}

/// Polls `store` for 100 ms of the paused clock, in which it gets no answer.
async fn run_unanswered<T>(store: std::pin::Pin<&mut impl Future<Output = T>>) {
    let time = std::time::Duration::from_millis(100);
    assert!(tokio::time::timeout(time, store).await.is_err());
}

const LATE: Fault = Fault::Late(Wait {
    call: std::time::Duration::from_secs(1),
    object: std::time::Duration::ZERO,
});

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test(start_paused = true)]
async fn unanswered_store_corrupt_load_is_a_miss() {
    let context = TestContext::new();
    let late = Rule::new(Some(Operation::Store), LATE);
    let corrupt = Rule::new(
        Some(Operation::Load),
        Fault::Corruption(Corruption::Corrupt),
    );
    let adapter = with_rules(&context, vec![late, corrupt]);
    let mut store = std::pin::pin!(context.store(&adapter, 0..1));
    run_unanswered(store.as_mut()).await;
    assert_eq!(
        context.store.used(),
        (1, 100),
        "the backend has it, unconfirmed"
    );
    assert_eq!(
        kinds(&context.load(&adapter, &objects(0..1)).await),
        [NOT_FOUND]
    );
    assert_eq!(store.await, [Stored::Written(100)]);
    assert_eq!(
        kinds(&context.load(&adapter, &objects(0..1)).await),
        [CORRUPT]
    );
}

#[tokio::test(start_paused = true)]
async fn unanswered_store_right_load_is_verified() {
    let context = TestContext::new();
    let late = Rule::new(Some(Operation::Store), LATE);
    let adapter = with_rules(&context, vec![late]);
    let mut store = std::pin::pin!(context.store(&adapter, 0..1));
    run_unanswered(store.as_mut()).await;
    assert_eq!(
        verified(&context.load(&adapter, &objects(0..1)).await),
        [true]
    );
    store.await;
}

#[tokio::test(start_paused = true)]
async fn abandoned_store_keeps_its_checksum() {
    let context = TestContext::new();
    let stall = Rule::new(Some(Operation::Store), Fault::Stall);
    let adapter = with_rules(&context, vec![stall]);
    run_unanswered(std::pin::pin!(context.store(&adapter, 0..1))).await;
    // It may be carried out later, and wrongly.
    context.store(&*context.mock(), 0..1).await;
    assert_eq!(
        verified(&context.load(&adapter, &objects(0..1)).await),
        [true]
    );
    context.store.damage(&object(0, 100).key, Damage::Flip);
    assert_eq!(
        kinds(&context.load(&adapter, &objects(0..1)).await),
        [CORRUPT]
    );
}

#[tokio::test]
async fn refused_store_keeps_the_earlier_checksum() {
    let context = TestContext::new();
    let full = Rule::new(Some(Operation::Store), Fault::Fail(ErrorKind::Full));
    let adapter = with_rules(&context, vec![Rule { after: 1, ..full }]);
    context.store(&adapter, 0..1).await;
    for number in [0, 1] {
        let other = StoreItem {
            object: object(number, 100),
            from: context.memory.filled(&[7; 100]),
        };
        let stored = adapter.store(vec![other]).await;
        assert_eq!(kinds(&stored), [Some(ErrorKind::Full)]);
    }
    assert_eq!(
        verified(&context.load(&adapter, &objects(0..1)).await),
        [true]
    );
    // Of the second one nothing is known, as before.
    context.store(&*context.mock(), 1..2).await;
    assert_eq!(
        verified(&context.load(&adapter, &objects(1..2)).await),
        [false]
    );
}

#[tokio::test]
async fn deleted_objects_are_forgotten() {
    let context = TestContext::new();
    let sums = Arc::new(ChecksumCache::new(100));
    let adapter = Checksums::new(context.mock(), sums.clone(), false);
    context.store(&adapter, 0..3).await;
    adapter.delete(vec![object(1, 100).key]).await;
    assert_eq!(sums.len(), 2);
}

#[test]
fn checksum_cache_evicts_the_least_recently_used() {
    let sums = Arc::new(ChecksumCache::new(10));
    let store = |sums: &Arc<ChecksumCache>, all: &[Known]| {
        sums.start(all.to_vec())
            .finish(all.iter().map(|_| ChecksumVerdict::Stored));
    };
    let known = |keys: &[u128]| -> Vec<_> {
        let expected = sums.get(keys).into_iter();
        expected.map(|expected| expected.known).collect()
    };
    for key in 0..1000 {
        store(&sums, &[(key, key + 1)]);
        assert_eq!(known(&[0]), [Some(1)], "is asked for all the time");
        assert!(sums.len() <= 10);
    }
    assert_eq!(known(&[999, 998, 1]), [Some(1000), Some(999), None]);
    // One that became another is not forgotten with its old value.
    store(&sums, &[(998, 5)]);
    sums.forget([(999, 1000), (998, 999)]);
    assert_eq!(known(&[999, 998]), [None, Some(5)]);

    let none = Arc::new(ChecksumCache::new(0));
    let begun = none.start(vec![(1, 1)]);
    assert_eq!(none.get(&[1]), [Expected::default()]);
    begun.finish([ChecksumVerdict::Stored]);
    assert!(none.is_empty());
}

#[test]
fn concurrent_stores_of_one_key_are_allowed() {
    let sums = Arc::new(ChecksumCache::new(10));
    let (one, two) = (sums.start(vec![(1, 7), (1, 8)]), sums.start(vec![(1, 8)]));
    one.finish([ChecksumVerdict::Unchanged, ChecksumVerdict::Unchanged]);
    let expected = &sums.get(&[1])[0];
    assert!(expected.allows(8) && !expected.allows(7));
    two.finish([ChecksumVerdict::Unchanged]);
    assert!(sums.get(&[1])[0].is_empty());
}

/// How loads end with `faults` between the checksums and a mock. None of them returns wrong bytes.
async fn loads_through(faults: serde_json::Value, count: u64) -> Vec<Option<ErrorKind>> {
    let context = TestContext::new();
    let config = json!({
        "type": "fault_inject",
        "inner": {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100},
        "faults": faults,
    });
    let registry = testing::registry();
    let adapter = registry.open(&registry.parse(&config).unwrap()).unwrap();
    context.store(&*adapter, 0..count).await;
    kinds(&context.load(&*adapter, &objects(0..count)).await)
}

#[tokio::test]
async fn wrong_bytes_from_below_never_pass() {
    let loaded = loads_through(
        json!([{"kind": "corrupt", "operation": "load", "every": 2}]),
        4,
    );
    assert_eq!(loaded.await, [None, CORRUPT, None, CORRUPT]);
    let loaded = loads_through(
        json!([{"kind": "short", "operation": "load", "every": 2}]),
        4,
    );
    assert_eq!(loaded.await, [None, CORRUPT, None, CORRUPT]);
    for kind in ["corrupt", "short", "long"] {
        let faults = json!([{"kind": kind, "operation": "store", "every": 3}]);
        let loaded = loads_through(faults, 4).await;
        assert_eq!(loaded, [None, None, CORRUPT, None], "{kind}");
    }
}

#[test]
fn require_checksum_needs_checksums() {
    let config = json!({
        "type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1,
        "require_checksum": true, "checksums": 0,
    });
    let line = testing::registry().parse(&config).unwrap_err().to_string();
    assert_eq!(
        line,
        r#"type "mock": key "checksums": 0 is not allowed; give at least 1 with require_checksum"#
    );
}
