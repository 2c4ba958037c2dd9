//! Several threads at once, with real "bytes": a lease holder reads exactly what the writer of its key wrote.

use crate::cache_support::{FirstFit, NOW, hash, namespace, row};
use kvtier_common::sync::atomic::{AtomicU64, Ordering};
#[cfg(shuttle)]
use kvtier_common::sync::shuttle::{self, thread};
use kvtier_core::ChunkHash;
use kvtier_core::cache::{Cache, CacheConfig, Extent, ReserveRequest, Stats};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::random::SplitMix64;
use std::ops::Range;
#[cfg(not(shuttle))]
use std::thread;

const CAPACITY: u64 = if cfg!(shuttle) { 150 } else { 1500 };
const GROUPS: u32 = 2;
const PROMPTS: u64 = if cfg!(shuttle) { 2 } else { 6 };
const CHUNKS: u64 = if cfg!(shuttle) { 10 } else { 24 };

/// Prompts share their first 8 chunks.
fn chunk_number(prompt: u64, chunk: u64) -> u64 {
    if chunk < 8 {
        chunk
    } else {
        prompt * 100 + chunk
    }
}

fn prompt_hashes(prompt: u64, chunks: u64) -> Vec<ChunkHash> {
    (0..chunks)
        .map(|chunk| hash(chunk_number(prompt, chunk) as u32))
        .collect()
}

/// What every unit of this object says once it is written.
fn mark(group: u32, number: u64) -> u64 {
    u64::from(group) << 32 | number | 1 << 63
}

fn units(arena: &[AtomicU64], extent: Extent) -> &[AtomicU64] {
    &arena[extent.offset as usize..(extent.offset + extent.len) as usize]
}

fn write(arena: &[AtomicU64], extent: Extent, mark: u64) {
    units(arena, extent)
        .iter()
        .for_each(|unit| unit.store(mark, Ordering::Relaxed));
}

fn assert_reads(arena: &[AtomicU64], extent: Extent, mark: u64) {
    for unit in units(arena, extent) {
        assert_eq!(unit.load(Ordering::Relaxed), mark, "someone else's bytes");
    }
}

fn store(cache: &Cache<FirstFit>, arena: &[AtomicU64], random: &mut SplitMix64) {
    let prompt = random.below(PROMPTS);
    let hashes = prompt_hashes(prompt, random.below(CHUNKS) + 1);
    let requests: Vec<_> = (0..GROUPS)
        .map(|group| ReserveRequest {
            namespace: namespace(group, ["", "a"][(prompt % 2) as usize]),
            hashes: &hashes,
            len: 7 + 6 * u64::from(group),
        })
        .collect();
    let reservation = cache.reserve(NOW, &requests).unwrap().reservation;
    for staged in reservation.staged() {
        let number = chunk_number(prompt, u64::from(staged.position));
        write(arena, staged.extent, mark(staged.request, number));
    }
    match random.below(4) {
        0 => drop(reservation),
        1 => drop(reservation.commit_leased(NOW)),
        _ => drop(reservation.commit(NOW)),
    }
}

fn read(cache: &Cache<FirstFit>, arena: &[AtomicU64], random: &mut SplitMix64) {
    let prompt = random.below(PROMPTS);
    let hashes = prompt_hashes(prompt, CHUNKS);
    let salt = ["", "a"][(prompt % 2) as usize];
    let window = Some(random.below(6) as u32 + 1);
    let rows = [row(0, salt, None), row(1, salt, window)].into();
    let mut found = cache.lookup(NOW, &rows, &hashes);
    for row in 0..2 {
        let chunks = found.lease.leased(row).unwrap();
        let claim = found.lease.claim(row, chunks.clone()).unwrap();
        if random.below(2) == 0 {
            found.lease.release_range(row..row + 1, chunks.clone());
        }
        for (chunk, &extent) in chunks.zip(claim.extents()) {
            let number = chunk_number(prompt, chunk as u64);
            assert_reads(arena, extent, mark(row as u32, number));
        }
    }
}

fn disturb(cache: &Cache<FirstFit>, random: &mut SplitMix64) {
    let salt = ["", "a"][random.below(2) as usize];
    let hashes = prompt_hashes(random.below(PROMPTS), CHUNKS);
    match random.below(8) {
        0 => drop(cache.clear(random.below(2) == 0)),
        1 | 2 => drop(cache.remove(namespace(0, salt), &hashes[4..10], random.below(2) == 0)),
        3 | 4 => drop(cache.evict(NOW, random.below(300), 20)),
        5 => drop(cache.touch(NOW, [namespace(1, salt)], &hashes)),
        6 => drop(cache.objects(0, 500)),
        _ => drop(cache.stats()),
    }
}

/// Lets threads use one cache, and checks that nothing is left of them at the end.
fn play(seeds: Range<u64>, steps: u64, check_invariants_every: u32) -> Stats {
    let arena: Vec<AtomicU64> = (0..CAPACITY).map(|_| AtomicU64::new(0)).collect();
    let config = CacheConfig {
        eviction: EvictionKind::Lru,
        check_invariants_every,
        ..CacheConfig::default()
    };
    let cache = Cache::new(FirstFit::new(CAPACITY, 1), config);
    thread::scope(|scope| {
        for seed in seeds {
            let (cache, arena) = (cache.clone(), &arena);
            scope.spawn(move || {
                let mut random = SplitMix64::new(seed);
                for _ in 0..steps {
                    match random.below(10) {
                        0..4 => store(&cache, arena, &mut random),
                        4..9 => read(&cache, arena, &mut random),
                        _ => disturb(&cache, &mut random),
                    }
                }
            });
        }
    });
    cache.check_invariants().unwrap();
    let stats = cache.stats();
    assert_eq!(cache.clear(false).kept, 0, "a lease was lost");
    let cleared = cache.stats();
    assert_eq!(
        (
            cleared.used_bytes,
            cleared.namespaces,
            cleared.accounting_errors
        ),
        (0, 0, 0)
    );
    stats
}

// proves: docs/compare.md#hits
// proves: docs/troubleshoot.md#troubleshoot
#[test]
fn threads_never_read_what_others_wrote() {
    let stats = play(1..5, 4000, 101);
    assert!(
        stats.hit_chunks_total > 0 && stats.evicted_objects_total > 0,
        "{stats:?}"
    );
}

/// Stress in few steps and little memory, in many orders of the threads.
#[cfg(shuttle)]
#[test]
fn interleavings_lose_no_lease() {
    use kvtier_common::sync::shuttle::rand::{RngCore, thread_rng};

    let few_steps = || {
        let seed = u64::from(thread_rng().next_u32());
        let _ = play(seed..seed + 3, 6, 1);
    };
    shuttle::check_pct(few_steps, 1000, 3);
    shuttle::check_random(few_steps, 1000);
}
