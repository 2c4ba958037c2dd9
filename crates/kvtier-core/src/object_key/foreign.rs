//! Keys written by other programs, whose hashes may have any length.

use super::parse::{ParseError, is_hash, number};
use super::text::hash_bytes;
use super::{KeyError, KeyShape, KeyText, ObjectKey, check_cache_salt, check_model_name};
use crate::hashing::ChunkHash;
use serde::{Deserialize, Serialize};

/// Object key from outside: of a directory, a bucket or a request.
///
/// It differs from [`ObjectKey`] only in its hash, which has 8 bytes if LMCache hashed with Python's `hash()`, and any
/// number if it was typed. Model name and salt were checked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ForeignKey {
    chunk_hash: Vec<u8>,
    model_name: String,
    kv_rank: u64,
    object_group_id: u32,
    cache_salt: String,
}

impl ForeignKey {
    /// A key from its parts.
    pub fn new(
        chunk_hash: Vec<u8>,
        model_name: String,
        kv_rank: u64,
        object_group_id: u32,
        cache_salt: String,
    ) -> Result<Self, KeyError> {
        check_model_name(&model_name)?;
        check_cache_salt(&cache_salt)?;
        Ok(Self {
            chunk_hash,
            model_name,
            kv_rank,
            object_group_id,
            cache_salt,
        })
    }

    /// Reads [`KeyText::name`] back. `shape` `None` takes both shapes, which is never ambiguous
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

    /// Reads [`KeyText::file_name`] back; otherwise like [`Self::parse_name`].
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

    /// The chunk's hash, of any length.
    pub fn chunk_hash(&self) -> &[u8] {
        &self.chunk_hash
    }

    /// The key's forms in text.
    pub fn text(&self) -> KeyText<'_> {
        KeyText {
            chunk_hash: &self.chunk_hash,
            model_name: &self.model_name,
            kv_rank: self.kv_rank,
            object_group_id: self.object_group_id,
            cache_salt: &self.cache_salt,
        }
    }
}

impl TryFrom<ForeignKey> for ObjectKey {
    type Error = KeyError;

    /// Fails when the hash does not have 32 bytes.
    fn try_from(key: ForeignKey) -> Result<Self, KeyError> {
        let hash = <[u8; ChunkHash::LEN]>::try_from(key.chunk_hash.as_slice())
            .map_err(|_| KeyError::HashLength(key.chunk_hash.len()))?;
        Self::new(
            ChunkHash(hash),
            key.model_name,
            key.kv_rank,
            key.object_group_id,
            key.cache_salt,
        )
    }
}

/// The JSON form of a key in LMCache 0.5.6's HTTP API and coordinator, fields in this order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodedObjectKey {
    /// The hash as lower-case hex.
    pub chunk_hash_hex: String,
    /// The model's name.
    pub model_name: String,
    /// World size and rank, packed.
    pub kv_rank: u64,
    /// The object group, 0 when absent.
    #[serde(default)]
    pub object_group_id: u32,
    /// The tenant, none when absent.
    #[serde(default)]
    pub cache_salt: String,
}

impl From<KeyText<'_>> for EncodedObjectKey {
    fn from(key: KeyText<'_>) -> Self {
        Self {
            chunk_hash_hex: key
                .chunk_hash
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
            model_name: key.model_name.to_owned(),
            kv_rank: key.kv_rank,
            object_group_id: key.object_group_id,
            cache_salt: key.cache_salt.to_owned(),
        }
    }
}

impl TryFrom<EncodedObjectKey> for ForeignKey {
    type Error = KeyError;

    fn try_from(key: EncodedObjectKey) -> Result<Self, KeyError> {
        let hash = hash_bytes(&key.chunk_hash_hex)
            .ok_or_else(|| KeyError::HashHex(key.chunk_hash_hex.clone()))?;
        Self::new(
            hash,
            key.model_name,
            key.kv_rank,
            key.object_group_id,
            key.cache_salt,
        )
    }
}
