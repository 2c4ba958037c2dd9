//! Events: records in shared memory, with counters.
//!
//! `recorded` counts the calls that recorded an event, `completed` is the last of them that its stream came to. An event
//! is complete when they are equal, also in importing processes, whether or not the exporter lives.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::abi::{ERROR_OUT_OF_MEMORY, Fault, Outcome};
use crate::segment::{Mapping, Segment};

/// Events that one process can have at a time.
const SLOTS: u64 = 1 << 16;
pub(crate) const FILE: &str = "events";

#[repr(C)]
pub(crate) struct Slot {
    /// Odd while the event exists; a slot that is used again has another.
    pub generation: AtomicU32,
    _pad: u32,
    pub recorded: AtomicU64,
    pub completed: AtomicU64,
    _reserved: u64,
}

const BYTES: u64 = SLOTS * size_of::<Slot>() as u64;

/// A process's events, ours or another's.
pub(crate) struct File(Mapping);

impl File {
    pub(crate) fn open(fd: &OwnedFd) -> Option<Arc<Self>> {
        use std::os::fd::AsRawFd as _;
        let whole = crate::segment::bytes_of(fd.as_raw_fd()) == BYTES;
        whole
            .then(|| Mapping::of(fd, BYTES))
            .flatten()
            .map(|mapping| Arc::new(Self(mapping)))
    }
}

/// One event's record.
#[derive(Clone)]
pub(crate) struct Record {
    file: Arc<File>,
    pub index: u32,
}

impl Record {
    /// `None`: no such slot.
    pub(crate) fn new(file: Arc<File>, index: u32) -> Option<Self> {
        (u64::from(index) < SLOTS).then_some(Self { file, index })
    }

    pub(crate) fn slot(&self) -> &Slot {
        let at = self
            .file
            .0
            .at(u64::from(self.index) * size_of::<Slot>() as u64);
        // SAFETY: inside the file, aligned to the slot's size, and only atomics.
        unsafe { &*at.cast::<Slot>() }
    }

    pub(crate) fn record(&self) -> u64 {
        self.slot().recorded.fetch_add(1, Ordering::AcqRel) + 1
    }

    pub(crate) fn complete(&self, up_to: u64) {
        self.slot().completed.fetch_max(up_to, Ordering::AcqRel);
    }

    pub(crate) fn last(&self) -> u64 {
        self.slot().recorded.load(Ordering::Acquire)
    }

    pub(crate) fn is_complete(&self, up_to: u64) -> bool {
        self.slot().completed.load(Ordering::Acquire) >= up_to
    }
}

/// The slots of this process.
#[derive(Default)]
pub(crate) struct Slots {
    file: Option<(Segment, Arc<File>)>,
    used: u32,
    free: VecDeque<u32>,
}

impl Slots {
    pub(crate) fn take(&mut self) -> Outcome<Record> {
        let none = || Fault::Code(ERROR_OUT_OF_MEMORY);
        if self.file.is_none() {
            let segment = Segment::create(FILE, BYTES).ok_or_else(none)?;
            let file = File::open(&segment.fd).ok_or_else(none)?;
            self.file = Some((segment, file));
        }
        let (_, file) = self.file.as_ref().ok_or_else(none)?;
        // New slots first, so that the slots of destroyed events are reused late.
        let index = if u64::from(self.used) < SLOTS {
            self.used += 1;
            self.used - 1
        } else {
            self.free.pop_front().ok_or_else(none)?
        };
        let record = Record::new(file.clone(), index).ok_or_else(none)?;
        let slot = record.slot();
        slot.recorded.store(0, Ordering::Relaxed);
        slot.completed.store(0, Ordering::Relaxed);
        slot.generation.fetch_add(1, Ordering::AcqRel);
        Ok(record)
    }

    pub(crate) fn release(&mut self, record: &Record) {
        record.slot().generation.fetch_add(1, Ordering::AcqRel);
        self.free.push_back(record.index);
    }
}

/// An event of this process, its own or imported.
pub(crate) struct Event {
    pub record: Record,
    pub flags: u32,
    pub device: usize,
    pub imported: bool,
    /// Imported, and scripted never to complete.
    pub stuck: bool,
    /// When its last record was reached, in nanoseconds.
    pub stamp: Arc<AtomicU64>,
}

impl Event {
    pub(crate) fn is_complete(&self) -> bool {
        !self.stuck && self.record.is_complete(self.record.last())
    }
}
