//! The slots: one cache line of facts for every object that has memory.

use super::Extent;
use crate::block_vec::BlockVec;
use crate::hashing::ChunkHash;

/// What a slot stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    /// Nothing; the slot is in the list of free ones.
    Free,
    /// An object being written, known to its reservation only.
    Staged,
    /// An object that lookups find.
    Resident,
    /// An object removed by force while leased: invisible, its memory in use until the last lease ends.
    Doomed,
}

/// One object. Exactly one cache line, because a batch's cost is the lines it touches.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Slot {
    pub(super) hash: ChunkHash,
    pub(super) extent: Extent,
    /// The interned space; the next free slot while this one is free.
    pub(super) space: u32,
    /// The state in the low two bits, whether it was used in the next, above them how often the slot has been freed.
    life: u32,
    /// How many leases are held.
    pub(super) leases: u32,
    /// When it was last used, in ticks of the cache's clock.
    pub(super) used_at: u32,
}

const _: () = assert!(size_of::<Slot>() == 64);

/// The state, and whether the object was used.
const FACT_BITS: u32 = 3;
const USED: u32 = 0b100;

impl Slot {
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

    /// Notes that a leased object was used, for when it returns to the eviction order.
    pub(super) fn note_use(&mut self) {
        self.life |= USED;
    }

    /// Whether the object was used since this was last asked.
    pub(super) fn take_use(&mut self) -> bool {
        let was_used = self.life & USED != 0;
        self.life &= !USED;
        was_used
    }

    pub(super) fn generation(&self) -> u32 {
        self.life >> FACT_BITS
    }
}

/// A slot at one point of its life: a reference kept beyond the slot's end is recognised.
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
/// More slots than this are not made, so that `u32::MAX` and its neighbour stay free for lists' own use.
const MAX_SLOTS: usize = 1 << 31;
/// Slots come in blocks, so that growing never moves what is there: 64 KiB at a time under the lock.
const BLOCK: usize = 1024;

/// All slots, by number.
#[derive(Debug)]
pub(super) struct Slab {
    slots: BlockVec<Slot, BLOCK>,
    /// Slots below this number have been handed out at least once.
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
    /// A slot for a new object, or `None` when there can be no more.
    pub(super) fn take(&mut self, hash: ChunkHash, space: u32, extent: Extent) -> Option<SlotRef> {
        let number = match self.first_free {
            NO_SLOT => self.another()?,
            number => number,
        };
        let slot = self.at_mut(number);
        let next = slot.space;
        slot.hash = hash;
        slot.extent = extent;
        slot.space = space;
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

    /// Ends the life of a slot.
    pub(super) fn give_back(&mut self, number: u32) {
        let next = self.first_free;
        let slot = self.at_mut(number);
        slot.life = slot.generation().wrapping_add(1) << FACT_BITS;
        slot.space = next;
        self.first_free = number;
        self.live -= 1;
    }

    /// A slot never handed out before.
    fn another(&mut self) -> Option<u32> {
        let number = self.known;
        if number as usize == MAX_SLOTS {
            return None;
        }
        self.slots.grow_to(number, || Slot {
            hash: ChunkHash([0; 32]),
            extent: Extent { offset: 0, len: 0 },
            space: NO_SLOT,
            life: 0,
            leases: 0,
            used_at: 0,
        });
        self.known += 1;
        Some(number)
    }

    /// The slot of this number, which must have been handed out once.
    pub(super) fn at(&self, number: u32) -> &Slot {
        &self.slots[number]
    }

    /// See [`at`](Self::at).
    pub(super) fn at_mut(&mut self, number: u32) -> &mut Slot {
        &mut self.slots[number]
    }

    /// The referred slot, unless its life has ended since.
    pub(super) fn get(&self, reference: SlotRef) -> Option<&Slot> {
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

    /// How many slots were handed out at least once, free ones included.
    pub(super) fn slots(&self) -> usize {
        self.known as usize
    }

    /// How many slots stand for an object.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// All slots with their numbers, free ones included.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (0..self.known).zip(self.slots.iter())
    }

    /// How many slots are in the list of free ones; an error when the list has a loop or a used slot.
    pub(super) fn count_free(&self) -> Result<usize, String> {
        let mut count = 0;
        let mut at = self.first_free;
        while at != NO_SLOT {
            let slot = self.at(at);
            if slot.state() != SlotState::Free || count == self.slots() {
                return Err(format!("slot {at} in the list of free slots is {slot:?}"));
            }
            count += 1;
            at = slot.space;
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
    fn a_reference_ends_with_its_slot_s_life() {
        let mut slab = Slab::default();
        let old = take(&mut slab);
        assert_eq!(slab.get(old).map(Slot::state), Some(SlotState::Staged));
        slab.give_back(old.slot);
        assert!(slab.get(old).is_none());
        let new = take(&mut slab);
        assert_eq!(new.slot, old.slot, "free slots are used again");
        assert!(slab.get(old).is_none());
        assert!(slab.get(new).is_some());
        assert!(slab.get(SlotRef::NONE).is_none());
    }

    #[test]
    fn slots_are_counted_beyond_a_block() {
        let mut slab = Slab::default();
        let taken: Vec<_> = (0..BLOCK + 1).map(|_| take(&mut slab)).collect();
        taken[..10].iter().for_each(|r| slab.give_back(r.slot));
        assert_eq!((slab.slots(), slab.live()), (BLOCK + 1, BLOCK - 9));
        assert_eq!(slab.count_free(), Ok(10));
        slab.at_mut(0).set_state(SlotState::Resident);
        assert!(slab.count_free().is_err());
    }
}
