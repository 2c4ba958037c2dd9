//! Small L1 that overwrites freed bytes with garbage.

use std::sync::Arc;

use kvtier_common::sync::Mutex;
use kvtier_memory::{Arena, ArenaKind, Extent, FreeExtents};
use tokio::sync::Notify;

use crate::object::Buffer;

/// Allocator of buffers in an anonymous arena, which are freed when their last hold is dropped.
#[derive(Clone)]
pub struct Memory(Arc<Pool>);

struct Pool {
    arena: Arc<Arena>,
    extents: Mutex<FreeExtents>,
    freed: Notify,
}

/// Keeps an extent allocated.
struct Hold {
    pool: Arc<Pool>,
    extent: Extent,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let garbage = vec![0xdb; self.extent.len as usize];
        let wiped = self.pool.arena.write(self.extent, 0, &garbage);
        let freed = self.pool.extents.lock().free(self.extent);
        self.pool.freed.notify_waiters();
        if !std::thread::panicking() {
            assert!(wiped.is_ok() && freed.is_ok(), "an extent was not taken");
        }
    }
}

impl Memory {
    /// Returns a memory of at least `bytes` bytes.
    ///
    /// # Panics
    /// If the system is out of memory.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let arena = Arena::create(ArenaKind::Anonymous, bytes).expect("memory for an arena");
        let extents = FreeExtents::new(arena.len()).expect("an arena that can be divided");
        Self(Arc::new(Pool {
            arena: Arc::new(arena),
            extents: Mutex::new(extents),
            freed: Notify::new(),
        }))
    }

    /// Returns a buffer of garbage.
    ///
    /// # Panics
    /// If there is no free memory, as adapters keep buffers of answered calls.
    #[must_use]
    pub fn buffer(&self, len: u64) -> Buffer {
        let extent = self.0.extents.lock().allocate(len);
        let extent = extent.expect("free memory, as adapters drop their buffers");
        let hold = Hold {
            pool: self.0.clone(),
            extent,
        };
        Buffer::new(self.0.arena.clone(), extent, Arc::new(hold))
    }

    /// Returns a buffer with these bytes.
    ///
    /// # Panics
    /// As [`Self::buffer`].
    #[must_use]
    pub fn filled(&self, bytes: &[u8]) -> Buffer {
        let buffer = self.buffer(bytes.len() as u64);
        buffer.write(0, bytes).expect("a buffer takes its own size");
        buffer
    }

    /// Returns a buffer outside of the arena, which can be neither read nor written.
    #[must_use]
    pub fn outside(&self, len: u64) -> Buffer {
        let extent = Extent {
            offset: self.0.arena.len() + 4096,
            len,
        };
        Buffer::new(self.0.arena.clone(), extent, Arc::new(()))
    }

    /// Whether any buffer is still held.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.0.extents.lock().used() > 0
    }

    /// Waits until no buffer is held.
    pub async fn until_unused(&self) {
        loop {
            let mut freed = std::pin::pin!(self.0.freed.notified());
            freed.as_mut().enable();
            if !self.is_used() {
                return;
            }
            freed.await;
        }
    }
}

/// Returns the bytes of a buffer.
///
/// # Panics
/// If it cannot be read.
#[must_use]
pub(super) fn bytes(buffer: &Buffer) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = buffer.read_into(0, buffer.len(), &mut bytes);
    read.expect("a buffer that can be read");
    bytes
}
