//! Request bodies: received under one budget, and parsed apart from the HTTP thread. One of at most [`MEDIUM`] bytes is parsed at a time,
//! and beside it a larger one.
//!
//! | bound | bytes |
//! | --- | --- |
//! | one body | `LIMIT` of its route; 413 beyond |
//! | all bodies that are being received or wait to be parsed | [`RECEIVED`]; 503 beyond |
//! | what bodies of at most [`SMALL`] bytes hold besides | [`SMALL`] per connection |
//! | one parsed body | its type; for quotas the bytes per tenant |

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use hyper::body::{Body as _, Frame};
use tokio::sync::Semaphore;
use tokio::task::yield_now;
use tokio::time::timeout;

use super::{Api, ApiError, BODY_LIMIT, detail, run_blocking};
use kvtier_common::sync::budget::{Budget, Charge};

/// Bytes of all large bodies together.
const RECEIVED: u64 = 40 << 20;

/// Largest body that is always received, bytes.
const SMALL: usize = 16 << 10;

/// Largest body that waits for no larger ones, bytes: 32,768 token ids as a list.
const MEDIUM: usize = 256 << 10;

/// How long the rest of a refused body is awaited.
const LINGER: Duration = Duration::from_secs(1);

/// What all requests of a server share.
pub struct Bodies {
    received: Arc<Budget>,
    /// Turns to parse a body of at most [`MEDIUM`] bytes, and a larger one.
    turns: [Arc<Semaphore>; 2],
}

impl Default for Bodies {
    fn default() -> Self {
        Self::new(RECEIVED)
    }
}

impl Bodies {
    fn new(received: u64) -> Self {
        Self {
            received: Budget::new(received),
            turns: [0; 2].map(|_| Arc::new(Semaphore::new(1))),
        }
    }
}

/// The body of a request, at most `LIMIT` bytes.
pub(super) struct Payload<const LIMIT: usize = BODY_LIMIT> {
    bytes: Vec<u8>,
    bodies: Arc<Bodies>,
    /// For the capacity of `bytes` beyond [`SMALL`].
    charges: Vec<Charge>,
}

impl<const LIMIT: usize> Payload<LIMIT> {
    /// Runs `read` on the body where it holds up no other request.
    pub(super) async fn read<T: Send + 'static>(
        self,
        read: impl FnOnce(&[u8]) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let turn = if self.bytes.len() > SMALL {
            // Never closed.
            let turn = &self.bodies.turns[usize::from(self.bytes.len() > MEDIUM)];
            Arc::clone(turn).acquire_owned().await.ok()
        } else {
            None
        };
        run_blocking(move || {
            // Also of a request whose client has disconnected.
            let _turn = turn;
            read(&self.bytes)
        })
        .await
    }

    async fn receive(&mut self, body: &mut Body) -> Result<(), ApiError> {
        check_len::<LIMIT>(body.size_hint().lower())?;
        while let Some(frame) = next(body).await {
            let frame = frame.map_err(|error| {
                let text = format!("the body was not received: {error}");
                detail(StatusCode::BAD_REQUEST, text)
            })?;
            if let Some(data) = frame.data_ref() {
                self.push(data)?;
            }
        }
        Ok(())
    }

    fn push(&mut self, data: &[u8]) -> Result<(), ApiError> {
        let len = self.bytes.len() + data.len();
        check_len::<LIMIT>(len as u64)?;
        let before = self.bytes.capacity();
        if len > before {
            let after = len.next_power_of_two().min(LIMIT);
            let more = after.saturating_sub(before.max(SMALL)) as u64;
            if more > 0 {
                let charge = self.bodies.received.take(more).ok_or_else(|| {
                    let most = self.bodies.received.limit() >> 20;
                    let text = format!(
                        "too many request bodies are being received (at most {most} MiB together); try again"
                    );
                    detail(StatusCode::SERVICE_UNAVAILABLE, text)
                })?;
                self.charges.push(charge);
            }
            let reserved = self.bytes.try_reserve_exact(after - self.bytes.len());
            reserved.map_err(|_| {
                let text = format!("out of memory for a body of {after} bytes; try again");
                detail(StatusCode::SERVICE_UNAVAILABLE, text)
            })?;
        }
        self.bytes.extend_from_slice(data);
        Ok(())
    }
}

/// Whether a body says that it is small enough to be outside the budget.
pub(super) fn is_small(body: &Body) -> bool {
    let most = body.size_hint().upper();
    most.is_some_and(|most| most <= SMALL as u64)
}

impl<const LIMIT: usize> FromRequest<Arc<Api>> for Payload<LIMIT> {
    type Rejection = ApiError;

    async fn from_request(request: Request, api: &Arc<Api>) -> Result<Self, ApiError> {
        let mut body = request.into_body();
        let mut payload = Self {
            bytes: Vec::new(),
            bodies: Arc::clone(&api.bodies),
            charges: Vec::new(),
        };
        match payload.receive(&mut body).await {
            Ok(()) => Ok(payload),
            Err(refused) => {
                drop(payload);
                // Else the client might see its connection end before the answer.
                let _ = timeout(LINGER, discard(&mut body, LIMIT)).await;
                Err(refused)
            }
        }
    }
}

/// Receives some bytes and forgets them.
async fn discard(body: &mut Body, most: usize) {
    let mut left = most;
    while let Some(Ok(frame)) = next(body).await {
        left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        if left == 0 {
            return;
        }
    }
}

/// The next part of a body, 64 KiB at most. Others have their turn before it, however fast it comes.
async fn next(body: &mut Body) -> Option<Result<Frame<Bytes>, axum::Error>> {
    yield_now().await;
    poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await
}

fn check_len<const LIMIT: usize>(len: u64) -> Result<(), ApiError> {
    if len <= LIMIT as u64 {
        return Ok(());
    }
    let most = LIMIT >> 20;
    let text = format!("the body has more than {most} MiB, the most that is allowed here");
    Err(detail(StatusCode::PAYLOAD_TOO_LARGE, text))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{OnceLock, mpsc};

    use axum::Extension;
    use tokio_stream_of::stream_of;

    use super::*;
    use crate::access::{Access, Role};
    use crate::health::Health;
    use kvtier_config::ServerConfig;

    /// Bodies that arrive in parts.
    mod tokio_stream_of {
        use std::convert::Infallible;
        use std::pin::Pin;
        use std::task::{Context, Poll};

        use axum::body::{Body, Bytes};
        use hyper::body::Frame;
        use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

        struct Parts(UnboundedReceiver<Bytes>);

        impl hyper::body::Body for Parts {
            type Data = Bytes;
            type Error = Infallible;

            fn poll_frame(
                mut self: Pin<&mut Self>,
                context: &mut Context<'_>,
            ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
                self.0
                    .poll_recv(context)
                    .map(|part| part.map(|part| Ok(Frame::data(part))))
            }
        }

        pub fn stream_of() -> (UnboundedSender<Bytes>, Body) {
            let (sender, parts) = unbounded_channel();
            (sender, Body::new(Parts(parts)))
        }
    }

    fn api(received: u64) -> Arc<Api> {
        let config = ServerConfig::from_flags(&["--l1-size-gb", "0.01"]).unwrap();
        Arc::new(Api {
            engine: OnceLock::new(),
            reload: OnceLock::new(),
            health: Arc::new(Health::default()),
            access: Arc::new(Access::open(&config.http).unwrap()),
            bodies: Arc::new(Bodies::new(received)),
            dashboard: Arc::default(),
        })
    }

    async fn receive(api: &Arc<Api>, body: Body) -> Result<Payload, ApiError> {
        Payload::from_request(Request::new(body), api).await
    }

    fn status<T>(outcome: Result<T, ApiError>) -> StatusCode {
        match outcome {
            Err(ApiError::Detail(status, _)) => status,
            Err(other) => panic!("{other:?}"),
            Ok(_) => StatusCode::OK,
        }
    }

    // proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
    #[tokio::test]
    async fn bodies_being_received_share_one_budget() {
        let api = api(1 << 20);
        let (sender, body) = stream_of();
        let holder = tokio::spawn({
            let api = Arc::clone(&api);
            async move { receive(&api, body).await.map(|payload| payload.bytes.len()) }
        });
        let half = || Bytes::from(vec![b' '; 600 << 10]);
        sender.send(half()).unwrap();
        while api.bodies.received.take(1 << 19).is_some() {
            yield_now().await;
        }
        // The first has 1 MiB less what is free, and is not complete.
        assert_eq!(
            status(receive(&api, Body::from(half())).await),
            StatusCode::SERVICE_UNAVAILABLE
        );
        let small = Body::from(vec![b' '; SMALL]);
        assert_eq!(status(receive(&api, small).await), StatusCode::OK);
        drop(sender);
        assert_eq!(holder.await.unwrap().unwrap(), 600 << 10);
        assert_eq!(
            status(receive(&api, Body::from(half())).await),
            StatusCode::OK
        );
    }

    #[tokio::test]
    async fn large_explanations_wait_before_their_body_is_received() {
        async fn explain(api: Arc<Api>, body: Body) -> String {
            let (api, role) = (axum::extract::State(api), Extension(Role::Read));
            match crate::explain::explain(api, role, Request::new(body)).await {
                Err(ApiError::Detail(_, text)) => text,
                Err(other) => panic!("{other:?}"),
                Ok(_) => panic!("there is no engine"),
            }
        }
        let api = api((1 << 20) - SMALL as u64);
        let (sender, body) = stream_of();
        let first = tokio::spawn(explain(Arc::clone(&api), body));
        let half = || Bytes::from(vec![b' '; 600 << 10]);
        sender.send(half()).unwrap();
        while !api.bodies.received.is_full() {
            yield_now().await;
        }
        let second = explain(Arc::clone(&api), Body::from(half()));
        let last = async {
            // Beside them.
            let small = Body::from(vec![b' '; SMALL]);
            let small = explain(Arc::clone(&api), small).await;
            drop(sender);
            small
        };
        let (second, small) = tokio::join!(second, last);
        assert_eq!(second, crate::NO_ENGINE, "it was not refused for the first");
        assert_eq!(small, crate::NO_ENGINE);
        assert_eq!(first.await.unwrap(), crate::NO_ENGINE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_above_the_limit_is_refused_before_it_is_received() {
        let api = api(RECEIVED);
        let large = Body::from(vec![b' '; BODY_LIMIT + 1]);
        assert_eq!(
            status(receive(&api, large).await),
            StatusCode::PAYLOAD_TOO_LARGE
        );
        let (sender, body) = stream_of();
        for _ in 0..9 {
            sender.send(Bytes::from(vec![b' '; 1 << 20])).unwrap();
        }
        // Its sender is still there.
        assert_eq!(
            status(receive(&api, body).await),
            StatusCode::PAYLOAD_TOO_LARGE
        );
        assert!(!api.bodies.received.is_full());
    }

    // proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
    #[tokio::test]
    async fn large_bodies_are_parsed_one_at_a_time_and_smaller_ones_beside_them() {
        static PARSED: AtomicUsize = AtomicUsize::new(0);
        let api = api(RECEIVED);
        let (begun, begins) = mpsc::channel();
        let mut gates = Vec::new();
        let mut tasks = Vec::new();
        for number in 0..8 {
            let body = Body::from(vec![b' '; MEDIUM + 1]);
            let payload = receive(&api, body).await.unwrap_or_else(|_| panic!());
            let (open, gate) = mpsc::channel::<()>();
            gates.push(open);
            let begun = begun.clone();
            tasks.push(tokio::spawn(payload.read(move |_| {
                let others = PARSED.fetch_add(1, Ordering::SeqCst);
                begun.send((number, others)).unwrap();
                let _ = gate.recv();
                PARSED.fetch_sub(1, Ordering::SeqCst);
            })));
            yield_now().await;
        }
        let (first, others) = begins.recv().unwrap();
        assert_eq!((first, others), (0, 0));
        // This thread, which is the only one of the runtime, is free meanwhile.
        for len in [2, MEDIUM] {
            let smaller = receive(&api, Body::from(vec![b' '; len])).await;
            let smaller = smaller.unwrap_or_else(|_| panic!());
            assert_eq!(smaller.read(<[u8]>::len).await.unwrap(), len);
        }
        assert!(begins.try_recv().is_err());
        drop(gates);
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        let order: Vec<_> = begins.try_iter().collect();
        assert_eq!(order, (1..8).map(|number| (number, 0)).collect::<Vec<_>>());
    }
}
