//! Leases: while one is held, its objects stay where they are.

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

/// What a lookup found.
#[derive(Debug)]
pub struct Lookup<A: ExtentAllocator> {
    /// Chunks in the longest prefix that every row can serve.
    pub hit_chunks: usize,
    /// Holds, for each row, exactly the chunks needed for that prefix.
    pub lease: PrefixLease<A>,
}

/// The hold of a lookup on the prefix it found. Dropping it releases everything in one step.
#[must_use = "dropping a lease releases its objects"]
#[derive(Debug)]
pub struct PrefixLease<A: ExtentAllocator> {
    cache: Cache<A>,
    rows: Vec<RowHold>,
}

/// The slots one row holds: `slots[i]` is chunk `start + i`, `SlotRef::NONE` once released.
#[derive(Debug)]
pub(super) struct RowHold {
    pub(super) start: usize,
    pub(super) slots: Vec<super::slab::SlotRef>,
}

impl<A: ExtentAllocator> PrefixLease<A> {
    pub(super) fn new(cache: Cache<A>, rows: Vec<RowHold>) -> Self {
        Self { cache, rows }
    }

    /// How many rows the lookup had.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The chunks the lookup pinned for a row; some may have been released since.
    pub fn pinned(&self, row: usize) -> Option<Range<usize>> {
        let row = self.rows.get(row)?;
        Some(row.start..row.start + row.slots.len())
    }

    /// Whether nothing is held any more.
    pub fn is_empty(&self) -> bool {
        self.held() == 0
    }

    /// How many objects are held.
    pub fn held(&self) -> usize {
        unimplemented!()
    }

    /// A lease of its own on these chunks of one row, in chunk order. `None` unless all of them are held here.
    pub fn claim(&self, row: usize, chunks: Range<usize>) -> Option<ReadLease<A>> {
        let _ = (row, chunks, &self.cache);
        unimplemented!()
    }

    /// Releases these chunks of these rows, in one step; what is not held is passed over. Gives the number of
    /// objects released.
    pub fn release_range(&mut self, rows: Range<usize>, chunks: Range<usize>) -> usize {
        let _ = (rows, chunks);
        unimplemented!()
    }
}

/// A hold on objects in a given order, with their places. Dropping it releases everything in one step.
#[must_use = "dropping a lease releases its objects"]
#[derive(Debug)]
pub struct ReadLease<A: ExtentAllocator> {
    cache: Cache<A>,
    slots: Vec<super::slab::SlotRef>,
    extents: Vec<Extent>,
}

impl<A: ExtentAllocator> ReadLease<A> {
    pub(super) fn new(
        cache: Cache<A>,
        slots: Vec<super::slab::SlotRef>,
        extents: Vec<Extent>,
    ) -> Self {
        Self {
            cache,
            slots,
            extents,
        }
    }

    /// Where the objects' bytes are, in the order asked for.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// How many objects are held.
    pub fn len(&self) -> usize {
        self.extents.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }
}
