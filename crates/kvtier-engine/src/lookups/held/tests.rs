use super::*;
use kvtier_core::GroupRow;
use kvtier_core::cache::{Cache, CacheConfig, Lookup, ReserveRequest};

const HASHES: [ChunkHash; 2] = [ChunkHash([1; 32]), ChunkHash([2; 32])];

fn namespace() -> Arc<Namespace> {
    scope().namespace(1, 0, 0)
}

/// A cache that has both chunks.
fn cache() -> Cache<L1Allocator> {
    let cache = Cache::new(L1Allocator::of_bytes(1 << 20), CacheConfig::default());
    let request = ReserveRequest {
        namespace: &namespace(),
        hashes: &HASHES,
        len: 16,
    };
    let reserved = cache.reserve(Duration::ZERO, &[request]).expect("a size");
    let _ = reserved.reservation.commit(Duration::ZERO);
    cache
}

fn find(cache: &Cache<L1Allocator>, chunks: usize) -> Lookup<L1Allocator> {
    let row = GroupRow {
        namespace: namespace(),
        window: None,
        object_bytes: 16,
    };
    let found = cache.lookup(Duration::ZERO, &[row].into(), &HASHES[..chunks]);
    assert_eq!(found.hit_chunks, chunks);
    found
}

fn scope() -> KeyScope {
    KeyScope::new("m", "", 1, None).expect("good names")
}

/// A lookup that has found one chunk.
fn found(cache: &Cache<L1Allocator>, readers: u16) -> HeldLookup {
    HeldLookup {
        at_end: None,
        segments: HeldSegments::Unknown,
        scope: scope(),
        connection: 7,
        prompt: HASHES.into(),
        hit_chunks: 1,
        lease: find(cache, 1).lease,
        readers,
        until_end: false,
        loaded: Vec::new(),
        created: Duration::ZERO,
    }
}

/// A lookup that has found one chunk so far, and what ends its wait.
fn pending(lookups: &HeldLookups, cache: &Cache<L1Allocator>) -> (u64, watch::Sender<()>) {
    let (done, pending) = watch::channel(());
    let lookup = found(cache, 1);
    (lookups.insert("r", lookup, Some(pending)), done)
}

fn result(cache: &Cache<L1Allocator>) -> Prefetched {
    Prefetched {
        lookup: find(cache, 2),
        loaded: vec![Cell { row: 0, chunk: 1 }],
    }
}

#[test]
fn a_result_takes_the_place_of_what_was_held_and_is_told_once() {
    let (cache, lookups) = (cache(), HeldLookups::default());
    let (serial, done) = pending(&lookups, &cache);
    let waits = lookups.take_outcome("r", 7);
    assert!(matches!(waits, LookupOutcome::Pending(_)));
    lookups.complete("r", serial, 0, result(&cache));
    drop(done);
    assert_eq!(cache.stats().leased_objects, 2);
    assert!(matches!(
        lookups.take_outcome("r", 7),
        LookupOutcome::Hit(2)
    ));
    assert!(matches!(
        lookups.take_outcome("r", 7),
        LookupOutcome::Unknown
    ));
    let grant = lookups.grant("r", &scope(), 1, 0, &HASHES, 0..2);
    let grant = grant.unwrap();
    let groups: Vec<_> = grant.iter().map(|row| row.object_group_id()).collect();
    assert_eq!(groups, [0]);
    let other = lookups.grant("r", &scope(), 1, 1, &HASHES, 0..2);
    assert!(other.is_none(), "another layout's");
    assert_eq!(lookups.end("r", 7).len(), 1);
    assert_eq!(cache.stats().leased_objects, 0);
}

#[test]
fn a_prefetch_that_ends_without_a_result_leaves_that_of_l1() {
    let (cache, lookups) = (cache(), HeldLookups::default());
    let (_, done) = pending(&lookups, &cache);
    drop(done);
    assert!(matches!(
        lookups.take_outcome("r", 7),
        LookupOutcome::Hit(1)
    ));
    assert!(matches!(
        lookups.take_outcome("r", 7),
        LookupOutcome::Unknown
    ));
    drop(lookups.end("r", 7));
    assert_eq!(cache.stats().leased_objects, 0);
}

#[test]
fn a_lookup_freed_or_ended_without_result_is_abandoned() {
    let (cache, lookups) = (cache(), HeldLookups::default());
    type Abandon = fn(&HeldLookups);
    // The session of one that was freed still has to end.
    let freed: Abandon = |lookups| lookups.free("r", 7, &scope(), 0..1);
    let ended: Abandon = |lookups| drop(lookups.end("r", 7));
    for (abandon, known) in [(freed, 1), (ended, 0)] {
        let (serial, done) = pending(&lookups, &cache);
        assert!(!done.is_closed());
        abandon(&lookups);
        assert!(done.is_closed(), "a load for it can stop");
        assert_eq!(cache.stats().leased_objects, 0);
        // Too late.
        lookups.complete("r", serial, 0, result(&cache));
        assert_eq!(cache.stats().leased_objects, 0);
        assert_eq!(lookups.counts(), (known, 0));
        let granted = lookups.grant("r", &scope(), 1, 0, &HASHES[..1], 0..1);
        assert!(granted.is_none());
        assert_eq!(lookups.end("r", 7).len(), known);
    }
}

/// More readers than are distinguished.
#[test]
fn every_one_of_many_readers_counts() {
    let (cache, lookups) = (cache(), HeldLookups::default());
    let readers = 2 * MAX_READERS as u16;
    lookups.insert("r", found(&cache, readers), None);
    for reader in 0..readers {
        assert_eq!(cache.stats().leased_objects, 1, "{reader}");
        lookups.release(
            InstanceId(reader.into()),
            "r",
            &scope(),
            1,
            &HASHES[..1],
            0..1,
        );
    }
    assert_eq!(cache.stats().leased_objects, 0);
}

/// A result arrives while its scheduler asks for it and another thread frees it, ends its request, or sweeps it out.
#[cfg(shuttle)]
mod interleavings {
    use kvtier_common::sync::shuttle::{self, thread};

    use super::*;

    fn cancel(lookups: &HeldLookups, how: usize) {
        match how {
            0 => lookups.free("r", 7, &scope(), 0..2),
            1 => drop(lookups.end("r", 7)),
            2 => assert!(lookups.remove_where(|lookup| lookup.connection == 7) <= 1),
            _ => assert!(lookups.release_older(Duration::from_secs(1)) <= 2),
        }
    }

    fn cancel_while_asking(how: usize) {
        let (cache, lookups) = (cache(), HeldLookups::default());
        let (serial, done) = pending(&lookups, &cache);
        let (cache, lookups) = (&cache, &lookups);
        thread::scope(|scope| {
            scope.spawn(move || {
                lookups.complete("r", serial, 0, result(cache));
                drop(done);
            });
            scope.spawn(move || {
                let mut results = 0;
                for _ in 0..4 {
                    match lookups.take_outcome("r", 7) {
                        LookupOutcome::Hit(chunks) => {
                            assert_eq!(chunks, 2, "not the whole result");
                            results += 1;
                        }
                        LookupOutcome::Pending(_) | LookupOutcome::Unknown => thread::yield_now(),
                    }
                }
                assert!(results <= 1, "reported twice");
            });
            scope.spawn(move || cancel(lookups, how));
        });
        drop(lookups.end("r", 7));
        assert_eq!(lookups.counts(), (0, 0));
        assert_eq!(cache.stats().leased_objects, 0, "a lease was lost");
    }

    #[test]
    fn interleavings_of_results_and_cancels_lose_no_lease() {
        for how in 0..4 {
            shuttle::check_random(move || cancel_while_asking(how), 1000);
        }
    }
}

/// The engine has the first chunk, and the lookup is of the second.
#[test]
fn result_behind_covered_chunks_counts_from_the_start() {
    let (cache, lookups) = (cache(), HeldLookups::default());
    let (serial, done) = pending(&lookups, &cache);
    let row = GroupRow {
        namespace: namespace(),
        window: None,
        object_bytes: 16,
    };
    let result = Prefetched {
        lookup: cache.lookup(Duration::ZERO, &[row].into(), &HASHES[1..]),
        loaded: vec![Cell { row: 0, chunk: 0 }],
    };
    lookups.complete("r", serial, 1, result);
    drop(done);
    assert_eq!(cache.stats().leased_objects, 1);
    assert!(matches!(
        lookups.take_outcome("r", 7),
        LookupOutcome::Hit(2)
    ));
    let grant = lookups.grant("r", &scope(), 1, 0, &HASHES, 1..2);
    assert!(grant.is_some());
    lookups.free("r", 7, &scope(), 0..1);
    assert_eq!(cache.stats().leased_objects, 1);
    lookups.free("r", 7, &scope(), 1..2);
    assert_eq!(cache.stats().leased_objects, 0);
}
