//! Namespaces: all of an object's identity but its chunk.

use super::{KeyError, check_cache_salt, check_model_name};
use std::sync::Arc;

/// All of an object's identity but the chunk hash: model, rank, object group, layout and tenant.
///
/// All fields take part in equality. A namespace that exists is valid: its model name and salt were checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace {
    model_name: Arc<str>,
    kv_rank: u64,
    object_group_id: u32,
    layout: u64,
    cache_salt: Arc<str>,
}

impl Namespace {
    /// A namespace from its parts. To derive several from one request, use [`KeyScope`](super::KeyScope), which shares
    /// the strings.
    ///
    /// # Errors
    /// [`KeyError`] for a model name or a salt that no key may have.
    pub fn new(
        model_name: impl Into<Arc<str>>,
        kv_rank: u64,
        object_group_id: u32,
        layout: u64,
        cache_salt: impl Into<Arc<str>>,
    ) -> Result<Self, KeyError> {
        let (model_name, cache_salt) = (model_name.into(), cache_salt.into());
        check_model_name(&model_name)?;
        check_cache_salt(&cache_salt)?;
        Ok(Self::of_checked(
            &model_name,
            kv_rank,
            object_group_id,
            layout,
            &cache_salt,
        ))
    }

    /// A namespace of names that were checked.
    pub(crate) fn of_checked(
        model_name: &Arc<str>,
        kv_rank: u64,
        object_group_id: u32,
        layout: u64,
        cache_salt: &Arc<str>,
    ) -> Self {
        Self {
            model_name: Arc::clone(model_name),
            kv_rank,
            object_group_id,
            layout,
            cache_salt: Arc::clone(cache_salt),
        }
    }

    /// The model's name as the engine gave it.
    pub fn model_name(&self) -> &Arc<str> {
        &self.model_name
    }

    /// World size and rank, packed; see [`kv_rank`](super::kv_rank).
    pub fn kv_rank(&self) -> u64 {
        self.kv_rank
    }

    /// The object group, 0 unless groups are stored separately.
    pub fn object_group_id(&self) -> u32 {
        self.object_group_id
    }

    /// Shape and type of the objects' arrays, as a fingerprint: objects laid out differently are different objects.
    /// 0 where a second tier's names leave it out; see [`without_layout`](Self::without_layout).
    pub fn layout(&self) -> u64 {
        self.layout
    }

    /// The tenant; empty for none.
    pub fn cache_salt(&self) -> &Arc<str> {
        &self.cache_salt
    }

    /// All of it but the layout.
    pub(crate) fn name(&self) -> (&str, u64, u32, &str) {
        (
            &self.model_name,
            self.kv_rank,
            self.object_group_id,
            &self.cache_salt,
        )
    }

    /// The namespace as second tiers name it: their formats have no place for a layout. Shared if it has none.
    pub fn without_layout(self: &Arc<Self>) -> Arc<Self> {
        match self.layout {
            0 => Arc::clone(self),
            _ => Arc::new(Self {
                layout: 0,
                ..Self::clone(self)
            }),
        }
    }

    /// Returns the namespace with other, equal strings.
    pub(crate) fn with_names(&self, model_name: &Arc<str>, cache_salt: &Arc<str>) -> Self {
        debug_assert!(self.model_name == *model_name && self.cache_salt == *cache_salt);
        Self {
            model_name: Arc::clone(model_name),
            cache_salt: Arc::clone(cache_salt),
            ..*self
        }
    }
}
