//! The pure planner: which bytes of which memory are which bytes of an object.
//!
//! A plan says nothing about direction: stores read the engine side, retrieves write it.

use crate::blocks::BlockTable;
use crate::error::PlanError;
use crate::geometry::{Part, Plane};
use crate::groups::KernelGroup;
use crate::layout::KvLayout;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Engine pages to object.
    Store,
    /// Object to engine pages.
    Retrieve,
}

/// One level of repetition around a run of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loop {
    /// Repetitions.
    pub count: u64,
    /// Bytes from one to the next in the engine's memory.
    pub engine_stride: u64,
    /// Bytes from one to the next in the object.
    pub object_stride: u64,
}

impl Loop {
    /// No repetition.
    pub const ONCE: Self = Self {
        count: 1,
        engine_stride: 0,
        object_stride: 0,
    };

    /// Whether repeating a run of `bytes` makes one longer run on both sides.
    pub(crate) fn adjoins(&self, bytes: u64) -> bool {
        self.count == 1 || (self.engine_stride == bytes && self.object_stride == bytes)
    }
}

/// Runs of equal length at affine addresses: three loops, outermost first, around `bytes` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AffineCopy {
    /// Index into [`KvLayout::memories`].
    pub memory: usize,
    /// Bytes from the start of that memory.
    pub engine_offset: u64,
    /// Bytes from the start of the object.
    pub object_offset: u64,
    /// Bytes of each run.
    pub bytes: u64,
    /// Loops around the run; a count of 1 is no loop.
    pub loops: [Loop; 3],
}

impl AffineCopy {
    /// Bytes moved in total.
    pub fn total_bytes(&self) -> u64 {
        self.loops
            .iter()
            .fold(self.bytes, |bytes, step| bytes * step.count)
    }

    /// Whether this is a single run.
    pub fn is_one_run(&self) -> bool {
        self.loops.iter().all(|step| step.count == 1)
    }

    /// Takes `next` in when both are single runs that adjoin on both sides.
    fn extend(&mut self, next: &Self) -> bool {
        let adjoins = self.memory == next.memory
            && self.engine_offset + self.bytes == next.engine_offset
            && self.object_offset + self.bytes == next.object_offset
            && self.is_one_run()
            && next.is_one_run();
        if adjoins {
            self.bytes += next.bytes;
        }
        adjoins
    }
}

/// One chunk of one object group of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRequest {
    /// Object group.
    pub object_group: usize,
    /// Position of the chunk in the request's range.
    pub chunk: usize,
    /// Tokens at the front of the *request's range* that are not to be moved, rounded down to whole
    /// blocks. 0 for stores.
    pub skip_tokens: u64,
}

impl KvLayout {
    /// Calls `visit` with the copies of one chunk, in object order. Independent of other chunks.
    /// Nothing is allocated.
    ///
    /// # Errors
    /// A chunk or group that does not exist, a table of another layout, or what `visit` returns.
    pub fn visit_chunk<E: From<PlanError>>(
        &self,
        blocks: &BlockTable,
        request: ChunkRequest,
        mut visit: impl FnMut(&AffineCopy) -> Result<(), E>,
    ) -> Result<(), E> {
        if blocks.layout_id != self.id {
            return Err(PlanError::ForeignBlockTable.into());
        }
        if request.chunk >= blocks.chunks() {
            return Err(PlanError::NoSuchChunk {
                chunk: request.chunk,
                chunks: blocks.chunks(),
            }
            .into());
        }
        let Some(object) = self.object_groups().get(request.object_group) else {
            return Err(PlanError::NoSuchObjectGroup {
                group: request.object_group,
                groups: self.object_groups().len(),
            }
            .into());
        };
        let mut pending: Option<AffineCopy> = None;
        for kernel in &object.kernel_groups {
            let group = &self.kernel_groups()[*kernel];
            let ids = blocks.chunk(*kernel, request.chunk);
            let skip = skipped_blocks(self.chunk_tokens(), group, request);
            let Some(ids) = ids.get(skip..).filter(|ids| !ids.is_empty()) else {
                continue;
            };
            visit_group(group, ids, skip, &mut |copy| {
                let Some(last) = &mut pending else {
                    pending = Some(*copy);
                    return Ok(());
                };
                if last.extend(copy) {
                    return Ok(());
                }
                visit(&std::mem::replace(last, *copy))
            })?;
        }
        pending.map_or(Ok(()), |last| visit(&last))
    }

    /// The copies of one chunk as a list, replacing what `copies` held.
    ///
    /// # Errors
    /// As [`KvLayout::visit_chunk`].
    pub fn plan_chunk(
        &self,
        blocks: &BlockTable,
        request: ChunkRequest,
        copies: &mut Vec<AffineCopy>,
    ) -> Result<(), PlanError> {
        copies.clear();
        self.visit_chunk(blocks, request, |copy| {
            copies.push(*copy);
            Ok(())
        })
    }
}

/// How many blocks at the front of this chunk lie wholly below the skipped tokens.
fn skipped_blocks(chunk_tokens: u64, group: &KernelGroup, request: ChunkRequest) -> usize {
    let start = (request.chunk as u64).saturating_mul(chunk_tokens);
    let tokens = request.skip_tokens.saturating_sub(start).min(chunk_tokens);
    // At most blocks_per_chunk, which is a usize.
    (tokens / group.tokens_per_block) as usize
}

/// The copies of one kernel group: for every plane, its runs of equally spaced blocks.
fn visit_group<E>(
    group: &KernelGroup,
    ids: &[u32],
    first_block: usize,
    visit: &mut impl FnMut(&AffineCopy) -> Result<(), E>,
) -> Result<(), E> {
    let row = group.row_bytes();
    let block = group.slots_per_block * row;
    let plane_bytes = group.slots_per_chunk * row;
    let mut plane_offset = group.object_offset;
    for plane in &group.planes {
        let mut rest = ids;
        let mut object_offset = plane_offset + first_block as u64 * block;
        while let Some(first) = rest.first() {
            let count = consecutive(rest);
            for part in &plane.parts {
                visit(&copy_of(
                    plane,
                    part,
                    *first,
                    count as u64,
                    object_offset,
                    block,
                ))?;
            }
            object_offset += count as u64 * block;
            rest = &rest[count..];
        }
        plane_offset += plane_bytes;
    }
    Ok(())
}

/// Length of the run of consecutive ids at the front.
fn consecutive(ids: &[u32]) -> usize {
    let breaks = ids
        .windows(2)
        .position(|pair| pair[0].checked_add(1) != Some(pair[1]));
    breaks.map_or(ids.len(), |at| at + 1)
}

/// `count` consecutive blocks of one plane as one copy.
fn copy_of(
    plane: &Plane,
    part: &Part,
    first: u32,
    count: u64,
    object_offset: u64,
    block: u64,
) -> AffineCopy {
    let blocks = Loop {
        count,
        engine_stride: plane.block_stride,
        object_stride: block,
    };
    let mut copy = AffineCopy {
        memory: plane.memory,
        engine_offset: plane.base + u64::from(first) * plane.block_stride + part.engine_offset,
        object_offset: object_offset + part.object_offset,
        bytes: part.bytes,
        loops: [blocks, part.loops[0], part.loops[1]],
    };
    if part.is_one_run() && blocks.adjoins(part.bytes) {
        copy.bytes *= count;
        copy.loops = [Loop::ONCE; 3];
    } else if count == 1 {
        copy.loops[0] = Loop::ONCE;
    }
    copy
}
