//! Speed limit of this machine: one thread copying memory, with caches as warm as in a transfer.
//!
//! A transfer has a warm side that the worker has just touched (its blocks, or its buffer) and a cold one (a piece of the
//! server's memory). A copy between two cold buffers would be slower, and make the server look better.

use std::time::{Duration, Instant};

use super::record::median;
use crate::pattern;

/// Bytes of the cold side: more than caches hold.
const COLD_BYTES: usize = 192 << 20;

/// Direction of the copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the warm side to the cold one.
    Store,
    /// From the cold side to the warm one.
    Retrieve,
}

/// Speed of one thread in 10^9 bytes per second. It copies in pieces of `piece` bytes, between a side of `warm` bytes that
/// was just written and successive parts of a cold one. The median over one pass of the cold side; all pages were touched
/// before.
pub(crate) fn gb_per_second(way: Way, warm: usize, piece: usize) -> f64 {
    let warm = warm.clamp(1, COLD_BYTES / 4);
    let piece = piece.clamp(1, warm);
    let mut near = vec![0_u8; warm];
    let mut far: Vec<u8> = vec![1; COLD_BYTES];
    let speeds = far.chunks_exact_mut(warm).zip(0..).map(|(far, seed)| {
        pattern::fill(seed, &mut near);
        let took = copy(way, &mut near, far, piece);
        std::hint::black_box((&mut near, far));
        warm as f64 / 1e9 / took.as_secs_f64()
    });
    median(speeds.collect()).unwrap_or(f64::NAN)
}

fn copy(way: Way, near: &mut [u8], far: &mut [u8], piece: usize) -> Duration {
    let start = Instant::now();
    for (near, far) in near.chunks_mut(piece).zip(far.chunks_mut(piece)) {
        match way {
            Way::Store => far.copy_from_slice(near),
            Way::Retrieve => near.copy_from_slice(far),
        }
    }
    start.elapsed()
}
