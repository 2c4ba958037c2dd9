//! What this machine can do at most: one thread copying memory.

use std::time::Instant;

/// Bytes of each of the two buffers: more than caches hold.
const BUFFER: usize = 192 << 20;

/// Copies, in pieces of that many bytes, between two touched buffers that no cache holds; 10^9 bytes a second, the
/// median of `passes` passes over the buffers.
pub(crate) fn gb_per_second(piece: usize, passes: usize) -> f64 {
    let piece = piece.clamp(1, BUFFER);
    let from: Vec<u8> = (0..BUFFER).map(|index| index as u8).collect();
    let mut to = vec![1_u8; BUFFER];
    let mut speeds: Vec<f64> = (0..passes.max(1))
        .map(|_| {
            let start = Instant::now();
            for (to, from) in to.chunks_exact_mut(piece).zip(from.chunks_exact(piece)) {
                to.copy_from_slice(from);
            }
            let seconds = start.elapsed().as_secs_f64();
            std::hint::black_box(&mut to);
            (BUFFER / piece * piece) as f64 / 1e9 / seconds
        })
        .collect();
    speeds.sort_by(f64::total_cmp);
    speeds[speeds.len() / 2]
}
