//! Which chunks a request means by its token range.

use std::num::NonZeroUsize;
use std::ops::Range;

/// The chunks meant by `start..end` of a lookup or a release, in tokens; never fails.
///
/// As LMCache 0.5.6: an end past the prompt is the prompt's end, an unaligned end is rounded down, an unaligned start
/// is rounded up, and what is left may be empty.
pub fn lookup_chunks(
    chunk_size: NonZeroUsize,
    token_count: usize,
    start: u64,
    end: u64,
) -> Range<usize> {
    let size = chunk_size.get() as u64;
    // Both are at most the number of chunks, which is a usize.
    let end = (end.min(token_count as u64) / size) as usize;
    let start = start.div_ceil(size).min(end as u64) as usize;
    start..end
}

/// The chunks meant by `start..end` of a store or a retrieve, in tokens; `start == end` means none.
///
/// These ranges say where bytes go, so nothing is rounded: both ends lie on chunk borders within the prompt.
pub fn store_chunks(
    chunk_size: NonZeroUsize,
    token_count: usize,
    start: u64,
    end: u64,
) -> Result<Range<usize>, RangeError> {
    let size = chunk_size.get() as u64;
    if !start.is_multiple_of(size) {
        return Err(RangeError::StartUnaligned { start, chunk_size });
    }
    if !end.is_multiple_of(size) {
        return Err(RangeError::EndUnaligned { end, chunk_size });
    }
    if end > token_count as u64 {
        return Err(RangeError::EndPastTokens { end, token_count });
    }
    if start > end {
        return Err(RangeError::StartPastEnd { start, end });
    }
    // `end` is within the prompt, whose length is a usize.
    Ok((start / size) as usize..(end / size) as usize)
}

/// A token range that names no whole chunks of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// `start` is inside a chunk.
    #[error("start {start} is not a multiple of the chunk size {chunk_size}")]
    StartUnaligned {
        /// As received, in tokens.
        start: u64,
        /// Tokens in a chunk.
        chunk_size: NonZeroUsize,
    },
    /// `end` is inside a chunk.
    #[error("end {end} is not a multiple of the chunk size {chunk_size}")]
    EndUnaligned {
        /// As received, in tokens.
        end: u64,
        /// Tokens in a chunk.
        chunk_size: NonZeroUsize,
    },
    /// `end` is behind the prompt.
    #[error("end {end} is past the {token_count} token ids of the key")]
    EndPastTokens {
        /// As received, in tokens.
        end: u64,
        /// Tokens in the key.
        token_count: usize,
    },
    /// The range runs backwards.
    #[error("start {start} is past end {end}")]
    StartPastEnd {
        /// As received, in tokens.
        start: u64,
        /// As received, in tokens.
        end: u64,
    },
}
