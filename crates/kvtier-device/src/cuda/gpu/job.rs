//! One transfer on its way through a GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::super::device_copy::{DeviceCopies, Place};
use super::super::events::ForeignEvent;
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
    pub retrieves: Mutex<Retrieves>,
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

/// A transfer.
pub(in super::super) struct Job {
    pub pages: Arc<Pages>,
    pub transfer: Transfer,
    done: Done,
    /// Told when everything of it is with the GPU.
    begun: Option<Begun>,
    /// The pages are ready when this is complete; none once it was.
    event: Option<ForeignEvent>,
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
    pub fn new(
        pages: Arc<Pages>,
        transfer: Transfer,
        event: ForeignEvent,
        event_timeout: Duration,
        done: Done,
    ) -> Self {
        let since = Instant::now();
        Self {
            pages,
            transfer,
            done,
            begun: None,
            event: Some(event),
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
        }
    }

    /// Whom to tell when everything of it is with the GPU.
    pub fn telling(mut self, begun: Begun) -> Self {
        self.begun = Some(begun);
        self
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
        let Some(event) = &self.event else {
            return Ok(true);
        };
        let last = self.event_deadline.is_some_and(|deadline| now >= deadline);
        if now >= self.ask_at || last {
            if event.is_complete()? {
                self.event = None;
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

    /// Tells whoever waits for it how it ended, after letting go of the pages: whoever hears of the last transfer may
    /// free them. A panic there is theirs.
    pub fn end(self, now: Instant) {
        let result = match self.error {
            Some(error) => Err(error),
            // Pages that were given up may be somebody else's by now.
            None => self.transfer.in_time(now).map(|()| self.moved),
        };
        let done = self.done;
        if self.transfer.direction == Direction::Retrieve {
            self.pages.retrieves.lock().count -= 1;
        }
        drop((self.event, self.pages, self.transfer));
        // What is caught has been printed, and the responder inside says it to the health.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| done(result)));
    }
}
