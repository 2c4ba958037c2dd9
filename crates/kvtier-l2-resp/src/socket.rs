//! A connected socket, TCP or in the file system, without waiting.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use kvtier_memory::AccessError;
use kvtier_memory::socket::SocketError;
use rustix::net::{RecvFlags, recv};
use tokio::io::{Interest, Ready};
use tokio::net::{TcpStream, UnixStream};

/// Whether a socket has only to be waited for.
pub(super) fn is_not_ready(error: &SocketError) -> bool {
    matches!(error, SocketError::System(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted))
}

/// A socket that is connected.
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
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
        work: impl FnOnce(BorrowedFd<'_>) -> Result<usize, SocketError>,
    ) -> Result<usize, SocketError> {
        let mut memory: Option<AccessError> = None;
        let work = |socket: BorrowedFd<'_>| match work(socket) {
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

    /// Receives what has arrived; 0 at the end.
    pub(super) fn receive(&self, space: &mut [u8]) -> Result<usize, SocketError> {
        self.try_io(Interest::READABLE, |socket| {
            let got = recv(socket, space, RecvFlags::DONTWAIT).map_err(io::Error::from)?;
            Ok(got.0)
        })
    }
}
