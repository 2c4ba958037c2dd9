//! The commands as their user runs them.

mod asking;
mod config;
mod definitions;
mod demo;
mod explain;
mod inherited;
mod notify;
mod quotas;
mod signals;
mod starting;

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::Command as Assert;

const KVTIER: &str = env!("CARGO_BIN_EXE_kvtier");

fn kvtier(args: &[&str]) -> Output {
    kvtier_with(&[], args)
}

fn kvtier_with(variables: &[(&str, &str)], args: &[&str]) -> Output {
    Assert::new(KVTIER)
        .envs(variables.iter().copied())
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

    fn start_without_pool() -> Self {
        Self::start_with(&["--shm-name", ""])
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
fn closed_stdout_causes_no_panic() {
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
    for command in [
        "server",
        "bench",
        "demo",
        "status",
        "quota",
        "config",
        "ping",
        "pools",
        "tier-test",
        "completions",
        "man",
        "version",
    ] {
        assert!(
            output.status.success() && text.contains(&format!("\n  {command} ")),
            "{text}"
        );
    }
}

#[test]
fn version_names_release_and_target() {
    let [flag, command] = [["--version"], ["version"]].map(|args| {
        let output = kvtier(&args);
        assert!(output.status.success() && output.stderr.is_empty());
        lines(&output.stdout)
    });
    assert_eq!(flag[0], command[0]);
    let release = format!("kvtier {} (", env!("CARGO_PKG_VERSION"));
    assert!(
        flag[0].starts_with(&release) && flag[0].contains("linux"),
        "{flag:?}"
    );
    assert!(command[1].contains("LMCache 0.4.2 to 0.5.7"));
}

#[test]
fn errors_are_uniform_and_usage_exits_2() {
    let closed = format!("127.0.0.1:{}", free_port());
    let web = format!("http://{closed}");
    for (args, code) in [
        (&["server", "--chunk-size", "0"][..], 2),
        (&["server", "--no-such-flag"], 2),
        (
            &[
                "server",
                "--host",
                "nosuchhost.invalid",
                "--port",
                "0",
                "--http-port",
                "0",
            ],
            2,
        ),
        (&["status", "tcp://a:1"], 2),
        (&["status", "--no-such-flag"], 2),
        (&["ping", "--count"], 2),
        (&["quota", "set", "alice"], 2),
        (&["quota", "nonsense"], 2),
        (&["pools", "free"], 2),
        (&["bench", "--scenario", "nonsense"], 2),
        (&["demo", "--no-such-flag"], 2),
        (&["status", &web], 1),
        (&["ping", &closed], 1),
        (&["quota", "list", &web], 1),
        (&["bench", &closed, "--timeout", "1"], 1),
    ] {
        let line = complaint(&kvtier(args), code);
        assert!(line.starts_with(&format!("kvtier {}: ", args[0])), "{line}");
    }
    assert!(complaint(&kvtier(&["nonsense"]), 2).starts_with("kvtier: "));
    let name = complaint(&kvtier(&["status", "\u{1b}[2J\n\u{9b}a:1"]), 2);
    assert!(!name.contains(char::is_control), "{name}");
}
