//! A server that is killed at any moment, and the next one: every byte that it serves is right, and what was answered is there.
//!
//! `KVTIER_KILLS=10000 cargo test -p kvtier --all-features --test it kills::killed -- --nocapture` kills as often as that;
//! with another `KVTIER_KILLS_SEED`, at other moments.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvtier_client::proto::response::ChunkSlot;
use kvtier_client::{
    Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, LmcacheDrivenWorker, Scope,
};
use kvtier_core::random::SplitMix64;

use crate::prompts::{
    CHUNK, CHUNKS, bytes, prompt, read, read_pages, retrieve_pages, scope, store, store_pages,
    try_store_pages, whole,
};
use crate::server::{KVTIER, Segments, Server, wait_until};

/// How long a request may take that a kill may leave without a reply: clients wait for the next server. A later reply counts as none.
const BRIEF: Duration = Duration::from_millis(200);

/// Stores of a worker without an answer, at most, until it is killed.
const MAX_INDETERMINATE: usize = 8;

/// Tenant of the worker whose pages the server copies.
const PAGES: &str = "pages";

/// Kills in the gate.
const KILLS: u64 = 20;

/// A worker in one of both transfer modes.
enum Worker {
    /// Worker that copies by itself.
    Copying(EngineDrivenWorker),
    /// Worker whose pages the server copies.
    Pages(LmcacheDrivenWorker),
}

impl Worker {
    fn connection(&mut self) -> &mut Connection {
        match self {
            Self::Copying(worker) => worker.connection(),
            Self::Pages(worker) => worker.connection(),
        }
    }

    /// Chunks of a prompt that it reads, all of them right.
    fn read(&mut self, salt: &str, number: u64) -> Result<u64, String> {
        match self {
            Self::Copying(worker) => read(worker, salt, number),
            Self::Pages(worker) => read_pages(worker, salt, number),
        }
    }

    /// Stores a prompt; returns whether the server has taken any of it.
    fn store(&mut self, salt: &str, number: u64) -> Result<bool, String> {
        match self {
            Self::Copying(worker) => {
                let len = worker.chunk_bytes();
                let source = |chunk| bytes(salt, number, chunk, len);
                let stored = worker.store(&prompt(number), whole(), "s", source);
                let stored = stored.map_err(|error| error.to_string())?;
                Ok(!stored.chunks.is_empty())
            }
            Self::Pages(worker) => try_store_pages(worker, salt, number),
        }
    }

    /// Requests without an answer after which it does nothing more. The server may still copy pages, which have to stay as they are;
    /// else each has reserved memory, and a worker may reserve a quarter of L1.
    fn max_indeterminate(&self) -> usize {
        match self {
            Self::Copying(_) => MAX_INDETERMINATE,
            Self::Pages(_) => 1,
        }
    }
}

/// Stores and reads until the server is killed. Returns the prompts whose store was answered.
fn work(
    mut worker: Worker,
    salt: &str,
    mut random: SplitMix64,
    prompts: u64,
    answered: &AtomicU64,
    is_killed: &AtomicBool,
) -> Vec<u64> {
    // Without an answer a prompt may be there or not, or be being written for as long as the server lives.
    let (mut stored, mut indeterminate) = (BTreeSet::new(), BTreeSet::new());
    let mut unanswered = 0;
    worker.connection().set_timeout(BRIEF);
    while !is_killed.load(Ordering::Relaxed) && unanswered < worker.max_indeterminate() {
        let number = random.below(prompts);
        let is_answered = if random.below(3) == 0 {
            worker.read(salt, number).is_ok()
        } else {
            let answer = worker.store(salt, number);
            match &answer {
                // None is taken of what is there, but also where the server refuses the store.
                Ok(false) if !stored.contains(&number) => indeterminate.insert(number),
                Ok(_) => stored.insert(number),
                Err(_) => indeterminate.insert(number),
            };
            answer.is_ok()
        };
        unanswered += usize::from(!is_answered);
        answered.fetch_add(is_answered.into(), Ordering::Relaxed);
    }
    stored.difference(&indeterminate).copied().collect()
}

// proves: docs/compare.md#restart
// proves: docs/operate.md#l1-after-a-restart
#[test]
fn killed_server_loses_nothing_it_answered() {
    let given = |name| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let (kills, seed) = (
        given("KVTIER_KILLS").unwrap_or(KILLS),
        given("KVTIER_KILLS_SEED").unwrap_or(17),
    );
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    kill_repeatedly(kills, seed, &|| Server::start(base.path(), "0.008", &[]));
}

/// Kills servers of some 8 MiB at any moment: what was answered is there in the next one, and right.
pub(crate) fn kill_repeatedly(kills: u64, seed: u64, start: &dyn Fn() -> Server) {
    let mut random = SplitMix64::new(seed);
    let (mut server, mut reads, mut objects) = (start(), 0, 0);
    for kill in 0..kills {
        // In every other round nothing is evicted: 8 MiB hold 256 prompts, and each tenant has 40. Else 25 times as many.
        let fits = kill % 2 == 0;
        let prompts = if fits { 40 } else { 1000 };
        // Not of one instance: a worker that ends unregisters it.
        let workers = [
            ("a", Worker::Copying(server.worker(1, "a"))),
            ("b", Worker::Copying(server.worker(3, "b"))),
            (PAGES, Worker::Pages(server.pages(5, PAGES))),
        ];
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
        server = start();
        assert!(server.restored().is_some(), "kill {kill}: {}", server.log);
        objects += server.restored().unwrap();
        for (salt, stored) in stored {
            let mut worker = match salt {
                PAGES => Worker::Pages(server.pages_reader(salt)),
                salt => Worker::Copying(server.reader(salt)),
            };
            for number in stored {
                let hit = worker.read(salt, number).unwrap();
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
                reads += worker.read(salt, number).unwrap();
            }
        }
    }
    eprintln!("{kills} kills, {objects} objects restored, {reads} chunks read, all right");
    assert!(reads > kills && objects > kills);
}

// proves: docs/operate.md#l1-after-a-restart
#[test]
fn stopped_server_leaves_l1_to_the_next() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let server = Server::start(base.path(), "0.03125", &[]);
    assert!(server.log.contains("L1 starts empty"), "{}", server.log);
    let mut worker = server.worker(1, "a");
    assert_eq!(store(&mut worker, "a", 1), CHUNKS);
    // Copied by the server.
    store_pages(&mut server.pages(3, "pages"), "pages", 2);
    server.stop();
    // Larger and smaller: what fits is there.
    for (size, objects) in [("0.03125", 8), ("0.0625", 8), ("0.015625", 8)] {
        let server = Server::start(base.path(), size, &[]);
        assert_eq!(server.restored(), Some(objects), "{}", server.log);
        assert_eq!(read(&mut server.worker(1, "a"), "a", 1), Ok(CHUNKS));
        let mut pages = server.pages(3, "pages");
        assert_eq!(pages.lookup(&prompt(2), "r").unwrap(), CHUNKS);
        retrieve_pages(&mut pages, "pages", 2, "r");
        server.stop();
    }
    // Another instance, another chunk size, none: nothing is believed.
    for (flags, told) in [
        (&["--instance-id", "other"][..], "another instance"),
        (
            &["--instance-id", "other", "--chunk-size", "32"],
            "another chunk size",
        ),
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

#[test]
fn check_config_says_what_becomes_of_earlier_l1() {
    let (_segments, base) = (Segments::new(), tempfile::tempdir().unwrap());
    let check = |more: &[&str]| Server::check(base.path(), "0.05", more);
    let assert_shown = |more: &[&str], expected: &str| {
        let (code, text) = check(more);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains(expected), "{expected}: {text}");
    };
    assert!(!check(&[]).1.contains("an earlier server"));
    let server = Server::start(base.path(), "0.05", &[]);
    store(&mut server.worker(1, "a"), "a", 1);
    // While it runs, it is another one's.
    let other = tempfile::tempdir().unwrap();
    let other = ["--state-dir", other.path().to_str().unwrap()];
    for (flags, named) in [
        (&[][..], "--state-dir: "),
        (&other, "--shm-name "),
        (
            &[&other[..], &["--l1-restore", "auto"]].concat(),
            "--shm-name ",
        ),
    ] {
        let (code, text) = check(flags);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(&format!("kvtier server: {named}")), "{text}");
    }
    server.stop();
    let earlier = "\nL1 of an earlier server is there, and is ";
    assert_shown(&[], &format!("{earlier}kept, with 4 objects\n"));
    let other = ["--chunk-size", "32"];
    assert_shown(
        &other,
        &format!("{earlier}replaced: the earlier one's ledger is not used: "),
    );
    let off = format!("{earlier}removed: {}\n", Segments::pool());
    assert_shown(&["--l1-restore", "off"], &off);
    // None of the checks has changed anything.
    let server = Server::start(base.path(), "0.05", &[]);
    assert_eq!(server.restored(), Some(4));
}

// proves: docs/compare.md#restart
// proves: docs/operate.md#l1-after-a-restart
#[test]
fn l1_is_kept_automatically_and_status_says_where() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let start = || Server::start(base.path(), "0.0078125", &["--l1-restore", "auto"]);
    let status = |server: &Server| {
        let mut status = std::process::Command::new(KVTIER);
        let status = status.args(["status", "--url", server.http_url()]);
        let text = String::from_utf8(status.output().unwrap().stdout).unwrap();
        let line = text.lines().find(|line| line.starts_with("state "));
        line.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    let file = format!("L1 kept in {}", Segments::pool());
    let mut server = start();
    let line = status(&server);
    assert!(line.contains(&file) && !line.contains("restored"), "{line}");
    drop(server.worker_with(1, "a", 0..1));
    server.kill();
    let server = start();
    let line = status(&server);
    let told = format!("{file}, {CHUNKS} objects restored");
    assert!(line.contains(&told), "{line}");
    server.stop();
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
    drop(server.worker_with(1, "a", 0..10));
    drop(server.worker_with(2, "b", 0..5));
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

/// What a smaller server leaves out is absent for a larger one after it: that memory was freed, or was another object's since.
// proves: docs/operate.md#l1-after-a-restart
#[test]
fn larger_server_after_a_smaller_one_believes_no_stale_record() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let server = Server::start(base.path(), "0.0625", &[]);
    // More records than the ledger of the smaller one has.
    drop(server.worker_with(1, "a", 0..700));
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

/// A client that has its memory from the server before, and goes on.
// proves: docs/operate.md#l1-after-a-restart
#[test]
fn memory_of_living_clients_is_kept_from_others() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let mut server = Server::start(base.path(), "0.0078125", &[]);
    let mut worker = server.worker_with(1, "a", 1..2);
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
        store(&mut other, "b", number);
    }
    let pool = std::fs::File::options().write(true).open(Segments::pool());
    let pool = pool.unwrap();
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

/// Bytes at these places of the pool.
fn pool_bytes(slots: &[(u64, u64)]) -> Vec<Vec<u8>> {
    let pool = std::fs::File::open(Segments::pool()).unwrap();
    let read = |(offset, length): &(u64, u64)| {
        let mut bytes = vec![0; *length as usize];
        pool.read_exact_at(&mut bytes, *offset).unwrap();
        bytes
    };
    slots.iter().map(read).collect()
}

/// What a client was granted before the kill, to read and to write, is withheld until the client has ended or the time for writes
/// has passed.
// proves: docs/operate.md#l1-after-a-restart
#[test]
fn granted_memory_is_withheld_until_client_ends() {
    for (ttl, ends) in [("600", true), ("1", false)] {
        let base = tempfile::tempdir().unwrap();
        let _segments = Segments::new();
        let mut server = Server::start(base.path(), "0.0078125", &[]);
        let mut worker = server.worker_with(1, "a", 1..2);
        let (stored, unfinished) = (prompt(1), prompt(2));
        assert_eq!(worker.lookup(&stored, "r").unwrap(), CHUNKS);
        let scope = scope("a");
        let places = |slots: Vec<_>| -> Vec<_> {
            let slots = slots.into_iter();
            slots
                .map(|slot: ChunkSlot<'_>| (slot.offset, slot.length))
                .collect()
        };
        let key = scope.worker_key(0, &stored, whole(), "r");
        let granted = worker.connection().prepare_retrieve(&key, InstanceId(1));
        let granted = places(granted.unwrap().slots.unwrap());
        let key = scope.worker_key(0, &unfinished, whole(), "s");
        let target = worker.connection().prepare_store(&key, InstanceId(1));
        let target = places(target.unwrap().target.unwrap().slots);
        assert_eq!([granted.len(), target.len()], [CHUNKS as usize; 2]);
        let expected = pool_bytes(&granted);
        server.kill();
        worker.connection().set_timeout(BRIEF);
        let flags = ["--l1-write-ttl-seconds", ttl];
        let server = Server::start(base.path(), "0.0078125", &flags);
        assert!(server.log.contains("withheld=8"), "{}", server.log);
        let withheld = || server.http("/status", None)["withheld_bytes"].clone();
        if ends {
            let all = granted.iter().chain(&target).map(|(_, length)| length);
            assert_eq!(withheld(), all.sum::<u64>());
            // Everything else is overwritten.
            let mut other = server.worker(2, "b");
            for number in 0..600 {
                store(&mut other, "b", number);
            }
            assert_eq!(pool_bytes(&granted), expected);
            drop((worker, other));
            wait_until("the end of the client", || withheld() == 0);
        } else {
            wait_until("the end of the time for writes", || withheld() == 0);
            drop(worker);
        }
        server.stop();
    }
}

/// Ctrl-C frees what SIGTERM and a crash keep.
// proves: docs/operate.md#l1-after-a-restart
// proves: docs/operate.md#memory-that-stays
#[test]
fn interrupted_server_frees_its_memory() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let pool = Segments::pool();
    let exist = || [&pool, &format!("{pool}.ledger")].map(|path| std::fs::exists(path).unwrap());
    let server = Server::start(base.path(), "0.0078125", &[]);
    drop(server.worker_with(1, "a", 1..2));
    server.stop();
    assert_eq!(exist(), [true; 2]);
    let server = Server::start(base.path(), "0.0078125", &[]);
    assert_eq!(server.restored(), Some(CHUNKS), "{}", server.log);
    let log = server.interrupt();
    assert_eq!(exist(), [false; 2], "{log}");
    assert!(
        log.contains("freed L1") && !log.contains("L1 is left"),
        "{log}"
    );
}

/// Exit code and output of `kvtier pools` with these arguments.
fn pools(args: &[&str]) -> (Option<i32>, String) {
    let mut command = std::process::Command::new(KVTIER);
    let output = command.arg("pools").args(args).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

// proves: docs/operate.md#l1-after-a-restart
// proves: docs/operate.md#memory-that-stays
#[test]
fn pools_frees_only_what_no_process_has() {
    let base = tempfile::tempdir().unwrap();
    let _segments = Segments::new();
    let path = Segments::pool();
    let pool = path.strip_prefix("/dev/shm/").unwrap();
    let mut server = Server::start(base.path(), "0.0078125", &[]);
    let mut worker = server.worker_with(1, "a", 1..2);
    let line = |of: &str| {
        let (_, listed) = pools(&[]);
        let mut lines = listed.lines().map(|line| line.trim().to_owned());
        lines.find(|line| line.split_whitespace().next() == Some(of))
    };
    let process = format!("the server that is process {}", server.child.id());
    for name in [pool, &format!("{pool}.ledger")] {
        assert!(line(name).unwrap().ends_with(&process), "{:?}", line(name));
    }
    let (code, text) = pools(&["free"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("allowed: names as `kvtier pools` lists them, or --all"),
        "{text}"
    );
    let (code, text) = pools(&["free", pool]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains(&process), "{text}");
    server.kill();
    worker.connection().set_timeout(BRIEF);
    // The worker still maps the pool.
    let ledger = format!("{pool}.ledger");
    for name in [pool, &ledger] {
        assert!(line(name).unwrap().ends_with("processes that map it"));
    }
    let (code, text) = pools(&["free", pool]);
    assert_eq!(
        (code, std::fs::exists(&path).unwrap()),
        (Some(1), true),
        "{text}"
    );
    assert!(line(&ledger).is_some());
    drop(worker);
    assert!(line(pool).unwrap().ends_with("nothing"));
    // Named without the prefix; its ledger goes with it.
    let (code, text) = pools(&["free", pool.strip_prefix("lmcache_l1_pool_").unwrap()]);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(line(pool), None);
    assert!(!std::fs::exists(format!("{path}.ledger")).unwrap());
    let (code, text) = pools(&["free", pool]);
    assert_eq!(code, Some(1));
    assert!(text.contains("there is none"), "{text}");
}

/// Scope of a client of kvtier's own, which names its chunk size.
fn own_scope() -> Scope {
    Scope {
        chunk_tokens: Some(CHUNK as u32),
        ..scope("registered")
    }
}

/// Kills a server while its workers noticed nothing, and starts the next one at the same address: the first retrieve and the first
/// store of each are served.
// proves: docs/operate.md#workers-after-a-restart
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
    let mut pages = server.pages_of(12, own_scope());
    let salt = "registered";
    for round in 0..5 {
        let (first, last) = (round, round + 1);
        if round == 0 {
            store_pages(&mut pages, "pages", first);
            store(&mut copying, salt, first);
        }
        server.kill();
        server = Server::start(base.path(), "0.03125", &flags);
        let state = &server.http("/status", None)["state"];
        assert_eq!(state["restored_workers"], 2, "{}", server.log);
        // What the earlier process had.
        assert_eq!(read(&mut copying, salt, first), Ok(CHUNKS));
        let request = format!("p{round}");
        assert_eq!(pages.lookup(&prompt(first), &request).unwrap(), CHUNKS);
        retrieve_pages(&mut pages, "pages", first, &request);
        // What the next one will have.
        store_pages(&mut pages, "pages", last);
        assert_eq!(store(&mut copying, salt, last), CHUNKS);
    }
    drop(copying.close().unwrap());
    drop(pages.close().unwrap());
    server.stop();
}

/// A registration is answered when the next process would restore it, and an unregistration when it would not.
// proves: docs/operate.md#workers-after-a-restart
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
