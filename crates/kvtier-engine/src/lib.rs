//! The cache engine: what each request of the protocol does.
//!
//! [`Engine::handle`] takes a decoded request and answers it through a [`Reply`]; it may be called from any number of threads. The
//! caller keeps the order that the protocol promises within one connection. Handlers wait for nothing but the short
//! locks of the tables and the copy of the bytes of their request.

#![forbid(unsafe_code)]

mod answer;
mod apart;
mod checksums;
mod chunk_sizes;
mod deadline;
mod devices;
mod engine_driven;
mod fingerprint;
mod housekeeping;
mod in_flight;
mod instances;
mod layout;
mod lookup;
mod lookups;
mod objects;
#[cfg(test)]
mod quota_tests;
mod refusal;
mod refusals;
mod registration;
mod rehearsal;
mod reply;
mod retrieve;
mod scrape;
mod staging;
mod status;
mod store;
mod tensors;
#[cfg(test)]
mod testing;
mod transfers;
mod warm;
mod worker_range;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

pub use answer::Answer;
pub use checksums::ChecksumError;
pub use housekeeping::INTERVAL as HOUSEKEEPING_INTERVAL;
pub use kvtier_l1::Clock;
pub use rehearsal::Rehearsal;
pub use rehearsal::rehearse;
pub use reply::{Reply, ReplyTarget};
pub use warm::{WarmError, WarmUp, Warmed};

use kvtier_core::hashing::ChunkHasher;
use kvtier_core::object_key::{KeyError, KeyScope};
use kvtier_core::prompt::{Prompt, PromptMemory, PromptReader};
use kvtier_proto::generation::Release;
use kvtier_proto::key::CacheKey;
use kvtier_proto::operation::Operation;
use kvtier_proto::request::Request;
use kvtier_proto::response::Response;
use kvtier_sync::Mutex;

use apart::Apart;
use chunk_sizes::ChunkSizes;
use devices::Devices;
use instances::Instances;
use kvtier_config::ServerConfig;
use kvtier_l1::{L1, L1Tenants, create_arena};
use kvtier_metrics::{Metrics, Readings};
use kvtier_tenants::{Opened, QuotaTier, Quotas, Salts};
use kvtier_tiers::L2;
pub(crate) use lookups::Lookups;
use refusals::Refusals;
use staging::StagingBudget;
use transfers::Transfers;
use warm::WarmUps;

/// Bytes for remembered prompts. 16 MiB hold the token ids of about 4 million tokens, the prompts of some hundred
/// requests in flight.
const PROMPT_MEMORY_BYTES: usize = 16 << 20;

/// Seed of sha256_cbor's first hash where PYTHONHASHSEED is not set, as vLLM 0.32 and LMCache 0.5.6 have it.
const HASH_SEED: &str = "vllm-none-hash";

/// Longest wait for the result of a lookup, whatever its client asks for.
const MAX_WAIT: Duration = Duration::from_secs(600);

/// The client of a request, as its connection shows it.
#[derive(Debug, Clone, Copy)]
pub struct Caller {
    /// Number of the connection since start.
    pub connection: u64,
    /// What is known of the client's release.
    pub release: Release,
    /// Whether the client has the chunk size from this process.
    pub knows_chunk_size: bool,
}

/// What a clear took out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cleared {
    /// Objects gone.
    pub objects: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Objects kept because of a lease.
    pub kept: usize,
}

/// The cache engine.
pub struct Engine {
    config: Arc<ServerConfig>,
    chunk_size: NonZeroUsize,
    l1: L1,
    prompts: PromptMemory,
    instances: Instances,
    staging: Arc<StagingBudget>,
    devices: Devices,
    apart: Apart,
    /// All requests are answered and all objects stored; only memory is still to be released.
    settled: AtomicBool,
    /// Whether requests that wait for a tier are answered with what is known.
    waits_ended: tokio::sync::watch::Sender<bool>,
    lookups: Arc<Lookups>,
    chunk_sizes: ChunkSizes,
    refusals: Refusals,
    transfers: Transfers,
    warm_ups: Arc<WarmUps>,
    metrics: Arc<Metrics>,
    /// When each scheduler's connection last pinged. Bounded by forgetting the dead ones.
    scheduler_pings: Mutex<HashMap<u64, Duration>>,
    /// Operations that were asked for and are not served; each is logged once.
    unserved: Mutex<Vec<Operation>>,
    prefaulted: AtomicU64,
    clock: Arc<Clock>,
    /// The tiers below L1, if there are any.
    l2: Option<Arc<L2>>,
    quotas: Arc<Quotas>,
    salts: Salts,
}

impl Engine {
    /// Makes the arena and an empty cache. Takes milliseconds whatever the size of L1.
    ///
    /// # Errors
    /// One line with what is unavailable and the flag that asks for it.
    pub fn new(config: Arc<ServerConfig>, metrics: Arc<Metrics>) -> Result<Self, String> {
        let chunk_size = NonZeroUsize::new(config.chunk_size as usize)
            .ok_or("--chunk-size: 0 is not allowed")?;
        let seed = std::env::var("PYTHONHASHSEED").unwrap_or_else(|_| HASH_SEED.into());
        let hasher = ChunkHasher::new(config.hash_algorithm, chunk_size, &seed);
        let salts = Salts::open(&config.tenants)?;
        let quotas = Opened::open(&config, &salts)?;
        let arena = Arc::new(create_arena(&config)?);
        let devices = Devices::find(&config, &arena)?;
        if let Some(warning) = devices.warning(&config) {
            tracing::warn!("{warning}");
        }
        let l1 = L1::create(&config, &quotas, arena, &devices.numa_nodes())?;
        let clock = Arc::new(Clock::start());
        let l2 = match &config.l2 {
            None => None,
            Some(l2) => Some(L2::start(
                l2,
                &quotas,
                l1.cache.clone(),
                Arc::clone(&l1.arena),
                Arc::clone(&clock),
                Arc::clone(&metrics),
            )?),
        };
        let own = L1Tenants {
            cache: l1.cache.clone(),
            clock: Arc::clone(&clock),
        };
        let tiers = std::iter::once(Box::new(own) as Box<dyn QuotaTier>);
        let tiers = tiers.chain(l2.iter().flat_map(|l2| l2.tenants()));
        let quotas = Quotas::new(quotas, tiers.collect());
        Ok(Self {
            chunk_size,
            staging: Arc::new(StagingBudget::new(l1.staging_limit())),
            l1,
            l2,
            quotas: Arc::new(quotas),
            salts,
            prompts: PromptMemory::new(hasher, PROMPT_MEMORY_BYTES),
            instances: Instances::default(),
            devices,
            apart: Apart::default(),
            settled: AtomicBool::new(false),
            waits_ended: tokio::sync::watch::Sender::new(false),
            lookups: Arc::default(),
            chunk_sizes: ChunkSizes::new(chunk_size),
            refusals: Refusals::default(),
            transfers: Transfers::default(),
            warm_ups: Arc::default(),
            metrics,
            scheduler_pings: Mutex::default(),
            unserved: Mutex::default(),
            prefaulted: AtomicU64::new(0),
            clock,
            config,
        })
    }

    /// The configuration it runs with.
    pub fn config(&self) -> &ServerConfig {
        &self.config
    }

    /// What it counts.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Reads token ids for [`Engine::handle`]: remembered prompts are neither decoded nor hashed.
    pub fn prompt_reader(&self) -> PromptReader<'_> {
        self.prompts.reader()
    }

    /// Its clock.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The time of everything below.
    fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Serves one request. The reply is used before this returns, or later.
    pub fn handle(self: &Arc<Self>, caller: Caller, request: &Request<'_, Prompt>, reply: Reply) {
        match request {
            Request::Store(store) => self.store(caller, store, reply),
            Request::Retrieve(retrieve) => self.retrieve(caller, retrieve, reply),
            Request::RegisterKvCache(registration) => {
                self.register_pages(caller, registration, reply);
            }
            Request::UnregisterKvCache { instance }
            | Request::UnregisterEngineDriven { instance } => {
                self.unregister(request.operation(), *instance, reply);
            }
            Request::WaitPrefetchStatus { job, timeout } => {
                self.wait_lookup_result(caller, *job, timeout.clamped(MAX_WAIT), reply);
            }
            request => reply.answer(self.answer(caller, request)),
        }
    }

    /// Serves a request that never waits.
    fn answer(&self, caller: Caller, request: &Request<'_, Prompt>) -> Answer {
        match request {
            Request::GetChunkSize => Answer::from(Response::Int(i64::from(self.config.chunk_size))),
            Request::GetExperimental => Answer::from(Response::Texts(Vec::new())),
            Request::Noop => Answer::from(Response::Text("OK".into())),
            Request::Ping { instance } => self.ping(caller, *instance),
            Request::ReportBlockAllocation(_) => Answer::nothing(),
            Request::Clear { force } => {
                self.clear(*force);
                Answer::nothing()
            }

            Request::RegisterEngineDriven(context) => self.register_engine_driven(caller, context),

            Request::Lookup { key, tp_size } => self.lookup(caller, key, *tp_size),
            Request::QueryPrefetchStatus { job } | Request::QueryPrefetchLookupHits { job } => {
                self.lookup_result(caller, *job)
            }
            Request::FreeLookupLocks { key, .. } => self.free_lookup(caller, key),
            Request::EndSession { request_id } => self.end_session(caller, request_id),

            Request::PrepareStore { key, instance } => self.prepare_store(key, *instance),
            Request::CommitStore {
                key,
                instance,
                data,
            } => self.commit_store(key, *instance, data),
            Request::PrepareRetrieve { key, instance } => {
                self.prepare_retrieve(caller, key, *instance)
            }
            Request::CommitRetrieve { key, instance } => self.commit_retrieve(key, *instance),

            // Between servers: there is nothing here for another server, and it learns so at once.
            Request::P2pLookupAndLock { .. } => Answer::from(Response::Int(0)),
            Request::P2pQueryLookupResults { .. } => Answer::from(Response::Addresses(Vec::new())),
            Request::P2pUnlockObjects { .. } => Answer::nothing(),
            other => self.unserved(other.operation()),
        }
    }

    /// Answers an operation that is not served: its client learns so at once, the operator once.
    pub fn unserved(&self, operation: Operation) -> Answer {
        let mut known = self.unserved.lock();
        if !known.contains(&operation) {
            known.push(operation);
            tracing::warn!(
                operation = operation.name(),
                "this operation is not served here; said once"
            );
        }
        Answer::unserved(operation)
    }

    /// Drops the objects of L1 that have no lease, or all of them.
    pub fn clear(&self, force: bool) -> Cleared {
        let removed = self.l1.cache.clear(force);
        tracing::info!(
            objects = removed.objects,
            bytes = removed.bytes,
            kept = removed.kept,
            force,
            "cleared L1"
        );
        Cleared {
            objects: removed.objects,
            bytes: removed.bytes,
            kept: removed.kept,
        }
    }

    /// Figures for `/metrics`.
    pub fn readings(&self) -> Readings {
        let stats = self.l1.cache.stats();
        let prompts = self.prompts.stats();
        let (lookups, unread) = self.lookups.counts();
        let l2 = self.l2.as_ref();
        let stores = l2.map(|l2| l2.store_counts()).unwrap_or_default();
        let tiers = l2.map_or_else(Vec::new, |l2| l2.readings());
        let tier_errors: u64 = tiers.iter().map(|tier| tier.accounting_errors).sum();
        Readings {
            capacity_bytes: stats.capacity_bytes,
            used_bytes: stats.used_bytes,
            staged_bytes: stats.staged_bytes,
            staging_limit_bytes: self.staging.limit(),
            largest_free_bytes: self.l1.largest_free(),
            objects: stats.objects,
            leased_objects: stats.leased_objects,
            prefaulted_bytes: self.prefaulted.load(Ordering::Relaxed),
            sessions: lookups as u64,
            unread_lookups: unread as u64,
            instances: self.instances.len() as u64,
            gpus: self.devices.figures(),
            pinned_bytes: self.devices.pinned_bytes(),
            evicted_objects: stats.evicted_objects_total,
            evicted_bytes: stats.evicted_bytes_total,
            accounting_errors: stats.accounting_errors + tier_errors,
            prompt_chunks_known: prompts.chunks_known,
            prompt_chunks_hashed: prompts.chunks_hashed,
            l2_prefetches: l2.map_or([0; 3], |l2| l2.prefetches()),
            l2_queued_bytes: stores.queued_bytes,
            l2_dropped_objects: stores.dropped_objects,
            l2_loading_objects: l2.map_or(0, |l2| l2.loading() as u64),
            tiers,
        }
    }

    /// The tiers below L1, if there are any.
    pub fn l2(&self) -> Option<&Arc<L2>> {
        self.l2.as_ref()
    }

    /// What tenants may have.
    pub fn quotas(&self) -> &Arc<Quotas> {
        &self.quotas
    }

    /// Answers the requests that wait for a tier, now and from now on, with what is known by then.
    pub fn end_waits(&self) {
        self.waits_ended.send_replace(true);
    }

    /// Ends the transfers that run by themselves. When this returns, every request that waits for one is answered,
    /// except those on a GPU that does not respond.
    pub fn end_transfers(&self) {
        self.devices.stop();
    }

    /// Stores what waits to be stored, takes the pool's name away, so that no segment outlives the server, ends what is done
    /// apart, and gives the arena back to the driver. To be called when nothing is asked any more.
    pub fn close(&self) {
        // Before anything that a driver may hold up.
        if let Some(l2) = &self.l2 {
            l2.close();
        }
        self.unlink_pool();
        self.settled.store(true, Ordering::Release);
        self.apart.finish();
        self.devices.close();
    }

    /// Whether nothing is lost when the process ends now, as far as [`Engine::close`] has come.
    pub fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Acquire)
    }

    /// How tenants are called.
    pub fn salts(&self) -> &Salts {
        &self.salts
    }

    /// Whose objects a request means.
    fn scope<T>(&self, key: &CacheKey<'_, T>) -> Result<KeyScope, KeyError> {
        self.salts.scope(key)
    }

    /// Takes the pool's name away. May be called at any time.
    pub fn unlink_pool(&self) {
        self.l1.arena.unlink();
    }
}
