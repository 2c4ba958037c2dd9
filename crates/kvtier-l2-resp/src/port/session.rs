//! One connection of the port: requests in, answers out, in their order.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvtier_memory::socket::{MAX_SLICES, Slice};
use tokio::io::Interest;
use tokio::time::{Instant, sleep, timeout_at};

use super::super::command::Segment;
use super::super::names;
use super::super::socket::is_not_ready;
use super::super::stream::Stream;
use super::requests::{PortRequest, Requests};
use super::{GREETING_TIMEOUT, IDLE_TIMEOUT, MAX_UNSENT, ReadPort, SEND_BYTES, SEND_TIMEOUT};
use kvtier_l2::trailer::{self, Trailer};

/// Bytes received at once.
const RECEIVE_BYTES: usize = 16 << 10;

/// Parts per second that a bounded port sends. Up to this number of connections, none is silent for longer than a second.
const PACED_PARTS: u64 = 128;

/// The refusal of everything else, with what is served.
const READ_ONLY: &str = "-READONLY this port serves PING HELLO AUTH SELECT EXISTS STRLEN GET MGET INFO CLIENT COMMAND QUIT";

const NO_PASSWORD: &str = "-NOAUTH Authentication required.";
const WRONG_PASSWORD: &str = "-WRONGPASS invalid username-password pair or user is disabled.";

/// Only user, as of a server without access lists.
const USER: &[u8] = b"default";

/// Answers on their way. An object in it is leased.
#[derive(Default)]
struct Unsent {
    segments: VecDeque<Segment>,
    /// Bytes of the first segment that are sent, and bytes of all that are not.
    sent: u64,
    bytes: u64,
}

impl Unsent {
    fn push(&mut self, segment: Segment) {
        self.bytes += segment.len();
        match (self.segments.back_mut(), segment) {
            (Some(Segment::Bytes(last)), Segment::Bytes(more)) => last.extend(more),
            (_, segment) => self.segments.push_back(segment),
        }
    }

    fn line(&mut self, line: &str) {
        self.push(Segment::Bytes(format!("{line}\r\n").into_bytes()));
    }

    fn integer(&mut self, number: u64) {
        self.line(&format!(":{number}"));
    }

    fn bulk(&mut self, bytes: &[u8]) {
        self.line(&format!("${}", bytes.len()));
        self.push(Segment::Bytes([bytes, b"\r\n"].concat()));
    }

    /// Drops what was sent; returns the lengths of the objects among it.
    fn advance(&mut self, sent: u64) -> Vec<u64> {
        (self.sent, self.bytes) = (self.sent + sent, self.bytes - sent);
        let mut objects = Vec::new();
        while let Some(first) = self.segments.front()
            && self.sent >= first.len()
        {
            self.sent -= first.len();
            if let Some(Segment::Object(object)) = self.segments.pop_front() {
                objects.push(object.len());
            }
        }
        objects
    }
}

/// A connection.
pub(super) struct PortSession<'a> {
    port: &'a ReadPort,
    id: u64,
    stream: Stream,
    opened: Instant,
    is_admitted: bool,
    /// Whether nothing more is read.
    is_ending: bool,
    requests: Requests,
    /// Keys whose values were asked for and are not answered yet.
    keys: VecDeque<Vec<u8>>,
    unsent: Unsent,
    /// Bytes of the objects in [`unsent`](Self::unsent), which the port counts.
    leased: u64,
}

impl Drop for PortSession<'_> {
    fn drop(&mut self) {
        self.port.leased.fetch_sub(self.leased, Ordering::Relaxed);
    }
}

impl<'a> PortSession<'a> {
    pub(super) fn new(port: &'a ReadPort, stream: Stream, opened: Instant) -> Self {
        Self {
            port,
            id: port.last_id.fetch_add(1, Ordering::Relaxed) + 1,
            stream,
            opened,
            is_admitted: port.options.password.is_empty(),
            is_ending: false,
            requests: Requests::default(),
            keys: VecDeque::new(),
            unsent: Unsent::default(),
            leased: 0,
        }
    }

    /// Serves it to its end.
    ///
    /// # Errors
    /// The system's, or [`io::ErrorKind::TimedOut`] for a client that asks nothing or does not read.
    pub(super) async fn run(mut self) -> io::Result<()> {
        let mut part = vec![0; RECEIVE_BYTES];
        loop {
            let is_all = self.answer().await;
            self.send().await?;
            if self.is_ending {
                return Ok(());
            }
            if is_all {
                match self.receive(&mut part).await? {
                    0 => return Ok(()),
                    received => self.requests.receive(&part[..received]),
                }
            }
        }
    }

    /// Until when to wait for a client: as given, but not beyond its time for a password.
    fn bounded(&self, until: Instant) -> Instant {
        if self.is_admitted {
            until
        } else {
            until.min(self.opened + GREETING_TIMEOUT)
        }
    }

    async fn receive(&mut self, part: &mut [u8]) -> io::Result<usize> {
        let until = self.bounded(Instant::now() + IDLE_TIMEOUT);
        loop {
            // A client may never stop sending.
            tokio::task::yield_now().await;
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match self.stream.receive(part) {
                Err(error) if is_not_ready(&error) => {
                    timeout_at(until, self.stream.ready(Interest::READABLE)).await??;
                }
                received => return received.map_err(io::Error::other),
            }
        }
    }

    /// Sends what there is.
    async fn send(&mut self) -> io::Result<()> {
        let (mut until, mut left) = (Instant::now() + SEND_TIMEOUT, SEND_BYTES);
        while self.unsent.bytes > 0 || self.stream.has_unsent() {
            let mut before = self.unsent.sent;
            let segments = self.unsent.segments.iter().take(MAX_SLICES);
            let slices = segments.map(|it| it.rest(std::mem::take(&mut before)));
            let mut slices: Vec<_> = slices.collect();
            if let Some(rate) = self.port.options.bandwidth {
                shorten(&mut slices, rate / PACED_PARTS);
            }
            let sent = match self.stream.send(&slices) {
                Ok(sent) => sent as u64,
                Err(error) if is_not_ready(&error) => {
                    let until = self.bounded(until);
                    timeout_at(until, self.stream.ready(Interest::WRITABLE)).await??;
                    continue;
                }
                Err(error) => return Err(io::Error::other(error)),
            };
            for bytes in self.unsent.advance(sent) {
                self.port.objects.count_sent(bytes);
                self.port.leased.fetch_sub(bytes, Ordering::Relaxed);
                self.leased -= bytes;
            }
            let pause = self.port.bandwidth.as_ref().map(|it| it.take(sent));
            left = left.saturating_sub(sent);
            match pause.filter(|pause| *pause > Duration::ZERO) {
                Some(pause) => sleep(pause).await,
                None => tokio::task::yield_now().await,
            }
            until += pause.unwrap_or_default();
            if left == 0 {
                (until, left) = (Instant::now() + SEND_TIMEOUT, SEND_BYTES);
            }
        }
        Ok(())
    }

    /// Answers what was asked, until there is enough to be sent. Returns whether that was all.
    async fn answer(&mut self) -> bool {
        while self.unsent.bytes < MAX_UNSENT && !self.is_ending {
            if let Some(key) = self.keys.pop_front() {
                self.value(&key);
                // A checksum takes as long as a copy.
                tokio::task::yield_now().await;
                continue;
            }
            match self.requests.next() {
                Ok(Some(request)) => self.command(&request),
                Ok(None) => return true,
                Err(error) => self.end(&format!("-ERR Protocol error: {}", error.0)),
            }
        }
        false
    }

    /// Ends with an answer.
    fn end(&mut self, line: &str) {
        self.unsent.line(line);
        self.is_ending = true;
    }

    fn command(&mut self, request: &PortRequest) {
        let Some((name, arguments)) = request.arguments.split_first() else {
            return;
        };
        let name = String::from_utf8_lossy(name).to_ascii_uppercase();
        let arguments: Vec<&[u8]> = arguments.iter().map(Vec::as_slice).collect();
        if !self.is_admitted && !matches!(&*name, "AUTH" | "HELLO" | "QUIT") {
            return self.unsent.line(NO_PASSWORD);
        }
        match (&*name, &arguments[..]) {
            _ if request.is_cut => self.unsent.line(READ_ONLY),
            ("PING", []) => self.unsent.line("+PONG"),
            ("PING", [text]) => self.unsent.bulk(text),
            ("AUTH", [password]) => self.authenticate(USER, password),
            ("AUTH", [user, password]) => self.authenticate(user, password),
            ("HELLO", options) => self.hello(options),
            ("CLIENT", [word]) if word.eq_ignore_ascii_case(b"id") => self.unsent.integer(self.id),
            ("SELECT", [b"0"]) | ("CLIENT", [_, ..]) => self.unsent.line("+OK"),
            ("SELECT", [_]) => self
                .unsent
                .line("-ERR DB index is out of range; allowed: 0"),
            ("EXISTS", [_, ..]) => {
                let lengths = arguments.iter().filter_map(|key| self.length(key));
                let found = lengths.count() as u64;
                self.unsent.integer(found);
            }
            ("STRLEN", [key]) => {
                let length = self.length(key).unwrap_or(0);
                self.unsent.integer(length);
            }
            ("GET", [key]) => self.keys.push_back(key.to_vec()),
            ("MGET", [_, ..]) => {
                self.unsent.line(&format!("*{}", arguments.len()));
                self.keys = arguments.iter().map(|key| key.to_vec()).collect();
            }
            ("INFO", _) => self.unsent.bulk(INFO.as_bytes()),
            ("COMMAND", _) => self.unsent.line("*0"),
            ("QUIT", []) => self.end("+OK"),
            (
                "PING" | "AUTH" | "SELECT" | "CLIENT" | "EXISTS" | "STRLEN" | "GET" | "MGET"
                | "QUIT",
                _,
            ) => {
                self.unsent
                    .line(&format!("-ERR wrong number of arguments for {name}"));
            }
            _ => self.unsent.line(READ_ONLY),
        }
    }

    fn authenticate(&mut self, user: &[u8], password: &[u8]) {
        if self.admit(user, password) {
            self.unsent.line("+OK");
        }
    }

    /// Whether a client is admitted by its password. A wrong one ends the connection.
    fn admit(&mut self, user: &[u8], password: &[u8]) -> bool {
        let own = self.port.options.password.as_bytes();
        if own.is_empty() {
            self.unsent
                .line("-ERR AUTH called without any password configured");
            return false;
        }
        // Hashes compare in constant time.
        let is_right = user == USER && blake3::hash(own) == blake3::hash(password);
        self.is_admitted |= is_right;
        if !is_right {
            self.end(WRONG_PASSWORD);
        }
        is_right
    }

    fn hello(&mut self, options: &[&[u8]]) {
        let (versions, mut options) = options.split_at(options.len().min(1));
        if !matches!(versions, [] | [b"2"]) {
            return self
                .unsent
                .line("-NOPROTO unsupported protocol version; allowed: 2");
        }
        while let Some((option, rest)) = options.split_first() {
            options = match (&*option.to_ascii_uppercase(), rest) {
                (b"AUTH", [user, password, rest @ ..]) if self.admit(user, password) => rest,
                (b"AUTH", [_, _, ..]) => return,
                (b"SETNAME", [_, rest @ ..]) => rest,
                _ => return self.unsent.line("-ERR Syntax error in HELLO"),
            };
        }
        if !self.is_admitted {
            return self.unsent.line(NO_PASSWORD);
        }
        let version = env!("CARGO_PKG_VERSION");
        let fields = [
            ("server", "kvtier"),
            ("version", version),
            ("mode", "standalone"),
            ("role", "master"),
        ];
        self.unsent.line("*12");
        for text in fields.into_iter().flat_map(|(name, value)| [name, value]) {
            self.unsent.bulk(text.as_bytes());
        }
        self.unsent.bulk(b"proto");
        self.unsent.integer(2);
        self.unsent.bulk(b"modules");
        self.unsent.line("*0");
    }

    /// Length of the value of a key that is there.
    fn length(&self, key: &[u8]) -> Option<u64> {
        let (key, is_companion) = names::parse(key)?;
        let found = self.port.objects.hold(&key)?;
        Some(if is_companion {
            trailer::LEN as u64
        } else {
            found.object.len
        })
    }

    /// Answers with the value of a key: an object stays leased until it is sent.
    fn value(&mut self, key: &[u8]) {
        let found = names::parse(key);
        let found = found
            .and_then(|(key, is_companion)| Some((self.port.objects.hold(&key)?, is_companion)));
        match found {
            Some((found, false)) if self.port.lease(found.from.len()) => {
                self.leased += found.from.len();
                self.unsent.line(&format!("${}", found.from.len()));
                self.unsent.push(Segment::Object(found.from));
                self.unsent.line("");
            }
            Some((found, true)) if let Ok(sum) = found.from.checksum() => {
                self.unsent.bulk(&Trailer::new(&found.object, sum).encode());
            }
            _ => self.unsent.line("$-1"),
        }
    }
}

/// Cuts what is sent at once behind this many bytes of its first object.
fn shorten(slices: &mut Vec<Slice<'_>>, bytes: u64) {
    let Some(at) = slices.iter().position(|it| matches!(it, Slice::Extent(..))) else {
        return;
    };
    slices.truncate(at + 1);
    if let Some(Slice::Extent(_, extent)) = slices.last_mut() {
        extent.len = extent.len.min(bytes.max(1));
    }
}

/// What clients look for: a server of this protocol that is no replica.
const INFO: &str = concat!(
    "# Server\r\nredis_version:7.0.0\r\nredis_mode:standalone\r\nserver_name:kvtier\r\nkvtier_version:",
    env!("CARGO_PKG_VERSION"),
    "\r\n# Replication\r\nrole:master\r\n",
);
