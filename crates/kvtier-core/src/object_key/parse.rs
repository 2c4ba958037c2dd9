//! Reading the text forms of keys, as leniently as LMCache 0.5.6 does and no more.

use super::text::hash_bytes;
use super::{ForeignKey, KeyError, KeyShape};

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

impl ForeignKey {
    /// Reads [`KeyText::name`](super::KeyText::name) back. `shape` `None` takes both shapes, which is never ambiguous
    /// for hashes of 8 bytes and more.
    ///
    /// Numbers may have a `0x`, a sign, underscores and white space around them; hashes may be upper case, with white
    /// space between their bytes; an empty last field is no salt. This follows Python's reader.
    pub fn parse_name(name: &str, shape: Option<KeyShape>) -> Result<Self, ParseError> {
        let fields: Vec<&str> = name.split('@').collect();
        let grouped = match shape {
            Some(shape) => shape == KeyShape::Grouped,
            None => match fields[..] {
                [_, _, _] => false,
                [_, _, third, _] => !is_hash(third),
                _ => true,
            },
        };
        let (model, rank, group, hash, salt) = match (grouped, &fields[..]) {
            (true, &[model, rank, group, hash]) => (model, rank, group, hash, ""),
            (true, &[model, rank, group, hash, salt]) => (model, rank, group, hash, salt),
            (false, &[model, rank, hash]) => (model, rank, "0", hash, ""),
            (false, &[model, rank, hash, salt]) => (model, rank, "0", hash, salt),
            _ => return Err(ParseError::FieldCount(name.to_owned(), fields.len())),
        };
        let kv_rank = number(rank).ok_or_else(|| ParseError::KvRank(rank.to_owned()))?;
        let group_id = number(group).and_then(|id| u32::try_from(id).ok());
        let group_id = group_id.ok_or_else(|| ParseError::ObjectGroup(group.to_owned()))?;
        let chunk_hash = hash_bytes(hash).ok_or_else(|| ParseError::ChunkHash(hash.to_owned()))?;
        Ok(Self::new(
            chunk_hash,
            model.to_owned(),
            kv_rank,
            group_id,
            salt.to_owned(),
        )?)
    }

    /// Reads [`KeyText::file_name`](super::KeyText::file_name) back; otherwise like [`Self::parse_name`].
    pub fn parse_file_name(file_name: &str, shape: Option<KeyShape>) -> Result<Self, ParseError> {
        let name = file_name
            .strip_suffix(".data")
            .ok_or_else(|| ParseError::Extension(file_name.to_owned()))?;
        match name.split_once('@') {
            Some((model, rest)) => {
                Self::parse_name(&format!("{}@{rest}", model.replace("-SEP-", "/")), shape)
            }
            None => Self::parse_name(name, shape),
        }
    }
}

fn is_hash(field: &str) -> bool {
    field.len() >= HASH_DIGITS && hash_bytes(field).is_some()
}

/// Python's `int(text, 16)`, for results that fit 64 bits without a sign.
fn number(text: &str) -> Option<u64> {
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
