//! A client for many threads: requests are submitted without waiting, and their results are futures.
//!
//! It has two threads: one owns the socket ([`io`]), one sends heartbeats ([`health`]).
//!
//! The mutex guards the requests that the first has not taken; no other lock is acquired inside.

mod chunk;
mod future;
mod health;
mod io;
mod kv_events;
mod lookup;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvtier_common::sync::Mutex;
use kvtier_proto::key::{CacheKey, TokenWriter};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{InstanceId, Request};
use rustix::event::{EventfdFlags, eventfd};

pub use chunk::ChunkTerms;
pub use future::Future;
pub use health::{Health, HealthCallback, RecoverHook};
pub use kv_events::{KvEventCallback, KvEventUpdate};

use kv_events::KvEventStream;
use lookup::LookupPoll;

use crate::answers;
use crate::calls::{Keyless, server_wait};
use crate::error::ClientError;
use crate::message::{ClientReply, Outgoing};
use crate::wire::{Address, BUSY_POLL};

/// Limit of requests in flight.
pub const MAX_IN_FLIGHT: usize = 1 << 16;

/// The instance of a scheduler, which is none.
const NO_INSTANCE: i64 = i64::MIN;

/// Limit of unsent session ends that are kept. Each has some dozens of bytes.
const MAX_UNSENT_ENDS: usize = 1 << 16;

/// How a [`Client`] behaves.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Time from submitting a request to its result, unless it is submitted with another deadline. Default 10 s.
    pub timeout: Duration,
    /// Time between two heartbeats. If one is not answered for as long, the server is degraded. After three in a row,
    /// and no other reply meanwhile, the connection is considered lost and replaced. Default 5 s, so a connection that
    /// died silently is replaced within about 15 s.
    pub heartbeat: Duration,
    /// First pause before a lost connection is tried again. Default 100 ms; it doubles up to 1 s, and each is shortened
    /// at random by up to half. The first heartbeat follows a new connection at once, so a server that is back is
    /// healthy again within about a second.
    pub reconnect: Duration,
    /// How long closing may wait for the last requests to be sent. Default 500 ms.
    pub linger: Duration,
    /// How long the I/O thread looks for a reply before it sleeps. Default 50 us; zero spares the processor.
    pub busy_poll: Duration,
    /// Usable chunk sizes. If given, each new server is asked for its chunk size and for its optional features before
    /// anything else depends on it, and one that cannot serve the size leaves the client degraded. Default: none, nothing is
    /// asked.
    pub chunk: Option<ChunkTerms>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            heartbeat: Duration::from_secs(5),
            reconnect: Duration::from_millis(100),
            linger: Duration::from_millis(500),
            busy_poll: BUSY_POLL,
            chunk: None,
        }
    }
}

/// A connection to a server, for any number of threads. A clone is another handle; dropping the last one closes it.
///
/// Each request has a deadline and ends by then, with a response or an error, even if the server ends, hangs or
/// restarts. If the connection is lost, the requests in flight fail at once.
#[derive(Clone)]
pub struct Client {
    shared: Arc<ClientShared>,
    /// None for the handle of the client's own threads.
    _handle: Option<Arc<CloseGuard>>,
}

/// Closes the client when it is dropped.
struct CloseGuard(Arc<ClientShared>);

impl Drop for CloseGuard {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Consumer of a request's result.
type OnResult = Box<dyn FnOnce(Result<ClientReply, ClientError>) + Send>;

/// Receiver of one request's result. Dropped without one, it receives [`ClientError::Closed`].
struct Sink(Option<OnResult>, Operation);

impl Sink {
    fn complete(mut self, result: Result<ClientReply, ClientError>) {
        self.complete_once(result);
    }

    fn complete_once(&mut self, result: Result<ClientReply, ClientError>) {
        if let Some(consume) = self.0.take() {
            // A panic is the consumer's, and printed; the thread serves other requests too.
            let _ = catch_unwind(AssertUnwindSafe(|| consume(result)));
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.complete_once(Err(ClientError::Closed { operation: self.1 }));
    }
}

/// A request that the I/O thread has to send.
struct Submitted {
    uid: u64,
    outgoing: Outgoing,
    deadline: Instant,
    /// Time from the submission to the deadline.
    timeout: Duration,
    sink: Sink,
}

/// Submitted requests that the I/O thread has not taken yet.
#[derive(Default)]
struct Inbox {
    requests: VecDeque<Submitted>,
    /// Session ends beyond [`MAX_IN_FLIGHT`], which are sent all the same.
    unsent_ends: VecDeque<Outgoing>,
    kv_events: Option<KvEventStream>,
    closing: bool,
    /// Whether the I/O thread has panicked.
    broken: bool,
}

/// State of the handles and the two threads.
struct ClientShared {
    endpoint: String,
    address: Address,
    /// The process that has the threads.
    owner: u32,
    /// Nanoseconds.
    timeout: AtomicU64,
    agreement: chunk::Agreement,
    inbox: Mutex<Inbox>,
    wake: OwnedFd,
    next_uid: AtomicU64,
    in_flight: AtomicUsize,
    /// The instance of heartbeats.
    instance: AtomicI64,
    /// Messages received from the server.
    received: AtomicU64,
    /// Number of a connection that the I/O thread has to drop as lost; 0 for none.
    lost_connection: AtomicU64,
    /// Set when the state turns degraded: lookups and prepares in flight fail.
    degraded: AtomicBool,
    /// Whether the last try to connect has failed.
    unreachable: AtomicBool,
    link: health::Link,
    watch: health::Watch,
}

/// At most 584 years.
fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// Keeps a session end whose request has failed: without it the server would keep the session's leases.
fn keep_end(ends: &mut VecDeque<Outgoing>, end: Outgoing) {
    if ends.len() < MAX_UNSENT_ENDS {
        ends.push_back(end);
    }
}

impl ClientShared {
    fn new(endpoint: &str, settings: Settings) -> Result<Self, ClientError> {
        let (endpoint, address) = Address::of_endpoint(endpoint)?;
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        Ok(Self {
            endpoint,
            address,
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
            received: AtomicU64::new(0),
            lost_connection: AtomicU64::new(0),
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

    /// Drops the connection of this number as lost, if it is still the current one.
    fn drop_connection(&self, number: u64) {
        self.lost_connection.store(number, Ordering::Relaxed);
        self.wake();
    }

    /// Counts a request in flight as ended.
    fn request_ended(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// Fails lookups and prepares in flight: the server has stopped answering.
    fn fail_in_flight(&self) {
        self.degraded.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Closes the client after a panic of the I/O thread; returns the requests it has not taken.
    fn break_down(&self) -> VecDeque<Submitted> {
        let mut inbox = self.inbox.lock();
        inbox.closing = true;
        inbox.broken = true;
        let requests = std::mem::take(&mut inbox.requests);
        drop(inbox);
        self.link.close();
        requests
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
    /// Returns before the connection is established; [`Client::wait_healthy`] proves that a server answers.
    ///
    /// # Errors
    /// [`ClientError::Connect`] if the address is invalid.
    pub fn connect(endpoint: &str) -> Result<Self, ClientError> {
        Self::connect_with(endpoint, Settings::default())
    }

    /// [`Client::connect`] with settings.
    ///
    /// # Errors
    /// [`ClientError::Connect`] if the address is invalid; [`ClientError::System`] if no thread can be started.
    pub fn connect_with(endpoint: &str, settings: Settings) -> Result<Self, ClientError> {
        let shared = Arc::new(ClientShared::new(endpoint, settings)?);
        let io = io::Io::new(Arc::clone(&shared), settings);
        // From here on dropping the handle ends the threads that were started.
        let client = Self {
            _handle: Some(Arc::new(CloseGuard(Arc::clone(&shared)))),
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

    /// A handle for the client's own threads, which does not keep the client open.
    fn internal(shared: Arc<ClientShared>) -> Self {
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

    /// Time from submitting a request to its result.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.shared.timeout()
    }

    /// Sets the timeout of later requests.
    pub fn set_timeout(&self, timeout: Duration) {
        self.shared.timeout.store(nanos(timeout), Ordering::Relaxed);
    }

    /// Requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::Relaxed)
    }

    /// Connections made so far. If the number has changed, the server may be another one, which knows nothing of earlier
    /// registrations and lookups.
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

    /// What [`Scope::chunk_tokens`](crate::Scope::chunk_tokens) may be for the connected server: the agreed size if that
    /// server reads it; none for one that has only its own size, or with which the client has not agreed yet.
    #[must_use]
    pub fn named_chunk_tokens(&self) -> Option<u32> {
        self.shared.agreement.named_chunk_tokens(self.connections())
    }

    /// Why the server cannot be used although it answers, and what to do; none while it can be, or does not answer.
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

    /// State of the server. Degraded until the first heartbeat is answered, and after a fork.
    #[must_use]
    pub fn health(&self) -> Health {
        if self.shared.is_forked() {
            return Health::Degraded;
        }
        self.shared.watch.state(&self.shared.link)
    }

    /// Whether the last try to connect has failed, as it does at once if nothing listens.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        self.shared.unreachable.load(Ordering::Relaxed)
    }

    /// Waits up to `timeout` for the server to be healthy; returns whether it is.
    #[must_use]
    pub fn wait_healthy(&self, timeout: Duration) -> bool {
        !self.shared.is_forked() && self.shared.watch.wait_healthy(&self.shared.link, timeout)
    }

    /// Calls `callback` with each later state, and with [`Health::Degraded`] again when [`Client::obstacle`] changes.
    pub fn on_health(&self, callback: HealthCallback) {
        if self.shared.is_forked() {
            return;
        }
        self.shared.watch.add_callback(callback);
    }

    /// Calls `hook` before the client is healthy again: on each connection except `registered_on` (a number of
    /// [`Client::connections`]), and when the server does not know this client's worker any more. It replaces an earlier
    /// hook. It must not hold a [`Client`]: it gets one as its argument.
    pub fn on_recover(&self, registered_on: u64, hook: RecoverHook) {
        if self.shared.is_forked() {
            return;
        }
        self.shared.watch.set_recover(hook);
        // A connection that was made before the hook was set became healthy without it.
        if registered_on != self.connections() {
            self.recover_again();
        }
    }

    /// Calls `callback` with the server's KV events of a model, on a thread of the client's, which it must not block. It replaces an
    /// earlier callback.
    ///
    /// # Errors
    /// [`ClientError::Encode`] for a name that no request can carry.
    pub fn on_kv_events(
        &self,
        model_name: &str,
        callback: KvEventCallback,
    ) -> Result<(), ClientError> {
        let stream = KvEventStream::new(model_name, callback)?;
        if !self.shared.is_forked() {
            self.shared.inbox.lock().kv_events = Some(stream);
            self.shared.wake();
        }
        Ok(())
    }

    /// Calls the hook of [`Client::on_recover`] soon, for a registration that was removed.
    pub fn recover_again(&self) {
        self.shared.link.recover_again();
    }

    /// Sets the instance of heartbeats: a worker's from its registration on; none for a scheduler.
    pub fn set_instance(&self, instance: Option<InstanceId>) {
        let number = instance.map_or(NO_INSTANCE, |instance| instance.0);
        self.shared.instance.store(number, Ordering::Relaxed);
    }

    /// Closes the client: requests in flight fail with [`ClientError::Closed`], later ones at once.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Submits a request; calls `sink` with its result, at its deadline at the latest, on a thread of the client's, which
    /// it must not block.
    pub fn submit_then<T: TokenWriter>(
        &self,
        request: &Request<'_, T>,
        timeout: Duration,
        sink: impl FnOnce(Result<ClientReply, ClientError>) + Send + 'static,
    ) {
        let operation = request.operation();
        let sink = Sink(Some(Box::new(sink)), operation);
        if self.shared.is_forked() {
            return sink.complete(Err(ClientError::Forked { operation }));
        }
        let outgoing = match Outgoing::encode(request) {
            Ok(outgoing) => outgoing,
            Err(error) => return sink.complete(Err(error)),
        };
        if self.shared.in_flight.fetch_add(1, Ordering::Relaxed) >= MAX_IN_FLIGHT {
            self.shared.request_ended();
            if operation == Operation::EndSession {
                keep_end(&mut self.shared.inbox.lock().unsent_ends, outgoing);
            }
            return sink.complete(Err(ClientError::TooMany {
                operation,
                limit: MAX_IN_FLIGHT,
            }));
        }
        let submitted = Submitted {
            uid: self.shared.next_uid.fetch_add(1, Ordering::Relaxed),
            outgoing,
            deadline: Instant::now() + timeout,
            timeout,
            sink,
        };
        let mut inbox = self.shared.inbox.lock();
        if inbox.closing {
            let broken = inbox.broken;
            // Completed without the lock. A sink that is dropped completes with "closed".
            drop(inbox);
            self.shared.request_ended();
            if broken {
                let sink = submitted.sink;
                sink.complete(Err(ClientError::Broken { operation }));
            }
            return;
        }
        inbox.requests.push_back(submitted);
        drop(inbox);
        self.shared.wake();
    }

    /// Submits a request; `read` turns its reply into the result.
    pub fn submit<T: TokenWriter, R: Send + 'static>(
        &self,
        request: &Request<'_, T>,
        timeout: Duration,
        read: impl FnOnce(&ClientReply) -> Result<R, ClientError> + Send + 'static,
    ) -> Future<R> {
        let (promise, future) = future::channel(request.operation());
        self.submit_then(request, timeout, move |reply| {
            promise.keep(reply.and_then(|reply| read(&reply)));
        });
        future
    }

    /// Submits a request whose result is the reply itself.
    pub fn submit_for_reply<T: TokenWriter>(
        &self,
        request: &Request<'_, T>,
        timeout: Duration,
    ) -> Future<ClientReply> {
        let (promise, future) = future::channel(request.operation());
        self.submit_then(request, timeout, move |reply| promise.keep(reply));
        future
    }

    /// Submits a request with the client's timeout, and the time that the server may hold its reply back.
    pub(crate) fn ask<T: TokenWriter, R: Send + 'static>(
        &self,
        request: &Request<'_, T>,
        read: fn(&ClientReply) -> Result<R, ClientError>,
    ) -> Future<R> {
        self.submit(request, self.timeout() + server_wait(request), read)
    }

    /// Looks a prompt up and asks until the result is known: chunks of the longest cached prefix, which are leased
    /// until they are retrieved or freed. A lookup that fails at its deadline ends its session, so that it holds nothing.
    ///
    /// A result of more chunks than were asked for is an error.
    pub fn lookup_hits<T: TokenWriter + Clone>(&self, key: &CacheKey<'_, T>) -> Future<u64> {
        self.lookup_hits_within(key, self.timeout())
    }

    /// Calls [`Client::lookup_hits`] with a deadline of its own.
    pub fn lookup_hits_within<T: TokenWriter + Clone>(
        &self,
        key: &CacheKey<'_, T>,
        timeout: Duration,
    ) -> Future<u64> {
        LookupPoll::start(Self::internal(Arc::clone(&self.shared)), key, timeout)
    }

    /// Finds those of a key's [objects](crate::Prompt::of_object_keys) that L1 has, or that the tiers give within `timeout`. What
    /// is found is leased until the session of the key's request ends.
    pub fn find<T: TokenWriter + Clone>(
        &self,
        key: &CacheKey<'_, T>,
        timeout: Duration,
    ) -> Future<Vec<bool>> {
        lookup::find(Self::internal(Arc::clone(&self.shared)), key, timeout)
    }

    /// Sends a heartbeat of this client's worker, or of a scheduler, and waits for its reply.
    fn heartbeat(&self, timeout: Duration) -> Result<bool, ClientError> {
        let number = self.shared.instance.load(Ordering::Relaxed);
        let instance = (number != NO_INSTANCE).then_some(InstanceId(number));
        self.submit(&Keyless::Ping { instance }, timeout, answers::truth)
            .join()
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
