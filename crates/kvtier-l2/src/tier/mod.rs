//! A tier: an adapter with an index of its objects, a capacity, and eviction.
//!
//! The index is the cache of `kvtier-core` over a byte sum in place of memory: the eviction policies, leases and
//! accounting of L1. It is a cache of the backend's contents; the backend is authoritative: if others write there too,
//! unknown keys are looked up in it, and an object that is missing there is removed from the index. [`KeyStates`] has the
//! keys whose state the index alone does not describe.
//!
//! `evicted_by_salt` and `last_store` guard a counter per tenant and the last error; neither has a lock inside.

mod budget;
mod counters;
mod deletes;
mod eviction;
mod key_states;
mod listing;
mod recovery;
mod store;
mod usage;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use counters::{Counter, Failures, TierCounters};
use kvtier_common::sync::{Mutex, RateLimited};
use kvtier_core::cache::{
    Cache, CacheConfig, Events, KeyOutcome, Loss, Page, ReadLease, Removed, Reservation,
    ReserveRequest, ResidentObject, SaltUsage, Stats,
};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::object_key::ObjectKey;
use kvtier_core::quota::{Grant, QuotaConfig, QuotaMode};
use kvtier_core::{ChunkHash, Namespace};
pub use usage::AdapterUsage;

use crate::adapter::{Adapter, Capabilities, ListPage, Listed, Loaded, Stored};
use crate::error::{ErrorKind, L2Error};
use crate::object::{LoadItem, ObjectSpec, StoreItem};
use budget::ByteBudget;
use deletes::{DeletesInFlight, missing_result};
use eviction::SpacePause;
use key_states::{KeyStates, UncountedBytes};
pub use recovery::Recovery;
use recovery::RecoveryProgress;
use store::LastStore;

/// Interval of log lines about failed stores and deletes and corrupt objects, which a broken backend causes with every call.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Eviction ahead of demand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierEviction {
    /// Eviction policy.
    pub policy: EvictionKind,
    /// Used fraction of the capacity from which a pass evicts.
    pub trigger_watermark: f64,
    /// Fraction of the used bytes that a pass evicts.
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

/// Configuration of a tier.
#[derive(Debug, Clone)]
pub struct TierConfig {
    /// Name of the tier in metrics and logs, such as `fs-0`.
    pub name: String,
    /// Bytes that its objects may take; `None` is bounded by the backend only.
    pub capacity_bytes: Option<u64>,
    /// Eviction ahead of demand. Without it only stores evict, least recently used first.
    pub eviction: Option<TierEviction>,
    /// How tenants' limits are enforced; watermark and ratio are those of `eviction`.
    pub quota_mode: QuotaMode,
    /// The limit of tenants without a grant; `None` = unlimited.
    pub quota_default: Option<u64>,
    /// Bytes that stay free in a backend with a bound of its own.
    pub reserve_bytes: u64,
}

/// Result of [`Tier::delete`] for one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deleted {
    /// The object was deleted.
    Removed,
    /// The object was not there.
    Absent,
    /// The object is leased and was kept.
    Kept,
}

/// Result of taking an object of the backend into the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Adopted {
    /// The index has it.
    Indexed,
    /// The object exceeds the capacity, and nothing can be evicted for it.
    OverCapacity,
    /// The object's tenant is at its limit.
    OverQuota,
    /// The object is being deleted, or a late delete of it may still be executed.
    Deleting,
}

/// A lease of an object of a tier, which is not evicted meanwhile.
#[derive(Debug)]
pub struct TierLease {
    _lease: Option<ReadLease<ByteBudget>>,
}

/// An adapter with an index of its objects, a capacity, and eviction.
///
/// ```
/// # use std::sync::Arc;
/// # use kvtier_core::{ChunkHash, ObjectKey, quota::QuotaMode};
/// use kvtier_l2::mock::{MemoryStore, Mock};
/// use kvtier_l2::{ObjectSpec, tier::{Tier, TierConfig}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let adapter = Arc::new(Mock::new(Arc::new(MemoryStore::new(1 << 20)), 1e9));
/// let tier = Tier::new(adapter, TierConfig {
///     name: "mock-0".into(),
///     capacity_bytes: Some(1 << 20),
///     eviction: None,
///     quota_mode: QuotaMode::Soft,
///     quota_default: None,
///     reserve_bytes: 0,
/// });
/// let key = ObjectKey::new(ChunkHash([7; 32]), "some/model", 0, 0, "")?;
/// let found = tier.lookup(vec![ObjectSpec { key, len: 4096, layout: 0 }]).await?;
/// assert!(found[0].is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Tier {
    adapter: Arc<dyn Adapter>,
    index: Cache<ByteBudget>,
    states: Arc<KeyStates>,
    config: TierConfig,
    counters: TierCounters,
    evicted_by_salt: Mutex<BTreeMap<Arc<str>, u64>>,
    /// Whether a tenant was ever granted anything.
    has_grants: AtomicBool,
    started: Instant,
    space_pause: SpacePause,
    recovery: RecoveryProgress,
    last_store: Mutex<LastStore>,
    corrupt_log: RateLimited,
    delete_log: RateLimited,
}

impl Tier {
    /// Returns a tier with an empty index, which [`Tier::recover`] fills.
    pub fn new(adapter: Arc<dyn Adapter>, mut config: TierConfig) -> Self {
        if adapter.capabilities().read_only {
            // The capacity of a read-only backend is its writers' concern.
            (config.capacity_bytes, config.eviction) = (None, None);
            config.quota_default = None;
        }
        let eviction = config.eviction.unwrap_or_default();
        let index = Cache::new(
            ByteBudget::new(config.capacity_bytes),
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
        let recovery = RecoveryProgress::new(adapter.capabilities().list);
        Self {
            adapter,
            index,
            states: Arc::default(),
            config,
            counters: TierCounters::default(),
            evicted_by_salt: Mutex::default(),
            has_grants: AtomicBool::new(false),
            started: Instant::now(),
            space_pause: SpacePause::default(),
            recovery,
            last_store: Mutex::new(LastStore::new()),
            corrupt_log: RateLimited::new(LOG_INTERVAL),
            delete_log: RateLimited::new(LOG_INTERVAL),
        }
    }

    /// Returns the tier's name in metrics and logs.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Returns the tier's adapter.
    pub fn adapter(&self) -> &Arc<dyn Adapter> {
        &self.adapter
    }

    /// Whether it is only loaded from.
    pub fn is_read_only(&self) -> bool {
        self.adapter.capabilities().read_only
    }

    /// Whether objects that are found are indexed. An index of what others evict, and what cannot be listed, would only grow.
    fn is_indexed(&self) -> bool {
        let Capabilities {
            read_only,
            shared,
            list,
            ..
        } = self.adapter.capabilities();
        list || !(read_only && shared)
    }

    /// Returns the configuration at the start. [`Tier::capacity_bytes`] and [`Tier::eviction`] return the current values.
    pub fn config(&self) -> &TierConfig {
        &self.config
    }

    /// Bytes that its objects may take; `None` is bounded by the backend only.
    pub fn capacity_bytes(&self) -> Option<u64> {
        let bounded = self.config.capacity_bytes;
        bounded.map(|_| self.index.usage().capacity_bytes)
    }

    /// Eviction ahead of demand.
    pub fn eviction(&self) -> Option<TierEviction> {
        let quotas = self.index.quotas();
        self.config.eviction.map(|eviction| TierEviction {
            trigger_watermark: quotas.watermark,
            eviction_ratio: quotas.ratio,
            ..eviction
        })
    }

    /// Sets its capacity, if it has one, and watermark and ratio, if it evicts ahead of demand. What exceeds a lower capacity
    /// is evicted by the next pass or store.
    pub fn set_limits(&self, capacity_bytes: Option<u64>, eviction: Option<TierEviction>) {
        if let (Some(_), Some(bytes)) = (self.config.capacity_bytes, capacity_bytes) {
            self.index
                .configure_allocator(|budget| budget.set_capacity(bytes));
        }
        if let (Some(_), Some(eviction)) = (self.config.eviction, eviction) {
            self.index.configure_quotas(|quotas| {
                quotas.watermark = eviction.trigger_watermark;
                quotas.ratio = eviction.eviction_ratio;
            });
        }
    }

    /// Returns the tier's counters.
    pub fn counters(&self) -> &TierCounters {
        &self.counters
    }

    /// Error of the last store; `None` if it succeeded.
    pub fn last_store_error(&self) -> Option<L2Error> {
        self.last_store.lock().error.clone()
    }

    /// Whether the last store failed for lack of space.
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

    /// Takes an object that was found in the backend into the index.
    fn adopt(&self, key: &ObjectKey, bytes: u64) -> Adopted {
        self.states.adopt(key, || self.insert(key, bytes))
    }

    /// Inserts an object into the index.
    fn insert(&self, key: &ObjectKey, bytes: u64) -> Adopted {
        match self.reserve(key, bytes) {
            Ok(Some(reservation)) => {
                let _ = reservation.commit(self.now());
                Adopted::Indexed
            }
            Ok(None) => Adopted::Indexed,
            Err(error) if error.kind() == ErrorKind::OverQuota => Adopted::OverQuota,
            Err(_) => Adopted::OverCapacity,
        }
    }

    /// Reserves bytes in the index; `None` if the object is there already.
    fn reserve(
        &self,
        key: &ObjectKey,
        bytes: u64,
    ) -> Result<Option<Reservation<ByteBudget>>, L2Error> {
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

    fn over_quota(&self) -> String {
        format!("the tenant is at its limit in {}", self.name())
    }

    /// Leases an object that is in the index.
    fn lease(&self, key: &ObjectKey) -> Option<TierLease> {
        let lease = self
            .index
            .lease(self.now(), key.namespace(), &[key.chunk_hash()])?;
        Some(TierLease {
            _lease: Some(lease),
        })
    }

    /// Returns a lease per object that is there.
    ///
    /// # Errors
    /// If the lookup in the backend fails.
    pub async fn lookup(&self, batch: Vec<ObjectSpec>) -> Result<Vec<Option<TierLease>>, L2Error> {
        self.counters.looked_up.add(batch.len() as u64);
        let may_have_more = self.may_have_more();
        let (mut held, mut unknown) = (Vec::with_capacity(batch.len()), Vec::new());
        for (position, object) in batch.iter().enumerate() {
            let is_indeterminate = self.states.is_indeterminate(&object.key);
            let lease = (!is_indeterminate)
                .then(|| self.lease(&object.key))
                .flatten();
            if lease.is_none() && (is_indeterminate || may_have_more) {
                unknown.push(position);
            }
            held.push(lease);
        }
        if !unknown.is_empty() {
            let objects = unknown.iter().map(|at| batch[*at].clone()).collect();
            let found = self.adapter.lookup(objects).await?;
            for (position, bytes) in unknown.into_iter().zip(found) {
                // An indeterminate key that was not found stays so: its store may still arrive.
                let Some(bytes) = bytes else { continue };
                let key = &batch[position].key;
                self.states.resolve(key);
                if !self.is_indexed() {
                    held[position] = Some(TierLease { _lease: None });
                } else if self.adopt(key, bytes) != Adopted::Deleting {
                    // It can be loaded even if the index cannot hold it.
                    held[position] = Some(self.lease(key).unwrap_or(TierLease { _lease: None }));
                }
            }
            // A lookup does not wait for deletes.
            self.add_evicted();
        }
        let found = held.iter().flatten().count();
        self.counters.found.add(found as u64);
        Ok(held)
    }

    /// Reads objects; one result each. An object that is missing, corrupt or unreadable is removed from the index, so that
    /// it can be stored again.
    pub async fn load(&self, batch: Vec<LoadItem>) -> Vec<Result<Loaded, L2Error>> {
        let objects: Vec<_> = batch.iter().map(|item| item.object.clone()).collect();
        let mut results = self.adapter.load(batch).await;
        results.resize_with(objects.len(), || Err(missing_result()));
        for (object, result) in objects.iter().zip(&results) {
            match result {
                Ok(loaded) => {
                    self.states.resolve(&object.key);
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
                        self.states.resolve(&object.key);
                    }
                    if error.kind() == ErrorKind::Corrupt
                        && let Some(suppressed_lines) = self.corrupt_log.permit(Instant::now())
                    {
                        let tier = self.name();
                        tracing::warn!(tier, %error, suppressed_lines, "a stored object is not what was stored");
                    }
                }
            }
        }
        results
    }

    /// Adopts the objects of the backend in the order of their last use. Failures are retried.
    ///
    /// To be run once, as a task of its own; `stop` ends it early.
    pub async fn recover(&self, stop: &AtomicBool) {
        recovery::recover(self, stop).await;
    }

    /// Whether the index does not have all objects of the backend yet.
    pub fn is_recovering(&self) -> bool {
        !self.recovery.is_done()
    }

    /// Progress of the recovery.
    pub fn recovery(&self) -> Recovery {
        self.recovery.get()
    }

    /// Runs one eviction pass: deletes what is pending, then evicts from the watermark down, and what exceeds a capacity that
    /// was lowered, unless the first recovery is still running. Ends at the first failed delete.
    pub async fn evict(&self) {
        eviction::evict(self).await;
    }

    /// Runs one pass that deletes objects of tenants over quota, unless the first recovery is still running. Ends at the
    /// first failed delete.
    pub async fn evict_over_quota(&self) {
        eviction::evict_over_quota(self).await;
    }

    /// Writes the objects that are not there yet; one result each.
    ///
    /// If a capacity or limits hold strictly, it waits for the end of the recovery. An object whose store was not answered
    /// in time counts, as it may be there, but lookups do not find it before the backend confirms it.
    pub async fn store(&self, batch: Vec<StoreItem>) -> Vec<Result<Stored, L2Error>> {
        if self.is_read_only() {
            return batch.iter().map(|_| Err(self.read_only())).collect();
        }
        store::store(self, batch).await
    }

    /// Deletes objects; one result each. A leased object is kept, unless `force` is set: then its readers get
    /// [`NotFound`](ErrorKind::NotFound).
    pub async fn delete(&self, keys: Vec<ObjectKey>, force: bool) -> Vec<Result<Deleted, L2Error>> {
        if self.is_read_only() {
            return keys.iter().map(|_| Err(self.read_only())).collect();
        }
        let remove = |key: &ObjectKey| {
            self.index
                .remove(key.namespace(), &[key.chunk_hash()], force)
        };
        let (mut in_flight, removed) = DeletesInFlight::start(&self.states, &keys, remove);
        let free = keys.iter().zip(&removed).filter(|(_, was)| was.kept == 0);
        let free = free.map(|(key, _)| key.clone()).collect();
        let mut results = self.adapter.delete(free).await.into_iter();
        let outcome = |(key, was): (&ObjectKey, Removed)| {
            if was.kept > 0 {
                return Ok(Deleted::Kept);
            }
            match results.next().unwrap_or_else(|| Err(missing_result())) {
                Ok(was_there) => {
                    in_flight.succeeded(key);
                    Ok(if was_there {
                        Deleted::Removed
                    } else {
                        Deleted::Absent
                    })
                }
                Err(error) => {
                    // It still takes its bytes. If the index cannot hold it, it is deleted later.
                    let insert =
                        || was.objects > 0 && self.insert(key, was.bytes) == Adopted::Indexed;
                    in_flight.failed(key, &error, insert);
                    Err(error)
                }
            }
        };
        let outcomes = keys.iter().zip(removed).map(outcome).collect();
        // An object that went back to the index may have evicted others.
        self.add_evicted();
        outcomes
    }

    fn read_only(&self) -> L2Error {
        let message = format!("{} is read_only", self.name());
        L2Error::new(ErrorKind::Unsupported, message)
    }

    /// Whether others change the backend too, and nothing that the index counts bounds it.
    fn is_open(&self) -> bool {
        let has_limits =
            self.index.quotas().default_limit.is_some() || self.has_grants.load(Ordering::Relaxed);
        let is_shared = self.adapter.capabilities().shared;
        is_shared && self.config.capacity_bytes.is_none() && !has_limits
    }

    /// Sets the grant of a tenant, or removes it: [`Cache::set_grant`].
    pub fn set_grant(&self, salt: &str, grant: Option<Grant>) {
        if grant.is_some() {
            self.has_grants.store(true, Ordering::Relaxed);
        }
        self.index.set_grant(salt, grant);
    }

    /// Sets the limit of tenants without a grant. A tier that is only loaded from has none.
    pub fn set_default_limit(&self, limit: Option<u64>) {
        if !self.is_read_only() {
            self.index
                .configure_quotas(|quotas| quotas.default_limit = limit);
        }
    }

    /// Whether objects are evicted for others at all.
    fn may_evict(&self) -> bool {
        let policy = self.config.eviction.map(|eviction| eviction.policy);
        policy != Some(EvictionKind::Noop)
    }

    /// Makes these objects the youngest of the eviction order, the last chunk the oldest of them.
    pub fn renew(&self, namespaces: &[Arc<Namespace>], hashes: &[ChunkHash]) {
        if self.may_evict() {
            self.index.renew(self.now(), namespaces, hashes);
        }
    }

    /// Adds what the index evicted to the pending deletes.
    fn add_evicted(&self) {
        self.states.add_pending(|| self.take_evicted());
    }

    fn take_evicted(&self) -> Vec<(ObjectKey, u64)> {
        let evicted = self.index.take_evicted().into_iter();
        let key = |object: ResidentObject| {
            let key = ObjectKey::of(&object.namespace, object.chunk_hash);
            (key, object.bytes)
        };
        evicted.map(key).collect()
    }

    /// Whether the objects exceed the capacity, pending deletes included.
    fn is_over_capacity(&self) -> bool {
        let used = || self.index.usage().used_bytes;
        let used = self
            .states
            .reserved_bytes(None, used, || self.take_evicted());
        self.capacity_bytes()
            .is_some_and(|capacity| used > capacity)
    }

    /// Whether a tenant exceeds a strict limit, pending deletes included.
    fn is_over_limit(&self, salt: &str) -> bool {
        if self.config.quota_mode != QuotaMode::Strict {
            return false;
        }
        let mut limit = None;
        let index = || match self.index.salt_usage(salt) {
            Some(usage) => {
                limit = usage
                    .grant
                    .map_or(self.index.quotas().default_limit, |grant| grant.limit);
                usage.counted_bytes
            }
            None => 0,
        };
        let bytes = self
            .states
            .reserved_bytes(Some(salt), index, || self.take_evicted());
        limit.is_some_and(|limit| bytes > limit)
    }

    /// Returns and resets the evicted objects by cache salt. To be called regularly, as the map grows with the tenants.
    pub fn take_evicted_by_salt(&self) -> BTreeMap<Arc<str>, u64> {
        std::mem::take(&mut *self.evicted_by_salt.lock())
    }

    /// Logs how many corrupt objects were found since the last such line, if one is due.
    pub fn log_suppressed(&self) {
        if let Some(objects) = self.corrupt_log.take_suppressed(Instant::now()) {
            let tier = self.name();
            tracing::warn!(tier, objects, "more stored objects are not what was stored");
        }
    }

    /// Whether it has a capacity or strict limits.
    fn is_strict(&self) -> bool {
        let has_limits = self.config.quota_mode == QuotaMode::Strict;
        has_limits || self.config.capacity_bytes.is_some()
    }

    /// Returns a page of the backend's objects: [`Adapter::list`].
    ///
    /// # Errors
    /// As [`Adapter::list`].
    pub async fn list(&self, from: Option<String>, limit: usize) -> Result<ListPage, L2Error> {
        self.adapter.list(from, limit).await
    }

    /// Returns its usage, pending deletes included.
    pub fn usage(&self) -> AdapterUsage {
        let stats = self.stats();
        let mut bytes_by_cache_salt = self.states.deleting_by_salt();
        let mut from = 0;
        loop {
            let page = self.index.salts(from, 1024);
            for salt in page.entries {
                let bytes = salt.bytes + salt.staged_bytes;
                let bytes = bytes.saturating_sub(self.states.unsent_bytes(&salt.salt));
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
            total_capacity_bytes: self.capacity_bytes().unwrap_or(0),
            objects: stats.objects,
            bytes_by_cache_salt,
        }
    }

    /// Returns the statistics of its index, without those of single tenants. The used bytes are those that the backend
    /// may hold: with pending deletes, without stores that still wait for them.
    pub fn stats(&self) -> Stats {
        let (mut stats, beside) = self.states.read(|| self.index.stats());
        stats.used_bytes = beside.held(stats.used_bytes);
        stats
    }

    /// Returns the usage that the index has of each tenant, `None` for an unknown one, and the bytes that the backend may
    /// hold of it, as in [`Tier::stats`].
    pub fn usages(&self, salts: &[&str]) -> Vec<(Option<SaltUsage>, u64)> {
        let (usages, beside) = self
            .states
            .read_each(salts, || self.index.stats_with(salts).1);
        let held = |(usage, beside): (Option<SaltUsage>, UncountedBytes)| {
            let indexed = usage.as_ref().map_or(0, |usage| usage.counted_bytes);
            (usage, beside.held(indexed))
        };
        usages.into_iter().zip(beside).map(held).collect()
    }

    /// Returns the statistics of the index and the usage of some tenants: [`Cache::stats_with`].
    pub fn stats_with<S: AsRef<str>>(&self, salts: &[S]) -> (Stats, Vec<Option<SaltUsage>>) {
        self.index.stats_with(salts)
    }

    /// Returns the tenants with objects or a grant: [`Cache::salts`].
    pub fn tenants(&self, from: u32, limit: usize) -> Page<SaltUsage> {
        self.index.salts(from, limit)
    }

    /// Bytes that were evicted and are not deleted yet, by cache salt.
    pub fn deleting_by_salt(&self) -> BTreeMap<Arc<str>, u64> {
        self.states.deleting_by_salt()
    }

    /// Whether the backend may have objects that the index lacks, so that a lookup asks it.
    pub fn may_have_more(&self) -> bool {
        self.adapter.capabilities().shared || self.is_recovering()
    }

    /// Whether the index has each of these objects. This neither leases nor uses them.
    pub fn indexes(&self, namespace: &Namespace, hashes: &[ChunkHash]) -> Vec<bool> {
        self.index.contains(namespace, hashes)
    }

    /// The next objects of a model that the index has lost behind `cursor`, from the first call on: [`Cache::removals`].
    pub fn removals(&self, model_name: &str, cursor: u64) -> Events {
        self.index.removals(model_name, cursor)
    }

    /// Calls `wake` at the first removal after a reader of [`Tier::removals`] found none: [`Cache::wake_by_events`].
    pub fn wake_by_removals(&self, wake: impl Fn() + Send + Sync + 'static) {
        self.index.wake_by_events(wake);
    }

    /// Whether the backend has each of these objects.
    ///
    /// # Errors
    /// As [`Adapter::lookup`].
    pub async fn backend_has(&self, objects: Vec<ObjectSpec>) -> Result<Vec<bool>, L2Error> {
        let found = self.adapter.lookup(objects).await?;
        Ok(found.iter().map(Option::is_some).collect())
    }

    /// The last loss of each of these objects, as far as it is remembered; ask for all in one call.
    pub fn losses(&self, asked: &[(&Arc<Namespace>, &[ChunkHash])]) -> Vec<Vec<Option<Loss>>> {
        self.index.losses(asked)
    }

    /// How far back [`Tier::losses`] remembers; `None` if nothing was forgotten yet.
    pub fn losses_since(&self) -> Option<Duration> {
        self.index.losses_since()
    }

    /// The namespaces with objects in the index, at most `limit` of them; start with `from` 0.
    pub fn namespaces(&self, from: u32, limit: usize) -> Page<Arc<Namespace>> {
        self.index.namespaces(from, limit)
    }
}

impl std::fmt::Debug for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tier")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
