//! One GPU: a thread that feeds the streams of stores and those of retrieves.
//!
//! The thread alone puts work on the streams. It takes transfers of workers by turns, a piece at a time, retrieves
//! before stores; asks a worker's event before it touches the worker's pages, so that no stream ever waits for somebody
//! else; and looks at what is done by asking, microseconds apart while there is something to ask for. With nothing to
//! do it sleeps.
//!
//! A second such thread, with two streams of its own, has the transfers that touch memory which is not pinned: the driver
//! copies that itself, in the thread that asks for it, and nothing else of the GPU is to wait for it. A worker's
//! retrieves follow each other to the same thread as long as one is under way, so that they write its pages in order.

mod executor;
mod job;
mod pinned;
mod profile;
mod readings;
mod staging;
mod thread;
mod turns;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use super::allocations::Allocations;
use super::driver::{Context, Event, EventFlags, IpcHandle, PhysicalDevice, Stream};
use super::error::CudaError;
use crate::device::DeviceError;
use crate::plan::Direction;

pub use executor::Executor;
pub(super) use job::{Job, Pages};
pub(super) use pinned::Pinned;
pub use pinned::PinningStatus;
pub use profile::{Profile, Rates, TRIED_RUNS};
pub use readings::{Moved, RUN_BUCKETS};

/// Positions of the mailboxes: of the thread for memory that is pinned, and of the one for any.
const PINNED: usize = 0;
const PAGEABLE: usize = 1;
/// Pieces of a direction under way with the second one: the driver does not come back before they are done.
const PAGEABLE_SLOTS: usize = 1;

/// How GPUs are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuOptions {
    /// The executor for everything; `None` chooses for each piece by what was tried at start.
    pub executor: Option<Executor>,
    /// How long a worker's event may take to be complete before its transfer fails.
    pub event_timeout: Duration,
    /// Bytes of the arena that are pinned at a time, rounded up to whole pages. Copies are cut where these adjoin.
    pub pin_bytes: u64,
    /// How long the driver may take for each of two steps of taking a GPU into use: to make its context, and to try it
    /// out.
    pub trial_timeout: Duration,
    /// How long a GPU that had no memory for a buffer to stage copies in is not asked for one again.
    pub staging_pause: Duration,
    /// How long stopping or dropping a GPU waits for what is with it, and for the driver to give up a piece of the arena.
    /// What has not ended then never does: its memory is lost.
    pub leave_timeout: Duration,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self {
            executor: None,
            // An engine's step takes milliseconds, its compilation of kernels seconds.
            event_timeout: Duration::from_secs(30),
            // Larger ones hold up other calls of the driver for longer than a transfer takes.
            pin_bytes: 256 << 20,
            // A second or two; some ten where the driver has to start many GPUs first.
            trial_timeout: Duration::from_secs(60),
            // Engines take memory and give it back when they start and end.
            staging_pause: Duration::from_secs(10),
            // Pieces take a millisecond.
            leave_timeout: Duration::from_secs(10),
        }
    }
}

/// What others give the thread, and what it tells them.
#[derive(Debug)]
struct Shared {
    /// Of the thread for pinned memory, and of the one for the rest.
    mailboxes: [Mailbox; 2],
    end: Mutex<End>,
    /// The threads have ended.
    ended: Condvar,
    counters: readings::Counters,
    profile: RwLock<Profile>,
    options: GpuOptions,
    /// Transfers that have not ended, by direction.
    under_way: Arc<[AtomicU64; 2]>,
    /// Why the GPU is of no use any more.
    broken: Mutex<Option<String>>,
    event_timeouts: AtomicU64,
}

/// What one of the threads is given.
#[derive(Debug, Default)]
struct Mailbox {
    inbox: Mutex<Inbox>,
    /// The inbox has something for the thread.
    wake: Condvar,
}

#[derive(Default)]
struct Inbox {
    jobs: Vec<Job>,
    /// Something changed that the thread should look at.
    nudged: bool,
    stop: bool,
    /// Nobody takes anything from here any more.
    closed: bool,
}

#[derive(Debug, Default)]
struct End {
    /// Since when the threads are to end.
    stopped: Option<Instant>,
    ended: bool,
}

impl Mailbox {
    /// Takes no more, if there is nothing left to take; says whether so.
    fn close(&self) -> bool {
        let mut inbox = self.inbox.lock();
        inbox.closed = inbox.jobs.is_empty();
        inbox.closed
    }

    /// Has the thread look at what waits, soon.
    fn nudge(&self) {
        self.inbox.lock().nudged = true;
        self.wake.notify_one();
    }

    fn stop(&self) {
        self.inbox.lock().stop = true;
        self.wake.notify_one();
    }
}

impl Shared {
    /// Nothing is begun any more, because of this error.
    fn broke(&self, error: &dyn std::fmt::Display) {
        self.broken.lock().get_or_insert_with(|| error.to_string());
    }

    /// There is no thread for a mailbox any more: what it has not taken fails.
    fn give_up(&self, mailbox: usize, why: &str) {
        self.broke(&why);
        let mut inbox = self.mailboxes[mailbox].inbox.lock();
        inbox.closed = true;
        let jobs = std::mem::take(&mut inbox.jobs);
        drop(inbox);
        jobs.into_iter().for_each(|job| self.refuse(job));
    }

    /// The executor for a piece: what is demanded, as far as there is memory for it, or the best.
    fn choose(
        &self,
        direction: Direction,
        mean: u64,
        host: executor::HostMemory,
        room: bool,
    ) -> Executor {
        match self.options.executor.map(|executor| executor.with(host)) {
            Some(Executor::Staged) if !room => Executor::Plain,
            Some(executor) => executor,
            None => self.profile.read().choose(direction, mean, host, room),
        }
    }

    fn refuse(&self, mut job: Job) {
        let why = self.broken.lock().clone();
        job.fail(why.map_or(DeviceError::Stopped, DeviceError::Broken));
        job.end(Instant::now());
    }
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Inbox({} jobs)", self.jobs.len())
    }
}

/// A GPU in use. Dropping it lets what is with the GPU end, and fails the rest.
pub(super) struct Gpu {
    shared: Arc<Shared>,
    pinned: Arc<Pinned>,
    thread: Option<JoinHandle<()>>,
    complete: CompleteEvent,
    pub allocations: Arc<Allocations>,
}

/// An event that was recorded once, while the GPU had nothing to do, and is kept: its handle stays good, however many
/// engines open it and however often.
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

/// What a GPU does, for metrics and `/status`.
#[derive(Debug, Clone)]
pub struct GpuReadings {
    /// What was moved: direction, executor, amounts. Only what is not 0.
    pub moved: Vec<(Direction, Executor, Moved)>,
    /// Runs by length, in buckets of [`RUN_BUCKETS`]: of stores, and of retrieves.
    pub runs: [[u64; RUN_BUCKETS.len() + 1]; 2],
    /// Transfers that have not ended: stores, retrieves.
    pub under_way: [u64; 2],
    /// Transfers that failed because the worker's pages were never ready.
    pub event_timeouts: u64,
    /// What was tried out.
    pub profile: Profile,
    /// Why the GPU is of no use any more, if so.
    pub broken: Option<String>,
    /// Allocations of workers that are open, see [`Allocations::open_count`].
    pub open_allocations: usize,
}

/// A GPU that is being taken into use.
pub(super) struct NewGpu {
    ordinal: i32,
    context: Arc<Context>,
    complete: CompleteEvent,
    allocations: Arc<Allocations>,
    tools: Arc<executor::Tools>,
    lanes: [executor::Lane; 2],
    /// For memory that is not pinned.
    pageable_lanes: [executor::Lane; 2],
}

impl NewGpu {
    /// Makes its context, which takes a second or two, and some hundred MiB of its memory.
    ///
    /// # Errors
    /// What the driver says.
    pub fn prepare(device: &PhysicalDevice) -> Result<Self, CudaError> {
        let context = Context::retain(device)?;
        let allocations = Allocations::new(Arc::clone(&context))?;
        let _current = context.enter()?;
        let tools = Arc::new(executor::Tools::find(&context));
        let lanes = |slots| -> Result<_, CudaError> {
            Ok([
                executor::Lane::new(&tools, Direction::Store, slots)?,
                executor::Lane::new(&tools, Direction::Retrieve, slots)?,
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

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Tries its executors out, some 100 ms. Only true while nothing else keeps the driver busy.
    ///
    /// # Errors
    /// What the driver says, or an executor that has to work and does not.
    pub fn try_out(&mut self, options: &GpuOptions) -> Result<Profile, CudaError> {
        let _current = self.context.enter()?;
        let profile = profile::try_out(&self.tools, self.lanes.each_mut())?;
        // What is demanded gives way where memory is not as it needs it; that is no obstacle.
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

    /// Starts its threads.
    ///
    /// # Errors
    /// What the system says when it gives no thread.
    pub fn start(
        self,
        profile: Profile,
        pinned: Arc<Pinned>,
        options: GpuOptions,
    ) -> Result<Gpu, CudaError> {
        let shared = Arc::new(Shared {
            mailboxes: Default::default(),
            end: Mutex::default(),
            ended: Condvar::new(),
            counters: readings::Counters::default(),
            profile: RwLock::new(profile),
            options,
            under_way: Default::default(),
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
        // Ends when the others have ended, with all that is over.
        let end_all = move || {
            over.into_iter().for_each(|job| job.end(Instant::now()));
            ending.end.lock().ended = true;
            ending.ended.notify_all();
        };
        let thread = spawn("gpu-end", Box::new(end_all))?;
        for (feeder, name) in feeders.into_iter().zip(["gpu", "gpu-slow"]) {
            let spawned = spawn(name, Box::new(move || feeder.run()));
            // One alone would be a GPU that does half of what it is asked for.
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
    /// Handle of an event that is complete.
    pub fn complete_event(&self) -> &[u8] {
        &self.complete.handle.0
    }

    /// The executor settings it runs with.
    pub fn options(&self) -> GpuOptions {
        self.shared.options
    }

    /// Where transfers that have not ended are counted, by direction.
    pub fn under_way(&self) -> &Arc<[AtomicU64; 2]> {
        &self.shared.under_way
    }

    /// Hands a transfer over; it ends some time.
    pub fn submit(&self, mut job: Job) {
        let (arena, mut chunks) = (&job.transfer.arena, job.transfer.chunks.iter());
        let pageable = chunks.any(|chunk| {
            self.pinned.memory_of(arena, chunk.extent) == executor::HostMemory::Pageable
        });
        let suits = if pageable { PAGEABLE } else { PINNED };
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

    /// Has the threads look at what waits, soon.
    pub fn nudge(&self) {
        self.shared.mailboxes.iter().for_each(Mailbox::nudge);
    }

    /// Begins nothing more. What is with the GPU ends as it would, the rest is refused.
    pub fn stop(&self) {
        let shared = &self.shared;
        shared.end.lock().stopped.get_or_insert_with(Instant::now);
        shared.mailboxes.iter().for_each(Mailbox::stop);
    }

    /// Waits until everything has ended and was told, if it was stopped. Gives up when that takes too long.
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

    /// Why it is of no use any more, if so.
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
            under_way: directions
                .map(|direction| shared.under_way[direction as usize].load(Ordering::Relaxed)),
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
        // Of the thread itself the last owner was what a transfer held. It ends by itself. Else it may have been left,
        // and keeps what the GPU may still touch.
        if thread.thread().id() != std::thread::current().id() && self.wait_end() {
            // It has nothing left to do.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").finish_non_exhaustive()
    }
}
