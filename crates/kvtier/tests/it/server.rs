//! A server process that keeps its state for the next one.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Lines};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvtier_client::{
    Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, LmcacheDrivenSpec,
    LmcacheDrivenWorker, Options, Scope,
};

use crate::prompts::{scope, store};

/// Value of `--instance-id`: also the folder in the state directory, and in names of memory that clients do not map.
pub(crate) static INSTANCE_NAME: LazyLock<String> =
    LazyLock::new(|| format!("kills-{}", std::process::id()));

pub(crate) const KVTIER: &str = env!("CARGO_BIN_EXE_kvtier");

/// How long a reply may take before the test fails.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// State directories of the servers of a test.
static BASES: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

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

    /// Starts a server; returns the log of one that ends before it serves.
    pub(crate) fn try_start(base: &Path, l1: &str, more: &[&str]) -> Result<Self, String> {
        let mut server = Self::spawn(base, l1, more);
        if server.wait_until_served() {
            Ok(server)
        } else {
            Err(std::mem::take(&mut server.log))
        }
    }

    /// Starts a server, and does not wait until it serves.
    pub(crate) fn spawn(base: &Path, l1: &str, more: &[&str]) -> Self {
        Self::spawn_by(Command::new(KVTIER), base, l1, more)
    }

    /// Starts a server by a command that takes the server's arguments.
    pub(crate) fn spawn_by(mut command: Command, base: &Path, l1: &str, more: &[&str]) -> Self {
        let mut bases = BASES.lock().unwrap_or_else(PoisonError::into_inner);
        bases.insert(base.to_owned());
        drop(bases);
        Self::with_arguments(&mut command, base, l1, more);
        let mut child = command
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

    /// Exit code and output of `--check-config` with the arguments of a server.
    pub(crate) fn check(base: &Path, l1: &str, more: &[&str]) -> (Option<i32>, String) {
        let mut command = Command::new(KVTIER);
        Self::with_arguments(&mut command, base, l1, more);
        let output = command.arg("--check-config").output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    }

    fn with_arguments(command: &mut Command, base: &Path, l1: &str, more: &[&str]) {
        command
            .arg("server")
            .args(["--port", "0", "--http-port", "0", "--l1-size-gb", l1])
            .args(["--chunk-size", "16", "--no-l1-prefault"])
            .args([
                "--instance-id",
                INSTANCE_NAME.as_str(),
                "--l1-restore",
                "on",
            ])
            .args(["--eviction-trigger-watermark", "1"])
            .args(["--cuda-driver", "off"])
            .arg("--state-dir")
            .arg(base)
            .args(["--shm-name", &Segments::name()])
            .args(more);
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
    pub(crate) fn reader(&self, salt: &str) -> EngineDrivenWorker {
        self.worker(Self::next_instance(), salt)
    }

    /// Returns a reader whose pages the server copies.
    pub(crate) fn pages_reader(&self, salt: &str) -> LmcacheDrivenWorker {
        self.pages(Self::next_instance(), salt)
    }

    fn next_instance() -> i64 {
        static NEXT: AtomicI64 = AtomicI64::new(1000);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// A worker that copies by itself and has stored these prompts. Another one of its instance takes its registration along when it ends.
    pub(crate) fn worker_with(
        &self,
        instance: i64,
        salt: &str,
        prompts: Range<u64>,
    ) -> EngineDrivenWorker {
        let mut worker = self.worker(instance, salt);
        for number in prompts {
            store(&mut worker, salt, number);
        }
        worker
    }

    /// A worker whose pages the server copies, with 4 KiB per chunk.
    pub(crate) fn pages(&self, instance: i64, salt: &str) -> LmcacheDrivenWorker {
        self.pages_of(instance, scope(salt))
    }

    /// Returns a worker of any tenant and chunk size, whose pages the server copies.
    pub(crate) fn pages_of(&self, instance: i64, mut scope: Scope) -> LmcacheDrivenWorker {
        // A model of its own: the layouts differ.
        scope.model_name += "/pages";
        let mut spec = LmcacheDrivenSpec::new(InstanceId(instance), scope, 2, 2, 16, 64);
        spec.block_tokens = 4;
        LmcacheDrivenWorker::register(self.connect(), spec).unwrap()
    }

    /// Number of objects that the start has found.
    pub(crate) fn restored(&self) -> Option<u64> {
        let line = self.log.lines().find(|line| line.contains("restored L1"))?;
        let (_, rest) = line.split_once("objects=")?;
        rest.split(' ').next()?.parse().ok()
    }

    pub(crate) fn http_url(&self) -> &str {
        let (_, rest) = self.log.split_once("http=\"").unwrap();
        rest.split('"').next().unwrap()
    }

    /// The answer of a route.
    pub(crate) fn http(&self, path: &str, body: Option<&str>) -> serde_json::Value {
        let url = format!("{}{path}", self.http_url());
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
        self.signal(rustix::process::Signal::TERM);
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Stops it as Ctrl-C does; returns the rest of its log.
    pub(crate) fn interrupt(mut self) -> String {
        self.signal(rustix::process::Signal::INT);
        assert!(self.child.wait().unwrap().success());
        self.rest_of_log()
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
        // Leaves the processor to the server.
        std::thread::sleep(Duration::from_millis(1));
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

    /// Removes the registrations that servers of a state directory have left.
    fn remove_registrations(base: &Path) {
        let id = std::fs::read_to_string(base.join(INSTANCE_NAME.as_str()).join("id"));
        let all = std::fs::read_dir("/dev/shm").into_iter().flatten();
        for entry in all.flatten().map(|entry| entry.path()) {
            let name = entry.to_string_lossy();
            if id.as_ref().is_ok_and(|id| name.ends_with(id.as_str())) {
                let _ = std::fs::remove_dir_all(&entry);
            }
        }
    }

    fn name() -> String {
        format!("kvtier_kills_{}", std::process::id())
    }

    /// The file of the pool.
    pub(crate) fn pool() -> String {
        format!("/dev/shm/lmcache_l1_pool_{}", Self::name())
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        let pool = Self::pool();
        let _ = std::fs::remove_file(format!("{pool}.ledger"));
        let _ = std::fs::remove_file(pool);
        let bases = std::mem::take(&mut *BASES.lock().unwrap_or_else(PoisonError::into_inner));
        bases
            .iter()
            .for_each(|base| Self::remove_registrations(base));
    }
}
