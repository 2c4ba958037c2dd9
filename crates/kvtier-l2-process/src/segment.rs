//! The segment of one connection: where the bytes of objects lie while a request for them is in flight.
//!
//! The mutex guards which parts are free; no other lock is acquired inside. A part stays allocated until the tier has answered, also if no caller waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier_common::sync::Mutex;
use kvtier_memory::{Extent, FreeExtents, SharedSegment};
use tokio::sync::Notify;

use kvtier_l2::{ErrorKind, L2Error};

/// Alignment of the parts: that of direct I/O.
pub(super) const ALIGNMENT: u64 = 4096;

/// Shared memory, and which parts of it are free.
pub(super) struct Segment {
    memory: SharedSegment,
    free: Mutex<FreeExtents>,
    freed: Notify,
    /// Requests that wait for memory wait here first, in order, so that small requests do not starve a large one.
    turn: tokio::sync::Mutex<()>,
    is_closed: AtomicBool,
}

/// A part of a segment; free again when it is dropped.
pub(super) struct SegmentSlot {
    segment: Arc<Segment>,
    extent: Extent,
}

impl SegmentSlot {
    pub(super) fn at(&self) -> u64 {
        self.extent.offset
    }

    pub(super) fn memory(&self) -> &SharedSegment {
        &self.segment.memory
    }
}

impl Drop for SegmentSlot {
    fn drop(&mut self) {
        let freed = self.segment.free.lock().free(self.extent);
        debug_assert!(freed.is_ok(), "a slot was not allocated: {freed:?}");
        self.segment.freed.notify_waiters();
    }
}

impl Segment {
    pub(super) fn create(bytes: u64) -> Result<Arc<Self>, L2Error> {
        let failed = |error: &dyn std::fmt::Display| {
            let what = format!("shared memory of {bytes} bytes: {error}");
            L2Error::new(ErrorKind::Memory, what)
        };
        let memory = SharedSegment::create(bytes).map_err(|error| failed(&error))?;
        let free =
            FreeExtents::with_alignment(memory.len(), ALIGNMENT).map_err(|error| failed(&error))?;
        Ok(Arc::new(Self {
            memory,
            free: Mutex::new(free),
            freed: Notify::new(),
            turn: tokio::sync::Mutex::new(()),
            is_closed: false.into(),
        }))
    }

    pub(super) fn memory(&self) -> &SharedSegment {
        &self.memory
    }

    /// Allocated bytes.
    pub(super) fn used(&self) -> u64 {
        self.free.lock().used()
    }

    /// Waits for `bytes`, at most [`Self::len`](SharedSegment::len). `None` if the segment was closed.
    pub(super) async fn allocate(self: &Arc<Self>, bytes: u64) -> Option<SegmentSlot> {
        let _turn = self.turn.lock().await;
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            if self.is_closed.load(Ordering::Acquire) {
                return None;
            }
            let allocated = self.free.lock().allocate(bytes.max(1));
            if let Ok(extent) = allocated {
                return Some(SegmentSlot {
                    segment: Arc::clone(self),
                    extent,
                });
            }
            freed.await;
        }
    }

    /// Ends all waits for memory.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtier_l2::conformance::poll_once;

    #[tokio::test]
    async fn memory_is_given_in_order_of_requests() {
        let segment = Segment::create(1 << 20).unwrap();
        let most = segment.allocate((1 << 20) - 8192).await.unwrap();
        let mut large = Box::pin(segment.allocate(1 << 20));
        assert!(poll_once(&mut large).await.is_none());
        // It would fit, but is behind the large one.
        let mut small = Box::pin(segment.allocate(4096));
        assert!(poll_once(&mut small).await.is_none());
        drop(most);
        let large = large.await.unwrap();
        assert!(poll_once(&mut small).await.is_none());
        drop(large);
        drop(small.await.unwrap());
        assert_eq!(segment.used(), 0);
    }

    #[tokio::test]
    async fn closing_ends_the_waits() {
        let segment = Segment::create(1 << 20).unwrap();
        let all = segment.allocate(1 << 20).await.unwrap();
        let waiting = tokio::spawn({
            let segment = Arc::clone(&segment);
            async move { segment.allocate(1).await.is_none() }
        });
        tokio::task::yield_now().await;
        segment.close();
        assert!(waiting.await.unwrap());
        drop(all);
        assert!(segment.allocate(1).await.is_none());
    }
}
