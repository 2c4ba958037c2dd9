//! The cache's view of memory: byte ranges from an allocator.

use kvtier_common::extent::{ArenaPiece, Extent};

/// Free space of one part of the arena, in bytes, rounding included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeSpace {
    /// Size of the part.
    pub capacity_bytes: u64,
    /// Free bytes in all.
    pub free_bytes: u64,
    /// Largest free extent: a larger object needs evictions, however much is free in all.
    pub largest_free_bytes: u64,
    /// Free extents.
    pub free_extents: u64,
}

/// Allocator of memory for objects. Called under the cache's lock, so it must be quick and must not call back.
///
/// The implementer guarantees: allocated extents never overlap; the `len` of an extent is exactly the `bytes` requested;
/// `used` exceeds `capacity` only where bytes are only counted, after the capacity was lowered; a failed `allocate` changes
/// nothing; where objects have addresses, `allocate` fails only if no free piece is large enough. The caller guarantees: `bytes` is at least 1, and each extent is freed exactly
/// once. `owner` is the caller's number for the object.
pub trait ExtentAllocator: Send {
    /// An extent of `bytes` bytes, or `None` when no free range is large enough.
    fn allocate(&mut self, bytes: u64, owner: u32) -> Option<Extent>;

    /// [`allocate`](Self::allocate) where memory has parts: an extent in this part, or elsewhere if much is free there.
    /// Returns `None` also if objects of this part should be evicted first; `allocate` may succeed even then. Without
    /// parts there is no difference.
    fn allocate_near(&mut self, bytes: u64, part: u32, owner: u32) -> Option<Extent> {
        let _ = part;
        self.allocate(bytes, owner)
    }

    /// Takes these extents, which are sorted by offset and do not overlap, in memory that is entirely free. Returns for each
    /// whether it was taken; one that lies outside the memory, or in two parts of it, is not.
    fn take_all(&mut self, extents: &[(Extent, u32)]) -> Vec<bool> {
        vec![false; extents.len()]
    }

    /// Frees an extent.
    fn free(&mut self, extent: Extent);

    /// Bytes that an extent of `bytes` bytes takes, rounding included: `used` grows by them.
    fn footprint(&self, bytes: u64) -> u64 {
        bytes
    }

    /// Bytes in all.
    fn capacity(&self) -> u64;

    /// Bytes of the largest possible extent: where memory has parts, an object lies in one of them.
    fn largest(&self) -> u64 {
        self.capacity()
    }

    /// Bytes in use, rounding included.
    fn used(&self) -> u64;

    /// Whether an object needs a free range in one piece. Where it does not, bytes are only counted.
    fn is_addressed(&self) -> bool {
        false
    }

    /// Visits the pieces that begin at `from` or later, upwards, to the end of the part that contains `from`, until
    /// `visit` returns false.
    fn pieces_up(&self, from: u64, visit: &mut dyn FnMut(ArenaPiece) -> bool) {
        let _ = (from, visit);
    }

    /// Visits the pieces that begin before `from`, downwards, to the start of the part that contains `from`, until
    /// `visit` returns false.
    fn pieces_down(&self, from: u64, visit: &mut dyn FnMut(ArenaPiece) -> bool) {
        let _ = (from, visit);
    }

    /// Free space of each part.
    fn free_space(&self) -> Vec<FreeSpace> {
        let free = self.capacity().saturating_sub(self.used());
        vec![FreeSpace {
            capacity_bytes: self.capacity(),
            free_bytes: free,
            largest_free_bytes: free,
            free_extents: u64::from(free > 0),
        }]
    }
}

impl<A: ExtentAllocator + ?Sized> ExtentAllocator for Box<A> {
    fn allocate(&mut self, bytes: u64, owner: u32) -> Option<Extent> {
        (**self).allocate(bytes, owner)
    }

    fn allocate_near(&mut self, bytes: u64, part: u32, owner: u32) -> Option<Extent> {
        (**self).allocate_near(bytes, part, owner)
    }

    fn take_all(&mut self, extents: &[(Extent, u32)]) -> Vec<bool> {
        (**self).take_all(extents)
    }

    fn free(&mut self, extent: Extent) {
        (**self).free(extent);
    }

    fn footprint(&self, bytes: u64) -> u64 {
        (**self).footprint(bytes)
    }

    fn capacity(&self) -> u64 {
        (**self).capacity()
    }

    fn largest(&self) -> u64 {
        (**self).largest()
    }

    fn used(&self) -> u64 {
        (**self).used()
    }

    fn is_addressed(&self) -> bool {
        (**self).is_addressed()
    }

    fn pieces_up(&self, from: u64, visit: &mut dyn FnMut(ArenaPiece) -> bool) {
        (**self).pieces_up(from, visit);
    }

    fn pieces_down(&self, from: u64, visit: &mut dyn FnMut(ArenaPiece) -> bool) {
        (**self).pieces_down(from, visit);
    }

    fn free_space(&self) -> Vec<FreeSpace> {
        (**self).free_space()
    }
}
