//! All connections: how many there are, which one gives way, and what time does to them.
//!
//! When there are as many as allowed, a guest gives way to a new one: a connection that has neither registered a worker nor asked
//! anything of the cache. If there is none, no connection is accepted until one ends: new ones wait in the system's queue.
//!
//! What serves no request has its turns, one per [`TURN_INTERVAL`] for all such connections together, and its senders wait:
//! a connection with more stray frames than allowed is parked, which means not read until its turn, and while more
//! connections end without a request than allowed, one is accepted per turn.

mod accepting;
mod large;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_proto::zmtp::{Error, ZmtpLimits, ZmtpMessage};

use super::allowance::Allowance;
use super::client::Client;
use super::connection::{Closed, Connection, SCRATCH_BYTES};
use super::limits;
use super::outbox::Outgoing;
use super::poll::{Interest, Poller, ReadySocket};
use super::socket::RequestSocket;
use crate::clock::Clock;
use kvtier_common::sync::RateLimited;
use kvtier_observe::metrics::Metrics;
use rustix::io::Errno;

use accepting::{Accept, Guest};
use large::HeldMemory;
#[cfg(test)]
pub use large::ROUND_BYTES;

// Tokens that are no connection's number.
const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

/// Time between two turns of the parked connections, and between two connections accepted while too many end without a
/// request.
pub(super) const TURN_INTERVAL: Duration = Duration::from_millis(1);

/// Connections per second that may end without a request. Probes of orchestrators and a restart of a large engine stay below it.
const VAIN_CONNECTIONS_PER_SECOND: u32 = 256;

/// Between two looks at the connections whose time has come.
const TICK: Duration = Duration::from_secs(1);

/// Connections accepted before those that are there get their turn.
const MAX_ACCEPTS: usize = 64;

/// How long no connection is accepted after the system had none to give.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Time after which a large message stalls if nothing more of it has arrived.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Most time that counts between two readings of the clock, which is read once per [`TICK`]: what clients sent while the
/// process did not run is read before any deadline ends.
const MAX_STEP: Duration = Duration::from_secs(2);

/// What the front end is to look at.
pub enum ConnectionEvent {
    /// The outbox has replies.
    Wake,
    /// A connection has something to read.
    Readable(u64),
    /// Requests of a connection have waited too long for the generation of their client.
    Undecided(u64),
}

/// The connections, by number.
pub struct Connections {
    listener: Arc<RequestSocket>,
    poller: Poller,
    ready: Vec<ReadySocket>,
    open: HashMap<u64, Connection>,
    /// Connections that give way, first the ones that have never sent a request. Numbers are in the order of accepting.
    guests: BTreeSet<Guest>,
    /// When each is to be ticked next.
    ticks: BTreeSet<(Instant, u64)>,
    /// Connections whose output is about to be written.
    queued: Vec<u64>,
    /// Connections that are not read until their turn, in this order.
    parked: VecDeque<u64>,
    /// When the next of them is read.
    next_turn: Instant,
    /// Allowance of connections that end without a request.
    vain: Allowance,
    next_id: u64,
    bounds: ConnectionBounds,
    memory: HeldMemory,
    accept: Accept,
    clock: Clock,
    next_tick: Instant,
    scratch: Box<[u8]>,
    metrics: Arc<Metrics>,
}

/// How much the connections may have.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionBounds {
    /// Connections at once.
    pub connections: usize,
    /// Bytes that they hold together: incomplete messages but for the oldest large one, and small replies that are not read.
    pub held_bytes: usize,
    /// Limits of each session.
    pub session: ZmtpLimits,
}

impl Connections {
    /// None yet; those that connect to `listener`. `wake` reports replies.
    ///
    /// # Errors
    /// The system's.
    pub fn new(
        listener: Arc<RequestSocket>,
        wake: impl std::os::fd::AsFd,
        bounds: ConnectionBounds,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<Self> {
        let poller = Poller::new()?;
        poller.add(&*listener, LISTENER)?;
        poller.add(wake, WAKE)?;
        let clock = Clock::start(MAX_STEP);
        Ok(Self {
            listener,
            poller,
            ready: Vec::new(),
            open: HashMap::new(),
            guests: BTreeSet::new(),
            ticks: BTreeSet::new(),
            queued: Vec::new(),
            parked: VecDeque::new(),
            next_turn: clock.now(),
            vain: Allowance::new(VAIN_CONNECTIONS_PER_SECOND, clock.now()),
            next_id: 0,
            bounds,
            memory: HeldMemory::new(bounds.held_bytes),
            accept: Accept::Now,
            next_tick: clock.now(),
            clock,
            scratch: vec![0; SCRATCH_BYTES].into(),
            metrics,
        })
    }

    /// The client of a connection; `make` makes it at its first request.
    pub fn client(&mut self, id: u64, make: impl FnOnce() -> Client) -> Option<&mut Client> {
        let connection = self.open.get_mut(&id)?;
        Some(connection.client.get_or_insert_with(|| {
            self.guests.remove(&Guest::silent(id));
            self.guests.insert(Guest::asking(id));
            make()
        }))
    }

    /// Notes that a connection uses the cache: it does not give way any more.
    pub fn keep(&mut self, id: u64) {
        self.guests.remove(&Guest::asking(id));
    }

    /// The time of deadlines.
    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Connections with requests that wait for the generation of their client.
    pub fn undecided(&self) -> Vec<u64> {
        let is_undecided =
            |of: &Connection| of.client.as_ref().is_some_and(|of| of.undecided.is_some());
        let undecided = self.open.iter().filter(|(_, of)| is_undecided(of));
        undecided.map(|(id, _)| *id).collect()
    }

    /// Waits for something to happen, for `timeout` at most, and does what needs no request: accepting, writing, time.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(
        &mut self,
        timeout: Duration,
        happened: &mut Vec<ConnectionEvent>,
    ) -> std::io::Result<()> {
        let mut ready = std::mem::take(&mut self.ready);
        if let Some(paused) = self.memory.begin_round() {
            self.watch_for_reading(paused, true);
        }
        let timeout = timeout.min(self.until_turn());
        self.poller.wait(timeout, &mut ready)?;
        self.clock.advance();
        for ReadySocket {
            token,
            readable,
            writable,
        } in ready.drain(..)
        {
            match token {
                LISTENER => self.accept(),
                WAKE => happened.push(ConnectionEvent::Wake),
                id => {
                    if writable {
                        self.queue(id);
                    }
                    if readable {
                        self.readable(id, happened);
                    }
                }
            }
        }
        self.ready = ready;
        self.pass_time(happened);
        self.unpark(happened);
        self.put_large_last(happened);
        Ok(())
    }

    fn accept(&mut self) {
        for accepted in 0..MAX_ACCEPTS {
            if accepted > 0 && self.vain.is_exceeded(self.clock.now()) {
                return self.stop_accepting(TURN_INTERVAL);
            }
            let is_full = self.open.len() >= self.bounds.connections;
            let displaced = is_full.then(|| self.guests.first().copied());
            if displaced == Some(None) {
                return self.pause_accepting("all of them use the cache", Duration::ZERO);
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
            if let Some(Some(guest)) = displaced {
                self.close(guest.id, Closed::Displaced);
            }
            let id = self.next_id;
            self.next_id += 1;
            let connection = Connection::new(socket, self.bounds.session, self.clock.now());
            if let Err(error) = self.poller.add(&connection, id) {
                let error = std::io::Error::from(error).to_string();
                return self.pause_accepting(&error, ACCEPT_PAUSE);
            }
            self.ticks.insert((connection.next_tick, id));
            self.open.insert(id, connection);
            self.guests.insert(Guest::silent(id));
            self.metrics.request_connections.set(self.open.len() as i64);
            self.queue(id);
        }
    }

    /// When connections are accepted again, if only time is waited for.
    fn accept_pause_end(&self) -> Option<Instant> {
        match self.accept {
            Accept::Paused(until) if self.has_place() => Some(until),
            _ => None,
        }
    }

    /// Watches the listener again if the pause is over and a connection would have a place.
    fn end_accept_pause(&mut self, now: Instant) {
        if let Accept::Paused(until) = self.accept
            && now >= until
            && self.has_place()
        {
            match self.poller.add(&*self.listener, LISTENER) {
                Ok(()) => self.accept = Accept::Now,
                Err(_) => self.accept = Accept::Paused(now + ACCEPT_PAUSE),
            }
        }
    }

    /// Whether a new connection would have a place: a free one, or that of a guest.
    fn has_place(&self) -> bool {
        self.open.len() < self.bounds.connections || !self.guests.is_empty()
    }

    fn stop_accepting(&mut self, pause: Duration) {
        if self.poller.remove(&*self.listener).is_ok() {
            self.accept = Accept::Paused(self.clock.now() + pause);
        }
    }

    fn pause_accepting(&mut self, cause: &str, pause: Duration) {
        self.stop_accepting(pause);
        static LOG_LIMIT: RateLimited = RateLimited::new(Duration::from_secs(60));
        if let Some(suppressed_lines) = LOG_LIMIT.permit(Instant::now()) {
            tracing::warn!(
                cause,
                connections = self.open.len(),
                limit = self.bounds.connections,
                suppressed_lines,
                "no further connection is accepted on the request port; new ones wait until others end"
            );
        }
    }

    /// Whether the listener is watched.
    #[cfg(test)]
    pub fn is_accepting(&self) -> bool {
        matches!(self.accept, Accept::Now)
    }

    /// Accepts no connection any more.
    pub fn end_accepting(&mut self) {
        if !matches!(self.accept, Accept::Paused(_)) {
            // Fails only for what is not there.
            let _ = self.poller.remove(&*self.listener);
        }
        self.accept = Accept::Ended;
    }

    /// Reports a connection that has something to read, or parks it.
    fn readable(&mut self, id: u64, happened: &mut Vec<ConnectionEvent>) {
        let now = self.clock.now();
        let Some(connection) = self.open.get_mut(&id) else {
            return;
        };
        if !connection.interest.read {
            // It is not watched for reading, so both sides have ended it.
            return self.close(id, Closed::ByClient);
        }
        if self.memory.pause(connection.large) {
            return self.watch_for_reading(id, false);
        }
        if !connection.strays.is_exceeded(now) {
            return happened.push(ConnectionEvent::Readable(id));
        }
        connection.park();
        self.watch_for_reading(id, false);
        self.parked.push_back(id);
        static LOG_LIMIT: RateLimited = RateLimited::new(Duration::from_secs(60));
        if let Some(suppressed_lines) = LOG_LIMIT.permit(Instant::now()) {
            tracing::info!(
                connection = id,
                suppressed_lines,
                "a client sent many frames that are part of no request; reading it slowly"
            );
        }
    }

    /// Time until the next turn; the longest there is if none waits for it.
    fn until_turn(&self) -> Duration {
        let parked = (!self.parked.is_empty()).then_some(self.next_turn);
        let next = self.accept_pause_end().into_iter().chain(parked).min();
        next.map_or(Duration::MAX, |at| {
            at.saturating_duration_since(self.clock.now())
        })
    }

    /// Reports the parked connection whose turn it is.
    fn unpark(&mut self, happened: &mut Vec<ConnectionEvent>) {
        let now = self.clock.now();
        if now < self.next_turn {
            return;
        }
        while let Some(id) = self.parked.pop_front() {
            if !self.open.contains_key(&id) {
                continue;
            }
            self.watch_for_reading(id, true);
            self.next_turn = now + TURN_INTERVAL;
            return happened.push(ConnectionEvent::Readable(id));
        }
    }

    /// Counts frames of a connection that are part of no request.
    pub fn count_strays(&mut self, id: u64, frames: usize) {
        let now = self.clock.now();
        if let Some(connection) = self.open.get_mut(&id) {
            connection.strays.count(frames as u64, now);
        }
    }

    /// Whether a connection has sent more stray frames than allowed.
    pub fn has_excess(&mut self, id: u64) -> bool {
        let now = self.clock.now();
        let connection = self.open.get_mut(&id);
        connection.is_some_and(|connection| connection.strays.is_exceeded(now))
    }

    /// Reads from a connection, and appends its messages. Returns why it has to be closed after they were served, if so.
    pub fn read(&mut self, id: u64, messages: &mut Vec<ZmtpMessage>) -> Option<Closed> {
        let connection = self.open.get_mut(&id)?;
        let was_large = connection.large.is_some();
        let turn_bytes = self.memory.turn_bytes(was_large)?;
        let read = connection.read(&mut self.scratch, messages, turn_bytes, self.clock.now());
        let due = connection.due();
        if due < connection.next_tick {
            self.schedule(id, due);
        }
        self.queue_output(id);
        self.count(id);
        match read {
            Ok(bytes) => {
                self.memory.count_read(bytes, was_large);
                None
            }
            Err(why) => {
                if matches!(why, Closed::Protocol(Error::OutOfMemory { .. })) {
                    self.free_memory();
                }
                Some(why)
            }
        }
    }

    /// Whether a message of a connection has begun to arrive and is not complete.
    pub fn is_amid_message(&self, id: u64) -> bool {
        self.open.get(&id).is_some_and(Connection::is_amid_message)
    }

    /// Queues a reply. Returns whether its connection is open.
    pub fn push(&mut self, reply: Outgoing) -> bool {
        let id = reply.connection;
        let Some(connection) = self.open.get_mut(&id) else {
            return false;
        };
        connection.push(reply, self.clock.now());
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
            if let Err(why) = connection.write(self.clock.now()) {
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

    /// Whether a connection has bytes that are not written.
    pub fn have_output(&mut self) -> bool {
        self.open.values_mut().any(Connection::has_output)
    }

    /// Whether no request waits or runs in a lane.
    pub fn are_idle(&self) -> bool {
        self.open.values().all(Connection::is_idle)
    }

    /// Whether no bytes are on the way in either direction, as far as they can be seen.
    pub fn are_quiet(&mut self) -> bool {
        let mut connections = self.open.values_mut();
        connections.all(|of| of.is_between_messages())
            && !self.open.values().any(Connection::has_input)
    }

    /// Bytes that all connections hold, but for the oldest large message.
    #[cfg(test)]
    pub fn bounded_bytes(&self) -> usize {
        self.memory.bounded_bytes()
    }

    /// Connections that have sent more stray frames than allowed, and are read in turns.
    #[cfg(test)]
    pub fn excessive(&mut self) -> usize {
        let now = self.clock.now();
        let connections = self.open.values_mut();
        connections
            .map(|connection| usize::from(connection.strays.is_exceeded(now)))
            .sum()
    }

    /// Counts connections that have ended without a request.
    #[cfg(test)]
    pub fn count_vain(&mut self, connections: u64) {
        self.vain.count(connections, self.clock.now());
    }

    /// Bytes that have arrived and are not read.
    #[cfg(test)]
    pub fn unread_bytes(&self) -> u64 {
        let unread = |of: &Connection| rustix::io::ioctl_fionread(of).unwrap_or(0);
        self.open.values().map(unread).sum()
    }

    /// The clock of the deadlines.
    #[cfg(test)]
    pub fn clock(&mut self) -> &mut Clock {
        &mut self.clock
    }

    /// Connections, and how many entries there are of those that have sent no request and of ticks.
    #[cfg(test)]
    pub fn counts(&self) -> [usize; 3] {
        let silent = self.guests.iter().filter(|guest| !guest.has_asked);
        [self.open.len(), silent.count(), self.ticks.len()]
    }

    /// Reads nothing more from a connection, and only writes. One that is ready to be read again has ended.
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

    fn pass_time(&mut self, happened: &mut Vec<ConnectionEvent>) {
        let now = self.clock.now();
        self.end_accept_pause(now);
        if now < self.next_tick {
            return;
        }
        self.next_tick = now + TICK;
        self.end_stalled(now);
        while let Some(&(at, id)) = self.ticks.first()
            && at <= now
        {
            self.ticks.pop_first();
            let Some(connection) = self.open.get_mut(&id) else {
                continue;
            };
            match connection.tick(now) {
                Ok(()) => {
                    if connection.is_undecided(now) {
                        happened.push(ConnectionEvent::Undecided(id));
                    }
                    // Later than now: what is overdue and stays open is about to be read.
                    let next = connection.due().max(now + TICK);
                    self.schedule(id, next);
                    self.queue_output(id);
                }
                Err(why) => self.close(id, why),
            }
        }
    }

    fn schedule(&mut self, id: u64, at: Instant) {
        if let Some(connection) = self.open.get_mut(&id) {
            let earlier = std::mem::replace(&mut connection.next_tick, at);
            self.ticks.remove(&(earlier, id));
            self.ticks.insert((at, id));
        }
    }

    fn queue_output(&mut self, id: u64) {
        if self.open.get_mut(&id).is_some_and(Connection::has_output) {
            self.queue(id);
        }
    }

    fn queue(&mut self, id: u64) {
        if let Some(connection) = self.open.get_mut(&id)
            && !std::mem::replace(&mut connection.is_queued, true)
        {
            self.queued.push(id);
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

    /// Watches a connection for reading, or no longer.
    fn watch_for_reading(&mut self, id: u64, read: bool) {
        if let Some(connection) = self.open.get(&id) {
            let interest = connection.interest;
            self.watch(id, Interest { read, ..interest });
        }
    }

    /// Moves the connections with large messages behind all others, the oldest message first.
    fn put_large_last(&self, happened: &mut [ConnectionEvent]) {
        if self.memory.oldest().is_none() {
            return;
        }
        happened.sort_by_key(|what| match what {
            ConnectionEvent::Readable(id) => self.open.get(id).and_then(|of| of.large),
            ConnectionEvent::Wake | ConnectionEvent::Undecided(_) => None,
        });
    }

    /// Counts what a connection holds. While all hold too much together, the one that costs most is closed: an attack
    /// that keeps memory pays for its time, and one that is quick for its bytes.
    fn count(&mut self, id: u64) {
        let Some(connection) = self.open.get_mut(&id) else {
            return;
        };
        self.memory.count(id, connection);
        while self.memory.bounded_bytes() > self.bounds.held_bytes {
            let Some(dearest) = self.dearest(self.memory.oldest()) else {
                return;
            };
            self.close(dearest, Closed::Memory);
        }
    }

    /// The connection whose bytes cost most, but for `spared`.
    fn dearest(&self, spared: Option<u64>) -> Option<u64> {
        let now = self.clock.now();
        let holders = self.open.iter();
        let holders = holders.filter(|(id, of)| of.counted_bytes > 0 && spared != Some(**id));
        let dearest = holders.max_by_key(|(id, of)| (of.held_cost(now), **id));
        dearest.map(|(id, _)| *id)
    }

    /// Closes the connection whose bytes cost most, after the system had no memory for another one.
    fn free_memory(&mut self) {
        static LOG_LIMIT: RateLimited = RateLimited::per_second();
        if let Some(suppressed_lines) = LOG_LIMIT.permit(Instant::now()) {
            tracing::warn!(
                held_bytes = self.memory.held_bytes,
                suppressed_lines,
                "out of memory for a client's message; closing its connection and the one that holds most"
            );
        }
        if let Some(dearest) = self.dearest(None) {
            self.close(dearest, Closed::Memory);
        }
    }

    /// Closes the connections whose large messages stall while others wait for them.
    fn end_stalled(&mut self, now: Instant) {
        let is_stalled = |id: &u64| {
            let connection = self.open.get(id);
            connection.is_some_and(|of| of.silence(now) >= STALL_TIMEOUT && !of.has_input())
        };
        let stalled: Vec<_> = self.memory.awaited().filter(is_stalled).collect();
        for id in stalled {
            self.close(id, Closed::Memory);
        }
    }

    /// Closes a connection.
    pub fn close(&mut self, id: u64, why: Closed) {
        let Some(connection) = self.open.remove(&id) else {
            return;
        };
        if let Some(client) = &connection.client {
            client.peer.close();
        }
        self.guests.remove(&Guest::asking(id));
        if self.guests.remove(&Guest::silent(id)) {
            self.vain.count(1, self.clock.now());
        }
        self.ticks.remove(&(connection.next_tick, id));
        self.memory.remove(&connection);
        self.metrics.request_connections.set(self.open.len() as i64);
        static LOG_LIMIT: RateLimited = RateLimited::per_second();
        if !matches!(why, Closed::ByClient)
            && let Some(suppressed_lines) = LOG_LIMIT.permit(Instant::now())
        {
            tracing::debug!(connection = id, cause = %why, suppressed_lines, "a connection was closed");
        }
        static TOO_LARGE_LIMIT: RateLimited = RateLimited::new(Duration::from_secs(60));
        if matches!(&why, Closed::Protocol(Error::TooLarge { limit, .. }) if *limit > limits::MAX_COMMAND)
            && let Some(suppressed_lines) = TOO_LARGE_LIMIT.permit(Instant::now())
        {
            tracing::warn!(
                connection = id, cause = %why, suppressed_lines,
                "a client's message is larger than --max-message-gb; its connection was closed"
            );
        }
    }
}
