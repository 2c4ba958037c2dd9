//! The ZMQ front end: one thread that owns the socket, moves frames and never waits for a request.
//!
//! It answers the requests that need next to no work at once ([`Job::is_quick`]), and queues the others in the lanes of
//! their connection. Pools decode and serve them and put the answers into the outbox, which wakes this thread.

mod connection;
mod ipc;
pub mod lanes;
mod limits;
mod outbox;
mod request;
pub(crate) mod seldom;
#[cfg(test)]
mod tests;

use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvtier_proto::frames::{ClientMessage, OperationId, RequestFrames};
use kvtier_proto::generation::{Generation, Resolved, Unresolved};
use kvtier_proto::operation::Lane as LaneKind;
use kvtier_proto::response::ResponseKind;
use kvtier_proto::wire::DecodeError;

use crate::config::ServerConfig;
use crate::engine::{Answer, Engine};
use crate::health::Health;
use connection::{Connections, Undecided};
use ipc::SocketFile;
use lanes::Pool;
use limits::{JOB_BYTES, MAX_FRAMES, MAX_HEAD, SEND_HWM};
use outbox::{Inbox, Outbox, Reply};
use request::{Job, Server, error_frame};
use seldom::Seldom;

/// Messages of a connection that may wait for its client's generation. A worker that reconnected waits for the answer to
/// one, and the next ping decides.
const MAX_UNDECIDED: usize = 16;

/// Messages taken from the socket before replies get their turn.
const BURST: usize = 64;

/// Milliseconds a new TCP connection has for the ZMTP handshake.
const HANDSHAKE_MS: i32 = 10_000;

/// Milliseconds between ZMTP heartbeats to a silent client, and until it is taken for gone.
const HEARTBEAT_MS: i32 = 10_000;
const HEARTBEAT_TIMEOUT_MS: i32 = 60_000;

/// How long to look for more work before sleeping. A request that follows a reply, and a reply that a pool is about to
/// give, come sooner than this; being woken for them costs more, most of all on virtual machines.
const LINGER: Duration = Duration::from_micros(50);

/// Milliseconds between looks at the stop flag when nothing happens; stopping also wakes the thread.
const IDLE_MS: i64 = 1000;

/// The request socket, bound; whoever connects waits until a front end runs on it.
pub struct RequestSocket {
    socket: zmq::Socket,
    endpoint: String,
    file: Option<SocketFile>,
}

impl RequestSocket {
    /// Why there could be no such socket whatever its port, told without leaving one.
    pub(crate) fn obstacle(config: &ServerConfig) -> Option<String> {
        if config.ipc_path().is_none() {
            let any_port = ServerConfig {
                port: 0,
                ..config.clone()
            };
            return Self::bind(&any_port).err();
        }
        let found = ipc::obstacle(config.ipc_path()?)?;
        let address = config.bind_address();
        Some(format!("--host: {address} cannot be bound: {found}"))
    }

    /// Binds the socket.
    ///
    /// # Errors
    /// One line that names the address.
    pub fn bind(config: &ServerConfig) -> Result<Self, String> {
        let address = config.bind_address();
        let context = zmq::Context::new();
        let file = match config
            .ipc_path()
            .map(|path| ipc::listen_at(path, config.ipc_mode))
        {
            None => None,
            Some(Ok(listener)) => Some(listener),
            Some(Err(error)) => return Err(format!("--host: {address} cannot be bound: {error}")),
        };
        let (listener, file) = file.unzip();
        let socket = bind(&context, &address, listener, config.max_message_bytes)
            .map_err(|error| match error {
                // libzmq's word for a name that is none of an interface; it asks no name server here.
                zmq::Error::ENODEV => format!(
                    "--host: {:?} is not found: give an IP address or a network interface of this machine; names of \
                     hosts are not looked up",
                    config.host
                ),
                error => format!("--host, --port: {address} cannot be bound: {error}"),
            })?;
        let endpoint = match socket.get_last_endpoint() {
            Ok(Ok(endpoint)) => endpoint,
            _ => address,
        };
        Ok(Self {
            socket,
            endpoint,
            file,
        })
    }
}

/// The running front end.
pub struct FrontEnd {
    endpoint: String,
    stop: Arc<AtomicBool>,
    outbox: Outbox,
    thread: Option<JoinHandle<()>>,
    /// Of a socket that is a path.
    file: Option<SocketFile>,
}

impl FrontEnd {
    /// Starts serving.
    ///
    /// # Errors
    /// A system out of threads or file descriptors, in one line.
    pub fn start(
        config: &ServerConfig,
        RequestSocket {
            socket,
            endpoint,
            file,
        }: RequestSocket,
        engine: Arc<Engine>,
        health: Arc<Health>,
    ) -> Result<Self, String> {
        let (outbox, inbox) = outbox::outbox().map_err(|error| format!("no eventfd: {error}"))?;
        let server = Arc::new(Server {
            engine,
            health,
            outbox: outbox.clone(),
        });
        let pool = |name, threads| {
            let server = Arc::clone(&server);
            Pool::start(name, threads, move |job, turn| server.run(job, turn))
                .map_err(|error| format!("no thread: {error}"))
        };
        let mut front = Front {
            socket,
            inbox,
            transfers: pool("kvtier-transfer", config.transfer_workers)?,
            control: pool("kvtier-control", config.control_workers)?,
            connections: Connections::new(
                limits::request_budget(config.max_message_bytes),
                limits::reply_budget(),
            ),
            server: Arc::clone(&server),
            stop: Arc::new(AtomicBool::new(false)),
        };
        let stop = Arc::clone(&front.stop);
        let thread = std::thread::Builder::new()
            .name("kvtier-front".into())
            .spawn(move || front.run())
            .map_err(|error| format!("no thread: {error}"))?;
        Ok(Self {
            endpoint,
            stop,
            outbox,
            thread: Some(thread),
            file,
        })
    }

    /// Where it listens, such as `tcp://127.0.0.1:5555`.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Stops taking requests, lets those under way finish, and closes the socket.
    pub fn stop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.outbox.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread has been noted in the health by itself.
            let _ = thread.join();
        }
        self.file = None;
    }
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        self.stop();
    }
}

fn bind(
    context: &zmq::Context,
    address: &str,
    listener: Option<OwnedFd>,
    max_message_bytes: u64,
) -> zmq::Result<zmq::Socket> {
    let mut socket = context.socket(zmq::ROUTER)?;
    socket.set_router_mandatory(true)?;
    // Only for an address that is one: with it on, a name may resolve to IPv6 alone.
    socket.set_ipv6(address.contains('['))?;
    socket.set_linger(1000)?;
    socket.set_sndhwm(SEND_HWM)?;
    let max_frame = limits::max_frame(max_message_bytes);
    socket.set_maxmsgsize(i64::try_from(max_frame).unwrap_or(i64::MAX))?;
    socket.set_handshake_ivl(HANDSHAKE_MS)?;
    socket.set_heartbeat_ivl(HEARTBEAT_MS)?;
    socket.set_heartbeat_timeout(HEARTBEAT_TIMEOUT_MS)?;
    match listener {
        None => socket.bind(address)?,
        Some(listener) => kvtier_zmq::bind_to(&mut socket, address, listener)?,
    }
    Ok(socket)
}

struct Front {
    socket: zmq::Socket,
    inbox: Inbox,
    transfers: Pool<Job>,
    control: Pool<Job>,
    connections: Connections,
    server: Arc<Server>,
    stop: Arc<AtomicBool>,
}

impl Front {
    fn run(&mut self) {
        let health = Arc::clone(&self.server.health);
        let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.serve()));
        if served.is_err() {
            health.poison("front end");
        }
    }

    fn serve(&mut self) {
        let wake: RawFd = self.inbox.fd();
        let mut last_work = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            // Both, whatever the first one finds.
            if self.send_replies() | self.take_requests() {
                last_work = Instant::now();
                continue;
            }
            if last_work.elapsed() < LINGER {
                std::thread::yield_now();
                continue;
            }
            let mut items = [
                self.socket.as_poll_item(zmq::POLLIN),
                zmq::PollItem::from_fd(wake, zmq::POLLIN),
            ];
            match zmq::poll(&mut items, IDLE_MS) {
                Ok(_) | Err(zmq::Error::EINTR) => {}
                Err(error) => {
                    tracing::error!(%error, "polling the request socket failed");
                    self.server.health.poison("front end");
                    return;
                }
            }
            if items[1].is_readable() {
                self.inbox.clear();
            }
        }
        // Who waits for a GPU is answered first: requests that the lanes still hold may wait for its driver.
        self.answer_transfers();
        self.transfers.finish();
        self.control.finish();
        // What they have begun, and their own answers.
        self.answer_transfers();
    }

    fn answer_transfers(&mut self) {
        self.server.engine.end_transfers();
        self.send_replies();
    }

    /// Serves or queues what has arrived, so much at most that replies get their turn; says whether there was anything.
    fn take_requests(&mut self) -> bool {
        for taken in 0..BURST {
            match receive(&self.socket) {
                Some(frames) => self.take(frames),
                None => return taken > 0,
            }
        }
        true
    }

    fn take(&mut self, frames: Vec<zmq::Message>) {
        let received = Instant::now();
        let mut frames = frames.into_iter();
        let Some(routing_id) = frames.next() else {
            return;
        };
        let frames: Vec<_> = frames.collect();
        let head: usize = frames.iter().take(2).map(|frame| frame.len()).sum();
        let parsed = match head {
            0..=MAX_HEAD => ClientMessage::parse(frames.iter().map(|frame| &**frame)),
            _ => Err(DecodeError::new(format!(
                "uid and op have at most {MAX_HEAD} bytes"
            ))),
        };
        let message = match parsed {
            Ok(ClientMessage::Request(request)) => request,
            // No stream stays open here: the only one ends with its first batch.
            Ok(ClientMessage::Stream { .. }) => return,
            Err(error) => {
                self.server.engine.metrics().malformed_messages.inc();
                static SAID: Seldom = Seldom::new();
                if let Some(left_out) = SAID.due(received) {
                    tracing::debug!(%error, left_out, "a message that is no request was dropped");
                }
                return;
            }
        };
        static TOLD_OFF: Seldom = Seldom::new();
        let connection = self.connections.get(&routing_id, received);
        let resolved = match connection.candidates.resolve(&message, &[Generation::G6]) {
            Ok(resolved) => resolved,
            Err(error) => {
                let reply = self.unresolved(&routing_id, &message, &error, received);
                if let Some(reply) = reply {
                    self.send(reply);
                }
                return;
            }
        };
        let decided = resolved.certain && !connection.undecided.is_empty();
        let earlier = decided.then(|| std::mem::take(&mut connection.undecided));
        if needs_decision(&resolved) && connection.undecided.len() < MAX_UNDECIDED {
            let bytes: u64 = frames.iter().map(|frame| frame.len() as u64).sum();
            if let Some(charge) = connection.peer.requests.take(bytes + JOB_BYTES) {
                connection.undecided.push(Undecided {
                    frames: std::iter::once(routing_id).chain(frames).collect(),
                    _charge: charge,
                });
                return;
            }
        }
        if resolved.generation != Generation::G6
            && resolved.certain
            && !std::mem::replace(&mut connection.told_off, true)
            && let Some(left_out) = TOLD_OFF.due(received)
        {
            tracing::warn!(
                left_out,
                releases = resolved.generation.releases(),
                "a client of LMCache {} connected; this server serves {}: it runs without a cache",
                resolved.generation.releases(),
                Generation::G6.releases(),
            );
        }
        let (uid, op) = (message.uid.to_vec(), message.op.to_vec());
        let payloads: Vec<_> = frames.into_iter().skip(2).collect();
        let bytes = payloads.iter().map(|payload| payload.len() as u64).sum();
        let mut job = Job {
            peer: Arc::clone(&connection.peer),
            uid,
            op,
            payloads,
            bytes,
            charge: None,
            resolved,
            takes_text: resolved.release.takes_text_op(),
            received,
        };
        for waiting in earlier.into_iter().flatten() {
            self.take(waiting.frames);
        }
        let connection = self.connections.get(&routing_id, received);
        let operation = resolved.spec.operation;
        if bytes > limits::max_payload(operation) {
            return self.refuse(job, "request_too_large");
        }
        let (pool, lane) = match operation.lane() {
            LaneKind::Inline => return self.serve_now(job),
            LaneKind::Transfer => (&self.transfers, &connection.transfers),
            LaneKind::Control => (&self.control, &connection.control),
        };
        // Only this thread puts jobs into lanes, so an idle one stays idle and no order is broken.
        if job.is_quick() && lane.is_idle() {
            return self.serve_now(job);
        }
        job.charge = job.peer.requests.take(bytes + JOB_BYTES);
        if job.charge.is_none() {
            return self.refuse(job, "queue_full");
        }
        if let Err(job) = pool.push(lane, job) {
            self.refuse(job, "lane_full");
        }
    }

    fn serve_now(&mut self, job: Job) {
        for reply in self.server.answer(job, &mut None) {
            self.send(reply);
        }
    }

    /// Answers with the operation's "no" a request that would take too much memory.
    fn refuse(&mut self, job: Job, reason: &'static str) {
        static SAID: Seldom = Seldom::new();
        if let Some(left_out) = SAID.due(job.received) {
            tracing::warn!(
                operation = job.resolved.spec.operation.name(),
                bytes = job.bytes,
                reason,
                left_out,
                "a client's request was refused"
            );
        }
        for reply in self.server.refuse(job, reason) {
            self.send(reply);
        }
    }

    /// A request that no table knows is answered too, so that nobody waits for ever: a client that takes a text learns
    /// why, others get the operation's "no", or their own frames back. Nothing answers a frame that names no operation.
    fn unresolved(
        &mut self,
        routing_id: &[u8],
        message: &RequestFrames<'_>,
        error: &Unresolved,
        received: Instant,
    ) -> Option<Reply> {
        self.server.engine.metrics().malformed_messages.inc();
        static SAID: Seldom = Seldom::new();
        if let Some(left_out) = SAID.due(received) {
            tracing::debug!(%error, left_out, "a request that no table knows");
        }
        let connection = self.connections.get(routing_id, received);
        let candidates = connection.candidates;
        let id = OperationId::decode(message.op).ok();
        // Who calls by name is of a release that takes a text, unless its connection has proved otherwise.
        let takes_text = candidates.release().takes_text_op()
            || matches!(id, Some(OperationId::Name(_))) && candidates.contains(Generation::G6);
        // A known operation with the wrong payloads still has its own "no", in the newest form its client may know.
        let known = id.and_then(|id| {
            let rows = candidates.iter().filter_map(|own| own.rows(id).next());
            rows.last()
        });
        let answer = match known {
            Some(spec) => {
                Answer::refusal_with(spec.operation, spec.response, "payload_count", error)
            }
            None => Answer::error(error.to_string(), "unknown_operation"),
        };
        let (op, payload) = match answer.error {
            Some(text) if takes_text => (error_frame(&text), None),
            _ if id.is_none() => return None,
            _ => (message.op.to_vec(), answer.payload),
        };
        Some(Reply {
            peer: Arc::clone(&connection.peer),
            uid: message.uid.to_vec(),
            op,
            payload,
            charge: None,
        })
    }

    /// Sends the replies that wait; says whether there were any.
    fn send_replies(&mut self) -> bool {
        let mut any = false;
        for reply in self.inbox.drain() {
            deliver(&mut self.socket, &self.server, reply);
            any = true;
        }
        any
    }

    fn send(&mut self, reply: Reply) {
        deliver(&mut self.socket, &self.server, reply);
    }
}

/// Whether any answer now may be of a type that the client does not expect, or one that its worker does not survive. A
/// query that is answered with nothing is repeated.
fn needs_decision(resolved: &Resolved) -> bool {
    let harmless = matches!(
        resolved.spec.response,
        ResponseKind::Nothing | ResponseKind::OptionalInt
    );
    !resolved.certain && !harmless
}

/// One message, if one is there: routing id first, and no more than [`MAX_FRAMES`] of its frames.
fn receive(socket: &zmq::Socket) -> Option<Vec<zmq::Message>> {
    let mut frames = Vec::with_capacity(6);
    loop {
        let mut frame = zmq::Message::new();
        match socket.recv(&mut frame, zmq::DONTWAIT) {
            Ok(()) => {}
            Err(zmq::Error::EAGAIN) => return None,
            Err(zmq::Error::EINTR) => continue,
            Err(error) => {
                tracing::error!(%error, "receiving failed");
                return None;
            }
        }
        let more = frame.get_more();
        if frames.len() < MAX_FRAMES {
            frames.push(frame);
        }
        if !more {
            return Some(frames);
        }
    }
}

fn deliver(socket: &mut zmq::Socket, server: &Server, reply: Reply) {
    let connection = reply.peer.id;
    if let Err(error) = send(socket, reply) {
        // Gone (EHOSTUNREACH), or so far behind that its queue is full (EAGAIN).
        server.engine.metrics().undeliverable.inc();
        static SAID: Seldom = Seldom::new();
        if let Some(left_out) = SAID.due(Instant::now()) {
            tracing::debug!(%error, connection, left_out, "a reply could not be delivered");
        }
    }
}

/// Hands a message to libzmq; what is charged for it is given back when libzmq has no use for its bytes any more.
fn send(socket: &mut zmq::Socket, reply: Reply) -> zmq::Result<()> {
    let more = zmq::DONTWAIT | zmq::SNDMORE;
    // The first frame finds the peer, or fails; what follows it is never refused.
    socket.send(&*reply.peer.routing_id, more)?;
    socket.send(reply.uid, more)?;
    let Some(payload) = reply.payload else {
        return socket.send(reply.op, zmq::DONTWAIT);
    };
    socket.send(reply.op, more)?;
    match reply.charge {
        None => socket.send(payload, zmq::DONTWAIT),
        Some(charge) => kvtier_zmq::send_with(socket, payload, charge, zmq::DONTWAIT),
    }
}
