//! Job: one transfer in flight on a GPU.
//!
//! The mutex guards a worker's retrieves in flight; no other lock is acquired inside.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvtier_common::sync::Mutex;

use super::super::device_copy::{AddressRange, DeviceCopies, DeviceCopy};
use super::super::events::{ForeignEvent, ForeignEvents};
use super::super::storages::Storages;
use super::executor::{HostMemory, PIECE};
use super::pinned::PinnedArena;
use crate::device::{DeviceError, Done, OnSubmitted, Transfer};
use crate::layout::KvLayout;
use crate::plan::{Direction, PlannedCopy};

/// Maximum interval between two queries of an event.
const MAX_POLL_INTERVAL: Duration = Duration::from_micros(500);

/// The pages of one worker, as used by the threads of its GPU.
#[derive(Debug)]
pub(in super::super) struct Pages {
    /// Identifies the worker.
    pub number: u64,
    pub layout: Arc<KvLayout>,
    /// By index of [`KvLayout::memories`].
    pub places: Vec<AddressRange>,
    /// No further copy starts.
    pub stopped: AtomicBool,
    /// Transfers of all workers in flight on the GPU, by direction.
    pub on_gpu: Arc<[AtomicU64; 2]>,
    pub retrieves: Mutex<Retrieves>,
    pub events: ForeignEvents,
    /// Keeps the memories mapped.
    pub storages: Storages,
}

/// The retrieves of a worker in flight. All are on one thread of the GPU, so that pages are written in request order.
#[derive(Debug, Default)]
pub(in super::super) struct Retrieves {
    thread: usize,
    count: usize,
}

impl Retrieves {
    /// Adds one; returns the thread that has the others, or else `suits`.
    pub fn enter(&mut self, suits: usize) -> usize {
        if self.count == 0 {
            self.thread = suits;
        }
        self.count += 1;
        self.thread
    }
}

/// A transfer. Dropping it reports a failure, unless [`GpuJob::finish`] has set the result. No piece of it may be in flight
/// then.
pub(in super::super) struct GpuJob {
    /// Called when all of its pieces are submitted.
    on_submitted: Option<OnSubmitted>,
    event: Event,
    pub transfer: Transfer,
    pub pages: Arc<Pages>,
    /// Whether it is counted in the worker's [`Retrieves`].
    counted_as_retrieve: bool,
    /// Time of submission, and of the timeout of its event.
    submitted_at: Instant,
    event_deadline: Option<Instant>,
    /// Time of the next query of the event.
    next_poll: Instant,
    next_chunk: usize,
    /// Copies of the chunk planned last, and the number of them in pieces.
    planned: DeviceCopies,
    taken: usize,
    /// Host memory of that chunk's object.
    host: HostMemory,
    /// Pieces in flight.
    pieces: usize,
    moved: u64,
    /// Whether it has left its queue: no piece will be submitted.
    is_dequeued: bool,
    /// First error; no piece is submitted after it.
    error: Option<DeviceError>,
    /// The last field: the callback of the last transfer may free the pages, so `pages` is dropped before.
    completion: Completion,
}

/// State of the engine's event, after which its pages are ready.
enum Event {
    /// Not opened yet.
    Sent,
    /// Opened, not known to be complete.
    Opened(ForeignEvent),
    /// The pages are ready.
    Complete,
}

/// The callback of a transfer and its result. Dropping it calls the callback.
pub(in super::super) struct Completion {
    done: Option<Done>,
    result: Option<Result<u64, DeviceError>>,
}

impl Completion {
    pub fn new(done: Done) -> Self {
        Self {
            done: Some(done),
            result: None,
        }
    }

    /// Reports the result.
    pub fn finish(mut self, result: Result<u64, DeviceError>) {
        self.result = Some(result);
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        let Some(done) = self.done.take() else {
            return;
        };
        let lost = || Err(DeviceError::Broken("the transfer was lost".into()));
        let result = self.result.take().unwrap_or_else(lost);
        // A panic in the callback is the caller's: it has been printed, and its reply handle reports it to /healthcheck.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| done(result)));
    }
}

/// Properties of a piece besides its copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PieceFacts {
    pub bytes: u64,
    /// Lowest level of its host memory.
    pub host: HostMemory,
    /// Whether it is the last piece of its job.
    pub last: bool,
}

impl GpuJob {
    /// Creates a job whose event must complete within `event_timeout`.
    pub fn new(pages: Arc<Pages>, transfer: Transfer, event_timeout: Duration, done: Done) -> Self {
        let submitted_at = Instant::now();
        pages.on_gpu[transfer.direction as usize].fetch_add(1, Ordering::Relaxed);
        Self {
            on_submitted: None,
            event: Event::Sent,
            transfer,
            pages,
            counted_as_retrieve: false,
            submitted_at,
            event_deadline: submitted_at.checked_add(event_timeout),
            next_poll: submitted_at,
            next_chunk: 0,
            planned: DeviceCopies::default(),
            taken: 0,
            host: HostMemory::Pageable,
            pieces: 0,
            moved: 0,
            is_dequeued: false,
            error: None,
            completion: Completion::new(done),
        }
    }

    /// Sets the copies, in place of chunks to plan. Their host memory is that of the transfer's arena, which is not pinned.
    ///
    /// # Errors
    /// A copy outside the arena or the pages.
    pub fn with_copies(mut self, copies: &[PlannedCopy]) -> Result<Self, DeviceError> {
        let arena = &self.transfer.arena;
        let rows = AddressRange {
            address: arena.base().as_ptr() as u64,
            bytes: arena.len(),
        };
        for copy in copies {
            let copy = DeviceCopy::new(copy, &self.pages.places, rows)?;
            push_parts(&mut self.planned, &copy);
        }
        // There is nothing to plan, and a piece of it may be in flight.
        self.next_chunk = 1;
        Ok(self)
    }

    /// Sets the callback for when all pieces are submitted.
    pub fn on_submitted(mut self, on_submitted: OnSubmitted) -> Self {
        self.on_submitted = Some(on_submitted);
        self
    }

    /// Counts it in its worker's retrieves, if it is one; returns the thread that has them, or else `suits`.
    pub(super) fn enter(&mut self, suits: usize) -> usize {
        match self.transfer.direction {
            Direction::Store => suits,
            Direction::Retrieve => {
                self.counted_as_retrieve = true;
                self.pages.retrieves.lock().enter(suits)
            }
        }
    }

    /// Opens the engine's event, if not done yet. The engine keeps it only for a limited time.
    ///
    /// # Errors
    /// An invalid event handle, or the driver's error.
    pub(super) fn open_event(&mut self) -> Result<(), DeviceError> {
        if let Event::Sent = self.event {
            let opened = self.pages.events.open(&self.transfer.event);
            self.event = Event::Opened(opened.map_err(DeviceError::Event)?);
        }
        Ok(())
    }

    /// Takes the callback for when all pieces are submitted; `None` after a failure.
    pub fn take_on_submitted(&mut self) -> Option<OnSubmitted> {
        self.on_submitted.take().filter(|_| self.error.is_none())
    }

    /// Whether a piece can be submitted now. The interval between queries of the event grows with the time waited.
    ///
    /// # Errors
    /// The job has failed: stopped, past its deadline, or an event error or timeout.
    pub fn is_ready(&mut self, now: Instant) -> Result<bool, DeviceError> {
        if self.pages.stopped.load(Ordering::Acquire) {
            return Err(DeviceError::Stopped);
        }
        self.transfer.check_deadline(now)?;
        self.open_event()?;
        let Event::Opened(event) = &self.event else {
            return Ok(true);
        };
        let last = self.event_deadline.is_some_and(|deadline| now >= deadline);
        if now >= self.next_poll || last {
            if event.is_complete()? {
                self.event = Event::Complete;
                return Ok(true);
            }
            let waited = now.saturating_duration_since(self.submitted_at);
            self.next_poll = now + (waited / 16).min(MAX_POLL_INTERVAL);
        }
        if last {
            Err(DeviceError::EventTimeout)
        } else {
            Ok(false)
        }
    }

    /// Fills `piece` with the next piece; `None` after the last one. `chunk` is scratch memory.
    ///
    /// # Errors
    /// An invalid chunk.
    pub(super) fn next_piece(
        &mut self,
        piece: &mut DeviceCopies,
        chunk: &mut DeviceCopies,
        pinned: &PinnedArena,
    ) -> Result<Option<PieceFacts>, DeviceError> {
        piece.clear();
        let mut facts = PieceFacts {
            bytes: 0,
            host: HostMemory::Mapped,
            last: false,
        };
        loop {
            let taken = piece.fill(&self.planned, self.taken, PIECE);
            if taken > self.taken {
                facts.host = facts.host.min(self.host);
                self.taken = taken;
            }
            if taken < self.planned.as_slice().len() {
                break;
            }
            if !self.plan_chunk(chunk, pinned)? {
                facts.last = true;
                break;
            }
        }
        facts.bytes = piece.run_lengths().bytes;
        Ok((facts.bytes > 0).then_some(facts))
    }

    /// Plans the next chunk; `false` after the last one.
    fn plan_chunk(
        &mut self,
        parts: &mut DeviceCopies,
        pinned: &PinnedArena,
    ) -> Result<bool, DeviceError> {
        let Transfer {
            arena,
            blocks,
            chunks,
            ..
        } = &self.transfer;
        let Some(chunk) = chunks.get(self.next_chunk) else {
            return Ok(false);
        };
        self.next_chunk += 1;
        self.taken = 0;
        self.planned.clear();
        let address = arena.address(chunk.extent, 0, chunk.extent.len)?;
        let extent = AddressRange {
            address: address.as_ptr() as u64,
            bytes: chunk.extent.len,
        };
        let (layout, places) = (&self.pages.layout, &self.pages.places);
        let planned = &mut self.planned;
        planned.push_chunk(layout, blocks, chunk.request, places, extent)?;
        self.host = pinned.memory_of(arena, chunk.extent);
        let lengths = planned.run_lengths();
        if lengths.bytes > PIECE.bytes || lengths.runs > PIECE.runs {
            // Single copies may exceed the limits of a piece.
            parts.clear();
            planned
                .as_slice()
                .iter()
                .for_each(|copy| push_parts(parts, copy));
            std::mem::swap(planned, parts);
        }
        Ok(true)
    }

    /// Records the first error; no piece is submitted after it.
    pub fn fail(&mut self, error: DeviceError) {
        self.error.get_or_insert(error);
    }

    /// Counts a submitted piece.
    pub fn piece_submitted(&mut self) {
        self.pieces += 1;
    }

    /// Counts an ended piece that has moved `bytes`.
    pub fn piece_ended(&mut self, bytes: u64) {
        self.pieces -= 1;
        self.moved += bytes;
    }

    /// Marks it as having left its queue.
    pub fn mark_dequeued(&mut self) {
        self.is_dequeued = true;
    }

    /// Whether it has left its queue and has no piece in flight.
    pub fn is_finished(&self) -> bool {
        self.is_dequeued && self.pieces == 0
    }

    /// Whether it has failed.
    pub fn has_failed(&self) -> bool {
        self.error.is_some()
    }

    /// Whether no piece of it was ever submitted.
    pub fn has_not_started(&self) -> bool {
        self.next_chunk == 0
    }

    /// Reports the result.
    pub fn finish(mut self, now: Instant) {
        self.completion.result = Some(match self.error.take() {
            Some(error) => Err(error),
            // After the deadline the engine may have reused the pages.
            None => self.transfer.check_deadline(now).map(|()| self.moved),
        });
    }
}

/// Appends a copy in parts within the limits of a piece.
fn push_parts(parts: &mut DeviceCopies, copy: &DeviceCopy) {
    // A multiple of 16, as the number of runs is.
    let most = copy.inner_bytes.saturating_mul(PIECE.runs);
    copy.visit_parts(most.min(PIECE.bytes), &mut |part| parts.push_apart(*part));
}

impl Drop for GpuJob {
    fn drop(&mut self) {
        let direction = self.transfer.direction;
        self.pages.on_gpu[direction as usize].fetch_sub(1, Ordering::Relaxed);
        if self.counted_as_retrieve {
            self.pages.retrieves.lock().count -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn lost_transfer_reports_a_failure() {
        let (say, hear) = mpsc::channel();
        let done: Done = Box::new(move |result| say.send(result).unwrap());
        drop(Completion::new(done));
        let completion = hear.recv().unwrap();
        assert!(
            matches!(completion, Err(DeviceError::Broken(_))),
            "{completion:?}"
        );
        assert!(hear.recv().is_err());
    }
}
