//! One socket to one server: requests out, replies in, each with a deadline.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvtier_proto::frames::ReplyFrames;
use kvtier_proto::key::TokenWriter;
use kvtier_proto::operation::Operation;
use kvtier_proto::request::Request;
use kvtier_proto::response::{Response, ResponseKind};

use crate::error::ClientError;
use crate::outgoing::{Outgoing, check_op};

/// How a [`Connection`] behaves. The defaults are those of the LMCache 0.5.6 client, but for the deadline, which
/// there is 300 s.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// How long each request may take until its reply, from the moment it is sent. Default 10 s.
    pub timeout: Duration,
    /// First pause before a lost connection is tried again. Default 100 ms; it doubles up to 1 s.
    pub reconnect: Duration,
    /// How long [`Drop`] may wait for the last requests to leave. Default 500 ms.
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

/// A request whose reply was not taken yet; [`Connection::receive`] takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "the reply waits for Connection::receive, or Connection::forget if nobody wants it"]
pub struct Ticket {
    uid: u64,
    operation: Operation,
}

impl Ticket {
    /// What was asked.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.operation
    }
}

/// The reply to one request.
pub struct Reply {
    ticket: Ticket,
    kind: ResponseKind,
    payload: Option<zmq::Message>,
    /// When it was taken from the socket.
    received: Instant,
}

impl Reply {
    pub(crate) fn new(
        uid: u64,
        operation: Operation,
        kind: ResponseKind,
        payload: Option<zmq::Message>,
    ) -> Self {
        Self {
            ticket: Ticket { uid, operation },
            kind,
            payload,
            received: Instant::now(),
        }
    }

    /// The request it answers.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// What was asked.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.ticket.operation
    }

    /// When it was taken from the socket, which for pipelined requests may be long before it was asked for.
    #[must_use]
    pub fn received(&self) -> Instant {
        self.received
    }

    /// The raw response; none for "nothing".
    #[must_use]
    pub fn payload(&self) -> Option<&[u8]> {
        self.payload.as_deref()
    }

    /// The typed response.
    ///
    /// # Errors
    /// [`ClientError::Reply`].
    pub fn response(&self) -> Result<Response<'_>, ClientError> {
        Response::decode(self.kind, self.payload()).map_err(|source| ClientError::Reply {
            operation: self.ticket.operation,
            source,
        })
    }
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply")
            .field("ticket", &self.ticket)
            .field("bytes", &self.payload().map(<[u8]>::len))
            .finish_non_exhaustive()
    }
}

/// A request on its way.
struct Pending {
    operation: Operation,
    kind: ResponseKind,
    sent: Instant,
    timeout: Duration,
}

/// What arrived for a request that somebody will ask for.
type Arrival = Result<Reply, ClientError>;

/// A connection to a server: one DEALER socket, used by one thread at a time.
///
/// A server that is down is no error before a deadline passes: ZMQ keeps requests until it can connect. Replies are
/// matched by number, so late replies to requests that timed out harm nobody.
///
/// The typed calls ([`Connection::lookup`] and so on) send one request and wait for its reply; [`Connection::send`] and
/// [`Connection::receive`] keep several in flight.
pub struct Connection {
    socket: zmq::Socket,
    // Behind the socket, so that it is dropped later: dropping it waits for the socket's linger.
    _context: zmq::Context,
    endpoint: String,
    timeout: Duration,
    next_uid: u64,
    pending: HashMap<u64, Pending>,
    arrived: HashMap<u64, Arrival>,
}

impl Connection {
    /// Connects with default [`Options`]. `endpoint` is `tcp://host:port`, `ipc://path`, or `host:port`, which means
    /// TCP.
    ///
    /// Returns before the connection is there; [`Connection::get_chunk_size`] proves that a server answers.
    ///
    /// # Errors
    /// [`ClientError::Connect`] for an address that is none.
    pub fn connect(endpoint: &str) -> Result<Self, ClientError> {
        Self::connect_with(endpoint, Options::default())
    }

    /// [`Connection::connect`] with options.
    ///
    /// # Errors
    /// [`ClientError::Connect`] for an address that is none.
    pub fn connect_with(endpoint: &str, options: Options) -> Result<Self, ClientError> {
        let endpoint = if endpoint.contains("://") {
            endpoint.to_owned()
        } else {
            format!("tcp://{endpoint}")
        };
        // A context, hence an I/O thread, for each connection: as engines have it, which are processes of their own.
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
            pending: HashMap::new(),
            arrived: HashMap::new(),
        })
    }

    /// The server's address.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// How long each request may take.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Changes how long each later request may take.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Sends a request without waiting for its reply.
    ///
    /// # Errors
    /// [`ClientError::Encode`], [`ClientError::Socket`] (also when the send queue stays full until the deadline).
    pub fn send<T: TokenWriter>(
        &mut self,
        request: &Request<'_, T>,
    ) -> Result<Ticket, ClientError> {
        let outgoing = Outgoing::encode(request)?;
        let (operation, kind) = (outgoing.operation, outgoing.kind);
        let uid = self.next_uid;
        self.send_frames(operation, outgoing.into_message(uid))?;
        self.next_uid += 1;
        self.pending.insert(
            uid,
            Pending {
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
            let Some(pending) = self.pending.get(&ticket.uid) else {
                return Err(ClientError::UnknownTicket { uid: ticket.uid });
            };
            let left = pending.timeout.saturating_sub(pending.sent.elapsed());
            if !self.take_message(pending.operation, left)? {
                return Err(self.timed_out(ticket.uid));
            }
        }
    }

    /// Waits for whichever reply comes first; none when no request is on its way.
    ///
    /// # Errors
    /// As [`Connection::receive`]; a timeout is that of the request whose deadline is next.
    pub fn receive_any(&mut self) -> Result<Option<Reply>, ClientError> {
        loop {
            if let Some(&uid) = self.arrived.keys().next() {
                return self.arrived.remove(&uid).transpose();
            }
            let Some((&uid, oldest)) = self
                .pending
                .iter()
                .min_by_key(|(_, pending)| pending.sent + pending.timeout)
            else {
                return Ok(None);
            };
            let left = oldest.timeout.saturating_sub(oldest.sent.elapsed());
            if !self.take_message(oldest.operation, left)? {
                return Err(self.timed_out(uid));
            }
        }
    }

    /// Gives up the reply to a request: it is dropped when it comes.
    pub fn forget(&mut self, ticket: Ticket) {
        self.arrived.remove(&ticket.uid);
        self.pending.remove(&ticket.uid);
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// As [`Connection::send`] and [`Connection::receive`].
    pub fn call<T: TokenWriter>(&mut self, request: &Request<'_, T>) -> Result<Reply, ClientError> {
        let ticket = self.send(request)?;
        self.receive(ticket)
    }

    /// Sends frames as they are, for tests of servers. Nobody waits for a reply.
    ///
    /// # Errors
    /// [`ClientError::Socket`].
    pub fn send_raw(&mut self, frames: Vec<Vec<u8>>) -> Result<(), ClientError> {
        self.send_frames(Operation::Noop, frames)
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

    /// Waits up to `left` for one message and files it; false when none came.
    fn take_message(&mut self, operation: Operation, left: Duration) -> Result<bool, ClientError> {
        let frames = match self.wait_frames(left) {
            Ok(Some(frames)) => frames,
            Ok(None) => return Ok(false),
            Err(source) => return Err(self.socket_error(operation, source)),
        };
        let received = Instant::now();
        self.file(frames, received);
        Ok(true)
    }

    /// The frames of one message; none when none came in time.
    fn wait_frames(&self, left: Duration) -> zmq::Result<Option<Vec<zmq::Message>>> {
        let deadline = Instant::now() + left;
        let first = loop {
            // Rounded up, lest the last part of a millisecond be spent spinning.
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

    /// Files a message under its request. Messages that belong to none are dropped: late replies, mostly.
    fn file(&mut self, mut frames: Vec<zmq::Message>, received: Instant) {
        let Ok(reply) = ReplyFrames::parse(frames.iter().map(|frame| &**frame)) else {
            return;
        };
        let Ok(uid) = reply.uid_number() else {
            return;
        };
        let Some(pending) = self.pending.remove(&uid) else {
            return;
        };
        let outcome = check_op(reply.op, pending.operation).map(|()| Reply {
            ticket: Ticket {
                uid,
                operation: pending.operation,
            },
            kind: pending.kind,
            payload: (frames.len() > 2).then(|| frames.swap_remove(2)),
            received,
        });
        self.arrived.insert(uid, outcome);
    }

    fn timed_out(&mut self, uid: u64) -> ClientError {
        match self.pending.remove(&uid) {
            Some(pending) => ClientError::Timeout {
                operation: pending.operation,
                endpoint: self.endpoint.clone(),
                waited: pending.timeout,
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
            .field("in_flight", &self.pending.len())
            .finish_non_exhaustive()
    }
}

/// The socket with the options of the LMCache 0.5.6 client.
fn open(context: &zmq::Context, endpoint: &str, options: Options) -> zmq::Result<zmq::Socket> {
    let millis = |span: Duration| i32::try_from(span.as_millis()).unwrap_or(i32::MAX);
    let socket = context.socket(zmq::DEALER)?;
    socket.set_connect_timeout(5000)?;
    socket.set_reconnect_ivl(millis(options.reconnect).max(1))?;
    socket.set_reconnect_ivl_max(1000)?;
    socket.set_linger(millis(options.linger))?;
    // Only a full queue of 1000 messages makes a send wait at all.
    socket.set_sndtimeo(millis(options.timeout))?;
    socket.connect(endpoint)?;
    Ok(socket)
}
