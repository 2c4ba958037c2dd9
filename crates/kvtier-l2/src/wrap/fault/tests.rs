use std::sync::Arc;

use serde_json::json;
use tokio::time::{Duration, Instant};

use super::*;
use crate::conformance::{self, Memory, content, object};
use crate::mock::{MemoryStore, Mock};
use crate::testing;

fn open_json(config: Value) -> Arc<dyn Adapter> {
    let registry = testing::registry();
    registry.open(&registry.parse(&config).unwrap()).unwrap()
}

fn around_mock() -> Value {
    json!({"type": "fault_inject", "inner": {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100}})
}

/// Returns the results of a lookup and a load of stored objects.
async fn there_and_loaded(
    adapter: &dyn Adapter,
    count: u64,
) -> (Vec<bool>, Vec<Option<ErrorKind>>) {
    let memory = Memory::new(1 << 20);
    let objects: Vec<_> = (0..count).map(|number| object(number, 100)).collect();
    let items = objects.iter().map(|object| StoreItem {
        object: object.clone(),
        from: memory.filled(&content(object)),
    });
    assert!(
        adapter
            .store(items.collect())
            .await
            .iter()
            .all(Result::is_ok)
    );
    let there = adapter.lookup(objects.clone()).await.unwrap();
    let items = objects.into_iter().map(|object| LoadItem {
        to: memory.buffer(object.len),
        object,
    });
    let loaded = adapter.load(items.collect()).await;
    let kinds = loaded
        .iter()
        .map(|result| result.as_ref().err().map(L2Error::kind));
    (there.iter().map(Option::is_some).collect(), kinds.collect())
}

#[tokio::test]
async fn pattern_fails_loads_only() {
    let mut config = around_mock();
    config["gap_indices"] = json!([2]);
    let adapter = open_json(config);
    let (there, loaded) = there_and_loaded(&*adapter, 4).await;
    assert_eq!(there, [true; 4]);
    assert_eq!(loaded, [None, None, Some(ErrorKind::Refused), None]);
    let status = adapter.status();
    assert_eq!(status["type"], "fault_inject");
    assert_eq!(status["fault_inject"]["inner"], "mock");
    assert_eq!(status["fault_inject"]["failed_loads"], 1);
}

#[tokio::test]
async fn failing_keys_depend_on_seed_only() {
    let mut failed = Vec::new();
    for seed in [1, 1, 2] {
        let mut config = around_mock();
        config["rate"] = json!(0.5);
        config["seed"] = json!(seed);
        let (_, loaded) = there_and_loaded(&*open_json(config), 64).await;
        failed.push(loaded.iter().map(Option::is_some).collect::<Vec<_>>());
    }
    assert_eq!(failed[0], failed[1]);
    assert_ne!(failed[0], failed[2]);
    let count = failed[0].iter().filter(|fails| **fails).count();
    assert!(
        (16..48).contains(&count),
        "{count} of 64 at a rate of one half"
    );
}

#[test]
fn inner_configuration_is_checked() {
    let mut config = around_mock();
    config["inner"]["max_size_gb"] = json!(-1);
    let line = testing::registry().parse(&config).unwrap_err().to_string();
    assert_eq!(
        line,
        r#"type "fault_inject": key "inner": type "mock": key "max_size_gb": -1 is not allowed; give a number above 0"#
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_faults_it_conforms() {
    conformance::run(|| {
        let store = Arc::new(MemoryStore::new(1 << 30));
        move || {
            let mock = Mock::new(store.clone(), 1e11);
            async move { Arc::new(Faulty::new(Arc::new(mock), Pattern::default(), Vec::new())) as _ }
        }
    })
    .await;
}

const UNAVAILABLE: Option<ErrorKind> = Some(ErrorKind::Unavailable);

/// An adapter as it is configured, without guards, so that nothing hides what it does.
fn bare(faults: Value) -> Arc<dyn Adapter> {
    let mut config = around_mock();
    config["faults"] = faults;
    let registry = testing::registry();
    registry
        .open_bare(&registry.parse(&config).unwrap())
        .unwrap()
}

fn stores(memory: &Memory, numbers: std::ops::Range<u64>) -> Vec<StoreItem> {
    let item = |number| {
        let object = object(number, 100);
        let from = memory.filled(&content(&object));
        StoreItem { object, from }
    };
    numbers.map(item).collect()
}

fn loads(memory: &Memory, numbers: std::ops::Range<u64>) -> Vec<LoadItem> {
    let item = |number| LoadItem {
        object: object(number, 100),
        to: memory.buffer(100),
    };
    numbers.map(item).collect()
}

fn kinds<T>(results: &[Result<T, L2Error>]) -> Vec<Option<ErrorKind>> {
    let kind = |result: &Result<T, L2Error>| result.as_ref().err().map(L2Error::kind);
    results.iter().map(kind).collect()
}

/// Returns the bytes loaded for object `number`, and the right ones.
async fn loaded_bytes(adapter: &dyn Adapter, memory: &Memory, number: u64) -> (Vec<u8>, Vec<u8>) {
    let items = loads(memory, number..number + 1);
    let to = items[0].to.clone();
    assert_eq!(kinds(&adapter.load(items).await), [None]);
    let mut bytes = Vec::new();
    to.read_into(0, 100, &mut bytes).unwrap();
    (bytes, content(&object(number, 100)))
}

fn flipped_bits(left: &[u8], right: &[u8]) -> u32 {
    let bytes = left.iter().zip(right);
    bytes.map(|(left, right)| (left ^ right).count_ones()).sum()
}

#[tokio::test]
async fn chosen_operations_fail_with_the_chosen_error() {
    let memory = Memory::new(1 << 20);
    let keys = || vec![object(0, 100).key, object(1, 100).key];
    let adapter = bare(json!([
        {"kind": "fail", "operation": "store", "error": "full", "limit": 1},
        {"kind": "fail", "operation": "delete", "error": "refused", "limit": 1},
        {"kind": "fail", "operation": "load", "error": "not_found", "after": 1, "limit": 1},
        {"kind": "fail", "operation": "lookup", "limit": 1},
        {"kind": "fail", "operation": "lookup", "error": "not_found", "limit": 1},
        {"kind": "fail", "operation": "list", "error": "busy", "limit": 2},
        {"kind": "fail", "operation": "free", "error": "deadline", "limit": 1},
    ]));
    let stored = adapter.store(stores(&memory, 0..2)).await;
    assert_eq!(kinds(&stored), [Some(ErrorKind::Full), None]);
    assert_eq!(
        stored[0].as_ref().unwrap_err().to_string(),
        "fault_inject: this store fails on purpose (full)"
    );
    let there = || adapter.lookup(vec![object(0, 100), object(1, 100)]);
    let error = there().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    // What failed was not stored; the next rule makes the other one a miss once it is asked for.
    adapter.store(stores(&memory, 0..1)).await[0]
        .clone()
        .unwrap();
    assert_eq!(there().await.unwrap(), [None, Some(100)]);
    assert_eq!(there().await.unwrap(), [Some(100), Some(100)]);
    let loaded = adapter.load(loads(&memory, 0..3)).await;
    let not_found = Some(ErrorKind::NotFound);
    assert_eq!(kinds(&loaded), [None, not_found, not_found]);
    assert_eq!(kinds(&adapter.load(loads(&memory, 1..2)).await), [None]);
    let deleted = adapter.delete(keys()).await;
    assert_eq!(kinds(&deleted), [Some(ErrorKind::Refused), None]);
    assert_eq!(adapter.delete(keys()).await, [Ok(true), Ok(false)]);
    assert_eq!(
        adapter.list(None, 1).await.unwrap_err().kind(),
        ErrorKind::Busy
    );
    let recovered = adapter.recover(&|_| true).await;
    assert_eq!(recovered.unwrap_err().kind(), ErrorKind::Busy);
    assert!(adapter.recover(&|_| true).await.is_ok());
    assert_eq!(
        adapter.free_bytes().await.unwrap_err().kind(),
        ErrorKind::Deadline
    );
    assert!(adapter.free_bytes().await.is_ok());
    let faults = adapter.status()["fault_inject"]["faults"].clone();
    assert_eq!(
        faults[0],
        json!({"kind": "fail", "operation": "store", "seen": 3, "faults": 1})
    );
    assert_eq!(faults[5]["faults"], 2);
}

#[tokio::test]
async fn any_operation_means_each_possible_one() {
    let memory = Memory::new(1 << 20);
    let adapter = bare(json!([{"kind": "fail", "error": "not_found"}]));
    let stored = adapter.store(stores(&memory, 0..1)).await;
    assert_eq!(kinds(&stored), [None]);
    assert_eq!(adapter.lookup(vec![object(0, 100)]).await.unwrap(), [None]);
    let loaded = adapter.load(loads(&memory, 0..1)).await;
    assert_eq!(kinds(&loaded), [Some(ErrorKind::NotFound)]);
    // That there is nothing to delete is no error.
    assert_eq!(adapter.delete(vec![object(0, 100).key]).await, [Ok(false)]);
    assert!(adapter.list(None, 1).await.is_ok());
    assert!(adapter.free_bytes().await.is_ok());
}

/// Returns the numbers of the objects that fail to load.
async fn failing(rule: Value, loads_of: u64, of: u64) -> Vec<u64> {
    let memory = Memory::new(4 << 20);
    let mut rule = rule;
    rule["kind"] = json!("fail");
    rule["operation"] = json!("load");
    let adapter = bare(json!([rule]));
    adapter.store(stores(&memory, 0..of)).await;
    let mut failed = Vec::new();
    for first in (0..of).step_by(loads_of as usize) {
        let loaded = adapter.load(loads(&memory, first..first + loads_of)).await;
        let each = (first..).zip(kinds(&loaded));
        failed.extend(each.filter(|(_, kind)| kind.is_some()).map(|(at, _)| at));
    }
    failed
}

#[tokio::test]
async fn faults_are_counted_over_calls() {
    let every = json!({"every": 3});
    assert_eq!(failing(every.clone(), 1, 9).await, [2, 5, 8]);
    assert_eq!(failing(every, 3, 9).await, [2, 5, 8]);
    let some = json!({"after": 2, "every": 2, "limit": 2});
    assert_eq!(failing(some, 5, 10).await, [3, 5]);
}

#[tokio::test]
async fn rate_is_reproducible() {
    let first = failing(json!({"rate": 0.25}), 4, 400).await;
    assert_eq!(failing(json!({"rate": 0.25}), 8, 400).await, first);
    assert!((70..130).contains(&first.len()), "{} of 400", first.len());
    let limited = failing(json!({"rate": 0.25, "limit": 10}), 4, 400).await;
    assert_eq!(limited, first[..10]);
}

#[tokio::test(start_paused = true)]
async fn delays_apply_before_or_after_the_call() {
    let memory = Memory::new(1 << 20);
    let adapter = bare(json!([
        {"kind": "delay", "operation": "load", "delay_ms": 1000, "object_delay_ms": 10},
        {"kind": "late", "operation": "store", "delay_ms": 500},
        {"kind": "delay", "operation": "free", "delay_ms": 3600000, "object_delay_ms": 3600000},
    ]));
    let began = Instant::now();
    let there = || adapter.lookup(vec![object(0, 100)]);
    // The store is done long before it is answered.
    let store = adapter.store(stores(&memory, 0..1));
    let (stored, found) = tokio::join!(store, async {
        sleep(Duration::from_millis(1)).await;
        there().await.unwrap()
    });
    assert_eq!((kinds(&stored), found), (vec![None], vec![Some(100)]));
    assert_eq!(began.elapsed().as_millis() / 10, 50);

    let began = Instant::now();
    let load = adapter.load(loads(&memory, 0..2));
    // The load comes too late for what is deleted meanwhile.
    let (loaded, _) = tokio::join!(load, adapter.delete(vec![object(0, 100).key]));
    assert_eq!(kinds(&loaded)[0], Some(ErrorKind::NotFound));
    assert_eq!(began.elapsed().as_millis() / 10, 102);

    let began = Instant::now();
    assert!(adapter.free_bytes().await.is_ok());
    assert_eq!(began.elapsed().as_secs(), 3600);
}

#[tokio::test(start_paused = true)]
async fn late_load_still_writes_its_bytes() {
    let memory = Memory::new(1 << 20);
    let mut config = around_mock();
    config["load_timeout_ms"] = json!(100);
    config["faults"] = json!([{"kind": "late", "operation": "load", "delay_ms": 1000}]);
    let adapter = open_json(config);
    adapter.store(stores(&memory, 0..1)).await;
    let items = loads(&memory, 0..1);
    let to = items[0].to.clone();
    let loaded = adapter.load(items).await;
    assert_eq!(kinds(&loaded), [Some(ErrorKind::Deadline)]);
    let mut bytes = Vec::new();
    to.read_into(0, 100, &mut bytes).unwrap();
    assert_eq!(bytes, content(&object(0, 100)));
}

#[tokio::test(start_paused = true)]
async fn stall_ends_with_caller_or_adapter() {
    let memory = Memory::new(1 << 20);
    let adapter = bare(json!([{"kind": "stall", "operation": "load", "limit": 2}]));
    adapter.store(stores(&memory, 0..1)).await;
    let year = Duration::from_secs(365 * 24 * 3600);
    let load = adapter.load(loads(&memory, 0..1));
    assert!(tokio::time::timeout(year, load).await.is_err());
    assert!(
        !memory.is_used(),
        "the buffers of a load that was cancelled"
    );
    let load = adapter.load(loads(&memory, 0..1));
    let (loaded, ()) = tokio::join!(load, async {
        sleep(Duration::from_secs(1)).await;
        adapter.close().await;
    });
    assert_eq!(kinds(&loaded), [UNAVAILABLE]);
}

#[tokio::test]
async fn load_corruption_keeps_the_stored_bytes() {
    let memory = Memory::new(1 << 20);
    let adapter = bare(json!([{"kind": "corrupt", "operation": "load", "limit": 1}]));
    adapter.store(stores(&memory, 0..1)).await;
    let (bytes, right) = loaded_bytes(&*adapter, &memory, 0).await;
    assert_eq!(flipped_bits(&bytes, &right), 1);
    let (bytes, right) = loaded_bytes(&*adapter, &memory, 0).await;
    assert_eq!(bytes, right);
}

#[tokio::test]
async fn store_corruption_keeps_l1() {
    let memory = Memory::new(1 << 20);
    let adapter = bare(json!([{"kind": "corrupt", "operation": "store", "limit": 1}]));
    let items = stores(&memory, 0..2);
    let from = items[0].from.clone();
    adapter.store(items).await;
    let mut bytes = Vec::new();
    from.read_into(0, 100, &mut bytes).unwrap();
    assert_eq!(bytes, content(&object(0, 100)));
    for (number, bits) in [(0, 1), (0, 1), (1, 0)] {
        let (bytes, right) = loaded_bytes(&*adapter, &memory, number).await;
        assert_eq!(flipped_bits(&bytes, &right), bits, "object {number}");
    }
}

#[tokio::test]
async fn objects_are_stored_too_short_and_too_long() {
    let memory = Memory::new(1 << 20);
    let adapter = bare(json!([
        {"kind": "short", "operation": "store", "limit": 1},
        {"kind": "long", "operation": "store", "limit": 1},
    ]));
    let stored = adapter.store(stores(&memory, 0..3)).await;
    let bytes: Vec<_> = stored
        .into_iter()
        .map(|stored| stored.unwrap().bytes())
        .collect();
    assert_eq!(bytes, [50, 101, 100]);
    let objects = (0..3).map(|number| object(number, 100)).collect();
    assert_eq!(
        adapter.lookup(objects).await.unwrap(),
        [None, None, Some(100)]
    );
    let corrupt = Some(ErrorKind::Corrupt);
    let loaded = adapter.load(loads(&memory, 0..3)).await;
    assert_eq!(kinds(&loaded), [corrupt, corrupt, None]);
}

#[tokio::test]
async fn short_load_has_wrong_second_half() {
    let memory = Memory::new(1 << 20);
    let adapter = bare(json!([{"kind": "short", "operation": "load"}]));
    adapter.store(stores(&memory, 0..1)).await;
    let (bytes, right) = loaded_bytes(&*adapter, &memory, 0).await;
    assert_eq!(bytes[..50], right[..50]);
    assert!(
        bytes[50..]
            .iter()
            .zip(&right[50..])
            .all(|(is, right)| is != right)
    );
}

#[test]
fn invalid_rule_is_refused_by_position_and_key() {
    let cases = [
        (
            json!(3),
            r#"key "faults": 3 is not allowed; give a list of objects"#,
        ),
        (json!([1]), "faults[0]: 1 is not an object; give one"),
        (
            json!([{}]),
            r#"faults[0]: key "kind" is missing; give fail, delay, late, stall, short, long or corrupt"#,
        ),
        (
            json!([{"kind": "stall"}, {"kind": "stall", "often": 1}]),
            r#"faults[1]: key "often" is unknown; known keys are kind, operation, error, delay_ms, object_delay_ms, after, every, rate, limit"#,
        ),
        (
            json!([{"kind": "fail", "every": 0}]),
            r#"faults[0]: key "every": 0 is not allowed; give a whole number from 1 on"#,
        ),
        (
            json!([{"kind": "delay"}]),
            r#"faults[0]: key "delay_ms": null is not allowed; give a time above 0 with kind "delay", here or as object_delay_ms"#,
        ),
        (
            json!([{"kind": "late", "delay_ms": 3600001}]),
            r#"faults[0]: key "delay_ms": 3600001 is not allowed; give a whole number from 0 to 3600000"#,
        ),
        (
            json!([{"kind": "stall", "delay_ms": 1}]),
            r#"faults[0]: key "delay_ms": 1 is not allowed; give none with kind "stall", only with delay and late"#,
        ),
        (
            json!([{"kind": "short", "error": "full"}]),
            r#"faults[0]: key "error": "full" is not allowed; give none with kind "short", only with fail"#,
        ),
        (
            json!([{"kind": "long", "operation": "load"}]),
            r#"faults[0]: key "operation": "load" is not allowed; give any or store with kind "long""#,
        ),
        (
            json!([{"kind": "fail", "error": "not_found", "operation": "store"}]),
            r#"faults[0]: key "operation": "store" is not allowed; give any, lookup, load or delete with kind "fail" and error "not_found""#,
        ),
    ];
    for (faults, expected) in cases {
        let mut config = around_mock();
        config["faults"] = faults;
        let line = testing::registry().parse(&config).unwrap_err().to_string();
        assert_eq!(line, format!("type \"fault_inject\": {expected}"));
    }
}
