//! `lookup`: the longest prefix that every row can serve, held in the same moment.

use super::ExtentAllocator;
use super::lease::{Counted, HeldChunks};
use super::slab::SlotRef;
use super::state::CacheState;
use super::tenant::Tenants;
use crate::group_row::GroupRow;
use crate::hashing::ChunkHash;
use crate::window::{ChunkBitmap, needed};

/// Result of a lookup, allocated before the lock is taken.
pub(super) struct LookupBatch {
    pub(super) holds: Vec<HeldChunks>,
    /// Number of each row's namespace, if it is known.
    namespaces: Vec<Option<u32>>,
}

impl LookupBatch {
    pub(super) fn new(rows: &[GroupRow], chunks: usize) -> Self {
        let holds = rows.iter().map(|row| HeldChunks {
            start: 0,
            slots: Vec::with_capacity(needed(row.window, chunks).len()),
        });
        Self {
            holds: holds.collect(),
            namespaces: Vec::with_capacity(rows.len()),
        }
    }

    /// See [`super::Cache::find`].
    pub(super) fn find(
        &mut self,
        state: &mut CacheState<impl ExtentAllocator>,
        rows: &[GroupRow],
        hashes: &[ChunkHash],
        found: &mut ChunkBitmap,
    ) -> usize {
        let Self { holds, namespaces } = self;
        namespaces.extend(rows.iter().map(|row| state.namespaces.find(&row.namespace)));
        let mut hit = 0;
        let asked = if rows.is_empty() { &[] } else { hashes };
        'each: for (position, hash) in asked.iter().enumerate() {
            for (hold, namespace) in holds.iter_mut().zip(&*namespaces) {
                let number = namespace.and_then(|namespace| state.find(namespace, hash));
                let Some(number) = number else {
                    // What one row lacks, none is to hold.
                    holds.iter_mut().for_each(|hold| hold.slots.truncate(hit));
                    continue 'each;
                };
                hold.slots.push(state.slab.reference(number));
            }
            found.set(position);
            hit += 1;
        }
        for reference in holds.iter().flat_map(|hold| &hold.slots) {
            state.lease(reference.slot);
        }
        hit
    }

    /// See [`super::Cache::lookup`]. Examines only chunks that can still matter: full-attention rows from the front
    /// to the first gap, the others from the end of the remaining prefix, each chunk of a row at most once.
    pub(super) fn lookup(
        &mut self,
        state: &mut CacheState<impl ExtentAllocator>,
        rows: &[GroupRow],
        hashes: &[ChunkHash],
    ) -> usize {
        let Self { holds, namespaces } = self;
        namespaces.extend(rows.iter().map(|row| state.namespaces.find(&row.namespace)));
        let mut hit = if rows.is_empty() { 0 } else { hashes.len() };
        for ((row, hold), namespace) in rows.iter().zip(&mut *holds).zip(&*namespaces) {
            if row.window.is_none() {
                let found = hashes[..hit].iter().map_while(|hash| {
                    let number = state.find((*namespace)?, hash)?;
                    Some(state.slab.reference(number))
                });
                hold.slots.extend(found);
                hit = hold.slots.len();
            }
        }
        // Rows with a window are checked in turn until all of them agree on the same length: an absent chunk
        // within a row's window rules out every length that ends above it.
        let (mut agreed, mut turn) = (0, 0);
        while hit > 0 && agreed < rows.len() {
            let absent = rows[turn].window.and_then(|_| {
                let from = needed(rows[turn].window, hit).start;
                let (namespace, hold) = (namespaces[turn], &mut holds[turn]);
                absent(state, namespace, &hashes[..hit], from, hold)
            });
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
                state.lease(reference.slot);
            }
        }
        hit
    }
}

/// See [`super::Cache::capacity_for`].
pub(super) fn capacity_for(
    state: &CacheState<impl ExtentAllocator>,
    rows: &[GroupRow],
    hashes: &[ChunkHash],
) -> u64 {
    let found = rows.iter().flat_map(|row| {
        let namespace = state.namespaces.find(&row.namespace);
        let found = hashes.iter().map(move |hash| state.find(namespace?, hash));
        found.flatten()
    });
    let leased = found.filter(|number| state.slab.at(*number).leases > 0);
    let own: u64 = leased.map(|number| state.footprint(number)).sum();
    let fixed = state.counters.staged.bytes + state.counters.doomed.bytes + state.leased.bytes;
    let free = state.allocator.capacity().saturating_sub(fixed);
    let salt = rows.first().map(|row| row.namespace.cache_salt());
    let tenant = salt.and_then(|salt| state.namespaces.tenants.find(salt));
    let within_limit = tenant.map_or(u64::MAX, |number| within_limit(state, number));
    free.min(within_limit) + own
}

/// Bytes that a strict limit allows a tenant beside what may not be evicted of it.
fn within_limit(state: &CacheState<impl ExtentAllocator>, number: u32) -> u64 {
    let tenants = &state.namespaces.tenants;
    match (tenants.strict_limit(number), tenants.get(number)) {
        (Some(limit), Some(tenant)) => limit.saturating_sub(tenant.bytes() - tenant.evictable()),
        _ => u64::MAX,
    }
}

/// The last absent chunk in `from..hashes.len()` of a row. While searching, `hold.slots` are the chunks known
/// to be present that end at `hold.start`, the last one first.
fn absent(
    state: &CacheState<impl ExtentAllocator>,
    namespace: Option<u32>,
    hashes: &[ChunkHash],
    from: usize,
    hold: &mut HeldChunks,
) -> Option<usize> {
    let mut first = hold.start - hold.slots.len();
    if hashes.len() <= first || hold.slots.is_empty() {
        hold.slots.clear();
        first = hashes.len();
        hold.start = first;
    }
    while first > from {
        first -= 1;
        match namespace.and_then(|namespace| state.find(namespace, &hashes[first])) {
            Some(number) => hold.slots.push(state.slab.reference(number)),
            None => {
                hold.slots.clear();
                return Some(first);
            }
        }
    }
    None
}

/// Counts a lookup, also for its tenant if that is known.
pub(super) fn count(
    state: &mut CacheState<impl ExtentAllocator>,
    rows: &[GroupRow],
    requested: usize,
    hit: usize,
) -> Counted {
    state.totals.lookups += 1;
    state.totals.requested_chunks += requested as u64;
    state.totals.hit_chunks += hit as u64;
    Counted {
        hit_chunks: hit,
        for_tenant: count_for_tenant(&mut state.namespaces.tenants, rows, requested, hit),
    }
}

/// Counts what a repeated lookup found beyond the first.
pub(super) fn count_again(
    state: &mut CacheState<impl ExtentAllocator>,
    rows: &[GroupRow],
    requested: usize,
    hit: usize,
    before: Counted,
) -> Counted {
    let more = hit.saturating_sub(before.hit_chunks);
    state.totals.hit_chunks += more as u64;
    let for_tenant = if before.for_tenant {
        count_for_tenant(&mut state.namespaces.tenants, rows, 0, more)
    } else {
        count_for_tenant(&mut state.namespaces.tenants, rows, requested, hit)
    };
    Counted {
        hit_chunks: hit,
        for_tenant: before.for_tenant || for_tenant,
    }
}

/// Counts a lookup for its tenant; returns whether that is known.
fn count_for_tenant(
    tenants: &mut Tenants,
    rows: &[GroupRow],
    requested: usize,
    hit: usize,
) -> bool {
    let salt = rows.first().map(|row| row.namespace.cache_salt());
    let number = salt.and_then(|salt| tenants.find(salt));
    let Some(tenant) = number.and_then(|number| tenants.get_mut(number)) else {
        return false;
    };
    tenant.totals.requested_chunks += requested as u64;
    tenant.totals.hit_chunks += hit as u64;
    true
}

/// Leases all these objects, or none of them: fills in their slots, in order. Returns whether they are leased.
pub(super) fn lease_all<A: ExtentAllocator>(
    state: &mut CacheState<A>,
    namespace: u32,
    hashes: &[ChunkHash],
    one: fn(&mut CacheState<A>, u32) -> SlotRef,
    slots: &mut Vec<SlotRef>,
) -> bool {
    for hash in hashes {
        match state.find(namespace, hash) {
            Some(number) => slots.push(state.slab.reference(number)),
            None => return false,
        }
    }
    for reference in slots {
        one(state, reference.slot);
    }
    true
}
