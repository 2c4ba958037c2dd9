//! Feeder: the thread that submits pieces to the streams of a GPU.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use super::super::device_copy::DeviceCopies;
use super::super::error::CudaError;
use super::super::events::{ExportedEvents, TIMELINE_BYTES, Timeline, TimelineSlot};
use super::executor::{CopyLane, Executor, Tools};
use super::fair_queue::FairQueue;
use super::job::GpuJob;
use super::pinned::PinnedArena;
use super::profile;
use super::{GpuShared, Mailbox, PINNED};
use crate::device::DeviceError;
use crate::plan::Direction;

/// How long the thread polls without sleeping after the last progress. Most pieces and events complete within it.
const SPIN_TIME: Duration = Duration::from_micros(50);
/// Poll interval while pieces are in flight: the maximum delay of an answer.
const PIECE_POLL_INTERVAL: Duration = Duration::from_micros(20);
/// Poll interval while only events are pending. An engine's step takes milliseconds.
const EVENT_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Poll interval of an unusable GPU.
const BROKEN_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long memory of submitted pieces stays reserved after the context is lost. The driver runs nothing more of the
/// context, but a copy engine may still finish its work; 8 pieces take a few milliseconds.
const CONTEXT_GRACE: Duration = Duration::from_secs(1);
/// How long memory of submitted pieces stays reserved after other errors, which leave open whether work still runs. By then
/// it has ended or never will.
const ERROR_GRACE: Duration = Duration::from_secs(30);

/// The queue and the pieces in flight of one direction.
struct DirectionQueue {
    lane: CopyLane,
    direction: Direction,
    /// Jobs with pieces to submit, by worker.
    waiting: FairQueue<u64, u64>,
    /// Pieces in flight; they end in this order.
    pieces: VecDeque<SubmittedPiece>,
    free: Vec<usize>,
    /// Since when queries of the first piece have failed.
    failing: Option<Instant>,
    /// Slot of its timeline events, once there is one.
    timeline_slot: Option<TimelineSlot>,
}

/// A piece in flight.
struct SubmittedPiece {
    slot: usize,
    job: u64,
    bytes: u64,
    executor: Executor,
    submitted_at: Instant,
}

/// Result of trying to submit the next piece of a job.
enum Progress {
    /// Not possible yet: its pages are not ready, or all slots are in use.
    Waiting,
    /// A piece was submitted, and there are more.
    PieceSubmitted,
    /// All pieces are submitted.
    AllSubmitted,
}

/// State of the thread.
pub(super) struct Feeder {
    shared: Arc<GpuShared>,
    /// Index of its mailbox.
    mailbox: usize,
    tools: Arc<Tools>,
    /// When to repeat the trial of staged copies, if it lacked memory.
    retry_at: Option<Instant>,
    /// Whether submission is paused until all pieces have ended, for that trial.
    is_paused: bool,
    /// Retrieves first.
    lines: [DirectionQueue; 2],
    jobs: HashMap<u64, GpuJob>,
    next_job: u64,
    /// Jobs whose events are not open yet. One is opened per round, because the driver takes some microseconds.
    unopened: VecDeque<u64>,
    /// Scratch memory: the next piece, and the chunk it is made from.
    piece: DeviceCopies,
    chunk: DeviceCopies,
    pinned: Arc<PinnedArena>,
    exported: ExportedEvents,
    timeline: Option<Arc<Timeline>>,
    finished: Sender<GpuJob>,
}

impl Feeder {
    pub fn new(
        shared: Arc<GpuShared>,
        mailbox: usize,
        tools: Arc<Tools>,
        [store, retrieve]: [CopyLane; 2],
        pinned: Arc<PinnedArena>,
        finished: Sender<GpuJob>,
    ) -> Self {
        let line = |lane: CopyLane, direction| DirectionQueue {
            free: (0..lane.slots()).collect(),
            lane,
            direction,
            waiting: FairQueue::default(),
            pieces: VecDeque::new(),
            failing: None,
            timeline_slot: None,
        };
        // Only one of the threads repeats the trial.
        let lacks_staging_memory =
            mailbox == PINNED && shared.profile.read().lacks_staging_memory();
        let pause = shared.options.staging_pause;
        Self {
            retry_at: lacks_staging_memory.then(|| after(pause)).flatten(),
            shared,
            mailbox,
            exported: ExportedEvents::new(Arc::clone(&tools.context)),
            timeline: None,
            tools,
            is_paused: false,
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
            finished,
        }
    }

    /// Runs until it is stopped and all pieces in flight have ended.
    pub fn run(mut self) {
        let served = catch_unwind(AssertUnwindSafe(|| self.serve()));
        if served.is_err() {
            self.abandon();
        } else if self.shared.broken.lock().is_none() {
            // All pieces are done; the streams become idle a moment later.
            for line in &self.lines {
                let _ = line.lane.finish();
            }
        }
    }

    fn serve(&mut self) {
        // A sleep of 20 us would otherwise take 70.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        if let Err(error) = self.tools.context.make_current() {
            self.shared.set_broken(&error);
        }
        let mut last_work = Instant::now();
        loop {
            let stop = self.take();
            let mut worked = self.open_event();
            self.try_staged();
            for line in 0..self.lines.len() {
                worked |= self.collect_done(line);
                worked |= self.submit_next(line, stop);
            }
            if stop && self.jobs.is_empty() && self.mailbox().close() {
                return;
            }
            let now = Instant::now();
            if worked {
                last_work = now;
            } else if !self.jobs.is_empty() && now - last_work < SPIN_TIME {
                std::hint::spin_loop();
            } else {
                self.sleep();
            }
        }
    }

    /// Fails all jobs after a panic, those with submitted pieces once the streams are idle. The state of this thread is not
    /// trusted.
    fn abandon(&mut self) {
        self.shared
            .abandon(self.mailbox, "its thread ended in a panic");
        let untouched = self.jobs.extract_if(|_, job| job.has_not_started());
        untouched.for_each(|(_, job)| self.shared.refuse(job));
        for DirectionQueue { lane, failing, .. } in &mut self.lines {
            let mut grace_over = |error| grace_is_over(failing, &error);
            while !lane.is_idle().unwrap_or_else(&mut grace_over) {
                std::thread::sleep(BROKEN_POLL_INTERVAL);
            }
        }
        let jobs = self.jobs.drain();
        jobs.for_each(|(_, job)| self.shared.refuse(job));
    }

    /// Repeats the trial of staged copies when it is due and no piece is in flight. With memory available, it takes as long
    /// as some hundred pieces.
    fn try_staged(&mut self) {
        let is_time = self.retry_at.is_some_and(|at| Instant::now() >= at);
        let broken = is_time && self.shared.broken.lock().is_some();
        if broken {
            // Never again: a time in the past would keep the thread from sleeping.
            self.retry_at = None;
        }
        let wanted = is_time && !broken;
        self.is_paused = wanted && self.lines.iter().any(|line| !line.pieces.is_empty());
        if !wanted || self.is_paused {
            return;
        }
        self.retry_at = None;
        let known = self.shared.profile.read().clone();
        let [retrieve, store] = &mut self.lines;
        let lanes = [&mut store.lane, &mut retrieve.lane];
        match profile::try_staged(&self.tools, lanes, &known) {
            Ok(Some(profile)) => *self.shared.profile.write() = profile,
            Ok(None) => self.retry_at = after(self.shared.options.staging_pause),
            Err(error) => self.shared.set_broken(&error),
        }
    }

    /// Takes new jobs from the mailbox; returns whether to stop.
    fn take(&mut self) -> bool {
        let mut inbox = self.mailbox().inbox.lock();
        let jobs = std::mem::take(&mut inbox.jobs);
        inbox.recheck = false;
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

    /// Opens the next event; returns whether there was one. A job with an invalid event fails at once.
    fn open_event(&mut self) -> bool {
        let Some(id) = self.unopened.pop_front() else {
            return false;
        };
        let opened = self.jobs.get_mut(&id).map(GpuJob::open_event);
        if let Some(Err(error)) = opened {
            self.fail_job(id, error);
            self.dequeue(id);
        }
        true
    }

    fn mailbox(&self) -> &Mailbox {
        &self.shared.mailboxes[self.mailbox]
    }

    fn line_of(&self, direction: Direction) -> usize {
        usize::from(self.lines[0].direction != direction)
    }

    /// Sleeps until the mailbox changes or the next poll is due.
    fn sleep(&self) {
        let mailbox = self.mailbox();
        let mut inbox = mailbox.inbox.lock();
        if !inbox.jobs.is_empty() || inbox.recheck || inbox.stop && self.jobs.is_empty() {
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
            BROKEN_POLL_INTERVAL
        } else if self.lines.iter().all(|line| line.pieces.is_empty()) {
            EVENT_POLL_INTERVAL
        } else {
            PIECE_POLL_INTERVAL
        };
        mailbox.wake.wait_for(&mut inbox, pause);
    }

    /// Collects the pieces that are done; returns whether there were any.
    fn collect_done(&mut self, line: usize) -> bool {
        let mut any = false;
        let line = &mut self.lines[line];
        while let Some(piece) = line.pieces.front() {
            let error = match line.lane.is_done(piece.slot) {
                Ok(true) => None,
                Ok(false) => break,
                Err(error) => {
                    self.shared.set_broken(&error);
                    if !grace_is_over(&mut line.failing, &error) {
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
                    let (counters, took) = (&self.shared.counters, piece.submitted_at.elapsed());
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
            hand_on_if_finished(&mut self.jobs, &self.finished, id);
        }
        any
    }

    /// Submits at most one piece, so that planning a thousand pages does not delay the other direction. Returns whether it
    /// made progress.
    fn submit_next(&mut self, line: usize, stop: bool) -> bool {
        let mut any = false;
        // Every worker is tried again after any progress. A worker that has to wait goes to the end; if all wait, their
        // order is unchanged.
        let mut left = self.lines[line].waiting.keys();
        while left > 0
            && let Some(&id) = self.lines[line].waiting.head()
        {
            match self.submit_piece(line, id, stop) {
                Ok(Progress::Waiting) => {
                    self.lines[line].waiting.pass();
                    left -= 1;
                    continue;
                }
                Ok(Progress::PieceSubmitted) => {
                    self.lines[line].waiting.pass();
                    return true;
                }
                Ok(Progress::AllSubmitted) => {
                    self.report_submitted(line, id);
                    self.dequeue_head(line, id);
                    return true;
                }
                Err(error) => {
                    self.fail_job(id, error);
                    self.dequeue_head(line, id);
                }
            }
            any = true;
            left = self.lines[line].waiting.keys();
        }
        any
    }

    /// Submits the next piece of a job, if possible.
    fn submit_piece(&mut self, line: usize, id: u64, stop: bool) -> Result<Progress, DeviceError> {
        if let Some(error) = self.shared.broken.lock().clone() {
            return Err(DeviceError::Broken(error));
        }
        if stop {
            return Err(DeviceError::Stopped);
        }
        let Some(job) = self.jobs.get_mut(&id) else {
            return Ok(Progress::AllSubmitted);
        };
        if job.has_failed() {
            return Ok(Progress::AllSubmitted);
        }
        let line = &mut self.lines[line];
        let ready = job.is_ready(Instant::now())?;
        let Some(&slot) = line.free.last().filter(|_| ready && !self.is_paused) else {
            return Ok(Progress::Waiting);
        };
        let Some(facts) = job.next_piece(&mut self.piece, &mut self.chunk, &self.pinned)? else {
            return Ok(Progress::AllSubmitted);
        };
        let host = facts.host.min(self.shared.profile.read().registered);
        let lengths = self.piece.run_lengths();
        let (mean, shared) = (lengths.mean(), &self.shared);
        let submitted_at = Instant::now();
        let mut chosen = shared.choose(line.direction, mean, host, true);
        if chosen == Executor::Staged {
            let pause = shared.options.staging_pause;
            let can_stage = line.lane.has_staging_buffer(slot, submitted_at, pause)?;
            chosen = shared.choose(line.direction, mean, host, can_stage);
        }
        shared.counters.runs(line.direction, mean, lengths.runs);
        // SAFETY: the context is current on this thread. The job keeps the pages mapped and holds the arena and its
        // extents, and lives until its last piece is done. The copies were checked against the mapped pages and the
        // extent, and the kernel is only chosen for memory with equal addresses on host and GPU. The slot is free.
        let submitted = unsafe {
            let pieces = self.pinned.pieces();
            line.lane.submit(slot, chosen, &self.piece, pieces)
        };
        // Also after an error part of it may have been started; it is done when the stream is.
        line.free.pop();
        job.piece_submitted();
        line.pieces.push_back(SubmittedPiece {
            slot,
            job: id,
            bytes: facts.bytes,
            executor: *submitted.as_ref().unwrap_or(&chosen),
            submitted_at,
        });
        submitted?;
        Ok(if facts.last {
            Progress::AllSubmitted
        } else {
            Progress::PieceSubmitted
        })
    }

    /// Reports that all pieces of a job are submitted, with the event that completes when they are done. If no event can be
    /// recorded, only the end is reported.
    fn report_submitted(&mut self, line: usize, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else {
            return;
        };
        let Some(on_submitted) = job.take_on_submitted() else {
            return;
        };
        // In the form of the request's event.
        let event = match job.transfer.event.len() {
            TIMELINE_BYTES => self.timeline_event(line).ok().map(|event| event.to_vec()),
            _ => {
                let event = self.lines[line].lane.export_event(&self.exported);
                event.ok().map(|event| event.to_vec())
            }
        };
        if let Some(event) = event {
            // A caught panic has been printed; the end of the job is reported as usual.
            let _ = catch_unwind(AssertUnwindSafe(|| on_submitted(&event)));
        }
    }

    /// Records a timeline event after all submitted pieces. The first one allocates the timeline.
    fn timeline_event(&mut self, line: usize) -> Result<[u8; TIMELINE_BYTES], DeviceError> {
        let line = &mut self.lines[line];
        let timeline_slot = match &mut line.timeline_slot {
            Some(timeline_slot) => timeline_slot,
            none => {
                let timeline = match &self.timeline {
                    Some(timeline) => Arc::clone(timeline),
                    None => Arc::clone(self.timeline.insert(Timeline::new(&self.tools.context)?)),
                };
                none.insert(timeline.slot()?)
            }
        };
        Ok(line.lane.export_timeline_event(timeline_slot)?)
    }

    /// Records the error of a job; no piece of it is submitted any more.
    fn fail_job(&mut self, id: u64, error: DeviceError) {
        match &error {
            DeviceError::EventTimeout => {
                self.shared.event_timeouts.fetch_add(1, Ordering::Relaxed);
            }
            DeviceError::Cuda(error) if error.ends_context() => {
                self.shared.set_broken(&error);
            }
            _ => {}
        }
        if let Some(job) = self.jobs.get_mut(&id) {
            job.fail(error);
        }
    }

    /// Removes a job from its queue, at any position.
    fn dequeue(&mut self, id: u64) {
        if let Some(job) = self.jobs.get_mut(&id) {
            let (worker, direction) = (job.pages.number, job.transfer.direction);
            job.mark_dequeued();
            let line = self.line_of(direction);
            self.lines[line].waiting.remove(worker, &id);
        }
        hand_on_if_finished(&mut self.jobs, &self.finished, id);
    }

    /// Removes the job whose turn it is from its queue.
    fn dequeue_head(&mut self, line: usize, id: u64) {
        self.lines[line].waiting.pop();
        if let Some(job) = self.jobs.get_mut(&id) {
            job.mark_dequeued();
        }
        hand_on_if_finished(&mut self.jobs, &self.finished, id);
    }
}

/// Whether queries have failed for the grace period of this error.
fn grace_is_over(failing: &mut Option<Instant>, error: &CudaError) -> bool {
    let grace = if error.ends_context() {
        CONTEXT_GRACE
    } else {
        ERROR_GRACE
    };
    failing.get_or_insert_with(Instant::now).elapsed() >= grace
}

/// The time after `pause`; `None` on overflow.
fn after(pause: Duration) -> Option<Instant> {
    Instant::now().checked_add(pause)
}

/// Hands a finished job to the thread that reports results, which may take long.
fn hand_on_if_finished(jobs: &mut HashMap<u64, GpuJob>, finished: &Sender<GpuJob>, id: u64) {
    if let Entry::Occupied(job) = jobs.entry(id)
        && job.get().is_finished()
    {
        // The receiver outlives this thread.
        let _ = finished.send(job.remove());
    }
}
