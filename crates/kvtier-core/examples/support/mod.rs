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

/// The splitmix64 sequence: every chunk hash looks as random as a real one.
pub fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
