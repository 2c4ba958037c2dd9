//! The stream of a server's KV events, on the connection of a [`Client`](super::Client).
//!
//! The client requests it on each connection, and acknowledges each batch once the callback has returned. A stream begins with the
//! present: nothing that the last connection's stream said need be true of this one's server.

use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvtier_proto::request::{InstanceId, Subscription};
use kvtier_proto::response::{EventBatch, Response};

use crate::calls::Keyless;
use crate::error::ClientError;
use crate::message::{ClientReply, Incoming, Outgoing};
use crate::wire::Frames;

/// Limit of events in one batch, which is that of LMCache's server.
const MAX_EVENTS: i64 = 1024;

/// Cursor behind all events.
const PRESENT: i64 = i64::MAX;

/// News of a stream of KV events.
#[derive(Debug)]
pub enum KvEventUpdate<'a> {
    /// A new connection: earlier batches are void, and there is no stream before the first batch.
    Requested,
    /// The next batch. The first has no events.
    Batch(EventBatch<'a>),
    /// There is no stream on this connection, or no longer: the reason.
    Ended(String),
}

/// Consumer of a stream's news.
pub type KvEventCallback = Box<dyn FnMut(KvEventUpdate<'_>) + Send>;

/// State of the stream.
pub(super) struct KvEventStream {
    request: Outgoing,
    callback: KvEventCallback,
    /// Number of the request; none without a stream.
    uid: Option<u64>,
    is_answered: bool,
}

impl KvEventStream {
    pub fn new(model_name: &str, callback: KvEventCallback) -> Result<Self, ClientError> {
        let request = Keyless::SubscribeKvEvents(Subscription {
            // A server has one stream per instance, and no other subscriber hashes this number.
            instance: InstanceId((RandomState::new().hash_one(model_name) >> 2).cast_signed()),
            model_name,
            cursor: PRESENT,
            max_events: MAX_EVENTS,
        });
        Ok(Self {
            request: Outgoing::encode(&request)?,
            callback,
            uid: None,
            is_answered: false,
        })
    }

    /// Whether messages of this number are the stream's.
    pub fn has(&self, uid: u64) -> bool {
        self.uid == Some(uid)
    }

    /// Returns the request on a new connection.
    pub fn request(&mut self, uid: u64) -> Frames {
        (self.uid, self.is_answered) = (Some(uid), false);
        self.notify(KvEventUpdate::Requested);
        self.request.clone().into_message(uid)
    }

    /// Hands a message on; returns its acknowledgement if the stream goes on.
    pub fn receive(&mut self, incoming: Incoming) -> Option<Frames> {
        self.is_answered = true;
        let uid = incoming.uid;
        let reply = incoming.into_reply(self.request.operation, self.request.kind);
        let why = match reply.as_ref().map(ClientReply::response) {
            Ok(Ok(Response::EventBatch(batch))) if batch.enabled => {
                self.notify(KvEventUpdate::Batch(batch));
                return Some(Outgoing::acknowledgement(uid));
            }
            Ok(Ok(Response::EventBatch(_))) => {
                "the server keeps no KV events (--kv-event-log-size 0)".to_owned()
            }
            Ok(Ok(_)) => "the server has ended the stream of KV events".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        self.end(why);
        None
    }

    /// Ends a stream whose request was not answered by its deadline.
    pub fn expire(&mut self) {
        if !self.is_answered {
            self.end("the server does not answer a subscription to KV events".to_owned());
        }
    }

    fn end(&mut self, why: String) {
        self.uid = None;
        self.notify(KvEventUpdate::Ended(why));
    }

    fn notify(&mut self, update: KvEventUpdate<'_>) {
        // A panic is the callback's, and printed; the thread serves other requests too.
        let _ = catch_unwind(AssertUnwindSafe(|| (self.callback)(update)));
    }
}
