//! All connections: how many there are, which one gives way, and what time does to them.
//!
//! When there are as many as allowed, the oldest one that has never sent a request gives way to a new one. If all have, no
//! connection is accepted until one ends: new ones wait in the system's queue.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_zmtp::{Limits, Message};
use rustix::io::Errno;

use super::client::Client;
use super::connection::{Closed, Connection, SCRATCH_BYTES};
use super::outbox::Reply;
use super::poll::{Interest, Poller, Ready};
use super::seldom::Seldom;
use super::socket::RequestSocket;
use crate::metrics::Metrics;

/// Tokens that are no connection's number.
const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

/// Connections accepted before those that are there get their turn.
const MAX_ACCEPTS: usize = 64;

/// How long no connection is accepted after the system had none to give.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Between two looks at the time of every connection.
const TICK: Duration = Duration::from_secs(1);

/// What the front end is to look at.
pub enum Happened {
    /// The outbox has replies.
    Wake,
    /// A connection has something to read.
    Readable(u64),
}

/// The connections, by number.
pub struct Connections {
    listener: Arc<RequestSocket>,
    poller: Poller,
    ready: Vec<Ready>,
    open: HashMap<u64, Connection>,
    /// In the order they were accepted. Those that have ended or sent a request are passed over.
    strangers: VecDeque<u64>,
    /// Those whose output is about to be written.
    queued: Vec<u64>,
    next_id: u64,
    bounds: Bounds,
    held_bytes: usize,
    accept: Accept,
    next_tick: Instant,
    scratch: Box<[u8]>,
    metrics: Arc<Metrics>,
}

/// How much the connections may have.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Connections at once.
    pub connections: usize,
    /// Bytes that they hold together: incomplete messages, and small replies that are not read.
    pub held_bytes: usize,
    /// Of each session.
    pub session: Limits,
}

/// Whether new connections are accepted.
#[derive(Debug, Clone, Copy)]
enum Accept {
    Now,
    /// Not before this time, nor while there are too many.
    Paused(Instant),
    /// Never again.
    Ended,
}

impl Connections {
    /// None yet; those that connect to `listener`. `wake` reports replies.
    ///
    /// # Errors
    /// The system's.
    pub fn new(
        listener: Arc<RequestSocket>,
        wake: impl std::os::fd::AsFd,
        bounds: Bounds,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<Self> {
        let poller = Poller::new()?;
        poller.add(&*listener, LISTENER)?;
        poller.add(wake, WAKE)?;
        Ok(Self {
            listener,
            poller,
            ready: Vec::new(),
            open: HashMap::new(),
            strangers: VecDeque::new(),
            queued: Vec::new(),
            next_id: 0,
            bounds,
            held_bytes: 0,
            accept: Accept::Now,
            next_tick: Instant::now(),
            scratch: vec![0; SCRATCH_BYTES].into(),
            metrics,
        })
    }

    /// The client of a connection; `make` makes it at its first request.
    pub fn client(&mut self, id: u64, make: impl FnOnce() -> Client) -> Option<&mut Client> {
        let connection = self.open.get_mut(&id)?;
        Some(connection.client.get_or_insert_with(make))
    }

    /// Waits for something to happen, for `timeout` at most, and does what needs no request: accepting, writing, time.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&mut self, timeout: Duration, happened: &mut Vec<Happened>) -> std::io::Result<()> {
        let mut ready = std::mem::take(&mut self.ready);
        self.poller.wait(timeout, &mut ready)?;
        for Ready {
            token,
            readable,
            writable,
        } in ready.drain(..)
        {
            match token {
                LISTENER => self.accept(),
                WAKE => happened.push(Happened::Wake),
                id => {
                    if writable {
                        self.queue(id);
                    }
                    if readable {
                        happened.push(Happened::Readable(id));
                    }
                }
            }
        }
        self.ready = ready;
        self.pass_time(Instant::now());
        Ok(())
    }

    /// Reads from a connection, and appends its messages. Returns why it has to be closed after they were served, if so.
    pub fn read(&mut self, id: u64, messages: &mut Vec<Message>) -> Option<Closed> {
        let connection = self.open.get_mut(&id)?;
        let read = connection.read(&mut self.scratch, messages, Instant::now());
        if connection.has_output() {
            self.queue(id);
        }
        self.count(id);
        read.err()
    }

    /// Queues a reply. Returns whether its connection is open.
    pub fn push(&mut self, reply: Reply) -> bool {
        let id = reply.peer.id;
        let Some(connection) = self.open.get_mut(&id) else {
            return false;
        };
        connection.push(reply);
        self.queue(id);
        true
    }

    /// Writes what is queued.
    pub fn write_queued(&mut self) {
        while let Some(id) = self.queued.pop() {
            let Some(connection) = self.open.get_mut(&id) else {
                continue;
            };
            connection.is_queued = false;
            if let Err(why) = connection.write(Instant::now()) {
                self.close(id, why);
                continue;
            }
            let interest = Interest {
                write: connection.has_output(),
                ..connection.interest
            };
            self.watch(id, interest);
            self.count(id);
        }
    }

    /// Whether the listener is watched.
    #[cfg(test)]
    pub fn is_accepting(&self) -> bool {
        matches!(self.accept, Accept::Now)
    }

    /// Whether a connection has bytes that are not written.
    pub fn have_output(&mut self) -> bool {
        self.open.values_mut().any(Connection::has_output)
    }

    /// Accepts no connection any more.
    pub fn end_accepting(&mut self) {
        if !matches!(self.accept, Accept::Paused(_)) {
            // Fails only for what is not there.
            let _ = self.poller.remove(&*self.listener);
        }
        self.accept = Accept::Ended;
    }

    /// Reads nothing more from a connection, and only writes. One that is ready to be read once more has ended.
    pub fn ignore_requests(&mut self, id: u64) {
        let Some(connection) = self.open.get(&id) else {
            return;
        };
        match connection.interest {
            Interest { read: true, write } => self.watch(id, Interest { read: false, write }),
            Interest { read: false, .. } => self.close(id, Closed::ByClient),
        }
    }

    /// Ends every connection in order.
    pub fn finish(&mut self) {
        for (_, connection) in self.open.drain() {
            connection.finish(&mut self.scratch);
        }
        self.metrics.request_connections.set(0);
    }

    fn accept(&mut self) {
        for _ in 0..MAX_ACCEPTS {
            let is_full = self.open.len() >= self.bounds.connections;
            let displaced = is_full.then(|| self.oldest_stranger());
            if displaced == Some(None) {
                return self.pause_accepting("all of them have sent requests", Duration::ZERO);
            }
            let socket = match self.listener.accept() {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                // The client has gone meanwhile.
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(error) => {
                    let error = std::io::Error::from(error).to_string();
                    return self.pause_accepting(&error, ACCEPT_PAUSE);
                }
            };
            if let Some(Some(stranger)) = displaced {
                self.close(stranger, Closed::Displaced);
            }
            let id = self.next_id;
            self.next_id += 1;
            let connection = Connection::new(socket, self.bounds.session, Instant::now());
            if let Err(error) = self.poller.add(&connection, id) {
                let error = std::io::Error::from(error).to_string();
                return self.pause_accepting(&error, ACCEPT_PAUSE);
            }
            self.open.insert(id, connection);
            self.strangers.push_back(id);
            self.metrics.request_connections.set(self.open.len() as i64);
            self.queue(id);
        }
    }

    /// The connection that was accepted first of those that have sent no request.
    fn oldest_stranger(&mut self) -> Option<u64> {
        while let Some(id) = self.strangers.front().copied() {
            match self.open.get(&id) {
                Some(connection) if connection.client.is_none() => return Some(id),
                _ => self.strangers.pop_front(),
            };
        }
        None
    }

    fn pause_accepting(&mut self, cause: &str, pause: Duration) {
        let now = Instant::now();
        if self.poller.remove(&*self.listener).is_ok() {
            self.accept = Accept::Paused(now + pause);
        }
        static SAID: Seldom = Seldom::every(Duration::from_secs(60));
        if let Some(left_out) = SAID.due(now) {
            tracing::warn!(
                cause,
                connections = self.open.len(),
                limit = self.bounds.connections,
                left_out,
                "no further connection is accepted on the request port; new ones wait until others end"
            );
        }
    }

    fn pass_time(&mut self, now: Instant) {
        if let Accept::Paused(until) = self.accept
            && now >= until
            && self.open.len() < self.bounds.connections
        {
            match self.poller.add(&*self.listener, LISTENER) {
                Ok(()) => self.accept = Accept::Now,
                Err(_) => self.accept = Accept::Paused(now + ACCEPT_PAUSE),
            }
        }
        if now < self.next_tick {
            return;
        }
        self.next_tick = now + TICK;
        let (mut asked, mut ended) = (Vec::new(), Vec::new());
        for (&id, connection) in &mut self.open {
            match connection.tick(now) {
                Ok(()) if connection.has_output() => asked.push(id),
                Ok(()) => {}
                Err(why) => ended.push((id, why)),
            }
        }
        asked.into_iter().for_each(|id| self.queue(id));
        ended.into_iter().for_each(|(id, why)| self.close(id, why));
    }

    fn queue(&mut self, id: u64) {
        if let Some(connection) = self.open.get_mut(&id)
            && !std::mem::replace(&mut connection.is_queued, true)
        {
            self.queued.push(id);
        }
    }

    /// Counts what a connection holds. If all hold too much together, the one whose bytes wait longest is closed.
    fn count(&mut self, id: u64) {
        let Some(connection) = self.open.get_mut(&id) else {
            return;
        };
        let bytes = connection.held_bytes();
        self.held_bytes -= std::mem::replace(&mut connection.counted_bytes, bytes);
        self.held_bytes += bytes;
        if self.held_bytes > self.bounds.held_bytes {
            let stuck = self
                .open
                .iter()
                .filter_map(|(id, of)| Some((of.stuck_since()?, *id)));
            if let Some((_, stuck)) = stuck.min() {
                self.close(stuck, Closed::Memory);
            }
        }
    }

    /// Changes what a connection is watched for.
    fn watch(&mut self, id: u64, interest: Interest) {
        let Some(connection) = self.open.get_mut(&id) else {
            return;
        };
        if std::mem::replace(&mut connection.interest, interest) != interest
            && let Err(error) = self.poller.modify(&*connection, id, interest)
        {
            self.close(id, Closed::Failed(error));
        }
    }

    /// Closes a connection.
    pub fn close(&mut self, id: u64, why: Closed) {
        let Some(connection) = self.open.remove(&id) else {
            return;
        };
        self.held_bytes -= connection.counted_bytes;
        self.metrics.request_connections.set(self.open.len() as i64);
        static SAID: Seldom = Seldom::new();
        if !matches!(why, Closed::ByClient)
            && let Some(left_out) = SAID.due(Instant::now())
        {
            tracing::debug!(connection = id, cause = %why, left_out, "a connection was closed");
        }
    }
}
