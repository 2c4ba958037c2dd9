//! The read-only port: what it answers, and its bounds.

use std::collections::HashMap;
use std::sync::atomic::AtomicI64;

use kvtier_l2::conformance::object;
use kvtier_l2::net::ServerTls;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use super::super::port::{GREETING_TIMEOUT, IDLE_TIMEOUT, SEND_TIMEOUT};
use super::secured::Files;
use super::*;

/// Objects in a small memory, which a lease takes.
pub(super) struct Held {
    pub(super) memory: Memory,
    pub(super) objects: HashMap<ObjectKey, ObjectSpec>,
    pub(super) sent: AtomicU64,
    pub(super) connections: AtomicI64,
}

impl Held {
    pub(super) fn new(bytes: u64, objects: impl IntoIterator<Item = ObjectSpec>) -> Arc<Self> {
        let objects = objects.into_iter().map(|it| (it.key.clone(), it));
        Arc::new(Self {
            memory: Memory::new(bytes),
            objects: objects.collect(),
            sent: AtomicU64::new(0),
            connections: AtomicI64::new(0),
        })
    }
}

impl ObjectSource for Held {
    fn hold(&self, key: &ObjectKey) -> Option<StoreItem> {
        let object = self.objects.get(key)?.clone();
        let from = self.memory.filled(&content(&object));
        Some(StoreItem { object, from })
    }

    fn count_sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    fn count_connection(&self, change: i64) {
        self.connections.fetch_add(change, Ordering::Relaxed);
    }
}

/// Starts a port; returns its number.
pub(super) async fn start(options: PortOptions, held: &Arc<Held>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let number = listener.local_addr().unwrap().port();
    let port = ReadPort::new(options, Arc::clone(held) as _).unwrap();
    tokio::spawn(port.serve(listener));
    number
}

async fn connect(options: PortOptions, held: &Arc<Held>) -> TcpStream {
    let port = start(options, held).await;
    TcpStream::connect(("127.0.0.1", port)).await.unwrap()
}

fn command(words: &[&str]) -> Vec<u8> {
    let mut commands = Commands::default();
    let words: Vec<_> = words.iter().map(|word| word.as_bytes()).collect();
    commands.push(&words);
    match &commands.segments[..] {
        [super::super::command::Segment::Bytes(bytes)] => bytes.clone(),
        _ => unreachable!("bytes alone"),
    }
}

async fn ask(stream: &mut TcpStream, words: &[&str]) -> Value {
    stream.write_all(&command(words)).await.unwrap();
    let mut bytes = Vec::new();
    loop {
        if let Some((value, length)) = reply::Progress::default().value(&bytes).unwrap() {
            assert_eq!(length, bytes.len(), "{words:?}");
            return value;
        }
        assert!(stream.read_buf(&mut bytes).await.unwrap() > 0, "{words:?}");
    }
}

/// What comes until the connection is closed.
async fn rest(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    // What was cut off may also be an error.
    let _ = stream.read_to_end(&mut bytes).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

fn password(password: &str) -> PortOptions {
    PortOptions {
        password: password.to_owned(),
        ..PortOptions::default()
    }
}

// proves: docs/l2.md#the-port-for-peers
#[tokio::test]
async fn reads_are_answered_and_all_else_is_refused() {
    let one = object(1, 1000);
    let held = Held::new(1 << 20, [one.clone()]);
    let mut stream = connect(PortOptions::default(), &held).await;
    let named = KeyedItem::new("", &one.key, &());
    let other = KeyedItem::new("", &object(2, 1000).key, &()).key;
    let (key, companion) = (&*named.key, &*named.companion);
    let bulk = |bytes: &[u8]| Value::Bulk(Some(bytes.to_vec()));
    let trailer =
        trailer::Trailer::new(&one, held.memory.filled(&content(&one)).checksum().unwrap());
    let (bytes, trailer) = (bulk(&content(&one)), bulk(&trailer.encode()));
    for (words, expected) in [
        (&["PING"][..], Value::Simple("PONG".into())),
        (&["ping", "there"], bulk(b"there")),
        (&["SELECT", "0"], Value::Simple("OK".into())),
        (&["EXISTS", key, companion, &other, "x"], Value::Integer(2)),
        (&["STRLEN", key], Value::Integer(1000)),
        (&["STRLEN", companion], Value::Integer(64)),
        (&["STRLEN", &other], Value::Integer(0)),
        (&["GET", key], bytes.clone()),
        (&["GET", companion], trailer.clone()),
        (&["GET", &other], Value::Bulk(None)),
        (&["GET", &key.to_uppercase()], Value::Bulk(None)),
        (
            &["MGET", key, &other, companion, key],
            Value::Array(vec![bytes.clone(), Value::Bulk(None), trailer, bytes]),
        ),
        (
            &["CLIENT", "SETINFO", "LIB-NAME", "x"],
            Value::Simple("OK".into()),
        ),
        (&["CLIENT", "id"], Value::Integer(1)),
        (&["COMMAND", "DOCS"], Value::Array(Vec::new())),
    ] {
        assert_eq!(ask(&mut stream, words).await, expected, "{words:?}");
    }
    let long = "x".repeat(1 << 20);
    for (words, code) in [
        (&["SELECT", "1"][..], "ERR"),
        (&["GET"], "ERR"),
        (&["AUTH", "x"], "ERR"),
        (&["HELLO", "3"], "NOPROTO"),
        (&["HELLO", "2", "X"], "ERR"),
        (&["SET", key, &long], "READONLY"),
        (&["GET", &long], "READONLY"),
        (&["UNLINK", key], "READONLY"),
        (&["FLUSHALL"], "READONLY"),
    ] {
        let answer = ask(&mut stream, words).await;
        assert!(
            matches!(&answer, Value::Error(text) if errors::code(text) == code),
            "{answer:?}"
        );
    }
    assert!(
        matches!(ask(&mut stream, &["HELLO", "2"]).await, Value::Array(all) if all.len() == 12)
    );
    assert!(matches!(
        ask(&mut stream, &["INFO"]).await,
        Value::Bulk(Some(_))
    ));
    assert_eq!(held.sent.load(Ordering::Relaxed), 3000);
    assert_eq!(held.connections.load(Ordering::Relaxed), 1);
    assert!(!held.memory.is_used());
    assert_eq!(
        ask(&mut stream, &["QUIT"]).await,
        Value::Simple("OK".into())
    );
    assert_eq!(rest(stream).await, "");
    while held.connections.load(Ordering::Relaxed) > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn requests_behind_a_large_answer_are_answered_too() {
    let one = object(1, 3 << 20);
    let held = Held::new(4 << 20, [one.clone()]);
    let mut stream = connect(PortOptions::default(), &held).await;
    let get = command(&["GET", &KeyedItem::new("", &one.key, &()).key]);
    let requests = [get.repeat(5), command(&["PING"])].concat();
    stream.write_all(&requests).await.unwrap();
    let each = [
        &format!("${}\r\n", one.len).into_bytes(),
        &content(&one)[..],
        b"\r\n",
    ]
    .concat();
    let mut answers = vec![0; 5 * each.len() + 7];
    stream.read_exact(&mut answers).await.unwrap();
    assert!(
        answers
            .chunks(each.len())
            .take(5)
            .all(|answer| answer == each)
    );
    assert!(answers.ends_with(b"+PONG\r\n"));
}

#[tokio::test]
async fn what_is_no_request_ends_the_connection() {
    let held = Held::new(1 << 20, []);
    let mut stream = connect(PortOptions::default(), &held).await;
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let told = rest(stream).await;
    assert!(told.starts_with("-ERR Protocol error"), "{told}");
}

// proves: docs/l2.md#the-port-for-peers
#[tokio::test]
async fn nothing_is_served_without_the_password() {
    let held = Held::new(1 << 20, [object(1, 10)]);
    let code = |value: Value| match value {
        Value::Error(text) => errors::code(&text).to_owned(),
        other => format!("{other:?}"),
    };
    let mut stream = connect(password("secret"), &held).await;
    for words in [&["PING"][..], &["GET", "x"], &["HELLO", "2"], &["INFO"]] {
        assert_eq!(code(ask(&mut stream, words).await), "NOAUTH");
    }
    let hello = ask(&mut stream, &["HELLO", "2", "AUTH", "default", "secret"]).await;
    assert!(matches!(hello, Value::Array(_)), "{hello:?}");
    assert_eq!(
        ask(&mut stream, &["PING"]).await,
        Value::Simple("PONG".into())
    );
    for words in [
        &["AUTH", "Secret"][..],
        &["AUTH", "secret1"],
        &["AUTH", ""],
        &["AUTH", "other", "secret"],
        &["HELLO", "2", "AUTH", "default", "x"],
    ] {
        let mut stream = connect(password("secret"), &held).await;
        stream
            .write_all(&[command(words), command(&["PING"])].concat())
            .await
            .unwrap();
        let told = rest(stream).await;
        assert!(
            told.starts_with("-WRONGPASS") && !told.contains("PONG"),
            "{told}"
        );
    }
}

// proves: docs/l2.md#the-port-for-peers
#[tokio::test(start_paused = true)]
async fn silent_clients_are_disconnected() {
    let held = Held::new(1 << 20, []);
    for (options, begun, limit) in [
        (password("secret"), &b""[..], GREETING_TIMEOUT),
        (password("secret"), b"*1\r\n", GREETING_TIMEOUT),
        (PortOptions::default(), b"*2\r\n$3\r\n", IDLE_TIMEOUT),
    ] {
        let mut stream = connect(options, &held).await;
        let began = Instant::now();
        stream.write_all(begun).await.unwrap();
        assert_eq!(rest(stream).await, "");
        let took = began.elapsed();
        assert!(
            (limit..limit + Duration::from_secs(1)).contains(&took),
            "{took:?}"
        );
    }
}

// proves: docs/l2.md#the-port-for-peers
#[tokio::test(start_paused = true)]
async fn client_that_never_stops_sending_is_disconnected_without_a_password() {
    let held = Held::new(1 << 20, []);
    let mut stream = connect(password("secret"), &held).await;
    ask(&mut stream, &["PING"]).await;
    // There is always more to be received: the socket is filled before the time goes on.
    let mut stream = stream.into_std().unwrap();
    let (began, nothing) = (Instant::now(), b"*0\r\n".repeat(16 << 10));
    let mut is_full = false;
    while began.elapsed() < 2 * GREETING_TIMEOUT {
        match std::io::Write::write(&mut stream, &nothing) {
            Ok(_) if is_full => {
                is_full = false;
                tokio::time::advance(Duration::from_millis(500)).await;
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                is_full = true;
                tokio::task::yield_now().await;
            }
            Err(_) => break,
        }
    }
    let took = began.elapsed();
    assert!(
        (GREETING_TIMEOUT..GREETING_TIMEOUT + Duration::from_secs(2)).contains(&took),
        "{took:?}"
    );
}

// proves: docs/l2.md#the-port-for-peers
#[tokio::test(start_paused = true)]
async fn client_that_does_not_read_loses_its_lease() {
    // Two of them are more than the memory has, so that a lease too many fails.
    let one = object(1, 40 << 20);
    let held = Held::new(64 << 20, [one.clone()]);
    let mut stream = connect(PortOptions::default(), &held).await;
    let get = command(&["GET", &KeyedItem::new("", &one.key, &()).key]);
    stream.write_all(&get.repeat(100)).await.unwrap();
    let began = Instant::now();
    while !held.memory.is_used() {
        tokio::task::yield_now().await;
    }
    held.memory.until_unused().await;
    let took = began.elapsed();
    assert!((SEND_TIMEOUT..2 * SEND_TIMEOUT).contains(&took), "{took:?}");
    assert_eq!(held.sent.load(Ordering::Relaxed), 0);
}

// proves: docs/l2.md#the-port-for-peers
#[tokio::test]
async fn object_beyond_the_leases_of_all_connections_is_absent() {
    let (large, small) = (object(1, 40 << 20), object(2, 1000));
    let held = Held::new(64 << 20, [large.clone(), small.clone()]);
    let options = PortOptions {
        max_leased: 1 << 20,
        ..PortOptions::default()
    };
    let port = start(options, &held).await;
    let key = |object: &ObjectSpec| KeyedItem::new("", &object.key, &()).key;
    let mut stuck = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let get = command(&["GET", &key(&large)]);
    stuck.write_all(&get).await.unwrap();
    // A single object is sent, however large it is.
    stuck.read_exact(&mut [0; 11]).await.unwrap();
    let mut other = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let get = ["GET", &key(&small)];
    assert_eq!(ask(&mut other, &get).await, Value::Bulk(None));
    drop(stuck);
    held.memory.until_unused().await;
    let found = Value::Bulk(Some(content(&small)));
    assert_eq!(ask(&mut other, &get).await, found);
}

// proves: docs/l2.md#the-port-for-peers
#[tokio::test(start_paused = true)]
async fn bandwidth_is_shared_by_all_connections() {
    let one = object(1, 1 << 20);
    let held = Held::new(8 << 20, [one.clone()]);
    let options = PortOptions {
        bandwidth: Some(1 << 20),
        ..PortOptions::default()
    };
    let port = start(options, &held).await;
    let key = KeyedItem::new("", &one.key, &()).key;
    let began = Instant::now();
    let read = async || {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        for _ in 0..4 {
            assert_eq!(
                ask(&mut stream, &["GET", &key]).await,
                Value::Bulk(Some(content(&one)))
            );
        }
    };
    tokio::join!(read(), read());
    let took = began.elapsed();
    // The last bytes are waited for behind them.
    assert!(
        (Duration::from_secs(6)..Duration::from_secs(10)).contains(&took),
        "{took:?}"
    );
}

// proves: docs/l2.md#the-port-for-peers
#[tokio::test]
async fn connections_are_bounded() {
    let held = Held::new(1 << 20, []);
    let options = PortOptions {
        max_connections: 4,
        ..PortOptions::default()
    };
    let port = start(options, &held).await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        assert_eq!(
            ask(&mut stream, &["PING"]).await,
            Value::Simple("PONG".into())
        );
        streams.push(stream);
    }
    let refused = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    assert!(
        rest(refused)
            .await
            .starts_with("-ERR max number of clients")
    );
    drop(streams.pop());
    while held.connections.load(Ordering::Relaxed) == 4 {
        tokio::task::yield_now().await;
    }
    let mut next = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    assert_eq!(
        ask(&mut next, &["PING"]).await,
        Value::Simple("PONG".into())
    );
}

// proves: docs/l2.md#the-port-for-peers
#[tokio::test]
async fn tls_needs_the_certificates_of_both_sides() {
    let one = object(1, 3 << 20);
    let held = Held::new(8 << 20, [one.clone()]);
    let files = Files::new("localhost");
    let options = PortOptions {
        tls: Some(ServerTls {
            cert: files.path("cert.pem"),
            key: files.path("key.pem"),
            ca: Some(files.path("ca.pem")),
        }),
        ..PortOptions::default()
    };
    let port = start(options, &held).await;
    for has_identity in [true, false] {
        let mut tls = files.tls();
        tls.identity = has_identity.then(|| (files.path("cert.pem"), files.path("key.pem")));
        let options = RespOptions {
            tls: Some(tls),
            companion_sums: false,
            trust_missing_layout: true,
            ..RespOptions::new(Address::Tcp("localhost".into(), port))
        };
        let adapter = RespAdapter::open("resp", &options);
        let memory = Memory::new(8 << 20);
        let loaded = load(&adapter, &memory, std::slice::from_ref(&one)).await;
        assert_eq!(loaded[0].is_ok(), has_identity, "{loaded:?}");
    }
}

// proves: docs/l2.md#the-port-for-peers
#[tokio::test]
async fn certificate_is_read_again_by_a_reload_alone() {
    let one = object(1, 10);
    let held = Held::new(1 << 20, [one.clone()]);
    let (files, next) = (Files::new("localhost"), Files::new("localhost"));
    let options = PortOptions {
        tls: Some(ServerTls {
            cert: files.path("cert.pem"),
            key: files.path("key.pem"),
            ca: None,
        }),
        ..PortOptions::default()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let number = listener.local_addr().unwrap().port();
    let port = ReadPort::new(options, Arc::clone(&held) as _).unwrap();
    tokio::spawn(Arc::clone(&port).serve(listener));
    let is_read = async |files: &Files| {
        let options = RespOptions {
            tls: Some(files.tls()),
            companion_sums: false,
            trust_missing_layout: true,
            ..RespOptions::new(Address::Tcp("localhost".into(), number))
        };
        let adapter = RespAdapter::open("resp", &options);
        let memory = Memory::new(1 << 20);
        load(&adapter, &memory, std::slice::from_ref(&one)).await[0].is_ok()
    };
    for file in ["cert.pem", "key.pem"] {
        std::fs::copy(next.path(file), files.path(file)).unwrap();
    }
    assert!(is_read(&files).await && !is_read(&next).await);
    assert!(port.reload().unwrap());
    assert!(is_read(&next).await);
    std::fs::write(files.path("cert.pem"), "nothing").unwrap();
    assert!(port.reload().is_err());
    assert!(is_read(&next).await);
}
