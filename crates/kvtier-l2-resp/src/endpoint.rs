//! How a server is reached, and how a connection begins.

use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::rustls::ClientConnection;

use super::RespOptions;
use super::address::Address;
use super::command::{Commands, RespReply};
use super::errors;
use super::reply::{self, Value};
use super::socket::{Socket, is_not_ready};
use super::stream::Stream;
use kvtier_common::sync::RateLimited;
use kvtier_l2::net::{connect_any, tls::TlsSettings};
use kvtier_l2::{ErrorKind, L2Error};

/// TCP keepalive: silence before the first probe, and time between two probes.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

/// Interval of log lines about lost connections to one server.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Connections of an adapter that are being made at once: each server accepts them one after the other, and each takes a file.
pub(super) const MAX_CONNECTING: usize = 64;

/// A server, and what a connection to it needs.
pub(super) struct Endpoint {
    /// Addresses of the server; of several, the first one that is a primary is used.
    pub(super) addresses: Vec<Address>,
    pub(super) options: Arc<RespOptions>,
    connecting: Arc<Semaphore>,
    tls: Option<TlsSettings>,
    /// How often a connection found that the server has become a replica: all of them look for the primary again then.
    pub(super) demotions: AtomicU64,
    /// For the log line about lost connections: a server that hangs costs one after the other.
    loss_log: RateLimited,
    /// For the line about connections made again, which come together.
    return_log: RateLimited,
}

impl Endpoint {
    /// Returns a server of an adapter, all of whose servers share `connecting`.
    pub(super) fn new(
        addresses: Vec<Address>,
        options: Arc<RespOptions>,
        connecting: Arc<Semaphore>,
    ) -> Self {
        Self {
            addresses,
            connecting,
            tls: options.tls.clone().map(TlsSettings::new),
            options,
            demotions: AtomicU64::new(0),
            loss_log: RateLimited::new(LOG_INTERVAL),
            return_log: RateLimited::new(LOG_INTERVAL),
        }
    }

    /// Logs why there is no connection, and how many calls that has failed.
    pub(super) fn log_loss(&self, error: &L2Error, failed_calls: usize) {
        if let Some(suppressed_lines) = self.loss_log.permit(Instant::now()) {
            tracing::warn!(
                tier = self.options.tier,
                address = self.name(),
                %error,
                failed_calls,
                suppressed_lines,
                "no connection to a second tier; connecting again"
            );
        }
    }

    /// Logs that there is a connection again.
    pub(super) fn log_return(&self) {
        if let Some(suppressed_lines) = self.return_log.permit(Instant::now()) {
            tracing::info!(
                tier = self.options.tier,
                address = self.name(),
                suppressed_lines,
                "connected to a second tier again"
            );
        }
    }

    /// For logs.
    pub(super) fn name(&self) -> String {
        let names: Vec<_> = self.addresses.iter().map(Address::to_string).collect();
        names.join(",")
    }

    /// An error of this server.
    pub(super) fn error(&self, kind: ErrorKind, what: &dyn Display) -> L2Error {
        let (prefix, what) = (format!("{}: ", self.name()), what.to_string());
        // A connection's failure has the address that was tried.
        let what = what.strip_prefix(&prefix).unwrap_or(&what);
        L2Error::new(kind, format!("{prefix}{what}"))
    }

    /// An error for replies that no server sends.
    pub(super) fn unexpected(&self) -> L2Error {
        self.unavailable(&"an unexpected reply")
    }

    /// The values of replies without objects.
    pub(super) fn values_of(&self, replies: Vec<RespReply>) -> Result<Vec<Value>, L2Error> {
        let value = |reply| match reply {
            RespReply::Value(value) => Ok(value),
            RespReply::Object(_) => Err(self.unexpected()),
        };
        replies.into_iter().map(value).collect()
    }

    /// Fails with the first error, which is the reason for the others. A key of another type is no error: it is replaced.
    pub(super) fn refuse_errors(&self, values: &[Value]) -> Result<(), L2Error> {
        for value in values {
            if let Value::Error(text) = value
                && errors::code(text) != "WRONGTYPE"
            {
                return Err(errors::of(self, text));
            }
        }
        Ok(())
    }

    fn unavailable(&self, what: &dyn Display) -> L2Error {
        self.error(ErrorKind::Unavailable, what)
    }

    /// A connection on which commands can be sent. To be given [`RespOptions::connection_timeout`].
    pub(super) async fn connect(&self) -> Result<Stream, L2Error> {
        // Never closed.
        let _turn = self.connecting.acquire().await;
        let [address] = &self.addresses[..] else {
            return self.connect_to_primary().await;
        };
        let part = self.options.connection_timeout;
        Ok(self.greeted(address, part, Commands::default()).await?.0)
    }

    /// A connection to the first address that is no replica.
    async fn connect_to_primary(&self) -> Result<Stream, L2Error> {
        let parts = u32::try_from(self.addresses.len()).unwrap_or(1);
        let part = self.options.connection_timeout / parts.max(1);
        let mut failed = self.unavailable(&"none of them is a primary");
        for address in &self.addresses {
            let mut role = Commands::default();
            role.push(&[b"ROLE"]);
            let greeted = timeout(part, self.greeted(address, part, role)).await;
            match greeted {
                Ok(Ok((stream, role))) if !is_replica(&role) => return Ok(stream),
                Ok(Ok(_)) => {}
                Ok(Err(error)) => failed = error,
                Err(_) => failed = self.unavailable(&format!("{address} does not answer")),
            }
        }
        Err(failed)
    }

    /// The replies to `commands` on a connection that is closed then.
    pub(super) async fn ask_once(&self, commands: Commands) -> Result<Vec<Value>, L2Error> {
        let part = self.options.connection_timeout;
        let address = &self.addresses[0];
        match timeout(part, self.greeted(address, part, commands)).await {
            Ok(greeted) => Ok(greeted?.1),
            Err(_) => Err(self.unavailable(&"it does not answer")),
        }
    }

    /// A connection to `address`, and the replies to `commands`, which are sent behind the greeting.
    async fn greeted(
        &self,
        address: &Address,
        limit: Duration,
        commands: Commands,
    ) -> Result<(Stream, Vec<Value>), L2Error> {
        let mut stream = self.open(address, limit).await?;
        let options = &self.options;
        let mut greeting = Commands::default();
        match (&*options.username, &*options.password) {
            (_, "") => {}
            ("", password) => greeting.push(&[b"AUTH", password.as_bytes()]),
            (user, password) => greeting.push(&[b"AUTH", user.as_bytes(), password.as_bytes()]),
        }
        if options.database > 0 && !options.cluster_mode {
            greeting.push(&[b"SELECT", options.database.to_string().as_bytes()]);
        }
        // An error if it needs a password, or has not loaded its data yet.
        greeting.push(&[b"PING"]);
        let own = greeting.expected.len();
        greeting.append(commands);
        let mut values = self.exchange(&mut stream, &greeting).await?;
        let asked = values.split_off(own.min(values.len()));
        for (at, value) in values.iter().enumerate() {
            if let Value::Error(text) = value {
                let text = if at == 0 && !options.password.is_empty() {
                    errors::of_credentials(text)
                } else {
                    text
                };
                return Err(errors::of(self, text));
            }
        }
        Ok((stream, asked))
    }

    async fn open(&self, address: &Address, limit: Duration) -> Result<Stream, L2Error> {
        let failed = |error: io::Error| self.unavailable(&error);
        let (host, socket) = match address {
            Address::Unix(path) => {
                let socket = UnixStream::connect(path).await.map_err(failed)?;
                ("localhost", Socket::Unix(socket))
            }
            Address::Tcp(host, port) => {
                let socket = connect_any(host, *port, limit).await.map_err(failed)?;
                tune(&socket, self.options.request_timeout).map_err(failed)?;
                (&**host, Socket::Tcp(socket))
            }
        };
        let Some(tls) = &self.tls else {
            return Ok(Stream::plain(socket));
        };
        let (settings, name) = tls.of(host).await?;
        let connection = ClientConnection::new(settings, name);
        let connection =
            connection.map_err(|error| self.unavailable(&format_args!("TLS: {error}")))?;
        let secured = timeout(limit / 2, Stream::secure(socket, connection.into())).await;
        if !matches!(secured, Ok(Ok(_))) {
            tls.expire();
        }
        match secured {
            Ok(stream) => stream.map_err(|error| self.unavailable(&format_args!("TLS: {error}"))),
            Err(_) => {
                let what = "TLS: no answer to the handshake; does the server use TLS at this port?";
                Err(self.unavailable(&what))
            }
        }
    }

    /// Sends commands without objects, and waits for their replies, or for an error behind which the server ends the connection.
    async fn exchange(
        &self,
        stream: &mut Stream,
        commands: &Commands,
    ) -> Result<Vec<Value>, L2Error> {
        let failed = |error: &dyn Display| self.unavailable(error);
        // A few bytes, which a new connection takes at once.
        let mut unsent: Vec<_> = commands.segments.iter().map(|it| it.rest(0)).collect();
        while !unsent.is_empty() || stream.has_unsent() {
            match stream.send(&unsent) {
                Ok(sent) if unsent.is_empty() || sent as u64 == commands.len() => unsent.clear(),
                Ok(_) => return Err(failed(&"it does not take a greeting")),
                Err(error) if is_not_ready(&error) => {
                    let ready = stream.ready(Interest::WRITABLE).await;
                    ready.map_err(|error| failed(&error))?;
                }
                Err(error) => return Err(failed(&error)),
            }
        }
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        let mut progress = reply::Progress::default();
        let mut part = vec![0; 64 << 10];
        while values.len() < commands.expected.len() {
            // A server may never stop sending.
            tokio::task::yield_now().await;
            match stream.receive(&mut part) {
                // The error says why.
                Ok(0) if matches!(values.last(), Some(Value::Error(_))) => return Ok(values),
                Ok(0) => return Err(failed(&"it has closed the connection")),
                Ok(got) => bytes.extend_from_slice(&part[..got]),
                Err(error) if is_not_ready(&error) => {
                    let ready = stream.ready(Interest::READABLE).await;
                    ready.map_err(|error| failed(&error))?;
                }
                Err(error) => return Err(failed(&error)),
            }
            while let Some((value, used)) =
                progress.value(&bytes).map_err(|error| failed(&error))?
            {
                bytes.drain(..used);
                values.push(value);
            }
        }
        if values.len() == commands.expected.len() && bytes.is_empty() {
            Ok(values)
        } else {
            Err(failed(&"a reply without a command"))
        }
    }
}

/// Sets the options of a connection whose other side may be silent for `limit` while something is on its way to it.
pub(super) fn tune(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    let (idle, interval) = KEEPALIVE;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, idle)?;
    sockopt::set_tcp_keepintvl(stream, interval)?;
    let millis = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, millis)?;
    Ok(())
}

/// Whether the reply to ROLE is that of a replica. Without an answer, as some users may not ask, it is none.
fn is_replica(role: &[Value]) -> bool {
    match role {
        [Value::Array(role)] => {
            matches!(role.first(), Some(Value::Bulk(Some(name))) if name == b"slave" || name == b"replica")
        }
        _ => false,
    }
}
