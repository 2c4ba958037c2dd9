//! The side of the new server.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvtier_config::{L1Origin, ServerConfig};
use kvtier_engine::{EngineHandOver, IndexSender, Opened, STOP_POLL_INTERVAL, check_stop};
use kvtier_error::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::SOCKET;
use super::wire::{
    Accepted, FORMAT, Hello, Kind, Link, State, receive, receive_descriptors, receive_index,
    receive_json, send, send_json,
};
use crate::front::FrontHandOver;

/// How long the old server may take until it is asked for its state: another new one may have asked before.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(120);

/// How long the indexes of the tiers may take to arrive: more than the old server gives itself.
const INDEX_TIMEOUT: Duration = Duration::from_secs(70);

/// How long the old server may take until its state is here: more than it gives itself.
const STATE_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a refusal may take to be sent.
const REFUSAL_TIMEOUT: Duration = Duration::from_millis(100);

/// What the running server hands over, while it still may go on.
pub struct Taken {
    stream: UnixStream,
    /// Whether this server is to stop.
    stop: Arc<AtomicBool>,
    /// Its process.
    pub process: u32,
    /// Its release.
    pub release: String,
    /// Clients wait from then on.
    pub since: Instant,
    /// The lock of the state directory.
    pub lock: Option<OwnedFd>,
    /// The request socket.
    pub socket: Option<OwnedFd>,
    /// Whether the path of that is the server's to remove.
    pub owns_path: bool,
    /// Listening sockets of HTTP, and of metrics if there is a port for them.
    pub http: Vec<TcpListener>,
    /// The connections.
    pub front: FrontHandOver,
    /// The engine.
    pub engine: EngineHandOver,
    /// What is open in this process; `None` once it is taken.
    pub opened: Option<Opened>,
}

/// Asks the running server of the instance for everything, with at most this many connections; `None` if none runs. A default of
/// L1's size is that server's then.
///
/// # Errors
/// Why it hands nothing over, or `stop` was set. It goes on, unless it has ended.
pub fn ask(
    config: &mut ServerConfig,
    connections: u64,
    stop: &Arc<AtomicBool>,
) -> Result<Option<Taken>> {
    let base = config.state.base.as_ref();
    let base = base.map_err(|reason| {
        Error::refused(format!(
            "--take-over takes a state directory, where servers meet: {reason}"
        ))
    })?;
    let Some(stream) = kvtier_state::connect(base, &config.state.instance, SOCKET)? else {
        return Ok(None);
    };
    let taken = receive_all(config, stream, connections, stop);
    taken.map(Some).map_err(|error| match error.kind() {
        ErrorKind::Io => error
            .context("--take-over: nothing was taken over")
            .hint("if it was stopped, or another server took over meanwhile, start again"),
        _ => error.context("--take-over: the running server goes on"),
    })
}

fn receive_all(
    config: &mut ServerConfig,
    stream: UnixStream,
    connections: u64,
    stop: &Arc<AtomicBool>,
) -> Result<Taken> {
    let within = |timeout| Link {
        stream: &stream,
        until: Some(Instant::now() + timeout),
    };
    let hello = Hello {
        formats: vec![FORMAT],
        process: std::process::id(),
        release: env!("CARGO_PKG_VERSION").to_owned(),
        flags: config.lasting_values(),
        connections,
    };
    // The other one goes on at once, and its log has the reason.
    let refuse = |error: &Error| refuse(&stream, error);
    let link = within(ACCEPT_TIMEOUT);
    send_json(&link, Kind::Hello, &hello)?;
    wait(&link, stop).inspect_err(refuse)?;
    let accepted: Accepted = receive_json(&link, Kind::Accepted)?;
    if config.l1_origin != L1Origin::Given {
        config.l1_bytes = accepted.l1_bytes;
    }
    // While clients are served: what is slow or unavailable delays only this.
    let opened = Opened::beside(config, stop).inspect_err(refuse)?;
    let link = within(STATE_TIMEOUT);
    send(&link, Kind::Opened, &[])?;
    let taken = wait(&link, stop).and_then(|()| receive_state(config, &link));
    let (state, bytes, mut descriptors) = taken.inspect_err(refuse)?;
    let paused = Duration::from_micros(state.paused_micros);
    let now = Instant::now();
    let since = now.checked_sub(paused).unwrap_or(now);
    let mut take = |count| descriptors.drain(..count).collect::<Vec<_>>();
    let (lock, socket) = (take(1).pop(), take(1).pop());
    let http = take(state.http_sockets).into_iter().map(Into::into);
    let sockets = take(state.front.count());
    Ok(Taken {
        process: state.process,
        release: state.release,
        since,
        lock,
        socket,
        owns_path: state.owns_path,
        http: http.collect(),
        front: FrontHandOver {
            state: state.front,
            sockets,
            bytes,
        },
        engine: EngineHandOver {
            state: state.engine,
            descriptors,
        },
        opened: Some(opened),
        stop: Arc::clone(stop),
        stream,
    })
}

/// Waits until the other server has sent something or has ended, or the time is over, as the next call then says.
///
/// # Errors
/// This server is to stop.
fn wait(link: &Link<'_>, stop: &AtomicBool) -> Result<()> {
    let interval = Timespec {
        tv_sec: 0,
        tv_nsec: STOP_POLL_INTERVAL.subsec_nanos().into(),
    };
    loop {
        check_stop(stop)?;
        let mut polled = [PollFd::new(link.stream, PollFlags::IN)];
        match poll(&mut polled, Some(&interval)) {
            Ok(0) if link.until.is_none_or(|until| Instant::now() < until) => {}
            Err(Errno::INTR) => {}
            Ok(_) | Err(_) => return Ok(()),
        }
    }
}

fn receive_state(config: &ServerConfig, link: &Link<'_>) -> Result<(State, Vec<u8>, Vec<OwnedFd>)> {
    let state: State = receive_json(link, Kind::State)?;
    if state.format != FORMAT {
        return Err(Error::refused(format!(
            "its state has format {}; this server reads {FORMAT}",
            state.format
        )));
    }
    let bytes = receive(link, Kind::Bytes, state.bytes)?;
    let bytes = bytes.filter(|bytes| bytes.len() as u64 == state.bytes);
    let bytes = bytes.ok_or_else(|| Error::refused("bytes of connections are missing"))?;
    let descriptors = receive_descriptors(link, state.descriptors())?;
    let listeners = 1 + usize::from(config.prometheus_port.is_some());
    if state.http_sockets != listeners {
        return Err(Error::refused(format!(
            "it has {} sockets for HTTP; this server needs {listeners}",
            state.http_sockets
        )));
    }
    Ok((state, bytes, descriptors))
}

fn refuse(stream: &UnixStream, error: &Error) {
    let link = Link {
        stream,
        until: Some(Instant::now() + REFUSAL_TIMEOUT),
    };
    // It may have ended, or refused by itself.
    let _ = send(&link, Kind::Refused, error.to_string().as_bytes());
}

impl Taken {
    /// Leaves everything to the old server, which goes on.
    pub fn refuse(stream: &UnixStream, error: &Error) {
        refuse(stream, error);
    }

    /// The way to the old server, apart from what it has handed over.
    ///
    /// # Errors
    /// The system's, out of descriptors.
    pub fn stream(&self) -> Result<UnixStream> {
        let stream = self.stream.try_clone();
        stream.map_err(|error| Error::io("its socket", error))
    }

    /// Takes everything: the old server has released it, or has ended before it could go on.
    ///
    /// # Errors
    /// The old server goes on, or has ended before it could read this; or this one is to stop, from here on as any other.
    pub fn commit(&self) -> Result<()> {
        check_stop(&self.stop)?;
        // No limit of time: it answers or ends, and until then the outcome is unknown.
        let link = Link {
            stream: &self.stream,
            until: None,
        };
        let sent = send(&link, Kind::Commit, &[]);
        // The reason, if it has refused.
        let done = receive(&link, Kind::Done, 0)?;
        // What was not sent it can have refused: it may go on, or have gone on until its end.
        sent?;
        if done.is_none() {
            tracing::warn!("the server before has ended without an answer (--take-over)");
        }
        Ok(())
    }
}

/// Receives the indexes of the tiers, behind the end of the hand-over, for tiers that are in use already.
pub struct IndexReader {
    begin: mpsc::Sender<Vec<IndexSender>>,
}

impl IndexReader {
    /// Starts the thread, which does nothing yet: the system may have none later.
    ///
    /// # Errors
    /// The system's.
    pub fn start(stream: UnixStream) -> Result<Self> {
        let (begin, begun) = mpsc::channel::<Vec<IndexSender>>();
        let read = move || {
            let Ok(tiers) = begun.recv() else {
                return;
            };
            let link = Link {
                stream: &stream,
                until: Some(Instant::now() + INDEX_TIMEOUT),
            };
            let received = tiers.into_iter().try_for_each(|tier| {
                // One that stops waits no longer.
                let _ = tier.send(receive_index(&link)?);
                Ok::<_, Error>(())
            });
            if let Err(error) = received {
                tracing::warn!(%error, "the indexes of tiers did not arrive");
            }
        };
        let thread = std::thread::Builder::new().name("kvtier-indexes".into());
        let started = thread.spawn(read);
        started.map_err(|error| Error::io("no thread", error))?;
        Ok(Self { begin })
    }

    /// Reads those of these tiers, meanwhile.
    pub fn read(self, tiers: Vec<IndexSender>) {
        // The thread has not ended before.
        let _ = self.begin.send(tiers);
    }
}
