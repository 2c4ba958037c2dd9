//! Cost of tenants: stores into a full cache, and a pass that finds no tenant over quota.
//!
//! `cargo run --release -p kvtier-core --example tenants [salts] [objects]` (default 100 000 and 1 million). Each way of
//! keeping tenants runs in turn, several times over, so that the machine's mood hits all of them. The allocator hands
//! out equal pieces from a list, so that the figures are the cache's own.

mod support;

use kvtier_core::cache::{Cache, CacheConfig, ReserveRequest};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::quota::{Grant, QuotaConfig, QuotaMode};
use kvtier_core::random::SplitMix64;
use kvtier_core::{ChunkHash, Namespace};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{OBJECT, Pieces};

/// Chunks in a prompt.
const PROMPT: usize = 16;
const REPEATS: usize = 9;
const NOW: Duration = Duration::from_secs(1);

fn prompt(number: u64) -> Vec<ChunkHash> {
    let hash = |chunk: u64| {
        let mut bytes = [0; 32];
        for (part, word) in bytes.chunks_exact_mut(8).zip(0..) {
            part.copy_from_slice(
                &SplitMix64::nth((number * PROMPT as u64 + chunk) * 4 + word, 0).to_le_bytes(),
            );
        }
        ChunkHash(bytes)
    };
    (0..PROMPT as u64).map(hash).collect()
}

struct Way {
    name: &'static str,
    cache: Cache<Pieces>,
    /// The number of the next prompt.
    next: u64,
    nanoseconds: Vec<f64>,
}

impl Way {
    fn new(name: &'static str, config: CacheConfig, objects: u64) -> Self {
        Self {
            name,
            cache: Cache::new(Pieces::new(objects), config),
            next: 0,
            nanoseconds: Vec::new(),
        }
    }

    /// Stores this many prompts of tenants in a fixed random order; returns the nanoseconds per object.
    fn store(&mut self, prompts: u64, salts: &[String]) -> f64 {
        let batch: Vec<_> = (self.next..self.next + prompts)
            .map(|number| {
                let salt = SplitMix64::nth(number, 0) % salts.len() as u64;
                let namespace = Namespace::new(
                    "meta-llama/Llama-3.1-8B-Instruct",
                    kvtier_core::kv_rank(1, 0),
                    0,
                    0,
                    &*salts[salt as usize],
                );
                (Arc::new(namespace.expect("good names")), prompt(number))
            })
            .collect();
        self.next += prompts;
        let start = Instant::now();
        for (namespace, hashes) in &batch {
            let request = ReserveRequest {
                namespace,
                hashes,
                len: OBJECT,
            };
            let reserved = self.cache.reserve(NOW, &[request]).expect("len is not 0");
            assert_eq!(reserved.reservation.commit(NOW).inserted, PROMPT);
        }
        start.elapsed().as_nanos() as f64 / (prompts * PROMPT as u64) as f64
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<u64>());
    let mut number = |default| args.next().and_then(Result::ok).unwrap_or(default);
    let (count, objects) = (number(100_000), number(1_000_000));
    let salts: Vec<_> = (0..count).map(|salt| format!("tenant-{salt:06}")).collect();
    let config = |eviction, mode| CacheConfig {
        eviction,
        quotas: QuotaConfig {
            mode,
            ..QuotaConfig::default()
        },
        ..CacheConfig::default()
    };
    let mut ways = [
        Way::new(
            "LRU, no quotas",
            config(EvictionKind::Lru, QuotaMode::Soft),
            objects,
        ),
        Way::new(
            "IsolatedLRU, no quotas",
            config(EvictionKind::IsolatedLru, QuotaMode::Soft),
            objects,
        ),
        Way::new(
            "IsolatedLRU, soft quotas",
            config(EvictionKind::IsolatedLru, QuotaMode::Soft),
            objects,
        ),
        Way::new(
            "IsolatedLRU, strict quotas",
            config(EvictionKind::IsolatedLru, QuotaMode::Strict),
            objects,
        ),
    ];
    // 1.5 times the average bytes per tenant: some tenants exceed it, most do not.
    let limit = objects * OBJECT / count * 3 / 2;
    for way in &mut ways[2..] {
        for salt in &salts {
            let grant = Grant {
                limit: Some(limit.max(PROMPT as u64 * OBJECT)),
                reserved: OBJECT,
            };
            way.cache.set_grant(salt, Some(grant));
        }
    }
    let prompts = objects / PROMPT as u64;
    for way in &mut ways {
        way.store(prompts * 3 / 2, &salts);
    }
    for _ in 0..REPEATS {
        for way in &mut ways {
            let nanoseconds = way.store(prompts / 8, &salts);
            way.nanoseconds.push(nanoseconds);
        }
    }
    println!("{count} salts, {objects} objects, medians of {REPEATS} rounds");
    let base = median(&mut ways[0].nanoseconds.clone());
    for way in &mut ways {
        let store = median(&mut way.nanoseconds);
        let stats = way.cache.stats();
        let bookkeeping = stats.bookkeeping_bytes as f64 / stats.objects.max(1) as f64;
        // Until no tenant is over quota; then the pass that every round ends with.
        while way.cache.evict_over_quota(NOW, 1024).objects > 0 {}
        let mut passes: Vec<_> = (0..1001)
            .map(|_| {
                let start = Instant::now();
                way.cache.evict_over_quota(NOW, 1024);
                start.elapsed().as_nanos() as f64
            })
            .collect();
        println!(
            "{:28} store {store:7.1} ns an object ({:.3} of LRU), pass with nothing to do {:5.0} ns, \
             {bookkeeping:.0} bytes of bookkeeping an object, {} salts over quota before",
            way.name,
            store / base,
            median(&mut passes),
            stats.over_quota_salts,
        );
    }
}
