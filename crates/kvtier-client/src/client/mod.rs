//! A client for many threads: requests are submitted without waiting, and their results are futures.
//!
//! Two threads serve it: one owns the socket ([`io`]), one watches the server ([`health`]).

mod backoff;
mod calls;
mod chunk;
mod future;
mod health;
mod io;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvtier_proto::key::TokenWriter;
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{InstanceId, Request};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

pub use chunk::ChunkTerms;
pub use future::Future;
pub use health::{Health, HealthCallback, RecoverHook};

use crate::connection::Reply;
use crate::error::ClientError;
use crate::outgoing::Outgoing;

/// Most requests that may be under way at once.
pub const MAX_IN_FLIGHT: usize = 1 << 16;

/// No worker: heartbeats are a scheduler's.
const NO_INSTANCE: i64 = i64::MIN;

/// Session ends kept at most that could not be sent. Each is some dozens of bytes.
const MAX_ENDS: usize = 1 << 16;

/// How a [`Client`] behaves.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// How long each request may take until its result, unless it is submitted with another deadline. Default 10 s.
    pub timeout: Duration,
    /// Time between two heartbeats; one that is not answered for as long makes the server degraded. Behind three in a
    /// row, and no other answer meanwhile, the connection is given up as lost and another one is made. Default 5 s, so a
    /// connection that died silently is replaced within about 15 s.
    pub heartbeat: Duration,
    /// First pause before a lost connection is tried again. Default 100 ms; it doubles up to 1 s, and each is shortened
    /// at random by up to half. The first heartbeat follows a new connection at once, so a server that is back is
    /// healthy again within about a second.
    pub reconnect: Duration,
    /// How long closing may wait for the last requests to leave. Default 500 ms.
    pub linger: Duration,
    /// Chunk sizes that can be used. With them each new server is asked for its own before anything else depends on it, and
    /// one that differs leaves the client degraded. Default: none, nothing is asked.
    pub chunk: Option<ChunkTerms>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            heartbeat: Duration::from_secs(5),
            reconnect: Duration::from_millis(100),
            linger: Duration::from_millis(500),
            chunk: None,
        }
    }
}

/// A connection to a server, for any number of threads. Cloning gives another handle; the last one closes it.
///
/// Each request has a deadline and is over by then, with a response or an error, also when the server is gone, hangs or
/// comes back as another one. A lost connection fails what was under way at once.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
    /// None for the handle that the client's own threads use.
    _handle: Option<Arc<Handle>>,
}

/// Closes the client when the last handle goes.
struct Handle(Arc<Shared>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// What is done with a request's result.
type Told = Box<dyn FnOnce(Result<Reply, ClientError>) + Send>;

/// Who gets a request's result. Dropped untold it says that the client was closed.
struct Sink(Option<Told>, Operation);

impl Sink {
    fn tell(mut self, result: Result<Reply, ClientError>) {
        self.tell_once(result);
    }

    fn tell_once(&mut self, result: Result<Reply, ClientError>) {
        if let Some(sink) = self.0.take() {
            // A panic is its owner's, and printed; the thread that tells serves others too.
            let _ = catch_unwind(AssertUnwindSafe(|| sink(result)));
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.tell_once(Err(ClientError::Closed { operation: self.1 }));
    }
}

/// A request on its way to the I/O thread.
struct Submitted {
    uid: u64,
    outgoing: Outgoing,
    deadline: Instant,
    /// From the submission to the deadline.
    waited: Duration,
    sink: Sink,
}

#[derive(Default)]
struct Inbox {
    new: VecDeque<Submitted>,
    /// Ends of sessions that there was no room for, to be sent all the same.
    ends: VecDeque<Outgoing>,
    closing: bool,
    /// The I/O thread has panicked.
    broken: bool,
}

/// What the handles and the two threads share.
struct Shared {
    endpoint: String,
    /// The process that has the threads.
    owner: u32,
    /// Nanoseconds.
    timeout: AtomicU64,
    agreement: chunk::Agreement,
    inbox: Mutex<Inbox>,
    wake: OwnedFd,
    next_uid: AtomicU64,
    in_flight: AtomicUsize,
    /// Whose heartbeats are sent.
    instance: AtomicI64,
    /// Messages that came from the server.
    heard: AtomicU64,
    /// Number of a connection that is to be given up as lost.
    silent: AtomicU64,
    /// The state has turned degraded: lookups and prepares in flight fail.
    degraded: AtomicBool,
    /// The last try to connect has failed.
    unreachable: AtomicBool,
    link: health::Link,
    watch: health::Watch,
}

/// At most 584 years.
fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// An end of a session that nobody waits for: without it the server would keep the session's leases.
fn keep_end(ends: &mut VecDeque<Outgoing>, end: Outgoing) {
    if ends.len() < MAX_ENDS {
        ends.push_back(end);
    }
}

impl Shared {
    fn new(endpoint: String, settings: Settings) -> Result<Self, ClientError> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        Ok(Self {
            endpoint,
            owner: std::process::id(),
            timeout: AtomicU64::new(nanos(settings.timeout)),
            agreement: chunk::Agreement::new(settings.chunk),
            inbox: Mutex::default(),
            wake: wake.map_err(|errno| ClientError::System {
                source: errno.into(),
            })?,
            next_uid: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            instance: AtomicI64::new(NO_INSTANCE),
            heard: AtomicU64::new(0),
            silent: AtomicU64::new(0),
            degraded: AtomicBool::new(false),
            unreachable: AtomicBool::new(false),
            link: health::Link::default(),
            watch: health::Watch::default(),
        })
    }

    fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    /// Whether this is a fork of the process that has the threads. No lock may be taken there: its holder may not exist.
    fn is_forked(&self) -> bool {
        std::process::id() != self.owner
    }

    fn wake(&self) {
        // Only a counter that overflows could fail, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn drain_wake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    /// Has the connection of this number, if it stands still, given up as lost.
    fn give_up_connection(&self, number: u64) {
        self.silent.store(number, Ordering::Relaxed);
        self.wake();
    }

    fn one_less(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// Fails lookups and prepares in flight: the server has stopped answering.
    fn fail_in_flight(&self) {
        self.degraded.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Nobody serves requests any more; gives those that nobody has taken.
    fn break_down(&self) -> VecDeque<Submitted> {
        let mut inbox = self.inbox.lock();
        inbox.closing = true;
        inbox.broken = true;
        let new = std::mem::take(&mut inbox.new);
        drop(inbox);
        self.link.close();
        new
    }

    fn close(&self) {
        if self.is_forked() {
            return;
        }
        self.inbox.lock().closing = true;
        self.watch.clear();
        self.link.close();
        self.wake();
    }
}

impl Client {
    /// Connects with default [`Settings`]. `endpoint` is `tcp://host:port`, `ipc://path`, or `host:port`, which means TCP.
    ///
    /// Returns before the connection is there; [`Client::wait_healthy`] proves that a server answers.
    ///
    /// # Errors
    /// [`ClientError::Connect`] for an address that is none.
    pub fn connect(endpoint: &str) -> Result<Self, ClientError> {
        Self::connect_with(endpoint, Settings::default())
    }

    /// [`Client::connect`] with settings.
    ///
    /// # Errors
    /// [`ClientError::Connect`] for an address that is none; [`ClientError::System`] when no thread can be started.
    pub fn connect_with(endpoint: &str, settings: Settings) -> Result<Self, ClientError> {
        let endpoint = if endpoint.contains("://") {
            endpoint.to_owned()
        } else {
            format!("tcp://{endpoint}")
        };
        let shared = Arc::new(Shared::new(endpoint, settings)?);
        let io = io::Io::open(Arc::clone(&shared), settings)?;
        // From here on dropping the handle ends the threads that were started.
        let client = Self {
            _handle: Some(Arc::new(Handle(Arc::clone(&shared)))),
            shared: Arc::clone(&shared),
        };
        let system = |source| ClientError::System { source };
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        thread("kvtier-io")
            .spawn(move || io.run())
            .map_err(system)?;
        thread("kvtier-health")
            .spawn(move || health::run(&shared, settings.heartbeat))
            .map_err(system)?;
        Ok(client)
    }

    /// The handle of the client's own threads, which keeps nothing open.
    fn internal(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            _handle: None,
        }
    }

    /// The server's address.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.shared.endpoint
    }

    /// How long each request may take.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.shared.timeout()
    }

    /// Changes how long each later request may take.
    pub fn set_timeout(&self, timeout: Duration) {
        self.shared.timeout.store(nanos(timeout), Ordering::Relaxed);
    }

    /// Requests under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::Relaxed)
    }

    /// Connections made so far. A number that changed means that the server may be another one, which knows nothing of
    /// earlier registrations and lookups.
    #[must_use]
    pub fn connections(&self) -> u64 {
        if self.shared.is_forked() {
            return 0;
        }
        self.shared.link.connections()
    }

    /// Tokens per chunk, as agreed with the server by [`Settings::chunk`]; none until then.
    #[must_use]
    pub fn chunk_tokens(&self) -> Option<u64> {
        self.shared.agreement.chunk_tokens()
    }

    /// Why the server that answers cannot be used, and what to do; none while it can, or while none answers.
    #[must_use]
    pub fn obstacle(&self) -> Option<String> {
        if self.shared.is_forked() {
            return None;
        }
        self.shared.watch.obstacle()
    }

    /// Whether this process is a fork of the one that made the client, where it does not work.
    #[must_use]
    pub fn is_forked(&self) -> bool {
        self.shared.is_forked()
    }

    /// How it stands with the server. Degraded until the first heartbeat was answered, and after a fork.
    #[must_use]
    pub fn health(&self) -> Health {
        if self.shared.is_forked() {
            return Health::Degraded;
        }
        self.shared.watch.state()
    }

    /// Whether the last try to connect has failed, as it does at once where nothing listens.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        self.shared.unreachable.load(Ordering::Relaxed)
    }

    /// Waits up to `patience` for the server to be healthy; whether it is.
    #[must_use]
    pub fn wait_healthy(&self, patience: Duration) -> bool {
        !self.shared.is_forked() && self.shared.watch.wait_healthy(patience)
    }

    /// Has `callback` called with each later state, and with [`Health::Degraded`] again when [`Client::obstacle`] changes.
    pub fn on_health(&self, callback: HealthCallback) {
        if self.shared.is_forked() {
            return;
        }
        self.shared.watch.add_callback(callback);
    }

    /// Has `hook` called on each connection but the one of this number ([`Client::connections`]), whose server was told,
    /// and when the server does not know this client's worker any more, before the client is healthy again. It replaces
    /// an earlier one. It must not hold a [`Client`]: it is given one.
    pub fn on_recover(&self, told: u64, hook: RecoverHook) {
        if self.shared.is_forked() {
            return;
        }
        self.shared.watch.set_recover(hook);
        // One that came meanwhile, before there was the hook, has been greeted without it.
        if told != self.connections() {
            self.recover_again();
        }
    }

    /// Has the hook of [`Client::on_recover`] called soon: what the server knew was taken back.
    pub fn recover_again(&self) {
        self.shared.link.recover_again();
    }

    /// Whose heartbeats are sent: those of a worker from its registration on, else a scheduler's.
    pub fn set_instance(&self, instance: Option<InstanceId>) {
        let number = instance.map_or(NO_INSTANCE, |instance| instance.0);
        self.shared.instance.store(number, Ordering::Relaxed);
    }

    /// Ends the client: what is under way fails with [`ClientError::Closed`]. Later requests do so at once.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Submits a request; `sink` is told its result, at its deadline at the latest, on a thread of the client's, which
    /// it must not keep waiting.
    pub fn submit_then<T: TokenWriter>(
        &self,
        request: &Request<'_, T>,
        timeout: Duration,
        sink: impl FnOnce(Result<Reply, ClientError>) + Send + 'static,
    ) {
        let operation = request.operation();
        let sink = Sink(Some(Box::new(sink)), operation);
        if self.shared.is_forked() {
            return sink.tell(Err(ClientError::Forked { operation }));
        }
        let outgoing = match Outgoing::encode(request) {
            Ok(outgoing) => outgoing,
            Err(error) => return sink.tell(Err(error)),
        };
        if self.shared.in_flight.fetch_add(1, Ordering::Relaxed) >= MAX_IN_FLIGHT {
            self.shared.one_less();
            if operation == Operation::EndSession {
                keep_end(&mut self.shared.inbox.lock().ends, outgoing);
            }
            return sink.tell(Err(ClientError::TooMany {
                operation,
                limit: MAX_IN_FLIGHT,
            }));
        }
        let submitted = Submitted {
            uid: self.shared.next_uid.fetch_add(1, Ordering::Relaxed),
            outgoing,
            deadline: Instant::now() + timeout,
            waited: timeout,
            sink,
        };
        let mut inbox = self.shared.inbox.lock();
        if inbox.closing {
            let broken = inbox.broken;
            // Told without the lock; a sink that is dropped is told that the client was closed.
            drop(inbox);
            self.shared.one_less();
            if broken {
                let sink = submitted.sink;
                sink.tell(Err(ClientError::Broken { operation }));
            }
            return;
        }
        inbox.new.push_back(submitted);
        drop(inbox);
        self.shared.wake();
    }

    /// Submits a request; `read` makes its response of the reply.
    pub fn submit<T: TokenWriter, R: Send + 'static>(
        &self,
        request: &Request<'_, T>,
        timeout: Duration,
        read: impl FnOnce(&Reply) -> Result<R, ClientError> + Send + 'static,
    ) -> Future<R> {
        let (promise, future) = future::channel(request.operation());
        self.submit_then(request, timeout, move |reply| {
            promise.keep(reply.and_then(|reply| read(&reply)));
        });
        future
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("endpoint", &self.shared.endpoint)
            .field("health", &self.health())
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}
