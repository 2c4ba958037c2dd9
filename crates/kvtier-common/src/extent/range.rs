//! A byte range of an arena, and a piece of the tiling of one.

/// `len` bytes from `offset`, counted from the start of an arena.
///
/// Plain data: the right to touch the bytes comes with the cache's leases and reservations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// First byte, counted from the start of the arena.
    pub offset: u64,
    /// Number of bytes, without rounding.
    pub len: u64,
}

impl Extent {
    /// An extent of `len` bytes from `offset`.
    #[must_use]
    pub const fn new(offset: u64, len: u64) -> Self {
        Self { offset, len }
    }

    /// The byte behind the last one; `None` on overflow.
    #[must_use]
    pub const fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }

    /// Whether the two share at least one byte.
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.len > 0
            && other.len > 0
            && self.offset < other.offset.saturating_add(other.len)
            && other.offset < self.offset.saturating_add(self.len)
    }
}

/// A range of an arena that is free, or taken by one object. Rounding is included, so pieces adjoin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaPiece {
    /// Extent of the piece.
    pub extent: Extent,
    /// The owner passed to its allocation; `None` while it is free.
    pub owner: Option<u32>,
}
