//! The thread of a GPU.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use super::super::device_copy::DeviceCopies;
use super::super::error::CudaError;
use super::super::events::{ExportedEvents, Lane as TimelineLane, TIMELINE_BYTES, Timeline};
use super::executor::{Executor, Lane, Tools};
use super::job::Job;
use super::pinned::Pinned;
use super::profile;
use super::turns::Turns;
use super::{Mailbox, PINNED, Shared};
use crate::device::DeviceError;
use crate::plan::Direction;

/// How long the thread asks without a pause after something last happened; most pieces are done, and most events
/// complete, within it.
const SPIN: Duration = Duration::from_micros(50);
/// Pause between two looks while the GPU has pieces: the delay of an answer, at most.
const PAUSE: Duration = Duration::from_micros(20);
/// Pause between two looks at events alone. An engine's step takes milliseconds.
const LONG_PAUSE: Duration = Duration::from_micros(100);

/// Pause between two looks at a GPU that is of no use any more.
const BROKEN_PAUSE: Duration = Duration::from_millis(10);
/// How long what is with the GPU is kept from others after an error. The driver says of some errors that nothing of the
/// context goes on, but an engine of the GPU may still finish what it was given; 8 pieces take a few milliseconds.
const CONTEXT_GRACE: Duration = Duration::from_secs(1);
/// The same for errors that say nothing about what goes on. Whatever it was, it has ended or never will.
const ERROR_GRACE: Duration = Duration::from_secs(30);

/// One direction.
struct Line {
    lane: Lane,
    direction: Direction,
    /// Jobs of which not everything was handed to the GPU, by worker.
    waiting: Turns<u64, u64>,
    /// Pieces with the GPU; they end in this order.
    pieces: VecDeque<Piece>,
    free: Vec<usize>,
    /// Since when the driver has only errors to say about the first of them.
    failing: Option<Instant>,
    /// Its events of isolated IPC, once there is one.
    numbers: Option<TimelineLane>,
}

/// A piece with the GPU.
struct Piece {
    slot: usize,
    job: u64,
    bytes: u64,
    executor: Executor,
    since: Instant,
}

/// What became of a look at a job.
enum Look {
    /// It has to wait: its pages are not ready, or all slots are in use.
    NotYet,
    /// A piece of it was handed to the GPU, and there is more.
    Begun,
    /// Everything was handed to the GPU.
    All,
}

/// What the thread owns.
pub(super) struct Feeder {
    shared: Arc<Shared>,
    /// Which of the mailboxes is its own.
    mailbox: usize,
    tools: Arc<Tools>,
    /// When to try what the GPU had no memory for.
    retry_at: Option<Instant>,
    /// No piece is begun, for that is to be tried when the last one has ended.
    held: bool,
    /// Retrieves first.
    lines: [Line; 2],
    jobs: HashMap<u64, Job>,
    next_job: u64,
    /// Jobs whose events are to be opened: soon, and one at a time, for the driver takes some microseconds.
    unopened: VecDeque<u64>,
    /// The piece that is being made, and the chunk it is made from.
    piece: DeviceCopies,
    chunk: DeviceCopies,
    pinned: Arc<Pinned>,
    exported: ExportedEvents,
    timeline: Option<Arc<Timeline>>,
    ends: Sender<Job>,
}

impl Feeder {
    pub fn new(
        shared: Arc<Shared>,
        mailbox: usize,
        tools: Arc<Tools>,
        [store, retrieve]: [Lane; 2],
        pinned: Arc<Pinned>,
        ends: Sender<Job>,
    ) -> Self {
        let line = |lane: Lane, direction| Line {
            free: (0..lane.slots()).collect(),
            lane,
            direction,
            waiting: Turns::default(),
            pieces: VecDeque::new(),
            failing: None,
            numbers: None,
        };
        // One of the threads is enough.
        let lacks_room = mailbox == PINNED && shared.profile.read().lacks_room();
        let pause = shared.options.staging_pause;
        Self {
            retry_at: lacks_room.then(|| later(pause)).flatten(),
            shared,
            mailbox,
            exported: ExportedEvents::new(Arc::clone(&tools.context)),
            timeline: None,
            tools,
            held: false,
            lines: [
                line(retrieve, Direction::Retrieve),
                line(store, Direction::Store),
            ],
            jobs: HashMap::new(),
            next_job: 0,
            unopened: VecDeque::new(),
            piece: DeviceCopies::default(),
            chunk: DeviceCopies::default(),
            pinned,
            ends,
        }
    }

    /// Runs until it is told to stop and everything with the GPU has ended.
    pub fn run(mut self) {
        let served = catch_unwind(AssertUnwindSafe(|| self.serve()));
        if served.is_err() {
            self.give_up();
        } else if self.shared.broken.lock().is_none() {
            // All pieces are done, and the streams know it a moment later.
            for line in &self.lines {
                let _ = line.lane.finish();
            }
        }
    }

    fn serve(&mut self) {
        // A pause of 20 us would otherwise take 70.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        if let Err(error) = self.tools.context.make_current() {
            self.shared.broke(&error);
        }
        let mut last_work = Instant::now();
        loop {
            let stop = self.take();
            let mut worked = self.open_event();
            self.try_staged();
            for line in 0..self.lines.len() {
                worked |= self.collect(line);
                worked |= self.feed(line, stop);
            }
            if stop && self.jobs.is_empty() && self.mailbox().close() {
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

    /// After a panic: fails everything, what the GPU may have something of once the streams are idle. The books are not
    /// trusted.
    fn give_up(&mut self) {
        self.shared
            .give_up(self.mailbox, "its thread ended in a panic");
        let untouched = self.jobs.extract_if(|_, job| job.is_untouched());
        untouched.for_each(|(_, job)| self.shared.refuse(job));
        for Line { lane, failing, .. } in &mut self.lines {
            let mut given_up = |error| is_given_up(failing, &error);
            while !lane.is_idle().unwrap_or_else(&mut given_up) {
                std::thread::sleep(BROKEN_PAUSE);
            }
        }
        let jobs = self.jobs.drain();
        jobs.for_each(|(_, job)| self.shared.refuse(job));
    }

    /// Tries what the GPU had no memory for, when it is time to and nothing is with the GPU. That takes as long as some
    /// hundred pieces, once there is memory.
    fn try_staged(&mut self) {
        let is_time = self.retry_at.is_some_and(|at| Instant::now() >= at);
        let broken = is_time && self.shared.broken.lock().is_some();
        if broken {
            // Never again. A time that stays in the past would be no rest.
            self.retry_at = None;
        }
        let wanted = is_time && !broken;
        self.held = wanted && self.lines.iter().any(|line| !line.pieces.is_empty());
        if !wanted || self.held {
            return;
        }
        self.retry_at = None;
        let known = self.shared.profile.read().clone();
        let [retrieve, store] = &mut self.lines;
        let lanes = [&mut store.lane, &mut retrieve.lane];
        match profile::try_staged(&self.tools, lanes, &known) {
            Ok(Some(profile)) => *self.shared.profile.write() = profile,
            Ok(None) => self.retry_at = later(self.shared.options.staging_pause),
            Err(error) => self.shared.broke(&error),
        }
    }

    /// Takes what was handed over; says whether to stop.
    fn take(&mut self) -> bool {
        let mut inbox = self.mailbox().inbox.lock();
        let jobs = std::mem::take(&mut inbox.jobs);
        inbox.nudged = false;
        let stop = inbox.stop;
        drop(inbox);
        for job in jobs {
            let id = self.next_job;
            self.next_job += 1;
            let line = self.line_of(job.transfer.direction);
            self.lines[line].waiting.push(job.pages.number, id);
            self.unopened.push_back(id);
            self.jobs.insert(id, job);
        }
        stop
    }

    /// Opens the next event; says whether there was one. Whose event is none has no turn to wait for.
    fn open_event(&mut self) -> bool {
        let Some(id) = self.unopened.pop_front() else {
            return false;
        };
        let opened = self.jobs.get_mut(&id).map(Job::open_event);
        if let Some(Err(error)) = opened {
            self.failed(id, error);
            self.drop_out(id);
        }
        true
    }

    fn mailbox(&self) -> &Mailbox {
        &self.shared.mailboxes[self.mailbox]
    }

    fn line_of(&self, direction: Direction) -> usize {
        usize::from(self.lines[0].direction != direction)
    }

    /// Sleeps until something is handed over, or it is time to ask again.
    fn rest(&self) {
        let mailbox = self.mailbox();
        let mut inbox = mailbox.inbox.lock();
        if !inbox.jobs.is_empty() || inbox.nudged || inbox.stop && self.jobs.is_empty() {
            return;
        }
        if self.jobs.is_empty() {
            match self.retry_at {
                Some(at) => {
                    mailbox.wake.wait_until(&mut inbox, at);
                }
                None => mailbox.wake.wait(&mut inbox),
            }
            return;
        }
        let pause = if self.lines.iter().any(|line| line.failing.is_some()) {
            BROKEN_PAUSE
        } else if self.lines.iter().all(|line| line.pieces.is_empty()) {
            LONG_PAUSE
        } else {
            PAUSE
        };
        mailbox.wake.wait_for(&mut inbox, pause);
    }

    /// Takes back the pieces that are done; says whether there were any.
    fn collect(&mut self, line: usize) -> bool {
        let mut any = false;
        let line = &mut self.lines[line];
        while let Some(piece) = line.pieces.front() {
            let error = match line.lane.is_done(piece.slot) {
                Ok(true) => None,
                Ok(false) => break,
                Err(error) => {
                    self.shared.broke(&error);
                    if !is_given_up(&mut line.failing, &error) {
                        break;
                    }
                    Some(error)
                }
            };
            if error.is_none() {
                line.failing = None;
            }
            any = true;
            line.free.push(piece.slot);
            let bytes = match &error {
                Some(_) => 0,
                None => {
                    let (counters, took) = (&self.shared.counters, piece.since.elapsed());
                    counters.piece(line.direction, piece.executor, piece.bytes, took);
                    piece.bytes
                }
            };
            let id = piece.job;
            line.pieces.pop_front();
            if let Some(job) = self.jobs.get_mut(&id) {
                if let Some(error) = error {
                    job.fail(error.into());
                }
                job.piece_ended(bytes);
            }
            end_if_over(&mut self.jobs, &self.ends, id);
        }
        any
    }

    /// Hands a piece to the GPU if there is room, one only: the other direction is not to wait while a list of a
    /// thousand pages is made. Says whether it did anything.
    fn feed(&mut self, line: usize, stop: bool) -> bool {
        let mut any = false;
        // Each worker is looked at once more after anything was done. Who has to wait comes last, so that when all
        // have to, their order stays.
        let mut left = self.lines[line].waiting.keys();
        while left > 0
            && let Some(&id) = self.lines[line].waiting.head()
        {
            match self.look_at(line, id, stop) {
                Ok(Look::NotYet) => {
                    self.lines[line].waiting.pass();
                    left -= 1;
                    continue;
                }
                Ok(Look::Begun) => {
                    self.lines[line].waiting.pass();
                    return true;
                }
                Ok(Look::All) => {
                    self.tell_begun(line, id);
                    self.leave(line, id);
                    return true;
                }
                Err(error) => {
                    self.failed(id, error);
                    self.leave(line, id);
                }
            }
            any = true;
            left = self.lines[line].waiting.keys();
        }
        any
    }

    /// Begins the next piece of a job, if it can be begun.
    fn look_at(&mut self, line: usize, id: u64, stop: bool) -> Result<Look, DeviceError> {
        if let Some(error) = self.shared.broken.lock().clone() {
            return Err(DeviceError::Broken(error));
        }
        if stop {
            return Err(DeviceError::Stopped);
        }
        let Some(job) = self.jobs.get_mut(&id) else {
            return Ok(Look::All);
        };
        if job.has_failed() {
            return Ok(Look::All);
        }
        let line = &mut self.lines[line];
        let ready = job.is_ready(Instant::now())?;
        let Some(&slot) = line.free.last().filter(|_| ready && !self.held) else {
            return Ok(Look::NotYet);
        };
        let Some(facts) = job.next_piece(&mut self.piece, &mut self.chunk, &self.pinned)? else {
            return Ok(Look::All);
        };
        let host = facts.host.min(self.shared.profile.read().registered);
        let lengths = self.piece.run_lengths();
        let (mean, shared) = (lengths.mean(), &self.shared);
        let since = Instant::now();
        let mut chosen = shared.choose(line.direction, mean, host, true);
        if chosen == Executor::Staged {
            let pause = shared.options.staging_pause;
            let room = line.lane.has_room(slot, since, pause)?;
            chosen = shared.choose(line.direction, mean, host, room);
        }
        shared.counters.runs(line.direction, mean, lengths.runs);
        // SAFETY: the context is current on this thread. The pages stay mapped as long as the job, which lives until
        // its last piece is done; the arena and its extents are held by the job too. The copies were checked against
        // the mapped pages and the extent, and the kernel is only chosen for memory that the GPU sees at the host's
        // addresses. The slot is free.
        let put = unsafe {
            let pieces = self.pinned.pieces();
            line.lane.put(slot, chosen, &self.piece, pieces)
        };
        // Some of it may have been started, whatever it says; it is done when the stream got there.
        line.free.pop();
        job.piece_begun();
        line.pieces.push_back(Piece {
            slot,
            job: id,
            bytes: facts.bytes,
            executor: *put.as_ref().unwrap_or(&chosen),
            since,
        });
        put?;
        Ok(match facts.last {
            true => Look::All,
            false => Look::Begun,
        })
    }

    /// Tells whoever wants to know that everything of a job is with the GPU, and the event that is complete when it is
    /// done. Without an event its end is all there is to tell.
    fn tell_begun(&mut self, line: usize, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else {
            return;
        };
        let Some(begun) = job.take_begun() else {
            return;
        };
        // In the form that the engine's own had.
        let event = match job.transfer.event.len() {
            TIMELINE_BYTES => self.number(line).ok().map(|number| number.to_vec()),
            _ => {
                let event = self.lines[line].lane.export_event(&self.exported);
                event.ok().map(|event| event.to_vec())
            }
        };
        if let Some(event) = event {
            // What is caught has been printed; whoever is to be told is told at the end.
            let _ = catch_unwind(AssertUnwindSafe(|| begun(&event)));
        }
    }

    /// An event of isolated IPC behind what is on a stream. The first one makes the buffer that they are in.
    fn number(&mut self, line: usize) -> Result<[u8; TIMELINE_BYTES], DeviceError> {
        let line = &mut self.lines[line];
        let numbers = match &mut line.numbers {
            Some(numbers) => numbers,
            none => {
                let timeline = match &self.timeline {
                    Some(timeline) => Arc::clone(timeline),
                    None => Arc::clone(self.timeline.insert(Timeline::new(&self.tools.context)?)),
                };
                none.insert(timeline.lane()?)
            }
        };
        Ok(line.lane.export_number(numbers)?)
    }

    /// Nothing more of a job is begun.
    fn failed(&mut self, id: u64, error: DeviceError) {
        match &error {
            DeviceError::NeverReady => {
                self.shared.event_timeouts.fetch_add(1, Ordering::Relaxed);
            }
            DeviceError::Cuda(error) if error.ends_context() => {
                self.shared.broke(&error);
            }
            _ => {}
        }
        if let Some(job) = self.jobs.get_mut(&id) {
            job.fail(error);
        }
    }

    /// A job leaves its queue, whoever is before it.
    fn drop_out(&mut self, id: u64) {
        if let Some(job) = self.jobs.get_mut(&id) {
            let (worker, direction) = (job.pages.number, job.transfer.direction);
            job.leave_queue();
            let line = self.line_of(direction);
            self.lines[line].waiting.remove(worker, &id);
        }
        end_if_over(&mut self.jobs, &self.ends, id);
    }

    /// The job whose turn it is leaves its queue.
    fn leave(&mut self, line: usize, id: u64) {
        self.lines[line].waiting.pop();
        if let Some(job) = self.jobs.get_mut(&id) {
            job.leave_queue();
        }
        end_if_over(&mut self.jobs, &self.ends, id);
    }
}

/// Whether the driver has had nothing but errors to say, this one now, for as long as what is with the GPU is kept from
/// others.
fn is_given_up(failing: &mut Option<Instant>, error: &CudaError) -> bool {
    let grace = match error.ends_context() {
        true => CONTEXT_GRACE,
        false => ERROR_GRACE,
    };
    failing.get_or_insert_with(Instant::now).elapsed() >= grace
}

/// Never, where that is too late to be told.
fn later(pause: Duration) -> Option<Instant> {
    Instant::now().checked_add(pause)
}

/// Hands on a job of which nothing is waiting or with the GPU any more: what is done with it takes longer than this
/// thread has.
fn end_if_over(jobs: &mut HashMap<u64, Job>, ends: &Sender<Job>, id: u64) {
    if let Entry::Occupied(job) = jobs.entry(id)
        && job.get().is_over()
    {
        // Whoever takes them ends after this thread.
        let _ = ends.send(job.remove());
    }
}
