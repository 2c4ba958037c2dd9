//! A tier: an adapter with an index of what it holds, a bound on its bytes, and eviction.
//!
//! The index is the cache of `kvtier-core` over a sum of bytes in place of memory: the same eviction policies, leases
//! and accounting as in L1, and one counter for all of it. It is a memory of what the adapter holds, not the truth:
//! where others write too, what it does not know is asked for, and what turns out to be gone is forgotten.

mod budget;
mod counters;
mod recovery;
mod usage;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use counters::{Counter, Failures, TierCounters};
use kvtier_core::cache::{
    Cache, CacheConfig, KeyOutcome, ReadLease, Removed, Reservation, ReserveRequest,
    ResidentObject, Space, Stats,
};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::object_key::ObjectKey;
use tokio::sync::watch;
pub use usage::AdapterUsage;

use crate::adapter::{Adapter, ListPage, Listed, Loaded, Stored};
use crate::error::{ErrorKind, L2Error};
use crate::object::{LoadItem, ObjectSpec, StoreItem};
use budget::Budget;
pub use recovery::Recovery;

/// Objects evicted under one hold of the index's lock.
const EVICTION_SLICE: usize = 1024;

/// When a tier makes room before it has to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierEviction {
    /// Who leaves.
    pub policy: EvictionKind,
    /// Used part of the capacity from which on a pass evicts.
    pub trigger_watermark: f64,
    /// Part of the bytes in use that a pass evicts.
    pub eviction_ratio: f64,
}

impl Default for TierEviction {
    fn default() -> Self {
        Self {
            policy: EvictionKind::Lru,
            trigger_watermark: 0.8,
            eviction_ratio: 0.2,
        }
    }
}

/// How a tier behaves.
#[derive(Debug, Clone)]
pub struct TierConfig {
    /// Its name in metrics and logs, such as `fs-0`.
    pub name: String,
    /// Bytes its objects may take; `None` is no bound but that of the backend.
    pub capacity_bytes: Option<u64>,
    /// When room is made before a store needs it. Without it only stores make room, least recently used first.
    pub eviction: Option<TierEviction>,
    /// Bytes of the backend that stay free, where it has a bound of its own.
    pub reserve_bytes: u64,
}

/// What [`Tier::delete`] did with an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deleted {
    /// It was there and is gone.
    Gone,
    /// It was not there.
    Absent,
    /// It is being read, and stays.
    Kept,
}

/// A hold on an object of a tier: it is not evicted meanwhile.
#[derive(Debug)]
pub struct TierLease {
    _lease: Option<ReadLease<Budget>>,
}

/// See the module.
pub struct Tier {
    adapter: Arc<dyn Adapter>,
    index: Cache<Budget>,
    config: TierConfig,
    counters: TierCounters,
    started: Instant,
    recovery: watch::Sender<Recovery>,
    /// The backend had no room at the last store.
    full: AtomicBool,
}

/// The place of a key in the index. Layouts are not part of names in a backend.
fn space(key: &ObjectKey) -> Space<'_> {
    Space {
        model_name: key.model_name(),
        kv_rank: key.kv_rank(),
        object_group_id: key.object_group_id(),
        layout: 0,
        cache_salt: key.cache_salt(),
    }
}

fn key_of(object: &ResidentObject) -> Option<ObjectKey> {
    let space = &object.space;
    ObjectKey::new(
        object.chunk_hash,
        Arc::clone(&space.model_name),
        space.kv_rank,
        space.object_group_id,
        Arc::clone(&space.cache_salt),
    )
    .ok()
}

impl Tier {
    /// An adapter with an empty index; [`Tier::recover`] fills it.
    pub fn new(adapter: Arc<dyn Adapter>, config: TierConfig) -> Self {
        let policy = config
            .eviction
            .map_or(EvictionKind::Lru, |eviction| eviction.policy);
        let index = Cache::new(
            Budget::new(config.capacity_bytes),
            CacheConfig {
                eviction: policy,
                report_evicted: true,
                ..CacheConfig::default()
            },
        );
        let recovery = if adapter.capabilities().list {
            Recovery::Running
        } else {
            Recovery::Done(Default::default())
        };
        Self {
            adapter,
            index,
            config,
            counters: TierCounters::default(),
            started: Instant::now(),
            recovery: watch::Sender::new(recovery),
            full: AtomicBool::new(false),
        }
    }

    /// Its name in metrics and logs.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The adapter inside.
    pub fn adapter(&self) -> &Arc<dyn Adapter> {
        &self.adapter
    }

    /// How it was set up.
    pub fn config(&self) -> &TierConfig {
        &self.config
    }

    /// What it counts.
    pub fn counters(&self) -> &TierCounters {
        &self.counters
    }

    /// Whether the backend had no room at the last store.
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Writes what is not there yet; one result each.
    ///
    /// A bounded tier waits until it knows what it held before the start.
    pub async fn store(&self, batch: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
        if self.config.capacity_bytes.is_some() {
            self.recovered().await;
        }
        let mut results: Vec<Option<Result<Stored, L2Error>>> = vec![None; batch.len()];
        let (mut places, mut items, mut reservations) = (Vec::new(), Vec::new(), Vec::new());
        let mut left = match self.room().await {
            Ok(left) => left,
            Err(error) => {
                let results: Vec<_> = batch.iter().map(|_| Err(error.clone())).collect();
                self.count_stored(&results);
                return results;
            }
        };
        for (place, item) in batch.into_iter().enumerate() {
            let bytes = self.adapter.size_of(item.object.len);
            match self.reserve(&item.object.key, bytes, &mut left) {
                Ok(Some(reservation)) => {
                    places.push(place);
                    items.push(item);
                    reservations.push((bytes, reservation));
                }
                Ok(None) => results[place] = Some(Ok(Stored::AlreadyThere(bytes))),
                Err(error) => results[place] = Some(Err(error)),
            }
        }
        self.delete_evicted().await;
        let keys: Vec<_> = items.iter().map(|item| item.object.key.clone()).collect();
        let stored = if items.is_empty() {
            Vec::new()
        } else {
            self.adapter.store(items).await
        };
        for (((place, key), (bytes, reservation)), result) in
            places.into_iter().zip(keys).zip(reservations).zip(stored)
        {
            if let Ok(stored) = &result {
                self.admit(&key, bytes, stored.bytes(), reservation);
            }
            results[place] = Some(result);
        }
        let missing = || L2Error::new(ErrorKind::Refused, "the adapter gave no result");
        let results: Vec<_> = results
            .into_iter()
            .map(|result| result.unwrap_or_else(|| Err(missing())))
            .collect();
        self.count_stored(&results);
        results
    }

    fn count_stored(&self, results: &[Result<Stored, L2Error>]) {
        let mut full = false;
        for result in results {
            match result {
                Ok(Stored::Written(bytes)) => {
                    self.counters.stored_objects.add(1);
                    self.counters.stored_bytes.add(*bytes);
                }
                Ok(Stored::AlreadyThere(_)) => self.counters.already_there.add(1),
                Err(error) => {
                    full |= error.kind() == ErrorKind::Full;
                    self.counters.store_failures.add(error.kind());
                }
            }
        }
        if results.is_empty() || self.full.swap(full, Ordering::Relaxed) == full {
            return;
        }
        if full {
            tracing::warn!(
                tier = self.name(),
                "no room: objects are not stored until there is some again"
            );
        } else {
            tracing::info!(tier = self.name(), "there is room again");
        }
    }

    /// Bytes that the backend has left for us; no bound is the largest number.
    async fn room(&self) -> Result<u64, L2Error> {
        Ok(match self.adapter.free_bytes().await? {
            Some(free) => free.saturating_sub(self.config.reserve_bytes),
            None => u64::MAX,
        })
    }

    /// Sets bytes aside for an object; `None` if it is there already.
    fn reserve(
        &self,
        key: &ObjectKey,
        bytes: u64,
        left: &mut u64,
    ) -> Result<Option<Reservation<Budget>>, L2Error> {
        let hash = key.chunk_hash();
        if bytes > *left && !self.index.contains(&space(key), &[hash])[0] {
            // Before anything is evicted for it in vain.
            return Err(L2Error::new(
                ErrorKind::Full,
                format!(
                    "{} has room for {left} bytes beside its reserve of {}, and {bytes} are needed",
                    self.name(),
                    self.config.reserve_bytes
                ),
            ));
        }
        let request = ReserveRequest {
            space: space(key),
            hashes: std::slice::from_ref(&hash),
            len: bytes.max(1),
        };
        let reserved = self
            .index
            .reserve(self.now(), &[request])
            .map_err(|error| L2Error::new(ErrorKind::Refused, error.to_string()))?;
        match reserved.outcomes.first() {
            Some(KeyOutcome::AlreadyResident) => Ok(None),
            Some(KeyOutcome::Reserved(_)) => {
                *left = left.saturating_sub(bytes);
                Ok(Some(reserved.reservation))
            }
            Some(KeyOutcome::NoMemory) | None => Err(L2Error::new(
                ErrorKind::Full,
                format!(
                    "{} is at its capacity of {} bytes and nothing can be evicted",
                    self.name(),
                    self.config.capacity_bytes.unwrap_or_default()
                ),
            )),
        }
    }

    /// Takes an object into the index with the bytes it really takes.
    fn admit(&self, key: &ObjectKey, reserved: u64, bytes: u64, reservation: Reservation<Budget>) {
        if reserved == bytes {
            let _ = reservation.commit(self.now());
        } else {
            drop(reservation);
            self.adopt(key, bytes);
        }
    }

    /// Takes an object into the index that is there; says whether there was room for it.
    fn adopt(&self, key: &ObjectKey, bytes: u64) -> bool {
        match self.reserve(key, bytes, &mut u64::MAX.clone()) {
            Ok(Some(reservation)) => {
                let _ = reservation.commit(self.now());
                true
            }
            Ok(None) => true,
            Err(_) => false,
        }
    }

    /// A hold on an object that the index knows.
    fn pin(&self, key: &ObjectKey) -> Option<TierLease> {
        let lease = self
            .index
            .pin(self.now(), &space(key), &[key.chunk_hash()])?;
        Some(TierLease {
            _lease: Some(lease),
        })
    }

    /// Which of these objects are there; those that are, are held.
    ///
    /// # Errors
    /// When the backend cannot be asked.
    pub async fn lookup(&self, batch: Vec<ObjectSpec>) -> Result<Vec<Option<TierLease>>, L2Error> {
        self.counters.looked_up.add(batch.len() as u64);
        let mut held: Vec<_> = batch.iter().map(|object| self.pin(&object.key)).collect();
        if self.adapter.capabilities().shared || self.is_recovering() {
            let unknown: Vec<_> = held
                .iter()
                .enumerate()
                .filter(|(_, held)| held.is_none())
                .map(|(place, _)| place)
                .collect();
            if !unknown.is_empty() {
                let asked = unknown.iter().map(|place| batch[*place].clone()).collect();
                let found = self.adapter.lookup(asked).await?;
                for (place, bytes) in unknown.into_iter().zip(found) {
                    let Some(bytes) = bytes else { continue };
                    let key = &batch[place].key;
                    // Without room in the index it is there all the same.
                    self.adopt(key, bytes);
                    held[place] = Some(self.pin(key).unwrap_or(TierLease { _lease: None }));
                }
                self.delete_evicted().await;
            }
        }
        let found = held.iter().flatten().count();
        self.counters.found.add(found as u64);
        Ok(held)
    }

    /// Reads objects; one result each. What is not there any more, is not what it has to be, or can never be read is
    /// forgotten, so that it can be stored again.
    pub async fn load(&self, batch: Vec<LoadItem>) -> Vec<Result<Loaded, L2Error>> {
        let objects: Vec<_> = batch.iter().map(|item| item.object.clone()).collect();
        let mut results = self.adapter.load(batch).await;
        results.resize_with(objects.len(), || {
            Err(L2Error::new(
                ErrorKind::Refused,
                "the adapter gave no result",
            ))
        });
        for (object, result) in objects.iter().zip(&results) {
            match result {
                Ok(loaded) => {
                    self.counters.loaded_objects.add(1);
                    self.counters.loaded_bytes.add(object.len);
                    self.counters.unverified.add(u64::from(!loaded.verified));
                }
                Err(error) => {
                    self.counters.load_failures.add(error.kind());
                    if matches!(
                        error.kind(),
                        ErrorKind::NotFound | ErrorKind::Corrupt | ErrorKind::Refused
                    ) {
                        self.index
                            .remove(&space(&object.key), &[object.key.chunk_hash()], true);
                    }
                    if error.kind() == ErrorKind::Corrupt {
                        tracing::warn!(tier = self.name(), %error, "a stored object is not what was stored");
                    }
                }
            }
        }
        results
    }

    /// Deletes objects; one result each. What is being read stays, unless `force` is given: then whoever reads it finds
    /// it gone.
    pub async fn delete(&self, keys: Vec<ObjectKey>, force: bool) -> Vec<Result<Deleted, L2Error>> {
        let remove = |key| self.index.remove(&space(key), &[key.chunk_hash()], force);
        let removed: Vec<_> = keys.iter().map(remove).collect();
        let free = keys.iter().zip(&removed).filter(|(_, was)| was.kept == 0);
        let free = free.map(|(key, _)| key.clone()).collect();
        let mut deleted = self.adapter.delete(free).await.into_iter();
        let outcome = |(key, was): (&ObjectKey, Removed)| {
            if was.kept > 0 {
                return Ok(Deleted::Kept);
            }
            match deleted.next() {
                Some(Ok(true)) => Ok(Deleted::Gone),
                Some(Ok(false)) => Ok(Deleted::Absent),
                Some(Err(error)) => {
                    if was.objects > 0 {
                        // It still takes its bytes.
                        self.adopt(key, was.bytes);
                    }
                    Err(error)
                }
                None => Err(L2Error::new(
                    ErrorKind::Refused,
                    "the adapter gave no result",
                )),
            }
        };
        keys.iter().zip(removed).map(outcome).collect()
    }

    /// A part of what the backend holds. See [`Adapter::list`].
    ///
    /// # Errors
    /// As [`Adapter::list`].
    pub async fn list(&self, from: Option<String>, limit: usize) -> Result<ListPage, L2Error> {
        self.adapter.list(from, limit).await
    }

    /// One pass: evicts down from the watermark.
    pub async fn evict(&self) {
        let Some(eviction) = self.config.eviction else {
            return;
        };
        let usage = self.index.usage();
        if self.config.capacity_bytes.is_none()
            || (usage.used_bytes as f64) < usage.capacity_bytes as f64 * eviction.trigger_watermark
        {
            return;
        }
        let mut wanted = (usage.used_bytes as f64 * eviction.eviction_ratio) as u64;
        while wanted > 0 {
            let evicted = self.index.evict(self.now(), wanted, EVICTION_SLICE);
            if evicted.objects == 0 {
                break;
            }
            wanted = wanted.saturating_sub(evicted.bytes);
            self.delete_evicted().await;
        }
    }

    /// Deletes in the backend what the index has evicted.
    async fn delete_evicted(&self) {
        let evicted = self.index.take_evicted();
        if evicted.is_empty() {
            return;
        }
        self.counters.evicted_objects.add(evicted.len() as u64);
        let bytes = evicted.iter().map(|object| object.bytes).sum();
        self.counters.evicted_bytes.add(bytes);
        let keys: Vec<_> = evicted.iter().filter_map(key_of).collect();
        let failed = self
            .adapter
            .delete(keys)
            .await
            .into_iter()
            .filter_map(Result::err)
            .inspect(|error| self.counters.store_failures.add(error.kind()))
            .last();
        if let Some(error) = failed {
            tracing::warn!(tier = self.name(), %error, "evicted objects could not be deleted");
        }
    }

    /// What it holds.
    pub fn usage(&self) -> AdapterUsage {
        let stats = self.index.stats();
        let mut bytes_by_cache_salt = BTreeMap::new();
        let mut from = 0;
        loop {
            let page = self.index.salts(from, 1024);
            for salt in page.entries {
                let bytes = salt.bytes + salt.staged_bytes;
                if bytes > 0 {
                    bytes_by_cache_salt.insert(salt.salt, bytes);
                }
            }
            match page.next {
                Some(next) => from = next,
                None => break,
            }
        }
        AdapterUsage {
            total_bytes_used: stats.used_bytes,
            total_capacity_bytes: self.config.capacity_bytes.unwrap_or(0),
            objects: stats.objects,
            bytes_by_cache_salt,
        }
    }

    /// What its index counts, without looking at each tenant.
    pub fn stats(&self) -> Stats {
        self.index.stats()
    }
}

impl std::fmt::Debug for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tier")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
