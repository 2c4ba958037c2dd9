//! Block table: the checked block ids of one request.

use crate::error::PlanError;
use crate::layout::{KvLayout, checked_id};

/// A block that the engine does not have. No block has this number, as there are at most as many.
pub(crate) const NO_BLOCK: u32 = u32::MAX;

/// Block ids of whole chunks, per kernel group, every one below the number of blocks, or [`NO_BLOCK`].
#[derive(Debug, Clone)]
pub struct BlockTable {
    pub(crate) layout_id: u64,
    chunks: usize,
    /// All groups' ids, one group behind the other.
    ids: Vec<u32>,
    /// Start of each group's ids, and blocks per chunk.
    groups: Vec<(usize, usize)>,
}

impl BlockTable {
    /// Checks the ids of a request that covers `chunks` chunks: one list per kernel group, of whole chunks and at least
    /// the blocks of all chunks. Additional ids are ignored.
    ///
    /// # Errors
    /// [`PlanError`]; LMCache's server answers [`PlanError::TooFewBlocks`] and
    /// [`PlanError::BlockOutOfRange`] with "not ok".
    pub fn check<L: AsRef<[i64]>>(
        layout: &KvLayout,
        block_ids: &[L],
        chunks: usize,
    ) -> Result<Self, PlanError> {
        let expected = layout.kernel_groups().len();
        if block_ids.len() != expected {
            return Err(PlanError::GroupCount {
                given: block_ids.len(),
                expected,
            });
        }
        // All counts are checked before anything is allocated.
        let mut total = 0usize;
        let mut groups = Vec::with_capacity(expected);
        for (group, ids) in layout.kernel_groups().iter().zip(block_ids) {
            let per_chunk = group.blocks_per_chunk;
            let given = ids.as_ref().len();
            let needed = chunks
                .checked_mul(per_chunk)
                .ok_or(PlanError::TooManyChunks {
                    chunks,
                    most: usize::MAX / per_chunk,
                })?;
            if given < needed {
                return Err(PlanError::TooFewBlocks {
                    group: group.index,
                    given,
                    needed,
                });
            }
            if given % per_chunk != 0 {
                return Err(PlanError::NotWholeChunks {
                    group: group.index,
                    given,
                    blocks_per_chunk: per_chunk,
                });
            }
            groups.push((total, per_chunk));
            // A list this long exists, so the sum cannot overflow.
            total += needed;
        }
        let mut ids = Vec::new();
        ids.try_reserve_exact(total)
            .map_err(|_| PlanError::OutOfMemory { ids: total })?;
        for (group, list) in layout.kernel_groups().iter().zip(block_ids) {
            let needed = chunks * group.blocks_per_chunk;
            for (position, id) in list.as_ref()[..needed].iter().enumerate() {
                let lacks = (*id == -1 && group.may_lack_blocks).then_some(NO_BLOCK);
                let checked = lacks.or_else(|| checked_id(*id, group.num_blocks));
                ids.push(checked.ok_or(PlanError::BlockOutOfRange {
                    group: group.index,
                    position,
                    id: *id,
                    num_blocks: group.num_blocks,
                })?);
            }
        }
        Ok(Self {
            layout_id: layout.id,
            chunks,
            ids,
            groups,
        })
    }

    /// Number of chunks.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Ids of one chunk in one kernel group; empty if either does not exist.
    pub fn chunk(&self, kernel_group: usize, chunk: usize) -> &[u32] {
        match self.groups.get(kernel_group) {
            Some((start, per_chunk)) if chunk < self.chunks => {
                let first = start + chunk * per_chunk;
                &self.ids[first..first + per_chunk]
            }
            _ => &[],
        }
    }

    /// Whether a chunk can be stored: the engine has data for all of it in every kernel group of an object group.
    ///
    /// - Window and recurrent-state groups: the engine replaces dropped blocks by its null block, so a null id is a hole.
    /// - Other groups: only a chunk of nothing but null ids is a hole. Engines without a null block have an ordinary
    ///   block of that number.
    pub fn has_data(
        &self,
        layout: &KvLayout,
        object_group: usize,
        chunk: usize,
        null_block_id: i64,
    ) -> bool {
        // Without a null block only blocks that the engine does not have are holes.
        let null = u32::try_from(null_block_id).unwrap_or(NO_BLOCK);
        let Some(object) = layout.object_groups().get(object_group) else {
            return true;
        };
        object.kernel_groups.iter().all(|index| {
            let group = &layout.kernel_groups()[*index];
            let ids = self.chunk(*index, chunk);
            let ids = ids.get(group.unneeded_blocks..).unwrap_or_default();
            let mut nulls = ids.iter().map(|id| *id == null || *id == NO_BLOCK);
            match (group.recurrent_state, group.window_tokens) {
                // The last block holds the state after the chunk.
                (true, _) => !nulls.next_back().unwrap_or(false),
                (false, Some(_)) => !nulls.any(|null| null),
                (false, None) => ids.is_empty() || !nulls.all(|null| null),
            }
        })
    }
}
