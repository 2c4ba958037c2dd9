//! Reads the counters and the state of the server.

use std::collections::BTreeMap;
use std::time::Instant;

use kvtier_engine::Engine;
use kvtier_observe::api::{
    DashboardTick, Metrics, MetricsReader, Rates, RecentLookup, Status, Traffic, unix_millis,
};

use super::history::Point;
use super::traffic;
use crate::Api;
use crate::info::health;
use crate::quota::shown;

/// Lookups of a tick.
const LOOKUPS: usize = 20;

/// Prefixes of the series that are read.
const READ: [&str; 6] = [
    "lmcache_mp_lookup",
    "lmcache_mp_num_finished",
    "kvtier_request_duration_seconds_bucket",
    "kvtier_refused_requests",
    "kvtier_l1_evicted",
    "kvtier_gpu_copied_bytes",
];

/// Labels of these series that are read: tenants and models are summed.
const LABELS: [&str; 5] = ["operation", "reason", "le", "gpu", "direction"];

/// What was read last.
#[derive(Default)]
pub(super) struct Sampler {
    last: Option<Metrics>,
    tiers: traffic::Tiers,
    pub(super) traffic: Option<Traffic>,
}

impl Sampler {
    /// Reads the counters; returns what has happened since they were last read.
    pub(super) fn read(&mut self, engine: &Engine) -> Point {
        let readings = engine.admin().readings();
        let at = Instant::now();
        // Read as it is written: with many tenants the text has some megabytes.
        let mut reader = MetricsReader::new(&READ, Some(&LABELS));
        // It takes any text.
        let _ = engine.metrics().encode_to(&readings, &mut reader);
        let now = reader.finish(at);
        let tiers = traffic::Tiers::of(at, &readings.tiers);
        let last = self.last.as_ref();
        self.traffic = last.map(|last| {
            let rates = Rates::between(last, &now);
            traffic::of(&rates, &now, tiers.since(&self.tiers))
        });
        (self.last, self.tiers) = (Some(now), tiers);
        traffic::point(self.traffic.as_ref(), &readings)
    }
}

/// The state now.
pub(super) fn state(api: &Api) -> DashboardTick {
    let engine = api.engine.get();
    let admin = engine.map(|engine| engine.admin());
    let health = health(api);
    let status = admin.map(|admin| brief(admin.status(health.reason.is_none())));
    let lookups = engine.map_or_else(Vec::new, |engine| {
        let latest = engine.admin().explanations.latest(LOOKUPS);
        latest.into_iter().map(|it| named(engine, it)).collect()
    });
    DashboardTick {
        at: unix_millis(),
        status,
        health,
        lookups,
        ..DashboardTick::default()
    }
}

fn named(engine: &Engine, lookup: RecentLookup) -> RecentLookup {
    RecentLookup {
        cache_salt: shown(engine, &lookup.cache_salt).into_owned(),
        ..lookup
    }
}

/// Without what is there twice, and without the layers of workers.
fn brief(mut status: Status) -> Status {
    let storage = &mut status.storage_manager;
    storage.l1_managers = BTreeMap::new();
    storage.store_controllers = BTreeMap::new();
    storage.l1_eviction_controllers = BTreeMap::new();
    for instance in status.cache_context_meta.values_mut() {
        instance.kv_cache_layout.kernel_groups.clear();
    }
    status
}
