//! Sockets straight from and to an arena, without a buffer in between.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::access::AccessError;
use crate::arena::Arena;
use kvtier_common::extent::Extent;

/// Slices of one [`send_slices`] at most.
pub const MAX_SLICES: usize = 64;

/// Bytes to be sent.
#[derive(Debug, Clone, Copy)]
pub enum Slice<'a> {
    /// Bytes of this process.
    Bytes(&'a [u8]),
    /// Bytes of an arena.
    Extent(&'a Arena, Extent),
}

/// Why a socket took or gave nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The arena's side failed.
    #[error(transparent)]
    Memory(#[from] AccessError),
    /// The socket's side failed; [`io::ErrorKind::WouldBlock`] if it is not ready.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Sends what `socket` takes of `slices`, in order and without waiting. Returns the number of bytes; only the first
/// [`MAX_SLICES`] slices are looked at.
///
/// # Errors
/// [`SocketError`].
pub fn send_slices(socket: BorrowedFd<'_>, slices: &[Slice<'_>]) -> Result<usize, SocketError> {
    let mut vectors = [libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    }; MAX_SLICES];
    let mut used = 0;
    for (vector, slice) in vectors.iter_mut().zip(slices) {
        let (base, len) = match slice {
            Slice::Bytes(bytes) => (bytes.as_ptr().cast_mut(), bytes.len()),
            Slice::Extent(arena, extent) => {
                let first = arena.address(*extent, 0, extent.len)?;
                (first.as_ptr(), extent.len as usize)
            }
        };
        (vector.iov_base, vector.iov_len) = (base.cast(), len);
        used += 1;
    }
    // SAFETY: all fields of a msghdr may be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (vectors.as_mut_ptr(), used as _);
    loop {
        // SAFETY: `message` names the first `used` of `vectors`, which name readable memory that outlives the call: bytes
        // that are borrowed, and extents that lie inside borrowed arenas. The system only reads them.
        let moved = unsafe {
            libc::sendmsg(
                socket.as_raw_fd(),
                &raw const message,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        if let Some(moved) = outcome(moved)? {
            for slice in slices {
                if let Slice::Extent(arena, extent) = slice {
                    arena.mapping().check_poison(*extent)?;
                }
            }
            return Ok(moved);
        }
    }
}

/// Bytes moved; `None` to try again.
pub(crate) fn outcome(moved: isize) -> Result<Option<usize>, SocketError> {
    if let Ok(moved) = usize::try_from(moved) {
        return Ok(Some(moved));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EINTR) => Ok(None),
        // The system touches lost pages without the fault guard and returns an error.
        Some(libc::EFAULT) => Err(AccessError::Poisoned { what: "arena" }.into()),
        _ => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::arena::ArenaKind;

    fn arena() -> Arena {
        Arena::create(ArenaKind::Anonymous, 1 << 20).unwrap()
    }

    #[test]
    fn slices_arrive_in_order() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let arena = arena();
        let (first, second) = (Extent::new(4096, 5), Extent::new(64, 3));
        arena.write(first, 0, b"first").unwrap();
        arena.write(second, 0, b"2nd").unwrap();
        let slices = [
            Slice::Bytes(b"<"),
            Slice::Extent(&arena, first),
            Slice::Bytes(b""),
            Slice::Extent(&arena, second),
            Slice::Bytes(b">"),
        ];
        assert_eq!(send_slices(ours.as_fd(), &slices).unwrap(), 10);
        let mut bytes = [0; 10];
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"<first2nd>");
    }

    #[test]
    fn received_bytes_are_in_the_extent_and_nowhere_else() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let arena = arena();
        let all = Extent::new(0, 100);
        arena.write(all, 0, &[7; 100]).unwrap();
        theirs.write_all(b"received, and more").unwrap();
        let got = arena.receive(Extent::new(10, 8), ours.as_fd()).unwrap();
        assert_eq!(got, 8);
        let mut bytes = Vec::new();
        arena.read_into(all, 0, 100, &mut bytes).unwrap();
        assert_eq!(&bytes[10..18], b"received");
        assert!(
            bytes[..10]
                .iter()
                .chain(&bytes[18..])
                .all(|byte| *byte == 7)
        );
    }

    #[test]
    fn sockets_that_are_not_ready_are_not_waited_for() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let arena = arena();
        let is_would_block = |result: Result<usize, SocketError>| matches!(result, Err(SocketError::System(error)) if error.kind() == ErrorKind::WouldBlock);
        assert!(is_would_block(
            arena.receive(Extent::new(0, 8), ours.as_fd())
        ));
        let large = [Slice::Extent(&arena, Extent::new(0, 1 << 20))];
        while send_slices(ours.as_fd(), &large).is_ok() {}
        assert!(is_would_block(send_slices(ours.as_fd(), &large)));
        drop(theirs);
        assert!(send_slices(ours.as_fd(), &large).is_err());
    }

    #[test]
    fn end_of_the_other_side_is_no_byte() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let got = arena().receive(Extent::new(0, 8), ours.as_fd());
        assert_eq!(got.unwrap(), 0);
    }

    #[test]
    fn extents_outside_of_the_arena_are_refused() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let arena = arena();
        let outside = Extent::new(1 << 20, 1);
        let is_memory = |result| matches!(result, Err(SocketError::Memory(_)));
        assert!(is_memory(arena.receive(outside, ours.as_fd())));
        assert!(is_memory(send_slices(
            ours.as_fd(),
            &[Slice::Extent(&arena, outside)]
        )));
    }
}
