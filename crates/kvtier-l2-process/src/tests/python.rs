//! The directory of the Python package, by the conformance suite, and as a command.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::*;
use kvtier_l2::conformance::{Damage, Subject, object, run};

const PACKAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bindings/python/python");

/// Arguments of Python for a directory.
fn arguments(objects: &Path) -> Vec<String> {
    let objects = objects.to_str().unwrap();
    let words = ["-B", "-m", "kvtier.tier.directory", "--path", objects];
    words.map(str::to_owned).into()
}

/// A directory of its own, served by a process of its own.
struct Directory {
    place: TempDir,
    process: Child,
}

impl Directory {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let objects = place.path().join("objects");
        Self::start(place, &arguments(&objects))
    }

    fn start(place: TempDir, arguments: &[String]) -> Self {
        let process = Command::new("python3")
            .args(arguments)
            .env("PYTHONPATH", PACKAGE)
            .env("KVTIER_SOCKET", place.path().join("socket"))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self { place, process }
    }

    fn options(&self) -> ProcessOptions {
        options(&self.place.path().join("socket"))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Subject for Directory {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        Box::pin(async {
            let adapter = ProcessAdapter::open(&self.options());
            until_connected(&adapter).await;
            let adapter: Arc<dyn Adapter> = Arc::new(adapter);
            adapter
        })
    }

    fn damage(&self, key: &ObjectKey, how: Damage) -> bool {
        let name = hex::encode(Sha256::digest(name_of(key)));
        let path = self.place.path().join("objects");
        let path = path.join(&name[..2]).join(&name);
        let mut bytes = std::fs::read(&path).unwrap();
        if how == Damage::Remove {
            std::fs::remove_file(&path).unwrap();
            return true;
        }
        how.apply(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        true
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn directory_in_python_passes() {
    run(Directory::new).await;
}

/// A program of a page, which keeps objects in memory.
struct Example(Directory);

impl Example {
    /// Starts the first program of a text, which listens on its first argument or this path.
    fn of(text: &str, path: &str) -> Self {
        let program = text.split("```python\n").nth(1).unwrap();
        let program = program.split("```").next().unwrap();
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("socket").to_str().unwrap().to_owned();
        let program = program.replace(path, &socket);
        let words = ["-c".to_owned(), program, socket];
        Self(Directory::start(place, &words))
    }
}

impl Subject for Example {
    fn open(&self) -> BoxFuture<'_, Arc<dyn Adapter>> {
        self.0.open()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn example_of_the_page_passes() {
    const PAGE: &str = include_str!("../../../../docs/tier-protocol.md");
    run(|| Example::of(PAGE, "/no/path")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn example_of_the_python_page_passes() {
    const PAGE: &str = include_str!("../../../../docs/python.md");
    let part = PAGE.split("\n## Second tiers\n").nth(1).unwrap();
    run(|| Example::of(part, "/run/kvtier/mine.sock")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_is_started_again_and_ends_with_the_adapter() {
    let place = tempfile::tempdir().unwrap();
    let mut options = options(&place.path().join("socket"));
    let words = ["env".to_owned(), format!("PYTHONPATH={PACKAGE}")];
    options.command = words.into();
    options.command.push("python3".into());
    options
        .command
        .extend(arguments(&place.path().join("objects")));
    let adapter = ProcessAdapter::open(&options);
    let (memory, objects) = (Memory::new(4 << 20), [object(1, 100_000), object(2, 1)]);
    // The first call waits for the start.
    assert_eq!(
        kinds(store(&adapter, &memory, &objects).await),
        [None, None]
    );
    let process = process_of(&options.socket_path);
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    while adapter.status()["command_restarts"] == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    until_connected(&adapter).await;
    let loaded = load(&adapter, &memory, &objects).await;
    assert_eq!(loaded[0].as_ref().unwrap(), &content(&objects[0]));
    assert_eq!(loaded[1].as_ref().unwrap(), &content(&objects[1]));
    let process = process_of(&options.socket_path);
    adapter.close().await;
    assert!(rustix::process::test_kill_process(process).is_err());
    // By SIGTERM, as it has removed its socket.
    assert!(!options.socket_path.exists());
}

/// The process that listens on a socket.
fn process_of(path: &Path) -> rustix::process::Pid {
    let socket = std::os::unix::net::UnixStream::connect(path).unwrap();
    let peer = rustix::net::sockopt::socket_peercred(&socket).unwrap();
    peer.pid
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_command_is_killed_and_started_again() {
    let place = tempfile::tempdir().unwrap();
    let mut options = options(&place.path().join("socket"));
    options.request_timeout = Duration::from_millis(300);
    let words = ["env".to_owned(), format!("PYTHONPATH={PACKAGE}")];
    options.command = words.into();
    options.command.push("python3".into());
    let objects = place.path().join("objects");
    options.command.extend(arguments(&objects));
    let adapter = ProcessAdapter::open(&options);
    until_connected(&adapter).await;
    let process = process_of(&options.socket_path);
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    let (memory, one) = (Memory::new(1 << 20), [object(1, 100_000)]);
    let stored = kinds(store(&adapter, &memory, &one).await);
    assert_eq!(stored, [Some(ErrorKind::Unavailable)]);
    while kinds(store(&adapter, &memory, &one).await) != [None] {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_ne!(process_of(&options.socket_path), process);
    assert!(rustix::process::test_kill_process(process).is_err());
    adapter.close().await;
}

#[tokio::test]
async fn command_that_cannot_start_is_an_unhealthy_tier() {
    let place = tempfile::tempdir().unwrap();
    for command in [&["/none"][..], &["false"], &["sh", "-c", "exit 3"]] {
        let mut options = options(&place.path().join("socket"));
        options.command = command.iter().map(|word| (*word).to_owned()).collect();
        let adapter = ProcessAdapter::open(&options);
        let error = adapter.connected().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert_eq!(adapter.status()["is_healthy"], false);
        adapter.close().await;
    }
}

/// Processes started by a command end as well, if the adapter is dropped and not closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_adapter_leaves_no_process() {
    let place = tempfile::tempdir().unwrap();
    let mut options = options(&place.path().join("socket"));
    let inner = arguments(&place.path().join("objects"));
    let script = format!(
        "PYTHONPATH={PACKAGE} python3 {} < /dev/null & wait",
        inner.join(" ")
    );
    options.command = ["sh", "-c", &script].map(str::to_owned).into();
    let adapter = ProcessAdapter::open(&options);
    until_connected(&adapter).await;
    let process = process_of(&options.socket_path);
    drop(adapter);
    while rustix::process::test_kill_process(process).is_ok() && is_running(process) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// As in process 1 of a container: what a command leaves behind becomes this process's children.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orphans_of_a_command_are_reaped() {
    let this = rustix::process::getpid();
    rustix::process::set_child_subreaper(Some(this)).unwrap();
    let place = tempfile::tempdir().unwrap();
    let mut options = options(&place.path().join("socket"));
    let script = "cd \"$0\"; (sh -c 'echo $$ > short' &); (sh -c 'echo $$ > long; exec sleep 1000' &); exec sleep 1000";
    let words = ["sh", "-c", script, place.path().to_str().unwrap()];
    options.command = words.map(str::to_owned).into();
    let adapter = ProcessAdapter::open(&options);
    let pid_in = async |name: &str| loop {
        let text = std::fs::read_to_string(place.path().join(name)).unwrap_or_default();
        if let Some(pid) = text.strip_suffix('\n') {
            return Path::new("/proc").join(pid);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let until_reaped = async |process: &Path| {
        while process.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    until_reaped(&pid_in("short").await).await;
    let long = pid_in("long").await;
    assert!(long.exists());
    adapter.close().await;
    until_reaped(&long).await;
}

/// Whether a process is neither gone nor waiting for its parent to ask how it ended.
fn is_running(process: rustix::process::Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_pid()));
    stat.is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap()
            .trim_start()
            .starts_with('Z')
    })
}
