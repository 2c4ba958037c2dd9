//! Prompts that are longer than the memory: each store and each lookup keeps the longest prefix that fits.

use crate::cache_support::*;
use kvtier_core::cache::{Cache, CacheConfig, ReserveOptions, ReserveRequest, ReservedPrompt};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::quota::{Grant, QuotaConfig, QuotaMode};
use kvtier_core::window::needed;
use kvtier_core::{ChunkHash, GroupRow};
use proptest::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// One prompt of objects of a byte, and the memory for it.
#[derive(Clone, Debug)]
struct Case {
    eviction: EvictionKind,
    capacity: u64,
    /// A strict limit of the tenant; only `IsolatedLru` has tenants.
    limit: Option<u64>,
    /// Workers, each with all groups.
    ranks: u32,
    /// Window of each object group.
    groups: Vec<Option<u32>>,
    chunks: u32,
    /// Chunks per store.
    part: usize,
    /// Bytes of the memory that other objects have at the start, and whether they stay.
    others: u64,
    are_leased: bool,
}

impl Case {
    fn rows(&self) -> Arc<[GroupRow]> {
        let rows = (0..self.ranks).flat_map(|rank| {
            self.groups
                .iter()
                .zip(0..)
                .map(move |(window, group)| GroupRow {
                    namespace: Arc::clone(namespace(8 * rank + group, "")),
                    window: *window,
                    object_bytes: 1,
                })
        });
        rows.collect()
    }

    fn cache(&self) -> Cache<FirstFit> {
        let config = CacheConfig {
            eviction: self.eviction,
            quotas: QuotaConfig {
                mode: QuotaMode::Strict,
                ..QuotaConfig::default()
            },
            check_invariants_every: 1,
            ..CacheConfig::default()
        };
        let cache = Cache::new(FirstFit::new(self.capacity, 1), config);
        let limit = self.limit.map(|bytes| Grant {
            limit: Some(bytes),
            reserved: 0,
        });
        cache.set_grant("", limit);
        store(
            &cache,
            namespace(0, "other"),
            &hashes(1000..1000 + self.others as u32),
            1,
        );
        cache
    }

    /// Objects that a prefix needs.
    fn objects(&self, hit: usize) -> usize {
        let of_group = |window: &Option<u32>| needed(*window, hit).len();
        self.ranks as usize * self.groups.iter().map(of_group).sum::<usize>()
    }

    /// Chunks for which there is memory. What a window needed for a shorter prefix is kept as well.
    fn expected(&self) -> usize {
        let leased = if self.are_leased { self.others } else { 0 };
        let memory = (self.capacity - leased).min(self.limit.unwrap_or(u64::MAX));
        let rows = self.ranks as usize * self.groups.len();
        (memory as usize / rows).min(self.chunks as usize)
    }
}

/// Stores chunks of a prompt for all ranks, as workers do: one after the other.
fn store_part(
    case: &Case,
    cache: &Cache<FirstFit>,
    rows: &[GroupRow],
    prompt: &[ChunkHash],
    chunks: Range<usize>,
) {
    for rank in rows.chunks(case.groups.len()) {
        let requests: Vec<_> = rank
            .iter()
            .map(|row| ReserveRequest {
                namespace: &row.namespace,
                hashes: &prompt[chunks.clone()],
                len: row.object_bytes,
            })
            .collect();
        let options = ReserveOptions {
            prompt: Some(ReservedPrompt {
                rows,
                hashes: &prompt[..chunks.end],
                prefix: 0,
            }),
            ..ReserveOptions::default()
        };
        let reserved = cache.reserve_with(NOW, &requests, &options).unwrap();
        let _ = reserved.reservation.commit(NOW);
    }
}

fn plays(case: &Case) {
    let (cache, rows, prompt) = (case.cache(), case.rows(), hashes(0..case.chunks));
    let others = hashes(1000..1000 + case.others as u32);
    let _lease = case
        .are_leased
        .then(|| cache.lease(NOW, namespace(0, "other"), &others));
    for round in 0..5 {
        let found = cache.lookup(NOW, &rows, &prompt);
        let hit = found.hit_chunks;
        if round > 0 {
            assert!(
                hit >= case.expected(),
                "round {round}: {hit} of {}",
                case.expected()
            );
        }
        assert!(case.objects(hit) as u64 <= case.capacity);
        // Read, then computed and stored from there on.
        drop(found);
        let mut from = hit;
        while from < prompt.len() {
            let end = prompt.len().min(from + case.part);
            store_part(case, &cache, &rows, &prompt, from..end);
            from = end;
        }
        cache.touch(NOW, rows.iter().map(|row| &row.namespace), &prompt);
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let evictions = prop_oneof![
        Just(EvictionKind::Lru),
        Just(EvictionKind::IsolatedLru),
        Just(EvictionKind::Arc)
    ];
    let groups = prop::collection::vec(prop::option::of(1..4_u32), 0..3);
    (
        evictions,
        8..80_u64,
        prop::option::of(8..60_u64),
        1..4_u32,
        groups,
        1..60_u32,
        1..70_usize,
        0..80_u64,
        any::<bool>(),
    )
        .prop_map(
            |(eviction, capacity, limit, ranks, mut groups, chunks, part, others, are_leased)| {
                let limit = limit.filter(|_| eviction == EvictionKind::IsolatedLru);
                groups.insert(0, None);
                Case {
                    eviction,
                    capacity,
                    limit,
                    ranks,
                    groups,
                    chunks,
                    part,
                    others: others.min(capacity),
                    are_leased,
                }
            },
        )
}

proptest! {
    #[test]
    fn repeated_prompt_hits_longest_prefix_that_fits(case in cases()) {
        plays(&case);
    }
}
