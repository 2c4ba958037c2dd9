//! The engine's KV pages in this process's own memory, and the bytes of a chunk in them.

use std::convert::Infallible;

use kvtier_device::{BlockTable, ChunkRequest, KvLayout, PlanError, PlannedCopy};
use parking_lot::RwLock;

/// The storage of one or several tensors.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    address: usize,
    bytes: usize,
}

impl Memory {
    /// # Safety
    /// `bytes` bytes at `address` stay readable and writable for as long as copies of this value are used, and nobody
    /// but the engine and its connector writes them.
    pub unsafe fn new(address: usize, bytes: usize) -> Self {
        Self { address, bytes }
    }

    /// The address of `len` bytes at `offset`, which are all inside.
    fn locate(self, offset: u64, len: u64) -> *mut u8 {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.bytes as u64),
            "a plan leaves its memory: {len} bytes at {offset} of {}",
            self.bytes
        );
        // Python told a number: the engine exposed its memory by telling it.
        std::ptr::with_exposed_provenance_mut(self.address + offset as usize)
    }
}

/// Pages and how they are laid out.
#[derive(Debug)]
pub struct Pages {
    pub layout: KvLayout,
    memories: Vec<Memory>,
    /// Whether they are still there; locked for reading while a chunk is copied.
    are_there: RwLock<bool>,
}

/// Why a chunk could not be copied.
pub enum CopyError<E> {
    Closed,
    Plan(PlanError),
    Other(E),
}

impl<E> From<PlanError> for CopyError<E> {
    fn from(error: PlanError) -> Self {
        Self::Plan(error)
    }
}

impl Pages {
    /// `memories` are those of the layout, in its order.
    pub fn new(layout: KvLayout, memories: Vec<Memory>) -> Self {
        Self {
            layout,
            memories,
            are_there: RwLock::new(true),
        }
    }

    /// They are about to go: waits for the chunks that are being copied; no other will be.
    pub fn close(&self) {
        *self.are_there.write() = false;
    }

    /// Bytes of one chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.layout
            .object_groups()
            .iter()
            .map(|group| group.object_bytes)
            .sum()
    }

    /// Gives every piece of a chunk to `put`, with its offset in the chunk.
    pub fn gather<E>(
        &self,
        blocks: &BlockTable,
        chunk: usize,
        mut put: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), CopyError<E>> {
        let request = ChunkRequest {
            object_group: 0,
            chunk,
            skip_tokens: 0,
        };
        let are_there = self.are_there.read();
        if !*are_there {
            return Err(CopyError::Closed);
        }
        self.layout.visit_chunk(blocks, request, |planned| {
            let memory = self.memories[planned.memory];
            each_run(planned, |page, object, len| {
                let from = memory.locate(page, len);
                // SAFETY: inside the memory; the engine does not write blocks that are being stored.
                let bytes = unsafe { std::slice::from_raw_parts(from.cast_const(), len as usize) };
                put(object, bytes).map_err(CopyError::Other)
            })
        })
    }

    /// Writes a chunk's bytes into its pages, but for those of the first `skip_tokens` of the request's range.
    pub fn scatter(
        &self,
        blocks: &BlockTable,
        chunk: usize,
        skip_tokens: u64,
        bytes: &[u8],
    ) -> Result<(), CopyError<Infallible>> {
        let request = ChunkRequest {
            object_group: 0,
            chunk,
            skip_tokens,
        };
        let are_there = self.are_there.read();
        if !*are_there {
            return Err(CopyError::Closed);
        }
        self.layout.visit_chunk(blocks, request, |planned| {
            let memory = self.memories[planned.memory];
            each_run(planned, |page, object, len| {
                let from = &bytes[object as usize..(object + len) as usize];
                let to = memory.locate(page, len);
                // SAFETY: inside the memory, as long as the slice, and no part of it: the engine reads no block that
                // is being loaded.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
                Ok(())
            })
        })
    }
}

/// Calls `visit` with (offset in the memory, offset in the object, length) of each contiguous run.
fn each_run<E>(
    planned: &PlannedCopy,
    mut visit: impl FnMut(u64, u64, u64) -> Result<(), E>,
) -> Result<(), E> {
    let copy = &planned.copy;
    let [a, b, c, d] = copy.loops;
    for i in 0..a.count {
        for j in 0..b.count {
            for k in 0..c.count {
                for l in 0..d.count {
                    let steps = [(i, a), (j, b), (k, c), (l, d)];
                    let page: u64 = steps.iter().map(|(n, step)| n * step.segment_stride).sum();
                    let object: u64 = steps.iter().map(|(n, step)| n * step.arena_stride).sum();
                    visit(
                        copy.segment_offset + page,
                        copy.arena_offset + object,
                        copy.inner_bytes,
                    )?;
                }
            }
        }
    }
    Ok(())
}
