//! Lookups of a [`Client`]: a request, then questions for its result until it is known.

use std::time::{Duration, Instant};

use kvtier_proto::key::{CacheKey, TokenWriter};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{Request, Seconds};

use super::future::{Promise, channel};
use super::{Client, Future};
use crate::answers;
use crate::calls::wait_request;
use crate::error::ClientError;

/// How long the server may wait for a lookup's result before it is asked again.
const MAX_SERVER_WAIT: Duration = Duration::from_secs(1);

/// A lookup whose result is awaited.
pub(super) struct LookupPoll {
    client: Client,
    request_id: String,
    deadline: Instant,
    timeout: Duration,
    /// The largest valid result in chunks; in tokens if the chunk size is unknown.
    limit: u64,
    /// Whether the server has answered that it has no result yet.
    is_pending: bool,
    promise: Promise<u64>,
}

impl LookupPoll {
    /// Sends the request of a lookup for a handle that does not keep the client open.
    pub(super) fn start<T: TokenWriter + Clone>(
        client: Client,
        key: &CacheKey<'_, T>,
        timeout: Duration,
    ) -> Future<u64> {
        let (promise, future) = channel(Operation::Lookup);
        let named = key.chunk_tokens.map(u64::from);
        let poll = Self {
            client: client.clone(),
            request_id: key.request_id.to_owned(),
            deadline: Instant::now() + timeout,
            timeout,
            limit: key.end / named.or_else(|| client.chunk_tokens()).unwrap_or(1),
            is_pending: false,
            promise,
        };
        let request = Request::Lookup {
            key: key.clone(),
            tp_size: i64::from(key.world_size),
        };
        client.submit_then(&request, timeout, move |reply| {
            match reply.and_then(|reply| answers::nothing(&reply)) {
                Ok(()) => poll.ask(),
                Err(error) => poll.fail(error),
            }
        });
        future
    }

    fn ask(mut self) {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return self.time_out(None);
        }
        // The server answers before the client's own deadline, which is for a server that does not.
        let wait = MAX_SERVER_WAIT.min(left.mul_f64(0.9));
        let client = self.client.clone();
        let request_id = self.request_id.clone();
        client.submit_then(
            &wait_request(&request_id, wait),
            left,
            move |reply| match reply.and_then(|reply| answers::hits(&reply, self.limit)) {
                Ok(Some(chunks)) => self.promise.keep(Ok(chunks)),
                Ok(None) => {
                    self.is_pending = true;
                    self.ask();
                }
                // Of the last question alone.
                Err(ClientError::Timeout { no_connection, .. }) => self.time_out(no_connection),
                Err(error) => self.fail(error),
            },
        );
    }

    /// Fails for the whole time of the lookup.
    fn time_out(self, no_connection: Option<String>) {
        let (operation, waited) = (Operation::Lookup, self.timeout);
        let endpoint = self.client.endpoint().to_owned();
        let error = if self.is_pending {
            ClientError::Pending {
                operation,
                endpoint,
                waited,
            }
        } else {
            ClientError::Timeout {
                operation,
                endpoint,
                waited,
                no_connection,
            }
        };
        self.fail(error);
    }

    fn fail(self, error: ClientError) {
        end_failed(&self.client, &self.request_id, &error);
        self.promise.keep(Err(error));
    }
}

/// Ends the session of a lookup that has failed, if the server may hold something for it. Sessions of a lost connection and of a
/// closed client end by themselves.
fn end_failed(client: &Client, request_id: &str, error: &ClientError) {
    if matches!(
        error,
        ClientError::Timeout { .. }
            | ClientError::Pending { .. }
            | ClientError::Degraded { .. }
            | ClientError::Unexpected { .. }
    ) {
        client.end_session(request_id).forget();
    }
}

/// [`Client::find`] for a handle that does not keep the client open.
pub(super) fn find<T: TokenWriter + Clone>(
    client: Client,
    key: &CacheKey<'_, T>,
    timeout: Duration,
) -> Future<Vec<bool>> {
    let (promise, future) = channel(Operation::Find);
    let asked = key.end / key.chunk_tokens.map_or(1, u64::from).max(1);
    let request_id = key.request_id.to_owned();
    let request = Request::Find {
        key: key.clone(),
        timeout: server_wait(timeout),
    };
    client.clone().submit_then(&request, timeout, move |reply| {
        let found = reply.and_then(|reply| answers::found(&reply, asked));
        if let Err(error) = &found {
            end_failed(&client, &request_id, error);
        }
        promise.keep(found);
    });
    future
}

/// The wait of a server that is to answer before its client's deadline, which is for a server that does not.
fn server_wait(left: Duration) -> Seconds {
    Seconds::Fraction(left.mul_f64(0.9).as_secs_f64())
}
