//! Events: counters in shared memory.
//!
//! `recorded` counts the calls that recorded an event, `completed` is the last of them that its stream came to. An event
//! is complete when they are equal, also in importing processes, whether or not the exporter lives.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::CudaResult;
use crate::segment::{Mapping, Segment};

pub(crate) const BYTES: u64 = 24;

/// The counters of an event.
#[derive(Clone)]
pub(crate) struct EventRecord(Arc<Mapping>);

impl EventRecord {
    pub(crate) fn of(fd: &OwnedFd) -> CudaResult<Self> {
        Ok(Self(Arc::new(Mapping::of(fd)?)))
    }

    fn number(&self, index: u64) -> &AtomicU64 {
        // SAFETY: inside the file, aligned, and only accessed as an atomic.
        unsafe { AtomicU64::from_ptr(self.0.at(index * 8).cast()) }
    }

    pub(crate) fn record(&self) -> u64 {
        self.number(0).fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Notes that a record was reached, and when.
    pub(crate) fn complete(&self, up_to: u64, nanoseconds: u64) {
        self.number(2).store(nanoseconds, Ordering::Release);
        self.number(1).fetch_max(up_to, Ordering::AcqRel);
    }

    pub(crate) fn last(&self) -> u64 {
        self.number(0).load(Ordering::Acquire)
    }

    pub(crate) fn is_complete(&self, up_to: u64) -> bool {
        self.number(1).load(Ordering::Acquire) >= up_to
    }

    pub(crate) fn nanoseconds(&self) -> u64 {
        self.number(2).load(Ordering::Acquire)
    }
}

/// An event of this process, which has a file, or an imported one.
pub(crate) struct Event {
    pub record: EventRecord,
    pub flags: u32,
    pub device: usize,
    pub segment: Option<Segment>,
}

impl Event {
    pub(crate) fn is_complete(&self) -> bool {
        self.record.is_complete(self.record.last())
    }
}
