//! Between L1 and the tiers: what is stored is written behind, what L1 lacks is prefetched.
//!
//! It runs on threads of its own, so that no tier, however slow, delays what L1 can answer. It knows L1's cache and
//! memory; requests, sessions and connections it never sees.
//!
//! The mutex guards the threads until they are stopped, the other lock which configuration is the current one; no other lock is
//! acquired inside.

mod calls;
mod flights;
mod locate;
mod objects;
mod pending;
mod prefetch;
mod status;
mod store;
mod tenants;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvtier_common::error::{Error, ErrorKind, Result};
use kvtier_common::sync::{Mutex, RwLock};
use kvtier_core::cache::{Cache, Extent, PrefixLease, ReadLease};
use kvtier_core::object_key::ObjectKey;
use kvtier_core::prefetch::Cell;
use kvtier_core::{ChunkHash, Namespace};
use kvtier_l2::tier::{Deleted, Tier, TierConfig, TierEviction};
use kvtier_l2::{Adapter, AdapterConfig, Buffer, L2Error};
use kvtier_memory::Arena;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout_at;

pub use locate::Located;
pub use objects::Cursor;
pub use prefetch::{PrefetchRequest, Prefetched};
pub use store::{StoreCounts, StoredPrompt};

use crate::l1::{Clock, L1Allocator};
use crate::tenants::{Opened, QuotaTier};
use calls::Calls;
use flights::Flights;
use kvtier_config::L2Config;
use kvtier_observe::api::{TierEvictionStatus, TierStatus};
use kvtier_observe::metrics::{Metrics, TierCall, TierReadings};
use objects::TierListing;
use pending::PendingStores;
use prefetch::PromptPrefetch;
use store::{BATCH_BYTES, StoreQueue, TierBatch};
use tenants::TierTenants;

/// Threads that plan and wait; adapters have their own for what blocks.
const THREADS: usize = 2;

/// How often full tiers are looked at.
const EVICTION_INTERVAL: Duration = Duration::from_secs(1);

/// How long an adapter with nothing left to do, and the threads of the tasks, may take to end.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// L2: the tiers behind L1, and the tasks that store to them and load from them.
pub struct L2 {
    /// The current one: a reload replaces it.
    config: RwLock<Arc<L2Config>>,
    tiers: Vec<Arc<Tier>>,
    /// Wakes a tier's eviction: some tenant may be over quota now.
    quotas_changed: Vec<Arc<Notify>>,
    cache: Cache<L1Allocator>,
    arena: Arc<Arena>,
    clock: Arc<Clock>,
    stores: StoreQueue,
    pending: PendingStores,
    flights: Flights,
    calls: Calls,
    /// Permits for running lookups in the tiers.
    lookups: Semaphore,
    /// Capacity for loads, in units of [`LOAD_UNIT`].
    loads: Arc<Semaphore>,
    /// Units that are free while nothing is loaded.
    load_units: usize,
    handle: Handle,
    runtime: Mutex<Option<Runtime>>,
    stop: Arc<AtomicBool>,
}

/// Bytes of one permit for loads: permits are counted in 32 bits.
const LOAD_UNIT: u64 = 4096;

impl L2 {
    /// Opens the tiers and starts. Adopting what they hold goes on behind.
    ///
    /// # Errors
    /// An adapter that cannot be opened, a system out of threads: one line.
    pub fn start(
        config: &L2Config,
        quotas: &Opened,
        cache: Cache<L1Allocator>,
        arena: Arc<Arena>,
        clock: Arc<Clock>,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>> {
        let tiers = || {
            let registry = kvtier_config::adapters::registry();
            let adapters = open(config, |adapter| registry.open(adapter))?;
            Ok(new_tiers(config, quotas, adapters))
        };
        Self::start_with(config, tiers, cache, arena, clock, metrics)
    }

    /// Starts with the tiers that `open` returns, called within a runtime.
    fn start_with(
        config: &L2Config,
        open: impl FnOnce() -> Result<Vec<Arc<Tier>>>,
        cache: Cache<L1Allocator>,
        arena: Arc<Arena>,
        clock: Arc<Clock>,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>> {
        let runtime = runtime()?;
        let tiers = {
            let _within = runtime.enter();
            open()?
        };
        let (stores, queues) = StoreQueue::new(tiers.len(), config.store_queue_bytes);
        let units = usize::try_from(config.load_bytes / LOAD_UNIT).unwrap_or(usize::MAX);
        let load_units = units.clamp(1, Semaphore::MAX_PERMITS);
        let l2 = Arc::new(Self {
            lookups: Semaphore::new(config.prefetch_max_in_flight.max(1)),
            loads: Arc::new(Semaphore::new(load_units)),
            load_units,
            flights: Flights::default(),
            pending: PendingStores::default(),
            calls: Calls::new(metrics, tiers.iter().map(|tier| tier.name())),
            stop: Arc::default(),
            handle: runtime.handle().clone(),
            runtime: Mutex::new(Some(runtime)),
            config: RwLock::new(Arc::new(config.clone())),
            quotas_changed: tiers.iter().map(|_| Arc::default()).collect(),
            tiers,
            cache,
            arena,
            clock,
            stores,
        });
        for (number, (tier, queue)) in l2.tiers.iter().zip(queues).enumerate() {
            let (stop, recovered) = (Arc::clone(&l2.stop), Arc::clone(tier));
            l2.handle
                .spawn(async move { recovered.recover(&stop).await });
            l2.serve(number, queue);
        }
        Ok(l2)
    }

    /// Starts the tasks that store to a tier and evict from it.
    fn serve(self: &Arc<Self>, number: usize, queue: UnboundedReceiver<TierBatch>) {
        self.handle
            .spawn(store::serve(Arc::downgrade(self), number, queue));
        let (stop, tier) = (Arc::clone(&self.stop), Arc::clone(&self.tiers[number]));
        let changed = Arc::clone(&self.quotas_changed[number]);
        let metrics = self.calls.shared_metrics();
        self.handle.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                // A backend that hangs delays no eviction.
                let _ = tokio::time::timeout(EVICTION_INTERVAL, tier.check()).await;
                let is_due = tokio::select! {
                    () = tokio::time::sleep(EVICTION_INTERVAL) => true,
                    () = changed.notified() => false,
                };
                if is_due {
                    tier.evict().await;
                }
                tier.evict_over_quota().await;
                status::count_evicted(&tier, &metrics);
                tier.log_suppressed();
            }
        });
    }

    /// The tenants of the tiers, in their order.
    pub fn tenants(&self) -> impl Iterator<Item = Box<dyn QuotaTier>> {
        let tiers = self.tiers.iter().zip(&self.quotas_changed);
        tiers.map(|(tier, quotas_changed)| {
            Box::new(TierTenants {
                tier: Arc::clone(tier),
                quotas_changed: Arc::clone(quotas_changed),
            }) as Box<dyn QuotaTier>
        })
    }

    /// How the tiers are used.
    pub fn config(&self) -> Arc<L2Config> {
        Arc::clone(&self.config.read())
    }

    /// Checks that a reload can have this configuration.
    ///
    /// # Errors
    /// It changes the capacity of a tier whose backend has its own space, which was divided when it was opened.
    pub fn check_config(&self, config: &L2Config) -> Result<()> {
        let mut tiers = self.tiers.iter().zip(&config.adapters);
        let fixed = tiers.find(|(tier, adapter)| {
            let owns_space = tier.adapter().capabilities().owns_space;
            owns_space && tier.capacity_bytes() != adapter.capacity_bytes()
        });
        fixed.map_or(Ok(()), |(tier, _)| {
            Err(Error::refused(format!(
                "l2-adapter {} max_capacity_gb cannot be changed: the space of its backend is fixed",
                tier.name()
            ))
            .hint("no flag was changed"))
        })
    }

    /// Uses these deadlines, capacities, watermarks and ratios from here on. Anything else of it must be as before.
    pub fn set_config(&self, config: L2Config) {
        for (tier, adapter) in self.tiers.iter().zip(&config.adapters) {
            tier.set_limits(adapter.capacity_bytes(), eviction(adapter));
        }
        *self.config.write() = Arc::new(config);
    }

    /// Handle of the runtime that the tiers' tasks run on.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// What waits to be stored, and what was dropped.
    pub fn store_counts(&self) -> StoreCounts {
        self.stores.counts()
    }

    /// Objects being loaded.
    pub fn loading(&self) -> usize {
        self.flights.len()
    }

    /// The tiers, in the order in which they are asked.
    pub fn tiers(&self) -> &[Arc<Tier>] {
        &self.tiers
    }

    /// At most `most` objects of a tier, of one model or of all.
    ///
    /// # Errors
    /// As the adapter's; [`kvtier_l2::ErrorKind::Refused`] for an invalid cursor.
    pub async fn list(
        &self,
        tier: usize,
        from: Cursor,
        model: Option<String>,
        most: usize,
    ) -> Result<TierListing, L2Error> {
        let tier = Arc::clone(&self.tiers[tier]);
        let task = async move { objects::list(&tier, from, model.as_deref(), most).await };
        // Where adapters live.
        self.handle
            .spawn(task)
            .await
            .unwrap_or_else(|error| Err(objects::lost(error)))
    }

    /// Deletes objects of a tier; one result each. What waits to be stored there is not stored, and what is being stored is
    /// deleted once its writes have ended. With `force` also what is being read there. Continues if the caller stops waiting.
    ///
    /// # Errors
    /// When the task fails as a whole: one line.
    pub async fn delete(
        &self,
        tier: usize,
        keys: Vec<ObjectKey>,
        force: bool,
    ) -> Result<Vec<Result<Deleted, L2Error>>, L2Error> {
        self.pending.revoke(tier, &keys, force);
        let tier = Arc::clone(&self.tiers[tier]);
        let task = async move { tier.delete(keys, force).await };
        // Where adapters live.
        self.handle.spawn(task).await.map_err(objects::lost)
    }

    /// Prefetches by their phase, as [`kvtier_observe::metrics::PrefetchPhase::ALL`].
    pub fn prefetches(&self) -> [u64; 3] {
        self.calls.phases()
    }

    /// Batches being stored, all tiers together.
    pub fn storing(&self) -> u64 {
        let of_tier = |tier| self.calls.of_tier(tier)[TierCall::Store as usize];
        (0..self.tiers.len()).map(of_tier).sum()
    }

    /// Figures of each tier.
    pub fn readings(&self) -> Vec<TierReadings> {
        let tiers = 0..self.tiers.len();
        tiers.map(|tier| status::readings(self, tier)).collect()
    }

    /// State of each tier.
    pub fn adapters_status(&self) -> Vec<TierStatus> {
        let tiers = 0..self.tiers.len();
        tiers.map(|tier| status::status(self, tier)).collect()
    }

    /// Names of the tiers whose adapter does not work, or whose breaker is open. No I/O, so a health probe may ask.
    pub fn failed_tiers(&self) -> Vec<String> {
        let failed = self
            .tiers
            .iter()
            .filter(|tier| !status::of_adapter(tier).is_healthy);
        failed.map(|tier| tier.name().to_owned()).collect()
    }

    /// Names of the tiers whose last store found no space.
    pub fn full_tiers(&self) -> impl Iterator<Item = &str> {
        let full = self.tiers.iter().filter(|tier| tier.is_full());
        full.map(|tier| tier.name())
    }

    /// Eviction of the tiers that evict.
    pub fn eviction_status(&self) -> Vec<TierEvictionStatus> {
        let tiers = self.tiers.iter();
        tiers.filter_map(|tier| status::eviction(tier)).collect()
    }

    /// Stores objects of `len` bytes of this prompt, which have just become resident, in every tier.
    pub fn store(
        self: &Arc<Self>,
        prompt: &Arc<StoredPrompt>,
        namespace: &Arc<Namespace>,
        hashes: &[ChunkHash],
        len: u64,
    ) {
        let objects = (BATCH_BYTES / len.max(1)).max(1);
        for hashes in hashes.chunks(usize::try_from(objects).unwrap_or(usize::MAX)) {
            prompt.store(self, namespace, hashes, len);
        }
    }

    /// Stores again what of a hit a tier could not store earlier: all at once if the tiers have stored since, else what one hit
    /// has per [`store::RETRY_INTERVAL`]. `hashes` are those of the prompt.
    pub fn store_again(self: &Arc<Self>, hit: &PrefixLease<L1Allocator>, hashes: &[ChunkHash]) {
        if !self.stores.may_retry(self.now()) {
            return;
        }
        let unstored = hit.take_unstored();
        if unstored.is_empty() {
            return;
        }
        let namespaces = unstored.iter().map(|(row, _)| &row.namespace);
        let prompt = StoredPrompt::new(namespaces, hashes.into());
        for (row, chunks) in unstored {
            let hashes = chunks
                .iter()
                .filter_map(|chunk| hashes.get(*chunk).copied());
            self.store(
                &prompt,
                &row.namespace,
                &hashes.collect::<Vec<_>>(),
                row.object_bytes,
            );
        }
    }

    /// A tier could not store these objects now: the next hit tries again.
    fn set_unstored(&self, namespace: &Namespace, hashes: &[ChunkHash]) {
        self.stores.is_failing.store(true, Ordering::Release);
        self.cache.set_unstored(namespace, hashes);
    }

    /// Names a host that is likely to have what is looked up next.
    pub fn prefer(&self, host: &str) {
        self.tiers
            .iter()
            .for_each(|tier| tier.adapter().prefer(host));
    }

    /// Brings as much of a prompt into L1 as there is. A request that is `cancelled` before it asks the tiers asks none. After that
    /// what they have is loaded all the same: a client whose deadline is shorter than the tiers' answers would never hit.
    pub async fn prefetch(
        self: &Arc<Self>,
        request: &Arc<PrefetchRequest>,
        cancelled: impl Fn() -> bool,
    ) -> Prefetched {
        let (l2, request) = (Arc::clone(self), Arc::clone(request));
        PromptPrefetch { l2, request }.run(cancelled).await
    }

    /// Brings those of these objects into L1 that a tier has, each for itself; returns what was loaded, and leases on what of them
    /// L1 has.
    pub async fn fetch(
        self: &Arc<Self>,
        request: &Arc<PrefetchRequest>,
    ) -> (Vec<Cell>, Vec<ReadLease<L1Allocator>>) {
        let (l2, request) = (Arc::clone(self), Arc::clone(request));
        let mut holds = Vec::new();
        let fetch = PromptPrefetch { l2, request };
        let loaded = fetch.fetch(|| false, &mut holds).await;
        (loaded, holds)
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn buffer(&self, extent: Extent, hold: Arc<dyn std::any::Any + Send + Sync>) -> Buffer {
        Buffer::new(Arc::clone(&self.arena), extent, hold)
    }

    /// Ends: what waits to be stored is still stored, as long as the configuration allows. Returns whether no tier can read or
    /// write L1 any more.
    pub fn close(&self) -> bool {
        let Some(runtime) = self.runtime.lock().take() else {
            return self.has_released_l1();
        };
        self.stores.end();
        self.stop.store(true, Ordering::Relaxed);
        runtime.block_on(async {
            let until = tokio::time::Instant::now() + self.config().drain_timeout;
            if timeout_at(until, self.stores.drained()).await.is_err() {
                let left = self.stores.counts();
                tracing::warn!(
                    objects = left.queued_objects,
                    bytes = left.queued_bytes,
                    "objects were not stored in time and are dropped"
                );
            }
            for tier in &self.tiers {
                // What it is still doing has its buffers.
                let _ = timeout_at(until.max(soon()), tier.adapter().close()).await;
            }
        });
        // Drops the tasks, and with them the buffers of calls that only wait.
        runtime.shutdown_timeout(CLOSE_TIMEOUT);
        self.has_released_l1()
    }

    /// Whether no buffer of a store or of a load is left, whose last owner may be a thread, a process or a device that hangs.
    fn has_released_l1(&self) -> bool {
        let is_loading = self.loads.available_permits() < self.load_units;
        !is_loading && self.stores.counts().queued_bytes == 0
    }
}

/// When an adapter should be done that has nothing left to do.
fn soon() -> tokio::time::Instant {
    tokio::time::Instant::now() + CLOSE_TIMEOUT
}

fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("kvtier-l2")
        .enable_all()
        .build()
        .map_err(|error| Error::io("no runtime for L2", error))
}

/// Opens the adapters, within a runtime.
fn open(
    config: &L2Config,
    one: impl Fn(&AdapterConfig) -> Result<Arc<dyn Adapter>, L2Error>,
) -> Result<Vec<Arc<dyn Adapter>>> {
    let open = |adapter: &AdapterConfig| {
        for warning in &adapter.warnings {
            tracing::warn!("--l2-adapter: {warning}");
        }
        one(adapter).map_err(|error| {
            Error::new(
                ErrorKind::Io,
                format!("--l2-adapter: type {:?}", adapter.kind),
            )
            .source(error)
        })
    };
    config.adapters.iter().map(open).collect()
}

fn eviction(adapter: &AdapterConfig) -> Option<TierEviction> {
    adapter.eviction.map(|eviction| TierEviction {
        policy: eviction.policy,
        trigger_watermark: eviction.trigger_watermark,
        eviction_ratio: eviction.eviction_ratio,
    })
}

/// Tiers with empty indexes over their adapters.
fn new_tiers(
    config: &L2Config,
    quotas: &Opened,
    adapters: Vec<Arc<dyn Adapter>>,
) -> Vec<Arc<Tier>> {
    let tier = |(adapter, opened): (&AdapterConfig, Arc<dyn Adapter>)| {
        let name = adapter.tier().to_owned();
        let limits = quotas.config(&name);
        let tier = TierConfig {
            capacity_bytes: adapter.capacity_bytes(),
            eviction: eviction(adapter),
            quota_mode: limits.mode,
            quota_default: limits.default_limit,
            reserve_bytes: config.min_free_bytes,
            name,
        };
        let tier = Tier::new(opened, tier);
        // Before it looks at what it holds.
        for (salt, grant) in quotas.grants(tier.name()) {
            tier.set_grant(salt, Some(grant));
        }
        Arc::new(tier)
    };
    let adapters = config.adapters.iter().zip(adapters);
    adapters.map(tier).collect()
}

impl std::fmt::Debug for L2 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("L2")
            .field("config", &self.config)
            .field("tiers", &self.tiers)
            .finish_non_exhaustive()
    }
}
