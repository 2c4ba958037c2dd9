//! Where a server is, how it is reached, and how a connection begins.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::Duration;

use kvtier_memory::AccessError;
use kvtier_memory::socket::{Slice, SocketError, send_slices};
use rustix::net::{RecvFlags, recv, sockopt};
use tokio::io::{Interest, Ready};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::timeout;

use super::command::Commands;
use super::errors;
use super::reply::{self, Value};
use crate::error::{ErrorKind, L2Error};

/// TCP keepalive: silence before the first probe, and time between two probes.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Host name or address, IPv6 without brackets.
    Tcp(String, u16),
    /// A socket in the file system.
    Unix(PathBuf),
}

/// A server, and what a connection to it needs.
#[derive(Clone)]
pub(super) struct Endpoint {
    pub(super) address: Address,
    pub(super) username: String,
    pub(super) password: String,
    pub(super) database: u32,
    pub(super) connection_timeout: Duration,
    pub(super) request_timeout: Duration,
}

impl Endpoint {
    /// For logs.
    pub(super) fn name(&self) -> String {
        match &self.address {
            Address::Tcp(host, port) if host.contains(':') => format!("[{host}]:{port}"),
            Address::Tcp(host, port) => format!("{host}:{port}"),
            Address::Unix(path) => path.display().to_string(),
        }
    }

    /// A connection on which commands can be sent.
    pub(super) async fn connect(&self) -> Result<Stream, L2Error> {
        let failed = |error: io::Error| {
            let message = format!("{}: {error}", self.name());
            L2Error::new(ErrorKind::Unavailable, message)
        };
        let stream = match &self.address {
            Address::Unix(path) => Stream::Unix(UnixStream::connect(path).await.map_err(failed)?),
            Address::Tcp(host, port) => {
                let stream = self.connect_any(host, *port).await.map_err(failed)?;
                self.tune(&stream).map_err(failed)?;
                Stream::Tcp(stream)
            }
        };
        let mut greeting = Commands::default();
        match (&*self.username, &*self.password) {
            (_, "") => {}
            ("", password) => greeting.push(&[b"AUTH", password.as_bytes()]),
            (user, password) => greeting.push(&[b"AUTH", user.as_bytes(), password.as_bytes()]),
        }
        if self.database > 0 {
            greeting.push(&[b"SELECT", self.database.to_string().as_bytes()]);
        }
        // An error if it needs a password, or has not loaded its data yet.
        greeting.push(&[b"PING"]);
        let has_credentials = !self.password.is_empty();
        for (at, value) in self.greet(&stream, &greeting).await?.iter().enumerate() {
            if let Value::Error(text) = value {
                // An unknown command may be repeated, with its arguments.
                let is_of_credentials = at == 0 && has_credentials;
                let text = if is_of_credentials {
                    errors::code(text)
                } else {
                    text
                };
                return Err(errors::of(self, text));
            }
        }
        Ok(stream)
    }

    /// Tries the addresses of a name, each for its part of the time.
    async fn connect_any(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let addresses: Vec<_> = lookup_host((host, port)).await?.collect();
        let part = self.connection_timeout / u32::try_from(addresses.len().max(1)).unwrap_or(1);
        let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in addresses {
            match timeout(part, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => failed = error,
                Err(_) => failed = io::ErrorKind::TimedOut.into(),
            }
        }
        Err(failed)
    }

    fn tune(&self, stream: &TcpStream) -> io::Result<()> {
        let (idle, interval) = KEEPALIVE;
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, idle)?;
        sockopt::set_tcp_keepintvl(stream, interval)?;
        let millis = u32::try_from(self.request_timeout.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(stream, millis)?;
        Ok(())
    }

    /// Sends commands without objects, and waits for their replies.
    async fn greet(&self, stream: &Stream, commands: &Commands) -> Result<Vec<Value>, L2Error> {
        let failed = |error: &dyn std::fmt::Display| {
            let message = format!("{}: {error}", self.name());
            L2Error::new(ErrorKind::Unavailable, message)
        };
        let is_not_ready = |error: &SocketError| matches!(error, SocketError::System(error) if error.kind() == io::ErrorKind::WouldBlock);
        let unsent: Vec<Slice<'_>> = commands.segments.iter().map(|it| it.rest(0)).collect();
        // A few bytes, which a new connection takes at once.
        loop {
            let ready = stream.ready(Interest::WRITABLE).await;
            ready.map_err(|error| failed(&error))?;
            match stream.try_io(Interest::WRITABLE, |socket| send_slices(socket, &unsent)) {
                Ok(sent) if sent as u64 == commands.len() => break,
                Ok(_) => return Err(failed(&"it does not take a greeting")),
                Err(error) if is_not_ready(&error) => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        while values.len() < commands.expected.len() {
            let mut part = [0; 1024];
            let ready = stream.ready(Interest::READABLE).await;
            ready.map_err(|error| failed(&error))?;
            let got = stream.try_io(Interest::READABLE, |socket| {
                let got = recv(socket, &mut part, RecvFlags::DONTWAIT).map_err(io::Error::from)?;
                Ok(got.0)
            });
            match got {
                Ok(0) => return Err(failed(&"it has closed the connection")),
                Ok(got) => bytes.extend_from_slice(&part[..got]),
                Err(error) if is_not_ready(&error) => {}
                Err(error) => return Err(failed(&error)),
            }
            while let Some((value, used)) = reply::value(&bytes).map_err(|error| failed(&error))? {
                bytes.drain(..used);
                values.push(value);
            }
        }
        match values.len() == commands.expected.len() && bytes.is_empty() {
            true => Ok(values),
            false => Err(failed(&"a reply without a command")),
        }
    }
}

/// A socket that is connected.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Waits until it may be ready.
    pub(super) async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        match self {
            Self::Tcp(stream) => stream.ready(interest).await,
            Self::Unix(stream) => stream.ready(interest).await,
        }
    }

    /// Does `work` if it is ready, and notes when it is not any more.
    pub(super) fn try_io(
        &self,
        interest: Interest,
        mut work: impl FnMut(BorrowedFd<'_>) -> Result<usize, SocketError>,
    ) -> Result<usize, SocketError> {
        let mut memory: Option<AccessError> = None;
        let mut work = |socket: BorrowedFd<'_>| match work(socket) {
            Ok(moved) => Ok(moved),
            Err(SocketError::System(error)) => Err(error),
            Err(SocketError::Memory(error)) => {
                let told = io::Error::other(error.clone());
                memory = Some(error);
                Err(told)
            }
            Err(error) => Err(io::Error::other(error)),
        };
        let done = match self {
            Self::Tcp(stream) => stream.try_io(interest, || work(stream.as_fd())),
            Self::Unix(stream) => stream.try_io(interest, || work(stream.as_fd())),
        };
        match memory {
            Some(error) => Err(error.into()),
            None => Ok(done?),
        }
    }
}
