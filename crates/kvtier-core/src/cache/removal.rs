//! Removal on request, and listings.

use super::losses::LossCause;
use super::slab::SlotState;
use super::state::CacheState;
use super::{ExtentAllocator, Page, Removed, ResidentObject};
use crate::hashing::ChunkHash;
use crate::object_key::Namespace;
use std::ops::Range;
use std::sync::Arc;

/// See [`super::Cache::remove`] and [`super::Cache::unload`].
pub(super) fn remove(
    state: &mut CacheState<impl ExtentAllocator>,
    namespace: &Namespace,
    hashes: &[ChunkHash],
    force: bool,
    cause: Option<LossCause>,
) -> Removed {
    let mut removed = Removed::default();
    for hash in hashes {
        // The namespace is removed with its last object, so it is looked up again for each.
        let number = state.namespaces.find(namespace);
        match number.and_then(|namespace| state.find(namespace, hash)) {
            Some(number) => remove_one(state, number, force, cause, &mut removed),
            None => removed.missing += 1,
        }
    }
    removed
}

fn remove_one(
    state: &mut CacheState<impl ExtentAllocator>,
    number: u32,
    force: bool,
    cause: Option<LossCause>,
    removed: &mut Removed,
) {
    let slot = state.slab.at(number);
    // What a tier has is unloaded to save memory only.
    let is_kept = slot.leases > 0 || slot.is_pinned() && cause.is_none();
    if is_kept && !force {
        removed.kept += 1;
        return;
    }
    if let Some(cause) = cause {
        let (namespace, hash) = (slot.namespace, slot.hash);
        state.lose(namespace, &hash, cause);
    }
    removed.bytes += state.remove_object(number);
    removed.objects += 1;
    state.totals.removed += 1;
}

/// Removes the resident objects among these slots.
pub(super) fn clear(
    state: &mut CacheState<impl ExtentAllocator>,
    slots: Range<u32>,
    force: bool,
    removed: &mut Removed,
) {
    for number in slots {
        if state.slab.at(number).state() == SlotState::Resident {
            remove_one(state, number, force, Some(LossCause::Removed), removed);
        }
    }
}

/// See [`super::Cache::objects`].
pub(super) fn objects(
    state: &CacheState<impl ExtentAllocator>,
    from: u32,
    limit: usize,
) -> Page<ResidentObject> {
    let slots = state.slab.slots() as u32;
    let end = from
        .saturating_add(u32::try_from(limit).unwrap_or(u32::MAX))
        .min(slots);
    let resident = (from..end).filter_map(|number| {
        let slot = state.slab.at(number);
        if slot.state() != SlotState::Resident {
            return None;
        }
        Some(ResidentObject {
            chunk_hash: slot.hash,
            namespace: Arc::clone(state.namespaces.get(slot.namespace)?),
            bytes: slot.extent.len,
            leases: slot.leases,
        })
    });
    Page {
        entries: resident.collect(),
        next: (end < slots).then_some(end),
    }
}
