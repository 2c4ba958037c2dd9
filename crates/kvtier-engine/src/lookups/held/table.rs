//! The table of lookups by request, age and scheduler. Knows nothing of locks.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use kvtier_core::ChunkHash;
use kvtier_core::object_key::KeyScope;
use kvtier_proto::request::InstanceId;
use tokio::sync::watch;

use super::HeldLookup;

/// Scheduler connections remembered; an engine has one.
const MAX_SCHEDULERS: usize = 16_384;

pub(super) struct HeldRow {
    pub(super) lookup: HeldLookup,
    /// Age order; also tells a newer lookup of the same request apart.
    pub(super) serial: u64,
    /// The result was not asked for yet.
    pub(super) unread: bool,
    /// The tiers are still being asked; closed once they were.
    pub(super) pending: Option<watch::Receiver<()>>,
    /// Reads so far, by row and chunk; made at the first read of an object that has several readers.
    pub(super) reads: Vec<u16>,
    /// Readers that have been counted there, with their ranks and chunks.
    pub(super) readers: Vec<(InstanceId, u64, Range<usize>)>,
    /// Chunks of the hit that the scheduler has freed: no retrieve may have them any more. Made at the first free.
    pub(super) freed: Vec<bool>,
}

impl HeldRow {
    /// Objects it was made for, whether still held or not, and the chunks behind them.
    pub(super) fn objects(&self) -> usize {
        let HeldLookup {
            hit_chunks,
            lease,
            prompt,
            ..
        } = &self.lookup;
        lease.rows().len() * hit_chunks + (prompt.len() - hit_chunks)
    }
}

#[derive(Default)]
pub(super) struct HeldTable {
    pub(super) by_request: HashMap<Box<str>, Vec<HeldRow>>,
    /// Serial and request, oldest first; entries that were removed already are skipped.
    pub(super) ages: VecDeque<(u64, Box<str>)>,
    pub(super) next_serial: u64,
    pub(super) len: usize,
    /// Sum of [`HeldRow::objects`].
    pub(super) held: usize,
    pub(super) schedulers: Schedulers,
}

/// Times of the schedulers' connections, as numbers of their requests.
#[derive(Default)]
pub(super) struct Schedulers {
    /// The first and the last request of each connection.
    heard: HashMap<u64, (u64, u64)>,
    /// Number of the last request.
    requests: u64,
}

impl Schedulers {
    /// Counts a request.
    pub(super) fn heard(&mut self, connection: u64) {
        self.requests += 1;
        let request = self.requests;
        self.heard.entry(connection).or_insert((request, request)).1 = request;
        if self.heard.len() > MAX_SCHEDULERS {
            // The longest silent half; a forgotten scheduler counts as silent.
            let mut last: Vec<_> = self.heard.values().map(|(_, last)| *last).collect();
            let (_, &mut middle, _) = last.select_nth_unstable(MAX_SCHEDULERS / 2);
            self.heard.retain(|_, (_, last)| *last > middle);
        }
    }

    /// Whether `earlier` may be where the scheduler of `connection` was before it reconnected.
    pub(super) fn followed(&self, earlier: u64, connection: u64) -> bool {
        let first = self.heard.get(&connection).map_or(0, |(first, _)| *first);
        self.heard
            .get(&earlier)
            .is_none_or(|(_, last)| *last < first)
    }
}

impl HeldTable {
    pub(super) fn remove_where(
        &mut self,
        request_id: &str,
        which: impl Fn(&Schedulers, &HeldRow) -> bool,
    ) -> Vec<HeldRow> {
        let Some(entries) = self.by_request.get_mut(request_id) else {
            return Vec::new();
        };
        let taken: Vec<_> = entries
            .extract_if(.., |entry| which(&self.schedulers, entry))
            .collect();
        if entries.is_empty() {
            self.by_request.remove(request_id);
        }
        self.forget(&taken);
        taken
    }

    /// Removes and returns the lookups of a request of the scheduler on `connection`.
    pub(super) fn take_own(&mut self, request_id: &str, connection: u64) -> Vec<HeldRow> {
        let own = self.remove_where(request_id, |_, entry| entry.lookup.connection == connection);
        if !own.is_empty() {
            return own;
        }
        self.remove_where(request_id, |schedulers, entry| {
            schedulers.followed(entry.lookup.connection, connection)
        })
    }

    /// Takes entries out of the totals.
    pub(super) fn forget(&mut self, taken: &[HeldRow]) {
        self.len -= taken.len();
        self.held -= taken.iter().map(HeldRow::objects).sum::<usize>();
    }

    /// The lookups of a request that asked for the same tokens, as far as they found any of these chunks.
    pub(super) fn readable<'t>(
        &'t mut self,
        request_id: &str,
        scope: &KeyScope,
        hashes: &[ChunkHash],
        chunks: &Range<usize>,
    ) -> impl Iterator<Item = &'t mut HeldRow> {
        let entries = self.by_request.get_mut(request_id);
        entries.into_iter().flatten().filter(move |entry| {
            let found = entry.lookup.hashes();
            let chunks = covered(chunks, found.len());
            same_scope(&entry.lookup.scope, scope)
                && hashes.get(chunks.clone()) == found.get(chunks)
        })
    }

    /// The lookup of a request of the scheduler on `connection`.
    pub(super) fn own(
        &mut self,
        request_id: &str,
        connection: u64,
        matches: impl Fn(&HeldRow) -> bool,
    ) -> Option<&mut HeldRow> {
        let entries = self.by_request.get_mut(request_id)?;
        let schedulers = &self.schedulers;
        let own = |entry: &HeldRow| entry.lookup.connection == connection;
        let reconnected = !entries.iter().any(own);
        entries.iter_mut().find(|entry| {
            let meant = own(entry)
                || (reconnected && schedulers.followed(entry.lookup.connection, connection));
            meant && matches(entry)
        })
    }

    /// Drops removed lookups from the front of the age order, and from all of it once they are the greater part.
    pub(super) fn trim_ages(&mut self) {
        let alive = |by_request: &HashMap<Box<str>, Vec<HeldRow>>,
                     (serial, request): &(u64, Box<str>)| {
            by_request
                .get(request)
                .is_some_and(|entries| entries.iter().any(|entry| entry.serial == *serial))
        };
        while self
            .ages
            .front()
            .is_some_and(|age| !alive(&self.by_request, age))
        {
            self.ages.pop_front();
        }
        if self.ages.len() > 2 * self.len + 1024 {
            let by_request = &self.by_request;
            self.ages.retain(|age| alive(by_request, age));
        }
    }
}

/// The part of `chunks` that lies within the first `hit`.
pub(super) fn covered(chunks: &Range<usize>, hit: usize) -> Range<usize> {
    let end = chunks.end.min(hit);
    chunks.start.min(end)..end
}

/// Whether two scopes are of the same model, world and tenant; workers aside.
pub(super) fn same_scope(a: &KeyScope, b: &KeyScope) -> bool {
    a.model_name() == b.model_name()
        && a.world_size() == b.world_size()
        && a.cache_salt() == b.cache_salt()
}
