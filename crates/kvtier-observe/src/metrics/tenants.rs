//! Metrics of single tenants: the largest ones have series of their own, the others share one.
//!
//! They are parts of totals: in each tier the series of all tenants add up to what the tier counts in all. So a tenant's
//! series begins at 0 when it gets one, and when it loses it its counts go to `other`, which never goes down.
//!
//! The mutex guards which tenants have series. A scrape holds it while it reads the tiers and the engine, so it is
//! outside nearly all other locks.

use std::collections::HashMap;
use std::sync::Arc;

use kvtier_common::sync::{Mutex, MutexGuard};
use kvtier_core::cache::{Page, SaltUsage, Stats};
use kvtier_core::object_key::{ShownSalt, TenantNames};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::Prefix;

/// Label value of all tenants without one of their own.
const OTHER: &str = "other";

/// Label value of requests without a salt.
const DEFAULT: &str = "_default";

/// Tenants looked at under one hold of a cache's lock.
const PAGE: usize = 1024;

/// Longest salt that becomes a label value, bytes.
const MAX_BYTES: usize = 256;

/// A tier that counts per tenant.
pub trait TenantSource {
    /// `l1`, or the name of the tier below it.
    fn name(&self) -> &str;

    /// Tenants of the tier, one page of at most `limit` from `from` on.
    fn tenants(&self, from: u32, limit: usize) -> Page<SaltUsage>;

    /// What it counts in all and of these tenants, at one moment.
    fn stats_with(&self, salts: &[Arc<str>]) -> (Stats, Vec<Option<SaltUsage>>);
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Labels {
    cache_salt: Arc<str>,
    tier: Arc<str>,
}

/// What is counted of a tenant, or in all.
const COUNTS: [(&str, &str); 5] = [
    ("tenant_requested_chunks", "Chunks that lookups asked for"),
    (
        "tenant_hit_chunks",
        "Chunks of the prefixes that lookups found",
    ),
    ("tenant_evicted_chunks", "Objects evicted"),
    (
        "tenant_refused_chunks",
        "Objects that were refused because there was no free space",
    ),
    (
        "tenant_over_quota_chunks",
        "Objects that were refused because of their tenant's limit",
    ),
];

type Counts = [u64; COUNTS.len()];

fn counts_of(usage: &SaltUsage) -> Counts {
    [
        usage.requested_chunks_total,
        usage.hit_chunks_total,
        usage.evicted_objects_total,
        usage.refused_total,
        usage.over_quota_total,
    ]
}

fn counts_in_all(stats: &Stats) -> Counts {
    [
        stats.requested_chunks_total,
        stats.hit_chunks_total,
        stats.evicted_objects_total,
        stats.refused_total,
        stats.over_quota_total,
    ]
}

/// What a tenant with series of its own did in a tier since it has them.
#[derive(Default)]
struct Since {
    counts: Counts,
    /// What the tier had counted when it was last looked at; `None` before the first time.
    last: Option<Counts>,
}

impl Since {
    fn count(&mut self, usage: Option<&SaltUsage>) {
        let now = usage.map_or(Counts::default(), counts_of);
        // A tenant that had nothing any more was forgotten with its counts, and may have come back.
        if let Some(last) = self.last {
            let was_forgotten = now.iter().zip(last).any(|(now, last)| *now < last);
            let base = if was_forgotten {
                Counts::default()
            } else {
                last
            };
            for ((sum, now), base) in self.counts.iter_mut().zip(now).zip(base) {
                *sum += now - base;
            }
        }
        self.last = Some(now);
    }
}

/// A tenant with series of its own: what it did, by tier.
type Labelled = HashMap<Arc<str>, Vec<Since>>;

/// Metrics of tenants.
pub struct TenantMetrics {
    names: TenantNames,
    bytes: Family<Labels, Gauge>,
    counters: [Family<Labels, Counter>; COUNTS.len()],
    /// Series by tenant; also locked while they are written, as each scrape rebuilds them.
    labelled: Mutex<Labelled>,
}

impl TenantMetrics {
    pub(super) fn new(own: &mut Prefix, names: TenantNames) -> Self {
        Self {
            names,
            bytes: own.add(
                "tenant_bytes",
                "Bytes of a tenant, those being written included",
            ),
            counters: COUNTS.map(|(name, help)| own.add(name, help)),
            labelled: Mutex::default(),
        }
    }

    /// Makes the series of the `most` largest tenants and of all others; none at all for 0. They stay as they are until
    /// what is given goes.
    pub fn read(
        &self,
        most: usize,
        tiers: &[&dyn TenantSource],
    ) -> MutexGuard<'_, impl Sized + use<>> {
        let mut labelled = self.labelled.lock();
        self.bytes.clear();
        self.counters.iter().for_each(Family::clear);
        if most > 0 {
            choose(&mut labelled, most, tiers);
            let salts: Vec<_> = labelled.keys().cloned().collect();
            for (number, tier) in tiers.iter().enumerate() {
                self.read_tier(&mut labelled, &salts, number, *tier);
            }
        }
        labelled
    }

    fn read_tier(
        &self,
        labelled: &mut Labelled,
        salts: &[Arc<str>],
        number: usize,
        tier: &dyn TenantSource,
    ) {
        let name: Arc<str> = tier.name().into();
        let (stats, usages) = tier.stats_with(salts);
        let mut other = counts_in_all(&stats);
        let mut other_bytes = stats.bytes + stats.staged_bytes + stats.doomed_bytes;
        for (salt, usage) in salts.iter().zip(&usages) {
            let Some(since) = labelled
                .get_mut(salt)
                .and_then(|tiers| tiers.get_mut(number))
            else {
                continue;
            };
            since.count(usage.as_ref());
            let bytes = usage.as_ref().map_or(0, |usage| usage.counted_bytes);
            self.tell(label(&self.names, salt), &name, bytes, &since.counts);
            other_bytes = other_bytes.saturating_sub(bytes);
            for (other, own) in other.iter_mut().zip(since.counts) {
                *other = other.saturating_sub(own);
            }
        }
        self.tell(OTHER.into(), &name, other_bytes, &other);
    }

    /// Adds, as two tenants can share a label: their short hashes may be equal.
    fn tell(&self, cache_salt: Arc<str>, tier: &Arc<str>, bytes: u64, counts: &Counts) {
        let tier = Arc::clone(tier);
        let labels = Labels { cache_salt, tier };
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.bytes.get_or_create(&labels).inc_by(bytes);
        for (family, count) in self.counters.iter().zip(counts) {
            family.get_or_create(&labels).inc_by(*count);
        }
    }
}

/// The label value of a tenant: its name, or a hash of the salt if that means something else here or is very long.
fn label(names: &TenantNames, salt: &str) -> Arc<str> {
    match &*names.name(salt) {
        "" => DEFAULT.into(),
        OTHER | DEFAULT => ShownSalt(salt).to_string().into(),
        odd if odd.starts_with('~') || odd.len() > MAX_BYTES => ShownSalt(salt).to_string().into(),
        name => name.into(),
    }
}

/// Decides which tenants have series of their own. A tenant keeps its series until another one has a quarter more bytes,
/// so that tenants of nearly equal size do not take turns.
fn choose(labelled: &mut Labelled, most: usize, tiers: &[&dyn TenantSource]) {
    let mut bytes: HashMap<Arc<str>, u64> = HashMap::new();
    for tier in tiers {
        let mut next = Some(0);
        while let Some(from) = next {
            let page = tier.tenants(from, PAGE);
            for usage in page.entries {
                *bytes.entry(usage.salt).or_default() += usage.counted_bytes;
            }
            next = page.next;
        }
    }
    let of = |salt: &Arc<str>| bytes.get(salt).copied().unwrap_or(0);
    // By name where they have as much, so that it does not change from one time to the next.
    let mut own: Vec<_> = labelled
        .keys()
        .map(|salt| (of(salt), salt.clone()))
        .collect();
    own.sort_unstable();
    let mut others: Vec<_> = bytes
        .iter()
        .filter(|(salt, bytes)| **bytes > 0 && !labelled.contains_key(*salt))
        .map(|(salt, bytes)| (*bytes, salt.clone()))
        .collect();
    if others.len() > most {
        others.select_nth_unstable_by(most, |a, b| b.cmp(a));
        others.truncate(most);
    }
    others.sort_unstable_by(|a, b| b.cmp(a));
    let mut smallest = own.into_iter();
    for (bytes, salt) in others {
        if labelled.len() >= most {
            match smallest.next() {
                Some((least, other)) if bytes > least.saturating_add(least / 4) => {
                    labelled.remove(&other);
                }
                _ => break,
            }
        }
        labelled.insert(salt, tiers.iter().map(|_| Since::default()).collect());
    }
}
