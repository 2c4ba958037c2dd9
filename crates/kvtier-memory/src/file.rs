//! What reading a file into an arena and writing it from there has in common.

use std::io;
use std::os::fd::{IntoRawFd, OwnedFd};

use crate::access::AccessError;

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

    pub(crate) fn len(&self) -> u64 {
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
pub(crate) fn file_offset(at: u64, done: u64, len: u64) -> Result<i64, FileError> {
    let end = at.checked_add(len).and_then(|end| i64::try_from(end).ok());
    end.map(|_| (at + done) as i64).ok_or(FileError::System {
        done,
        source: io::Error::from_raw_os_error(libc::EFBIG),
    })
}

/// Bytes moved; `None` to try again.
pub(crate) fn outcome(moved: isize, done: u64) -> Result<Option<u64>, FileError> {
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
