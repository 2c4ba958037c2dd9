//! The hot paths, for counting their instructions: `instructions SCENARIO ROUNDS`.
//!
//! Time is too noisy to gate on, instructions are not: `tests/instructions.sh` runs each scenario under callgrind with
//! two numbers of rounds and holds the difference against the limits in `tests/instructions.tsv`. One round is one
//! prompt of 128 chunks.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvtier_core::cache::{Cache, CacheConfig, Extent, ExtentAllocator, ReserveRequest};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::hashing::{ChunkHasher, HashAlgorithm};
use kvtier_core::ledger::{Identity, Ledger, Words};
use kvtier_core::prompt::PromptMemory;
use kvtier_core::quota::Grant;
use kvtier_core::{ChunkHash, GroupRow, Namespace};
use kvtier_proto::key::TokenReader;
use kvtier_proto::wire::write_tokens;

const CHUNKS: usize = 128;
const CHUNK: usize = 256;
const OBJECT: u64 = 4096;
const CAPACITY_PROMPTS: usize = 64;
/// Tenants beside the one that stores, each with a grant.
const TENANTS: usize = 10_000;

/// Equal pieces, last in first out.
struct Pieces(Vec<u64>);

impl ExtentAllocator for Pieces {
    fn allocate(&mut self, bytes: u64, _: u32) -> Option<Extent> {
        self.0.pop().map(|offset| Extent { offset, len: bytes })
    }

    fn free(&mut self, extent: Extent) {
        self.0.push(extent.offset);
    }

    fn capacity(&self) -> u64 {
        (CAPACITY_PROMPTS * CHUNKS) as u64 * OBJECT
    }

    fn used(&self) -> u64 {
        self.capacity() - self.0.len() as u64 * OBJECT
    }
}

/// Words in memory.
struct Memory(Vec<AtomicU64>);

impl Words for Memory {
    fn get(&self, at: u64) -> u64 {
        self.0[place(at)].load(Ordering::Relaxed)
    }

    fn set(&mut self, at: u64, word: u64) {
        let at = place(at);
        self.0[at].store(word, Ordering::Release);
    }

    fn set_all(&mut self, at: u64, words: &[u64]) {
        let at = place(at);
        // As the words of a segment, which are set one by one.
        for (place, word) in self.0[at..at + words.len()].iter().zip(words) {
            place.store(*word, Ordering::Release);
        }
    }

    fn end(&self) -> u64 {
        0
    }

    fn reach(&mut self, _: std::ops::Range<u64>) -> bool {
        true
    }
}

/// Header, first names and records without the space between them.
fn place(at: u64) -> usize {
    (at & 0x3_ffff) as usize
}

fn tokens(prompt: u32) -> Vec<u32> {
    let start = prompt * 7919;
    (0..(CHUNKS * CHUNK) as u32)
        .map(|position| (start + position * 31) % 128_000)
        .collect()
}

/// The array of a prompt's token ids as it stands in a payload, without its header.
fn encoded(prompt: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_tokens(&mut bytes, &tokens(prompt));
    // An array of more than 15 and at most 65535 entries has a header of three bytes.
    bytes.split_off(3)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let scenario = args.next().expect("a scenario");
    let rounds: u32 = args
        .next()
        .and_then(|rounds| rounds.parse().ok())
        .expect("rounds");
    let chunk = NonZeroUsize::new(CHUNK).expect("not 0");
    let hasher = || ChunkHasher::new(HashAlgorithm::Blake3, chunk, "");
    let count = CHUNKS * CHUNK;
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
    let pieces = (0..(CAPACITY_PROMPTS * CHUNKS) as u64)
        .map(|piece| piece * OBJECT)
        .collect();
    let has_tenants = scenario.starts_with("tenants-");
    let config = CacheConfig {
        eviction: if has_tenants {
            EvictionKind::IsolatedLru
        } else {
            EvictionKind::Lru
        },
        ..CacheConfig::default()
    };
    let cache = if scenario.starts_with("ledger-") {
        let identity = Identity {
            arena: [1, 2],
            chunk_size: CHUNK as u64,
            hash_algorithm: 3,
            tenants: 4,
            instance: 5,
            origin: 6,
        };
        let ledger = Ledger::create(
            Memory((0..1 << 18).map(|_| AtomicU64::new(0)).collect()),
            7,
            &identity,
        );
        Cache::with_ledger(Pieces(pieces), config, ledger.expect("words"))
    } else {
        Cache::new(Pieces(pieces), config)
    };
    for tenant in 0..if has_tenants { TENANTS } else { 0 } {
        let grant = Grant {
            limit: Some(u64::MAX / 2),
            reserved: 0,
        };
        cache.set_grant(&format!("tenant-{tenant}"), Some(grant));
    }
    let now = Duration::from_secs(1);
    let hashes = |round: u32| -> Vec<ChunkHash> {
        let hash = |chunk: u32| {
            *blake3::hash(&[round.to_le_bytes(), chunk.to_le_bytes()].concat()).as_bytes()
        };
        (0..CHUNKS as u32)
            .map(|chunk| ChunkHash(hash(chunk)))
            .collect()
    };
    let is_granted = scenario == "ledger-grant";
    let store = |hashes: &[ChunkHash]| {
        let request = ReserveRequest {
            namespace: &namespace,
            hashes,
            len: OBJECT,
        };
        let reserved = cache.reserve(now, &[request]).expect("len is not 0");
        if is_granted {
            reserved.reservation.grant(now);
        }
        assert_eq!(reserved.reservation.commit(now).inserted, CHUNKS);
    };
    match scenario.as_str() {
        // All chunks resident: hold and release them.
        "lookup" | "find" => {
            let prompt = hashes(0);
            store(&prompt);
            let rows = [GroupRow {
                namespace,
                window: None,
                object_bytes: OBJECT,
            }]
            .into();
            for _ in 0..rounds {
                let found = if scenario == "find" {
                    cache.find(now, &rows, &prompt, None).1
                } else {
                    cache.lookup(now, &rows, &prompt)
                };
                assert_eq!(found.hit_chunks, CHUNKS);
            }
        }
        // A full cache: each object evicts one.
        "store" | "tenants-store" | "ledger-store" | "ledger-grant" => {
            let prompts: Vec<_> = (0..CAPACITY_PROMPTS as u32 + 64).map(hashes).collect();
            let (fill, more) = prompts.split_at(CAPACITY_PROMPTS);
            fill.iter().for_each(|prompt| store(prompt));
            more.iter()
                .take(rounds as usize)
                .for_each(|prompt| store(prompt));
        }
        // No tenant is over quota: as many passes as a prompt has chunks.
        "tenants-pass" => {
            for _ in 0..rounds as usize * CHUNKS {
                assert_eq!(cache.evict_over_quota(now, 1024).objects, 0);
            }
        }
        // A prompt seen before: neither decoded nor hashed.
        "prompt-known" => {
            let memory = PromptMemory::new(hasher(), 64 << 20);
            let payload = encoded(0);
            for _ in 0..=rounds {
                let (prompt, used) = memory.reader().read(count, &payload).expect("good tokens");
                assert_eq!((prompt.hashes.len(), used), (CHUNKS, payload.len()));
            }
        }
        // A new prompt: decoded, hashed, remembered.
        "prompt-new" => {
            let memory = PromptMemory::new(hasher(), 64 << 20);
            let payloads: Vec<_> = (0..64).map(encoded).collect();
            for payload in payloads.iter().take(rounds as usize) {
                let (prompt, _) = memory.reader().read(count, payload).expect("good tokens");
                assert_eq!(prompt.hashes.len(), CHUNKS);
            }
        }
        other => panic!(
            "no scenario {other:?}; allowed: lookup, store, ledger-store, ledger-grant, tenants-store, tenants-pass, prompt-known, prompt-new"
        ),
    }
}
