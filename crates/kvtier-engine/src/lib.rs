//! The cache engine: what each request of the protocol does.
//!
//! [`Engine::handle`] takes a decoded request and answers it through a [`Reply`]; it may be called from any number of threads. The
//! caller keeps the order that the protocol promises within one connection. Handlers wait for nothing but the short
//! locks of the tables and the copy of the bytes of their request.
//!
//! Four services do the work, each with tables and locks of its own. A service calls only those below it:
//!
//! | service | requests |
//! | --- | --- |
//! | `admin` | HTTP: status, metrics, objects, prefetch jobs; eviction to the watermark |
//! | `workers` | registrations, unregistrations, pings; an instance that has left ends its transfers and lookups |
//! | `transfers` | stores and retrieves, by the server's copy or by PREPARE and COMMIT |
//! | `lookups` | lookups, their results, and the ends of sessions |
//! | `context` | no requests: configuration, L1, tiers, the table of workers, devices, clock, metrics |
//!
//! A lock of a service may be held while one below it is taken, never the other way round; the cache's lock is the last.
//!
//! `unserved` guards which operations were refused and logged; no other lock is acquired inside.

#![forbid(unsafe_code)]

mod admin;
mod answer;
mod blend;
mod client_warnings;
mod context;
mod devices;
mod instances;
mod kv_events;
mod lookups;
mod payload;
mod preflight;
mod reply;
mod sessions;
#[cfg(test)]
mod testing;
mod transfers;
mod workers;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub use admin::{
    Admin, ChecksumError, ExplainError, PrefetchError, PrefetchJob, PrefetchResult, TenantView,
};
use answer::BLEND_VERSION;
pub use answer::EngineAnswer;
use blend::Blend;
pub use kv_events::TierChunks;
pub use kvtier_common::error::{Error, ErrorKind, Result};
pub use kvtier_proto::session::{MAX_BYTES as MAX_SESSION_BYTES, SessionAction};
use kvtier_store::l1::Clock;
pub use payload::{Payload, PayloadPart};
pub use preflight::{EarlierL1, Preflight, preflight};
pub use reply::{Reply, ReplyTarget};
pub use sessions::SessionResult;

use kvtier_common::state::StateDir;
use kvtier_common::sync::{Mutex, RateLimited, RwLock};
use kvtier_config::{EngineType, ServerConfig};
use kvtier_core::ObjectKey;
use kvtier_core::prompt::{Prompt, PromptReader};
use kvtier_l2::{Buffer, ObjectSpec, StoreItem};
use kvtier_observe::metrics::Metrics;
use kvtier_observe::trace::Tracer;
use kvtier_proto::chunk::CHUNK_TOKENS_FEATURE;
use kvtier_proto::generation::Release;
use kvtier_proto::key::{KeyHead, OBJECTS_FEATURE};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{HELD_BLOCKS_FEATURE, InstanceId, Request};
use kvtier_proto::response::Response;
use kvtier_store::l1::{L1, L1Tenants, ServerInstance, open_arena};
use kvtier_store::tenants::{QuotaTier, Quotas, Salts};
use kvtier_store::tiers::L2;

use client_warnings::{ClientWarnings, Insertion};
use context::Context;
use devices::Devices;
use instances::Instances;
use kv_events::{KV_EVENTS_FEATURE, KvEventSource};
use lookups::Lookups;
use sessions::table::AgentSessions;
use transfers::Transfers;
use workers::Workers;

/// Interval between calls of [`Engine::housekeep`].
pub const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(1);

/// Longest wait for the result of a lookup, whatever its client asks for.
const MAX_WAIT: Duration = Duration::from_secs(600);

/// The client of a request, as its connection shows it.
#[derive(Debug, Clone, Copy)]
pub struct Caller {
    /// Number of the connection since start.
    pub connection: u64,
    /// What is known of the client's release.
    pub release: Release,
    /// The releases that it may be of, for people.
    pub releases: &'static str,
    /// Whether the client has the chunk size from this process.
    pub knows_chunk_size: bool,
    /// Whether the chunk size that its requests get was negotiated for its connection, as clients of LMCache do from 0.5.7 on.
    pub negotiates_chunk_size: bool,
    /// Whether its workers register again after a restart of the server, if that is known.
    pub registers_again: Option<bool>,
    /// Whether a worker has the id that its client names, on every connection.
    pub names_workers: bool,
}

/// The file in the state directory that says where L1 is.
const L1_RECORD: &str = "l1";

/// Opens the state directory, or returns why nothing is kept.
///
/// # Errors
/// Another server has it.
fn open_state(config: &ServerConfig) -> Result<Result<StateDir>> {
    let settings = &config.state;
    let base = match &settings.base {
        Ok(base) => base,
        Err(reason) => return Ok(Err(reason.clone())),
    };
    match StateDir::open(base, &settings.instance) {
        Ok(state) => Ok(Ok(state)),
        Err(error) if error.kind() == ErrorKind::InUse => Err(error.context("--state-dir")),
        Err(error) => {
            tracing::warn!(%error, "--state-dir cannot be used; nothing that is set at run time outlives this process");
            Ok(Err(error.context("--state-dir cannot be used")))
        }
    }
}

/// The cache engine.
///
/// ```
/// use std::sync::Arc;
///
/// use kvtier_config::ServerConfig;
/// use kvtier_engine::Engine;
/// use kvtier_observe::metrics::Metrics;
///
/// let config = ServerConfig::from_flags(&["--l1-size-gb", "0.0078125", "--shm-name", ""])?;
/// let engine = Engine::new(Arc::new(config), Arc::new(Metrics::new()))?;
/// assert!(engine.admin().scrape().contains("kvtier_l1_objects 0"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Engine {
    context: Arc<Context>,
    admin: Admin,
    workers: Arc<Workers>,
    transfers: Arc<Transfers>,
    lookups: Arc<Lookups>,
    /// Operations that were asked for and are not served; each is logged once.
    unserved: Mutex<Vec<Operation>>,
    is_drained: AtomicBool,
    /// Requests so far.
    requests: AtomicU64,
}

impl Engine {
    /// Makes the arena and an empty cache. Takes milliseconds whatever the size of L1.
    ///
    /// # Errors
    /// One line with what is unavailable and the flag that asks for it.
    pub fn new(config: Arc<ServerConfig>, metrics: Arc<Metrics>) -> Result<Self> {
        let (context, quotas) = Self::open(config, metrics)?;
        let engine = Self::over(context, quotas);
        engine.transfers.inherit();
        Ok(engine)
    }

    fn open(config: Arc<ServerConfig>, metrics: Arc<Metrics>) -> Result<(Context, Quotas)> {
        let tracing = config.tracing.as_ref();
        let tracer = Tracer::start(tracing, &config.instance_id, config.session_ttl, &metrics)?;
        let chunk_size = NonZeroUsize::new(config.chunk_size as usize)
            .ok_or_else(|| Error::refused("--chunk-size: 0 is not allowed"))?;
        let salts = Salts::open(&config.tenants)?;
        let state = open_state(&config)?;
        let quotas = kvtier_store::tenants::Opened::open(&config, state.as_ref().ok(), &salts)?;
        // A file that others may write says nothing.
        let record = state
            .as_ref()
            .ok()
            .and_then(|state| state.file(L1_RECORD).ok());
        let instance = state
            .as_ref()
            .map_err(Clone::clone)
            .map(|state| ServerInstance {
                folder: state.id(),
                tenants: salts.number(),
                record: record.as_deref(),
            });
        let (arena, kept) = open_arena(&config, instance)?;
        let arena = Arc::new(arena);
        let devices = Devices::find(&config, &arena)?;
        if let Some(warning) = devices.warning(&config) {
            tracing::warn!("{warning}");
        }
        let l1 = L1::create(&config, &quotas, arena, kept, &devices.numa_nodes())?;
        let clock = Arc::new(Clock::start(l1.heritage.age));
        let start = |l2| {
            let (cache, arena) = (l1.cache.clone(), Arc::clone(&l1.arena));
            let (clock, metrics) = (Arc::clone(&clock), Arc::clone(&metrics));
            L2::start(l2, &quotas, cache, arena, clock, metrics)
        };
        let l2 = config.l2.as_ref().map(start).transpose()?;
        let own = L1Tenants {
            cache: l1.cache.clone(),
            clock: Arc::clone(&clock),
        };
        let tiers = std::iter::once(Box::new(own) as Box<dyn QuotaTier>);
        let tiers = tiers.chain(l2.iter().flat_map(|l2| l2.tenants()));
        let quotas = Quotas::new(quotas, tiers.collect());
        let blend = match config.engine_type {
            EngineType::Default => None,
            EngineType::Blend => {
                let max_segments = config.blend_max_segments as usize;
                Some(Arc::new(Blend::open(max_segments, state.as_ref().ok())?))
            }
        };
        let kv_events = KvEventSource::new(config.kv_event_log_size, blend.is_some());
        let context = Context {
            config: RwLock::new(config),
            chunk_size,
            l1,
            l2,
            salts,
            state,
            instances: Instances::default(),
            devices,
            metrics,
            tracer,
            clock,
            client_warnings: ClientWarnings::default(),
            kv_events,
            sessions: AgentSessions::default(),
            blend,
        };
        Ok((context, quotas))
    }

    /// The services over this context.
    fn over(context: Context, quotas: Quotas) -> Self {
        let context = Arc::new(context);
        let lookups = Arc::new(Lookups::new(&context));
        let transfers = Arc::new(Transfers::new(&context, &lookups));
        let workers = Arc::new(Workers::new(&context, &transfers, &lookups));
        Self {
            admin: Admin::new(&context, &workers, &transfers, &lookups, quotas),
            context,
            workers,
            transfers,
            lookups,
            unserved: Mutex::default(),
            is_drained: AtomicBool::new(false),
            requests: AtomicU64::new(0),
        }
    }

    /// The configuration it runs with.
    pub fn config(&self) -> Arc<ServerConfig> {
        self.context.config()
    }

    /// Metrics of the engine.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.context.metrics
    }

    /// What operators ask for.
    pub fn admin(&self) -> &Admin {
        &self.admin
    }

    /// Reads token ids for [`Engine::handle`]: remembered prompts are neither decoded nor hashed.
    pub fn prompt_reader(&self) -> PromptReader<'_> {
        self.lookups.prompts.reader()
    }

    /// Keys of objects that a request with this key is about, at most: chunks of its prompt, times ranks, times object groups.
    pub fn objects(&self, key: &KeyHead<'_>) -> u64 {
        let chunks = key.token_count / self.context.chunk_size(key.chunk_tokens);
        let ranks = key.worker_id.map_or(key.world_size, |_| 1);
        let groups = self
            .context
            .instances
            .groups(key.model_name, key.world_size);
        (chunks as u64)
            .saturating_mul(ranks.into())
            .saturating_mul(groups as u64)
    }

    /// Clock of all deadlines.
    pub fn clock(&self) -> &Clock {
        &self.context.clock
    }

    /// The tiers below L1, if there are any.
    pub fn l2(&self) -> Option<&Arc<L2>> {
        self.context.l2.as_ref()
    }

    /// Leases an object of L1, for as long as its buffer lives: for peers that read it.
    pub fn hold(&self, key: &ObjectKey) -> Option<StoreItem> {
        let Context { l1, clock, .. } = &*self.context;
        let (namespace, lease) = l1.cache.hold_any_layout(clock.now(), key)?;
        let extent = *lease.extents().first()?;
        let object = ObjectSpec {
            key: key.clone(),
            len: extent.len,
            layout: namespace.layout(),
        };
        let from = Buffer::new(Arc::clone(&l1.arena), extent, Arc::new(lease));
        Some(StoreItem { object, from })
    }

    /// Names of tenants inside the server.
    pub fn salts(&self) -> &Salts {
        &self.context.salts
    }

    /// Limits and shares of tenants.
    pub fn quotas(&self) -> &Arc<Quotas> {
        &self.admin.quotas
    }

    /// Serves one request. The reply is used before this returns, or later.
    pub fn handle(&self, caller: Caller, request: &Request<'_, Prompt>, reply: Reply) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        match request {
            Request::Store(store) => self.transfers.store(caller, store, reply),
            Request::Retrieve(retrieve) => self.transfers.retrieve(caller, retrieve, reply),
            Request::RegisterKvCache(registration) => {
                self.workers.register_pages(caller, registration, reply);
            }
            Request::UnregisterKvCache { instance }
            | Request::UnregisterEngineDriven { instance } => {
                self.workers
                    .unregister(request.operation(), *instance, reply);
            }
            Request::WaitPrefetchStatus { job, timeout } => {
                let timeout = timeout.clamped(MAX_WAIT);
                self.lookups.wait_result(caller, *job, timeout, reply);
            }
            Request::Find { key, timeout } => {
                let timeout = timeout.clamped(MAX_WAIT);
                self.lookups.find(caller, key, timeout, reply);
            }
            Request::CbRegisterRope(rope) if self.context.blend.is_some() => {
                self.workers.register_rope(rope, reply);
            }
            Request::CbRetrievePreComputed(retrieve) if let Some(blend) = &self.context.blend => {
                self.transfers.place(blend, caller, retrieve, reply);
            }
            request => reply.answer(self.answer(caller, request)),
        }
    }

    /// Serves a request that never waits.
    fn answer(&self, caller: Caller, request: &Request<'_, Prompt>) -> EngineAnswer {
        match request {
            Request::GetExperimental => {
                let events = self.has_kv_events().then_some(KV_EVENTS_FEATURE);
                let features = events.into_iter().chain([
                    HELD_BLOCKS_FEATURE,
                    CHUNK_TOKENS_FEATURE,
                    OBJECTS_FEATURE,
                ]);
                EngineAnswer::from(Response::Texts(features.map(Into::into).collect()))
            }
            Request::Noop => EngineAnswer::from(Response::Text("OK".into())),
            Request::Ping { instance } => self.workers.ping(caller, *instance),
            Request::ReportBlockAllocation(_) => EngineAnswer::nothing(),
            Request::Clear { force } => {
                self.admin.clear(*force);
                EngineAnswer::nothing()
            }

            Request::RegisterEngineDriven(context) => {
                self.workers.register_engine_driven(caller, context)
            }

            Request::Lookup { key, tp_size } => self.lookups.lookup(caller, key, *tp_size),
            Request::QueryPrefetchStatus { job } => self.lookups.result(caller, *job),
            Request::QueryPrefetchLookupHits { job } => self.lookups.hits(caller, *job),
            Request::CbUnifiedLookup { key, tp_size } => {
                self.lookups.unified(caller, key, *tp_size)
            }
            // Its further ranges are of earlier lookups, which the next lookup of the request has released.
            Request::FreeLookupLocks { key, .. } => self.lookups.free(caller, key),
            Request::EndSession { request_id } => self.lookups.end_session(caller, request_id),

            Request::PrepareStore {
                key,
                instance,
                skipped_chunks,
            } => self
                .transfers
                .engine_driven(key, *instance)
                .prepare_store(skipped_chunks),
            Request::CommitStore {
                key,
                instance,
                data,
            } => self
                .transfers
                .engine_driven(key, *instance)
                .commit_store(data),
            Request::PrepareRetrieve { key, instance } => self
                .transfers
                .engine_driven(key, *instance)
                .prepare_retrieve(caller),
            Request::CommitRetrieve { key, instance } => self
                .transfers
                .engine_driven(key, *instance)
                .commit_retrieve(),

            // Between servers: there is nothing here for another server, and it learns so at once.
            Request::P2pLookupAndLock { .. } => EngineAnswer::from(Response::Int(0)),
            Request::P2pQueryLookupResults { .. } => {
                EngineAnswer::from(Response::Addresses(Vec::new()))
            }
            Request::P2pUnlockObjects { .. } => EngineAnswer::nothing(),
            Request::CbProtocolHandshake { client_version } if self.context.blend.is_some() => {
                EngineAnswer::from(Response::Handshake {
                    version: BLEND_VERSION,
                    compatible: *client_version == BLEND_VERSION,
                })
            }
            Request::CbUnregisterRope { instance } if self.context.blend.is_some() => {
                if let Some(instance) = self.context.instances.get(*instance) {
                    instance.set_rope(None);
                }
                EngineAnswer::nothing()
            }
            // A prompt in another order is another prompt.
            Request::CbReorderPlan { .. } if self.context.blend.is_some() => {
                EngineAnswer::from(Response::Ints(Vec::new()))
            }
            other => self.unserved(other.operation()),
        }
    }

    /// Answers an operation that is not served: its client learns so at once, the operator once.
    fn unserved(&self, operation: Operation) -> EngineAnswer {
        let mut known = self.unserved.lock();
        if !known.contains(&operation) {
            known.push(operation);
            tracing::warn!(
                operation = operation.name(),
                "this operation is not served here; said once"
            );
        }
        EngineAnswer::unserved(operation)
    }

    /// Takes over the registrations of an earlier process of the server. To be called before the first request; returns within
    /// some seconds.
    pub fn restore_workers(&self) {
        self.workers.restore();
    }

    /// Whether a worker is registered under this id.
    pub fn is_registered(&self, id: InstanceId) -> bool {
        self.context.instances.get(id).is_some()
    }

    /// Notes a chunk size that a client is about to learn. One that is new to this instance waits for the disk.
    pub fn announce_chunk_size(&self, tokens: u32) {
        self.lookups.chunk_sizes.announce(tokens.into());
    }

    /// Counts a request that no served release of LMCache sends, and warns of its client in the log, in health probes and in
    /// `/status`. One that sends many, or many clients of a kind, are one warning.
    pub fn warn_of_client(&self, connection: u64, text: &str) {
        self.context.metrics.unknown_requests.inc();
        let now = self.context.now();
        // Clients that cause ever new ones do not flood the log.
        static LOG_LIMIT: RateLimited = RateLimited::per_second();
        let is_logged = match self.context.client_warnings.insert(connection, text, now) {
            Insertion::New => true,
            Insertion::Replaced => LOG_LIMIT.permit(Instant::now()).is_some(),
            Insertion::Known | Insertion::LeftOut => false,
        };
        if is_logged {
            tracing::warn!(connection, "{text}");
        }
    }

    /// Notes that workers have lost the connection by which alone they are known.
    pub fn lose_workers(&self, ids: &[InstanceId]) {
        let instances = ids.iter().filter_map(|id| self.context.instances.get(*id));
        instances.for_each(|instance| instance.lose());
    }

    /// Whether retrieves of such workers are still in flight.
    pub fn has_lost_retrieves(&self) -> bool {
        self.context.instances.has_lost_retrieves()
    }

    /// Refuses a retrieve, or another transfer, of a client that does not notice or not survive a "no": by its next
    /// ping. `held` is answered when the client has noticed.
    pub fn refuse_by_ping(&self, caller: Caller, held: Option<Reply>) {
        let now = self.context.now();
        self.transfers
            .refused_retrieves
            .add(caller.connection, held, now);
    }

    /// Whether answers are held until their clients notice a refused ping. Sends those that are due.
    pub fn holds_answers(&self) -> bool {
        let refused = &self.transfers.refused_retrieves;
        drop(refused.due(self.context.now()));
        refused.holds_answers()
    }

    /// Forgets what is known of a connection that has ended, and of nothing else: a client that reconnects is another
    /// connection.
    pub fn forget_connection(&self, connection: u64) {
        self.lookups.chunk_sizes.forget(connection);
        self.transfers.refused_retrieves.forget(connection);
        let now = self.context.now();
        self.context.client_warnings.forget(connection, now);
    }

    /// Entries of connections.
    #[cfg(any(test, feature = "testing"))]
    pub fn known_connections(&self) -> usize {
        self.lookups.chunk_sizes.len() + self.transfers.refused_retrieves.len()
    }

    /// [`Admin::prefault`].
    pub fn prefault(&self, stop: &AtomicBool) {
        let requests = || self.requests.load(Ordering::Relaxed);
        self.admin.prefault(stop, requests);
    }

    /// Runs one round of the periodic work: workers that ended or fell silent, segments that their clients have left, expired
    /// lookups and transfers, tenants over quota, and the low watermark; and the counting of misses by reason, which reads more
    /// than a lookup may; and the note of a client of another server, which waits for the disk.
    ///
    /// No request depends on it: `reserve` evicts by itself, and every release has its own request. It only limits how long
    /// abandoned memory stays.
    pub fn housekeep(&self) {
        let now = self.context.now();
        self.workers.expire(now);
        for segment in kvtier_memory::segment::remove_orphans() {
            tracing::info!(segment, "removed a segment that no process has mapped");
        }
        self.lookups.expire(now);
        self.transfers.expire(now);
        self.context.l1.expire();
        sessions::repeat(&self.context);
        self.admin.evict();
        self.admin.explanations.count_misses();
        self.lookups.chunk_sizes.keep_foreign();
        if let Some(blend) = &self.context.blend {
            // What is left is written in the next round.
            let _ = blend.keep();
        }
    }

    /// Considers every worker and scheduler alive: the process itself was stopped, and what they have sent is not read yet.
    pub fn forgive_silence(&self) {
        let now = self.context.now();
        self.context.instances.all_seen(now);
        self.lookups.forgive_silence(now);
    }

    /// Whether pages of the arena were lost: another process truncated the pool, or its file system is full.
    pub fn lost_memory(&self) -> bool {
        self.context.l1.arena.poisoned().is_some()
    }

    /// Why a GPU is unusable, if one is.
    pub fn broken_gpu(&self) -> Option<String> {
        self.context.devices.broken()
    }

    /// Sends the traces that wait for it, within some seconds. What is traced from here on is dropped.
    pub fn end_traces(&self) {
        self.context.tracer.stop();
    }

    /// Answers the requests that wait for a tier, now and from now on, with what is known by then.
    pub fn end_waits(&self) {
        self.lookups.end_waits();
    }

    /// Ends the transfers that run by themselves. When this returns, every request that waits for one is answered,
    /// except those on a GPU that does not respond.
    pub fn end_transfers(&self) {
        self.context.devices.stop();
    }

    /// Stores what waits to be stored, unlinks the pool unless the next server goes on with it, ends the work on driver threads,
    /// and unpins the arena. L1 is left to the next server only if no tier and no GPU can write it any more. To be called after
    /// the last request.
    pub fn close(&self) {
        // Before anything that a driver may hold up.
        let tiers_have_ended = self.l2().is_none_or(|l2| l2.close());
        self.context.l1.arena.unlink();
        if !tiers_have_ended || !self.context.devices.stop().is_empty() {
            self.context.l1.discard();
        }
        self.is_drained.store(true, Ordering::Release);
        // Memory of workers that have left is released, for a while.
        self.workers.driver_threads.finish();
        self.workers.close();
        self.context.devices.close();
        if let Some(blend) = &self.context.blend {
            while blend.keep() {}
        }
        // From here on the next server may have them: both change only by requests, and there are none any more.
        self.context.l1.close();
        if let Ok(state) = &self.context.state {
            state.release();
        }
    }

    /// Lets L1 end with the process: [`Engine::close`] frees it, in place of leaving it to the next server.
    pub fn end_l1(&self) {
        self.context.l1.end_with_process();
    }

    /// Whether nothing is lost when the process ends now, as far as [`Engine::close`] has come: all requests are answered and
    /// all objects stored; only memory is still to be released.
    pub fn is_drained(&self) -> bool {
        self.is_drained.load(Ordering::Acquire)
    }

    /// For a process that ends before [`Engine::close`] has: unlinks the name of the pool, which the next server gets only if
    /// the engine [is drained](Engine::is_drained) and L1 does not [end with it](L1::ends_with_process). May be called at any
    /// time, and waits for nothing.
    pub fn abandon(&self) {
        self.context.l1.arena.unlink();
        if !self.is_drained() || self.context.l1.ends_with_process() {
            self.context.l1.discard();
        }
    }
}
