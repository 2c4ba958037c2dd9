//! Copy counters of a GPU, for metrics and `/status`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::executor::Executor;
use crate::plan::Direction;

/// Upper bounds of the buckets of run lengths, in bytes; the last bucket has none.
pub const RUN_BUCKETS: [u64; 6] = [256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10];

/// Totals of one direction and executor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes.
    pub bytes: u64,
    /// Pieces.
    pub pieces: u64,
    /// Nanoseconds from submitting a piece to seeing its completion; pieces overlap.
    pub nanos: u64,
}

/// Counters since start, by direction and executor.
#[derive(Debug, Default)]
pub(super) struct Counters {
    moved: [[Counter; Executor::ALL.len()]; 2],
    /// Runs by length, by direction.
    runs: [[AtomicU64; RUN_BUCKETS.len() + 1]; 2],
}

#[derive(Debug, Default)]
struct Counter {
    bytes: AtomicU64,
    pieces: AtomicU64,
    nanos: AtomicU64,
}

impl Counters {
    pub fn piece(&self, direction: Direction, executor: Executor, bytes: u64, took: Duration) {
        let counter = &self.moved[direction as usize][executor as usize];
        counter.bytes.fetch_add(bytes, Ordering::Relaxed);
        counter.pieces.fetch_add(1, Ordering::Relaxed);
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        counter.nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    pub fn runs(&self, direction: Direction, bytes: u64, count: u64) {
        let bucket = RUN_BUCKETS.partition_point(|bound| *bound < bytes);
        self.runs[direction as usize][bucket].fetch_add(count, Ordering::Relaxed);
    }

    pub fn moved(&self, direction: Direction, executor: Executor) -> Moved {
        let counter = &self.moved[direction as usize][executor as usize];
        Moved {
            bytes: counter.bytes.load(Ordering::Relaxed),
            pieces: counter.pieces.load(Ordering::Relaxed),
            nanos: counter.nanos.load(Ordering::Relaxed),
        }
    }

    pub fn run_lengths(&self, direction: Direction) -> [u64; RUN_BUCKETS.len() + 1] {
        self.runs[direction as usize]
            .each_ref()
            .map(|count| count.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_counts_in_the_first_bucket_that_fits() {
        let counters = Counters::default();
        for (bytes, count) in [(1, 1), (256, 2), (257, 4), (256 << 10, 8), (u64::MAX, 16)] {
            counters.runs(Direction::Store, bytes, count);
        }
        assert_eq!(
            counters.run_lengths(Direction::Store),
            [3, 4, 0, 0, 0, 8, 16]
        );
        assert_eq!(counters.run_lengths(Direction::Retrieve), [0; 7]);
    }
}
