//! Identity of stored objects: namespaces, keys, their forms in text and JSON, and the scope of a request.

mod foreign;
mod namespace;
mod parse;
mod salt_key;
mod scope;
mod shown;
mod tenant_names;
mod text;

use crate::hashing::ChunkHash;
use std::sync::Arc;

pub use kvtier_proto::key::MAX_SALT_BYTES;

pub use foreign::{EncodedObjectKey, ForeignKey};
pub use namespace::Namespace;
pub use parse::ParseError;
pub use salt_key::SaltKey;
pub use scope::{KeyScope, MAX_WORLD_SIZE};
pub use shown::{ShownSalt, shown_path};
pub use tenant_names::TenantNames;
pub use text::{KeyShape, KeyText};

/// Packs world size and worker number as LMCache 0.5.6 does with `local` equal to `global`:
/// `(world_size << 24) | (worker << 16) | (world_size << 8) | worker`.
///
/// Nothing is masked, so large numbers overlap exactly as they do in LMCache; [`KeyScope`] refuses those that would give
/// two workers one rank.
pub fn kv_rank(world_size: u32, worker: u32) -> u64 {
    kv_rank_parts(world_size, worker, world_size, worker)
}

/// [`kv_rank`] with separate local numbers.
pub fn kv_rank_parts(
    world_size: u32,
    global_rank: u32,
    local_world_size: u32,
    local_rank: u32,
) -> u64 {
    u64::from(world_size) << 24
        | u64::from(global_rank) << 16
        | u64::from(local_world_size) << 8
        | u64::from(local_rank)
}

/// Checks a model name as part of an object key: it has no `@`, which separates the fields of the text forms.
pub fn check_model_name(model_name: &str) -> Result<(), KeyError> {
    if model_name.contains('@') {
        Err(KeyError::ModelName(model_name.to_owned()))
    } else {
        Ok(())
    }
}

/// Checks a cache salt: at most 128 characters, none of `@`, `/`, `\` and NUL.
pub fn check_cache_salt(cache_salt: &str) -> Result<(), KeyError> {
    kvtier_proto::key::check_salt(cache_salt).map_err(|error| KeyError::CacheSalt(error.message))
}

/// Value that cannot be part of an object key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The model name holds an `@`.
    #[error(
        "model_name must not contain '@', which separates the fields of a key's text forms (got {0:?})"
    )]
    ModelName(String),
    /// The salt holds a forbidden character or is too long.
    #[error("cache_salt: {0}")]
    CacheSalt(String),
    /// The world size is zero or too large for its place in a rank.
    #[error("world_size must be between 1 and {MAX_WORLD_SIZE} (got {0})")]
    WorldSize(u32),
    /// The worker is too large for its place in a rank.
    #[error(
        "worker_id must be below {MAX_WORLD_SIZE}, or two workers would share their objects (got {0})"
    )]
    WorkerId(u32),
    /// The hash is of another algorithm.
    #[error("chunk_hash must have 32 bytes, as blake3 and sha256_cbor make it (got {0})")]
    HashLength(usize),
    /// The hash is not written as hex.
    #[error("chunk_hash_hex must be pairs of hex digits (got {0:?})")]
    HashHex(String),
}

/// Name of one stored object: a chunk of a namespace. Second tiers store objects under it, so it has no layout.
///
/// All fields take part in equality. A key that exists is valid, because its namespace is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    chunk_hash: ChunkHash,
    /// Namespace of layout 0.
    namespace: Arc<Namespace>,
}

impl ObjectKey {
    /// The key of a chunk of a namespace. To make many keys, pass a namespace [without
    /// layout](Namespace::without_layout), which they share.
    pub fn of(namespace: &Arc<Namespace>, chunk_hash: ChunkHash) -> Self {
        Self {
            chunk_hash,
            namespace: namespace.without_layout(),
        }
    }

    /// A key from its parts.
    ///
    /// # Errors
    /// See [`Namespace::new`].
    pub fn new(
        chunk_hash: ChunkHash,
        model_name: impl Into<Arc<str>>,
        kv_rank: u64,
        object_group_id: u32,
        cache_salt: impl Into<Arc<str>>,
    ) -> Result<Self, KeyError> {
        let namespace = Namespace::new(model_name, kv_rank, object_group_id, 0, cache_salt)?;
        Ok(Self {
            chunk_hash,
            namespace: Arc::new(namespace),
        })
    }

    /// The chunk's hash.
    pub fn chunk_hash(&self) -> ChunkHash {
        self.chunk_hash
    }

    /// The rest of the key. Its layout is 0.
    pub fn namespace(&self) -> &Arc<Namespace> {
        &self.namespace
    }

    /// The model's name as the engine gave it.
    pub fn model_name(&self) -> &Arc<str> {
        self.namespace.model_name()
    }

    /// World size and rank, packed; see [`kv_rank`].
    pub fn kv_rank(&self) -> u64 {
        self.namespace.kv_rank()
    }

    /// The object group, 0 unless groups are stored separately.
    pub fn object_group_id(&self) -> u32 {
        self.namespace.object_group_id()
    }

    /// The tenant; empty for none.
    pub fn cache_salt(&self) -> &Arc<str> {
        self.namespace.cache_salt()
    }

    /// The key's forms in text.
    pub fn text(&self) -> KeyText<'_> {
        KeyText {
            chunk_hash: &self.chunk_hash.0,
            model_name: self.model_name(),
            kv_rank: self.kv_rank(),
            object_group_id: self.object_group_id(),
            cache_salt: self.cache_salt(),
        }
    }

    /// Reads [`KeyText::name`] back; see [`ForeignKey::parse_name`].
    pub fn parse_name(name: &str, shape: Option<KeyShape>) -> Result<Self, ParseError> {
        Ok(ForeignKey::parse_name(name, shape)?.try_into()?)
    }

    /// Reads [`KeyText::file_name`] back; see [`ForeignKey::parse_file_name`].
    pub fn parse_file_name(file_name: &str, shape: Option<KeyShape>) -> Result<Self, ParseError> {
        Ok(ForeignKey::parse_file_name(file_name, shape)?.try_into()?)
    }
}
