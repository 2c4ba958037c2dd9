//! A read-only port: what a server holds, for other servers and for any client of Redis' protocol.
//!
//! | bound | |
//! | --- | --- |
//! | connections | [`PortOptions::max_connections`] |
//! | a client that has not authenticated | [`GREETING_TIMEOUT`] |
//! | a client that asks nothing | [`IDLE_TIMEOUT`] |
//! | leased bytes and other answers of a connection | [`MAX_UNSENT`] and one object |
//! | leased bytes of all connections | [`PortOptions::max_leased`], or one object |
//! | a client that does not read | [`SEND_TIMEOUT`] for each [`SEND_BYTES`] |
//! | what is kept of a request | [`requests::MAX_KEPT`] |
//!
//! The mutex guards the settings of TLS; no other lock is acquired inside.

mod requests;
mod session;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::object_key::ObjectKey;
use kvtier_l2::StoreItem;
use kvtier_l2::net::{Link, ServerTls, TlsError};
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::rustls::{ServerConfig, ServerConnection};

use super::endpoint::tune;
use super::socket::Socket;
use super::stream::Stream;
use session::PortSession;

/// Time for a handshake, and for a password.
pub(super) const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest time without a request.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// Longest time for [`SEND_BYTES`] of answers, or fewer if there are no more.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(10);
const SEND_BYTES: u64 = 1 << 20;

/// Unsent bytes from which on no further request is answered.
const MAX_UNSENT: u64 = 1 << 20;

/// Send buffer of a connection, half of what the system counts. The system's own choice, up to 4 MiB, costs a seventh more CPU
/// time over loopback.
const SEND_BUFFER: usize = 512 << 10;

/// Pause after the system has no connection to give.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Objects that a port serves.
pub trait ObjectSource: Send + Sync + 'static {
    /// Leases an object, for as long as its buffer lives.
    fn hold(&self, key: &ObjectKey) -> Option<StoreItem>;

    /// Counts an object that was sent.
    fn count_sent(&self, bytes: u64);

    /// Counts a connection that was opened (1) or closed (-1).
    fn count_connection(&self, change: i64);
}

/// How a port is guarded.
#[derive(Clone)]
pub struct PortOptions {
    /// Password of its clients; empty is none.
    pub password: String,
    /// Certificate of the port, if connections are secured.
    pub tls: Option<ServerTls>,
    /// Bytes that it sends per second, all connections together; `None` is unbounded.
    pub bandwidth: Option<u64>,
    /// Bytes of objects that are sent at once, all connections together; further objects count as absent.
    pub max_leased: u64,
    /// Connections at once. A reader has one per worker and one more.
    pub max_connections: usize,
}

impl Default for PortOptions {
    fn default() -> Self {
        Self {
            password: String::new(),
            tls: None,
            bandwidth: None,
            max_leased: u64::MAX,
            max_connections: Semaphore::MAX_PERMITS,
        }
    }
}

/// A read-only port over some objects.
pub struct ReadPort {
    objects: Arc<dyn ObjectSource>,
    options: PortOptions,
    /// Settings of [`PortOptions::tls`].
    tls: Option<Mutex<Arc<ServerConfig>>>,
    /// What all connections together may send.
    bandwidth: Option<Link>,
    /// Bytes of objects that are being sent.
    leased: AtomicU64,
    /// Number of the last connection.
    last_id: AtomicU64,
}

impl ReadPort {
    /// Returns a port that is not bound yet.
    ///
    /// # Errors
    /// A file of TLS that cannot be used.
    pub fn new(
        options: PortOptions,
        objects: Arc<dyn ObjectSource>,
    ) -> Result<Arc<Self>, TlsError> {
        let tls = options.tls.as_ref().map(ServerTls::settings).transpose()?;
        Ok(Arc::new(Self {
            objects,
            tls: tls.map(Mutex::new),
            bandwidth: options.bandwidth.map(|rate| Link::new(rate.max(1) as f64)),
            options,
            leased: AtomicU64::new(0),
            last_id: AtomicU64::new(0),
        }))
    }

    /// Reads the files of TLS again, for later connections; returns whether there are any.
    ///
    /// # Errors
    /// Files that cannot be used; the previous settings stay.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let (Some(files), Some(settings)) = (&self.options.tls, &self.tls) else {
            return Ok(false);
        };
        let read = files.settings()?;
        *settings.lock() = read;
        Ok(true)
    }

    /// Counts an object that is to be sent, unless too much is being sent.
    fn lease(&self, bytes: u64) -> bool {
        let leased = |now: u64| {
            let all = now.saturating_add(bytes);
            (now == 0 || all <= self.options.max_leased).then_some(all)
        };
        let order = Ordering::Relaxed;
        self.leased.fetch_update(order, order, leased).is_ok()
    }

    /// Serves connections until this future, and the runtime that polls it, are dropped.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) {
        let slots = Arc::new(Semaphore::new(self.options.max_connections));
        loop {
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::debug!(%error, "a connection to the port for peers could not be accepted");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
                // A client that is refused may not even learn why.
                let _ = stream.try_write(b"-ERR max number of clients reached\r\n");
                continue;
            };
            let port = Arc::clone(&self);
            tokio::spawn(async move {
                let connection = CountedConnection::new(&*port.objects);
                if let Err(error) = port.talk(stream).await {
                    tracing::debug!(%peer, %error, "a connection to the port for peers ended");
                }
                drop((connection, slot));
            });
        }
    }

    async fn talk(&self, stream: TcpStream) -> io::Result<()> {
        let opened = Instant::now();
        // As the connections to other servers.
        tune(&stream, SEND_TIMEOUT)?;
        sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER)?;
        let socket = Socket::Tcp(stream);
        let stream = match &self.tls {
            None => Stream::plain(socket),
            Some(settings) => {
                let settings = Arc::clone(&settings.lock());
                let connection = ServerConnection::new(settings).map_err(io::Error::other)?;
                let secured = Stream::secure(socket, connection.into());
                timeout(GREETING_TIMEOUT, secured).await??
            }
        };
        PortSession::new(self, stream, opened).run().await
    }
}

/// An open connection in the counts.
struct CountedConnection<'a>(&'a dyn ObjectSource);

impl<'a> CountedConnection<'a> {
    fn new(objects: &'a dyn ObjectSource) -> Self {
        objects.count_connection(1);
        Self(objects)
    }
}

impl Drop for CountedConnection<'_> {
    fn drop(&mut self) {
        self.0.count_connection(-1);
    }
}
