//! Placement: tokens of stored objects are written to other positions of an engine's pages, with their keys rotated to these.

use std::sync::Arc;
use std::time::Instant;

use kvtier_memory::{AccessError, AffineCopy, Arena, ArenaKind, CopyLoop, Extent};

use crate::device::DeviceError;
use crate::error::PlanError;
use crate::geometry::Plane;
use crate::groups::KernelGroup;
use crate::layout::{KvLayout, checked_id};
use crate::plan::PlannedCopy;
use crate::rope::{Rope, Rotation};

/// Block ids of a prompt, per kernel group, every one below the number of blocks. Token `t` is in block `t / tokens_per_block`.
#[derive(Debug, Clone)]
pub struct PromptBlocks {
    layout_id: u64,
    groups: Vec<Vec<u32>>,
    /// Tokens that have a block in every group.
    tokens: u64,
}

impl PromptBlocks {
    /// Checks the ids: one list per kernel group, of any length.
    ///
    /// # Errors
    /// [`PlanError::GroupCount`], [`PlanError::BlockOutOfRange`].
    pub fn check<L: AsRef<[i64]>>(layout: &KvLayout, block_ids: &[L]) -> Result<Self, PlanError> {
        let groups = layout.kernel_groups();
        if block_ids.len() != groups.len() {
            return Err(PlanError::GroupCount {
                given: block_ids.len(),
                expected: groups.len(),
            });
        }
        let checked = |group: &KernelGroup, ids: &[i64]| {
            let id = |(position, id): (usize, &i64)| {
                checked_id(*id, group.num_blocks).ok_or(PlanError::BlockOutOfRange {
                    group: group.index,
                    position,
                    id: *id,
                    num_blocks: group.num_blocks,
                })
            };
            ids.iter().enumerate().map(id).collect()
        };
        let lists = groups.iter().zip(block_ids);
        let tokens = lists.clone().map(|(group, ids)| {
            let blocks = ids.as_ref().len() as u64;
            blocks.saturating_mul(group.tokens_per_block)
        });
        Ok(Self {
            layout_id: layout.id,
            tokens: tokens.min().unwrap_or(0),
            groups: lists
                .map(|(group, ids)| checked(group, ids.as_ref()))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Tokens that have a block in every group.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }
}

/// The first tokens of an object, and where they are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentCopy {
    /// Object group.
    pub object_group: usize,
    /// The object, at least as long as an object of its group.
    pub extent: Extent,
    /// Position of the object's first token when its keys were computed.
    pub old_start: u64,
    /// Position of that token in the prompt.
    pub start: u64,
    /// Number of tokens, at most those of a chunk.
    pub tokens: u64,
}

/// The segments of one request.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Arena of the extents.
    pub arena: Arc<Arena>,
    /// The engine's blocks, checked against the layout of the pages.
    pub blocks: PromptBlocks,
    /// The segments, in copy order. No two write the same tokens.
    pub segments: Vec<SegmentCopy>,
    /// How keys are rotated, checked against the layout of the pages.
    pub rope: Arc<Rope>,
    /// As in [`crate::Transfer`].
    pub deadline: Option<Instant>,
    /// As in [`crate::Transfer`].
    pub event: Vec<u8>,
}

/// Rotated rows, and their copies to the pages.
pub(crate) struct RowBatch {
    /// Memory of the rows, from its start on.
    pub rows: Arc<Arena>,
    /// The copies; arena offsets count from the start of the memory.
    pub copies: Vec<PlannedCopy>,
    used: u64,
}

impl Placement {
    /// Calls `visit` with all rows, in batches of at most `batch_bytes` or one row. Nothing is visited if the placement is
    /// invalid, and a batch is only reused if `visit` keeps no share of its memory.
    ///
    /// # Errors
    /// An invalid placement, or the error of `visit`.
    pub(crate) fn visit_batches(
        &self,
        layout: &KvLayout,
        batch_bytes: u64,
        mut visit: impl FnMut(&RowBatch) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.check(layout)?;
        let rows = layout.kernel_groups().iter().map(KernelGroup::row_bytes);
        let len = rows.max().unwrap_or(0).max(batch_bytes);
        let rows = Arena::create(ArenaKind::Anonymous, len);
        let mut batch = RowBatch {
            rows: Arc::new(rows.map_err(|_| AccessError::OutOfMemory { len })?),
            copies: Vec::new(),
            used: 0,
        };
        for segment in &self.segments {
            for kernel in &layout.object_groups()[segment.object_group].kernel_groups {
                let group = &layout.kernel_groups()[*kernel];
                let rotation = self
                    .rope
                    .rotation(group, segment.old_start, segment.start)?;
                for plane in 0..group.planes.len() {
                    // Values follow the keys of all layers.
                    let is_key = plane < group.layer_indices.len();
                    let rotation = rotation.as_ref().filter(|_| is_key);
                    self.add_plane(&mut batch, segment, group, plane, rotation, &mut visit)?;
                }
            }
        }
        visit(&batch)
    }

    /// Adds the rows of one plane.
    fn add_plane(
        &self,
        batch: &mut RowBatch,
        segment: &SegmentCopy,
        group: &KernelGroup,
        plane: usize,
        rotation: Option<&Rotation>,
        visit: &mut impl FnMut(&RowBatch) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let row = group.row_bytes();
        let in_object = group.object_offset + plane as u64 * group.slots_per_chunk * row;
        let mut done = 0;
        while done < segment.tokens {
            let fit = (batch.rows.len() - batch.used) / row;
            if fit == 0 {
                visit(batch)?;
                batch.copies.clear();
                batch.used = 0;
                continue;
            }
            let count = fit.min(segment.tokens - done);
            let rows = batch.take(count * row)?;
            self.arena
                .read(segment.extent, in_object + done * row, rows)?;
            if let Some(rotation) = rotation {
                rotation.apply(rows);
            }
            let blocks = &self.blocks.groups[group.index];
            batch.add_copies(
                group,
                &group.planes[plane],
                blocks,
                segment.start + done,
                count,
            );
            done += count;
        }
        Ok(())
    }

    /// Checks everything that can be known before a byte is written.
    fn check(&self, layout: &KvLayout) -> Result<(), DeviceError> {
        if [self.blocks.layout_id, self.rope.layout_id] != [layout.id; 2] {
            return Err(PlanError::ForeignBlockTable.into());
        }
        for (at, segment) in self.segments.iter().enumerate() {
            let Some(object) = layout.object_groups().get(segment.object_group) else {
                return Err(PlanError::NoSuchObjectGroup {
                    group: segment.object_group,
                    groups: layout.object_groups().len(),
                }
                .into());
            };
            layout.check_extent(object.index, segment.extent.len)?;
            let check = |field, value: u64, most: u64| {
                let error = PlanError::InvalidSegment {
                    segment: at,
                    field,
                    value,
                    most,
                };
                if value <= most { Ok(()) } else { Err(error) }
            };
            check("tokens", segment.tokens, layout.chunk_tokens())?;
            let end = |start: u64| start.saturating_add(segment.tokens);
            check("end in the blocks", end(segment.start), self.blocks.tokens)?;
            for group in &object.kernel_groups {
                if segment.old_start == segment.start {
                    continue;
                }
                if let Some(positions) = self.rope.positions(*group) {
                    check("end in the cos/sin cache", end(segment.start), positions)?;
                    check(
                        "old end in the cos/sin cache",
                        end(segment.old_start),
                        positions,
                    )?;
                }
            }
        }
        Ok(())
    }
}

impl RowBatch {
    /// Takes memory for rows, at most what is left.
    fn take(&mut self, bytes: u64) -> Result<&mut [u8], DeviceError> {
        let all = Arc::get_mut(&mut self.rows).and_then(Arena::bytes_mut);
        let all = all.ok_or_else(|| DeviceError::Broken("rotated rows are still in use".into()))?;
        Ok(&mut all[self.used as usize..][..bytes as usize])
    }

    /// Adds the copies of rows at the end of the used memory to tokens from `position` on.
    fn add_copies(
        &mut self,
        group: &KernelGroup,
        plane: &Plane,
        blocks: &[u32],
        position: u64,
        count: u64,
    ) {
        let (per_block, row) = (group.slots_per_block, group.row_bytes());
        let mut at = position;
        while at < position + count {
            let (block, slot) = (at / per_block, at % per_block);
            let slots = (per_block - slot).min(position + count - at);
            let block = u64::from(blocks[block as usize]) * plane.block_stride;
            for part in &plane.parts {
                let part = part.slots(slot, slots, row);
                let copy = PlannedCopy {
                    memory: plane.memory,
                    copy: AffineCopy {
                        loops: [CopyLoop::ONCE, CopyLoop::ONCE, part.loops[0], part.loops[1]],
                        inner_bytes: part.bytes,
                        segment_offset: plane.base + block + part.engine_offset,
                        arena_offset: self.used + part.object_offset,
                    },
                };
                let last = self.copies.last_mut();
                if !last.is_some_and(|last| last.extend(&copy)) {
                    self.copies.push(copy);
                }
            }
            self.used += slots * row;
            at += slots;
        }
    }
}
