//! Input of adapters: keys and memory of L1.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use kvtier_core::object_key::{KeyShape, ObjectKey};
use kvtier_memory::checksum::checksum128;
use kvtier_memory::{AccessError, Arena, Extent};

use crate::error::{ErrorKind, L2Error};

/// Digest that binds a checksum to a key: the xxh3-128 of the key's text.
pub fn key_digest(key: &ObjectKey) -> u128 {
    checksum128(key.text().name(KeyShape::Grouped).as_bytes())
}

/// Bit of [`ObjectSpec::layout`] of objects whose bytes fit only pages like those they were stored from: same block size,
/// same kind of processor, same page format of the engine. Bytes without a layout are never accepted for such an object
/// by their length alone.
pub const PAGE_BOUND: u64 = 1 << 63;

/// Type of all values of an object, in bits 59 to 62 of [`ObjectSpec::layout`]; 0 there is another type, or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// `torch.bfloat16`.
    BFloat16 = 1,
    /// `torch.float16`.
    Float16 = 2,
}

impl Element {
    const SHIFT: u32 = 59;
    const BITS: u64 = 0xf << Self::SHIFT;
    const ALL: [Self; 2] = [Self::BFloat16, Self::Float16];

    /// Returns the type's name in torch.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::BFloat16 => "bfloat16",
            Self::Float16 => "float16",
        }
    }

    /// Returns the type of that name in torch, if it is one of these.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.name() == name)
    }

    /// Returns `layout` for objects whose values all have this type; `None` is another type, or several.
    #[must_use]
    pub const fn in_layout(layout: u64, element: Option<Self>) -> u64 {
        let number = match element {
            Some(element) => element as u64,
            None => 0,
        };
        layout & !Self::BITS | number << Self::SHIFT
    }
}

/// Expected identity, length and layout of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectSpec {
    /// Key of the object.
    pub key: ObjectKey,
    /// Length in bytes.
    pub len: u64,
    /// Fingerprint of shape and type of its arrays, with [`PAGE_BOUND`] and [`Element`]. It is not part of the key, so equal
    /// keys can have different layouts; bytes of another layout must not be loaded.
    pub layout: u64,
}

impl ObjectSpec {
    /// Whether its bytes fit only pages like those they were stored from.
    #[must_use]
    pub fn is_page_bound(&self) -> bool {
        self.layout & PAGE_BOUND != 0
    }

    /// Type of all of its values, if it is one of [`Element`].
    #[must_use]
    pub fn element(&self) -> Option<Element> {
        let number = (self.layout & Element::BITS) >> Element::SHIFT;
        let mut all = Element::ALL.into_iter();
        all.find(|element| *element as u64 == number)
    }
}

/// Bytes of one object in L1.
///
/// It owns what keeps the memory in place (a lease or a reservation), so I/O that outlives its caller never touches
/// reused memory.
#[derive(Clone)]
pub struct Buffer {
    arena: Arc<Arena>,
    extent: Extent,
    #[expect(dead_code, reason = "held, to be released when dropped")]
    hold: Arc<dyn Any + Send + Sync>,
}

impl Buffer {
    /// Returns a buffer over memory that `hold` keeps in place.
    pub fn new(arena: Arc<Arena>, extent: Extent, hold: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            arena,
            extent,
            hold,
        }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.extent.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.extent.len == 0
    }

    /// Checks that it is as long as its object.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] if it is not.
    pub fn check_len(&self, len: u64) -> Result<(), L2Error> {
        match self.len() {
            own if own == len => Ok(()),
            own => {
                let message = format!("a buffer of {own} bytes for {len}");
                Err(L2Error::new(ErrorKind::Refused, message))
            }
        }
    }

    /// Checks that it is as long as its object, and that its memory has an address.
    ///
    /// # Errors
    /// [`ErrorKind::Refused`] or [`ErrorKind::Memory`] if not.
    pub fn check(&self, len: u64) -> Result<(), L2Error> {
        self.check_len(len)?;
        self.arena.address(self.extent, 0, len)?;
        Ok(())
    }

    /// Whether its memory begins at a multiple of `unit`, as I/O past the page cache needs.
    pub fn is_aligned(&self, unit: u64) -> bool {
        let start = self.arena.address(self.extent, 0, 0);
        start.is_ok_and(|start| (start.as_ptr().addr() as u64).is_multiple_of(unit))
    }

    /// Returns the buffer's arena, for I/O directly from and to it.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Returns the buffer's extent in the arena.
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

    /// Copies bytes from offset `at` to `out`, whose bytes are undefined on error.
    ///
    /// # Errors
    /// See [`AccessError`].
    pub fn read(&self, at: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.arena.read(self.extent, at, out)
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

/// Object to be written to a backend.
#[derive(Debug, Clone)]
pub struct StoreItem {
    /// Identity of the object.
    pub object: ObjectSpec,
    /// Source of the `object.len` bytes.
    pub from: Buffer,
}

/// Object to be read from a backend.
#[derive(Debug, Clone)]
pub struct LoadItem {
    /// Expected identity of the object.
    pub object: ObjectSpec,
    /// Destination of its `object.len` bytes. The contents are undefined after an error.
    pub to: Buffer,
}
