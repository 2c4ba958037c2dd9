use std::sync::Arc;

use kvtier_core::object_key::ObjectKey;
use serde_json::json;
use tokio::time::{Duration, Instant};

use super::*;
use crate::conformance::{self, Damage, Memory, Subject, content, object};
use crate::testing;
use crate::wrap::checksum::{ChecksumCache, Checksums};

/// A store, what was stored there, and the adapter on it.
struct OnStore(Arc<MemoryStore>, Arc<ChecksumCache>);

impl Subject for OnStore {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        let mock = Mock::new(self.0.clone(), 64.0 * GIB as f64);
        let checked = Checksums::new(Arc::new(mock), self.1.clone(), false);
        Box::pin(async move { Arc::new(checked) as _ })
    }

    fn damage(&self, key: &ObjectKey, how: Damage) -> bool {
        self.0.damage(key, how)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conforms() {
    conformance::run(|| {
        OnStore(
            Arc::new(MemoryStore::new(1 << 30)),
            Arc::new(ChecksumCache::new(1 << 10)),
        )
    })
    .await;
}

fn store_item(memory: &Memory, object: &ObjectSpec) -> StoreItem {
    StoreItem {
        object: object.clone(),
        from: memory.filled(&content(object)),
    }
}

#[tokio::test]
async fn item_over_capacity_is_refused_alone() {
    let memory = Memory::new(1 << 20);
    let mock = Mock::new(Arc::new(MemoryStore::new(10_000)), f64::INFINITY);
    let objects = [object(1, 6000), object(2, 6000), object(3, 4000)];
    let items = |which: &[usize]| {
        which
            .iter()
            .map(|&at| store_item(&memory, &objects[at]))
            .collect()
    };
    let stored = mock.store(items(&[0, 1, 2])).await;
    assert_eq!(stored[0], Ok(Stored::Written(6000)));
    let full = stored[1].as_ref().unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Full);
    assert_eq!(
        full.to_string(),
        "mock: 6000 bytes do not fit, 6000 of 10000 are used"
    );
    assert_eq!(stored[2], Ok(Stored::Written(4000)));
    assert_eq!(mock.free_bytes().await, Ok(Some(0)));
    mock.delete(vec![objects[0].key.clone()]).await[0]
        .clone()
        .unwrap();
    assert_eq!(mock.store(items(&[1])).await, [Ok(Stored::Written(6000))]);
}

#[tokio::test]
async fn object_of_another_length_replaces_the_old() {
    let memory = Memory::new(1 << 20);
    let store = Arc::new(MemoryStore::new(10_000));
    let mock = Mock::new(store.clone(), f64::INFINITY);
    for len in [8000, 9000, 100] {
        let stored = mock.store(vec![store_item(&memory, &object(1, len))]).await;
        assert_eq!(stored, [Ok(Stored::Written(len))]);
        assert_eq!(store.used(), (1, len));
    }
}

#[tokio::test(start_paused = true)]
async fn all_callers_share_the_speed_of_the_link() {
    let memory = Memory::new(1 << 20);
    let mock = Mock::new(Arc::new(MemoryStore::new(1 << 20)), 10_000.0);
    let began = Instant::now();
    let one = |number| mock.store(vec![store_item(&memory, &object(number, 10_000))]);
    tokio::join!(one(1), one(2), one(3));
    let took = began.elapsed();
    assert!(
        (Duration::from_secs(3)..Duration::from_millis(3010)).contains(&took),
        "{took:?}"
    );
}

#[tokio::test]
async fn opens_by_its_configuration() {
    let config = json!({"type": "mock", "max_size_gb": 0.5, "mock_bandwidth_gb": 2});
    let registry = testing::registry();
    let adapter = registry.open(&registry.parse(&config).unwrap()).unwrap();
    assert_eq!(adapter.free_bytes().await, Ok(Some(1 << 29)));
    for (key, value) in [
        ("max_size_gb", json!(0)),
        ("mock_bandwidth_gb", json!(null)),
    ] {
        let mut wrong = config.clone();
        wrong[key] = value;
        let line = registry.parse(&wrong).unwrap_err().to_string();
        assert!(
            line.starts_with(&format!("type \"mock\": key {key:?}")),
            "{line}"
        );
    }
}
