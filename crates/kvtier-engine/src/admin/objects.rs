//! Single objects of L1, listed and deleted by operators.

use std::collections::HashMap;

use kvtier_core::cache::{Removed, ResidentObject};
use kvtier_core::{ChunkHash, ObjectKey};

use super::Admin;

/// Namespaces or objects that are examined per hold of the cache's lock.
pub(super) const SLICE: usize = 1024;

/// Slots that one call examines, once it has an object.
const MAX_EXAMINED: usize = 100_000;

impl Admin {
    /// At most `limit` objects of L1, of one model or of all, and the `from` of the next part. `from` is 0 at first.
    pub fn list_objects(
        &self,
        from: u32,
        model: Option<&str>,
        limit: usize,
    ) -> (Vec<ResidentObject>, Option<u32>) {
        let (mut objects, mut next, mut left) = (Vec::new(), Some(from), MAX_EXAMINED);
        // A page is empty only at the end.
        while let Some(from) =
            next.filter(|_| objects.len() < limit && (left > 0 || objects.is_empty()))
        {
            let slots = SLICE.min(limit - objects.len());
            left = left.saturating_sub(slots);
            let page = self.context.l1.cache.objects(from, slots);
            let of_model = |object: &ResidentObject| {
                model.is_none_or(|model| **object.namespace.model_name() == *model)
            };
            objects.extend(page.entries.into_iter().filter(of_model));
            next = page.next;
        }
        (objects, next)
    }

    /// Removes objects from L1, of any layout: those without a lease, or all of them with `force`.
    pub fn delete_objects(&self, keys: &[ObjectKey], force: bool) -> Removed {
        let mut by_namespace: HashMap<_, Vec<ChunkHash>> = HashMap::new();
        for key in keys {
            let hashes = by_namespace.entry(key.namespace()).or_default();
            hashes.push(key.chunk_hash());
        }
        let (mut sum, mut next) = (Removed::default(), Some(0));
        while let Some(from) = next {
            let page = self.context.l1.cache.namespaces(from, SLICE);
            for namespace in &page.entries {
                if let Some(hashes) = by_namespace.get(&namespace.without_layout()) {
                    let removed = self.context.l1.cache.remove(namespace, hashes, force);
                    sum.objects += removed.objects;
                    sum.bytes += removed.bytes;
                    sum.kept += removed.kept;
                }
            }
            next = page.next;
        }
        tracing::info!(
            asked = keys.len(),
            objects = sum.objects,
            kept = sum.kept,
            force,
            "deleted from L1"
        );
        sum
    }
}
