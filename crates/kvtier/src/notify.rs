//! The service manager: what a server under systemd reports to it (`sd_notify`), and its watchdog.
//!
//! A report is a datagram of lines `KEY=VALUE` to the socket that `NOTIFY_SOCKET` names. Without that variable nothing is
//! opened and nothing is sent. A manager that does not read costs a report, never the server.

use std::ffi::{OsStr, OsString};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use kvtier_server::engine::HOUSEKEEPING_INTERVAL;
use rustix::time::{ClockId, clock_gettime};

/// Interval of reports where the manager allows more than the clock can express.
const FAR_AWAY: Duration = Duration::from_secs(1 << 30);

/// Reports of one process to its service manager.
#[derive(Debug, Default)]
pub(crate) struct Notifier {
    manager: Option<(UnixDatagram, SocketAddr)>,
    /// What the manager shows while the server serves.
    status: String,
}

impl Notifier {
    /// From the environment. An address that cannot be used is logged, and nothing is reported then.
    pub(crate) fn from_environment(status: String) -> Self {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Self::default();
        };
        match connect(&name) {
            Ok(manager) => Self {
                manager: Some(manager),
                status,
            },
            Err(error) => {
                tracing::warn!(
                    NOTIFY_SOCKET = ?name,
                    %error,
                    "service manager is not notified; allowed: a path or an abstract name (@...) of a datagram socket"
                );
                Self::default()
            }
        }
    }

    /// Requests are answered.
    pub(crate) fn ready(&self) {
        self.send(|| format!("READY=1\nSTATUS={}", self.status));
    }

    /// What may change while running is read again; `ready` is the end of it.
    pub(crate) fn reloading(&self) {
        // Of the system's clock that the manager compares with the time of its signal.
        self.send(|| {
            let now = clock_gettime(ClockId::Monotonic);
            let micros = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
            format!(
                "RELOADING=1\nMONOTONIC_USEC={micros}\nSTATUS=reading configuration, tokens and certificate again"
            )
        });
    }

    /// The server stops, for which it may take `limit`.
    pub(crate) fn stopping(&self, limit: Duration) {
        let micros = limit.as_micros();
        self.send(|| {
            format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={micros}\nSTATUS=answering requests in flight and storing what waits")
        });
    }

    /// The server is alive.
    fn alive(&self) {
        self.send(|| "WATCHDOG=1".to_owned());
    }

    fn send(&self, report: impl FnOnce() -> String) {
        let Some((socket, manager)) = &self.manager else {
            return;
        };
        if let Err(error) = socket.send_to_addr(report().as_bytes(), manager) {
            // A watchdog that expects more ends the process, so this is no flood.
            tracing::debug!(%error, "service manager was not notified");
        }
    }
}

/// A socket that never blocks, and the manager's address.
fn connect(name: &OsStr) -> std::io::Result<(UnixDatagram, SocketAddr)> {
    let manager = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(name)?,
        _ => return Err(std::io::ErrorKind::InvalidInput.into()),
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok((socket, manager))
}

/// The watchdog of a service manager: it ends a process that does not report in time.
///
/// The server reports while no component has failed and the housekeeping, which takes the locks of all others, makes
/// rounds. So one that hangs, or that only a restart repairs, is started again.
#[derive(Debug)]
pub(crate) struct Watchdog {
    /// Interval of reports: half of what the manager allows.
    interval: Duration,
    /// When the next report is due.
    due: Instant,
    rounds: u64,
    /// When `rounds` last grew.
    grew: Instant,
}

impl Watchdog {
    /// From the environment: `WATCHDOG_USEC`, if it is meant for this process.
    pub(crate) fn from_environment() -> Option<Self> {
        let variable = |name| std::env::var_os(name);
        Self::parse(variable("WATCHDOG_USEC"), variable("WATCHDOG_PID"))
    }

    fn parse(micros: Option<OsString>, pid: Option<OsString>) -> Option<Self> {
        let own = std::process::id().to_string();
        if pid.is_some_and(|pid| pid != *own) {
            return None;
        }
        let micros: u64 = micros?.to_str()?.parse().ok()?;
        let now = Instant::now();
        (micros > 0).then(|| Self {
            interval: Duration::from_micros(micros.div_ceil(2)),
            due: now,
            rounds: 0,
            grew: now,
        })
    }

    /// Waits until the next report is due.
    pub(crate) async fn wait(&self) {
        tokio::time::sleep_until(self.due.into()).await;
    }

    /// Reports, unless the server is unhealthy or its housekeeping, `rounds` so far, has stopped.
    pub(crate) fn report(&mut self, notifier: &Notifier, is_healthy: bool, rounds: u64) {
        let now = Instant::now();
        let wait = if self.is_alive(is_healthy, rounds, now) {
            notifier.alive();
            self.interval
        } else {
            // A process that was stopped for long makes its next round soon.
            self.interval.min(HOUSEKEEPING_INTERVAL)
        };
        self.due = now.checked_add(wait).unwrap_or(now + FAR_AWAY);
    }

    fn is_alive(&mut self, is_healthy: bool, rounds: u64, now: Instant) -> bool {
        if rounds != self.rounds {
            (self.rounds, self.grew) = (rounds, now);
        }
        let allowed = self.interval + 2 * HOUSEKEEPING_INTERVAL;
        is_healthy && now.duration_since(self.grew) <= allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watchdog_is_for_the_named_process() {
        let parse = |micros: &str, pid: Option<&str>| {
            Watchdog::parse(Some(micros.into()), pid.map(OsString::from))
        };
        let own = std::process::id().to_string();
        let interval = Some(Duration::from_secs(15));
        for pid in [None, Some(own.as_str())] {
            assert_eq!(parse("30000000", pid).map(|found| found.interval), interval);
        }
        assert!(parse("30000000", Some("1x")).is_none());
        for micros in ["", "0", "-1", "1s", "99999999999999999999"] {
            assert!(parse(micros, None).is_none(), "{micros}");
        }
        assert!(Watchdog::parse(None, None).is_none());
    }

    // proves: docs/operate.md#systemd
    #[test]
    fn stopped_housekeeping_ends_the_reports() {
        let mut watchdog = Watchdog::parse(Some("20000000".into()), None).unwrap();
        let start = watchdog.grew;
        let mut at = |seconds, is_healthy, rounds| {
            watchdog.is_alive(is_healthy, rounds, start + Duration::from_secs(seconds))
        };
        assert!(at(10, true, 9) && at(20, true, 19));
        assert!(!at(21, false, 20), "a failed component");
        // The last round was seen at 21; the interval of 10 s and two rounds later it is too late.
        assert!(at(33, true, 20));
        assert!(!at(34, true, 20) && !at(60, true, 20));
        assert!(at(61, true, 21), "they run again");
    }

    #[test]
    fn silent_watchdog_asks_again_soon() {
        let mut watchdog = Watchdog::parse(Some("20000000".into()), None).unwrap();
        let silent = Notifier::default();
        watchdog.report(&silent, true, 1);
        let regular = watchdog.due;
        watchdog.report(&silent, false, 2);
        assert!(watchdog.due < regular);
    }

    #[test]
    fn report_without_manager_is_not_made() {
        Notifier::default().send(|| unreachable!("there is no manager"));
    }

    #[test]
    fn unusable_address_is_an_error() {
        for name in ["notify", "vsock:2:1234", &format!("/{}", "x".repeat(200))] {
            assert!(connect(OsStr::new(name)).is_err(), "{name}");
        }
        assert!(connect(OsStr::new("@kvtier/notify")).is_ok());
    }
}
