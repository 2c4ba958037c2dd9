//! The thread that owns the socket: requests out, replies in, deadlines, and the loss of the connection.
//!
//! Requests leave only while a connection stands. When it is lost, everything that left and was not answered fails at
//! once (the server may have done it or not), and the socket is replaced, so that nothing reaches a later server
//! behind the caller's back, after a pause ([`Backoff`]). What has not left waits for the next connection, or its
//! deadline; the end of a session waits for a connection however long that takes, since nobody tells it again.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvtier_proto::frames::ReplyFrames;
use kvtier_proto::operation::Operation;
use kvtier_proto::response::ResponseKind;

use super::backoff::Backoff;
use super::{Settings, Shared, Sink, Submitted, keep_end};
use crate::connection::Reply;
use crate::error::ClientError;
use crate::outgoing::{Outgoing, check_op};

/// Seconds of silence behind which the system asks whether the other side of a connection is still there, seconds
/// between two such questions, and how many may stay without an answer: a minute until it is taken for lost.
const KEEPALIVE: (i32, i32, i32) = (30, 10, 3);

/// A socket and the monitor that receives the events of its connections.
struct Wire {
    monitor: zmq::Socket,
    socket: zmq::Socket,
}

/// Where no events are sent.
const NO_MONITOR: &str = "inproc://kvtier-client-no-monitor";

impl Drop for Wire {
    /// Ends the events before the monitor: libzmq's thread waits for ever to send one that nothing receives, and then
    /// makes no connection any more. Whether the other place can be bound does not matter.
    fn drop(&mut self) {
        let _ = self.socket.monitor(NO_MONITOR, 0);
    }
}

/// A request that left.
struct Pending {
    operation: Operation,
    kind: ResponseKind,
    waited: Duration,
    sink: Sink,
}

pub(super) struct Io {
    shared: Arc<Shared>,
    context: zmq::Context,
    settings: Settings,
    wire: Option<Wire>,
    backoff: Backoff,
    /// When to make the next wire, if there is none.
    again: Instant,
    up: bool,
    sockets: u64,
    /// Not sent yet, in order.
    waiting: VecDeque<Submitted>,
    /// Ends of sessions that did not leave by their deadline.
    ends: VecDeque<Outgoing>,
    sent: HashMap<u64, Pending>,
    deadlines: BinaryHeap<Reverse<(Instant, u64)>>,
}

impl Io {
    /// Opens the socket, so that an address that is none is an error of the caller's.
    pub(super) fn open(shared: Arc<Shared>, settings: Settings) -> Result<Self, ClientError> {
        let mut io = Self {
            shared,
            context: zmq::Context::new(),
            settings,
            wire: None,
            backoff: Backoff::new(settings.reconnect),
            again: Instant::now(),
            up: false,
            sockets: 0,
            waiting: VecDeque::new(),
            ends: VecDeque::new(),
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

    /// Runs `serve`. If it panics, which is a bug, all that is under way and all that comes fails rather than wait for
    /// a thread that has ended.
    fn guarded(&mut self, serve: impl FnOnce(&mut Self)) {
        let ended = catch_unwind(AssertUnwindSafe(|| serve(self)));
        self.shared.link.set(false);
        if ended.is_ok() {
            // What is still here fails as closed: sinks are told when they are dropped.
            return;
        }
        let new = self.shared.break_down();
        let sent = self.sent.drain().map(|(_, pending)| pending.sink);
        let waiting = self.waiting.drain(..).chain(new).map(|each| each.sink);
        for sink in sent.chain(waiting) {
            let operation = sink.1;
            sink.tell(Err(ClientError::Broken { operation }));
            self.shared.one_less();
        }
    }

    fn serve(&mut self) {
        while !self.take_submitted() {
            self.expire(Instant::now());
            if self.shared.degraded.swap(false, Ordering::Relaxed) {
                self.fail_dependent();
            }
            let backlog = self.send_waiting();
            self.wait(backlog);
            self.read_monitor();
            self.read_replies();
        }
        self.send_waiting();
    }

    fn new_wire(&mut self) -> zmq::Result<Wire> {
        self.sockets += 1;
        let place = format!("inproc://kvtier-client-monitor-{}", self.sockets);
        let millis = |span: Duration| i32::try_from(span.as_millis()).unwrap_or(i32::MAX);
        let socket = self.context.socket(zmq::DEALER)?;
        socket.set_connect_timeout(5000)?;
        socket.set_reconnect_ivl(millis(self.settings.reconnect).max(1))?;
        socket.set_reconnect_ivl_max(1000)?;
        socket.set_linger(millis(self.settings.linger))?;
        // Nothing is queued for a connection that does not stand.
        socket.set_immediate(true)?;
        let (idle, interval, count) = KEEPALIVE;
        socket.set_tcp_keepalive(1)?;
        socket.set_tcp_keepalive_idle(idle)?;
        socket.set_tcp_keepalive_intvl(interval)?;
        socket.set_tcp_keepalive_cnt(count)?;
        // The same of ZMTP, where the address is no TCP one, or a proxy is between.
        socket.set_heartbeat_ivl(idle * 1000)?;
        socket.set_heartbeat_timeout(interval * count * 1000)?;
        let events = zmq::SocketEvent::HANDSHAKE_SUCCEEDED.to_raw()
            | zmq::SocketEvent::CONNECT_RETRIED.to_raw()
            | zmq::SocketEvent::DISCONNECTED.to_raw();
        socket.monitor(&place, i32::from(events))?;
        let monitor = self.context.socket(zmq::PAIR)?;
        monitor.set_linger(0)?;
        monitor.connect(&place)?;
        let wire = Wire { monitor, socket };
        wire.socket.connect(&self.shared.endpoint)?;
        Ok(wire)
    }

    /// Takes what callers submitted; true when the client is closed.
    fn take_submitted(&mut self) -> bool {
        let mut inbox = self.shared.inbox.lock();
        let closing = inbox.closing;
        let new = std::mem::take(&mut inbox.new);
        let ends = std::mem::take(&mut inbox.ends);
        drop(inbox);
        for end in ends {
            keep_end(&mut self.ends, end);
        }
        for submitted in new {
            self.deadlines
                .push(Reverse((submitted.deadline, submitted.uid)));
            self.waiting.push_back(submitted);
        }
        closing
    }

    /// Sends what waits, as far as the socket takes it; true when something is left.
    fn send_waiting(&mut self) -> bool {
        while self.up
            && let Some(wire) = &self.wire
            && !self.ends.is_empty()
        {
            match wire.socket.get_events() {
                Ok(events) if events.contains(zmq::POLLOUT) => {}
                _ => return true,
            }
            if let Some(end) = self.ends.pop_front() {
                // Nobody waits for the reply, which is dropped as late.
                let uid = self.shared.next_uid.fetch_add(1, Ordering::Relaxed);
                let _ = wire
                    .socket
                    .send_multipart(end.into_message(uid), zmq::DONTWAIT);
            }
        }
        while self.up
            && let Some(wire) = &self.wire
            && let Some(first) = self.waiting.front()
        {
            // A message that is refused is lost to the library, so ask first.
            match wire.socket.get_events() {
                Ok(events) if events.contains(zmq::POLLOUT) => {}
                _ => return true,
            }
            if first.deadline <= Instant::now() {
                return false;
            }
            let Some(next) = self.waiting.pop_front() else {
                return false;
            };
            let Submitted {
                uid,
                outgoing,
                waited,
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
                        Pending {
                            operation,
                            kind,
                            waited,
                            sink,
                        },
                    );
                }
                Err(source) => {
                    self.shared.one_less();
                    sink.tell(Err(ClientError::Socket {
                        operation,
                        endpoint: self.shared.endpoint.clone(),
                        source,
                    }));
                }
            }
        }
        false
    }

    /// Waits for a message, an event, a caller or the next deadline.
    fn wait(&self, backlog: bool) {
        let now = Instant::now();
        let next = self
            .deadlines
            .peek()
            .map_or(Duration::from_secs(60), |Reverse((deadline, _))| {
                deadline.saturating_duration_since(now)
            });
        let next = if self.wire.is_none() {
            next.min(self.again.saturating_duration_since(now))
        } else {
            next
        };
        // Rounded up, lest the last part of a millisecond be spent spinning.
        let millis = next.as_nanos().div_ceil(1_000_000).min(60_000) as i64;
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

    /// Follows the connection's fate.
    fn read_monitor(&mut self) {
        let silent = self.shared.silent.swap(0, Ordering::Relaxed);
        let mut lost = self.up && silent != 0 && silent == self.shared.link.connections();
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

    /// Makes the next socket when its time has come.
    fn reopen(&mut self, now: Instant) {
        if now >= self.again {
            self.wire = self.new_wire().ok();
            self.again = now + self.backoff.pause();
        }
    }

    /// The connection is gone.
    fn lose(&mut self) {
        self.up = false;
        self.again = Instant::now() + self.backoff.pause();
        self.shared.link.set(false);
        if let Some(wire) = self.wire.take() {
            // Nothing that was not sent may be sent later.
            let _ = wire.socket.set_linger(0);
        }
        for (_, pending) in self.sent.drain() {
            let operation = pending.operation;
            pending.sink.tell(Err(ClientError::Disconnected {
                operation,
                endpoint: self.shared.endpoint.clone(),
            }));
            self.shared.one_less();
        }
        // What has not left must not reach a later server, which may mean other lengths.
        self.fail_dependent();
    }

    /// Fails what is of no use without a server that answers: an engine waits for it, and the server keeps nothing that has
    /// to be heard of.
    fn fail_dependent(&mut self) {
        let sent = self
            .sent
            .extract_if(|_, pending| is_dependent(pending.operation))
            .map(|(_, pending)| pending.sink);
        let (dependent, rest) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|each: &Submitted| is_dependent(each.outgoing.operation));
        self.waiting = rest;
        let waiting = VecDeque::into_iter(dependent).map(|each| each.sink);
        for sink in sent.chain(waiting).collect::<Vec<_>>() {
            let operation = sink.1;
            self.shared.one_less();
            sink.tell(Err(ClientError::Degraded {
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
            self.file(frames);
        }
    }

    /// Completes the request a message answers. Messages that answer none are late, and dropped.
    fn file(&mut self, mut frames: Vec<zmq::Message>) {
        self.shared.heard.fetch_add(1, Ordering::Relaxed);
        let Ok(reply) = ReplyFrames::parse(frames.iter().map(|frame| &**frame)) else {
            return;
        };
        let Ok(uid) = reply.uid_number() else { return };
        let Some(pending) = self.sent.remove(&uid) else {
            return;
        };
        self.backoff.reset();
        let result = check_op(reply.op, pending.operation).map(|()| {
            let payload = (frames.len() > 2).then(|| frames.swap_remove(2));
            Reply::new(uid, pending.operation, pending.kind, payload)
        });
        self.shared.one_less();
        pending.sink.tell(result);
    }

    /// Fails what has passed its deadline.
    fn expire(&mut self, now: Instant) {
        while let Some(Reverse((deadline, uid))) = self.deadlines.peek().copied() {
            if deadline > now {
                return;
            }
            self.deadlines.pop();
            let (operation, waited, sink) = if let Some(pending) = self.sent.remove(&uid) {
                (pending.operation, pending.waited, pending.sink)
            } else if let Some(at) = self.waiting.iter().position(|waiting| waiting.uid == uid)
                && let Some(never_left) = self.waiting.remove(at)
            {
                let operation = never_left.outgoing.operation;
                if operation == Operation::EndSession {
                    keep_end(&mut self.ends, never_left.outgoing);
                }
                (operation, never_left.waited, never_left.sink)
            } else {
                continue;
            };
            self.shared.one_less();
            sink.tell(Err(ClientError::Timeout {
                operation,
                endpoint: self.shared.endpoint.clone(),
                waited,
            }));
        }
    }
}

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

    /// Of a client of nobody's, without threads.
    fn io() -> Io {
        let settings = Settings::default();
        let shared = Shared::new("tcp://127.0.0.1:9".to_owned(), settings).unwrap();
        Io::open(Arc::new(shared), settings).unwrap()
    }

    #[test]
    fn a_lost_connection_is_left_alone_for_a_while() {
        let mut io = io();
        io.lose();
        io.read_monitor();
        assert!(io.wire.is_none());
        let first = io.again;
        io.reopen(first);
        assert!(io.wire.is_some());
        // Had there been none, the next try would have come later.
        assert!(io.again > first);
    }

    #[test]
    fn what_has_woken_the_thread_wakes_it_once() {
        let io = io();
        io.shared.wake();
        io.wait(false);
        let mut fds = [PollFd::new(&io.shared.wake, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(0));
    }

    #[test]
    fn a_silent_connection_is_given_up_and_the_one_behind_it_is_not() {
        let mut io = io();
        let connect = |io: &mut Io| {
            io.up = true;
            io.shared.link.set(true);
            io.shared.link.connections()
        };
        let first = connect(&mut io);
        io.shared.give_up_connection(first);
        io.read_monitor();
        assert!(!io.up && io.wire.is_none());
        io.reopen(io.again);
        connect(&mut io);
        io.shared.give_up_connection(first);
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
        let waiting: Vec<_> = io
            .waiting
            .iter()
            .map(|each| each.outgoing.operation)
            .collect();
        assert_eq!(waiting, [Operation::Noop, Operation::EndSession]);
    }

    #[test]
    fn ends_of_sessions_that_had_no_room_or_no_time_are_kept() {
        let mut io = io();
        let client = Client::internal(Arc::clone(&io.shared));
        client.end_session("waits too long").forget();
        io.take_submitted();
        io.expire(Instant::now() + Duration::from_secs(3600));
        io.shared
            .in_flight
            .store(super::super::MAX_IN_FLIGHT, Ordering::Relaxed);
        let refused = client.end_session("has no room").join();
        assert!(matches!(refused, Err(ClientError::TooMany { .. })));
        // Nothing else is.
        assert!(client.noop().join().is_err());
        io.take_submitted();
        assert_eq!(io.ends.len(), 2);
        assert!(io.waiting.is_empty());
    }

    #[test]
    fn a_panic_of_the_thread_fails_all_that_is_under_way_and_all_that_comes() {
        let mut io = io();
        let shared = Arc::clone(&io.shared);
        let client = Client::internal(Arc::clone(&shared));
        let waiting = client.noop();
        io.guarded(|io| {
            io.take_submitted();
            client.noop().forget();
            panic!("a bug");
        });
        let is_broken = |error| matches!(error, ClientError::Broken { .. });
        assert!(waiting.join().is_err_and(is_broken));
        assert!(client.noop().join().is_err_and(is_broken));
        assert_eq!(client.in_flight(), 0);
        // The other thread says so, and ends.
        let (told, heard) = mpsc::channel();
        client.on_health(Box::new(move |health| {
            let _ = told.send(health);
        }));
        shared.watch.set(Health::Healthy);
        super::super::health::run(&shared, Duration::from_secs(600));
        assert_eq!(heard.iter().take(2).last(), Some(Health::Degraded));
    }
}
