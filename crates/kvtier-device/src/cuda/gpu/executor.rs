//! Executors (ways of copying) and the copy lane of one direction, which submits pieces to its streams.

use std::ffi::{CString, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::device_copy::{DeviceCopies, DeviceCopy, PieceLimits, PinnedPieces};
use super::super::driver::{
    Attribute, Context, CopyBatch, DeviceBuffer, DevicePtr, Event, EventFlags, Grid, HostBuffer,
    Kernel, Module, SourceOrder, Stream,
};
use super::super::error::CudaError;
use super::super::events::{ExportedEvents, TIMELINE_BYTES, TimelineSlot};
use super::super::kernel::{KernelPlan, PTX, THREADS, Unit};
use super::staging::StagedRanges;
use crate::plan::Direction;
use kvtier_memory::CopyLoop;

/// Pieces of one direction in flight. With [`PIECE`] they are a millisecond of work on a link of 55 GB/s, so the link
/// stays busy while the thread does other work.
pub(super) const SLOTS: usize = 4;
/// Limits of a piece. The runs, a multiple of 16, are limited because the copy engines take a microsecond or more per run,
/// and the thread does nothing else while it submits a piece.
pub(super) const PIECE: PieceLimits = PieceLimits {
    bytes: 16 << 20,
    runs: 16 << 10,
    copies: 4096,
};
/// Bytes for the items and tiles of a piece: 96 per copy, 16 per tile of 16 KiB, and at most one more tile per copy.
const PLAN_BYTES: usize = PIECE.copies * (96 + 16) + (PIECE.bytes as usize >> 14) * 16 + 4096;
/// Staging bytes of a piece on the GPU, with padding to keep each range's alignment modulo 16 of the arena.
const STAGING_BYTES: u64 = PIECE.bytes + (PIECE.copies as u64) * 32;
/// Blocks of a kernel that accesses host memory: with 32 KiB in flight in each they saturate a link of 64 GB/s with a
/// latency of 2 us four times over.
const LINK_BLOCKS: u32 = 16;
/// Blocks of a kernel that accesses only GPU memory.
const LOCAL_BLOCKS: u32 = 64;

/// A way of copying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Executor {
    /// Copy engines, one call for all runs of a piece (drivers since CUDA 12.8).
    Batch,
    /// The copy kernel between pages and a staging buffer on the GPU, copy engines between that and the host.
    Staged,
    /// The copy kernel, directly between pages and pinned host memory.
    Kernel,
    /// Copy engines, one call per run.
    Plain,
}

impl Executor {
    /// All executors. Of two that are equally fast, the first interferes less with a concurrently running model.
    pub const ALL: [Self; 4] = [Self::Batch, Self::Staged, Self::Kernel, Self::Plain];

    /// The executor to use in its place for such host memory.
    pub(super) fn with(self, host: HostMemory) -> Self {
        match self {
            Self::Batch if host < HostMemory::Pinned => Self::Plain,
            Self::Kernel if host < HostMemory::Mapped => Self::Staged,
            any => any,
        }
    }

    /// Name in metrics, `/status` and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::Kernel => "kernel",
            Self::Staged => "staged",
            Self::Plain => "plain",
        }
    }
}

/// Properties of the host memory of a piece, each level including the previous one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum HostMemory {
    /// Ordinary memory.
    #[default]
    Pageable,
    /// Pinned memory.
    Pinned,
    /// Each chunk in one pinned piece, at equal addresses on host and GPU.
    Mapped,
}

impl HostMemory {
    /// The level of registered memory on a GPU.
    pub fn of_registered(context: &Context, start: NonNull<u8>) -> Self {
        let device = context.device();
        let own = device.attribute(Attribute::HostPointersOfRegisteredMemory);
        let seen = context.host_device_pointer(start);
        if own == Ok(1) && seen == Ok(DevicePtr(start.as_ptr() as u64)) {
            Self::Mapped
        } else {
            Self::Pinned
        }
    }
}

/// Context and loaded kernels of a GPU.
#[derive(Debug)]
pub(super) struct Tools {
    pub context: Arc<Context>,
    /// In the order of [`Unit::ALL`].
    kernels: Result<Vec<Kernel>, CudaError>,
}

impl Tools {
    /// Loads the kernels. A failure is not an error, because other executors need none.
    pub fn find(context: &Arc<Context>) -> Self {
        Self {
            context: Arc::clone(context),
            kernels: load_kernels(context),
        }
    }

    /// Why an executor is unavailable on this GPU.
    pub fn obstacle(&self, executor: Executor) -> Option<String> {
        match (executor, &self.kernels) {
            (Executor::Plain, _) => None,
            (Executor::Batch, _) => (!self.context.driver().has_batch_copy())
                .then(|| "the driver is older than CUDA 12.8".to_owned()),
            (Executor::Kernel | Executor::Staged, kernels) => {
                kernels.as_ref().err().map(ToString::to_string)
            }
        }
    }
}

fn load_kernels(context: &Arc<Context>) -> Result<Vec<Kernel>, CudaError> {
    let text = |text: &str| {
        // Our texts contain no zero bytes; an empty name fails to load.
        CString::new(text).unwrap_or_default()
    };
    // SAFETY: the text is part of this crate.
    let module = unsafe { Module::load(context, &text(PTX)) }?;
    let kernel = |unit: Unit| module.kernel(&text(unit.kernel()));
    Unit::ALL.into_iter().map(kernel).collect()
}

/// The streams of one direction and the slots of its pieces in flight.
#[derive(Debug)]
pub(super) struct CopyLane {
    tools: Arc<Tools>,
    direction: Direction,
    stream: Stream,
    /// Stream of the kernels of [`Executor::Staged`], which run concurrently with the copies of other pieces.
    kernels: Stream,
    /// Slot of the last piece whose final step is on `kernels`.
    last_on_kernels: Option<usize>,
    slots: Vec<PieceSlot>,
    batch: CopyBatch,
    plan: KernelPlan,
    staged: DeviceCopies,
    whole: DeviceCopies,
    ranges: StagedRanges,
    /// When the GPU last had no memory for a staging buffer; `None` after a success.
    staging_refused_at: Option<Instant>,
}

/// Memory that a kernel accesses besides pages.
#[derive(Debug, Clone, Copy)]
enum KernelTarget {
    /// Pinned memory of the host.
    Host,
    /// Staging buffer on the GPU.
    Gpu,
}

/// Resources of one piece until it is done.
#[derive(Debug)]
struct PieceSlot {
    done: Event,
    /// Completes after the first step of a staged piece.
    half: Event,
    /// Whether `done` was recorded for the piece; recording may fail.
    recorded: bool,
    /// Memory from which the kernel reads its plan, if the kernel is loaded.
    plan: Option<HostBuffer>,
    /// Allocated on first use by [`CopyLane::has_staging_buffer`].
    staging: Option<DeviceBuffer>,
}

impl CopyLane {
    /// Creates the streams. Retrieves have the higher priority, because engines wait for their bytes.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(tools: &Arc<Tools>, direction: Direction, slots: usize) -> Result<Self, CudaError> {
        let priority = match direction {
            Direction::Retrieve => i32::MIN,
            Direction::Store => 0,
        };
        let context = &tools.context;
        let plan = || HostBuffer::new(context, PLAN_BYTES);
        let slot = |_| {
            Ok(PieceSlot {
                done: Event::new(context, EventFlags::Plain)?,
                half: Event::new(context, EventFlags::Plain)?,
                recorded: true,
                plan: tools.kernels.is_ok().then(plan).transpose()?,
                staging: None,
            })
        };
        Ok(Self {
            stream: Stream::new(context, priority)?,
            kernels: Stream::new(context, priority)?,
            last_on_kernels: None,
            slots: (0..slots).map(slot).collect::<Result<_, CudaError>>()?,
            tools: Arc::clone(tools),
            direction,
            batch: CopyBatch::default(),
            plan: KernelPlan::default(),
            staged: DeviceCopies::default(),
            whole: DeviceCopies::default(),
            ranges: StagedRanges::default(),
            staging_refused_at: None,
        })
    }

    /// Maximum pieces in flight.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Whether a slot has the staging buffer that [`Executor::Staged`] needs. A missing one is allocated, unless an
    /// allocation failed within `pause`: an engine may have taken all GPU memory, and a failing allocation takes longer
    /// than a piece.
    ///
    /// # Errors
    /// Driver errors that [end the context](CudaError::ends_context).
    pub fn has_staging_buffer(
        &mut self,
        slot: usize,
        now: Instant,
        pause: Duration,
    ) -> Result<bool, CudaError> {
        let place = &mut self.slots[slot].staging;
        let waits = |since: Instant| now.saturating_duration_since(since) < pause;
        if place.is_some() || self.staging_refused_at.is_some_and(waits) {
            return Ok(place.is_some());
        }
        match DeviceBuffer::new(&self.tools.context, STAGING_BYTES) {
            Ok(buffer) => {
                *place = Some(buffer);
                self.staging_refused_at = None;
            }
            Err(error) if error.ends_context() => return Err(error),
            Err(error) => {
                if self.staging_refused_at.replace(now).is_none() {
                    let direction = self.direction;
                    tracing::warn!(
                        gpu = self.tools.context.device().ordinal(),
                        ?direction,
                        %error,
                        "no GPU memory for a staging buffer; copying without until there is"
                    );
                }
            }
        }
        Ok(place.is_some())
    }

    /// Submits a piece; returns the executor used, which differs from the chosen one if that does not support the piece.
    /// The slot is in use until [`CopyLane::is_done`], also after an error.
    ///
    /// # Errors
    /// The driver's error. Part of the piece may have been started.
    ///
    /// # Safety
    /// The context is current. Every address of the copies is valid until the slot is done, the host's also for the GPU if
    /// the executor is [`Executor::Kernel`]. The slot is done.
    pub unsafe fn submit(
        &mut self,
        slot: usize,
        executor: Executor,
        copies: &DeviceCopies,
        pieces: PinnedPieces,
    ) -> Result<Executor, CudaError> {
        // SAFETY: promised by the caller.
        let submitted = self.keep_order(executor).and_then(|()| unsafe {
            match executor {
                Executor::Plain => self.plain(copies, pieces).map(|()| Executor::Plain),
                Executor::Batch => self.batch(copies, pieces).map(|()| Executor::Batch),
                Executor::Kernel => self
                    .launch(slot, copies, KernelTarget::Host)
                    .map(|()| Executor::Kernel),
                Executor::Staged => self.staged(slot, copies, pieces),
            }
        });
        let last_on_kernels =
            self.direction == Direction::Retrieve && submitted == Ok(Executor::Staged);
        if last_on_kernels {
            self.last_on_kernels = Some(slot);
        }
        let done = &self.slots[slot].done;
        let recorded = match &submitted {
            Ok(_) if last_on_kernels => done.record(&self.kernels),
            Ok(_) => done.record(&self.stream),
            // Started parts may be on either stream.
            Err(_) => self
                .step(slot, &self.kernels, &self.stream)
                .and_then(|()| done.record(&self.stream)),
        };
        self.slots[slot].recorded = recorded.is_ok();
        submitted.and_then(|used| recorded.map(|()| used))
    }

    /// Records an event after all submitted pieces and returns its handle.
    ///
    /// # Errors
    /// The driver's error.
    pub fn export_event(&self, exported: &ExportedEvents) -> Result<[u8; 64], CudaError> {
        self.join()?;
        exported.record(&self.stream)
    }

    /// Records a timeline event after all submitted pieces. `slot` has no other stream.
    ///
    /// # Errors
    /// The driver's error.
    pub fn export_timeline_event(
        &self,
        slot: &TimelineSlot,
    ) -> Result<[u8; TIMELINE_BYTES], CudaError> {
        self.join()?;
        slot.record(&self.stream)
    }

    /// Keeps writes to pages in submission order: a piece whose last step is on `stream` waits for those whose last step is
    /// on `kernels`.
    fn keep_order(&mut self, executor: Executor) -> Result<(), CudaError> {
        if executor != Executor::Staged {
            self.join()?;
            self.last_on_kernels = None;
        }
        Ok(())
    }

    /// Makes later work of `stream` wait for all pieces. If the slot has been reused since, its piece has ended.
    fn join(&self) -> Result<(), CudaError> {
        match self.last_on_kernels {
            Some(slot) => self.stream.wait_event(&self.slots[slot].done),
            None => Ok(()),
        }
    }

    /// Whether all submitted work is done.
    ///
    /// # Errors
    /// The driver's error about it.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        Ok(self.stream.is_idle()? && self.kernels.is_idle()?)
    }

    /// Whether the piece in a slot is done.
    ///
    /// # Errors
    /// The driver's error about it. Unless that [ends the context](CudaError::ends_context), the piece may still run.
    pub fn is_done(&self, slot: usize) -> Result<bool, CudaError> {
        let slot = &self.slots[slot];
        if slot.recorded {
            slot.done.is_complete()
        } else {
            self.is_idle()
        }
    }

    /// Waits for all submitted work.
    ///
    /// # Errors
    /// The driver's error about it.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.stream.synchronize()?;
        self.kernels.synchronize()
    }

    /// Frees the staging buffers. All submitted work must be done.
    pub fn drop_staging(&mut self) {
        for slot in &mut self.slots {
            slot.staging = None;
        }
    }

    unsafe fn plain(&self, copies: &DeviceCopies, pieces: PinnedPieces) -> Result<(), CudaError> {
        copies.visit_runs(pieces, |run| {
            let (source, target) = run.source_and_target(self.direction);
            // SAFETY: promised by the caller of `submit`.
            unsafe { self.stream.copy(target, source, run.bytes as usize) }
        })
    }

    unsafe fn batch(
        &mut self,
        copies: &DeviceCopies,
        pieces: PinnedPieces,
    ) -> Result<(), CudaError> {
        self.batch.clear();
        let Self {
            batch, direction, ..
        } = self;
        let collected: Result<(), std::convert::Infallible> = copies.visit_runs(pieces, |run| {
            let (source, target) = run.source_and_target(*direction);
            batch.push(target, source, run.bytes as usize);
            Ok(())
        });
        let Ok(()) = collected;
        // SAFETY: promised by the caller of `submit`. The sources are not written: pages are ready before any of their
        // copies is submitted, and objects are read-only while leased.
        unsafe { self.stream.copy_batch(&self.batch, SourceOrder::Any) }
    }

    /// Launches the kernel for copies within the limits of a [`PIECE`].
    unsafe fn launch(
        &mut self,
        slot: usize,
        copies: &DeviceCopies,
        target: KernelTarget,
    ) -> Result<(), CudaError> {
        let (stream, most_blocks) = match target {
            KernelTarget::Host => (&self.stream, LINK_BLOCKS),
            KernelTarget::Gpu => (&self.kernels, LOCAL_BLOCKS),
        };
        let kernels = self.tools.kernels.as_ref().map_err(Clone::clone)?;
        self.plan.clear();
        self.plan.push(copies.as_slice(), self.direction);
        let Some(host) = &self.slots[slot].plan else {
            return Err(CudaError::Missing { function: "kvcopy" });
        };
        let mut used = 0;
        for (unit, work) in self.plan.launches() {
            // Memory that the driver allocated has one address for host and GPU.
            let mut place = |bytes: &[u8]| -> Result<u64, CudaError> {
                let at = used;
                if bytes.len() > PLAN_BYTES - at {
                    return Err(CudaError::Call {
                        function: "a launch",
                        code: 1,
                        name: format!("a plan of more than {PLAN_BYTES} bytes"),
                    });
                }
                used = at + bytes.len();
                // SAFETY: the size was just checked, and the slot's previous piece is done.
                unsafe {
                    let to = host.base().as_ptr().add(at);
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
                    Ok(to as u64)
                }
            };
            // Both have sizes that are multiples of 16 bytes, their alignment.
            let mut items = place(work.item_bytes())?;
            let mut tiles = place(work.tile_bytes())?;
            let mut count = work.tiles().len() as u32;
            let grid = Grid {
                blocks: work.blocks(most_blocks),
                threads: THREADS,
            };
            let mut arguments: [*mut c_void; 3] = [
                (&raw mut items).cast(),
                (&raw mut tiles).cast(),
                (&raw mut count).cast(),
            ];
            // SAFETY: these are the kernel's three parameters; the lists are unchanged until the slot is done, and the
            // caller of `submit` promises for the addresses in them.
            unsafe { kernels[unit as usize].launch(stream, grid, &mut arguments) }?;
        }
        Ok(())
    }

    unsafe fn staged(
        &mut self,
        slot: usize,
        copies: &DeviceCopies,
        pieces: PinnedPieces,
    ) -> Result<Executor, CudaError> {
        let staged = self.slots[slot].staging.as_ref().is_some_and(|buffer| {
            self.ranges
                .fill(copies.as_slice(), buffer.base().0, STAGING_BYTES)
        });
        if !staged {
            self.keep_order(Executor::Plain)?;
            // SAFETY: as for this function.
            return unsafe { self.plain(copies, pieces) }.map(|()| Executor::Plain);
        }
        let (mut staged, mut whole) = (
            std::mem::take(&mut self.staged),
            std::mem::take(&mut self.whole),
        );
        staged.clear();
        whole.clear();
        for copy in copies.as_slice() {
            let host = self.ranges.staged(copy.host);
            staged.push(DeviceCopy { host, ..*copy });
        }
        for range in self.ranges.all() {
            whole.push(DeviceCopy {
                engine: range.staged,
                host: range.host,
                inner_bytes: range.bytes,
                loops: [CopyLoop::ONCE; 3],
            });
        }
        // SAFETY: the buffer fits all ranges and belongs to this slot; the rest as for this function.
        let put = unsafe {
            match self.direction {
                Direction::Store => self
                    .launch(slot, &staged, KernelTarget::Gpu)
                    .and_then(|()| self.step(slot, &self.kernels, &self.stream))
                    .and_then(|()| self.plain(&whole, pieces)),
                Direction::Retrieve => self
                    .plain(&whole, pieces)
                    .and_then(|()| self.step(slot, &self.stream, &self.kernels))
                    .and_then(|()| self.launch(slot, &staged, KernelTarget::Gpu)),
            }
        };
        (self.staged, self.whole) = (staged, whole);
        put.map(|()| Executor::Staged)
    }

    /// Makes later work of `then` wait for the work on `first`.
    fn step(&self, slot: usize, first: &Stream, then: &Stream) -> Result<(), CudaError> {
        let half = &self.slots[slot].half;
        half.record(first)?;
        then.wait_event(half)
    }
}

impl Drop for CopyLane {
    /// Leaks resources that the streams may still use.
    fn drop(&mut self) {
        let _current = self.tools.context.enter();
        let in_use = match self.is_idle() {
            Ok(idle) => !idle,
            Err(error) => !error.ends_context(),
        };
        if in_use {
            std::mem::forget(std::mem::take(&mut self.slots));
            // The kernels too.
            std::mem::forget(Arc::clone(&self.tools));
        }
    }
}
