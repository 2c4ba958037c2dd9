//! One connection: its socket, its ZMTP session, and what is on the way to its client.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use kvtier_memory::socket::SocketError;
use kvtier_proto::zmtp::{Error, ZmtpLimits, ZmtpMessage, ZmtpSession};
use rustix::io::{Errno, ioctl_fionread, read};
use rustix::net::{Shutdown, shutdown};

use super::allowance::Allowance;
use super::client::Client;
use super::limits::MAX_SMALL_OUTPUT;
use super::outbox::Outgoing;
use super::output::{Output, oldest, push_reply, write_to};
use super::poll::Interest;

/// How long a new connection has for the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// After how long a silence a client is asked whether it is there, and after how long it is considered gone.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(30);
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a client may take none of the bytes that wait for it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a client may take to read a large reply, whose chunks stay leased: after that time clients of LMCache ask no more.
const LARGE_REPLY_TIMEOUT: Duration = Duration::from_secs(300);

/// How long requests wait for one that shows the generation of their client: a worker pings every 10 s and times
/// out after 300 s.
const UNDECIDED_TIMEOUT: Duration = Duration::from_secs(60);

/// Added to the time for which bytes have been held, so that of new ones the most count.
const LEAST_HELD: Duration = Duration::from_secs(1);

/// Bytes of a frame still to come from which on they are read into the frame itself, not through the shared buffer.
const MIN_IN_PLACE_BYTES: usize = 4 << 10;

/// Bytes read from one connection before others get their turn.
pub const TURN_BYTES: usize = 256 << 10;

/// Bytes of the buffer that all connections read small messages through.
pub const SCRATCH_BYTES: usize = 8 << 10;

/// Messages and stray frames of one read above which a connection reads fewer bytes at a time, down to [`MIN_READ_BYTES`], so
/// that a flood of tiny ones delays other connections by microseconds.
const MANY_FRAMES: u64 = 16;
const MIN_READ_BYTES: usize = 128;

/// Bytes of a new connection's first read: the handshake and a request.
const FIRST_READ_BYTES: usize = 512;

/// Stray frames per second beyond which a connection is read in turns. Heartbeats are a few per second.
const STRAY_FRAMES_PER_SECOND: u32 = 256;

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub enum Closed {
    /// The client closed it, or the system did.
    #[error("the client closed it")]
    ByClient,
    /// The system's error.
    #[error("{0}")]
    Failed(#[from] Errno),
    /// A reply could not be written.
    #[error("{0}")]
    Unwritten(#[from] SocketError),
    /// The client broke the protocol or a bound.
    #[error(transparent)]
    Protocol(#[from] Error),
    /// No handshake in time.
    #[error("no handshake within {} s", HANDSHAKE_TIMEOUT.as_secs())]
    Handshake,
    /// No sign of life.
    #[error("the client is silent")]
    Silent,
    /// Replies wait and the client does not read.
    #[error("the client does not read its replies")]
    Unread,
    /// Another connection needs its place.
    #[error("it does not use the cache, and another client needs its place")]
    Displaced,
    /// All connections together hold too much.
    #[error(
        "incomplete messages and unread replies of all clients need too much memory, and its own the most for its time"
    )]
    Memory,
}

/// The beginning of a large message, and the number of its connection.
pub type Large = (Instant, u64);

/// A connection.
pub struct Connection {
    socket: OwnedFd,
    session: ZmtpSession,
    output: Output,
    /// From its first request on.
    pub client: Option<Client>,
    /// Bytes read at a time.
    read_bytes: usize,
    /// Allowance of stray frames.
    pub strays: Allowance,
    /// Place among the connections with large messages, when it was last counted.
    pub large: Option<Large>,
    /// What its socket is watched for.
    pub interest: Interest,
    /// Whether its output is about to be written.
    pub is_queued: bool,
    /// Part of the bytes that all connections hold, when it was last counted.
    pub counted_bytes: usize,
    /// When it is to be ticked next.
    pub next_tick: Instant,
    opened: Instant,
    /// When something last arrived.
    heard: Instant,
    /// When it was last asked whether it is there.
    pinged: Instant,
    /// Since when a message is incomplete.
    partial_since: Option<Instant>,
    /// Since when bytes wait to be written.
    output_since: Option<Instant>,
    /// Since when the client has read nothing of them.
    unread_since: Option<Instant>,
}

impl Connection {
    /// A connection that has just been accepted; our greeting waits to be written.
    pub fn new(socket: OwnedFd, limits: ZmtpLimits, now: Instant) -> Self {
        Self {
            socket,
            session: ZmtpSession::router(limits),
            output: Output::default(),
            client: None,
            read_bytes: FIRST_READ_BYTES,
            strays: Allowance::new(STRAY_FRAMES_PER_SECOND, now),
            large: None,
            interest: Interest::READ,
            is_queued: false,
            counted_bytes: 0,
            next_tick: now + HANDSHAKE_TIMEOUT,
            opened: now,
            heard: now,
            pinged: now,
            partial_since: None,
            output_since: None,
            unread_since: None,
        }
    }

    /// Reads what has arrived, at most `turn_bytes` (and a buffer's worth), and appends the messages that are complete.
    /// Returns the number of bytes.
    ///
    /// # Errors
    /// The connection has to be closed. The messages before its end are appended all the same.
    pub fn read(
        &mut self,
        scratch: &mut [u8],
        messages: &mut Vec<ZmtpMessage>,
        turn_bytes: usize,
        now: Instant,
    ) -> Result<usize, Closed> {
        let before = messages.len();
        let strays_before = self.session.stray_frames();
        let scratch = &mut scratch[..self.read_bytes];
        let mut taken = 0;
        loop {
            let (result, wanted, at) = match self.session.body(MIN_IN_PLACE_BYTES)? {
                Some(body) => {
                    let at = body.len();
                    let wanted = (body.capacity() - at).min(turn_bytes - taken);
                    body.resize(at + wanted, 0);
                    let result = read(&self.socket, &mut body[at..]);
                    body.truncate(at + result.unwrap_or(0));
                    (result, wanted, Some(at))
                }
                None if taken == 0 => (read(&self.socket, &mut *scratch), scratch.len(), None),
                None => break,
            };
            let got = match result {
                Ok(0) => return Err(Closed::ByClient),
                Ok(got) => got,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            match at {
                None => self.session.receive_messages(&scratch[..got], messages)?,
                Some(at) => self.session.body_messages(at, messages)?,
            }
            taken += got;
            if got < wanted || taken >= turn_bytes {
                break;
            }
        }
        if taken > 0 {
            self.heard = now;
        }
        let strays = self.session.stray_frames() - strays_before;
        self.strays.count(strays, now);
        self.read_bytes = match (messages.len() - before) as u64 + strays {
            MANY_FRAMES.. => (self.read_bytes / 2).max(MIN_READ_BYTES),
            _ => (self.read_bytes * 2).min(SCRATCH_BYTES),
        };
        self.partial_since = if !self.session.is_amid_message() {
            None
        } else if messages.len() > before {
            Some(now)
        } else {
            self.partial_since.or(Some(now))
        };
        Ok(taken)
    }

    /// Does not read it until its turn, and then only a little.
    pub fn park(&mut self) {
        self.read_bytes = MIN_READ_BYTES;
    }

    /// Queues a reply.
    pub fn push(&mut self, reply: Outgoing, now: Instant) {
        push_reply(&mut self.output, reply, now);
    }

    /// Writes a turn's worth of what waits.
    ///
    /// # Errors
    /// The connection has to be closed.
    pub fn write(&mut self, now: Instant) -> Result<(), Closed> {
        if !self.session.output().is_empty() {
            self.output.push_bytes(self.session.output());
        }
        let written = write_to(&mut self.output, &self.socket)?;
        self.output_since = if self.output.is_empty() {
            None
        } else {
            self.output_since.or(Some(now))
        };
        self.unread_since = if self.output.is_empty() {
            None
        } else if written > 0 {
            Some(now)
        } else {
            self.unread_since.or(Some(now))
        };
        if self.output.small_bytes() > MAX_SMALL_OUTPUT {
            Err(Closed::Unread)
        } else {
            Ok(())
        }
    }

    /// Whether bytes wait to be written.
    pub fn has_output(&mut self) -> bool {
        !self.output.is_empty() || !self.session.output().is_empty()
    }

    /// Does what time demands. What has arrived and is not read yet counts as a sign of life, and what the client has
    /// read while nothing was written for it as reading.
    ///
    /// # Errors
    /// The connection has to be closed.
    pub fn tick(&mut self, now: Instant) -> Result<(), Closed> {
        if !self.session.is_ready() {
            return if now.duration_since(self.opened) < HANDSHAKE_TIMEOUT {
                Ok(())
            } else {
                Err(Closed::Handshake)
            };
        }
        let silent = self.silence(now);
        let is_over = self.session.ttl().is_some_and(|ttl| silent >= ttl);
        if is_over && !self.has_input() {
            return Err(Closed::Silent);
        }
        if self.is_unread(now) {
            self.write(now)?;
            if self.is_unread(now) {
                return Err(Closed::Unread);
            }
        }
        if silent < HEARTBEAT_INTERVAL || now.duration_since(self.pinged) < HEARTBEAT_INTERVAL {
            return Ok(());
        }
        let was_asked = self.pinged > self.heard;
        self.pinged = now;
        if self.session.ping() && silent >= HEARTBEAT_TIMEOUT && was_asked && !self.has_input() {
            return Err(Closed::Silent);
        }
        Ok(())
    }

    /// When [`Connection::tick`] has something to do next, unless something happens before. It is never later than the
    /// next heartbeat, so that of what happens only a TTL can bring it forward.
    pub fn due(&self) -> Instant {
        if !self.session.is_ready() {
            return self.opened + HANDSHAKE_TIMEOUT;
        }
        let heartbeat = self.heard.max(self.pinged) + HEARTBEAT_INTERVAL;
        let silent = self.session.ttl().map(|ttl| self.heard + ttl);
        let unread = self.unread_since.map(|since| since + WRITE_TIMEOUT);
        let undecided = self
            .undecided_since()
            .map(|since| since + UNDECIDED_TIMEOUT);
        let large = oldest(&self.output).map(|queued| queued + LARGE_REPLY_TIMEOUT);
        let others = [silent, unread, undecided, large].into_iter().flatten();
        others.fold(heartbeat, Instant::min)
    }

    /// Whether requests have waited for the generation of their client for too long.
    pub fn is_undecided(&self, now: Instant) -> bool {
        self.undecided_since()
            .is_some_and(|since| now.duration_since(since) >= UNDECIDED_TIMEOUT)
    }

    fn undecided_since(&self) -> Option<Instant> {
        let undecided = self.client.as_ref()?.undecided.as_ref()?;
        Some(undecided.since)
    }

    fn is_unread(&self, now: Instant) -> bool {
        let is_over = |since: Option<Instant>, timeout| {
            since.is_some_and(|since| now.duration_since(since) >= timeout)
        };
        is_over(self.unread_since, WRITE_TIMEOUT)
            || is_over(oldest(&self.output), LARGE_REPLY_TIMEOUT)
    }

    /// Time since something was last read.
    pub fn silence(&self, now: Instant) -> Duration {
        now.duration_since(self.heard)
    }

    /// Whether something has arrived that is not read yet.
    pub fn has_input(&self) -> bool {
        ioctl_fionread(&self.socket).is_ok_and(|bytes| bytes > 0)
    }

    /// Whether a message has begun to arrive and is not complete.
    pub fn is_amid_message(&self) -> bool {
        self.session.is_amid_message()
    }

    /// Whether no request of its client waits or runs in a lane.
    pub fn is_idle(&self) -> bool {
        self.client.as_ref().is_none_or(Client::is_idle)
    }

    /// Whether nothing waits to be written and no message is incomplete.
    pub fn is_between_messages(&mut self) -> bool {
        !self.has_output() && !self.is_amid_message()
    }

    /// When its message began to arrive, if that is larger than a turn by now.
    pub fn large_since(&self) -> Option<Instant> {
        let is_large = self.session.held_bytes() > TURN_BYTES;
        self.partial_since.filter(|_| is_large)
    }

    /// Bytes it holds without being charged for them.
    pub fn held_bytes(&self) -> usize {
        self.session.held_bytes() + self.output.small_bytes()
    }

    /// What those bytes cost the other connections: bytes times the time for which they have been held, however slowly
    /// they move on. A message counts from its beginning, replies from when the client fell behind.
    pub fn held_cost(&self, now: Instant) -> u128 {
        let cost = |bytes: usize, since: Option<Instant>| {
            let held = since.map_or(Duration::ZERO, |since| now.duration_since(since));
            bytes as u128 * (held + LEAST_HELD).as_millis()
        };
        cost(self.session.held_bytes(), self.partial_since)
            + cost(self.output.small_bytes(), self.output_since)
    }

    /// Ends it in order: the client reads all that was written, then the end. Bytes that it has sent are discarded, since
    /// they would turn the end into a reset.
    pub fn finish(self, scratch: &mut [u8]) {
        // A connection that has ended already needs neither.
        let _ = shutdown(&self.socket, Shutdown::Write);
        let _ = read(&self.socket, scratch);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
