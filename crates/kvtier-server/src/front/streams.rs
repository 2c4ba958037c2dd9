//! Streams of KV events: a batch at once, and one more for each acknowledgement as soon as there is something to tell.
//!
//! The front's thread alone has them, so there is no lock. A stream without an acknowledgement is an entry here and nothing else:
//! the log is bounded and forgets what it has not read. One with an acknowledgement and nothing to read is woken by the
//! next event.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_core::cache::Events;
use kvtier_engine::{Engine, TierChunks};
use kvtier_proto::frames::StreamControl;
use kvtier_proto::key::SkipTokens;
use kvtier_proto::request::{InstanceId, Request, Subscription};

use super::client::Peer;
use super::outbox::{Outbox, Outgoing};
use super::request::{RequestJob, RequestServer, outgoing};

/// Streams at once: one for each engine of a host, and then some.
const MAX_STREAMS: usize = 1024;

/// Events of a batch, at most.
const MAX_EVENTS: i64 = 1024;

/// Longest name of a model, bytes.
const MAX_MODEL_NAME: usize = 1024;

/// An open stream.
struct Stream {
    peer: Arc<Peer>,
    uid: Vec<u8>,
    op: Vec<u8>,
    model_name: Box<str>,
    /// The last event that it has received or that is not for it.
    cursor: u64,
    max_events: usize,
    /// For a client of kvtier's, if there are tiers.
    tiers: Option<TierChunks>,
    /// Whether it has had no batch yet: its first one may be empty.
    is_first: bool,
    /// Batches that may be sent: at most two, the one that waits for events and the next.
    credits: u8,
}

impl Stream {
    /// The stream that a request asks for, and the worker that does.
    ///
    /// # Errors
    /// The reason for the metrics.
    fn asked(job: &RequestJob, engine: &Engine) -> Result<(InstanceId, Self), &'static str> {
        let sender = &job.sender;
        let payloads: Vec<_> = job.payloads.iter().map(Vec::as_slice).collect();
        let decoded = Request::decode(sender.spec(), &payloads, &mut SkipTokens);
        let Ok(Request::SubscribeKvEvents(asked)) = decoded else {
            return Err("undecodable");
        };
        let is_good = asked.cursor >= 0
            && (1..=MAX_EVENTS).contains(&asked.max_events)
            && asked.model_name.len() <= MAX_MODEL_NAME;
        let has_tiers = is_good && asked.cursor == Subscription::PRESENT_WITH_TIERS;
        let stream = Self {
            peer: Arc::clone(&sender.peer),
            uid: sender.uid.clone(),
            op: sender.op.clone(),
            model_name: asked.model_name.into(),
            cursor: asked.cursor as u64,
            max_events: asked.max_events as usize,
            tiers: has_tiers
                .then(|| engine.tier_chunks(asked.model_name))
                .flatten(),
            is_first: true,
            credits: 1,
        };
        is_good
            .then_some((asked.instance, stream))
            .ok_or("bad_arguments")
    }

    /// Adds the batches that it may have, as far as there is something to tell. Returns whether it goes on.
    fn advance(&mut self, engine: &Engine, news: &News, messages: &mut Vec<Outgoing>) -> bool {
        while self.credits > 0 && !self.peer.replies.is_full() {
            let mut read = engine.kv_events(&self.model_name, self.cursor, self.max_events);
            let mut has_news = false;
            if let (Some(known), Some(read)) = (&mut self.tiers, &mut read) {
                engine.follow_tiers(known, read);
                has_news = known.has_news();
            }
            match &read {
                None if !self.is_first => return false,
                None => {}
                Some(read) => {
                    self.cursor = read.next_cursor;
                    if !self.is_first && !read.lost && read.events.is_empty() && !has_news {
                        if self.tiers.as_ref().is_some_and(TierChunks::is_behind) {
                            news.announce();
                        }
                        break;
                    }
                }
            }
            self.is_first = false;
            self.credits -= 1;
            messages.push(self.batch(engine, read.as_ref()));
        }
        true
    }

    /// The batch of these events.
    fn batch(&self, engine: &Engine, read: Option<&Events>) -> Outgoing {
        let payload = engine.kv_event_batch(read, self.tiers.as_ref()).payload;
        outgoing(&self.peer, self.uid.clone(), self.op.clone(), payload)
    }

    /// The message that ends it.
    fn end(self) -> Outgoing {
        outgoing(&self.peer, self.uid, self.op, None)
    }
}

/// Whether there are events that a stream waits for.
#[derive(Clone)]
struct News {
    is_there: Arc<AtomicBool>,
    outbox: Outbox,
}

impl News {
    /// Wakes the front's thread for them, after what it does now.
    fn announce(&self) {
        self.is_there.store(true, Ordering::Release);
        self.outbox.wake();
    }
}

/// All open streams.
pub struct Streams {
    server: Arc<RequestServer>,
    /// By the worker that subscribes: it has one, the latest.
    open: HashMap<InstanceId, Stream>,
    news: News,
}

impl Streams {
    /// None yet. News wakes the thread of `outbox`.
    pub fn new(server: Arc<RequestServer>, outbox: Outbox) -> Self {
        let news = News {
            is_there: Arc::default(),
            outbox,
        };
        let announced = news.clone();
        server
            .engine
            .wake_by_kv_events(move || announced.announce());
        Self {
            server,
            open: HashMap::new(),
            news,
        }
    }

    /// Opens a stream; returns the messages of it and of the one whose place it takes. A bad request is not answered, as by
    /// LMCache's server.
    pub fn open(&mut self, job: &RequestJob) -> Vec<Outgoing> {
        let operation = job.sender.spec().operation.name();
        let metrics = Arc::clone(self.server.engine.metrics());
        let (instance, mut stream) = match Stream::asked(job, &self.server.engine) {
            Ok(asked) => asked,
            Err(reason) => {
                metrics.refused(operation, reason);
                return Vec::new();
            }
        };
        metrics.answered(operation, job.sender.received.elapsed());
        let replaced = self.open.remove(&instance).map(Stream::end);
        let mut messages: Vec<_> = replaced.into_iter().collect();
        self.prune();
        if self.open.len() >= MAX_STREAMS {
            metrics.refused(operation, "too_many_streams");
            messages.push(stream.batch(&self.server.engine, None));
            messages.push(stream.end());
            return messages;
        }
        stream.advance(&self.server.engine, &self.news, &mut messages);
        self.open.insert(instance, stream);
        self.count();
        messages
    }

    /// Hears a client's word about a stream; returns its messages, or nothing if there is no such stream.
    pub fn control(
        &mut self,
        connection: u64,
        uid: &[u8],
        control: StreamControl,
    ) -> Option<Vec<Outgoing>> {
        let is_it = |stream: &Stream| stream.peer.id == connection && stream.uid == uid;
        let (instance, stream) = self.open.iter_mut().find(|(_, stream)| is_it(stream))?;
        let instance = *instance;
        let mut messages = Vec::new();
        let goes_on = match control {
            StreamControl::Cancel => false,
            StreamControl::Ack => {
                stream.credits = 2.min(stream.credits + 1);
                stream.advance(&self.server.engine, &self.news, &mut messages)
            }
        };
        if !goes_on {
            messages.extend(self.open.remove(&instance).map(Stream::end));
            self.count();
        }
        Some(messages)
    }

    /// The batches of streams that waited for events, if there are some.
    pub fn news(&mut self) -> Vec<Outgoing> {
        let is_there = &self.news.is_there;
        if !is_there.load(Ordering::Relaxed) || !is_there.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        self.prune();
        let mut messages = Vec::new();
        for stream in self.open.values_mut() {
            stream.advance(&self.server.engine, &self.news, &mut messages);
        }
        messages
    }

    /// Forgets streams whose connection has ended.
    pub fn prune(&mut self) {
        if !self.open.is_empty() {
            self.open.retain(|_, stream| !stream.peer.is_closed());
            self.count();
        }
    }

    fn count(&self) {
        self.server.engine.set_kv_event_subscribers(self.open.len());
    }
}
