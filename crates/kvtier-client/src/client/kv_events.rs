//! The stream of a server's KV events, on the connection of a [`Client`](super::Client).
//!
//! The client requests it on each connection, and acknowledges each batch once the callback has returned. A stream begins with the
//! present: nothing that the last connection's stream said need be true of this one's server. One that is not answered in time or that
//! ends is requested again, unless the server has refused it. Batches of kvtier servers with tiers have events of these too, of medium `STORAGE`.

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

/// News of a stream of KV events.
#[derive(Debug)]
pub enum KvEventUpdate<'a> {
    /// A new connection, or a new stream on it: earlier batches are void, and there is no stream before the first batch.
    Requested,
    /// The next batch. The first has no events.
    Batch(EventBatch<'a>),
    /// There is no stream on this connection, or no longer: the reason. It may be back on the same connection.
    Ended(String),
}

/// Consumer of a stream's news.
pub type KvEventCallback = Box<dyn FnMut(KvEventUpdate<'_>) + Send>;

#[derive(PartialEq)]
enum EventStreamState {
    /// Not answered yet.
    Requested,
    Open,
    /// The callback knows that there is none.
    Ended,
}

/// A stream and its consumer.
pub(super) struct KvEventStream {
    request: Outgoing,
    callback: KvEventCallback,
    /// Number of the request; none before the first one, and of a stream that is not requested again.
    uid: Option<u64>,
    state: EventStreamState,
}

impl KvEventStream {
    pub fn new(model_name: &str, callback: KvEventCallback) -> Result<Self, ClientError> {
        let request = Keyless::SubscribeKvEvents(Subscription {
            // A server has one stream per instance, and no other subscriber hashes this number.
            instance: InstanceId((RandomState::new().hash_one(model_name) >> 2).cast_signed()),
            model_name,
            cursor: Subscription::PRESENT_WITH_TIERS,
            max_events: MAX_EVENTS,
        });
        Ok(Self {
            request: Outgoing::encode(&request)?,
            callback,
            uid: None,
            state: EventStreamState::Requested,
        })
    }

    /// Whether messages of this number are the stream's.
    pub fn has(&self, uid: u64) -> bool {
        self.uid == Some(uid)
    }

    /// Returns the request. The callback hears of one on a new connection only.
    pub fn request(&mut self, uid: u64, is_new_connection: bool) -> Frames {
        self.uid = Some(uid);
        if is_new_connection {
            self.state = EventStreamState::Requested;
            self.notify(KvEventUpdate::Requested);
        }
        self.request.clone().into_message(uid)
    }

    /// Hands a message on; returns its acknowledgement if the stream goes on.
    pub fn receive(&mut self, incoming: Incoming) -> Option<Frames> {
        let uid = incoming.uid;
        let reply = incoming.into_reply(self.request.operation, self.request.kind);
        let why = match reply.as_ref().map(ClientReply::response) {
            Ok(Ok(Response::EventBatch(batch))) if batch.enabled => {
                if std::mem::replace(&mut self.state, EventStreamState::Open)
                    == EventStreamState::Ended
                {
                    self.notify(KvEventUpdate::Requested);
                }
                self.notify(KvEventUpdate::Batch(batch));
                return Some(Outgoing::acknowledgement(uid));
            }
            Ok(Ok(Response::EventBatch(_))) => {
                "the server keeps no KV events (--kv-event-log-size 0)".to_owned()
            }
            Ok(Ok(_)) => {
                self.end("the server has ended the stream of KV events".to_owned());
                return None;
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        // Refused, as another request would be.
        self.uid = None;
        self.end(why);
        None
    }

    /// Ends a stream whose request was not answered by its deadline. Returns whether there is none, so that it is requested again.
    pub fn expire(&mut self) -> bool {
        if self.state == EventStreamState::Requested {
            self.end("the server does not answer a subscription to KV events".to_owned());
        }
        self.state == EventStreamState::Ended
    }

    fn end(&mut self, why: String) {
        self.state = EventStreamState::Ended;
        self.notify(KvEventUpdate::Ended(why));
    }

    fn notify(&mut self, update: KvEventUpdate<'_>) {
        // A panic is the callback's, and printed; the thread serves other requests too.
        let _ = catch_unwind(AssertUnwindSafe(|| (self.callback)(update)));
    }
}
