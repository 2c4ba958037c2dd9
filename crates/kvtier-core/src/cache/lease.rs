//! Leases: while one is held, its objects stay where they are.

use super::slab::SlotRef;
use super::state::State;
use super::{Cache, Extent, ExtentAllocator, Space};
use std::ops::Range;

/// One row of a lookup: an object group on a rank.
#[derive(Clone, Copy, Debug)]
pub struct LookupRow<'a> {
    /// Where the row's objects belong.
    pub space: Space<'a>,
    /// Chunks the row needs at the end of a prefix; `None` = all of them (full attention). 0 counts as 1.
    pub window: Option<u32>,
}

/// What of a lookup is counted already, for [`Cache::look_again`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Chunks that it found.
    pub hit_chunks: usize,
    /// Whether it is counted for its tenant too, which was not known otherwise.
    pub for_tenant: bool,
}

impl Counted {
    /// Nothing more is to be counted.
    pub const ALL: Self = Self {
        hit_chunks: usize::MAX,
        for_tenant: true,
    };
}

/// What a lookup found.
#[derive(Debug)]
pub struct Lookup<A: ExtentAllocator> {
    /// Chunks in the longest prefix that every row can serve.
    pub hit_chunks: usize,
    /// What of it is counted.
    pub counted: Counted,
    /// Holds, for each row, exactly the chunks needed for that prefix.
    pub lease: PrefixLease<A>,
}

/// The hold of a lookup on the prefix it found. Dropping it releases everything in one step.
#[must_use = "dropping a lease releases its objects"]
#[derive(Debug)]
pub struct PrefixLease<A: ExtentAllocator> {
    cache: Cache<A>,
    rows: Vec<RowHold>,
    held: usize,
}

/// The slots one row holds: `slots[i]` is chunk `start + i`, [`SlotRef::NONE`] once released.
#[derive(Debug)]
pub(super) struct RowHold {
    pub(super) start: usize,
    pub(super) slots: Vec<SlotRef>,
}

impl RowHold {
    /// The part of `slots` that these chunks are; chunks outside are passed over.
    fn within(&self, chunks: &Range<usize>) -> Range<usize> {
        let at = |chunk: usize| chunk.saturating_sub(self.start).min(self.slots.len());
        let start = at(chunks.start);
        start..at(chunks.end).max(start)
    }

    /// Chunks that were pinned.
    fn chunks(&self) -> Range<usize> {
        self.start..self.start + self.slots.len()
    }
}

impl<A: ExtentAllocator> PrefixLease<A> {
    pub(super) fn new(cache: Cache<A>, rows: Vec<RowHold>) -> Self {
        let held = rows.iter().map(|row| row.slots.len()).sum();
        Self { cache, rows, held }
    }

    /// How many rows the lookup had.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The chunks the lookup pinned for a row; some may have been released since. `None` for no such row.
    pub fn pinned(&self, row: usize) -> Option<Range<usize>> {
        self.rows.get(row).map(RowHold::chunks)
    }

    /// Whether nothing is held any more.
    pub fn is_empty(&self) -> bool {
        self.held == 0
    }

    /// How many objects are held.
    pub fn held(&self) -> usize {
        self.held
    }

    /// A lease of its own on these chunks of one row, in chunk order. `None` unless all of them are held here.
    pub fn claim(&self, row: usize, chunks: Range<usize>) -> Option<ReadLease<A>> {
        let row = self.rows.get(row)?;
        let within = row.within(&chunks);
        if chunks.start > chunks.end || within.len() != chunks.len() {
            return None;
        }
        let slots = &row.slots[within];
        if slots.contains(&SlotRef::NONE) {
            return None;
        }
        let mut hold = OrderedHold {
            slots: slots.to_vec(),
            extents: Vec::with_capacity(slots.len()),
        };
        if !slots.is_empty() {
            self.cache.locked(|state| {
                for reference in slots {
                    state.pin(reference.slot);
                    hold.extents.push(state.slab.at(reference.slot).extent);
                }
            });
        }
        Some(ReadLease::new(self.cache.clone(), hold))
    }

    /// Releases these chunks of these rows in one step; what is not held is passed over. Gives the number of
    /// objects released.
    pub fn release_range(&mut self, rows: Range<usize>, chunks: Range<usize>) -> usize {
        let last = rows.end.min(self.rows.len());
        let rows = &mut self.rows[rows.start.min(last)..last];
        let count = |row: &RowHold| {
            let slots = &row.slots[row.within(&chunks)];
            slots.iter().filter(|slot| **slot != SlotRef::NONE).count()
        };
        let released: usize = rows.iter().map(count).sum();
        if released > 0 {
            self.cache.locked(|state| state.release(rows, &chunks));
            for row in rows {
                let within = row.within(&chunks);
                row.slots[within].fill(SlotRef::NONE);
            }
            self.held -= released;
        }
        released
    }
}

impl<A: ExtentAllocator> Drop for PrefixLease<A> {
    fn drop(&mut self) {
        if self.held > 0 {
            self.cache
                .locked(|state| state.release(&self.rows, &(0..usize::MAX)));
        }
    }
}

impl<A: ExtentAllocator> State<A> {
    /// Releases these chunks, the last chunk of all rows first: so it becomes the first to leave, and no row loses
    /// its front while another still has its tail.
    fn release(&mut self, rows: &[RowHold], chunks: &Range<usize>) {
        let first = rows.iter().map(|row| row.start).min().unwrap_or(0);
        let end = rows.iter().map(|row| row.chunks().end).max().unwrap_or(0);
        for chunk in (first.max(chunks.start)..end.min(chunks.end)).rev() {
            for row in rows {
                let slot = chunk
                    .checked_sub(row.start)
                    .and_then(|at| row.slots.get(at));
                match slot {
                    Some(&SlotRef::NONE) | None => {}
                    Some(&slot) => self.unpin(slot),
                }
            }
        }
    }
}

/// Held objects in a given order, and their places.
#[derive(Debug, Default)]
pub(super) struct OrderedHold {
    pub(super) slots: Vec<SlotRef>,
    pub(super) extents: Vec<Extent>,
}

/// A hold on objects in a given order, with their places. Dropping it releases everything in one step.
#[must_use = "dropping a lease releases its objects"]
#[derive(Debug)]
pub struct ReadLease<A: ExtentAllocator> {
    cache: Cache<A>,
    hold: OrderedHold,
}

impl<A: ExtentAllocator> ReadLease<A> {
    pub(super) fn new(cache: Cache<A>, hold: OrderedHold) -> Self {
        Self { cache, hold }
    }

    /// Where the objects' bytes are, in the order asked for.
    pub fn extents(&self) -> &[Extent] {
        &self.hold.extents
    }

    /// How many objects are held.
    pub fn len(&self) -> usize {
        self.hold.extents.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.hold.extents.is_empty()
    }
}

impl<A: ExtentAllocator> Drop for ReadLease<A> {
    fn drop(&mut self) {
        if !self.hold.slots.is_empty() {
            self.cache.locked(|state| {
                for &slot in self.hold.slots.iter().rev() {
                    state.unpin(slot);
                }
            });
        }
    }
}
