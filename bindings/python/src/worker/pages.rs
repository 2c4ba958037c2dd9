//! The engine's KV pages in this process's memory, and the bytes of chunks in them.
//!
//! The lock guards whether the pages exist and is shared while a chunk is copied; no other is acquired inside.

use kvtier_common::sync::RwLock;
use kvtier_device::{BlockTable, ChunkRequest, KvLayout, PlanError, PlannedCopy};

/// The storage of one or several tensors.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    address: usize,
    bytes: usize,
}

impl Memory {
    /// # Safety
    /// `bytes` bytes at `address` stay readable and writable for as long as copies of this value are used, and only the
    /// engine and its connector write them.
    pub unsafe fn new(address: usize, bytes: usize) -> Self {
        Self { address, bytes }
    }

    /// The address of `len` bytes at `offset`. Panics unless they are all inside.
    fn locate(self, offset: u64, len: u64) -> *mut u8 {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.bytes as u64),
            "a plan leaves its memory: {len} bytes at {offset} of {}",
            self.bytes
        );
        // The engine exposed its memory by passing the address as a number.
        std::ptr::with_exposed_provenance_mut(self.address + offset as usize)
    }
}

/// Pages and their layout.
#[derive(Debug)]
pub struct Pages {
    pub layout: KvLayout,
    memories: Vec<Memory>,
    /// Whether the pages still exist; locked for reading while a chunk is copied.
    are_open: RwLock<bool>,
}

/// Error of copying a chunk.
pub enum CopyError<E> {
    /// The pages do not exist any more.
    Closed,
    Plan(PlanError),
    /// The error of the function that takes the bytes.
    Other(E),
}

impl<E> From<PlanError> for CopyError<E> {
    fn from(error: PlanError) -> Self {
        Self::Plan(error)
    }
}

impl Pages {
    /// `memories` are in the order of the layout's.
    pub fn new(layout: KvLayout, memories: Vec<Memory>) -> Self {
        Self {
            layout,
            memories,
            are_open: RwLock::new(true),
        }
    }

    /// Waits for the chunks that are being copied, and lets no other one be copied: the pages are about to be freed.
    pub fn close(&self) {
        *self.are_open.write() = false;
    }

    /// Bytes per chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.layout
            .object_groups()
            .iter()
            .map(|group| group.object_bytes)
            .sum()
    }

    /// Passes every piece of a chunk to `put`, with its offset in the chunk.
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
        let are_open = self.are_open.read();
        if !*are_open {
            return Err(CopyError::Closed);
        }
        request.visit_copies(&self.layout, blocks, |planned| {
            let memory = self.memories[planned.memory];
            each_run(planned, |page, object, len| {
                let from = memory.locate(page, len);
                // SAFETY: inside the memory; the engine does not write blocks that are being stored.
                let bytes = unsafe { std::slice::from_raw_parts(from.cast_const(), len as usize) };
                put(object, bytes).map_err(CopyError::Other)
            })
        })
    }

    /// Has `read` write every piece of a chunk, given its offset in the chunk, except the pages of the first `skip_tokens` of the
    /// request's range.
    pub fn scatter<E>(
        &self,
        blocks: &BlockTable,
        chunk: usize,
        skip_tokens: u64,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), CopyError<E>> {
        let request = ChunkRequest {
            object_group: 0,
            chunk,
            skip_tokens,
        };
        let are_open = self.are_open.read();
        if !*are_open {
            return Err(CopyError::Closed);
        }
        request.visit_copies(&self.layout, blocks, |planned| {
            let memory = self.memories[planned.memory];
            each_run(planned, |page, object, len| {
                let to = memory.locate(page, len);
                // SAFETY: inside the memory; the engine neither reads nor writes blocks that are being loaded.
                let to = unsafe { std::slice::from_raw_parts_mut(to, len as usize) };
                read(object, to).map_err(CopyError::Other)
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
