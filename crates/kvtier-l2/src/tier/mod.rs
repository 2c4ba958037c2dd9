//! A tier: an adapter with an index of what it holds, a bound on its bytes, and eviction.
//!
//! The index is the cache of `kvtier-core` over a sum of bytes in place of memory: the same eviction policies, leases
//! and accounting as in L1, and one counter for all of it. It is a memory of what the adapter holds, not the truth:
//! where others write too, what it does not know is asked for, and what turns out to be gone is forgotten.

mod budget;
mod condemned;
mod counters;
mod eviction;
mod recovery;
mod store;
mod tenants;
mod unsent;
mod unsure;
mod usage;
mod warned;
mod writing;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use counters::{Counter, Failures, TierCounters};
use kvtier_core::cache::{Cache, CacheConfig, ReadLease, Removed, Stats};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::object_key::ObjectKey;
use kvtier_core::quota::{QuotaConfig, QuotaMode};
use parking_lot::Mutex;
use tokio::sync::watch;
pub use usage::AdapterUsage;

use crate::adapter::{Adapter, ListPage, Listed, Loaded};
use crate::error::{ErrorKind, L2Error};
use crate::object::{LoadItem, ObjectSpec};
use budget::Budget;
use condemned::Condemned;
pub use recovery::Recovery;
use unsent::Unsent;
use unsure::Unsure;
use warned::Warned;
use writing::Writing;

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
    /// What tenants' limits mean; watermark and ratio are those of `eviction`.
    pub quota_mode: QuotaMode,
    /// The limit of tenants without a grant; `None` = unlimited.
    pub quota_default: Option<u64>,
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

/// What became of an object that was found in the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Adopted {
    /// The index has it.
    Known,
    /// The index has no room for it.
    NoRoom,
    /// Its tenant may have no more.
    OverQuota,
    /// It is being deleted.
    Leaving,
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
    condemned: Arc<Condemned>,
    unsure: Unsure,
    unsent: Unsent,
    writing: Writing,
    config: TierConfig,
    counters: TierCounters,
    evicted_by_salt: Mutex<BTreeMap<Arc<str>, u64>>,
    started: Instant,
    recovery: watch::Sender<Recovery>,
    /// Why the last batch could not be stored, or not all of it.
    trouble: Mutex<Option<L2Error>>,
    /// Lines about objects that are not what was stored, and about deletes.
    damaged: Warned,
    undeleted: Warned,
}

impl Tier {
    /// An adapter with an empty index; [`Tier::recover`] fills it.
    pub fn new(adapter: Arc<dyn Adapter>, mut config: TierConfig) -> Self {
        if adapter.capabilities().read_only {
            // What others keep there is not ours to bound.
            (config.capacity_bytes, config.eviction) = (None, None);
            config.quota_default = None;
        }
        let eviction = config.eviction.unwrap_or_default();
        let index = Cache::new(
            Budget::new(config.capacity_bytes),
            CacheConfig {
                eviction: eviction.policy,
                report_evicted: true,
                quotas: QuotaConfig {
                    mode: config.quota_mode,
                    default_limit: config.quota_default,
                    watermark: eviction.trigger_watermark,
                    ratio: eviction.eviction_ratio,
                },
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
            condemned: Arc::default(),
            unsure: Unsure::default(),
            unsent: Unsent::default(),
            writing: Writing::default(),
            config,
            counters: TierCounters::default(),
            evicted_by_salt: Mutex::default(),
            started: Instant::now(),
            recovery: watch::Sender::new(recovery),
            trouble: Mutex::new(None),
            damaged: Warned::default(),
            undeleted: Warned::default(),
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

    /// Whether it is only loaded from.
    pub fn is_read_only(&self) -> bool {
        self.adapter.capabilities().read_only
    }

    /// How it was set up.
    pub fn config(&self) -> &TierConfig {
        &self.config
    }

    /// What it counts.
    pub fn counters(&self) -> &TierCounters {
        &self.counters
    }

    /// Why the last store failed; `None` once one has gone well.
    pub fn last_store_error(&self) -> Option<L2Error> {
        self.trouble.lock().clone()
    }

    /// Whether the backend had no room at the last store.
    pub fn is_full(&self) -> bool {
        self.last_store_error()
            .is_some_and(|error| error.kind() == ErrorKind::Full)
    }

    /// Checks whether the backend is still the one that was opened: [`Adapter::check`].
    pub async fn check(&self) {
        self.adapter.check().await;
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Takes an object into the index that is there.
    fn adopt(&self, key: &ObjectKey, bytes: u64) -> Adopted {
        self.condemned.adopt(key, || self.enter(key, bytes))
    }

    /// The index's part of that.
    fn enter(&self, key: &ObjectKey, bytes: u64) -> Adopted {
        match self.reserve(key, bytes) {
            Ok(Some(reservation)) => {
                let _ = reservation.commit(self.now());
                Adopted::Known
            }
            Ok(None) => Adopted::Known,
            Err(error) if error.kind() == ErrorKind::OverQuota => Adopted::OverQuota,
            Err(_) => Adopted::NoRoom,
        }
    }

    /// A hold on an object that the index knows.
    fn pin(&self, key: &ObjectKey) -> Option<TierLease> {
        let lease = self
            .index
            .pin(self.now(), key.namespace(), &[key.chunk_hash()])?;
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
        let may_have_more = self.adapter.capabilities().shared || self.is_recovering();
        let (mut held, mut unknown) = (Vec::with_capacity(batch.len()), Vec::new());
        for (place, object) in batch.iter().enumerate() {
            let is_unsure = self.unsure.has(&object.key);
            let lease = (!is_unsure).then(|| self.pin(&object.key)).flatten();
            if lease.is_none() && (is_unsure || may_have_more) {
                unknown.push(place);
            }
            held.push(lease);
        }
        if !unknown.is_empty() {
            let asked = unknown.iter().map(|place| batch[*place].clone()).collect();
            let found = self.adapter.lookup(asked).await?;
            for (place, bytes) in unknown.into_iter().zip(found) {
                // What is unsure stays so: it may come yet.
                let Some(bytes) = bytes else { continue };
                let key = &batch[place].key;
                self.unsure.settle(key);
                if self.adopt(key, bytes) != Adopted::Leaving {
                    // Without room in the index it is there all the same.
                    held[place] = Some(self.pin(key).unwrap_or(TierLease { _lease: None }));
                }
            }
            // Who looks something up does not wait for deletes.
            self.condemn_evicted();
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
                    self.unsure.settle(&object.key);
                    self.counters.loaded_objects.add(1);
                    self.counters.loaded_bytes.add(object.len);
                    self.counters.unverified.add(u64::from(!loaded.verified));
                }
                Err(error) => {
                    self.counters.load_failures.add(error.kind());
                    if matches!(
                        error.kind(),
                        ErrorKind::NotFound
                            | ErrorKind::Corrupt
                            | ErrorKind::Unreadable
                            | ErrorKind::Refused
                    ) {
                        self.index
                            .remove(object.key.namespace(), &[object.key.chunk_hash()], true);
                        self.unsure.settle(&object.key);
                    }
                    if error.kind() == ErrorKind::Corrupt
                        && let Some(left_out) = self.damaged.due(self.now())
                    {
                        let tier = self.name();
                        tracing::warn!(tier, %error, left_out, "a stored object is not what was stored");
                    }
                }
            }
        }
        results
    }

    /// Deletes objects; one result each. What is being read stays, unless `force` is given: then whoever reads it finds
    /// it gone.
    pub async fn delete(&self, keys: Vec<ObjectKey>, force: bool) -> Vec<Result<Deleted, L2Error>> {
        if self.is_read_only() {
            return keys.iter().map(|_| Err(self.read_only())).collect();
        }
        let marked = self.condemned.mark(&keys);
        let remove = |key: &ObjectKey| {
            let remove = || {
                self.index
                    .remove(key.namespace(), &[key.chunk_hash()], force)
            };
            let was = marked.take_out(key, remove);
            if was.objects > 0 {
                self.unsure.settle(key);
            }
            was
        };
        let removed: Vec<_> = keys.iter().map(remove).collect();
        let free = keys.iter().zip(&removed).filter(|(_, was)| was.kept == 0);
        let free = free.map(|(key, _)| key.clone()).collect();
        let mut deleted = self.adapter.delete(free).await.into_iter();
        let outcome = |(key, was): (&ObjectKey, Removed)| {
            if was.kept > 0 {
                return Ok(Deleted::Kept);
            }
            let no_result = || L2Error::new(ErrorKind::Refused, "the adapter gave no result");
            match deleted.next().unwrap_or_else(|| Err(no_result())) {
                Ok(was_there) => {
                    marked.gone(key);
                    Ok(match was_there {
                        true => Deleted::Gone,
                        false => Deleted::Absent,
                    })
                }
                Err(error) => {
                    // It still takes its bytes; without room in the index it is deleted later.
                    marked.failed(key, |bytes| {
                        let adopted = self.enter(key, bytes);
                        if adopted == Adopted::Known {
                            self.unsure.add(key);
                        }
                        adopted
                    });
                    Err(error)
                }
            }
        };
        let outcomes = keys.iter().zip(removed).map(outcome).collect();
        // What went back to the index may have had others leave.
        self.condemn_evicted();
        outcomes
    }

    fn read_only(&self) -> L2Error {
        let message = format!("{} is read_only", self.name());
        L2Error::new(ErrorKind::Unsupported, message)
    }

    /// A part of what the backend holds. See [`Adapter::list`].
    ///
    /// # Errors
    /// As [`Adapter::list`].
    pub async fn list(&self, from: Option<String>, limit: usize) -> Result<ListPage, L2Error> {
        self.adapter.list(from, limit).await
    }

    /// What it holds, with what it gave up and the backend has not deleted yet.
    pub fn usage(&self) -> AdapterUsage {
        let stats = self.stats();
        let mut bytes_by_cache_salt = self.condemned.by_salt();
        let mut from = 0;
        loop {
            let page = self.index.salts(from, 1024);
            for salt in page.entries {
                let bytes = salt.bytes + salt.staged_bytes;
                let bytes = bytes.saturating_sub(self.unsent.bytes(Some(&salt.salt)));
                if bytes > 0 {
                    *bytes_by_cache_salt.entry(salt.salt).or_default() += bytes;
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

    /// What its index counts, without looking at each tenant. Used are the bytes that the backend may hold: also those of
    /// what the index gave up and the backend has not deleted yet, and not those of stores that wait for that.
    pub fn stats(&self) -> Stats {
        let (mut stats, leaving) = self.condemned.beside(None, || self.index.stats());
        let used = stats.used_bytes + leaving;
        stats.used_bytes = used.saturating_sub(self.unsent.bytes(None));
        stats
    }
}

impl std::fmt::Debug for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tier")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
