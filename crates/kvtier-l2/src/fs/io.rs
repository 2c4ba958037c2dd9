//! How the bytes of an open file are moved. One implementation an engine; all but this is the same for all of them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kvtier_core::object_key::shown_path;
use kvtier_memory::uring::Tail;
use kvtier_memory::{Extent, FileError};
use rustix::io::Errno;

use crate::error::{ErrorKind, L2Error};
use crate::object::Buffer;

/// Bytes to be moved between a file, from its start, and a buffer with a tail behind it. It has all that is touched
/// meanwhile.
pub(super) struct Move {
    /// Whoever gave it knows it by this.
    pub number: usize,
    pub file: OwnedFd,
    pub buffer: Buffer,
    /// Bytes of the buffer.
    pub body: u64,
    pub tail: Tail,
    /// Bytes of a file that is read; `None` for one that is written.
    pub size: Option<u64>,
}

/// What [`Engine::read`] and [`Engine::write`] say, the latter nothing.
pub(super) type Moved = Result<(u64, Option<u128>), FileError>;

/// What a thread has to move.
pub(super) trait Work {
    /// The next, which is got ready here: while others are under way, if the engine moves several at a time.
    fn next(&mut self) -> Option<Move>;

    /// One is through.
    fn done(&mut self, one: Move, moved: Moved);

    /// What became of one will never be known.
    fn lost(&mut self, number: usize);
}

/// Moves bytes between files and arenas. Each call ends when its bytes are moved; several threads call at once. What an
/// engine does not do in a way of its own is done by plain system calls, one at a time.
pub(super) trait Engine: Send + Sync + 'static {
    /// For `/status`.
    fn name(&self) -> &'static str;

    /// Does all of it.
    fn run(&self, work: &mut dyn Work) {
        while let Some(mut one) = work.next() {
            let (file, tail) = (one.file.as_fd(), &mut one.tail);
            let moved = match one.size {
                Some(size) => self.read(file, &one.buffer, one.body, tail, size),
                None => self
                    .write(file, &one.buffer, one.body, tail)
                    .map(|()| (0, None)),
            };
            work.done(one, moved);
        }
    }

    /// Reads a file from its start: the first `body` bytes of `to`, then `tail`. Gives how many there were, which is
    /// `size` or more unless the file is shorter; and the checksum of those in `to`, if that came with it.
    fn read(
        &self,
        file: BorrowedFd<'_>,
        to: &Buffer,
        body: u64,
        tail: &mut [u8],
        size: u64,
    ) -> Result<(u64, Option<u128>), FileError> {
        let (arena, extent) = (to.arena(), part(to, body));
        if is_direct(file) {
            // In one piece, or the disk would wait for us.
            return Ok((arena.read_file(extent, tail, file, 0, size)?, None));
        }
        let (read, sum) = arena.read_file_summed(extent, tail, file, 0, size)?;
        Ok((read, Some(sum)))
    }

    /// Writes a file from its start: the first `body` bytes of `from`, then `tail`.
    fn write(
        &self,
        file: BorrowedFd<'_>,
        from: &Buffer,
        body: u64,
        tail: &[u8],
    ) -> Result<(), FileError> {
        from.arena().write_file(part(from, body), tail, file, 0)
    }

    /// Has a file or directory survive a power loss.
    fn sync(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        rustix::fs::fsync(file)
    }
}

/// `preadv` and `pwritev`, one at a time: nothing in a way of its own.
pub(super) struct Posix;

pub(super) fn part(buffer: &Buffer, body: u64) -> Extent {
    let extent = buffer.extent();
    Extent::new(extent.offset, body.min(extent.len))
}

impl Engine for Posix {
    fn name(&self) -> &'static str {
        "posix"
    }
}

/// Closes a file that was written: some file systems say only then that there was no room.
pub(super) fn close(file: OwnedFd) -> Result<(), Errno> {
    kvtier_memory::close_file(file).map_err(|error| errno(&error))
}

/// Whether a file is read and written past the page cache.
pub(super) fn is_direct(file: impl AsFd) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::DIRECT))
}

/// Whether I/O past the page cache was refused as such.
pub(super) fn refuses_direct(error: &FileError) -> bool {
    matches!(error, FileError::System { done: 0, source } if errno(source) == Errno::INVAL)
}

/// Lets a file go on through the page cache.
pub(super) fn leave_direct(file: &OwnedFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(file.as_fd())?;
    rustix::fs::fcntl_setfl(file.as_fd(), flags - rustix::fs::OFlags::DIRECT)
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The system's reason, if it had one.
pub(super) fn reason(error: &FileError) -> Option<Errno> {
    match error {
        FileError::System { source, .. } => Some(errno(source)),
        _ => None,
    }
}

/// The error of what an engine lost.
pub(super) fn lost() -> L2Error {
    L2Error::new(
        ErrorKind::Unavailable,
        "the system does not say what became of the file",
    )
}

/// An error of a system call on a file.
pub(super) fn refused(action: &str, path: &str, error: Errno) -> L2Error {
    let path = shown_path(path);
    L2Error::new(kind(error), format!("cannot {action} {path:?}: {error}"))
}

/// An error of moving bytes.
pub(super) fn failed(action: &str, path: &str, error: &FileError) -> L2Error {
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
