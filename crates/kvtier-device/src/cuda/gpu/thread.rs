//! The thread of a GPU.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::device_copy::DeviceCopies;
use super::super::driver::Context;
use super::super::error::CudaError;
use super::Shared;
use super::executor::{Executor, Lane, SLOTS};
use super::job::{Job, PieceFacts};
use super::pinned::Pinned;
use super::turns::Turns;
use crate::device::DeviceError;
use crate::plan::Direction;

/// How long the thread asks without a pause after something last happened; most pieces are done, and most events
/// complete, within it.
const SPIN: Duration = Duration::from_micros(50);
/// Pause between two looks while the GPU has pieces: the delay of an answer, at most.
const PAUSE: Duration = Duration::from_micros(20);
/// Pause between two looks at events alone. An engine's step takes milliseconds.
const LONG_PAUSE: Duration = Duration::from_micros(100);

/// One direction.
struct Line {
    lane: Lane,
    direction: Direction,
    /// Jobs of which not everything was handed to the GPU, by worker.
    waiting: Turns<u64, u64>,
    /// Pieces with the GPU; they end in this order.
    pieces: VecDeque<Piece>,
    free: Vec<usize>,
}

/// A piece with the GPU.
struct Piece {
    slot: usize,
    job: u64,
    bytes: u64,
    executor: Executor,
    since: Instant,
}

/// What there is to do for a job.
enum Next {
    /// The worker's pages are not ready.
    NotYet,
    Piece(PieceFacts),
    /// Everything was handed to the GPU.
    Nothing,
}

/// What the thread owns.
pub(super) struct Feeder {
    shared: Arc<Shared>,
    context: Arc<Context>,
    /// Retrieves first.
    lines: [Line; 2],
    jobs: HashMap<u64, Job>,
    next_job: u64,
    copies: DeviceCopies,
    pinned: Arc<Pinned>,
}

impl Feeder {
    pub fn new(
        shared: Arc<Shared>,
        context: Arc<Context>,
        [store, retrieve]: [Lane; 2],
        pinned: Arc<Pinned>,
    ) -> Self {
        let line = |lane, direction| Line {
            lane,
            direction,
            waiting: Turns::default(),
            pieces: VecDeque::new(),
            free: (0..SLOTS).collect(),
        };
        Self {
            shared,
            context,
            lines: [
                line(retrieve, Direction::Retrieve),
                line(store, Direction::Store),
            ],
            jobs: HashMap::new(),
            next_job: 0,
            copies: DeviceCopies::default(),
            pinned,
        }
    }

    pub fn run(mut self) {
        // A pause of 20 us would otherwise take 70.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        if let Err(error) = self.context.make_current() {
            self.broke(error.to_string());
        }
        let mut last_work = Instant::now();
        loop {
            let stop = self.take();
            let mut worked = false;
            for line in 0..self.lines.len() {
                worked |= self.collect(line);
                worked |= self.feed(line, stop);
            }
            if stop && self.jobs.is_empty() {
                return;
            }
            let now = Instant::now();
            if worked {
                last_work = now;
            } else if !self.jobs.is_empty() && now - last_work < SPIN {
                std::hint::spin_loop();
            } else {
                self.rest();
            }
        }
    }

    /// Takes what was handed over; says whether to stop.
    fn take(&mut self) -> bool {
        let mut inbox = self.shared.inbox.lock();
        let jobs = std::mem::take(&mut inbox.jobs);
        inbox.nudged = false;
        let stop = inbox.stop;
        drop(inbox);
        for job in jobs {
            let id = self.next_job;
            self.next_job += 1;
            let line = self.line_of(job.transfer.direction);
            self.lines[line].waiting.push(job.pages.number, id);
            self.jobs.insert(id, job);
        }
        stop
    }

    fn line_of(&self, direction: Direction) -> usize {
        usize::from(self.lines[0].direction != direction)
    }

    /// Sleeps until something is handed over, or it is time to ask again.
    fn rest(&self) {
        let mut inbox = self.shared.inbox.lock();
        if !inbox.jobs.is_empty() || inbox.nudged || inbox.stop && self.jobs.is_empty() {
            return;
        }
        if self.jobs.is_empty() {
            self.shared.wake.wait(&mut inbox);
            return;
        }
        let pause = match self.lines.iter().all(|line| line.pieces.is_empty()) {
            true => LONG_PAUSE,
            false => PAUSE,
        };
        self.shared.wake.wait_for(&mut inbox, pause);
    }

    /// Takes back the pieces that are done; says whether there were any.
    fn collect(&mut self, line: usize) -> bool {
        let mut any = false;
        while let Some(piece) = self.lines[line].pieces.front() {
            let failed = match self.lines[line].lane.is_done(piece.slot) {
                Ok(false) => break,
                Ok(true) => None,
                // The driver has given up this context, and with it all that was on its streams.
                Err(error) => Some(error),
            };
            let Some(piece) = self.lines[line].pieces.pop_front() else {
                break;
            };
            any = true;
            self.lines[line].free.push(piece.slot);
            if let Some(error) = &failed {
                self.broke(error.to_string());
            }
            let direction = self.lines[line].direction;
            let bytes = if failed.is_none() { piece.bytes } else { 0 };
            if failed.is_none() {
                let took = piece.since.elapsed();
                let counters = &self.shared.counters;
                counters.piece(direction, piece.executor, bytes, took);
            }
            if let Some(job) = self.jobs.get_mut(&piece.job) {
                if let Some(error) = failed {
                    job.fail(error.into());
                }
                job.piece_ended(bytes);
            }
            self.end_if_over(piece.job);
        }
        any
    }

    /// Hands pieces to the GPU while there is room; says whether it did anything.
    fn feed(&mut self, line: usize, stop: bool) -> bool {
        let mut any = false;
        // Each worker is asked once if none of them is ready.
        let mut left_to_ask = self.lines[line].waiting.keys();
        while left_to_ask > 0 && !self.lines[line].free.is_empty() {
            let Some(&id) = self.lines[line].waiting.head() else {
                break;
            };
            let next = match self.refusal(stop) {
                Some(refusal) => Err(refusal),
                None => self.next_piece(id),
            };
            match next {
                Ok(Next::NotYet) => {
                    self.lines[line].waiting.pass();
                    left_to_ask -= 1;
                    continue;
                }
                Ok(Next::Piece(facts)) => match self.put(line, id, facts) {
                    Ok(()) => self.lines[line].waiting.pass(),
                    Err(error) => self.fail(line, id, error.into()),
                },
                Ok(Next::Nothing) => {
                    self.dequeue(line);
                    self.end_if_over(id);
                }
                Err(error) => self.fail(line, id, error),
            }
            any = true;
            left_to_ask = self.lines[line].waiting.keys();
        }
        any
    }

    /// Why nothing is begun any more, whatever it is.
    fn refusal(&self, stop: bool) -> Option<DeviceError> {
        let broken = self.shared.broken.lock().clone();
        match broken {
            Some(error) => Some(DeviceError::Broken(error)),
            None => stop.then_some(DeviceError::Stopped),
        }
    }

    /// Fills `copies` with the next piece of a job.
    fn next_piece(&mut self, id: u64) -> Result<Next, DeviceError> {
        let Some(job) = self.jobs.get_mut(&id) else {
            return Ok(Next::Nothing);
        };
        if !job.is_ready(Instant::now())? {
            return Ok(Next::NotYet);
        }
        let pinned = &self.pinned;
        let facts = job.next_piece(&mut self.copies, |extent| pinned.covers(extent))?;
        Ok(facts.map_or(Next::Nothing, Next::Piece))
    }

    /// The job whose turn it is fails.
    fn fail(&mut self, line: usize, id: u64, error: DeviceError) {
        if matches!(error, DeviceError::NeverReady) {
            self.shared.event_timeouts.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(job) = self.jobs.get_mut(&id) {
            job.fail(error);
        }
        self.dequeue(line);
        self.end_if_over(id);
    }

    /// Puts the piece in `copies` on the stream.
    fn put(&mut self, line: usize, id: u64, facts: PieceFacts) -> Result<(), CudaError> {
        let line = &mut self.lines[line];
        let (Some(slot), Some(job)) = (line.free.pop(), self.jobs.get_mut(&id)) else {
            return Ok(());
        };
        let lengths = self.copies.run_lengths();
        let (mean, shared) = (lengths.mean(), &self.shared);
        let straight = facts.straight && self.pinned.same_address();
        let chosen = match shared.options.executor {
            Some(Executor::Kernel) if !straight => Executor::Staged,
            Some(executor) => executor,
            None => shared.profile.choose(line.direction, mean, straight),
        };
        shared.counters.runs(line.direction, mean, lengths.runs);
        let since = Instant::now();
        // SAFETY: the context is current on this thread. The pages stay mapped as long as the job, which lives until
        // its last piece is done; the arena and its extents are held by the job too. The copies were checked against
        // the mapped pages and the extent. What is `straight` is pinned at the addresses of the host. The slot is free.
        let put = unsafe {
            line.lane
                .put(slot, chosen, &self.copies, self.pinned.pieces())
        };
        // Something of it may have been started, whatever it says; it is done when the stream got there.
        job.piece_begun();
        line.pieces.push_back(Piece {
            slot,
            job: id,
            bytes: facts.bytes,
            executor: *put.as_ref().unwrap_or(&chosen),
            since,
        });
        put.map(drop)
    }

    /// Takes the job whose turn it is out of its queue.
    fn dequeue(&mut self, line: usize) {
        let id = self.lines[line].waiting.pop();
        if let Some(job) = id.and_then(|id| self.jobs.get_mut(&id)) {
            job.leave_queue();
        }
    }

    /// Ends a job of which nothing is waiting or with the GPU any more.
    fn end_if_over(&mut self, id: u64) {
        if self.jobs.get(&id).is_some_and(Job::is_over)
            && let Some(job) = self.jobs.remove(&id)
        {
            let direction = job.transfer.direction as usize;
            job.end(Instant::now());
            self.shared.under_way[direction].fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn broke(&self, error: String) {
        self.shared.broken.lock().get_or_insert(error);
    }
}
