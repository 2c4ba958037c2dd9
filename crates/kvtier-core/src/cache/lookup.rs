//! `lookup`: the longest prefix that every row can serve, held in the same moment.

use super::ExtentAllocator;
use super::lease::{Counted, LookupRow, RowHold};
use super::slab::SlotRef;
use super::state::State;
use super::tenant::Tenant;
use crate::hashing::ChunkHash;
use crate::window::needed;

/// What a lookup fills in; its memory is there before the lock is taken.
pub(super) struct LookupBatch {
    pub(super) holds: Vec<RowHold>,
    /// Each row's space, if it is known.
    spaces: Vec<Option<u32>>,
}

impl LookupBatch {
    pub(super) fn new(rows: &[LookupRow<'_>], chunks: usize) -> Self {
        let holds = rows.iter().map(|row| RowHold {
            start: 0,
            slots: Vec::with_capacity(needed(row.window, chunks).len()),
        });
        Self {
            holds: holds.collect(),
            spaces: Vec::with_capacity(rows.len()),
        }
    }
}

impl<A: ExtentAllocator> State<A> {
    /// See [`super::Cache::lookup`]. Looks only at chunks that can still matter: full-attention rows from the front
    /// to the first gap, the others from the end of what is left, each chunk of a row at most once.
    pub(super) fn lookup(
        &mut self,
        rows: &[LookupRow<'_>],
        hashes: &[ChunkHash],
        batch: &mut LookupBatch,
    ) -> usize {
        let LookupBatch { holds, spaces } = batch;
        spaces.extend(rows.iter().map(|row| self.spaces.find(&row.space)));
        let mut hit = if rows.is_empty() { 0 } else { hashes.len() };
        for ((row, hold), space) in rows.iter().zip(&mut *holds).zip(&*spaces) {
            if row.window.is_none() {
                let found = hashes[..hit].iter().map_while(|hash| {
                    let number = self.find((*space)?, hash)?;
                    Some(self.slab.reference(number))
                });
                hold.slots.extend(found);
                hit = hold.slots.len();
            }
        }
        // Rows with a window are asked in turn until all of them have agreed to the same length: an absent chunk
        // within a row's window rules out every length that ends above it.
        let (mut agreed, mut turn) = (0, 0);
        while hit > 0 && agreed < rows.len() {
            let absent = match rows[turn].window {
                None => None,
                Some(_) => {
                    let from = needed(rows[turn].window, hit).start;
                    self.absent(spaces[turn], &hashes[..hit], from, &mut holds[turn])
                }
            };
            turn = (turn + 1) % rows.len();
            match absent {
                Some(chunk) => (hit, agreed) = (chunk, 0),
                None => agreed += 1,
            }
        }
        for (row, hold) in rows.iter().zip(&mut *holds) {
            let needed = needed(row.window, hit);
            if row.window.is_some() && hit > 0 {
                // Found from the end to the front, from a length that may have been too long.
                hold.slots.drain(..hold.start - hit);
                hold.slots.truncate(needed.len());
                hold.slots.reverse();
            } else {
                hold.slots.truncate(hit);
            }
            hold.start = needed.start;
            for reference in &hold.slots {
                self.pin(reference.slot);
            }
        }
        hit
    }

    /// The last absent chunk in `from..hashes.len()` of a row. While searching, `hold.slots` are the chunks known
    /// to be present that end at `hold.start`, the last one first.
    fn absent(
        &self,
        space: Option<u32>,
        hashes: &[ChunkHash],
        from: usize,
        hold: &mut RowHold,
    ) -> Option<usize> {
        let mut first = hold.start - hold.slots.len();
        if hashes.len() <= first || hold.slots.is_empty() {
            hold.slots.clear();
            first = hashes.len();
            hold.start = first;
        }
        while first > from {
            first -= 1;
            match space.and_then(|space| self.find(space, &hashes[first])) {
                Some(number) => hold.slots.push(self.slab.reference(number)),
                None => {
                    hold.slots.clear();
                    return Some(first);
                }
            }
        }
        None
    }

    /// Counts a lookup, also for its tenant if that is known.
    pub(super) fn count_lookup(
        &mut self,
        rows: &[LookupRow<'_>],
        requested: usize,
        hit: usize,
    ) -> Counted {
        self.totals.lookups += 1;
        self.totals.requested_chunks += requested as u64;
        self.totals.hit_chunks += hit as u64;
        Counted {
            hit_chunks: hit,
            for_tenant: self.count_for_tenant(rows, requested, hit),
        }
    }

    /// Counts what a lookup found that was counted before.
    pub(super) fn count_again(
        &mut self,
        rows: &[LookupRow<'_>],
        requested: usize,
        hit: usize,
        before: Counted,
    ) -> Counted {
        let more = hit.saturating_sub(before.hit_chunks);
        self.totals.hit_chunks += more as u64;
        let for_tenant = match before.for_tenant {
            true => self.count_for_tenant(rows, 0, more),
            false => self.count_for_tenant(rows, requested, hit),
        };
        Counted {
            hit_chunks: hit,
            for_tenant: before.for_tenant || for_tenant,
        }
    }

    /// Whether the tenant is known.
    fn count_for_tenant(&mut self, rows: &[LookupRow<'_>], requested: usize, hit: usize) -> bool {
        let Some(tenant) = self.tenant_of(rows) else {
            return false;
        };
        tenant.totals.requested_chunks += requested as u64;
        tenant.totals.hit_chunks += hit as u64;
        true
    }

    fn tenant_of(&mut self, rows: &[LookupRow<'_>]) -> Option<&mut Tenant> {
        let tenants = &mut self.spaces.tenants;
        let number = tenants.find(rows.first()?.space.cache_salt)?;
        tenants.get_mut(number)
    }

    /// A lease on all these objects, or on none: fills in their slots, in order.
    pub(super) fn lease_all(
        &mut self,
        space: u32,
        hashes: &[ChunkHash],
        one: fn(&mut Self, u32) -> SlotRef,
        slots: &mut Vec<SlotRef>,
    ) -> bool {
        for hash in hashes {
            match self.find(space, hash) {
                Some(number) => slots.push(self.slab.reference(number)),
                None => return false,
            }
        }
        for reference in slots {
            one(self, reference.slot);
        }
        true
    }
}
