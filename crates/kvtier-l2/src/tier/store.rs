//! Stores: bytes are reserved in the index, what was evicted for them is deleted, and then they are written.

use std::collections::BTreeSet;

use kvtier_core::cache::{KeyOutcome, ReadLease, Reservation, ReserveRequest};
use kvtier_core::object_key::ObjectKey;

use super::budget::Budget;
use super::deletes::missing_result;
use super::key_states::{Claim, UnsentBytes, WriteInFlight};
use super::{Adopted, Tier};
use crate::adapter::Stored;
use crate::error::{ErrorKind, L2Error};
use crate::object::StoreItem;

/// Evictions for the objects of one store that a backend has no space for.
const MAX_EVICTIONS: usize = 4;

/// Free bytes of the backend, and the bytes whose writes had ended when they were read.
#[derive(Debug, Clone, Copy)]
struct FreeSpace {
    all: u64,
    /// Free bytes beyond the reserve.
    free: u64,
    ended: u64,
}

/// Progress of one object of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
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
    reservation: Option<Reservation<Budget>>,
    /// Keeps such a key in the index.
    _held: Option<ReadLease<Budget>>,
    /// Bytes in the backend of an object whose pending delete was cancelled for this store.
    cancelled_delete: Option<u64>,
    sent: Sent,
    unsent: Option<UnsentBytes<'a>>,
    _write: WriteInFlight<'a>,
}

impl PlannedStore<'_> {
    fn finish(mut self, result: &Result<Stored, L2Error>) {
        self.sent = match result {
            Ok(stored) => {
                if stored.bytes() != self.bytes {
                    self.bytes = stored.bytes();
                    drop(self.reservation.take());
                }
                Sent::Done
            }
            Err(error) if error.kind() == ErrorKind::Deadline => Sent::Unanswered,
            Err(_) => Sent::No,
        }
    }
}

impl Drop for PlannedStore<'_> {
    fn drop(&mut self) {
        let (tier, key) = (self.tier, &self.key);
        let reservation = self.reservation.take();
        if self.sent == Sent::No {
            if let Some(bytes) = self.cancelled_delete {
                tier.states.add_pending(|| vec![(key.clone(), bytes)]);
            }
            drop(reservation);
            return;
        }
        match self.sent {
            Sent::Done => tier.states.resolve(key),
            _ => tier.states.set_indeterminate(key),
        }
        match reservation {
            Some(reservation) => drop(reservation.commit(tier.now())),
            None if tier.insert(key, self.bytes) == Adopted::Indexed => {}
            None => tier.states.add_pending(|| vec![(key.clone(), self.bytes)]),
        }
    }
}

impl Tier {
    /// Writes the objects that are not there yet; one result each.
    ///
    /// If a capacity or limits hold strictly, it waits for the end of the recovery. An object whose store was not answered
    /// in time counts, as it may be there, but lookups do not find it before the backend confirms it.
    pub async fn store(&self, batch: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
        if self.is_read_only() {
            return batch.iter().map(|_| Err(self.read_only())).collect();
        }
        let mut results: Vec<Option<Result<Stored, L2Error>>> = vec![None; batch.len()];
        match self.free_space(&batch).await {
            Ok(free) => {
                self.evict_surplus().await;
                self.store_into(batch, free, &mut results).await;
            }
            Err(error) => results.fill(Some(Err(error))),
        }
        let results: Vec<_> = results
            .into_iter()
            .map(|result| result.unwrap_or_else(|| Err(missing_result())))
            .collect();
        self.count_stored(&results);
        results
    }

    async fn store_into(
        &self,
        batch: Vec<StoreItem>,
        free: FreeSpace,
        results: &mut [Option<Result<Stored, L2Error>>],
    ) {
        let mut staged = Vec::new();
        let mut items = Vec::new();
        for (position, item) in batch.into_iter().enumerate() {
            match self.stage(position, &item, free) {
                Ok(Some(object)) => {
                    staged.push(object);
                    items.push(item);
                }
                Ok(None) => {
                    let bytes = self.adapter.size_of(item.object.len);
                    results[position] = Some(Ok(Stored::AlreadyThere(bytes)));
                }
                Err(error) => results[position] = Some(Err(error)),
            }
        }
        self.add_evicted();
        let mut at = 0;
        while at < staged.len() {
            match self.states.claim(&staged[at].key).await {
                Claim::Free => {}
                Claim::Cancelled(bytes) => staged[at].cancelled_delete = Some(bytes),
                Claim::Refused => {
                    let message = "its last delete was not answered and may come yet";
                    let error = L2Error::new(ErrorKind::Unavailable, message);
                    results[staged.remove(at).position] = Some(Err(error));
                    items.remove(at);
                    continue;
                }
            }
            at += 1;
        }
        if let Err(error) = self.free_capacity().await {
            while self.is_over_capacity()
                && let Some(object) = staged.pop()
            {
                items.pop();
                let message = format!("{} cannot free space: {error}", self.name());
                results[object.position] = Some(Err(L2Error::new(ErrorKind::Full, message)));
            }
        }
        self.enforce_limits(&mut staged, &mut items, results).await;
        if items.is_empty() {
            return;
        }
        for object in &mut staged {
            object.sent = Sent::Unanswered;
            object.unsent = None;
        }
        let stored = self.write(items).await;
        for (object, result) in staged.into_iter().zip(stored) {
            let position = object.position;
            object.finish(&result);
            results[position] = Some(result);
        }
    }

    /// Writes objects. If the backend has no space for some of them, others are evicted, and those are written again.
    async fn write(&self, items: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
        let mut results = self.adapter.store(items.clone()).await;
        for _ in 0..MAX_EVICTIONS {
            let is_full = |result: &Result<_, L2Error>| matches!(result, Err(error) if error.kind() == ErrorKind::Full);
            let full: Vec<_> = (0..results.len())
                .filter(|at| is_full(&results[*at]))
                .collect();
            let sizes = full.iter().filter_map(|at| items.get(*at));
            let bytes: u64 = sizes
                .map(|item| self.adapter.size_of(item.object.len))
                .sum();
            if results.iter().all(Result::is_ok) {
                self.shorten_pause();
            }
            if full.is_empty() || !self.evict_some(bytes).await {
                break;
            }
            let again = full.iter().filter_map(|at| items.get(*at).cloned());
            let again = self.adapter.store(again.collect()).await;
            let is_stuck = again.iter().all(is_full);
            for (at, result) in full.into_iter().zip(again) {
                results[at] = result;
            }
            if is_stuck && self.pause_eviction_for_space() {
                break;
            }
        }
        results
    }

    /// Removes the objects from the store that would exceed a strict limit of their tenant: nothing is written before what
    /// was evicted for it is deleted.
    async fn enforce_limits(
        &self,
        staged: &mut Vec<PlannedStore<'_>>,
        items: &mut Vec<StoreItem>,
        results: &mut [Option<Result<Stored, L2Error>>],
    ) {
        let salts = staged.iter().map(|object| object.key.cache_salt());
        let salts: BTreeSet<_> = salts.cloned().collect();
        for salt in salts {
            let freed = self.free_quota(&salt).await;
            while self.is_over_limit(&salt) {
                let is_of_tenant = |object: &PlannedStore<'_>| *object.key.cache_salt() == salt;
                let Some(at) = staged.iter().rposition(is_of_tenant) else {
                    break;
                };
                items.remove(at);
                let object = staged.remove(at);
                let cause = match &freed {
                    Err(error) => error.to_string(),
                    Ok(()) => "nothing more can be evicted".to_owned(),
                };
                let message = format!("{}: {cause}", self.over_quota());
                results[object.position] = Some(Err(L2Error::new(ErrorKind::OverQuota, message)));
            }
        }
    }

    fn over_quota(&self) -> String {
        format!("the tenant is at its limit in {}", self.name())
    }

    /// Returns the backend's free space, after it has evicted for what of the batch does not fit.
    async fn free_space(&self, batch: &[StoreItem]) -> Result<FreeSpace, L2Error> {
        if self.is_strict() {
            self.recovered().await?;
        }
        let mut space = self.read_free_space().await?;
        for _ in 0..MAX_EVICTIONS {
            let missing = match space.free {
                u64::MAX => 0,
                free => {
                    let left = self.states.left(free, space.ended);
                    self.absent_bytes(batch).saturating_sub(left)
                }
            };
            // All that the tier has would not be enough: others have the space.
            let below_reserve = self.config.reserve_bytes.saturating_sub(space.all);
            let is_in_vain = missing.saturating_add(below_reserve) > self.index.usage().used_bytes;
            if missing == 0 || is_in_vain || !self.evict_some(missing).await {
                break;
            }
            let before = std::mem::replace(&mut space, self.read_free_space().await?);
            if space.all <= before.all && self.pause_eviction_for_space() {
                break;
            }
        }
        Ok(space)
    }

    async fn read_free_space(&self) -> Result<FreeSpace, L2Error> {
        let ended = self.states.ended_bytes();
        let all = self.adapter.free_bytes().await?;
        let free = all.map(|all| all.saturating_sub(self.config.reserve_bytes));
        Ok(FreeSpace {
            all: all.unwrap_or(u64::MAX),
            free: free.unwrap_or(u64::MAX),
            ended,
        })
    }

    /// Bytes in the backend of the objects that the index does not have.
    fn absent_bytes(&self, batch: &[StoreItem]) -> u64 {
        let is_absent = |item: &&StoreItem| {
            let key = &item.object.key;
            !self.index.contains(key.namespace(), &[key.chunk_hash()])[0]
        };
        let absent = batch.iter().filter(is_absent);
        let sizes = absent.map(|item| self.adapter.size_of(item.object.len));
        sizes.fold(0, u64::saturating_add)
    }

    /// Reserves bytes for an object, in the backend and in the index; `None` if it is there already.
    fn stage(
        &self,
        position: usize,
        item: &StoreItem,
        space_left: FreeSpace,
    ) -> Result<Option<PlannedStore<'_>>, L2Error> {
        item.from.check_len(item.object.len)?;
        let key = &item.object.key;
        let bytes = self.adapter.size_of(item.object.len);
        let is_indeterminate = self.states.is_indeterminate(key);
        let mut unsent = Some(self.states.add_unsent(key.cache_salt(), bytes));
        if !is_indeterminate && self.index.contains(key.namespace(), &[key.chunk_hash()])[0] {
            // Counts as used; unless it was evicted just now, it is there.
            if self.reserve(key, bytes)?.is_none() {
                return Ok(None);
            }
        }
        // First, so that nothing is evicted in vain.
        let write = self
            .states
            .start_write(bytes, space_left.free, space_left.ended);
        let write = write.map_err(|left| {
            L2Error::new(
                ErrorKind::Full,
                format!(
                    "{} has {left} bytes free beyond its reserve of {}, and {bytes} are needed",
                    self.name(),
                    self.config.reserve_bytes
                ),
            )
        })?;
        let (reservation, held) = loop {
            if let Some(reservation) = self.reserve(key, bytes)? {
                break (Some(reservation), None);
            }
            if !is_indeterminate {
                return Ok(None);
            }
            let held = self
                .index
                .hold(self.now(), key.namespace(), &[key.chunk_hash()]);
            if held.is_some() {
                // The backend may have it already.
                unsent = None;
                break (None, held);
            }
        };
        Ok(Some(PlannedStore {
            tier: self,
            position,
            key: key.clone(),
            bytes,
            reservation,
            _held: held,
            cancelled_delete: None,
            sent: Sent::No,
            unsent,
            _write: write,
        }))
    }

    /// Reserves bytes in the index; `None` if the object is there already.
    pub(super) fn reserve(
        &self,
        key: &ObjectKey,
        bytes: u64,
    ) -> Result<Option<Reservation<Budget>>, L2Error> {
        let hash = key.chunk_hash();
        let request = ReserveRequest {
            namespace: key.namespace(),
            hashes: std::slice::from_ref(&hash),
            len: bytes.max(1),
        };
        let reserved = self
            .index
            .reserve(self.now(), &[request])
            .map_err(|error| L2Error::new(ErrorKind::Refused, error.to_string()))?;
        match reserved.outcomes.first() {
            Some(KeyOutcome::AlreadyResident) => Ok(None),
            Some(KeyOutcome::Reserved(_)) => Ok(Some(reserved.reservation)),
            Some(KeyOutcome::OverQuota) => {
                Err(L2Error::new(ErrorKind::OverQuota, self.over_quota()))
            }
            Some(KeyOutcome::NoMemory | KeyOutcome::OverStaging) | None => Err(L2Error::new(
                ErrorKind::Full,
                format!(
                    "{} is at its capacity of {} bytes and nothing can be evicted",
                    self.name(),
                    self.capacity_bytes().unwrap_or_default()
                ),
            )),
        }
    }

    fn count_stored(&self, results: &[Result<Stored, L2Error>]) {
        let mut failure = None;
        for result in results {
            match result {
                Ok(Stored::Written(bytes)) => {
                    self.counters.stored_objects.add(1);
                    self.counters.stored_bytes.add(*bytes);
                }
                Ok(Stored::AlreadyThere(_)) => self.counters.already_there.add(1),
                Err(error) => {
                    self.counters.store_failures.add(error.kind());
                    // One tenant's limit is no failure of the tier.
                    if error.kind() != ErrorKind::OverQuota {
                        failure = Some(error.clone());
                    }
                }
            }
        }
        if !results.is_empty() {
            self.set_store_error(failure);
        }
    }

    /// Sets the result of the last store, and logs it if it is a change.
    fn set_store_error(&self, error: Option<L2Error>) {
        let is_logged = {
            let mut last = self.last_store.lock();
            last.error.clone_from(&error);
            match &error {
                Some(error) => last.log.failed(error.kind(), std::time::Instant::now()),
                None => last.log.succeeded(),
            }
        };
        if !is_logged {
            return;
        }
        let tier = self.name();
        match error {
            Some(error) if error.kind() == ErrorKind::Full => {
                tracing::warn!(tier, %error, "out of space: stores suspended until there is free space");
            }
            Some(error) => tracing::warn!(tier, %error, "objects cannot be stored"),
            None => tracing::info!(tier, "stores resumed"),
        }
    }
}
