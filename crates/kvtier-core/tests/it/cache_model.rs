//! The cache against a naive model of itself: any calls in any order give the same answers, extents included.

use crate::cache_support::model::{Id, Model, ModelStaged, Quotas};
use crate::cache_support::{FirstFit, NOW, hash, namespace};
use kvtier_core::cache::{Cache, CacheConfig, PrefixLease, ReadLease, Reservation, ReserveRequest};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::quota::{Grant, QuotaConfig, QuotaMode};
use kvtier_core::{ChunkHash, GroupRow, Namespace};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::Index;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

const NAMESPACES: usize = 5;
const TENANTS: [&str; 3] = ["", "a", "b"];
const CHUNKS: u32 = 10;

fn namespace_of(number: usize) -> &'static Arc<Namespace> {
    [
        namespace(0, ""),
        namespace(1, ""),
        namespace(0, "a"),
        namespace(1, "a"),
        namespace(0, "b"),
    ][number]
}

/// The tenant of a namespace, in [`TENANTS`].
fn tenant_of(namespace: usize) -> usize {
    [0, 0, 1, 1, 2][namespace]
}

#[derive(Clone, Debug)]
enum Op {
    Reserve(Vec<(usize, Vec<u32>, u64)>),
    Commit(Index),
    CommitSubset(Index, u16),
    CommitFirst(Index, bool),
    CommitLeased(Index),
    Pin(usize, Vec<u32>, u64),
    PinPrefix(Index, u64),
    EndPins(u64),
    Abort(Index),
    Lookup(Vec<(usize, Option<u32>)>, Vec<u32>),
    Find(Vec<usize>, Vec<u32>),
    Claim(Index, usize, Range<usize>),
    ReleaseRange(Index, Range<usize>, Range<usize>),
    ReleasePrefix(Index),
    ReleaseRead(Index),
    Lease(usize, Vec<u32>),
    Touch(usize, Vec<u32>),
    EvictFirst(usize, Vec<u32>),
    Evict(u64, usize),
    Remove(usize, Vec<u32>, bool),
    Clear(bool),
    SetGrant(usize, Option<Grant>),
    EvictOverQuota(usize),
}

fn chunks() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![
        // Mostly prefixes, for they are what hits; sometimes anything.
        4 => (0..=CHUNKS).prop_map(|end| (0..end).collect()),
        1 => vec(0..CHUNKS, 0..6),
    ]
}

fn span(end: usize) -> impl Strategy<Value = Range<usize>> {
    (0..end, 0..end).prop_map(|(a, b)| a.min(b)..a.max(b) + 1)
}

fn op() -> impl Strategy<Value = Op> {
    let which = any::<Index>;
    let window = prop_oneof![Just(None), (0..4u32).prop_map(Some)];
    prop_oneof![
        6 => vec((0..NAMESPACES, chunks(), 1..9u64), 1..4).prop_map(Op::Reserve),
        6 => which().prop_map(Op::Commit),
        1 => (which(), any::<u16>()).prop_map(|(w, keep)| Op::CommitSubset(w, keep)),
        1 => which().prop_map(Op::CommitLeased),
        2 => (which(), any::<bool>()).prop_map(|(w, l)| Op::CommitFirst(w, l)),
        3 => (0..NAMESPACES, chunks(), 0..9u64).prop_map(|(s, c, t)| Op::Pin(s, c, t)),
        1 => (which(), 0..9u64).prop_map(|(w, t)| Op::PinPrefix(w, t)),
        2 => (0..9u64).prop_map(Op::EndPins),
        1 => which().prop_map(Op::Abort),
        5 => (vec((0..NAMESPACES, window), 0..4), chunks()).prop_map(|(r, c)| Op::Lookup(r, c)),
        2 => (vec(0..NAMESPACES, 0..3), chunks()).prop_map(|(r, c)| Op::Find(r, c)),
        2 => (which(), 0..3usize, span(8)).prop_map(|(w, r, c)| Op::Claim(w, r, c)),
        2 => (which(), span(3), span(8)).prop_map(|(w, r, c)| Op::ReleaseRange(w, r, c)),
        3 => which().prop_map(Op::ReleasePrefix),
        3 => which().prop_map(Op::ReleaseRead),
        1 => (0..NAMESPACES, chunks()).prop_map(|(s, c)| Op::Lease(s, c)),
        1 => (0..NAMESPACES, chunks()).prop_map(|(s, c)| Op::Touch(s, c)),
        1 => (0..NAMESPACES, chunks()).prop_map(|(s, c)| Op::EvictFirst(s, c)),
        1 => (0..60u64, 0..8usize).prop_map(|(b, n)| Op::Evict(b, n)),
        1 => (0..NAMESPACES, chunks(), any::<bool>()).prop_map(|(s, c, f)| Op::Remove(s, c, f)),
        1 => any::<bool>().prop_map(Op::Clear),
        3 => (0..TENANTS.len(), option::of(grant())).prop_map(|(t, g)| Op::SetGrant(t, g)),
        2 => (0..8usize).prop_map(Op::EvictOverQuota),
    ]
}

fn grant() -> impl Strategy<Value = Grant> {
    let reserved = prop_oneof![Just(0), 0..60u64];
    (option::of(0..60u64), reserved).prop_map(|(limit, reserved)| Grant {
        limit,
        reserved: limit.map_or(reserved, |limit| reserved.min(limit)),
    })
}

fn quotas() -> impl Strategy<Value = QuotaConfig> {
    let mode = prop_oneof![Just(QuotaMode::Soft), Just(QuotaMode::Strict)];
    let default_limit = option::weighted(0.3, 0..60u64);
    // As exact in binary as bytes are, so that both sides round alike.
    let part = || (0..=8u32).prop_map(|eighths| f64::from(eighths) / 8.0);
    (mode, default_limit, part(), part()).prop_map(|(mode, default_limit, watermark, ratio)| {
        QuotaConfig {
            mode,
            default_limit,
            watermark,
            ratio,
        }
    })
}

fn hashes_of(chunks: &[u32]) -> Vec<ChunkHash> {
    chunks.iter().map(|&chunk| hash(chunk)).collect()
}

type ModelRows = Vec<(usize, Vec<Option<Id>>)>;

fn real_rows(rows: &[(usize, Option<u32>)]) -> Arc<[GroupRow]> {
    let row = |&(namespace, window): &(usize, Option<u32>)| GroupRow {
        namespace: Arc::clone(namespace_of(namespace)),
        window,
        object_bytes: 1,
    };
    rows.iter().map(row).collect()
}

struct Both {
    cache: Cache<FirstFit>,
    model: Model,
    reservations: Vec<(Reservation<FirstFit>, Vec<ModelStaged>)>,
    prefixes: Vec<(PrefixLease<FirstFit>, ModelRows)>,
    reads: Vec<(ReadLease<FirstFit>, Vec<Id>)>,
    /// Pins so far: no two have one deadline.
    pins: u64,
}

/// Seconds of a pin of this rank, the `number`th: more than those of any lower rank.
fn seconds(rank: u64, number: u64) -> u64 {
    rank * 1000 + number
}

/// Takes the chosen one out of a list that may be empty.
fn pick<T>(list: &mut Vec<T>, which: &Index) -> Option<T> {
    (!list.is_empty()).then(|| list.swap_remove(which.index(list.len())))
}

impl Both {
    fn new(
        capacity: u64,
        align: u64,
        eviction: EvictionKind,
        quotas: QuotaConfig,
        max_pinned_share: f64,
    ) -> Self {
        let isolates = eviction == EvictionKind::IsolatedLru;
        let config = CacheConfig {
            eviction,
            quotas: if isolates {
                quotas
            } else {
                QuotaConfig::default()
            },
            max_pinned_share,
            // `compare` checks them.
            check_invariants_every: 0,
            ..CacheConfig::default()
        };
        let evicts = eviction != EvictionKind::Noop;
        let mut model = Model::new(FirstFit::new(capacity, align), evicts, tenant_of);
        model.max_pinned_share = max_pinned_share;
        model.quotas = isolates.then(|| Quotas {
            config: quotas,
            ..Quotas::default()
        });
        Self {
            cache: Cache::new(FirstFit::new(capacity, align), config),
            model,
            reservations: Vec::new(),
            prefixes: Vec::new(),
            reads: Vec::new(),
            pins: 0,
        }
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Reserve(requests) => self.reserve(&requests),
            Op::Commit(which) => self.commit(&which, |_| true),
            Op::CommitSubset(which, keep) => self.commit(&which, |at| keep >> (at % 16) & 1 == 1),
            Op::CommitLeased(which) => self.commit_leased(&which, false),
            Op::CommitFirst(which, true) => self.commit_leased(&which, true),
            Op::CommitFirst(which, false) => {
                if let Some((real, staged)) = pick(&mut self.reservations, &which) {
                    let _ = real.evict_first().commit(NOW);
                    self.model.commit(&staged, |_| true, false, true);
                }
            }
            Op::Pin(namespace, chunks, rank) => {
                let time = self.next_pin(rank);
                let request = ReserveRequest {
                    namespace: namespace_of(namespace),
                    hashes: &hashes_of(&chunks),
                    len: 1,
                };
                self.cache.pin(NOW, &[request], Duration::from_secs(time));
                for chunk in chunks {
                    if let Some(&id) = self.model.resident.get(&(namespace, chunk)) {
                        self.model.pin(id, time);
                    }
                }
            }
            Op::PinPrefix(which, rank) => {
                let time = self.next_pin(rank);
                let at = which.index(self.prefixes.len().max(1));
                let found = self.prefixes.get(at);
                // As the rows of a real lookup.
                let of_one_tenant = |rows: &ModelRows| {
                    let ids = rows.iter().flat_map(|(_, ids)| ids.iter().flatten());
                    let mut tenants = ids.map(|id| tenant_of(self.model.objects[id].key.0));
                    let first = tenants.next();
                    tenants.all(|tenant| Some(tenant) == first)
                };
                if let Some((lease, rows)) = found.filter(|(_, rows)| of_one_tenant(rows)) {
                    lease.pin(NOW, Duration::from_secs(time));
                    pin_rows(&mut self.model, rows, time);
                }
            }
            Op::EndPins(rank) => {
                let time = seconds(rank, 0);
                // The tick by which no pin ends early.
                let ended = self
                    .cache
                    .end_pins(NOW + Duration::from_secs(time), usize::MAX);
                assert_eq!(ended, self.model.end_pins(time - u64::from(time > 0)));
            }
            Op::Abort(which) => {
                if let Some((real, staged)) = pick(&mut self.reservations, &which) {
                    real.abort();
                    self.model.commit(&staged, |_| false, false, false);
                }
            }
            Op::Lookup(rows, chunks) => self.lookup(&rows, &chunks),
            Op::Find(rows, chunks) => self.find(&rows, &chunks),
            Op::Claim(which, row, span) => self.claim(&which, row, span),
            Op::ReleaseRange(which, rows, span) => self.release_range(&which, &rows, &span),
            Op::ReleasePrefix(which) => {
                if let Some((lease, mut rows)) = pick(&mut self.prefixes, &which) {
                    drop(lease);
                    let all = 0..rows.len();
                    release(&mut self.model, &mut rows, &all, &(0..usize::MAX));
                }
            }
            Op::ReleaseRead(which) => {
                if let Some((lease, ids)) = pick(&mut self.reads, &which) {
                    drop(lease);
                    ids.iter().rev().for_each(|&id| self.model.end_lease(id));
                }
            }
            Op::Lease(namespace, chunks) => {
                let lease = self
                    .cache
                    .lease(NOW, namespace_of(namespace), &hashes_of(&chunks));
                let find = |&chunk| self.model.resident.get(&(namespace, chunk)).copied();
                let ids: Option<Vec<Id>> = chunks.iter().map(find).collect();
                assert_eq!(lease.is_some(), ids.is_some());
                if let (Some(lease), Some(ids)) = (lease, ids) {
                    ids.iter().for_each(|&id| self.model.lease(id));
                    self.keep_read(lease, ids);
                }
            }
            Op::Touch(namespace, chunks) => {
                let hashes = hashes_of(&chunks);
                let touched = self.cache.touch(NOW, [namespace_of(namespace)], &hashes);
                assert_eq!(touched, self.model.touch_all(namespace, &chunks));
            }
            Op::EvictFirst(namespace, chunks) => {
                let hashes = hashes_of(&chunks);
                let namespaces = [namespace_of(namespace)];
                let counts = self.cache.evict_first(NOW, namespaces, &hashes);
                assert_eq!(counts, self.model.evict_all_first(namespace, &chunks));
            }
            Op::Evict(bytes, objects) => {
                let evicted = self.cache.evict(NOW, bytes, objects);
                let expected = self.model.evict(bytes, objects);
                assert_eq!((evicted.objects, evicted.bytes), expected);
            }
            Op::Remove(namespace, chunks, force) => {
                let removed =
                    self.cache
                        .remove(namespace_of(namespace), &hashes_of(&chunks), force);
                let mut counts = (0, 0, 0);
                for chunk in chunks {
                    match self.model.remove((namespace, chunk), force) {
                        Some(true) => counts.0 += 1,
                        Some(false) => counts.1 += 1,
                        None => counts.2 += 1,
                    }
                }
                assert_eq!((removed.objects, removed.kept, removed.missing), counts);
            }
            Op::SetGrant(tenant, grant) => self.set_grant(tenant, grant),
            Op::EvictOverQuota(objects) => self.evict_over_quota(objects),
            Op::Clear(force) => {
                let removed = self.cache.clear(force);
                let keys: Vec<_> = self.model.resident.keys().copied().collect();
                let results = keys.iter().map(|&key| self.model.remove(key, force));
                let count = results.filter(|count| *count == Some(true)).count();
                assert_eq!(
                    (removed.objects, removed.kept),
                    (count, self.model.resident.len())
                );
            }
        }
    }

    /// Grants mean something only where tenants have orders of their own.
    fn set_grant(&mut self, tenant: usize, grant: Option<Grant>) {
        if self.model.quotas.is_some() {
            self.cache.set_grant(TENANTS[tenant], grant);
            self.model.set_grant(tenant, grant);
        }
    }

    fn evict_over_quota(&mut self, objects: usize) {
        if self.model.quotas.is_some() {
            let evicted = self.cache.evict_over_quota(NOW, objects);
            let expected = self.model.evict_over_quota(objects);
            assert_eq!((evicted.objects, evicted.bytes), expected);
        }
    }

    fn reserve(&mut self, requests: &[(usize, Vec<u32>, u64)]) {
        let hashes: Vec<_> = requests
            .iter()
            .map(|request| hashes_of(&request.1))
            .collect();
        let real: Vec<_> = requests
            .iter()
            .zip(&hashes)
            .map(|(request, hashes)| ReserveRequest {
                namespace: namespace_of(request.0),
                hashes,
                len: request.2,
            })
            .collect();
        let before = TENANTS.map(|tenant| self.tenant_bytes(tenant));
        let evicted = || self.cache.stats().evicted_objects_total;
        let evicted_before = evicted();
        let reserved = self.cache.reserve(NOW, &real).unwrap();
        if reserved.reservation.is_empty() {
            assert_eq!(
                evicted(),
                evicted_before,
                "a refused reserve evicts nothing"
            );
        }
        let (outcomes, staged) = self.model.reserve(requests);
        assert_eq!(reserved.outcomes, outcomes);
        self.strict_limits_hold(before);
        let places = reserved.reservation.staged().iter();
        let places: Vec<_> = places
            .map(|s| (s.request as usize, s.position as usize, s.extent))
            .collect();
        let expected: Vec<_> = staged
            .iter()
            .map(|&(request, position, id)| (request, position, self.model.objects[&id].extent))
            .collect();
        assert_eq!(places, expected);
        self.reservations.push((reserved.reservation, staged));
    }

    fn commit(&mut self, which: &Index, keep: impl Fn(usize) -> bool) {
        let Some((real, staged)) = pick(&mut self.reservations, which) else {
            return;
        };
        let mut at = 0..;
        let committed = real.commit_subset(NOW, |_| at.next().is_some_and(&keep));
        let (counts, _) = self.model.commit(&staged, keep, false, false);
        assert_eq!(
            (committed.inserted, committed.duplicates, committed.aborted),
            counts
        );
    }

    fn commit_leased(&mut self, which: &Index, goes_first: bool) {
        let Some((real, staged)) = pick(&mut self.reservations, which) else {
            return;
        };
        let real = if goes_first { real.evict_first() } else { real };
        let (committed, lease) = real.commit_leased(NOW);
        let (counts, ids) = self.model.commit(&staged, |_| true, true, goes_first);
        assert_eq!((committed.inserted, committed.duplicates, 0), counts);
        self.keep_read(lease, ids);
    }

    fn next_pin(&mut self, rank: u64) -> u64 {
        self.pins += 1;
        seconds(rank, self.pins)
    }

    fn keep_read(&mut self, lease: ReadLease<FirstFit>, ids: Vec<Id>) {
        self.reads.push((lease, ids));
    }

    /// Windows are of no account to a find.
    fn find(&mut self, rows: &[usize], chunks: &[u32]) {
        let windows = rows.iter().map(|&namespace| (namespace, Some(1)));
        let real = real_rows(&windows.collect::<Vec<_>>());
        let (found, lookup) = self.cache.find(NOW, &real, &hashes_of(chunks), None);
        let resident = |namespace: &usize, chunk: &u32| {
            let id = self.model.resident.get(&(*namespace, *chunk));
            id.copied()
        };
        let is_found =
            |chunk: &u32| !rows.is_empty() && rows.iter().all(|row| resident(row, chunk).is_some());
        for (position, chunk) in chunks.iter().enumerate() {
            assert_eq!(found.get(position), is_found(chunk), "{position}");
        }
        let hits: Vec<_> = chunks.iter().filter(|chunk| is_found(chunk)).collect();
        assert_eq!(lookup.hit_chunks, hits.len());
        let of_row = |row: &usize| {
            let ids = hits.iter().map(|chunk| resident(row, chunk));
            (0, ids.collect::<Vec<_>>())
        };
        let model_rows: ModelRows = rows.iter().map(of_row).collect();
        for id in model_rows.iter().flat_map(|(_, ids)| ids.iter().flatten()) {
            self.model.lease(*id);
        }
        self.prefixes.push((lookup.lease, model_rows));
    }

    fn lookup(&mut self, rows: &[(usize, Option<u32>)], chunks: &[u32]) {
        let found = self.cache.lookup(NOW, &real_rows(rows), &hashes_of(chunks));
        let (hit, model_rows) = self.model.lookup(rows, chunks);
        assert_eq!(found.hit_chunks, hit);
        for (row, (start, ids)) in model_rows.iter().enumerate() {
            assert_eq!(found.lease.leased(row), Some(*start..start + ids.len()));
        }
        let some = |(start, ids): (usize, Vec<Id>)| (start, ids.into_iter().map(Some).collect());
        let model_rows = model_rows.into_iter().map(some).collect();
        self.prefixes.push((found.lease, model_rows));
    }

    fn claim(&mut self, which: &Index, row: usize, span: Range<usize>) {
        if self.prefixes.is_empty() {
            return;
        }
        let (lease, rows) = &self.prefixes[which.index(self.prefixes.len())];
        let claimed = lease.claim(row, span.clone());
        let held = |chunk: usize| {
            let (start, ids) = rows.get(row)?;
            *ids.get(chunk.checked_sub(*start)?)?
        };
        let ids: Option<Vec<Id>> = span.map(held).collect();
        assert_eq!(claimed.is_some(), ids.is_some());
        if let (Some(claimed), Some(ids)) = (claimed, ids) {
            ids.iter().for_each(|&id| self.model.lease(id));
            self.keep_read(claimed, ids);
        }
    }

    fn release_range(&mut self, which: &Index, rows: &Range<usize>, span: &Range<usize>) {
        if self.prefixes.is_empty() {
            return;
        }
        let at = which.index(self.prefixes.len());
        let (lease, model_rows) = &mut self.prefixes[at];
        let released = lease.release_range(rows.clone(), span.clone());
        assert_eq!(released, release(&mut self.model, model_rows, rows, span));
    }

    fn tenant_bytes(&self, tenant: &str) -> u64 {
        let usage = self.cache.salt_usage(tenant);
        usage.map_or(0, |usage| usage.counted_bytes)
    }

    /// With strict limits a store never takes a tenant beyond its limit; one whose limit sank below what it has grows
    /// no more.
    fn strict_limits_hold(&self, before: [u64; TENANTS.len()]) {
        let Some(quotas) = &self.model.quotas else {
            return;
        };
        for (tenant, before) in before.into_iter().enumerate() {
            let limit = self.model.limit(tenant).unwrap_or(u64::MAX);
            let now = self.tenant_bytes(TENANTS[tenant]);
            if quotas.config.mode == QuotaMode::Strict {
                assert!(
                    now <= limit.max(before),
                    "{now} of {limit}, {before} before"
                );
            }
        }
    }

    /// What can be seen from outside is the same on both sides.
    fn compare(&self) {
        let (stats, model) = (self.cache.stats(), &self.model);
        let counted = (
            stats.objects,
            stats.bytes,
            stats.staged_objects,
            stats.staged_bytes,
            stats.leased_objects,
            stats.evicted_objects_total,
            stats.refused_total,
            stats.over_quota_total,
            (stats.pinned_bytes, stats.pins_refused_total),
        );
        let expected = (
            model.resident.len() as u64,
            model.resident_bytes(),
            model.staged.len() as u64,
            model.staged_bytes(),
            model.leased() as u64,
            model.evicted,
            model.refused,
            model.over_quota,
            (model.pinned_bytes(), model.pins_refused),
        );
        for (tenant, salt) in TENANTS.iter().enumerate() {
            assert_eq!(self.tenant_bytes(salt), model.tenant_bytes(tenant));
        }
        assert_eq!(counted, expected);
        assert_eq!(
            stats.doomed_objects as usize,
            model.objects.len() - model.staged.len() - model.resident.len()
        );
        let all = crate::cache_support::hashes(0..CHUNKS);
        for number in 0..NAMESPACES {
            let contains = self.cache.contains(namespace_of(number), &all);
            let known = |chunk| model.resident.contains_key(&(number, chunk));
            assert_eq!(contains, (0..CHUNKS).map(known).collect::<Vec<_>>());
        }
        // Held objects never move, whatever else happens.
        for (lease, ids) in &self.reads {
            let expected: Vec<_> = ids.iter().map(|id| model.objects[id].extent).collect();
            assert_eq!(lease.extents(), expected);
        }
        self.cache.check_invariants().unwrap();
    }
}

/// Pins what is held, the first chunk of all rows first.
fn pin_rows(model: &mut Model, rows: &ModelRows, until: u64) {
    for chunk in 0..CHUNKS as usize {
        for (start, ids) in rows {
            let at = chunk.checked_sub(*start);
            let id = at.and_then(|at| ids.get(at)).copied().flatten();
            if let Some(id) = id.filter(|id| model.is_resident(*id)) {
                model.pin(id, until);
            }
        }
    }
}

fn release(
    model: &mut Model,
    rows: &mut ModelRows,
    which: &Range<usize>,
    span: &Range<usize>,
) -> usize {
    let mut released = 0;
    for chunk in (span.start..span.end.min(CHUNKS as usize)).rev() {
        for (number, (start, ids)) in rows.iter_mut().enumerate() {
            let at = chunk
                .checked_sub(*start)
                .filter(|_| which.contains(&number));
            let id = at.and_then(|at| ids.get_mut(at)).and_then(Option::take);
            if let Some(id) = id {
                model.end_lease(id);
                released += 1;
            }
        }
    }
    released
}

proptest! {
    // proves: docs/compare.md#l1-in-host-memory
    // proves: docs/compare.md#retention
    // proves: docs/troubleshoot.md#the-cache-is-full
    #[test]
    fn any_calls_give_the_model_s_answers(
        capacity in 20..120u64,
        align in prop_oneof![Just(1u64), Just(4)],
        eviction in prop_oneof![
            2 => Just(EvictionKind::Lru),
            4 => Just(EvictionKind::IsolatedLru),
            1 => Just(EvictionKind::Noop),
        ],
        quotas in quotas(),
        max_pinned_share in prop_oneof![Just(0.0), Just(0.125), Just(0.5), Just(1.0)],
        ops in vec(op(), 1..80),
    ) {
        let mut both = Both::new(capacity, align, eviction, quotas, max_pinned_share);
        for op in ops {
            both.run(op);
            both.compare();
        }
        both.reservations.clear();
        both.prefixes.clear();
        both.reads.clear();
        both.cache.clear(false);
        (0..TENANTS.len()).for_each(|tenant| both.set_grant(tenant, None));
        let stats = both.cache.stats();
        prop_assert_eq!((stats.used_bytes, stats.objects, stats.namespaces, stats.salts), (0, 0, 0, 0));
        prop_assert_eq!((stats.leased_objects, stats.accounting_errors), (0, 0));
    }
}
