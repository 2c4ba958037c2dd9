//! `kvtier server --take-over`: clients notice nothing of it, or nothing happens.

use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use kvtier_client::proto::request::Request;
use kvtier_client::{EngineDrivenWorker, InstanceId, LmcacheDrivenSpec, LmcacheDrivenWorker};
use kvtier_core::random::SplitMix64;
use kvtier_memory::checksum::checksum128;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::kills::{
    CHUNKS, KVTIER, Segments, Server, bytes, prompt, read, scope, wait_until, whole,
};

const L1: &str = "0.03125";

/// Takes over from a server, which ends with 0; the new one takes its place. Or returns the log of the one that did not.
fn take_over(server: &mut Server, base: &Path, more: &[&str]) -> Result<(), String> {
    let new = Server::try_start(base, L1, &[&["--take-over"], more].concat())?;
    let mut old = std::mem::replace(server, new);
    assert!(old.child.wait().unwrap().success());
    assert_eq!(old.endpoint, server.endpoint);
    Ok(())
}

/// A worker of tenant "a" that has stored these prompts.
fn worker_with(server: &Server, prompts: Range<u64>) -> EngineDrivenWorker {
    let mut worker = server.worker(1, "a");
    let len = worker.chunk_bytes();
    for number in prompts {
        let source = |chunk| bytes("a", number, chunk, len);
        worker.store(&prompt(number), whole(), "s", source).unwrap();
    }
    worker
}

/// Whether the lookup of a prompt under the request "held" still leads to its bytes.
fn held_is_right(worker: &mut EngineDrivenWorker, number: u64) -> bool {
    let (len, mut right) = (worker.chunk_bytes(), true);
    let check = |chunk, found: &[u8]| right &= found == bytes("a", number, chunk, len);
    let got = worker.retrieve(&prompt(number), whole(), "held", check);
    got.unwrap().is_some() && right
}

/// A client in bytes.
struct Raw(TcpStream);

impl Raw {
    fn connect(server: &Server) -> Self {
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

    fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    fn receive(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// The request of this number for the chunk size, and the answer.
    fn exchange(number: u8) -> (Vec<u8>, Vec<u8>) {
        let head = [&[1, 1, number, 1, 15, 0xae][..], b"get_chunk_size"].concat();
        let request = [&[1, 1, number, 0, 15, 0xae][..], b"get_chunk_size"].concat();
        (request, [&head[..], &[0, 1, 16]].concat())
    }
}

#[test]
fn clients_notice_nothing_of_a_take_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut worker = server.worker(1, "a");
    let len = worker.chunk_bytes();
    let mut spec = LmcacheDrivenSpec::new(InstanceId(3), scope("pages"), 2, 2, 16, 64);
    spec.block_tokens = 4;
    // A model of its own: the layouts differ.
    spec.scope.model_name = "kills/pages".to_owned();
    let mut pages = LmcacheDrivenWorker::register(server.connect(), spec).unwrap();
    let (own, target): (Vec<i64>, Vec<i64>) = ((0..16).collect(), (16..32).collect());
    for (chunk, blocks) in (0..CHUNKS).zip(own.chunks(4)) {
        let content = bytes("pages", 2, chunk, pages.chunk_bytes());
        pages.write_chunk(blocks, &content).unwrap();
    }
    assert!(pages.store(&prompt(2), whole(), "s", &own).unwrap());
    let mut pipelined = server.connect();
    let mut raw = Raw::connect(&server);
    let (request, answer) = Raw::exchange(0);
    raw.send(&request);
    assert_eq!(raw.receive(answer.len()), answer);
    // In the greeting still.
    let mut early = TcpStream::connect(server.endpoint.strip_prefix("tcp://").unwrap()).unwrap();
    early.write_all(&[0xff, 0, 0]).unwrap();
    for round in 0..5_u64 {
        let (number, request) = (10 + round, format!("r{round}"));
        let source = |chunk| bytes("a", number, chunk, len);
        let stored = worker.store(&prompt(number), whole(), "s", source);
        assert_eq!(stored.unwrap().chunks.len() as u64, CHUNKS);
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
        let pool = format!(
            "/dev/shm/lmcache_l1_pool_kvtier_kills_{}",
            std::process::id()
        );
        let pool = std::fs::File::options().write(true).open(pool).unwrap();
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
        assert!(
            pages
                .retrieve(&prompt(2), whole(), &request, &target, 0)
                .unwrap()
        );
        for (chunk, blocks) in (0..CHUNKS).zip(target.chunks(4)) {
            let mut found = Vec::new();
            pages.read_chunk(blocks, &mut found).unwrap();
            assert_eq!(found, bytes("pages", 2, chunk, found.len()));
        }
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
        let len = worker.chunk_bytes();
        while !stop.load(Ordering::Relaxed) {
            if stored < 40 {
                let source = |chunk| bytes(salt, stored, chunk, len);
                let written = worker.store(&prompt(stored), whole(), "s", source).unwrap();
                assert_eq!(written.chunks.len() as u64, CHUNKS);
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
    let mut spec = LmcacheDrivenSpec::new(InstanceId(8), scope("p"), 2, 2, 16, 64);
    spec.block_tokens = 4;
    spec.scope.model_name = "kills/pages".to_owned();
    let mut pages = LmcacheDrivenWorker::register(server.connect(), spec).unwrap();
    std::thread::spawn(move || {
        let (own, target): (Vec<i64>, Vec<i64>) = ((0..16).collect(), (16..32).collect());
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            for (chunk, blocks) in (0..CHUNKS).zip(own.chunks(4)) {
                let content = bytes("p", number, chunk, pages.chunk_bytes());
                pages.write_chunk(blocks, &content).unwrap();
            }
            assert!(pages.store(&prompt(number), whole(), "s", &own).unwrap());
            let request = format!("p{number}");
            assert_eq!(pages.lookup(&prompt(number), &request).unwrap(), CHUNKS);
            let got = pages.retrieve(&prompt(number), whole(), &request, &target, 0);
            assert!(got.unwrap());
            for (chunk, blocks) in (0..CHUNKS).zip(target.chunks(4)) {
                let mut found = Vec::new();
                pages.read_chunk(blocks, &mut found).unwrap();
                assert_eq!(found, bytes("p", number, chunk, found.len()));
            }
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
        (&["--max-message-gb", "1"], "--max-message-gb is"),
        (
            &["--l1-write-ttl-seconds", "7"],
            "--l1-write-ttl-seconds is",
        ),
    ] {
        let log = take_over(&mut server, base.path(), flags).unwrap_err();
        assert!(log.contains(told), "{flags:?}: {log}");
        assert!(log.contains("the running server goes on"), "{log}");
    }
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
            "second tiers",
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
    let server = Server::start(base.path(), L1, &[]);
    let mut clients: Vec<_> = (0..70).map(|_| server.connect()).collect();
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
    let mut clients: Vec<_> = (0..50).map(|_| server.connect()).collect();
    let (refused, is_served) = limited("-n 1024", &["--take-over"]);
    let told = "needs 82 more; it may open 128 (ulimit -n)";
    assert!(!is_served && refused.log.contains(told), "{}", refused.log);
    for client in &mut clients {
        client.noop().unwrap();
    }
    server.stop();
}

#[test]
fn second_new_server_learns_of_the_first() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let (between, mut new) = Between::start(base.path());
    let hello = Between::read(&between.new);
    (&between.old).write_all(&hello).unwrap();
    let second = UnixStream::connect(base.path().join("kills/take-over")).unwrap();
    (&second).write_all(&hello).unwrap();
    between.write_state(between.read_state());
    let commit = Between::read(&between.new);
    (&between.old).write_all(&commit).unwrap();
    let done = Between::read(&between.old);
    (&between.new).write_all(&done).unwrap();
    let refusal = Between::read(&second);
    assert_eq!(refusal[0], 2);
    let told = String::from_utf8_lossy(&refusal[25..]).into_owned();
    let first = format!("process {} has just taken over", new.child.id());
    assert!(told.contains(&first), "{told}");
    assert!(new.wait_until_served(), "{}", new.log);
    assert!(server.child.wait().unwrap().success());
    new.stop();
}

#[test]
fn port_of_another_instance_is_named() {
    let (base, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let _segments = Segments::new();
    let server = Server::start(base.path(), L1, &[]);
    let port = server.endpoint.rsplit(':').next().unwrap();
    let flags = ["--port", port, "--take-over"];
    let log = Server::try_start(other.path(), L1, &flags).err().unwrap();
    let told = "no server of --instance-id kills is there in this --state-dir (--take-over)";
    assert!(log.contains(told), "{log}");
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
    let worker = worker_with(&server, 0..1);
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
    let mut worker = worker_with(&server, 0..1);
    assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    let status = server.http("/status", None);
    let l1 = &status["storage_manager"]["l1_manager"];
    assert_eq!(l1["total_object_count"], CHUNKS, "{status:#}");
    server.stop();
    // The default algorithm has none.
    let (mut server, _) = seeded("blake3", "7", &[]);
    let mut worker = worker_with(&server, 0..1);
    for seed in ["8", "9"] {
        let (new, is_served) = seeded("blake3", seed, &["--take-over"]);
        assert!(is_served, "{}", new.log);
        server.child.wait().unwrap();
        server = new;
        assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    }
    server.stop();
}

/// What a failure has left is not for another process.
#[test]
fn unhealthy_server_is_not_taken_over() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut pages = server.pages(3);
    let blocks: Vec<i64> = (0..16).collect();
    assert!(pages.store(&prompt(1), whole(), "s", &blocks).unwrap());
    // Pages of the pool are lost.
    let pool = format!(
        "/dev/shm/lmcache_l1_pool_kvtier_kills_{}",
        std::process::id()
    );
    let pool = std::fs::File::options().write(true).open(pool).unwrap();
    pool.set_len(0).unwrap();
    assert_eq!(pages.lookup(&prompt(1), "r").unwrap(), CHUNKS);
    assert!(
        !pages
            .retrieve(&prompt(1), whole(), "r", &blocks, 0)
            .unwrap()
    );
    wait_until("a failed health", || {
        server.http("/status", None)["is_healthy"] == false
    });
    let log = take_over(&mut server, base.path(), &[]).unwrap_err();
    assert!(log.contains("unhealthy, and has to be restarted"), "{log}");
    server.connect().noop().unwrap();
}

/// Which process is killed, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kill {
    NewBeforeHello,
    NewAfterHello,
    NewAfterState,
    NewBeforeCommit,
    NewAfterCommit,
    OldAfterHello,
    OldAfterState,
    OldBeforeCommit,
    OldAfterCommit,
}

/// Which server serves afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Survivor {
    Old,
    New,
    Neither,
}

impl Kill {
    const ALL: [Self; 9] = [
        Self::NewBeforeHello,
        Self::NewAfterHello,
        Self::NewAfterState,
        Self::NewBeforeCommit,
        Self::NewAfterCommit,
        Self::OldAfterHello,
        Self::OldAfterState,
        Self::OldBeforeCommit,
        Self::OldAfterCommit,
    ];

    fn survivor(self) -> Survivor {
        match self {
            Self::NewBeforeHello
            | Self::NewAfterHello
            | Self::NewAfterState
            | Self::NewBeforeCommit => Survivor::Old,
            // It had everything by then: no other process has it.
            Self::NewAfterCommit => Survivor::Neither,
            // Nothing was handed over yet.
            Self::OldAfterHello => Survivor::Neither,
            // It could not commit.
            Self::OldAfterState => Survivor::Neither,
            Self::OldBeforeCommit | Self::OldAfterCommit => Survivor::New,
        }
    }
}

/// Between the two servers: passes their messages on, and kills one of them at a certain moment.
struct Between {
    new: UnixStream,
    old: UnixStream,
}

impl Between {
    /// Takes the place of the old server's socket, and starts a new one.
    fn start(base: &Path) -> (Self, Server) {
        let path = base.join("kills/take-over");
        let hidden = base.join("kills/hidden");
        std::fs::rename(&path, &hidden).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let server = Server::spawn(base, L1, &["--take-over"]);
        let (new, _) = listener.accept().unwrap();
        let old = UnixStream::connect(&hidden).unwrap();
        std::fs::rename(&hidden, &path).unwrap();
        (Self { new, old }, server)
    }

    /// The same, up to the new server's commit, which the old one does not get.
    fn start_with_lost_commit(base: &Path) -> (Self, Server) {
        let (between, new) = Self::start(base);
        let hello = Self::read(&between.new);
        (&between.old).write_all(&hello).unwrap();
        between.write_state(between.read_state());
        assert_eq!(Self::read(&between.new)[0], 5);
        (between, new)
    }

    fn read(mut from: &UnixStream) -> Vec<u8> {
        let mut message = vec![0; 25];
        from.read_exact(&mut message).unwrap();
        let len = u64::from_le_bytes(message[1..9].try_into().unwrap());
        message.resize(25 + len as usize, 0);
        from.read_exact(&mut message[25..]).unwrap();
        message
    }

    /// The state of the old server, the connections' bytes and all descriptors.
    fn read_state(&self) -> (Vec<u8>, Vec<u8>, Vec<OwnedFd>) {
        let (state, bytes) = (Self::read(&self.old), Self::read(&self.old));
        assert_eq!(state[0], 3, "{}", String::from_utf8_lossy(&state));
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut slices = [IoSliceMut::new(&mut byte)];
        recvmsg(
            &self.old,
            &mut slices,
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
        .unwrap();
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                descriptors.extend(some);
            }
        }
        (state, bytes, descriptors)
    }

    fn write_state(&self, (state, bytes, descriptors): (Vec<u8>, Vec<u8>, Vec<OwnedFd>)) {
        let mut new = &self.new;
        new.write_all(&state).unwrap();
        // One that refuses the state may not wait for the rest.
        if new.write_all(&bytes).is_err() {
            return;
        }
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let slices = [IoSlice::new(&[0])];
        let _ = sendmsg(&self.new, &slices, &mut control, SendFlags::NOSIGNAL);
    }

    /// Passes everything on until the moment of a kill. Both ends are closed then, as by the death of either.
    fn run(self, kill: Kill, new: &mut Child, old: &mut Child) {
        let end = |child: &mut Child| {
            child.kill().unwrap();
            child.wait().unwrap();
        };
        let pass =
            |from: &UnixStream, mut to: &UnixStream| to.write_all(&Self::read(from)).unwrap();
        if kill == Kill::NewBeforeHello {
            return end(new);
        }
        pass(&self.new, &self.old);
        match kill {
            Kill::NewAfterHello => return end(new),
            Kill::OldAfterHello => return end(old),
            _ => {}
        }
        let state = self.read_state();
        match kill {
            Kill::NewAfterState => return end(new),
            Kill::OldAfterState => {
                end(old);
                // The proxy still has its socket.
                self.new.shutdown(Shutdown::Read).unwrap();
            }
            _ => {}
        }
        self.write_state(state);
        if kill == Kill::OldAfterState {
            return;
        }
        let commit = Self::read(&self.new);
        assert_eq!(commit[0], 5);
        match kill {
            Kill::NewBeforeCommit => return end(new),
            Kill::OldBeforeCommit => return end(old),
            _ => {}
        }
        (&self.old).write_all(&commit).unwrap();
        let done = Self::read(&self.old);
        assert_eq!(done[0], 6);
        match kill {
            Kill::NewAfterCommit => {
                assert!(old.wait().unwrap().success());
                end(new);
            }
            _ => end(old),
        }
    }
}

#[test]
fn kill_at_each_step_leaves_one_server_or_none() {
    for kill in Kill::ALL {
        let base = tempfile::tempdir().unwrap();
        let _segments = Segments::new();
        let mut server = Server::start(base.path(), L1, &[]);
        let mut worker = worker_with(&server, 0..3);
        assert_eq!(worker.lookup(&prompt(1), "held").unwrap(), CHUNKS);
        let mut raw = Raw::connect(&server);
        let (request, answer) = Raw::exchange(0);
        raw.send(&request[..7]);
        let (between, mut new) = Between::start(base.path());
        between.run(kill, &mut new.child, &mut server.child);
        let mut check = |server: &Server| {
            raw.send(&request[7..]);
            assert_eq!(
                raw.receive(answer.len()),
                answer,
                "{kill:?}: {}",
                server.log
            );
            assert!(held_is_right(&mut worker, 1), "{kill:?}");
            for number in 0..3 {
                assert_eq!(read(&mut worker, "a", number), Ok(CHUNKS), "{kill:?}");
            }
        };
        let is_served = new.wait_until_served();
        match kill.survivor() {
            Survivor::Old => {
                assert!(!is_served, "{kill:?}: {}", new.log);
                check(&server);
                // And the next one can take over.
                take_over(&mut server, base.path(), &[]).unwrap();
                assert_eq!(read(&mut worker, "a", 2), Ok(CHUNKS), "{kill:?}");
                server.stop();
            }
            Survivor::New => {
                assert!(is_served, "{kill:?}: {}", new.log);
                check(&new);
                take_over(&mut new, base.path(), &[]).unwrap();
                new.stop();
            }
            Survivor::Neither => {
                assert!(!is_served, "{kill:?}: {}", new.log);
                // As after any kill: what was stored is there.
                let server = Server::start(base.path(), L1, &[]);
                let mut worker = server.worker(2, "a");
                for number in 0..3 {
                    assert_eq!(read(&mut worker, "a", number), Ok(CHUNKS), "{kill:?}");
                }
                server.stop();
            }
        }
    }
}

/// A message with another body.
fn with_body(message: &[u8], change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
    let mut body = serde_json::from_slice(&message[25..]).unwrap();
    change(&mut body);
    let body = serde_json::to_vec(&body).unwrap();
    let len = (body.len() as u64).to_le_bytes();
    let sum = checksum128(&body).to_le_bytes();
    [&message[..1], &len, &sum, &body].concat()
}

#[test]
fn state_that_is_not_understood_is_not_taken() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut worker = worker_with(&server, 0..1);
    assert_eq!(worker.lookup(&prompt(0), "held").unwrap(), CHUNKS);
    let scope = scope("a");
    let unfinished = prompt(1);
    let key = scope.worker_key(0, &unfinished, whole(), "s");
    worker
        .connection()
        .prepare_store(&key, InstanceId(1))
        .unwrap();
    let read_key = scope.worker_key(0, &unfinished, whole(), "s");
    let attempt = |hello: fn(&mut serde_json::Value), state: Option<fn(&mut serde_json::Value)>| {
        let (between, mut new) = Between::start(base.path());
        let greeting = with_body(&Between::read(&between.new), hello);
        (&between.old).write_all(&greeting).unwrap();
        let answer = match state {
            Some(change) => {
                let (state, bytes, descriptors) = between.read_state();
                between.write_state((with_body(&state, change), bytes, descriptors));
                let refusal = Between::read(&between.new);
                (&between.old).write_all(&refusal).unwrap();
                refusal
            }
            None => {
                let refusal = Between::read(&between.old);
                (&between.new).write_all(&refusal).unwrap();
                refusal
            }
        };
        drop(between);
        assert!(!new.wait_until_served(), "{}", new.log);
        assert_eq!(answer[0], 2);
        let told = String::from_utf8(answer[25..].to_vec()).unwrap();
        assert!(new.log.contains(told.trim()), "{} {told}", new.log);
        told
    };
    for (hello, told) in [
        (
            (|hello| hello["formats"] = [2, 3].into()) as fn(&mut serde_json::Value),
            "formats [2, 3]; this one writes 1",
        ),
        (
            |hello| hello["formats"] = serde_json::Value::Null,
            "cannot be read",
        ),
        (
            |hello| hello["flags"]["--chunk-size"]["sum"] = "7".into(),
            "--chunk-size is 16 in the running server and another 16",
        ),
    ] {
        let refused = attempt(hello, None);
        assert!(refused.contains(told), "{refused}");
    }
    // The next release may read more.
    let newer: fn(&mut serde_json::Value) = |hello| hello["formats"] = [1, 2].into();
    for (state, told) in [
        (
            (|state| state["format"] = 2.into()) as fn(&mut serde_json::Value),
            "format 2; this server reads 1",
        ),
        (|state| state["later"] = 1.into(), "unknown field `later`"),
        (
            |state| state["http_sockets"] = 0.into(),
            "too many descriptors",
        ),
        (
            |state| state["engine"]["workers"][0]["id"] = 9.into(),
            "worker 9: its registration is not kept",
        ),
        (
            |state| state["engine"]["lookups"]["lookups"][0]["rows"][0]["layout"] = 9.into(),
            "an object that is not in L1",
        ),
        (
            |state| state["engine"]["lookups"]["lookups"][0]["hashes"][0] = "x".into(),
            "no chunk hash",
        ),
        (
            |state| state["engine"]["lookups"]["lookups"][0]["freed"] = [true, true].into(),
            "was read or freed",
        ),
        (
            |state| state["engine"]["transfers"][0]["memory"]["store"][0][0] = 99_999.into(),
            "has not recorded its memory",
        ),
        (
            |state| state["front"]["connections"][0]["client"]["generations"] = 128.into(),
            "generation that is unknown",
        ),
        (
            |state| state["front"]["connections"][0]["input"] = 9.into(),
            "bytes of a connection are missing",
        ),
    ] {
        let refused = attempt(newer, Some(state));
        assert!(refused.contains(told), "{refused}");
    }
    // All of it is still as it was.
    let granted = worker
        .connection()
        .commit_store(&read_key, InstanceId(1), b"");
    assert!(granted.unwrap());
    assert!(held_is_right(&mut worker, 0));
    take_over(&mut server, base.path(), &[]).unwrap();
    assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    server.stop();
}

/// Names of the threads of a process, once all have theirs: until then a thread has the main one's.
fn threads(child: &Child) -> Vec<String> {
    let mut names = Vec::new();
    wait_until("a name for each thread", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        let found = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
        names = found.map(|name| name.unwrap().trim().to_owned()).collect();
        names.iter().filter(|name| *name == "kvtier").count() == 1
    });
    names
}

/// An end of file behind a commit is no proof that the old server has ended.
#[test]
fn new_server_does_not_serve_beside_running_one() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut worker = worker_with(&server, 0..1);
    let (between, mut new) = Between::start_with_lost_commit(base.path());
    // Nothing that the system may refuse is left to be started by then.
    let names = threads(&new.child);
    for name in ["kvtier-front", "kvtier-housekee"] {
        assert!(names.iter().any(|found| found == name), "{names:?}");
    }
    drop(between);
    assert!(!new.wait_until_served(), "{}", new.log);
    assert!(new.log.contains("L1"), "{}", new.log);
    assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    take_over(&mut server, base.path(), &[]).unwrap();
    assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    server.stop();
}

/// The other server could still commit while the old one ends.
#[test]
fn stop_during_hand_over_refuses_it() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let (between, mut new) = Between::start_with_lost_commit(base.path());
    let pid = rustix::process::Pid::from_child(&server.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    // It is closed before the time of a hand-over ends, which a refusal would tell.
    let mut rest = Vec::new();
    (&between.old).read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    // The commit would come too late.
    assert!((&between.old).write_all(&[5; 25]).is_err());
    assert!(server.child.wait().unwrap().success());
    new.child.kill().unwrap();
    drop(between);
    assert!(!new.wait_until_served(), "{}", new.log);
    let server = Server::start(base.path(), L1, &[]);
    assert!(server.log.contains("objects"), "{}", server.log);
    server.stop();
}

/// Whether it is a stop or the end of the other server that keeps *done* from it, the old one does not know.
#[test]
fn done_that_cannot_be_sent_is_a_warning() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut worker = worker_with(&server, 0..1);
    let (between, mut new) = Between::start(base.path());
    (&between.old)
        .write_all(&Between::read(&between.new))
        .unwrap();
    between.write_state(between.read_state());
    between.old.shutdown(Shutdown::Read).unwrap();
    (&between.old)
        .write_all(&Between::read(&between.new))
        .unwrap();
    assert!(server.child.wait().unwrap().success());
    let log = server.rest_of_log();
    assert!(
        log.contains("done was not sent") && !log.contains("ERROR"),
        "{log}"
    );
    drop(between);
    assert!(new.wait_until_served(), "{}", new.log);
    assert_eq!(read(&mut worker, "a", 0), Ok(CHUNKS));
    new.stop();
}

/// The old server waits 10 s for all steps together, then goes on; the new one must not serve beside it.
#[test]
fn new_server_that_comes_too_late_ends() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), L1, &[]);
    let mut worker = worker_with(&server, 0..1);
    assert_eq!(worker.lookup(&prompt(0), "held").unwrap(), CHUNKS);
    let (between, mut new) = Between::start_with_lost_commit(base.path());
    // It arrives too late.
    let refusal = Between::read(&between.old);
    assert_eq!(refusal[0], 2);
    (&between.new).write_all(&refusal).unwrap();
    assert!(!new.wait_until_served());
    assert!(new.log.contains("did not answer in time"), "{}", new.log);
    assert!(held_is_right(&mut worker, 0));
    take_over(&mut server, base.path(), &[]).unwrap();
    server.stop();
}
