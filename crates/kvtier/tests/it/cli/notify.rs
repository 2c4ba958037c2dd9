//! What a server reports to a service manager, which is a datagram socket here.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::{KVTIER, free_port, kvtier};

/// A server under a manager.
struct Managed {
    child: Child,
    manager: UnixDatagram,
    port: u16,
}

impl Managed {
    fn start(manager: UnixDatagram, address: &str, environment: &[(&str, &str)]) -> Self {
        manager
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let port = free_port();
        let child = Command::new(KVTIER)
            .args(["server", "--l1-size-gb", "0.05", "--shm-name", ""])
            .args(["--port", &port.to_string(), "--http-port", "0"])
            .env("NOTIFY_SOCKET", address)
            .envs(environment.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            child,
            manager,
            port,
        }
    }

    /// The lines of the next report.
    fn report(&self) -> Vec<String> {
        let mut bytes = [0; 1024];
        let length = self.manager.recv(&mut bytes).unwrap();
        super::lines(&bytes[..length])
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(status.unwrap().success());
    }

    fn expect_ready(&self) {
        let report = self.report();
        assert_eq!(report[0], "READY=1");
        let address = format!("tcp://127.0.0.1:{}, http://127.0.0.1:", self.port);
        assert!(
            report[1].starts_with("STATUS=serving on ") && report[1].contains(&address),
            "{report:?}"
        );
    }

    fn stop(mut self) {
        self.signal("TERM");
        assert_eq!(
            self.report()[..2],
            ["STOPPING=1", "EXTEND_TIMEOUT_USEC=20000000"]
        );
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn monotonic_micros() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000 + now.tv_nsec / 1000
}

// proves: docs/operate.md#systemd
#[test]
fn manager_sees_start_reload_and_stop() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let server = Managed::start(manager, path.to_str().unwrap(), &[]);
    server.expect_ready();
    // No retry: it was ready.
    let ping = kvtier(&[
        "ping",
        "--count",
        "1",
        &format!("127.0.0.1:{}", server.port),
    ]);
    assert!(ping.status.success(), "{ping:?}");
    let before = monotonic_micros();
    server.signal("HUP");
    let report = server.report();
    assert_eq!(report[0], "RELOADING=1");
    let micros: i64 = report[1]
        .strip_prefix("MONOTONIC_USEC=")
        .unwrap()
        .parse()
        .unwrap();
    assert!((before..=monotonic_micros()).contains(&micros), "{micros}");
    server.expect_ready();
    server.stop();
}

// proves: docs/operate.md#systemd
#[test]
fn abstract_address_and_watchdog_are_served() {
    let name = format!("kvtier/notify/{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = UnixDatagram::bind_addr(&address).unwrap();
    let watchdog = [("WATCHDOG_USEC", "200000")];
    let server = Managed::start(manager, &format!("@{name}"), &watchdog);
    server.expect_ready();
    for _ in 0..3 {
        assert_eq!(server.report(), ["WATCHDOG=1"]);
    }
    server.signal("TERM");
    while server.report()[0] != "STOPPING=1" {}
}

#[test]
fn watchdog_of_another_process_has_no_reports() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let watchdog = [("WATCHDOG_USEC", "1000"), ("WATCHDOG_PID", "1")];
    let server = Managed::start(manager, path.to_str().unwrap(), &watchdog);
    server.expect_ready();
    server.stop();
}

#[test]
fn missing_manager_costs_nothing() {
    for address in ["/nowhere/notify", "relative", ""] {
        let manager = UnixDatagram::unbound().unwrap();
        let mut server = Managed::start(manager, address, &[]);
        let requests = format!("127.0.0.1:{}", server.port);
        while !kvtier(&["ping", "--count", "1", &requests])
            .status
            .success()
        {
            assert!(server.child.try_wait().unwrap().is_none(), "it ended");
            std::thread::yield_now();
        }
        server.signal("TERM");
        assert_eq!(server.child.wait().unwrap().code(), Some(0));
    }
}
