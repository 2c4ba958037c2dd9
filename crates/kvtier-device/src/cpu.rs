//! CPU backend: engine pages in POSIX shared-memory segments that the engine created.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvtier_memory::{AffineCopy, ForeignSegment, copy_affine};

use crate::device::{ChunkCopy, Device, DeviceError, Done, EngineMemory, Transfer, check_deadline};
use crate::error::LayoutError;
use crate::layout::KvLayout;
use crate::physical::visit_block_runs;
use crate::placement::Placement;
use crate::plan::Direction;
use crate::spec::MemorySpec;

/// Maximum copies per batch; bounds the memory of a running plan.
const BATCH: usize = 64;

/// Maximum bytes per batch, and so the most that is moved after a deadline. A batch takes about 30 us; reading the clock
/// before it takes about 30 ns.
const BATCH_BYTES: u64 = 256 << 10;

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
            let mut segment =
                ForeignSegment::open(name, *nbytes).map_err(|source| DeviceError::Open {
                    name: name.clone(),
                    source,
                })?;
            // [`CpuMemory::has_ended`] asks the first.
            if index > 0 {
                segment.close_file();
            }
            segments.push(segment);
        }
        layout.check_memories(|memory| segments[memory].len())?;
        Ok(Box::new(CpuMemory {
            layout,
            segments,
            has_stopped: AtomicBool::new(false),
        }))
    }
}

/// The mapped segments of one worker, each once for all its layers.
struct CpuMemory {
    layout: Arc<KvLayout>,
    /// By index of [`KvLayout::memories`].
    segments: Vec<ForeignSegment>,
    /// No batch starts any more.
    has_stopped: AtomicBool,
}

impl EngineMemory for CpuMemory {
    fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }

    fn is_current(&self) -> bool {
        self.segments.iter().all(ForeignSegment::is_current)
    }

    fn identity(&self) -> Vec<u64> {
        self.segments
            .iter()
            .flat_map(ForeignSegment::identity)
            .collect()
    }

    /// Tests one segment: all are of one engine.
    fn has_ended(&self) -> bool {
        let first = self.segments.first();
        first.is_some_and(ForeignSegment::is_orphan)
    }

    fn device(&self) -> &'static str {
        CpuDevice.name()
    }

    fn transfer(&self, transfer: Transfer, done: Done) {
        done(self.copy_all(&transfer, Instant::now));
    }

    fn place(&self, placement: Placement, done: Done) {
        done(self.place_all(&placement, Instant::now));
    }

    /// Starts no more copies; running transfers end after their current batch, because a partial transfer is useless.
    fn stop(&self) {
        self.has_stopped.store(true, Ordering::SeqCst);
    }

    /// The request's own event: a copy in host memory is done before the answer.
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
    /// Copies all chunks in order and returns the bytes moved.
    fn copy_all(
        &self,
        transfer: &Transfer,
        clock: impl Fn() -> Instant,
    ) -> Result<u64, DeviceError> {
        let mut moved = 0;
        for chunk in &transfer.chunks {
            moved += self.copy(transfer, *chunk, &clock)?;
        }
        self.check_running(transfer.deadline, &clock)?;
        Ok(moved)
    }

    /// Writes all segments in order and returns the bytes moved.
    fn place_all(
        &self,
        placement: &Placement,
        clock: impl Fn() -> Instant,
    ) -> Result<u64, DeviceError> {
        let mut moved = 0;
        placement.visit_batches(&self.layout, BATCH_BYTES, |batch| {
            self.check_running(placement.deadline, &clock)?;
            let (rows, to) = (&batch.rows, kvtier_memory::Direction::ArenaToSegment);
            for planned in &batch.copies {
                let (segment, copies) = (&self.segments[planned.memory], [planned.copy]);
                moved += copy_affine(segment, rows, rows.whole(), to, &copies)?;
            }
            Ok(())
        })?;
        self.check_running(placement.deadline, &clock)?;
        Ok(moved)
    }

    fn check_running(
        &self,
        deadline: Option<Instant>,
        clock: impl Fn() -> Instant,
    ) -> Result<(), DeviceError> {
        if self.has_stopped.load(Ordering::SeqCst) {
            return Err(DeviceError::Stopped);
        }
        check_deadline(deadline, clock())
    }

    fn copy(
        &self,
        transfer: &Transfer,
        chunk: ChunkCopy,
        clock: impl Fn() -> Instant,
    ) -> Result<u64, DeviceError> {
        let ChunkCopy { request, extent } = chunk;
        self.layout.check_extent(request.object_group, extent.len)?;
        let direction = match transfer.direction {
            Direction::Store => kvtier_memory::Direction::SegmentToArena,
            Direction::Retrieve => kvtier_memory::Direction::ArenaToSegment,
        };
        // A batch has copies of one segment.
        let mut batch: Vec<AffineCopy> = Vec::with_capacity(BATCH);
        let mut batch_memory = 0;
        let mut batch_bytes = 0;
        let mut moved = 0;
        let mut flush = |memory: usize, batch: &mut Vec<AffineCopy>| -> Result<(), DeviceError> {
            if !batch.is_empty() {
                self.check_running(transfer.deadline, &clock)?;
                let segment = &self.segments[memory];
                moved += copy_affine(segment, &transfer.arena, extent, direction, batch)?;
                batch.clear();
            }
            Ok(())
        };
        request.visit_copies(&self.layout, &transfer.blocks, |planned| {
            visit_pieces(&planned.copy, &mut |piece, bytes| {
                let is_full = batch.len() == BATCH || batch_bytes + bytes > BATCH_BYTES;
                if planned.memory != batch_memory || is_full {
                    flush(batch_memory, &mut batch)?;
                    batch_memory = planned.memory;
                    batch_bytes = 0;
                }
                batch.push(piece);
                batch_bytes += bytes;
                Ok::<(), DeviceError>(())
            })
        })?;
        flush(batch_memory, &mut batch)?;
        Ok(moved)
    }
}

/// Passes `visit` a copy in pieces of at most [`BATCH_BYTES`], in order, with their bytes.
fn visit_pieces<E>(
    copy: &AffineCopy,
    visit: &mut impl FnMut(AffineCopy, u64) -> Result<(), E>,
) -> Result<(), E> {
    // The execution refuses a copy that is larger than any object.
    let bytes = copy.bytes().unwrap_or(u64::MAX);
    if bytes <= BATCH_BYTES {
        return visit(*copy, bytes);
    }
    // Steps of the outermost loop, or bytes of the run where there is no loop.
    let outer = copy.loops.iter().position(|step| step.count > 1);
    let (count, segment_stride, arena_stride) = match outer {
        Some(at) => {
            let step = copy.loops[at];
            (step.count, step.segment_stride, step.arena_stride)
        }
        None => (copy.inner_bytes, 1, 1),
    };
    let most = (BATCH_BYTES / (bytes / count)).max(1);
    let mut done = 0;
    while done < count {
        let taken = most.min(count - done);
        let mut piece = *copy;
        match outer {
            Some(at) => piece.loops[at].count = taken,
            None => piece.inner_bytes = taken,
        }
        piece.segment_offset = copy.segment_offset.saturating_add(done * segment_stride);
        piece.arena_offset = copy.arena_offset.saturating_add(done * arena_stride);
        visit_pieces(&piece, visit)?;
        done += taken;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use kvtier_memory::{Arena, ArenaKind, CopyLoop, Extent, OwnSegment};

    use super::*;
    use crate::plan::ChunkRequest;
    use crate::spec::TensorSpec;
    use crate::{
        BlockTable, Engine, GroupRope, KvQuant, LayoutHints, PromptBlocks, Rope, SegmentCopy,
    };

    const CHUNK: u64 = 4 << 20;

    /// One chunk of 4 MiB of zeroes in one run, and a retrieve with `deadline` that sets it to ones.
    fn case(deadline: Instant) -> (OwnSegment, CpuMemory, Transfer) {
        let segment = OwnSegment::create(2 * CHUNK).unwrap();
        let tensor = TensorSpec {
            memory: MemorySpec::CpuShm {
                name: segment.name().to_owned(),
                nbytes: 2 * CHUNK,
            },
            dtype_size: 1,
            dtype_name: "uint8".to_owned(),
            shape: vec![2, 16, CHUNK / 16],
            stride: vec![CHUNK, CHUNK / 16, 1],
            storage_offset: 0,
        };
        let layout = KvLayout::detect(
            &[tensor],
            Engine::Vllm,
            &LayoutHints::default(),
            &[],
            16,
            true,
        );
        let layout = Arc::new(layout.unwrap());
        let memory = CpuMemory {
            segments: vec![ForeignSegment::open(segment.name(), 2 * CHUNK).unwrap()],
            layout: Arc::clone(&layout),
            has_stopped: AtomicBool::new(false),
        };
        let arena = Arena::create(ArenaKind::Anonymous, CHUNK).unwrap();
        let extent = Extent::new(0, CHUNK);
        arena.write(extent, 0, &vec![1; CHUNK as usize]).unwrap();
        let request = ChunkRequest {
            object_group: 0,
            chunk: 0,
            skip_tokens: 0,
        };
        let transfer = Transfer {
            arena: Arc::new(arena),
            blocks: BlockTable::check(&layout, &[[1i64]], 1).unwrap(),
            chunks: vec![ChunkCopy { request, extent }],
            direction: Direction::Retrieve,
            deadline: Some(deadline),
            event: Vec::new(),
        };
        (segment, memory, transfer)
    }

    fn written(segment: &OwnSegment) -> u64 {
        let mut bytes = Vec::new();
        let segment = segment.as_segment();
        segment.read_into(0, segment.len(), &mut bytes).unwrap();
        bytes.iter().filter(|byte| **byte == 1).count() as u64
    }

    #[test]
    fn paused_transfer_writes_no_batch_after_its_deadline() {
        let start = Instant::now();
        let deadline = start + Duration::from_secs(5);
        let (segment, memory, transfer) = case(deadline);
        let clock_reads = Cell::new(0);
        // The third reading of the clock is an hour later.
        let clock = || {
            clock_reads.set(clock_reads.get() + 1);
            start + Duration::from_secs(if clock_reads.get() < 3 { 1 } else { 3600 })
        };
        let end = memory.copy_all(&transfer, clock);
        assert!(matches!(end, Err(DeviceError::DeadlinePassed)), "{end:?}");
        assert_eq!(written(&segment), 2 * BATCH_BYTES);
        // With time left, every byte is written.
        assert_eq!(memory.copy_all(&transfer, || start).unwrap(), CHUNK);
        assert_eq!(written(&segment), CHUNK);
    }

    #[test]
    fn paused_placement_writes_no_batch_after_its_deadline() {
        let start = Instant::now();
        let (segment, memory, transfer) = case(start + Duration::from_secs(5));
        let groups = vec![GroupRope {
            table: None,
            window: [0, 0],
            head_size: 0,
            neox: true,
            quant: KvQuant::None,
        }];
        let placement = Placement {
            arena: transfer.arena,
            blocks: PromptBlocks::check(&memory.layout, &[[1i64]]).unwrap(),
            // A row is a batch.
            segments: vec![SegmentCopy {
                object_group: 0,
                extent: transfer.chunks[0].extent,
                old_start: 7,
                start: 0,
                tokens: 16,
            }],
            rope: Arc::new(Rope::check(&memory.layout, Vec::new(), groups).unwrap()),
            deadline: transfer.deadline,
            event: Vec::new(),
        };
        let clock_reads = Cell::new(0);
        let clock = || {
            clock_reads.set(clock_reads.get() + 1);
            start + Duration::from_secs(if clock_reads.get() < 3 { 1 } else { 3600 })
        };
        let end = memory.place_all(&placement, clock);
        assert!(matches!(end, Err(DeviceError::DeadlinePassed)), "{end:?}");
        assert_eq!(written(&segment), 2 * BATCH_BYTES);
        assert_eq!(memory.place_all(&placement, || start).unwrap(), CHUNK);
        assert_eq!(written(&segment), CHUNK);
    }

    #[test]
    fn stop_ends_a_transfer_within_a_chunk() {
        let now = Instant::now();
        let (segment, memory, transfer) = case(now);
        let clock_reads = Cell::new(0);
        let clock = || {
            clock_reads.set(clock_reads.get() + 1);
            if clock_reads.get() == 3 {
                memory.stop();
            }
            now
        };
        let end = memory.copy_all(&transfer, clock);
        assert!(matches!(end, Err(DeviceError::Stopped)), "{end:?}");
        assert_eq!(written(&segment), 3 * BATCH_BYTES);
        let end = memory.copy_all(&transfer, || now);
        assert!(matches!(end, Err(DeviceError::Stopped)), "{end:?}");
    }

    #[test]
    fn pieces_cover_the_copy_in_order() {
        let step = |count, segment_stride, arena_stride| CopyLoop {
            count,
            segment_stride,
            arena_stride,
        };
        let runs = |copy: &AffineCopy| {
            let mut runs = Vec::new();
            let [a, b, c, d] = copy.loops;
            for i in 0..a.count {
                for j in 0..b.count {
                    for k in 0..c.count {
                        for l in 0..d.count {
                            let steps = [(i, a), (j, b), (k, c), (l, d)];
                            let at: u64 = steps.iter().map(|(n, s)| n * s.segment_stride).sum();
                            let to: u64 = steps.iter().map(|(n, s)| n * s.arena_stride).sum();
                            runs.push((
                                copy.segment_offset + at,
                                copy.arena_offset + to,
                                copy.inner_bytes,
                            ));
                        }
                    }
                }
            }
            runs
        };
        let loops = [step(3, 1 << 30, 1 << 20), step(37, 5 << 20, 1 << 14)];
        for (inner, copy) in [
            (1 << 14, AffineCopy::new(7, 11, 1 << 14, &loops)),
            (1000, AffineCopy::new(7, 11, 1000, &loops)),
        ] {
            let mut pieces = Vec::new();
            visit_pieces(&copy, &mut |piece, bytes| {
                assert!(bytes <= BATCH_BYTES);
                assert_eq!(piece.bytes(), Some(bytes));
                pieces.extend(runs(&piece));
                Ok::<(), ()>(())
            })
            .unwrap();
            assert_eq!(pieces, runs(&copy), "runs of {inner} bytes");
        }
        let mut end = 0;
        let long = AffineCopy::new(7, 11, (1 << 20) + 3, &[]);
        visit_pieces(&long, &mut |piece, bytes| {
            assert_eq!(
                (piece.segment_offset, piece.arena_offset),
                (7 + end, 11 + end)
            );
            end += bytes;
            Ok::<(), ()>(())
        })
        .unwrap();
        assert_eq!(end, (1 << 20) + 3);
    }
}
