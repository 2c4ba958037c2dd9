//! Two models with objects of different sizes on one L1: hit rates, refused objects and evicted bytes, simulated.
//!
//! `fragmentation [REQUESTS]`. Prompts of each model are drawn by a Zipf law; a request looks its prompt up, holds what it
//! found for the next 16 or 400 requests, and stores the rest. `policy order` evicts in policy order until the allocator finds a
//! hole, however many that takes; `runs` is what the cache does. `split` places large objects from the top of the arena
//! and small ones from the bottom.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvtier_core::cache::{
    ArenaPiece, Cache, CacheConfig, Extent, ExtentAllocator, KeyOutcome, ReserveRequest,
};
use kvtier_core::random::SplitMix64;
use kvtier_core::{ChunkHash, GroupRow, Namespace};

/// Units of 64 KiB: 8 GiB.
const CAPACITY: u64 = 131_072;
/// Objects of this many units and more are large: 4 MiB.
const LARGE: u64 = 64;
const PROMPTS: usize = 2000;

#[derive(Clone, Copy, PartialEq)]
struct Variant {
    name: &'static str,
    runs: bool,
    split: bool,
}

/// The smallest free extent that fits, the lowest of those, or with `split` the highest for large objects.
struct BestFit {
    variant: Variant,
    used: u64,
    /// By offset: size, and owner unless free.
    blocks: BTreeMap<u64, (u64, Option<u32>)>,
    free: BTreeSet<(u64, u64)>,
}

impl BestFit {
    fn new(variant: Variant) -> Self {
        Self {
            variant,
            used: 0,
            blocks: BTreeMap::from([(0, (CAPACITY, None))]),
            free: BTreeSet::from([(CAPACITY, 0)]),
        }
    }

    fn release(&mut self, offset: u64, size: u64) {
        self.blocks.insert(offset, (size, None));
        self.free.insert((size, offset));
    }
}

impl ExtentAllocator for BestFit {
    fn allocate(&mut self, bytes: u64, owner: u32) -> Option<Extent> {
        let from_top = self.variant.split && bytes >= LARGE;
        let fitting = self.free.range((bytes, 0)..).copied();
        let (size, offset) = match (self.variant.split, from_top) {
            (false, _) => fitting.into_iter().next()?,
            (true, false) => fitting.min_by_key(|(_, offset)| *offset)?,
            (true, true) => fitting.max_by_key(|(_, offset)| *offset)?,
        };
        self.free.remove(&(size, offset));
        self.blocks.remove(&offset);
        let at = if from_top {
            offset + size - bytes
        } else {
            offset
        };
        if size > bytes {
            let rest = if from_top { offset } else { offset + bytes };
            self.release(rest, size - bytes);
        }
        self.blocks.insert(at, (bytes, Some(owner)));
        self.used += bytes;
        Some(Extent {
            offset: at,
            len: bytes,
        })
    }

    fn free(&mut self, extent: Extent) {
        let (mut offset, mut size) = (extent.offset, extent.len);
        self.blocks.remove(&offset);
        self.used -= size;
        let next = self.blocks.range(offset..).next();
        if let Some((&at, &(next, None))) = next {
            self.blocks.remove(&at);
            self.free.remove(&(next, at));
            size += next;
        }
        let before = self.blocks.range(..offset).next_back();
        if let Some((&at, &(before, None))) = before {
            self.blocks.remove(&at);
            self.free.remove(&(before, at));
            (offset, size) = (at, size + before);
        }
        self.release(offset, size);
    }

    fn capacity(&self) -> u64 {
        CAPACITY
    }

    fn used(&self) -> u64 {
        self.used
    }

    fn is_addressed(&self) -> bool {
        self.variant.runs
    }

    fn pieces_up(&self, from: u64, visit: &mut dyn FnMut(ArenaPiece) -> bool) {
        let pieces = self.blocks.range(from..);
        pieces.map(piece).all(visit);
    }

    fn pieces_down(&self, from: u64, visit: &mut dyn FnMut(ArenaPiece) -> bool) {
        let pieces = self.blocks.range(..from).rev();
        pieces.map(piece).all(visit);
    }
}

fn piece((&offset, &(len, owner)): (&u64, &(u64, Option<u32>))) -> ArenaPiece {
    ArenaPiece {
        extent: Extent { offset, len },
        owner,
    }
}

/// A random number from 0 to 1.
fn fraction(random: &mut SplitMix64) -> f64 {
    (random.next() >> 11) as f64 / (1u64 << 53) as f64
}

fn hash(prompt: usize, chunk: usize) -> ChunkHash {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&(prompt as u64).to_le_bytes());
    bytes[8..16].copy_from_slice(&(chunk as u64).to_le_bytes());
    ChunkHash(bytes)
}

fn run(variant: Variant, sizes: [u64; 2], in_flight: usize, requests: u64) {
    let cache = Cache::new(BestFit::new(variant), CacheConfig::default());
    let mut random = SplitMix64::new(7);
    // Cumulated weights of a Zipf law with exponent 0.8.
    let mut sum = 0.0;
    let weights = (1..=PROMPTS).map(|rank| {
        sum += (rank as f64).powf(-0.8);
        sum
    });
    let weights: Vec<f64> = weights.collect();
    let (mut asked, mut hit, mut stored, mut refused) =
        ([0u64; 2], [0u64; 2], [0u64; 2], [0u64; 2]);
    let mut held = VecDeque::new();
    for request in 0..requests {
        let now = Duration::from_millis(100 * request);
        // Both models have equal requested bytes.
        let share = sizes[1] as f64 / (sizes[0] + sizes[1]) as f64;
        let model = usize::from(fraction(&mut random) >= share);
        let rank = fraction(&mut random) * weights[PROMPTS - 1];
        let prompt = weights.partition_point(|weight| *weight < rank);
        let chunks = 4 + prompt % 13;
        let hashes: Vec<_> = (0..chunks).map(|chunk| hash(prompt, chunk)).collect();
        let namespace = Namespace::new(["small", "large"][model], 0, 0, 0, "");
        let namespace = Arc::new(namespace.expect("good names"));
        let row = GroupRow {
            namespace: Arc::clone(&namespace),
            window: None,
            object_bytes: sizes[model],
        };
        let found = cache.lookup(now, &[row].into(), &hashes);
        let counts = request >= requests / 4;
        if counts {
            asked[model] += chunks as u64;
            hit[model] += found.hit_chunks as u64;
        }
        let store = ReserveRequest {
            namespace: &namespace,
            hashes: &hashes,
            len: sizes[model],
        };
        let reserved = cache.reserve(now, &[store]).expect("len is not 0");
        if counts {
            let of = |kind: fn(&KeyOutcome) -> bool| {
                reserved
                    .outcomes
                    .iter()
                    .filter(|outcome| kind(outcome))
                    .count() as u64
            };
            stored[model] += of(|outcome| matches!(outcome, KeyOutcome::Reserved(_)));
            refused[model] += of(|outcome| matches!(outcome, KeyOutcome::NoMemory));
        }
        reserved.reservation.commit(now);
        held.push_back(found.lease);
        if held.len() > in_flight {
            held.pop_front();
        }
    }
    let stats = cache.stats();
    let rate = |part: u64, all: u64| 100.0 * part as f64 / all.max(1) as f64;
    println!(
        "{}\t{}:{}\t{in_flight}\t{:.1}\t{:.1}\t{:.2}\t{:.2}\t{:.1}\t{:.1}",
        variant.name,
        sizes[0],
        sizes[1],
        rate(hit[0], asked[0]),
        rate(hit[1], asked[1]),
        rate(refused[0], stored[0] + refused[0]),
        rate(refused[1], stored[1] + refused[1]),
        stats.evicted_bytes_total as f64 / 16_384.0,
        rate(stats.used_bytes, CAPACITY),
    );
}

fn main() {
    let requests = std::env::args().nth(1);
    let requests = requests.map_or(20_000, |number| number.parse().expect("a number"));
    println!(
        "eviction\tunits of 64 KiB\theld\thits small %\thits large %\trefused small %\trefused large %\tevicted GiB\tin use at the end %"
    );
    for in_flight in [16, 400] {
        for sizes in [[128, 128], [32, 128], [37, 128], [16, 512], [30, 100]] {
            for (name, runs, split) in [
                ("policy order", false, false),
                ("runs", true, false),
                ("policy order, split", false, true),
                ("runs, split", true, true),
            ] {
                let variant = Variant { name, runs, split };
                run(variant, sizes, in_flight, requests);
            }
        }
    }
}
