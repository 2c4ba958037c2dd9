//! The cache's view of memory: opaque byte ranges from an allocator it drives.

/// A range of bytes in the arena; the cache never looks inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Bytes from the start of the arena.
    pub offset: u64,
    /// Bytes of the object. Rounding up to an alignment is the allocator's own matter.
    pub len: u64,
}

/// Where objects' bytes come from. Called under the cache's lock, so it must be quick and must not call back.
///
/// Obligations of the implementer: extents handed out never overlap; `allocate` returns an extent whose `len` is
/// exactly what was asked; `used` never exceeds `capacity`; a failed `allocate` changes nothing. Obligations of the
/// caller: `bytes` is at least 1, and each extent is freed exactly once.
pub trait ExtentAllocator: Send {
    /// An extent of `bytes` bytes, or `None` when no free range is large enough.
    fn allocate(&mut self, bytes: u64) -> Option<Extent>;

    /// The same where memory has parts: an extent in this part, or elsewhere if much is free there. `None` also where
    /// something should leave this part first; [`ExtentAllocator::allocate`] may then give one all the same. Without
    /// parts there is no difference.
    fn allocate_near(&mut self, bytes: u64, part: u32) -> Option<Extent> {
        let _ = part;
        self.allocate(bytes)
    }

    /// Takes back an extent.
    fn free(&mut self, extent: Extent);

    /// All the bytes there are.
    fn capacity(&self) -> u64;

    /// Bytes of the largest extent there can be: where memory has parts, an object lies in one of them.
    fn largest(&self) -> u64 {
        self.capacity()
    }

    /// Bytes in use, rounding included.
    fn used(&self) -> u64;
}

impl<A: ExtentAllocator + ?Sized> ExtentAllocator for Box<A> {
    fn allocate(&mut self, bytes: u64) -> Option<Extent> {
        (**self).allocate(bytes)
    }

    fn allocate_near(&mut self, bytes: u64, part: u32) -> Option<Extent> {
        (**self).allocate_near(bytes, part)
    }

    fn free(&mut self, extent: Extent) {
        (**self).free(extent);
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
}
