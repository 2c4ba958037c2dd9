//! A blocking connection: one socket to one server, requests out, replies in, each with a deadline.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvtier_proto::key::{CacheKey, TokenWriter};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::Request;
use kvtier_proto::response::ResponseKind;

use crate::answers;
use crate::error::ClientError;
use crate::message::{Incoming, Outgoing, Reply, Ticket};
use crate::socket::{dealer, millis, with_scheme};

/// First and longest pause between two questions for the result of a lookup.
const FIRST_PAUSE: Duration = Duration::from_micros(50);
const MAX_PAUSE: Duration = Duration::from_millis(2);

/// How a [`Connection`] behaves. The defaults are those of the LMCache 0.5.6 client, except for the timeout, which is
/// 300 s there.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Time from sending a request to its reply. Default 10 s.
    pub timeout: Duration,
    /// First pause before a lost connection is tried again. Default 100 ms; it doubles up to 1 s.
    pub reconnect: Duration,
    /// How long [`Drop`] may wait for the last requests to be sent. Default 500 ms.
    pub linger: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            reconnect: Duration::from_millis(100),
            linger: Duration::from_millis(500),
        }
    }
}

/// A request in flight.
struct InFlight {
    operation: Operation,
    kind: ResponseKind,
    sent: Instant,
    timeout: Duration,
}

/// A connection to a server: one DEALER socket, used by one thread at a time.
///
/// A server that is down is no error before a deadline passes: ZMQ keeps requests until it can connect. Replies are
/// matched by number, so late replies to requests that timed out are dropped.
///
/// The typed calls ([`Connection::lookup`] and so on) send one request and wait for its reply; [`Connection::send`] and
/// [`Connection::receive`] keep several in flight.
pub struct Connection {
    socket: zmq::Socket,
    // Declared after the socket, so that it is dropped later: dropping it waits for the socket's linger.
    _context: zmq::Context,
    endpoint: String,
    timeout: Duration,
    next_uid: u64,
    in_flight: HashMap<u64, InFlight>,
    /// Replies that were not received by the caller yet.
    arrived: HashMap<u64, Result<Reply, ClientError>>,
}

impl Connection {
    /// Connects with default [`Options`]. `endpoint` is `tcp://host:port`, `ipc://path`, or `host:port`, which means
    /// TCP.
    ///
    /// Returns before the connection is established; [`Connection::get_chunk_size`] proves that a server answers.
    ///
    /// # Errors
    /// [`ClientError::Connect`] if the address is invalid.
    pub fn connect(endpoint: &str) -> Result<Self, ClientError> {
        Self::connect_with(endpoint, Options::default())
    }

    /// [`Connection::connect`] with options.
    ///
    /// # Errors
    /// [`ClientError::Connect`] if the address is invalid.
    pub fn connect_with(endpoint: &str, options: Options) -> Result<Self, ClientError> {
        let endpoint = with_scheme(endpoint);
        // A context, hence an I/O thread, per connection: as in engines, where each is in a process of its own.
        let context = zmq::Context::new();
        let socket = open(&context, &endpoint, options).map_err(|source| ClientError::Connect {
            endpoint: endpoint.clone(),
            source,
        })?;
        Ok(Self {
            socket,
            _context: context,
            endpoint,
            timeout: options.timeout,
            next_uid: 0,
            in_flight: HashMap::new(),
            arrived: HashMap::new(),
        })
    }

    /// The server's address.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Time from sending a request to its reply.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sets the timeout of later requests.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Sends a request without waiting for its reply.
    ///
    /// # Errors
    /// [`ClientError::Encode`], [`ClientError::Socket`] (also if the send queue stays full until the deadline).
    pub fn send<T: TokenWriter>(
        &mut self,
        request: &Request<'_, T>,
    ) -> Result<Ticket, ClientError> {
        let outgoing = Outgoing::encode(request)?;
        let (operation, kind) = (outgoing.operation, outgoing.kind);
        let uid = self.next_uid;
        self.send_frames(operation, outgoing.into_message(uid))?;
        self.next_uid += 1;
        self.in_flight.insert(
            uid,
            InFlight {
                operation,
                kind,
                sent: Instant::now(),
                timeout: self.timeout,
            },
        );
        Ok(Ticket { uid, operation })
    }

    /// Waits for the reply to one request, up to the deadline it was sent with.
    ///
    /// # Errors
    /// [`ClientError::Timeout`], [`ClientError::Server`] with the server's error text, [`ClientError::Socket`],
    /// [`ClientError::UnknownTicket`]. After any of them the ticket is used up.
    pub fn receive(&mut self, ticket: Ticket) -> Result<Reply, ClientError> {
        loop {
            if let Some(arrival) = self.arrived.remove(&ticket.uid) {
                return arrival;
            }
            let Some(request) = self.in_flight.get(&ticket.uid) else {
                return Err(ClientError::UnknownTicket { uid: ticket.uid });
            };
            let left = request.timeout.saturating_sub(request.sent.elapsed());
            if !self.take_message(request.operation, left)? {
                return Err(self.timed_out(ticket.uid));
            }
        }
    }

    /// Abandons a request: its reply is dropped on arrival.
    pub fn forget(&mut self, ticket: Ticket) {
        self.arrived.remove(&ticket.uid);
        self.in_flight.remove(&ticket.uid);
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// As [`Connection::send`] and [`Connection::receive`].
    pub fn call<T: TokenWriter>(&mut self, request: &Request<'_, T>) -> Result<Reply, ClientError> {
        let ticket = self.send(request)?;
        self.receive(ticket)
    }

    /// Sends a request whose reply is dropped. A failure to send it is ignored: the server may be the reason.
    pub(crate) fn notify<T: TokenWriter>(&mut self, request: &Request<'_, T>) {
        if let Ok(ticket) = self.send(request) {
            self.forget(ticket);
        }
    }

    /// Looks a prompt up and asks until the result is known: chunks of the longest cached prefix, which are leased
    /// until they are retrieved or freed.
    ///
    /// # Errors
    /// As [`Connection::call`]; [`ClientError::Timeout`] also if the result stays unknown for the timeout.
    pub fn lookup_hits<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
    ) -> Result<u64, ClientError> {
        self.lookup_chunks(key, key.end)
    }

    /// As [`Connection::lookup_hits`], for a lookup of `limit` chunks: a result of more chunks is an error.
    pub(crate) fn lookup_chunks<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
        limit: u64,
    ) -> Result<u64, ClientError> {
        self.lookup(key)?;
        let started = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let hits = self.query_prefetch_status(key.request_id)?;
            if let Some(chunks) = answers::limited(Operation::QueryPrefetchStatus, hits, limit)? {
                return Ok(chunks);
            }
            if started.elapsed() >= self.timeout {
                return Err(ClientError::Timeout {
                    operation: Operation::QueryPrefetchStatus,
                    endpoint: self.endpoint.clone(),
                    waited: started.elapsed(),
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    fn send_frames(
        &self,
        operation: Operation,
        frames: impl IntoIterator<Item = Vec<u8>>,
    ) -> Result<(), ClientError> {
        self.socket
            .send_multipart(frames, 0)
            .map_err(|source| self.socket_error(operation, source))
    }

    /// Waits up to `left` for one message and files it under its request; false if none came. A message that belongs to
    /// no request in flight is dropped: mostly a late reply.
    fn take_message(&mut self, operation: Operation, left: Duration) -> Result<bool, ClientError> {
        let frames = match self.wait_frames(left) {
            Ok(Some(frames)) => frames,
            Ok(None) => return Ok(false),
            Err(source) => return Err(self.socket_error(operation, source)),
        };
        if let Some(incoming) = Incoming::parse(frames)
            && let Some(request) = self.in_flight.remove(&incoming.uid)
        {
            let uid = incoming.uid;
            let reply = incoming.into_reply(request.operation, request.kind);
            self.arrived.insert(uid, reply);
        }
        Ok(true)
    }

    /// The frames of one message; none if none came in time.
    fn wait_frames(&self, left: Duration) -> zmq::Result<Option<Vec<zmq::Message>>> {
        let deadline = Instant::now() + left;
        let first = loop {
            // Rounded up, so that the last part of a millisecond is not spent spinning.
            let left = deadline.saturating_duration_since(Instant::now());
            let millis = left.as_nanos().div_ceil(1_000_000).min(3_600_000);
            self.socket.set_rcvtimeo(millis as i32)?;
            match self.socket.recv_msg(0) {
                Ok(message) => break message,
                Err(zmq::Error::EINTR) => {}
                Err(zmq::Error::EAGAIN) if deadline <= Instant::now() => return Ok(None),
                Err(zmq::Error::EAGAIN) => {}
                Err(error) => return Err(error),
            }
        };
        let mut frames = vec![first];
        while self.socket.get_rcvmore()? {
            frames.push(self.socket.recv_msg(0)?);
        }
        Ok(Some(frames))
    }

    fn timed_out(&mut self, uid: u64) -> ClientError {
        match self.in_flight.remove(&uid) {
            Some(request) => ClientError::Timeout {
                operation: request.operation,
                endpoint: self.endpoint.clone(),
                waited: request.timeout,
            },
            None => ClientError::UnknownTicket { uid },
        }
    }

    fn socket_error(&self, operation: Operation, source: zmq::Error) -> ClientError {
        ClientError::Socket {
            operation,
            endpoint: self.endpoint.clone(),
            source,
        }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("endpoint", &self.endpoint)
            .field("in_flight", &self.in_flight.len())
            .finish_non_exhaustive()
    }
}

fn open(context: &zmq::Context, endpoint: &str, options: Options) -> zmq::Result<zmq::Socket> {
    let socket = dealer(context, options.reconnect, options.linger)?;
    // A send waits only if the queue of 1000 messages is full.
    socket.set_sndtimeo(millis(options.timeout))?;
    socket.connect(endpoint)?;
    Ok(socket)
}
