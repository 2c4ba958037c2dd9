//! `kvtier bench start`: time from a server's start to its first answer, and its idle memory.

use std::fs::File;
use std::io::{Read, Write as _};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use kvtier_client::{Connection, Options};
use rustix::process::{Pid, Signal, kill_process};

use super::args::StartArgs;
use super::footprint::resident;
use super::record::{Recorder, Row, median};
use super::report::Report;
use crate::cli::address::no_listener;
use crate::cli::stop::stop_flag;

/// Interval between attempts to connect.
const CONNECT_INTERVAL: Duration = Duration::from_millis(1);

/// Time for a server to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Interval between checks that a server which does not answer yet still runs.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Bytes shown of the end of a failed server's stderr.
const TAIL_BYTES: usize = 2048;

/// A child process that is stopped on drop.
struct Server {
    child: Child,
    /// Receives the end of its stderr when that is closed.
    tail: Receiver<Vec<u8>>,
}

impl Server {
    fn start(args: &StartArgs) -> anyhow::Result<Self> {
        let log = match &args.log {
            Some(path) => Some(
                File::options()
                    .create(true)
                    .append(true)
                    .open(path)
                    .with_context(|| format!("opening {}", path.display()))?,
            ),
            None => None,
        };
        let output = match &log {
            Some(log) => Stdio::from(log.try_clone()?),
            None => Stdio::null(),
        };
        let (program, rest) = args
            .command
            .split_first()
            .context("the server's command is missing")?;
        let mut child = Command::new(program)
            .args(rest)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(Stdio::piped())
            // A terminal's Ctrl-C interrupts only this process, which then stops the server in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {program}"))?;
        let (closed, tail) = channel();
        if let Some(stderr) = child.stderr.take() {
            // The receiver may have been dropped.
            std::thread::spawn(move || drop(closed.send(drain(stderr, log))));
        }
        Ok(Self { child, tail })
    }

    /// Stops the server; returns the error with the end of its stderr.
    fn failed(mut self, error: anyhow::Error) -> anyhow::Error {
        if let Err(error) = self.stop() {
            return error;
        }
        let tail = self.tail.recv_timeout(Duration::from_secs(1));
        let tail = String::from_utf8_lossy(&tail.unwrap_or_default()).into_owned();
        match tail.trim() {
            "" => error,
            tail => anyhow::anyhow!("{error:#}; its stderr ends with\n{tail}"),
        }
    }

    /// Sends SIGTERM to the process; kills it after a timeout.
    fn stop(&mut self) -> anyhow::Result<Duration> {
        let start = Instant::now();
        if self.child.try_wait()?.is_some() {
            return Ok(Duration::ZERO);
        }
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM).context("asking the server to end")?;
        }
        while start.elapsed() < STOP_TIMEOUT {
            if self.child.try_wait()?.is_some() {
                return Ok(start.elapsed());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.child.kill()?;
        self.child.wait()?;
        Ok(start.elapsed())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Nothing can be done about a failure.
        let _ = self.stop();
    }
}

/// Copies the output to the log, if there is one; returns its last lines.
fn drain(mut stderr: impl Read, mut log: Option<File>) -> Vec<u8> {
    let mut tail = Vec::new();
    let mut buffer = [0; TAIL_BYTES];
    while let Ok(read @ 1..) = stderr.read(&mut buffer) {
        let bytes = &buffer[..read];
        // A log that cannot be written must not block the server.
        let _ = log.as_mut().map(|log| log.write_all(bytes));
        tail.extend_from_slice(bytes);
        tail.drain(..tail.len().saturating_sub(TAIL_BYTES));
    }
    if tail.len() == TAIL_BYTES
        && let Some(end) = tail.iter().position(|byte| *byte == b'\n')
    {
        tail.drain(..=end);
    }
    tail
}

pub(crate) fn run(args: &StartArgs) -> anyhow::Result<ExitCode> {
    let url = args.url().context("the server's address is missing")?;
    let stop = stop_flag()?;
    let stopped = || stop.load(Ordering::Relaxed);
    let label = args
        .label
        .clone()
        .or_else(|| args.command.first().cloned())
        .unwrap_or_default();
    let mut report = Report::new(label, url, 0, 0);
    let mut starts = Recorder::default();
    let mut ends = Recorder::default();
    let mut memory = Vec::new();
    for _ in 0..args.rounds {
        if stopped() {
            report.abort("interrupted".to_owned());
            break;
        }
        anyhow::ensure!(
            no_listener(url, args.timeout)?.is_some(),
            "something already listens at {url}"
        );
        let begin = Instant::now();
        let mut server = Server::start(args)?;
        report.chunk_tokens = match first_answer(url, args, &mut server, begin, stopped) {
            Ok(tokens) => tokens,
            Err(error) if stopped() => return Err(error),
            Err(error) => return Err(server.failed(error)),
        };
        starts.success(begin.elapsed(), 0);
        std::thread::sleep(args.settle);
        memory.push(resident(server.child.id())?);
        ends.success(server.stop()?, 0);
    }
    let wall = Duration::ZERO;
    report.add(starts.row("start to first answer", wall));
    report.add(ends.row("stop", wall));
    if !memory.is_empty() {
        let mib = |pick: fn(&super::footprint::Resident) -> u64| {
            let values = memory.iter().map(|resident| pick(resident) as f64);
            median(values.collect()).unwrap_or(f64::NAN) / 1_048_576.0
        };
        report.add(
            Row::of_facts("idle memory")
                .fact("private MiB", mib(|m| m.anonymous))
                .fact("shared MiB", mib(|m| m.shared))
                .fact("all MiB", mib(|m| m.all)),
        );
    }
    report.print(args.json.as_deref())?;
    Ok(report.exit_code())
}

/// Waits for the first answered request; returns its answer, tokens per chunk.
fn first_answer(
    url: &str,
    args: &StartArgs,
    server: &mut Server,
    begin: Instant,
    stopped: impl Fn() -> bool,
) -> anyhow::Result<usize> {
    // ZMQ pauses between attempts to connect, which would be measured too, so it connects only when something listens.
    while no_listener(url, args.timeout)?.is_some() {
        if let Some(status) = server.child.try_wait()? {
            anyhow::bail!("the server ended before it listened: {status}");
        }
        anyhow::ensure!(!stopped(), "interrupted");
        anyhow::ensure!(
            begin.elapsed() < args.timeout,
            "the server did not listen at {url} within {:?}",
            args.timeout
        );
        std::thread::sleep(CONNECT_INTERVAL);
    }
    // A request waits for its whole timeout, even if the server has ended, so it runs on another thread.
    let (answered, answer) = channel();
    let (to, options) = (
        url.to_owned(),
        Options {
            timeout: args
                .timeout
                .saturating_sub(begin.elapsed())
                .max(CHECK_INTERVAL),
            reconnect: CONNECT_INTERVAL,
            ..Options::default()
        },
    );
    std::thread::spawn(move || {
        let tokens =
            Connection::connect_with(&to, options).and_then(|mut server| server.get_chunk_size());
        // There is no receiver once the server has ended.
        let _ = answered.send(tokens);
    });
    loop {
        match answer.recv_timeout(CHECK_INTERVAL) {
            Ok(tokens) => return Ok(tokens?),
            Err(RecvTimeoutError::Disconnected) => anyhow::bail!("the request was not made"),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(status) = server.child.try_wait()? {
            anyhow::bail!("the server ended before it answered: {status}");
        }
        anyhow::ensure!(!stopped(), "interrupted");
    }
}
