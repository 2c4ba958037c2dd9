//! What the examples that measure the cache share.

use kvtier_core::cache::{Extent, ExtentAllocator};

/// Bytes of an object.
pub const OBJECT: u64 = 4096;

/// Equal pieces, last in first out.
pub struct Pieces {
    free: Vec<u64>,
    capacity: u64,
}

impl Pieces {
    /// Memory for `objects` objects; the lowest pieces are used first.
    pub fn new(objects: u64) -> Self {
        Self {
            free: (0..objects).rev().map(|piece| piece * OBJECT).collect(),
            capacity: objects * OBJECT,
        }
    }
}

impl ExtentAllocator for Pieces {
    fn allocate(&mut self, bytes: u64, _: u32) -> Option<Extent> {
        let offset = self.free.pop()?;
        Some(Extent { offset, len: bytes })
    }

    fn free(&mut self, extent: Extent) {
        self.free.push(extent.offset);
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn used(&self) -> u64 {
        self.capacity - self.free.len() as u64 * OBJECT
    }
}
