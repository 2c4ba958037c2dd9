//! What adapters are given: keys, and memory of L1.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use kvtier_core::object_key::{KeyShape, ObjectKey};
use kvtier_memory::checksum::checksum128;
use kvtier_memory::{AccessError, Arena, Extent};

/// What checksums are bound to a key by: the xxh3-128 of its text.
pub(crate) fn key_digest(key: &ObjectKey) -> u128 {
    checksum128(key.text().name(KeyShape::Grouped).as_bytes())
}

/// The bit of [`ObjectSpec::layout`] that is set for objects whose bytes fit only pages like those they were stored
/// from: of the same block size, on the same kind of processor, of an engine with the same page format. Bytes that do not
/// say their layout are never taken for such an object by their length alone.
pub const PAGE_BOUND: u64 = 1 << 63;

/// One object, as those who ask know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectSpec {
    /// Its full identity.
    pub key: ObjectKey,
    /// Bytes it must have.
    pub len: u64,
    /// Stands for shape and type of its arrays. Not part of a key, so equal keys can be of different layouts: what was
    /// stored under another one must not be loaded. Has [`PAGE_BOUND`].
    pub layout: u64,
}

impl ObjectSpec {
    /// Whether its bytes fit only pages like those they were stored from.
    #[must_use]
    pub fn is_page_bound(&self) -> bool {
        self.layout & PAGE_BOUND != 0
    }
}

/// The bytes of one object in L1.
///
/// It owns what keeps the memory in place (a lease or a reservation), so an I/O that is under way when its caller gives
/// up never touches memory that was given to somebody else.
#[derive(Clone)]
pub struct Buffer {
    arena: Arc<Arena>,
    extent: Extent,
    #[expect(dead_code, reason = "held, to be released when dropped")]
    hold: Arc<dyn Any + Send + Sync>,
}

impl Buffer {
    /// Memory that `hold` keeps in place.
    pub fn new(arena: Arc<Arena>, extent: Extent, hold: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            arena,
            extent,
            hold,
        }
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.extent.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.extent.len == 0
    }

    /// The arena, for I/O straight from and to it.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Where in the arena.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Copies `bytes` to offset `at`.
    ///
    /// # Errors
    /// See [`AccessError`].
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.arena.write(self.extent, at, bytes)
    }

    /// Appends `len` bytes from offset `at` to `out`.
    ///
    /// # Errors
    /// See [`AccessError`].
    pub fn read_into(&self, at: u64, len: u64, out: &mut Vec<u8>) -> Result<(), AccessError> {
        self.arena.read_into(self.extent, at, len, out)
    }

    /// The 128-bit xxh3 of the bytes.
    ///
    /// # Errors
    /// See [`AccessError`].
    pub fn checksum(&self) -> Result<u128, AccessError> {
        self.arena.checksum(self.extent)
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("extent", &self.extent)
            .finish_non_exhaustive()
    }
}

/// An object to be written to a backend.
#[derive(Debug, Clone)]
pub struct StoreItem {
    /// What it is.
    pub object: ObjectSpec,
    /// Its bytes; `object.len` of them.
    pub from: Buffer,
}

/// An object to be read from a backend.
#[derive(Debug, Clone)]
pub struct LoadItem {
    /// What it must be.
    pub object: ObjectSpec,
    /// Where its bytes go; `object.len` of them. Undefined after an error.
    pub to: Buffer,
}
