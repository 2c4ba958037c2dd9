use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::conformance::{self, Memory, content, object};
use crate::mock::{Mock, Shelf};

fn open_json(config: Value) -> Arc<dyn Adapter> {
    let registry = Registry::built_in();
    registry.open(&registry.parse(&config).unwrap()).unwrap()
}

fn around_mock() -> Value {
    json!({"type": "fault_inject", "inner": {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100}})
}

/// What a lookup and a load of some objects say, once they were stored.
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
async fn faults_are_only_seen_by_loads() {
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
async fn the_same_keys_fail_each_time_and_others_by_another_seed() {
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
fn the_inner_adapter_is_checked_too() {
    let mut config = around_mock();
    config["inner"]["max_size_gb"] = json!(-1);
    let line = Registry::built_in().parse(&config).unwrap_err().to_string();
    assert_eq!(
        line,
        r#"type "fault_inject": key "inner": type "mock": key "max_size_gb": -1 is not allowed; give a number above 0"#
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_faults_it_conforms() {
    conformance::run(|| {
        let shelf = Arc::new(Shelf::new(1 << 30));
        move || {
            let mock = Mock::new(shelf.clone(), 1e11);
            async move { Arc::new(Faulty::new(Arc::new(mock), Pattern::default())) as _ }
        }
    })
    .await;
}
