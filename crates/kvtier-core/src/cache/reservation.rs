//! Memory set aside for objects whose bytes are still being written.

use super::lease::OrderedHold;
use super::slab::SlotRef;
use super::{Cache, Extent, ExtentAllocator, ReadLease, Space};
use crate::hashing::ChunkHash;
use std::cmp::Reverse;
use std::mem;
use std::time::Duration;

/// Objects of one space and one size that somebody wants to write.
#[derive(Clone, Copy, Debug)]
pub struct ReserveRequest<'a> {
    /// Where the objects belong.
    pub space: Space<'a>,
    /// The chunks, in prefix order.
    pub hashes: &'a [ChunkHash],
    /// Bytes of each object, at least 1.
    pub len: u64,
}

/// What became of one requested key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    /// The object is in the cache already; nothing to write.
    AlreadyResident,
    /// Memory is set aside.
    Reserved(Extent),
    /// No memory, and no eviction that would make a free range as large.
    NoMemory,
    /// The tenant's limit leaves no room, and it has nothing left that could be evicted.
    OverQuota,
    /// The call may not reserve more: [`Cache::reserve_staged`].
    OverStaging,
}

/// A `reserve` that was refused as a whole; nothing was set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// An object without bytes cannot be stored.
    #[error("len of reserve request {request} is 0: allowed is 1 or more bytes")]
    EmptyObject {
        /// Which of the requests.
        request: usize,
    },
}

/// What a `reserve` achieved.
#[derive(Debug)]
pub struct Reserved<A: ExtentAllocator> {
    /// The memory set aside; possibly none.
    pub reservation: Reservation<A>,
    /// One outcome a key, the requests' keys in order, one request after the other.
    pub outcomes: Vec<KeyOutcome>,
}

/// One object being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staged {
    /// Which of the requests asked for it.
    pub request: u32,
    /// Which of that request's hashes it is.
    pub position: u32,
    /// Where its bytes go.
    pub extent: Extent,
    pub(super) slot: SlotRef,
}

/// What a commit achieved. Counts objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// New in the cache.
    pub inserted: usize,
    /// Bytes of those.
    pub inserted_bytes: u64,
    /// Dropped, because the key had become resident meanwhile; its first writer wins.
    pub duplicates: usize,
    /// Given up by `commit_subset`.
    pub aborted: usize,
}

/// Memory set aside, private to its holder until committed. Dropping it gives the memory back.
#[must_use = "dropping a reservation gives its memory back"]
#[derive(Debug)]
pub struct Reservation<A: ExtentAllocator> {
    cache: Cache<A>,
    staged: Vec<Staged>,
}

impl<A: ExtentAllocator> Reservation<A> {
    pub(super) fn new(cache: Cache<A>, staged: Vec<Staged>) -> Self {
        Self { cache, staged }
    }

    /// The objects to write, in the order in which they were asked for.
    pub fn staged(&self) -> &[Staged] {
        &self.staged
    }

    /// Where to write, one extent an object, in the order of [`staged`](Self::staged).
    pub fn extents(&self) -> impl ExactSizeIterator<Item = Extent> + '_ {
        self.staged.iter().map(|staged| staged.extent)
    }

    /// How many objects to write.
    pub fn len(&self) -> usize {
        self.staged.len()
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.staged.is_empty()
    }

    /// Makes all objects visible. Their bytes must be written.
    pub fn commit(self, now: Duration) -> Committed {
        self.commit_subset(now, |_| true)
    }

    /// Makes those objects visible that `keep` says yes to, and gives up the others, in one step.
    pub fn commit_subset(mut self, now: Duration, keep: impl FnMut(&Staged) -> bool) -> Committed {
        let keep: Vec<bool> = self.staged.iter().map(keep).collect();
        let staged = mem::take(&mut self.staged);
        if staged.is_empty() {
            return Committed::default();
        }
        let order = last_chunk_first(&staged);
        self.cache.locked(|state| {
            state.tell_time(now);
            state.commit(&staged, order, &keep)
        })
    }

    /// Makes all objects visible and leases them in the same moment, so that nothing can evict them first. Where
    /// another writer was first, the lease is on that writer's object. The lease's order is that of
    /// [`staged`](Self::staged).
    pub fn commit_leased(mut self, now: Duration) -> (Committed, ReadLease<A>) {
        let staged = mem::take(&mut self.staged);
        let mut hold = OrderedHold {
            slots: staged.iter().map(|staged| staged.slot).collect(),
            extents: staged.iter().map(|staged| staged.extent).collect(),
        };
        let mut committed = Committed::default();
        if !staged.is_empty() {
            let order = last_chunk_first(&staged);
            committed = self.cache.locked(|state| {
                state.tell_time(now);
                state.commit_leased(&staged, order, &mut hold)
            });
        }
        (committed, ReadLease::new(self.cache.clone(), hold))
    }

    /// Gives the memory back; the same as dropping.
    pub fn abort(self) {}
}

impl<A: ExtentAllocator> Drop for Reservation<A> {
    fn drop(&mut self) {
        if !self.staged.is_empty() {
            self.cache.locked(|state| {
                for staged in &self.staged {
                    state.abort(staged.slot);
                }
            });
        }
    }
}

/// The order in which staged objects become resident: the last chunk of all requests first, because it is worth
/// least without the others and should be the first to leave.
fn last_chunk_first(staged: &[Staged]) -> impl Iterator<Item = usize> + use<> {
    let one_request =
        staged.first().map(|first| first.request) == staged.last().map(|last| last.request);
    let mut order = Vec::new();
    if !one_request {
        order.extend(0..staged.len());
        order.sort_by_key(|&at| Reverse(staged[at].position));
    }
    let reversed = if one_request { staged.len() } else { 0 };
    order.into_iter().chain((0..reversed).rev())
}
