//! The cache's view of memory: opaque byte ranges from an allocator it drives.

/// A range of bytes in the arena; the cache never looks inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Bytes from the start of the arena.
    pub offset: u64,
    /// Bytes of the object, without rounding; [`ExtentAllocator::footprint`] has what it takes.
    pub len: u64,
}

/// A range of the arena that is free, or taken by one object. Rounding is included, so pieces adjoin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it is.
    pub extent: Extent,
    /// The owner that its `allocate` was given; `None` while it is free.
    pub owner: Option<u32>,
}

/// Free space of a part of the arena, in bytes, rounding included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeSpace {
    /// Size of the part.
    pub capacity_bytes: u64,
    /// Free in all.
    pub free_bytes: u64,
    /// Largest free extent: a larger object needs evictions, however much is free in all.
    pub largest_free_bytes: u64,
    /// Free extents.
    pub free_extents: u64,
}

/// Where objects' bytes come from. Called under the cache's lock, so it must be quick and must not call back.
///
/// Obligations of the implementer: extents handed out never overlap; `allocate` returns an extent whose `len` is
/// exactly what was asked; `used` never exceeds `capacity`; a failed `allocate` changes nothing. Where objects have
/// addresses, `allocate` fails only if no free piece is as large. Obligations of the caller: `bytes` is at least 1, and
/// each extent is freed exactly once. `owner` is the caller's number for what will be there.
pub trait ExtentAllocator: Send {
    /// An extent of `bytes` bytes, or `None` when no free range is large enough.
    fn allocate(&mut self, bytes: u64, owner: u32) -> Option<Extent>;

    /// The same where memory has parts: an extent in this part, or elsewhere if much is free there. `None` also where
    /// something should leave this part first; [`ExtentAllocator::allocate`] may then give one all the same. Without
    /// parts there is no difference.
    fn allocate_near(&mut self, bytes: u64, part: u32, owner: u32) -> Option<Extent> {
        let _ = part;
        self.allocate(bytes, owner)
    }

    /// Takes back an extent.
    fn free(&mut self, extent: Extent);

    /// Bytes that an extent of `bytes` bytes takes, rounding included: `used` grows by them.
    fn footprint(&self, bytes: u64) -> u64 {
        bytes
    }

    /// All the bytes there are.
    fn capacity(&self) -> u64;

    /// Bytes of the largest extent there can be: where memory has parts, an object lies in one of them.
    fn largest(&self) -> u64 {
        self.capacity()
    }

    /// Bytes in use, rounding included.
    fn used(&self) -> u64;

    /// Whether an object needs a free range in one piece. Where it does not, bytes are only counted.
    fn is_addressed(&self) -> bool {
        false
    }

    /// Visits the pieces that begin at `from` or later, upwards, to the end of the part in which `from` is, until `visit`
    /// returns false.
    fn pieces_up(&self, from: u64, visit: &mut dyn FnMut(Piece) -> bool) {
        let _ = (from, visit);
    }

    /// Visits the pieces that begin before `from`, downwards, to the start of the part in which `from` is, until `visit`
    /// returns false.
    fn pieces_down(&self, from: u64, visit: &mut dyn FnMut(Piece) -> bool) {
        let _ = (from, visit);
    }

    /// Free space of each part.
    fn free_space(&self) -> Vec<FreeSpace> {
        let free = self.capacity() - self.used();
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

    fn pieces_up(&self, from: u64, visit: &mut dyn FnMut(Piece) -> bool) {
        (**self).pieces_up(from, visit);
    }

    fn pieces_down(&self, from: u64, visit: &mut dyn FnMut(Piece) -> bool) {
        (**self).pieces_down(from, visit);
    }

    fn free_space(&self) -> Vec<FreeSpace> {
        (**self).free_space()
    }
}
