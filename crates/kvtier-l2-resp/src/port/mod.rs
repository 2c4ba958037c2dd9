//! A read-only port: what a server holds, for other servers and for any client of Redis' protocol.
//!
//! | bound | |
//! | --- | --- |
//! | connections | [`MAX_CONNECTIONS`] |
//! | a client that has not authenticated | [`GREETING_TIMEOUT`] |
//! | a client that asks nothing | [`IDLE_TIMEOUT`] |
//! | leased bytes and other answers of a connection | [`MAX_UNSENT`] and one object |
//! | a client that does not read | [`SEND_TIMEOUT`] for each [`SEND_BYTES`] |
//! | what is kept of a request | [`requests::MAX_KEPT`] |
//!
//! The mutex guards the settings of TLS; no other lock is acquired inside.

mod requests;
mod session;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::object_key::ObjectKey;
use kvtier_l2::StoreItem;
use kvtier_l2::net::{Link, ServerTls, TlsError};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::rustls::{ServerConfig, ServerConnection};

use super::endpoint::tune;
use super::socket::Socket;
use super::stream::Stream;
use session::PortSession;

/// Connections at once. A reader has one per worker and one more.
pub(super) const MAX_CONNECTIONS: usize = 256;

/// Time for a handshake, and for a password.
pub(super) const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest time without a request.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// Longest time for [`SEND_BYTES`] of answers, or fewer if there are no more.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(10);
const SEND_BYTES: u64 = 1 << 20;

/// Unsent bytes from which on no further request is answered.
const MAX_UNSENT: u64 = 1 << 20;

/// How long the settings of TLS are used before their files are read again.
const TLS_LIFE: Duration = Duration::from_secs(60);

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
#[derive(Clone, Default)]
pub struct PortOptions {
    /// Password of its clients; empty is none.
    pub password: String,
    /// Certificate of the port, if connections are secured.
    pub tls: Option<ServerTls>,
    /// Bytes that it sends per second, all connections together; `None` is unbounded.
    pub bandwidth: Option<u64>,
}

/// A read-only port over some objects.
pub struct ReadPort {
    objects: Arc<dyn ObjectSource>,
    password: String,
    tls: Option<PortTls>,
    /// What all connections together may send.
    bandwidth: Option<Link>,
}

/// Files of TLS, and what they held when they were last read.
struct PortTls {
    files: ServerTls,
    read: Mutex<(Instant, Arc<ServerConfig>)>,
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
        let tls = options.tls.map(|files| {
            let read = (Instant::now(), files.settings()?);
            Ok(PortTls {
                files,
                read: Mutex::new(read),
            })
        });
        Ok(Arc::new(Self {
            objects,
            password: options.password,
            tls: tls.transpose()?,
            bandwidth: options.bandwidth.map(|rate| Link::new(rate.max(1) as f64)),
        }))
    }

    /// Serves connections until this future, and the runtime that polls it, are dropped.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) {
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
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
        let socket = Socket::Tcp(stream);
        let stream = match self.tls_settings() {
            None => Stream::plain(socket),
            Some(settings) => {
                let connection = ServerConnection::new(settings).map_err(io::Error::other)?;
                let secured = Stream::secure(socket, connection.into());
                timeout(GREETING_TIMEOUT, secured).await??
            }
        };
        PortSession::new(self, stream, opened).run().await
    }

    /// Settings of TLS, read a minute ago at most. Files that cannot be used change nothing.
    fn tls_settings(&self) -> Option<Arc<ServerConfig>> {
        let PortTls { files, read } = self.tls.as_ref()?;
        let (at, settings) = read.lock().clone();
        if at.elapsed() < TLS_LIFE {
            return Some(settings);
        }
        let settings = files.settings().unwrap_or_else(|error| {
            tracing::warn!(%error, "the certificate of the port for peers was not read again; keeping the previous one");
            settings
        });
        *read.lock() = (Instant::now(), Arc::clone(&settings));
        Some(settings)
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
