//! Runs: free pieces and evictable objects that adjoin, for an object that is larger than the next victim.
//!
//! The cheapest run found is evicted as a whole, so an eviction is never in vain. An object costs its bytes by how long
//! it has been idle. Objects never move, so leased and staged ones are walls between runs.
//!
//! A run is what an object falls back on: before, victims leave in policy order while little of the memory is free
//! (`State::make_hole_of_many`), as recency predicts hits better than adjacency. Simulated with two models on 8 GiB, whose
//! objects are 1:4, 1:3.5, 1:32 and 1:3.3 in size, hit rates are within 0.8 points of evicting in policy order until a
//! hole appears, and 4 to 9 % more of the memory is in use at 1:32; placing large objects from the other end of the arena
//! gains nothing and refused some, so there are no size classes. `examples/fragmentation.rs`; figures in
//! `benches/runs/2026-11-22/fragmentation.tsv`.
//!
//! Work under the lock is bounded, for each reserved object:
//!
//! | step | pieces at most |
//! | --- | --- |
//! | around each of the next [`SEEDS`] victims | 2 x [`REACH`], and less once they have the bytes |
//! | if none of them is in a run: onwards from where the last such search ended | [`SWEEP`] |
//!
//! In an arena of up to [`SWEEP`] pieces a run is found if there is one; in a larger one by later searches.

use super::ExtentAllocator;
use super::extent::Piece;
use super::room::NoRoom;
use super::slab::SlotState;
use super::state::State;
use std::ops::Range;

/// Victims whose neighbourhood is searched.
const SEEDS: usize = 8;
/// Pieces searched to each side of a victim.
const REACH: usize = 256;
/// Pieces searched in address order.
const SWEEP: usize = 4096;
/// Units of cost of a byte used right now.
const COST_SCALE: u64 = 256;

/// A piece that is free, or could be.
#[derive(Clone, Copy, Debug)]
struct Movable {
    bytes: u64,
    /// The object to evict; `None` if the piece is free.
    owner: Option<u32>,
    cost: u64,
}

/// Decides which pieces of one neighbourhood are movable for a store of one tenant.
struct Judge<'a, A> {
    state: &'a State<A>,
    salt: u32,
    /// Tenants with a reserved share, and their bytes that may leave beside those judged movable so far.
    shares: Vec<(u32, u64)>,
}

impl<A: ExtentAllocator> Judge<'_, A> {
    fn movable(&mut self, piece: Piece) -> Option<Movable> {
        let bytes = piece.extent.len;
        let Some(owner) = piece.owner else {
            return Some(Movable {
                bytes,
                owner: None,
                cost: 0,
            });
        };
        let slot = self.state.slab.at(owner);
        if slot.state() != SlotState::Resident || slot.leases > 0 {
            return None;
        }
        self.take_share(self.state.spaces.salt_of(slot.space), bytes)?;
        let idle_ticks = self.state.clock.saturating_sub(slot.used_at);
        Some(Movable {
            bytes,
            owner: Some(owner),
            cost: bytes.saturating_mul(COST_SCALE) / (u64::from(idle_ticks) + 1),
        })
    }

    /// Takes an object's bytes from what may leave of its tenant; `None` where its reserved share forbids it.
    fn take_share(&mut self, salt: u32, bytes: u64) -> Option<()> {
        let tenant = self.state.spaces.tenants.get(salt)?;
        let Some(unreserved) = tenant.unreserved() else {
            return Some(());
        };
        if salt == self.salt || tenant.is_over() {
            return Some(());
        }
        let at = self.shares.iter().position(|(known, _)| *known == salt);
        let at = at.unwrap_or_else(|| {
            self.shares.push((salt, unreserved));
            self.shares.len() - 1
        });
        let left = &mut self.shares[at].1;
        *left = left.checked_sub(bytes)?;
        Some(())
    }
}

/// The cheapest run so far.
struct Cheapest {
    bytes: u64,
    cost: u64,
    members: Option<Vec<u32>>,
}

impl Cheapest {
    /// Compares the shortest runs of a stretch of adjoining pieces; the first of equal ones stays.
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
}

impl<A: ExtentAllocator> State<A> {
    /// Objects whose eviction leaves a free range of `bytes` bytes, in order of address. `over`: the storing tenant if it
    /// is over its strict limit, so that its own objects are looked at first.
    pub(super) fn cheapest_run(
        &mut self,
        salt: u32,
        bytes: u64,
        over: Option<u32>,
    ) -> Result<Vec<u32>, NoRoom> {
        let mut cheapest = Cheapest {
            bytes,
            cost: 0,
            members: None,
        };
        for seed in self.seeds(salt, over) {
            self.search_around(seed, salt, &mut cheapest);
        }
        if cheapest.members.is_none() {
            self.sweep(salt, &mut cheapest);
        }
        cheapest.members.ok_or(NoRoom::Memory)
    }

    /// The next victims of the tenant that is to lose objects: one over its quota, or the policy's choice, or the storing
    /// tenant itself.
    fn seeds(&mut self, salt: u32, over: Option<u32>) -> Vec<u32> {
        let source = over
            .or_else(|| self.over_quota_for(salt))
            .or_else(|| self.policy.victim().is_none().then_some(salt));
        let mut seeds = Vec::with_capacity(SEEDS);
        self.policy.upcoming(source, SEEDS, &mut seeds);
        seeds
    }

    fn search_around(&self, seed: u32, salt: u32, cheapest: &mut Cheapest) {
        let offset = self.slab.at(seed).extent.offset;
        let mut judge = self.judge(salt);
        // From the seed on and left of it, each until it has the bytes by itself.
        let mut gather = |side: &mut Vec<Movable>, piece| {
            let Some(movable) = judge.movable(piece) else {
                return false;
            };
            side.push(movable);
            side.len() < REACH
        };
        let (mut stretch, mut right) = (Vec::new(), Vec::new());
        let mut missing = cheapest.bytes;
        self.allocator.pieces_up(offset, &mut |piece| {
            missing = missing.saturating_sub(piece.extent.len);
            gather(&mut right, piece) && missing > 0
        });
        let mut missing = cheapest.bytes;
        self.allocator.pieces_down(offset, &mut |piece| {
            missing = missing.saturating_sub(piece.extent.len);
            gather(&mut stretch, piece) && missing > 0
        });
        stretch.reverse();
        stretch.append(&mut right);
        cheapest.compare(&stretch);
    }

    fn sweep(&mut self, salt: u32, cheapest: &mut Cheapest) {
        let (first, end) = (self.hand, self.allocator.capacity());
        // Where the stretch that is being gathered starts, and where the next piece does.
        let (mut start, mut at, mut left) = (first, first, SWEEP);
        while left > 0 && at < end {
            let mut judge = self.judge(salt);
            let mut stretch = Vec::new();
            let part = at;
            start = at;
            self.allocator.pieces_up(part, &mut |piece| {
                at = piece.extent.offset + piece.extent.len;
                left -= 1;
                if let Some(movable) = judge.movable(piece) {
                    stretch.push(movable);
                } else {
                    cheapest.compare(&stretch);
                    stretch.clear();
                    judge.shares.clear();
                    start = at;
                }
                left > 0
            });
            cheapest.compare(&stretch);
            if at == part {
                break;
            }
        }
        self.hand = match at {
            at if at >= end || left > 0 => 0,
            at if start == first => at,
            _ => start,
        };
    }

    fn judge(&self, salt: u32) -> Judge<'_, A> {
        Judge {
            state: self,
            salt,
            shares: Vec::new(),
        }
    }
}
