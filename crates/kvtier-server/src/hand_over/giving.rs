//! The side of the old server: a thread that waits for the next one.

use std::net::TcpListener;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvtier_engine::Engine;
use kvtier_error::{Error, ErrorKind, Result};
use kvtier_http::{Changes, Health, PausedChanges};
use kvtier_sync::{Mutex, MutexGuard};
use rustix::net::{Shutdown, shutdown};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::SOCKET;
use super::wire::{
    FORMAT, Hello, Kind, State, receive, receive_json, send, send_descriptors, send_json,
};
use crate::front::{HandedFront, Paused, RequestSocket};
use crate::reload::Reloader;

/// How long what is in flight may take to end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// How long changes over HTTP may take to end.
const CHANGES_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the new server may take for each of its steps.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a refusal may take to be sent, while clients wait.
const REFUSAL_TIMEOUT: Duration = Duration::from_millis(100);

/// Rounds of the housekeeping: the lock is held for each, and for a hand-over.
pub struct Rounds(Mutex<()>);

impl Rounds {
    /// Of one server.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(())))
    }

    /// Begins a round, or keeps others from beginning.
    pub fn begin(&self) -> MutexGuard<'_, ()> {
        self.0.lock()
    }
}

/// What is paused and handed over.
pub struct GivingParts {
    pub engine: Arc<Engine>,
    pub health: Arc<Health>,
    pub reloader: Arc<Reloader>,
    pub rounds: Arc<Rounds>,
    pub changes: Changes,
    pub runtime: Handle,
    pub socket: Arc<RequestSocket>,
    /// Listening sockets of HTTP.
    pub http: Vec<TcpListener>,
    /// Pauses the front end.
    pub pause: Box<dyn Fn(Instant) -> Result<Paused> + Send>,
}

/// Waits for a server that takes over.
pub struct Giver {
    listener: Arc<UnixListener>,
    is_over: Arc<AtomicBool>,
    over: watch::Receiver<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Giver {
    /// Starts to wait; `None`, with a line in the log, where no server can take over.
    pub fn start(parts: GivingParts) -> Option<Self> {
        let started = Self::try_start(parts);
        match started {
            Ok(giver) => giver,
            Err(error) => {
                tracing::warn!(%error, "no other server can take over from this one (--take-over)");
                None
            }
        }
    }

    fn try_start(parts: GivingParts) -> Result<Option<Self>> {
        let Some(listener) = parts.engine.listen(SOCKET)? else {
            return Ok(None);
        };
        let listener = Arc::new(listener);
        let is_over = Arc::<AtomicBool>::default();
        let (sender, over) = watch::channel(false);
        let (accepted, is_set) = (Arc::clone(&listener), Arc::clone(&is_over));
        let wait = move || {
            // Fails once the socket is shut down.
            while let Ok((stream, _)) = accepted.accept() {
                if give(&parts, &stream) {
                    is_set.store(true, Ordering::Release);
                    let _ = sender.send(true);
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("kvtier-take-over".into());
        let thread = thread.spawn(wait);
        Ok(Some(Self {
            listener,
            is_over,
            over,
            thread: Some(thread.map_err(|error| Error::io("no thread", error))?),
        }))
    }

    /// Whether another server has everything.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Becomes true when another server has everything.
    pub fn over(&self) -> watch::Receiver<bool> {
        self.over.clone()
    }

    /// Waits no longer. A hand-over that runs ends first.
    pub fn stop(&mut self) {
        let _ = shutdown(&*self.listener, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A panic of it is printed, and nothing was handed over.
            let _ = thread.join();
        }
    }
}

impl Drop for Giver {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Serves a server that asks; returns whether it has everything now.
fn give(parts: &GivingParts, stream: &UnixStream) -> bool {
    let started = Instant::now();
    match try_give(parts, stream) {
        Ok(process) => {
            tracing::info!(
                process,
                milliseconds = started.elapsed().as_millis() as u64,
                "handed over to another server; this process ends"
            );
            true
        }
        Err(error) => {
            tracing::warn!(%error, milliseconds = started.elapsed().as_millis() as u64, "nothing was handed over; serving on");
            false
        }
    }
}

/// Hands over; returns the process that has everything.
///
/// # Errors
/// Nothing was handed over, and the other server has received the reason.
fn try_give(parts: &GivingParts, stream: &UnixStream) -> Result<u32> {
    let refuse = |error: &Error| refuse(stream, error);
    let process = greet(parts, stream).inspect_err(refuse)?;
    let PausedParts {
        reloads,
        round,
        changes,
        mut front,
    } = pause(parts).inspect_err(refuse)?;
    let sent = send_all(parts, stream, std::mem::take(&mut front.front));
    // It may have refused meanwhile, and ended.
    let sent = sent.map_err(|error| match receive(stream, Kind::Commit, 0) {
        Err(refusal) if refusal.kind() == ErrorKind::Invalid => refusal,
        _ => error,
    });
    // The point of no return: this is read, or a refusal is sent while clients are still paused.
    let committed = sent.and_then(|()| match receive(stream, Kind::Commit, 0)? {
        Some(_) => Ok(()),
        None => Err(unavailable("the other server has ended")),
    });
    committed.inspect_err(refuse)?;
    // This server must not go on beside the other one.
    let _aborting = AbortOnPanic;
    front.hand_over();
    parts.engine.release();
    changes.end();
    // For the rest of this process.
    std::mem::forget((reloads, round));
    if let Err(error) = send(stream, Kind::Done, &[]) {
        tracing::error!(%error, "the other server has ended after it took everything");
    }
    Ok(process)
}

fn unavailable(what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, what)
}

/// Sends the other server the reason why nothing is handed over. It may have ended.
fn refuse(stream: &UnixStream, error: &Error) {
    let _ = stream.set_write_timeout(Some(REFUSAL_TIMEOUT));
    let _ = send(stream, Kind::Refused, error.to_string().as_bytes());
}

/// What is paused. It goes on when this is dropped.
struct PausedParts<'a> {
    reloads: MutexGuard<'a, ()>,
    round: MutexGuard<'a, ()>,
    changes: PausedChanges,
    front: Paused,
}

/// Receives what the other server is, and checks it; returns its process.
fn greet(parts: &GivingParts, stream: &UnixStream) -> Result<u32> {
    let failed = |error| Error::io("the socket", error);
    stream
        .set_read_timeout(Some(STEP_TIMEOUT))
        .map_err(failed)?;
    stream
        .set_write_timeout(Some(STEP_TIMEOUT))
        .map_err(failed)?;
    let hello: Hello = receive_json(stream, Kind::Hello)?;
    tracing::info!(
        process = hello.process,
        release = hello.release,
        "another server asks to take over"
    );
    check(parts, &hello)?;
    Ok(hello.process)
}

fn pause(parts: &GivingParts) -> Result<PausedParts<'_>> {
    let reloads = parts.reloader.pause();
    let reloads = reloads.ok_or_else(|| unavailable("the configuration is being reloaded"))?;
    let round = parts.rounds.begin();
    let changes = parts.changes.pause(&parts.runtime, CHANGES_TIMEOUT);
    let changes = changes.ok_or_else(|| unavailable("a change over HTTP is in flight"))?;
    Ok(PausedParts {
        reloads,
        round,
        changes,
        front: (parts.pause)(Instant::now() + DRAIN_TIMEOUT)?,
    })
}

/// Ends the process at a panic of the thread that has it.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Checks what can be checked while requests are served.
fn check(parts: &GivingParts, hello: &Hello) -> Result<()> {
    if !hello.formats.contains(&FORMAT) {
        return Err(Error::refused(format!(
            "its release {} reads the state in formats {:?}; this one writes {FORMAT}",
            hello.release, hello.formats
        )));
    }
    let config = parts.engine.config();
    for (flag, sum) in config.lasting_flags() {
        if hello.flags.get(&flag) != Some(&sum) {
            let shown = config.shown_flag(&flag).unwrap_or_else(|| "another".into());
            return Err(Error::refused(format!(
                "{flag} is {shown} in the running server, and something else in the other one"
            )));
        }
    }
    // What a panic has left half changed is not for another process.
    let lost = || {
        parts
            .engine
            .lost_memory()
            .then(|| "L1 lost pages".to_owned())
    };
    if let Some(reason) = parts.health.reason().or_else(lost) {
        return Err(unavailable(&format!(
            "the running server is unhealthy, and has to be restarted: {reason}"
        )));
    }
    parts.engine.check_hand_over()
}

fn send_all(parts: &GivingParts, stream: &UnixStream, front: HandedFront) -> Result<()> {
    let HandedFront {
        state: front,
        sockets,
        bytes,
    } = front;
    let lock = parts.engine.state_lock()?;
    let state = State {
        format: FORMAT,
        process: std::process::id(),
        release: env!("CARGO_PKG_VERSION").to_owned(),
        l1_bytes: parts.engine.config().l1_bytes,
        owns_path: parts.socket.owns_path(),
        bytes: bytes.len() as u64,
        http_sockets: parts.http.len(),
        front,
        engine: parts.engine.state()?,
    };
    let listening = [lock.as_fd(), parts.socket.as_fd()].into_iter();
    let listening = listening.chain(parts.http.iter().map(|it| it.as_fd()));
    let all = listening.chain(sockets.iter().map(|it| it.as_fd()));
    let all: Vec<BorrowedFd<'_>> = all.collect();
    send_json(stream, Kind::State, &state)?;
    send(stream, Kind::Bytes, &bytes)?;
    send_descriptors(stream, &all)
}
