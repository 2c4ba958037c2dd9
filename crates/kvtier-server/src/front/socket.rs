//! The request socket: where clients connect.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, accept_with, bind, getsockname, listen, netdevice,
    socket_with, sockopt,
};

use super::interface::ipv4_address;
use super::ipc::{self, SocketFile};
use crate::inherited::Inherited;
use kvtier_common::error::{Error, Result};
use kvtier_config::ServerConfig;

/// Connections that may wait to be accepted, if the system allows as many.
pub(super) const BACKLOG: i32 = 1024;

/// After how long a silence the system probes a TCP peer, and how often until it closes the connection. Heartbeats probe
/// peers of ZMTP 3.1 as well.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_COUNT: u32 = 6;

/// The request socket, bound. Connections wait until a front end accepts them.
pub struct RequestSocket {
    /// File of an `ipc://` socket, removed when dropped; none if the socket was inherited. Dropped before the socket, which
    /// keeps the inode number from being reused until then.
    _file: Option<SocketFile>,
    socket: OwnedFd,
    endpoint: String,
}

impl RequestSocket {
    /// Checks that such a socket is possible, whatever its port; nothing is left behind.
    ///
    /// # Errors
    /// As [`RequestSocket::bind`]; [`ErrorKind::InUse`](kvtier_common::error::ErrorKind::InUse) for a path where a server listens.
    pub(crate) fn preflight(config: &ServerConfig, inherited: &Inherited) -> Result<()> {
        if let Some(path) = config.ipc_path() {
            if inherited.has_path(path) {
                return ipc::check_inherited(path, config.ipc_mode)
                    .map_err(|error| error.context(format!("--host: {}", config.bind_address())));
            }
            return ipc::preflight(path).map_err(|error| cannot_bind(config, error));
        }
        let mut any_port = config.clone();
        any_port.args.port = 0;
        Self::bind(&any_port, &mut Inherited::default()).map(drop)
    }

    /// Takes the inherited socket at the address of the configuration, or binds one.
    ///
    /// # Errors
    /// One line that names the address.
    pub fn bind(config: &ServerConfig, inherited: &mut Inherited) -> Result<Self> {
        let address = config.bind_address();
        if let Some(path) = config.ipc_path() {
            // Its file belongs to the service manager.
            if let Some(socket) = inherited.take_path(path) {
                return Ok(Self {
                    socket,
                    endpoint: address,
                    _file: None,
                });
            }
            let (socket, file) = ipc::listen_at(path, config.ipc_mode)
                .map_err(|error| cannot_bind(config, error))?;
            return Ok(Self {
                socket,
                endpoint: address,
                _file: Some(file),
            });
        }
        let Some(host) = resolve(&config.host, config.port) else {
            return Err(Error::refused(format!(
                "--host: {:?} is not found: give an IP address or a network interface of this machine; names of \
                 hosts are not looked up",
                config.host
            )));
        };
        let socket = match inherited.take_ip(host) {
            Some(socket) => set_options(&socket).map(|()| socket),
            None => listen_tcp(host),
        };
        let socket = socket.map_err(|error| {
            Error::io(format!("--host, --port: {address} cannot be bound"), error)
        })?;
        let bound = getsockname(&socket)
            .ok()
            .and_then(|bound| SocketAddr::try_from(bound).ok());
        let endpoint = bound.map_or(address, |bound| format!("tcp://{bound}"));
        Ok(Self {
            socket,
            endpoint,
            _file: None,
        })
    }

    /// Address of the socket, such as `tcp://127.0.0.1:5555`.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The next connection that waits.
    pub(super) fn accept(&self) -> Result<OwnedFd, Errno> {
        accept_with(&self.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)
    }
}

impl AsFd for RequestSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn cannot_bind(config: &ServerConfig, error: Error) -> Error {
    error.context(format!("--host: {} cannot be bound", config.bind_address()))
}

/// The address of a host as `--host` has it: an IP address, `*`, `localhost`, or an interface.
fn resolve(host: &str, port: u16) -> Option<SocketAddr> {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let bare = bare.unwrap_or(host);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Some(SocketAddr::new(ip, port));
    }
    if let Some((ip, zone)) = bare.split_once('%') {
        let ip = ip.parse().ok()?;
        let zone = zone.parse().ok().or_else(|| interface_index(zone))?;
        return Some(SocketAddrV6::new(ip, port, 0, zone).into());
    }
    let ip = match bare {
        "*" => Ipv4Addr::UNSPECIFIED,
        // As it is for every client of this protocol.
        "localhost" => Ipv4Addr::LOCALHOST,
        interface => ipv4_address(interface).ok()??,
    };
    Some(SocketAddr::new(ip.into(), port))
}

fn interface_index(name: &str) -> Option<u32> {
    let socket = socket_with(
        AddressFamily::INET6,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    );
    netdevice::name_to_index(socket.ok()?, name).ok()
}

fn listen_tcp(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        // `::` is every address, of IPv4 too.
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    set_options(&socket)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Sets what connections inherit.
fn set_options(socket: &OwnedFd) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_COUNT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_is_an_address_or_an_interface() {
        for (host, address) in [
            ("127.0.0.1", Some("127.0.0.1:7")),
            ("localhost", Some("127.0.0.1:7")),
            ("lo", Some("127.0.0.1:7")),
            ("*", Some("0.0.0.0:7")),
            ("::", Some("[::]:7")),
            ("[::1]", Some("[::1]:7")),
            ("fe80::1%lo", Some("[fe80::1%1]:7")),
            ("fe80::1%nosuch", None),
            ("example.invalid", None),
            ("", None),
        ] {
            let found = resolve(host, 7).map(|address| address.to_string());
            assert_eq!(found.as_deref(), address, "{host}");
        }
    }

    #[test]
    fn every_kind_of_address_accepts_with_its_options() {
        for (host, peer) in [
            ("127.0.0.1", "127.0.0.1"),
            ("*", "127.0.0.1"),
            ("lo", "127.0.0.1"),
            ("::1", "::1"),
            ("[::]", "::1"),
            // `::` is every address.
            ("::", "127.0.0.1"),
        ] {
            let listening = listen_tcp(resolve(host, 0).expect(host)).expect(host);
            let bound = getsockname(&listening).expect(host);
            let port = SocketAddr::try_from(bound).expect(host).port();
            let peer = SocketAddr::new(peer.parse().expect("an address"), port);
            let _client = std::net::TcpStream::connect(peer).expect(host);
            let accepted = loop {
                match accept_with(&listening, SocketFlags::NONBLOCK) {
                    Err(Errno::AGAIN) => std::thread::yield_now(),
                    accepted => break accepted.expect(host),
                }
            };
            assert!(sockopt::tcp_nodelay(&accepted).expect(host), "{host}");
            assert!(sockopt::socket_keepalive(&accepted).expect(host), "{host}");
            let idle = sockopt::tcp_keepidle(&accepted).expect(host);
            assert_eq!(idle, KEEPALIVE_IDLE, "{host}");
        }
    }
}
