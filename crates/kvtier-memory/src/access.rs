//! Why bytes of an arena or a segment could not be read or written.

/// A refused or failed access. Nothing outside the stated memory was touched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The range asked for does not lie inside what it is part of.
    #[error("{len} bytes at offset {offset} do not fit in the {limit} bytes of the {what}")]
    OutOfBounds {
        /// What was to be accessed: "arena", "extent" or "segment".
        what: &'static str,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes there are.
        limit: u64,
    },
    /// The offsets of a copy do not even fit in 64 bits.
    #[error("copy {index}: its extremes in the {what} do not fit in 64 bits")]
    Overflow {
        /// What was to be accessed: "extent" or "segment".
        what: &'static str,
        /// Index of the copy in the list.
        index: usize,
    },
    /// Pages were lost under a mapping (its file was truncated, or its file system is full).
    /// What was copied is not to be trusted.
    #[error("pages of the {what} were lost: it was truncated or its file system is full")]
    Poisoned {
        /// What lost pages: "arena" or "segment".
        what: &'static str,
    },
    /// There is no memory for the buffer that was to take the bytes.
    #[error("no memory for a buffer of {len} bytes")]
    OutOfMemory {
        /// Bytes asked for.
        len: u64,
    },
}

/// Whether `len` bytes at `offset` lie in the first `limit` bytes of `what`.
///
/// # Errors
/// [`AccessError::OutOfBounds`] if they do not.
#[inline]
pub fn within(what: &'static str, offset: u64, len: u64, limit: u64) -> Result<(), AccessError> {
    if offset.checked_add(len).is_some_and(|end| end <= limit) {
        return Ok(());
    }
    Err(AccessError::OutOfBounds {
        what,
        offset,
        len,
        limit,
    })
}
