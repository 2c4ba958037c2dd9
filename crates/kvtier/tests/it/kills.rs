//! A server that is killed at any moment, and the next one: every byte that it serves is right, and what was answered is there.
//!
//! `KVTIER_KILLS=10000 cargo test -p kvtier --all-features --test it kills::killed -- --nocapture` kills as often as that;
//! with another `KVTIER_KILLS_SEED`, at other moments.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Lines};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvtier_client::{
    Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, LmcacheDrivenSpec,
    LmcacheDrivenWorker, Options, Prompt, Scope,
};
use kvtier_core::random::SplitMix64;

pub(crate) const KVTIER: &str = env!("CARGO_BIN_EXE_kvtier");

/// Tokens of a chunk.
pub(crate) const CHUNK: usize = 16;
/// Chunks of a prompt.
pub(crate) const CHUNKS: u64 = 4;

/// How long a reply may take before the test fails.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// The same for a request that a kill may leave without one: clients wait for the next server. One that comes later counts as none.
const BRIEF: Duration = Duration::from_millis(200);

/// Stores of a worker without an answer, at most, until it is killed.
const MAX_UNSURE: usize = 8;

/// Kills in the gate.
const KILLS: u64 = 20;

pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) endpoint: String,
    pub(crate) log: String,
    lines: Option<Lines<BufReader<ChildStderr>>>,
    rest: Option<JoinHandle<String>>,
}

impl Server {
    /// Starts a server of the instance that keeps its state below `base`.
    pub(crate) fn start(base: &Path, l1: &str, more: &[&str]) -> Self {
        let started = Self::try_start(base, l1, more);
        started.unwrap_or_else(|log| panic!("the server does not serve: {log}"))
    }

    /// The same, or the log of a server that ends before it serves.
    pub(crate) fn try_start(base: &Path, l1: &str, more: &[&str]) -> Result<Self, String> {
        let mut server = Self::spawn(base, l1, more);
        match server.wait_until_served() {
            true => Ok(server),
            false => Err(std::mem::take(&mut server.log)),
        }
    }

    /// The same, which does not serve yet.
    pub(crate) fn spawn(base: &Path, l1: &str, more: &[&str]) -> Self {
        Self::spawn_by(Command::new(KVTIER), base, l1, more)
    }

    /// The same by a command that takes the server's arguments.
    pub(crate) fn spawn_by(mut command: Command, base: &Path, l1: &str, more: &[&str]) -> Self {
        let pool = format!("kvtier_kills_{}", std::process::id());
        let mut child = command
            .args([
                "server",
                "--port",
                "0",
                "--http-port",
                "0",
                "--l1-size-gb",
                l1,
            ])
            .args([
                "--chunk-size",
                "16",
                "--no-l1-prefault",
                "--instance-id",
                "kills",
            ])
            .args([
                "--l1-restore",
                "on",
                "--eviction-trigger-watermark",
                "1",
                "--cuda-driver",
                "off",
            ])
            .arg("--state-dir")
            .arg(base)
            .args(["--shm-name", &pool])
            .args(more)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        Self {
            child,
            endpoint: String::new(),
            log: String::new(),
            lines: Some(lines),
            rest: None,
        }
    }

    /// What the server has logged since it serves, once it has ended.
    pub(crate) fn rest_of_log(&mut self) -> String {
        self.rest.take().unwrap().join().unwrap()
    }

    /// Reads the log until the server serves; returns whether it does, and has not ended.
    pub(crate) fn wait_until_served(&mut self) -> bool {
        let Some(mut lines) = self.lines.take() else {
            return true;
        };
        for line in lines.by_ref().map_while(Result::ok) {
            self.log += &line;
            self.log.push('\n');
            if let Some((_, rest)) = line.split_once("endpoint=\"") {
                let endpoint = rest.split_once('"').unwrap().0;
                self.endpoint = endpoint.to_owned();
                // Read to its end, so that the server never waits for it.
                let rest = move || lines.map_while(Result::ok).collect::<Vec<_>>().join("\n");
                self.rest = Some(std::thread::spawn(rest));
                return true;
            }
        }
        self.child.wait().unwrap();
        false
    }

    pub(crate) fn connect(&self) -> Connection {
        let options = Options {
            timeout: REPLY_TIMEOUT,
            ..Options::default()
        };
        Connection::connect_with(&self.endpoint, options).unwrap()
    }

    /// A worker that copies by itself, with 8 KiB per chunk.
    pub(crate) fn worker(&self, instance: i64, salt: &str) -> EngineDrivenWorker {
        let mut spec = EngineDrivenSpec::new(InstanceId(instance), scope(salt), 2, 64);
        spec.block_tokens = 4;
        EngineDrivenWorker::register(self.connect(), spec).unwrap()
    }

    /// A worker of an instance that no other one of the process has. One that ends unregisters its instance, perhaps after
    /// the next one has registered.
    fn reader(&self, salt: &str) -> EngineDrivenWorker {
        static NEXT: AtomicI64 = AtomicI64::new(1000);
        self.worker(NEXT.fetch_add(1, Ordering::Relaxed), salt)
    }

    /// A worker whose pages the server copies, with 4 KiB per chunk.
    pub(crate) fn pages(&self, instance: i64) -> LmcacheDrivenWorker {
        let mut spec = LmcacheDrivenSpec::new(InstanceId(instance), scope("pages"), 2, 2, 16, 64);
        spec.block_tokens = 4;
        LmcacheDrivenWorker::register(self.connect(), spec).unwrap()
    }

    /// Number of objects that the start has found.
    pub(crate) fn restored(&self) -> Option<u64> {
        let line = self.log.lines().find(|line| line.contains("restored L1"))?;
        let (_, rest) = line.split_once("objects=")?;
        rest.split(' ').next()?.parse().ok()
    }

    /// The answer of a route.
    pub(crate) fn http(&self, path: &str, body: Option<&str>) -> serde_json::Value {
        let (_, rest) = self.log.split_once("http=\"").unwrap();
        let url = format!("{}{path}", rest.split('"').next().unwrap());
        let answer = match body {
            None => ureq::get(url).call(),
            Some(body) => ureq::put(url).send(body),
        };
        let text = answer.unwrap().body_mut().read_to_string().unwrap();
        serde_json::from_str(&text).unwrap()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Asks it to stop.
    pub(crate) fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    pub(crate) fn stop(mut self) {
        self.terminate();
        assert!(self.child.wait().unwrap().success());
    }
}

/// Waits for something that comes soon or not at all.
pub(crate) fn wait_until(what: &str, mut is_there: impl FnMut() -> bool) {
    let until = Instant::now() + REPLY_TIMEOUT;
    while !is_there() {
        assert!(Instant::now() < until, "{what} did not come");
        std::thread::yield_now();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Segments of this process's name, one test at a time. Removes what the last server has left in /dev/shm.
pub(crate) struct Segments {
    _turn: MutexGuard<'static, ()>,
}

impl Segments {
    pub(crate) fn new() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        Self { _turn: turn }
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        for name in ["", ".ledger"] {
            let pid = std::process::id();
            let path = format!("/dev/shm/lmcache_l1_pool_kvtier_kills_{pid}{name}");
            let _ = std::fs::remove_file(path);
        }
    }
}

pub(crate) fn scope(salt: &str) -> Scope {
    Scope {
        cache_salt: salt.to_owned(),
        ..Scope::new("kills/model")
    }
}

pub(crate) fn prompt(number: u64) -> Prompt {
    let first = u32::try_from(number).unwrap() * 1000;
    let tokens: Vec<_> = (0..CHUNKS as u32 * CHUNK as u32)
        .map(|token| first + token)
        .collect();
    Prompt::new(&tokens)
}

pub(crate) fn whole() -> Range<u64> {
    0..CHUNKS * CHUNK as u64
}

/// Bytes of a chunk that nothing else has.
pub(crate) fn bytes(salt: &str, number: u64, chunk: u64, len: usize) -> Vec<u8> {
    let tenant = salt.bytes().fold(0, |sum, byte| sum * 31 + u64::from(byte));
    SplitMix64::new(tenant << 32 ^ number << 8 ^ chunk).bytes(len)
}

/// Chunks of a prompt that a worker reads, all of them right.
pub(crate) fn read(
    worker: &mut EngineDrivenWorker,
    salt: &str,
    number: u64,
) -> Result<u64, String> {
    let (prompt, request) = (prompt(number), format!("r{number}"));
    let hit = worker
        .lookup(&prompt, &request)
        .map_err(|error| error.to_string())?;
    let len = worker.chunk_bytes();
    let mut wrong = None;
    if hit > 0 {
        let range = 0..hit * CHUNK as u64;
        let check = |chunk, found: &[u8]| {
            if found != bytes(salt, number, chunk, len) {
                wrong = Some(chunk);
            }
        };
        let read = worker.retrieve(&prompt, range, &request, check);
        if read.map_err(|error| error.to_string())?.is_none() {
            return Err(format!(
                "{hit} chunks were found, and their retrieve was refused"
            ));
        }
    }
    assert_eq!(
        wrong, None,
        "wrong bytes in a chunk of prompt {number} of {salt:?}"
    );
    Ok(hit)
}

/// Stores and reads until the server is killed. Returns the prompts whose store was answered.
fn work(
    mut worker: EngineDrivenWorker,
    salt: &str,
    mut random: SplitMix64,
    prompts: u64,
    answered: &AtomicU64,
    is_killed: &AtomicBool,
) -> Vec<u64> {
    // Without an answer a prompt may be there or not, or be being written for as long as the server lives.
    let (mut stored, mut unsure) = (BTreeSet::new(), BTreeSet::new());
    let len = worker.chunk_bytes();
    worker.connection().set_timeout(BRIEF);
    // Each store without an answer has reserved memory, and a worker may reserve a quarter of L1.
    while !is_killed.load(Ordering::Relaxed) && unsure.len() < MAX_UNSURE {
        let number = random.below(prompts);
        let is_answered = if random.below(3) == 0 {
            read(&mut worker, salt, number).is_ok()
        } else {
            let source = |chunk| bytes(salt, number, chunk, len);
            let answer = worker.store(&prompt(number), whole(), "s", source);
            match &answer {
                // None is taken of what is there, but also where the server refuses the store.
                Ok(taken) if taken.chunks.is_empty() && !stored.contains(&number) => {
                    unsure.insert(number)
                }
                Ok(_) => stored.insert(number),
                Err(_) => unsure.insert(number),
            };
            answer.is_ok()
        };
        answered.fetch_add(is_answered.into(), Ordering::Relaxed);
    }
    stored.difference(&unsure).copied().collect()
}

#[test]
fn killed_server_loses_nothing_it_answered() {
    let given = |name| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let (kills, seed) = (
        given("KVTIER_KILLS").unwrap_or(KILLS),
        given("KVTIER_KILLS_SEED").unwrap_or(17),
    );
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut random = SplitMix64::new(seed);
    let (mut server, mut reads, mut objects) = (Server::start(base.path(), "0.008", &[]), 0, 0);
    for kill in 0..kills {
        // In every other round nothing is evicted: 8 MiB hold 256 prompts, and each tenant has 40. Else 10 times as many.
        let fits = kill % 2 == 0;
        let prompts = if fits { 40 } else { 1000 };
        // Not of one instance: a worker that ends unregisters it.
        let workers =
            [(1, "a"), (3, "b")].map(|(instance, salt)| (salt, server.worker(instance, salt)));
        let mut clear = server.connect();
        if fits {
            clear.clear(true).unwrap();
        }
        let (answered, is_killed) = (AtomicU64::new(0), AtomicBool::new(false));
        let target = random.below(60);
        let stored: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = workers
                .into_iter()
                .map(|(salt, worker)| {
                    let random = SplitMix64::new(random.next());
                    let (answered, is_killed) = (&answered, &is_killed);
                    scope.spawn(move || {
                        let stored = work(worker, salt, random, prompts, answered, is_killed);
                        (salt, stored)
                    })
                })
                .collect();
            while answered.load(Ordering::Relaxed) < target
                && !threads.iter().all(|thread| thread.is_finished())
            {
                std::thread::yield_now();
            }
            server.kill();
            is_killed.store(true, Ordering::Relaxed);
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        server = Server::start(base.path(), "0.008", &[]);
        assert!(server.restored().is_some(), "kill {kill}: {}", server.log);
        objects += server.restored().unwrap();
        for (salt, stored) in stored {
            let mut worker = server.reader(salt);
            for number in stored {
                let hit = read(&mut worker, salt, number).unwrap();
                assert!(
                    !fits || hit == CHUNKS,
                    "kill {kill}: {hit} chunks of prompt {number} of {salt:?}; {}\n{}",
                    server.http("/status", None)["storage_manager"]["l1_manager"],
                    server.log
                );
                reads += hit;
            }
            // Others may have been stored without an answer; their bytes are right, too.
            for number in 0..prompts.min(60) {
                reads += read(&mut worker, salt, number).unwrap();
            }
        }
    }
    eprintln!("{kills} kills, {objects} objects restored, {reads} chunks read, all right");
    assert!(reads > kills && objects > kills);
}

#[test]
fn stopped_server_leaves_l1_to_the_next() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let server = Server::start(base.path(), "0.03125", &[]);
    assert!(server.log.contains("L1 starts empty"), "{}", server.log);
    let mut worker = server.worker(1, "a");
    let len = worker.chunk_bytes();
    let store = |worker: &mut EngineDrivenWorker, number| {
        worker
            .store(&prompt(number), whole(), "s", |chunk| {
                bytes("a", number, chunk, len)
            })
            .unwrap()
            .chunks
            .len()
    };
    assert_eq!(store(&mut worker, 1), 4);
    // Copied by the server.
    let mut pages = server.pages(3);
    let blocks: Vec<i64> = (0..16).collect();
    for chunk in 0..CHUNKS {
        let own = &blocks[chunk as usize * 4..][..4];
        pages
            .write_chunk(own, &bytes("pages", 2, chunk, pages.chunk_bytes()))
            .unwrap();
    }
    assert!(pages.store(&prompt(2), whole(), "s", &blocks).unwrap());
    server.stop();
    // Larger and smaller: what fits is there.
    for (size, objects) in [("0.03125", 8), ("0.0625", 8), ("0.015625", 8)] {
        let server = Server::start(base.path(), size, &[]);
        assert_eq!(server.restored(), Some(objects), "{}", server.log);
        assert_eq!(read(&mut server.worker(1, "a"), "a", 1), Ok(CHUNKS));
        let mut pages = server.pages(3);
        assert_eq!(pages.lookup(&prompt(2), "r").unwrap(), CHUNKS);
        let target: Vec<i64> = (16..32).collect();
        assert!(
            pages
                .retrieve(&prompt(2), whole(), "r", &target, 0)
                .unwrap()
        );
        for chunk in 0..CHUNKS {
            let (mut found, own) = (Vec::new(), &target[chunk as usize * 4..][..4]);
            pages.read_chunk(own, &mut found).unwrap();
            assert_eq!(found, bytes("pages", 2, chunk, found.len()));
        }
        server.stop();
    }
    // Another chunk size, another instance, none: nothing is believed.
    for (flags, told) in [
        (&["--chunk-size", "32"][..], "another chunk size"),
        (&["--instance-id", "other"], "another chunk size"),
        (&["--l1-restore", "off"], "--l1-restore off"),
    ] {
        let server = Server::start(base.path(), "0.03125", flags);
        assert_eq!(server.restored(), None);
        let line = server
            .log
            .lines()
            .find(|line| line.contains("L1 starts empty"));
        assert!(
            line.is_some_and(|line| line.contains(told)),
            "{}",
            server.log
        );
        server.stop();
    }
    let server = Server::start(base.path(), "0.03125", &[]);
    assert!(
        server.log.contains("no earlier server has left one"),
        "{}",
        server.log
    );
}

/// Stores prompts of a tenant.
/// By a worker of its own: with an id of another one it would lose its registration when that one ends.
fn store(server: &Server, instance: i64, salt: &str, prompts: Range<u64>) {
    let mut worker = server.worker(instance, salt);
    let len = worker.chunk_bytes();
    for number in prompts {
        worker
            .store(&prompt(number), whole(), "s", |chunk| {
                bytes(salt, number, chunk, len)
            })
            .unwrap();
    }
}

#[test]
fn usage_and_quotas_are_exact_after_a_kill() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let start = || {
        let flags = ["--eviction-policy", "IsolatedLRU"];
        Server::start(base.path(), "0.0078125", &flags)
    };
    let mut server = start();
    let body = r#"{"limit_gb": "1MiB", "reserved_gb": "512KiB"}"#;
    assert_eq!(server.http("/quota/a", Some(body))["status"], "ok");
    store(&server, 1, "a", 0..10);
    store(&server, 2, "b", 0..5);
    let told = |server: &Server| {
        ["a", "b"].map(|salt| {
            let told = server.http(&format!("/quota/{salt}"), None);
            let l1 = &told["tiers"]["l1"];
            let keys = ["limit_bytes", "reserved_bytes", "usage_bytes", "objects"];
            keys.map(|key| l1[key].as_u64())
        })
    };
    let chunk = 8192;
    let expected = [
        [
            Some(1 << 20),
            Some(1 << 19),
            Some(10 * CHUNKS * chunk),
            Some(10 * CHUNKS),
        ],
        [None, Some(0), Some(5 * CHUNKS * chunk), Some(5 * CHUNKS)],
    ];
    assert_eq!(told(&server), expected);
    server.kill();
    let server = start();
    assert_eq!(server.restored(), Some(15 * CHUNKS), "{}", server.log);
    assert_eq!(told(&server), expected, "before the first request");
    for (salt, prompts) in [("a", 10), ("b", 5)] {
        let mut worker = server.reader(salt);
        for number in 0..prompts {
            assert_eq!(read(&mut worker, salt, number), Ok(CHUNKS));
        }
    }
    assert_eq!(told(&server), expected);
}

/// What a smaller server leaves out is absent for a larger one after it: that memory was given back, or was another object's since.
#[test]
fn larger_server_after_a_smaller_one_believes_no_stale_record() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let server = Server::start(base.path(), "0.0625", &[]);
    // More records than the ledger of the smaller one has.
    store(&server, 1, "a", 0..700);
    server.stop();
    let small = Server::start(base.path(), "0.0078125", &[]);
    let fit = small.restored().unwrap();
    assert!((1..2800).contains(&fit), "{}", small.log);
    small.stop();
    let server = Server::start(base.path(), "0.0625", &[]);
    // It was full, so some may have been evicted.
    let kept = server.restored().unwrap();
    assert!((1..=fit).contains(&kept), "{}", server.log);
    let mut worker = server.worker(2, "a");
    let hits = (0..700).map(|number| read(&mut worker, "a", number).unwrap());
    assert!((1..=kept).contains(&hits.sum()));
}

/// Damage to the files of a server that has ended.
#[derive(Clone, Copy, Debug)]
enum Damage {
    None,
    /// The pool ends after the first prompt.
    ShortPool,
    EmptyPool,
    /// A pool with the same bytes that is another file.
    CopiedPool,
    NoPool,
    OpenPool,
    ForeignPool,
    NoLedger,
    EmptyLedger,
    /// Ends within the header.
    ShortLedger,
    /// Ends within the records' first piece.
    ShortRecords,
    ZeroedLedger,
    Version,
    Header,
    OpenLedger,
    ForeignLedger,
    LinkedLedger,
}

impl Damage {
    fn inflict(self, pool: &str, ledger: &str) {
        use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
        let write = |path: &str| std::fs::File::options().write(true).open(path).unwrap();
        let cut = |path: &str, len| write(path).set_len(len).unwrap();
        let open_to_others = |path: &str| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644)).unwrap();
        };
        let give_away = |path: &str| std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
        let len = |path: &str| std::fs::metadata(path).unwrap().len();
        match self {
            Self::None => {}
            Self::ShortPool => cut(pool, CHUNKS * 8192),
            Self::EmptyPool => cut(pool, 0),
            Self::CopiedPool => {
                let copy = format!("{pool}.copy");
                std::fs::copy(pool, &copy).unwrap();
                std::fs::rename(copy, pool).unwrap();
            }
            Self::NoPool => std::fs::remove_file(pool).unwrap(),
            Self::OpenPool => open_to_others(pool),
            Self::ForeignPool => give_away(pool),
            Self::NoLedger => std::fs::remove_file(ledger).unwrap(),
            Self::EmptyLedger => cut(ledger, 0),
            Self::ShortLedger => cut(ledger, 100),
            Self::ShortRecords => cut(ledger, len(ledger) - 4096),
            Self::ZeroedLedger => {
                let size = len(ledger);
                cut(ledger, 0);
                cut(ledger, size);
            }
            Self::Version => write(ledger).write_all_at(&[99], 8).unwrap(),
            Self::Header => write(ledger).write_all_at(&[0xff; 4], 80).unwrap(),
            Self::OpenLedger => open_to_others(ledger),
            Self::ForeignLedger => give_away(ledger),
            Self::LinkedLedger => {
                let other = format!("{ledger}.other");
                std::fs::rename(ledger, &other).unwrap();
                std::os::unix::fs::symlink(&other, ledger).unwrap();
            }
        }
    }

    /// Objects of the eight that the next server has, or what its log says.
    fn expected(self) -> Result<u64, &'static str> {
        match self {
            Self::None => Ok(2 * CHUNKS),
            Self::ShortPool => Ok(CHUNKS),
            Self::EmptyPool | Self::ShortRecords => Ok(0),
            Self::CopiedPool => Err("another arena"),
            Self::NoPool | Self::OpenPool | Self::ForeignPool => Err("no earlier server has left"),
            Self::NoLedger | Self::OpenLedger | Self::ForeignLedger | Self::LinkedLedger => {
                Err("has no ledger")
            }
            Self::EmptyLedger | Self::ShortLedger | Self::ZeroedLedger => Err("there is none"),
            Self::Version => Err("format version 99"),
            Self::Header => Err("its header is damaged"),
        }
    }
}

#[test]
fn damaged_segments_are_not_believed() {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: files of other users, since only root can give files away");
    }
    for damage in [
        Damage::None,
        Damage::ShortPool,
        Damage::EmptyPool,
        Damage::CopiedPool,
        Damage::NoPool,
        Damage::OpenPool,
        Damage::ForeignPool,
        Damage::NoLedger,
        Damage::EmptyLedger,
        Damage::ShortLedger,
        Damage::ShortRecords,
        Damage::ZeroedLedger,
        Damage::Version,
        Damage::Header,
        Damage::OpenLedger,
        Damage::ForeignLedger,
        Damage::LinkedLedger,
    ] {
        if matches!(damage, Damage::ForeignPool | Damage::ForeignLedger) && !is_root {
            continue;
        }
        let base = tempfile::tempdir().unwrap();
        let segments = Segments::new();
        let server = Server::start(base.path(), "0.0078125", &[]);
        store(&server, 1, "a", 0..2);
        server.stop();
        let pool = format!(
            "/dev/shm/lmcache_l1_pool_kvtier_kills_{}",
            std::process::id()
        );
        let ledger = format!("{pool}.ledger");
        damage.inflict(&pool, &ledger);
        let server = Server::start(base.path(), "0.0078125", &[]);
        match damage.expected() {
            Ok(objects) => {
                assert_eq!(
                    server.restored(),
                    Some(objects),
                    "{damage:?}: {}",
                    server.log
                );
            }
            Err(told) => {
                assert_eq!(server.restored(), None, "{damage:?}: {}", server.log);
                assert!(server.log.contains(told), "{damage:?}: {}", server.log);
            }
        }
        // What it has is right, and it goes on.
        let mut worker = server.worker(2, "a");
        let hits: u64 = (0..2)
            .map(|number| read(&mut worker, "a", number).unwrap())
            .sum();
        assert_eq!(hits, damage.expected().unwrap_or(0), "{damage:?}");
        store(&server, 1, "a", 0..3);
        for number in 0..3 {
            assert_eq!(read(&mut worker, "a", number), Ok(CHUNKS), "{damage:?}");
        }
        server.stop();
        let _ = std::fs::remove_file(format!("{ledger}.other"));
        drop(segments);
    }
}

/// A client that has its memory from the server before, and goes on.
#[test]
fn memory_of_living_clients_is_kept_from_others() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), "0.0078125", &[]);
    let mut worker = server.worker(1, "a");
    let len = worker.chunk_bytes();
    worker
        .store(&prompt(1), whole(), "s", |chunk| bytes("a", 1, chunk, len))
        .unwrap();
    // Prepared and not committed: the client may write for as long as it lives.
    let unfinished = prompt(2);
    let scope = scope("a");
    let key = scope.worker_key(0, &unfinished, whole(), "s");
    let slots = worker
        .connection()
        .prepare_store(&key, InstanceId(1))
        .unwrap();
    let slots: Vec<_> = slots
        .target
        .unwrap()
        .slots
        .into_iter()
        .map(|slot| (slot.offset, slot.length))
        .collect();
    assert_eq!(slots.len() as u64, CHUNKS);
    server.kill();
    let server = Server::start(base.path(), "0.0078125", &[]);
    assert_eq!(server.restored(), Some(CHUNKS), "{}", server.log);
    assert!(server.log.contains("withheld=4"), "{}", server.log);
    // Everything is overwritten but these.
    let mut other = server.worker(2, "b");
    for number in 0..600 {
        other
            .store(&prompt(number), whole(), "s", |chunk| {
                bytes("b", number, chunk, len)
            })
            .unwrap();
    }
    let pool = format!(
        "/dev/shm/lmcache_l1_pool_kvtier_kills_{}",
        std::process::id()
    );
    let pool = std::fs::File::options().write(true).open(pool).unwrap();
    use std::os::unix::fs::FileExt as _;
    for (offset, length) in slots {
        pool.write_all_at(&vec![0xee; length as usize], offset)
            .unwrap();
    }
    for number in 500..600 {
        let hit = read(&mut other, "b", number).unwrap();
        assert!(hit > 0, "the last stores are there");
    }
    // What was not committed is not readable.
    assert_eq!(server.worker(3, "a").lookup(&unfinished, "y").unwrap(), 0);
}

/// Of a client of kvtier's own, which names its chunk size.
fn own_scope() -> Scope {
    Scope {
        chunk_tokens: Some(CHUNK as u32),
        ..scope("registered")
    }
}

/// Kills a server while its workers noticed nothing, and starts the next one at the same address: the first retrieve and the first
/// store of each are served.
#[test]
fn first_requests_after_a_kill_are_served_without_registration() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let host = format!("ipc://{}/socket", base.path().display());
    let flags = ["--host", &host];
    let mut server = Server::start(base.path(), "0.03125", &flags);
    let mut spec = EngineDrivenSpec::new(InstanceId(11), own_scope(), 2, 64);
    spec.block_tokens = 4;
    let mut copying = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    let mut spec = LmcacheDrivenSpec::new(InstanceId(12), own_scope(), 2, 2, 16, 64);
    spec.block_tokens = 4;
    spec.scope.model_name = "kills/pages".to_owned();
    let mut pages = LmcacheDrivenWorker::register(server.connect(), spec).unwrap();
    let (own, target): (Vec<i64>, Vec<i64>) = ((0..16).collect(), (16..32).collect());
    let write = |pages: &mut LmcacheDrivenWorker, number| {
        for (chunk, blocks) in (0..CHUNKS).zip(own.chunks(4)) {
            let content = bytes("pages", number, chunk, pages.chunk_bytes());
            pages.write_chunk(blocks, &content).unwrap();
        }
    };
    for round in 0..5 {
        let (first, last) = (round, round + 1);
        if round == 0 {
            write(&mut pages, first);
            assert!(pages.store(&prompt(first), whole(), "s", &own).unwrap());
            let len = copying.chunk_bytes();
            let source = |chunk| bytes("registered", first, chunk, len);
            copying.store(&prompt(first), whole(), "s", source).unwrap();
        }
        server.kill();
        server = Server::start(base.path(), "0.03125", &flags);
        let state = &server.http("/status", None)["state"];
        assert_eq!(state["restored_workers"], 2, "{}", server.log);
        // What the earlier process had.
        assert_eq!(read(&mut copying, "registered", first), Ok(CHUNKS));
        let request = format!("p{round}");
        assert_eq!(pages.lookup(&prompt(first), &request).unwrap(), CHUNKS);
        assert!(
            pages
                .retrieve(&prompt(first), whole(), &request, &target, 0)
                .unwrap()
        );
        for (chunk, blocks) in (0..CHUNKS).zip(target.chunks(4)) {
            let mut found = Vec::new();
            pages.read_chunk(blocks, &mut found).unwrap();
            assert_eq!(found, bytes("pages", first, chunk, found.len()));
        }
        // What the next one will have.
        write(&mut pages, last);
        assert!(pages.store(&prompt(last), whole(), "s", &own).unwrap());
        let len = copying.chunk_bytes();
        let source = |chunk| bytes("registered", last, chunk, len);
        let stored = copying.store(&prompt(last), whole(), "s", source).unwrap();
        assert_eq!(stored.chunks.len() as u64, CHUNKS);
    }
    drop(copying.close().unwrap());
    drop(pages.close().unwrap());
    server.stop();
}

/// A registration is answered when the next process would restore it, and an unregistration when it would not.
#[test]
fn kill_right_behind_an_answer_keeps_what_was_answered() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let host = format!("ipc://{}/socket", base.path().display());
    let flags = ["--host", &host];
    let mut server = Server::start(base.path(), "0.008", &flags);
    for _ in 0..5 {
        let restored = |server: &Server| {
            let state = &server.http("/status", None)["state"];
            assert_eq!(state["left_out_workers"], serde_json::json!({}));
            state["restored_workers"].as_u64().unwrap()
        };
        let spec = EngineDrivenSpec::new(InstanceId(11), own_scope(), 2, 64);
        let worker = EngineDrivenWorker::register(server.connect(), spec).unwrap();
        server.kill();
        server = Server::start(base.path(), "0.008", &flags);
        assert_eq!(restored(&server), 1, "{}", server.log);
        drop(worker.close().unwrap());
        server.kill();
        server = Server::start(base.path(), "0.008", &flags);
        assert_eq!(restored(&server), 0, "{}", server.log);
    }
    server.stop();
}
