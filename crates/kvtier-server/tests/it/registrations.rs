//! Registrations that outlive the process: the next one serves the first request of a worker that noticed nothing, with the right
//! bytes, and leaves out what may be other memory, or another request's pages, by now.

use std::collections::BTreeMap;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use kvtier_client::{
    Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, LmcacheDrivenSpec,
    LmcacheDrivenWorker, Scope,
};
use kvtier_server::ServerConfig;
use tempfile::TempDir;

use crate::engine_driven::Client;
use crate::support::{CHUNK, Steps, TestServer, bytes, prompt, range};

const ID: InstanceId = InstanceId(0x1234_5678_9abc);

/// Between two pings of a worker of LMCache's here.
const HEARTBEAT: Duration = Duration::from_secs(100);

/// Processes of one server, one after another, at one address.
struct Bed {
    base: TempDir,
    pool: String,
}

impl Bed {
    fn new(name: &str) -> Self {
        Self {
            base: tempfile::tempdir().unwrap(),
            pool: format!("kvtier_kept_{}_{name}", std::process::id()),
        }
    }

    /// The next process, which goes on with L1.
    fn start(&self) -> TestServer {
        self.start_with(&["--l1-restore", "on", "--instance-id", "a"])
    }

    fn start_with(&self, flags: &[&str]) -> TestServer {
        self.start_on(Some(self.pool.clone()), flags)
    }

    fn start_without_pool(&self, flags: &[&str]) -> TestServer {
        self.start_on(None, flags)
    }

    fn start_on(&self, pool: Option<String>, flags: &[&str]) -> TestServer {
        self.start_on_changed(pool, flags, |_| {})
    }

    fn start_on_changed(
        &self,
        pool: Option<String>,
        flags: &[&str],
        change: impl FnOnce(&mut ServerConfig),
    ) -> TestServer {
        let host = format!("ipc://{}/socket", self.base.path().display());
        let state = self.base.path().join("state");
        let own = ["--host", &host, "--state-dir", state.to_str().unwrap()];
        TestServer::start_with(&[&own[..], flags].concat(), |config| {
            config.shm_name = pool;
            change(config);
        })
    }

    fn start_changed(&self, change: impl FnOnce(&mut ServerConfig)) -> TestServer {
        self.start_on_changed(Some(self.pool.clone()), &["--instance-id", "a"], change)
    }

    /// Folder of the registrations.
    fn folder(&self) -> PathBuf {
        let id = std::fs::read_to_string(self.base.path().join("state/a/id")).unwrap();
        let all = std::fs::read_dir("/dev/shm").unwrap().flatten();
        let found = all
            .map(|entry| entry.path())
            .find(|path| path.to_str().is_some_and(|path| path.ends_with(&id)));
        found.unwrap_or_else(|| PathBuf::from("/dev/shm/kvtier_none"))
    }

    fn files(&self) -> Vec<PathBuf> {
        let all = std::fs::read_dir(self.folder()).into_iter().flatten();
        all.flatten().map(|entry| entry.path()).collect()
    }

    /// The only registration.
    fn file(&self) -> PathBuf {
        let files = self.files();
        assert_eq!(files.len(), 1, "{files:?}");
        files[0].clone()
    }

    /// The number there in the only registration.
    fn recorded(&self, at: usize) -> u64 {
        let content = std::fs::read(self.file()).unwrap();
        u64::from_le_bytes(content[at..at + 8].try_into().unwrap())
    }

    /// Changes it.
    fn record(&self, at: u64, number: u64) {
        let file = std::fs::File::options().write(true).open(self.file());
        file.unwrap()
            .write_all_at(&number.to_le_bytes(), at)
            .unwrap();
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.folder());
        for end in ["", ".ledger"] {
            let _ = std::fs::remove_file(format!("/dev/shm/lmcache_l1_pool_{}{end}", self.pool));
        }
    }
}

/// Scope of a client of kvtier's own, which names its chunk size.
fn own(model: &str) -> Scope {
    Scope {
        chunk_tokens: Some(CHUNK as u32),
        ..Scope::new(model)
    }
}

fn pages(server: &TestServer, scope: Scope) -> LmcacheDrivenWorker {
    let mut spec = LmcacheDrivenSpec::new(ID, scope, 2, 2, 16, 32);
    spec.block_tokens = 4;
    LmcacheDrivenWorker::register(server.connect(), spec).unwrap()
}

fn copying(server: &TestServer, scope: Scope, force_pickle: bool) -> EngineDrivenWorker {
    let mut spec = EngineDrivenSpec::new(ID, scope, 2, 64);
    (spec.block_tokens, spec.force_pickle) = (4, force_pickle);
    EngineDrivenWorker::register(server.connect(), spec).unwrap()
}

fn outcome(server: &TestServer) -> (u64, BTreeMap<String, u64>) {
    let state = server.engine().admin().status(true).state;
    (state.restored_workers, state.left_out_workers)
}

fn left_out(reason: &str) -> (u64, BTreeMap<String, u64>) {
    (0, BTreeMap::from([(reason.to_owned(), 1)]))
}

fn blocks(ids: std::ops::Range<i64>) -> Vec<i64> {
    ids.collect()
}

/// Stores one chunk from blocks 1 to 4.
fn store(worker: &mut LmcacheDrivenWorker, seed: u32) -> bool {
    let len = worker.chunk_bytes();
    let own = blocks(1..5);
    worker
        .write_chunk(&own, &bytes(seed.into(), 0, len))
        .unwrap();
    worker
        .store(&prompt(seed, 1), range(0..1), "s", &own)
        .unwrap()
}

/// Looks a chunk up and loads it into blocks 9 to 12; `None` if it is no hit, or the retrieve is refused.
fn load(worker: &mut LmcacheDrivenWorker, seed: u32, request: &str) -> Option<Vec<u8>> {
    let (prompt, own) = (prompt(seed, 1), blocks(9..13));
    if worker.lookup(&prompt, request).unwrap() == 0 {
        return None;
    }
    let retrieved = worker.retrieve(&prompt, range(0..1), request, &own, 0);
    let mut found = Vec::new();
    worker.read_chunk(&own, &mut found).unwrap();
    retrieved.unwrap().then_some(found)
}

/// Lookups that prove the chunk size of a client of LMCache's to a restarted server: 48 and 32 tokens, and a rest of 15.
fn prove_chunk_size(worker: &mut LmcacheDrivenWorker) {
    let prompt = |tokens: u32| {
        let tokens: Vec<_> = (900_000..900_000 + tokens).collect();
        kvtier_client::Prompt::new(&tokens)
    };
    for tokens in [63, 47] {
        assert_eq!(worker.lookup(&prompt(tokens), "proof").unwrap(), 0);
    }
}

/// Two pings. The second is known to be answered.
fn ping_twice(server: &TestServer, connection: &mut Connection) {
    for pause in [HEARTBEAT, Duration::from_secs(2)] {
        assert!(connection.ping(Some(ID)).unwrap());
        server.pass(pause);
    }
}

// proves: docs/operate.md#workers-after-a-restart
#[test]
fn first_requests_after_a_restart_are_served() {
    let bed = Bed::new("pages");
    let server = bed.start();
    let mut worker = pages(&server, own("kept/pages"));
    assert!(store(&mut worker, 1));
    drop(server);
    let server = bed.start();
    assert_eq!(outcome(&server), (1, BTreeMap::new()));
    let found = load(&mut worker, 1, "first");
    assert_eq!(found, Some(bytes(1, 0, worker.chunk_bytes())));
    assert!(store(&mut worker, 2));
    let found = load(&mut worker, 2, "second");
    assert_eq!(found, Some(bytes(2, 0, worker.chunk_bytes())));
    // Its client knows what it has lost with the connection.
    assert!(worker.connection().ping(Some(ID)).unwrap());
    // And again, without a registration in between.
    drop(server);
    let server = bed.start();
    assert_eq!(outcome(&server), (1, BTreeMap::new()));
    assert!(load(&mut worker, 2, "third").is_some());
    server.assert_sound();
    drop(worker.close().unwrap());
    assert!(bed.files().is_empty());
}

// proves: docs/operate.md#workers-after-a-restart
#[test]
fn workers_that_copy_are_served_if_pool_is_the_same() {
    for force_pickle in [false, true] {
        let bed = Bed::new(&format!("copying_{force_pickle}"));
        let server = bed.start();
        let mut worker = copying(&server, own("kept/copying"), force_pickle);
        worker.stored(&prompt(1, 2), 0..2, 1);
        // Its chunks have shown whether it maps the pool.
        server.pass(Duration::ZERO);
        drop(server);
        let server = bed.start();
        assert_eq!(outcome(&server), (1, BTreeMap::new()));
        assert_eq!(worker.lookup(&prompt(1, 2), "r").unwrap(), 2);
        worker.assert_reads(&prompt(1, 2), 0..2, "r", 1);
        assert_eq!(worker.stored(&prompt(2, 2), 0..2, 2), [0, 1]);
        assert_eq!(worker.lookup(&prompt(2, 2), "q").unwrap(), 2);
        worker.assert_reads(&prompt(2, 2), 0..2, "q", 2);
        drop(server);
        // A new pool: its memory is none that the worker has mapped.
        let server = bed.start_with(&["--l1-restore", "off", "--instance-id", "a"]);
        if force_pickle {
            assert_eq!(outcome(&server), (1, BTreeMap::new()));
            assert_eq!(worker.lookup(&prompt(1, 2), "s").unwrap(), 0, "L1 is empty");
            assert_eq!(worker.stored(&prompt(1, 2), 0..2, 1), [0, 1]);
        } else {
            assert_eq!(outcome(&server), left_out("pool"))
        }
        server.assert_sound();
    }
}

// proves: docs/operate.md#workers-after-a-restart
#[test]
fn worker_that_sends_its_chunks_needs_no_memory() {
    let bed = Bed::new("pickled");
    let flags = ["--l1-restore", "off", "--instance-id", "a"];
    let server = bed.start_without_pool(&flags);
    let mut worker = copying(&server, own("kept/pickled"), false);
    worker.stored(&prompt(1, 2), 0..2, 1);
    drop(server);
    let server = bed.start_without_pool(&flags);
    assert_eq!(outcome(&server), (1, BTreeMap::new()));
    assert_eq!(worker.lookup(&prompt(1, 2), "r").unwrap(), 0, "L1 is empty");
    assert_eq!(worker.stored(&prompt(1, 2), 0..2, 1), [0, 1]);
    assert_eq!(worker.lookup(&prompt(1, 2), "q").unwrap(), 2);
    worker.assert_reads(&prompt(1, 2), 0..2, "q", 1);
}

// proves: docs/operate.md#workers-after-a-restart
#[test]
fn client_that_may_wait_for_lost_answers_is_served_until_its_ping() {
    let bed = Bed::new("provisional");
    let server = bed.start();
    let mut worker = pages(&server, Scope::new("kept/provisional"));
    assert!(store(&mut worker, 1));
    ping_twice(&server, worker.connection());
    drop(server);
    let server = bed.start();
    assert_eq!(outcome(&server), (1, BTreeMap::new()));
    assert!(store(&mut worker, 2));
    prove_chunk_size(&mut worker);
    for seed in [1, 2] {
        let found = load(&mut worker, seed, &format!("r{seed}"));
        assert_eq!(found, Some(bytes(seed.into(), 0, worker.chunk_bytes())));
    }
    // What the earlier process did not answer is abandoned by its client at this "no" alone.
    assert!(!worker.connection().ping(Some(ID)).unwrap());
    assert!(!store(&mut worker, 3));
    assert!(bed.files().is_empty());
    assert!(worker.connection().ping(Some(ID)).unwrap());
    server.assert_sound();
}

#[test]
fn client_that_negotiated_its_chunk_size_is_not_served_for_good() {
    let bed = Bed::new("negotiated");
    let server = bed.start();
    let mut client = Client::new(&server);
    client.register(Vec::new());
    drop((client, server));
    // It has not pinged, so it may have abandoned any of its transfers.
    let server = bed.start();
    assert_eq!(outcome(&server), left_out("silent"));
}

// proves: docs/clients.md#the-server-is-restarted-with-another-chunk-size
#[test]
fn repeated_prompt_hits_after_a_restart() {
    let bed = Bed::new("repeated");
    let server = bed.start();
    let mut worker = pages(&server, Scope::new("kept/repeated"));
    let mut other = server.connect();
    assert!(other.ping(None).unwrap());
    assert!(store(&mut worker, 1));
    ping_twice(&server, worker.connection());
    drop(server);
    let server = bed.start();
    let len = worker.chunk_bytes();
    for request in ["first", "second"] {
        let found = load(&mut worker, 1, request);
        assert_eq!(found, Some(bytes(1, 0, len)), "{request}");
    }
    assert_eq!(server.engine().metrics().unproven_lookups.get(), 0);
    // A client that no server of this instance can have told its chunk size: it has no hits, and others may be such clients.
    let (scope, tokens) = (Scope::new("kept/repeated"), prompt(1, 2));
    let key = scope.scheduler_key(&tokens, 0..24, "other");
    assert_eq!(other.lookup_hits(&key).unwrap(), 0);
    assert_eq!(load(&mut worker, 1, "third"), None);
    assert_eq!(server.engine().metrics().unproven_lookups.get(), 2);
    prove_chunk_size(&mut worker);
    assert_eq!(load(&mut worker, 1, "fourth"), Some(bytes(1, 0, len)));
    // The housekeeping writes that down.
    server.pass(Duration::ZERO);
    drop(server);
    let server = bed.start();
    assert_eq!(load(&mut worker, 1, "fifth"), None);
    server.assert_sound();
}

// proves: docs/operate.md#workers-after-a-restart
#[test]
fn start_removes_folders_of_ended_servers() {
    let id = format!("1_{:x}_{}", std::process::id(), "0".repeat(32));
    let left = Path::new("/dev/shm").join(format!("kvtier_{id}"));
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&left)
        .unwrap();
    let earlier = SystemTime::now() - Duration::from_secs(2 * 60 * 60);
    let folder = std::fs::File::open(&left).unwrap();
    folder.set_modified(earlier).unwrap();
    drop(folder);
    drop(Bed::new("left").start());
    assert!(!left.exists());
}

#[test]
fn client_that_may_have_timed_out_is_not_served() {
    // Its pings do not tell how soon it abandons a transfer.
    let bed = Bed::new("unknown");
    let server = bed.start();
    let mut worker = pages(&server, Scope::new("kept/unknown"));
    assert!(worker.connection().ping(Some(ID)).unwrap());
    server.pass(Duration::from_secs(2));
    drop(server);
    let server = bed.start();
    assert_eq!(outcome(&server), left_out("silent"));
    assert!(!store(&mut worker, 1));
    drop((worker, server));

    let bed = Bed::new("late");
    let server = bed.start();
    let mut worker = pages(&server, Scope::new("kept/late"));
    ping_twice(&server, worker.connection());
    drop(server);
    // It could have abandoned transfers before the start.
    bed.record(16, 1_000);
    let server = bed.start();
    assert_eq!(outcome(&server), left_out("silent"));
    assert!(!store(&mut worker, 1));
    drop((worker, server));

    // It can abandon transfers meanwhile.
    let bed = Bed::new("overdue");
    let server = bed.start();
    let mut worker = pages(&server, Scope::new("kept/overdue"));
    ping_twice(&server, worker.connection());
    drop(server);
    let server = bed.start();
    assert!(store(&mut worker, 1));
    server.engine().clock().skip(HEARTBEAT * 3 / 2);
    assert!(!store(&mut worker, 2));
    server.pass(Duration::ZERO);
    assert_eq!(server.readings().instances, 0);
    assert!(!worker.connection().ping(Some(ID)).unwrap());
}

/// Offsets of the worker would be of the other server's pool.
// proves: docs/operate.md#workers-after-a-restart
#[test]
fn worker_that_another_server_may_have_registered_meanwhile_is_not_served() {
    for force_pickle in [false, true] {
        let bed = Bed::new(&format!("between_{force_pickle}"));
        let scope = Scope::new("kept/between");
        let server = bed.start();
        let mut worker = copying(&server, scope.clone(), force_pickle);
        worker.stored(&prompt(1, 1), 0..1, 1);
        ping_twice(&server, worker.connection());
        drop(server);
        // Its client has missed two heartbeats.
        bed.record(16, 1_000);
        let pool = format!("{}_b", bed.pool);
        let between = bed.start_on(Some(pool), &["--instance-id", "b"]);
        let mut elsewhere = copying(&between, scope, force_pickle);
        elsewhere.stored(&prompt(2, 1), 0..1, 2);
        drop(between);
        let server = bed.start();
        assert_eq!(outcome(&server), left_out("silent"));
        assert_eq!(server.readings().instances, 0);
        assert!(!worker.connection().ping(Some(ID)).unwrap());
        server.assert_sound();
    }
}

/// Nothing else shows that its process has ended.
// proves: docs/operate.md#workers-after-a-restart
#[test]
fn worker_that_copies_and_was_silent_for_long_is_not_restored() {
    const SECOND: u64 = 1_000_000_000;
    for (flags, limit) in [
        (&[][..], 120),
        (&["--worker-reap-timeout-seconds", "0"][..], 120),
        (&["--worker-reap-timeout-seconds", "40"][..], 40),
    ] {
        let bed = Bed::new(&format!("dead_{limit}_{}", flags.len()));
        let flags = [&["--l1-restore", "on", "--instance-id", "a"], flags].concat();
        let server = bed.start_with(&flags);
        let _worker = copying(&server, own("kept/dead"), true);
        drop(server);
        let registered = bed.recorded(8);
        bed.record(8, registered - (limit - 20) * SECOND);
        let server = bed.start_with(&flags);
        assert_eq!(outcome(&server), (1, BTreeMap::new()));
        drop(server);
        bed.record(8, registered - limit * SECOND);
        let server = bed.start_with(&flags);
        assert_eq!(outcome(&server), left_out("silent"));
    }
}

// proves: docs/operate.md#workers-after-a-restart
#[test]
fn registration_of_its_client_makes_a_restored_worker_lasting() {
    let bed = Bed::new("again");
    let server = bed.start();
    let scope = Scope::new("kept/again");
    let mut worker = copying(&server, scope.clone(), false);
    worker.stored(&prompt(1, 1), 0..1, 1);
    ping_twice(&server, worker.connection());
    drop(server);
    let server = bed.start();
    assert_eq!(outcome(&server), (1, BTreeMap::new()));
    let mut again = copying(&server, scope, false);
    assert!(again.connection().ping(Some(ID)).unwrap());
    assert_eq!(server.readings().instances, 1);
    assert_eq!(again.lookup(&prompt(1, 1), "r").unwrap(), 1);
    again.assert_reads(&prompt(1, 1), 0..1, "r", 1);
}

// proves: docs/operate.md#workers-after-a-restart
#[test]
fn replaced_segment_is_not_opened() {
    let bed = Bed::new("replaced");
    let server = bed.start();
    let mut worker = pages(&server, own("kept/replaced"));
    assert!(store(&mut worker, 1));
    drop(server);
    let path = format!("/dev/shm{}", worker.segment_name());
    let len = std::fs::metadata(&path).unwrap().len() as usize;
    // Made first, so that it is another file.
    std::fs::write(format!("{path}_new"), vec![7; len]).unwrap();
    let replacement = std::fs::File::open(format!("{path}_new")).unwrap();
    // Servers remove segments without a lock.
    replacement.lock_shared().unwrap();
    std::fs::rename(format!("{path}_new"), &path).unwrap();
    let server = bed.start();
    assert_eq!(outcome(&server), left_out("memory"));
    assert_eq!(server.readings().instances, 0);
    let (scope, prompt) = (own("kept/replaced"), prompt(1, 1));
    let key = scope.worker_key(0, &prompt, range(0..1), "r");
    let retrieved = worker
        .connection()
        .retrieve(&key, ID, &[blocks(9..13)], 0)
        .unwrap();
    assert!(!retrieved);
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 7));
    assert!(!worker.connection().ping(Some(ID)).unwrap());
    assert!(bed.files().is_empty());
}

// proves: docs/operate.md#workers-after-a-restart
#[test]
fn only_the_last_registration_is_restored() {
    let bed = Bed::new("last");
    let server = bed.start();
    let _first = pages(&server, own("kept/first"));
    let mut second = pages(&server, own("kept/second"));
    assert!(store(&mut second, 1));
    drop(server);
    let server = bed.start();
    assert_eq!(outcome(&server), (1, BTreeMap::new()));
    assert!(load(&mut second, 1, "r").is_some());
    let status = server.engine().admin().status(true);
    let models: Vec<_> = status.cache_context_meta.values().collect();
    assert_eq!(models[0].model_name, "kept/second");
}

// proves: docs/operate.md#workers-after-a-restart
#[test]
fn workers_that_left_are_not_restored() {
    let bed = Bed::new("left");
    let server = bed.start();
    let left = copying(&server, own("kept/left"), true);
    bed.file();
    let mut connection = left.close().unwrap();
    assert!(bed.files().is_empty());
    assert!(!bed.folder().exists());
    let mut silent = copying(&server, own("kept/silent"), true);
    assert!(silent.connection().ping(Some(ID)).unwrap());
    server.pass(Duration::from_secs(121));
    assert_eq!(server.readings().instances, 0);
    assert!(bed.files().is_empty());
    drop(server);
    let server = bed.start();
    assert_eq!(outcome(&server), (0, BTreeMap::new()));
    assert!(!connection.ping(Some(ID)).unwrap());
    // One that is restored is expected to ping from the start on.
    let _worker = copying(&server, own("kept/quiet"), true);
    drop(server);
    let server = bed.start();
    assert_eq!(outcome(&server).0, 1);
    server.pass(Duration::from_secs(119));
    assert_eq!(server.readings().instances, 1);
    server.pass(Duration::from_secs(2));
    assert_eq!(server.readings().instances, 0);
    assert!(bed.files().is_empty());
}

// proves: docs/operate.md#workers-after-a-restart
#[test]
fn files_that_are_no_registrations_of_the_server_are_left_out() {
    let bed = Bed::new("damaged");
    let server = bed.start();
    let mut worker = copying(&server, own("kept/damaged"), true);
    worker.stored(&prompt(1, 1), 0..1, 1);
    drop(server);
    let (path, good) = (bed.file(), std::fs::read(bed.file()).unwrap());
    let changed = |at: usize, by: u8| {
        let mut content = good.clone();
        content[at] ^= by;
        content
    };
    let far = good.len() - 1;
    let cases = [
        (Vec::new(), "damaged"),
        (good[..47].to_vec(), "damaged"),
        (good[..far].to_vec(), "damaged"),
        ([&good[..], b"x"].concat(), "damaged"),
        (changed(7, 3), "damaged"),
        (changed(32, 1), "damaged"),
        (changed(90, 1), "damaged"),
        (changed(far, 1), "damaged"),
        (vec![0xff; 2 << 20], "damaged"),
    ];
    for (content, reason) in cases {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(path.parent().unwrap(), mode).unwrap();
        std::fs::write(&path, &content).unwrap();
        let server = bed.start();
        assert_eq!(
            outcome(&server),
            left_out(reason),
            "{} bytes",
            content.len()
        );
        assert!(!worker.connection().ping(Some(ID)).unwrap());
        server.assert_sound();
        assert!(!path.exists());
    }
    // Another name than its worker's; a link; a server of another chunk size.
    let restore = |to: &PathBuf| {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(path.parent().unwrap(), mode).unwrap();
        std::fs::write(to, &good).unwrap();
    };
    restore(&path.with_file_name("worker-0000000000000007"));
    assert_eq!(outcome(&bed.start()), left_out("damaged"));
    let victim = bed.base.path().join("victim");
    restore(&victim);
    std::os::unix::fs::symlink(&victim, &path).unwrap();
    assert_eq!(outcome(&bed.start()), left_out("damaged"));
    assert_eq!(std::fs::read(&victim).unwrap(), good);
    restore(&path);
    // A folder that others may write is not used.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(path.parent().unwrap(), mode).unwrap();
    let server = bed.start();
    assert_eq!(outcome(&server), (0, BTreeMap::new()));
    assert!(path.exists());
    // And the right one is believed.
    drop(server);
    restore(&path);
    assert_eq!(outcome(&bed.start()), (1, BTreeMap::new()));
    let server = bed.start_changed(|config| config.args.chunk_size = 32);
    assert_eq!(outcome(&server), left_out("foreign"));
}

// proves: docs/operate.md#workers-after-a-restart
#[test]
fn another_server_restores_nothing() {
    let bed = Bed::new("other");
    let server = bed.start();
    let mut worker = copying(&server, own("kept/other"), true);
    drop(server);
    let path = bed.file();
    // Another instance, and one whose flags refuse it now.
    for flags in [
        &["--instance-id", "b"][..],
        &[
            "--instance-id",
            "a",
            "--supported-transfer-mode",
            "lmcache_driven",
        ],
    ] {
        let server = bed.start_with(flags);
        let refused = flags.len() > 2;
        if refused {
            assert_eq!(outcome(&server), left_out("refused"))
        } else {
            assert_eq!(outcome(&server), (0, BTreeMap::new()))
        }
        assert!(!worker.connection().ping(Some(ID)).unwrap());
        drop(server);
        assert_eq!(path.exists(), !refused);
    }
}
