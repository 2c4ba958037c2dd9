//! The side of the old server: a thread that waits for the next one.
//!
//! The mutex of [`Rounds`] guards the turn of the housekeeping, held for a round and for a hand-over; the locks of what is handed
//! over are acquired inside. `asking` guards the connection to a server that asks to take over; no other lock is acquired inside.

use std::net::TcpListener;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvtier_engine::{Engine, EngineHandOver, PausedTiers};
use kvtier_error::{Error, ErrorKind, Result};
use kvtier_http::{Changes, Health, PausedChanges};
use kvtier_sync::RateLimited;
use kvtier_sync::{Mutex, MutexGuard};
use rustix::net::{Shutdown, shutdown};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::wire::{
    Accepted, FORMAT, Hello, Kind, Link, State, receive, receive_json, send, send_descriptors,
    send_index, send_json,
};
use super::{SOCKET, millis};
use crate::descriptors::Descriptors;
use crate::front::{FrontHandOver, Paused, RequestSocket};
use crate::reload::Reloader;

/// How long what is in flight may take to end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// How long changes over HTTP may take to end.
const CHANGES_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a whole hand-over may take until the commit: clients wait no longer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long the new server may take to open its tiers and GPUs, while clients are served.
const OPEN_TIMEOUT: Duration = Duration::from_secs(90);

/// How long what runs in the tiers may take to end, while clients are served.
const PAUSE_TIERS_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a refusal may take to be sent, while clients wait.
const REFUSAL_TIMEOUT: Duration = Duration::from_millis(100);

/// How long the indexes of the tiers may take to be sent, while the other server serves.
const INDEX_TIMEOUT: Duration = Duration::from_secs(60);

/// How long other servers that ask may keep this one from its end, once it has handed over.
const LATE_TIMEOUT: Duration = Duration::from_secs(1);

/// Descriptors of a hand-over besides the connections': listening sockets, locks, and requests over HTTP meanwhile.
const SPARE_DESCRIPTORS: u64 = 32;

/// How long no server is accepted after the system could not accept one.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

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
    shared: Arc<Shared>,
    over: watch::Receiver<bool>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread and those that stop it have in common. The mutex guards the connection to a server that asks.
#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    is_stopping: AtomicBool,
    asking: Mutex<Option<UnixStream>>,
}

impl Shared {
    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Lets a hand-over begin its next step.
    ///
    /// # Errors
    /// This server stops.
    fn check_step(&self) -> Result<()> {
        match self.is_stopping() {
            false => Ok(()),
            true => Err(unavailable("the running server stops")),
        }
    }
}

impl Giver {
    /// Opens the socket on which other servers ask; they wait there until [`start`](Self::start). `None` without a state directory.
    ///
    /// # Errors
    /// The system's.
    pub fn listen(engine: &Engine) -> Result<Option<UnixListener>> {
        engine.listen(SOCKET)
    }

    /// Starts to answer; `None`, with a line in the log, where no server can take over.
    pub fn start(listener: Result<Option<UnixListener>>, parts: GivingParts) -> Option<Self> {
        let started = listener.and_then(|listener| Self::try_start(listener, parts));
        match started {
            Ok(giver) => giver,
            Err(error) => {
                tracing::warn!(%error, "no other server can take over from this one (--take-over)");
                None
            }
        }
    }

    fn try_start(listener: Option<UnixListener>, parts: GivingParts) -> Result<Option<Self>> {
        let Some(listener) = listener else {
            return Ok(None);
        };
        let listener = Arc::new(listener);
        let shared = Arc::<Shared>::default();
        let (sender, over) = watch::channel(false);
        let (accepted, state) = (Arc::clone(&listener), Arc::clone(&shared));
        let wait = move || {
            while !state.is_stopping() {
                // Fails once the socket is shut down.
                let asked = accepted.accept().and_then(|(stream, _)| {
                    *state.asking.lock() = Some(stream.try_clone()?);
                    Ok(stream)
                });
                match asked {
                    // After the connection is known to those that stop this.
                    Ok(_) if state.is_stopping() => return,
                    Ok(stream) => {
                        if let Some(successor) = give(&parts, &state, &stream) {
                            state.is_over.store(true, Ordering::Release);
                            // Meanwhile the process ends.
                            let _ = sender.send(true);
                            refuse_late(&accepted, successor);
                            return;
                        }
                    }
                    Err(_) if state.is_stopping() => return,
                    Err(error) => {
                        static LOG_LIMIT: RateLimited = RateLimited::new(Duration::from_secs(60));
                        if let Some(suppressed_lines) = LOG_LIMIT.permit(Instant::now()) {
                            tracing::warn!(%error, suppressed_lines, "a server that takes over could not connect; waiting on");
                        }
                        std::thread::park_timeout(ACCEPT_PAUSE);
                    }
                }
                *state.asking.lock() = None;
            }
        };
        let thread = std::thread::Builder::new().name("kvtier-take-over".into());
        let thread = thread.spawn(wait);
        Ok(Some(Self {
            listener,
            shared,
            over,
            thread: Some(thread.map_err(|error| Error::io("no thread", error))?),
        }))
    }

    /// Whether another server has everything.
    pub fn is_over(&self) -> bool {
        self.shared.is_over.load(Ordering::Acquire)
    }

    /// Becomes true when another server has everything.
    pub fn over(&self) -> watch::Receiver<bool> {
        self.over.clone()
    }

    /// Waits no longer. A hand-over that has not been committed is refused when its current step has ended; one that has been ends
    /// first.
    pub fn stop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::Release);
        let _ = shutdown(&*self.listener, Shutdown::Both);
        if let Some(stream) = &*self.shared.asking.lock() {
            // What has arrived is read all the same, a commit among it.
            let _ = shutdown(stream, Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
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

/// Serves a server that asks; returns its process if it has everything now.
fn give(parts: &GivingParts, shared: &Shared, stream: &UnixStream) -> Option<u32> {
    let started = Instant::now();
    match try_give(parts, shared, stream) {
        Ok((process, pause)) => {
            tracing::info!(
                process,
                milliseconds = millis(pause),
                "handed over to another server; this process ends"
            );
            Some(process)
        }
        Err(error) => {
            tracing::warn!(%error, milliseconds = millis(started.elapsed()), "nothing was handed over; serving on");
            None
        }
    }
}

/// Refuses the servers that have asked while another one took over.
fn refuse_late(listener: &UnixListener, successor: u32) {
    let until = Instant::now() + LATE_TIMEOUT;
    let reason = format!("process {successor} has just taken over; start again to ask that one");
    // Without it the first wait would last for ever.
    if listener.set_nonblocking(true).is_err() {
        return;
    }
    while let Ok((stream, _)) = listener.accept()
        && Instant::now() < until
    {
        let link = Link {
            stream: &stream,
            until: Some(until),
        };
        // Else it might see the connection end while it asks.
        let _ = receive_json::<Hello>(&link, Kind::Hello);
        refuse(&stream, &unavailable(&reason));
    }
}

/// Hands over; returns the process that has everything, and how long clients have waited so far.
///
/// # Errors
/// Nothing was handed over, and the other server cannot commit any more.
fn try_give(parts: &GivingParts, shared: &Shared, stream: &UnixStream) -> Result<(u32, Duration)> {
    let link = |timeout| Link {
        stream,
        until: Some(Instant::now() + timeout),
    };
    let refuse = |error: &Error| refuse(stream, error);
    let process = greet(parts, &link(OPEN_TIMEOUT)).inspect_err(refuse)?;
    let until = Instant::now() + PAUSE_TIERS_TIMEOUT;
    let tiers = parts.engine.pause_tiers(until).inspect_err(refuse)?;
    let link = &link(TIMEOUT);
    let mut paused = pause(parts, shared, link, tiers).inspect_err(refuse)?;
    // Once the state may be there, a panic must not let this server go on: the other one may have committed.
    let _aborting = AbortOnPanic;
    let front = std::mem::take(&mut paused.front.front);
    let sent = send_all(parts, link, front, paused.since);
    // It may have refused meanwhile, and ended.
    let sent = sent.map_err(|error| match receive(link, Kind::Commit, 0) {
        Err(refusal) if refusal.kind() == ErrorKind::Invalid => refusal,
        _ => error,
    });
    // While paused.
    let committed = sent.and_then(|()| receive_commit(link));
    committed.inspect_err(refuse)?;
    let PausedParts {
        reloads,
        round,
        changes,
        tiers,
        front,
        since,
    } = paused;
    front.hand_over();
    parts.engine.release();
    changes.end();
    // For the rest of this process.
    std::mem::forget((reloads, round, tiers));
    let link = Link {
        stream: link.stream,
        until: Some(Instant::now() + TIMEOUT),
    };
    let done = send(&link, Kind::Done, &[]);
    let pause = since.elapsed();
    match done {
        Ok(()) => send_indexes(&parts.engine, stream),
        Err(error) => {
            tracing::warn!(%error, "done was not sent; the other server has everything, and waits for the locks");
        }
    }
    Ok((process, pause))
}

/// Sends the indexes of the tiers to a server that serves already.
fn send_indexes(engine: &Engine, stream: &UnixStream) {
    let link = Link {
        stream,
        until: Some(Instant::now() + INDEX_TIMEOUT),
    };
    let sent = engine
        .tier_indexes()
        .try_for_each(|index| send_index(&link, &index));
    if let Err(error) = sent {
        tracing::warn!(%error, "the indexes of tiers were not sent; the other server reads its tiers");
    }
}

fn unavailable(what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, what)
}

/// The point of no return: receives the commit, or lets the other server send none any more.
///
/// # Errors
/// It cannot commit.
fn receive_commit(link: &Link<'_>) -> Result<()> {
    let received = receive(link, Kind::Commit, 0);
    if let Ok(Some(_)) = received {
        return Ok(());
    }
    // The system lets the other one send nothing from here on. What it has sent before counts, whatever the time.
    let _ = shutdown(link.stream, Shutdown::Read);
    let unlimited = Link {
        stream: link.stream,
        until: None,
    };
    match receive(&unlimited, Kind::Commit, 0) {
        Ok(Some(_)) => Ok(()),
        Ok(None) | Err(_) => Err(match received {
            Err(error) => error,
            Ok(_) => unavailable("the other server has ended, or this one stops"),
        }),
    }
}

/// Lets the other server commit no more, and sends it the reason.
fn refuse(stream: &UnixStream, error: &Error) {
    let _ = shutdown(stream, Shutdown::Read);
    let link = Link {
        stream,
        until: Some(Instant::now() + REFUSAL_TIMEOUT),
    };
    // It may have ended, or not read: it cannot commit in any case.
    let _ = send(&link, Kind::Refused, error.to_string().as_bytes());
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

/// The paused parts of the server; a drop resumes them.
struct PausedParts<'a> {
    reloads: MutexGuard<'a, ()>,
    round: MutexGuard<'a, ()>,
    changes: PausedChanges,
    tiers: Option<PausedTiers>,
    front: Paused,
    /// Clients wait from then on.
    since: Instant,
}

/// Receives what the other server is, checks it, and waits until it has opened what takes long; returns its process.
fn greet(parts: &GivingParts, link: &Link<'_>) -> Result<u32> {
    let hello: Hello = receive_json(link, Kind::Hello)?;
    tracing::info!(
        process = hello.process,
        release = hello.release,
        "another server asks to take over"
    );
    check(parts, &hello)?;
    let l1_bytes = parts.engine.config().l1_bytes;
    send_json(link, Kind::Accepted, &Accepted { l1_bytes })?;
    let opened = receive(link, Kind::Opened, 0)?;
    opened.ok_or_else(|| unavailable("the other server has ended, or this one stops"))?;
    Ok(hello.process)
}

fn pause<'a>(
    parts: &'a GivingParts,
    shared: &Shared,
    link: &Link<'_>,
    tiers: Option<PausedTiers>,
) -> Result<PausedParts<'a>> {
    shared.check_step()?;
    let reloads = parts.reloader.pause();
    let reloads = reloads.ok_or_else(|| unavailable("the configuration is being reloaded"))?;
    let round = parts.rounds.begin();
    // A worker whose process has just ended could not be taken over.
    parts.engine.housekeep();
    let changes = parts.changes.pause(&parts.runtime, CHANGES_TIMEOUT);
    let changes = changes.ok_or_else(|| unavailable("a change over HTTP is in flight"))?;
    shared.check_step()?;
    let since = Instant::now();
    let drained = since + DRAIN_TIMEOUT;
    let until = link.until.map_or(drained, |until| until.min(drained));
    let front = (parts.pause)(until)?;
    shared.check_step()?;
    parts.engine.drain_tiers(until)?;
    check_health(parts)?;
    Ok(PausedParts {
        front,
        tiers,
        since,
        reloads,
        round,
        changes,
    })
}

/// Checks what can be checked while requests are served.
fn check(parts: &GivingParts, hello: &Hello) -> Result<()> {
    if !hello.formats.contains(&FORMAT) {
        return Err(Error::refused(format!(
            "its release {} reads the state in formats {:?}; this one writes {FORMAT}",
            hello.release, hello.formats
        )));
    }
    let own = parts.engine.config().lasting_values();
    let differences = own.differences(&hello.flags);
    if !differences.is_empty() {
        return Err(Error::refused(differences.join("; ")));
    }
    // Each connection is here twice until it is handed over.
    let connections = parts.engine.metrics().request_connections.get();
    let connections = u64::try_from(connections).unwrap_or_default();
    if connections > hello.connections {
        return Err(unavailable(&format!(
            "{connections} clients are connected; the other server can have {} (ulimit -n)",
            hello.connections
        )));
    }
    Descriptors::check_free(connections + SPARE_DESCRIPTORS)
        .map_err(|error| error.context("the running server"))?;
    check_health(parts)?;
    parts.engine.check_hand_over()
}

/// Checks that nothing has failed: what a panic has left half changed is not for another process. Asked again in the pause, since clients
/// are served until then.
fn check_health(parts: &GivingParts) -> Result<()> {
    let engine = &parts.engine;
    let lost = || engine.lost_memory().then(|| "L1 lost pages".to_owned());
    let broken = || engine.broken_gpu().map(|error| format!("GPU ({error})"));
    match parts.health.reason().or_else(lost).or_else(broken) {
        None => Ok(()),
        Some(reason) => Err(unavailable(&format!(
            "the running server is unhealthy, and has to be restarted: {reason}"
        ))),
    }
}

fn send_all(
    parts: &GivingParts,
    link: &Link<'_>,
    front: FrontHandOver,
    since: Instant,
) -> Result<()> {
    let FrontHandOver {
        state: front,
        sockets,
        bytes,
    } = front;
    let lock = parts.engine.state_lock()?;
    let EngineHandOver {
        state: engine,
        descriptors,
    } = parts.engine.hand_over()?;
    let state = State {
        format: FORMAT,
        process: std::process::id(),
        release: env!("CARGO_PKG_VERSION").to_owned(),
        owns_path: parts.socket.owns_path(),
        bytes: bytes.len() as u64,
        paused_micros: u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX),
        http_sockets: parts.http.len(),
        front,
        engine,
    };
    let listening = [lock.as_fd(), parts.socket.as_fd()].into_iter();
    let listening = listening.chain(parts.http.iter().map(|it| it.as_fd()));
    let all = listening.chain(sockets.iter().chain(&descriptors).map(|it| it.as_fd()));
    let all: Vec<BorrowedFd<'_>> = all.collect();
    send_json(link, Kind::State, &state)?;
    send(link, Kind::Bytes, &bytes)?;
    send_descriptors(link, &all)
}
