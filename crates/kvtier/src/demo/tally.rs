//! What happened: counts, latencies and everything that was wrong.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::engine::Kind;

/// Longest latency that is told apart, in nanoseconds: a minute.
const LONGEST: u64 = 60_000_000_000;

/// Wrong things that are told in words; the rest is only counted.
const TOLD: usize = 10;

/// Latencies of one operation.
pub(super) type Latencies = Histogram<u64>;

fn latencies() -> Latencies {
    Histogram::new_with_bounds(1, LONGEST, 3).expect("the bounds and digits are allowed")
}

/// Latencies of one kind of engine.
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
            lookup: latencies(),
            store: latencies(),
            retrieve: latencies(),
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (mine, theirs) in [
            (&mut self.lookup, &other.lookup),
            (&mut self.store, &other.store),
            (&mut self.retrieve, &other.retrieve),
        ] {
            // Cannot fail: all have the same bounds.
            let _ = mine.add(theirs);
        }
    }
}

/// Notes a latency.
pub(super) fn record(into: &mut Latencies, took: Duration) {
    into.saturating_record((took.as_nanos() as u64).max(1));
}

/// Counts of one phase.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    /// Turns served, each one a lookup, a load of what hit, and a store of the rest.
    pub(super) requests: u64,
    /// Tokens of whole chunks in their prompts, and those of them that hit.
    pub(super) asked_tokens: u64,
    pub(super) hit_tokens: u64,
    /// Bytes sent to the cache, and bytes that came back.
    pub(super) stored_bytes: u64,
    pub(super) retrieved_bytes: u64,
    /// Chunks that came back and were compared.
    pub(super) verified_chunks: u64,
    /// Lookups of another tenant's prompt, and loads of what they must not find.
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

    /// Share of the tokens asked for that hit.
    pub(super) fn hit_rate(&self) -> f64 {
        self.hit_tokens as f64 / self.asked_tokens.max(1) as f64
    }
}

/// Everything that was wrong.
#[derive(Debug, Clone, Default)]
pub(super) struct Faults {
    pub(super) count: u64,
    pub(super) told: Vec<String>,
}

impl Faults {
    pub(super) fn note(&mut self, what: String) {
        self.count += 1;
        if self.told.len() < TOLD {
            self.told.push(what);
        }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.count += other.count;
        let room = TOLD.saturating_sub(self.told.len());
        self.told.extend(other.told.into_iter().take(room));
    }
}
