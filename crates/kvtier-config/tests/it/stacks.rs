//! Adapters as they are opened, with transformations and checksums, over a directory.

use std::sync::Arc;

use kvtier_l2::conformance::{self, Memory, kinds, object, store};
use kvtier_l2::{Adapter, ErrorKind, LoadItem, ObjectSpec, probe};
use serde_json::{Value, json};

fn open(config: &Value) -> Arc<dyn Adapter> {
    let registry = kvtier_config::adapters::registry();
    registry.open(&registry.parse(config).unwrap()).unwrap()
}

/// Runs the suite with an `fs` tier.
async fn fs_conforms(serde: Value) {
    conformance::run(|| {
        let directory = Arc::new(tempfile::tempdir().unwrap());
        let serde = serde.clone();
        move || {
            let directory = Arc::clone(&directory);
            let config = json!({"type": "fs", "base_path": directory.path(), "serde": serde});
            async move {
                let _directory = &directory;
                open(&config)
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fs_with_aesgcm_conforms() {
    let keys = tempfile::tempdir().unwrap();
    let path = keys.path().join("a");
    std::fs::write(&path, "a master key of 32 or so bytes, as text").unwrap();
    fs_conforms(json!({"type": "aesgcm", "master_key_path": path, "frame": "bound"})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fs_with_compress_conforms() {
    fs_conforms(json!({"type": "compress"})).await;
}

/// Loads objects; whether each was verified, or its error.
async fn verified(
    adapter: &dyn Adapter,
    memory: &Memory,
    objects: &[ObjectSpec],
) -> Vec<Result<bool, ErrorKind>> {
    let item = |object: &ObjectSpec| LoadItem {
        object: object.clone(),
        to: memory.buffer(object.len),
    };
    let loaded = adapter.load(objects.iter().map(item).collect()).await;
    let each = loaded.into_iter();
    each.map(|result| match result {
        Ok(loaded) => Ok(loaded.verified),
        Err(error) => Err(error.kind()),
    })
    .collect()
}

#[tokio::test]
async fn verifying_adapter_is_trusted_unless_faults_injected() {
    let directory = tempfile::tempdir().unwrap();
    let fs = json!({"type": "fs", "base_path": directory.path()});
    let plain = open(&fs);
    assert!(plain.status().get("checksums").is_none());
    let harmless = json!([{"kind": "fail"}]);
    let none = open(&json!({"type": "fault_inject", "inner": fs, "faults": harmless}));
    assert!(none.status().get("checksums").is_none());

    let faults = json!([{"kind": "corrupt", "limit": 2}]);
    let adapter = open(&json!({"type": "fault_inject", "inner": fs, "faults": faults}));
    let memory = Memory::new(1 << 20);
    let objects = [object(0, 100)];
    for expected in [Err(ErrorKind::Corrupt), Ok(true)] {
        let stored = store(&*adapter, &memory, &objects).await;
        assert_eq!(kinds(stored), [None]);
        assert_eq!(verified(&*adapter, &memory, &objects).await, [expected]);
    }
}

async fn probed(config: Value) -> Result<bool, String> {
    let adapter = open(&config);
    let probed = probe(&*adapter).await;
    adapter.close().await;
    probed
        .map(|probed| probed.was_written)
        .map_err(|error| error.to_string())
}

#[tokio::test]
async fn trial_leaves_nothing_and_names_the_step_that_fails() {
    let directory = tempfile::tempdir().unwrap();
    let fs = json!({"type": "fs", "base_path": directory.path()});
    assert_eq!(probed(fs.clone()).await, Ok(true));
    let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
    assert!(
        left.iter().flatten().all(|entry| entry.path().is_dir()),
        "{left:?}"
    );
    let read_only = json!({"type": "fs", "base_path": directory.path(), "read_only": true});
    assert_eq!(probed(read_only).await, Ok(false));
    for (operation, kind) in [("store", "fail"), ("lookup", "fail"), ("load", "corrupt")] {
        let faults = [json!({"kind": kind, "operation": operation})];
        let faulty = json!({"type": "fault_inject", "inner": fs, "faults": faults, "retries": 0});
        let told = probed(faulty).await.unwrap_err();
        assert!(told.starts_with(operation), "{told}");
    }
}
