//! What a cache has recently evicted, removed or refused, and why: the memory behind the question why a lookup missed.
//!
//! A ring of fixed size, written with every eviction, so it stores the hash of a key and no key; an index would cost more
//! than the evictions that it describes. A question reads the ring once for all of its keys: under the lock it only copies
//! entries, a slice at a time.

use super::clock::TICKS_PER_SECOND;
use super::namespaces::identities;
use super::refusal::Refusal;
use crate::hashing::ChunkHash;
use crate::object_key::Namespace;
use foldhash::quality::RandomState;
use hashbrown::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Entries of the ring.
pub(super) const ENTRIES: usize = 1 << 16;

/// Entries that are copied under one hold of the lock.
pub(super) const SLICE: usize = 1 << 13;

/// Bits of an entry's second word that hold the cause.
const CAUSE_BITS: u32 = 8;

/// Why an object is not in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossCause {
    /// The policy evicted it for a store.
    Space,
    /// The policy evicted it ahead of demand, above the watermark.
    Watermark,
    /// Eviction from a tenant over quota.
    Quota,
    /// Removal on request.
    Removed,
    /// Refused store: no memory was free, and no eviction would have freed enough.
    RefusedSpace,
    /// Refused store: the limit of the object's tenant.
    RefusedQuota,
    /// Refused store: the limit of uncommitted bytes.
    RefusedStaging,
}

impl LossCause {
    const ALL: [Self; 7] = [
        Self::Space,
        Self::Watermark,
        Self::Quota,
        Self::Removed,
        Self::RefusedSpace,
        Self::RefusedQuota,
        Self::RefusedStaging,
    ];
}

impl From<Refusal> for LossCause {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Memory => Self::RefusedSpace,
            Refusal::Quota => Self::RefusedQuota,
            Refusal::Staging => Self::RefusedStaging,
        }
    }
}

/// The last time that an object was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Why.
    pub cause: LossCause,
    /// How long ago.
    pub ago: Duration,
}

/// A key's hash, then time (in ticks) and cause.
pub(super) type LossWords = [u64; 2];

/// The ring.
#[derive(Debug)]
pub(super) struct Losses {
    ring: Box<[LossWords; ENTRIES]>,
    /// Losses recorded so far.
    total: u64,
}

impl Default for Losses {
    fn default() -> Self {
        // Zeroed memory, which takes no page until it is written.
        let ring = vec![[0; 2]; ENTRIES].into_boxed_slice();
        Self {
            ring: ring.try_into().expect("it has that many entries"),
            total: 0,
        }
    }
}

impl Losses {
    #[inline]
    pub(super) fn record(&mut self, key: u64, ticks: u32, cause: LossCause) {
        let word = u64::from(ticks) << CAUSE_BITS | cause as u64;
        self.ring[self.total as usize % ENTRIES] = [key, word];
        self.total += 1;
    }

    /// Bytes of the ring that were written.
    pub(super) fn bookkeeping_bytes(&self) -> usize {
        ENTRIES.min(self.total as usize) * size_of::<LossWords>()
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Age of the oldest loss that is still known, at this time in ticks, if older ones were forgotten.
    pub(super) fn since(&self, clock: u32) -> Option<Duration> {
        let [_, word] = self.ring[self.total as usize % ENTRIES];
        (self.total > ENTRIES as u64).then(|| ago(clock, (word >> CAUSE_BITS) as u32))
    }

    /// Number of the oldest loss that is still known.
    pub(super) fn first(&self) -> u64 {
        self.total.saturating_sub(ENTRIES as u64)
    }

    /// Copies the losses numbered `from..to`; those overwritten meanwhile are skipped.
    pub(super) fn copy(&self, from: u64, to: u64, copied: &mut Vec<LossWords>) {
        let numbers = from.max(self.first())..to;
        copied.extend(numbers.map(|number| self.ring[number as usize % ENTRIES]));
    }
}

/// A question to the ring, about keys of several namespaces.
pub(super) struct LossQuestion {
    keys: Vec<Vec<u64>>,
    latest: HashMap<u64, Option<(u32, LossCause)>>,
}

impl LossQuestion {
    pub(super) fn new(seed: &RandomState, asked: &[(&Arc<Namespace>, &[ChunkHash])]) -> Self {
        let keys = asked
            .iter()
            .map(|(namespace, hashes)| identities(seed, namespace, hashes));
        let keys: Vec<_> = keys.collect();
        Self {
            latest: keys.iter().flatten().map(|key| (*key, None)).collect(),
            keys,
        }
    }

    /// Notes what these entries, later than those before, say of the keys.
    pub(super) fn note(&mut self, entries: &[LossWords]) {
        for [key, word] in entries {
            if let Some(known) = self.latest.get_mut(key) {
                let cause = (word & ((1 << CAUSE_BITS) - 1)) as usize;
                let cause = LossCause::ALL.get(cause);
                *known = cause.map(|cause| ((word >> CAUSE_BITS) as u32, *cause));
            }
        }
    }

    /// The last loss of each key, at this time in ticks.
    pub(super) fn answer(&self, clock: u32) -> Vec<Vec<Option<Loss>>> {
        let answer = |key: &u64| {
            let (ticks, cause) = self.latest.get(key).copied().flatten()?;
            let ago = ago(clock, ticks);
            Some(Loss { cause, ago })
        };
        let of_keys = |keys: &Vec<u64>| keys.iter().map(answer).collect();
        self.keys.iter().map(of_keys).collect()
    }
}

fn ago(clock: u32, ticks: u32) -> Duration {
    Duration::from_secs(clock.saturating_sub(ticks).into()) / TICKS_PER_SECOND
}

// Steps under the lock are counted only with debug assertions.
#[cfg(all(test, debug_assertions))]
mod tests {
    use super::super::{Cache, CacheConfig, Extent, ExtentAllocator};
    use super::*;
    use std::sync::atomic::Ordering;

    struct NoMemory;

    impl ExtentAllocator for NoMemory {
        fn allocate(&mut self, _bytes: u64, _owner: u32) -> Option<Extent> {
            None
        }

        fn free(&mut self, _extent: Extent) {}

        fn capacity(&self) -> u64 {
            0
        }

        fn used(&self) -> u64 {
            0
        }
    }

    #[test]
    fn ring_is_read_once_for_all_namespaces() {
        let config = CacheConfig {
            check_invariants_every: u32::MAX,
            ..CacheConfig::default()
        };
        let cache = Cache::new(NoMemory, config);
        let of_rank = |rank| Arc::new(Namespace::new("m", rank, 0, 0, "").unwrap());
        let namespaces: Vec<_> = (0..256).map(of_rank).collect();
        let hashes: Vec<_> = (0..4).map(|number| ChunkHash([number; 32])).collect();
        cache.locked(|state| {
            for namespace in namespaces.iter().cycle().take(ENTRIES + 1) {
                let key = identities(&state.namespaces.seed, namespace, &hashes[1..2])[0];
                state.losses.record(key, 0, LossCause::Space);
            }
        });
        let steps = || cache.shared.calls.load(Ordering::Relaxed);
        let before = steps();
        let asked: Vec<_> = namespaces.iter().map(|it| (it, &hashes[..])).collect();
        let losses = cache.losses(&asked);
        assert_eq!(steps() - before, 1 + (ENTRIES / SLICE) as u32);
        assert_eq!(losses.len(), namespaces.len());
        let loss = Some(Loss {
            cause: LossCause::Space,
            ago: Duration::ZERO,
        });
        for of_namespace in losses {
            assert_eq!(of_namespace, [None, loss, None, None]);
        }
    }
}
