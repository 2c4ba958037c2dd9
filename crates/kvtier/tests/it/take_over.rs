//! `kvtier server --take-over`: clients notice nothing of it, or nothing happens.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use kvtier_client::proto::request::Request;
use kvtier_client::{EngineDrivenWorker, InstanceId};
use kvtier_core::random::SplitMix64;

use crate::prompts::{
    CHUNKS, bytes, prompt, read, retrieve_pages, scope, store, store_pages, whole,
};
use crate::server::{INSTANCE_NAME, KVTIER, Segments, Server, wait_until};

pub(crate) const L1: &str = "0.03125";

/// Takes over from a server, which ends with 0; the new one takes its place. Or returns the log of the one that did not.
pub(crate) fn take_over(server: &mut Server, base: &Path, more: &[&str]) -> Result<(), String> {
    let new = Server::try_start(base, L1, &[&["--take-over"], more].concat())?;
    let mut old = std::mem::replace(server, new);
    assert!(old.child.wait().unwrap().success());
    assert_eq!(old.endpoint, server.endpoint);
    Ok(())
}

/// Whether the lookup of a prompt under the request "held" still leads to its bytes.
pub(crate) fn held_is_right(worker: &mut EngineDrivenWorker, number: u64) -> bool {
    let (len, mut right) = (worker.chunk_bytes(), true);
    let check = |chunk, found: &[u8]| right &= found == bytes("a", number, chunk, len);
    let got = worker.retrieve(&prompt(number), whole(), "held", check);
    got.unwrap().is_some() && right
}

/// A client in bytes.
pub(crate) struct Raw(TcpStream);

impl Raw {
    pub(crate) fn connect(server: &Server) -> Self {
        let address = server.endpoint.strip_prefix("tcp://").unwrap();
        let mut greeting = [0; 64];
        (greeting[0], greeting[8], greeting[9]) = (0xff, 1, 0x7f);
        (greeting[10], greeting[11]) = (3, 1);
        greeting[12..16].copy_from_slice(b"NULL");
        let mut raw = Self(TcpStream::connect(address).unwrap());
        raw.send(&greeting);
        raw.send(b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER");
        raw.receive(64 + 43);
        raw
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    pub(crate) fn receive(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// The request of this number for the chunk size, and the answer.
    pub(crate) fn exchange(number: u8) -> (Vec<u8>, Vec<u8>) {
        let head = [&[1, 1, number, 1, 15, 0xae][..], b"get_chunk_size"].concat();
        let request = [&[1, 1, number, 0, 15, 0xae][..], b"get_chunk_size"].concat();
        (request, [&head[..], &[0, 1, 16]].concat())
    }

    /// Negotiates its chunk size, as LMCache 0.5.7 does first; the answer is `tokens`, for blocks of as many.
    fn negotiate(&mut self, tokens: u8) {
        // The answer has the form of the request.
        let head = [&[1, 1, 200, 1, 21, 0xb4][..], b"negotiate_chunk_size"].concat();
        let message = [&head[..], &[0, 1, tokens]].concat();
        self.send(&message);
        assert_eq!(self.receive(message.len()), message);
    }
}

#[test]
fn clients_notice_nothing_of_a_take_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut worker = server.worker(1, "a");
    let len = worker.chunk_bytes();
    let mut pages = server.pages(3, "pages");
    store_pages(&mut pages, "pages", 2);
    let mut pipelined = server.connect();
    let mut raw = Raw::connect(&server);
    raw.negotiate(16);
    let (request, answer) = Raw::exchange(0);
    raw.send(&request);
    assert_eq!(raw.receive(answer.len()), answer);
    // In the greeting still.
    let mut early = TcpStream::connect(server.endpoint.strip_prefix("tcp://").unwrap()).unwrap();
    early.write_all(&[0xff, 0, 0]).unwrap();
    for round in 0..5_u64 {
        let (number, request) = (10 + round, format!("r{round}"));
        assert_eq!(store(&mut worker, "a", number), CHUNKS);
        // Looked up before, read after.
        assert_eq!(worker.lookup(&prompt(number), &request).unwrap(), CHUNKS);
        assert_eq!(pages.lookup(&prompt(2), &request).unwrap(), CHUNKS);
        // Prepared before, committed after: a store and a retrieve.
        let scope = scope("a");
        let unfinished = prompt(100 + round);
        let key = scope.worker_key(0, &unfinished, whole(), "s");
        let instance = InstanceId(1);
        let granted = worker.connection().prepare_store(&key, instance).unwrap();
        let slots = granted.target.unwrap().slots;
        let places: Vec<_> = slots
            .iter()
            .map(|slot| (slot.offset, slot.length))
            .collect();
        assert_eq!(places.len() as u64, CHUNKS);
        let earlier = prompt(10);
        let held = format!("h{round}");
        assert_eq!(worker.lookup(&earlier, &held).unwrap(), CHUNKS);
        let read_key = scope.worker_key(0, &earlier, whole(), &held);
        let connection = worker.connection();
        assert!(
            connection
                .prepare_retrieve(&read_key, instance)
                .unwrap()
                .success
        );
        // A part of a request, and several.
        let (request_bytes, answer) = Raw::exchange(1 + round as u8);
        let cut = 4 * round as usize;
        raw.send(&request_bytes[..cut]);
        let noop = Request::<Vec<u32>>::Noop;
        let tickets: Vec<_> = (0..50).map(|_| pipelined.send(&noop).unwrap()).collect();

        take_over(&mut server, base.path(), &[]).unwrap();

        assert!(server.log.contains("connections=5"), "{}", server.log);
        let (_, pause) = server.log.split_once("milliseconds=").unwrap();
        let pause = pause.split_whitespace().next().unwrap();
        let (_, decimals) = pause.split_once('.').unwrap();
        assert_eq!(decimals.len(), 1, "{}", server.log);
        raw.send(&request_bytes[cut..]);
        assert_eq!(raw.receive(answer.len()), answer);
        for ticket in tickets {
            pipelined.receive(ticket).unwrap();
        }
        let pool = std::fs::File::options().write(true).open(Segments::pool());
        let pool = pool.unwrap();
        for (chunk, (offset, length)) in (0..).zip(&places) {
            use std::os::unix::fs::FileExt as _;
            assert_eq!(*length as usize, len);
            pool.write_all_at(&bytes("a", 100 + round, chunk, len), *offset)
                .unwrap();
        }
        assert!(
            worker
                .connection()
                .commit_store(&key, instance, b"")
                .unwrap()
        );
        assert!(
            worker
                .connection()
                .commit_retrieve(&read_key, instance)
                .unwrap()
        );
        assert!(
            !worker
                .connection()
                .commit_store(&key, instance, b"")
                .unwrap()
        );
        let mut wrong = Vec::new();
        let check = |chunk, found: &[u8]| {
            if found != bytes("a", number, chunk, len) {
                wrong.push(chunk);
            }
        };
        let got = worker.retrieve(&prompt(number), whole(), &request, check);
        assert!(got.unwrap().is_some() && wrong.is_empty(), "{wrong:?}");
        retrieve_pages(&mut pages, "pages", 2, &request);
        for number in (10..=10 + round).chain(100..=100 + round) {
            assert_eq!(read(&mut worker, "a", number), Ok(CHUNKS));
        }
        worker.connection().end_session(&request).unwrap();
    }
    // Nothing is left of leases and grants.
    let status = server.http("/status", None);
    let l1 = &status["storage_manager"]["l1_manager"];
    for field in [
        "read_locked_count",
        "write_locked_count",
        "staging_bytes",
        "accounting_errors",
    ] {
        assert_eq!(l1[field], 0, "{field}: {status:#}");
    }
    assert_eq!(status["withheld_transfers"], 0);
    assert_eq!(early.write(&[0]).unwrap(), 1);
    server.stop();
}

/// What a client does all the time, on a thread: stores, and reads what it has stored. Every answer has to be there, and right.
fn serve_load(server: &Server, salt: &'static str, stop: Arc<AtomicBool>) -> JoinHandle<u64> {
    let mut worker = server.worker(20 + salt.len() as i64, salt);
    let mut random = SplitMix64::new(salt.len() as u64);
    std::thread::spawn(move || {
        let (mut stored, mut reads) = (0, 0);
        while !stop.load(Ordering::Relaxed) {
            if stored < 40 {
                assert_eq!(store(&mut worker, salt, stored), CHUNKS);
                stored += 1;
            }
            let number = random.below(stored);
            assert_eq!(read(&mut worker, salt, number), Ok(CHUNKS));
            reads += 1;
        }
        reads
    })
}

/// The same of a worker whose pages the server copies.
fn serve_pages(server: &Server, stop: Arc<AtomicBool>) -> JoinHandle<u64> {
    let mut pages = server.pages(8, "p");
    std::thread::spawn(move || {
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            store_pages(&mut pages, "p", number);
            let request = format!("p{number}");
            assert_eq!(pages.lookup(&prompt(number), &request).unwrap(), CHUNKS);
            retrieve_pages(&mut pages, "p", number, &request);
            pages.connection().end_session(&request).unwrap();
            number = (number + 1) % 40;
        }
        number
    })
}

/// A number of take-overs from the environment, or the one of the gate.
fn take_overs() -> u64 {
    let given = std::env::var("KVTIER_TAKE_OVERS").ok();
    given.and_then(|number| number.parse().ok()).unwrap_or(20)
}

/// `KVTIER_TAKE_OVERS=1000 cargo test -p kvtier --all-features --test it take_over::every -- --nocapture` for more.
#[test]
fn every_answer_is_right_under_load() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let stop = Arc::<AtomicBool>::default();
    let load = ["a", "bb", "ccc"].map(|salt| serve_load(&server, salt, Arc::clone(&stop)));
    let pages = serve_pages(&server, Arc::clone(&stop));
    let take_overs = take_overs();
    for round in 0..take_overs {
        take_over(&mut server, base.path(), &[]).unwrap_or_else(|log| panic!("{round}: {log}"));
    }
    stop.store(true, Ordering::Relaxed);
    let reads: u64 = load.into_iter().map(|thread| thread.join().unwrap()).sum();
    pages.join().unwrap();
    eprintln!("{take_overs} take-overs, {reads} prompts read, all right");
    assert!(reads > take_overs);
    server.stop();
}

#[test]
fn refused_take_over_changes_nothing() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let stop = Arc::<AtomicBool>::default();
    let load = serve_load(&server, "a", Arc::clone(&stop));
    for (flags, told) in [
        (
            &["--chunk-size", "32", "--l1-size-gb", "0.0625"][..],
            "--chunk-size is 16 in the running server and 32 in the other one; \
             --l1-size-gb is 0.03125 in the running server and 0.0625 in the other one",
        ),
        (&["--chunk-size", "32"], "--chunk-size is 16"),
        (&["--l1-size-gb", "0.0625"], "--l1-size-gb is 0.03125"),
        (&["--l1-align-bytes", "8192"], "--l1-align-bytes is"),
        (&["--max-message-gb", "2"], "--max-message-gb is"),
        (
            &["--l1-write-ttl-seconds", "7"],
            "--l1-write-ttl-seconds is",
        ),
    ] {
        let log = take_over(&mut server, base.path(), flags).unwrap_err();
        assert!(log.contains(told), "{flags:?}: {log}");
        assert!(log.contains("the running server goes on"), "{log}");
    }
    let mut other = Raw::connect(&server);
    other.negotiate(32);
    let log = take_over(&mut server, base.path(), &[]).unwrap_err();
    assert!(log.contains("negotiated another chunk size"), "{log}");
    drop(other);
    stop.store(true, Ordering::Relaxed);
    assert!(load.join().unwrap() > 0);
    server.stop();
    // Without what it needs, on either side.
    for (flags, told) in [
        (&["--l1-restore", "off"][..], "L1 ends with the process"),
        (
            &["--state-dir", "none", "--l1-restore", "off"],
            "takes a state directory",
        ),
        (
            &[
                "--l2-adapter",
                r#"{"type":"mock","max_size_gb":0.01,"mock_bandwidth_gb":1}"#,
            ],
            "type \"mock\" keeps its state in the process of the server",
        ),
    ] {
        let mut server = Server::start(base.path(), L1, flags);
        let log = take_over(&mut server, base.path(), flags).unwrap_err();
        assert!(log.contains(told), "{flags:?}: {log}");
        server.connect().noop().unwrap();
        server.stop();
    }
    let server = Server::start(base.path(), L1, &["--take-over"]);
    assert!(server.log.contains("starting as usual"), "{}", server.log);
    server.stop();
}

#[test]
fn sockets_of_every_kind_are_handed_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let path = base.path().join("socket");
    let host = format!("ipc://{}", path.display());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let flags = ["--host", &host, "--prometheus-port", &port];
    let mut server = Server::start(base.path(), L1, &flags);
    let mut client = server.connect();
    client.noop().unwrap();
    let status = |server: &Server| server.http("/status", None)["is_healthy"].clone();
    let address = server.log.split_once("http=\"").unwrap().1.to_owned();
    for _ in 0..2 {
        take_over(&mut server, base.path(), &flags).unwrap();
        client.noop().unwrap();
        server.connect().noop().unwrap();
        assert_eq!(status(&server), true);
        let metrics = ureq::get(format!("http://127.0.0.1:{port}/metrics")).call();
        assert_eq!(metrics.unwrap().status(), 200);
        let again = server.log.split_once("http=\"").unwrap().1;
        assert_eq!(again.split('"').next(), address.split('"').next());
    }
    assert!(path.exists());
    server.stop();
    assert!(!path.exists());
}

/// A body that never comes is no change in flight.
#[test]
fn request_without_body_delays_no_take_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let (_, address) = server.log.split_once("http=\"http://").unwrap();
    let mut stream = TcpStream::connect(address.split('"').next().unwrap()).unwrap();
    let head = "PUT /quota/a HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n\
                content-type: application/json\r\ncontent-length: 99\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    // The body is waited for.
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 100");
    take_over(&mut server, base.path(), &[]).unwrap_or_else(|log| panic!("{log}"));
    server.stop();
}

/// Each has a connection of its own: those that the old server has accepted it answers, the others wait for the new one.
#[test]
fn every_get_is_answered_in_take_overs() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let (_, address) = server.log.split_once("http=\"http://").unwrap();
    let address = address.split('"').next().unwrap().to_owned();
    let (answered, stop) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let (counter, is_over) = (Arc::clone(&answered), Arc::clone(&stop));
    let client = std::thread::spawn(move || {
        while !is_over.load(Ordering::Relaxed) {
            let mut stream = TcpStream::connect(&address).unwrap();
            let head = "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            stream.write_all(head.as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            let head = head.to_lowercase();
            let (_, length) = head.split_once("content-length: ").unwrap();
            let length = length.split("\r\n").next().unwrap();
            assert_eq!(length.parse(), Ok(body.len()), "{head}");
            assert!(head.starts_with("http/1.1 200 "), "{head}");
            counter.fetch_add(1, Ordering::Relaxed);
        }
    });
    for _ in 0..5 {
        let before = answered.load(Ordering::Relaxed);
        wait_until("an answer", || answered.load(Ordering::Relaxed) > before);
        take_over(&mut server, base.path(), &[]).unwrap_or_else(|log| panic!("{log}"));
    }
    stop.store(true, Ordering::Relaxed);
    client.join().unwrap();
    server.stop();
}

#[test]
fn too_few_descriptors_refuse_a_take_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let limited = |limit: &str, more: &[&str]| {
        let mut command = Command::new("sh");
        let script = format!("ulimit {limit} && exec \"$@\"");
        command.args(["-c", &script, "sh", KVTIER]);
        let mut server = Server::spawn_by(command, base.path(), L1, more);
        let is_served = server.wait_until_served();
        (server, is_served)
    };
    let clients_of = |server: &Server, count| -> Vec<_> {
        let mut clients: Vec<_> = (0..count).map(|_| server.connect()).collect();
        // Those that have an answer have been accepted.
        for client in &mut clients {
            client.noop().unwrap();
        }
        clients
    };
    let server = Server::start(base.path(), L1, &[]);
    let mut clients = clients_of(&server, 70);
    // Of both limits.
    let (refused, is_served) = limited("-n 128", &["--take-over"]);
    let told = "70 clients are connected; the other server can have 64 (ulimit -n)";
    assert!(!is_served && refused.log.contains(told), "{}", refused.log);
    // Of the soft one, which may be raised.
    let (new, is_served) = limited("-S -n 64", &["--take-over"]);
    assert!(is_served, "{}", new.log);
    for client in &mut clients {
        client.noop().unwrap();
    }
    drop((clients, server));
    new.stop();
    let (server, _) = limited("-n 128", &[]);
    let mut clients = clients_of(&server, 50);
    let (refused, is_served) = limited("-n 1024", &["--take-over"]);
    let told = "needs 82 more; it may open 128 (ulimit -n)";
    assert!(!is_served && refused.log.contains(told), "{}", refused.log);
    for client in &mut clients {
        client.noop().unwrap();
    }
    server.stop();
}

#[test]
fn port_of_another_instance_is_named() {
    let (base, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let _segments = Segments::new();
    let server = Server::start(base.path(), L1, &[]);
    let port = server.endpoint.rsplit(':').next().unwrap();
    let flags = ["--port", port, "--take-over"];
    let log = Server::try_start(other.path(), L1, &flags).err().unwrap();
    let told = format!(
        "no server of --instance-id {} is there in this --state-dir (--take-over)",
        *INSTANCE_NAME
    );
    assert!(log.contains(&told), "{log}");
    server.stop();
}

/// Objects of another seed could only fill L1: no prompt has their hashes.
#[test]
fn l1_of_another_hash_seed_is_not_believed() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let seeded = |algorithm: &str, seed: &str, more: &[&str]| {
        let mut command = Command::new(KVTIER);
        command.env("PYTHONHASHSEED", seed);
        let flags = [&["--hash-algorithm", algorithm], more].concat();
        let mut server = Server::spawn_by(command, base.path(), L1, &flags);
        let is_served = server.wait_until_served();
        (server, is_served)
    };
    let (server, _) = seeded("sha256_cbor", "7", &[]);
    let worker = server.worker_with(1, "a", 0..1);
    let (refused, is_served) = seeded("sha256_cbor", "8", &["--take-over"]);
    assert!(!is_served && refused.log.contains("PYTHONHASHSEED"));
    drop(worker);
    server.stop();
    // Read and found by the next one of its own.
    let (server, _) = seeded("sha256_cbor", "7", &[]);
    assert_eq!(server.restored(), Some(CHUNKS));
    assert_eq!(read(&mut server.worker(1, "a"), "a", 0), Ok(CHUNKS));
    server.stop();
    let (server, _) = seeded("sha256_cbor", "8", &[]);
    assert_eq!(server.restored(), None);
    assert!(
        server.log.contains("hash algorithm or seed"),
        "{}",
        server.log
    );
    let mut worker = server.worker_with(1, "a", 0..1);
    assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    let status = server.http("/status", None);
    let l1 = &status["storage_manager"]["l1_manager"];
    assert_eq!(l1["total_object_count"], CHUNKS, "{status:#}");
    server.stop();
    // The default algorithm has none.
    let (mut server, _) = seeded("blake3", "7", &[]);
    let mut worker = server.worker_with(1, "a", 0..1);
    for seed in ["8", "9"] {
        let (new, is_served) = seeded("blake3", seed, &["--take-over"]);
        assert!(is_served, "{}", new.log);
        server.child.wait().unwrap();
        server = new;
        assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    }
    server.stop();
}

/// Makes a server unhealthy: it notices that pages of its pool are lost.
pub(crate) fn lose_pages(server: &Server) {
    let mut pages = server.pages(3, "pages");
    let blocks: Vec<i64> = (0..16).collect();
    assert!(pages.store(&prompt(1), whole(), "s", &blocks).unwrap());
    let pool = std::fs::File::options().write(true).open(Segments::pool());
    pool.unwrap().set_len(0).unwrap();
    assert_eq!(pages.lookup(&prompt(1), "r").unwrap(), CHUNKS);
    assert!(
        !pages
            .retrieve(&prompt(1), whole(), "r", &blocks, 0)
            .unwrap()
    );
}

/// What a failure has left is not for another process.
#[test]
fn unhealthy_server_is_not_taken_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    lose_pages(&server);
    wait_until("a failed health", || {
        server.http("/status", None)["is_healthy"] == false
    });
    let log = take_over(&mut server, base.path(), &[]).unwrap_err();
    assert!(log.contains("unhealthy, and has to be restarted"), "{log}");
    server.connect().noop().unwrap();
}
