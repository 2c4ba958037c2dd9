//! The I/O thread, which owns the socket: requests out, replies in, deadlines, and the loss of the connection.
//!
//! Requests are sent only while a connection is up. When it is lost:
//!
//! * Sent requests without a reply fail at once; the server may have served them or not.
//! * The connection is replaced, after a pause ([`Backoff`]).
//! * Unsent requests wait for the next connection, or their deadline. A session end waits for a connection however long
//!   that takes, since it is not repeated.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvtier_proto::operation::Operation;
use kvtier_proto::response::ResponseKind;
use rustix::event::{PollFd, PollFlags};

use super::{ClientShared, KvEventStream, Settings, Sink, Submitted, keep_end};
use crate::backoff::Backoff;
use crate::error::ClientError;
use crate::message::{Incoming, Outgoing};
use crate::wire::{Frames, Heartbeats, Wire, wait};

/// Longest wait for a socket without a deadline.
const MAX_POLL: Duration = Duration::from_secs(60);

/// A sent request.
struct Sent {
    operation: Operation,
    kind: ResponseKind,
    timeout: Duration,
    sink: Sink,
}

pub(super) struct Io {
    shared: Arc<ClientShared>,
    linger: Duration,
    busy_poll: Duration,
    /// None while there is no connection and no attempt to make one.
    wire: Option<Wire>,
    backoff: Backoff,
    /// When to make the next wire, if there is none.
    reopen_at: Instant,
    /// Why the last attempt to connect failed; none while requests can be sent.
    no_connection: Option<String>,
    /// Whether requests can be sent.
    up: bool,
    /// In the order of submission.
    unsent: VecDeque<Submitted>,
    /// Session ends that were not sent by their deadline.
    unsent_ends: VecDeque<Outgoing>,
    sent: HashMap<u64, Sent>,
    deadlines: BinaryHeap<Reverse<(Instant, u64)>>,
    kv_events: Option<KvEventStream>,
}

impl Io {
    pub(super) fn new(shared: Arc<ClientShared>, settings: Settings) -> Self {
        Self {
            shared,
            linger: settings.linger,
            busy_poll: settings.busy_poll,
            wire: None,
            backoff: Backoff::new(settings.reconnect),
            reopen_at: Instant::now(),
            no_connection: None,
            up: false,
            unsent: VecDeque::new(),
            unsent_ends: VecDeque::new(),
            sent: HashMap::new(),
            deadlines: BinaryHeap::new(),
            kv_events: None,
        }
    }

    /// Runs until the client is closed.
    pub(super) fn run(mut self) {
        self.guarded(Self::serve);
    }

    /// Runs `serve`. If it panics, which is a bug, all current and later requests fail rather than wait for a thread that
    /// has ended.
    fn guarded(&mut self, serve: impl FnOnce(&mut Self)) {
        let ended = catch_unwind(AssertUnwindSafe(|| serve(self)));
        self.shared.link.set(false);
        if ended.is_ok() {
            // The remaining requests fail as closed when their sinks are dropped.
            return;
        }
        let not_taken = self.shared.break_down();
        let sent = self.sent.drain().map(|(_, sent)| sent.sink);
        let unsent = self.unsent.drain(..).chain(not_taken);
        let unsent = unsent.map(|request| request.sink);
        for sink in sent.chain(unsent) {
            let operation = sink.1;
            sink.complete(Err(ClientError::Broken { operation }));
            self.shared.request_ended();
        }
    }

    fn serve(&mut self) {
        while !self.take_submitted() {
            self.expire(Instant::now());
            if self.shared.degraded.swap(false, Ordering::Relaxed) {
                self.fail_dependent();
            }
            self.send_unsent();
            self.wait(MAX_POLL);
            self.advance(Instant::now());
        }
        self.finish();
    }

    /// Sends what is left, as far as the connection that is up takes it in time.
    fn finish(&mut self) {
        let until = Instant::now() + self.linger;
        loop {
            let now = Instant::now();
            self.expire(now);
            self.send_unsent();
            let is_sent = self.unsent.is_empty() && self.unsent_ends.is_empty();
            let has_output = self.wire.as_ref().is_some_and(Wire::has_output);
            if !self.up || (is_sent && !has_output) || now >= until {
                return;
            }
            self.wait(until - now);
            self.advance(Instant::now());
        }
    }

    /// Takes the submitted requests; returns whether the client is closed.
    fn take_submitted(&mut self) -> bool {
        let mut inbox = self.shared.inbox.lock();
        let closing = inbox.closing;
        let requests = std::mem::take(&mut inbox.requests);
        let ends = std::mem::take(&mut inbox.unsent_ends);
        let kv_events = inbox.kv_events.take();
        drop(inbox);
        if kv_events.is_some() {
            self.kv_events = kv_events;
            self.request_kv_events(true);
        }
        for end in ends {
            keep_end(&mut self.unsent_ends, end);
        }
        for submitted in requests {
            self.deadlines
                .push(Reverse((submitted.deadline, submitted.uid)));
            self.unsent.push_back(submitted);
        }
        closing
    }

    /// Sends unsent requests as far as the connection takes them.
    fn send_unsent(&mut self) {
        let now = Instant::now();
        while let Some(wire) = self
            .wire
            .as_mut()
            .filter(|wire| self.up && wire.has_capacity())
        {
            let message = if let Some(end) = self.unsent_ends.pop_front() {
                // The reply is dropped as late.
                end.into_message(self.shared.next_uid.fetch_add(1, Ordering::Relaxed))
            // An expired one fails with the next turn.
            } else if self.unsent.front().is_some_and(|next| next.deadline > now)
                && let Some(next) = self.unsent.pop_front()
            {
                let Submitted {
                    uid,
                    outgoing,
                    timeout,
                    sink,
                    ..
                } = next;
                let (operation, kind) = (outgoing.operation, outgoing.kind);
                let sent = Sent {
                    operation,
                    kind,
                    timeout,
                    sink,
                };
                self.sent.insert(uid, sent);
                outgoing.into_message(uid)
            } else {
                return wire.write();
            };
            wire.send(message);
            if !wire.has_capacity() {
                // What the system takes of it makes space for the next ones.
                wire.write();
            }
        }
    }

    /// Waits for a message, an event, a submitted request or the next deadline.
    fn wait(&self, longest: Duration) {
        let now = Instant::now();
        let deadline = self
            .deadlines
            .peek()
            .map(|Reverse((deadline, _))| *deadline);
        let due = match &self.wire {
            Some(wire) => wire.due(),
            None => Some(self.reopen_at),
        };
        let next = deadline.into_iter().chain(due).min();
        let left = next.map_or(longest, |next| next.saturating_duration_since(now));
        let mut fds = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        fds.extend(self.wire.as_ref().and_then(Wire::poll_fd));
        let busy_poll = if self.sent.is_empty() {
            Duration::ZERO
        } else {
            self.busy_poll
        };
        wait(&mut fds, left.min(longest), busy_poll);
        self.shared.drain_wake();
    }

    /// Moves what the connection can move, and replaces one that is lost.
    fn advance(&mut self, now: Instant) {
        let dropped = self.shared.lost_connection.swap(0, Ordering::Relaxed);
        let mut messages = Vec::new();
        let moved = match &mut self.wire {
            Some(wire) => wire.advance(now, &mut messages),
            None => Ok(false),
        };
        if !self.up && self.wire.as_ref().is_some_and(Wire::is_ready) {
            self.up = true;
            self.no_connection = None;
            self.request_kv_events(true);
            self.shared.unreachable.store(false, Ordering::Relaxed);
            self.shared.link.set(true);
        }
        // Replies that came before the end still count.
        messages
            .into_iter()
            .for_each(|frames| self.complete(frames));
        let is_dropped = self.up && dropped != 0 && dropped == self.shared.link.connections();
        match moved {
            Err(error) if !self.up => self.fail_to_connect(now, &error),
            Err(_) => self.lose(),
            Ok(_) if is_dropped => self.lose(),
            Ok(_) => {}
        }
        if self.wire.is_none() {
            self.reopen(now);
        }
    }

    fn fail_to_connect(&mut self, now: Instant, error: &std::io::Error) {
        self.wire = None;
        self.no_connection = Some(error.to_string());
        self.reopen_at = now + self.backoff.pause();
        self.shared.unreachable.store(true, Ordering::Relaxed);
    }

    /// Requests the stream of KV events, if there is one, on a connection that is up.
    fn request_kv_events(&mut self, is_new_connection: bool) {
        if let Some(stream) = &mut self.kv_events
            && let Some(wire) = self.wire.as_mut().filter(|_| self.up)
        {
            let uid = self.shared.next_uid.fetch_add(1, Ordering::Relaxed);
            let deadline = Instant::now() + self.shared.timeout();
            self.deadlines.push(Reverse((deadline, uid)));
            wire.send(stream.request(uid, is_new_connection));
        }
    }

    /// Starts the next attempt to connect if the pause is over.
    fn reopen(&mut self, now: Instant) {
        if now >= self.reopen_at {
            match Wire::open(&self.shared.address, Heartbeats::On, now) {
                Ok(wire) => self.wire = Some(wire),
                Err(error) => self.fail_to_connect(now, &error),
            }
        }
    }

    /// Drops a lost connection.
    fn lose(&mut self) {
        self.up = false;
        self.reopen_at = Instant::now() + self.backoff.pause();
        self.shared.link.set(false);
        self.wire = None;
        for (_, sent) in self.sent.drain() {
            let operation = sent.operation;
            sent.sink.complete(Err(ClientError::Disconnected {
                operation,
                endpoint: self.shared.endpoint.clone(),
            }));
            self.shared.request_ended();
        }
        // Unsent ones must not reach a later server, whose chunk size may differ.
        self.fail_dependent();
    }

    /// Fails the requests that need a server that answers now: an engine waits for them, and the server keeps nothing for
    /// them that it has to release.
    fn fail_dependent(&mut self) {
        let sent = self
            .sent
            .extract_if(|_, sent| is_dependent(sent.operation))
            .map(|(_, sent)| sent.sink);
        let (dependent, rest) = std::mem::take(&mut self.unsent)
            .into_iter()
            .partition(|request: &Submitted| is_dependent(request.outgoing.operation));
        self.unsent = rest;
        let unsent = VecDeque::into_iter(dependent).map(|request| request.sink);
        for sink in sent.chain(unsent).collect::<Vec<_>>() {
            let operation = sink.1;
            self.shared.request_ended();
            sink.complete(Err(ClientError::Degraded {
                operation,
                endpoint: self.shared.endpoint.clone(),
            }));
        }
    }

    /// Completes the request that a message answers. A message that answers none is late, and dropped.
    fn complete(&mut self, frames: Frames) {
        self.shared.received.fetch_add(1, Ordering::Relaxed);
        let Some(incoming) = Incoming::parse(frames) else {
            return;
        };
        if let Some(stream) = self.kv_events.as_mut().filter(|it| it.has(incoming.uid)) {
            let uid = incoming.uid;
            match (stream.receive(incoming), &mut self.wire) {
                (Some(frames), Some(wire)) => wire.send(frames),
                _ => {
                    let retry_at = Instant::now() + self.backoff.pause();
                    self.deadlines.push(Reverse((retry_at, uid)));
                }
            }
            return;
        }
        let Some(sent) = self.sent.remove(&incoming.uid) else {
            return;
        };
        self.backoff.reset();
        let reply = incoming.into_reply(sent.operation, sent.kind);
        self.shared.request_ended();
        sent.sink.complete(reply);
    }

    /// Fails the requests past their deadline.
    fn expire(&mut self, now: Instant) {
        while let Some(Reverse((deadline, uid))) = self.deadlines.peek().copied() {
            if deadline > now {
                return;
            }
            self.deadlines.pop();
            if let Some(stream) = self.kv_events.as_mut().filter(|it| it.has(uid)) {
                if stream.expire() {
                    self.request_kv_events(false);
                }
                continue;
            }
            let (operation, waited, sink) = if let Some(sent) = self.sent.remove(&uid) {
                (sent.operation, sent.timeout, sent.sink)
            } else if let Some(at) = self.unsent.iter().position(|request| request.uid == uid)
                && let Some(request) = self.unsent.remove(at)
            {
                let operation = request.outgoing.operation;
                if operation == Operation::EndSession {
                    keep_end(&mut self.unsent_ends, request.outgoing);
                }
                (operation, request.timeout, request.sink)
            } else {
                continue;
            };
            self.shared.request_ended();
            sink.complete(Err(ClientError::Timeout {
                operation,
                endpoint: self.shared.endpoint.clone(),
                waited,
                no_connection: self.no_connection.clone(),
            }));
        }
    }
}

/// Whether a request of this operation fails when the server stops answering.
fn is_dependent(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Lookup
            | Operation::Find
            | Operation::QueryPrefetchStatus
            | Operation::WaitPrefetchStatus
            | Operation::PrepareStore
            | Operation::PrepareRetrieve
    )
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc;

    use rustix::event::{Timespec, poll};

    use super::super::{Client, Health};
    use super::*;

    /// The I/O state of a client without threads.
    fn io_to(endpoint: &str) -> Io {
        let settings = Settings::default();
        let shared = ClientShared::new(endpoint, settings).unwrap();
        Io::new(Arc::new(shared), settings)
    }

    fn io() -> Io {
        io_to("tcp://127.0.0.1:9")
    }

    #[test]
    fn lost_connection_is_retried_after_a_pause() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut io = io_to(&listener.local_addr().unwrap().to_string());
        io.advance(io.reopen_at);
        assert!(io.wire.is_some());
        let lost_at = Instant::now();
        io.lose();
        assert!(io.wire.is_none() && io.reopen_at > lost_at);
        io.advance(lost_at);
        assert!(io.wire.is_none());
        io.advance(io.reopen_at);
        assert!(io.wire.is_some());
    }

    #[test]
    fn refused_connection_is_unreachable_and_retried_after_a_pause() {
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
        let mut io = io_to(&closed.unwrap().to_string());
        let first = io.reopen_at;
        while !io.shared.unreachable.load(Ordering::Relaxed) {
            io.advance(first);
        }
        assert!(io.wire.is_none() && io.reopen_at > first);
    }

    #[test]
    fn wake_up_is_consumed_by_one_wait() {
        let io = io();
        io.shared.wake();
        io.wait(MAX_POLL);
        let mut fds = [PollFd::new(&io.shared.wake, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(0));
    }

    #[test]
    fn silent_connection_is_dropped_and_its_successor_kept() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut io = io_to(&listener.local_addr().unwrap().to_string());
        let connect = |io: &mut Io| {
            io.advance(io.reopen_at);
            io.up = true;
            io.shared.link.set(true);
            io.shared.link.connections()
        };
        let first = connect(&mut io);
        io.shared.drop_connection(first);
        io.advance(Instant::now());
        assert!(!io.up && io.wire.is_none());
        connect(&mut io);
        io.shared.drop_connection(first);
        io.advance(Instant::now());
        assert!(io.up && io.wire.is_some());
    }

    #[test]
    fn degraded_client_fails_lookups_and_keeps_the_rest() {
        let mut io = io();
        let client = Client::internal(Arc::clone(&io.shared));
        let prompt = crate::Prompt::new(&[1, 2]);
        let scope = crate::Scope::new("m");
        let lookup = client.lookup_hits(&scope.scheduler_key(&prompt, 0..2, "r"));
        let other = client.noop();
        io.take_submitted();
        io.fail_dependent();
        let error = lookup.join().unwrap_err();
        assert!(matches!(error, ClientError::Degraded { .. }), "{error}");
        assert!(!other.is_ready());
        // The session that the server may have opened ends.
        io.take_submitted();
        let unsent: Vec<_> = io
            .unsent
            .iter()
            .map(|request| request.outgoing.operation)
            .collect();
        assert_eq!(unsent, [Operation::Noop, Operation::EndSession]);
    }

    #[test]
    fn session_ends_are_kept_beyond_limit_and_deadline() {
        let mut io = io();
        let client = Client::internal(Arc::clone(&io.shared));
        client.end_session("late").forget();
        io.take_submitted();
        io.expire(Instant::now() + Duration::from_secs(3600));
        io.shared
            .in_flight
            .store(super::super::MAX_IN_FLIGHT, Ordering::Relaxed);
        let refused = client.end_session("beyond the limit").join();
        assert!(matches!(refused, Err(ClientError::TooMany { .. })));
        // Other requests are not kept.
        assert!(client.noop().join().is_err());
        io.take_submitted();
        assert_eq!(io.unsent_ends.len(), 2);
        assert!(io.unsent.is_empty());
    }

    #[test]
    fn panic_of_the_thread_fails_current_and_later_requests() {
        let mut io = io();
        let shared = Arc::clone(&io.shared);
        let client = Client::internal(Arc::clone(&shared));
        let current = client.noop();
        io.guarded(|io| {
            io.take_submitted();
            client.noop().forget();
            panic!("a bug");
        });
        let is_broken = |error| matches!(error, ClientError::Broken { .. });
        assert!(current.join().is_err_and(is_broken));
        assert!(client.noop().join().is_err_and(is_broken));
        assert_eq!(client.in_flight(), 0);
        // The other thread reports it, and ends.
        let (sender, states) = mpsc::channel();
        client.on_health(Box::new(move |health| {
            let _ = sender.send(health);
        }));
        shared.watch.set_healthy(0);
        super::super::health::run(&shared, Duration::from_secs(600));
        assert_eq!(states.iter().take(2).last(), Some(Health::Degraded));
    }
}
