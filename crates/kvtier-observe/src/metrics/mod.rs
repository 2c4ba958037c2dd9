//! Metrics: LMCache 0.5.6's names where it has the figure, `kvtier_` names for what it lacks.
//!
//! Counters that belong to a request are incremented as it is answered; gauges are read from the engine by a scrape.
//! This module must never depend on the crates that count: it receives only numbers and names. Labels that clients choose
//! are bounded: after [`MAX_SALTS`] tenants and [`MAX_MODELS`] models further ones share the value `other`.

/// Declares metrics by `field: Type = registry.name, "help"` and, for one that is not made by default, its value.
///
/// The fields in front of `with` are no metrics: the constructor `register` takes their values as a tuple.
macro_rules! metrics {
    (@made) => { Default::default() };
    (@made $made:expr) => { $made };
    (
        $(#[$doc:meta])* $vis:vis struct $struct:ident($($prefix:ident),+) {
            $($(#[$other_doc:meta])* $other_vis:vis $other:ident: $other_type:ty),* $(,)?
        } with {
            $($field_vis:vis $field:ident: $type:ty = $registry:ident.$name:ident, $help:literal $(, $made:expr)?;)*
        }
    ) => {
        $(#[$doc])*
        $vis struct $struct {
            $($(#[$other_doc])* $other_vis $other: $other_type,)*
            $(#[doc = $help] $field_vis $field: $type,)*
        }

        impl $struct {
            pub(in crate::metrics) fn register($($prefix: &mut Prefix,)+ ($($other,)*): ($($other_type,)*)) -> Self {
                Self {
                    $($other,)*
                    $($field: $registry.add_made(stringify!($name), $help, metrics!(@made $($made)?)),)*
                }
            }
        }
    };
}

/// Declares how metrics are read from `$of`: `name: "help", value`.
macro_rules! figures {
    ($(#[$doc:meta])* $table:ident: [$of:ty; $len:literal] { $($name:ident: $help:literal, $value:expr;)* }) => {
        $(#[$doc])*
        const $table: [$crate::metrics::Figure<$of>; $len] = [$((stringify!($name), $help, $value)),*];
    };
}

/// Name, help text, and how the value is read.
type Figure<T> = (&'static str, &'static str, fn(&T) -> u64);

mod gpu;
mod l2;
mod labels;
mod names;
mod serde;
mod tenants;
#[cfg(test)]
mod tenants_tests;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crate::api::{PeerPortStatus, RequestPortStatus};
pub use gpu::{GpuFigures, GpuMetrics};
use kvtier_core::cache::KeyOutcome;
use kvtier_core::object_key::TenantNames;
pub use l2::{GuardReadings, L2Metrics, PrefetchPhase, TierCall, TierReadings};
pub use labels::SpanLoss;
use labels::{
    BuildLabels, DeviceLabels, EarlyExitLabels, FailureLabels, L1GaugeLabels, L1Labels,
    LoadedLabels, LookupLabels, MissLabels, OperationLabels, OverQuotaLabels, ReadFailureLabels,
    RefusedLabels, SessionLabels, SpanLabels, SpanLossLabels, TraceLabels,
};
use names::Names;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};
pub use serde::SerdeReadings;
pub use tenants::{TenantMetrics, TenantSource};

/// Tenants with a label value of their own.
pub const MAX_SALTS: usize = 1000;

/// Models with a label value of their own.
pub const MAX_MODELS: usize = 50;

/// Latency buckets in seconds: 10 microseconds to 10 seconds, about three a decade.
const LATENCY_BUCKETS: [f64; 19] = [
    10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2,
    0.5, 1.0, 2.0, 5.0, 10.0,
];

/// Labels of the gauges of L1.
const L1: L1GaugeLabels = L1GaugeLabels {
    backend: "dram",
    l1_tag: "_default",
};

fn latency() -> Histogram {
    Histogram::new(LATENCY_BUCKETS)
}

fn traced_latency() -> HistogramWithExemplars<TraceLabels> {
    HistogramWithExemplars::new(LATENCY_BUCKETS.into_iter())
}

metrics! {
    /// Everything that is counted.
    ///
    /// ```
    /// use kvtier_observe::metrics::{Metrics, Readings};
    ///
    /// let readings = Readings {
    ///     objects: 3,
    ///     ..Readings::default()
    /// };
    /// let text = Metrics::new().encode(&readings);
    /// assert!(text.contains("kvtier_l1_objects 3\n"));
    /// ```
    pub struct Metrics(lmcache, own) {
        registries: [Registry; 2],
        salts: Arc<Names>,
        models: Arc<Names>,
        /// Metrics of the tiers.
        pub l2: L2Metrics,
        /// Metrics of single tenants.
        pub tenants: TenantMetrics,
        gpus: GpuMetrics,
    } with {
        l1_write_chunks: Family<L1Labels, Counter> = lmcache.l1_write_chunks, "Objects admitted to L1";
        l1_read_chunks: Family<L1Labels, Counter> = lmcache.l1_read_chunks, "Objects leased by lookups";
        allocation_failures: Family<FailureLabels, Counter> = lmcache.l1_allocation_failure_chunks,
            "Chunks L1 had no free space for";
        over_quota: Family<OverQuotaLabels, Counter> = own.l1_over_quota_chunks,
            "Chunks L1 refused because of their tenant's limit";
        over_staging: Family<OverQuotaLabels, Counter> = own.l1_over_staging_chunks,
            "Chunks refused because uncommitted stores were at their limit";
        read_failures: Family<ReadFailureLabels, Counter> = lmcache.l1_read_failure_chunks,
            "Chunks that could not be read";
        lookup_requested_tokens: Family<LookupLabels, Counter> = lmcache.lookup_requested_tokens,
            "Tokens of full chunks asked for";
        lookup_hit_tokens: Family<LookupLabels, Counter> = lmcache.lookup_hit_tokens, "Tokens found";
        lookup_hit_l1_tokens: Family<LookupLabels, Counter> = lmcache.lookup_hit_l1_tokens, "Tokens found in L1";
        lookup_hit_l2_tokens: Family<LookupLabels, Counter> = lmcache.lookup_hit_l2_tokens,
            "Tokens that the tiers below L1 added to the prefixes found there";
        lookup_hit_l1_keys: Family<LookupLabels, Counter> = lmcache.lookup_hit_l1_keys, "Objects found in L1";
        lookup_hit_l2_keys: Family<LookupLabels, Counter> = lmcache.lookup_hit_l2_keys,
            "Objects that the tiers below L1 added to those found there";
        lookups: Family<LookupLabels, Counter> = lmcache.lookups_requests, "Lookups";
        early_exits: Family<EarlyExitLabels, Counter> = lmcache.lookup_early_exit_requests,
            "Lookups that asked for no key";
        misses: Family<MissLabels, Counter> = own.lookup_misses,
            "Lookups that did not find all of their chunks, by what had become of the first missing one";
        submitted_stores: Family<DeviceLabels, Counter> = lmcache.num_submitted_stores, "Stores received";
        finished_stores: Family<DeviceLabels, Counter> = lmcache.num_finished_stores, "Stores answered";
        submitted_retrieves: Family<DeviceLabels, Counter> = lmcache.num_submitted_retrieves, "Retrieves received";
        finished_retrieves: Family<DeviceLabels, Counter> = lmcache.num_finished_retrieves, "Retrieves answered";
        chunks_loaded: Family<LoadedLabels, Counter> = lmcache.num_chunks_loaded, "Chunks returned to workers";
        requests: Family<OperationLabels, Counter> = own.requests, "Requests by operation";
        refused: Family<RefusedLabels, Counter> = own.refused_requests,
            "Requests that got their operation's failure answer";
        latency: Family<OperationLabels, Histogram> = own.request_duration_seconds,
            "Time from a request's arrival to its answer", Family::new_with_constructor(latency);
        pub undeliverable: Counter = own.undeliverable_replies, "Replies whose client had left or did not read";
        pub malformed_messages: Counter = own.malformed_messages, "Messages that are no request";
        pub unknown_requests: Counter = own.unknown_requests, "Requests that no served release of LMCache sends";
        pub handler_panics: Counter = own.handler_panics, "Handlers that panicked";
        pub reaped_instances: Counter = own.reaped_instances, "Workers considered dead";
        pub expired_transfers: Counter = own.expired_transfers, "Transfers that expired without a commit";
        pub expired_lookups: Counter = own.expired_lookups, "Lookup leases that expired unused";
        pub unproven_lookups: Counter = own.unproven_lookups, "Lookups of clients whose chunk size is not proven";
        exported_spans: Counter = own.trace_exported_spans, "Spans that the collector of traces has taken";
        span_seconds: Family<SpanLabels, HistogramWithExemplars<TraceLabels>> = own.trace_span_seconds,
            "Durations of spans that the collector of traces has, with the latest trace of each bucket", Family::new_with_constructor(traced_latency);
        session_actions: Family<SessionLabels, Counter> = own.agent_session_actions,
            "Actions that were asked for sessions of agents";
        session_objects: Family<SessionLabels, Counter> = own.agent_session_objects,
            "Objects of L1 that sessions of agents have released or demoted";
        lost_spans: Family<SpanLossLabels, Counter> = own.trace_lost_spans, "Spans that no collector has";
        pub blend_matched_tokens: Counter = own.blend_matched_tokens,
            "Tokens that lookups found behind prefixes, in chunks of other prompts";
        pub blend_placed_tokens: Counter = own.blend_placed_tokens,
            "Tokens of chunks of other prompts that were written into pages";
        pub blend_late_lookups: Counter = own.blend_late_lookups,
            "Lookups that were answered with their prefix alone, since finding more took too long";
        pub request_connections: Gauge = own.request_connections, "Connections to the request port";
        request_connections_max: Gauge = own.request_connections_max,
            "Connections to the request port that are accepted at most";
        open_files_max: Gauge = own.open_files_max, "File descriptors the process may have";
        pub peer_connections: Gauge = own.peer_connections, "Connections to the port for peers";
        peer_sent_objects: Counter = own.peer_sent_objects, "Objects of L1 that peers have read";
        peer_sent_bytes: Counter = own.peer_sent_bytes, "Bytes of L1 that peers have read";
        pub eviction_ticks: Counter = lmcache.l1_eviction_loop_ticks, "Background eviction passes";
        pub eviction_triggered: Counter = lmcache.l1_eviction_loop_triggered, "Background eviction passes that evicted";
        l1_usage_bytes: Family<L1GaugeLabels, Gauge> = lmcache.l1_memory_usage_bytes, "Bytes of L1 in use";
        l1_usage_ratio: Family<L1GaugeLabels, Gauge<f64, AtomicU64>> = lmcache.l1_usage_ratio, "Share of L1 in use";
        l1_staging_bytes: Family<L1GaugeLabels, Gauge> = lmcache.l1_staging_bytes,
            "Bytes reserved and not yet committed";
        kv_events_log_depth: Gauge = lmcache.kv_events_log_depth, "Stores and removals that are kept for subscribers";
        l1_withheld_bytes: Gauge = own.l1_withheld_bytes,
            "Bytes that workers were granted and did not commit in time, or before an earlier server ended";
        l1_staging_limit_bytes: Gauge = own.l1_staging_limit_bytes,
            "Bytes that stores may have staged and not committed";
        l1_largest_free_bytes: Gauge = own.l1_largest_free_bytes, "Bytes of the largest free extent of L1";
        l1_capacity_bytes: Gauge = own.l1_capacity_bytes, "Size of L1";
        l1_objects: Gauge = own.l1_objects, "Readable objects in L1";
        l1_leased_objects: Gauge = own.l1_leased_objects, "Objects in L1 with a lease";
        l1_pinned_object_bytes: Gauge = own.l1_pinned_object_bytes, "Bytes of objects in L1 that requests have pinned";
        l1_pins_refused: Counter = own.l1_pins_refused, "Objects not pinned because pinned ones were at their share";
        l1_prefaulted_bytes: Gauge = own.l1_prefaulted_bytes, "Bytes of L1 touched since start";
        active_prefetch_jobs: Gauge = lmcache.active_prefetch_jobs, "Lookups whose result was not asked for yet";
        active_sessions: Gauge = own.active_sessions, "Request sessions alive";
        agent_sessions: Gauge = own.agent_sessions, "Sessions of agents that are remembered";
        blend_segments: Gauge = own.blend_segments,
            "Chunks that are known to be found elsewhere than in a prefix, with --engine-type blend";
        registered_instances: Gauge = own.registered_instances, "Workers registered";
        evicted_chunks: Counter = own.l1_evicted_chunks, "Objects evicted from L1";
        evicted_bytes: Counter = own.l1_evicted_bytes, "Bytes evicted from L1";
        accounting_errors: Counter = own.accounting_errors, "Accounting errors found; anything but 0 is a bug";
        prompt_chunks_known: Counter = own.prompt_chunks_known, "Prompt chunks whose hash was remembered";
        prompt_chunks_hashed: Counter = own.prompt_chunks_hashed, "Prompt chunks decoded and hashed";
    }
}

/// Figures read from the engine at scrape time.
#[derive(Debug, Default, Clone)]
pub struct Readings {
    /// Bytes of L1.
    pub capacity_bytes: u64,
    /// Bytes in use, staged ones included.
    pub used_bytes: u64,
    /// Bytes reserved and not committed.
    pub staged_bytes: u64,
    /// Bytes that stores may have reserved and not committed.
    pub staging_limit_bytes: u64,
    /// Bytes that clients were granted and did not commit in time, or before an earlier server ended.
    pub withheld_bytes: u64,
    /// Events in the log.
    pub kv_events: u64,
    /// Bytes of the largest free extent.
    pub largest_free_bytes: u64,
    /// Readable objects.
    pub objects: u64,
    /// Objects with at least one lease.
    pub leased_objects: u64,
    /// Bytes of objects that requests have pinned.
    pub pinned_object_bytes: u64,
    /// Objects not pinned since start, because a share did not allow it.
    pub pins_refused: u64,
    /// Bytes of the arena touched so far.
    pub prefaulted_bytes: u64,
    /// Request sessions alive.
    pub sessions: u64,
    /// Sessions of agents that are remembered.
    pub agent_sessions: u64,
    /// Chunks that are found behind prefixes.
    pub blend_segments: u64,
    /// Lookups whose result no client has asked for yet.
    pub unread_lookups: u64,
    /// Workers registered.
    pub instances: u64,
    /// Objects evicted since start.
    pub evicted_objects: u64,
    /// Bytes evicted since start.
    pub evicted_bytes: u64,
    /// Accounting errors found since start; anything but 0 is a bug.
    pub accounting_errors: u64,
    /// Chunks whose hash was remembered from an earlier request.
    pub prompt_chunks_known: u64,
    /// Chunks that were decoded and hashed.
    pub prompt_chunks_hashed: u64,
    /// Lookups for which the tiers are asked now, as [`PrefetchPhase::ALL`].
    pub l2_prefetches: [u64; 3],
    /// Bytes of L1 that wait to be stored in a tier.
    pub l2_queued_bytes: u64,
    /// Objects that were not stored in a tier because too many bytes waited.
    pub l2_dropped_objects: u64,
    /// Objects being loaded from a tier.
    pub l2_loading_objects: u64,
    /// The tiers below L1.
    pub tiers: Vec<TierReadings>,
    /// The GPUs in use.
    pub gpus: Vec<GpuFigures>,
    /// Bytes of L1 that GPUs reach directly.
    pub pinned_bytes: u64,
}

/// Metrics whose names share a prefix.
struct Prefix(Registry);

impl Prefix {
    fn new(prefix: &str) -> Self {
        Self(Registry::with_prefix(prefix))
    }

    fn add<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        self.add_made(name, help, M::default())
    }

    fn add_made<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register(name, help, metric.clone());
        metric
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Makes and registers every metric.
    pub fn new() -> Self {
        Self::naming(TenantNames::default())
    }

    /// Makes and registers every metric, with tenants under these names.
    pub fn naming(tenants: TenantNames) -> Self {
        // LMCache's names, then those it lacks.
        let (mut lmcache, mut own) = (Prefix::new("lmcache_mp"), Prefix::new("kvtier"));
        let build: Family<BuildLabels, Gauge> = own.add("build_info", "Version of this server");
        build
            .get_or_create(&BuildLabels {
                version: env!("CARGO_PKG_VERSION"),
            })
            .set(1);
        let salts = Arc::new(Names::of_tenants(MAX_SALTS, tenants.clone()));
        let models = Arc::new(Names::new(MAX_MODELS));
        let l2 = L2Metrics::new(&mut lmcache, &mut own, &salts, &models);
        let tenants = TenantMetrics::new(&mut own, tenants);
        let gpus = GpuMetrics::register(&mut own, ());
        let registries = <[Registry; 2]>::default();
        let others = (registries, salts, models, l2, tenants, gpus);
        let mut metrics = Self::register(&mut lmcache, &mut own, others);
        metrics.registries = [lmcache.0, own.0];
        metrics
    }

    /// How many file descriptors there are.
    pub fn has_descriptors(&self, limit: u64, connections: u64) {
        let gauge = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        self.open_files_max.set(gauge(limit));
        self.request_connections_max.set(gauge(connections));
    }

    /// The request port in `/status`.
    pub fn request_port(&self) -> RequestPortStatus {
        RequestPortStatus {
            connections: self.request_connections.get(),
            connections_max: self.request_connections_max.get(),
            open_files_max: self.open_files_max.get(),
        }
    }

    /// An object of L1 that a peer has read.
    pub fn peer_sent(&self, bytes: u64) {
        self.peer_sent_objects.inc();
        self.peer_sent_bytes.inc_by(bytes);
    }

    /// The port for peers in `/status`.
    pub fn peer_port(&self) -> PeerPortStatus {
        PeerPortStatus {
            connections: self.peer_connections.get(),
            sent_objects: self.peer_sent_objects.get(),
            sent_bytes: self.peer_sent_bytes.get(),
        }
    }

    /// A lookup that asked for keys.
    pub fn lookup(
        &self,
        model: &str,
        salt: &str,
        requested_tokens: u64,
        hit_tokens: u64,
        hit_keys: u64,
    ) {
        let cache_salt = self.salts.label(salt);
        let labels = LookupLabels {
            cache_salt: Arc::clone(&cache_salt),
            model_name: self.models.label(model),
        };
        self.lookups.get_or_create(&labels).inc();
        self.lookup_requested_tokens
            .get_or_create(&labels)
            .inc_by(requested_tokens);
        self.lookup_hit_tokens
            .get_or_create(&labels)
            .inc_by(hit_tokens);
        self.lookup_hit_l1_tokens
            .get_or_create(&labels)
            .inc_by(hit_tokens);
        self.lookup_hit_l1_keys
            .get_or_create(&labels)
            .inc_by(hit_keys);
        self.l1_read_chunks
            .get_or_create(&L1Labels {
                cache_salt,
                l1_tag: "_default",
            })
            .inc_by(hit_keys);
    }

    /// The tiers added this to the prefix that a lookup had found in L1.
    pub fn prefetched(&self, model: &str, salt: &str, tokens: u64, keys: u64) {
        let labels = LookupLabels {
            cache_salt: self.salts.label(salt),
            model_name: self.models.label(model),
        };
        self.lookup_hit_tokens.get_or_create(&labels).inc_by(tokens);
        self.lookup_hit_l2_tokens
            .get_or_create(&labels)
            .inc_by(tokens);
        self.lookup_hit_l2_keys.get_or_create(&labels).inc_by(keys);
    }

    /// A lookup that could not ask for any key.
    pub fn early_exit(&self, model: &str, salt: &str, reason: &'static str) {
        let labels = EarlyExitLabels {
            cache_salt: self.salts.label(salt),
            model_name: self.models.label(model),
            reason,
        };
        self.early_exits.get_or_create(&labels).inc();
    }

    /// Lookups that missed: what had become of the chunk, why, and where (`l1`, a tier's name, or nowhere).
    pub fn missed(&self, reason: &'static str, cause: &'static str, tier: &str, lookups: u64) {
        let labels = MissLabels {
            cause,
            reason,
            tier: tier.into(),
        };
        self.misses.get_or_create(&labels).inc_by(lookups);
    }

    /// Objects admitted to L1.
    pub fn admitted(&self, salt: &str, objects: u64) {
        self.l1_write_chunks
            .get_or_create(&L1Labels {
                cache_salt: self.salts.label(salt),
                l1_tag: "_default",
            })
            .inc_by(objects);
    }

    /// Counts the outcomes of a reservation in L1 `during` a store (`l1_store`) or a prefetch (`l2_prefetch`). Returns for
    /// how many objects there was no memory, and how many the tenant's limit refused.
    pub fn reserved(
        &self,
        during: &'static str,
        model: &str,
        salt: &str,
        outcomes: &[KeyOutcome],
    ) -> [usize; 2] {
        let count = |kind| outcomes.iter().filter(|outcome| **outcome == kind).count();
        let [no_memory, over_quota] = [KeyOutcome::NoMemory, KeyOutcome::OverQuota].map(count);
        let over_staging = count(KeyOutcome::OverStaging);
        if no_memory > 0 {
            let labels = FailureLabels {
                during,
                model_name: self.models.label(model),
            };
            let family = &self.allocation_failures;
            family.get_or_create(&labels).inc_by(no_memory as u64);
        }
        let refused = [
            (&self.over_quota, over_quota),
            (&self.over_staging, over_staging),
        ];
        for (family, count) in refused.into_iter().filter(|(_, count)| *count > 0) {
            let labels = OverQuotaLabels {
                cache_salt: self.salts.label(salt),
                during,
            };
            family.get_or_create(&labels).inc_by(count as u64);
        }
        [no_memory, over_quota]
    }

    /// Chunks that were not in L1 any more, `during` a retrieve (`l1_retrieve`: no client had a lease on them) or a store
    /// to a tier (`l2_store`).
    pub fn not_found(&self, during: &'static str, model: &str, chunks: u64) {
        let labels = ReadFailureLabels {
            during,
            model_name: self.models.label(model),
            reason: "not_found",
        };
        self.read_failures.get_or_create(&labels).inc_by(chunks);
    }

    /// Chunks given to a worker.
    pub fn loaded(&self, model: &str, salt: &str, worker_id: u32, chunks: u64) {
        let labels = LoadedLabels {
            cache_salt: self.salts.label(salt),
            model_name: self.models.label(model),
            worker_id,
        };
        self.chunks_loaded.get_or_create(&labels).inc_by(chunks);
    }

    /// A store was received, or answered.
    pub fn store(&self, device: &'static str, finished: bool) {
        let family = if finished {
            &self.finished_stores
        } else {
            &self.submitted_stores
        };
        family.get_or_create(&DeviceLabels { device }).inc();
    }

    /// A retrieve was received, or answered.
    pub fn retrieve(&self, device: &'static str, finished: bool) {
        let family = if finished {
            &self.finished_retrieves
        } else {
            &self.submitted_retrieves
        };
        family.get_or_create(&DeviceLabels { device }).inc();
    }

    /// An action was asked for a session of an agent.
    pub fn session_action(&self, action: &'static str) {
        let labels = SessionLabels { action };
        self.session_actions.get_or_create(&labels).inc();
    }

    /// Objects that an action was done to.
    pub fn session_objects(&self, action: &'static str, objects: u64) {
        let labels = SessionLabels { action };
        self.session_objects.get_or_create(&labels).inc_by(objects);
    }

    /// A request was answered.
    pub fn answered(&self, operation: &'static str, took: Duration) {
        let labels = OperationLabels { operation };
        self.requests.get_or_create(&labels).inc();
        self.latency
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
    }

    /// A request got its operation's failure answer.
    pub fn refused(&self, operation: &'static str, reason: &'static str) {
        self.refused
            .get_or_create(&RefusedLabels { operation, reason })
            .inc();
    }

    /// A collector has taken spans; those of one call that it has not taken are not known one by one.
    pub fn spans_exported(&self, spans: u64) {
        self.exported_spans.inc_by(spans);
    }

    /// A span that the collector has, with the id of its trace in hexadecimal digits.
    pub fn span(&self, span: &'static str, took: Duration, ended: SystemTime, trace_id: String) {
        self.span_seconds
            .get_or_create(&SpanLabels { span })
            .observe(
                took.as_secs_f64(),
                Some(TraceLabels { trace_id }),
                Some(ended),
            );
    }

    /// Spans, or records that would have become spans, were dropped.
    pub fn spans_lost(&self, reason: SpanLoss, spans: u64) {
        let reason = reason.name();
        self.lost_spans
            .get_or_create(&SpanLossLabels { reason })
            .inc_by(spans);
    }

    /// The text of `/metrics`.
    pub fn encode(&self, readings: &Readings) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.encode_to(readings, &mut out);
        out
    }

    /// Writes the text of `/metrics`.
    ///
    /// # Errors
    /// An error of `out`.
    pub fn encode_to(&self, readings: &Readings, out: &mut impl fmt::Write) -> fmt::Result {
        let set = |gauge: &Gauge, value: u64| {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&self.l1_usage_bytes.get_or_create(&L1), readings.used_bytes);
        set(
            &self.l1_staging_bytes.get_or_create(&L1),
            readings.staged_bytes,
        );
        let ratio = readings.used_bytes as f64 / readings.capacity_bytes.max(1) as f64;
        self.l1_usage_ratio.get_or_create(&L1).set(ratio);
        set(&self.l1_staging_limit_bytes, readings.staging_limit_bytes);
        set(&self.l1_withheld_bytes, readings.withheld_bytes);
        set(&self.kv_events_log_depth, readings.kv_events);
        set(&self.l1_largest_free_bytes, readings.largest_free_bytes);
        set(&self.l1_capacity_bytes, readings.capacity_bytes);
        set(&self.l1_objects, readings.objects);
        set(&self.l1_leased_objects, readings.leased_objects);
        set(&self.l1_pinned_object_bytes, readings.pinned_object_bytes);
        set(&self.l1_prefaulted_bytes, readings.prefaulted_bytes);
        set(&self.active_prefetch_jobs, readings.unread_lookups);
        set(&self.active_sessions, readings.sessions);
        set(&self.agent_sessions, readings.agent_sessions);
        set(&self.blend_segments, readings.blend_segments);
        set(&self.registered_instances, readings.instances);
        // The engine's own totals are the truth; the counters here only follow them.
        for (counter, total) in [
            (&self.evicted_chunks, readings.evicted_objects),
            (&self.evicted_bytes, readings.evicted_bytes),
            (&self.l1_pins_refused, readings.pins_refused),
            (&self.accounting_errors, readings.accounting_errors),
            (&self.prompt_chunks_known, readings.prompt_chunks_known),
            (&self.prompt_chunks_hashed, readings.prompt_chunks_hashed),
        ] {
            counter.inner().fetch_max(total, Ordering::Relaxed);
        }
        self.gpus.read(&readings.gpus, readings.pinned_bytes);
        self.l2.read(readings);
        for registry in &self.registries {
            text::encode_registry(out, registry)?;
        }
        text::encode_eof(out)
    }
}
