//! One connection attempt and, if it succeeds, the connection: a non-blocking socket and its ZMTP session.
//!
//! ```text
//! resolving -> connecting (one candidate after the other) -> handshake -> ready -> lost
//! ```
//! A wire that is lost is dropped; its owner opens the next one. It has no thread: its owner waits for [`Wire::poll_fd`]
//! until [`Wire::due`], then calls [`Wire::advance`].

mod address;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use kvtier_proto::zmtp::{Output, Slice, Version, ZmtpLimits, ZmtpMessage, ZmtpSession};
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, read, retry_on_intr};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrAny, SocketFlags,
    SocketType, connect, getpeername, sendmsg, shutdown, socket_with, sockopt,
};

pub(crate) use address::Address;
use address::{Candidates, Resolving};

/// How long one candidate may take, handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Silence after which the server is asked whether it is there, and silence after that until it is considered dead.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(30);
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(30);

/// TCP keepalive: silence before the first probe, time between two probes, and the number of unanswered probes after
/// which the system closes the connection.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(30), Duration::from_secs(10), 3);

/// Bytes of a frame from which on it is not copied to be sent, and is received in place.
const MIN_LARGE_BYTES: usize = 4 << 10;

/// Bytes that may wait to be written before no more messages are taken.
const MAX_WAITING_BYTES: usize = 1 << 20;

/// Buffers handed to the system at once.
const MAX_SLICES: usize = 16;

/// Bytes read before what they complete is handed on.
const TURN_BYTES: usize = 1 << 20;

/// Most unread bytes that are discarded at the end.
const MAX_DRAINED_BYTES: usize = 4 << 20;

/// Default time for which a thread that waits for a reply does not sleep. A wake-up costs more than the rest of a request.
pub(crate) const BUSY_POLL: Duration = Duration::from_micros(50);

/// Bytes of the buffer that small messages are read through.
const SCRATCH_BYTES: usize = 16 << 10;

/// Bounds of what a server may send: the longest value of MessagePack, with number and operation.
const LIMITS: ZmtpLimits = ZmtpLimits {
    frame_bytes: u32::MAX as u64 + 5,
    message_frames: 4,
    message_bytes: u32::MAX as u64 + 4096,
    command_bytes: 4096,
};

/// Frames of a message.
pub(crate) type Frames = Vec<Vec<u8>>;

/// How the server is watched while nothing is received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heartbeats {
    /// The owner always waits for the wire: both sides send PINGs.
    On,
    /// The owner waits only for replies, so it could not answer PINGs; announcing ZMTP 3.0 keeps the server from sending
    /// them.
    Off,
}

#[derive(Debug)]
enum Stage {
    Resolving(Resolving),
    /// Connecting to one candidate; the others are tried if it fails.
    Connecting(OwnedFd, Candidates),
    /// Handshake and traffic.
    Connected(OwnedFd),
    Lost,
}

/// A connection, or an attempt to make one.
#[derive(Debug)]
pub(crate) struct Wire {
    stage: Stage,
    /// The address that is tried, or was last.
    candidate: Option<SocketAddrAny>,
    /// Addresses that failed before it, and why.
    failures: String,
    session: ZmtpSession,
    output: Output,
    scratch: Box<[u8]>,
    heartbeats: Heartbeats,
    /// When the current candidate was first tried.
    begun: Instant,
    /// When something last arrived.
    heard: Instant,
    /// When the server was last asked whether it is there.
    pinged: Option<Instant>,
    /// Nothing can be written any more; what has arrived is still read.
    write_error: Option<Errno>,
    /// The process that made it.
    owner: u32,
}

impl Wire {
    /// Starts to connect.
    ///
    /// # Errors
    /// The system's, if it has failed already.
    pub fn open(address: &Address, heartbeats: Heartbeats, now: Instant) -> std::io::Result<Self> {
        let version = match heartbeats {
            Heartbeats::On => Version::V3_1,
            Heartbeats::Off => Version::V3_0,
        };
        let mut wire = Self {
            stage: Stage::Lost,
            candidate: None,
            failures: String::new(),
            session: ZmtpSession::dealer(version, LIMITS),
            output: Output::default(),
            scratch: vec![0; SCRATCH_BYTES].into(),
            heartbeats,
            begun: now,
            heard: now,
            pinged: None,
            write_error: None,
            owner: std::process::id(),
        };
        wire.stage = match (address.candidate(), address) {
            (Some(candidate), _) => {
                let stage = wire.connect_next(vec![candidate]);
                stage.map_err(|error| wire.explained(error))?
            }
            (None, Address::Tcp { host, port }) => {
                Stage::Resolving(Resolving::start(host.clone(), *port)?)
            }
            (None, Address::Ipc(_)) => return Err(Errno::ADDRNOTAVAIL.into()),
        };
        Ok(wire)
    }

    /// Whether messages can be sent.
    pub fn is_ready(&self) -> bool {
        self.session.is_ready()
    }

    /// Whether it takes another message: the handshake is complete, and little waits to be written.
    pub fn has_capacity(&self) -> bool {
        self.is_ready() && self.write_error.is_none() && self.output.bytes() < MAX_WAITING_BYTES
    }

    /// Whether bytes wait to be written.
    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Queues a message; [`Wire::advance`] writes it.
    pub fn send(&mut self, frames: Frames) {
        let last = frames.len().saturating_sub(1);
        for (number, frame) in frames.into_iter().enumerate() {
            if frame.len() < MIN_LARGE_BYTES {
                self.output.push_frame(&frame, number < last)
            } else {
                self.output.push_pieces(frame.len(), [frame], number < last)
            }
        }
    }

    /// What to wait for.
    pub fn poll_fd(&self) -> Option<PollFd<'_>> {
        match &self.stage {
            Stage::Resolving(resolving) => Some(PollFd::new(&*resolving.wake, PollFlags::IN)),
            Stage::Connecting(socket, _) => Some(PollFd::new(socket, PollFlags::OUT)),
            Stage::Connected(socket) => Some(if self.output.is_empty() {
                PollFd::new(socket, PollFlags::IN)
            } else {
                PollFd::new(socket, PollFlags::IN | PollFlags::OUT)
            }),
            Stage::Lost => None,
        }
    }

    /// Whether this is a fork of the process that made it, which goes on using the socket.
    pub fn is_forked(&self) -> bool {
        std::process::id() != self.owner
    }

    /// When to call [`Wire::advance`] at the latest; none for never.
    pub fn due(&self) -> Option<Instant> {
        match (&self.stage, self.heartbeats) {
            _ if self.write_error.is_some() => Some(self.heard),
            // The system decides how long that takes.
            (Stage::Resolving(_), _) => None,
            _ if !self.is_ready() => Some(self.begun + CONNECT_TIMEOUT),
            (_, Heartbeats::Off) => None,
            (_, Heartbeats::On) => Some(match self.pinged {
                None => self.heard + HEARTBEAT_INTERVAL,
                Some(pinged) => pinged + HEARTBEAT_TIMEOUT,
            }),
        }
    }

    /// Does what is possible without waiting: connects, writes, and appends the messages that have arrived. Returns whether
    /// anything has arrived.
    ///
    /// # Errors
    /// The connection is lost, or there was none; the messages before its end are appended all the same. Until it is ready,
    /// the error names each address that was tried.
    pub fn advance(&mut self, now: Instant, messages: &mut Vec<Frames>) -> std::io::Result<bool> {
        let moved = self.move_bytes(now, messages);
        moved.map_err(|error| self.explained(error))
    }

    fn move_bytes(&mut self, now: Instant, messages: &mut Vec<Frames>) -> std::io::Result<bool> {
        let stage = std::mem::replace(&mut self.stage, Stage::Lost);
        self.stage = self.connect(stage, now)?;
        let Stage::Connected(socket) = &self.stage else {
            return Ok(false);
        };
        let mut received = Vec::new();
        let read = read_turn(socket, &mut self.session, &mut self.scratch, &mut received);
        // A message with more frames than a reply has is none.
        let received = received
            .into_iter()
            .filter(|message| message.discarded_frames == 0);
        messages.extend(received.map(|message| message.frames));
        let has_read = read?;
        if has_read {
            (self.heard, self.pinged) = (now, None);
        } else if let Some(error) = self.write_error {
            return Err(error.into());
        }
        self.check_time(now)?;
        self.write();
        Ok(has_read)
    }

    /// Takes the steps up to a connection that are possible now.
    fn connect(&mut self, stage: Stage, now: Instant) -> std::io::Result<Stage> {
        let is_late = now >= self.begun + CONNECT_TIMEOUT;
        match stage {
            Stage::Resolving(resolving) => match resolving.take() {
                Some(found) => {
                    self.begun = now;
                    self.connect_next(found?)
                }
                None => Ok(Stage::Resolving(resolving)),
            },
            Stage::Connecting(socket, others) => {
                let error = match sockopt::socket_error(&socket)? {
                    Ok(()) if getpeername(&socket).is_ok() => return Ok(Stage::Connected(socket)),
                    Ok(()) if !is_late => return Ok(Stage::Connecting(socket, others)),
                    Ok(()) => Errno::TIMEDOUT,
                    Err(error) => error,
                };
                self.begun = now;
                if others.is_empty() {
                    return Err(error.into());
                }
                self.failures = self.failed(&error) + "; ";
                self.connect_next(others)
            }
            stage => Ok(stage),
        }
    }

    /// Starts to connect to the first candidate that does not fail at once.
    fn connect_next(&mut self, mut candidates: Candidates) -> std::io::Result<Stage> {
        while !candidates.is_empty() {
            let candidate = candidates.remove(0);
            let started = start_connect(&candidate);
            self.candidate = Some(candidate);
            match started {
                Ok(socket) => return Ok(Stage::Connecting(socket, candidates)),
                Err(error) if candidates.is_empty() => return Err(error.into()),
                Err(error) => self.failures = self.failed(&error) + "; ",
            }
        }
        Err(Errno::ADDRNOTAVAIL.into())
    }

    /// The addresses that failed, the current one with this error.
    fn failed(&self, error: &dyn std::fmt::Display) -> String {
        let address = self.candidate.clone();
        match address.and_then(|address| SocketAddr::try_from(address).ok()) {
            Some(address) => format!("{}{address}: {error}", self.failures),
            // A path is the whole endpoint, and a name that was not resolved has no address.
            None => error.to_string(),
        }
    }

    /// An error with the addresses that failed, unless there was a connection.
    fn explained(&self, error: std::io::Error) -> std::io::Error {
        if self.is_ready() {
            error
        } else {
            std::io::Error::new(error.kind(), self.failed(&error))
        }
    }

    /// Ends a handshake that takes too long, and asks a silent server whether it is there.
    fn check_time(&mut self, now: Instant) -> std::io::Result<()> {
        match self.due() {
            Some(due) if now >= due => {}
            _ => return Ok(()),
        }
        if !self.is_ready() || self.pinged.is_some() {
            return Err(Errno::TIMEDOUT.into());
        }
        if self.session.ping() {
            self.pinged = Some(now);
        } else {
            // A server of ZMTP 3.0: TCP keepalive watches it.
            self.heard = now;
        }
        Ok(())
    }

    /// Writes what the socket takes. If that fails, [`Wire::advance`] reports it behind what has arrived.
    pub fn write(&mut self) {
        let Stage::Connected(socket) = &self.stage else {
            return;
        };
        if !self.session.output().is_empty() {
            self.output.push_bytes(self.session.output());
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let mut no_control: [MaybeUninit<u8>; 0] = [];
        let mut no_control = SendAncillaryBuffer::new(&mut no_control);
        let written = self.output.write_with(usize::MAX, |waiting| {
            let mut slices = [IoSlice::new(&[]); MAX_SLICES];
            let mut used = 0;
            for (slice, next) in slices.iter_mut().zip(waiting) {
                *slice = IoSlice::new(match next {
                    Slice::Small(bytes) => bytes,
                    Slice::Piece(frame, from) => &frame[from..],
                });
                used += 1;
            }
            match retry_on_intr(|| sendmsg(socket, &slices[..used], &mut no_control, flags)) {
                Ok(written) => Ok(Some(written)),
                Err(Errno::AGAIN) => Ok(None),
                Err(error) => Err(error),
            }
        });
        if let Err(error) = written {
            self.output = Output::default();
            self.write_error = Some(error);
        }
    }
}

impl Drop for Wire {
    /// Ends the connection in order: the server reads all that was written. Unread bytes would turn the end into a reset.
    fn drop(&mut self) {
        if let Stage::Connected(socket) = &self.stage
            && !self.is_forked()
        {
            let _ = shutdown(socket, Shutdown::Write);
            let mut left = MAX_DRAINED_BYTES;
            while left > 0
                && let Ok(got @ 1..) = read(socket, &mut *self.scratch)
            {
                left = left.saturating_sub(got);
            }
        }
    }
}

/// Reads a turn's worth and appends the messages that are complete; returns whether anything arrived.
fn read_turn(
    socket: &OwnedFd,
    session: &mut ZmtpSession,
    scratch: &mut [u8],
    messages: &mut Vec<ZmtpMessage>,
) -> std::io::Result<bool> {
    let mut taken = 0;
    while taken < TURN_BYTES {
        let (result, wanted, at) = match session
            .body(MIN_LARGE_BYTES)
            .map_err(std::io::Error::other)?
        {
            Some(body) => {
                let (at, wanted) = (body.len(), body.capacity() - body.len());
                (read(socket, spare_capacity(body)), wanted, Some(at))
            }
            None => (read(socket, &mut *scratch), scratch.len(), None),
        };
        let got = match result {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => got,
            Err(Errno::AGAIN) => break,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        taken += got;
        let received = match at {
            None => session.receive_messages(&scratch[..got], messages),
            Some(at) => session.body_messages(at, messages),
        };
        received.map_err(std::io::Error::other)?;
        if got < wanted {
            break;
        }
    }
    Ok(taken > 0)
}

fn start_connect(candidate: &SocketAddrAny) -> Result<OwnedFd, Errno> {
    let family = candidate.address_family();
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    if family != AddressFamily::UNIX {
        let (idle, interval, count) = KEEPALIVE;
        sockopt::set_tcp_nodelay(&socket, true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, idle)?;
        sockopt::set_tcp_keepintvl(&socket, interval)?;
        sockopt::set_tcp_keepcnt(&socket, count)?;
    }
    match connect(&socket, candidate) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// Waits until one of these is ready, or for `timeout`. The first `busy_poll` of it the thread does not sleep.
pub(crate) fn wait(fds: &mut [PollFd<'_>], timeout: Duration, busy_poll: Duration) {
    let begun = Instant::now();
    let busy_poll = busy_poll.min(timeout);
    while begun.elapsed() < busy_poll {
        match poll(fds, Some(&Timespec::default())) {
            Ok(0) => std::thread::yield_now(),
            _ => return,
        }
    }
    let timeout = timeout.saturating_sub(begun.elapsed());
    let timeout = Timespec::try_from(timeout).unwrap_or(Timespec {
        tv_sec: i64::MAX,
        tv_nsec: 0,
    });
    // An interrupted poll is one that ends early.
    let _ = poll(fds, Some(&timeout));
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A wire, the server's end of it once it is accepted, and the time of its beginning.
    fn pair(heartbeats: Heartbeats) -> (Wire, TcpStream, Instant) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let now = Instant::now();
        let wire = Wire::open(&Address::parse(&address).unwrap(), heartbeats, now).unwrap();
        (wire, listener.accept().unwrap().0, now)
    }

    /// Completes the handshake.
    fn shake_hands(wire: &mut Wire, stream: &mut TcpStream, now: Instant) {
        let mut session = ZmtpSession::router(LIMITS);
        let mut messages = Vec::new();
        while !wire.is_ready() {
            stream.write_all(session.output()).unwrap();
            session.output().clear();
            wait(&mut Vec::from_iter(wire.poll_fd()), SECOND, Duration::ZERO);
            wire.advance(now, &mut messages).unwrap();
            stream.set_nonblocking(true).unwrap();
            let mut bytes = [0; 200];
            let got = stream.read(&mut bytes).unwrap_or(0);
            stream.set_nonblocking(false).unwrap();
            let mut bytes = &bytes[..got];
            while !bytes.is_empty() {
                session.receive(&mut bytes).unwrap();
            }
        }
    }

    #[test]
    fn silent_server_is_asked_and_then_lost() {
        let (mut wire, mut stream, now) = pair(Heartbeats::On);
        shake_hands(&mut wire, &mut stream, now);
        let mut messages = Vec::new();
        let asked = now + HEARTBEAT_INTERVAL;
        assert_eq!(wire.due(), Some(asked));
        wire.advance(asked, &mut messages).unwrap();
        let mut sent = Vec::new();
        while !sent.ends_with(b"\x04PING\x00\x00") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            sent.extend(byte);
        }
        // An answer is a sign of life.
        stream.write_all(b"\x04\x05\x04PONG").unwrap();
        wait(&mut Vec::from_iter(wire.poll_fd()), SECOND, Duration::ZERO);
        wire.advance(asked, &mut messages).unwrap();
        assert_eq!(wire.due(), Some(asked + HEARTBEAT_INTERVAL));
        let asked = asked + HEARTBEAT_INTERVAL;
        wire.advance(asked, &mut messages).unwrap();
        wire.advance(asked + HEARTBEAT_TIMEOUT - SECOND, &mut messages)
            .unwrap();
        assert!(
            wire.advance(asked + HEARTBEAT_TIMEOUT, &mut messages)
                .is_err()
        );
        assert!(messages.is_empty());
    }

    #[test]
    fn wire_without_heartbeats_is_kept_however_silent() {
        let (mut wire, mut stream, now) = pair(Heartbeats::Off);
        shake_hands(&mut wire, &mut stream, now);
        assert_eq!(wire.due(), None);
        wire.advance(now + 1000 * HEARTBEAT_TIMEOUT, &mut Vec::new())
            .unwrap();
    }

    #[test]
    fn server_without_a_handshake_is_lost_in_time() {
        let (mut wire, _stream, now) = pair(Heartbeats::On);
        let mut messages = Vec::new();
        wire.advance(now + CONNECT_TIMEOUT - SECOND, &mut messages)
            .unwrap();
        assert_eq!(wire.due(), Some(now + CONNECT_TIMEOUT));
        assert!(wire.advance(now + CONNECT_TIMEOUT, &mut messages).is_err());
    }

    #[test]
    fn peer_that_speaks_no_zmtp_is_lost_at_once() {
        let (mut wire, mut stream, now) = pair(Heartbeats::On);
        let address = stream.local_addr().unwrap();
        stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .unwrap();
        let mut messages = Vec::new();
        let error = loop {
            wait(&mut Vec::from_iter(wire.poll_fd()), SECOND, Duration::ZERO);
            if let Err(error) = wire.advance(now, &mut messages) {
                break error;
            }
        };
        let told = format!("{address}: the peer does not speak ZMTP 3");
        assert_eq!(error.to_string(), told);
    }

    #[test]
    fn busy_poll_lasts_no_longer_than_the_wait() {
        let (wire, ..) = pair(Heartbeats::Off);
        let mut connected = Vec::from_iter(wire.poll_fd());
        wait(&mut connected, SECOND, Duration::MAX);
        assert!(!connected[0].revents().is_empty());
        wait(&mut [], Duration::from_millis(1), Duration::MAX);
    }

    #[test]
    fn next_candidate_is_tried_when_one_fails() {
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let candidates = [closed.unwrap(), listener.local_addr().unwrap()];
        let (mut wire, _, now) = pair(Heartbeats::On);
        let candidates = candidates.map(SocketAddrAny::from);
        wire.stage = wire.connect_next(candidates.into()).unwrap();
        while !matches!(wire.stage, Stage::Connected(_)) {
            wait(&mut Vec::from_iter(wire.poll_fd()), SECOND, Duration::ZERO);
            wire.advance(now, &mut Vec::new()).unwrap();
        }
        listener.accept().unwrap();
    }

    #[test]
    fn failure_names_each_address_that_was_tried() {
        let closed = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
        let [one, two] = [closed(), closed()].map(Result::unwrap);
        let (mut wire, _, now) = pair(Heartbeats::On);
        let candidates = [one, two].map(SocketAddrAny::from);
        wire.stage = wire.connect_next(candidates.into()).unwrap();
        let error = loop {
            wait(&mut Vec::from_iter(wire.poll_fd()), SECOND, Duration::ZERO);
            if let Err(error) = wire.advance(now, &mut Vec::new()) {
                break error.to_string();
            }
        };
        let refused = Errno::CONNREFUSED;
        assert_eq!(error, format!("{one}: {refused}; {two}: {refused}"));
    }
}
