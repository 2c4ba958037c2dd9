//! The I/O thread, which owns the socket: requests out, replies in, deadlines, and the loss of the connection.
//!
//! Requests are sent only while a connection is up. When it is lost:
//!
//! * Sent requests without a reply fail at once; the server may have served them or not.
//! * The socket is replaced, after a pause ([`Backoff`]), so that nothing reaches a later server unnoticed.
//! * Unsent requests wait for the next connection, or their deadline. A session end waits for a connection however long
//!   that takes, since it is not repeated.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvtier_proto::operation::Operation;
use kvtier_proto::response::ResponseKind;

use super::backoff::Backoff;
use super::{Settings, Shared, Sink, Submitted, keep_end};
use crate::error::ClientError;
use crate::message::{Incoming, Outgoing};
use crate::socket::dealer;

/// TCP keepalive: seconds of silence before the first probe, seconds between two probes, and the number of unanswered
/// probes after which the connection is considered lost. That takes a minute.
const KEEPALIVE: (i32, i32, i32) = (30, 10, 3);

/// Longest wait for a socket without a deadline.
const MAX_POLL: Duration = Duration::from_secs(60);

/// A socket and the monitor that receives the events of its connections.
struct Wire {
    monitor: zmq::Socket,
    socket: zmq::Socket,
}

/// An endpoint to which no events are sent.
const NO_MONITOR: &str = "inproc://kvtier-client-no-monitor";

impl Drop for Wire {
    /// Ends the events before the monitor: libzmq's thread would wait forever to send one that nothing receives, and make
    /// no connection any more. Whether the other endpoint can be bound does not matter.
    fn drop(&mut self) {
        let _ = self.socket.monitor(NO_MONITOR, 0);
    }
}

/// A sent request.
struct Sent {
    operation: Operation,
    kind: ResponseKind,
    timeout: Duration,
    sink: Sink,
}

pub(super) struct Io {
    shared: Arc<Shared>,
    context: zmq::Context,
    settings: Settings,
    wire: Option<Wire>,
    backoff: Backoff,
    /// When to make the next wire, if there is none.
    reopen_at: Instant,
    up: bool,
    sockets: u64,
    /// In the order of submission.
    unsent: VecDeque<Submitted>,
    /// Session ends that were not sent by their deadline.
    unsent_ends: VecDeque<Outgoing>,
    sent: HashMap<u64, Sent>,
    deadlines: BinaryHeap<Reverse<(Instant, u64)>>,
}

impl Io {
    /// Opens the socket, so that the caller gets the error if the address is invalid.
    pub(super) fn open(shared: Arc<Shared>, settings: Settings) -> Result<Self, ClientError> {
        let mut io = Self {
            shared,
            context: zmq::Context::new(),
            settings,
            wire: None,
            backoff: Backoff::new(settings.reconnect),
            reopen_at: Instant::now(),
            up: false,
            sockets: 0,
            unsent: VecDeque::new(),
            unsent_ends: VecDeque::new(),
            sent: HashMap::new(),
            deadlines: BinaryHeap::new(),
        };
        io.wire = Some(io.new_wire().map_err(|source| ClientError::Connect {
            endpoint: io.shared.endpoint.clone(),
            source,
        })?);
        Ok(io)
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
            let backlog = self.send_unsent();
            self.wait(backlog);
            self.read_monitor();
            self.read_replies();
        }
        self.send_unsent();
    }

    fn new_wire(&mut self) -> zmq::Result<Wire> {
        self.sockets += 1;
        let events_at = format!("inproc://kvtier-client-monitor-{}", self.sockets);
        let socket = dealer(&self.context, self.settings.reconnect, self.settings.linger)?;
        // Nothing is queued for a connection that is not up.
        socket.set_immediate(true)?;
        let (idle, interval, count) = KEEPALIVE;
        socket.set_tcp_keepalive(1)?;
        socket.set_tcp_keepalive_idle(idle)?;
        socket.set_tcp_keepalive_intvl(interval)?;
        socket.set_tcp_keepalive_cnt(count)?;
        // The same of ZMTP, for other addresses than TCP ones, and for proxies.
        socket.set_heartbeat_ivl(idle * 1000)?;
        socket.set_heartbeat_timeout(interval * count * 1000)?;
        let events = zmq::SocketEvent::HANDSHAKE_SUCCEEDED.to_raw()
            | zmq::SocketEvent::CONNECT_RETRIED.to_raw()
            | zmq::SocketEvent::DISCONNECTED.to_raw();
        socket.monitor(&events_at, i32::from(events))?;
        let monitor = self.context.socket(zmq::PAIR)?;
        monitor.set_linger(0)?;
        monitor.connect(&events_at)?;
        let wire = Wire { monitor, socket };
        wire.socket.connect(&self.shared.endpoint)?;
        Ok(wire)
    }

    /// Takes the submitted requests; returns whether the client is closed.
    fn take_submitted(&mut self) -> bool {
        let mut inbox = self.shared.inbox.lock();
        let closing = inbox.closing;
        let requests = std::mem::take(&mut inbox.requests);
        let ends = std::mem::take(&mut inbox.unsent_ends);
        drop(inbox);
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

    /// Sends unsent requests as far as the socket takes them; returns whether some are left.
    fn send_unsent(&mut self) -> bool {
        while self.up
            && let Some(wire) = &self.wire
            && !self.unsent_ends.is_empty()
        {
            match wire.socket.get_events() {
                Ok(events) if events.contains(zmq::POLLOUT) => {}
                _ => return true,
            }
            if let Some(end) = self.unsent_ends.pop_front() {
                // The reply is dropped as late.
                let uid = self.shared.next_uid.fetch_add(1, Ordering::Relaxed);
                let _ = wire
                    .socket
                    .send_multipart(end.into_message(uid), zmq::DONTWAIT);
            }
        }
        while self.up
            && let Some(wire) = &self.wire
            && let Some(first) = self.unsent.front()
        {
            // libzmq loses a message that it refuses, so ask first.
            match wire.socket.get_events() {
                Ok(events) if events.contains(zmq::POLLOUT) => {}
                _ => return true,
            }
            if first.deadline <= Instant::now() {
                return false;
            }
            let Some(next) = self.unsent.pop_front() else {
                return false;
            };
            let Submitted {
                uid,
                outgoing,
                timeout,
                sink,
                ..
            } = next;
            let (operation, kind) = (outgoing.operation, outgoing.kind);
            let sending = wire
                .socket
                .send_multipart(outgoing.into_message(uid), zmq::DONTWAIT);
            match sending {
                Ok(()) => {
                    self.sent.insert(
                        uid,
                        Sent {
                            operation,
                            kind,
                            timeout,
                            sink,
                        },
                    );
                }
                Err(source) => {
                    self.shared.request_ended();
                    sink.complete(Err(ClientError::Socket {
                        operation,
                        endpoint: self.shared.endpoint.clone(),
                        source,
                    }));
                }
            }
        }
        false
    }

    /// Waits for a message, an event, a submitted request or the next deadline.
    fn wait(&self, backlog: bool) {
        let now = Instant::now();
        let next = self
            .deadlines
            .peek()
            .map_or(MAX_POLL, |Reverse((deadline, _))| {
                deadline.saturating_duration_since(now)
            });
        let next = if self.wire.is_none() {
            next.min(self.reopen_at.saturating_duration_since(now))
        } else {
            next
        };
        // Rounded up, so that the last part of a millisecond is not spent spinning.
        let millis = next
            .as_nanos()
            .div_ceil(1_000_000)
            .min(MAX_POLL.as_millis()) as i64;
        let mut items = vec![zmq::PollItem::from_fd(
            self.shared.wake.as_raw_fd(),
            zmq::POLLIN,
        )];
        if let Some(wire) = &self.wire {
            items.push(wire.monitor.as_poll_item(zmq::POLLIN));
            let events = if backlog && self.up {
                zmq::POLLIN | zmq::POLLOUT
            } else {
                zmq::POLLIN
            };
            items.push(wire.socket.as_poll_item(events));
        }
        // An interrupted poll is one that ends early.
        let _ = zmq::poll(&mut items, millis);
        self.shared.drain_wake();
    }

    /// Reads the events of the connection.
    fn read_monitor(&mut self) {
        let dropped = self.shared.lost_connection.swap(0, Ordering::Relaxed);
        let mut lost = self.up && dropped != 0 && dropped == self.shared.link.connections();
        while let Some(wire) = &self.wire {
            let Ok(event) = wire.monitor.recv_bytes(zmq::DONTWAIT) else {
                break;
            };
            // A second frame has the address, which is known.
            while wire.monitor.get_rcvmore().unwrap_or(false) {
                let _ = wire.monitor.recv_bytes(zmq::DONTWAIT);
            }
            let Some(number) = event.first_chunk::<2>().map(|raw| u16::from_ne_bytes(*raw)) else {
                continue;
            };
            if number == zmq::SocketEvent::HANDSHAKE_SUCCEEDED.to_raw() {
                self.up = true;
                self.shared.unreachable.store(false, Ordering::Relaxed);
                self.shared.link.set(true);
            } else if number == zmq::SocketEvent::CONNECT_RETRIED.to_raw() {
                self.shared.unreachable.store(true, Ordering::Relaxed);
            } else if number == zmq::SocketEvent::DISCONNECTED.to_raw() && self.up {
                lost = true;
                break;
            }
        }
        if lost {
            // Replies that came before the end still count.
            self.read_replies();
            self.lose();
        }
        if self.wire.is_none() {
            self.reopen(Instant::now());
        }
    }

    /// Makes the next socket if the pause is over.
    fn reopen(&mut self, now: Instant) {
        if now >= self.reopen_at {
            self.wire = self.new_wire().ok();
            self.reopen_at = now + self.backoff.pause();
        }
    }

    /// Drops a lost connection.
    fn lose(&mut self) {
        self.up = false;
        self.reopen_at = Instant::now() + self.backoff.pause();
        self.shared.link.set(false);
        if let Some(wire) = self.wire.take() {
            // What libzmq has not sent must not be sent later.
            let _ = wire.socket.set_linger(0);
        }
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

    fn read_replies(&mut self) {
        loop {
            let Some(wire) = &self.wire else { return };
            let Ok(first) = wire.socket.recv_msg(zmq::DONTWAIT) else {
                return;
            };
            let mut frames = vec![first];
            while wire.socket.get_rcvmore().unwrap_or(false) {
                match wire.socket.recv_msg(zmq::DONTWAIT) {
                    Ok(frame) => frames.push(frame),
                    Err(_) => break,
                }
            }
            self.complete(frames);
        }
    }

    /// Completes the request that a message answers. A message that answers none is late, and dropped.
    fn complete(&mut self, frames: Vec<zmq::Message>) {
        self.shared.received.fetch_add(1, Ordering::Relaxed);
        let Some(incoming) = Incoming::parse(frames) else {
            return;
        };
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
            }));
        }
    }
}

/// Whether a request of this operation fails when the server stops answering.
fn is_dependent(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Lookup
            | Operation::QueryPrefetchStatus
            | Operation::WaitPrefetchStatus
            | Operation::PrepareStore
            | Operation::PrepareRetrieve
    )
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::super::{Client, Health};
    use super::*;

    /// The I/O state of a client without threads.
    fn io() -> Io {
        let settings = Settings::default();
        let shared = Shared::new("tcp://127.0.0.1:9".to_owned(), settings).unwrap();
        Io::open(Arc::new(shared), settings).unwrap()
    }

    #[test]
    fn lost_connection_is_retried_after_a_pause() {
        let mut io = io();
        io.lose();
        io.read_monitor();
        assert!(io.wire.is_none());
        let first = io.reopen_at;
        io.reopen(first);
        assert!(io.wire.is_some());
        // Had there been none, the next try would have come later.
        assert!(io.reopen_at > first);
    }

    #[test]
    fn wake_up_is_consumed_by_one_wait() {
        let io = io();
        io.shared.wake();
        io.wait(false);
        let mut fds = [PollFd::new(&io.shared.wake, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(0));
    }

    #[test]
    fn silent_connection_is_dropped_and_its_successor_kept() {
        let mut io = io();
        let connect = |io: &mut Io| {
            io.up = true;
            io.shared.link.set(true);
            io.shared.link.connections()
        };
        let first = connect(&mut io);
        io.shared.drop_connection(first);
        io.read_monitor();
        assert!(!io.up && io.wire.is_none());
        io.reopen(io.reopen_at);
        connect(&mut io);
        io.shared.drop_connection(first);
        io.read_monitor();
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
        shared.watch.set(Health::Healthy);
        super::super::health::run(&shared, Duration::from_secs(600));
        assert_eq!(states.iter().take(2).last(), Some(Health::Degraded));
    }
}
