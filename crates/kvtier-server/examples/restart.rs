//! Time from the start of a server to its first hit, with an L1 that the server before has left; and the longest wait of a client
//! that asks all the time while the server restarts on a socket that stays open, as with `kvtier.socket`.
//!
//! ```text
//! cargo build --profile dist -p kvtier
//! cargo run --release -p kvtier-server --example restart -- target/dist/kvtier OBJECTS [ROUNDS]
//! ```
//!
//! Objects take 4 KiB of L1 each. Their bytes are never written, so they cost a page of address space and no memory; their records are
//! those that a server writes. One JSON object per round; the medians last.

#![expect(clippy::unwrap_used, reason = "an example")]

use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvtier_client::{Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, Prompt, Scope};
use kvtier_common::state::StateDir;
use kvtier_core::cache::ReserveRequest;
use kvtier_core::{ChunkHash, Namespace};
use kvtier_server::ServerConfig;
use kvtier_store::l1::{L1, ServerInstance, open_arena};
use kvtier_store::tenants::{Opened, Salts};

const CHUNK: usize = 16;
/// Objects committed at once.
const BATCH: u64 = 1024;

struct Setup<'a> {
    binary: &'a str,
    base: &'a Path,
    gib: f64,
    pool: String,
}

impl Setup<'_> {
    fn flags(&self, port: u16) -> Vec<String> {
        let flags = format!(
            "--host 127.0.0.1 --port {port} --http-port 0 --chunk-size {CHUNK} --instance-id restart --no-l1-prefault --l1-restore on --cuda-driver off \
             --eviction-trigger-watermark 1 --l1-size-gb {} --shm-name {} --state-dir {}",
            self.gib,
            self.pool,
            self.base.display()
        );
        flags.split(' ').map(str::to_owned).collect()
    }

    /// A server that serves, where, and the time until then.
    fn start(&self) -> (Child, String, Duration) {
        let mut command = Command::new(self.binary);
        command.arg("server").args(self.flags(0));
        Self::serving(command)
    }

    /// A server that serves on this socket, as a service manager starts one.
    fn start_on(&self, socket: &TcpListener) -> Child {
        let mut command = Command::new("sh");
        let passed = "LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" server \"$@\" 3<&0 </dev/null";
        command.args(["-c", passed, self.binary]);
        command.args(self.flags(socket.local_addr().unwrap().port()));
        command.stdin(OwnedFd::from(socket.try_clone().unwrap()));
        Self::serving(command).0
    }

    fn serving(mut command: Command) -> (Child, String, Duration) {
        let began = Instant::now();
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let endpoint = lines.by_ref().map_while(Result::ok).find_map(|line| {
            let (_, rest) = line.split_once("endpoint=\"")?;
            Some(rest.split_once('"')?.0.to_owned())
        });
        let took = began.elapsed();
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        (child, endpoint.expect("the server ends"), took)
    }

    /// Adds objects as a server would.
    fn fill(&self, objects: u64) {
        let flags = self.flags(0);
        let flags: Vec<_> = flags.iter().map(String::as_str).collect();
        let config = ServerConfig::from_flags(&flags).unwrap();
        let base = config.state.base.as_ref().expect("a state directory");
        let state = StateDir::open(base, &config.state.instance).unwrap();
        let instance = ServerInstance {
            folder: state.id(),
            tenants: 0,
            record: None,
        };
        let (arena, kept) = open_arena(&config, Ok(instance)).unwrap();
        let quotas = Opened::open(&config, None, &Salts::of(None)).unwrap();
        let l1 = L1::create(&config, &quotas, Arc::new(arena), kept, &[]).unwrap();
        let namespace = Arc::new(Namespace::new("many", 0, 0, 0, "").unwrap());
        for batch in 0..objects.div_ceil(BATCH) {
            let numbers = batch * BATCH..((batch + 1) * BATCH).min(objects);
            let hash = |number: u64| ChunkHash(*blake3::hash(&number.to_le_bytes()).as_bytes());
            let hashes: Vec<_> = numbers.map(hash).collect();
            let request = ReserveRequest {
                namespace: &namespace,
                hashes: &hashes,
                len: 4096,
            };
            let now = l1.heritage.age;
            let reserved = l1.cache.reserve(now, &[request]).unwrap();
            assert_eq!(reserved.reservation.commit(now).inserted, hashes.len());
        }
        l1.close();
    }
}

fn worker(endpoint: &str) -> EngineDrivenWorker {
    let mut spec = EngineDrivenSpec::new(InstanceId(1), Scope::new("one"), 2, 64);
    spec.block_tokens = 4;
    EngineDrivenWorker::register(Connection::connect(endpoint).unwrap(), spec).unwrap()
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A client asks all the time; each of its waits is the time of one answer, of a new connection too.
fn restart(setup: &Setup<'_>, objects: u64, prompt: &Prompt, rounds: usize) {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("tcp://{}", socket.local_addr().unwrap());
    let mut child = setup.start_on(&socket);
    let mut longest = Vec::new();
    for round in 0..rounds {
        let is_over = AtomicBool::new(false);
        let (wait, usual, new) = std::thread::scope(|scope| {
            let asks = scope.spawn(|| {
                let mut asking = Connection::connect(&endpoint).unwrap();
                let mut answers = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    let asked = Instant::now();
                    while asking.noop().is_err() {
                        asking = Connection::connect(&endpoint).unwrap();
                    }
                    answers.push(asked.elapsed());
                }
                answers.sort_unstable();
                (answers[answers.len() - 1], answers[answers.len() / 2])
            });
            let pid = rustix::process::Pid::from_child(&child);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            assert!(child.wait().unwrap().success());
            let new = setup.start_on(&socket);
            assert_eq!(worker(&endpoint).lookup(prompt, "after").unwrap(), 1);
            is_over.store(true, Ordering::Relaxed);
            let (wait, usual) = asks.join().unwrap();
            (wait, usual, new)
        });
        child = new;
        println!(
            "{{\"objects\": {objects}, \"restart\": {round}, \"longest_wait_ms\": {:.1}, \"usual_answer_ms\": {:.3}}}",
            wait.as_secs_f64() * 1e3,
            usual.as_secs_f64() * 1e3
        );
        longest.push(wait);
    }
    kill(child);
    longest.sort_unstable();
    println!(
        "{{\"objects\": {objects}, \"longest_wait_ms_median\": {:.1}, \"longest_wait_ms_most\": {:.1}}}",
        longest[longest.len() / 2].as_secs_f64() * 1e3,
        longest[longest.len() - 1].as_secs_f64() * 1e3
    );
}

fn main() {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let [binary, objects, rounds @ ..] = &args[..] else {
        panic!("usage: restart BINARY OBJECTS [ROUNDS]");
    };
    let objects: u64 = objects.parse().unwrap();
    let rounds: usize = rounds.first().map_or(5, |rounds| rounds.parse().unwrap());
    let base = tempfile::tempdir().unwrap();
    let setup = Setup {
        binary,
        base: base.path(),
        gib: (objects + 4096) as f64 * 4096.0 / f64::from(1 << 30),
        pool: format!("kvtier_restart_{}", std::process::id()),
    };
    let prompt = Prompt::new(&(0..CHUNK as u32).collect::<Vec<_>>());
    let (child, endpoint, empty) = setup.start();
    let stored = worker(&endpoint).store(&prompt, 0..CHUNK as u64, "s", |_| vec![7; 8192]);
    assert_eq!(stored.unwrap().chunks, [0]);
    kill(child);
    setup.fill(objects);
    let mut all = Vec::new();
    for round in 0..rounds {
        let began = Instant::now();
        let (child, endpoint, serving) = setup.start();
        let mut connection = worker(&endpoint);
        assert_eq!(connection.lookup(&prompt, "r").unwrap(), 1);
        let hit = began.elapsed();
        kill(child);
        println!(
            "{{\"objects\": {objects}, \"round\": {round}, \"serving_ms\": {:.1}, \"first_hit_ms\": {:.1}}}",
            serving.as_secs_f64() * 1e3,
            hit.as_secs_f64() * 1e3
        );
        all.push(hit);
    }
    all.sort_unstable();
    println!(
        "{{\"objects\": {objects}, \"empty_serving_ms\": {:.1}, \"first_hit_ms_median\": {:.1}}}",
        empty.as_secs_f64() * 1e3,
        all[all.len() / 2].as_secs_f64() * 1e3
    );
    restart(&setup, objects, &prompt, rounds);
    for name in ["", ".ledger"] {
        let _ = std::fs::remove_file(format!("/dev/shm/lmcache_l1_pool_{}{name}", setup.pool));
    }
}
