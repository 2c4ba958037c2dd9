//! Slots: one cache line of facts per object that has memory.

use super::Extent;
use crate::block_vec::BlockVec;
use crate::hashing::ChunkHash;
use crate::object_key::Namespace;
use crate::violation::Violation;
use std::sync::Arc;
use std::time::Duration;

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    /// No object; the slot is in the free list.
    Free,
    /// An object being written, visible to its reservation only.
    Staged,
    /// An object that lookups find.
    Resident,
    /// An object removed by force while leased: invisible, its memory is freed with the last lease.
    Doomed,
}

/// One object. Exactly one cache line, because a batch's cost is the lines it touches.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct ObjectSlot {
    pub(super) hash: ChunkHash,
    pub(super) extent: Extent,
    /// Number of the namespace; the next free slot while this one is free.
    pub(super) namespace: u32,
    /// The state in the low two bits, five facts in the next (`FACT_BITS`), above them how often the slot was freed.
    life: u32,
    /// How many leases are held.
    pub(super) leases: u32,
    /// When it was last used, in ticks of the cache's clock.
    pub(super) used_at: u32,
}

const _: () = assert!(size_of::<ObjectSlot>() == 64);

/// Bits of an object's last use, in ticks, that may be out of date in the ledger: 6.4 seconds.
const COARSE_BITS: u32 = 6;

/// The state; whether the object was used, whether a client may be copying its memory, whether it is pinned, whether it is
/// to be evicted first, and whether a tier has to store it again.
const FACT_BITS: u32 = 7;
const USED: u32 = 0b100;
const GRANTED: u32 = 0b1000;
const PINNED: u32 = 0b1_0000;
const EVICT_FIRST: u32 = 0b10_0000;
const UNSTORED: u32 = 0b100_0000;

impl ObjectSlot {
    pub(super) fn state(&self) -> SlotState {
        match self.life & 0b11 {
            0 => SlotState::Free,
            1 => SlotState::Staged,
            2 => SlotState::Resident,
            _ => SlotState::Doomed,
        }
    }

    pub(super) fn set_state(&mut self, state: SlotState) {
        self.life = self.life & !0b11 | state as u32;
    }

    /// Sets the time of the last use, in ticks. Returns whether the ledger's, which it has roughly, is out of date now.
    #[inline]
    pub(super) fn use_at(&mut self, tick: u32) -> bool {
        let before = std::mem::replace(&mut self.used_at, tick);
        before >> COARSE_BITS != tick >> COARSE_BITS
    }

    /// Records a use of a leased or pinned object, for its return to the eviction order.
    pub(super) fn note_use(&mut self) {
        self.life |= USED;
    }

    /// Notes that the object goes with others, as it was used.
    pub(super) fn evict_as_others(&mut self) {
        self.life &= !EVICT_FIRST;
    }

    pub(super) fn pin(&mut self) {
        self.life = (self.life | PINNED) & !EVICT_FIRST;
    }

    pub(super) fn unpin(&mut self) {
        self.life &= !PINNED;
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.life & PINNED != 0
    }

    /// Whether it is leased or pinned, so that it is not in the eviction order.
    pub(super) fn is_held(&self) -> bool {
        self.leases > 0 || self.is_pinned()
    }

    /// Notes that the object is to be evicted before others, until it is used from now on.
    pub(super) fn evict_first(&mut self) {
        self.life = self.life & !USED | EVICT_FIRST;
    }

    pub(super) fn is_evicted_first(&self) -> bool {
        self.life & EVICT_FIRST != 0
    }

    /// Whether it is granted, pinned or to be evicted first.
    pub(super) fn is_special(&self) -> bool {
        self.life & (GRANTED | PINNED | EVICT_FIRST) != 0
    }

    /// Whether the object was used since the last call.
    pub(super) fn take_use(&mut self) -> bool {
        let was_used = self.life & USED != 0;
        self.life &= !USED;
        was_used
    }

    /// Records that a client may be copying the object's memory by itself.
    pub(super) fn grant(&mut self) {
        self.life |= GRANTED;
    }

    pub(super) fn is_granted(&self) -> bool {
        self.life & GRANTED != 0
    }

    /// Whether a client was granted the memory; it is not any more.
    pub(super) fn take_grant(&mut self) -> bool {
        let was_granted = self.is_granted();
        self.life &= !GRANTED;
        was_granted
    }

    /// Notes that a tier could not store the object. Returns whether that is new.
    pub(super) fn set_unstored(&mut self) -> bool {
        let is_new = self.life & UNSTORED == 0;
        self.life |= UNSTORED;
        is_new
    }

    /// Whether a tier could not store the object; it is about to be stored again, or freed.
    pub(super) fn take_unstored(&mut self) -> bool {
        let was_unstored = self.life & UNSTORED != 0;
        self.life &= !UNSTORED;
        was_unstored
    }

    pub(super) fn is_unstored(&self) -> bool {
        self.life & UNSTORED != 0
    }

    pub(super) fn generation(&self) -> u32 {
        self.life >> FACT_BITS
    }
}

/// Namespace and time of a grant of an earlier process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantOrigin {
    /// Namespace of the objects.
    pub namespace: Arc<Namespace>,
    /// Time of the grant, or of the last use of a readable object.
    pub granted_at: Duration,
}

/// A slot and its generation: a reference kept beyond the life of its object is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotRef {
    pub(super) slot: u32,
    pub(super) generation: u32,
}

impl SlotRef {
    /// Refers to nothing.
    pub(super) const NONE: Self = Self {
        slot: u32::MAX,
        generation: u32::MAX,
    };
}

const NO_SLOT: u32 = u32::MAX;
/// Most slots, so that `u32::MAX` and its neighbour stay free for markers in lists.
const MAX_SLOTS: usize = 1 << 31;
/// Slots per block: growing allocates 64 KiB under the lock and moves nothing.
const BLOCK: usize = 1024;

/// All slots, by number.
#[derive(Debug)]
pub(super) struct Slab {
    slots: BlockVec<ObjectSlot, BLOCK>,
    /// Slots below this number were used at least once.
    known: u32,
    first_free: u32,
    live: usize,
}

impl Default for Slab {
    fn default() -> Self {
        Self {
            slots: BlockVec::default(),
            known: 0,
            first_free: NO_SLOT,
            live: 0,
        }
    }
}

impl Slab {
    /// Takes a slot for a new object; `None` if all are in use.
    pub(super) fn take(
        &mut self,
        hash: ChunkHash,
        namespace: u32,
        extent: Extent,
    ) -> Option<SlotRef> {
        let number = match self.first_free {
            NO_SLOT => self.grow()?,
            number => number,
        };
        let slot = self.at_mut(number);
        let next = slot.namespace;
        slot.hash = hash;
        slot.extent = extent;
        slot.namespace = namespace;
        slot.leases = 0;
        slot.set_state(SlotState::Staged);
        let generation = slot.generation();
        self.first_free = next;
        self.live += 1;
        Some(SlotRef {
            slot: number,
            generation,
        })
    }

    /// Frees a slot.
    pub(super) fn free(&mut self, number: u32) {
        let next = self.first_free;
        let slot = self.at_mut(number);
        slot.life = slot.generation().wrapping_add(1) << FACT_BITS;
        slot.namespace = next;
        self.first_free = number;
        self.live -= 1;
    }

    /// A slot never used before.
    fn grow(&mut self) -> Option<u32> {
        let number = self.known;
        if number as usize == MAX_SLOTS {
            return None;
        }
        self.slots.grow_to(number, || ObjectSlot {
            hash: ChunkHash([0; 32]),
            extent: Extent { offset: 0, len: 0 },
            namespace: NO_SLOT,
            life: 0,
            leases: 0,
            used_at: 0,
        });
        self.known += 1;
        Some(number)
    }

    /// Puts an object of an earlier process into its slot, which must be free, and stages it. Call
    /// [`link_free`](Self::link_free) after the last one.
    pub(super) fn place(&mut self, number: u32, hash: ChunkHash, namespace: u32, extent: Extent) {
        while self.known <= number && self.grow().is_some() {}
        let slot = self.at_mut(number);
        slot.hash = hash;
        slot.extent = extent;
        slot.namespace = namespace;
        slot.leases = 0;
        slot.set_state(SlotState::Staged);
        self.live += 1;
    }

    /// Makes the free list of all slots without an object, the lowest first.
    pub(super) fn link_free(&mut self) {
        self.first_free = NO_SLOT;
        for number in (0..self.known).rev() {
            if self.at(number).state() == SlotState::Free {
                self.at_mut(number).namespace = self.first_free;
                self.first_free = number;
            }
        }
    }

    /// The slot of this number, which must have been used once.
    pub(super) fn at(&self, number: u32) -> &ObjectSlot {
        &self.slots[number]
    }

    /// See [`at`](Self::at).
    pub(super) fn at_mut(&mut self, number: u32) -> &mut ObjectSlot {
        &mut self.slots[number]
    }

    /// The slot, unless it was freed since.
    pub(super) fn get(&self, reference: SlotRef) -> Option<&ObjectSlot> {
        let slot = self.slots.get(reference.slot)?;
        (slot.generation() == reference.generation && slot.state() != SlotState::Free)
            .then_some(slot)
    }

    /// A reference to the slot as it is now.
    pub(super) fn reference(&self, number: u32) -> SlotRef {
        SlotRef {
            slot: number,
            generation: self.at(number).generation(),
        }
    }

    /// Number of slots used at least once, free ones included.
    pub(super) fn slots(&self) -> usize {
        self.known as usize
    }

    /// Number of slots that have an object.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// All slots with their numbers, free ones included.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &ObjectSlot)> {
        (0..self.known).zip(self.slots.iter())
    }

    /// Number of slots in the free list.
    ///
    /// # Errors
    /// The list has a loop or a used slot.
    pub(super) fn count_free(&self) -> Result<usize, Violation> {
        let mut count = 0;
        let mut at = self.first_free;
        while at != NO_SLOT {
            let slot = self.at(at);
            if slot.state() != SlotState::Free || count == self.slots() {
                return Err(Violation(format!("slot {at} in the free list is {slot:?}")));
            }
            count += 1;
            at = slot.namespace;
        }
        Ok(count)
    }

    pub(super) fn bookkeeping_bytes(&self) -> usize {
        self.slots.bookkeeping_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(slab: &mut Slab) -> SlotRef {
        let extent = Extent { offset: 0, len: 1 };
        slab.take(ChunkHash([7; 32]), 3, extent).unwrap()
    }

    #[test]
    fn reference_of_freed_slot_is_recognised() {
        let mut slab = Slab::default();
        let old = take(&mut slab);
        assert_eq!(
            slab.get(old).map(ObjectSlot::state),
            Some(SlotState::Staged)
        );
        slab.free(old.slot);
        assert!(slab.get(old).is_none());
        let new = take(&mut slab);
        assert_eq!(new.slot, old.slot, "free slots are reused");
        assert!(slab.get(old).is_none());
        assert!(slab.get(new).is_some());
        assert!(slab.get(SlotRef::NONE).is_none());
    }

    #[test]
    fn slots_are_counted_across_blocks() {
        let mut slab = Slab::default();
        let taken: Vec<_> = (0..BLOCK + 1).map(|_| take(&mut slab)).collect();
        taken[..10].iter().for_each(|r| slab.free(r.slot));
        assert_eq!((slab.slots(), slab.live()), (BLOCK + 1, BLOCK - 9));
        assert_eq!(slab.count_free(), Ok(10));
        slab.at_mut(0).set_state(SlotState::Resident);
        assert!(slab.count_free().is_err());
    }
}
