//! The chunk size that a client of kvtier's own asks for, instead of the server's default.
//!
//! It travels as a field of its own in the layout hints or the context of a registration, and in every key, in front of
//! the token ids, which are hashed by it. LMCache's clients never send it and count in chunks of `get_chunk_size`. A
//! server that does not know the field skips it, so a client sends it only to one that has [`CHUNK_TOKENS_FEATURE`].

use crate::wire::{self, DecodeError, Reader};

/// Wire name of the field.
pub const CHUNK_TOKENS: &str = "kvtier.chunk_tokens";

/// Name of the optional feature by which a client recognizes a server that reads the field.
pub const CHUNK_TOKENS_FEATURE: &str = "kvtier.chunk_tokens.1";

/// Fewest tokens of a chunk that a client may ask for. Hashes and objects of smaller ones would outweigh their KV.
pub const MIN_CHUNK_TOKENS: u32 = 16;
/// Most tokens of a chunk, as of `--chunk-size`.
pub const MAX_CHUNK_TOKENS: u32 = 65_536;

/// A number of tokens as a client may ask for it; none outside the bounds.
#[must_use]
pub fn allowed(tokens: u64) -> Option<u32> {
    u32::try_from(tokens)
        .ok()
        .filter(|tokens| (MIN_CHUNK_TOKENS..=MAX_CHUNK_TOKENS).contains(tokens))
}

/// The chunk size for a client whose chunks have to be a multiple of `alignment` tokens: the smallest that is no smaller than
/// `minimum`. LMCache's clients from 0.5.7 on ask for it with `negotiate_chunk_size`.
///
/// # Errors
/// There is none up to [`MAX_CHUNK_TOKENS`].
pub fn aligned(minimum: u32, alignment: i64) -> Result<u32, DecodeError> {
    u32::try_from(alignment)
        .ok()
        .filter(|alignment| *alignment > 0)
        .and_then(|alignment| minimum.checked_next_multiple_of(alignment))
        .filter(|tokens| *tokens <= MAX_CHUNK_TOKENS)
        .ok_or_else(|| {
            DecodeError::at(
                "required_chunk_alignment",
                format!(
                    "{alignment}; allowed: from 1 on, so that a multiple lies between {minimum} and {MAX_CHUNK_TOKENS} tokens"
                ),
            )
        })
}

pub(crate) fn read(reader: &mut Reader<'_>) -> Result<u32, DecodeError> {
    let tokens: i64 = reader.int()?;
    u64::try_from(tokens).ok().and_then(allowed).ok_or_else(|| {
        DecodeError::new(format!(
            "{tokens} tokens per chunk; allowed: {MIN_CHUNK_TOKENS} to {MAX_CHUNK_TOKENS}"
        ))
    })
}

/// Writes the field, name first, if it is there.
pub(crate) fn write(out: &mut Vec<u8>, tokens: Option<u32>) {
    if let Some(tokens) = tokens {
        wire::write_str(out, CHUNK_TOKENS);
        wire::write_uint(out, tokens.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_size_is_smallest_multiple_from_minimum_on() {
        for (minimum, alignment, size) in [
            (256, 16, 256),
            (256, 1, 256),
            (256, 48, 288),
            (256, 528, 528),
            (4, 3, 6),
            (1, 65_536, 65_536),
        ] {
            assert_eq!(
                aligned(minimum, alignment),
                Ok(size),
                "{minimum} {alignment}"
            );
        }
        for alignment in [0, -16, 65_537, i64::MAX, i64::MIN] {
            let refused = aligned(256, alignment).unwrap_err();
            assert_eq!(refused.field, "required_chunk_alignment");
        }
        assert!(aligned(65_535, 65_535 - 1).is_err());
    }
}
