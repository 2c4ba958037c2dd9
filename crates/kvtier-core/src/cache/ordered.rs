//! All objects in the order of their eviction, for the next process.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::ExtentAllocator;
use super::slab::{Slot, SlotState};
use super::state::State;
use crate::hashing::ChunkHash;
use crate::object_key::Namespace;

/// An object, its namespace by its place in [`Ordered::namespaces`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderedObject {
    /// The rest of the key.
    pub namespace: u32,
    /// The chunk.
    pub chunk_hash: ChunkHash,
    /// Its bytes.
    pub bytes: u64,
}

/// Objects in the order of their eviction; leased ones, which are in no order, are behind the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ordered {
    /// Those of the objects.
    pub namespaces: Vec<Arc<Namespace>>,
    /// The next victim first.
    pub objects: Vec<OrderedObject>,
}

impl<A: ExtentAllocator> State<A> {
    pub(super) fn ordered(&self) -> Ordered {
        let mut ordered = Ordered::default();
        let mut places = BTreeMap::new();
        let mut push = |slot: &Slot| {
            let Some(namespace) = self.namespaces.get(slot.namespace) else {
                return;
            };
            let place = *places.entry(slot.namespace).or_insert_with(|| {
                ordered.namespaces.push(Arc::clone(namespace));
                ordered.namespaces.len() as u32 - 1
            });
            ordered.objects.push(OrderedObject {
                namespace: place,
                chunk_hash: slot.hash,
                bytes: slot.extent.len,
            });
        };
        // A policy whose order is damaged has none; then, as without eviction, the order is that of the slots.
        let order = self.policy.order().unwrap_or_default();
        let mut is_in_order = vec![false; self.slab.slots()];
        for number in order {
            is_in_order[number as usize] = true;
            push(self.slab.at(number));
        }
        for number in 0..self.slab.slots() as u32 {
            let slot = self.slab.at(number);
            if slot.state() == SlotState::Resident && !is_in_order[number as usize] {
                push(slot);
            }
        }
        ordered
    }
}
