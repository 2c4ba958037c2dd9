//! The signals of a server.

use std::sync::Arc;

use kvtier_server::Server;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::notify::{Notifier, Watchdog};

/// Among the signals: a report to the service manager is due.
const WATCHDOG: &str = "watchdog";

/// Among the signals: Ctrl-C.
pub(crate) const SIGINT: &str = "SIGINT";

/// The signals of a server.
///
/// | signal | effect |
/// | --- | --- |
/// | SIGTERM | stop; L1 is kept where it can be |
/// | SIGINT | stop, and free L1 |
/// | SIGHUP | read the file of `--config`, tokens and certificate again |
/// | SIGUSR1, SIGUSR2 | log the state |
/// | SIGXFSZ | none: the write above a file size limit fails |
pub(crate) struct ServerSignals {
    runtime: Runtime,
    term: Signal,
    int: Signal,
    hup: Signal,
    usr1: Signal,
    usr2: Signal,
    _too_large: Signal,
}

impl ServerSignals {
    pub(crate) fn listen() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let guard = runtime.enter();
        let too_large = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
        let signals = [
            SignalKind::terminate(),
            SignalKind::interrupt(),
            SignalKind::hangup(),
            SignalKind::user_defined1(),
            SignalKind::user_defined2(),
            too_large,
        ];
        let [term, int, hup, usr1, usr2, too_large] = signals.map(signal);
        let (term, int, hup, usr1, usr2, _too_large) =
            (term?, int?, hup?, usr1?, usr2?, too_large?);
        drop(guard);
        Ok(Self {
            runtime,
            term,
            int,
            hup,
            usr1,
            usr2,
            _too_large,
        })
    }

    /// Waits for a signal that ends the server; serves the others and the service manager meanwhile.
    pub(crate) fn wait(&mut self, server: &Server, notifier: &Arc<Notifier>) -> &'static str {
        let mut watchdog = Watchdog::from_environment();
        loop {
            let signal = self.runtime.block_on(async {
                tokio::select! {
                    () = due(watchdog.as_ref()) => WATCHDOG,
                    _ = self.term.recv() => "SIGTERM",
                    _ = self.int.recv() => SIGINT,
                    _ = self.hup.recv() => "SIGHUP",
                    _ = self.usr1.recv() => "SIGUSR1",
                    _ = self.usr2.recv() => "SIGUSR2",
                }
            });
            match signal {
                WATCHDOG => {
                    let health = server.health();
                    if let Some(watchdog) = &mut watchdog {
                        watchdog.report(notifier, health.reason().is_none(), health.rounds());
                    }
                }
                "SIGHUP" => reload(server, notifier),
                "SIGUSR1" | "SIGUSR2" => log_state(server, signal),
                signal => return signal,
            }
        }
    }
}

/// Waits until the service manager's watchdog is due, if there is one.
async fn due(watchdog: Option<&Watchdog>) {
    match watchdog {
        Some(watchdog) => watchdog.wait().await,
        None => std::future::pending().await,
    }
}

/// Reloads on a thread of its own: a hanging file system must not delay a stop.
fn reload(server: &Server, notifier: &Arc<Notifier>) {
    notifier.reloading();
    let reloader = Arc::clone(server.reloader());
    let reported = Arc::clone(notifier);
    let reload = move || {
        // A failure is in the log.
        if let Ok(reloaded) = reloader.reload() {
            let changed = reloaded.changed.len();
            let checked = reloaded.checked.join(", ");
            tracing::info!(signal = "SIGHUP", changed, checked, "reloaded");
        }
        reported.ready();
    };
    let thread = std::thread::Builder::new().name("kvtier-reload".into());
    if let Err(error) = thread.spawn(reload) {
        tracing::error!(%error, "reload failed: no thread for it");
        notifier.ready();
    }
}

fn log_state(server: &Server, signal: &str) {
    let readings = server.engine().admin().readings();
    tracing::info!(
        signal,
        unhealthy = server.health().reason(),
        objects = readings.objects,
        used_bytes = readings.used_bytes,
        capacity_bytes = readings.capacity_bytes,
        leased_objects = readings.leased_objects,
        sessions = readings.sessions,
        workers = readings.instances,
        "state"
    );
}
