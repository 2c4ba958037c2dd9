//! The ways of copying, and the stream of one direction that they are put on.

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
use super::super::events::{ExportedEvents, Lane as TimelineLane, TIMELINE_BYTES};
use super::super::kernel::{KernelPlan, PTX, THREADS, Unit};
use super::staging::StagedRanges;
use crate::plan::Direction;
use kvtier_memory::CopyLoop;

/// Pieces of one direction that are handed to the GPU before the first is done. With [`PIECE`] they are a
/// millisecond of work on a link of 55 GB/s, so the link stays busy while the thread does something else.
pub(super) const SLOTS: usize = 4;
/// Bytes, runs and copies of a piece at most. The runs, a multiple of 16: the copy engines take a microsecond or more for
/// each, and the thread does nothing else while it starts a piece.
pub(super) const PIECE: PieceLimits = PieceLimits {
    bytes: 16 << 20,
    runs: 16 << 10,
    copies: 4096,
};
/// Room for the items and tiles of a piece: 96 bytes a copy, 16 a tile of 16 KiB, and at most one more tile a copy.
const PLAN_BYTES: usize = PIECE.copies * (96 + 16) + (PIECE.bytes as usize >> 14) * 16 + 4096;
/// Room for the bytes of a piece on the GPU, and for their places to be as far off 16 bytes as in the arena.
const STAGING_BYTES: u64 = PIECE.bytes + (PIECE.copies as u64) * 32;
/// Blocks of a kernel that reads or writes the host's memory: 32 KiB under way in each fill a link of 64 GB/s with a
/// latency of 2 us four times over.
const LINK_BLOCKS: u32 = 16;
/// Blocks of a kernel that stays on the GPU.
const LOCAL_BLOCKS: u32 = 64;

/// A way of copying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Executor {
    /// The copy engines, all runs of a piece by one call (drivers of CUDA 12.8 and later).
    Batch,
    /// Our kernel between pages and a buffer on the GPU, the copy engines between that and the host.
    Staged,
    /// Our kernel, straight between pages and pinned memory.
    Kernel,
    /// The copy engines, one call a run.
    Plain,
}

impl Executor {
    /// All of them. Of two that are as fast, the first disturbs a model that runs beside it less.
    pub const ALL: [Self; 4] = [Self::Batch, Self::Staged, Self::Kernel, Self::Plain];

    /// The one to use with such memory.
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

/// What the host's side of a piece is, each the one before it and more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum HostMemory {
    /// Memory as any other.
    #[default]
    Pageable,
    /// Pinned.
    Pinned,
    /// Each chunk in one pinned piece, and the GPU sees it at the host's own addresses.
    Mapped,
}

impl HostMemory {
    /// What registered memory is to a GPU.
    pub fn of_registered(context: &Context, start: NonNull<u8>) -> Self {
        let device = context.device();
        let own = device.attribute(Attribute::HostPointersOfRegisteredMemory);
        let seen = context.host_device_pointer(start);
        match own == Ok(1) && seen == Ok(DevicePtr(start.as_ptr() as u64)) {
            true => Self::Mapped,
            false => Self::Pinned,
        }
    }
}

/// What a GPU can copy with.
#[derive(Debug)]
pub(super) struct Tools {
    pub context: Arc<Context>,
    /// In the order of [`Unit::ALL`].
    kernels: Result<Vec<Kernel>, CudaError>,
}

impl Tools {
    /// Looks what there is. That the kernel cannot be loaded is no error: there are other ways.
    pub fn find(context: &Arc<Context>) -> Self {
        Self {
            context: Arc::clone(context),
            kernels: load_kernels(context),
        }
    }

    /// Why an executor cannot be used here at all.
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
        // Our own texts have no zero bytes; one that had is a kernel without a name.
        CString::new(text).unwrap_or_default()
    };
    // SAFETY: the text is ours.
    let module = unsafe { Module::load(context, &text(PTX)) }?;
    let kernel = |unit: Unit| module.kernel(&text(unit.kernel()));
    Unit::ALL.into_iter().map(kernel).collect()
}

/// The streams of one direction, and what its pieces need until they are done.
#[derive(Debug)]
pub(super) struct Lane {
    tools: Arc<Tools>,
    direction: Direction,
    stream: Stream,
    /// Of [`Executor::Staged`], whose kernel for one piece runs beside the copy of another one: the kernels.
    kernels: Stream,
    /// The slot of the last piece that ends there.
    beside: Option<usize>,
    slots: Vec<Slot>,
    batch: CopyBatch,
    plan: KernelPlan,
    staged: DeviceCopies,
    whole: DeviceCopies,
    ranges: StagedRanges,
    /// When the GPU had no memory for a buffer, until it has again.
    refused: Option<Instant>,
}

/// What a launch of the kernel touches beside pages.
#[derive(Debug, Clone, Copy)]
enum Reach {
    /// Pinned memory of the host.
    Host,
    /// A buffer on the GPU.
    Gpu,
}

/// What one piece needs until it is done.
#[derive(Debug)]
struct Slot {
    done: Event,
    /// The first of a staged piece's two steps is done.
    half: Event,
    /// Whether `done` stands for the piece. It could not be recorded otherwise.
    recorded: bool,
    /// Where the kernel reads its plan; there if there is a kernel.
    plan: Option<HostBuffer>,
    /// Made when there first has to be [room](Lane::has_room).
    staging: Option<DeviceBuffer>,
}

impl Lane {
    /// Streams of its own. The retrieves' go first: somebody waits for their bytes.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(tools: &Arc<Tools>, direction: Direction, slots: usize) -> Result<Self, CudaError> {
        let priority = match direction {
            Direction::Retrieve => i32::MIN,
            Direction::Store => 0,
        };
        let context = &tools.context;
        let plan = || context.allocate_host(PLAN_BYTES);
        let slot = |_| {
            Ok(Slot {
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
            beside: None,
            slots: (0..slots).map(slot).collect::<Result<_, CudaError>>()?,
            tools: Arc::clone(tools),
            direction,
            batch: CopyBatch::default(),
            plan: KernelPlan::default(),
            staged: DeviceCopies::default(),
            whole: DeviceCopies::default(),
            ranges: StagedRanges::default(),
            refused: None,
        })
    }

    /// How many pieces it can have under way.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Whether a slot has a buffer on the GPU, which [`Executor::Staged`] needs. One that it lacks is asked for now,
    /// but not within `pause` after the GPU had no memory for one: an engine may have taken all there is, and asking takes
    /// the driver longer than a piece.
    ///
    /// # Errors
    /// What the driver says when it [ends the context](CudaError::ends_context).
    pub fn has_room(
        &mut self,
        slot: usize,
        now: Instant,
        pause: Duration,
    ) -> Result<bool, CudaError> {
        let place = &mut self.slots[slot].staging;
        let waits = |since: Instant| now.saturating_duration_since(since) < pause;
        if place.is_some() || self.refused.is_some_and(waits) {
            return Ok(place.is_some());
        }
        match self.tools.context.allocate(STAGING_BYTES) {
            Ok(buffer) => {
                *place = Some(buffer);
                self.refused = None;
            }
            Err(error) if error.ends_context() => return Err(error),
            Err(error) => {
                if self.refused.replace(now).is_none() {
                    let direction = self.direction;
                    tracing::warn!(
                        gpu = self.tools.context.device().ordinal(),
                        ?direction,
                        %error,
                        "a GPU has no memory to stage copies in; until it has, they go without"
                    );
                }
            }
        }
        Ok(place.is_some())
    }

    /// Puts a piece on the streams; gives the executor that was used, which is another one where the piece does not
    /// suit the one that was chosen. Also on an error, the slot is in use until [`Lane::is_done`].
    ///
    /// # Errors
    /// What the driver says. Some of the piece may have been started.
    ///
    /// # Safety
    /// The context is current. Every address of the copies is good to read or write until the slot is done, the host's
    /// addresses also for the GPU if the executor is [`Executor::Kernel`]. The slot is done.
    pub unsafe fn put(
        &mut self,
        slot: usize,
        executor: Executor,
        copies: &DeviceCopies,
        pieces: PinnedPieces,
    ) -> Result<Executor, CudaError> {
        // SAFETY: promised by the caller.
        let put = self.keep_order(executor).and_then(|()| unsafe {
            match executor {
                Executor::Plain => self.plain(copies, pieces).map(|()| Executor::Plain),
                Executor::Batch => self.batch(copies, pieces).map(|()| Executor::Batch),
                Executor::Kernel => self
                    .launch(slot, copies, Reach::Host)
                    .map(|()| Executor::Kernel),
                Executor::Staged => self.staged(slot, copies, pieces),
            }
        });
        let beside = self.direction == Direction::Retrieve && put == Ok(Executor::Staged);
        if beside {
            self.beside = Some(slot);
        }
        let done = &self.slots[slot].done;
        let recorded = match &put {
            Ok(_) if beside => done.record(&self.kernels),
            Ok(_) => done.record(&self.stream),
            // What was started of it may be on either.
            Err(_) => self
                .step(slot, &self.kernels, &self.stream)
                .and_then(|()| done.record(&self.stream)),
        };
        self.slots[slot].recorded = recorded.is_ok();
        put.and_then(|used| recorded.map(|()| used))
    }

    /// The handle of an event that is complete when everything that is on the streams now is done.
    ///
    /// # Errors
    /// What the driver says.
    pub fn export_event(&self, exported: &ExportedEvents) -> Result<[u8; 64], CudaError> {
        self.join()?;
        exported.record(&self.stream)
    }

    /// The same as an event of isolated IPC. `numbers` is used for no other stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn export_number(&self, numbers: &TimelineLane) -> Result<[u8; TIMELINE_BYTES], CudaError> {
        self.join()?;
        numbers.record(&self.stream)
    }

    /// Pages are written in the order in which that was asked for: a piece whose last step is on the stream itself waits
    /// for those whose last step is beside it.
    fn keep_order(&mut self, executor: Executor) -> Result<(), CudaError> {
        if executor != Executor::Staged {
            self.join()?;
            self.beside = None;
        }
        Ok(())
    }

    /// What comes next on the stream waits for all pieces. If the slot was used again since, its piece had ended.
    fn join(&self) -> Result<(), CudaError> {
        match self.beside {
            Some(slot) => self.stream.wait_event(&self.slots[slot].done),
            None => Ok(()),
        }
    }

    /// Whether everything that was put on the streams is done.
    ///
    /// # Errors
    /// What the driver says about it.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        Ok(self.stream.is_idle()? && self.kernels.is_idle()?)
    }

    /// Whether the piece in a slot is done.
    ///
    /// # Errors
    /// What the driver says about it. Unless that [ends the context](CudaError::ends_context), the piece may still move.
    pub fn is_done(&self, slot: usize) -> Result<bool, CudaError> {
        let slot = &self.slots[slot];
        match slot.recorded {
            true => slot.done.is_complete(),
            false => self.is_idle(),
        }
    }

    /// Waits for everything that was put on the streams.
    ///
    /// # Errors
    /// What the driver says about it.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.stream.synchronize()?;
        self.kernels.synchronize()
    }

    /// Gives the buffers on the GPU back, when everything that was put on the streams is done.
    pub fn drop_staging(&mut self) {
        for slot in &mut self.slots {
            slot.staging = None;
        }
    }

    unsafe fn plain(&self, copies: &DeviceCopies, pieces: PinnedPieces) -> Result<(), CudaError> {
        copies.visit_runs(pieces, |run| {
            let (source, target) = run.source_and_target(self.direction);
            // SAFETY: promised by the caller of `put`.
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
        // SAFETY: promised by the caller of `put`. Nobody writes the sources: pages are ready before anything of them
        // is put on a stream, and objects are read-only while they are leased.
        unsafe { self.stream.copy_batch(&self.batch, SourceOrder::Any) }
    }

    /// Runs the kernel over the copies. They are at most a [`PIECE`].
    unsafe fn launch(
        &mut self,
        slot: usize,
        copies: &DeviceCopies,
        reach: Reach,
    ) -> Result<(), CudaError> {
        let (stream, most_blocks) = match reach {
            Reach::Host => (&self.stream, LINK_BLOCKS),
            Reach::Gpu => (&self.kernels, LOCAL_BLOCKS),
        };
        let kernels = self.tools.kernels.as_ref().map_err(Clone::clone)?;
        self.plan.clear();
        self.plan.push(copies.as_slice(), self.direction);
        let Some(host) = &self.slots[slot].plan else {
            return Err(CudaError::Missing { function: "kvcopy" });
        };
        let mut used = 0;
        for (unit, work) in self.plan.launches() {
            // What the driver allocated has one address for host and GPU.
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
                // SAFETY: it fits, as was just looked at, and whoever used the slot before is done.
                unsafe {
                    let to = host.base().as_ptr().add(at);
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
                    Ok(to as u64)
                }
            };
            // Both are multiples of 16 bytes, as their alignment is.
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
            // SAFETY: these are the kernel's three parameters; the lists stay as they are until the slot is done, and
            // the caller of `put` promises for the addresses in them.
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
        // SAFETY: the buffer has room for all ranges and is this slot's; the rest as for this function.
        let put = unsafe {
            match self.direction {
                Direction::Store => self
                    .launch(slot, &staged, Reach::Gpu)
                    .and_then(|()| self.step(slot, &self.kernels, &self.stream))
                    .and_then(|()| self.plain(&whole, pieces)),
                Direction::Retrieve => self
                    .plain(&whole, pieces)
                    .and_then(|()| self.step(slot, &self.stream, &self.kernels))
                    .and_then(|()| self.launch(slot, &staged, Reach::Gpu)),
            }
        };
        (self.staged, self.whole) = (staged, whole);
        put.map(|()| Executor::Staged)
    }

    /// What comes next on one stream waits for what is on another.
    fn step(&self, slot: usize, first: &Stream, then: &Stream) -> Result<(), CudaError> {
        let half = &self.slots[slot].half;
        half.record(first)?;
        then.wait_event(half)
    }
}

impl Drop for Lane {
    /// What the streams may still use is not given back.
    fn drop(&mut self) {
        let _current = self.tools.context.enter();
        let in_use = match self.is_idle() {
            Ok(idle) => !idle,
            Err(error) => !error.ends_context(),
        };
        if in_use {
            std::mem::forget(std::mem::take(&mut self.slots));
            // The kernel too.
            std::mem::forget(Arc::clone(&self.tools));
        }
    }
}
