//! The stream of KV events of LMCache's clients: what a model can hit, as batches of the protocol.

use std::borrow::Cow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use kvtier_core::cache::{ChunkEvent, Events};
use kvtier_observe::api::KvEvents;
use kvtier_proto::operation::Operation;
use kvtier_proto::response::{EventBatch, EventRecord, Response};

use super::{Engine, EngineAnswer};

/// Name of the optional feature by which LMCache's clients up to 0.5.6 recognize a server with such a stream.
pub const KV_EVENTS_FEATURE: &str = "kv_event_stream";

/// What the stream needs beside the log.
pub struct KvEventSource {
    /// Whether there is a log.
    is_on: bool,
    /// Start of this process in nanoseconds: the log begins with it.
    incarnation: i64,
    /// Streams that are open.
    pub subscribers: AtomicUsize,
}

impl KvEventSource {
    /// For a log of this size.
    pub fn new(log_size: u32) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let nanos = now.unwrap_or_default().as_nanos();
        Self {
            is_on: log_size > 0,
            incarnation: i64::try_from(nanos).unwrap_or(i64::MAX),
            subscribers: AtomicUsize::new(0),
        }
    }
}

impl Engine {
    /// Whether there is a log of KV events.
    pub fn has_kv_events(&self) -> bool {
        self.context.kv_events.is_on
    }

    /// Whether the tokens of a request's prompt are to be kept, as it may make chunks resident.
    pub fn announces(&self, operation: Operation) -> bool {
        let may_store = match operation {
            Operation::Store | Operation::PrepareStore | Operation::CommitStore => true,
            Operation::Lookup => self.context.l2.is_some(),
            _ => false,
        };
        may_store && self.has_kv_events()
    }

    /// The events of a model behind `cursor`; see [`kvtier_core::cache::Cache::events`].
    pub fn kv_events(&self, model_name: &str, cursor: u64, max: usize) -> Option<Events> {
        self.context.l1.cache.events(model_name, cursor, max)
    }

    /// Calls `wake` when there is news; see [`kvtier_core::cache::Cache::wake_by_events`].
    pub fn wake_by_kv_events(&self, wake: impl Fn() + Send + Sync + 'static) {
        self.context.l1.cache.wake_by_events(wake);
    }

    /// Notes the number of open streams.
    pub fn set_kv_event_subscribers(&self, number: usize) {
        let subscribers = &self.context.kv_events.subscribers;
        subscribers.store(number, Ordering::Relaxed);
    }

    /// The batch with these events; without a log it says that there is none.
    pub fn kv_event_batch(&self, read: Option<&Events>) -> EngineAnswer {
        let batch = EventBatch {
            enabled: read.is_some(),
            incarnation: self.context.kv_events.incarnation,
            next_cursor: read.map_or(0, |read| read.next_cursor as i64),
            lost: read.is_some_and(|read| read.lost),
            events: read.map_or(Vec::new(), |read| {
                read.events.iter().map(|event| record(event)).collect()
            }),
        };
        EngineAnswer::from(Response::EventBatch(batch))
    }
}

fn record(event: &ChunkEvent) -> EventRecord<'_> {
    let stored = event.stored.as_ref();
    let parent = stored.and_then(|stored| stored.parent.as_ref());
    EventRecord {
        seq: event.seq as i64,
        kind: if stored.is_some() {
            "stored"
        } else {
            "removed"
        }
        .into(),
        medium: "CPU".into(),
        model_name: (&*event.model_name).into(),
        block_hashes: event.hashes.iter().map(|hash| hash.0[..].into()).collect(),
        parent_block_hash: parent.map(|parent| Cow::from(&parent.0[..])),
        token_ids: stored.map_or(&[][..], |stored| &stored.tokens).into(),
    }
}

impl super::Context {
    /// The state of log and streams. Stores have their tokens with them, so none is unbound, and no bus drops an event.
    pub fn kv_events_status(&self) -> KvEvents {
        let log = self.l1.cache.event_log();
        let state = log.unwrap_or_default();
        KvEvents {
            enabled: log.is_some(),
            incarnation: self.kv_events.incarnation,
            log_depth: state.depth,
            log_capacity: state.capacity,
            next_seq: log.map_or(1, |state| state.next_seq),
            lost_markers: 0,
            unbound_stores: 0,
            subscribers: self.kv_events.subscribers.load(Ordering::Relaxed),
        }
    }
}
