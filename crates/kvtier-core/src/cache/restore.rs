//! A cache with the objects of an earlier process.

use super::lease::OrderedHold;
use super::reservation::StagedObject;
use super::slab::{GrantOrigin, SlotRef, SlotState};
use super::state::{CacheState, TICKS_PER_SECOND};
use super::{Cache, CacheConfig, ExtentAllocator, ReadLease, Reservation};
use crate::ledger::{Fault, Found, Journal, Ledger, ObjectState, Rejected, Snapshot, Words};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

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
struct Granted {
    withheld: Vec<StagedObject>,
    read: OrderedHold,
}

impl<A: ExtentAllocator> Cache<A> {
    /// A cache over this memory, which must be entirely free, with the objects of a snapshot and its ledger. They have the order
    /// of their last uses, as exactly as the ledger knows them, and of equally old ones that of their commits, so that a
    /// prefix loses its end first. Writes to the ledger only what is left out. Names of namespaces without objects are forgotten:
    /// their numbers are reused.
    pub fn restore<W: Words + 'static>(
        allocator: A,
        config: CacheConfig,
        mut ledger: Ledger<W>,
        mut snapshot: Snapshot,
    ) -> (Self, Restored<A>) {
        let mut state = CacheState::new(allocator, config);
        let found = state.admit_all(&mut ledger, &mut snapshot);
        let granted = state.restore(&found);
        for (number, namespace) in (0..).zip(&snapshot.namespaces) {
            if namespace.is_some() {
                // The table's own use ends: namespaces without objects are forgotten.
                state.drop_user(number);
            }
            if state.namespaces.get(number).is_none() {
                ledger.forget_namespace(number);
            }
        }
        state.journal = Some(Box::new(ledger));
        let resident = state.counters.resident;
        let cache = Self::over(state, config);
        let restored = Restored {
            objects: resident.objects,
            bytes: resident.bytes,
            rejected: snapshot.rejected,
            withheld: Reservation::new(cache.clone(), granted.withheld),
            read: ReadLease::new(cache.clone(), granted.read),
        };
        (cache, restored)
    }
}

impl<A: ExtentAllocator> CacheState<A> {
    /// Takes the memory and the namespaces of a snapshot's objects. Returns those that have both, in eviction order.
    fn admit_all<W: Words>(
        &mut self,
        ledger: &mut Ledger<W>,
        snapshot: &mut Snapshot,
    ) -> Vec<Found> {
        self.namespaces.restore(&snapshot.namespaces);
        let mut kept = std::mem::take(&mut snapshot.objects);
        let extents: Vec<_> = kept
            .iter()
            .map(|found| (found.extent, found.slot))
            .collect();
        let mut taken = self.allocator.take_all(&extents).into_iter();
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
            self.slab
                .place(found.slot, found.hash, found.namespace, found.extent);
            let slot = self.slab.at_mut(found.slot);
            slot.used_at = found.used_at;
            let is_readable = found.state != ObjectState::Withheld;
            if is_readable && self.find(found.namespace, &found.hash).is_some() {
                self.allocator.free(found.extent);
                self.slab.free(found.slot);
                ledger.leave_out(snapshot, found.slot, Fault::Duplicate);
                continue;
            }
            if is_readable {
                let key = self.index.fingerprint(found.namespace, &found.hash);
                self.index.insert(key, found.slot);
            }
            unique.push(*found);
        }
        self.slab.link_free();
        unique.reverse();
        unique
    }

    /// Accounts for objects that have their slots, their memory and their namespaces, and puts them in the eviction order.
    fn restore(&mut self, objects: &[Found]) -> Granted {
        let mut granted = Granted::default();
        for found in objects {
            let (number, namespace) = (found.slot, found.namespace);
            self.namespaces.add_user(namespace);
            let bytes = self.footprint(number);
            self.clock = self.clock.max(found.used_at);
            if found.state == ObjectState::Withheld {
                self.account(namespace, bytes, SlotState::Free, SlotState::Staged);
                self.slab.at_mut(number).grant();
                granted.withheld.push(StagedObject {
                    request: 0,
                    position: 0,
                    extent: found.extent,
                    slot: self.slab.reference(number),
                });
                continue;
            }
            self.account(namespace, bytes, SlotState::Free, SlotState::Resident);
            self.slab.at_mut(number).set_state(SlotState::Resident);
            let candidate = self.candidate(number, self.slab.at(number));
            let identity = self.namespaces.identity(namespace, &found.hash);
            self.policy.admit(candidate, identity);
            self.policy.insert(candidate, false);
            if found.state == ObjectState::Read {
                granted.read.extents.push(found.extent);
                granted.read.slots.push(self.slab.reference(number));
            }
        }
        for held in &granted.read.slots {
            self.hold_granted(*held);
        }
        granted
    }

    /// Positions of objects in this order by their grant: one entry per namespace and time.
    pub(super) fn by_grant(
        &self,
        slots: impl Iterator<Item = SlotRef>,
    ) -> Vec<(GrantOrigin, Vec<usize>)> {
        let mut grants: BTreeMap<(u32, u32), Vec<usize>> = BTreeMap::new();
        for (at, reference) in slots.enumerate() {
            let slot = self.slab.at(reference.slot);
            grants
                .entry((slot.namespace, slot.used_at))
                .or_default()
                .push(at);
        }
        let grants = grants.into_iter().filter_map(|((namespace, tick), at)| {
            let origin = GrantOrigin {
                namespace: Arc::clone(self.namespaces.get(namespace)?),
                granted_at: Duration::from_secs(tick.into()) / TICKS_PER_SECOND,
            };
            Some((origin, at))
        });
        grants.collect()
    }

    /// Leases an object whose ledger says already that a client may be reading it. That is no use of it: its time stays.
    fn hold_granted(&mut self, reference: SlotRef) {
        let slot = self.slab.at_mut(reference.slot);
        let used_at = slot.used_at;
        slot.grant();
        self.hold(reference.slot);
        self.slab.at_mut(reference.slot).used_at = used_at;
    }
}
