//! Connections: taken up to a bound, with or without TLS, each with its deadlines.
//!
//! | a client that is slow | is disconnected after |
//! | --- | --- |
//! | in the TLS handshake | [`HANDSHAKE`] |
//! | in the head of a request, or between two requests | [`HEAD`] |
//! | in the body of a request | [`super::REQUEST_TIMEOUT`], with the rest of the request |
//! | in reading an answer | [`ANSWER`] |
//!
//! At the bound a new connection takes the place of the one that has waited longest for a request. A share of the
//! connections is kept from requests that take long: all but `/healthcheck` are refused beyond [`requests`].

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tower_service::Service as _;

use super::detail;
use super::gate::{OPEN, Peer};
use super::waiting::{Seat, Waiting};
use crate::access::Access;

/// Connections at once.
pub(super) const CONNECTIONS: usize = 256;

/// Requests served at once with this many connections, beside those for [`OPEN`]; the next one is answered with 503.
fn requests(connections: usize) -> usize {
    connections - connections / 8
}

/// For the TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// For the head of a request, counted from the end of the one before.
const HEAD: Duration = Duration::from_secs(30);

/// For the first head of a connection that was taken before the stop: its client may be about to send it.
const LAST_HEAD: Duration = Duration::from_millis(200);

/// For an answer that the client does not read as it is sent.
const ANSWER: Duration = Duration::from_secs(30);

/// Most bytes of a request's head; a longer one is answered with 431.
const HEAD_BYTES: usize = 64 << 10;

/// Pause after the system has no connection to give, such as without a file descriptor.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves `router` until `stop` resolves, and then finishes the requests in flight.
pub(super) async fn serve(
    listener: TcpListener,
    access: Arc<Access>,
    router: Router,
    connections: usize,
    stop: impl Future<Output = ()>,
) {
    let slots = Arc::new(Semaphore::new(connections));
    let requests = Arc::new(Semaphore::new(requests(connections)));
    let waiting = Arc::new(Waiting::default());
    let stopping = watch::Sender::new(false);
    let mut stop = pin!(stop);
    loop {
        let (stream, peer, slot) = tokio::select! {
            () = &mut stop => break,
            accepted = accept(&listener, &slots, &waiting) => accepted,
        };
        let (access, stopping) = (Arc::clone(&access), stopping.subscribe());
        let served = Served {
            peer,
            router: router.clone(),
            requests: Arc::clone(&requests),
            seat: waiting.add(),
        };
        tokio::spawn(async move {
            let seat = Arc::clone(&served.seat);
            tokio::select! {
                biased;
                () = seat.closed() => tracing::debug!(%peer, "an idle connection to the HTTP API was closed for a new one"),
                () = connect(stream, access, served, stopping) => {}
            }
            drop(slot);
        });
    }
    drop(listener);
    stopping.send_replace(true);
    // Every connection has one. Never closed.
    let all = u32::try_from(connections).unwrap_or(u32::MAX);
    let _ = slots.acquire_many(all).await;
}

async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
    waiting: &Waiting,
) -> (TcpStream, SocketAddr, OwnedSemaphorePermit) {
    let (stream, peer) = loop {
        match listener.accept().await {
            Ok(accepted) => break accepted,
            Err(error) => {
                tracing::debug!(%error, "a connection to the HTTP API could not be taken");
                sleep(PAUSE).await;
            }
        }
    };
    let slot = match Arc::clone(slots).try_acquire_owned() {
        Ok(slot) => Ok(slot),
        Err(_) => tokio::select! {
            slot = Arc::clone(slots).acquire_owned() => slot,
            () = waiting.close_oldest() => Arc::clone(slots).acquire_owned().await,
        },
    };
    match slot {
        Ok(slot) => (stream, peer, slot),
        // Never closed.
        Err(_) => std::future::pending().await,
    }
}

/// What a connection is served with.
struct Served {
    peer: SocketAddr,
    router: Router,
    /// Requests that may be handled.
    requests: Arc<Semaphore>,
    seat: Arc<Seat>,
}

/// Serves one connection, after a handshake where there is TLS.
async fn connect(
    stream: TcpStream,
    access: Arc<Access>,
    served: Served,
    mut stopping: watch::Receiver<bool>,
) {
    // Answers are short and complete; an option that is refused costs some milliseconds.
    let _ = stream.set_nodelay(true);
    let peer = served.peer;
    let Some(settings) = access.tls() else {
        return talk(Box::new(stream), served, stopping).await;
    };
    let handshake = timeout(HANDSHAKE, TlsAcceptor::from(settings).accept(stream));
    let shaken = tokio::select! {
        biased;
        shaken = handshake => shaken,
        () = last_head(&mut stopping) => return,
    };
    match shaken {
        Ok(Ok(stream)) => talk(Box::new(stream), served, stopping).await,
        Ok(Err(error)) => tracing::debug!(%peer, %error, "no TLS with this client"),
        Err(_) => tracing::debug!(%peer, "the TLS handshake took too long"),
    }
}

/// Until the server stops.
async fn stop(stopping: &mut watch::Receiver<bool>) {
    // Also ends when the sender was dropped.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

/// Until the time of a connection without a request is over, after a stop.
async fn last_head(stopping: &mut watch::Receiver<bool>) {
    stop(stopping).await;
    sleep(LAST_HEAD).await;
}

/// A connection, with or without TLS: hyper is compiled for one type.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Serves one connection. At a stop the request that it has sent, or is about to send first, is answered.
async fn talk(stream: Box<dyn Stream>, served: Served, mut stopping: watch::Receiver<bool>) {
    let peer = served.peer;
    let has_asked = AtomicBool::new(false);
    let service = service_fn(|mut request: Request<Incoming>| {
        has_asked.store(true, Ordering::Relaxed);
        let handling = served.seat.begin();
        let turn = match request.uri().path() {
            OPEN => Ok(None),
            _ => Arc::clone(&served.requests).try_acquire_owned().map(Some),
        };
        request.extensions_mut().insert(Peer(peer));
        let hosts = request.headers().get_all(header::HOST).iter().count();
        let mut router = served.router.clone();
        async move {
            let mut answer = match &turn {
                _ if hosts > 1 => ambiguous(hosts),
                Ok(_) => router.call(request).await?,
                Err(_) => crowded(),
            };
            let nosniff = HeaderValue::from_static("nosniff");
            let headers = answer.headers_mut();
            headers.insert(header::X_CONTENT_TYPE_OPTIONS, nosniff);
            drop((turn, handling));
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(Patient::new(stream)), service);
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => ended,
        () = stop(&mut stopping) => {
            // hyper closes a connection that has read nothing yet.
            let asked = async {
                if !has_asked.load(Ordering::Relaxed) {
                    sleep(LAST_HEAD).await;
                }
            };
            tokio::select! {
                biased;
                ended = connection.as_mut() => ended,
                () = asked => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%peer, %error, "a connection to the HTTP API ended");
    }
}

/// The answer to a request for several hosts: others may have read another one of them (RFC 9112, 3.2).
fn ambiguous(hosts: usize) -> Response {
    let text = format!("{hosts} Host headers; allowed: 1");
    detail(StatusCode::BAD_REQUEST, text).into_response()
}

fn crowded() -> Response {
    let text = "too many requests are being handled; try again";
    detail(StatusCode::SERVICE_UNAVAILABLE, text).into_response()
}

/// A stream that fails if the peer does not read what was written in time.
struct Patient {
    stream: Box<dyn Stream>,
    /// Runs from when something could not be written until all has been.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn new(stream: Box<dyn Stream>) -> Self {
        Self {
            stream,
            stalled: None,
        }
    }

    fn bounded<T>(
        &mut self,
        written: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            return written;
        }
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(ANSWER)));
        match stalled.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bounded(written, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        if flushed.is_ready() {
            // hyper flushes once everything it has is written.
            self.stalled = None;
        }
        self.bounded(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(context);
        self.bounded(closed, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.bounded(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;
    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tokio::time::Instant;

    use super::*;

    /// A connection to a small router; time advances by itself while all tasks are idle.
    fn connect() -> (DuplexStream, watch::Sender<bool>) {
        let router = Router::new()
            .route("/", get(async || "here"))
            .route("/long", get(async || vec![b'x'; 1 << 20]))
            .route("/body", post(async |body: Bytes| body.len().to_string()))
            .layer(super::super::deadline());
        let (ours, theirs) = tokio::io::duplex(4096);
        let running = watch::Sender::new(false);
        let served = Served {
            peer: SocketAddr::from(([127, 0, 0, 1], 1)),
            router,
            requests: Arc::new(Semaphore::new(1)),
            seat: Arc::new(Waiting::default()).add(),
        };
        tokio::spawn(talk(Box::new(theirs), served, running.subscribe()));
        (ours, running)
    }

    /// What comes until the connection is closed, and how long that took.
    async fn rest(mut stream: DuplexStream) -> (String, Duration) {
        let (began, mut text) = (Instant::now(), String::new());
        // What was cut off may also be an error.
        let _ = stream.read_to_string(&mut text).await;
        (text, began.elapsed())
    }

    fn is_about(took: Duration, expected: Duration) -> bool {
        (expected..expected + Duration::from_secs(2)).contains(&took)
    }

    #[tokio::test(start_paused = true)]
    async fn slow_heads_and_idle_connections_are_closed() {
        for begun in ["", "GET / HT", "GET / HTTP/1.1\r\nhost: a\r\n"] {
            let (mut stream, _running) = connect();
            stream.write_all(begun.as_bytes()).await.unwrap();
            let (text, took) = rest(stream).await;
            assert!(is_about(took, HEAD), "{begun:?}: {took:?}");
            assert!(!text.contains("here"), "{text}");
        }
        let (mut stream, _running) = connect();
        stream
            .write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            .await
            .unwrap();
        let (text, took) = rest(stream).await;
        assert!(
            text.ends_with("here") && is_about(took, HEAD),
            "{text} {took:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn request_with_two_hosts_is_refused() {
        for (hosts, status) in [
            ("host: a\r\n", "200 OK"),
            ("host: a\r\nHost: b\r\n", "400 Bad Request"),
        ] {
            let (mut stream, _running) = connect();
            let head = format!("GET / HTTP/1.1\r\n{hosts}connection: close\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            let (text, _) = rest(stream).await;
            assert!(
                text.starts_with(&format!("HTTP/1.1 {status}\r\n")),
                "{text}"
            );
            assert!(
                text.contains("\r\nx-content-type-options: nosniff\r\n"),
                "{text}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_comes_byte_by_byte_gets_no_more_time() {
        let (mut stream, _running) = connect();
        let began = Instant::now();
        while stream.write_all(b"G").await.is_ok() {
            sleep(Duration::from_secs(1)).await;
            assert!(began.elapsed() < 2 * HEAD);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_is_answered_with_408() {
        let (mut stream, _running) = connect();
        let head = b"POST /body HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n12345";
        stream.write_all(head).await.unwrap();
        let (text, took) = rest(stream).await;
        assert!(text.starts_with("HTTP/1.1 408 "), "{text}");
        assert!(
            took < super::super::REQUEST_TIMEOUT + HEAD + ANSWER,
            "{took:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_answers_too_slowly_is_disconnected() {
        for bytes in [0, 100] {
            let (mut stream, _running) = connect();
            stream
                .write_all(b"GET /long HTTP/1.1\r\nhost: a\r\n\r\n")
                .await
                .unwrap();
            let (began, mut read) = (Instant::now(), 0);
            while began.elapsed() < 2 * ANSWER {
                sleep(Duration::from_secs(1)).await;
                let mut buffer = vec![0; bytes];
                read += stream.read(&mut buffer).await.unwrap_or(0);
            }
            let (text, _) = rest(stream).await;
            assert!(read + text.len() < 1 << 19, "{read} and {}", text.len());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_answers_what_was_asked_and_what_is_about_to_be() {
        let head = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
        for (before, after) in [(head, ""), ("GET / HT", &head[8..]), ("", head), ("", "")] {
            let (mut stream, running) = connect();
            stream.write_all(before.as_bytes()).await.unwrap();
            sleep(Duration::from_millis(1)).await;
            running.send_replace(true);
            sleep(Duration::from_millis(1)).await;
            // A connection that is closed takes none.
            let _ = stream.write_all(after.as_bytes()).await;
            let (text, took) = rest(stream).await;
            let is_asked = before.len() + after.len() > 0;
            assert_eq!(
                text.ends_with("here"),
                is_asked,
                "{before:?}, {after:?}: {text}"
            );
            assert!(took <= LAST_HEAD, "{took:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_above_its_bound_is_refused() {
        let (mut stream, _running) = connect();
        let head = format!(
            "GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n",
            "x".repeat(HEAD_BYTES)
        );
        // It need not be taken whole.
        let _ = timeout(Duration::from_secs(1), stream.write_all(head.as_bytes())).await;
        let (text, _) = rest(stream).await;
        assert!(text.starts_with("HTTP/1.1 431 "), "{text}");
    }

    /// A server that takes at most this many connections, where `POST /body` waits for its body.
    async fn start(connections: usize) -> (SocketAddr, impl Future<Output = ()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let config = kvtier_config::ServerConfig::from_flags(&["--l1-size-gb", "0.01"]).unwrap();
        let access = Arc::new(Access::open(&config.http).unwrap());
        let router = Router::new()
            .route(OPEN, get(async || "well"))
            .route("/", get(async || "here"))
            .route("/body", post(async |body: Bytes| body.len().to_string()));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let served = tokio::spawn(serve(listener, access, router, connections, async {
            let _ = stopped.await;
        }));
        let end = async move {
            drop(stop);
            served.await.unwrap();
        };
        (address, end)
    }

    async fn ask(stream: &mut TcpStream, path: &str) -> String {
        let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        String::from_utf8(answer.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn a_new_connection_takes_the_place_of_the_idlest() {
        let (address, end) = start(2).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        let mut second = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut second, "/").await, "HTTP/1.1 200");
        assert_eq!(ask(&mut first, "/").await, "HTTP/1.1 200");
        let mut third = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut third, "/").await, "HTTP/1.1 200");
        // The rest of its answer, then its end.
        let mut rest = Vec::new();
        let _ = second.read_to_end(&mut rest).await;
        assert!(rest.ends_with(b"here"));
        drop((first, third));
        end.await;
    }

    // proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
    #[tokio::test]
    async fn health_is_answered_beside_requests_that_take_every_turn() {
        let (address, end) = start(8).await;
        // Answered once the body is being received.
        let head =
            b"POST /body HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n";
        let next = "HTTP/1.1 100 Continue\r\n\r\n";
        let mut slow = Vec::new();
        for _ in 0..requests(8) {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(head).await.unwrap();
            let mut answer = vec![0; next.len()];
            stream.read_exact(&mut answer).await.unwrap();
            assert_eq!(answer, next.as_bytes());
            slow.push(stream);
        }
        // More than there is, and none of them says anything.
        let mut idle = Vec::new();
        for _ in 0..32 {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        let mut probe = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut probe, OPEN).await, "HTTP/1.1 200");
        let mut other = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask(&mut other, "/").await, "HTTP/1.1 503");
        for mut stream in slow {
            stream.write_all(b"12345").await.unwrap();
            let mut answer = [0; 12];
            stream.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"HTTP/1.1 200");
        }
        drop((idle, probe, other));
        end.await;
    }
}
