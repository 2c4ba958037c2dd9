//! A blocking connection: one socket to one server, requests out, replies in, each with a deadline.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use kvtier_proto::key::{CacheKey, TokenWriter};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::Request;
use kvtier_proto::response::ResponseKind;

use crate::answers;
use crate::backoff::Backoff;
use crate::error::ClientError;
use crate::message::{ClientReply, Incoming, Outgoing, Ticket};
use crate::wire::{Address, BUSY_POLL, Frames, Heartbeats, Wire, wait};

/// Limit of requests that wait to be sent.
const MAX_UNSENT: usize = 1000;

/// How long a caller whose deadline has passed goes on reading what has arrived.
const READ_GRACE: Duration = Duration::from_secs(1);

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
    /// How long a call that waits for a reply looks for it before its thread sleeps. Default 50 us; zero spares the
    /// processor.
    pub busy_poll: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            reconnect: Duration::from_millis(100),
            linger: Duration::from_millis(500),
            busy_poll: BUSY_POLL,
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

/// A connection to a server, used by one thread at a time.
///
/// It has no thread: bytes move during calls, so a server may close one that leaves replies unread for a minute. A server that is down is no error before a deadline passes: requests wait
/// until it can be reached. If the connection is lost, the sent requests in flight fail at once, and the next call
/// connects again. Replies are matched by number, so late replies to requests that timed out are dropped.
///
/// The typed calls ([`Connection::lookup`] and so on) send one request and wait for its reply; [`Connection::send`] and
/// [`Connection::receive`] keep several in flight.
///
/// ```no_run
/// use kvtier_client::{Connection, Prompt, Scope};
///
/// let mut connection = Connection::connect("localhost:5555")?;
/// let chunk_tokens = connection.get_chunk_size()?;
/// let (scope, prompt) = (Scope::new("some/model"), Prompt::new(&[1; 512]));
/// let key = scope.scheduler_key(&prompt, prompt.whole_chunks(chunk_tokens), "request-1");
/// println!("{} chunks are cached", connection.lookup_hits(&key)?);
/// connection.end_session("request-1")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Connection {
    address: Address,
    endpoint: String,
    timeout: Duration,
    linger: Duration,
    busy_poll: Duration,
    /// None while there is no connection and no attempt to make one.
    wire: Option<Wire>,
    backoff: Backoff,
    /// When to open the next wire, if there is none.
    reopen_at: Instant,
    /// Why the last attempt to connect failed; none while the connection is ready.
    no_connection: Option<String>,
    /// Whether the wire, or the last one, has brought a message.
    has_answered: bool,
    next_uid: u64,
    /// Messages that no wire has taken, with their numbers.
    unsent: VecDeque<(u64, Frames)>,
    in_flight: HashMap<u64, InFlight>,
    /// Replies that were not received by the caller yet.
    arrived: HashMap<u64, Result<ClientReply, ClientError>>,
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
        let (endpoint, address) = Address::of_endpoint(endpoint)?;
        let now = Instant::now();
        let mut connection = Self {
            address,
            endpoint,
            timeout: options.timeout,
            linger: options.linger,
            busy_poll: options.busy_poll,
            wire: None,
            backoff: Backoff::new(options.reconnect),
            reopen_at: now,
            no_connection: None,
            has_answered: false,
            next_uid: 0,
            unsent: VecDeque::new(),
            in_flight: HashMap::new(),
            arrived: HashMap::new(),
        };
        connection.turn(now);
        Ok(connection)
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

    /// Sends a request without waiting for its reply. Only while a connection is being made, it waits for that.
    ///
    /// # Errors
    /// [`ClientError::Encode`]; [`ClientError::Unsent`] if as many requests wait to be sent as may, until the deadline.
    pub fn send<T: TokenWriter>(
        &mut self,
        request: &Request<'_, T>,
    ) -> Result<Ticket, ClientError> {
        let until = Instant::now() + self.timeout;
        let ticket = self.queue(request)?;
        // No thread writes it later. If there is no server, a later call does.
        while self.is_connecting() && self.turn(until) {}
        Ok(ticket)
    }

    /// Queues a request, and writes it if that is possible at once.
    fn queue<T: TokenWriter>(&mut self, request: &Request<'_, T>) -> Result<Ticket, ClientError> {
        let outgoing = Outgoing::encode(request)?;
        let (operation, kind) = (outgoing.operation, outgoing.kind);
        let (sent, timeout) = (Instant::now(), self.timeout);
        // What has happened meanwhile: the server may have closed an idle connection.
        self.turn(sent);
        while self.unsent.len() >= MAX_UNSENT {
            if !self.turn(sent + timeout) {
                return Err(ClientError::Unsent {
                    operation,
                    endpoint: self.endpoint.clone(),
                    limit: MAX_UNSENT,
                });
            }
        }
        let uid = self.next_uid;
        self.next_uid += 1;
        self.unsent.push_back((uid, outgoing.into_message(uid)));
        let request = InFlight {
            operation,
            kind,
            sent,
            timeout,
        };
        self.in_flight.insert(uid, request);
        self.send_unsent();
        Ok(Ticket { uid, operation })
    }

    /// Waits for the reply to one request, up to the deadline it was sent with.
    ///
    /// # Errors
    /// [`ClientError::Timeout`], [`ClientError::Disconnected`], [`ClientError::Server`] with the server's error text,
    /// [`ClientError::UnknownTicket`]. After any of them the ticket is used up.
    pub fn receive(&mut self, ticket: Ticket) -> Result<ClientReply, ClientError> {
        let uid = ticket.uid;
        loop {
            if let Some(arrival) = self.arrived.remove(&uid) {
                return arrival;
            }
            let Some(request) = self.in_flight.get(&uid) else {
                return Err(ClientError::UnknownTicket { uid });
            };
            let (operation, waited) = (request.operation, request.timeout);
            if !self.turn(request.sent + waited) && !self.arrived.contains_key(&uid) {
                self.forget(ticket);
                return Err(ClientError::Timeout {
                    operation,
                    endpoint: self.endpoint.clone(),
                    waited,
                    no_connection: self.no_connection.clone(),
                });
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
    pub fn call<T: TokenWriter>(
        &mut self,
        request: &Request<'_, T>,
    ) -> Result<ClientReply, ClientError> {
        let ticket = self.send(request)?;
        self.receive(ticket)
    }

    /// Sends a request whose reply is dropped. A failure to send it is ignored: the server may be the reason.
    pub(crate) fn notify<T: TokenWriter>(&mut self, request: &Request<'_, T>) {
        if let Ok(ticket) = self.queue(request) {
            self.forget(ticket);
        }
    }

    /// Looks a prompt up and asks until the result is known: chunks of the longest cached prefix, which are leased
    /// until they are retrieved or freed.
    ///
    /// # Errors
    /// As [`Connection::call`]; [`ClientError::Pending`] if the result stays unknown for the timeout.
    pub fn lookup_hits<T: TokenWriter + Clone>(
        &mut self,
        key: &CacheKey<'_, T>,
    ) -> Result<u64, ClientError> {
        self.lookup_chunks(key, key.end)
    }

    /// Calls [`Connection::lookup_hits`] for a lookup of `limit` chunks: a result of more chunks is an error.
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
                return Err(ClientError::Pending {
                    operation: Operation::Lookup,
                    endpoint: self.endpoint.clone(),
                    waited: started.elapsed(),
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// Waits once for the wire, up to `until`, and moves what can be moved. Returns whether to go on:
    /// it is earlier than `until`, or there may be more to read.
    fn turn(&mut self, until: Instant) -> bool {
        let now = Instant::now();
        if self.wire.is_none() && now >= self.reopen_at {
            self.has_answered = false;
            match Wire::open(&self.address, Heartbeats::Off, now) {
                Ok(wire) => self.wire = Some(wire),
                Err(error) => {
                    self.reopen_at = now + self.backoff.pause();
                    self.no_connection = Some(error.to_string());
                }
            }
        }
        let due = match &self.wire {
            Some(wire) => wire.due(),
            None => Some(self.reopen_at),
        };
        let left = due
            .map_or(until, |due| due.min(until))
            .saturating_duration_since(now);
        if !left.is_zero() {
            let fd = self.wire.as_ref().and_then(Wire::poll_fd);
            let busy_poll = if self.in_flight.is_empty() {
                Duration::ZERO
            } else {
                self.busy_poll
            };
            wait(&mut Vec::from_iter(fd), left, busy_poll);
        }
        let mut messages = Vec::new();
        let now = Instant::now();
        let moved = match &mut self.wire {
            Some(wire) => wire.advance(now, &mut messages),
            None => Ok(false),
        };
        for frames in messages {
            self.has_answered = true;
            self.backoff.reset();
            self.file(frames);
        }
        if self.wire.as_ref().is_some_and(Wire::is_ready) {
            self.no_connection = None;
        } else if let Err(error) = &moved {
            self.no_connection = Some(error.to_string());
        }
        match moved {
            Ok(_) => self.send_unsent(),
            Err(_) => self.lose(now),
        }
        // What has arrived by then counts, however long it takes to read.
        now < until || matches!(moved, Ok(true)) && now < until + READ_GRACE
    }

    fn is_connecting(&self) -> bool {
        self.wire.as_ref().is_some_and(|wire| !wire.is_ready())
    }

    fn send_unsent(&mut self) {
        let Some(wire) = &mut self.wire else {
            return;
        };
        while wire.has_capacity()
            && let Some((_, frames)) = self.unsent.pop_front()
        {
            wire.send(frames);
            wire.write();
        }
    }

    /// Files a message under its request. One that belongs to no request in flight is dropped: mostly a late reply.
    fn file(&mut self, frames: Frames) {
        if let Some(incoming) = Incoming::parse(frames)
            && let Some(request) = self.in_flight.remove(&incoming.uid)
        {
            let uid = incoming.uid;
            let reply = incoming.into_reply(request.operation, request.kind);
            self.arrived.insert(uid, reply);
        }
    }

    /// Drops the wire, and fails what it has taken: the server may have served it, or not.
    fn lose(&mut self, now: Instant) {
        self.wire = None;
        self.reopen_at = if self.has_answered {
            // Mostly a server that closed an idle connection, or was started again.
            now
        } else {
            now + self.backoff.pause()
        };
        let unsent = &self.unsent;
        let is_sent = |uid: &u64| !unsent.iter().any(|(unsent, _)| unsent == uid);
        for (uid, request) in self.in_flight.extract_if(|uid, _| is_sent(uid)) {
            let lost = ClientError::Disconnected {
                operation: request.operation,
                endpoint: self.endpoint.clone(),
            };
            self.arrived.insert(uid, Err(lost));
        }
    }
}

impl Drop for Connection {
    /// Waits for the last requests to be written, up to [`Options::linger`].
    fn drop(&mut self) {
        let until = Instant::now() + self.linger;
        if self.wire.as_ref().is_some_and(Wire::is_forked) {
            return;
        }
        let has_unwritten = |connection: &Self| {
            let wire = connection.wire.as_ref();
            !connection.unsent.is_empty() || wire.is_some_and(Wire::has_output)
        };
        while has_unwritten(self) && self.turn(until) {}
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
