//! Engines whose pages are in host memory: POSIX shared-memory segments that the engine created.

use std::sync::Arc;
use std::time::Instant;

use kvtier_memory::{AffineCopy, ForeignSegment, SegmentError, copy_affine};

use crate::device::{ChunkCopy, Device, DeviceError, Done, EngineMemory, Transfer};
use crate::error::LayoutError;
use crate::layout::KvLayout;
use crate::physical::visit_block_runs;
use crate::plan::Direction;
use crate::spec::MemorySpec;

/// Copies handed to the executor at a time; bounds the memory a plan takes while it runs.
const BATCH: usize = 64;

/// The backend for `cpu_shm` tensors.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuDevice;

impl Device for CpuDevice {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn open(&self, layout: Arc<KvLayout>) -> Result<Box<dyn EngineMemory>, DeviceError> {
        let mut segments = Vec::with_capacity(layout.memories().len());
        for (index, memory) in layout.memories().iter().enumerate() {
            let MemorySpec::CpuShm { name, nbytes } = memory else {
                return Err(LayoutError::new(
                    format!("memory {index} of the engine"),
                    memory.kind(),
                    "cpu_shm (this server has no other device)",
                )
                .into());
            };
            let segment =
                ForeignSegment::open(name, *nbytes).map_err(|source| DeviceError::Open {
                    name: name.clone(),
                    source,
                })?;
            segments.push(segment);
        }
        layout.check_memories(|memory| segments[memory].len())?;
        Ok(Box::new(CpuMemory { layout, segments }))
    }
}

/// One worker's segments, mapped; each once, however many layers are in it.
struct CpuMemory {
    layout: Arc<KvLayout>,
    /// By index of [`KvLayout::memories`].
    segments: Vec<ForeignSegment>,
}

impl EngineMemory for CpuMemory {
    fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }

    fn is_current(&self) -> bool {
        self.segments.iter().all(ForeignSegment::is_current)
    }

    fn remove_orphans(&self) -> Vec<Result<String, SegmentError>> {
        let mut removed = Vec::new();
        for segment in &self.segments {
            match segment.unlink_if_orphan() {
                Ok(true) => removed.push(Ok(segment.name().to_owned())),
                Ok(false) => {}
                Err(error) => removed.push(Err(error)),
            }
        }
        removed
    }

    fn device(&self) -> &'static str {
        CpuDevice.name()
    }

    fn transfer(&self, transfer: Transfer, done: Done) {
        done(self.copy_all(&transfer, Instant::now));
    }

    /// The same: whoever asks for a copy in host memory has waited for its end with the answer.
    fn answer_event<'a>(&self, asked: &'a [u8]) -> &'a [u8] {
        asked
    }

    fn read_blocks(
        &self,
        layer: usize,
        block_ids: &[i64],
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), DeviceError> {
        let planes = self.layout.layer_planes(layer)?;
        let mut buffer = Vec::new();
        planes.visit_blocks(block_ids, |plane, id| {
            buffer.clear();
            let segment = &self.segments[plane.memory];
            visit_block_runs(plane, id, |at, bytes| {
                segment.read_into(at, bytes, &mut buffer)
            })?;
            sink(&buffer);
            Ok(())
        })
    }
}

impl CpuMemory {
    /// Copies one chunk after the other, and gives the bytes moved.
    fn copy_all(
        &self,
        transfer: &Transfer,
        clock: impl Fn() -> Instant,
    ) -> Result<u64, DeviceError> {
        let mut moved = 0;
        for chunk in &transfer.chunks {
            transfer.in_time(clock())?;
            moved += self.copy(transfer, *chunk)?;
        }
        transfer.in_time(clock())?;
        Ok(moved)
    }

    fn copy(&self, transfer: &Transfer, chunk: ChunkCopy) -> Result<u64, DeviceError> {
        let ChunkCopy { request, extent } = chunk;
        self.layout.check_extent(request.object_group, extent)?;
        let direction = match transfer.direction {
            Direction::Store => kvtier_memory::Direction::SegmentToArena,
            Direction::Retrieve => kvtier_memory::Direction::ArenaToSegment,
        };
        // Copies of one segment are handed over together.
        let mut batch: Vec<AffineCopy> = Vec::with_capacity(BATCH);
        let mut batch_memory = 0;
        let mut moved = 0;
        let mut flush = |memory: usize, batch: &mut Vec<AffineCopy>| -> Result<(), DeviceError> {
            if !batch.is_empty() {
                let segment = &self.segments[memory];
                moved += copy_affine(segment, &transfer.arena, extent, direction, batch)?;
                batch.clear();
            }
            Ok(())
        };
        self.layout
            .visit_chunk(&transfer.blocks, request, |planned| {
                if planned.memory != batch_memory || batch.len() == BATCH {
                    flush(batch_memory, &mut batch)?;
                    batch_memory = planned.memory;
                }
                batch.push(planned.copy);
                Ok::<(), DeviceError>(())
            })?;
        flush(batch_memory, &mut batch)?;
        Ok(moved)
    }
}
