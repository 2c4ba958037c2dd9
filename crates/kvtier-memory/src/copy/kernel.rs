//! The loops of an affine copy, specialised by the size of the contiguous pieces: for small
//! pieces (head-transposed layouts) a call to `memcpy` would cost more than the bytes.

use super::{AffineCopy, Direction, MAX_LOOPS};

/// A loop as the kernels see it: steps, and bytes per step on the side read and written.
#[derive(Clone, Copy)]
struct Step {
    count: usize,
    from: usize,
    to: usize,
}

const ONCE: Step = Step {
    count: 1,
    from: 0,
    to: 0,
};

/// Bytes of a cache line. Pieces of whole lines may be written in any order at little cost.
const LINE: usize = 64;

/// Executes a copy whose bounds were proved.
///
/// # Safety
/// Every byte that `copy` touches from `segment` and `extent` on must be valid for the access,
/// and the two sides must not overlap.
pub(super) unsafe fn execute(
    copy: &AffineCopy,
    segment: *mut u8,
    extent: *mut u8,
    direction: Direction,
) {
    if copy.inner_bytes == 0 || copy.loops.iter().any(|l| l.count == 0) {
        return;
    }
    let (steps, inner) = normalise(copy, direction);
    // SAFETY: both offsets lie inside, as the caller promises.
    let (there, here) = unsafe {
        (
            segment.add(copy.segment_offset as usize),
            extent.add(copy.arena_offset as usize),
        )
    };
    let (from, to) = match direction {
        Direction::SegmentToArena => (there.cast_const(), here),
        Direction::ArenaToSegment => (here.cast_const(), there),
    };
    // SAFETY: the steps and `inner` describe the same bytes as `copy`.
    unsafe {
        match inner {
            1 => nest(&steps, from, to, Whole::<1>),
            2 => nest(&steps, from, to, Whole::<2>),
            4 => nest(&steps, from, to, Whole::<4>),
            8 => nest(&steps, from, to, Whole::<8>),
            16 => nest(&steps, from, to, Whole::<16>),
            32 => nest(&steps, from, to, Whole::<32>),
            64 => nest(&steps, from, to, Lines::<1>),
            128 => nest(&steps, from, to, Lines::<2>),
            192 => nest(&steps, from, to, Lines::<3>),
            256 => nest(&steps, from, to, Lines::<4>),
            512 => nest(&steps, from, to, Lines::<8>),
            bytes => nest(&steps, from, to, Any { bytes }),
        }
    }
}

/// Drops loops that run once, and joins loops that on both sides go on where the one inside
/// them ends. The same bytes, in longer pieces and in a better order.
fn normalise(copy: &AffineCopy, direction: Direction) -> ([Step; MAX_LOOPS], usize) {
    let mut inner = copy.inner_bytes as usize;
    // Innermost last; `kept` is how many, from the end, are in use.
    let mut steps = [ONCE; MAX_LOOPS];
    let mut kept = 0;
    for l in copy.loops.iter().rev().filter(|l| l.count > 1) {
        let (segment, arena) = (l.segment_stride as usize, l.arena_stride as usize);
        let (from, to) = match direction {
            Direction::SegmentToArena => (segment, arena),
            Direction::ArenaToSegment => (arena, segment),
        };
        let count = l.count as usize;
        if kept == 0 {
            if from == inner && to == inner {
                inner *= count;
                continue;
            }
        } else {
            let inside = &mut steps[MAX_LOOPS - kept];
            if from == inside.from.wrapping_mul(inside.count)
                && to == inside.to.wrapping_mul(inside.count)
            {
                inside.count *= count;
                continue;
            }
        }
        kept += 1;
        steps[MAX_LOOPS - kept] = Step { count, from, to };
    }
    if inner >= LINE {
        // Innermost what is read in order: reads wait for memory, writes do not.
        steps[MAX_LOOPS - kept..].sort_by_key(|step| std::cmp::Reverse(step.from));
    }
    (steps, inner)
}

/// How one contiguous piece is copied.
trait CopyPiece {
    /// Copies one piece.
    ///
    /// # Safety
    /// The piece must be readable at `from`, writable at `to`, and not overlap.
    unsafe fn copy(&self, from: *const u8, to: *mut u8);
}

/// `N` bytes in a few moves.
struct Whole<const N: usize>;

impl<const N: usize> CopyPiece for Whole<N> {
    #[inline(always)]
    unsafe fn copy(&self, from: *const u8, to: *mut u8) {
        // SAFETY: as promised by the caller. Arrays of bytes have no alignment.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<[u8; N]>(), to.cast(), 1) };
    }
}

/// `N` times 64 bytes, each in a few moves: the compiler calls `memcpy` for larger arrays.
struct Lines<const N: usize>;

impl<const N: usize> CopyPiece for Lines<N> {
    #[inline(always)]
    unsafe fn copy(&self, from: *const u8, to: *mut u8) {
        for line in 0..N {
            // SAFETY: line `line` of the piece, which the caller promises.
            unsafe { Whole::<64>.copy(from.add(64 * line), to.add(64 * line)) };
        }
    }
}

/// Any number of bytes, by `memcpy`.
struct Any {
    bytes: usize,
}

impl CopyPiece for Any {
    #[inline(always)]
    unsafe fn copy(&self, from: *const u8, to: *mut u8) {
        // SAFETY: as promised by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from, to, self.bytes) };
    }
}

/// Copies a piece for every combination of steps.
///
/// # Safety
/// As [`execute`], for the pieces that the steps reach.
#[inline(always)]
unsafe fn nest(steps: &[Step; MAX_LOOPS], from: *const u8, to: *mut u8, piece: impl CopyPiece) {
    let [a, b, c, d] = *steps;
    for i in 0..a.count {
        for j in 0..b.count {
            for k in 0..c.count {
                let from_outer = i * a.from + j * b.from + k * c.from;
                let to_outer = i * a.to + j * b.to + k * c.to;
                for l in 0..d.count {
                    // SAFETY: the caller promises that all combinations of steps lie inside.
                    unsafe {
                        piece.copy(
                            from.add(from_outer + l * d.from),
                            to.add(to_outer + l * d.to),
                        );
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::CopyLoop;
    use super::*;

    /// Every piece, in exactly the memory that the copy needs: a byte too far is one that Miri and AddressSanitizer see.
    #[test]
    fn pieces_of_any_size_stay_inside_their_memory() {
        let sizes = [1, 2, 3, 4, 8, 16, 31, 32, 64, 65, 128, 192, 256, 512, 1000];
        for (inner, gap) in sizes.into_iter().flat_map(|size| [(size, 0), (size, 5)]) {
            let stride = inner + gap;
            // The extent has the pieces transposed, and no gaps.
            let loops = [
                CopyLoop {
                    count: 3,
                    segment_stride: 2 * stride,
                    arena_stride: inner,
                },
                CopyLoop {
                    count: 2,
                    segment_stride: stride,
                    arena_stride: 3 * inner,
                },
            ];
            let copy = AffineCopy::new(0, 0, inner, &loops);
            let mut segment: Vec<u8> = (0..6 * stride - gap).map(|at| at as u8).collect();
            let mut extent = vec![0xff; 6 * inner as usize];
            let (there, here) = (segment.as_mut_ptr(), extent.as_mut_ptr());
            // SAFETY: both have as many bytes as the loops reach.
            unsafe { execute(&copy, there, here, Direction::SegmentToArena) };
            for (at, byte) in extent.iter().enumerate() {
                let (piece, within) = (at as u64 / inner, at as u64 % inner);
                let (row, column) = (piece % 3, piece / 3);
                assert_eq!(*byte, (row * 2 * stride + column * stride + within) as u8);
            }
            let before = segment.clone();
            let there = segment.as_mut_ptr();
            // SAFETY: as above.
            unsafe { execute(&copy, there, here, Direction::ArenaToSegment) };
            assert_eq!(segment, before);
        }
    }
}
