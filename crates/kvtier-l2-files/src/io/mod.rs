//! I/O of the adapters that keep objects in files or on a device: engines, one per way of moving the bytes of open files, and the
//! threads that run them.

mod batch;
pub(crate) mod choice;
pub(crate) mod nixl;
pub(crate) mod pool;
pub(crate) mod uring;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvtier_core::object_key::shown_path;
use kvtier_memory::uring::{Tail, Transfer};
use kvtier_memory::{Extent, FileError};
use rustix::io::Errno;
use serde_json::Value;

use kvtier_l2::{Buffer, ErrorKind, L2Error};

pub(crate) use batch::{FileOperation, FileStep, run};

/// Transfer between a file and a buffer with a tail behind it. It owns all that is accessed meanwhile.
pub(crate) struct Move {
    /// Identifies it for its [`FileWork`].
    pub number: usize,
    pub file: OwnedFd,
    /// Offset of the bytes in the file.
    pub at: u64,
    pub buffer: Buffer,
    /// Bytes of the buffer.
    pub body: u64,
    pub tail: Tail,
    /// Bytes to read; `None` for a write.
    pub size: Option<u64>,
}

/// Result of [`Engine::read`]; empty for [`Engine::write`].
pub(crate) type Moved = Result<(u64, Option<u128>), FileError>;

/// Transfers of one thread.
pub(crate) trait FileWork {
    /// Prepares the next transfer, while others are in flight if the engine runs several at a time.
    fn next(&mut self) -> Option<Move>;

    /// A transfer has ended.
    fn done(&mut self, one: Move, moved: Moved);

    /// The outcome of a transfer is lost.
    fn lost(&mut self, number: usize);
}

/// Moves bytes between files and arenas. A call ends when its bytes are moved; several threads call at once. By default
/// transfers run one at a time by POSIX calls.
pub(crate) trait Engine: Send + Sync + 'static {
    /// Returns the engine's name in `/status`.
    fn name(&self) -> &'static str;

    /// Returns the engine's part of `/status`, if it has one.
    fn status(&self) -> Option<Value> {
        None
    }

    /// Runs all transfers.
    fn run(&self, work: &mut dyn FileWork) {
        while let Some(mut one) = work.next() {
            let (file, tail) = ((one.file.as_fd(), one.at), &mut one.tail);
            let moved = match one.size {
                Some(size) => self.read(file, &one.buffer, one.body, tail, size),
                None => self
                    .write(file, &one.buffer, one.body, tail)
                    .map(|()| (0, None)),
            };
            work.done(one, moved);
        }
    }

    /// Reads a file from a place: the first `body` bytes of `to`, then `tail`. Returns the bytes read, at least `size`
    /// unless the file is shorter, and the checksum of those in `to` if it was computed.
    fn read(
        &self,
        (file, at): (BorrowedFd<'_>, u64),
        to: &Buffer,
        body: u64,
        tail: &mut [u8],
        size: u64,
    ) -> Result<(u64, Option<u128>), FileError> {
        let (arena, extent) = (to.arena(), part(to, body));
        if is_direct(file) {
            // In one call, so that the disk is never idle.
            return Ok((arena.read_file(extent, tail, file, at, size)?, None));
        }
        let (read, sum) = arena.read_file_summed(extent, tail, file, at, size)?;
        Ok((read, Some(sum)))
    }

    /// Writes a file from a place: the first `body` bytes of `from`, then `tail`.
    fn write(
        &self,
        (file, at): (BorrowedFd<'_>, u64),
        from: &Buffer,
        body: u64,
        tail: &[u8],
    ) -> Result<(), FileError> {
        from.arena().write_file(part(from, body), tail, file, at)
    }

    /// Makes a file or directory survive a power loss.
    fn sync(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        rustix::fs::fsync(file)
    }
}

/// `preadv` and `pwritev`, one at a time: the defaults.
pub(crate) struct Posix;

pub(crate) fn part(buffer: &Buffer, body: u64) -> Extent {
    let extent = buffer.extent();
    Extent::new(extent.offset, body.min(extent.len))
}

impl Engine for Posix {
    fn name(&self) -> &'static str {
        "posix"
    }
}

/// Data of a transfer in flight; it keeps the buffer in place.
pub(crate) struct HeldBuffer {
    pub number: usize,
    buffer: Buffer,
    body: u64,
}

/// Returns a transfer that owns all that is accessed.
pub(crate) fn transfer(one: Move) -> Transfer<HeldBuffer> {
    Transfer {
        file: one.file,
        at: one.at,
        arena: Arc::clone(one.buffer.arena()),
        extent: part(&one.buffer, one.body),
        tail: one.tail,
        enough: one.size,
        hold: HeldBuffer {
            number: one.number,
            buffer: one.buffer,
            body: one.body,
        },
    }
}

/// A transfer has ended.
pub(crate) fn done(
    work: &mut dyn FileWork,
    ended: Transfer<HeldBuffer>,
    moved: Result<u64, FileError>,
) {
    let HeldBuffer {
        number,
        buffer,
        body,
    } = ended.hold;
    let one = Move {
        number,
        file: ended.file,
        at: ended.at,
        buffer,
        body,
        tail: ended.tail,
        size: ended.enough,
    };
    let moved: Moved = moved.map(|bytes| (bytes, None));
    work.done(one, moved);
}

/// Closes a written file: some file systems report a lack of space only then.
pub(crate) fn close(file: OwnedFd) -> Result<(), Errno> {
    kvtier_memory::close_file(file).map_err(|error| errno(&error))
}

/// Whether a file is open for direct I/O.
pub(crate) fn is_direct(file: impl AsFd) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::DIRECT))
}

/// Whether direct I/O was refused as such.
pub(crate) fn refuses_direct(error: &FileError) -> bool {
    matches!(error, FileError::System { done: 0, source } if errno(source) == Errno::INVAL)
}

/// Switches a file to the page cache.
pub(crate) fn leave_direct(file: &OwnedFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(file.as_fd())?;
    rustix::fs::fcntl_setfl(file.as_fd(), flags - rustix::fs::OFlags::DIRECT)
}

/// Whether the medium lacks what was written, so that other places may be readable: past the page cache an error of the medium
/// is not `EIO` but what the device reported.
pub(crate) fn is_unreadable(error: Errno) -> bool {
    matches!(
        error,
        Errno::IO | Errno::NODATA | Errno::ILSEQ | Errno::BADMSG | Errno::UCLEAN
    )
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// Returns the error of the system, if there is one.
pub(crate) fn reason(error: &FileError) -> Option<Errno> {
    match error {
        FileError::System { source, .. } => Some(errno(source)),
        _ => None,
    }
}

/// Error of a transfer whose outcome is lost.
pub(crate) fn lost() -> L2Error {
    L2Error::new(
        ErrorKind::Unavailable,
        "the system does not say what became of the file",
    )
}

/// Returns the error of a system call on a file.
pub(crate) fn refused(action: &str, path: &str, error: Errno) -> L2Error {
    let path = shown_path(path);
    L2Error::new(kind(error), format!("cannot {action} {path:?}: {error}"))
}

/// Returns the error of a transfer.
pub(crate) fn failed(action: &str, path: &str, error: &FileError) -> L2Error {
    let kind = match error {
        FileError::Memory(_) => ErrorKind::Memory,
        FileError::System { source, .. } => kind(errno(source)),
        _ => ErrorKind::Unavailable,
    };
    let path = shown_path(path);
    L2Error::new(kind, format!("cannot {action} {path:?}: {error}"))
}

fn kind(error: Errno) -> ErrorKind {
    match error {
        Errno::NOENT => ErrorKind::NotFound,
        Errno::NOSPC | Errno::DQUOT => ErrorKind::Full,
        Errno::ACCESS
        | Errno::PERM
        | Errno::ROFS
        | Errno::FBIG
        | Errno::INVAL
        | Errno::ISDIR
        | Errno::NOTDIR
        | Errno::NOTEMPTY
        | Errno::EXIST
        | Errno::LOOP
        | Errno::NAMETOOLONG
        | Errno::XDEV
        | Errno::OPNOTSUPP => ErrorKind::Refused,
        _ => ErrorKind::Unavailable,
    }
}
