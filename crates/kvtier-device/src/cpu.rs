//! Engines whose pages are in host memory: POSIX shared-memory segments that the engine created.

use std::sync::Arc;
use std::time::Instant;

use kvtier_memory::{AffineCopy, CopyLoop, ForeignSegment, SegmentError, copy_affine};

use crate::blocks::checked_id;
use crate::device::{ChunkCopy, Device, DeviceError, Done, EngineMemory, Transfer};
use crate::error::{LayoutError, PlanError};
use crate::geometry::{Part, Plane};
use crate::layout::KvLayout;
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
        let memory = CpuMemory { layout, segments };
        memory.check_bounds()?;
        Ok(Box::new(memory))
    }
}

/// One worker's segments, mapped; each once, however many layers are in it.
struct CpuMemory {
    layout: Arc<KvLayout>,
    /// By index of [`KvLayout::memories`].
    segments: Vec<ForeignSegment>,
}

impl CpuMemory {
    /// Every block of every plane lies inside what was really mapped. The layout proved it for the
    /// sizes the engine stated; this holds it against the segments themselves.
    fn check_bounds(&self) -> Result<(), DeviceError> {
        for group in self.layout.kernel_groups() {
            for (index, plane) in group.planes.iter().enumerate() {
                let limit = self.segments[plane.memory].len();
                let end = plane.end(group.num_blocks);
                if end.is_none_or(|end| end > limit) {
                    let layer = group.layer_indices[index % group.layer_indices.len()];
                    return Err(LayoutError::new(
                        format!("kv_caches[{layer}]"),
                        format!("{end:?} bytes into {}", self.segments[plane.memory].name()),
                        format!("at most {limit}, the bytes of the segment"),
                    )
                    .into());
                }
            }
        }
        Ok(())
    }
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
        let ids = block_ids
            .iter()
            .enumerate()
            .map(|(position, id)| {
                checked_id(*id, planes.num_blocks).ok_or(PlanError::BlockOutOfRange {
                    group: planes.group,
                    position,
                    id: *id,
                    num_blocks: planes.num_blocks,
                })
            })
            .collect::<Result<Vec<u32>, _>>()?;
        let mut buffer = Vec::new();
        let mut read = |plane: &Plane, id: u32| {
            buffer.clear();
            self.read_block(plane, id, &mut buffer)?;
            sink(&buffer);
            Ok::<(), DeviceError>(())
        };
        if planes.planes_outside_blocks {
            for plane in &planes.planes {
                for id in &ids {
                    read(plane, *id)?;
                }
            }
        } else {
            for id in &ids {
                for plane in &planes.planes {
                    read(plane, *id)?;
                }
            }
        }
        Ok(())
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

    /// Appends one block of one plane in the order of the tensor's dimensions, which is that of
    /// descending strides.
    fn read_block(&self, plane: &Plane, id: u32, buffer: &mut Vec<u8>) -> Result<(), DeviceError> {
        let segment = &self.segments[plane.memory];
        let block = plane.base + u64::from(id) * plane.block_stride;
        for part in &plane.parts {
            let (bytes, [outer, inner]) = physical(part);
            for i in 0..outer.count {
                for j in 0..inner.count {
                    let at = block
                        + part.engine_offset
                        + i * outer.segment_stride
                        + j * inner.segment_stride;
                    segment.read_into(at, bytes, buffer)?;
                }
            }
        }
        Ok(())
    }
}

/// A part's loops in the engine's order, with what adjoins there as one run.
fn physical(part: &Part) -> (u64, [CopyLoop; 2]) {
    let mut loops = part.loops;
    loops.sort_by_key(|step| std::cmp::Reverse(step.segment_stride));
    let mut bytes = part.bytes;
    for step in loops.iter_mut().rev() {
        if step.count > 1 {
            if step.segment_stride != bytes {
                break;
            }
            bytes *= step.count;
        }
        *step = CopyLoop::ONCE;
    }
    (bytes, loops)
}
