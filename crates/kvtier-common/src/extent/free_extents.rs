//! Free and taken extents of an arena: best fit, with all bookkeeping outside the arena.

use std::collections::{BTreeMap, BTreeSet};

use crate::extent::{ArenaPiece, Extent};

/// Alignment of extents unless stated otherwise, in bytes (as LMCache 0.5.6 aligns).
pub const DEFAULT_ALIGNMENT: u64 = 4096;

/// Most units that can be counted: one bit of 32 marks an extent as taken.
const MAX_UNITS: u32 = u32::MAX >> 1;

/// An invalid capacity or alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// The alignment is not a power of two.
    #[error("alignment {alignment} is not a power of two")]
    Alignment {
        /// Bytes requested.
        alignment: u64,
    },
    /// The capacity holds no unit of the alignment, or more than can be counted.
    #[error(
        "capacity {capacity} is not 1 to {} units of {alignment} bytes",
        u32::MAX
    )]
    Capacity {
        /// Bytes requested.
        capacity: u64,
        /// Bytes per unit.
        alignment: u64,
    },
}

/// Why an extent could not be allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// Zero bytes were requested: a mistake of the caller.
    #[error("an extent of 0 bytes was requested")]
    ZeroBytes,
    /// No free extent is large enough.
    #[error(
        "no free extent of {bytes} bytes: {free} bytes are free, at most {largest_free} in one piece"
    )]
    NoSpace {
        /// Bytes requested.
        bytes: u64,
        /// Bytes free.
        free: u64,
        /// Bytes of the largest free extent.
        largest_free: u64,
    },
}

/// An extent was freed that is not (or no longer) taken. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{} bytes at offset {} were freed but are not taken", extent.len, extent.offset)]
pub struct FreeError {
    /// The extent passed to `free`.
    pub extent: Extent,
}

/// Counts of [`FreeExtents`]. Byte counts are of whole units, so `used + free == capacity`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocatorStats {
    /// Bytes in all.
    pub capacity: u64,
    /// Bytes taken.
    pub used: u64,
    /// Bytes free.
    pub free: u64,
    /// Bytes of the largest free extent.
    pub largest_free: u64,
    /// Extents taken.
    pub used_extents: usize,
    /// Free extents.
    pub free_extents: usize,
}

/// Allocator of an arena's extents: the smallest free one that fits, the lowest of those.
///
/// All operations take O(log n) in the number of extents and never rebuild a table, so none is
/// much slower than the others. Offsets and sizes are counted in units of the alignment, in
/// 31 bits: 8 TiB at the default 4096 bytes.
///
/// ```
/// use kvtier_common::extent::FreeExtents;
///
/// let mut free = FreeExtents::new(64 << 10)?;
/// let extent = free.allocate(5000)?;
/// // Whole units of 4096 bytes.
/// assert_eq!(free.used(), 8192);
/// free.free(extent)?;
/// assert_eq!(free.largest_free(), 64 << 10);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FreeExtents {
    /// log2 of the alignment.
    shift: u32,
    /// Units in all.
    capacity: u32,
    /// Units taken.
    used: u32,
    /// Every extent, free or taken, by its first unit: together they tile the arena. One map
    /// for both, so that the neighbours of an extent are found where the extent is.
    blocks: BTreeMap<u32, Block>,
    /// The free ones as (size, first unit).
    free: BTreeSet<(u32, u32)>,
}

/// An extent: its size in units and whether it is taken, in 32 bits, and its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Block {
    bits: u32,
    owner: u32,
}

impl Block {
    fn free(size: u32) -> Self {
        Self {
            bits: size << 1,
            owner: 0,
        }
    }

    fn taken(size: u32, owner: u32) -> Self {
        Self {
            bits: size << 1 | 1,
            owner,
        }
    }

    fn size(self) -> u32 {
        self.bits >> 1
    }

    fn is_taken(self) -> bool {
        self.bits & 1 == 1
    }
}

impl FreeExtents {
    /// An allocator over `capacity` bytes, aligned to [`DEFAULT_ALIGNMENT`].
    ///
    /// # Errors
    /// [`GeometryError::Capacity`].
    pub fn new(capacity: u64) -> Result<Self, GeometryError> {
        Self::with_alignment(capacity, DEFAULT_ALIGNMENT)
    }

    /// Returns an allocator over `capacity` bytes. It uses whole multiples of `alignment` (a power
    /// of two, in bytes).
    ///
    /// # Errors
    /// See [`GeometryError`].
    pub fn with_alignment(capacity: u64, alignment: u64) -> Result<Self, GeometryError> {
        if !alignment.is_power_of_two() {
            return Err(GeometryError::Alignment { alignment });
        }
        let units = u32::try_from(capacity / alignment)
            .ok()
            .filter(|units| (1..=MAX_UNITS).contains(units))
            .ok_or(GeometryError::Capacity {
                capacity,
                alignment,
            })?;
        Ok(Self {
            shift: alignment.trailing_zeros(),
            capacity: units,
            used: 0,
            blocks: BTreeMap::from([(0, Block::free(units))]),
            free: BTreeSet::from([(units, 0)]),
        })
    }

    /// Allocates an extent of `bytes` bytes. Its length is `bytes`; it takes that rounded up to the
    /// alignment.
    ///
    /// # Errors
    /// See [`AllocateError`].
    pub fn allocate(&mut self, bytes: u64) -> Result<Extent, AllocateError> {
        self.allocate_for(bytes, 0)
    }

    /// [`allocate`](Self::allocate) for an owner that [`pieces_up`](Self::pieces_up) reports. The caller chooses the number.
    ///
    /// # Errors
    /// See [`AllocateError`].
    pub fn allocate_for(&mut self, bytes: u64, owner: u32) -> Result<Extent, AllocateError> {
        if bytes == 0 {
            return Err(AllocateError::ZeroBytes);
        }
        let found = self
            .units(bytes)
            .and_then(|units| Some((units, *self.free.range((units, 0)..).next()?)));
        let Some((units, (size, offset))) = found else {
            return Err(AllocateError::NoSpace {
                bytes,
                free: self.bytes(self.capacity - self.used),
                largest_free: self.largest_free(),
            });
        };
        self.free.remove(&(size, offset));
        self.blocks.insert(offset, Block::taken(units, owner));
        if size > units {
            let (rest, rest_size) = (offset + units, size - units);
            self.blocks.insert(rest, Block::free(rest_size));
            self.free.insert((rest_size, rest));
        }
        self.used += units;
        Ok(Extent::new(self.bytes(offset), bytes))
    }

    /// Takes these extents, each with its owner, in an allocator that has none taken. They are sorted by offset. Returns for
    /// each whether it was taken: not those that overlap an earlier one, begin between two units, or end outside.
    pub fn take_all(&mut self, extents: &[(Extent, u32)]) -> Vec<bool> {
        debug_assert_eq!(self.used, 0, "extents are taken already");
        let mut blocks = Vec::with_capacity(2 * extents.len() + 1);
        let mut end = 0;
        let mut take = |extent: &Extent, owner| {
            let (offset, units) = (self.unit_of(extent.offset)?, self.units(extent.len)?);
            let after = offset.checked_add(units)?;
            if offset < end || after > self.capacity {
                return None;
            }
            if offset > end {
                blocks.push((end, Block::free(offset - end)));
            }
            blocks.push((offset, Block::taken(units, owner)));
            end = after;
            Some(units)
        };
        let taken: Vec<_> = extents
            .iter()
            .map(|(extent, owner)| take(extent, *owner))
            .collect();
        if end < self.capacity {
            blocks.push((end, Block::free(self.capacity - end)));
        }
        self.used = taken.iter().flatten().sum();
        let free = blocks.iter().filter(|(_, block)| !block.is_taken());
        self.free = free
            .map(|(offset, block)| (block.size(), *offset))
            .collect();
        self.blocks = blocks.into_iter().collect();
        taken.iter().map(Option::is_some).collect()
    }

    /// Frees an extent returned by [`allocate`](Self::allocate).
    ///
    /// # Errors
    /// [`FreeError`]: double free, unknown or modified extent.
    pub fn free(&mut self, extent: Extent) -> Result<(), FreeError> {
        let error = FreeError { extent };
        let offset = self.unit_of(extent.offset).ok_or(error)?;
        let units = self.units(extent.len).ok_or(error)?;
        let is_it = |block: &&Block| block.is_taken() && block.size() == units;
        self.blocks.get(&offset).filter(is_it).ok_or(error)?;
        self.used -= units;
        let mut size = units;
        let after = offset + units;
        if let Some(next) = self.blocks.get(&after).filter(|next| !next.is_taken()) {
            let next = next.size();
            size += next;
            self.blocks.remove(&after);
            self.free.remove(&(next, after));
        }
        let before = self.blocks.range_mut(..offset).next_back();
        if let Some((&start, previous)) = before.filter(|(_, previous)| !previous.is_taken()) {
            let old = previous.size();
            *previous = Block::free(old + size);
            self.blocks.remove(&offset);
            self.free.remove(&(old, start));
            self.free.insert((old + size, start));
        } else {
            self.blocks.insert(offset, Block::free(size));
            self.free.insert((size, offset));
        }
        Ok(())
    }

    /// The pieces from the first that begins at `offset` or later, upwards.
    pub fn pieces_up(&self, offset: u64) -> impl Iterator<Item = ArenaPiece> {
        let first = u32::try_from(offset.div_ceil(self.alignment())).unwrap_or(u32::MAX);
        let blocks = self.blocks.range(first..);
        blocks.map(|(&offset, block)| self.piece(offset, *block))
    }

    /// The pieces that begin before `offset`, downwards.
    pub fn pieces_down(&self, offset: u64) -> impl Iterator<Item = ArenaPiece> {
        let end = u32::try_from(offset.div_ceil(self.alignment())).unwrap_or(u32::MAX);
        let blocks = self.blocks.range(..end).rev();
        blocks.map(|(&offset, block)| self.piece(offset, *block))
    }

    fn piece(&self, offset: u32, block: Block) -> ArenaPiece {
        ArenaPiece {
            extent: Extent::new(self.bytes(offset), self.bytes(block.size())),
            owner: block.is_taken().then_some(block.owner),
        }
    }

    /// Bytes in all.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.bytes(self.capacity)
    }

    /// Bytes taken, in whole units.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.bytes(self.used)
    }

    /// Bytes of the largest free extent.
    #[must_use]
    pub fn largest_free(&self) -> u64 {
        self.bytes(self.free.last().map_or(0, |(size, _)| *size))
    }

    /// Bytes that every offset is a multiple of.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        1 << self.shift
    }

    /// Bytes that an extent of `bytes` bytes takes.
    #[must_use]
    pub fn footprint(&self, bytes: u64) -> u64 {
        bytes.saturating_add(self.alignment() - 1) >> self.shift << self.shift
    }

    /// All counts at once.
    #[must_use]
    pub fn stats(&self) -> AllocatorStats {
        AllocatorStats {
            capacity: self.capacity(),
            used: self.used(),
            free: self.bytes(self.capacity - self.used),
            largest_free: self.largest_free(),
            used_extents: self.blocks.len() - self.free.len(),
            free_extents: self.free.len(),
        }
    }

    /// Checks all invariants. O(n).
    ///
    /// # Errors
    /// The first invariant that is broken, which is a bug here.
    pub fn check_invariants(&self) -> Result<(), &'static str> {
        let (mut expected, mut used, mut free) = (0, 0, 0);
        let mut last_free = false;
        for (&offset, block) in &self.blocks {
            let size = block.size();
            if offset != expected || size == 0 {
                return Err("extents tile the arena");
            }
            expected = offset + size;
            if block.is_taken() {
                used += size;
            } else {
                if last_free {
                    return Err("free neighbours are joined");
                }
                if !self.free.contains(&(size, offset)) {
                    return Err("free extents are found by size");
                }
                free += 1;
            }
            last_free = !block.is_taken();
        }
        if expected != self.capacity {
            return Err("extents tile the arena to its end");
        }
        if used != self.used {
            return Err("used is the sum of what is taken");
        }
        if free != self.free.len() {
            return Err("extents found by size are free");
        }
        Ok(())
    }

    fn bytes(&self, units: u32) -> u64 {
        u64::from(units) << self.shift
    }

    /// Units that `bytes` bytes take; `None` if none or more than can be counted.
    fn units(&self, bytes: u64) -> Option<u32> {
        let units = (bytes.checked_sub(1)? >> self.shift) + 1;
        u32::try_from(units)
            .ok()
            .filter(|units| *units <= MAX_UNITS)
    }

    /// The unit that begins at `offset`.
    fn unit_of(&self, offset: u64) -> Option<u32> {
        let aligned = offset & (self.alignment() - 1) == 0;
        u32::try_from(offset >> self.shift).ok().filter(|_| aligned)
    }
}
