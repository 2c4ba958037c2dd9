//! Signals to a server.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStderr, Command, Stdio};

use super::{KVTIER, kvtier};

/// A server whose log is read.
struct Logged {
    child: Child,
    log: BufReader<ChildStderr>,
    seen: Vec<String>,
}

impl Logged {
    fn start(flags: &[&str]) -> Self {
        let mut child = Command::new(KVTIER)
            .args(["server", "--l1-size-gb", "0.05", "--shm-name", ""])
            .args(["--port", "0", "--http-port", "0"])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        let mut server = Self {
            child,
            log,
            seen: Vec::new(),
        };
        server.expect("serving");
        server
    }

    /// The next line with this text.
    fn expect(&mut self, text: &str) -> String {
        loop {
            let mut line = String::new();
            let read = self.log.read_line(&mut line).unwrap();
            assert!(read > 0, "the log ended before {text:?}: {:?}", self.seen);
            self.seen.push(line.clone());
            if line.contains(text) {
                return line;
            }
        }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(status.unwrap().success());
    }

    fn stop(mut self) {
        self.signal("TERM");
        self.expect("stopped");
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// proves: docs/operate.md#restart-and-upgrade
#[test]
fn hangup_reloads_tokens_and_ends_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let tokens = directory.path().join("tokens");
    std::fs::write(&tokens, "admin a 0123456789abcdef\n").unwrap();
    let mut server = Logged::start(&["--http-token-file", tokens.to_str().unwrap()]);
    std::fs::write(&tokens, "admin b 0123456789abcdeX\n").unwrap();
    for _ in 0..2 {
        server.signal("HUP");
        let line = server.expect("reloaded signal=");
        assert!(line.contains("checked=\"the tokens of HTTP\""), "{line}");
    }
    assert!(
        server
            .seen
            .iter()
            .any(|line| line.contains("the tokens of HTTP read again"))
    );
    server.stop();
}

#[test]
fn hangup_changes_the_log_filter() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kvtier.toml");
    std::fs::write(&file, "log-level = \"info\"\n").unwrap();
    let mut server = Logged::start(&["--config", file.to_str().unwrap()]);
    server.signal("HUP");
    server.expect("reloaded signal=");
    std::fs::write(
        &file,
        "log-level = \"info,kvtier_http=trace,kvtier_server=warn\"\n",
    )
    .unwrap();
    server.signal("HUP");
    server.expect("reloaded signal=");
    let changed = |server: &Logged| {
        let lines = server.seen.iter();
        lines
            .filter(|line| line.contains("changed by a reload"))
            .count()
    };
    // That line is of the target that the new filter silences.
    assert_eq!(changed(&server), 0);
    std::fs::write(&file, "log-level = \"info\"\n").unwrap();
    server.signal("HUP");
    server.expect("reloaded signal=");
    assert_eq!(changed(&server), 1);
    server.stop();
}

// proves: docs/operate.md#restart-and-upgrade
#[test]
fn user_signals_log_the_state_and_end_nothing() {
    let mut server = Logged::start(&[]);
    for signal in ["USR1", "USR2", "USR1"] {
        server.signal(signal);
        let line = server.expect(&format!("state signal=\"SIG{signal}\""));
        assert!(
            line.contains("objects=0") && line.contains("workers=0"),
            "{line}"
        );
    }
    server.signal("HUP");
    server.expect("reloaded signal=");
    server.stop();
}

#[test]
fn flags_without_effect_are_named_once() {
    let flags = [
        "--l2-store-policy",
        "skip_l1",
        "--ipc-mode",
        "0660",
        "--p2p-listen-url",
        "x",
        "--disable-metrics",
    ];
    let mut server = Logged::start(&flags);
    server.signal("USR1");
    server.expect("state");
    let named = server
        .seen
        .iter()
        .filter(|line| line.contains("flags without effect"));
    let named: Vec<_> = named.cloned().collect();
    assert_eq!(named.len(), 1, "{:?}", server.seen);
    for flag in [flags[0], flags[2], flags[4], flags[6]] {
        assert!(named[0].contains(flag), "{named:?}");
    }
    server.stop();
    let strict = kvtier(&[&["server", "--check-config", "--strict-flags"], &flags[..]].concat());
    assert_eq!(strict.status.code(), Some(2));
}
