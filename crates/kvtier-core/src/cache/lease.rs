//! Leases: while one is held, its objects are not evicted and keep their memory.

use super::slab::SlotRef;
use super::state::CacheState;
use super::{Cache, Extent, ExtentAllocator, GrantOrigin, pins};
use crate::group_row::GroupRow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The part of a lookup that was counted, for [`Cache::lookup_again`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Chunks that it found.
    pub hit_chunks: usize,
    /// Whether it was counted for its tenant too. If not, the tenant was unknown.
    pub for_tenant: bool,
}

impl Counted {
    /// A lookup that counts nothing more.
    pub const ALL: Self = Self {
        hit_chunks: usize::MAX,
        for_tenant: true,
    };
}

/// Result of a lookup.
#[derive(Debug)]
pub struct Lookup<A: ExtentAllocator> {
    /// Chunks in the longest prefix that every row can serve.
    pub hit_chunks: usize,
    /// The part of it that was counted.
    pub counted: Counted,
    /// Whether a tier could not store some object of the cache: [`PrefixLease::take_unstored`] has those that were hit.
    pub may_be_unstored: bool,
    /// The lease on exactly the chunks that each row needs for that prefix.
    pub lease: PrefixLease<A>,
}

/// Lease of a lookup on the prefix it found. Dropping it releases everything in one step.
#[must_use = "dropping a lease releases its objects"]
#[derive(Debug)]
pub struct PrefixLease<A: ExtentAllocator> {
    cache: Cache<A>,
    rows: Arc<[GroupRow]>,
    /// Held chunks, one entry per row.
    holds: Vec<HeldChunks>,
    held: usize,
}

/// The slots that one row holds: `slots[i]` is chunk `start + i`, [`SlotRef::NONE`] once released.
#[derive(Debug)]
pub(super) struct HeldChunks {
    pub(super) start: usize,
    pub(super) slots: Vec<SlotRef>,
}

impl HeldChunks {
    /// The part of `slots` of these chunks; chunks outside are ignored.
    fn within(&self, chunks: &Range<usize>) -> Range<usize> {
        let at = |chunk: usize| chunk.saturating_sub(self.start).min(self.slots.len());
        let start = at(chunks.start);
        start..at(chunks.end).max(start)
    }

    /// Chunks that were leased.
    fn chunks(&self) -> Range<usize> {
        self.start..self.start + self.slots.len()
    }

    /// The slot of a chunk that is still held.
    fn held(&self, chunk: usize) -> Option<SlotRef> {
        let slot = *self.slots.get(chunk.checked_sub(self.start)?)?;
        (slot != SlotRef::NONE).then_some(slot)
    }

    /// The chunks that were leased for any of these rows, and those between them.
    fn span(rows: &[Self]) -> Range<usize> {
        let first = rows.iter().map(|row| row.start).min().unwrap_or(0);
        let end = rows.iter().map(|row| row.chunks().end).max().unwrap_or(0);
        first..end
    }
}

impl<A: ExtentAllocator> PrefixLease<A> {
    pub(super) fn new(cache: Cache<A>, rows: Arc<[GroupRow]>, holds: Vec<HeldChunks>) -> Self {
        let slots = holds.iter().flat_map(|hold| &hold.slots);
        let held = slots.filter(|slot| **slot != SlotRef::NONE).count();
        Self {
            cache,
            rows,
            holds,
            held,
        }
    }

    /// The rows of the lookup.
    pub fn rows(&self) -> &Arc<[GroupRow]> {
        &self.rows
    }

    /// The chunks that the lookup leased for a row; some may have been released since. `None` for an unknown row.
    pub fn leased(&self, row: usize) -> Option<Range<usize>> {
        self.holds.get(row).map(HeldChunks::chunks)
    }

    /// Pins what is held for this time from `now` on, as [`Cache::pin`] does.
    pub fn pin(&self, now: Duration, time: Duration) {
        let deadline = pins::deadline(now, time);
        self.cache.locked(|state| {
            // The first chunk of all rows first.
            for chunk in HeldChunks::span(&self.holds) {
                for slot in self.holds.iter().filter_map(|row| row.held(chunk)) {
                    state.pin(slot.slot, deadline);
                }
            }
        });
    }

    /// Counts its chunks from `covered` chunks further to the front: the lookup was of what lies behind them.
    pub fn shift(&mut self, covered: usize) {
        self.holds.iter_mut().for_each(|hold| hold.start += covered);
    }

    /// The chunks of each row that are held and that a tier could not store. They are about to be stored again: the next call
    /// does not return them.
    pub fn take_unstored(&self) -> Vec<(&GroupRow, Vec<usize>)> {
        let rows = self.rows.iter().zip(&self.holds);
        self.cache.locked(|state| {
            let mut take = |hold: &HeldChunks| {
                let held = hold.chunks().filter(|chunk| {
                    let slot = hold
                        .held(*chunk)
                        .filter(|slot| state.slab.get(*slot).is_some());
                    let taken = slot.is_some_and(|it| state.slab.at_mut(it.slot).take_unstored());
                    state.unstored -= usize::from(taken);
                    taken
                });
                held.collect::<Vec<_>>()
            };
            let taken = rows.map(|(row, hold)| (row, take(hold)));
            taken.filter(|(_, chunks)| !chunks.is_empty()).collect()
        })
    }

    /// Whether nothing is held (any more).
    pub fn is_empty(&self) -> bool {
        self.held == 0
    }

    /// Number of objects held.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Returns a separate lease on these chunks of one row, in chunk order; `None` unless all of them are held here.
    pub fn claim(&self, row: usize, chunks: Range<usize>) -> Option<ReadLease<A>> {
        let row = self.holds.get(row)?;
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
                    state.lease(reference.slot);
                    hold.extents.push(state.slab.at(reference.slot).extent);
                }
            });
        }
        Some(ReadLease::new(self.cache.clone(), hold))
    }

    /// Releases these chunks of these rows in one step; chunks not held are ignored. Returns the number of objects
    /// released.
    pub fn release_range(&mut self, rows: Range<usize>, chunks: Range<usize>) -> usize {
        let last = rows.end.min(self.holds.len());
        let rows = &mut self.holds[rows.start.min(last)..last];
        let count = |row: &HeldChunks| {
            let slots = &row.slots[row.within(&chunks)];
            slots.iter().filter(|slot| **slot != SlotRef::NONE).count()
        };
        let released: usize = rows.iter().map(count).sum();
        if released > 0 {
            self.cache
                .locked(|state| release_held(state, rows, &chunks));
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
                .locked(|state| release_held(state, &self.holds, &(0..usize::MAX)));
        }
    }
}

/// Releases these chunks, the last chunk of all rows first: so it is evicted first, and no row loses its front while
/// another still has its tail.
fn release_held(
    state: &mut CacheState<impl ExtentAllocator>,
    rows: &[HeldChunks],
    chunks: &Range<usize>,
) {
    let all = HeldChunks::span(rows);
    for chunk in (all.start.max(chunks.start)..all.end.min(chunks.end)).rev() {
        for slot in rows.iter().filter_map(|row| row.held(chunk)) {
            state.end_lease(slot);
        }
    }
}

/// Held objects in a given order, and their extents.
#[derive(Debug, Default)]
pub(super) struct OrderedHold {
    pub(super) slots: Vec<SlotRef>,
    pub(super) extents: Vec<Extent>,
}

/// Lease on objects in a given order, with their extents. Dropping it releases everything in one step.
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

    /// Notes in the ledger that a client reads this memory by itself, so that a next process keeps it as it is. Call it before
    /// the client learns of the memory.
    pub fn grant(&self) {
        self.cache
            .locked(|state| state.grant(self.hold.slots.iter().copied()));
    }

    /// The lease in parts, one per grant.
    pub fn by_grant(mut self) -> Vec<(GrantOrigin, Self)> {
        let hold = std::mem::take(&mut self.hold);
        let slots = hold.slots.iter().copied();
        let grants = self.cache.locked(|state| state.by_grant(slots));
        let part = |at: Vec<usize>| OrderedHold {
            slots: at.iter().map(|at| hold.slots[*at]).collect(),
            extents: at.iter().map(|at| hold.extents[*at]).collect(),
        };
        let grants = grants.into_iter();
        grants
            .map(|(origin, at)| (origin, Self::new(self.cache.clone(), part(at))))
            .collect()
    }

    /// The objects' extents, in the order requested.
    pub fn extents(&self) -> &[Extent] {
        &self.hold.extents
    }

    /// Number of objects held.
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
                    state.end_lease(slot);
                }
            });
        }
    }
}
