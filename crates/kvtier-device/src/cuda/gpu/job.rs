//! One transfer on its way through a GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::super::device_copy::{DeviceCopies, Place};
use super::super::events::{ForeignEvent, ForeignEvents};
use super::super::storages::Storages;
use super::executor::{HostMemory, PIECE};
use super::pinned::Pinned;
use crate::device::{Begun, DeviceError, Done, Transfer};
use crate::layout::KvLayout;
use crate::plan::Direction;

/// Longest pause between two questions about an event.
const LONGEST_PAUSE: Duration = Duration::from_micros(500);

/// One worker's pages as the thread of its GPU knows them.
#[derive(Debug)]
pub(in super::super) struct Pages {
    /// Tells workers apart.
    pub number: u64,
    pub layout: Arc<KvLayout>,
    /// By index of [`KvLayout::memories`].
    pub places: Vec<Place>,
    /// Nothing more of it is begun.
    pub stopped: AtomicBool,
    /// Transfers of everybody on the GPU that have not ended, by direction.
    pub on_gpu: Arc<[AtomicU64; 2]>,
    pub retrieves: Mutex<Retrieves>,
    pub events: ForeignEvents,
    /// What keeps the places mapped.
    pub _storages: Storages,
}

/// Where the retrieves of a worker are that have not ended: with one of the GPU's threads all of them, so that its pages are
/// written in the order in which that was asked for.
#[derive(Debug, Default)]
pub(in super::super) struct Retrieves {
    thread: usize,
    count: usize,
}

impl Retrieves {
    /// One more; gives the thread that has the others, or the one that suits it.
    pub fn enter(&mut self, suits: usize) -> usize {
        if self.count == 0 {
            self.thread = suits;
        }
        self.count += 1;
        self.thread
    }
}

/// A transfer. Dropped, whoever waits for it is told how it ended: that it failed, unless it [ended](Job::end) well. No piece
/// of it may be with the GPU then.
pub(in super::super) struct Job {
    /// Told when everything of it is with the GPU.
    begun: Option<Begun>,
    event: Event,
    pub transfer: Transfer,
    pub pages: Arc<Pages>,
    /// Counted among the worker's retrieves.
    entered: bool,
    /// When it was handed over, and when it is given up if the event is not complete by then.
    since: Instant,
    event_deadline: Option<Instant>,
    /// When to ask the event again.
    ask_at: Instant,
    next_chunk: usize,
    /// Copies of the chunk that was planned last, and how many of them were taken.
    planned: DeviceCopies,
    taken: usize,
    /// Where the object of that chunk is.
    host: HostMemory,
    /// Pieces handed to the GPU that are not done.
    pieces: usize,
    moved: u64,
    /// Nothing of it waits to be begun.
    has_left: bool,
    /// Why nothing more of it is begun.
    error: Option<DeviceError>,
    /// The last field: who hears of the last transfer may free the pages, so they are let go of before.
    told: Told,
}

/// What the engine sent to say when its pages are ready.
enum Event {
    /// Not looked at.
    Sent,
    /// They are when this is complete.
    Opened(ForeignEvent),
    /// They are.
    Complete,
}

/// Who waits for a transfer, and how it ended, once that is known. Told when it is dropped.
struct Told {
    done: Option<Done>,
    result: Option<Result<u64, DeviceError>>,
}

impl Drop for Told {
    fn drop(&mut self) {
        let Some(done) = self.done.take() else {
            return;
        };
        let lost = || Err(DeviceError::Broken("nobody is left to end this".into()));
        let result = self.result.take().unwrap_or_else(lost);
        // A panic there is theirs. What is caught has been printed, and the responder inside says it to the health.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| done(result)));
    }
}

/// What a piece is made of, beside its copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PieceFacts {
    pub bytes: u64,
    /// What all of its host memory is, at least.
    pub host: HostMemory,
    /// Nothing comes after it.
    pub last: bool,
}

impl Job {
    /// `event_timeout` is how long its event may take from now on.
    pub fn new(pages: Arc<Pages>, transfer: Transfer, event_timeout: Duration, done: Done) -> Self {
        let since = Instant::now();
        pages.on_gpu[transfer.direction as usize].fetch_add(1, Ordering::Relaxed);
        Self {
            begun: None,
            event: Event::Sent,
            transfer,
            pages,
            entered: false,
            since,
            event_deadline: since.checked_add(event_timeout),
            ask_at: since,
            next_chunk: 0,
            planned: DeviceCopies::default(),
            taken: 0,
            host: HostMemory::Pageable,
            pieces: 0,
            moved: 0,
            has_left: false,
            error: None,
            told: Told {
                done: Some(done),
                result: None,
            },
        }
    }

    /// Whom to tell when everything of it is with the GPU.
    pub fn telling(mut self, begun: Begun) -> Self {
        self.begun = Some(begun);
        self
    }

    /// Counts it among its worker's retrieves if it is one; gives the thread that has them, or the one that suits it.
    pub(super) fn enter(&mut self, suits: usize) -> usize {
        match self.transfer.direction {
            Direction::Store => suits,
            Direction::Retrieve => {
                self.entered = true;
                self.pages.retrieves.lock().enter(suits)
            }
        }
    }

    /// Opens the engine's event, unless that was done. The engine keeps it only so long.
    ///
    /// # Errors
    /// Bytes that are no event, or what the driver says.
    pub(super) fn open_event(&mut self) -> Result<(), DeviceError> {
        if let Event::Sent = self.event {
            let opened = self.pages.events.open(&self.transfer.event);
            self.event = Event::Opened(opened.map_err(DeviceError::Event)?);
        }
        Ok(())
    }

    /// Takes whom to tell that everything of it is with the GPU; nobody when something of it failed.
    pub fn take_begun(&mut self) -> Option<Begun> {
        self.begun.take().filter(|_| self.error.is_none())
    }

    /// Whether a piece of it can be begun now. An event is asked less and less often: what it costs to find out late
    /// is little beside what was waited for already.
    ///
    /// # Errors
    /// Why none can any more.
    pub fn is_ready(&mut self, now: Instant) -> Result<bool, DeviceError> {
        if self.pages.stopped.load(Ordering::Acquire) {
            return Err(DeviceError::Stopped);
        }
        self.transfer.in_time(now)?;
        self.open_event()?;
        let Event::Opened(event) = &self.event else {
            return Ok(true);
        };
        let last = self.event_deadline.is_some_and(|deadline| now >= deadline);
        if now >= self.ask_at || last {
            if event.is_complete()? {
                self.event = Event::Complete;
                return Ok(true);
            }
            let waited = now.saturating_duration_since(self.since);
            self.ask_at = now + (waited / 16).min(LONGEST_PAUSE);
        }
        match last {
            true => Err(DeviceError::NeverReady),
            false => Ok(false),
        }
    }

    /// Fills `piece` with the next piece; `None` when there is none. `chunk` is anybody's.
    ///
    /// # Errors
    /// A chunk that cannot be.
    pub(super) fn next_piece(
        &mut self,
        piece: &mut DeviceCopies,
        chunk: &mut DeviceCopies,
        pinned: &Pinned,
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

    /// Plans the next chunk; says whether there was one.
    fn plan_chunk(
        &mut self,
        parts: &mut DeviceCopies,
        pinned: &Pinned,
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
        let extent = Place {
            address: address.as_ptr() as u64,
            bytes: chunk.extent.len,
        };
        let (layout, places) = (&self.pages.layout, &self.pages.places);
        let planned = &mut self.planned;
        planned.push_chunk(layout, blocks, chunk.request, places, extent)?;
        self.host = pinned.memory_of(arena, chunk.extent);
        let lengths = planned.run_lengths();
        if lengths.bytes > PIECE.bytes || lengths.runs > PIECE.runs {
            // There may be copies that are too much for a piece.
            parts.clear();
            for copy in planned.as_slice() {
                // A multiple of 16, as the number of runs is.
                let most = copy.inner_bytes.saturating_mul(PIECE.runs);
                copy.each_part(most.min(PIECE.bytes), &mut |part| parts.push_apart(*part));
            }
            std::mem::swap(planned, parts);
        }
        Ok(true)
    }

    /// Nothing more of it is begun.
    pub fn fail(&mut self, error: DeviceError) {
        self.error.get_or_insert(error);
    }

    /// A piece of it was handed to the GPU.
    pub fn piece_begun(&mut self) {
        self.pieces += 1;
    }

    /// A piece of it has ended, after moving so many bytes.
    pub fn piece_ended(&mut self, bytes: u64) {
        self.pieces -= 1;
        self.moved += bytes;
    }

    /// Nothing of it waits any more.
    pub fn leave_queue(&mut self) {
        self.has_left = true;
    }

    /// Whether nothing of it waits or is with the GPU.
    pub fn is_over(&self) -> bool {
        self.has_left && self.pieces == 0
    }

    /// Whether nothing more of it is begun.
    pub fn has_failed(&self) -> bool {
        self.error.is_some()
    }

    /// Whether nothing of it was ever handed to the GPU, not even in part.
    pub fn is_untouched(&self) -> bool {
        self.next_chunk == 0
    }

    /// It is over: tells how it ended.
    pub fn end(mut self, now: Instant) {
        self.told.result = Some(match self.error.take() {
            Some(error) => Err(error),
            // Pages that were given up may be somebody else's by now.
            None => self.transfer.in_time(now).map(|()| self.moved),
        });
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let direction = self.transfer.direction;
        self.pages.on_gpu[direction as usize].fetch_sub(1, Ordering::Relaxed);
        if self.entered {
            self.pages.retrieves.lock().count -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn who_waits_for_a_transfer_that_is_lost_is_told() {
        let (say, hear) = mpsc::channel();
        let done: Done = Box::new(move |result| say.send(result).unwrap());
        drop(Told {
            done: Some(done),
            result: None,
        });
        let told = hear.recv().unwrap();
        assert!(matches!(told, Err(DeviceError::Broken(_))), "{told:?}");
        assert!(hear.recv().is_err());
    }
}
