//! Spaces: everything of an object's identity but the chunk hash.

use std::sync::Arc;

/// One model, rank, object group and tenant. All fields take part in identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Space<'a> {
    /// The model's name as the engine gave it.
    pub model_name: &'a str,
    /// World size and rank, packed; see [`crate::kv_rank`].
    pub kv_rank: u64,
    /// The object group.
    pub object_group_id: u32,
    /// The tenant; empty for none.
    pub cache_salt: &'a str,
}

/// [`Space`] with names of its own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnedSpace {
    /// The model's name as the engine gave it.
    pub model_name: Arc<str>,
    /// World size and rank, packed; see [`crate::kv_rank`].
    pub kv_rank: u64,
    /// The object group.
    pub object_group_id: u32,
    /// The tenant; empty for none.
    pub cache_salt: Arc<str>,
}
