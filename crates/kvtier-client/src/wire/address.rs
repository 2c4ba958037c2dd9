//! Addresses of servers: `tcp://host:port` and `ipc://path`.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SocketAddrAny, SocketAddrUnix};

use crate::error::ClientError;

/// Address of a server, as it is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    Tcp { host: String, port: u16 },
    Ipc(SocketAddrUnix),
}

/// Addresses of sockets to try one after the other.
pub(crate) type Candidates = Vec<SocketAddrAny>;

impl Address {
    /// An endpoint with its scheme, which is TCP where none is given, and its address.
    ///
    /// # Errors
    /// [`ClientError::Connect`].
    pub fn of_endpoint(endpoint: &str) -> Result<(String, Self), ClientError> {
        let endpoint = if endpoint.contains("://") {
            endpoint.to_owned()
        } else {
            format!("tcp://{endpoint}")
        };
        let address = Self::parse(&endpoint)?;
        Ok((endpoint, address))
    }

    /// Parses an address with its scheme.
    ///
    /// # Errors
    /// [`ClientError::Connect`].
    pub fn parse(text: &str) -> Result<Self, ClientError> {
        let allowed = "allowed are tcp://HOST:PORT and ipc://PATH";
        let refused = |message: String| ClientError::Connect {
            endpoint: text.to_owned(),
            message,
        };
        if let Some(path) = text.strip_prefix("ipc://") {
            let unix = match path.strip_prefix('@') {
                Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
                None => SocketAddrUnix::new(path),
            };
            return match unix {
                Ok(unix) if !path.is_empty() => Ok(Self::Ipc(unix)),
                Ok(_) => Err(refused(format!("the path is empty; {allowed}"))),
                Err(error) => Err(refused(format!("the path is invalid: {error}"))),
            };
        }
        let tcp = text.strip_prefix("tcp://");
        let parts = tcp.and_then(|tcp| tcp.rsplit_once(':'));
        let (host, port) = parts.ok_or_else(|| refused(allowed.to_owned()))?;
        let host = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        if host.is_empty() || host == "*" {
            return Err(refused(format!("the host is {host:?}; {allowed}")));
        }
        match port.parse() {
            Ok(port) if port > 0 => Ok(Self::Tcp {
                host: host.to_owned(),
                port,
            }),
            _ => Err(refused(format!(
                "the port is {port:?}; allowed: 1 to 65535"
            ))),
        }
    }

    /// The socket's address, if no name has to be resolved.
    pub fn candidate(&self) -> Option<SocketAddrAny> {
        match self {
            Self::Ipc(unix) => Some(SocketAddrAny::from(unix.clone())),
            Self::Tcp { host, port } => {
                let ip = host.parse().ok()?;
                Some(SocketAddrAny::from(SocketAddr::new(ip, *port)))
            }
        }
    }
}

/// A name that is being resolved on a thread of its own, which the system may keep waiting.
#[derive(Debug)]
pub(crate) struct Resolving {
    resolved: Receiver<std::io::Result<Candidates>>,
    /// Readable when it is resolved.
    pub wake: Arc<OwnedFd>,
}

impl Resolving {
    /// Starts to resolve.
    ///
    /// # Errors
    /// The system's: no descriptor or no thread.
    pub fn start(host: String, port: u16) -> std::io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let (sender, resolved) = sync_channel(1);
        let done = Arc::clone(&wake);
        let resolve = move || {
            // IPv4 first, which is all that clients of libzmq use.
            let found = (host.as_str(), port).to_socket_addrs().map(|found| {
                let mut found: Vec<_> = found.collect();
                found.sort_by_key(SocketAddr::is_ipv6);
                found.into_iter().map(SocketAddrAny::from).collect()
            });
            let _ = sender.send(found);
            let _ = rustix::io::write(&done, &1u64.to_ne_bytes());
        };
        let thread = std::thread::Builder::new().name("kvtier-resolve".into());
        thread.spawn(resolve)?;
        Ok(Self { resolved, wake })
    }

    /// The result, once there is one.
    pub fn take(&self) -> Option<std::io::Result<Candidates>> {
        self.resolved.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_has_scheme_host_and_port() {
        for (text, host, port) in [
            ("tcp://127.0.0.1:5555", "127.0.0.1", 5555),
            ("tcp://[::1]:1", "::1", 1),
            ("tcp://cache.example:65535", "cache.example", 65535),
        ] {
            let host = host.to_owned();
            assert_eq!(Address::parse(text).unwrap(), Address::Tcp { host, port });
        }
        for path in [
            "ipc:///run/kvtier.sock",
            "ipc://relative",
            "ipc://@abstract",
        ] {
            assert!(Address::parse(path).unwrap().candidate().is_some());
        }
    }

    #[test]
    fn invalid_address_is_refused_with_what_is_allowed() {
        for (text, named) in [
            ("tcp://", "allowed are tcp://HOST:PORT and ipc://PATH"),
            ("gopher://x:1", "allowed are"),
            ("tcp://:1", "the host is \"\""),
            ("tcp://*:1", "the host is \"*\""),
            ("tcp://h:", "the port is \"\""),
            ("tcp://h:0", "allowed: 1 to 65535"),
            ("tcp://h:65536", "allowed: 1 to 65535"),
            ("ipc://", "the path is empty"),
            (&format!("ipc://{}", "x".repeat(200)), "the path is invalid"),
        ] {
            let error = Address::parse(text).unwrap_err().to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    #[test]
    fn only_numeric_hosts_need_no_resolver() {
        let candidate = |text| Address::parse(text).unwrap().candidate();
        assert!(candidate("tcp://[::1]:7").is_some() && candidate("tcp://127.0.0.1:7").is_some());
        assert_eq!(candidate("tcp://cache.invalid:7"), None);
        // It may be ::1 alone.
        assert_eq!(candidate("tcp://localhost:7"), None);
    }
}
