//! Clusters: the conformance suite, slots on their way, a primary that dies, and nodes that send keys in circles.

use std::path::Path;
use std::time::Instant;

use kvtier_core::object_key::KeyShape;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::super::names::KeyedItem;
use super::super::slots::{SLOTS, slot};
use super::part::{ClusterPart, node_of};
use super::server::{Redis, redis, valkey};
use super::*;
use kvtier_l2::conformance::{object, run};

/// Three primaries with equal parts of the slots, and `replicas` of the first one.
fn cluster(replicas: usize) -> (Vec<Redis>, Vec<Redis>) {
    cluster_of(&redis(), replicas)
}

/// Starts a cluster of another program.
fn cluster_of(program: &Path, replicas: usize) -> (Vec<Redis>, Vec<Redis>) {
    // A node that is not scheduled for this long is taken for a dead one, and the cluster is down; only a replica that is to
    // take over needs that soon.
    let node_timeout = if replicas > 0 { "500" } else { "5000" };
    let flags = [
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        "{bus}",
        "--cluster-config-file",
        "nodes.conf",
        "--cluster-node-timeout",
        node_timeout,
        "--cluster-require-full-coverage",
        "no",
        "--cluster-replica-validity-factor",
        "0",
    ];
    let start = |_| Redis::start_program(program, &flags);
    let primaries: Vec<_> = (0..3).map(start).collect();
    let replicas: Vec<_> = (0..replicas).map(start).collect();
    let part = |at: usize| (at * usize::from(SLOTS)).div_ceil(3).to_string();
    for (at, node) in primaries.iter().enumerate() {
        let last = (part(at + 1).parse::<usize>().unwrap() - 1).to_string();
        node.told(&["CLUSTER", "ADDSLOTSRANGE", &part(at), &last]);
        // Nodes of the same epoch resolve that later, and may undo the move of a slot with it.
        node.told(&["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()]);
    }
    let first = &primaries[0];
    for node in primaries.iter().skip(1).chain(&replicas) {
        let (port, bus) = (node.port.to_string(), node.bus.to_string());
        first.told(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
    }
    let all = || primaries.iter().chain(&replicas);
    let known = format!("cluster_known_nodes:{}", all().count());
    // Without full coverage a node is also content with the slots of those that it has met so far.
    let assigned = format!("cluster_slots_assigned:{SLOTS}");
    wait(|| {
        all().all(|node| {
            let info = node.told(&["CLUSTER", "INFO"]);
            ["cluster_state:ok", &known, &assigned]
                .iter()
                .all(|line| info.contains(*line))
        })
    });
    for replica in &replicas {
        replica.told(&["CLUSTER", "REPLICATE", &first.told(&["CLUSTER", "MYID"])]);
    }
    wait(|| {
        replicas.iter().all(|node| {
            node.told(&["INFO", "replication"])
                .contains("master_link_status:up")
        })
    });
    (primaries, replicas)
}

fn wait(mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < until, "the cluster does not come to it");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn options(nodes: &[Redis]) -> RespOptions {
    RespOptions {
        addresses: nodes.iter().map(Redis::address).collect(),
        cluster_mode: true,
        num_workers: 2,
        ..nodes[0].options()
    }
}

fn key_of(object: &ObjectSpec) -> String {
    object.key.text().name(KeyShape::Grouped)
}

// proves: docs/compare.md#redis-valkey
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_passes() {
    run(ClusterPart::maker(cluster(0).0, |nodes| {
        options(&nodes[1..2])
    }))
    .await;
}

#[tokio::test]
async fn keys_are_on_their_nodes_with_their_companions() {
    let (nodes, memory) = (cluster(0).0, Memory::new(4 << 20));
    let adapter = RespAdapter::open("valkey", &options(&nodes[..1]));
    let objects: Vec<_> = (0..40).map(|number| object(number, 1000)).collect();
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None; 40]);
    for object in &objects {
        let named = KeyedItem::new("", &object.key, &());
        let node = node_of(&nodes, &named.key);
        assert_eq!(node.get(&named.key), Some(content(object)));
        assert!(node.get(&named.companion).is_some());
        // As the server counts.
        let counted = node.ask(&[b"CLUSTER", b"KEYSLOT", named.companion.as_bytes()]);
        assert_eq!(counted, Value::Integer(slot(named.key.as_bytes()).into()));
    }
    let listed = adapter.list(None, 1000).await.unwrap();
    assert!(
        listed
            .next
            .is_some_and(|next| next.starts_with("0@127.0.0.1:"))
    );
}

/// Begins to move the slot of a key from its node to `to`.
fn begin_to_move(from: &Redis, to: &Redis, key: &str) {
    let slot = slot(key.as_bytes()).to_string();
    let id = |node: &Redis| node.told(&["CLUSTER", "MYID"]);
    to.told(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(from)]);
    from.told(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(to)]);
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn objects_of_a_slot_on_its_way_are_found_on_both_nodes() {
    check_migration(&cluster(0).0).await;
}

#[tokio::test]
async fn valkey_objects_of_migrating_slot_are_found() {
    if let Some(program) = valkey("valkey_objects_of_migrating_slot_are_found") {
        check_migration(&cluster_of(&program, 0).0).await;
    }
}

/// Stores and loads objects of a slot before, while and after it is moved.
async fn check_migration(nodes: &[Redis]) {
    let memory = Memory::new(4 << 20);
    let adapter = RespAdapter::open("valkey", &options(nodes));
    // Two objects of one slot: by the tag of their model.
    let of = |number: u8| {
        let key = format!("{{m}}@01000100@0@{}", hex(number));
        ObjectSpec {
            key: ObjectKey::parse_name(&key, Some(KeyShape::Grouped)).unwrap(),
            len: 3000,
            layout: 7,
        }
    };
    let (old, new) = ([of(1)], [of(2)]);
    assert_eq!(kinds(store(&adapter, &memory, &old).await), [None]);
    let named = KeyedItem::new("", &old[0].key, &());
    let from = node_of(nodes, &named.key);
    let to = nodes.iter().find(|node| node.port != from.port).unwrap();
    begin_to_move(from, to, &named.key);
    // Not moved yet; what is new goes to the other node.
    assert_eq!(load(&adapter, &memory, &old).await, [Ok(content(&old[0]))]);
    assert_eq!(kinds(store(&adapter, &memory, &new).await), [None]);
    assert_eq!(load(&adapter, &memory, &new).await, [Ok(content(&new[0]))]);
    let port = to.port.to_string();
    from.told(&[
        "MIGRATE",
        "127.0.0.1",
        &port,
        "",
        "0",
        "5000",
        "KEYS",
        &named.key,
        &named.companion,
    ]);
    let both = [old[0].clone(), new[0].clone()];
    assert_eq!(
        adapter.lookup(both.to_vec()).await,
        Ok(vec![Some(3064), Some(3064)])
    );
    for object in &both {
        let loaded = load(&adapter, &memory, std::slice::from_ref(object)).await;
        assert_eq!(loaded, [Ok(content(object))]);
    }
    let id = to.told(&["CLUSTER", "MYID"]);
    let number = slot(named.key.as_bytes()).to_string();
    for node in [to, from] {
        node.told(&["CLUSTER", "SETSLOT", &number, "NODE", &id]);
    }
    assert_eq!(load(&adapter, &memory, &old).await, [Ok(content(&old[0]))]);
    let deleted = adapter
        .delete(both.iter().map(|it| it.key.clone()).collect())
        .await;
    assert_eq!(deleted, [Ok(true), Ok(true)]);
    assert_eq!(to.get(&named.key), None);
}

/// Moves one key of a slot on its way.
fn migrate(from: &Redis, to: &Redis, key: &str) {
    let port = to.port.to_string();
    from.told(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
}

#[tokio::test]
async fn object_and_companion_on_two_nodes_are_still_one() {
    let (nodes, memory) = (cluster(0).0, Memory::new(4 << 20));
    let adapter = RespAdapter::open("valkey", &options(&nodes));
    for (number, moves_companion) in [(1, true), (2, false)] {
        let objects = [object(number, 3000)];
        assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None]);
        let named = KeyedItem::new("", &objects[0].key, &());
        let from = node_of(&nodes, &named.key);
        let to = nodes.iter().find(|node| node.port != from.port).unwrap();
        begin_to_move(from, to, &named.key);
        let (first, second) = if moves_companion {
            (&named.companion, &named.key)
        } else {
            (&named.key, &named.companion)
        };
        migrate(from, to, first);
        let found = adapter.lookup(objects.to_vec()).await;
        assert_eq!(found, Ok(vec![Some(3064)]));
        let loaded = load(&adapter, &memory, &objects).await;
        assert_eq!(loaded, [Ok(content(&objects[0]))]);
        // A copy at the other node would be in the way of the rest.
        let stored = kinds(store(&adapter, &memory, &objects).await);
        assert_eq!(stored, [Some(ErrorKind::Unavailable)]);
        migrate(from, to, second);
        let loaded = load(&adapter, &memory, &objects).await;
        assert_eq!(loaded, [Ok(content(&objects[0]))]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn primary_without_a_replica_costs_only_its_own_objects() {
    let (mut nodes, _) = cluster(0);
    let memory = Memory::new(8 << 20);
    let config = serde_json::json!({
        "type": "valkey", "cluster_mode": true, "num_workers": 2, "max_capacity_gb": 1,
        "startup_nodes": format!("127.0.0.1:{}", nodes[1].port), "retry_pause_ms": 1,
    });
    let registry = kvtier_l2::Registry::of(&[VALKEY]);
    let config = registry.parse(&config).unwrap();
    let adapter = registry.open(&config).unwrap();
    let objects: Vec<_> = (0..60).map(|number| object(number, 2000)).collect();
    let items = |objects: &[ObjectSpec]| -> Vec<StoreItem> {
        let item = |object: &ObjectSpec| StoreItem {
            object: object.clone(),
            from: memory.filled(&content(object)),
        };
        objects.iter().map(item).collect()
    };
    assert_eq!(kinds(adapter.store(items(&objects)).await), [None; 60]);
    let first = nodes[0].port;
    nodes[0].kill();
    let is_of_first = |object: &ObjectSpec| node_of(&nodes, &key_of(object)).port == first;
    // More of them than open a breaker.
    for _ in 0..20 {
        assert!(matches!(adapter.free_bytes().await, Ok(None)));
        let found = adapter.lookup(objects.clone()).await.unwrap();
        let stored = adapter.store(items(&objects)).await;
        for ((object, found), stored) in objects.iter().zip(found).zip(stored) {
            assert_eq!(
                (found.is_some(), stored.is_ok()),
                (!is_of_first(object), !is_of_first(object))
            );
        }
        // Batches of its objects alone are no sign that the others do not answer.
        let its: Vec<_> = objects
            .iter()
            .filter(|object| is_of_first(object))
            .cloned()
            .collect();
        assert!(adapter.store(items(&its)).await.iter().all(Result::is_err));
    }
    let recovered = adapter.recover(&|_| true).await.unwrap();
    let left = objects.iter().filter(|object| !is_of_first(object)).count();
    assert_eq!(recovered.objects, left as u64);
}

#[tokio::test]
async fn nodes_that_do_not_answer_are_not_waited_for() {
    let (nodes, memory) = (cluster(0).0, Memory::new(1 << 20));
    // It takes connections, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = Address::Tcp("127.0.0.1".into(), silent.local_addr().unwrap().port());
    let options = RespOptions {
        addresses: vec![silent, nodes[0].address()],
        ..options(&nodes)
    };
    let adapter = RespAdapter::open("valkey", &options);
    let objects = [object(1, 100)];
    let stored = tokio::time::timeout(Duration::from_secs(5), store(&adapter, &memory, &objects));
    assert_eq!(kinds(stored.await.expect("the other node answers")), [None]);
    // One that hangs makes lookups of its own keys fail, and of no others.
    let objects: Vec<_> = (0..20).map(|number| object(number, 100)).collect();
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None; 20]);
    let frozen = node_of(&nodes, &key_of(&objects[0]));
    frozen.signal(rustix::process::Signal::STOP);
    let lookup = tokio::time::timeout(Duration::from_secs(3), adapter.lookup(objects.clone()));
    let found = lookup.await.expect("the other nodes answer").unwrap();
    frozen.signal(rustix::process::Signal::CONT);
    for (object, found) in objects.iter().zip(found) {
        let is_of_frozen = node_of(&nodes, &key_of(object)).port == frozen.port;
        assert_eq!(found.is_some(), !is_of_frozen);
    }
}

#[tokio::test]
async fn calls_end_when_the_adapter_is_closed_before_a_node_has_answered() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let options = RespOptions {
        cluster_mode: true,
        ..RespOptions::new(Address::Tcp(
            "127.0.0.1".into(),
            silent.local_addr().unwrap().port(),
        ))
    };
    let adapter = RespAdapter::open("valkey", &options);
    let closed = async {
        tokio::task::yield_now().await;
        adapter.close().await;
    };
    let (found, ()) = tokio::join!(adapter.lookup(vec![object(1, 100)]), closed);
    assert_eq!(found.unwrap_err().kind(), ErrorKind::Unavailable);
}

fn hex(number: u8) -> String {
    [number; 32].map(|byte| format!("{byte:02x}")).concat()
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn primary_that_dies_costs_its_own_objects_until_its_replica_takes_over() {
    let (mut nodes, replicas) = cluster(1);
    let memory = Memory::new(4 << 20);
    let adapter = RespAdapter::open("valkey", &options(&nodes));
    let objects: Vec<_> = (0..60).map(|number| object(number, 2000)).collect();
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None; 60]);
    let first = nodes[0].port;
    let is_of_first: Vec<_> = objects
        .iter()
        .map(|object| node_of(&nodes, &key_of(object)).port == first)
        .collect();
    wait(|| replicas[0].ask(&[b"DBSIZE"]) == nodes[0].ask(&[b"DBSIZE"]));
    nodes[0].kill();
    let started = Instant::now();
    let mut failed = 0;
    loop {
        let found = adapter.lookup(objects.clone()).await.unwrap();
        let loaded = load(&adapter, &memory, &objects).await;
        let mut are_all_there = true;
        for (at, (found, loaded)) in found.iter().zip(loaded).enumerate() {
            match loaded {
                Ok(bytes) => assert_eq!(bytes, content(&objects[at])),
                Err(error) => {
                    assert!(is_of_first[at], "{error}");
                    failed += 1;
                    are_all_there = false;
                }
            }
            assert!(found.is_some() || is_of_first[at]);
        }
        if are_all_there {
            break;
        }
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "no other node took over"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(failed > 0, "the primary was not used");
    assert_eq!(kinds(store(&adapter, &memory, &objects).await), [None; 60]);
    until(&adapter, true).await;
}

// proves: docs/troubleshoot.md#second-tiers
#[tokio::test]
async fn nodes_that_send_keys_in_circles_are_left() {
    let port = listen(|mut stream| async move {
        let port = stream.local_addr().unwrap().port();
        let mut bytes = vec![0; 65536];
        while let Ok(got @ 1..) = stream.read(&mut bytes).await {
            let asked = String::from_utf8_lossy(&bytes[..got]).into_owned();
            let slots = format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:{port}\r\n");
            let moved = format!("-MOVED 1 127.0.0.1:{port}\r\n");
            let mut said = String::new();
            for word in asked.split("\r\n") {
                match word {
                    "PING" => said.push_str("+PONG\r\n"),
                    "CLUSTER" => said.push_str(&slots),
                    "STRLEN" | "GET" | "EXPIRE" => said.push_str(&moved),
                    _ => {}
                }
            }
            if stream.write_all(said.as_bytes()).await.is_err() {
                return;
            }
        }
    })
    .await;
    let options = RespOptions {
        cluster_mode: true,
        ..RespOptions::new(Address::Tcp("127.0.0.1".into(), port))
    };
    let (adapter, memory) = (RespAdapter::open("valkey", &options), Memory::new(1 << 20));
    assert_eq!(
        kinds(load(&adapter, &memory, &[object(1, 100)]).await),
        [Some(ErrorKind::Unavailable)]
    );
    let found = adapter.lookup(vec![object(1, 100)]).await;
    assert_eq!(found.unwrap_err().kind(), ErrorKind::Unavailable);
}

#[tokio::test]
async fn a_server_that_is_no_cluster_is_told_so() {
    let (server, memory) = (Redis::start(&[]), Memory::new(1 << 20));
    let adapter = RespAdapter::open("valkey", &options(std::slice::from_ref(&server)));
    let stored = store(&adapter, &memory, &[object(1, 100)]).await;
    let error = stored[0].as_ref().unwrap_err();
    assert!(
        error.to_string().contains("cluster support disabled"),
        "{error}"
    );
    assert_eq!(adapter.status()["is_healthy"], false);
    // And the other way round.
    let (nodes, _) = cluster(0);
    let adapter = RespAdapter::open("resp", &nodes[0].options());
    let objects: Vec<_> = (0..20).map(|number| object(number, 100)).collect();
    let stored = store(&adapter, &memory, &objects).await;
    let told = stored
        .iter()
        .find_map(|stored| stored.as_ref().err())
        .unwrap();
    assert!(told.to_string().contains("cluster_mode"), "{told}");
}
