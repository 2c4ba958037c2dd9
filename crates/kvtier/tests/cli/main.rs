//! The commands as their user runs them.
#![expect(clippy::unwrap_used, reason = "tests")]

mod asking;
mod demo;
mod quotas;
mod starting;

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::Command as Assert;

const KVTIER: &str = env!("CARGO_BIN_EXE_kvtier");

fn kvtier(args: &[&str]) -> Output {
    Assert::new(KVTIER)
        .args(args)
        .timeout(Duration::from_secs(300))
        .output()
        .unwrap()
}

fn lines(bytes: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(bytes)
        .lines()
        .map(str::to_owned)
        .collect()
}

/// The one line a command that failed has to say.
fn complaint(output: &Output, code: i32) -> String {
    let said = lines(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said:?}");
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(output.stdout.is_empty());
    said[0].clone()
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// A server on ports of its own, stopped on drop.
struct Server {
    child: Child,
    requests: String,
    http: String,
}

impl Server {
    fn start() -> Self {
        Self::start_with(&["--shm-name", &format!("kvtier_cli_{}", std::process::id())])
    }

    fn start_with(flags: &[&str]) -> Self {
        let (port, http) = (free_port(), free_port());
        let child = Command::new(KVTIER)
            .args(["server", "--l1-size-gb", "0.05"])
            .args([
                "--port",
                &port.to_string(),
                "--http-port",
                &http.to_string(),
            ])
            .args(flags)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self {
            child,
            requests: format!("tcp://127.0.0.1:{port}"),
            http: format!("http://127.0.0.1:{http}"),
        };
        let began = Instant::now();
        while !kvtier(&["ping", "--count", "1", "--url", &server.http])
            .status
            .success()
        {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "the server does not answer"
            );
            std::thread::yield_now();
        }
        server
    }

    fn port(&self) -> &str {
        self.requests.rsplit_once(':').unwrap().1
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGTERM, so that the pool goes away.
        let _ = Command::new("kill")
            .arg(self.child.id().to_string())
            .status();
        let _ = self.child.wait();
    }
}

#[test]
fn who_stops_reading_ends_no_command_with_a_panic() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_kvtier"))
        .args(["server", "--help"])
        .stdout(writer)
        .output()
        .unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
}

#[test]
fn help_names_every_command() {
    let output = kvtier(&["--help"]);
    let text = lines(&output.stdout).join("\n");
    for command in ["server", "bench", "demo", "status", "ping"] {
        assert!(
            output.status.success() && text.contains(&format!("\n  {command} ")),
            "{text}"
        );
    }
}
