//! Fields of the text forms of keys, read as leniently as LMCache 0.5.6 does and no more.

use super::KeyError;
use super::text::hash_bytes;

/// Fewest hex digits of a hash: a third field with fewer is a group, which has at most eight.
const HASH_DIGITS: usize = 16;

/// Text that is no key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The file name has another extension.
    #[error("{0:?} does not end in \".data\"")]
    Extension(String),
    /// There are too few or too many `@`.
    #[error("{0:?} has {1} fields between '@'; a key has 3 to 5, one fewer without its group")]
    FieldCount(String, usize),
    /// The rank is not a hex number, or not one below 2^64.
    #[error("bad kv_rank {0:?}: not a hex number of at most 64 bits")]
    KvRank(String),
    /// The group is not a hex number, or not one below 2^32.
    #[error("bad object_group_id {0:?}: not a hex number of at most 32 bits")]
    ObjectGroup(String),
    /// The hash is not pairs of hex digits.
    #[error("bad chunk_hash {0:?}: not pairs of hex digits")]
    ChunkHash(String),
    /// The fields are well-formed but no key may have them.
    #[error(transparent)]
    Key(#[from] KeyError),
}

pub(super) fn is_hash(field: &str) -> bool {
    field.len() >= HASH_DIGITS && hash_bytes(field).is_some()
}

/// Python's `int(text, 16)`, for results that fit 64 bits without a sign.
pub(super) fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    let text = text.strip_prefix('+').unwrap_or(text);
    let digits = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(rest) => rest.strip_prefix('_').unwrap_or(rest),
        None => text,
    };
    // Underscores stand between digits only.
    if digits.starts_with('_') || digits.ends_with('_') || digits.contains("__") {
        return None;
    }
    if !digits
        .bytes()
        .all(|byte| byte == b'_' || byte.is_ascii_hexdigit())
    {
        return None;
    }
    u64::from_str_radix(&digits.replace('_', ""), 16).ok()
}
