//! Connections to the backend: HTTP/1.1 over TCP or TLS, kept alive.
//!
//! One request at a time per connection. A connection goes back to the idle ones after the response was read to its end, and
//! is closed otherwise, also when its call is dropped. So no response is read as that of another request. The mutex guards
//! the idle connections; no other lock is acquired inside.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hyper::body::{Body as _, Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::http::response::Parts;
use hyper_util::rt::TokioIo;
use kvtier_common::sync::Mutex;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::content::{Content, Outgoing};
use kvtier_l2::net::{ClientTls, connect_any, tls::TlsSettings};
use kvtier_l2::{ErrorKind, L2Error};

/// How long a connection is kept without use: servers close theirs after 5 to 60 s.
const IDLE: Duration = Duration::from_secs(20);

/// Bytes for which a request, or a response, may take the time of a silence again: no connection is slower for long.
const TIMEOUT_BYTES: u64 = 4 << 20;

/// Bytes of a response that does not say how many it has, for its time.
const UNKNOWN_BYTES: u64 = 64 << 20;

/// Address of the backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Server {
    /// Name or address, without brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// `None` is plain HTTP.
    pub(super) tls: Option<ClientTls>,
}

/// One connection. Dropping it closes it.
struct Connection {
    sender: SendRequest<Outgoing>,
    task: AbortHandle,
    idle_since: Instant,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The connections to a server.
pub(super) struct Http {
    server: Server,
    connection_timeout: Duration,
    request_timeout: Duration,
    idle: Mutex<Vec<Connection>>,
    is_closed: AtomicBool,
    tls: Option<TlsSettings>,
}

/// A request as it is sent.
#[derive(Clone)]
pub(super) struct Outbound {
    pub(super) method: &'static str,
    /// Path and query, quoted.
    pub(super) target: String,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) content: Content,
    /// Whether it has the same effect twice as once.
    pub(super) is_idempotent: bool,
}

/// A response whose head was read.
pub(super) struct Response<'a> {
    pub(super) head: Parts,
    body: Incoming,
    connection: Connection,
    http: &'a Http,
    /// Whether the request was sent and the response read, both to their ends.
    is_sent: bool,
    is_read: bool,
    /// When its body has to be read.
    until: Instant,
}

/// Why there is no response.
enum HttpFailure {
    /// The connection was closed before the first byte of it.
    Closed(L2Error),
    Other(L2Error),
}

impl Http {
    pub(super) fn new(
        server: Server,
        connection_timeout: Duration,
        request_timeout: Duration,
    ) -> Self {
        Self {
            tls: server.tls.clone().map(TlsSettings::new),
            server,
            connection_timeout,
            request_timeout,
            idle: Mutex::new(Vec::new()),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Idle connections.
    pub(super) fn idle(&self) -> usize {
        self.idle.lock().len()
    }

    /// Closes the connections that were not used for long.
    pub(super) fn prune(&self) {
        let is_old = |connection: &mut Connection| {
            connection.sender.is_closed() || connection.idle_since.elapsed() >= IDLE
        };
        let old: Vec<_> = self.idle.lock().extract_if(.., is_old).collect();
        drop(old);
    }

    /// Closes the idle connections; no more are kept.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        let idle = std::mem::take(&mut *self.idle.lock());
        drop(idle);
    }

    fn error(&self, kind: ErrorKind, what: &str) -> L2Error {
        let Server { host, port, .. } = &self.server;
        L2Error::new(kind, format!("{host}:{port}: {what}"))
    }

    /// Sends a request and reads the head of its response. A kept connection may have been closed by the server meanwhile:
    /// then an idempotent request is sent again, on a new one.
    pub(super) async fn send(&self, request: &Outbound) -> Result<Response<'_>, L2Error> {
        if let Some(connection) = self.kept().await {
            match self.send_on(connection, request).await {
                Err(HttpFailure::Closed(_)) if request.is_idempotent => {}
                Err(HttpFailure::Closed(error) | HttpFailure::Other(error)) => return Err(error),
                Ok(response) => return Ok(response),
            }
        }
        match self.send_on(self.connect().await?, request).await {
            Err(HttpFailure::Closed(error) | HttpFailure::Other(error)) => Err(error),
            Ok(response) => Ok(response),
        }
    }

    /// The connection used last that is still open.
    async fn kept(&self) -> Option<Connection> {
        loop {
            let mut connection = self.idle.lock().pop()?;
            let is_fresh = connection.idle_since.elapsed() < IDLE;
            // The end of its last response may not have been noticed yet.
            if is_fresh && !connection.sender.is_closed() {
                let ready = timeout(self.request_timeout, connection.sender.ready()).await;
                if matches!(ready, Ok(Ok(()))) {
                    return Some(connection);
                }
            }
        }
    }

    async fn connect(&self) -> Result<Connection, L2Error> {
        let connecting = timeout(self.connection_timeout, self.connected());
        connecting
            .await
            .unwrap_or_else(|_| Err(self.error(ErrorKind::Unavailable, "no connection in time")))
    }

    async fn connected(&self) -> Result<Connection, L2Error> {
        let failed = |error: std::io::Error| {
            self.error(ErrorKind::Unavailable, &format!("connection: {error}"))
        };
        let Server { host, port, .. } = &self.server;
        let stream = connect_any(host, *port, self.connection_timeout).await;
        let stream = stream.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let Some(tls) = &self.tls else {
            return self.greeted(TokioIo::new(stream)).await;
        };
        let (settings, name) = tls.of(host).await?;
        let stream = TlsConnector::from(settings).connect(name, stream).await;
        let stream = stream.inspect_err(|_| tls.expire());
        self.greeted(TokioIo::new(stream.map_err(failed)?)).await
    }

    async fn greeted<S>(&self, stream: TokioIo<S>) -> Result<Connection, L2Error>
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = http1::handshake(stream)
            .await
            .map_err(|error| self.error(ErrorKind::Unavailable, &format!("connection: {error}")))?;
        // Its errors are also those of its requests.
        let task = tokio::spawn(async move { drop(connection.await) }).abort_handle();
        Ok(Connection {
            sender,
            task,
            idle_since: Instant::now(),
        })
    }

    async fn send_on(
        &self,
        mut connection: Connection,
        request: &Outbound,
    ) -> Result<Response<'_>, HttpFailure> {
        let sent = Arc::new(AtomicU64::new(0));
        let mut outgoing = hyper::Request::builder()
            .method(request.method)
            .uri(request.target.as_str());
        for (name, value) in &request.headers {
            outgoing = outgoing.header(*name, value.as_str());
        }
        let outgoing = outgoing.body(Outgoing::new(request.content.clone(), &sent));
        let outgoing = outgoing.map_err(|error| {
            HttpFailure::Other(self.error(ErrorKind::Refused, &format!("request: {error}")))
        })?;
        let response = connection.sender.send_request(outgoing);
        let mut response = std::pin::pin!(response);
        let mut before = 0;
        let until = self.until(request.content.len());
        let response = loop {
            // Silence is a time without a byte in either direction.
            match timeout(self.request_timeout, &mut response).await {
                Ok(response) => break response,
                Err(_) => {
                    let now = sent.load(Ordering::Relaxed);
                    let is_silent = std::mem::replace(&mut before, now) == now;
                    if is_silent || Instant::now() >= until {
                        return Err(HttpFailure::Other(self.silent()));
                    }
                }
            }
        };
        match response {
            Ok(response) => {
                let (head, body) = response.into_parts();
                let announced = body.size_hint().upper().unwrap_or(UNKNOWN_BYTES);
                Ok(Response {
                    until: self.until(announced),
                    is_sent: sent.load(Ordering::Relaxed) == request.content.len(),
                    is_read: body.is_end_stream(),
                    head,
                    body,
                    connection,
                    http: self,
                })
            }
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn failed(&self, error: &hyper::Error) -> HttpFailure {
        let source = std::error::Error::source(error);
        if let Some(own) = source.and_then(|source| source.downcast_ref::<L2Error>()) {
            return HttpFailure::Other(own.clone());
        }
        let cause = source.map_or_else(String::new, |source| format!(": {source}"));
        let what = self.error(ErrorKind::Unavailable, &format!("request: {error}{cause}"));
        let is_reset = source
            .and_then(|source| source.downcast_ref::<std::io::Error>())
            .is_some_and(|error| {
                use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
                matches!(
                    error.kind(),
                    BrokenPipe | ConnectionReset | ConnectionAborted
                )
            });
        if error.is_canceled() || error.is_incomplete_message() || is_reset {
            return HttpFailure::Closed(what);
        }
        HttpFailure::Other(what)
    }

    /// When a body of `bytes` has to be moved.
    fn until(&self, bytes: u64) -> Instant {
        let parts = u32::try_from(bytes / TIMEOUT_BYTES).unwrap_or(u32::MAX);
        Instant::now() + self.request_timeout.saturating_mul(parts.saturating_add(1))
    }

    fn silent(&self) -> L2Error {
        let seconds = self.request_timeout.as_secs_f64();
        let what = format!("silent for {seconds} s, or slower than 4 MiB in that time");
        self.error(ErrorKind::Deadline, &what)
    }
}

impl Response<'_> {
    /// A header as text.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.head.headers.get(name)?.to_str().ok()
    }

    pub(super) fn status(&self) -> u16 {
        self.head.status.as_u16()
    }

    /// Whether the body is a range of what was asked for.
    pub(super) fn is_partial(&self) -> bool {
        self.status() == 206 || self.head.headers.contains_key("content-range")
    }

    /// Bytes of the body by its head, also if it has none as the answer to `HEAD`.
    pub(super) fn content_length(&self) -> Option<u64> {
        self.header("content-length")?.parse().ok()
    }

    /// The next bytes of the body, `None` at its end.
    pub(super) async fn frame(&mut self) -> Result<Option<Bytes>, L2Error> {
        loop {
            let body = &mut self.body;
            let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context));
            let left = self.until.saturating_duration_since(Instant::now());
            let frame = timeout(left.min(self.http.request_timeout), frame).await;
            match frame.map_err(|_| self.http.silent())? {
                None => {
                    self.is_read = true;
                    return Ok(None);
                }
                // Trailers are of no interest.
                Some(Ok(frame)) => {
                    if let Ok(bytes) = frame.into_data() {
                        return Ok(Some(bytes));
                    }
                }
                Some(Err(error)) => {
                    let what = format!("response: {error}");
                    return Err(self.http.error(ErrorKind::Unavailable, &what));
                }
            }
        }
    }

    /// Ends the call: the connection is kept if the body was read to its end, and closed otherwise.
    pub(super) fn end(self) {
        let Self {
            mut connection,
            http,
            is_sent,
            is_read,
            ..
        } = self;
        let is_kept = !http.is_closed.load(Ordering::Acquire);
        if is_kept && is_sent && is_read && !connection.sender.is_closed() {
            connection.idle_since = Instant::now();
            http.idle.lock().push(connection);
        }
    }

    /// Reads the body to its end if it has at most `limit` bytes.
    pub(super) async fn whole(mut self, limit: usize) -> Result<Vec<u8>, L2Error> {
        let mut out = Vec::new();
        let too_long = |http: &Http| {
            let what = format!("a response of more than {limit} bytes");
            Err(http.error(ErrorKind::Unavailable, &what))
        };
        if self.body.size_hint().lower() > limit as u64 {
            return too_long(self.http);
        }
        // Whatever its length is said to be.
        self.until = self.until.min(self.http.until(limit as u64));
        while let Some(bytes) = self.frame().await? {
            if out.len() + bytes.len() > limit {
                return too_long(self.http);
            }
            out.try_reserve(bytes.len()).map_err(|_| {
                let what = format!("no memory for a response of {} bytes so far", out.len());
                self.http.error(ErrorKind::Memory, &what)
            })?;
            out.extend_from_slice(&bytes);
        }
        self.end();
        Ok(out)
    }
}
