//! The link to a tier: a task that connects, greets, serves a session until it ends, and connects again.
//!
//! The mutex guards the tasks, until they have ended; no other lock is acquired inside.

use std::hash::{BuildHasher as _, RandomState};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use kvtier_common::sync::Mutex;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::frame::{self, HEADER, Head};
use super::message::{Request, Welcome};
use super::options::ProcessOptions;
use super::segment::Segment;
use super::session::{End, ProcessConnection, Wire};
use super::supervisor::Supervisor;
use kvtier_common::sync::RateLimited;
use kvtier_l2::{
    ErrorKind, L2Error,
    backoff::{FIRST_PAUSE, REFUSED_PAUSE, pause},
};

/// Time for the answer to the hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest answer to the hello.
const MAX_WELCOME: usize = 64 << 10;

/// Name of kvtier in the hello.
const CLIENT: &str = concat!("kvtier/", env!("CARGO_PKG_VERSION"));

#[derive(Clone)]
enum ProcessLinkState {
    /// During the first attempt only, or while a command starts: calls wait for it.
    Connecting,
    Up(Arc<ProcessConnection>),
    Down(L2Error),
}

struct LinkShared {
    options: Arc<ProcessOptions>,
    instance: String,
    state: watch::Sender<ProcessLinkState>,
    /// What the tier said last of itself.
    welcome: watch::Sender<Option<Arc<Welcome>>>,
    supervisor: Option<Supervisor>,
}

/// A connection to a tier, or the attempts to make one.
pub(super) struct Link {
    shared: Arc<LinkShared>,
    stop: watch::Sender<bool>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl Link {
    /// Starts to connect. To be called within a tokio runtime.
    pub(super) fn open(options: &ProcessOptions) -> Self {
        let supervisor = (!options.command.is_empty()).then(Supervisor::default);
        let random = RandomState::new();
        let shared = Arc::new(LinkShared {
            options: Arc::new(options.clone()),
            instance: format!("{:016x}{:016x}", random.hash_one(0), random.hash_one(1)),
            state: watch::Sender::new(ProcessLinkState::Connecting),
            welcome: watch::Sender::new(None),
            supervisor,
        });
        let (stop, stopped) = watch::channel(false);
        let mut tasks = Vec::new();
        if shared.supervisor.is_some() {
            let (shared, stopped) = (Arc::clone(&shared), stopped.clone());
            tasks.push(tokio::spawn(async move {
                if let Some(supervisor) = &shared.supervisor {
                    supervisor.run(&shared.options, stopped).await;
                }
            }));
        }
        tasks.push(tokio::spawn({
            let shared = Arc::clone(&shared);
            async move { shared.run(stopped).await }
        }));
        Self {
            shared,
            stop,
            tasks: Mutex::new(tasks),
        }
    }

    /// Returns the session. Waits for the first attempt to connect, not for another one.
    pub(super) async fn session(&self) -> Result<Arc<ProcessConnection>, L2Error> {
        let mut states = self.shared.state.subscribe();
        let state = states.wait_for(|state| !matches!(state, ProcessLinkState::Connecting));
        match state.await.as_deref() {
            Ok(ProcessLinkState::Up(session)) => Ok(Arc::clone(session)),
            Ok(ProcessLinkState::Down(error)) => Err(error.clone()),
            _ => Err(closed()),
        }
    }

    /// Returns the session, if there is one.
    pub(super) fn current(&self) -> Option<Arc<ProcessConnection>> {
        match &*self.shared.state.borrow() {
            ProcessLinkState::Up(session) => Some(Arc::clone(session)),
            _ => None,
        }
    }

    /// What the tier said last of itself, also of an earlier connection.
    pub(super) fn welcome(&self) -> Option<Arc<Welcome>> {
        self.shared.welcome.borrow().clone()
    }

    /// Why there is no session.
    pub(super) fn problem(&self) -> Option<L2Error> {
        match &*self.shared.state.borrow() {
            ProcessLinkState::Up(_) => None,
            ProcessLinkState::Down(error) => Some(error.clone()),
            ProcessLinkState::Connecting => {
                Some(self.shared.error(ErrorKind::Unavailable, "connecting"))
            }
        }
    }

    /// How often a command was started again.
    pub(super) fn restarts(&self) -> Option<u64> {
        Some(self.shared.supervisor.as_ref()?.restarts())
    }

    /// Returns an error with the socket's name. The text may be the tier's.
    pub(super) fn error(&self, kind: ErrorKind, what: &str) -> L2Error {
        self.shared.error(kind, what)
    }

    /// Ends the session and the command. What is in flight fails.
    pub(super) async fn close(&self) {
        self.stop.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock());
        for task in tasks {
            // Both end in a bounded time.
            let _ = task.await;
        }
        self.shared
            .state
            .send_replace(ProcessLinkState::Down(closed()));
    }
}

fn closed() -> L2Error {
    L2Error::new(ErrorKind::Unavailable, "the adapter is closed")
}

/// Waits until the link is closed or dropped.
pub(super) async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error is a link that was dropped.
    let _ = stop.wait_for(|stop| *stop).await;
}

impl LinkShared {
    fn error(&self, kind: ErrorKind, what: &str) -> L2Error {
        self.options.error(kind, what)
    }

    async fn run(&self, mut stop: watch::Receiver<bool>) {
        tokio::select! {
            () = self.connect_always() => {}
            () = stopped(&mut stop) => {}
        }
        let state = self.state.send_replace(ProcessLinkState::Down(closed()));
        if let ProcessLinkState::Up(session) = state {
            session.end(&closed());
        }
    }

    /// Logs why there is no connection.
    fn log_loss(&self, limit: &RateLimited, error: &L2Error, failed_calls: usize) {
        if let Some(suppressed_lines) = limit.permit(std::time::Instant::now()) {
            tracing::warn!(tier = &*self.options.tier, %error, failed_calls, suppressed_lines, "no connection to a tier in a process of its own; connecting again");
        }
    }

    async fn connect_always(&self) {
        // Servers that lost their tier at once come back at different times.
        let seed = RandomState::new().hash_one(0);
        let mut failures: u64 = 0;
        let log_limit = RateLimited::per_second();
        loop {
            let (error, failed) = match self.connect().await {
                Ok((session, wire)) => {
                    let session = Arc::new(session);
                    let welcome = Arc::new(session.welcome.clone());
                    tracing::info!(
                        socket = %self.options.socket_path.display(),
                        tier = welcome.tier,
                        "connected to a tier in a process of its own"
                    );
                    self.welcome.send_replace(Some(welcome));
                    self.state
                        .send_replace(ProcessLinkState::Up(Arc::clone(&session)));
                    let end = session.serve(wire, self.options.request_timeout).await;
                    if session.has_answered() {
                        failures = 0;
                    }
                    let error = self.error(ErrorKind::Unavailable, &end.to_string());
                    // Later calls are not sent there any more.
                    self.state
                        .send_replace(ProcessLinkState::Down(error.clone()));
                    if let (End::Silent(_) | End::Unanswered(_), Some(supervisor)) =
                        (&end, &self.supervisor)
                    {
                        supervisor.restart();
                    }
                    let failed = session.end(&error);
                    (error, Some(failed))
                }
                Err(error) => {
                    let is_starting = self
                        .supervisor
                        .as_ref()
                        .is_some_and(|child| child.is_starting());
                    if is_starting && error.kind() != ErrorKind::Refused {
                        sleep(FIRST_PAUSE).await;
                        continue;
                    }
                    self.state
                        .send_replace(ProcessLinkState::Down(error.clone()));
                    (error, (failures == 0).then_some(0))
                }
            };
            if let Some(failed) = failed {
                self.log_loss(&log_limit, &error, failed);
            }
            let pause = match error.kind() {
                ErrorKind::Refused => REFUSED_PAUSE,
                _ => pause(seed, failures),
            };
            failures += 1;
            sleep(pause).await;
        }
    }

    /// Connects and greets.
    async fn connect(&self) -> Result<(ProcessConnection, Wire), L2Error> {
        let path = &self.options.socket_path;
        let stream = UnixStream::connect(path).await;
        let stream = stream.map_err(|error| {
            self.error(ErrorKind::Unavailable, &format!("not connected: {error}"))
        })?;
        let greeted = timeout(HELLO_TIMEOUT, self.greet(stream)).await;
        if let Some(supervisor) = &self.supervisor {
            match &greeted {
                Err(_) => supervisor.restart(),
                Ok(_) => supervisor.has_started(),
            }
        }
        greeted.unwrap_or_else(|_| {
            let what = format!("the hello was not answered within {HELLO_TIMEOUT:?}");
            Err(self.error(ErrorKind::Unavailable, &what))
        })
    }

    async fn greet(&self, mut stream: UnixStream) -> Result<(ProcessConnection, Wire), L2Error> {
        let broken = |error: std::io::Error| {
            let what = format!("the hello failed: {}", End::from(error));
            self.error(ErrorKind::Unavailable, &what)
        };
        let refused = |what: &dyn std::fmt::Display| {
            let what = format!("the hello was answered by something else: {what}");
            self.error(ErrorKind::Refused, &what)
        };
        let segment = Segment::create(self.options.shared_memory_bytes)?;
        let size = segment.memory().len();
        let hello = Request::hello(CLIENT, &self.instance, size, &self.options.options);
        let hello = frame::encode(0, &hello.encode()?);
        let sent = send_with_descriptor(&stream, &hello, &segment);
        let sent = sent.await.map_err(broken)?;
        let rest = hello.get(sent..).unwrap_or_default();
        stream.write_all(rest).await.map_err(broken)?;
        let mut head = [0; HEADER];
        stream.read_exact(&mut head).await.map_err(broken)?;
        let head = Head::decode(&head).map_err(|error| refused(&error))?;
        if head.id != 0 || head.len > MAX_WELCOME {
            return Err(refused(&format!("id {}, {} bytes", head.id, head.len)));
        }
        let mut body = vec![0; head.len];
        stream.read_exact(&mut body).await.map_err(broken)?;
        let welcome = Welcome::decode(&body).map_err(|error| refused(&error))?;
        let mut welcome = welcome.map_err(|error| self.error(error.kind(), &error.to_string()))?;
        welcome.tier = self.options.secrets.hide(&welcome.tier);
        if !welcome.features.metadata && !self.options.trust_missing_layout {
            let what = "the tier keeps no metadata, so that layouts cannot be compared; give trust_missing_layout \
                true if all engines that use it agree in the form of their pages";
            return Err(self.error(ErrorKind::Refused, what));
        }
        let options = Arc::clone(&self.options);
        Ok(ProcessConnection::new(options, welcome, segment, stream))
    }
}

/// Sends the beginning of `bytes`, and with its first byte the segment's descriptor. Returns how many bytes were sent.
async fn send_with_descriptor(
    stream: &UnixStream,
    bytes: &[u8],
    segment: &Segment,
) -> std::io::Result<usize> {
    let send = || {
        let descriptors = [segment.memory().descriptor()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let slices = [IoSlice::new(bytes)];
        Ok(sendmsg(stream.as_fd(), &slices, &mut control, flags)?)
    };
    loop {
        stream.writable().await?;
        match stream.try_io(Interest::WRITABLE, send) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            sent => return sent,
        }
    }
}
