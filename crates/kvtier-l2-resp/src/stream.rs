//! A connection to a server: a socket as it is, or with TLS.

use std::io::{self, BufRead as _, IoSlice, Write as _};

use kvtier_memory::Extent;
use kvtier_memory::socket::{Slice, SocketError, send_slices};
use tokio::io::{Interest, Ready};
use tokio_rustls::rustls::Connection as TlsConnection;

use super::socket::Socket;
use kvtier_l2::Buffer;

/// Bytes that TLS encrypts before they are sent, and receives before they are decrypted.
const TLS_BYTES: usize = 128 << 10;

/// Parts without a byte for us before others of the runtime get their turn.
const MAX_RECEIVES: usize = 16;

/// A connection. Nothing here waits but [`ready`](Self::ready).
pub(super) struct Stream {
    socket: Socket,
    tls: Option<Box<TlsSession>>,
}

/// The TLS of a connection.
struct TlsSession {
    connection: TlsConnection,
    /// What was received; the part from `decrypted` up to `received` is not decrypted yet.
    encrypted: Vec<u8>,
    decrypted: usize,
    received: usize,
    /// Bytes of objects on their way to be encrypted.
    scratch: Vec<u8>,
}

impl Stream {
    pub(super) fn plain(socket: Socket) -> Self {
        Self { socket, tls: None }
    }

    /// Secures a socket, as the client or the server that `connection` is.
    pub(super) async fn secure(socket: Socket, mut connection: TlsConnection) -> io::Result<Self> {
        // What is sent is bounded by what is encrypted at once.
        connection.set_buffer_limit(None);
        let mut session = Box::new(TlsSession {
            connection,
            encrypted: vec![0; TLS_BYTES],
            decrypted: 0,
            received: 0,
            scratch: Vec::new(),
        });
        while session.connection.is_handshaking() {
            // A server may never stop sending.
            tokio::task::yield_now().await;
            let moved = match session.flush(&socket) {
                Ok(()) => session.decrypt(&socket).map(|_| ()),
                Err(error) => Err(error),
            };
            match moved {
                Ok(()) => {}
                Err(SocketError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    let interest = if session.connection.wants_write() {
                        Interest::READABLE | Interest::WRITABLE
                    } else {
                        Interest::READABLE
                    };
                    socket.ready(interest).await?;
                }
                Err(SocketError::System(error)) => return Err(error),
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(Self {
            socket,
            tls: Some(session),
        })
    }

    /// Waits until it may be ready.
    pub(super) async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        self.socket.ready(interest).await
    }

    /// Whether bytes that it took wait to be sent; [`send`](Self::send) sends them first.
    pub(super) fn has_unsent(&self) -> bool {
        let tls = self.tls.as_ref();
        tls.is_some_and(|session| session.connection.wants_write())
    }

    /// Takes some of `slices`, in order, and returns the number of bytes. They are not read any more.
    pub(super) fn send(&mut self, slices: &[Slice<'_>]) -> Result<usize, SocketError> {
        match &mut self.tls {
            None if slices.is_empty() => Ok(0),
            None => {
                let send = |socket: std::os::fd::BorrowedFd<'_>| send_slices(socket, slices);
                self.socket.try_io(Interest::WRITABLE, send)
            }
            Some(session) => session.send(&self.socket, slices),
        }
    }

    /// Receives what has arrived; 0 at the end.
    pub(super) fn receive(&mut self, space: &mut [u8]) -> Result<usize, SocketError> {
        let Some(session) = &mut self.tls else {
            return self.socket.receive(space);
        };
        let arrived = session.arrived(&self.socket)?;
        let taken = arrived.len().min(space.len());
        space[..taken].copy_from_slice(&arrived[..taken]);
        session.connection.reader().consume(taken);
        Ok(taken)
    }

    /// Receives what has arrived into a buffer behind its first `done` bytes; 0 at the end, or if it is full.
    pub(super) fn receive_object(&mut self, to: &Buffer, done: u64) -> Result<usize, SocketError> {
        let extent = to.extent();
        let rest = Extent::new(extent.offset + done, extent.len - done);
        let Some(session) = &mut self.tls else {
            let receive = |socket: std::os::fd::BorrowedFd<'_>| to.arena().receive(rest, socket);
            return self.socket.try_io(Interest::READABLE, receive);
        };
        let arrived = session.arrived(&self.socket)?;
        let taken = arrived.len().min(rest.len as usize);
        to.write(done, &arrived[..taken])?;
        session.connection.reader().consume(taken);
        Ok(taken)
    }
}

impl TlsSession {
    fn send(&mut self, socket: &Socket, slices: &[Slice<'_>]) -> Result<usize, SocketError> {
        self.flush(socket)?;
        let mut taken = 0;
        for slice in slices {
            let bytes = match slice {
                Slice::Bytes(bytes) => &bytes[..bytes.len().min(TLS_BYTES - taken)],
                Slice::Extent(arena, extent) => {
                    self.scratch.clear();
                    let part = extent.len.min((TLS_BYTES - taken) as u64);
                    arena.read_into(*extent, 0, part, &mut self.scratch)?;
                    &self.scratch
                }
            };
            self.connection.writer().write_all(bytes)?;
            taken += bytes.len();
            if taken == TLS_BYTES {
                break;
            }
        }
        match self.flush(socket) {
            // It has taken them all the same.
            Err(SocketError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            flushed => flushed?,
        }
        Ok(taken)
    }

    /// Sends what is encrypted; an error if something is left.
    fn flush(&mut self, socket: &Socket) -> Result<(), SocketError> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut Sender(socket))?;
        }
        Ok(())
    }

    /// What has arrived, decrypted; empty at the end.
    fn arrived(&mut self, socket: &Socket) -> Result<&[u8], SocketError> {
        // Records may hold nothing, and there may be no end of them.
        for _ in 0..MAX_RECEIVES {
            let state = self.connection.process_new_packets();
            let state = state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            if state.plaintext_bytes_to_read() > 0 {
                return Ok(self.connection.reader().into_first_chunk()?);
            }
            if state.peer_has_closed() || self.decrypt(socket)? == 0 {
                return Ok(&[]);
            }
        }
        Err(io::Error::from(io::ErrorKind::Interrupted).into())
    }

    /// Passes on what was received, or else receives something; 0 at the end.
    fn decrypt(&mut self, socket: &Socket) -> Result<usize, SocketError> {
        if self.decrypted == self.received {
            self.decrypted = 0;
            self.received = 0;
            self.received = socket.receive(&mut self.encrypted)?;
        }
        let mut rest = &self.encrypted[self.decrypted..self.received];
        let passed = self.connection.read_tls(&mut rest)?;
        self.decrypted += passed;
        let processed = self.connection.process_new_packets();
        processed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        match passed {
            0 if self.connection.is_handshaking() => {
                Err(io::Error::from(io::ErrorKind::UnexpectedEof).into())
            }
            passed => Ok(passed),
        }
    }
}

/// A socket that TLS writes to.
struct Sender<'a>(&'a Socket);

impl io::Write for Sender<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let slices: Vec<_> = parts.iter().map(|part| Slice::Bytes(part)).collect();
        let sent = self
            .0
            .try_io(Interest::WRITABLE, |socket| send_slices(socket, &slices));
        sent.map_err(|error| match error {
            SocketError::System(error) => error,
            error => io::Error::other(error),
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
