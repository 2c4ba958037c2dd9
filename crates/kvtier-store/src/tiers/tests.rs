//! What only an adapter that misbehaves on cue can show.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_core::cache::{Cache, CacheConfig, ReserveRequest};
use kvtier_core::object_key::{KeyScope, ObjectKey};
use kvtier_core::prefetch::Cell;
use kvtier_core::quota::QuotaMode;
use kvtier_core::{ChunkHash, GroupRow, Namespace};
use kvtier_l2::Capabilities;
use kvtier_l2::testing::{Operation, Step, TestAdapter};
use kvtier_l2::tier::{Deleted, Tier, TierConfig};
use kvtier_memory::{Arena, ArenaKind};

use super::prefetch::LOAD_BATCH;
use super::store::BATCHES;
use super::{L2, PrefetchRequest, Prefetched, StoredPrompt};
use crate::l1::{Clock, L1Allocator};
use kvtier_config::{L2Config, PrefetchPolicy, StorePolicy};
use kvtier_observe::metrics::Readings;

const LEN: u64 = 4096;

/// Returns a shared adapter that has every object, all bytes of this value.
fn adapter_with(value: u8, step: Option<Step>, read_only: bool) -> Arc<TestAdapter> {
    let capabilities = Capabilities {
        shared: true,
        read_only,
        ..Capabilities::default()
    };
    let adapter = TestAdapter::new(capabilities, 0).with_every_object(value);
    for operation in [Operation::Load, Operation::Store] {
        adapter.always(operation, step.clone());
    }
    Arc::new(adapter)
}

/// Returns an adapter that loads and stores at once.
fn prompt(value: u8) -> Arc<TestAdapter> {
    adapter_with(value, None, false)
}

/// Returns an adapter that answers no load and no store in time and keeps their buffers.
fn late(value: u8) -> Arc<TestAdapter> {
    adapter_with(value, Some(Step::KeepBuffers), false)
}

/// Returns an adapter whose loads and stores wait for its gate.
fn gated(value: u8) -> Arc<TestAdapter> {
    adapter_with(value, Some(Step::Wait), false)
}

struct Bed {
    l2: Arc<L2>,
    arena: Arc<Arena>,
    cache: Cache<L1Allocator>,
    request: Arc<PrefetchRequest>,
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.l2.close();
    }
}

/// How long a test may wait for something.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Waits for something that comes soon or not at all.
fn wait_until(what: &str, mut is_there: impl FnMut() -> bool) {
    let until = Instant::now() + WAIT_TIMEOUT;
    while !is_there() {
        assert!(Instant::now() < until, "{what} did not come");
        std::thread::yield_now();
    }
}

/// An empty L1 above these adapters, and a prompt of three chunks.
fn bed(adapters: &[Arc<TestAdapter>], load_timeout: Duration) -> Bed {
    bed_with(adapters, load_timeout, StorePolicy::Default)
}

fn config(load_timeout: Duration, store_policy: StorePolicy) -> L2Config {
    L2Config {
        adapters: Vec::new(),
        store_policy,
        prefetch_policy: PrefetchPolicy::Retain,
        prefetch_max_in_flight: 8,
        lookup_timeout: Duration::from_secs(60),
        load_timeout,
        drain_timeout: Duration::ZERO,
        store_queue_bytes: 1 << 20,
        load_bytes: 1 << 20,
        min_free_bytes: 0,
    }
}

fn tiers(adapters: &[Arc<TestAdapter>]) -> Vec<Arc<Tier>> {
    let tier = |adapter: &Arc<TestAdapter>| {
        let config = TierConfig {
            name: "scripted".into(),
            capacity_bytes: Some(1 << 40),
            eviction: None,
            quota_mode: QuotaMode::Soft,
            quota_default: None,
            reserve_bytes: 0,
        };
        Arc::new(Tier::new(Arc::clone(adapter) as _, config))
    };
    adapters.iter().map(tier).collect()
}

fn bed_with(
    adapters: &[Arc<TestAdapter>],
    load_timeout: Duration,
    store_policy: StorePolicy,
) -> Bed {
    bed_of(1 << 20, adapters, load_timeout, store_policy)
}

fn bed_of(
    bytes: u64,
    adapters: &[Arc<TestAdapter>],
    load_timeout: Duration,
    store_policy: StorePolicy,
) -> Bed {
    let arena = Arc::new(Arena::create(ArenaKind::Anonymous, bytes).expect("memory"));
    let cache = Cache::new(L1Allocator::of_bytes(bytes), CacheConfig::default());
    let clock = Arc::new(Clock::start(Duration::ZERO));
    let l2 = L2::start_with(
        &config(load_timeout, store_policy),
        || Ok(tiers(adapters)),
        cache.clone(),
        Arc::clone(&arena),
        clock,
        Arc::default(),
    );
    let scope = KeyScope::new("m", "", 1, None).expect("good names");
    let row = GroupRow {
        namespace: scope.namespace(1, 0, 0),
        window: None,
        object_bytes: LEN,
    };
    let request = PrefetchRequest {
        scope,
        rows: [row].into(),
        hashes: [1, 2, 3].map(|byte| ChunkHash([byte; 32])).into(),
        is_object_keys: false,
        tokens: Default::default(),
        counted: kvtier_core::cache::Counted::ALL,
        span: None,
    };
    Bed {
        l2: l2.expect("threads"),
        arena,
        cache,
        request: Arc::new(request),
    }
}

impl Bed {
    fn prefetch(&self) -> Prefetched {
        let prefetch = self.l2.prefetch(&self.request, || false);
        self.l2.handle().block_on(prefetch)
    }

    /// The prompt of chunks 1 to 9.
    fn prompt(&self) -> Arc<StoredPrompt> {
        let hashes = (1..10).map(|number| ChunkHash([number; 32])).collect();
        StoredPrompt::new([&self.request.rows[0].namespace].into_iter(), hashes)
    }

    /// Puts the chunks of these numbers into L1, and has each stored by a batch of its own.
    fn store(&self, numbers: impl IntoIterator<Item = u8>) {
        let namespace = &self.request.rows[0].namespace;
        for number in numbers {
            let hashes = &[ChunkHash([number; 32])];
            let request = ReserveRequest {
                namespace,
                hashes,
                len: LEN,
            };
            let reserved = self
                .cache
                .reserve(Duration::ZERO, &[request])
                .expect("free space");
            let _ = reserved.reservation.commit(Duration::ZERO);
            self.l2.store(&self.prompt(), namespace, hashes, LEN);
        }
    }

    fn key(&self, number: u8) -> ObjectKey {
        ObjectKey::of(&self.request.rows[0].namespace, ChunkHash([number; 32]))
    }

    /// Deletes these chunks.
    fn delete(&self, numbers: impl IntoIterator<Item = u8>, force: bool) -> Vec<Deleted> {
        let keys = numbers.into_iter().map(|number| self.key(number)).collect();
        let deleted = self.l2.delete(0, keys, force);
        let deleted = self.l2.handle().block_on(deleted).expect("no panic");
        deleted
            .into_iter()
            .map(|each| each.expect("done"))
            .collect()
    }

    /// Waits until nothing is stored any more.
    fn settle(&self) {
        wait_until("the end of all stores", || {
            self.l2.store_counts().queued_bytes == 0
        });
    }

    /// The values of the bytes of all objects in L1, each object of one value.
    fn values(&self) -> Vec<u8> {
        let namespace = &self.request.rows[0].namespace;
        let held = self
            .cache
            .lease(Duration::ZERO, namespace, &self.request.hashes);
        let held = held.expect("all are resident");
        let values = held.extents().iter().map(|extent| {
            let (mut bytes, extent) = (Vec::new(), *extent);
            self.arena
                .read_into(extent, 0, extent.len, &mut bytes)
                .expect("the arena is sound");
            assert!(bytes.iter().all(|byte| *byte == bytes[0]));
            bytes[0]
        });
        values.collect()
    }
}

#[test]
fn memory_of_a_late_load_is_not_reused() {
    let (late, right) = (late(66), prompt(1));
    let bed = bed(&[Arc::clone(&late), right], Duration::from_secs(60));
    assert_eq!(bed.prefetch().lookup.hit_chunks, 0);
    assert_eq!(bed.cache.stats().staged_objects, 3, "it may still write");
    // It does, and releases the memory.
    for buffer in late.kept.lock().drain(..) {
        late.fill(&buffer);
    }
    let stats = bed.cache.stats();
    assert_eq!((stats.staged_objects, stats.objects), (0, 0));
}

/// Waits until the first tier is asked for one load: a prefetch may time out before its load begins.
fn wait_for_load(bed: &Bed) {
    wait_until("a load", || bed.l2.calls.of_tier(0) == [0, 1, 0]);
}

#[test]
fn a_load_that_comes_after_its_deadline_still_ends_in_l1() {
    let gated = gated(5);
    let bed = bed(&[Arc::clone(&gated)], Duration::from_millis(1));
    assert_eq!(bed.prefetch().lookup.hit_chunks, 0);
    // The next one waits for the same load instead of beginning another, and no longer either.
    assert_eq!(bed.prefetch().lookup.hit_chunks, 0);
    wait_for_load(&bed);
    assert_eq!(bed.cache.stats().staged_objects, 3);
    gated.gate.add_permits(1);
    wait_until("the end of all loads", || bed.l2.loading() == 0);
    assert_eq!(bed.values(), [5, 5, 5]);
    let found = bed.prefetch();
    assert_eq!(
        (found.lookup.hit_chunks, found.loaded),
        (3, Vec::<Cell>::new())
    );
}

/// An L1 for some objects of a whole batch each, and a prompt of three of them.
fn bed_of_large(objects: u64, adapter: &Arc<TestAdapter>) -> Bed {
    let (bytes, timeout) = (objects * LOAD_BATCH, Duration::from_secs(60));
    let adapters = [Arc::clone(adapter)];
    let mut bed = bed_of(bytes, &adapters, timeout, StorePolicy::Default);
    let mut request = (*bed.request).clone();
    let mut row = request.rows[0].clone();
    row.object_bytes = LOAD_BATCH;
    request.rows = [row].into();
    bed.request = Arc::new(request);
    bed
}

/// Puts such objects into L1.
fn put_large(bed: &Bed, namespace: &Arc<Namespace>, hashes: &[ChunkHash]) {
    let len = LOAD_BATCH;
    let request = ReserveRequest {
        namespace,
        hashes,
        len,
    };
    let reserved = bed.cache.reserve(Duration::ZERO, &[request]);
    let _ = reserved
        .expect("free space")
        .reservation
        .commit(Duration::ZERO);
}

/// Another prompt brings the second chunk while the first is loaded.
#[test]
fn chunk_that_comes_meanwhile_does_not_end_the_load() {
    let gated = gated(5);
    let bed = bed_of_large(4, &gated);
    let (l2, request) = (Arc::clone(&bed.l2), Arc::clone(&bed.request));
    let prefetch = async move { l2.prefetch(&request, || false).await.lookup.hit_chunks };
    let prefetch = bed.l2.handle().spawn(prefetch);
    wait_for_load(&bed);
    let namespace = &bed.request.rows[0].namespace;
    put_large(&bed, namespace, &bed.request.hashes[1..2]);
    gated.gate.add_permits(9);
    assert_eq!(bed.l2.handle().block_on(prefetch).expect("no panic"), 3);
}

/// L1 is full, and the second chunk is the oldest in it.
#[test]
fn load_evicts_no_later_chunk_of_its_prompt() {
    let bed = bed_of_large(3, &prompt(5));
    let hashes = &bed.request.hashes;
    put_large(&bed, &bed.request.rows[0].namespace, &hashes[1..2]);
    let other = bed.request.scope.namespace(2, 0, 0);
    put_large(&bed, &other, &hashes[..2]);
    assert_eq!(bed.prefetch().lookup.hit_chunks, 3);
}

#[test]
fn a_lookup_that_was_given_up_loads_nothing() {
    let bed = bed(&[prompt(1)], Duration::from_secs(60));
    let prefetch = bed.l2.prefetch(&bed.request, || true);
    assert_eq!(bed.l2.handle().block_on(prefetch).lookup.hit_chunks, 0);
    assert_eq!(bed.cache.stats().objects, 0);
}

#[test]
fn lookup_cancelled_while_tiers_are_asked_still_loads() {
    let bed = bed(&[prompt(7)], Duration::from_secs(60));
    let is_asked = std::sync::atomic::AtomicBool::new(false);
    let cancelled = || is_asked.swap(true, std::sync::atomic::Ordering::Relaxed);
    let prefetch = bed.l2.prefetch(&bed.request, cancelled);
    drop(bed.l2.handle().block_on(prefetch));
    assert_eq!(bed.values(), [7, 7, 7]);
}

#[test]
fn what_a_late_store_still_reads_stays_leased_and_counted() {
    let late = late(0);
    let bed = bed(&[Arc::clone(&late)], Duration::from_secs(60));
    bed.store(1..=3);
    wait_until("three late stores", || late.kept.lock().len() == 3);
    assert_eq!(bed.l2.store_counts().queued_bytes, 3 * LEN);
    assert_eq!(bed.cache.stats().leased_objects, 3);
    late.kept.lock().clear();
    bed.settle();
    assert_eq!(bed.cache.stats().leased_objects, 0);
}

#[test]
fn close_reports_whether_a_tier_still_uses_l1() {
    let late = late(66);
    let loading = bed(&[Arc::clone(&late)], Duration::from_secs(60));
    loading.prefetch();
    assert!(!loading.l2.close(), "it may still write");
    late.kept.lock().clear();
    assert!(loading.l2.close());
    let storing = bed(&[Arc::clone(&late)], Duration::from_secs(60));
    storing.store([1]);
    wait_until("a late store", || !late.kept.lock().is_empty());
    assert!(!storing.l2.close(), "it may still read");
    late.kept.lock().clear();
    assert!(storing.l2.close());
    // A call that only waits ends with its task.
    let waiting = bed(&[gated(1)], Duration::from_millis(1));
    waiting.prefetch();
    wait_for_load(&waiting);
    waiting.store([9]);
    assert!(waiting.l2.close());
}

#[test]
fn what_was_stored_too_late_does_not_leave_l1() {
    let late = late(0);
    let policy = StorePolicy::SkipL1;
    let bed = bed_with(&[Arc::clone(&late)], Duration::from_secs(60), policy);
    let namespace = &bed.request.rows[0].namespace;
    // The second one is stored when the tier's index has it already.
    for round in 1..=2 {
        bed.store([1]);
        wait_until("a late store", || !late.kept.lock().is_empty());
        late.kept.lock().clear();
        bed.settle();
        assert_eq!(late.store_keys().len(), round);
        assert!(bed.cache.contains(namespace, &[ChunkHash([1; 32])])[0]);
    }
}

#[test]
fn nothing_is_stored_in_a_tier_that_is_only_read_nor_leaves_l1_for_it() {
    let policy = StorePolicy::SkipL1;
    let read_only = || adapter_with(1, None, true);
    let alone = bed_with(&[read_only()], Duration::from_secs(60), policy);
    alone.store([1, 2]);
    assert_eq!(alone.l2.store_counts().queued_bytes, 0);
    assert_eq!(alone.cache.stats().objects, 2);
    let (none, all) = (read_only(), prompt(1));
    let both = [Arc::clone(&none), Arc::clone(&all)];
    let beside = bed_with(&both, Duration::from_secs(60), policy);
    beside.store([1, 2]);
    beside.settle();
    assert_eq!((none.store_keys().len(), all.store_keys().len()), (0, 2));
    wait_until("an empty L1", || beside.cache.stats().objects == 0);
    let tiers = beside.l2.readings();
    assert!(tiers[0].is_read_only && !tiers[1].is_read_only);
}

#[test]
fn what_is_deleted_while_it_waits_to_be_stored_never_is() {
    [false, true].into_iter().for_each(delete_while_stores_wait);
}

fn delete_while_stores_wait(force: bool) {
    let gated = gated(0);
    let policy = StorePolicy::SkipL1;
    let bed = bed_with(&[Arc::clone(&gated)], Duration::from_secs(60), policy);
    // More than are stored at the same time.
    bed.store(1..=9);
    let all: Vec<_> = (1..=9).map(|number| bed.key(number)).collect();
    wait_until("the first batches", || gated.store_keys().len() >= BATCHES);
    assert_eq!(bed.delete([1, 9], force), [Deleted::Absent; 2]);
    gated.gate.add_permits(1000);
    bed.settle();
    // The first one was being written, the last one was not.
    assert!(gated.store_keys().contains(&all[0]) && !gated.store_keys().contains(&all[8]));
    let left: HashSet<_> = all[1..8].iter().cloned().collect();
    assert_eq!(gated.keys(), left);
    assert_eq!(bed.l2.tiers()[0].usage().objects, 7);
    // What the tier does not have stays in L1.
    assert_eq!(bed.cache.stats().objects, 2);
    // It can be stored again.
    bed.store([1, 9]);
    bed.settle();
    assert_eq!(gated.keys().len(), 9);
}

#[test]
fn what_is_deleted_goes_even_if_its_store_comes_after_its_deadline() {
    let late = late(0);
    let bed = bed(&[Arc::clone(&late)], Duration::from_secs(60));
    bed.store([1, 2]);
    wait_until("two late stores", || late.kept.lock().len() == 2);
    bed.delete([1], true);
    // It arrives nevertheless, and releases the memory.
    let both = [bed.key(1), bed.key(2)];
    for key in &both {
        late.put(key, LEN, 0);
    }
    late.kept.lock().clear();
    bed.settle();
    assert_eq!(late.keys(), HashSet::from([both[1].clone()]));
}

/// Stores that a tier cannot take while it is away, or for which its queue has no space.
#[test]
fn hit_objects_that_a_tier_lacks_are_stored_then() {
    let away = prompt(0);
    away.always(
        Operation::Store,
        Some(Step::Fail(kvtier_l2::ErrorKind::Unavailable)),
    );
    let bed = bed(&[Arc::clone(&away)], Duration::from_secs(60));
    bed.store(1..=3);
    bed.settle();
    let hit = || {
        let found = bed
            .cache
            .lookup(Duration::ZERO, &bed.request.rows, &bed.request.hashes);
        assert_eq!(found.hit_chunks, 3);
        if found.may_be_unstored {
            bed.l2.store_again(&found.lease, &bed.request.hashes);
        }
        found.may_be_unstored
    };
    assert_eq!((away.keys().len(), away.store_keys().len()), (0, 3));
    // Hits while it is away store one hit's objects at most, and not one of them twice.
    for _ in 0..10 {
        assert!(hit());
    }
    bed.settle();
    assert!(away.store_keys().len() <= 6, "{:?}", away.store_keys());
    away.always(Operation::Store, None);
    wait_until("all in the tier", || {
        hit();
        away.keys().len() == 3
    });
    bed.settle();
    let sent = away.store_keys().len();
    assert!(!hit(), "nothing is left to store");
    bed.settle();
    assert_eq!(away.store_keys().len(), sent);
}

#[test]
fn objects_beyond_the_queue_are_stored_when_hit() {
    let gated = gated(0);
    let bed = bed(&[Arc::clone(&gated)], Duration::from_secs(60));
    let bound = bed.l2.stores.admit(0, 1, 1 << 20).expect("an empty queue");
    bed.store(1..=3);
    assert_eq!(bed.l2.store_counts().dropped_objects, 3);
    drop(bound);
    gated.gate.add_permits(1000);
    wait_until("all in the tier", || {
        let request = &bed.request;
        let found = bed
            .cache
            .lookup(Duration::ZERO, &request.rows, &request.hashes);
        bed.l2.store_again(&found.lease, &request.hashes);
        gated.keys().len() == 3
    });
}

/// A tier for six of nine chunks, each in a batch of its own.
#[test]
fn queued_batches_keep_the_beginning_of_their_prompt() {
    let gated = gated(0);
    let bed = bed(&[Arc::clone(&gated)], Duration::from_secs(60));
    bed.l2.tiers()[0].set_limits(Some(6 * LEN), None);
    bed.store(1..=9);
    gated.gate.add_permits(1000);
    bed.settle();
    let kept = gated.keys();
    assert_eq!(kept.len(), 6);
    assert!(
        kept.is_superset(&[bed.key(1), bed.key(2)].into()),
        "{kept:?}"
    );
}

/// The backend writes what it is sent and answers later, after the delete.
#[test]
fn stores_answered_after_their_delete_are_not_indexed() {
    let gated = gated(0);
    let bed = bed(&[Arc::clone(&gated)], Duration::from_secs(60));
    bed.store(1..=3);
    wait_until("three stores", || gated.store_keys().len() == 3);
    for number in 1..=3 {
        gated.put(&bed.key(number), LEN, 0);
    }
    assert_eq!(bed.delete([1, 3], false), [Deleted::Removed; 2]);
    assert_eq!(gated.keys(), HashSet::from([bed.key(2)]));
    gated.gate.add_permits(1000);
    bed.settle();
    assert_eq!(gated.keys(), HashSet::from([bed.key(2)]));
    let usage = bed.l2.tiers()[0].usage();
    assert_eq!((usage.objects, usage.total_bytes_used), (1, LEN));
}

#[test]
fn a_load_without_capacity_in_time_does_not_begin() {
    let gated = gated(5);
    let bed = bed(&[Arc::clone(&gated)], Duration::from_millis(1));
    let permits = bed.l2.loads.available_permits();
    let all = bed
        .l2
        .loads
        .try_acquire_many(u32::try_from(permits).expect("few"));
    assert_eq!(bed.prefetch().lookup.hit_chunks, 0);
    wait_until("the end of all loads", || bed.l2.loading() == 0);
    drop(all);
    assert_eq!(bed.cache.stats().staged_objects, 0);
}

/// The lines of `/metrics` with one name.
fn counted(bed: &Bed, name: &str) -> Vec<String> {
    let metrics = bed.l2.calls.metrics().encode(&Readings::default());
    let lines = metrics.lines().filter_map(|line| line.strip_prefix(name));
    lines.map(str::to_owned).collect()
}

#[test]
fn loads_in_flight_and_timeouts_are_counted() {
    let gated = gated(5);
    let bed = bed(&[Arc::clone(&gated)], Duration::from_millis(1));
    bed.prefetch();
    bed.prefetch();
    let timeouts = counted(&bed, "kvtier_l2_prefetch_timeouts_total");
    assert_eq!(timeouts, [r#"{phase="load"} 2"#]);
    wait_for_load(&bed);
    assert_eq!(bed.l2.calls.loading_bytes(0), 3 * LEN);
    assert_eq!(bed.l2.prefetches(), [0, 0, 0]);
    gated.gate.add_permits(1);
    wait_until("the end of all loads", || bed.l2.loading() == 0);
    assert_eq!(bed.l2.calls.of_tier(0), [0, 0, 0]);
    assert_eq!(bed.l2.calls.loading_bytes(0), 0);
}

#[test]
fn replaced_deadline_holds_for_the_next_prefetch() {
    let gated = gated(5);
    // The test would hang without the other one.
    let bed = bed(&[Arc::clone(&gated)], Duration::from_secs(86_400));
    let config = L2Config {
        load_timeout: Duration::from_millis(1),
        ..(*bed.l2.config()).clone()
    };
    bed.l2.set_config(config);
    bed.prefetch();
    let timeouts = counted(&bed, "kvtier_l2_prefetch_timeouts_total");
    assert_eq!(timeouts, [r#"{phase="load"} 1"#]);
    gated.gate.add_permits(1);
}

/// L1 holds 256 chunks; the prompt in the tier has 600, whose end is in L1.
#[test]
fn longest_prefix_that_fits_is_loaded_each_time() {
    let bed = bed(&[prompt(1)], Duration::from_secs(60));
    let hash = |number: u16| {
        let mut bytes = [0; 32];
        bytes[..2].copy_from_slice(&number.to_be_bytes());
        ChunkHash(bytes)
    };
    let hashes: Arc<[ChunkHash]> = (0..600).map(hash).collect();
    let namespace = &bed.request.rows[0].namespace;
    let tail = ReserveRequest {
        namespace,
        hashes: &hashes[400..],
        len: LEN,
    };
    let tail = bed
        .cache
        .reserve(Duration::ZERO, &[tail])
        .expect("free space");
    let _ = tail.reservation.commit(Duration::ZERO);
    let request = Arc::new(PrefetchRequest {
        hashes: Arc::clone(&hashes),
        ..(*bed.request).clone()
    });
    for _ in 0..3 {
        let found = bed
            .l2
            .handle()
            .block_on(bed.l2.prefetch(&request, || false));
        assert_eq!(found.lookup.hit_chunks, 256);
    }
}

#[test]
fn why_an_object_did_not_come_into_l1_is_counted() {
    let failures = "lmcache_mp_l2_prefetch_failure_chunks_total";
    let late = bed(&[late(1)], Duration::from_secs(60));
    late.prefetch();
    let expected = r#"{model_name="m",reason="deadline"} 3"#;
    assert_eq!(counted(&late, failures), [expected]);

    let full = bed(&[prompt(1)], Duration::from_secs(60));
    let other = full.request.scope.namespace(2, 0, 0);
    let request = ReserveRequest {
        namespace: &other,
        hashes: &full.request.hashes[..1],
        len: 1 << 20,
    };
    let all = full.cache.reserve(Duration::ZERO, &[request]);
    assert_eq!(full.prefetch().lookup.hit_chunks, 0);
    let expected = r#"{model_name="m",reason="l1_oom"} 3"#;
    assert_eq!(counted(&full, failures), [expected]);
    let out_of_memory = counted(&full, "lmcache_mp_l1_allocation_failure_chunks_total");
    assert_eq!(
        out_of_memory,
        [r#"{during="l2_prefetch",model_name="m"} 3"#]
    );
    drop(all);
}
