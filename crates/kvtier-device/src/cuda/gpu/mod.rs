//! One GPU in use: its two feeder threads, their mailboxes, and the state shared with them.
//!
//! A feeder thread alone submits work to its streams:
//! - It takes transfers of the workers round-robin, one piece at a time, retrieves before stores.
//! - It polls a worker's event before it accesses the worker's pages, so no stream ever waits for another process.
//! - It polls for completed pieces, microseconds apart while any are in flight, and sleeps otherwise.
//!
//! The second feeder, with its own streams, has the transfers of host memory that is not pinned: the driver copies that
//! in the calling thread, and nothing else of the GPU should wait for it. A worker's retrieves stay on one thread while
//! one is in flight, so that its pages are written in order.
//!
//! `profile` guards the rates of the executors; `broken` (why the GPU is unusable) may be acquired inside. `inbox`
//! guards the jobs for one thread, `end` whether the threads have ended; no lock is acquired inside these.

mod executor;
mod fair_queue;
mod job;
mod pinned;
mod profile;
mod readings;
mod staging;
mod thread;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvtier_common::sync::{Condvar, Mutex, RwLock};

use super::allocations::Allocations;
use super::driver::{Context, Event, EventFlags, IpcHandle, PhysicalDevice, Stream};
use super::error::CudaError;
use crate::device::DeviceError;
use crate::plan::Direction;

pub use executor::Executor;
pub(super) use job::{Completion, GpuJob, Pages};
pub(super) use pinned::PinnedArena;
pub use pinned::PinningStatus;
pub use profile::{Profile, Rates, TRIED_RUNS};
pub use readings::{Moved, RUN_BUCKETS};

/// Indices of the mailboxes: of the thread for pinned memory, and of the one for any memory.
const PINNED: usize = 0;
const PAGEABLE: usize = 1;
/// Pieces per direction in flight on the second thread: the driver returns only when they are done.
const PAGEABLE_SLOTS: usize = 1;

/// Options of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuOptions {
    /// The executor for all pieces; `None` chooses per piece by the rates of the trial.
    pub executor: Option<Executor>,
    /// Timeout of a worker's event, after which its transfer fails.
    pub event_timeout: Duration,
    /// Bytes of the arena pinned by one call, rounded up to whole pages. Copies are cut at the borders.
    pub pin_bytes: u64,
    /// Timeout of each of the two steps of activating a GPU: creating its context, and its trial.
    pub trial_timeout: Duration,
    /// Time between two attempts to allocate a staging buffer after a failure.
    pub staging_pause: Duration,
    /// How long stopping or dropping a GPU waits for its transfers, and for the driver to unpin a piece of the arena. The
    /// memory of transfers that have not ended then is leaked.
    pub leave_timeout: Duration,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self {
            executor: None,
            // An engine's step takes milliseconds, the compilation of its kernels seconds.
            event_timeout: Duration::from_secs(30),
            // Larger ones block other driver calls for longer than a transfer takes.
            pin_bytes: 256 << 20,
            // A second or two; about ten if the driver has to initialise many GPUs first.
            trial_timeout: Duration::from_secs(60),
            // Free GPU memory changes when engines start and end.
            staging_pause: Duration::from_secs(10),
            // Pieces take a millisecond.
            leave_timeout: Duration::from_secs(10),
        }
    }
}

/// State shared between the GPU's threads and its users.
#[derive(Debug)]
struct GpuShared {
    /// By index [`PINNED`] and [`PAGEABLE`].
    mailboxes: [Mailbox; 2],
    end: Mutex<End>,
    /// Signalled when the threads have ended.
    ended: Condvar,
    counters: readings::Counters,
    profile: RwLock<Profile>,
    options: GpuOptions,
    /// Transfers in flight, by direction.
    in_flight: Arc<[AtomicU64; 2]>,
    /// Why the GPU is unusable, if it is.
    broken: Mutex<Option<String>>,
    event_timeouts: AtomicU64,
}

/// Mailbox of one thread.
#[derive(Debug, Default)]
struct Mailbox {
    inbox: Mutex<Inbox>,
    /// Signalled when the inbox has changed.
    wake: Condvar,
}

#[derive(Default)]
struct Inbox {
    jobs: Vec<GpuJob>,
    /// The thread should check its jobs again.
    recheck: bool,
    stop: bool,
    /// The thread has ended: jobs are refused.
    closed: bool,
}

#[derive(Debug, Default)]
struct End {
    /// When the threads were notified to stop.
    stopped: Option<Instant>,
    ended: bool,
}

impl Mailbox {
    /// Closes the inbox if it is empty; returns whether it was.
    fn close(&self) -> bool {
        let mut inbox = self.inbox.lock();
        inbox.closed = inbox.jobs.is_empty();
        inbox.closed
    }

    /// Makes the thread check its jobs.
    fn wake_threads(&self) {
        self.inbox.lock().recheck = true;
        self.wake.notify_one();
    }

    fn stop(&self) {
        self.inbox.lock().stop = true;
        self.wake.notify_one();
    }
}

impl GpuShared {
    /// Marks the GPU as unusable because of this error.
    fn set_broken(&self, error: &dyn std::fmt::Display) {
        self.broken.lock().get_or_insert_with(|| error.to_string());
    }

    /// Closes the mailbox of a dead thread and fails the jobs in it.
    fn abandon(&self, mailbox: usize, why: &str) {
        self.set_broken(&why);
        let mut inbox = self.mailboxes[mailbox].inbox.lock();
        inbox.closed = true;
        let jobs = std::mem::take(&mut inbox.jobs);
        drop(inbox);
        jobs.into_iter().for_each(|job| self.refuse(job));
    }

    /// The executor for a piece: the configured one, as far as the memory allows, or the best.
    fn choose(
        &self,
        direction: Direction,
        mean: u64,
        host: executor::HostMemory,
        can_stage: bool,
    ) -> Executor {
        match self.options.executor.map(|executor| executor.with(host)) {
            Some(Executor::Staged) if !can_stage => Executor::Plain,
            Some(executor) => executor,
            None => self.profile.read().choose(direction, mean, host, can_stage),
        }
    }

    fn refuse(&self, mut job: GpuJob) {
        let why = self.broken.lock().clone();
        job.fail(why.map_or(DeviceError::Stopped, DeviceError::Broken));
        job.finish(Instant::now());
    }
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Inbox({} jobs)", self.jobs.len())
    }
}

/// A GPU in use. Dropping it waits for submitted pieces and fails the other transfers.
pub(super) struct Gpu {
    shared: Arc<GpuShared>,
    pinned: Arc<PinnedArena>,
    thread: Option<JoinHandle<()>>,
    complete: CompleteEvent,
    pub allocations: Arc<Allocations>,
}

/// A completed event, recorded once and kept: engines may open its handle any number of times.
#[derive(Debug)]
struct CompleteEvent {
    handle: IpcHandle,
    _event: Event,
}

impl CompleteEvent {
    /// The context must be current.
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let event = Event::new(context, EventFlags::Shared)?;
        let stream = Stream::new(context, i32::MIN)?;
        event.record(&stream)?;
        stream.synchronize()?;
        Ok(Self {
            handle: event.ipc_handle()?,
            _event: event,
        })
    }
}

/// Readings of a GPU, for metrics and `/status`.
#[derive(Debug, Clone)]
pub struct GpuReadings {
    /// Totals by direction and executor, without zeros.
    pub moved: Vec<(Direction, Executor, Moved)>,
    /// Runs by length, in buckets of [`RUN_BUCKETS`]: stores, retrieves.
    pub runs: [[u64; RUN_BUCKETS.len() + 1]; 2],
    /// Transfers in flight: stores, retrieves.
    pub in_flight: [u64; 2],
    /// Transfers that failed because the worker's event timed out.
    pub event_timeouts: u64,
    /// Result of the trial.
    pub profile: Profile,
    /// Why the GPU is unusable, if it is.
    pub broken: Option<String>,
    /// Open allocations of workers, see [`Allocations::open_count`].
    pub open_allocations: usize,
}

/// A GPU during activation.
pub(super) struct NewGpu {
    ordinal: i32,
    context: Arc<Context>,
    complete: CompleteEvent,
    allocations: Arc<Allocations>,
    tools: Arc<executor::Tools>,
    lanes: [executor::CopyLane; 2],
    /// Lanes for memory that is not pinned.
    pageable_lanes: [executor::CopyLane; 2],
}

impl NewGpu {
    /// Creates the context, which takes a second or two and some hundred MiB of GPU memory.
    ///
    /// # Errors
    /// The driver's error.
    pub fn prepare(device: &PhysicalDevice) -> Result<Self, CudaError> {
        let context = Context::retain(device)?;
        let allocations = Allocations::new(Arc::clone(&context))?;
        let _current = context.enter()?;
        let tools = Arc::new(executor::Tools::find(&context));
        let lanes = |slots| -> Result<_, CudaError> {
            Ok([
                executor::CopyLane::new(&tools, Direction::Store, slots)?,
                executor::CopyLane::new(&tools, Direction::Retrieve, slots)?,
            ])
        };
        let lanes = (lanes(executor::SLOTS)?, lanes(PAGEABLE_SLOTS)?);
        Ok(Self {
            ordinal: device.ordinal(),
            complete: CompleteEvent::new(&context)?,
            context: Arc::clone(&context),
            allocations,
            tools,
            lanes: lanes.0,
            pageable_lanes: lanes.1,
        })
    }

    /// Context of the GPU.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Measures the executors, which takes about 100 ms. The driver must be idle otherwise.
    ///
    /// # Errors
    /// The driver's error, or a required executor that does not work.
    pub fn try_out(&mut self, options: &GpuOptions) -> Result<Profile, CudaError> {
        let _current = self.context.enter()?;
        let profile = profile::try_out(&self.tools, self.lanes.each_mut())?;
        // The configured executor is replaced where its memory does not suit; that is no error.
        let demanded = options.executor;
        let demanded = demanded.map(|executor| executor.with(profile.registered));
        for needed in [Some(Executor::Plain), demanded] {
            let why = needed.and_then(|executor| profile.obstacle(executor));
            if let Some((executor, why)) = why {
                let (name, why) = (executor.name(), why.clone());
                return Err(CudaError::Executor { name, why });
            }
        }
        Ok(profile)
    }

    /// Starts the threads.
    ///
    /// # Errors
    /// The system's error if a thread cannot be started.
    pub fn start(
        self,
        profile: Profile,
        pinned: Arc<PinnedArena>,
        options: GpuOptions,
    ) -> Result<Gpu, CudaError> {
        let shared = Arc::new(GpuShared {
            mailboxes: Default::default(),
            end: Mutex::default(),
            ended: Condvar::new(),
            counters: readings::Counters::default(),
            profile: RwLock::new(profile),
            options,
            in_flight: Default::default(),
            broken: Mutex::default(),
            event_timeouts: AtomicU64::new(0),
        });
        let (ends, over) = std::sync::mpsc::channel();
        let feeder = |mailbox, lanes| {
            let (tools, pinned) = (Arc::clone(&self.tools), Arc::clone(&pinned));
            let (shared, ends) = (Arc::clone(&shared), ends.clone());
            thread::Feeder::new(shared, mailbox, tools, lanes, pinned, ends)
        };
        let feeders = [
            feeder(PINNED, self.lanes),
            feeder(PAGEABLE, self.pageable_lanes),
        ];
        drop(ends);
        let ending = Arc::clone(&shared);
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let name = format!("kvtier-{name}-{}", self.ordinal);
            let thread = std::thread::Builder::new().name(name).spawn(run);
            thread.map_err(|error| CudaError::Call {
                function: "the thread of a GPU",
                code: error.raw_os_error().unwrap_or(-1),
                name: error.to_string(),
            })
        };
        // Reports finished jobs; ends after both feeders.
        let end_all = move || {
            over.into_iter().for_each(|job| job.finish(Instant::now()));
            ending.end.lock().ended = true;
            ending.ended.notify_all();
        };
        let thread = spawn("gpu-end", Box::new(end_all))?;
        for (feeder, name) in feeders.into_iter().zip(["gpu", "gpu-slow"]) {
            let spawned = spawn(name, Box::new(move || feeder.run()));
            // With one feeder alone, half of the transfers would never run.
            spawned.inspect_err(|_| shared.mailboxes.iter().for_each(Mailbox::stop))?;
        }
        Ok(Gpu {
            shared,
            pinned,
            thread: Some(thread),
            complete: self.complete,
            allocations: self.allocations,
        })
    }
}

impl Gpu {
    /// Handle of a completed event.
    pub fn complete_event(&self) -> &[u8] {
        &self.complete.handle.0
    }

    /// Options of this GPU.
    pub fn options(&self) -> GpuOptions {
        self.shared.options
    }

    /// Counters of the transfers in flight, by direction.
    pub fn in_flight(&self) -> &Arc<[AtomicU64; 2]> {
        &self.shared.in_flight
    }

    /// Hands a transfer to the thread for its memory.
    pub fn submit(&self, job: GpuJob) {
        let (arena, mut chunks) = (&job.transfer.arena, job.transfer.chunks.iter());
        let pageable = chunks.any(|chunk| {
            self.pinned.memory_of(arena, chunk.extent) == executor::HostMemory::Pageable
        });
        self.submit_to(if pageable { PAGEABLE } else { PINNED }, job);
    }

    /// Hands over a job that [`GpuJob::with_copies`] made.
    pub fn submit_copies(&self, job: GpuJob) {
        self.submit_to(PAGEABLE, job);
    }

    fn submit_to(&self, suits: usize, mut job: GpuJob) {
        let mailbox = &self.shared.mailboxes[job.enter(suits)];
        let mut inbox = mailbox.inbox.lock();
        if inbox.closed {
            drop(inbox);
            return self.shared.refuse(job);
        }
        inbox.jobs.push(job);
        drop(inbox);
        mailbox.wake.notify_one();
    }

    /// Makes the threads check their jobs.
    pub fn wake_threads(&self) {
        self.shared.mailboxes.iter().for_each(Mailbox::wake_threads);
    }

    /// Stops: submitted pieces finish, all other transfers are refused.
    pub fn stop(&self) {
        let shared = &self.shared;
        shared.end.lock().stopped.get_or_insert_with(Instant::now);
        shared.mailboxes.iter().for_each(Mailbox::stop);
    }

    /// Waits until all transfers have ended and were reported; `false` after [`GpuOptions::leave_timeout`] from the stop.
    pub fn wait_end(&self) -> bool {
        let shared = &self.shared;
        let mut end = shared.end.lock();
        let waited = end.stopped.map_or(Duration::ZERO, |at| at.elapsed());
        let left = shared.options.leave_timeout.saturating_sub(waited);
        let result = shared
            .ended
            .wait_while_for(&mut end, |end| !end.ended, left);
        !result.timed_out()
    }

    /// Why the GPU is unusable, if it is.
    pub fn broken(&self) -> Option<String> {
        self.shared.broken.lock().clone()
    }

    pub fn readings(&self) -> GpuReadings {
        let shared = &self.shared;
        let directions = [Direction::Store, Direction::Retrieve];
        let moved = directions.into_iter().flat_map(|direction| {
            Executor::ALL.into_iter().map(move |executor| {
                (
                    direction,
                    executor,
                    shared.counters.moved(direction, executor),
                )
            })
        });
        GpuReadings {
            moved: moved.filter(|(_, _, moved)| moved.pieces > 0).collect(),
            runs: directions.map(|direction| shared.counters.run_lengths(direction)),
            in_flight: directions
                .map(|direction| shared.in_flight[direction as usize].load(Ordering::Relaxed)),
            event_timeouts: shared.event_timeouts.load(Ordering::Relaxed),
            profile: shared.profile.read().clone(),
            broken: self.broken(),
            open_allocations: self.allocations.open_count(),
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.stop();
        let Some(thread) = self.thread.take() else {
            return;
        };
        // If this runs on the thread itself, a transfer held the last reference and the thread ends by itself. If the wait
        // times out, the thread keeps the memory that the GPU may still access.
        if thread.thread().id() != std::thread::current().id() && self.wait_end() {
            // The thread is about to return.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").finish_non_exhaustive()
    }
}
