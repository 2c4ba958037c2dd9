//! A cache with the objects of an earlier process.

use super::lease::OrderedHold;
use super::reservation::StagedObject;
use super::slab::{SlotRef, SlotState};
use super::state::CacheState;
use super::{ExtentAllocator, ReadLease, Reservation};
use crate::ledger::{Fault, FoundObject, Journal, Ledger, ObjectState, Rejected, Snapshot, Words};

/// What a cache has of an earlier process.
#[derive(Debug)]
pub struct Restored<A: ExtentAllocator> {
    /// Readable objects.
    pub objects: u64,
    /// Bytes of the readable objects, rounding included.
    pub bytes: u64,
    /// Objects left out.
    pub rejected: Rejected,
    /// Memory that clients of the earlier process may still copy, and that is no readable object.
    pub withheld: Reservation<A>,
    /// Readable objects that such clients may still read: they must not be evicted.
    pub read: ReadLease<A>,
}

/// Objects with memory that clients may still copy.
#[derive(Default)]
pub(super) struct Granted {
    pub(super) withheld: Vec<StagedObject>,
    pub(super) read: OrderedHold,
}

/// Fills an empty cache with the objects of a snapshot; see [`super::Cache::restore`].
pub(super) fn restore<W: Words>(
    state: &mut CacheState<impl ExtentAllocator>,
    ledger: &mut Ledger<W>,
    snapshot: &mut Snapshot,
) -> Granted {
    let found = admit_all(state, ledger, snapshot);
    let granted = account_all(state, &found);
    for (number, namespace) in (0..).zip(&snapshot.namespaces) {
        if namespace.is_some() {
            // The table's own use ends: namespaces without objects are forgotten.
            state.drop_user(number);
        }
        if state.namespaces.get(number).is_none() {
            ledger.forget_namespace(number);
        }
    }
    granted
}

/// Takes the memory and the namespaces of a snapshot's objects. Returns those that have both, in eviction order.
fn admit_all<W: Words>(
    state: &mut CacheState<impl ExtentAllocator>,
    ledger: &mut Ledger<W>,
    snapshot: &mut Snapshot,
) -> Vec<FoundObject> {
    state.namespaces.restore(&snapshot.namespaces);
    let mut kept = std::mem::take(&mut snapshot.objects);
    let extents: Vec<_> = kept
        .iter()
        .map(|found| (found.extent, found.slot))
        .collect();
    let mut taken = state.allocator.take_all(&extents).into_iter();
    kept.retain(|found| {
        let is_taken = taken.next().unwrap_or(false);
        if !is_taken {
            ledger.leave_out(snapshot, found.slot, Fault::Bounds);
        }
        is_taken
    });
    kept.sort_unstable_by_key(|found| (found.used_at, found.sequence));
    // Of two objects with one key the one used last is kept; its memory is not known to be freed, so it is freed here.
    let mut unique = Vec::with_capacity(kept.len());
    for found in kept.iter().rev() {
        state
            .slab
            .place(found.slot, found.hash, found.namespace, found.extent);
        let slot = state.slab.at_mut(found.slot);
        slot.used_at = found.used_at;
        let is_readable = found.state != ObjectState::Withheld;
        if is_readable && state.find(found.namespace, &found.hash).is_some() {
            state.allocator.free(found.extent);
            state.slab.free(found.slot);
            ledger.leave_out(snapshot, found.slot, Fault::Duplicate);
            continue;
        }
        if is_readable {
            let key = state.index.fingerprint(found.namespace, &found.hash);
            state.index.insert(key, found.slot);
        }
        unique.push(*found);
    }
    state.slab.link_free();
    unique.reverse();
    unique
}

/// Accounts for objects that have their slots, their memory and their namespaces, and puts them in the eviction order.
fn account_all(state: &mut CacheState<impl ExtentAllocator>, objects: &[FoundObject]) -> Granted {
    let mut granted = Granted::default();
    for found in objects {
        let (number, namespace) = (found.slot, found.namespace);
        state.namespaces.add_user(namespace);
        let bytes = state.footprint(number);
        state.clock = state.clock.max(found.used_at);
        if found.state == ObjectState::Withheld {
            state.account(namespace, bytes, SlotState::Free, SlotState::Staged);
            state.slab.at_mut(number).grant();
            granted.withheld.push(StagedObject {
                request: 0,
                position: 0,
                extent: found.extent,
                slot: state.slab.reference(number),
            });
            continue;
        }
        state.account(namespace, bytes, SlotState::Free, SlotState::Resident);
        state.slab.at_mut(number).set_state(SlotState::Resident);
        let candidate = state.candidate(number, state.slab.at(number));
        let identity = state.namespaces.identity(namespace, &found.hash);
        state.policy.admit(candidate, identity);
        state.policy.insert(candidate, false);
        if found.state == ObjectState::Read {
            granted.read.extents.push(found.extent);
            granted.read.slots.push(state.slab.reference(number));
        }
    }
    for held in &granted.read.slots {
        hold_granted(state, *held);
    }
    granted
}

/// Leases an object whose ledger says already that a client may be reading it. That is no use of it: its time stays.
fn hold_granted(state: &mut CacheState<impl ExtentAllocator>, reference: SlotRef) {
    let slot = state.slab.at_mut(reference.slot);
    let used_at = slot.used_at;
    slot.grant();
    state.hold(reference.slot);
    state.slab.at_mut(reference.slot).used_at = used_at;
}
