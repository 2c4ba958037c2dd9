//! The front end's loop: it serves a message at once, queues it in a lane or refuses it, sends replies, and ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvtier_proto::frames::{ClientMessage, MAX_PAYLOADS};
use kvtier_proto::generation::Generation;
use kvtier_proto::operation::{Lane as LaneKind, Operation};
use kvtier_proto::response::ResponseKind;
use kvtier_proto::wire::DecodeError;
use kvtier_proto::zmtp::{ZmtpLimits, ZmtpMessage};

use super::client::Budgets;
use super::connections::{ConnectionBounds, ConnectionEvent, Connections};
use super::dispatch::{self, QUICK_WORK, QUICK_WORK_ALONE, is_quick, log_older_client};
use super::lanes::LanePool;
use super::limits::{self, MAX_HEAD};
use super::names::lookup_number;
use super::outbox::{Inbox, Outgoing};
use super::request::{RequestJob, RequestSender, RequestServer};
use super::socket::RequestSocket;
use super::streams::Streams;
use kvtier_common::sync::RateLimited;

/// Longest sleep. Stopping wakes the thread.
const IDLE: Duration = Duration::from_secs(1);

/// Between two looks at the pools while they end.
const ENDING: Duration = Duration::from_millis(10);

/// How long the stop waits for pings, at most half of what it may take: some clients notice a refusal only by one, and
/// send one every 10 s.
const LAST_PINGS: Duration = Duration::from_secs(11);

/// Time between two checks whether anything is in flight.
const QUIET_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How long the stop waits for answers that no pool holds any more, and for the system to take the last bytes.
const LAST_ANSWERS: Duration = Duration::from_secs(2);
const LAST_BYTES: Duration = Duration::from_secs(1);

/// What the thread works on.
pub struct Front {
    pub(super) connections: Connections,
    pub(super) budgets: Budgets,
    inbox: Inbox,
    transfers: LanePool<RequestJob>,
    control: LanePool<RequestJob>,
    streams: Streams,
    pub(super) server: Arc<RequestServer>,
    pub(super) stop: Arc<AtomicBool>,
    happened: Vec<ConnectionEvent>,
    /// Whether one connection alone has something to be read.
    pub(super) is_alone: bool,
    messages: Vec<ZmtpMessage>,
}

/// Bounds of the connections, for messages of at most `max_message_bytes`.
pub(super) fn bounds(connections: usize, max_message_bytes: u64) -> ConnectionBounds {
    let frame_bytes = limits::max_frame(max_message_bytes);
    ConnectionBounds {
        connections,
        held_bytes: limits::HELD_BYTES,
        session: ZmtpLimits {
            frame_bytes,
            // One that shows that there are too many.
            message_frames: 2 + MAX_PAYLOADS + 1,
            message_bytes: frame_bytes + limits::PLAIN_REQUEST,
            command_bytes: limits::MAX_COMMAND,
        },
    }
}

impl Front {
    /// Not serving yet.
    ///
    /// # Errors
    /// The system's.
    pub fn new(
        socket: Arc<RequestSocket>,
        server: Arc<RequestServer>,
        inbox: Inbox,
        [transfers, control]: [LanePool<RequestJob>; 2],
        bounds: ConnectionBounds,
        request_bytes: u64,
    ) -> std::io::Result<Self> {
        let metrics = Arc::clone(server.engine.metrics());
        Ok(Self {
            connections: Connections::new(socket, inbox.fd(), bounds, metrics)?,
            budgets: Budgets::new(request_bytes, Arc::downgrade(&server.engine)),
            inbox,
            transfers,
            control,
            streams: Streams::new(Arc::clone(&server), server.outbox.clone()),
            server,
            stop: Arc::default(),
            happened: Vec::new(),
            is_alone: false,
            messages: Vec::new(),
        })
    }

    /// Serves until the stop flag is set.
    pub fn run(mut self) {
        let health = Arc::clone(&self.server.health);
        let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.serve()));
        match served {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::error!(%error, "polling the request socket failed");
                health.poison("front end");
            }
            Err(_) => health.poison("front end"),
        }
    }

    fn serve(&mut self) -> std::io::Result<()> {
        let busy_poll = self.server.engine.config().busy_poll;
        let mut last_work = Instant::now();
        while !self.is_stopping() {
            let polls = !busy_poll.is_zero() && last_work.elapsed() < busy_poll;
            if self.turn(if polls { Duration::ZERO } else { IDLE })? {
                last_work = Instant::now();
            } else if polls {
                std::thread::yield_now();
            }
        }
        self.end()
    }

    /// Whether the stop flag is set.
    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Sends the replies that wait, then serves or queues what arrives within `timeout`. Returns whether there was
    /// anything.
    pub(super) fn turn(&mut self, timeout: Duration) -> std::io::Result<bool> {
        let mut worked = self.send_replies();
        let mut happened = std::mem::take(&mut self.happened);
        self.wait(timeout, &mut happened)?;
        let is_readable = |what: &&ConnectionEvent| matches!(what, ConnectionEvent::Readable(_));
        self.is_alone = happened.iter().filter(is_readable).count() == 1;
        for what in happened.drain(..) {
            match what {
                ConnectionEvent::Wake => {
                    worked = true;
                    self.inbox.clear();
                }
                ConnectionEvent::Readable(id) => worked |= self.read(id),
                ConnectionEvent::Undecided(id) => self.answer_undecided(id),
            }
        }
        self.happened = happened;
        // What was answered at once.
        worked |= self.send_replies();
        if !worked {
            self.streams.prune();
        }
        Ok(worked)
    }

    /// Waits for the sockets and for replies.
    fn wait(
        &mut self,
        timeout: Duration,
        happened: &mut Vec<ConnectionEvent>,
    ) -> std::io::Result<()> {
        // Their wake-up may have come before the last replies were drained.
        let sleeps = !timeout.is_zero()
            && self.inbox.begin_sleep()
            && (timeout < IDLE || !self.is_stopping());
        let timeout = if sleeps { timeout } else { Duration::ZERO };
        let waited = self.connections.wait(timeout, happened);
        self.inbox.end_sleep();
        waited
    }

    /// Serves or queues what a connection has sent. Returns whether more is likely to follow at once: not after a
    /// heartbeat, nor from a connection that waits for its turn.
    fn read(&mut self, id: u64) -> bool {
        let mut messages = std::mem::take(&mut self.messages);
        let ended = self.connections.read(id, &mut messages);
        let is_busy = !messages.is_empty() || self.connections.is_amid_message(id);
        for message in messages.drain(..) {
            self.take(id, message.frames);
        }
        self.messages = messages;
        if let Some(why) = ended {
            self.connections.close(id, why);
        }
        is_busy && !self.connections.has_excess(id)
    }

    /// Serves a message of connection `id`, or queues it.
    pub(super) fn take(&mut self, id: u64, frames: Vec<Vec<u8>>) {
        let received = Instant::now();
        let head: usize = frames.iter().take(2).map(Vec::len).sum();
        let parsed = match head {
            0..=MAX_HEAD => ClientMessage::parse(frames.iter().map(Vec::as_slice)),
            _ => Err(DecodeError::new(format!(
                "uid and op have at most {MAX_HEAD} bytes"
            ))),
        };
        let message = match parsed {
            Ok(ClientMessage::Request(request)) => request,
            Ok(ClientMessage::Stream { uid, control }) => {
                return match self.streams.control(id, uid, control) {
                    Some(messages) => messages.into_iter().for_each(|it| self.send(it)),
                    None => self.connections.count_strays(id, frames.len()),
                };
            }
            Err(error) => {
                self.connections.count_strays(id, frames.len());
                self.server.engine.metrics().malformed_messages.inc();
                static LOG_LIMIT: RateLimited = RateLimited::per_second();
                if let Some(suppressed_lines) = LOG_LIMIT.permit(received) {
                    tracing::debug!(%error, suppressed_lines, "a message that is no request was dropped");
                }
                return;
            }
        };
        static LOG_LIMIT: RateLimited = RateLimited::per_second();
        let now = self.connections.now();
        let Some(client) = self.connections.client(id, || self.budgets.client(id)) else {
            // It sent a message and ended.
            return;
        };
        let resolved = match client.candidates.resolve(&message, &[Generation::G6]) {
            Ok(resolved) => resolved,
            Err(error) => {
                let reply = dispatch::unresolved(&self.server, client, &message, &error, received);
                if let Some(reply) = reply {
                    // Behind what was answered before.
                    self.server.outbox.send(reply);
                }
                self.connections.count_strays(id, frames.len());
                return;
            }
        };
        let decided = resolved
            .is_decided
            .then(|| client.undecided.take())
            .flatten();
        if resolved.generation != Generation::G6
            && resolved.is_decided
            && !std::mem::replace(&mut client.is_logged, true)
            && let Some(suppressed_lines) = LOG_LIMIT.permit(received)
        {
            log_older_client(&resolved, suppressed_lines);
        }
        let mut frames = frames.into_iter();
        let (Some(uid), Some(op)) = (frames.next(), frames.next()) else {
            return;
        };
        let payloads: Vec<_> = frames.collect();
        let bytes = payloads.iter().map(|payload| payload.len() as u64).sum();
        let is_numbered = (resolved.spec.operation, resolved.spec.response)
            == (Operation::Lookup, ResponseKind::Int);
        let lookup_number = is_numbered.then(|| lookup_number(self.server.first_number, &uid));
        let mut job = RequestJob {
            sender: RequestSender {
                peer: Arc::clone(&client.peer),
                uid,
                op,
                bytes,
                charge: None,
                resolved,
                lookup_number,
                received,
            },
            payloads,
        };
        if resolved.needs_decision {
            match client.defer(job, now) {
                None => return,
                Some(refused) => job = refused,
            }
        }
        for earlier in decided.into_iter().flat_map(|waiting| waiting.jobs) {
            self.take(id, earlier.into_frames());
        }
        let operation = resolved.spec.operation;
        if operation.lane() != LaneKind::Inline {
            self.connections.keep(id);
        }
        let Some(client) = self.connections.client(id, || self.budgets.client(id)) else {
            return;
        };
        if operation == Operation::SubscribeKvEvents {
            let messages = self.streams.open(&job).into_iter();
            return messages.for_each(|it| self.send(it));
        }
        if bytes > limits::max_payload(operation) {
            return self.refuse(job, "request_too_large");
        }
        let work = if is_quick(operation) {
            client.work(operation, dispatch::work(&self.server.engine, &job))
        } else {
            u64::MAX
        };
        let (pool, lane) = match operation.lane() {
            LaneKind::Inline => return self.serve_now(job),
            LaneKind::Transfer => (&self.transfers, &client.transfers),
            LaneKind::Control => (&self.control, &client.control),
        };
        // Only this thread puts jobs into lanes, so an idle one stays idle and no order is broken.
        let quick_work = if self.is_alone {
            QUICK_WORK_ALONE
        } else {
            QUICK_WORK
        };
        if work <= quick_work && lane.is_idle() {
            return self.serve_now(job);
        }
        if !job.sender.take_memory() {
            return self.refuse(job, "queue_full");
        }
        if let Err(job) = pool.push(lane, job) {
            self.refuse(job, "lane_full");
        }
    }

    /// Answers the requests of a connection that wait for the generation of its client, as far as that goes without it.
    fn answer_undecided(&mut self, id: u64) {
        let client = self.connections.client(id, || self.budgets.client(id));
        let undecided = client.and_then(|client| client.undecided.take());
        for job in undecided.into_iter().flat_map(|waiting| waiting.jobs) {
            self.serve_now(job);
        }
    }

    fn serve_now(&mut self, job: RequestJob) {
        self.server.serve(job, None);
    }

    /// Answers with the operation's "no" a request that would take too much memory.
    fn refuse(&mut self, job: RequestJob, reason: &'static str) {
        static LOG_LIMIT: RateLimited = RateLimited::per_second();
        if let Some(suppressed_lines) = LOG_LIMIT.permit(job.sender.received) {
            tracing::warn!(
                operation = job.sender.spec().operation.name(),
                bytes = job.sender.bytes,
                reason,
                suppressed_lines,
                "a client's request was refused"
            );
        }
        self.server.refuse(job.sender, reason);
    }

    /// Sends the replies that wait. Returns whether there were any.
    pub(super) fn send_replies(&mut self) -> bool {
        let replies: Vec<_> = self.inbox.drain().collect();
        let any = !replies.is_empty();
        // The event of a store is sent before its answer.
        for batch in self.streams.news() {
            self.send(batch);
        }
        replies.into_iter().for_each(|reply| self.send(reply));
        self.connections.write_queued();
        any
    }

    /// Queues a reply for its connection.
    pub(super) fn send(&mut self, reply: Outgoing) {
        let connection = reply.connection;
        if !self.connections.push(reply) {
            self.server.engine.metrics().undeliverable.inc();
            static LOG_LIMIT: RateLimited = RateLimited::per_second();
            if let Some(suppressed_lines) = LOG_LIMIT.permit(Instant::now()) {
                tracing::debug!(
                    connection,
                    suppressed_lines,
                    "a reply could not be delivered: its client has gone"
                );
            }
        }
    }

    /// Ends the connections when nothing is in flight, so that no client waits for an answer that never comes. If there is no
    /// such moment, answers every request that has been read, hands the answers to the system, and ends them then.
    fn end(&mut self) -> std::io::Result<()> {
        self.connections.end_accepting();
        // What has arrived by now.
        self.turn(Duration::ZERO)?;
        let stop_timeout = self.server.engine.config().stop_timeout;
        let until = Instant::now() + stop_timeout / 2;
        self.serve_last_pings(until.min(Instant::now() + LAST_PINGS))?;
        // What waits for a tier, and then for a GPU: requests that the lanes still hold may wait for its driver. Lookups
        // have what L1 has from here on.
        self.server.engine.end_waits();
        self.serve_until_quiet(until.min(Instant::now() + stop_timeout / 8))?;
        self.server.engine.end_transfers();
        self.transfers.close();
        self.control.close();
        while !(self.transfers.has_ended() && self.control.has_ended()) {
            self.send_within(ENDING)?;
        }
        // What the last requests have begun.
        self.server.engine.end_transfers();
        let until = Instant::now() + LAST_ANSWERS;
        while self.server.has_unanswered() && Instant::now() < until {
            self.send_within(ENDING)?;
        }
        self.send_replies();
        let until = Instant::now() + LAST_BYTES;
        while self.connections.have_output() && Instant::now() < until {
            self.send_within(ENDING)?;
        }
        self.connections.finish();
        Ok(())
    }

    /// Serves on while requests wait for a ping of their client, within bounds. A retrieve whose client has not noticed
    /// that it is refused stays without an answer, which it would take for data.
    fn serve_last_pings(&mut self, until: Instant) -> std::io::Result<()> {
        let engine = Arc::clone(&self.server.engine);
        while (engine.holds_answers() || !self.connections.undecided().is_empty())
            && Instant::now() < until
        {
            self.turn(ENDING)?;
        }
        Ok(())
    }

    /// Serves on until nothing is in flight, and ends all connections then. After `until` the stop goes on in any case.
    fn serve_until_quiet(&mut self, until: Instant) -> std::io::Result<()> {
        while !self.is_quiet() {
            if Instant::now() >= until {
                return Ok(());
            }
            self.turn(QUIET_POLL_INTERVAL)?;
        }
        self.connections.finish();
        Ok(())
    }

    /// Whether no client waits for an answer or has sent anything that is not served.
    fn is_quiet(&mut self) -> bool {
        for id in self.connections.undecided() {
            self.answer_undecided(id);
        }
        // In this order: a request has left its lane when its reply is counted, and is counted until its answer is in the outbox.
        let is_answered = self.connections.are_idle() && !self.server.has_unanswered();
        self.send_replies();
        is_answered && self.connections.are_quiet()
    }

    /// Sends replies for at most `timeout`; requests stay unread.
    fn send_within(&mut self, timeout: Duration) -> std::io::Result<()> {
        self.send_replies();
        let mut happened = std::mem::take(&mut self.happened);
        self.wait(timeout, &mut happened)?;
        for what in happened.drain(..) {
            match what {
                ConnectionEvent::Wake => self.inbox.clear(),
                // The client may have ended, or goes on asking: neither keeps the others waiting.
                ConnectionEvent::Readable(id) => self.connections.ignore_requests(id),
                ConnectionEvent::Undecided(id) => self.answer_undecided(id),
            }
        }
        self.happened = happened;
        self.connections.write_queued();
        Ok(())
    }
}
