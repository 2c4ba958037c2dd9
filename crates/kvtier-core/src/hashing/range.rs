//! Chunks of a token range.

use std::num::NonZeroUsize;
use std::ops::Range;

/// The chunks of `start..end` of a lookup or a release, in tokens; never fails.
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

/// The chunks of `start..end` of a store or a retrieve, in tokens; `start == end` is none.
///
/// These ranges decide where bytes go, so nothing is rounded: both ends lie on chunk borders within the prompt.
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
        /// Start of the range as received, in tokens.
        start: u64,
        /// Tokens in a chunk.
        chunk_size: NonZeroUsize,
    },
    /// `end` is inside a chunk.
    #[error("end {end} is not a multiple of the chunk size {chunk_size}")]
    EndUnaligned {
        /// End of the range as received, in tokens.
        end: u64,
        /// Tokens in a chunk.
        chunk_size: NonZeroUsize,
    },
    /// `end` is behind the prompt.
    #[error("end {end} is past the {token_count} token ids of the key")]
    EndPastTokens {
        /// End of the range as received, in tokens.
        end: u64,
        /// Tokens in the key.
        token_count: usize,
    },
    /// The range runs backwards.
    #[error("start {start} is past end {end}")]
    StartPastEnd {
        /// Start of the range as received, in tokens.
        start: u64,
        /// End of the range as received, in tokens.
        end: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: NonZeroUsize = NonZeroUsize::new(4).unwrap();

    #[test]
    fn lookup_accepts_any_range() {
        let chunks = |start, end| lookup_chunks(SIZE, 18, start, end);
        assert_eq!(chunks(0, 16), 0..4);
        assert_eq!(chunks(0, u64::MAX), 0..4);
        assert_eq!(chunks(5, 15), 2..3);
        assert!(chunks(8, 8).is_empty());
        assert!(chunks(u64::MAX, u64::MAX).is_empty());
        assert!(chunks(12, 4).is_empty());
    }

    #[test]
    fn store_accepts_whole_chunks_only() {
        let chunks = |start, end| store_chunks(SIZE, 18, start, end);
        assert_eq!(chunks(0, 16), Ok(0..4));
        assert_eq!(chunks(8, 8), Ok(2..2));
        let error = |start, end| chunks(start, end).unwrap_err().to_string();
        assert_eq!(error(2, 8), "start 2 is not a multiple of the chunk size 4");
        assert_eq!(error(0, 10), "end 10 is not a multiple of the chunk size 4");
        assert_eq!(error(0, 20), "end 20 is past the 18 token ids of the key");
        assert_eq!(error(12, 8), "start 12 is past end 8");
        assert!(chunks(u64::MAX - 3, u64::MAX - 3).is_err());
    }
}
