//! Files straight from and to an arena, without a buffer in between.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

use xxhash_rust::xxh3::Xxh3;

use crate::access::AccessError;
use crate::arena::Arena;
use crate::checksum;
use kvtier_common::extent::Extent;

/// Bytes that are read before they are hashed; they stay in a second-level cache.
const PIECE: u64 = 256 << 10;

/// Why a file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The arena's side failed.
    #[error(transparent)]
    Memory(#[from] AccessError),
    /// The file's side failed.
    #[error("{source} after {done} bytes")]
    System {
        /// Bytes moved before.
        done: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A write moved nothing and gave no reason.
    #[error("no more bytes are taken after {0} bytes")]
    Stuck(u64),
}

impl Arena {
    /// Reads `file` from its byte `at` on: into `extent`, and behind it into `tail`, until `enough` bytes are there or
    /// the file ends. Returns the bytes read, which may be more than `enough`.
    ///
    /// With `O_DIRECT` the extent, `tail` and `at` must be aligned as the file system wants it, and `enough` should be
    /// what the file has: a second read would begin where the first ended.
    ///
    /// # Errors
    /// [`FileError`]; what is in the extent then is undefined.
    pub fn read_file(
        &self,
        extent: Extent,
        tail: &mut [u8],
        file: BorrowedFd<'_>,
        at: u64,
        enough: u64,
    ) -> Result<u64, FileError> {
        self.read_rest(extent, tail, file, at, enough, 0)
    }

    /// [`Self::read_file`] behind the first `done` bytes; returns those too.
    pub(crate) fn read_rest(
        &self,
        extent: Extent,
        tail: &mut [u8],
        file: BorrowedFd<'_>,
        at: u64,
        enough: u64,
        mut done: u64,
    ) -> Result<u64, FileError> {
        let first = self.address(extent, 0, extent.len)?.as_ptr();
        let pieces = Pieces::new(first, extent.len, tail.as_mut_ptr(), tail.len());
        while done < enough.min(pieces.len()) {
            let vectors = pieces.from(done as usize);
            // SAFETY: `vectors` name writable memory that outlives the call: the extent, checked to lie inside this
            // arena, and `tail`, which is borrowed exclusively. Others may write the extent meanwhile; the system does
            // not mind, and we make no reference to it.
            let moved = unsafe {
                libc::preadv(
                    file.as_raw_fd(),
                    vectors.as_ptr(),
                    2,
                    offset(at, done, pieces.len())?,
                )
            };
            match outcome(moved, done)? {
                Some(0) => break,
                Some(moved) => done += moved,
                None => {}
            }
        }
        self.mapping().check_poison(extent)?;
        Ok(done)
    }

    /// [`Self::read_file`], which also returns the [`Self::checksum`] of the extent. The bytes are hashed piece by piece while
    /// the processor's caches have them, so it suits files in the page cache; others are better read whole.
    ///
    /// # Errors
    /// As [`Self::read_file`].
    pub fn read_file_summed(
        &self,
        extent: Extent,
        tail: &mut [u8],
        file: BorrowedFd<'_>,
        at: u64,
        enough: u64,
    ) -> Result<(u64, u128), FileError> {
        let mut hasher = Xxh3::new();
        let mut done = 0;
        loop {
            // The last piece comes with the tail.
            let left = extent.len - done;
            let is_last = left <= 2 * PIECE;
            let piece = Extent::new(extent.offset + done, if is_last { left } else { PIECE });
            let (tail, wanted) = if is_last {
                (&mut *tail, enough.saturating_sub(done))
            } else {
                (&mut [][..], PIECE)
            };
            let read = self.read_file(piece, tail, file, at.saturating_add(done), wanted)?;
            checksum::feed(&mut hasher, self.mapping(), piece)?;
            done += read;
            if is_last || read < piece.len {
                return Ok((done, hasher.digest128()));
            }
        }
    }

    /// Writes `extent` and behind it `tail` to `file` from its byte `at` on, all of it.
    ///
    /// # Errors
    /// [`FileError`]; the file may have part of the bytes then.
    pub fn write_file(
        &self,
        extent: Extent,
        tail: &[u8],
        file: BorrowedFd<'_>,
        at: u64,
    ) -> Result<(), FileError> {
        self.write_rest(extent, tail, file, at, 0)
    }

    /// [`Self::write_file`] behind the first `done` bytes.
    pub(crate) fn write_rest(
        &self,
        extent: Extent,
        tail: &[u8],
        file: BorrowedFd<'_>,
        at: u64,
        mut done: u64,
    ) -> Result<(), FileError> {
        let first = self.address(extent, 0, extent.len)?.as_ptr();
        let pieces = Pieces::new(first, extent.len, tail.as_ptr().cast_mut(), tail.len());
        while done < pieces.len() {
            let vectors = pieces.from(done as usize);
            // SAFETY: `vectors` name readable memory that outlives the call: the extent, checked to lie inside this
            // arena, and `tail`, which is borrowed. The system only reads them.
            let moved = unsafe {
                libc::pwritev(
                    file.as_raw_fd(),
                    vectors.as_ptr(),
                    2,
                    offset(at, done, pieces.len())?,
                )
            };
            match outcome(moved, done)? {
                Some(0) => return Err(FileError::Stuck(done)),
                Some(moved) => done += moved,
                None => {}
            }
        }
        Ok(self.mapping().check_poison(extent)?)
    }
}

/// Closes a file and returns the system's result, unlike a drop: over a network, a write may fail only here.
///
/// # Errors
/// Those of `close`; the file is closed all the same.
pub fn close_file(file: OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is ours alone and not used again, whatever `close` says.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Two pieces of memory that are one after the other in a file.
pub(crate) struct Pieces {
    first: *mut u8,
    first_len: usize,
    second: *mut u8,
    second_len: usize,
}

impl Pieces {
    pub(crate) fn new(first: *mut u8, first_len: u64, second: *mut u8, second_len: usize) -> Self {
        Self {
            first,
            first_len: first_len as usize,
            second,
            second_len,
        }
    }

    fn len(&self) -> u64 {
        self.first_len as u64 + self.second_len as u64
    }

    /// What is left of both behind the first `done` bytes, at most `len` of them.
    pub(crate) fn from(&self, done: usize) -> [libc::iovec; 2] {
        let of_first = done.min(self.first_len);
        let of_second = done - of_first;
        [
            libc::iovec {
                iov_base: self.first.wrapping_add(of_first).cast(),
                iov_len: self.first_len - of_first,
            },
            libc::iovec {
                iov_base: self.second.wrapping_add(of_second).cast(),
                iov_len: self.second_len - of_second,
            },
        ]
    }
}

/// Returns the file offset of the next byte; the end must be a file offset too.
fn offset(at: u64, done: u64, len: u64) -> Result<i64, FileError> {
    let end = at.checked_add(len).and_then(|end| i64::try_from(end).ok());
    end.map(|_| (at + done) as i64).ok_or(FileError::System {
        done,
        source: io::Error::from_raw_os_error(libc::EFBIG),
    })
}

/// Bytes moved; `None` to try again.
fn outcome(moved: isize, done: u64) -> Result<Option<u64>, FileError> {
    if let Ok(moved) = u64::try_from(moved) {
        return Ok(Some(moved));
    }
    let source = io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::EINTR) => Ok(None),
        // The system touches lost pages without the fault guard and returns an error.
        Some(libc::EFAULT) => Err(AccessError::Poisoned { what: "arena" }.into()),
        _ => Err(FileError::System { done, source }),
    }
}
