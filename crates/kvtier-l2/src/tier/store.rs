//! Stores: bytes are reserved in the index, what was evicted for them is deleted, and then they are written.

use std::collections::BTreeSet;

use kvtier_common::sync::OutageLog;
use kvtier_core::cache::{ReadLease, Reservation};
use kvtier_core::object_key::ObjectKey;

use super::budget::ByteBudget;
use super::deletes::missing_result;
use super::eviction::{evict_some, evict_surplus, free_capacity, free_quota, pause_for_space};
use super::key_states::{Claim, UnsentBytes, WriteInFlight};
use super::{Adopted, LOG_INTERVAL, Tier};
use crate::adapter::Stored;
use crate::error::{ErrorKind, L2Error};
use crate::object::StoreItem;

/// Evictions for the objects of one store that a backend has no space for.
const MAX_EVICTIONS: usize = 4;

/// Result of the last store.
#[derive(Debug)]
pub(super) struct LastStore {
    /// Error of it, or of a part of it.
    pub(super) error: Option<L2Error>,
    log: OutageLog<ErrorKind>,
}

impl LastStore {
    pub(super) fn new() -> Self {
        Self {
            error: None,
            log: OutageLog::new(LOG_INTERVAL),
        }
    }
}

/// Free bytes of the backend, and the bytes whose writes had ended when they were read.
#[derive(Debug, Clone, Copy)]
struct BackendSpace {
    all: u64,
    /// Free bytes beyond the reserve.
    free: u64,
    ended: u64,
}

impl BackendSpace {
    /// Returns the backend's free space, after it has evicted for what of the batch does not fit.
    async fn make(tier: &Tier, batch: &[StoreItem]) -> Result<Self, L2Error> {
        if tier.is_strict() {
            tier.recovery.ended().await?;
        }
        let mut space = Self::read(tier).await?;
        for _ in 0..MAX_EVICTIONS {
            let missing = match space.free {
                u64::MAX => 0,
                free => {
                    let left = tier.states.left(free, space.ended);
                    absent_bytes(tier, batch).saturating_sub(left)
                }
            };
            // All that the tier has would not be enough: others have the space.
            let below_reserve = tier.config.reserve_bytes.saturating_sub(space.all);
            let is_in_vain = missing.saturating_add(below_reserve) > tier.index.usage().used_bytes;
            if missing == 0 || is_in_vain || !evict_some(tier, missing).await {
                break;
            }
            let before = std::mem::replace(&mut space, Self::read(tier).await?);
            if space.all <= before.all && pause_for_space(tier) {
                break;
            }
        }
        Ok(space)
    }

    async fn read(tier: &Tier) -> Result<Self, L2Error> {
        let ended = tier.states.ended_bytes();
        let all = tier.adapter.free_bytes().await?;
        let free = all.map(|all| all.saturating_sub(tier.config.reserve_bytes));
        Ok(Self {
            all: all.unwrap_or(u64::MAX),
            free: free.unwrap_or(u64::MAX),
            ended,
        })
    }
}

/// Progress of one object of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SendState {
    /// Not sent, or refused: it is not in the backend.
    No,
    /// Sent, and the outcome is unknown.
    Unanswered,
    /// In the backend.
    Done,
}

/// Bytes reserved for an object. If it is dropped after it was sent and before the answer, the object counts as stored,
/// since it may be in the backend.
struct PlannedStore<'a> {
    tier: &'a Tier,
    /// Position in the batch.
    position: usize,
    key: ObjectKey,
    bytes: u64,
    /// `None` if the key is indeterminate and in the index.
    reservation: Option<Reservation<ByteBudget>>,
    /// Keeps such a key in the index.
    _held: Option<ReadLease<ByteBudget>>,
    /// Bytes in the backend of an object whose pending delete was cancelled for this store.
    cancelled_delete: Option<u64>,
    sent: SendState,
    unsent: Option<UnsentBytes<'a>>,
    _write: WriteInFlight<'a>,
}

impl<'a> PlannedStore<'a> {
    /// Reserves bytes for an object, in the backend and in the index; `None` if it is there already.
    fn new(
        tier: &'a Tier,
        position: usize,
        item: &StoreItem,
        space_left: BackendSpace,
    ) -> Result<Option<Self>, L2Error> {
        item.from.check_len(item.object.len)?;
        let key = &item.object.key;
        let bytes = tier.adapter.size_of(item.object.len);
        let is_indeterminate = tier.states.is_indeterminate(key);
        let mut unsent = Some(tier.states.add_unsent(key.cache_salt(), bytes));
        if !is_indeterminate && tier.index.contains(key.namespace(), &[key.chunk_hash()])[0] {
            // Counts as used; unless it was evicted just now, it is there.
            if tier.reserve(key, bytes)?.is_none() {
                return Ok(None);
            }
        }
        // First, so that nothing is evicted in vain.
        let write = tier
            .states
            .start_write(bytes, space_left.free, space_left.ended);
        let write = write.map_err(|left| {
            L2Error::new(
                ErrorKind::Full,
                format!(
                    "{} has {left} bytes free beyond its reserve of {}, and {bytes} are needed",
                    tier.name(),
                    tier.config.reserve_bytes
                ),
            )
        })?;
        let (reservation, held) = loop {
            if let Some(reservation) = tier.reserve(key, bytes)? {
                break (Some(reservation), None);
            }
            if !is_indeterminate {
                return Ok(None);
            }
            let held = tier
                .index
                .hold(tier.now(), key.namespace(), &[key.chunk_hash()]);
            if held.is_some() {
                // The backend may have it already.
                unsent = None;
                break (None, held);
            }
        };
        Ok(Some(Self {
            tier,
            position,
            key: key.clone(),
            bytes,
            reservation,
            _held: held,
            cancelled_delete: None,
            sent: SendState::No,
            unsent,
            _write: write,
        }))
    }

    fn finish(mut self, result: &Result<Stored, L2Error>) {
        self.sent = match result {
            Ok(stored) => {
                if stored.bytes() != self.bytes {
                    self.bytes = stored.bytes();
                    drop(self.reservation.take());
                }
                SendState::Done
            }
            Err(error) if error.kind() == ErrorKind::Deadline => SendState::Unanswered,
            Err(_) => SendState::No,
        }
    }
}

impl Drop for PlannedStore<'_> {
    fn drop(&mut self) {
        let (tier, key) = (self.tier, &self.key);
        let reservation = self.reservation.take();
        if self.sent == SendState::No {
            if let Some(bytes) = self.cancelled_delete {
                tier.states.add_pending(|| vec![(key.clone(), bytes)]);
            }
            drop(reservation);
            return;
        }
        match self.sent {
            SendState::Done => tier.states.resolve(key),
            _ => tier.states.set_indeterminate(key),
        }
        match reservation {
            Some(reservation) => drop(reservation.commit(tier.now())),
            None if tier.insert(key, self.bytes) == Adopted::Indexed => {}
            None => tier.states.add_pending(|| vec![(key.clone(), self.bytes)]),
        }
    }
}

/// Objects of one store.
struct StoreBatch<'a> {
    tier: &'a Tier,
    staged: Vec<PlannedStore<'a>>,
    /// The item of each of them.
    items: Vec<StoreItem>,
    /// Results by position, as far as they are known.
    results: Vec<Option<Result<Stored, L2Error>>>,
}

impl<'a> StoreBatch<'a> {
    /// Stages the objects that are not there yet.
    fn new(tier: &'a Tier, batch: Vec<StoreItem>, free: BackendSpace) -> Self {
        let (mut staged, mut items) = (Vec::new(), Vec::new());
        let mut results = vec![None; batch.len()];
        for (position, item) in batch.into_iter().enumerate() {
            match PlannedStore::new(tier, position, &item, free) {
                Ok(Some(object)) => {
                    staged.push(object);
                    items.push(item);
                }
                Ok(None) => {
                    let bytes = tier.adapter.size_of(item.object.len);
                    results[position] = Some(Ok(Stored::AlreadyThere(bytes)));
                }
                Err(error) => results[position] = Some(Err(error)),
            }
        }
        tier.add_evicted();
        Self {
            tier,
            staged,
            items,
            results,
        }
    }

    fn refuse(&mut self, at: usize, kind: ErrorKind, message: impl Into<String>) {
        self.items.remove(at);
        let object = self.staged.remove(at);
        self.results[object.position] = Some(Err(L2Error::new(kind, message)));
    }

    /// Takes over the deletes of the objects. Refuses an object whose last delete may come yet.
    async fn claim(&mut self) {
        let mut at = 0;
        while let Some(object) = self.staged.get_mut(at) {
            match self.tier.states.claim(&object.key).await {
                Claim::Free => {}
                Claim::Cancelled(bytes) => object.cancelled_delete = Some(bytes),
                Claim::Refused => {
                    let message = "its last delete was not answered and may come yet";
                    self.refuse(at, ErrorKind::Unavailable, message);
                    continue;
                }
            }
            at += 1;
        }
    }

    /// Refuses the last objects if the capacity is exceeded and nothing more can be deleted.
    async fn enforce_capacity(&mut self) {
        let Err(error) = free_capacity(self.tier).await else {
            return;
        };
        while self.tier.is_over_capacity()
            && let Some(last) = self.staged.len().checked_sub(1)
        {
            let message = format!("{} cannot free space: {error}", self.tier.name());
            self.refuse(last, ErrorKind::Full, message);
        }
    }

    /// Refuses the objects that would exceed a strict limit of their tenant: nothing is written before what was evicted for it
    /// is deleted.
    async fn enforce_limits(&mut self) {
        let salts = self.staged.iter().map(|object| object.key.cache_salt());
        let salts: BTreeSet<_> = salts.cloned().collect();
        for salt in salts {
            let freed = free_quota(self.tier, &salt).await;
            while self.tier.is_over_limit(&salt) {
                let is_of_tenant = |object: &PlannedStore<'_>| *object.key.cache_salt() == salt;
                let Some(at) = self.staged.iter().rposition(is_of_tenant) else {
                    break;
                };
                let cause = match &freed {
                    Err(error) => error.to_string(),
                    Ok(()) => "nothing more can be evicted".to_owned(),
                };
                let message = format!("{}: {cause}", self.tier.over_quota());
                self.refuse(at, ErrorKind::OverQuota, message);
            }
        }
    }

    /// Writes what is staged; returns all results.
    async fn write(mut self) -> Vec<Option<Result<Stored, L2Error>>> {
        if self.items.is_empty() {
            return self.results;
        }
        for object in &mut self.staged {
            object.sent = SendState::Unanswered;
            object.unsent = None;
        }
        let stored = write(self.tier, self.items).await;
        for (object, result) in self.staged.into_iter().zip(stored) {
            let position = object.position;
            object.finish(&result);
            self.results[position] = Some(result);
        }
        self.results
    }
}

/// See [`Tier::store`].
pub(super) async fn store(tier: &Tier, batch: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
    let results = match BackendSpace::make(tier, &batch).await {
        Ok(free) => {
            evict_surplus(tier).await;
            let mut batch = StoreBatch::new(tier, batch, free);
            batch.claim().await;
            batch.enforce_capacity().await;
            batch.enforce_limits().await;
            batch.write().await
        }
        Err(error) => vec![Some(Err(error)); batch.len()],
    };
    let results: Vec<_> = results
        .into_iter()
        .map(|result| result.unwrap_or_else(|| Err(missing_result())))
        .collect();
    count_stored(tier, &results);
    results
}

/// Writes objects. If the backend has no space for some of them, others are evicted, and those are written again.
async fn write(tier: &Tier, items: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
    let mut results = tier.adapter.store(items.clone()).await;
    for _ in 0..MAX_EVICTIONS {
        let is_full = |result: &Result<_, L2Error>| matches!(result, Err(error) if error.kind() == ErrorKind::Full);
        let full: Vec<_> = (0..results.len())
            .filter(|at| is_full(&results[*at]))
            .collect();
        let sizes = full.iter().filter_map(|at| items.get(*at));
        let bytes: u64 = sizes
            .map(|item| tier.adapter.size_of(item.object.len))
            .sum();
        if results.iter().all(Result::is_ok) {
            tier.space_pause.shorten(tier.now());
        }
        if full.is_empty() || !evict_some(tier, bytes).await {
            break;
        }
        let again = full.iter().filter_map(|at| items.get(*at).cloned());
        let again = tier.adapter.store(again.collect()).await;
        let is_stuck = again.iter().all(is_full);
        for (at, result) in full.into_iter().zip(again) {
            results[at] = result;
        }
        if is_stuck && pause_for_space(tier) {
            break;
        }
    }
    results
}

/// Bytes in the backend of the objects that the index does not have.
fn absent_bytes(tier: &Tier, batch: &[StoreItem]) -> u64 {
    let is_absent = |item: &&StoreItem| {
        let key = &item.object.key;
        !tier.index.contains(key.namespace(), &[key.chunk_hash()])[0]
    };
    let absent = batch.iter().filter(is_absent);
    let sizes = absent.map(|item| tier.adapter.size_of(item.object.len));
    sizes.fold(0, u64::saturating_add)
}

fn count_stored(tier: &Tier, results: &[Result<Stored, L2Error>]) {
    let mut failure = None;
    for result in results {
        match result {
            Ok(Stored::Written(bytes)) => {
                tier.counters.stored_objects.add(1);
                tier.counters.stored_bytes.add(*bytes);
            }
            Ok(Stored::AlreadyThere(_)) => tier.counters.already_there.add(1),
            Err(error) => {
                tier.counters.store_failures.add(error.kind());
                // One tenant's limit is no failure of the tier.
                if error.kind() != ErrorKind::OverQuota {
                    failure = Some(error.clone());
                }
            }
        }
    }
    if !results.is_empty() {
        set_store_error(tier, failure);
    }
}

/// Sets the result of the last store, and logs it if it is a change.
fn set_store_error(tier: &Tier, error: Option<L2Error>) {
    let is_logged = {
        let mut last = tier.last_store.lock();
        last.error.clone_from(&error);
        match &error {
            Some(error) => last.log.failed(error.kind(), std::time::Instant::now()),
            None => last.log.succeeded(),
        }
    };
    if !is_logged {
        return;
    }
    let tier = tier.name();
    match error {
        Some(error) if error.kind() == ErrorKind::Full => {
            tracing::warn!(tier, %error, "out of space: stores suspended until there is free space");
        }
        Some(error) => tracing::warn!(tier, %error, "objects cannot be stored"),
        None => tracing::info!(tier, "stores resumed"),
    }
}
