//! Sockets that a service manager has bound for this process (socket activation).
//!
//! Flags say where the server listens. An inherited socket is used where its address is one of them, so that all else that
//! depends on an address, such as tokens or the pool's name, is as without it. A socket at another address is refused.

use std::ffi::OsStr;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use kvtier_common::error::{Error, Result};
use rustix::io::{FdFlags, fcntl_setfd, ioctl_fionbio};
use rustix::net::{SocketAddrUnix, SocketType, getsockname, sockopt};

/// What the service manager has, in messages.
const ORIGIN: &str = "LISTEN_FDS";

/// Sockets that are not used yet.
#[derive(Debug, Default)]
pub struct Inherited {
    sockets: Vec<(Address, OwnedFd)>,
}

/// Address of an inherited socket.
#[derive(Debug, PartialEq, Eq)]
enum Address {
    Ip(SocketAddr),
    Path(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => write!(f, "tcp://{address}"),
            Self::Path(path) => write!(f, "ipc://{}", path.display()),
        }
    }
}

impl Inherited {
    /// Takes the sockets that the service manager has passed.
    ///
    /// # Errors
    /// One that does not listen for connections over TCP or at a path.
    pub fn new(sockets: Vec<OwnedFd>) -> Result<Self> {
        let checked = sockets.into_iter().map(|socket| match listening(&socket) {
            Some(address) => {
                prepare(&socket).map_err(|error| Error::io(format!("{ORIGIN}: {address}"), error))?;
                Ok((address, socket))
            }
            None => Err(Error::refused(format!(
                "{ORIGIN}: a descriptor is no listening stream socket; give ListenStream= with an IP address and a port, or with a path"
            ))),
        });
        let sockets = checked.collect::<Result<_>>()?;
        Ok(Self { sockets })
    }

    /// Returns the socket at an address.
    pub(crate) fn take_ip(&mut self, address: SocketAddr) -> Option<OwnedFd> {
        self.take(&Address::Ip(address))
    }

    /// Returns the socket at the first of these addresses that has one, for HTTP.
    pub(crate) fn take_first(
        &mut self,
        addresses: impl IntoIterator<Item = SocketAddr>,
    ) -> Option<TcpListener> {
        let mut addresses = addresses.into_iter();
        addresses.find_map(|address| self.take_ip(address).map(Into::into))
    }

    /// Whether a socket at a path is left.
    pub(crate) fn has_path(&self, path: &Path) -> bool {
        let mut left = self.sockets.iter();
        left.any(|(address, _)| matches!(address, Address::Path(its) if its == path))
    }

    /// Returns the socket at a path.
    pub(crate) fn take_path(&mut self, path: &Path) -> Option<OwnedFd> {
        self.take(&Address::Path(path.to_owned()))
    }

    fn take(&mut self, address: &Address) -> Option<OwnedFd> {
        let at = self.sockets.iter().position(|(its, _)| its == address)?;
        Some(self.sockets.swap_remove(at).1)
    }

    /// Checks that all sockets were taken: connections to another would wait forever.
    ///
    /// # Errors
    /// Names the address of a socket that no flag names.
    pub(crate) fn check_used_up(&self) -> Result<()> {
        let Some((address, _)) = self.sockets.first() else {
            return Ok(());
        };
        Err(Error::refused(format!(
            "{ORIGIN}: the service manager listens at {address}, where no flag puts a port of the server; give ListenStream= and \
             --host, --port, --http-host, --http-port the same addresses"
        )))
    }
}

/// The address of a stream socket that listens.
fn listening(socket: &OwnedFd) -> Option<Address> {
    let is_stream = sockopt::socket_type(socket).ok()? == SocketType::STREAM;
    if !is_stream || !sockopt::socket_acceptconn(socket).ok()? {
        return None;
    }
    let address = getsockname(socket).ok()?;
    match SocketAddr::try_from(address.clone()) {
        Ok(ip) => Some(Address::Ip(ip)),
        Err(_) => {
            let address = SocketAddrUnix::try_from(address).ok()?;
            let path = OsStr::from_bytes(address.path()?.as_ref().to_bytes()).into();
            Some(Address::Path(path))
        }
    }
}

/// Makes a socket as one of our own: it never blocks, and programs that the server starts do not have it.
fn prepare(socket: &OwnedFd) -> rustix::io::Result<()> {
    fcntl_setfd(socket, FdFlags::CLOEXEC)?;
    ioctl_fionbio(socket, true)
}
