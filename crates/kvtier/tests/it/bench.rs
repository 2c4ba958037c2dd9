//! `kvtier bench` against `kvtier server`.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

const KVTIER: &str = env!("CARGO_BIN_EXE_kvtier");

/// A server on free ports, stopped on drop.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(name: &str) -> Self {
        Self::start_with(name, "0.25")
    }

    fn start_with(name: &str, l1_size_gb: &str) -> Self {
        let (port, http_port) = (free_port(), free_port());
        let child = Command::new(KVTIER)
            .args([
                "server",
                "--l1-size-gb",
                l1_size_gb,
                "--port",
                &port.to_string(),
            ])
            .args(["--http-port", &http_port.to_string()])
            .args(["--shm-name", &format!("{name}_{}", std::process::id())])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut server = Self { child, port };
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert_eq!(server.child.try_wait().unwrap(), None, "the server ended");
            std::thread::yield_now();
        }
        server
    }

    fn bench(&self, args: &[&str]) -> Output {
        Command::new(KVTIER)
            .args(["bench", &format!("tcp://127.0.0.1:{}", self.port)])
            .args(["--timeout", "60s", "--json", "-"])
            .args(args)
            .output()
            .unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGTERM, so that the pool is removed.
        let id = self.child.id().to_string();
        let _ = Command::new("kill").arg(id).status();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap().port()
}

fn rows(output: &Output) -> Vec<serde_json::Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    let report: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|error| {
        panic!(
            "{error}: {text}\n{}",
            String::from_utf8_lossy(&output.stderr)
        )
    });
    assert_eq!(report["aborted"], serde_json::Value::Null, "{report:#}");
    report["rows"].as_array().unwrap().clone()
}

// proves: docs/compare.md#command-line
#[test]
fn whole_table_runs_and_bytes_are_right() {
    let server = Server::start("bench_table");
    let output = server.bench(&[
        "--requests=3",
        "--prompt-tokens=2100",
        "--clients=2",
        "--chunk-bytes=64KiB",
        "--chunks-per-request=3",
    ]);
    let rows = rows(&output);
    let names: Vec<_> = rows
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "ping",
            "lookup hit",
            "lookup miss",
            "retrieve bookkeeping",
            "store bookkeeping",
            "engine-driven store (shm)",
            "engine-driven retrieve (shm)",
            "lmcache-driven store",
            "lmcache-driven retrieve",
            "mixed lookup, 2 clients",
            "mixed writer",
        ]
    );
    for row in &rows {
        assert_eq!(
            (&row["failed"], &row["mismatched"]),
            (&0.into(), &0.into()),
            "{row:#}"
        );
    }
    for row in &rows[..9] {
        assert_eq!(row["count"], 3, "{row:#}");
    }
    assert_eq!(rows[9]["count"], 6);
    assert!(output.status.success());
}

#[test]
fn evicted_chunks_are_reported_with_flag_to_change() {
    let server = Server::start_with("bench_evicted", "0.01");
    let output = server.bench(&[
        "--scenario=engine-driven",
        "--volume=16MiB",
        "--chunk-bytes=256KiB",
    ]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("0 of 8 stored chunks are found; evicted? --volume"),
        "{text}"
    );
}

#[test]
fn trace_is_replayed_with_its_hits() {
    let server = Server::start("bench_trace");
    let mut trace = tempfile::NamedTempFile::new().unwrap();
    for ids in ["[1, 2, 3]", "[1, 2, 4]", "[5, 6, 7]", "[1, 2, 3]"] {
        use std::io::Write;
        writeln!(
            trace,
            r#"{{"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": {ids}}}"#
        )
        .unwrap();
    }
    let path = trace.path().to_str().unwrap();
    let output = server.bench(&["--trace", path, "--clients=1"]);
    let rows = rows(&output);
    let facts = &rows[3]["facts"];
    assert_eq!(facts["requests"], 4.0);
    // Hits: none; two blocks of three; none; all three.
    let rate = facts["hit rate"].as_f64().unwrap();
    assert!((rate - 5.0 / 12.0).abs() < 1e-9, "{rate}");
    assert!(output.status.success());
}

#[test]
fn memory_is_reported_per_object() {
    let server = Server::start("bench_memory");
    let pid = server.child.id().to_string();
    let output = server.bench(&["--scenario=memory", "--objects=128", "--pid", &pid]);
    let rows = rows(&output);
    assert_eq!(rows[1]["facts"]["objects"], 128.0);
    assert!(output.status.success());
}

#[test]
fn two_servers_are_measured_in_turn() {
    let first = Server::start("bench_first");
    let second = Server::start("bench_second");
    let beside = format!("127.0.0.1:{}", second.port);
    let requests = "--requests=5";
    let chosen = ["--scenario=lookup-hit", "--prompt-tokens=2100", requests];
    let output = first.bench(&[&chosen[..], &["--beside", &beside]].concat());
    let rows = rows(&output);
    let names: Vec<_> = rows
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["lookup hit", "lookup hit beside"]);
    for row in &rows {
        assert_eq!((&row["count"], &row["failed"]), (&5.into(), &0.into()));
        assert_eq!(row["facts"]["chunks"], 8.0, "{row:#}");
    }
    for (fact, quantile) in [("p50 of the first's", "p50"), ("p99 of the first's", "p99")] {
        let of = |row: usize| rows[row]["latency_us"][quantile].as_f64().unwrap();
        let expected = rows[1]["facts"][fact].as_f64().unwrap();
        // The last digit may change when numbers are parsed from text.
        assert!(
            (expected * of(0) / of(1) - 1.0).abs() < 1e-9,
            "{fact}: {expected}"
        );
    }
    assert!(output.status.success());
}

/// The error of `kvtier bench` for a server that it cannot measure.
fn complaint(port: u16, timeout: &str) -> String {
    let output = assert_cmd::Command::new(KVTIER)
        .args(["bench", &format!("tcp://127.0.0.1:{port}")])
        .args(["--timeout", timeout])
        .timeout(Duration::from_secs(60))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn missing_server_is_named_at_once() {
    let port = free_port();
    let text = complaint(port, "3600");
    assert!(
        text.contains(&format!("no server at tcp://127.0.0.1:{port}")),
        "{text}"
    );
}

#[test]
fn silent_server_ends_run_with_its_name() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let text = complaint(silent.local_addr().unwrap().port(), "50ms");
    assert!(
        text.contains("get_chunk_size: no reply from tcp://127.0.0.1:"),
        "{text}"
    );
}

#[test]
fn missing_arguments_are_named_once_before_start() {
    // Nothing listens there, and nothing is sent.
    let url = format!("127.0.0.1:{}", free_port());
    for (scenarios, lacking) in [
        ("replay", &["--trace"][..]),
        ("ping,memory", &["--pid"]),
        ("memory,replay,memory", &["--pid", "--trace"]),
    ] {
        let output = Command::new(KVTIER)
            .args(["bench", &url, "--scenario", scenarios])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(
            output.stdout.is_empty() && text.lines().count() == 1,
            "{text}"
        );
        for flag in lacking {
            assert_eq!(text.matches(flag).count(), 1, "{text}");
        }
    }
}

#[test]
fn starts_are_timed_and_server_is_stopped() {
    let (port, http_port) = (free_port().to_string(), free_port().to_string());
    let url = format!("tcp://127.0.0.1:{port}");
    let name = format!("bench_start_{}", std::process::id());
    let output = Command::new(KVTIER)
        .args(["bench", "start", "--url", &url, "--rounds", "2"])
        .args(["--settle", "1ms", "--json", "-", "--", KVTIER, "server"])
        .args([
            "--l1-size-gb",
            "0.25",
            "--port",
            &port,
            "--http-port",
            &http_port,
        ])
        .args(["--shm-name", &name])
        .output()
        .unwrap();
    let rows = rows(&output);
    assert_eq!(rows[0]["name"], "start to first answer");
    assert_eq!(rows[0]["count"], 2);
    assert!(rows[2]["facts"]["private MiB"].as_f64().unwrap() > 0.0);
    assert!(output.status.success());
    assert!(TcpStream::connect(format!("127.0.0.1:{port}")).is_err());
}

/// The error of `kvtier bench start` for a command that never answers.
fn complaint_of_start(url: &str, timeout: &str, command: &[&str]) -> String {
    let output = assert_cmd::Command::new(KVTIER)
        .args(["bench", "start", url, "--timeout", timeout, "--"])
        .args(command)
        .timeout(Duration::from_secs(60))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    text
}

#[test]
fn failed_start_is_reported_with_stderr() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, http_port) = (
        free_port().to_string(),
        taken.local_addr().unwrap().port().to_string(),
    );
    let url = format!("127.0.0.1:{port}");
    let server = ["server", "--l1-size-gb", "0.05", "--shm-name", ""];
    let ports = ["--port", &port, "--http-port", &http_port];
    let text = complaint_of_start(&url, "3600", &[&[KVTIER], &server[..], &ports[..]].concat());
    assert!(
        text.contains("the server ended before it") && text.contains("--http-port"),
        "{text}"
    );
    // A command that hangs is waited for until the timeout.
    for url in [&url, "ipc:///no/such/socket"] {
        let hangs = ["sh", "-c", "echo last words >&2; exec tail -f /dev/null"];
        let text = complaint_of_start(url, "500ms", &hangs);
        assert!(
            text.contains("did not listen at") && text.contains("\nlast words\n"),
            "{text}"
        );
    }
}

#[test]
fn server_death_during_request_ends_bench() {
    let directory = tempfile::tempdir().unwrap();
    let (started, asked) = (
        directory.path().join("started"),
        directory.path().join("asked"),
    );
    let port = free_port();
    let dies = format!(
        "touch {started:?}; until [ -e {asked:?} ]; do :; done; echo last words >&2; exit 3"
    );
    // Listens for the server, and lets it die after two connections: one to check that it listens, one for the request.
    let listener = std::thread::spawn(move || {
        while !started.exists() {
            std::thread::yield_now();
        }
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let connections = [listener.accept().unwrap(), listener.accept().unwrap()];
        std::fs::write(asked, "").unwrap();
        (listener, connections)
    });
    let text = complaint_of_start(&format!("127.0.0.1:{port}"), "3600", &["sh", "-c", &dies]);
    assert!(
        text.contains("ended before it answered: exit status: 3")
            && text.contains("\nlast words\n"),
        "{text}"
    );
    listener.join().unwrap();
}
