//! A byte range inside an arena.

/// `len` bytes from `offset`, counted from the start of an arena.
///
/// Plain data: holding one gives no right to the bytes, the cache's leases do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// First byte, counted from the start of the arena.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Extent {
    /// An extent of `len` bytes from `offset`.
    #[must_use]
    pub const fn new(offset: u64, len: u64) -> Self {
        Self { offset, len }
    }

    /// The byte behind the last one; `None` if that is no `u64`.
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
