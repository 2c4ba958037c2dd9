//! Allocator of a tier's index: a byte sum with a bound, without memory.

use kvtier_core::cache::{Extent, ExtentAllocator};

/// Byte counter. Extents have offsets only so that each is unique.
#[derive(Debug)]
pub struct ByteBudget {
    capacity: u64,
    used: u64,
    next: u64,
}

impl ByteBudget {
    /// Returns a budget of `capacity` bytes; `None` is unbounded.
    pub fn new(capacity: Option<u64>) -> Self {
        Self {
            // Half the range, so that no sum of sizes wraps.
            capacity: capacity.unwrap_or(u64::MAX / 2),
            used: 0,
            next: 0,
        }
    }

    /// Sets its bytes. If more are in use, none can be allocated before they are freed.
    pub fn set_capacity(&mut self, capacity: u64) {
        self.capacity = capacity;
    }
}

impl ExtentAllocator for ByteBudget {
    fn allocate(&mut self, bytes: u64, _: u32) -> Option<Extent> {
        let used = self.used.checked_add(bytes)?;
        if used > self.capacity {
            return None;
        }
        self.used = used;
        let offset = self.next;
        self.next = self.next.wrapping_add(bytes);
        Some(Extent { offset, len: bytes })
    }

    fn free(&mut self, extent: Extent) {
        self.used = self.used.saturating_sub(extent.len);
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn used(&self) -> u64 {
        self.used
    }
}
