//! Lookups in flight: what each request found and still holds.
//!
//! A lookup belongs to its request, its scope (model, workers, tenant) and its scheduler's connection, so equal request
//! ids of two engines or tenants never meet. A scheduler that has reconnected finds its lookups again: they are those of
//! connections that have been silent since its own first word. What a lookup holds is released when its workers have
//! read it, when the scheduler frees it, when the session ends, when the scheduler's connection is dead, and in the end
//! by age. A running transfer has a lease of its own, so none of these releases memory under it.
//!
//! The mutex guards the table. Leases are dropped, and so the cache's lock is taken, after it or inside it, never around it.

mod table;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvtier_common::sync::Mutex;
use kvtier_core::cache::PrefixLease;
use kvtier_core::object_key::KeyScope;
use kvtier_core::prefetch::Cell;
use kvtier_core::segments::{SegmentMatch, SegmentScope};
use kvtier_core::{ChunkHash, Namespace};
use kvtier_proto::request::InstanceId;
use tokio::sync::watch;

use super::super::blend::LeasedSegments;
use super::super::sessions::table::AtEnd;
use kvtier_store::l1::L1Allocator;
use kvtier_store::tiers::Prefetched;
use table::{HeldRow, HeldTable, covered, same_scope};

/// Lookups kept at most; the oldest go first. An engine has as many as it has requests waiting or running.
const MAX_LOOKUPS: usize = 65_536;

/// Objects that all lookups together may hold, and chunks that they missed; each costs some 50 bytes here. Beyond it the oldest lookups go first.
const MAX_HELD: usize = 16 << 20;

/// Reads of one lookup that are distinguished by their reader; a worker reads what was found at once, or in a few
/// parts.
const MAX_READERS: usize = 64;

/// The prefix that a lookup found, and the lease on what of it is still held.
pub struct HeldLookup {
    /// Model, workers and tenant.
    pub scope: KeyScope,
    /// Number of the scheduler's connection.
    pub connection: u64,
    /// Chunk hashes of the prompt.
    pub prompt: Arc<[ChunkHash]>,
    /// Chunks in the prefix that was found.
    pub hit_chunks: usize,
    /// The lease on it.
    pub lease: PrefixLease<L1Allocator>,
    /// Workers that will read each object.
    pub readers: u16,
    /// Whether the lease stays until the session ends: the client does not notice that a retrieve was refused.
    pub until_end: bool,
    /// Objects that were loaded into L1 for it.
    pub loaded: Vec<Cell>,
    /// When it was made, since start.
    pub created: Duration,
    /// What happens to its agent's session when it ends.
    pub at_end: Option<AtEnd>,
    /// Segments behind its prefix.
    pub segments: HeldSegments,
}

/// Segments behind the prefix of a lookup.
#[derive(Default)]
pub enum HeldSegments {
    /// No search has begun.
    #[default]
    Unknown,
    /// A task looks for them, while this lives.
    Pending(Weak<()>),
    /// What was found.
    Found(Arc<FoundSegments>),
}

/// Segments in the order of their prompt. They are leased for as long as this lives.
#[derive(Default)]
pub struct FoundSegments {
    /// Scope of the segments; `None` if there are none.
    pub scope: Option<SegmentScope>,
    pub matches: Vec<SegmentMatch>,
    /// The lease, counted.
    pub lease: Option<(PrefixLease<L1Allocator>, LeasedSegments)>,
}

/// What is known of the segments of a lookup.
pub enum SegmentsOutcome {
    /// Nothing: the caller looks for them, for the lookup of this serial. Others wait while the second lives.
    Unknown(u64, Arc<()>),
    /// The tiers are still being asked.
    Pending,
    /// What was found.
    Found(Arc<FoundSegments>),
}

impl HeldLookup {
    /// Chunk hashes of the prefix that was found.
    pub fn hashes(&self) -> &[ChunkHash] {
        &self.prompt[..self.hit_chunks]
    }
}

/// All lookups in flight.
#[derive(Default)]
pub struct HeldLookups {
    table: Mutex<HeldTable>,
}

/// Outcome of a lookup, as far as it is known.
pub enum LookupOutcome {
    /// No such lookup, or one that was reported already.
    Unknown,
    /// The tiers are still being asked. Closed once they were.
    Pending(watch::Receiver<()>),
    /// Chunks in the prefix that was found.
    Hit(usize),
}

impl HeldLookups {
    /// Notes that a scheduler is connected here.
    pub fn heard(&self, connection: u64) {
        self.table.lock().schedulers.heard(connection);
    }

    /// Sets the result of a pending lookup, of what lies behind the first `covered` chunks of the prompt. If the lookup was
    /// removed or freed, nothing happens.
    pub fn complete(&self, request_id: &str, serial: u64, covered: usize, mut result: Prefetched) {
        result.lookup.lease.shift(covered);
        for cell in &mut result.loaded {
            cell.chunk += covered;
        }
        let mut table = self.table.lock();
        let entries = table.by_request.get_mut(request_id);
        let entry = entries.and_then(|entries| {
            entries
                .iter_mut()
                .find(|entry| entry.serial == serial && entry.pending.is_some())
        });
        let Some(entry) = entry else {
            drop(table);
            drop(result);
            return;
        };
        let before = entry.objects();
        entry.pending = None;
        entry.lookup.hit_chunks = covered + result.lookup.hit_chunks;
        entry.lookup.loaded = result.loaded;
        let earlier = std::mem::replace(&mut entry.lookup.lease, result.lookup.lease);
        // A retrieve that did not wait for the result has been counted against the earlier lease.
        (entry.reads, entry.readers) = (Vec::new(), Vec::new());
        let after = entry.objects();
        table.held = table.held - before + after;
        drop(table);
        drop(earlier);
    }

    /// Inserts a lookup and returns its serial, for [`HeldLookups::complete`]. An earlier one of the same request, scope and
    /// connection is abandoned. Requests that wait for a pending result wake when the other end of `pending` is dropped.
    pub fn insert(
        &self,
        request_id: &str,
        lookup: HeldLookup,
        pending: Option<watch::Receiver<()>>,
    ) -> u64 {
        let mut table = self.table.lock();
        table.schedulers.heard(lookup.connection);
        let mut dropped = table.remove_where(request_id, |_, entry| {
            entry.lookup.connection == lookup.connection
                && same_scope(&entry.lookup.scope, &lookup.scope)
        });
        let serial = table.next_serial;
        table.next_serial += 1;
        table.len += 1;
        let entry = HeldRow {
            lookup,
            serial,
            unread: true,
            pending,
            reads: Vec::new(),
            readers: Vec::new(),
            freed: Vec::new(),
        };
        table.held += entry.objects();
        let request: Box<str> = request_id.into();
        table.ages.push_back((serial, request.clone()));
        table.by_request.entry(request).or_default().push(entry);
        table.trim_ages();
        while table.len > MAX_LOOKUPS || (table.held > MAX_HELD && table.len > 1) {
            let Some((oldest, request)) = table.ages.pop_front() else {
                break;
            };
            dropped.extend(table.remove_where(&request, |_, entry| entry.serial == oldest));
        }
        drop(table);
        drop(dropped);
        serial
    }

    /// The hit of a request's lookup, once.
    pub fn take_outcome(&self, request_id: &str, connection: u64) -> LookupOutcome {
        self.with_outcome(request_id, connection, |entry| {
            (entry.unread, entry.pending) = (false, None);
        })
    }

    /// The hit of a request's lookup, if it was not taken.
    pub fn outcome(&self, request_id: &str, connection: u64) -> LookupOutcome {
        self.with_outcome(request_id, connection, |_| {})
    }

    /// Whether the lookup of a request whose result was not taken is one of this prompt.
    pub fn is_of(&self, request_id: &str, connection: u64, hashes: &[ChunkHash]) -> bool {
        let mut table = self.table.lock();
        let entry = table.own(request_id, connection, |entry| entry.unread);
        entry.is_some_and(|entry| hashes.starts_with(&entry.lookup.prompt))
    }

    fn with_outcome(
        &self,
        request_id: &str,
        connection: u64,
        known: impl FnOnce(&mut HeldRow),
    ) -> LookupOutcome {
        let mut table = self.table.lock();
        table.schedulers.heard(connection);
        let Some(entry) = table.own(request_id, connection, |entry| entry.unread) else {
            return LookupOutcome::Unknown;
        };
        // The other end is dropped once the tiers were asked, or by a panic: then the result is what L1 had.
        let is_open = |pending: &&watch::Receiver<()>| pending.has_changed().is_ok();
        if let Some(pending) = entry.pending.as_ref().filter(is_open) {
            return LookupOutcome::Pending(pending.clone());
        }
        known(entry);
        LookupOutcome::Hit(entry.lookup.hit_chunks)
    }

    /// The segments of a request's lookup whose result is known and was not taken.
    pub fn segments(&self, request_id: &str, connection: u64) -> SegmentsOutcome {
        let mut table = self.table.lock();
        let Some(entry) = table.own(request_id, connection, |entry| entry.unread) else {
            return SegmentsOutcome::Found(Arc::default());
        };
        // A lookup that was refused has no rows.
        if entry.lookup.lease.rows().is_empty() {
            return SegmentsOutcome::Found(Arc::default());
        }
        match &entry.lookup.segments {
            HeldSegments::Found(found) => SegmentsOutcome::Found(Arc::clone(found)),
            HeldSegments::Pending(alive) if alive.strong_count() > 0 => SegmentsOutcome::Pending,
            // A panic has ended the search.
            HeldSegments::Pending(_) => SegmentsOutcome::Found(Arc::default()),
            HeldSegments::Unknown => {
                let alive = Arc::new(());
                entry.lookup.segments = HeldSegments::Pending(Arc::downgrade(&alive));
                SegmentsOutcome::Unknown(entry.serial, alive)
            }
        }
    }

    /// Sets the segments of a lookup. If it was removed, what they lease is released.
    pub fn set_segments(&self, request_id: &str, serial: u64, found: Arc<FoundSegments>) {
        let mut table = self.table.lock();
        let entries = table.by_request.get_mut(request_id);
        let mut entries = entries.into_iter().flatten();
        if let Some(entry) = entries.find(|entry| entry.serial == serial) {
            entry.lookup.segments = HeldSegments::Found(found);
        }
    }

    /// The segments that workers may read by the lookups of a request.
    pub fn segments_of(&self, request_id: &str, scope: &KeyScope) -> Vec<Arc<FoundSegments>> {
        let table = self.table.lock();
        let entries = table.by_request.get(request_id);
        let entries = entries.into_iter().flatten();
        let own = entries.filter(|entry| same_scope(&entry.lookup.scope, scope));
        let found = own.filter_map(|entry| match &entry.lookup.segments {
            HeldSegments::Found(found) => Some(Arc::clone(found)),
            _ => None,
        });
        found.collect()
    }

    /// The namespaces, one per object group, in which a worker of `kv_rank` and this layout may read these chunks by a
    /// request's lookup.
    ///
    /// The lookup must have found them, for the same tokens, and they must not have been freed. A worker may read
    /// twice: the second time it receives what is still there.
    pub fn grant(
        &self,
        request_id: &str,
        scope: &KeyScope,
        kv_rank: u64,
        layout: u64,
        hashes: &[ChunkHash],
        chunks: Range<usize>,
    ) -> Option<Vec<Arc<Namespace>>> {
        let mut table = self.table.lock();
        let freed = |entry: &HeldRow| {
            let freed = entry.freed.get(chunks.clone());
            freed.is_some_and(|freed| freed.contains(&true))
        };
        let lookup = table
            .readable(request_id, scope, hashes, &chunks)
            .find(|entry| chunks.end <= entry.lookup.hit_chunks && !freed(entry))
            .map(|entry| &entry.lookup)?;
        let namespaces = lookup.lease.rows().iter().map(|row| &row.namespace);
        let mine = namespaces.filter(|it| (it.kv_rank(), it.layout()) == (kv_rank, layout));
        let mine: Vec<_> = mine.cloned().collect();
        (!mine.is_empty()).then_some(mine)
    }

    /// Releases these chunks for one worker of `kv_rank`, whether it read them or not; the leases end with the last reader. A
    /// worker that is done with the same chunks again, as one that was refused and repeats its request, is still one reader.
    pub fn release(
        &self,
        worker: InstanceId,
        request_id: &str,
        scope: &KeyScope,
        kv_rank: u64,
        hashes: &[ChunkHash],
        chunks: Range<usize>,
    ) {
        let mut table = self.table.lock();
        let Some(entry) = table
            .readable(request_id, scope, hashes, &chunks)
            .find(|entry| !entry.lookup.lease.is_empty())
        else {
            return;
        };
        let width = entry.lookup.hit_chunks;
        // What lies behind the hit was never held.
        let chunks = covered(&chunks, width);
        if chunks.is_empty() {
            return;
        }
        if entry.lookup.readers > 1 {
            if entry.reads.is_empty() {
                entry.reads = vec![0; entry.lookup.lease.rows().len() * width];
            }
            let reader = (worker, kv_rank, chunks.clone());
            if entry.readers.contains(&reader) {
                return;
            }
            // Beyond that a reader may count twice: its lease is released too early, which costs a miss.
            if entry.readers.len() < MAX_READERS {
                entry.readers.push(reader);
            }
        }
        let mine: Vec<_> = (0..entry.lookup.lease.rows().len())
            .filter(|row| entry.lookup.lease.rows()[*row].namespace.kv_rank() == kv_rank)
            .collect();
        for row in mine {
            if entry.lookup.readers <= 1 {
                // One cache-lock for the range of a row; there is one row for each object group.
                entry
                    .lookup
                    .lease
                    .release_range(row..row + 1, chunks.clone());
                continue;
            }
            let reads = &mut entry.reads[row * width..][chunks.clone()];
            reads
                .iter_mut()
                .for_each(|reads| *reads = reads.saturating_add(1));
            let done: Vec<_> = reads
                .iter()
                .map(|reads| *reads >= entry.lookup.readers)
                .collect();
            let mut end = chunks.start;
            for run in done.chunk_by(|a, b| a == b) {
                let start = end;
                end += run.len();
                if run[0] {
                    entry.lookup.lease.release_range(row..row + 1, start..end);
                }
            }
        }
    }

    /// Frees chunks that the scheduler will not retrieve.
    pub fn free(&self, request_id: &str, connection: u64, scope: &KeyScope, chunks: Range<usize>) {
        if chunks.is_empty() {
            return;
        }
        let mut table = self.table.lock();
        table.schedulers.heard(connection);
        let Some(entry) = table.own(request_id, connection, |entry| {
            same_scope(&entry.lookup.scope, scope)
        }) else {
            return;
        };
        let hit = entry.lookup.hit_chunks;
        // No request will ask for the result of a pending one any more: nothing of it is needed, and nothing loaded.
        let chunks = match entry.pending.take() {
            Some(_) => 0..hit,
            None => chunks,
        };
        entry.unread = false;
        let rows = entry.lookup.lease.rows().len();
        entry.lookup.lease.release_range(0..rows, chunks.clone());
        entry.freed.resize(hit, false);
        entry.freed[covered(&chunks, hit)].fill(true);
    }

    /// Ends a request: returns its lookups, to be touched and dropped.
    pub fn end(&self, request_id: &str, connection: u64) -> Vec<HeldLookup> {
        let mut table = self.table.lock();
        table.schedulers.heard(connection);
        let ended = table.take_own(request_id, connection);
        table.trim_ages();
        ended.into_iter().map(|entry| entry.lookup).collect()
    }

    /// Removes the lookups of a request that continues.
    pub fn forget(&self, request_id: &str, connection: u64) {
        let mut table = self.table.lock();
        table.schedulers.heard(connection);
        let void = table.take_own(request_id, connection);
        drop(table);
        drop(void);
    }

    /// Removes the lookups that `which` selects; returns their number.
    pub fn remove_where(&self, mut which: impl FnMut(&HeldLookup) -> bool) -> usize {
        let mut dropped = Vec::new();
        let mut table = self.table.lock();
        table.by_request.retain(|_, entries| {
            dropped.extend(entries.extract_if(.., |entry| which(&entry.lookup)));
            !entries.is_empty()
        });
        table.forget(&dropped);
        table.trim_ages();
        drop(table);
        dropped.len()
    }

    /// Releases the leases of lookups made before `limit` and never read, but for those that last until the end; the
    /// lookups stay known.
    /// Returns the number of objects released.
    pub fn release_older(&self, limit: Duration) -> usize {
        let mut table = self.table.lock();
        let mut released = 0;
        for entry in table.by_request.values_mut().flatten() {
            let lookup = &entry.lookup;
            if lookup.created >= limit || lookup.until_end {
                continue;
            }
            if let HeldSegments::Found(found) = &entry.lookup.segments
                && let Some((lease, _)) = &found.lease
            {
                released += lease.held();
                entry.lookup.segments = HeldSegments::Found(Arc::default());
            }
            if !entry.lookup.lease.is_empty() {
                let (rows, hit) = (entry.lookup.lease.rows().len(), entry.lookup.hit_chunks);
                released += entry.lookup.lease.release_range(0..rows, 0..hit);
            }
        }
        released
    }

    /// The number of known lookups.
    pub fn len(&self) -> usize {
        self.table.lock().len
    }

    /// The number of known lookups, and of those whose result was never asked for.
    pub fn counts(&self) -> (usize, usize) {
        let table = self.table.lock();
        let unread = table
            .by_request
            .values()
            .flatten()
            .filter(|entry| entry.unread)
            .count();
        (table.len, unread)
    }
}
