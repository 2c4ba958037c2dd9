//! Keys written by other programs, whose hashes may have any length.

use super::text::hash_bytes;
use super::{KeyError, KeyText, ObjectKey, check_cache_salt, check_model_name};
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
