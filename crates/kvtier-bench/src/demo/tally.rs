//! Results: counts, latencies and faults.

use super::engine::Kind;
use crate::latencies::Latencies;

/// Faults that are described; further ones are only counted.
const MAX_DESCRIBED: usize = 10;

/// Latencies of the engines of one kind.
#[derive(Debug, Clone)]
pub(super) struct KindLatencies {
    pub(super) kind: Kind,
    pub(super) lookup: Latencies,
    pub(super) store: Latencies,
    pub(super) retrieve: Latencies,
}

impl KindLatencies {
    pub(super) fn new(kind: Kind) -> Self {
        Self {
            kind,
            lookup: Latencies::new(),
            store: Latencies::new(),
            retrieve: Latencies::new(),
        }
    }

    /// One entry per kind: engines of different kinds turn out to be of one where the server has no pool.
    pub(super) fn merged(all: &[Self]) -> Vec<Self> {
        let mut merged: Vec<Self> = Vec::new();
        for one in all {
            match merged.iter_mut().find(|known| known.kind == one.kind) {
                Some(known) => known.add(one),
                None => merged.push(one.clone()),
            }
        }
        merged
    }

    fn add(&mut self, other: &Self) {
        for (mine, theirs) in [
            (&mut self.lookup, &other.lookup),
            (&mut self.store, &other.store),
            (&mut self.retrieve, &other.retrieve),
        ] {
            mine.add(theirs);
        }
    }
}

/// Counts of one phase.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    /// Turns served: each is a lookup, a retrieve of the hits, and a store of the rest.
    pub(super) requests: u64,
    /// Tokens of whole chunks in their prompts, and the ones that hit.
    pub(super) asked_tokens: u64,
    pub(super) hit_tokens: u64,
    /// Bytes stored, and bytes retrieved.
    pub(super) stored_bytes: u64,
    pub(super) retrieved_bytes: u64,
    /// Chunks that were retrieved and compared.
    pub(super) verified_chunks: u64,
    /// Lookups of another tenant's prompt, and retrieves beyond their hits.
    pub(super) foreign_lookups: u64,
    pub(super) foreign_loads: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.asked_tokens += other.asked_tokens;
        self.hit_tokens += other.hit_tokens;
        self.stored_bytes += other.stored_bytes;
        self.retrieved_bytes += other.retrieved_bytes;
        self.verified_chunks += other.verified_chunks;
        self.foreign_lookups += other.foreign_lookups;
        self.foreign_loads += other.foreign_loads;
    }

    /// Share of the tokens that hit.
    pub(super) fn hit_rate(&self) -> f64 {
        self.hit_tokens as f64 / self.asked_tokens.max(1) as f64
    }
}

/// Violations of what the cache promises.
#[derive(Debug, Clone, Default)]
pub(super) struct Faults {
    pub(super) count: u64,
    /// The first ones.
    pub(super) described: Vec<String>,
}

impl Faults {
    pub(super) fn push(&mut self, fault: String) {
        self.count += 1;
        if self.described.len() < MAX_DESCRIBED {
            self.described.push(fault);
        }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.count += other.count;
        let free = MAX_DESCRIBED.saturating_sub(self.described.len());
        self.described
            .extend(other.described.into_iter().take(free));
    }
}
