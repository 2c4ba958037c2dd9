//! The command of a tier that kvtier starts: started again when it ends, ended with kvtier, its output in the log.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, child_subreaper, kill_process_group, waitpgid};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, Command};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::link::stopped;
use super::message::line;
use super::options::ProcessOptions;

/// Variable with the path of the socket.
const SOCKET_VARIABLE: &str = "KVTIER_SOCKET";

/// Time in which calls wait for a command that was started.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between SIGTERM and SIGKILL.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause before the first start after an end, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Time after which a command that ends is started again as if for the first time.
const STEADY_TIME: Duration = Duration::from_secs(60);

/// Longest line of its output that is logged, in bytes, and lines per [`LOG_INTERVAL`].
const MAX_LINE: usize = 1000;
const MAX_LINES: u32 = 50;
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Pause between two attempts to reap orphans.
const REAP_INTERVAL: Duration = Duration::from_millis(200);

/// Time for the last output after the end of the command.
const LAST_OUTPUT_TIMEOUT: Duration = Duration::from_secs(1);

/// A command that is kept running.
#[derive(Default)]
pub(super) struct Supervisor {
    /// Since when it has been starting.
    starting: watch::Sender<Option<Instant>>,
    restart: Notify,
    restarts: AtomicU64,
}

/// Process group of a command. All of it is killed when this is dropped.
struct Group(Option<Pid>);

impl Group {
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.0 {
            // There may be no process in it any more.
            let _ = kill_process_group(group, signal);
        }
    }
}

/// Whether orphans become children of this process, which then has to reap them: as process 1 of a container.
fn adopts_orphans() -> bool {
    std::process::id() == 1 || child_subreaper().is_ok_and(|reaper| reaper.is_some())
}

/// Reaps the orphans of a group until no child of this process is left in it. Returns the status of the group's command if that
/// was reaped with them.
async fn reap(group: Option<Pid>) -> Option<ExitStatus> {
    let group = group?;
    loop {
        match waitpgid(group, WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == group => {
                return Some(ExitStatus::from_raw(status.as_raw()));
            }
            Ok(Some(_)) => {}
            Ok(None) => sleep(REAP_INTERVAL).await,
            Err(_) => return None,
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

impl Supervisor {
    /// Whether the command was started a moment ago and has not answered yet.
    pub(super) fn is_starting(&self) -> bool {
        let starting = *self.starting.borrow();
        starting.is_some_and(|since| since.elapsed() < START_TIMEOUT)
    }

    /// Notes that the command has answered.
    pub(super) fn has_started(&self) {
        self.starting.send_replace(None);
    }

    /// Ends it and starts it again.
    pub(super) fn restart(&self) {
        self.restart.notify_one();
    }

    /// How often it was started again.
    pub(super) fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    /// Keeps it running until `stop`.
    pub(super) async fn run(&self, options: &Arc<ProcessOptions>, mut stop: watch::Receiver<bool>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let started = Instant::now();
            self.starting.send_replace(Some(started));
            // A wish to end the one before.
            let _ = timeout(Duration::ZERO, self.restart.notified()).await;
            match start(options) {
                Err(error) => {
                    let command = options.command.first();
                    tracing::warn!(tier = &*options.tier, ?command, %error, "a tier's command could not be started");
                }
                Ok((child, group)) => {
                    if self.watch(options, child, group, &mut stop).await {
                        return;
                    }
                }
            }
            self.starting.send_replace(None);
            if started.elapsed() > STEADY_TIME {
                pause = FIRST_PAUSE;
            }
            tokio::select! {
                () = sleep(pause) => {}
                () = stopped(&mut stop) => return,
            }
            pause = (pause * 2).min(MAX_PAUSE);
            self.restarts.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Logs the output of a command until its end. Returns whether it was stopped.
    async fn watch(
        &self,
        options: &Arc<ProcessOptions>,
        mut child: Child,
        group: Group,
        stop: &mut watch::Receiver<bool>,
    ) -> bool {
        let tier = &options.tier;
        // A wait would close it, and its end is the sign that kvtier has ended.
        let input = child.stdin.take();
        let mut logs = JoinSet::new();
        if let Some(output) = child.stdout.take() {
            logs.spawn(log(Arc::clone(options), output));
        }
        if let Some(output) = child.stderr.take() {
            logs.spawn(log(Arc::clone(options), output));
        }
        let orphans = group.0.filter(|_| adopts_orphans());
        let ended = async {
            tokio::select! {
                status = child.wait() => status,
                Some(status) = reap(orphans) => Ok(status),
            }
        };
        let is_stopped = tokio::select! {
            status = ended => {
                let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
                tracing::warn!(tier = &**tier, status, "a tier's command has ended; it is started again");
                false
            }
            () = self.restart.notified() => {
                tracing::warn!(tier = &**tier, "a tier's command does not answer; it is ended and started again");
                terminate(tier, &mut child, &group).await;
                false
            }
            () = stopped(stop) => {
                terminate(tier, &mut child, &group).await;
                true
            }
        };
        // What it has started itself ends with it, also if it crashed.
        drop((group, input));
        tokio::spawn(reap(orphans));
        let last = async { while logs.join_next().await.is_some() {} };
        let _ = timeout(LAST_OUTPUT_TIMEOUT, last).await;
        is_stopped
    }
}

fn start(options: &ProcessOptions) -> std::io::Result<(Child, Group)> {
    let (program, arguments) = match options.command.split_first() {
        Some((program, arguments)) => (program.as_str(), arguments),
        None => ("", [].as_slice()),
    };
    let child = Command::new(program)
        .args(arguments)
        .env(SOCKET_VARIABLE, &options.socket_path)
        // Ends when kvtier does, however that ends.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()?;
    let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    Ok((child, Group(group)))
}

/// Asks a command to end, then makes it.
async fn terminate(tier: &str, child: &mut Child, group: &Group) {
    group.signal(Signal::TERM);
    if timeout(STOP_TIMEOUT, child.wait()).await.is_err() {
        tracing::warn!(
            tier,
            "a tier's command did not end within {STOP_TIMEOUT:?}; killed it"
        );
        group.signal(Signal::KILL);
        let _ = child.wait().await;
    }
}

/// Returns a line of output as it is logged.
pub(super) fn shown(options: &ProcessOptions, output: &[u8]) -> String {
    let whole = String::from_utf8_lossy(output);
    let shown = options.secrets.hide(&line(whole.trim_end(), MAX_LINE));
    kvtier_l2::redact::text(&shown)
}

/// Logs lines, at most [`MAX_LINES`] per interval.
async fn log(options: Arc<ProcessOptions>, mut output: impl AsyncRead + Unpin) {
    let mut buffer = vec![0; 4096];
    let mut text = Vec::new();
    let (mut window, mut lines, mut suppressed_lines) = (Instant::now(), 0, 0_u64);
    let mut write = |text: &mut Vec<u8>| {
        let shown = shown(&options, text);
        text.clear();
        if shown.is_empty() {
            return;
        }
        if window.elapsed() > LOG_INTERVAL {
            (window, lines) = (Instant::now(), 0);
        }
        if lines == MAX_LINES {
            suppressed_lines += 1;
            return;
        }
        lines += 1;
        tracing::info!(
            tier = &*options.tier,
            line = shown,
            suppressed_lines,
            "output of a tier's command"
        );
        suppressed_lines = 0;
    };
    loop {
        let read = match output.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(read) => read,
        };
        for &byte in buffer.get(..read).unwrap_or_default() {
            if byte == b'\n' {
                write(&mut text);
            } else if text.len() < MAX_LINE {
                text.push(byte);
            }
        }
    }
    write(&mut text);
}
