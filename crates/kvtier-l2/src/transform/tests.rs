//! Transformed adapters as a tier uses them.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use super::scratch::Scratch;
use super::*;
use crate::conformance::{self, Damage, Memory, Subject, content, object};
use crate::error::ErrorKind;
use crate::mock::{MemoryStore, Mock};
use crate::object::{LoadItem, StoreItem};
use crate::{BoxFuture, Loaded, Stored};
use crate::{sample, testing};
use kvtier_core::object_key::ObjectKey;

fn key_file(directory: &Path, name: &str) -> String {
    let path = directory.join(name);
    std::fs::write(&path, format!("master key {name} of 32 or so bytes")).unwrap();
    path.display().to_string()
}

fn aesgcm(path: &str, frame: &str) -> Value {
    json!({"type": "aesgcm", "master_key_path": path, "frame": frame})
}

fn configs(serde: &Value) -> Vec<SerdeConfig> {
    SerdeConfig::parse_all("a tier", serde).unwrap()
}

/// A store in memory with a transformation, and its context.
struct Context {
    memory: Memory,
    store: Arc<MemoryStore>,
    directory: tempfile::TempDir,
}

impl Context {
    fn new() -> Self {
        Self {
            memory: Memory::new(32 << 20),
            store: Arc::new(MemoryStore::new(64 << 20)),
            directory: tempfile::tempdir().unwrap(),
        }
    }

    fn key(&self, name: &str) -> String {
        key_file(self.directory.path(), name)
    }

    fn open(&self, serde: &Value) -> Arc<dyn Adapter> {
        let mock = Arc::new(Mock::new(self.store.clone(), 1e11));
        transformed(mock, &configs(serde)).unwrap()
    }

    async fn store(
        &self,
        to: &dyn Adapter,
        objects: &[ObjectSpec],
    ) -> Vec<Result<Stored, ErrorKind>> {
        let item = |object: &ObjectSpec| StoreItem {
            object: object.clone(),
            from: self.memory.filled(&content(object)),
        };
        let stored = to.store(objects.iter().map(item).collect()).await;
        let stored = stored.into_iter();
        stored
            .map(|result| result.map_err(|error| error.kind()))
            .collect()
    }

    /// How each load ended. What is `Ok` has the right bytes.
    async fn load(
        &self,
        from: &dyn Adapter,
        objects: &[ObjectSpec],
    ) -> Vec<Result<bool, ErrorKind>> {
        let item = |object: &ObjectSpec| LoadItem {
            object: object.clone(),
            to: self.memory.buffer(object.len),
        };
        let items: Vec<_> = objects.iter().map(item).collect();
        let buffers: Vec<_> = items.iter().map(|item| item.to.clone()).collect();
        let loaded = from.load(items).await;
        let each = loaded.into_iter().zip(objects).zip(buffers);
        each.map(|((result, object), buffer)| {
            let mut bytes = Vec::new();
            buffer.read_into(0, object.len, &mut bytes).unwrap();
            assert!(result.is_err() || bytes == content(object), "{object:?}");
            result
                .map(|loaded: Loaded| loaded.verified)
                .map_err(|error| error.kind())
        })
        .collect()
    }
}

/// A memory store for the conformance suite.
struct InMemory {
    context: Context,
    serde: Value,
}

impl Subject for InMemory {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        Box::pin(async { self.context.open(&self.serde) })
    }

    fn damage(&self, key: &ObjectKey, how: Damage) -> bool {
        self.context.store.damage(key, how)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mock_with_aesgcm_conforms() {
    conformance::run(|| {
        let context = Context::new();
        let serde = aesgcm(&context.key("a"), "lmcache");
        InMemory { context, serde }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mock_with_two_serdes_and_little_scratch_conforms() {
    conformance::run(|| {
        let context = Context::new();
        let path = context.key("a");
        let mut inner = aesgcm(&path, "bound");
        inner["scratch_gb"] = json!(0.001);
        inner["max_workers"] = json!(3);
        let mut outer = aesgcm(&path, "lmcache");
        outer["scratch_gb"] = json!(0.0001);
        let serde = json!([outer, inner]);
        InMemory { context, serde }
    })
    .await;
}

#[tokio::test]
async fn values_of_a_type_that_fp8_does_not_know_are_misses() {
    let context = Context::new();
    let adapter = context.open(&json!([{"type": "fp8"}, aesgcm(&context.key("a"), "lmcache")]));
    let known = object(1, 4000);
    let unknown = ObjectSpec {
        layout: Element::in_layout(known.layout, None),
        ..known.clone()
    };
    let half = ObjectSpec {
        layout: Element::in_layout(known.layout, Some(Element::Float16)),
        ..known.clone()
    };
    let both = [unknown.clone(), known.clone()];
    let stored = context.store(&*adapter, &both).await;
    assert_eq!(stored, [Err(ErrorKind::Refused), Ok(Stored::Written(2029))]);
    assert_eq!(adapter.status()["serde"][0]["store_failures"], 1);
    let found = adapter.lookup(vec![unknown.clone(), known.clone(), half.clone()]);
    assert_eq!(found.await.unwrap(), [None, Some(2029), None]);
    let loaded = context.load(&*adapter, &[unknown, known, half]).await;
    assert_eq!(loaded[..2], [Err(ErrorKind::Refused), Ok(false)]);
    assert!(loaded[2].is_err(), "other values: {loaded:?}");
}

#[tokio::test]
async fn list_is_applied_in_its_order() {
    let context = Context::new();
    let aesgcm = aesgcm(&context.key("a"), "bound");
    let one = [object(1, 100_000)];
    let adapter = context.open(&json!([{"type": "compress"}, aesgcm]));
    context.store(&*adapter, &one).await.remove(0).unwrap();
    assert_eq!(context.store.used(), (1, 77_401 + 25 + 2 * 16));
    assert_eq!(context.load(&*adapter, &one).await, [Ok(true)]);
    let types = |at: usize| adapter.status()["serde"][at]["type"].clone();
    assert_eq!([types(0), types(1)], ["compress", "aesgcm"]);
    // What is encrypted, or was converted, has no values any more.
    for kind in ["compress", "fp8"] {
        for first in [
            aesgcm.clone(),
            json!({"type": "compress"}),
            json!({"type": "fp8"}),
        ] {
            let serde = json!([first, {"type": kind}]);
            let line = SerdeConfig::parse_all("a tier", &serde).unwrap_err();
            let expected = format!("a tier: serde: {kind} behind another type finds no values");
            assert!(line.to_string().starts_with(&expected), "{line}");
        }
    }
}

#[tokio::test]
async fn incompressible_object_is_not_stored() {
    let context = Context::new();
    let adapter = context.open(&json!({"type": "compress"}));
    let one = object(1, 100_000);
    let noise = kvtier_core::random::SplitMix64::new(1).bytes(100_000);
    let from = context.memory.filled(&noise);
    let stored = adapter
        .store(vec![StoreItem {
            object: one.clone(),
            from,
        }])
        .await;
    assert_eq!(stored[0].as_ref().unwrap_err().kind(), ErrorKind::Refused);
    assert_eq!(context.store.used(), (0, 0));
    assert_eq!(adapter.status()["serde"][0]["store_failures"], 1);
    context.store(&*adapter, &[one]).await.remove(0).unwrap();
    assert_eq!(context.store.used(), (1, 77_401));
    assert!(adapter.status()["serde"][0]["ratio"].as_f64().unwrap() < 0.775);
}

#[tokio::test]
async fn lengths_are_those_of_the_backend() {
    let context = Context::new();
    let adapter = context.open(&aesgcm(&context.key("a"), "bound"));
    let objects = [object(1, 1000), object(2, 50_000)];
    let stored = context.store(&*adapter, &objects).await;
    assert_eq!(
        stored,
        [Ok(Stored::Written(1041)), Ok(Stored::Written(50_041))]
    );
    assert_eq!(context.store.used(), (2, 51_082));
    let found = adapter.lookup(objects.to_vec()).await.unwrap();
    assert_eq!(found, [Some(1041), Some(50_041)]);
    assert_eq!(adapter.size_of(1000), 1041);
    assert_eq!(adapter.size_of(u64::MAX), u64::MAX);
    let too_long = ObjectSpec {
        len: u64::MAX - 3,
        ..object(1, 0)
    };
    let found = adapter.lookup(vec![too_long, objects[1].clone()]).await;
    assert_eq!(found.unwrap(), [None, Some(50_041)]);
    let page = adapter.list(None, 10).await.unwrap();
    assert_eq!(
        page.objects.iter().map(|listed| listed.bytes).sum::<u64>(),
        51_082
    );
}

#[tokio::test]
async fn status_shows_ratio_time_and_failures() {
    let context = Context::new();
    let path = context.key("a");
    let adapter = context.open(&json!([aesgcm(&path, "lmcache"), aesgcm(&path, "bound")]));
    let one = [object(1, 10_000)];
    context.store(&*adapter, &one).await.remove(0).unwrap();
    assert_eq!(context.load(&*adapter, &one).await, [Ok(true)]);
    context.store.damage(&one[0].key, Damage::Flip);
    assert_eq!(
        context.load(&*adapter, &one).await,
        [Err(ErrorKind::Corrupt)]
    );
    let status = adapter.status();
    let (outer, inner) = (&status["serde"][0], &status["serde"][1]);
    assert_eq!(
        (&outer["frame"], &inner["frame"]),
        (&json!("lmcache"), &json!("bound"))
    );
    assert_eq!(
        (&outer["type"], &outer["aes_bits"]),
        (&json!("aesgcm"), &json!(128))
    );
    assert_eq!(
        (&outer["stored_bytes"], &outer["transformed_bytes"]),
        (&json!(10_000), &json!(10_029))
    );
    assert_eq!(
        (&inner["stored_bytes"], &inner["transformed_bytes"]),
        (&json!(10_029), &json!(10_070))
    );
    assert_eq!(outer["ratio"], json!(1.0029));
    assert_eq!(
        (&inner["corrupt_loads"], &outer["corrupt_loads"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(inner["loaded_objects"], 1);
    assert_eq!(inner["scratch_used_bytes"], 0);
    assert!(inner["cpu_seconds"].as_f64().unwrap() > 0.0, "{inner}");
}

#[tokio::test]
async fn moved_object_fails_only_if_bound() {
    for (frame, expected) in [("lmcache", Ok(false)), ("bound", Err(ErrorKind::Corrupt))] {
        let context = Context::new();
        let adapter = context.open(&aesgcm(&context.key("a"), frame));
        let objects = [object(1, 5000), object(2, 5000)];
        for result in context.store(&*adapter, &objects).await {
            result.unwrap();
        }
        // The bytes of one below the key of the other.
        let bare = Mock::new(context.store.clone(), 1e11);
        let layout = stored_layout(sample::LAYOUT, &format!("aesgcm {frame} 128"));
        let len = adapter.size_of(5000);
        let stored = |number| ObjectSpec {
            layout,
            ..object(number, len)
        };
        let to = context.memory.buffer(len);
        let item = LoadItem {
            object: stored(1),
            to: to.clone(),
        };
        bare.load(vec![item]).await.remove(0).unwrap();
        bare.delete(vec![objects[1].key.clone()])
            .await
            .remove(0)
            .unwrap();
        let item = StoreItem {
            object: stored(2),
            from: to,
        };
        bare.store(vec![item]).await.remove(0).unwrap();
        let to = context.memory.buffer(5000);
        let item = LoadItem {
            object: objects[1].clone(),
            to,
        };
        let loaded = adapter.load(vec![item]).await.remove(0);
        let loaded = loaded
            .map(|loaded| loaded.verified)
            .map_err(|error| error.kind());
        assert_eq!(loaded, expected, "{frame}");
    }
}

#[tokio::test]
async fn wrong_key_deletes_nothing() {
    for (frame, kind) in [
        ("lmcache", ErrorKind::Corrupt),
        ("bound", ErrorKind::Refused),
    ] {
        let context = Context::new();
        let right = context.open(&aesgcm(&context.key("a"), frame));
        let objects: Vec<_> = (0..5).map(|number| object(number, 3000)).collect();
        context.store(&*right, &objects).await;
        let used = context.store.used();

        let wrong = context.open(&aesgcm(&context.key("b"), frame));
        assert_eq!(context.load(&*wrong, &objects).await, [Err(kind); 5]);
        assert_eq!(context.store.used(), used, "all are there");
        assert_eq!(wrong.lookup(objects.clone()).await.unwrap(), [None; 5]);
        // Only what is stored again is replaced.
        let len = wrong.size_of(3000);
        let stored = context.store(&*wrong, &objects[..1]).await;
        assert_eq!(stored, [Ok(Stored::Written(len))]);
        assert_eq!(
            wrong.lookup(objects[..1].to_vec()).await.unwrap(),
            [Some(len)]
        );
        assert!(context.load(&*wrong, &objects[..1]).await[0].is_ok());
        assert_eq!(context.store.used(), used);

        let loaded = context.load(&*right, &objects).await;
        assert!(
            loaded[0].is_err() && loaded[1..].iter().all(Result::is_ok),
            "{loaded:?}"
        );
    }
}

#[tokio::test]
async fn adapter_that_keeps_buffers_is_no_error() {
    /// Holds the buffers of its calls for ever.
    struct Keeping(Mock, kvtier_common::sync::Mutex<Vec<Buffer>>);

    impl Adapter for Keeping {
        fn kind(&self) -> &'static str {
            self.0.kind()
        }

        fn capabilities(&self) -> crate::Capabilities {
            // And others use its backend.
            crate::Capabilities {
                shared: true,
                ..self.0.capabilities()
            }
        }

        fn store(&self, batch: Vec<StoreItem>) -> BoxFuture<'_, Vec<Result<Stored, L2Error>>> {
            self.1
                .lock()
                .extend(batch.iter().map(|item| item.from.clone()));
            self.0.store(batch)
        }

        fn lookup(
            &self,
            batch: Vec<ObjectSpec>,
        ) -> BoxFuture<'_, Result<Vec<Option<u64>>, L2Error>> {
            self.0.lookup(batch)
        }

        fn load(&self, batch: Vec<LoadItem>) -> BoxFuture<'_, Vec<Result<Loaded, L2Error>>> {
            self.1
                .lock()
                .extend(batch.iter().map(|item| item.to.clone()));
            self.0.load(batch)
        }

        fn delete(&self, keys: Vec<ObjectKey>) -> BoxFuture<'_, Vec<Result<bool, L2Error>>> {
            self.0.delete(keys)
        }

        fn list(
            &self,
            from: Option<String>,
            limit: usize,
        ) -> BoxFuture<'_, Result<crate::ListPage, L2Error>> {
            self.0.list(from, limit)
        }

        fn recover<'a>(
            &'a self,
            found: &'a (dyn Fn(Vec<crate::Listed>) -> bool + Send + Sync),
        ) -> BoxFuture<'a, Result<crate::Recovered, L2Error>> {
            self.0.recover(found)
        }

        fn status(&self) -> Value {
            self.0.status()
        }

        fn close(&self) -> BoxFuture<'_, ()> {
            self.0.close()
        }
    }

    let context = Context::new();
    let open = |name: &str| {
        let inner = Keeping(Mock::new(context.store.clone(), 1e11), Default::default());
        let serde = aesgcm(&context.key(name), "bound");
        transformed(Arc::new(inner), &configs(&serde)).unwrap()
    };
    let one = [object(1, 30_000)];
    let right = open("a");
    context.store(&*right, &one).await.remove(0).unwrap();
    assert_eq!(context.load(&*right, &one).await, [Ok(true)]);

    // Another server's key: what it has stored stays, also if this one stores the object again.
    let wrong = open("b");
    let (refused, len) = ([Err(ErrorKind::Refused)], wrong.size_of(30_000));
    assert_eq!(context.load(&*wrong, &one).await, refused);
    let stored = context.store(&*wrong, &one).await;
    assert_eq!(stored, [Ok(Stored::AlreadyThere(len))]);
    assert_eq!(context.load(&*wrong, &one).await, refused);
    assert_eq!(context.load(&*right, &one).await, [Ok(true)]);
}

#[tokio::test]
async fn other_transformation_is_another_layout() {
    let context = Context::new();
    let path = context.key("a");
    let one = [object(1, 3000)];
    let frames = [
        aesgcm(&path, "lmcache"),
        json!({"type": "aesgcm", "master_key_path": path, "aes_bits": 256}),
    ];
    let [short, long] = frames.map(|serde| context.open(&serde));
    context.store(&*short, &one).await.remove(0).unwrap();
    assert_eq!(long.lookup(one.to_vec()).await.unwrap(), [None]);
    assert!(short.lookup(one.to_vec()).await.unwrap()[0].is_some());
    let bound = |layout| stored_layout(layout, "x") & PAGE_BOUND != 0;
    assert!(bound(5 | PAGE_BOUND) && !bound(5));
    assert_ne!(stored_layout(5, "x"), stored_layout(6, "x"));
    assert_ne!(stored_layout(5, "x"), stored_layout(5, "y"));
}

#[tokio::test]
async fn fault_below_the_transformation_is_detected() {
    let directory = tempfile::tempdir().unwrap();
    let serde = aesgcm(&key_file(directory.path(), "a"), "bound");
    let inner = json!({"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100, "serde": serde});
    let faults = json!([{"kind": "corrupt", "operation": "load", "every": 2}]);
    let registry = testing::registry();
    let config = json!({"type": "fault_inject", "inner": inner, "faults": faults});
    let adapter = registry.open(&registry.parse(&config).unwrap()).unwrap();
    assert_eq!(adapter.status()["serde"][0]["frame"], "bound", "inherited");
    assert!(adapter.status().get("checksums").is_none(), "tags verify");
    let context = Context::new();
    let objects: Vec<_> = (0..4).map(|number| object(number, 3000)).collect();
    context.store(&*adapter, &objects).await;
    let corrupt = Err(ErrorKind::Corrupt);
    let loaded = context.load(&*adapter, &objects).await;
    assert_eq!(loaded, [Ok(true), corrupt, Ok(true), corrupt]);

    let mut other = config.clone();
    other["serde"] = aesgcm(&key_file(directory.path(), "b"), "bound");
    let line = registry.parse(&other).unwrap_err().to_string();
    assert_eq!(
        line,
        r#"type "fault_inject": key "serde" differs from that of its inner adapter; give it once"#
    );
}

#[test]
fn bad_configurations_name_key_and_value() {
    let line = |serde: Value| {
        SerdeConfig::parse_all("a tier", &serde)
            .unwrap_err()
            .to_string()
    };
    let key = |name: &str, value: Value| {
        let mut serde = aesgcm("k", "bound");
        serde[name] = value;
        line(serde)
    };
    assert_eq!(
        line(json!({"type": "aesgcm"})),
        r#"a tier: serde: key "master_key_path" is missing; give a path written out, without ~ or $ at its start and without NUL"#
    );
    assert_eq!(
        key("aes_bits", json!(192)),
        r#"a tier: serde: key "aes_bits": 192 is not allowed; give 128 or 256"#
    );
    assert_eq!(
        key("frame", json!("own")),
        r#"a tier: serde: key "frame": "own" is not allowed; give lmcache or bound"#
    );
    assert!(key("workers", json!(1)).contains(r#"key "workers" is unknown"#));
    assert!(key("key_provider", json!("kms")).ends_with(r#""kms" is not allowed; give hkdf"#));
    let mut serde = aesgcm("k", "lmcache");
    serde["earlier_keys"] = json!([{"path": "old"}]);
    assert!(
        line(json!([serde]))
            .starts_with(r#"a tier: serde[0]: key "earlier_keys": "1 objects" is not allowed"#)
    );
    assert!(line(json!({"type": "turboquant"})).contains("on a GPU"));
    assert!(line(json!("fp8")).contains(r#""fp8" is not allowed; give an object"#));
    assert!(line(json!({"type": 7})).contains(r#"key "type": 7 is not allowed"#));
}

#[tokio::test]
async fn scratch_is_bounded_and_waited_for() {
    let scratch = Scratch::new(1 << 20);
    let mut first = scratch.take(600 << 10).await.unwrap();
    first.bytes_mut().unwrap()[0] = 1;
    assert!(scratch.try_take(600 << 10).is_none());
    let waiting = scratch.take(600 << 10);
    let mut waiting = std::pin::pin!(waiting);
    assert!(conformance::poll_once(waiting.as_mut()).await.is_none());
    drop(first);
    let second = waiting.await.unwrap();
    assert_eq!(scratch.used(), 640 << 10);
    // What is larger than all of it waits until it is alone.
    assert!(scratch.try_take(5 << 20).is_none());
    drop(second);
    let mut large = scratch.take(5 << 20).await.unwrap();
    assert!(large.bytes_mut().unwrap().len() >= 5 << 20);
    assert!(scratch.try_take(1).is_none());
    drop(large);
    assert_eq!(scratch.used(), 0);
}
