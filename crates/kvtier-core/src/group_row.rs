//! Rows of a lookup.

use crate::object_key::Namespace;
use std::sync::Arc;

/// One row of a lookup: an object group on a rank.
///
/// Made once per lookup and shared by what looks it up, holds it and loads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRow {
    /// The row's objects.
    pub namespace: Arc<Namespace>,
    /// Chunks the row needs at the end of a prefix; `None` = all of them (full attention). 0 counts as 1.
    pub window: Option<u32>,
    /// Bytes of each object.
    pub object_bytes: u64,
}
