//! What a cache has recently evicted, removed or refused, and why: the memory behind the question why a lookup missed.
//!
//! A ring of fixed size, written with every eviction, so it stores the hash of a key and no key; an index would cost more
//! than the evictions that it describes. A question reads the ring once, in slices, for all of its keys.

use super::ExtentAllocator;
use super::refusal::Refusal;
use super::state::{State, TICKS_PER_SECOND};
use crate::hashing::ChunkHash;
use crate::object_key::Namespace;
use hashbrown::HashMap;
use std::time::Duration;

/// Entries of the ring, 16 bytes each.
pub(super) const ENTRIES: usize = 1 << 16;

/// Entries that are read under one hold of the lock.
pub(super) const SLICE: u64 = 1 << 13;

/// Bits of an entry's second word that hold the cause.
const CAUSE_BITS: u32 = 8;

/// Why an object is not in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossCause {
    /// The policy evicted it for a store.
    Space,
    /// The policy evicted it ahead of demand, above the watermark.
    Watermark,
    /// Its tenant was over quota.
    Quota,
    /// It was removed on request.
    Removed,
    /// It was not stored: no memory was free, and no eviction would have freed enough.
    RefusedSpace,
    /// It was not stored: its tenant's limit.
    RefusedQuota,
    /// It was not stored: the limit of uncommitted bytes.
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

/// The ring. An entry is a key's hash, then time (in ticks) and cause.
#[derive(Debug)]
pub(super) struct Losses {
    ring: Box<[[u64; 2]; ENTRIES]>,
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
        ENTRIES.min(self.total as usize) * size_of::<[u64; 2]>()
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Time of the oldest loss that is still known, in ticks, if older ones were forgotten.
    fn oldest(&self) -> Option<u32> {
        let [_, word] = self.ring[self.total as usize % ENTRIES];
        (self.total > ENTRIES as u64).then_some((word >> CAUSE_BITS) as u32)
    }

    /// Fills in the latest of the losses numbered `from..to` for each of these keys; those overwritten meanwhile are skipped.
    fn read(&self, from: u64, to: u64, latest: &mut HashMap<u64, Option<(u32, LossCause)>>) {
        for number in from.max(self.total.saturating_sub(ENTRIES as u64))..to {
            let [key, word] = self.ring[number as usize % ENTRIES];
            if let Some(known) = latest.get_mut(&key) {
                let cause = (word & ((1 << CAUSE_BITS) - 1)) as usize;
                let cause = LossCause::ALL.get(cause);
                *known = cause.map(|cause| ((word >> CAUSE_BITS) as u32, *cause));
            }
        }
    }
}

/// A question to the ring.
pub(super) struct Question {
    latest: HashMap<u64, Option<(u32, LossCause)>>,
}

impl<A: ExtentAllocator> State<A> {
    /// The ring's hashes of these keys.
    pub(super) fn loss_keys(&self, namespace: &Namespace, hashes: &[ChunkHash]) -> Vec<u64> {
        self.namespaces.identities(namespace, hashes)
    }

    /// Notes that an object of a namespace that is known was not stored, or was removed.
    #[cold]
    pub(super) fn lose(&mut self, namespace: u32, hash: &ChunkHash, cause: LossCause) {
        let key = self.namespaces.identity(namespace, hash);
        self.losses.record(key, self.clock, cause);
    }

    pub(super) fn read_losses(&self, from: u64, to: u64, question: &mut Question) {
        self.losses.read(from, to, &mut question.latest);
    }

    /// Age of the oldest loss that is known, if older ones were forgotten.
    pub(super) fn losses_since(&self) -> Option<Duration> {
        Some(ago(self.clock, self.losses.oldest()?))
    }
}

impl Question {
    pub(super) fn new(keys: &[u64]) -> Self {
        Self {
            latest: keys.iter().map(|key| (*key, None)).collect(),
        }
    }

    pub(super) fn answer(&self, key: u64, clock: u32) -> Option<Loss> {
        let (ticks, cause) = self.latest.get(&key).copied().flatten()?;
        Some(Loss {
            cause,
            ago: ago(clock, ticks),
        })
    }
}

fn ago(clock: u32, ticks: u32) -> Duration {
    Duration::from_secs(clock.saturating_sub(ticks).into()) / TICKS_PER_SECOND
}
