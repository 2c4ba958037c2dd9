//! The one copy between an engine's segment and an extent of an arena.
//!
//! A [`AffineCopy`] says where bytes go by strides instead of by lists, so that a whole chunk is
//! a handful of them. All bounds are proved before the first byte moves, from the extremes of
//! each copy; the loops then run unchecked.

use crate::access::{AccessError, within};
use crate::arena::Arena;
use crate::segment::ForeignSegment;
use kvtier_common::extent::Extent;

mod kernel;

/// Loops around the contiguous bytes of an [`AffineCopy`].
pub const MAX_LOOPS: usize = 4;

/// Direction in which bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the engine's memory into the arena (store).
    SegmentToArena,
    /// From the arena into the engine's memory (retrieve).
    ArenaToSegment,
}

/// One loop of an [`AffineCopy`]: how often, and how far each step is on either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyLoop {
    /// Number of steps.
    pub count: u64,
    /// Bytes from one step to the next in the segment.
    pub segment_stride: u64,
    /// Bytes from one step to the next in the extent.
    pub arena_stride: u64,
}

impl CopyLoop {
    /// A loop that runs once: for those of the [`MAX_LOOPS`] that a copy does not need.
    pub const ONCE: Self = Self {
        count: 1,
        segment_stride: 0,
        arena_stride: 0,
    };
}

/// Copies `inner_bytes` contiguous bytes for every combination of loop steps.
///
/// With steps `i` of loop `l`, bytes lie at `segment_offset + sum(i[l] * segment_stride[l])` of
/// the segment and `arena_offset + sum(i[l] * arena_stride[l])` of the extent. The pieces must
/// not overlap where they are written (the result would depend on their order); together they
/// may have no more bytes than the extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AffineCopy {
    /// Loops, outermost first.
    pub loops: [CopyLoop; MAX_LOOPS],
    /// Contiguous bytes copied in each step of the innermost loop.
    pub inner_bytes: u64,
    /// First byte in the segment.
    pub segment_offset: u64,
    /// First byte in the extent, counted from the extent's start.
    pub arena_offset: u64,
}

impl AffineCopy {
    /// A copy with up to [`MAX_LOOPS`] loops, outermost first.
    ///
    /// # Panics
    /// If there are more loops than that.
    #[must_use]
    pub fn new(
        segment_offset: u64,
        arena_offset: u64,
        inner_bytes: u64,
        outer_loops: &[CopyLoop],
    ) -> Self {
        assert!(
            outer_loops.len() <= MAX_LOOPS,
            "more than {MAX_LOOPS} loops"
        );
        let mut loops = [CopyLoop::ONCE; MAX_LOOPS];
        loops[MAX_LOOPS - outer_loops.len()..].copy_from_slice(outer_loops);
        Self {
            loops,
            inner_bytes,
            segment_offset,
            arena_offset,
        }
    }

    /// Bytes it copies; `None` if that is no `u64`.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        if self.loops.iter().any(|l| l.count == 0) {
            return Some(0);
        }
        self.loops
            .iter()
            .try_fold(self.inner_bytes, |bytes, l| bytes.checked_mul(l.count))
    }

    /// The byte behind the last one touched on one side; `None` if that is no `u64`.
    /// Meaningful if anything is copied at all.
    fn end(&self, offset: u64, stride: impl Fn(&CopyLoop) -> u64) -> Option<u64> {
        self.loops
            .iter()
            .try_fold(offset, |at, l| {
                at.checked_add((l.count - 1).checked_mul(stride(l))?)
            })?
            .checked_add(self.inner_bytes)
    }
}

/// A contiguous run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First byte in the segment.
    pub segment_offset: u64,
    /// First byte in the extent, counted from the extent's start.
    pub arena_offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// Executes `copies` between `segment` and `extent` of `arena`, in order; returns the bytes copied.
///
/// # Errors
/// [`AccessError::OutOfBounds`] and [`AccessError::Overflow`] before anything was copied.
/// [`AccessError::Poisoned`] when pages of either side were lost, before or meanwhile: what was
/// copied so far is not to be used.
pub fn copy_affine(
    segment: &ForeignSegment,
    arena: &Arena,
    extent: Extent,
    direction: Direction,
    copies: &[AffineCopy],
) -> Result<u64, AccessError> {
    let mut total = 0_u64;
    for (index, copy) in copies.iter().enumerate() {
        let bytes = prove(segment, extent, index, copy)?;
        total = total.checked_add(bytes).ok_or(AccessError::Overflow {
            what: "extent",
            index,
        })?;
    }
    // The whole extent, once: from here on offsets inside it are offsets from its address.
    let inside = arena.mapping().locate(extent.offset, extent.len)?;
    let foreign = segment.mapping().locate(0, segment.len())?;
    segment.check()?;
    for copy in copies {
        // SAFETY: `prove` has shown that every byte touched lies in the segment and the extent,
        // which are different mappings that live as long as the borrows.
        unsafe { kernel::execute(copy, foreign.as_ptr(), inside.as_ptr(), direction) };
        // Also stops a copy from faulting its way through a truncated segment.
        segment.check()?;
    }
    arena.mapping().check_poison(extent)?;
    Ok(total)
}

/// Executes `runs` as [`copy_affine`] does its copies.
///
/// # Errors
/// As [`copy_affine`].
pub fn copy_runs(
    segment: &ForeignSegment,
    arena: &Arena,
    extent: Extent,
    direction: Direction,
    runs: &[Run],
) -> Result<u64, AccessError> {
    let mut total = 0_u64;
    for (index, run) in runs.iter().enumerate() {
        within("segment", run.segment_offset, run.len, segment.len())?;
        within("extent", run.arena_offset, run.len, extent.len)?;
        total = total.checked_add(run.len).ok_or(AccessError::Overflow {
            what: "extent",
            index,
        })?;
    }
    let inside = arena.mapping().locate(extent.offset, extent.len)?;
    let foreign = segment.mapping().locate(0, segment.len())?;
    segment.check()?;
    for run in runs {
        // SAFETY: the run lies in the segment and the extent (checked above), which are
        // different mappings that live as long as the borrows.
        unsafe {
            let there = foreign.as_ptr().add(run.segment_offset as usize);
            let here = inside.as_ptr().add(run.arena_offset as usize);
            let (from, to) = match direction {
                Direction::SegmentToArena => (there.cast_const(), here),
                Direction::ArenaToSegment => (here.cast_const(), there),
            };
            std::ptr::copy_nonoverlapping(from, to, run.len as usize);
        }
        segment.check()?;
    }
    arena.mapping().check_poison(extent)?;
    Ok(total)
}

/// Checks that `copy` stays inside both sides; returns its bytes.
fn prove(
    segment: &ForeignSegment,
    extent: Extent,
    index: usize,
    copy: &AffineCopy,
) -> Result<u64, AccessError> {
    let overflow = |what| AccessError::Overflow { what, index };
    let bytes = copy.bytes().ok_or(overflow("extent"))?;
    if bytes == 0 {
        return Ok(0);
    }
    let end = copy
        .end(copy.segment_offset, |l| l.segment_stride)
        .ok_or(overflow("segment"))?;
    let span = end - copy.segment_offset;
    within("segment", copy.segment_offset, span, segment.len())?;
    let end = copy
        .end(copy.arena_offset, |l| l.arena_stride)
        .ok_or(overflow("extent"))?;
    let span = end - copy.arena_offset;
    within("extent", copy.arena_offset, span, extent.len)?;
    // Strides of zero could state endless work inside those bounds.
    within("extent", 0, bytes, extent.len)?;
    Ok(bytes)
}
