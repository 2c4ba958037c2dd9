//! Series of tenants add up to the totals and never go down, whichever tenants come, grow and are forgotten.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use kvtier_core::cache::{Page, SaltUsage, Stats};
use kvtier_core::object_key::ShownSalt;
use proptest::prelude::*;

use super::tenants::TenantSource;
use super::{Metrics, Readings};

/// A tier whose counts the test sets.
#[derive(Default)]
struct FakeSource {
    tenants: RefCell<BTreeMap<String, SaltUsage>>,
    all: RefCell<Stats>,
}

fn empty_usage(salt: &str) -> SaltUsage {
    SaltUsage {
        salt: salt.into(),
        objects: 0,
        bytes: 0,
        staged_bytes: 0,
        counted_bytes: 0,
        grant: None,
        over_quota: false,
        requested_chunks_total: 0,
        hit_chunks_total: 0,
        committed_objects_total: 0,
        committed_bytes_total: 0,
        evicted_objects_total: 0,
        evicted_bytes_total: 0,
        refused_total: 0,
        over_quota_total: 0,
    }
}

impl FakeSource {
    fn has(&self, salt: &str, bytes: u64) {
        let mut tenants = self.tenants.borrow_mut();
        let usage = tenants
            .entry(salt.into())
            .or_insert_with(|| empty_usage(salt));
        let mut all = self.all.borrow_mut();
        all.bytes = all.bytes - usage.counted_bytes + bytes;
        usage.counted_bytes = bytes;
    }

    fn counts(&self, salt: &str, count: u64) {
        let mut tenants = self.tenants.borrow_mut();
        let usage = tenants
            .entry(salt.into())
            .or_insert_with(|| empty_usage(salt));
        let mut all = self.all.borrow_mut();
        usage.requested_chunks_total += 2 * count;
        all.requested_chunks_total += 2 * count;
        usage.hit_chunks_total += count;
        all.hit_chunks_total += count;
        usage.evicted_objects_total += 1;
        all.evicted_objects_total += 1;
        usage.refused_total += 2;
        all.refused_total += 2;
        usage.over_quota_total += 3;
        all.over_quota_total += 3;
    }

    fn forgets(&self, salt: &str) {
        self.has(salt, 0);
        self.tenants.borrow_mut().remove(salt);
    }
}

impl TenantSource for FakeSource {
    fn name(&self) -> &str {
        "source"
    }

    fn tenants(&self, from: u32, limit: usize) -> Page<SaltUsage> {
        let tenants = self.tenants.borrow();
        let from = from as usize;
        let entries: Vec<_> = tenants.values().skip(from).take(limit).cloned().collect();
        let end = from + entries.len();
        let next = (end < tenants.len()).then(|| u32::try_from(end).unwrap());
        Page { entries, next }
    }

    fn stats_with(&self, salts: &[Arc<str>]) -> (Stats, Vec<Option<SaltUsage>>) {
        let tenants = self.tenants.borrow();
        let usages = salts.iter().map(|salt| tenants.get(&**salt).cloned());
        (*self.all.borrow(), usages.collect())
    }
}

/// The values of the series of tenants, by metric and then by tenant.
fn read(
    metrics: &Metrics,
    most: usize,
    source: &FakeSource,
) -> BTreeMap<String, BTreeMap<String, u64>> {
    let _read = metrics.tenants.read(most, &[source]);
    let mut read: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    for line in metrics.encode(&Readings::default()).lines() {
        let Some(rest) = line.strip_prefix("kvtier_tenant_") else {
            continue;
        };
        let (name, rest) = rest.split_once("{cache_salt=\"").unwrap();
        let (salt, value) = rest.split_once("\",tier=\"source\"} ").unwrap();
        let of_name = read.entry(name.to_owned()).or_default();
        let before = of_name.insert(salt.to_owned(), value.parse().unwrap());
        assert_eq!(before, None, "twice the same series");
    }
    read
}

fn assert_adds_up(read: &BTreeMap<String, BTreeMap<String, u64>>, source: &FakeSource) {
    let all = source.all.borrow();
    for (name, total) in [
        ("bytes", all.bytes),
        ("requested_chunks_total", all.requested_chunks_total),
        ("hit_chunks_total", all.hit_chunks_total),
        ("evicted_chunks_total", all.evicted_objects_total),
        ("refused_chunks_total", all.refused_total),
        ("over_quota_chunks_total", all.over_quota_total),
    ] {
        assert_eq!(read[name].values().sum::<u64>(), total, "{name}");
    }
}

#[derive(Debug, Clone)]
enum Act {
    Has(usize, u64),
    Counts(usize, u64),
    Forgets(usize),
    Read,
}

fn act() -> impl Strategy<Value = Act> {
    let tenant = 0..SALTS.len();
    prop_oneof![
        3 => (tenant.clone(), 0..1000_u64).prop_map(|(tenant, bytes)| Act::Has(tenant, bytes)),
        3 => (tenant.clone(), 0..100_u64).prop_map(|(tenant, count)| Act::Counts(tenant, count)),
        1 => tenant.prop_map(Act::Forgets),
        3 => Just(Act::Read),
    ]
}

/// Some have names that mean something else here.
const SALTS: [&str; 7] = ["", "a", "b", "c", "other", "_default", "~2c3d4e5f"];

proptest! {
    #[test]
    fn series_add_up_and_never_go_down(acts in prop::collection::vec(act(), 1..80), most in 1_usize..5) {
        let (metrics, source) = (Metrics::new(), FakeSource::default());
        let mut before = BTreeMap::new();
        for act in acts {
            match act {
                Act::Has(tenant, bytes) => source.has(SALTS[tenant], bytes),
                Act::Counts(tenant, count) => source.counts(SALTS[tenant], count),
                Act::Forgets(tenant) => source.forgets(SALTS[tenant]),
                Act::Read => {
                    let now = read(&metrics, most, &source);
                    assert_adds_up(&now, &source);
                    for (name, tenants) in &now {
                        prop_assert!(tenants.len() <= most + 1);
                        let Some(before) = before.get(name).filter(|_| name != "bytes") else {
                            continue;
                        };
                        let before: &BTreeMap<String, u64> = before;
                        prop_assert!(tenants["other"] >= before["other"], "other {}", name);
                        for (salt, value) in tenants {
                            // It has gone and come back, if it is less than it was: that is a series of its own.
                            let least = before.get(salt).copied().unwrap_or(0);
                            prop_assert!(*value >= least, "{} of {}", name, salt);
                        }
                    }
                    before = now;
                }
            }
        }
    }
}

#[test]
fn the_largest_tenants_have_series_and_keep_them() {
    let (metrics, source) = (Metrics::new(), FakeSource::default());
    let names = |most| {
        let read = read(&metrics, most, &source);
        let bytes = read.get("bytes").cloned().unwrap_or_default();
        bytes.into_keys().collect::<Vec<_>>().join(" ")
    };
    for (salt, bytes) in [("a", 100), ("b", 90), ("c", 80), ("", 70)] {
        source.has(salt, bytes);
        source.counts(salt, 10);
    }
    assert_eq!(names(2), "a b other");
    // What came before they had series is in `other`.
    assert_eq!(read(&metrics, 2, &source)["hit_chunks_total"]["a"], 0);
    source.counts("a", 7);
    assert_eq!(read(&metrics, 2, &source)["hit_chunks_total"]["a"], 7);
    source.has("c", 112);
    assert_eq!(names(2), "a b other", "no more than a quarter more");
    source.has("c", 113);
    assert_eq!(names(2), "a c other");
    source.has("", 200);
    assert_eq!(names(2), "_default c other");
    assert_eq!(read(&metrics, 2, &source)["hit_chunks_total"]["other"], 47);
    assert_eq!(names(0), "");
}

#[test]
fn ambiguous_salt_is_hashed_as_label() {
    let (metrics, source) = (Metrics::new(), FakeSource::default());
    let long = "x".repeat(300);
    let odd = ["other", "_default", "~12345678", &long];
    for salt in odd {
        source.has(salt, 10);
    }
    source.has("", 5);
    let read = read(&metrics, 9, &source);
    let mut expected: Vec<_> = odd.map(|salt| ShownSalt(salt).to_string()).into();
    expected.extend(["_default".into(), "other".into()]);
    expected.sort();
    assert_eq!(read["bytes"].keys().cloned().collect::<Vec<_>>(), expected);
    assert_eq!((read["bytes"]["other"], read["bytes"]["_default"]), (0, 5));
}
