//! The server's log, as the reader of its stderr gets it, or does not.

use std::io::{BufRead as _, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvtier_client::{Connection, Options};

/// A server whose stderr is a pipe, killed on drop.
struct Server {
    child: Child,
    client: Connection,
}

impl Server {
    fn start(pool: &str, flags: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        drop(listener);
        let pool = format!("kvtier_log_{pool}_{}", std::process::id());
        let child = Command::new(env!("CARGO_BIN_EXE_kvtier"))
            .args(["server", "--l1-size-gb", "0.05", "--http-port", "0"])
            .args(["--port", &port, "--shm-name", &pool])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let options = Options {
            timeout: Duration::from_secs(60),
            ..Options::default()
        };
        let endpoint = format!("tcp://127.0.0.1:{port}");
        let mut client = Connection::connect_with(&endpoint, options).unwrap();
        client.get_chunk_size().unwrap();
        Self { child, client }
    }

    /// Makes the server write `lines` log lines.
    fn log(&mut self, lines: usize) {
        for _ in 0..lines {
            self.client.clear(false).unwrap();
        }
    }

    fn terminate(&self) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").arg(pid).status();
        assert!(status.unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// proves: docs/troubleshoot.md#the-log
#[test]
fn a_server_with_unread_stderr_runs_and_ends() {
    let mut server = Server::start("unread", &[]);
    // More than a pipe holds.
    server.log(1000);
    assert!(server.client.ping(None).unwrap());
    server.terminate();
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

// proves: docs/troubleshoot.md#the-log
#[test]
fn last_log_line_is_written_before_exit() {
    let mut server = Server::start("read", &[]);
    server.log(3);
    server.terminate();
    let mut text = String::new();
    let mut stderr = server.child.stderr.take().unwrap();
    stderr.read_to_string(&mut text).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(
        lines
            .iter()
            .filter(|line| line.contains("cleared L1"))
            .count(),
        3,
        "{text}"
    );
    assert!(lines.last().unwrap().ends_with("stopped"), "{text}");
}

#[test]
fn lost_tier_s_line_names_the_tier() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = closed.local_addr().unwrap().port();
    drop(closed);
    let tier = format!(r#"{{"type":"resp","name":"cold","host":"127.0.0.1","port":{port}}}"#);
    let mut server = Server::start("tier", &["--l2-adapter", &tier]);
    let stderr = BufReader::new(server.child.stderr.take().unwrap());
    let mut lines = stderr.lines().map(Result::unwrap);
    let line = lines.find(|line| line.contains("no connection to a second tier"));
    let line = line.unwrap();
    for part in ["tier=\"cold\"", "failed_calls=", "suppressed_lines=0"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    // A server that is killed leaves its pool.
    server.terminate();
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}
