//! Reservations: memory of objects whose bytes are still being written.

use super::lease::OrderedHold;
use super::slab::SlotRef;
use super::state::CacheState;
use super::{Cache, Extent, ExtentAllocator, GrantOrigin, ReadLease};
use crate::hashing::ChunkHash;
use crate::object_key::Namespace;
use std::cmp::Reverse;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

/// Objects of one namespace and one size to reserve memory for.
#[derive(Clone, Copy, Debug)]
pub struct ReserveRequest<'a> {
    /// The objects' namespace.
    pub namespace: &'a Arc<Namespace>,
    /// The chunks, in prefix order.
    pub hashes: &'a [ChunkHash],
    /// Bytes of each object, at least 1.
    pub len: u64,
}

/// Outcome of one requested key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    /// The object is in the cache already; nothing to write.
    AlreadyResident,
    /// Memory is reserved.
    Reserved(Extent),
    /// No memory is free, and no eviction would free a range large enough.
    NoMemory,
    /// The tenant's limit is reached, and none of its objects may be evicted.
    OverQuota,
    /// The call may not reserve more: [`ReserveOptions::max_staged_bytes`](super::ReserveOptions::max_staged_bytes).
    OverStaging,
}

/// A `reserve` that was refused as a whole; nothing was reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// An object without bytes cannot be stored.
    #[error("len of reserve request {request} is 0: allowed is 1 or more bytes")]
    EmptyObject {
        /// Index of the request.
        request: usize,
    },
}

/// Result of a `reserve`.
#[derive(Debug)]
pub struct Reserved<A: ExtentAllocator> {
    /// The reserved memory; possibly none.
    pub reservation: Reservation<A>,
    /// Bytes that it takes, rounding included.
    pub bytes: u64,
    /// One outcome per key, in the order of the requests and their keys.
    pub outcomes: Vec<KeyOutcome>,
}

/// One object being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedObject {
    /// Index of its request.
    pub request: u32,
    /// Index in that request's hashes.
    pub position: u32,
    /// The memory for its bytes.
    pub extent: Extent,
    pub(super) slot: SlotRef,
}

/// Result of a commit, in objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// New in the cache.
    pub inserted: usize,
    /// Bytes of those.
    pub inserted_bytes: u64,
    /// Dropped, because the key had become resident meanwhile: the first writer wins.
    pub duplicates: usize,
    /// Aborted by `commit_subset`.
    pub aborted: usize,
}

impl Committed {
    /// Counts a staged object that was to be admitted: see [`CacheState::admit`].
    fn add(&mut self, state: &CacheState<impl ExtentAllocator>, admitted: Option<(u32, bool)>) {
        match admitted {
            Some((number, true)) => {
                self.inserted += 1;
                self.inserted_bytes += state.footprint(number);
            }
            _ => self.duplicates += 1,
        }
    }
}

/// Reserved memory, private to its holder until committed. Dropping it aborts.
#[must_use = "dropping a reservation frees its memory"]
#[derive(Debug)]
pub struct Reservation<A: ExtentAllocator> {
    cache: Cache<A>,
    staged: Vec<StagedObject>,
    evict_first: bool,
}

impl<A: ExtentAllocator> Reservation<A> {
    pub(super) fn new(cache: Cache<A>, staged: Vec<StagedObject>) -> Self {
        Self {
            cache,
            staged,
            evict_first: false,
        }
    }

    /// The objects to write, in the order of the requests.
    pub fn staged(&self) -> &[StagedObject] {
        &self.staged
    }

    /// The memory to write to, one extent per object, in the order of [`staged`](Self::staged).
    pub fn extents(&self) -> impl ExactSizeIterator<Item = Extent> + '_ {
        self.staged.iter().map(|staged| staged.extent)
    }

    /// Notes in the ledger that a client writes this memory by itself from `now` on, so that a next process keeps it from
    /// others. Call it before the client learns of the memory, and again while the client may write.
    pub fn grant(&self, now: Duration) {
        self.cache.locked(|state| {
            state.advance_clock(now);
            state.grant(self.staged.iter().map(|staged| staged.slot));
        });
    }

    /// The reservation in parts, one per grant.
    pub fn by_grant(mut self) -> Vec<(GrantOrigin, Self)> {
        let staged = mem::take(&mut self.staged);
        let slots = staged.iter().map(|staged| staged.slot);
        let grants = self.cache.locked(|state| state.by_grant(slots));
        let part = |at: Vec<usize>| at.into_iter().map(|at| staged[at]).collect();
        let grants = grants.into_iter();
        grants
            .map(|(origin, at)| (origin, Self::new(self.cache.clone(), part(at))))
            .collect()
    }

    /// Makes the reserved objects the first to be evicted, until they are used.
    pub fn evict_first(mut self) -> Self {
        self.evict_first = true;
        self
    }

    /// Number of objects to write.
    pub fn len(&self) -> usize {
        self.staged.len()
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.staged.is_empty()
    }

    /// Makes all objects resident. Their bytes must have been written.
    pub fn commit(self, now: Duration) -> Committed {
        self.commit_subset(now, |_| true)
    }

    /// Makes the objects resident that `keep` accepts, and aborts the others, in one step.
    pub fn commit_subset(
        mut self,
        now: Duration,
        keep: impl FnMut(&StagedObject) -> bool,
    ) -> Committed {
        let keep: Vec<bool> = self.staged.iter().map(keep).collect();
        let staged = mem::take(&mut self.staged);
        if staged.is_empty() {
            return Committed::default();
        }
        let order = last_chunk_first(&staged);
        self.cache.locked(|state| {
            state.advance_clock(now);
            let committed = admit_kept(state, &staged, order, &keep);
            if self.evict_first {
                state.evict_first(last_chunk_first(&staged).map(|at| staged[at].slot));
            }
            committed
        })
    }

    /// Makes all objects resident and leases them in the same step, so that none is evicted in between. If another writer
    /// was first, the lease is on that writer's object. The lease's order is that of [`staged`](Self::staged).
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
                state.advance_clock(now);
                let committed = admit_leased(state, &staged, order, &mut hold);
                if self.evict_first {
                    state.evict_first(last_chunk_first(&staged).map(|at| staged[at].slot));
                }
                committed
            });
        }
        (committed, ReadLease::new(self.cache.clone(), hold))
    }

    /// Frees the memory; the same as dropping.
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

/// The order in which staged objects become resident: the last chunk of all requests first, because it is worth least
/// without the others and should be evicted first.
fn last_chunk_first(staged: &[StagedObject]) -> impl Iterator<Item = usize> + use<> {
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

/// Admits the staged objects that `keep` marks and aborts the others, in this order.
fn admit_kept(
    state: &mut CacheState<impl ExtentAllocator>,
    staged: &[StagedObject],
    order: impl Iterator<Item = usize>,
    keep: &[bool],
) -> Committed {
    let mut committed = Committed::default();
    for at in order {
        if !keep[at] {
            state.abort(staged[at].slot);
            committed.aborted += 1;
            continue;
        }
        let admitted = state.admit(staged[at].slot);
        committed.add(state, admitted);
    }
    committed
}

/// Admits all staged objects and leases each key's resident object.
fn admit_leased(
    state: &mut CacheState<impl ExtentAllocator>,
    staged: &[StagedObject],
    order: impl Iterator<Item = usize>,
    hold: &mut OrderedHold,
) -> Committed {
    let mut committed = Committed::default();
    for at in order {
        let admitted = state.admit(staged[at].slot);
        if let Some((number, _)) = admitted {
            hold.slots[at] = state.hold(number);
            hold.extents[at] = state.slab.at(number).extent;
        }
        committed.add(state, admitted);
    }
    committed
}
