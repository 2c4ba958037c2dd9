//! An established connection: commands out, replies in.
//!
//! Many commands are in flight at once. Their replies come in the same order, and each is read to its end, so a reply
//! belongs to the command that is the oldest. Where that is in doubt (a malformed reply, one without a command, no reply in
//! time), the connection ends, and everything that was in flight on it fails.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use kvtier_memory::socket::{MAX_SLICES, SocketError};
use tokio::io::Interest;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use super::command::{Expected, RespReply, Segment};
use super::connection::{ConnectionCall, ConnectionState};
use super::endpoint::Endpoint;
use super::errors::Fatal;
use super::reply::{self, Head};
use super::stream::Stream;
use kvtier_l2::{Buffer, ErrorKind, L2Error};

/// Calls in flight, bytes of objects that are still to come, and bytes to be sent at most, so that none of them is in the way of
/// the others for long. A single call may exceed them.
///
/// A server copies the replies to all commands that it has read before it sends the first: with several large ones a connection
/// its memory and the processor's cache are full of copies, and loads take a fifth longer. So the next large object is asked for
/// when the last part of the one before is on its way, which is more than a network has in flight per connection.
const MAX_CALLS: usize = 64;
const MAX_EXPECTED_BYTES: u64 = 256 << 10;
const MAX_UNSENT_BYTES: u64 = 4 << 20;

/// Bytes read at once, but for bodies of objects.
const READ_BYTES: usize = 16 << 10;

/// Bytes of replies that are kept for one call, objects apart.
const MAX_KEPT_BYTES: usize = 4 * reply::MAX_VALUE;

/// Bytes of a call for which it may take [`RespOptions::request_timeout`](super::RespOptions) again.
const TIMEOUT_BYTES: u64 = 4 << 20;

/// The same of a peer, whose bandwidth may be bounded: four connections to it are in time at 1 MiB per second.
const PEER_TIMEOUT_BYTES: u64 = 256 << 10;

/// Bytes sent or received before others of the runtime get their turn.
const TURN_BYTES: usize = 1 << 20;

/// A call that was sent, or is being sent.
struct PendingCommand {
    expected: VecDeque<Expected>,
    replies: Vec<RespReply>,
    answer: oneshot::Sender<Result<Vec<RespReply>, L2Error>>,
    /// Part of the call in [`State::load`].
    size: u64,
    expected_bytes: u64,
    /// [`Pipe::sent_bytes`] once it is sent.
    sent_at: u64,
    /// Bytes of replies that are kept.
    kept_bytes: usize,
}

/// The body that is being read.
enum Body {
    /// Body of the right length: `done` bytes are in the buffer.
    Object { done: u64 },
    /// Body of another length: this much is left of it and its end.
    Discarded { left: u64 },
}

/// An established connection.
pub(super) struct Pipe<'a> {
    endpoint: &'a Endpoint,
    state: &'a ConnectionState,
    stream: Stream,
    unsent: VecDeque<Segment>,
    /// Bytes of the first segment that are sent, of all that are not, and of all that were.
    sent: u64,
    unsent_bytes: u64,
    sent_bytes: u64,
    pending: VecDeque<PendingCommand>,
    /// Bytes expected of the objects whose replies have not ended.
    expected_bytes: u64,
    received: Vec<u8>,
    /// How far the first reply of those was read.
    progress: reply::Progress,
    body: Option<Body>,
    /// [`Endpoint::demotions`] at its beginning.
    demotions: u64,
    /// Why the connection ends once the reply before is filed.
    ending: Option<L2Error>,
    /// Why it takes no more calls, and ends once those that it has are answered.
    fatal: Option<L2Error>,
    /// When something was last received, or sent of the oldest call, or that came.
    moved: Instant,
    /// When the oldest call became that.
    oldest: Instant,
}

impl<'a> Pipe<'a> {
    pub(super) fn new(endpoint: &'a Endpoint, state: &'a ConnectionState, stream: Stream) -> Self {
        let now = Instant::now();
        Self {
            endpoint,
            state,
            stream,
            unsent: VecDeque::new(),
            sent: 0,
            unsent_bytes: 0,
            sent_bytes: 0,
            pending: VecDeque::new(),
            expected_bytes: 0,
            received: Vec::new(),
            progress: reply::Progress::default(),
            body: None,
            demotions: endpoint.demotions.load(Ordering::Relaxed),
            ending: None,
            fatal: None,
            moved: now,
            oldest: now,
        }
    }

    /// Serves calls until there can be no more, or the connection is lost.
    pub(super) async fn serve(
        &mut self,
        queued: &mut VecDeque<ConnectionCall>,
        calls: &mut mpsc::UnboundedReceiver<ConnectionCall>,
    ) -> Result<(), L2Error> {
        let mut is_open = true;
        loop {
            while self.has_capacity()
                && let Some(call) = queued.pop_front()
            {
                self.take(call);
            }
            while is_open && queued.is_empty() && self.has_capacity() {
                match calls.try_recv() {
                    Ok(call) => self.take(call),
                    Err(mpsc::error::TryRecvError::Empty) => break,
                    Err(mpsc::error::TryRecvError::Disconnected) => is_open = false,
                }
            }
            if !is_open && queued.is_empty() && self.pending.is_empty() {
                return Ok(());
            }
            self.check_time()?;
            if self.fatal.is_none()
                && self.demotions != self.endpoint.demotions.load(Ordering::Relaxed)
            {
                let what = &"the server has become a replica";
                self.fatal = Some(self.endpoint.error(ErrorKind::Unavailable, what));
            }
            if self.pending.is_empty()
                && let Some(error) = self.fatal.take()
            {
                return Err(error);
            }
            // What is sent behind the oldest call is no sign of life.
            let is_sending = self
                .pending
                .front()
                .is_some_and(|it| self.sent_bytes < it.sent_at);
            let has_sent = self.send()?;
            let has_received = self.receive()?;
            if has_received || has_sent && is_sending {
                self.moved = Instant::now();
            }
            if has_sent || has_received {
                // Others of the runtime get their turn.
                tokio::task::yield_now().await;
                continue;
            }
            let interest = if self.unsent.is_empty() && !self.stream.has_unsent() {
                Interest::READABLE
            } else {
                Interest::READABLE | Interest::WRITABLE
            };
            tokio::select! {
                ready = self.stream.ready(interest) => { ready.map_err(|error| self.lost(&error))?; }
                call = calls.recv(), if is_open && queued.is_empty() && self.has_capacity() => match call {
                    Some(call) => self.take(call),
                    None => is_open = false,
                },
                () = sleep_until(self.due()), if !self.pending.is_empty() => {}
            }
        }
    }

    fn has_capacity(&self) -> bool {
        self.fatal.is_none()
            && self.pending.len() < MAX_CALLS
            && self.unsent_bytes < MAX_UNSENT_BYTES
            && self.expected_bytes - self.received_bytes() < MAX_EXPECTED_BYTES
    }

    /// Bytes of the object that is being received.
    fn received_bytes(&self) -> u64 {
        match self.body {
            Some(Body::Object { done }) => done,
            Some(Body::Discarded { .. }) | None => 0,
        }
    }

    fn take(&mut self, call: ConnectionCall) {
        let size = call.size();
        let ConnectionCall { commands, answer } = call;
        if answer.is_closed() {
            // The caller waits no longer, and nothing is sent.
            return self.state.end(size, answer, Ok(Vec::new()));
        }
        let (bytes, expected_bytes) = (commands.len(), commands.expected_bytes());
        if self.pending.is_empty() {
            (self.moved, self.oldest) = (Instant::now(), Instant::now());
        }
        self.unsent_bytes += bytes;
        self.expected_bytes += expected_bytes;
        self.unsent.extend(commands.segments);
        self.pending.push_back(PendingCommand {
            expected: commands.expected.into(),
            replies: Vec::new(),
            answer,
            size,
            expected_bytes,
            sent_at: self.sent_bytes + self.unsent_bytes,
            kept_bytes: 0,
        });
    }

    /// When the connection is lost unless something moves, or the oldest call is answered.
    fn due(&self) -> Instant {
        let size = self.pending.front().map_or(0, |oldest| oldest.size);
        let part = if self.endpoint.options.read_only {
            PEER_TIMEOUT_BYTES
        } else {
            TIMEOUT_BYTES
        };
        let parts = 1 + u32::try_from(size / part).unwrap_or(u32::MAX - 1);
        let whole = self.oldest + self.endpoint.options.request_timeout.saturating_mul(parts);
        whole.min(self.moved + self.endpoint.options.request_timeout)
    }

    fn check_time(&self) -> Result<(), L2Error> {
        if !self.pending.is_empty() && Instant::now() >= self.due() {
            Err(L2Error::new(
                ErrorKind::Deadline,
                format!("{}: no answer in time", self.endpoint.name()),
            ))
        } else {
            Ok(())
        }
    }

    /// Sends what the socket takes; returns whether it took anything.
    fn send(&mut self) -> Result<bool, L2Error> {
        let mut turn = 0;
        if self.unsent.is_empty() && self.stream.has_unsent() {
            let sent = self.stream.send(&[]);
            return Ok(self.outcome(sent)?.is_some());
        }
        while !self.unsent.is_empty() && turn < TURN_BYTES {
            let slices: Vec<_> = self
                .unsent
                .iter()
                .take(MAX_SLICES)
                .enumerate()
                .map(|(at, segment)| segment.rest(if at == 0 { self.sent } else { 0 }))
                .collect();
            let sent = self.stream.send(&slices);
            let Some(sent) = self.outcome(sent)? else {
                break;
            };
            turn += sent;
            self.unsent_bytes -= sent as u64;
            self.sent_bytes += sent as u64;
            self.sent += sent as u64;
            while let Some(first) = self.unsent.front()
                && self.sent >= first.len()
            {
                self.sent -= first.len();
                self.unsent.pop_front();
            }
        }
        Ok(turn > 0)
    }

    /// Receives what has arrived; returns whether anything had.
    fn receive(&mut self) -> Result<bool, L2Error> {
        let mut turn = 0;
        loop {
            self.read_replies()?;
            if turn >= TURN_BYTES {
                return Ok(true);
            }
            let got = match (&self.body, self.oldest_object()) {
                (Some(Body::Object { done }), Some(to))
                    if self.received.is_empty() && *done < to.len() =>
                {
                    let (to, done) = (to.clone(), *done);
                    let got = self.stream.receive_object(&to, done);
                    let got = self.outcome(got)?;
                    if let (Some(Body::Object { done }), Some(got)) = (&mut self.body, got) {
                        *done += got as u64;
                    }
                    got
                }
                _ => self.receive_bytes()?,
            };
            match got {
                Some(0) => {
                    let message = format!("{}: it has closed the connection", self.endpoint.name());
                    return Err(L2Error::new(ErrorKind::Unavailable, message));
                }
                Some(got) => turn += got,
                None => return Ok(turn > 0),
            }
        }
    }

    fn receive_bytes(&mut self) -> Result<Option<usize>, L2Error> {
        let before = self.received.len();
        self.received.try_reserve(READ_BYTES).map_err(|_| {
            let message = format!("no memory for a reply of {before} bytes so far");
            L2Error::new(ErrorKind::Memory, message)
        })?;
        self.received.resize(before + READ_BYTES, 0);
        let space = &mut self.received[before..];
        let got = self.stream.receive(space);
        let got = self.outcome(got);
        let kept = got.as_ref().ok().copied().flatten().unwrap_or(0);
        self.received.truncate(before + kept);
        got
    }

    /// The number of bytes; none if the socket is not ready.
    fn outcome(&self, moved: Result<usize, SocketError>) -> Result<Option<usize>, L2Error> {
        match moved {
            Ok(moved) => Ok(Some(moved)),
            Err(SocketError::System(error))
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted
                ) =>
            {
                Ok(None)
            }
            Err(SocketError::System(error)) => Err(self.lost(&error)),
            Err(error) => Err(L2Error::new(ErrorKind::Memory, error.to_string())),
        }
    }

    fn lost(&self, error: &std::io::Error) -> L2Error {
        let message = format!("{}: {error}", self.endpoint.name());
        L2Error::new(ErrorKind::Unavailable, message)
    }

    /// The buffer of the object that is expected next.
    fn oldest_object(&self) -> Option<&Buffer> {
        match self.pending.front()?.expected.front()? {
            Expected::Object(to) => Some(to),
            Expected::Value | Expected::Asking => None,
        }
    }

    /// Takes the replies that have arrived.
    fn read_replies(&mut self) -> Result<(), L2Error> {
        let mut at = 0;
        let done = loop {
            match self.next_reply(at) {
                Ok(Some((used, reply))) => {
                    at += used;
                    if let Some(reply) = reply
                        && let Err(error) = self.file(reply, used)
                    {
                        break Err(error);
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.received.drain(..at.min(self.received.len()));
        done
    }

    /// Reads from byte `at` of what was received on: the bytes used, and the reply, if it is complete. None if more has to
    /// arrive.
    fn next_reply(&mut self, at: usize) -> Result<Option<(usize, Option<RespReply>)>, L2Error> {
        let bytes = &self.received[at..];
        let malformed = |error: reply::Malformed| {
            let message = format!("{}: {error}", self.endpoint.name());
            L2Error::new(ErrorKind::Unavailable, message)
        };
        let Some(expected) = self
            .pending
            .front()
            .and_then(|oldest| oldest.expected.front())
        else {
            return if bytes.is_empty() {
                Ok(None)
            } else {
                Err(malformed(reply::Malformed("a reply without a command")))
            };
        };
        let to = match expected {
            Expected::Value | Expected::Asking => {
                let value = self.progress.value(bytes).map_err(malformed)?;
                return Ok(value.map(|(value, used)| (used, Some(RespReply::Value(value)))));
            }
            Expected::Object(to) => to,
        };
        match &mut self.body {
            Some(Body::Object { done }) if *done < to.len() => {
                let used = bytes.len().min((to.len() - *done) as usize);
                if used == 0 {
                    return Ok(None);
                }
                to.write(*done, &bytes[..used])?;
                *done += used as u64;
                Ok(Some((used, None)))
            }
            Some(Body::Object { .. }) => match bytes.first_chunk() {
                Some(b"\r\n") => {
                    self.body = None;
                    Ok(Some((2, Some(RespReply::Object(Ok(()))))))
                }
                Some(_) => Err(malformed(reply::Malformed("a body of another length"))),
                None => Ok(None),
            },
            Some(Body::Discarded { left }) => {
                let used = (bytes.len() as u64).min(*left);
                *left -= used;
                if *left > 0 {
                    return Ok((used > 0).then_some((used as usize, None)));
                }
                self.body = None;
                let error = L2Error::new(ErrorKind::Corrupt, "the value has another length");
                Ok(Some((used as usize, Some(RespReply::Object(Err(error))))))
            }
            None => {
                let Some((head, used)) = reply::head(bytes).map_err(malformed)? else {
                    return Ok(None);
                };
                let not_found = || L2Error::new(ErrorKind::NotFound, "there is no such key");
                let reply = match head {
                    Head::Bulk(Some(length)) if length == to.len() => {
                        self.body = Some(Body::Object { done: 0 });
                        None
                    }
                    // What is much longer takes longer to read than another connection.
                    Head::Bulk(Some(length)) if length / 2 <= to.len().max(READ_BYTES as u64) => {
                        self.body = Some(Body::Discarded { left: length + 2 });
                        None
                    }
                    Head::Bulk(Some(_)) => {
                        self.ending =
                            Some(malformed(reply::Malformed("a value that is much longer")));
                        let error = L2Error::new(ErrorKind::Corrupt, "the value is much longer");
                        Some(RespReply::Object(Err(error)))
                    }
                    Head::Bulk(None) => Some(RespReply::Object(Err(not_found()))),
                    Head::Error(text) => Some(RespReply::Value(reply::Value::Error(text))),
                    _ => return Err(malformed(reply::Malformed("another type than a body"))),
                };
                Ok(Some((used, reply)))
            }
        }
    }

    /// Files a reply of `bytes` under the oldest call.
    fn file(&mut self, reply: RespReply, bytes: usize) -> Result<(), L2Error> {
        let fatal = match &reply {
            RespReply::Value(reply::Value::Error(text)) => Fatal::of(self.endpoint, text),
            _ => None,
        };
        let Some(oldest) = self.pending.front_mut() else {
            return Ok(());
        };
        if oldest.expected.len() == 1 && self.sent_bytes < oldest.sent_at {
            // Its buffers are not free yet.
            let message = format!("{}: a reply came before its command", self.endpoint.name());
            return Err(L2Error::new(ErrorKind::Unavailable, message));
        }
        oldest.kept_bytes += bytes;
        if oldest.kept_bytes > MAX_KEPT_BYTES {
            let message = format!("{}: replies that are too long", self.endpoint.name());
            return Err(L2Error::new(ErrorKind::Unavailable, message));
        }
        match oldest.expected.pop_front() {
            Some(Expected::Asking) => {}
            expected => {
                if let Some(Expected::Object(to)) = expected {
                    self.expected_bytes -= to.len();
                }
                oldest.replies.push(reply);
            }
        }
        if oldest.expected.is_empty()
            && let Some(done) = self.pending.pop_front()
        {
            self.oldest = Instant::now();
            self.state.end(done.size, done.answer, Ok(done.replies));
        }
        if let Some(Fatal { error, is_demotion }) = fatal {
            self.fatal = Some(error);
            if is_demotion {
                self.endpoint.demotions.fetch_add(1, Ordering::Relaxed);
            }
        }
        match self.ending.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Fails what is in flight, and returns the number of calls. What was sent and is no load may have been done, or may
    /// still be.
    pub(super) fn fail(&mut self, error: &L2Error) -> usize {
        self.unsent.clear();
        let failed = self.pending.len();
        for pending in self.pending.drain(..) {
            let may_be_done = pending.expected_bytes == 0 && self.sent_bytes >= pending.sent_at;
            let error = if may_be_done {
                L2Error::new(ErrorKind::Deadline, error.to_string())
            } else {
                error.clone()
            };
            self.state.end(pending.size, pending.answer, Err(error));
        }
        failed
    }
}
