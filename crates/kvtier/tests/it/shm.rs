//! A server whose `/dev/shm` an earlier one has filled.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use kvtier_server::config::HostMemory;

/// 40 MiB of the 64 that the test's own /dev/shm has.
const FLAGS: &str = "--l1-size-gb 0.0390625 --host 127.0.0.1 --port 0 --http-port 0";

/// The pool that a server killed with SIGKILL leaves, all of it touched.
const STALE: &str = "head -c 40m /dev/zero > /dev/shm/lmcache_l1_pool_old;";

/// Removed file that a process holds, as a worker that has it mapped.
const HELD: &str = "exec 9> /dev/shm/x; head -c 40m /dev/zero >&9; rm /dev/shm/x;";

/// What a shell does in namespaces of its own, whose /dev/shm has 64 MiB. KVTIER is the program, SERVER a server with the
/// flags above.
fn alone(script: &str) -> Command {
    let mut command = Command::new("unshare");
    let mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm &&";
    let script = script.replace("SERVER", &format!("exec KVTIER server {FLAGS}"));
    let script = script.replace("KVTIER", env!("CARGO_BIN_EXE_kvtier"));
    command
        .args(["--user", "--map-root-user", "--mount", "sh", "-ec"])
        .arg(format!("{mount} {{ {script} }}"));
    command
}

/// Whether the system lets us have such namespaces: inside a container it often does not.
fn is_possible() -> bool {
    let made = alone("true;").output();
    let possible = made.is_ok_and(|made| made.status.success());
    if !possible {
        eprintln!("no mount namespace here: nothing was tested");
    }
    possible
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

/// A server, killed on drop.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The log of a server up to the line that says it serves, or to its end.
fn log(script: &str) -> String {
    let child = alone(script).stderr(Stdio::piped()).spawn().unwrap();
    let mut server = Server(child);
    let stderr = BufReader::new(server.0.stderr.take().unwrap());
    let mut log = String::new();
    for line in stderr.lines().map_while(Result::ok) {
        log += &line;
        log.push('\n');
        if line.contains("serving") {
            break;
        }
    }
    log
}

// proves: docs/operate.md#restart-and-upgrade
#[test]
fn killed_servers_pool_is_freed_for_successor() {
    if !is_possible() {
        return;
    }
    let started = log(&format!("{STALE} SERVER --shm-name old;"));
    assert!(started.contains("serving"), "{started}");
    assert!(!started.contains("no shared memory pool"), "{started}");

    let check = |name| {
        let script = format!("{STALE} SERVER --check-config --shm-name {name};");
        alone(&script).output().unwrap()
    };
    let same = check("old");
    assert!(same.status.success(), "{}", said(&same));
    assert!(!said(&same).contains("warning"), "{}", said(&same));
    let other = check("other");
    assert!(!other.status.success(), "{}", said(&other));
    assert!(said(&other).contains("--shm-name other: /dev/shm has "));
}

// proves: docs/troubleshoot.md#shared-memory
#[test]
fn full_shm_error_says_workers_may_hold_it() {
    if !is_possible() {
        return;
    }
    let cause = "until each worker that maps it has registered again or ended";
    let refused = log(&format!("{HELD} SERVER --shm-name old;"));
    assert!(!refused.contains("serving"), "{refused}");
    assert!(refused.contains(cause), "{refused}");

    let mut checked = alone(&format!("{HELD} SERVER --check-config;"));
    let checked = said(&checked.output().unwrap());
    assert!(checked.contains("warning: /dev/shm has "), "{checked}");

    let without = log(&format!("{HELD} SERVER;"));
    assert!(without.contains("serving"), "{without}");
    let warning = without
        .lines()
        .find(|line| line.contains("no shared memory pool"));
    assert!(warning.unwrap().contains(cause), "{without}");
}

// proves: docs/compare.md#flags-of-lmcache
// proves: docs/operate.md#restart-and-upgrade
#[test]
fn the_default_pool_leaves_space_for_the_previous() {
    if !is_possible() {
        return;
    }
    // A quarter of the memory just fits, once.
    let size = (HostMemory::of_this_process().bytes / 4).next_multiple_of(1 << 20);
    let script =
        format!("mount -o remount,size={size} /dev/shm; KVTIER server --check-config --port 0;");
    let checked = alone(&script).output().unwrap();
    assert!(
        said(&checked).contains("45 % of /dev/shm"),
        "{}",
        said(&checked)
    );
}
