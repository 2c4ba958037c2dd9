//! One transfer on its way through a GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use super::super::device_copy::{DeviceCopies, DeviceCopy, Place};
use super::super::events::ForeignEvent;
use super::super::storages::Storages;
use super::executor::{PIECE_BYTES, PIECE_COPIES};
use crate::device::{DeviceError, Done, Transfer};
use crate::layout::KvLayout;

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
    /// Transfers that have not ended.
    pub under_way: AtomicUsize,
    /// What keeps the places mapped.
    pub _storages: Storages,
}

/// A transfer.
pub(in super::super) struct Job {
    pub pages: Arc<Pages>,
    pub transfer: Transfer,
    /// The pages are ready when this is complete.
    pub event: ForeignEvent,
    /// When it is given up if the event is not complete by then.
    pub event_deadline: Instant,
    pub done: Done,
    progress: Progress,
}

/// How far a transfer is.
#[derive(Debug, Default)]
struct Progress {
    ready: bool,
    next_chunk: usize,
    /// Copies of the chunks planned last, and how many of them were taken.
    planned: Vec<DeviceCopy>,
    taken: usize,
    /// Whether the extent of that chunk is pinned.
    straight: bool,
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
pub(in super::super) struct PieceFacts {
    pub bytes: u64,
    /// Whether all of its host memory is pinned.
    pub straight: bool,
}

impl Job {
    pub fn new(
        pages: Arc<Pages>,
        transfer: Transfer,
        event: ForeignEvent,
        event_deadline: Instant,
        done: Done,
    ) -> Self {
        Self {
            pages,
            transfer,
            event,
            event_deadline,
            done,
            progress: Progress::default(),
        }
    }

    /// Whether a piece of it can be begun now.
    ///
    /// # Errors
    /// Why none can any more.
    pub fn is_ready(&mut self, now: Instant) -> Result<bool, DeviceError> {
        if self.pages.stopped.load(Ordering::Acquire) {
            return Err(DeviceError::Stopped);
        }
        self.transfer.in_time(now)?;
        if !self.progress.ready {
            self.progress.ready = self.event.is_complete()?;
        }
        match self.progress.ready {
            true => Ok(true),
            false if now < self.event_deadline => Ok(false),
            false => Err(DeviceError::NeverReady),
        }
    }

    /// Fills `copies` with the next piece; none when there is none.
    ///
    /// # Errors
    /// A chunk that cannot be.
    pub fn next_piece(
        &mut self,
        copies: &mut DeviceCopies,
        is_pinned: impl Fn(kvtier_memory::Extent) -> bool,
    ) -> Result<Option<PieceFacts>, DeviceError> {
        copies.clear();
        let mut bytes = 0;
        let mut straight = true;
        loop {
            let Some(copy) = self.progress.planned.get(self.progress.taken) else {
                match self.plan_chunk(&is_pinned)? {
                    true => continue,
                    false => break,
                }
            };
            let full =
                bytes + copy.bytes() > PIECE_BYTES || copies.as_slice().len() >= PIECE_COPIES;
            if full && bytes > 0 {
                break;
            }
            bytes += copy.bytes();
            straight &= self.progress.straight;
            copies.push(*copy);
            self.progress.taken += 1;
        }
        Ok((bytes > 0).then_some(PieceFacts { bytes, straight }))
    }

    /// Plans the next chunk; says whether there was one.
    fn plan_chunk(
        &mut self,
        is_pinned: impl Fn(kvtier_memory::Extent) -> bool,
    ) -> Result<bool, DeviceError> {
        let Some(chunk) = self.transfer.chunks.get(self.progress.next_chunk) else {
            return Ok(false);
        };
        self.progress.next_chunk += 1;
        let address = self
            .transfer
            .arena
            .address(chunk.extent, 0, chunk.extent.len)?;
        let extent = Place {
            address: address.as_ptr() as u64,
            bytes: chunk.extent.len,
        };
        let mut whole = DeviceCopies::default();
        whole.push_chunk(
            &self.pages.layout,
            &self.transfer.blocks,
            chunk.request,
            &self.pages.places,
            extent,
        )?;
        self.progress.planned.clear();
        self.progress.taken = 0;
        self.progress.straight = is_pinned(chunk.extent);
        for copy in whole.as_slice() {
            copy.each_part(PIECE_BYTES, &mut |part| self.progress.planned.push(*part));
        }
        Ok(true)
    }

    /// Nothing more of it is begun.
    pub fn fail(&mut self, error: DeviceError) {
        self.progress.error.get_or_insert(error);
    }

    /// A piece of it was handed to the GPU.
    pub fn piece_begun(&mut self) {
        self.progress.pieces += 1;
    }

    /// A piece of it has ended, or will never.
    pub fn piece_ended(&mut self, bytes: u64) {
        self.progress.pieces -= 1;
        self.progress.moved += bytes;
    }

    /// Nothing of it waits any more.
    pub fn leave_queue(&mut self) {
        self.progress.has_left = true;
    }

    /// Whether nothing of it waits or is with the GPU.
    pub fn is_over(&self) -> bool {
        self.progress.has_left && self.progress.pieces == 0
    }

    /// Tells whoever waits for it how it ended. A panic there is theirs.
    pub fn end(self, now: Instant) {
        let Progress { error, moved, .. } = self.progress;
        let result = match error {
            Some(error) => Err(error),
            // Pages that were given up may be somebody else's by now.
            None => self.transfer.in_time(now).map(|()| moved),
        };
        let done = self.done;
        // What is caught has been printed, and the responder inside says it to the health.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| done(result)));
        self.pages.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}
