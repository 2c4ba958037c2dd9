//! A real server: the conformance suite, LMCache's objects, identity, and a server that dies, hangs, or refuses.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvtier_core::ChunkHash;
use kvtier_core::object_key::KeyShape;

use super::super::names::COMPANION;
use super::part::ClusterPart;
use super::server::{Redis, valkey};
use super::*;
use kvtier_l2::{
    PAGE_BOUND,
    conformance::{check_some, evicted_by_the_backend_leaves_the_index, object, poll_once, run},
};

// proves: docs/compare.md#redis-valkey
// proves: docs/troubleshoot.md#second-tiers
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_passes() {
    run(ClusterPart::maker(vec![Redis::start(&[])], |nodes| {
        nodes[0].options()
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn valkey_server_passes() {
    if let Some(program) = valkey("valkey_server_passes") {
        let server = Redis::start_program(&program, &[]);
        run(ClusterPart::maker(vec![server], |nodes| nodes[0].options())).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_companions_passes_on_one_connection_of_a_unix_socket() {
    let make = ClusterPart::maker(vec![Redis::start(&[])], |nodes| RespOptions {
        companion_sums: false,
        num_workers: 1,
        ttl_seconds: Some(1000),
        ..nodes[0].unix_options()
    });
    // Only a companion tells the layout of an object.
    let report = check_some(make, |case| case != "other_layouts_are_never_ok").await;
    assert!(report.failed().next().is_none(), "\n{report}");
}

#[tokio::test]
async fn lookups_of_more_keys_than_a_call_has_are_answered_in_order() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let adapter = RespAdapter::open("resp", &server.options());
    let objects: Vec<_> = (0..3 * KEYS_PER_CALL as u64 - 7)
        .map(|number| object(number, 100))
        .collect();
    let present: Vec<_> = objects.iter().step_by(3).cloned().collect();
    assert!(
        kinds(store(&adapter, &memory, &present).await)
            .iter()
            .all(Option::is_none)
    );
    let found = adapter.lookup(objects.clone()).await.unwrap();
    assert_eq!(found.len(), objects.len());
    for (number, found) in found.iter().enumerate() {
        assert_eq!(found.is_some(), number % 3 == 0, "object {number}");
    }
}

/// As LMCache 0.5.6 wrote it.
fn lmcaches() -> (ObjectSpec, &'static str) {
    let name = "org/Tiny-Classic@01000100@0@43ffdcf95be755dd4e260cde32de8d8b51d4e53e24ca45878e941a6c102e5f1f@tenant-A";
    let object = ObjectSpec {
        key: ObjectKey::parse_name(name, Some(KeyShape::Grouped)).unwrap(),
        len: 512,
        layout: 77,
    };
    (object, name)
}

/// Objects that a server of LMCache 0.5.6 left in Redis, with their bytes.
fn recorded() -> Vec<(ObjectSpec, String, Vec<u8>)> {
    let text = include_str!("../../tests/vectors/resp_objects.json");
    let vectors: serde_json::Value = serde_json::from_str(text).unwrap();
    let object = |case: &serde_json::Value| {
        let (name, fields) = (case["key"].as_str().unwrap(), &case["fields"]);
        let key = ObjectKey::parse_name(name, Some(KeyShape::Grouped)).unwrap();
        let field = |name: &str| fields[name].as_str().unwrap();
        let number = |name: &str| u32::try_from(fields[name].as_u64().unwrap()).unwrap();
        let of_fields = ObjectKey::new(
            field("chunk_hash").parse().unwrap(),
            field("model_name"),
            number("kv_rank").into(),
            number("object_group_id"),
            field("cache_salt"),
        );
        assert_eq!(key, of_fields.unwrap(), "{name}");
        let value = base64(case["value_base64"].as_str().unwrap());
        assert_eq!(Some(value.len() as u64), case["value_len"].as_u64());
        let len = value.len() as u64;
        let object = ObjectSpec {
            key,
            len,
            layout: 77,
        };
        (object, name.to_owned(), value)
    };
    vectors["objects"]
        .as_array()
        .unwrap()
        .iter()
        .map(object)
        .collect()
}

fn base64(text: &str) -> Vec<u8> {
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |byte: u8| digits.iter().position(|digit| *digit == byte).unwrap() as u32;
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for byte in text.bytes().filter(|byte| *byte != b'=') {
        bits = ((bits << 6) | digit(byte)) & 0xffff;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(((bits >> count) & 0xff) as u8);
        }
    }
    bytes
}

#[tokio::test]
async fn keys_and_values_are_lmcaches_in_both_directions() {
    let memory = Memory::new(1 << 20);
    let recorded = recorded();
    assert_eq!(recorded.len(), 6);
    for (object, name, value) in recorded {
        let server = Redis::start(&[]);
        let options = RespOptions {
            trust_missing_layout: true,
            ..server.options()
        };
        let adapter = RespAdapter::open("resp", &options);
        server.set(&name, &value);
        let found = adapter.lookup(vec![object.clone()]).await;
        assert_eq!(found, Ok(vec![Some(object.len + 64)]));
        let loaded = load(&adapter, &memory, std::slice::from_ref(&object)).await;
        assert_eq!(loaded, [Ok(value.clone())]);
        assert_eq!(adapter.status()["unverified_loads"], 1);
        // And ours are where it looks, with nothing behind them and no time to live.
        server.ask(&[b"DEL", name.as_bytes()]);
        let item = StoreItem {
            object: object.clone(),
            from: memory.filled(&value),
        };
        let stored = adapter.store(vec![item]).await;
        assert_eq!(stored, [Ok(Stored::Written(object.len + 64))]);
        assert_eq!(server.get(&name), Some(value));
        assert_eq!(server.ask(&[b"TTL", name.as_bytes()]), Value::Integer(-1));
        let companion = format!("{COMPANION}{{{name}}}");
        assert!(matches!(
            server.ask(&[b"TTL", companion.as_bytes()]),
            Value::Integer(1..)
        ));
    }
}

#[tokio::test]
async fn objects_of_another_layout_are_misses_and_are_replaced() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let adapter = RespAdapter::open("resp", &server.options());
    let ours = object(1, 4000);
    let other = ObjectSpec {
        layout: ours.layout + 1,
        ..ours.clone()
    };
    assert_eq!(
        kinds(store(&adapter, &memory, std::slice::from_ref(&other)).await),
        [None]
    );
    assert_eq!(
        adapter.lookup(vec![ours.clone(), other.clone()]).await,
        Ok(vec![None, Some(4064)])
    );
    let loaded = load(&adapter, &memory, std::slice::from_ref(&ours)).await;
    assert_eq!(kinds(loaded), [Some(ErrorKind::NotFound)]);
    assert_eq!(
        kinds(store(&adapter, &memory, std::slice::from_ref(&ours)).await),
        [None]
    );
    assert_eq!(
        adapter.lookup(vec![ours, other]).await,
        Ok(vec![Some(4064), None])
    );
}

#[tokio::test]
async fn page_bound_objects_without_a_layout_are_misses_unless_trusted() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let (mut object, name) = lmcaches();
    object.layout |= PAGE_BOUND;
    server.set(name, &[7; 512]);
    for companion_sums in [true, false] {
        for trust_missing_layout in [false, true] {
            let adapter = RespAdapter::open(
                "resp",
                &RespOptions {
                    companion_sums,
                    trust_missing_layout,
                    ..server.options()
                },
            );
            let found = adapter.lookup(vec![object.clone()]).await.unwrap();
            assert_eq!(found[0].is_some(), trust_missing_layout);
            let loaded = load(&adapter, &memory, std::slice::from_ref(&object)).await;
            assert_eq!(loaded[0].is_ok(), trust_missing_layout);
        }
    }
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn object_that_lost_its_companion_is_a_miss_and_is_stored_again() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let adapter = RespAdapter::open("resp", &server.options());
    let objects = [object(1, 4000)];
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None]);
    let name = objects[0].key.text().name(KeyShape::Grouped);
    let companion = format!("{COMPANION}{{{name}}}");
    // A load keeps it alive.
    server.ask(&[b"EXPIRE", companion.as_bytes(), b"100"]);
    assert_eq!(kinds(load(&adapter, &memory, &objects).await), [None]);
    assert!(matches!(
        server.ask(&[b"TTL", companion.as_bytes()]),
        Value::Integer(101..)
    ));
    // The server has evicted it.
    server.ask(&[b"DEL", companion.as_bytes()]);
    assert_eq!(adapter.lookup(objects.to_vec()).await, Ok(vec![None]));
    assert_eq!(
        kinds(load(&adapter, &memory, &objects).await),
        [Some(ErrorKind::NotFound)]
    );
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None]);
    assert_eq!(kinds(load(&adapter, &memory, &objects).await), [None]);
}

#[tokio::test]
async fn server_that_evicts_is_never_full() {
    let (server, memory) = (Redis::start(&[]), Memory::new(4 << 20));
    let adapter = RespAdapter::open("resp", &server.options());
    server.ask(&[b"CONFIG", b"SET", b"maxmemory", b"3mb"]);
    assert!(matches!(adapter.free_bytes().await, Ok(Some(_))));
    server.ask(&[b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lru"]);
    assert_eq!(adapter.free_bytes().await, Ok(None));
    let objects: Vec<_> = (0..100).map(|number| object(number, 30_000)).collect();
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None; 100]);
    let found = adapter.lookup(objects).await.unwrap();
    assert!(found.iter().any(Option::is_none) && found.iter().any(Option::is_some));
}

#[tokio::test]
async fn listing_tells_when_objects_were_used() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let adapter = RespAdapter::open("resp", &server.options());
    assert_eq!(
        kinds(store(&adapter, &memory, &[object(1, 100)]).await),
        [None]
    );
    let name = object(1, 100).key.text().name(KeyShape::Grouped);
    let dump = match server.ask(&[b"DUMP", name.as_bytes()]) {
        Value::Bulk(Some(dump)) => dump,
        other => panic!("{other:?}"),
    };
    let restored = server.ask(&[
        b"RESTORE",
        name.as_bytes(),
        b"0",
        &dump,
        b"REPLACE",
        b"IDLETIME",
        b"5000",
    ]);
    assert_eq!(restored, Value::Simple("OK".into()));
    let listed = adapter.list(None, 100).await.unwrap().objects;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    assert!(listed[0].used_at + 4000 < now, "{listed:?}");
}

#[tokio::test]
async fn tenants_never_share_a_value() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let adapter = RespAdapter::open("resp", &server.options());
    let of = |salt: &str| {
        let key = ObjectKey::new(ChunkHash([3; 32]), "model", 0x0100_0100, 0, salt).unwrap();
        ObjectSpec {
            key,
            len: 1000,
            layout: 1,
        }
    };
    let objects = ["", "alice", "bob"].map(of);
    assert_eq!(
        kinds(store(&adapter, &memory, &objects[..2]).await),
        [None, None]
    );
    let loaded = load(&adapter, &memory, &objects).await;
    assert_eq!(loaded[0].as_ref().unwrap(), &content(&objects[0]));
    assert_eq!(loaded[1].as_ref().unwrap(), &content(&objects[1]));
    assert_eq!(kinds(loaded)[2], Some(ErrorKind::NotFound));
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn failed_stores_shift_no_reply() {
    // What LMCache's client does wrong: after errors, the answers that it reads are those of other keys.
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let adapter = RespAdapter::open(
        "resp",
        &RespOptions {
            num_workers: 1,
            ..server.options()
        },
    );
    let objects: Vec<_> = (0..20).map(|number| object(number, 3000)).collect();
    assert!(
        kinds(store(&adapter, &memory, &objects[..5]).await)
            .iter()
            .all(Option::is_none)
    );
    server.ask(&[b"CONFIG", b"SET", b"maxmemory", b"1kb"]);
    let refused = kinds(store(&adapter, &memory, &objects[5..]).await);
    assert_eq!(refused, [Some(ErrorKind::Full); 15]);
    assert_eq!(adapter.free_bytes().await, Ok(Some(0)));
    let loaded = load(&adapter, &memory, &objects).await;
    for (object, loaded) in objects[..5].iter().zip(&loaded) {
        assert_eq!(loaded.as_ref(), Ok(&content(object)));
    }
    assert_eq!(kinds(loaded)[5..], [Some(ErrorKind::NotFound); 15]);
    server.ask(&[b"CONFIG", b"SET", b"maxmemory", b"0"]);
    assert_eq!(
        kinds(store(&adapter, &memory, &objects[5..]).await),
        [None; 15]
    );
    assert_eq!(adapter.free_bytes().await, Ok(None));
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn values_of_other_types_are_misses_until_replaced() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let adapter = RespAdapter::open("resp", &server.options());
    let (object, name) = lmcaches();
    server.ask(&[b"LPUSH", name.as_bytes(), b"a"]);
    let objects = [object];
    assert_eq!(adapter.lookup(objects.to_vec()).await, Ok(vec![None]));
    assert_eq!(
        kinds(load(&adapter, &memory, &objects).await),
        [Some(ErrorKind::Corrupt)]
    );
    assert_eq!(adapter.list(None, 100).await.unwrap().objects, []);
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None]);
    assert_eq!(
        load(&adapter, &memory, &objects).await,
        [Ok(content(&objects[0]))]
    );
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn server_that_dies_and_returns_is_used_again() {
    let (mut server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let adapter = RespAdapter::open("resp", &server.options());
    let objects = [object(1, 5000)];
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None]);
    server.kill();
    until(&adapter, false).await;
    assert_eq!(
        kinds(store(&adapter, &memory, &objects).await),
        [Some(ErrorKind::Unavailable)]
    );
    let looked_up = adapter.lookup(objects.to_vec()).await;
    assert_eq!(looked_up.unwrap_err().kind(), ErrorKind::Unavailable);
    server.restart();
    until(&adapter, true).await;
    // It is empty now.
    assert_eq!(adapter.lookup(objects.to_vec()).await, Ok(vec![None]));
    assert_eq!(
        kinds(load(&adapter, &memory, &objects).await),
        [Some(ErrorKind::NotFound)]
    );
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None]);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn object_evicted_by_the_server_leaves_the_index() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let adapter = Arc::new(RespAdapter::open("resp", &server.options()));
    evicted_by_the_backend_leaves_the_index(adapter, &memory, |_| {
        server.ask(&[b"FLUSHALL"]);
    })
    .await;
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn server_killed_during_a_store_has_all_of_it_or_nothing() {
    let (mut server, memory) = (Redis::start(&[]), Memory::new(16 << 20));
    let options = RespOptions {
        request_timeout: Duration::from_secs(20),
        ..server.options()
    };
    let adapter = RespAdapter::open("resp", &options);
    let objects = [object(1, 8 << 20)];
    assert_eq!(adapter.lookup(objects.to_vec()).await, Ok(vec![None]));
    // Its sockets take a part of the value.
    server.signal(rustix::process::Signal::STOP);
    let storing = async { kinds(store(&adapter, &memory, &objects).await) };
    let mut storing = std::pin::pin!(storing);
    for _ in 0..20 {
        assert!(poll_once(&mut storing).await.is_none());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    server.kill();
    let stored = storing.await;
    assert!(
        matches!(
            stored[..],
            [Some(ErrorKind::Unavailable | ErrorKind::Deadline)]
        ),
        "{stored:?}"
    );
    memory.until_unused().await;
    server.restart();
    until(&adapter, true).await;
    assert_eq!(adapter.lookup(objects.to_vec()).await, Ok(vec![None]));
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None]);
    assert_eq!(
        load(&adapter, &memory, &objects).await,
        [Ok(content(&objects[0]))]
    );
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn server_that_hangs_loses_its_connections_and_is_used_again() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let options = RespOptions {
        request_timeout: Duration::from_millis(200),
        ..server.options()
    };
    let adapter = RespAdapter::open("resp", &options);
    let objects = [object(1, 5000)];
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None]);
    server.signal(rustix::process::Signal::STOP);
    assert_eq!(
        kinds(load(&adapter, &memory, &objects).await),
        [Some(ErrorKind::Deadline)]
    );
    server.signal(rustix::process::Signal::CONT);
    until(&adapter, true).await;
    assert_eq!(
        load(&adapter, &memory, &objects).await,
        [Ok(content(&objects[0]))]
    );
    memory.until_unused().await;
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn credentials_are_sent_and_a_refusal_is_told() {
    let server = Redis::start(&[
        "--user",
        "kv",
        "on",
        ">s3cret",
        "~*",
        "+@all",
        "--requirepass",
        "other",
    ]);
    let memory = Memory::new(1 << 20);
    let with = |username: &str, password: &str| {
        let options = RespOptions {
            username: username.into(),
            password: password.into(),
            database: 3,
            ..server.options()
        };
        RespAdapter::open("resp", &options)
    };
    let objects = [object(1, 100)];
    for (username, password, kind) in [
        ("kv", "s3cret", None),
        ("", "other", None),
        ("kv", "wrong", Some(ErrorKind::Refused)),
        ("", "", Some(ErrorKind::Refused)),
    ] {
        let adapter = with(username, password);
        assert_eq!(
            kinds(store(&adapter, &memory, &objects).await),
            [kind],
            "{username}"
        );
        assert_eq!(adapter.status()["is_healthy"], kind.is_none());
        let told = adapter.status().to_string();
        assert!(
            !told.contains("s3cret") && !told.contains("wrong\""),
            "{told}"
        );
    }
}

#[tokio::test]
async fn objects_are_in_the_database_and_for_the_time_that_are_configured() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let options = RespOptions {
        database: 3,
        ttl_seconds: Some(1000),
        ..server.options()
    };
    let adapter = RespAdapter::open("resp", &options);
    let one = [object(1, 100)];
    assert_eq!(kinds(store(&adapter, &memory, &one).await), [None]);
    let keyspace = server.told(&["INFO", "keyspace"]);
    assert!(
        keyspace.contains("db3:keys=2,expires=2") && !keyspace.contains("db0"),
        "{keyspace}"
    );
    server.told(&["SWAPDB", "0", "3"]);
    let key = one[0].key.text().name(KeyShape::Grouped);
    let left = server.ask(&[b"TTL", key.as_bytes()]);
    assert!(
        matches!(left, Value::Integer(900..=1000)),
        "{left:?} seconds"
    );
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn server_that_is_a_replica_now_is_unavailable_for_stores() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let adapter = RespAdapter::open("resp", &server.options());
    let objects = [object(1, 100)];
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None]);
    server.ask(&[b"REPLICAOF", b"127.0.0.1", b"1"]);
    server.ask(&[b"CONFIG", b"SET", b"replica-serve-stale-data", b"yes"]);
    assert_eq!(
        kinds(store(&adapter, &memory, &objects).await),
        [Some(ErrorKind::Unavailable)]
    );
    until(&adapter, false).await;
    server.ask(&[b"REPLICAOF", b"NO", b"ONE"]);
    until(&adapter, true).await;
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None]);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn of_a_server_and_its_replica_the_primary_is_used() {
    let (mut primary, replica) = (Redis::start(&[]), Redis::start(&[]));
    let memory = Memory::new(1 << 20);
    let port = primary.port.to_string();
    replica.told(&["REPLICAOF", "127.0.0.1", &port]);
    let options = RespOptions {
        addresses: vec![replica.address(), primary.address()],
        connection_timeout: Duration::from_secs(2),
        ..primary.options()
    };
    let adapter = RespAdapter::open("valkey", &options);
    let objects = [object(1, 5000)];
    let name = objects[0].key.text().name(KeyShape::Grouped);
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None]);
    assert!(primary.get(&name).is_some());
    while replica.get(&name).is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The other one takes over, and has what was stored.
    primary.kill();
    until(&adapter, false).await;
    assert_eq!(
        kinds(load(&adapter, &memory, &objects).await),
        [Some(ErrorKind::Unavailable)]
    );
    replica.told(&["REPLICAOF", "NO", "ONE"]);
    until(&adapter, true).await;
    assert_eq!(
        load(&adapter, &memory, &objects).await,
        [Ok(content(&objects[0]))]
    );
    assert_eq!(
        kinds(store(&adapter, &memory, &[object(2, 100)]).await),
        [None]
    );
}
