//! Lookups in flight as the next process receives them.

use std::sync::Arc;
use std::time::Duration;

use kvtier_core::cache::{Cache, HeldRow};
use kvtier_core::object_key::KeyScope;
use kvtier_core::prefetch::Cell;
use kvtier_core::{ChunkHash, GroupRow};
use kvtier_error::{Error, Result};
use kvtier_l1::L1Allocator;
use kvtier_proto::request::InstanceId;
use serde::{Deserialize, Serialize};

use super::super::super::handed::millis;
use super::table::{Entry, Table};
use super::{HeldLookup, HeldLookups, MAX_LOOKUPS};

/// All lookups in flight.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LookupsState {
    /// Oldest first.
    pub lookups: Vec<LookupState>,
    /// Each scheduler's connection, and the numbers of its first and its last request.
    pub schedulers: Vec<(u64, u64, u64)>,
    /// Requests of all schedulers, which are numbered together.
    pub scheduler_requests: u64,
}

/// A lookup. Times are milliseconds before the hand-over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LookupState {
    pub request_id: String,
    pub connection: u64,
    pub model_name: String,
    pub cache_salt: String,
    pub world_size: u32,
    /// None for all workers.
    pub worker: Option<u32>,
    /// Of the prefix that was found.
    pub hashes: Vec<ChunkHash>,
    pub rows: Vec<RowState>,
    pub readers: u16,
    pub until_end: bool,
    pub age: u64,
    pub is_unread: bool,
    pub reads: Vec<u16>,
    /// Worker, rank, first chunk and the one behind the last.
    pub readers_so_far: Vec<(i64, u64, usize, usize)>,
    pub freed: Vec<bool>,
    /// Row and chunk of each object that was loaded for it.
    pub loaded: Vec<(usize, usize)>,
}

/// A row of a lookup, and the chunks that it leased.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowState {
    pub kv_rank: u64,
    pub object_group: u32,
    pub layout: u64,
    pub window: Option<u32>,
    pub object_bytes: u64,
    pub first_chunk: usize,
    /// Of each from there on, whether it is still held.
    pub held: Vec<bool>,
}

impl HeldLookups {
    /// Whether a lookup waits for a tier.
    pub fn are_waiting(&self) -> bool {
        let table = self.table.lock();
        table.by_request.values().flatten().any(Entry::is_waiting)
    }

    /// All lookups, for the next process.
    ///
    /// # Errors
    /// One still waits for a tier.
    pub fn state(&self, now: Duration) -> Result<LookupsState> {
        let table = self.table.lock();
        let mut entries: Vec<_> = table
            .by_request
            .iter()
            .flat_map(|(request, entries)| entries.iter().map(move |entry| (request, entry)))
            .collect();
        entries.sort_by_key(|(_, entry)| entry.serial);
        let lookups = entries.into_iter().map(|(request, entry)| {
            if entry.is_waiting() {
                return Err(Error::refused(format!(
                    "the lookup of request {request:?} still waits for a tier"
                )));
            }
            Ok(LookupState::of(request, entry, now))
        });
        Ok(LookupsState {
            lookups: lookups.collect::<Result<_>>()?,
            schedulers: table.schedulers.state(),
            scheduler_requests: table.schedulers.requests(),
        })
    }

    /// Goes on with the lookups of the earlier process.
    ///
    /// # Errors
    /// One names no key, or an object that is not there.
    pub fn resume(
        &self,
        state: &LookupsState,
        cache: &Cache<L1Allocator>,
        now: Duration,
    ) -> Result<()> {
        if state.lookups.len() > MAX_LOOKUPS {
            return Err(Error::refused(format!(
                "{} lookups; allowed: {MAX_LOOKUPS}",
                state.lookups.len()
            )));
        }
        let mut resumed = Table::default();
        resumed
            .schedulers
            .resume(&state.schedulers, state.scheduler_requests);
        for lookup in &state.lookups {
            let of =
                |error: Error| error.context(format!("lookup of request {:?}", lookup.request_id));
            let entry = lookup.resume(cache, now, resumed.next_serial).map_err(of)?;
            let request: Box<str> = lookup.request_id.as_str().into();
            resumed.next_serial += 1;
            resumed.len += 1;
            resumed.held += entry.objects();
            resumed.ages.push_back((entry.serial, request.clone()));
            resumed.by_request.entry(request).or_default().push(entry);
        }
        *self.table.lock() = resumed;
        Ok(())
    }
}

impl LookupState {
    fn of(request: &str, entry: &Entry, now: Duration) -> Self {
        let HeldLookup {
            scope,
            connection,
            lease,
            readers,
            until_end,
            created,
            loaded,
            ..
        } = &entry.lookup;
        let hashes = entry.lookup.hashes();
        let workers = scope.workers();
        let rows = lease.rows().iter().enumerate().map(|(at, row)| {
            let HeldRow { start, held } = lease.held_chunks(at);
            RowState {
                kv_rank: row.namespace.kv_rank(),
                object_group: row.namespace.object_group_id(),
                layout: row.namespace.layout(),
                window: row.window,
                object_bytes: row.object_bytes,
                first_chunk: start,
                held,
            }
        });
        let read = entry.readers.iter();
        // What lies behind the prefix has no effect any more.
        let loaded = loaded.iter().filter(|cell| cell.chunk < hashes.len());
        let loaded = loaded.map(|cell| (cell.row, cell.chunk));
        Self {
            request_id: request.into(),
            connection: *connection,
            model_name: scope.model_name().as_ref().into(),
            cache_salt: scope.cache_salt().as_ref().into(),
            world_size: scope.world_size(),
            worker: (workers != (0..scope.world_size())).then_some(workers.start),
            hashes: hashes.to_vec(),
            rows: rows.collect(),
            readers: *readers,
            until_end: *until_end,
            age: millis(now.saturating_sub(*created)),
            is_unread: entry.unread,
            reads: entry.reads.clone(),
            readers_so_far: read
                .map(|(worker, rank, chunks)| (worker.0, *rank, chunks.start, chunks.end))
                .collect(),
            freed: entry.freed.clone(),
            loaded: loaded.collect(),
        }
    }

    fn resume(&self, cache: &Cache<L1Allocator>, now: Duration, serial: u64) -> Result<Entry> {
        let scope = KeyScope::new(
            &self.model_name,
            &self.cache_salt,
            self.world_size,
            self.worker,
        );
        let scope = scope.map_err(Error::refused)?;
        let hashes: Arc<[ChunkHash]> = self.hashes.as_slice().into();
        let rows = self.rows.iter().map(|row| GroupRow {
            namespace: scope.namespace(row.kv_rank, row.object_group, row.layout),
            window: row.window,
            object_bytes: row.object_bytes,
        });
        let held = self.rows.iter().map(|row| HeldRow {
            start: row.first_chunk,
            held: row.held.clone(),
        });
        let held: Vec<_> = held.collect();
        let lease = cache.hold_rows(rows.collect(), &hashes, &held);
        let lease = lease.ok_or_else(|| Error::refused("it holds an object that is not in L1"))?;
        let objects = self.rows.len() * hashes.len();
        let fits = |len: usize, whole: usize| len == 0 || len == whole;
        let are_inside = self
            .readers_so_far
            .iter()
            .all(|(_, _, start, end)| start <= end && *end <= hashes.len());
        if !fits(self.reads.len(), objects) || !fits(self.freed.len(), hashes.len()) || !are_inside
        {
            return Err(Error::refused("what was read or freed of it is not in it"));
        }
        let is_there =
            |(row, chunk): &(usize, usize)| *row < self.rows.len() && *chunk < hashes.len();
        if !self.loaded.iter().all(is_there) {
            return Err(Error::refused("what was loaded for it is not in it"));
        }
        let loaded = self.loaded.iter();
        let loaded = loaded.map(|(row, chunk)| Cell {
            row: *row,
            chunk: *chunk,
        });
        let loaded = loaded.collect();
        let read = self.readers_so_far.iter();
        Ok(Entry {
            lookup: HeldLookup {
                scope,
                connection: self.connection,
                hit_chunks: hashes.len(),
                prompt: hashes,
                lease,
                readers: self.readers,
                until_end: self.until_end,
                loaded,
                created: now.saturating_sub(Duration::from_millis(self.age)),
            },
            serial,
            unread: self.is_unread,
            pending: None,
            reads: self.reads.clone(),
            readers: read
                .map(|(worker, rank, start, end)| (InstanceId(*worker), *rank, *start..*end))
                .collect(),
            freed: self.freed.clone(),
        })
    }
}
