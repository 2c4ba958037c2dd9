//! How many key operations a second one core does on a large cache, and what an object costs in bookkeeping.
//!
//! `cargo run --release -p kvtier-core --example cache_ops [objects]` (default 1 million). The allocator hands out
//! equal pieces from a list, so that the figures are the cache's own.

mod support;

use kvtier_core::cache::{Cache, CacheConfig, ReserveRequest};
use kvtier_core::random::SplitMix64;
use kvtier_core::{ChunkHash, GroupRow, Namespace};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{OBJECT, Pieces};

/// Chunks in a prompt.
const PROMPT: usize = 128;

fn prompt(number: usize, hashes: &mut Vec<ChunkHash>) {
    hashes.clear();
    hashes.extend((0..PROMPT).map(|chunk| {
        let mut bytes = [0; 32];
        let seed = (number * PROMPT + chunk) as u64;
        for (part, word) in bytes.chunks_exact_mut(8).zip(0..) {
            part.copy_from_slice(&SplitMix64::nth(seed * 4 + word, 0).to_le_bytes());
        }
        ChunkHash(bytes)
    }));
}

/// Runs `step` for each prompt and prints keys a second, and the slowest tenth of a per cent of the calls.
fn measure(name: &str, prompts: impl Iterator<Item = usize>, mut step: impl FnMut(&[ChunkHash])) {
    let mut hashes = Vec::with_capacity(PROMPT);
    let mut times = Vec::new();
    for number in prompts {
        prompt(number, &mut hashes);
        let start = Instant::now();
        step(&hashes);
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let total: Duration = times.iter().sum();
    let per_key = |time: Duration| time.as_secs_f64() * 1e9 / PROMPT as f64;
    println!(
        "{name:<40} {:>5.1} M keys/s at the median   ns/key: mean {:>4.0}, p50 {:>4.0}, p99 {:>4.0}, p99.9 {:>5.0}, max {:>6.0}",
        1e3 / per_key(times[times.len() / 2]),
        per_key(total) / times.len() as f64,
        per_key(times[times.len() / 2]),
        per_key(times[times.len() * 99 / 100]),
        per_key(times[times.len() * 999 / 1000]),
        per_key(times[times.len() - 1]),
    );
}

fn main() {
    let objects: usize = std::env::args().nth(1).map_or(1_000_000, |count| {
        count.parse().expect("a number of objects")
    });
    let prompts = objects / PROMPT;
    let pieces = Pieces::new((prompts * PROMPT) as u64);
    let cache = Cache::new(pieces, CacheConfig::default());
    let now = Duration::from_secs(1);
    let namespace = Arc::new(
        Namespace::new(
            "meta-llama/Llama-3.1-8B-Instruct",
            kvtier_core::kv_rank(1, 0),
            0,
            0,
            "tenant",
        )
        .expect("good names"),
    );
    let store = |hashes: &[ChunkHash]| {
        let request = ReserveRequest {
            namespace: &namespace,
            hashes,
            len: OBJECT,
        };
        let reserved = cache.reserve(now, &[request]).expect("len is not 0");
        assert_eq!(reserved.reservation.commit(now).inserted, PROMPT);
    };
    let rows = [GroupRow {
        namespace: Arc::clone(&namespace),
        window: None,
        object_bytes: OBJECT,
    }]
    .into();
    // A stride without a common factor visits all prompts in an order that no cache line predicts.
    let scattered = |count: usize| (0..count).map(move |n| n * 7919 % prompts);

    measure("reserve + commit, filling", 0..prompts, store);
    let stats = cache.stats();
    println!(
        "{} objects, {:.1} bytes of bookkeeping each",
        stats.objects,
        stats.bookkeeping_bytes as f64 / stats.objects as f64
    );
    measure(
        "lookup + release, scattered prompts",
        scattered(prompts),
        |hashes| {
            let found = cache.lookup(now, &rows, hashes);
            assert_eq!(found.hit_chunks, PROMPT);
        },
    );
    measure(
        "lookup + release, the same 16 prompts",
        (0..prompts).map(|n| n % 16),
        |hashes| {
            black_box(cache.lookup(now, &rows, hashes).hit_chunks);
        },
    );
    measure(
        "lookup + claim + release, scattered",
        scattered(prompts),
        |hashes| {
            let found = cache.lookup(now, &rows, hashes);
            black_box(found.lease.claim(0, 0..PROMPT).expect("held").extents());
        },
    );
    let unknown = prompts..prompts * 2;
    measure("contains, absent", unknown.clone(), |hashes| {
        black_box(cache.contains(&namespace, hashes));
    });
    measure("touch, scattered", scattered(prompts), |hashes| {
        cache.touch(now, [&namespace], hashes);
    });
    measure("reserve + commit, each evicting one", unknown, store);
    measure("evict, 128 a call", 0..prompts / 2, |_| {
        assert_eq!(cache.evict(now, u64::MAX, PROMPT).objects, PROMPT);
    });
    let start = Instant::now();
    let cleared = cache.clear(false).objects;
    let nanos = start.elapsed().as_secs_f64() * 1e9 / cleared as f64;
    println!("clear: {nanos:.0} ns/object, {cleared} objects");
}
