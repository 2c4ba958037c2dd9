//! The type `peers`: objects of other servers, whatever those do.

use kvtier_l2::conformance::object;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use super::port::{Held, start};
use super::*;

/// Long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

fn adapter(ports: &[u16], first_byte: Duration) -> PeersAdapter {
    let peers = ports.iter().map(|port| ("127.0.0.1".to_owned(), *port));
    PeersAdapter::open(PeersOptions::new(peers.collect(), first_byte))
}

/// Waits until that many peers are connected.
async fn connected(adapter: &PeersAdapter, count: usize) {
    while adapter.status()["connected_peers"] != count {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn port(held: &Arc<Held>) -> u16 {
    start(PortOptions::default(), held).await
}

/// What a peer says instead of what it should.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// All is passed on.
    None,
    /// Nothing is passed on any more.
    Freeze,
    /// Nothing is passed on until there is another fault, or none.
    Wait,
    /// Each part takes longer than it may.
    Slow,
    /// Values end within.
    Cut,
    /// A byte of each answer is another one.
    Garble,
    /// All answers are noise.
    Noise,
}

/// Passes on what goes to a port, until its fault is set.
struct Proxy {
    port: u16,
    fault: tokio::sync::watch::Sender<Fault>,
}

impl Proxy {
    async fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let fault = tokio::sync::watch::Sender::new(Fault::None);
        let told = fault.subscribe();
        tokio::spawn(async move {
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let far = TcpStream::connect(("127.0.0.1", to)).await.unwrap();
                let ((mut from_near, mut to_near), (mut from_far, mut to_far)) =
                    (near.into_split(), far.into_split());
                tokio::spawn(async move { tokio::io::copy(&mut from_near, &mut to_far).await });
                let mut told = told.clone();
                tokio::spawn(async move {
                    let mut part = vec![0; 1 << 16];
                    loop {
                        let Ok(got @ 1..) = from_far.read(&mut part).await else {
                            return;
                        };
                        let part = &mut part[..got];
                        let passes = |fault: &Fault| *fault != Fault::Wait;
                        let Ok(fault) = told.wait_for(passes).await.map(|fault| *fault) else {
                            return;
                        };
                        match fault {
                            Fault::None | Fault::Wait => {}
                            Fault::Freeze => std::future::pending().await,
                            Fault::Slow => tokio::time::sleep(Duration::from_secs(2)).await,
                            Fault::Cut if got > 100 => {
                                let _ = to_near.write_all(&part[..100]).await;
                                return;
                            }
                            Fault::Cut => {}
                            Fault::Garble => part[got / 2] ^= 1,
                            Fault::Noise => part.fill(b'x'),
                        }
                        if to_near.write_all(part).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { port, fault }
    }
}

// proves: docs/l2.md#reading-from-peers
#[tokio::test]
async fn objects_are_loaded_from_the_peers_that_have_them() {
    let objects: Vec<_> = (0..6)
        .map(|number| object(number, 100_000 + number))
        .collect();
    let first = Held::new(4 << 20, objects[..3].iter().cloned());
    let second = Held::new(4 << 20, objects[2..5].iter().cloned());
    let adapter = adapter(&[port(&first).await, port(&second).await], PATIENCE);
    connected(&adapter, 2).await;
    let found = adapter.lookup(objects.clone()).await.unwrap();
    let lengths: Vec<_> = objects
        .iter()
        .map(|it| Some(adapter.size_of(it.len)))
        .collect();
    assert_eq!(found[..5], lengths[..5]);
    assert_eq!(found[5], None);
    let memory = Memory::new(4 << 20);
    let loaded = load(&adapter, &memory, &objects).await;
    for (object, loaded) in objects.iter().zip(&loaded).take(5) {
        assert_eq!(loaded.as_deref().ok(), Some(&content(object)[..]));
    }
    assert_eq!(kinds(loaded)[5], Some(ErrorKind::NotFound));
    // One that was not looked up, and one of another layout, which has the same length.
    let fresh = PeersAdapter::open(adapter.options().clone());
    connected(&fresh, 2).await;
    let mut other = objects[1].clone();
    other.layout ^= 1;
    let loaded = load(&fresh, &memory, &[objects[0].clone(), other]).await;
    assert_eq!(kinds(loaded), [None, Some(ErrorKind::NotFound)]);
    for result in kinds(store(&fresh, &memory, &objects[..1]).await) {
        assert_eq!(result, Some(ErrorKind::Unsupported));
    }
    fresh.close().await;
    adapter.close().await;
    memory.until_unused().await;
}

// proves: docs/l2.md#reading-from-peers
#[tokio::test]
async fn faults_of_a_peer_cost_its_hits_alone() {
    let (theirs, ours) = (object(1, 200_000), object(2, 200_000));
    let good = Held::new(4 << 20, [ours.clone()]);
    let bad = Held::new(4 << 20, [theirs.clone()]);
    let memory = Memory::new(4 << 20);
    for fault in [
        Fault::Freeze,
        Fault::Slow,
        Fault::Cut,
        Fault::Garble,
        Fault::Noise,
    ] {
        let proxy = Proxy::start(port(&bad).await).await;
        let adapter = adapter(&[proxy.port, port(&good).await], Duration::from_secs(1));
        connected(&adapter, 2).await;
        let both = [theirs.clone(), ours.clone()];
        // Each has one.
        assert!(
            adapter
                .lookup(both.to_vec())
                .await
                .unwrap()
                .iter()
                .all(Option::is_some)
        );
        proxy.fault.send_replace(fault);
        let loaded = load(&adapter, &memory, &both).await;
        assert_eq!(loaded[1].as_deref().ok(), Some(&content(&ours)[..]));
        assert!(loaded[0].is_err());
        let began = Instant::now();
        let found = adapter.lookup(both.to_vec()).await.unwrap();
        assert!(found[1].is_some() && began.elapsed() < PATIENCE / 2);
        // It is used again once it is well.
        proxy.fault.send_replace(Fault::None);
        loop {
            // Connections that were made meanwhile may be frozen for ever.
            let loaded = load(&adapter, &memory, &both[..1]).await;
            if loaded[0].is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        adapter.close().await;
    }
}

// proves: docs/l2.md#reading-from-peers
#[tokio::test]
async fn dead_and_refusing_peers_are_misses_with_a_cause() {
    let one = object(1, 1000);
    let held = Held::new(1 << 20, [one.clone()]);
    let secret = PortOptions {
        password: "secret".to_owned(),
        ..PortOptions::default()
    };
    let guarded = start(secret, &held).await;
    let absent = super::server::free_port();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let full = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let refusal = b"-ERR max number of clients reached\r\n";
            let _ = stream.write_all(refusal).await;
        }
    });
    let mut options = adapter(&[guarded, absent, full], PATIENCE)
        .options()
        .clone();
    for (password, cause) in [("wrong", "WRONGPASS"), ("", "NOAUTH"), ("secret", "")] {
        options.common.password = password.to_owned();
        let adapter = PeersAdapter::open(options.clone());
        // Their attempts have ended, well or not.
        while adapter.status()["peers"].as_array().is_none_or(|peers| {
            let is_new = |peer: &Json| peer["connected"] == 0 && peer["error"].is_null();
            peers.len() < 3 || peers.iter().any(is_new)
        }) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let found = adapter.lookup(vec![one.clone()]).await.unwrap();
        let is_found = cause.is_empty();
        assert_eq!(found[0].is_some(), is_found, "{password}");
        let status = adapter.status();
        assert_eq!(status["is_healthy"], is_found, "{status}");
        assert_eq!(status["error"].is_null(), is_found, "{status}");
        let address = json!([format!("127.0.0.1:{guarded}")]);
        let peers = status["peers"].as_array().unwrap();
        let peer = peers.iter().find(|peer| peer["addresses"] == address);
        let error = peer.unwrap()["error"].as_str().unwrap_or_default();
        assert!(
            error.contains(cause) && error.is_empty() == is_found,
            "{error}"
        );
        adapter.close().await;
    }
    // A password that the port has no use for.
    options.peers = vec![("127.0.0.1".to_owned(), port(&held).await)];
    let adapter = PeersAdapter::open(options);
    while adapter.status()["error"].is_null() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let error = adapter.status()["error"].to_string();
    assert!(error.contains("without any password"), "{error}");
}

// proves: docs/l2.md#reading-from-peers
#[tokio::test]
async fn peer_that_only_claims_objects_hides_no_other() {
    let one = object(1, 200_000);
    let mut other = one.clone();
    other.layout ^= 1;
    let memory = Memory::new(4 << 20);
    let one = [one];
    for (theirs, fault) in [(one[0].clone(), Fault::Garble), (other, Fault::None)] {
        let liar = Proxy::start(port(&Held::new(4 << 20, [theirs])).await).await;
        let honest = Proxy::start(port(&Held::new(4 << 20, one.clone())).await).await;
        let mut options = adapter(&[liar.port, honest.port], PATIENCE)
            .options()
            .clone();
        options.common.request_timeout = PATIENCE;
        let adapter = PeersAdapter::open(options);
        connected(&adapter, 2).await;
        // The first claim is the wrong one.
        honest.fault.send_replace(Fault::Wait);
        assert!(adapter.lookup(one.to_vec()).await.unwrap()[0].is_some());
        liar.fault.send_replace(fault);
        assert!(load(&adapter, &memory, &one).await[0].is_err());
        liar.fault.send_replace(Fault::None);
        // It is the first again, and the other one is waited for.
        let mut lookup = adapter.lookup(one.to_vec());
        let early = tokio::time::timeout(Duration::from_millis(200), &mut lookup);
        assert!(early.await.is_err());
        honest.fault.send_replace(Fault::None);
        assert!(lookup.await.unwrap()[0].is_some());
        assert_eq!(kinds(load(&adapter, &memory, &one).await), [None]);
        // Without an answer of the other one it is believed.
        honest.fault.send_replace(Fault::Noise);
        assert!(adapter.lookup(one.to_vec()).await.unwrap()[0].is_some());
        adapter.close().await;
    }
}

/// Opens the tier of a configuration, guards included.
fn opened(config: &Json) -> Arc<dyn kvtier_l2::Adapter> {
    let registry = kvtier_l2::Registry::of(&[PEERS]);
    registry.open(&registry.parse(config).unwrap()).unwrap()
}

#[tokio::test]
async fn failures_of_a_peer_do_not_turn_off_the_others() {
    let (theirs, ours) = (object(1, 200_000), object(2, 200_000));
    let bad = Held::new(1 << 20, [theirs.clone()]);
    let good = Held::new(1 << 20, [ours.clone()]);
    let proxy = Proxy::start(port(&bad).await).await;
    let peers = [proxy.port, port(&good).await].map(|port| format!("127.0.0.1:{port}"));
    let adapter = opened(&json!({
        "type": "peers",
        "peers": peers,
        "first_byte_ms": 30_000,
        "lookup_timeout_ms": 30_000,
        "load_timeout_ms": 500,
        "breaker_failures": 1,
        "breaker_pause_ms": 30_000,
        "breaker_pause_max_ms": 30_000,
    }));
    while adapter.status()["connected_peers"] != 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let both = vec![theirs.clone(), ours.clone()];
    let found = adapter.lookup(both).await.unwrap();
    assert!(found.iter().all(Option::is_some));
    proxy.fault.send_replace(Fault::Freeze);
    let memory = Memory::new(4 << 20);
    assert!(load(&*adapter, &memory, &[theirs]).await[0].is_err());
    assert_eq!(kinds(load(&*adapter, &memory, &[ours]).await), [None]);
    adapter.close().await;
}

#[tokio::test]
async fn lookup_ends_in_time_with_what_has_arrived() {
    let port = listen(|mut stream| async move {
        let mut bytes = Vec::new();
        let _ = stream.read_buf(&mut bytes).await;
        let _ = stream.write_all(b"+PONG\r\n").await;
        // The first 128 questions are answered, the others are not.
        let mut answers = b":10\r\n".repeat(128);
        while stream.read_buf(&mut bytes).await.is_ok_and(|got| got > 0) {
            let questions = bytes.windows(6).filter(|word| word == b"STRLEN");
            if questions.count() >= 128 {
                let _ = stream.write_all(&std::mem::take(&mut answers)).await;
            }
        }
    })
    .await;
    let mut options = adapter(&[port], PATIENCE).options().clone();
    options.common.request_timeout = PATIENCE;
    options.lookup_timeout = Duration::from_secs(1);
    let adapter = PeersAdapter::open(options);
    connected(&adapter, 1).await;
    let objects = (0..130).map(|number| object(number, 10)).collect();
    let began = Instant::now();
    let found = adapter.lookup(objects).await.unwrap();
    assert!(began.elapsed() < PATIENCE / 2);
    let is_known = |number: usize| number < 128;
    for (number, found) in found.iter().enumerate() {
        assert_eq!(found.is_some(), is_known(number), "{number}");
    }
}

// proves: docs/l2.md#the-port-for-peers
#[tokio::test]
async fn object_of_a_port_with_little_bandwidth_is_waited_for() {
    let one = [object(1, 2 << 20)];
    let options = PortOptions {
        bandwidth: Some(1 << 20),
        ..PortOptions::default()
    };
    let port = start(options, &Held::new(4 << 20, one.clone())).await;
    let adapter = adapter(&[port], PATIENCE);
    connected(&adapter, 1).await;
    assert!(adapter.lookup(one.to_vec()).await.unwrap()[0].is_some());
    let memory = Memory::new(4 << 20);
    assert_eq!(kinds(load(&adapter, &memory, &one).await), [None]);
}

#[test]
fn time_for_an_answer_is_within_that_of_a_lookup() {
    let registry = kvtier_l2::Registry::of(&[PEERS]);
    let mut config = json!({"type": "peers", "peers": ["a:1"], "first_byte_ms": 1000});
    registry.parse(&config).unwrap();
    config["first_byte_ms"] = json!(1001);
    let line = registry.parse(&config).unwrap_err().to_string();
    assert_eq!(
        line,
        r#"type "peers": key "first_byte_ms": 1001 is not allowed; give at most "lookup_timeout_ms", which is 1000"#
    );
}

// proves: docs/l2.md#reading-from-peers
#[tokio::test]
async fn frozen_peer_is_not_asked_once_its_breaker_opens() {
    let frozen = listen(|mut stream| async move {
        let mut bytes = vec![0; 65536];
        let _ = stream.read(&mut bytes).await;
        let _ = stream.write_all(b"+PONG\r\n").await;
        // Nothing more is answered.
        while stream.read(&mut bytes).await.is_ok_and(|got| got > 0) {}
    })
    .await;
    let mut options = adapter(&[frozen], Duration::from_millis(20))
        .options()
        .clone();
    options.guards.breaker_pause = PATIENCE;
    let adapter = PeersAdapter::open(options);
    connected(&adapter, 1).await;
    let began = Instant::now();
    for _ in 0..5 {
        assert_eq!(adapter.lookup(vec![object(1, 10)]).await.unwrap(), [None]);
    }
    assert!(began.elapsed() < PATIENCE / 2);
    let breaker = &adapter.status()["peers"][0]["breaker"]["lookup"];
    assert_eq!(
        (&breaker["state"], &breaker["opened"]),
        (&json!("open"), &json!(1))
    );
    assert_eq!(adapter.lookup(vec![object(1, 10)]).await.unwrap(), [None]);
    assert_eq!(
        adapter.status()["peers"][0]["breaker"]["lookup"]["refused"],
        1
    );
}

// proves: docs/l2.md#reading-from-peers
#[tokio::test]
async fn each_of_many_peers_gets_its_turn() {
    let one = object(1, 1000);
    let nothing = Held::new(1 << 20, []);
    let held = Held::new(1 << 20, [one.clone()]);
    let mut ports = Vec::new();
    for _ in 0..11 {
        ports.push(port(&nothing).await);
    }
    ports.push(port(&held).await);
    let adapter = adapter(&ports, PATIENCE);
    connected(&adapter, 12).await;
    let is_found = async || adapter.lookup(vec![one.clone()]).await.unwrap()[0].is_some();
    let mut lookups = 0;
    while !is_found().await {
        lookups += 1;
        assert!(lookups < 20, "its turn did not come");
    }
    let answered = |peer: &&Json| !peer["answered_seconds_ago"].is_null();
    let status = adapter.status();
    assert!(
        status["peers"]
            .as_array()
            .unwrap()
            .iter()
            .filter(answered)
            .count()
            >= 8
    );
}

// proves: docs/l2.md#other-servers
#[tokio::test]
async fn server_is_no_peer_of_its_own() {
    let held = Held::new(1 << 20, [object(1, 1000)]);
    let (own, other) = (port(&held).await, port(&held).await);
    let peers = [own, other].map(|port| ("localhost".to_owned(), port));
    let adapter = PeersAdapter::open(PeersOptions {
        own_port: Some(own),
        ..PeersOptions::new(peers.to_vec(), PATIENCE)
    });
    connected(&adapter, 1).await;
    let status = adapter.status();
    let peers = status["peers"].as_array().unwrap();
    assert!(peers.iter().all(|it| {
        it["addresses"][0]
            .as_str()
            .unwrap()
            .ends_with(&format!(":{other}"))
    }));
}

// proves: docs/l2.md#reading-from-peers
#[tokio::test]
async fn peer_that_a_request_names_is_asked_first() {
    let one = object(1, 1000);
    let nothing = Held::new(1 << 20, []);
    let held = Held::new(1 << 20, [one.clone()]);
    let mut peers = Vec::new();
    for _ in 0..11 {
        peers.push(("127.0.0.1".to_owned(), port(&nothing).await));
    }
    let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let number = listener.local_addr().unwrap().port();
    let port = ReadPort::new(PortOptions::default(), Arc::clone(&held) as _).unwrap();
    tokio::spawn(port.serve(listener));
    peers.push(("127.0.0.2".to_owned(), number));
    let adapter = PeersAdapter::open(PeersOptions::new(peers, PATIENCE));
    connected(&adapter, 12).await;
    let is_found = async || adapter.lookup(vec![one.clone()]).await.unwrap()[0].is_some();
    adapter.prefer("host.of.an.attacker");
    assert!(!is_found().await);
    adapter.prefer("127.0.0.2");
    assert!(is_found().await);
    assert_eq!(adapter.status()["peers"].as_array().unwrap().len(), 12);
}

// proves: docs/l2.md#reading-from-peers
#[tokio::test]
async fn names_are_resolved() {
    let one = object(1, 1000);
    let held = Held::new(1 << 20, [one.clone()]);
    let peers = vec![
        ("no-such-host.invalid".to_owned(), 1),
        ("localhost".to_owned(), port(&held).await),
    ];
    let adapter = PeersAdapter::open(PeersOptions::new(peers.clone(), PATIENCE));
    // It may have an address of another family, where nothing listens.
    connected(&adapter, 1).await;
    assert!(adapter.lookup(vec![one]).await.unwrap()[0].is_some());
    assert_eq!(adapter.status()["is_healthy"], true);
    let adapter = PeersAdapter::open(PeersOptions::new(peers[..1].to_vec(), PATIENCE));
    while adapter.status()["is_healthy"] == true {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let error = adapter.status()["error"].to_string();
    assert!(error.contains("no-such-host.invalid: "), "{error}");
}
