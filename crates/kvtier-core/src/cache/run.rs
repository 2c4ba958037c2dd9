//! Runs: adjoining free pieces and evictable objects, for an object that is larger than the next victim.
//!
//! The cheapest run found is evicted as a whole, so an eviction is never in vain. An object costs its bytes divided by
//! its idle time. Objects never move, so leased and staged ones are walls between runs, and pinned ones unless no run is found without.
//!
//! A run is the last resort: before, victims are evicted in policy order while little of the memory is free
//! (`MemoryDemand::by_run`), as recency predicts hits better than adjacency. Simulated with two models on 8 GiB, whose
//! objects are 1:4, 1:3.5, 1:32 and 1:3.3 in size, hit rates are within 0.8 points of evicting in policy order until a
//! large enough range is free, and 4 to 9 % more of the memory is in use at 1:32; placing large objects from the other end of the arena
//! gains nothing and refused some, so there are no size classes. `examples/fragmentation.rs`; figures in
//! `benches/runs/2026-11-22/fragmentation.tsv`.
//!
//! Work under the lock is bounded, for each reserved object:
//!
//! | step | most pieces |
//! | --- | --- |
//! | around each of the next [`SEEDS`] victims | 2 x [`REACH`], and less once they have the bytes |
//! | if none of them is in a run: from the end of the last such search | [`SWEEP`] |
//! | if that finds none, and objects are pinned: with these, from the end of that search | [`SWEEP`] |
//!
//! In an arena of up to [`SWEEP`] pieces a run is found if one exists; in a larger one by later searches.

use super::slab::SlotState;
use super::state::CacheState;
use super::{ArenaPiece, ExtentAllocator};
use std::ops::Range;

/// Victims whose neighbourhood is searched.
const SEEDS: usize = 8;
/// Pieces searched to each side of a victim.
const REACH: usize = 256;
/// Pieces searched in address order.
const SWEEP: usize = 4096;
/// Cost of a byte used just now.
const COST_SCALE: u64 = 256;

/// A piece that is free or can be freed.
#[derive(Clone, Copy, Debug)]
struct Movable {
    bytes: u64,
    /// The object to evict; `None` for a free piece.
    owner: Option<u32>,
    cost: u64,
}

/// Decides which pieces of one neighbourhood are movable for a store of one tenant.
struct Judge<'a, A> {
    state: &'a CacheState<A>,
    tenant: u32,
    /// Whether pinned objects are movable.
    with_pinned: bool,
    /// Tenants with a reserved share, and their bytes that may still be evicted beside those judged movable so far.
    shares: Vec<(u32, u64)>,
}

impl<A: ExtentAllocator> Judge<'_, A> {
    fn movable(&mut self, piece: ArenaPiece) -> Option<Movable> {
        let bytes = piece.extent.len;
        let Some(owner) = piece.owner else {
            return Some(Movable {
                bytes,
                owner: None,
                cost: 0,
            });
        };
        let slot = self.state.slab.at(owner);
        let is_kept = slot.leases > 0 || slot.is_pinned() && !self.with_pinned;
        if slot.state() != SlotState::Resident || is_kept || self.state.is_kept(owner) {
            return None;
        }
        self.take_share(self.state.namespaces.tenant_of(slot.namespace), bytes)?;
        let idle_ticks = self.state.clock.saturating_sub(slot.used_at);
        Some(Movable {
            bytes,
            owner: Some(owner),
            cost: bytes.saturating_mul(COST_SCALE) / (u64::from(idle_ticks) + 1),
        })
    }

    /// Takes an object's bytes from those that may be evicted of its tenant; `None` if its reserved share forbids it.
    fn take_share(&mut self, tenant: u32, bytes: u64) -> Option<()> {
        let owner = self.state.namespaces.tenants.get(tenant)?;
        let Some(unreserved) = owner.unreserved() else {
            return Some(());
        };
        if tenant == self.tenant || owner.is_over() {
            return Some(());
        }
        let at = self.shares.iter().position(|(known, _)| *known == tenant);
        let at = at.unwrap_or_else(|| {
            self.shares.push((tenant, unreserved));
            self.shares.len() - 1
        });
        let left = &mut self.shares[at].1;
        *left = left.checked_sub(bytes)?;
        Some(())
    }
}

/// Search for a run of `bytes` bytes, with the cheapest so far.
struct RunSearch {
    tenant: u32,
    bytes: u64,
    cost: u64,
    members: Option<Vec<u32>>,
}

impl RunSearch {
    fn new(tenant: u32, bytes: u64) -> Self {
        Self {
            tenant,
            bytes,
            cost: 0,
            members: None,
        }
    }

    /// Compares the shortest runs of a stretch of adjoining pieces; of equal ones the first is kept.
    fn compare(&mut self, stretch: &[Movable]) {
        let (mut start, mut bytes, mut cost) = (0, 0, 0);
        let mut found: Option<Range<usize>> = None;
        for (end, piece) in (1..).zip(stretch) {
            bytes += piece.bytes;
            cost += piece.cost;
            while bytes - stretch[start].bytes >= self.bytes {
                bytes -= stretch[start].bytes;
                cost -= stretch[start].cost;
                start += 1;
            }
            let is_first = self.members.is_none() && found.is_none();
            if bytes >= self.bytes && (is_first || cost < self.cost) {
                self.cost = cost;
                found = Some(start..end);
            }
        }
        if let Some(found) = found {
            let members = stretch[found].iter().filter_map(|piece| piece.owner);
            self.members = Some(members.collect());
        }
    }

    fn judge<'a, A>(&self, state: &'a CacheState<A>, with_pinned: bool) -> Judge<'a, A> {
        Judge {
            state,
            tenant: self.tenant,
            with_pinned,
            shares: Vec::new(),
        }
    }

    fn around(&mut self, state: &CacheState<impl ExtentAllocator>, seed: u32) {
        let offset = state.slab.at(seed).extent.offset;
        let mut judge = self.judge(state, false);
        // To the right of the seed, itself included, and to the left, each until it has enough bytes.
        let mut gather = |side: &mut Vec<Movable>, piece| {
            let Some(movable) = judge.movable(piece) else {
                return false;
            };
            side.push(movable);
            side.len() < REACH
        };
        let (mut stretch, mut right) = (Vec::new(), Vec::new());
        let mut missing = self.bytes;
        state.allocator.pieces_up(offset, &mut |piece| {
            missing = missing.saturating_sub(piece.extent.len);
            gather(&mut right, piece) && missing > 0
        });
        let mut missing = self.bytes;
        state.allocator.pieces_down(offset, &mut |piece| {
            missing = missing.saturating_sub(piece.extent.len);
            gather(&mut stretch, piece) && missing > 0
        });
        stretch.reverse();
        stretch.append(&mut right);
        self.compare(&stretch);
    }

    fn sweep(&mut self, state: &mut CacheState<impl ExtentAllocator>, with_pinned: bool) {
        let (first, end) = (state.hand, state.allocator.capacity());
        // Start of the current stretch, and of the next piece.
        let (mut start, mut at, mut left) = (first, first, SWEEP);
        while left > 0 && at < end {
            let mut judge = self.judge(state, with_pinned);
            let mut stretch = Vec::new();
            let part = at;
            start = at;
            state.allocator.pieces_up(part, &mut |piece| {
                at = piece.extent.offset + piece.extent.len;
                left -= 1;
                if let Some(movable) = judge.movable(piece) {
                    stretch.push(movable);
                } else {
                    self.compare(&stretch);
                    stretch.clear();
                    judge.shares.clear();
                    start = at;
                }
                left > 0
            });
            self.compare(&stretch);
            if at == part {
                break;
            }
        }
        state.hand = match at {
            at if at >= end || left > 0 => 0,
            at if start == first => at,
            _ => start,
        };
    }
}

/// Objects whose eviction leaves a free range of `bytes` bytes, in address order. `over`: the tenant over quota whose objects are
/// examined first.
pub(super) fn cheapest_run(
    state: &mut CacheState<impl ExtentAllocator>,
    tenant: u32,
    bytes: u64,
    over: Option<u32>,
) -> Option<Vec<u32>> {
    let mut search = RunSearch::new(tenant, bytes);
    for seed in seeds(state, tenant, over) {
        search.around(state, seed);
    }
    if search.members.is_none() {
        search.sweep(state, false);
    }
    search.members
}

/// Cheapest run that may have pinned objects, searched only if there are any.
#[cold]
pub(super) fn pinned_run(
    state: &mut CacheState<impl ExtentAllocator>,
    tenant: u32,
    bytes: u64,
) -> Option<Vec<u32>> {
    let mut search = RunSearch::new(tenant, bytes);
    if state.pinned.tally.objects > 0 {
        search.sweep(state, true);
    }
    search.members
}

/// The next victims, of the tenant over quota, else of the policy's choice, else of the storing tenant.
fn seeds(state: &mut CacheState<impl ExtentAllocator>, tenant: u32, over: Option<u32>) -> Vec<u32> {
    let source = over.or_else(|| state.policy.victim().is_none().then_some(tenant));
    let mut seeds = Vec::with_capacity(SEEDS);
    state.policy.upcoming(source, SEEDS, &mut seeds);
    seeds
}
