//! Metrics of the tiers below L1.
//!
//! What happens in a call is counted when it happens; what a tier counts by itself is read by a scrape.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use super::labels::{
    AdapterLabels, AdaptersLabels, CallLabels, PhaseLabels, PrefetchFailureLabels, SaltLabels,
    StoreAdaptersLabels, TierFailureLabels, TierLabels,
};
use super::names::Names;
use super::serde::{SerdeMetrics, SerdeReadings};
use super::{Prefix, Readings, latency};

/// Upper bounds in GB/s: a slow network to the memory of a host.
const THROUGHPUT_BUCKETS: [f64; 14] = [
    0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0,
];

/// A call of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierCall {
    /// Asks which objects the tier has.
    Lookup,
    /// Objects into L1.
    Load,
    /// Objects out of L1.
    Store,
}

impl TierCall {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Lookup, Self::Load, Self::Store];

    /// Label value, and the name of its lane in an adapter's status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lookup => "lookup",
            Self::Load => "load",
            Self::Store => "store",
        }
    }
}

/// Phase that a prefetch is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefetchPhase {
    /// The prefetch waits for its turn.
    Queue,
    /// The tiers are asked what they have.
    Lookup,
    /// The prefetch waits for what is being loaded.
    Load,
}

impl PrefetchPhase {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Queue, Self::Lookup, Self::Load];

    /// Label value.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Lookup => "lookup",
            Self::Load => "load",
        }
    }
}

/// Figures of one tier, since start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TierReadings {
    /// Type and number of the tier.
    pub name: String,
    /// Bytes its objects take now.
    pub used_bytes: u64,
    /// Bytes they may take; 0 is no bound.
    pub capacity_bytes: u64,
    /// Objects in it now.
    pub objects: u64,
    /// Whether the adapter works and its breakers are closed.
    pub is_healthy: bool,
    /// Whether the tier had no free space at the last store.
    pub is_full: bool,
    /// Whether the tier is only loaded from.
    pub is_read_only: bool,
    /// Whether the tier does not know yet what it held before the start.
    pub is_recovering: bool,
    /// Objects that wait to be stored there, or are being stored.
    pub queued_objects: u64,
    /// Bytes of the queued objects.
    pub queued_bytes: u64,
    /// Objects that were not stored there because too many bytes waited.
    pub dropped_objects: u64,
    /// Bytes of the dropped objects.
    pub dropped_bytes: u64,
    /// Calls in flight, as [`TierCall::ALL`].
    pub calls: [u64; 3],
    /// Bytes of the loads in flight.
    pub loading_bytes: u64,
    /// Objects written.
    pub stored_objects: u64,
    /// Bytes written.
    pub stored_bytes: u64,
    /// Objects not written because they were there.
    pub already_there: u64,
    /// Objects that could not be written, by reason.
    pub store_failures: Vec<(&'static str, u64)>,
    /// Objects asked for.
    pub looked_up: u64,
    /// Objects found.
    pub found: u64,
    /// Objects read.
    pub loaded_objects: u64,
    /// Bytes read.
    pub loaded_bytes: u64,
    /// Objects read that had no checksum.
    pub unverified: u64,
    /// Objects that could not be read, by reason.
    pub load_failures: Vec<(&'static str, u64)>,
    /// Objects evicted.
    pub evicted_objects: u64,
    /// Bytes evicted.
    pub evicted_bytes: u64,
    /// Objects quarantined because they were not what was stored, if the adapter does that.
    pub quarantined: u64,
    /// Violated invariants of its accounting; anything but 0 is a bug.
    pub accounting_errors: u64,
    /// Guards of the tier, as [`TierCall::ALL`]; none where they are switched off.
    pub guards: Vec<GuardReadings>,
    /// Transformations of the tier, one per type.
    pub serdes: Vec<SerdeReadings>,
}

/// What the guards of one kind of call have done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuardReadings {
    /// The breaker lets no ordinary call through.
    pub is_open: bool,
    /// Times the breaker opened.
    pub opened: u64,
    /// Calls the breaker did not let through.
    pub refused: u64,
    /// Calls that missed their deadline.
    pub late: u64,
    /// Objects that were tried again.
    pub retried: u64,
}

figures! {
    /// What a tier's counters have, by name.
    COUNTERS: [TierReadings; 13] {
        l2_stored_objects: "Objects written", |tier| tier.stored_objects;
        l2_stored_bytes: "Bytes written", |tier| tier.stored_bytes;
        l2_already_there_objects: "Objects not written because they were there", |tier| tier.already_there;
        l2_dropped_objects: "Objects not stored because too many bytes waited", |tier| tier.dropped_objects;
        l2_dropped_bytes: "Bytes of those", |tier| tier.dropped_bytes;
        l2_looked_up_objects: "Objects asked for", |tier| tier.looked_up;
        l2_found_objects: "Objects found", |tier| tier.found;
        l2_loaded_objects: "Objects read", |tier| tier.loaded_objects;
        l2_loaded_bytes: "Bytes read", |tier| tier.loaded_bytes;
        l2_unverified_objects: "Objects read that had no checksum to compare with", |tier| tier.unverified;
        l2_quarantined_objects: "Objects quarantined because they were not what was stored", |tier| tier.quarantined;
        l2_evicted_objects: "Objects evicted", |tier| tier.evicted_objects;
        l2_evicted_bytes: "Bytes evicted", |tier| tier.evicted_bytes;
    }
}

figures! {
    /// What a tier is like now, by name.
    GAUGES: [TierReadings; 7] {
        l2_capacity_bytes: "Bytes the objects may take; 0 is no bound", |tier| tier.capacity_bytes;
        l2_objects: "Objects there", |tier| tier.objects;
        l2_queued_objects: "Objects that wait to be stored or are being stored", |tier| tier.queued_objects;
        l2_queued_bytes: "Bytes of those", |tier| tier.queued_bytes;
        l2_healthy: "1 while the backend answers and no breaker is open", |tier| u64::from(tier.is_healthy);
        l2_full: "1 while there is no free space", |tier| u64::from(tier.is_full);
        l2_recovering: "1 while it is not known what was there before the start", |tier| u64::from(tier.is_recovering);
    }
}

figures! {
    /// What a guard counts, by name.
    GUARDS: [GuardReadings; 4] {
        l2_breaker_opened: "Times the breaker opened", |guard| guard.opened;
        l2_breaker_refused_calls: "Calls the breaker did not let through", |guard| guard.refused;
        l2_late_calls: "Calls that missed their deadline", |guard| guard.late;
        l2_retried_objects: "Objects that were tried again", |guard| guard.retried;
    }
}

metrics! {
    /// The metrics of the tiers.
    pub struct L2Metrics(lmcache, own) {
        salts: Arc<Names>,
        models: Arc<Names>,
        counters: [Family<TierLabels, Counter>; COUNTERS.len()],
        gauges: [Family<TierLabels, Gauge>; GAUGES.len()],
        guards: [Family<CallLabels, Counter>; GUARDS.len()],
        serdes: SerdeMetrics,
    } with {
        lookup_requests: Counter = lmcache.l2_prefetch_lookup_requests, "Lookups for which the tiers were asked";
        lookup_objects: Family<SaltLabels, Counter> = lmcache.l2_prefetch_lookup_objects_chunks,
            "Objects that L1 lacked in those lookups";
        load_requests: Counter = lmcache.l2_prefetch_load_submitted_requests, "Batches given to a tier to load";
        load_objects: Family<SaltLabels, Counter> = lmcache.l2_prefetch_load_submitted_objects_chunks,
            "Objects of those batches";
        loads_completed: Family<TierLabels, Counter> = lmcache.l2_load_completed_requests, "Batches a tier has loaded";
        loaded_objects: Family<SaltLabels, Counter> = lmcache.l2_prefetch_load_completed_chunks, "Objects loaded";
        store_requests: Counter = lmcache.l2_store_submitted_requests, "Batches given to a tier to store";
        store_objects: Family<SaltLabels, Counter> = lmcache.l2_store_submitted_objects_chunks,
            "Objects of those batches";
        stores_completed: Family<TierLabels, Counter> = lmcache.l2_store_completed_requests,
            "Batches a tier has stored";
        stored_objects: Family<SaltLabels, Counter> = lmcache.l2_store_completed_objects_chunks,
            "Objects that a tier has now";
        evicted_objects: Family<SaltLabels, Counter> = lmcache.l2_evicted_objects_chunks, "Objects evicted";
        prefetch_failures: Family<PrefetchFailureLabels, Counter> = lmcache.l2_prefetch_failure_chunks,
            "Objects a tier had that could not be loaded";
        load_throughput: Family<TierLabels, Histogram, Throughput> = lmcache.l2_load_throughput_GB_per_second,
            "Bytes of a batch over the time of its load", Family::new_with_constructor(Throughput);
        store_throughput: Family<TierLabels, Histogram, Throughput> = lmcache.l2_store_throughput_GB_per_second,
            "Bytes of a batch over the time of its store", Family::new_with_constructor(Throughput);
        seconds: Family<CallLabels, Histogram> = own.l2_call_duration_seconds,
            "Time a tier took for a batch", Family::new_with_constructor(latency);
        timeouts: Family<PhaseLabels, Counter> = own.l2_prefetch_timeouts,
            "Lookups that went on without what a tier might have had";
        usage_bytes: Family<TierLabels, Gauge> = lmcache.l2_usage_bytes, "Bytes the objects take";
        inflight_stores: Family<AdapterLabels, Gauge> = lmcache.num_inflight_l2_stores, "Batches being stored";
        inflight_loads: Family<AdapterLabels, Gauge> = lmcache.num_inflight_l2_loads, "Batches being loaded";
        inflight_load_bytes: Family<AdapterLabels, Gauge> = lmcache.inflight_load_memory_usage_bytes,
            "Bytes of L1 being loaded into";
        store_adapters: Family<StoreAdaptersLabels, Gauge> = lmcache.l2_store_adapters, "Tiers that are stored to";
        prefetch_adapters: Family<AdaptersLabels, Gauge> = lmcache.l2_prefetch_adapters, "Tiers that are asked";
        prefetches: Family<PhaseLabels, Gauge> = own.l2_prefetches, "Lookups for which the tiers are asked now";
        loading_objects: Gauge = own.l2_loading_objects, "Objects being loaded";
        breaker_open: Family<CallLabels, Gauge> = own.l2_breaker_open, "1 while the breaker lets no call through";
        store_failures: Family<TierFailureLabels, Counter> = own.l2_store_failures, "Objects that could not be written";
        load_failures: Family<TierFailureLabels, Counter> = own.l2_load_failures, "Objects that could not be read";
    }
}

#[derive(Clone)]
struct Throughput;

impl MetricConstructor<Histogram> for Throughput {
    fn new_metric(&self) -> Histogram {
        Histogram::new(THROUGHPUT_BUCKETS)
    }
}

impl L2Metrics {
    pub(super) fn new(
        lmcache: &mut Prefix,
        own: &mut Prefix,
        salts: &Arc<Names>,
        models: &Arc<Names>,
    ) -> Self {
        let counters = COUNTERS.map(|(name, help, _)| own.add(name, help));
        let gauges = GAUGES.map(|(name, help, _)| own.add(name, help));
        let guards = GUARDS.map(|(name, help, _)| own.add(name, help));
        let (salts, models) = (Arc::clone(salts), Arc::clone(models));
        let serdes = SerdeMetrics::new(own);
        Self::register(
            lmcache,
            own,
            (salts, models, counters, gauges, guards, serdes),
        )
    }

    fn salt(&self, salt: &str) -> SaltLabels {
        SaltLabels {
            cache_salt: self.salts.label(salt),
        }
    }

    /// The tiers are about to be asked for this many objects.
    pub fn asked(&self, salt: &str, objects: usize) {
        self.lookup_requests.inc();
        self.lookup_objects
            .get_or_create(&self.salt(salt))
            .inc_by(objects as u64);
    }

    /// A tier was given a batch.
    pub fn began(&self, call: TierCall, salt: &str, objects: usize) {
        let (requests, family) = match call {
            TierCall::Lookup => return,
            TierCall::Load => (&self.load_requests, &self.load_objects),
            TierCall::Store => (&self.store_requests, &self.store_objects),
        };
        requests.inc();
        family
            .get_or_create(&self.salt(salt))
            .inc_by(objects as u64);
    }

    /// A tier has answered, with success for this many objects and bytes.
    pub fn ended(
        &self,
        call: TierCall,
        l2_name: &Arc<str>,
        salt: &str,
        objects: usize,
        bytes: u64,
        took: Duration,
    ) {
        let tier = TierLabels {
            l2_name: Arc::clone(l2_name),
        };
        let (requests, family, throughput) = match call {
            TierCall::Lookup => return,
            TierCall::Load => (
                &self.loads_completed,
                &self.loaded_objects,
                &self.load_throughput,
            ),
            TierCall::Store => (
                &self.stores_completed,
                &self.stored_objects,
                &self.store_throughput,
            ),
        };
        requests.get_or_create(&tier).inc();
        family
            .get_or_create(&self.salt(salt))
            .inc_by(objects as u64);
        if bytes > 0 {
            let seconds = took.as_secs_f64().max(1e-9);
            throughput
                .get_or_create(&tier)
                .observe(bytes as f64 / 1e9 / seconds);
        }
    }

    /// A tier has evicted objects.
    pub fn evicted(&self, salt: &str, objects: u64) {
        self.evicted_objects
            .get_or_create(&self.salt(salt))
            .inc_by(objects);
    }

    /// How long a tier took, answer or not.
    pub fn took(&self, call: TierCall, l2_name: &Arc<str>, took: Duration) {
        let labels = CallLabels {
            call: call.name(),
            l2_name: Arc::clone(l2_name),
        };
        self.seconds
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
    }

    /// Objects that a tier had and that did not come into L1.
    pub fn not_loaded(&self, model: &str, reason: &'static str, objects: usize) {
        let labels = PrefetchFailureLabels {
            model_name: self.models.label(model),
            reason,
        };
        self.prefetch_failures
            .get_or_create(&labels)
            .inc_by(objects as u64);
    }

    /// A lookup stopped waiting for its tiers in `phase`.
    pub fn lookup_timed_out(&self, phase: PrefetchPhase) {
        let phase = phase.name();
        self.timeouts.get_or_create(&PhaseLabels { phase }).inc();
    }

    /// Takes over what the tiers count.
    pub(super) fn read(&self, readings: &Readings) {
        let adapters = readings.tiers.len() as u64;
        let read_only = readings.tiers.iter().filter(|tier| tier.is_read_only);
        let stored_to = adapters - read_only.count() as u64;
        for (state, stored_to, asked) in [("active", stored_to, adapters), ("draining", 0, 0)] {
            let labels = StoreAdaptersLabels {
                l1_tag: "_default",
                state,
            };
            set(&self.store_adapters, &labels, stored_to);
            set(&self.prefetch_adapters, &AdaptersLabels { state }, asked);
        }
        if adapters == 0 {
            return;
        }
        for (phase, number) in PrefetchPhase::ALL.iter().zip(readings.l2_prefetches) {
            let phase = phase.name();
            set(&self.prefetches, &PhaseLabels { phase }, number);
        }
        let loading = i64::try_from(readings.l2_loading_objects);
        self.loading_objects.set(loading.unwrap_or(i64::MAX));
        for (index, tier) in readings.tiers.iter().enumerate() {
            self.read_tier(index, tier);
        }
    }

    fn read_tier(&self, index: usize, tier: &TierReadings) {
        let l2_name: Arc<str> = tier.name.as_str().into();
        let labels = TierLabels {
            l2_name: Arc::clone(&l2_name),
        };
        self.serdes.read(tier);
        set(&self.usage_bytes, &labels, tier.used_bytes);
        for (family, (.., value)) in self.gauges.iter().zip(GAUGES) {
            set(family, &labels, value(tier));
        }
        for (family, (.., value)) in self.counters.iter().zip(COUNTERS) {
            follow(family, &labels, value(tier));
        }
        let adapter = AdapterLabels {
            adapter_index: index as u64,
            l2_name: Arc::clone(&l2_name),
        };
        let [_, loads, stores] = tier.calls;
        set(&self.inflight_stores, &adapter, stores);
        set(&self.inflight_loads, &adapter, loads);
        set(&self.inflight_load_bytes, &adapter, tier.loading_bytes);
        for (family, failures) in [
            (&self.store_failures, &tier.store_failures),
            (&self.load_failures, &tier.load_failures),
        ] {
            for (reason, times) in failures {
                let labels = TierFailureLabels {
                    l2_name: Arc::clone(&l2_name),
                    reason,
                };
                follow(family, &labels, *times);
            }
        }
        for (call, guard) in TierCall::ALL.iter().zip(&tier.guards) {
            let labels = CallLabels {
                call: call.name(),
                l2_name: Arc::clone(&l2_name),
            };
            set(&self.breaker_open, &labels, u64::from(guard.is_open));
            for (family, (.., value)) in self.guards.iter().zip(GUARDS) {
                follow(family, &labels, value(guard));
            }
        }
    }
}

/// What labels of a family must be able to do.
trait Labels: Clone + std::hash::Hash + Eq + EncodeLabelSet {}

impl<T: Clone + std::hash::Hash + Eq + EncodeLabelSet> Labels for T {}

fn set<L: Labels>(family: &Family<L, Gauge>, labels: &L, value: u64) {
    let value = i64::try_from(value).unwrap_or(i64::MAX);
    family.get_or_create(labels).set(value);
}

/// The total is the truth; the counter only follows it.
fn follow<L: Labels>(family: &Family<L, Counter>, labels: &L, total: u64) {
    let counter = family.get_or_create(labels);
    counter.inner().fetch_max(total, Ordering::Relaxed);
}
