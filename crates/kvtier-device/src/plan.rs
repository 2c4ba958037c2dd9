//! Copy planner: maps bytes of the engine's memories to bytes of an object.
//!
//! A plan has no direction: stores read the engine's side, retrieves write it. "Segment" in [`AffineCopy`] means an
//! engine's memory of any kind.

use kvtier_memory::{AffineCopy, CopyLoop, MAX_LOOPS};

use crate::blocks::{BlockTable, NO_BLOCK};
use crate::error::PlanError;
use crate::geometry::{BlockPart, Plane, adjoins};
use crate::groups::KernelGroup;
use crate::layout::KvLayout;

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Engine pages to object.
    Store,
    /// Object to engine pages.
    Retrieve,
}

impl Direction {
    /// Name in metrics and `/status`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Retrieve => "retrieve",
        }
    }
}

/// One element of a plan: a copy in one of the engine's memories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedCopy {
    /// Index into [`KvLayout::memories`]; the copy's segment offsets count from its start.
    pub memory: usize,
    /// The copy; arena offsets count from the start of the object. It has at most three loops: blocks, slots, heads.
    pub copy: AffineCopy,
}

impl PlannedCopy {
    /// Bytes moved, at most those of an object.
    pub fn bytes(&self) -> u64 {
        self.copy.bytes().unwrap_or(u64::MAX)
    }

    /// Whether this is a single run.
    pub fn is_one_run(&self) -> bool {
        self.copy.loops.iter().all(|step| step.count == 1)
    }

    /// Appends `next` if both are single runs that are adjacent on both sides.
    pub(crate) fn extend(&mut self, next: &Self) -> bool {
        let (own, other) = (&mut self.copy, &next.copy);
        if self.memory != next.memory
            || own.segment_offset + own.inner_bytes != other.segment_offset
            || own.arena_offset + own.inner_bytes != other.arena_offset
            || !self.is_one_run()
            || !next.is_one_run()
        {
            return false;
        }
        self.copy.inner_bytes += next.copy.inner_bytes;
        true
    }
}

/// One chunk of one object group of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRequest {
    /// Object group.
    pub object_group: usize,
    /// Position of the chunk in the request's range.
    pub chunk: usize,
    /// Tokens at the start of the *request's range* that are not moved, rounded down to whole blocks. 0 for stores.
    pub skip_tokens: u64,
}

impl ChunkRequest {
    /// Calls `visit` with the copies of this chunk, in object order, without allocating. Independent of other chunks.
    ///
    /// # Errors
    /// A chunk or group that does not exist, a table of another layout, or the error of `visit`.
    pub fn visit_copies<E: From<PlanError>>(
        self,
        layout: &KvLayout,
        blocks: &BlockTable,
        mut visit: impl FnMut(&PlannedCopy) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut pending: Option<PlannedCopy> = None;
        self.visit_spans(layout, blocks, |span| {
            let copy = span.copy();
            let Some(last) = &mut pending else {
                pending = Some(copy);
                return Ok(());
            };
            if last.extend(&copy) {
                return Ok(());
            }
            visit(&std::mem::replace(last, copy))
        })?;
        pending.map_or(Ok(()), |last| visit(&last))
    }

    /// Like [`ChunkRequest::visit_copies`], without merging adjacent spans or making copies of them.
    ///
    /// # Errors
    /// The same.
    pub(crate) fn visit_spans<E: From<PlanError>>(
        self,
        layout: &KvLayout,
        blocks: &BlockTable,
        mut visit: impl FnMut(Span<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        if blocks.layout_id != layout.id {
            return Err(PlanError::ForeignBlockTable.into());
        }
        if self.chunk >= blocks.chunks() {
            return Err(PlanError::NoSuchChunk {
                chunk: self.chunk,
                chunks: blocks.chunks(),
            }
            .into());
        }
        let Some(object) = layout.object_groups().get(self.object_group) else {
            return Err(PlanError::NoSuchObjectGroup {
                group: self.object_group,
                groups: layout.object_groups().len(),
            }
            .into());
        };
        for kernel in &object.kernel_groups {
            let group = &layout.kernel_groups()[*kernel];
            let ids = blocks.chunk(*kernel, self.chunk);
            let skip = skipped_blocks(layout.chunk_tokens(), group, self);
            let skip = skip.max(group.unneeded_blocks);
            let Some(ids) = ids.get(skip..).filter(|ids| !ids.is_empty()) else {
                continue;
            };
            visit_group(group, ids, skip, &mut visit)?;
        }
        Ok(())
    }

    /// Replaces `copies` with the copies of this chunk.
    ///
    /// # Errors
    /// As [`ChunkRequest::visit_copies`].
    pub fn plan(
        self,
        layout: &KvLayout,
        blocks: &BlockTable,
        copies: &mut Vec<PlannedCopy>,
    ) -> Result<(), PlanError> {
        copies.clear();
        self.visit_copies(layout, blocks, |copy| {
            copies.push(*copy);
            Ok(())
        })
    }
}

/// Number of blocks at the start of this chunk that are entirely skipped.
fn skipped_blocks(chunk_tokens: u64, group: &KernelGroup, request: ChunkRequest) -> usize {
    let start = (request.chunk as u64).saturating_mul(chunk_tokens);
    let tokens = request.skip_tokens.saturating_sub(start).min(chunk_tokens);
    // At most blocks_per_chunk, which is a usize.
    (tokens / group.tokens_per_block) as usize
}

/// One part of a plane in consecutive blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span<'a> {
    plane: &'a Plane,
    part: &'a BlockPart,
    first: u32,
    count: u64,
    /// Offset of the first block's first row in the object, and bytes from block to block there.
    object_offset: u64,
    block: u64,
}

/// A run: bytes that are contiguous on both sides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlannedRun {
    /// Index into [`KvLayout::memories`].
    pub memory: usize,
    /// From the start of the memory.
    pub segment_offset: u64,
    /// From the start of the object.
    pub arena_offset: u64,
    pub bytes: u64,
}

impl Span<'_> {
    fn start(&self) -> PlannedRun {
        let Self { plane, part, .. } = self;
        let first = u64::from(self.first) * plane.block_stride;
        PlannedRun {
            memory: plane.memory,
            segment_offset: plane.base + first + part.engine_offset,
            arena_offset: self.object_offset + part.object_offset,
            bytes: part.bytes,
        }
    }

    fn blocks(&self) -> CopyLoop {
        CopyLoop {
            count: self.count,
            segment_stride: self.plane.block_stride,
            arena_stride: self.block,
        }
    }

    /// The span as a run, if it is one.
    #[inline]
    pub fn run(&self) -> Option<PlannedRun> {
        let part = self.part;
        if !part.is_one_run() || !adjoins(&self.blocks(), part.bytes) {
            return None;
        }
        let mut run = self.start();
        run.bytes *= self.count;
        Some(run)
    }

    /// The span as one copy.
    pub fn copy(&self) -> PlannedCopy {
        let run = self.run();
        let [outer, inner] = self.part.loops;
        let loops = match run {
            Some(_) => [CopyLoop::ONCE; MAX_LOOPS],
            None => [CopyLoop::ONCE, self.blocks(), outer, inner],
        };
        let PlannedRun {
            memory,
            segment_offset,
            arena_offset,
            bytes,
        } = run.unwrap_or_else(|| self.start());
        PlannedCopy {
            memory,
            copy: AffineCopy {
                loops,
                inner_bytes: bytes,
                segment_offset,
                arena_offset,
            },
        }
    }
}

/// Visits the spans of one kernel group: for every plane, its runs of consecutive blocks. Blocks that the engine does not have
/// are left out. `first_block` is the place in the chunk of the first of `ids`, at least that of the first needed one.
fn visit_group<E>(
    group: &KernelGroup,
    ids: &[u32],
    first_block: usize,
    visit: &mut impl FnMut(Span<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let row = group.row_bytes();
    let block = group.slots_per_block * row;
    let plane_bytes = group.slots_per_chunk * row;
    let first_row = (first_block - group.unneeded_blocks) as u64 * block;
    let mut plane_offset = group.object_offset;
    for plane in &group.planes {
        let mut rest = ids;
        let mut object_offset = plane_offset + first_row;
        while let Some(first) = rest.first() {
            if *first == NO_BLOCK {
                object_offset += block;
                rest = &rest[1..];
                continue;
            }
            let length = consecutive(rest);
            let count = length as u64;
            for part in &plane.parts {
                visit(Span {
                    plane,
                    part,
                    first: *first,
                    count,
                    object_offset,
                    block,
                })?;
            }
            object_offset += count * block;
            rest = &rest[length..];
        }
        plane_offset += plane_bytes;
    }
    Ok(())
}

/// Number of consecutive ids at the start.
fn consecutive(ids: &[u32]) -> usize {
    let breaks = ids
        .windows(2)
        .position(|pair| pair[0].checked_add(1) != Some(pair[1]) || pair[1] == NO_BLOCK);
    breaks.map_or(ids.len(), |at| at + 1)
}
