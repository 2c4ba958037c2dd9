//! Prefetch: what L1 lacks of a prompt comes from the tiers.
//!
//! A lookup never waits for more than two deadlines, one for asking and one for loading; its answer is what L1 has by
//! then. Loads are tasks of their own: one that comes too late for its lookup still ends in L1.
//!
//! `reservation` guards the memory of a load, `landed` which objects have arrived; neither has a lock inside.

use std::collections::HashMap;
use std::sync::Arc;

use kvtier_common::sync::Mutex;
use kvtier_core::cache::{
    ChunkTokens, Counted, Extent, KeyOutcome, Lookup, ReadLease, Reservation, ReserveOptions,
    ReserveRequest, ReservedPrompt,
};
use kvtier_core::object_key::KeyScope;
use kvtier_core::prefetch::{Cell, PrefetchPlan};
use kvtier_core::{ChunkHash, GroupRow, ObjectKey};
use kvtier_l2::tier::TierLease;
use kvtier_l2::{ErrorKind, LoadItem, ObjectSpec};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::flights::{Claimed, Flight, over};
use super::{L2, LOAD_UNIT};
use crate::l1::L1Allocator;
use kvtier_observe::metrics::{PrefetchPhase, TierCall};
use kvtier_observe::trace::LookupSpan;

/// Chunks that are asked for first, and at most at once. The rest behind a gap is not asked for, and most prompts that
/// miss do so at their first chunk.
pub(super) const FIRST_SLICE: usize = 16;
pub(super) const LAST_SLICE: usize = 1024;

/// Bytes that are loaded by one task: several of them overlap, and each becomes readable on its own.
pub(super) const LOAD_BATCH: u64 = 16 << 20;

/// What a lookup asks for.
#[derive(Debug, Clone)]
pub struct PrefetchRequest {
    /// Scope of the objects.
    pub scope: KeyScope,
    /// Object groups and ranks.
    pub rows: Arc<[GroupRow]>,
    /// The chunks.
    pub hashes: Arc<[ChunkHash]>,
    /// Whether each chunk is an object of its own, and not only worth its prefix.
    pub is_object_keys: bool,
    /// Tokens of the chunks, if those that are loaded are to be announced.
    pub tokens: Option<Arc<ChunkTokens>>,
    /// What of its lookup is counted already.
    pub counted: Counted,
    /// Span of the lookup, if it is traced.
    pub span: Option<LookupSpan>,
}

/// What came of it.
pub struct Prefetched {
    /// The prefix that L1 has now, held.
    pub lookup: Lookup<L1Allocator>,
    /// The objects that were loaded for it.
    pub loaded: Vec<Cell>,
}

/// A tier that has an object, and the hold on it there.
type Source = (usize, TierLease);

/// Load buffer. An adapter may still write after its load was abandoned, so the adapter's holds keep the memory: when
/// the last of them is dropped, what was loaded is committed, and the rest released.
struct LoadBuffer {
    l2: Arc<L2>,
    reservation: Mutex<Option<Reservation<L1Allocator>>>,
    /// Whether each staged object has its bytes.
    landed: Mutex<Vec<bool>>,
    /// Part of the memory that may be loaded into at the same time.
    _permit: OwnedSemaphorePermit,
}

impl LoadBuffer {
    fn commit(&mut self) {
        let landed = std::mem::take(self.landed.get_mut());
        if let Some(reservation) = self.reservation.get_mut().take() {
            let mut landed = landed.into_iter();
            let _ = reservation.commit_subset(self.l2.now(), |_| landed.next().unwrap_or(false));
        }
    }
}

impl Drop for LoadBuffer {
    fn drop(&mut self) {
        self.commit();
    }
}

/// Destination of an object of a batch: its number among what is staged, and its memory.
type Destination = (usize, Extent);

/// A load of its own: the object, its source, and the sender that wakes the other requests for it.
struct LoadRequest {
    cell: Cell,
    object: ObjectSpec,
    source: Source,
    flight: Flight,
}

/// A prefetch for a lookup.
#[derive(Clone)]
pub(super) struct PromptPrefetch {
    pub(super) l2: Arc<L2>,
    pub(super) request: Arc<PrefetchRequest>,
}

impl PromptPrefetch {
    /// See [`L2::prefetch`].
    pub(super) async fn run(&self, cancelled: impl Fn() -> bool) -> Prefetched {
        let Self { l2, request } = self;
        let mut holds = Vec::new();
        let loaded = self.fetch(cancelled, &mut holds).await;
        let lookup =
            l2.cache
                .lookup_again(l2.now(), &request.rows, &request.hashes, request.counted);
        if let (Some(tokens), false) = (&request.tokens, loaded.is_empty()) {
            l2.cache.announce(&request.rows, &request.hashes, tokens);
        }
        Prefetched { lookup, loaded }
    }

    /// Asks the tiers, and loads what they have; returns what was loaded. What is resident is held in `holds`.
    pub(super) async fn fetch(
        &self,
        cancelled: impl Fn() -> bool,
        holds: &mut Vec<ReadLease<L1Allocator>>,
    ) -> Vec<Cell> {
        let Self { l2, request } = self;
        let asked_until = Instant::now() + l2.config().lookup_timeout;
        let mut loaded = Vec::new();
        let mut phase = l2.calls.queue();
        // A queue that does not move is the same as a tier that does not answer.
        let turn = timeout_at(asked_until, l2.lookups.acquire()).await;
        if turn.is_err() {
            self.timed_out(PrefetchPhase::Queue);
        }
        if let Ok(Ok(turn)) = turn
            && !cancelled()
        {
            phase.is_now(PrefetchPhase::Lookup);
            let (plan, mut sources) = self.ask(asked_until).await;
            // Loads are bounded by their bytes; a request that only asks need not wait for them.
            drop(turn);
            // No more than L1 can have: what is behind it would take the place of what is before.
            let capacity = if sources.is_empty() {
                0
            } else {
                l2.cache.capacity_for(&request.rows, &request.hashes)
            };
            let needed = plan.needed_within(capacity, |len| l2.cache.footprint([len]));
            let needed = needed.into_iter();
            let needed: Vec<_> = needed.map(|cell| (cell, sources.remove(&cell))).collect();
            let all = plan.needed_within(u64::MAX, |_| 1).into_iter();
            let beyond = all.filter(|cell| sources.contains_key(cell)).count();
            self.count_refused(&vec![KeyOutcome::NoMemory; beyond]);
            if needed.iter().any(|(_, source)| source.is_some()) {
                phase.is_now(PrefetchPhase::Load);
                let load_until = Instant::now() + l2.config().load_timeout;
                loaded = self.load(needed, load_until, holds).await;
            }
        }
        loaded
    }

    fn timed_out(&self, phase: PrefetchPhase) {
        self.l2.calls.metrics().l2.lookup_timed_out(phase);
    }

    /// Asks L1, and the tiers in turn for what is missing.
    async fn ask(&self, until: Instant) -> (PrefetchPlan, HashMap<Cell, Source>) {
        let Self { l2, request } = self;
        let chunks = request.hashes.len();
        let rows = Arc::clone(&request.rows);
        let mut plan = if request.is_object_keys {
            PrefetchPlan::of_each(rows, chunks)
        } else {
            PrefetchPlan::new(rows, chunks)
        };
        let (salt, mut missing) = (request.scope.cache_salt(), chunks * request.rows.len());
        for (row, GroupRow { namespace, .. }) in request.rows.iter().enumerate() {
            let resident = l2.cache.contains(namespace, &request.hashes);
            for (chunk, _) in resident.into_iter().enumerate().filter(|(_, is)| *is) {
                plan.found(Cell { row, chunk });
                missing -= 1;
            }
        }
        l2.calls.metrics().l2.asked(salt, missing);
        let mut is_late = false;
        let mut sources = HashMap::new();
        let mut slice = if request.is_object_keys {
            LAST_SLICE
        } else {
            FIRST_SLICE
        };
        let mut from = 0;
        while from < chunks {
            let asked = from..from + slice;
            (from, slice) = (asked.end, LAST_SLICE.min(4 * slice));
            for (number, tier) in l2.tiers.iter().enumerate() {
                let wanted = plan.wanted(asked.clone());
                let objects = objects(&request.rows, &request.hashes, &wanted);
                if objects.is_empty() {
                    break;
                }
                let (cells, objects): (Vec<_>, Vec<_>) = objects.into_iter().unzip();
                let call = TierCall::Lookup;
                let span = request.span.as_ref();
                let mut call = l2.calls.begin(call, number, salt, objects.len(), 0, span);
                let found = timeout_at(until, tier.lookup(objects)).await;
                if let Ok(Ok(found)) = &found {
                    call.found(found);
                }
                drop(call);
                let found = match found {
                    Ok(Ok(found)) => found,
                    Ok(Err(error)) => {
                        tracing::debug!(tier = tier.name(), %error, "a tier could not be asked");
                        continue;
                    }
                    Err(_) => {
                        tracing::debug!(tier = tier.name(), "a tier did not answer in time");
                        is_late = true;
                        continue;
                    }
                };
                for (cell, lease) in cells.into_iter().zip(found) {
                    if let Some(lease) = lease {
                        plan.found(cell);
                        sources.insert(cell, (number, lease));
                    }
                }
            }
        }
        if is_late {
            self.timed_out(PrefetchPhase::Lookup);
        }
        (plan, sources)
    }

    /// Holds on what of these objects is in L1.
    fn pin_cells(&self, cells: &[Cell]) -> Vec<ReadLease<L1Allocator>> {
        let Self { l2, request } = self;
        let rows = request.rows.iter().enumerate();
        rows.filter_map(|(number, row)| {
            let of_row = cells.iter().filter(|cell| cell.row == number);
            let hashes: Vec<_> = of_row.map(|cell| request.hashes[cell.chunk]).collect();
            l2.cache.lease(l2.now(), &row.namespace, &hashes)
        })
        .collect()
    }

    /// Loads the objects that have a source, or waits for other requests' loads; returns those that were loaded here. What
    /// is resident, or becomes so in time, is held in `holds`.
    ///
    /// Memory is reserved in the order of the chunks, and none behind a chunk that is refused.
    async fn load(
        &self,
        needed: Vec<(Cell, Option<Source>)>,
        until: Instant,
        holds: &mut Vec<ReadLease<L1Allocator>>,
    ) -> Vec<Cell> {
        let Self { l2, request } = self;
        let cells: Vec<_> = needed.iter().map(|(cell, _)| *cell).collect();
        let chunks = cells.last().map_or(0, |last| last.chunk + 1);
        let objects = objects(&request.rows, &request.hashes, &cells);
        let mut needed = objects.into_iter().zip(needed).peekable();
        let (mut tasks, mut joined) = (JoinSet::new(), Vec::new());
        let mut is_late = false;
        while needed.peek().is_some() {
            let (mut batch, mut resident, mut bytes) = (Vec::new(), Vec::new(), 0);
            while bytes < LOAD_BATCH
                && let Some(((cell, object), (_, source))) = needed.next()
            {
                let Some(source) = source else {
                    resident.push(cell);
                    continue;
                };
                match l2.flights.claim(&object) {
                    Claimed::Others(flight) => joined.push((cell, flight)),
                    Claimed::Own(flight) => {
                        bytes += object.len;
                        batch.push(LoadRequest {
                            cell,
                            object,
                            source,
                            flight,
                        });
                    }
                }
            }
            // Not evicted for the batches after this one.
            holds.extend(self.pin_cells(&resident));
            if batch.is_empty() {
                continue;
            }
            // A load that has not begun when its lookup times out does not begin: there may be many of them.
            let units = u32::try_from(bytes.div_ceil(LOAD_UNIT)).unwrap_or(u32::MAX);
            // An object larger than the whole capacity is loaded alone.
            let most = u32::try_from(l2.config().load_bytes / LOAD_UNIT).unwrap_or(u32::MAX);
            let permit = Arc::clone(&l2.loads).acquire_many_owned(units.clamp(1, most.max(1)));
            let Ok(Ok(permit)) = timeout_at(until, permit).await else {
                is_late = true;
                break;
            };
            let reserved = self.reserve_batch(chunks, &batch, permit);
            let Some((landing, extents, is_refused)) = reserved else {
                break;
            };
            let arrived = batch.iter().zip(&extents);
            let arrived = arrived.filter(|(_, place)| place.is_none());
            let arrived: Vec<_> = arrived.map(|(wanted, _)| wanted.cell).collect();
            holds.extend(self.pin_cells(&arrived));
            let prefetch = self.clone();
            tasks.spawn(async move {
                let cells = prefetch.load_batch(batch, landing, extents).await;
                let leases = prefetch.pin_cells(&cells);
                (cells, leases)
            });
            if is_refused {
                break;
            }
        }
        let mut loaded = Vec::new();
        // Loads that are late go on: what they give is worth having.
        while let Ok(Some(done)) = timeout_at(until, tasks.join_next()).await {
            if let Ok((cells, leases)) = done {
                loaded.extend(cells);
                holds.extend(leases);
            }
        }
        is_late |= !tasks.is_empty();
        tasks.detach_all();
        for (cell, flight) in joined {
            match timeout_at(until, over(flight)).await {
                Ok(()) => holds.extend(self.pin_cells(&[cell])),
                Err(_) => is_late = true,
            }
        }
        if is_late {
            self.timed_out(PrefetchPhase::Load);
        }
        loaded
    }

    /// Counts objects that are not loaded, as L1 has no memory for them.
    fn count_refused(&self, outcomes: &[KeyOutcome]) {
        let Self { l2, request } = self;
        let (model, salt) = (request.scope.model_name(), request.scope.cache_salt());
        let metrics = l2.calls.metrics();
        let [out_of_memory, over_quota] = metrics.reserved("l2_prefetch", model, salt, outcomes);
        for (reason, objects) in [("l1_oom", out_of_memory), ("over_quota", over_quota)] {
            if objects > 0 {
                metrics.l2.not_loaded(model, reason, objects);
            }
        }
    }

    /// Reserves memory for a batch of a prefix of `chunks` chunks; returns it, where each object of the batch goes (nowhere if it was
    /// refused, or became resident meanwhile), and whether one was refused.
    fn reserve_batch(
        &self,
        chunks: usize,
        batch: &[LoadRequest],
        permit: OwnedSemaphorePermit,
    ) -> Option<(Arc<LoadBuffer>, Vec<Option<Destination>>, bool)> {
        let Self { l2, request } = self;
        let of_row = |row| {
            let wanted = batch.iter().enumerate();
            let wanted = wanted.filter(move |(_, wanted)| wanted.cell.row == row);
            wanted
                .map(|(at, wanted)| (at, request.hashes[wanted.cell.chunk]))
                .unzip()
        };
        let by_row: Vec<(Vec<_>, Vec<_>)> = (0..request.rows.len()).map(of_row).collect();
        let requests = request.rows.iter().zip(&by_row);
        let requests: Vec<_> = requests
            .map(|(row, (_, hashes))| ReserveRequest {
                namespace: &row.namespace,
                hashes,
                len: row.object_bytes,
            })
            .collect();
        let options = ReserveOptions {
            prompt: Some(ReservedPrompt {
                rows: &request.rows,
                hashes: &request.hashes[..chunks],
                prefix: chunks,
            }),
            ..ReserveOptions::default()
        };
        let reserved = l2.cache.reserve_with(l2.now(), &requests, &options);
        let (reservation, is_refused) = match reserved {
            Ok(reserved) => {
                self.count_refused(&reserved.outcomes);
                let mut outcomes = reserved.outcomes.iter();
                let is_refused =
                    outcomes.any(|it| matches!(it, KeyOutcome::NoMemory | KeyOutcome::OverQuota));
                (reserved.reservation, is_refused)
            }
            Err(error) => {
                tracing::warn!(%error, "no memory could be asked for to load into");
                return None;
            }
        };
        let mut extents = vec![None; batch.len()];
        for (place, staged) in reservation.staged().iter().enumerate() {
            let (places, _) = &by_row[staged.request as usize];
            extents[places[staged.position as usize]] = Some((place, staged.extent));
        }
        let landing = Arc::new(LoadBuffer {
            l2: Arc::clone(l2),
            landed: Mutex::new(vec![false; reservation.len()]),
            reservation: Mutex::new(Some(reservation)),
            _permit: permit,
        });
        Some((landing, extents, is_refused))
    }

    /// Loads one batch into its memory; returns what has become resident by it.
    async fn load_batch(
        &self,
        batch: Vec<LoadRequest>,
        landing: Arc<LoadBuffer>,
        extents: Vec<Option<Destination>>,
    ) -> Vec<Cell> {
        let Self { l2, request } = self;
        let (model, salt) = (request.scope.model_name(), request.scope.cache_salt());
        let metrics = l2.calls.metrics();
        let mut flights = Vec::new();
        let mut by_tier: Vec<Vec<(usize, Cell, LoadItem, TierLease)>> =
            l2.tiers.iter().map(|_| Vec::new()).collect();
        for (wanted, place) in batch.into_iter().zip(extents) {
            flights.push(wanted.flight);
            let Some((place, extent)) = place else {
                continue;
            };
            let item = LoadItem {
                object: wanted.object,
                to: l2.buffer(extent, Arc::clone(&landing) as _),
            };
            let (tier, lease) = wanted.source;
            by_tier[tier].push((place, wanted.cell, item, lease));
        }
        let mut loaded = Vec::new();
        // What one tier fails to give, the next one is asked for.
        let mut failed = Vec::new();
        let mut reasons = Vec::new();
        for (number, (tier, mut wanted)) in l2.tiers.iter().zip(by_tier).enumerate() {
            wanted.append(&mut failed);
            if wanted.is_empty() {
                continue;
            }
            reasons.clear();
            let items: Vec<_> = wanted.iter().map(|(_, _, item, _)| item.clone()).collect();
            let lens: Vec<_> = items.iter().map(|item| item.object.len).collect();
            let (call, bytes) = (TierCall::Load, lens.iter().sum());
            let span = request.span.as_ref();
            let call = l2.calls.begin(call, number, salt, lens.len(), bytes, span);
            let results = tier.load(items).await;
            let read = lens
                .iter()
                .zip(&results)
                .filter(|(_, result)| result.is_ok());
            let (objects, bytes) = read.fold((0, 0), |(n, sum), (len, _)| (n + 1, sum + len));
            call.answered(salt, objects, bytes);
            for (wanted, result) in wanted.into_iter().zip(results) {
                match result {
                    Ok(_) => {
                        landing.landed.lock()[wanted.0] = true;
                        loaded.push(wanted.1);
                    }
                    Err(error) => {
                        tracing::debug!(tier = tier.name(), %error, "an object could not be loaded");
                        let reason = error.kind().name();
                        if error.kind() == ErrorKind::Deadline {
                            // It may still write to the memory, so no other load uses it.
                            metrics.l2.not_loaded(model, reason, 1);
                        } else {
                            reasons.push(reason);
                            failed.push(wanted);
                        }
                    }
                }
            }
        }
        for reason in reasons {
            metrics.l2.not_loaded(model, reason, 1);
        }
        drop(failed);
        // Commits, unless an adapter still writes for an abandoned load: then the end of that write commits.
        drop(landing);
        // Only now, so that the waiting requests find them.
        drop(flights);
        loaded
    }
}

/// The objects of these cells, as tiers name them.
pub(super) fn objects(
    rows: &[GroupRow],
    hashes: &[ChunkHash],
    cells: &[Cell],
) -> Vec<(Cell, ObjectSpec)> {
    let namespaces = rows.iter().map(|row| row.namespace.without_layout());
    let namespaces: Vec<_> = namespaces.collect();
    let object = |cell: &Cell| {
        let (row, hash) = (&rows[cell.row], hashes[cell.chunk]);
        let object = ObjectSpec {
            key: ObjectKey::of(&namespaces[cell.row], hash),
            len: row.object_bytes,
            layout: row.namespace.layout(),
        };
        (*cell, object)
    };
    cells.iter().map(object).collect()
}
