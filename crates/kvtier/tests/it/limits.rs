//! A server under the limits of a shell.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

#[test]
fn file_size_limit_fails_only_its_write() {
    let program = assert_cmd::cargo::cargo_bin("kvtier");
    let command = format!(
        "exec {} server --port 0 --http-port 0 --l1-size-gb 0.01 --shm-name ''",
        program.display()
    );
    let mut server = Command::new("sh")
        .args(["-c", &command])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("serving")));
    let pid = Pid::from_raw(i32::try_from(server.id()).unwrap()).unwrap();
    // What a write above `ulimit -f` sends.
    kill_process(pid, Signal::XFSZ).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    assert!(lines.any(|line| line.unwrap().contains("stopped")));
    assert!(server.wait().unwrap().success());
}

// proves: docs/clients.md#too-many-connections
#[test]
fn too_few_descriptors_are_refused_in_one_line() {
    let program = assert_cmd::cargo::cargo_bin("kvtier");
    let command = format!(
        "ulimit -n 32; exec {} server --port 0 --http-port 0 --l1-size-gb 0.01 --shm-name '' --log-level warn",
        program.display()
    );
    let output = Command::new("sh").args(["-c", &command]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(
        said.trim_end(),
        "kvtier server: this process may open 32 files (ulimit -n); a server needs at least 64"
    );
}
