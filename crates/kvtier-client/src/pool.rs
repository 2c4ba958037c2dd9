//! The server's memory pool, as a worker that copies by itself sees it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use crate::error::ClientError;

/// Where POSIX shared memory lives on Linux.
const SHARED_MEMORY: &str = "/dev/shm";

/// `O_NOFOLLOW` of Linux on the architectures engines run on (x86-64: octal 400000, AArch64: 100000).
const NO_FOLLOW: i32 = if cfg!(target_arch = "aarch64") {
    0o100_000
} else {
    0o400_000
};

/// The shared pool, open for reading and writing.
///
/// Bytes move by positioned reads and writes of the segment instead of through a mapping: one copy either way, and a
/// server that takes the pool away gives an error instead of a fault.
#[derive(Debug)]
pub struct Pool {
    name: String,
    file: File,
    bytes: u64,
}

impl Pool {
    /// Opens the pool `name` (as the server told it, without a slash), which must have `bytes` bytes.
    ///
    /// # Errors
    /// [`ClientError::Pool`]: another host, another user, a pool that is gone or too small, or a name that is none.
    pub fn open(name: &str, bytes: u64) -> Result<Self, ClientError> {
        let refuse = |message: String| ClientError::Pool {
            name: name.chars().take(255).collect(),
            message,
        };
        let plain = name.strip_prefix('/').unwrap_or(name);
        if plain.is_empty() || plain.contains(['/', '\0']) || plain.starts_with('.') {
            return Err(refuse(
                "the name must be one part of a path, without a slash inside".to_owned(),
            ));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(NO_FOLLOW)
            .open(Path::new(SHARED_MEMORY).join(plain))
            .map_err(|error| refuse(format!("cannot be opened: {error}")))?;
        let actual = file
            .metadata()
            .map_err(|error| refuse(format!("cannot be examined: {error}")))?
            .len();
        if actual < bytes {
            return Err(refuse(format!(
                "has {actual} bytes, fewer than the {bytes} stated"
            )));
        }
        Ok(Self {
            name: plain.to_owned(),
            file,
            bytes,
        })
    }

    /// Bytes of the pool.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a pool is never empty")]
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`ClientError::Pool`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), ClientError> {
        self.check(offset, bytes.len() as u64)?;
        self.file
            .write_all_at(bytes, offset)
            .map_err(|error| self.failed("write", offset, &error))
    }

    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    /// [`ClientError::Pool`].
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), ClientError> {
        self.check(offset, buffer.len() as u64)?;
        self.file
            .read_exact_at(buffer, offset)
            .map_err(|error| self.failed("read", offset, &error))
    }

    /// Fails unless the range lies inside the pool, so that a server's odd answer cannot make the segment grow.
    fn check(&self, offset: u64, len: u64) -> Result<(), ClientError> {
        if offset.checked_add(len).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        Err(ClientError::Pool {
            name: self.name.clone(),
            message: format!(
                "{len} bytes at {offset} do not lie inside its {} bytes",
                self.bytes
            ),
        })
    }

    fn failed(&self, what: &str, offset: u64, error: &std::io::Error) -> ClientError {
        ClientError::Pool {
            name: self.name.clone(),
            message: format!("cannot {what} at {offset}: {error}"),
        }
    }
}
