//! Which parts of an arena are taken: best fit, with all bookkeeping outside the arena.

use std::collections::{BTreeMap, BTreeSet};

use crate::extent::Extent;

/// Alignment of extents unless stated otherwise, in bytes (as LMCache 0.5.6 aligns).
pub const DEFAULT_ALIGNMENT: u64 = 4096;

/// A capacity or alignment that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// The alignment is no power of two.
    #[error("alignment {alignment} is not a power of two")]
    Alignment {
        /// Bytes asked for.
        alignment: u64,
    },
    /// The capacity holds no unit of the alignment, or more than can be counted.
    #[error(
        "capacity {capacity} is not 1 to {} units of {alignment} bytes",
        u32::MAX
    )]
    Capacity {
        /// Bytes asked for.
        capacity: u64,
        /// Bytes of a unit.
        alignment: u64,
    },
}

/// Why an extent could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// Zero bytes were asked for: a mistake of the caller.
    #[error("an extent of 0 bytes was asked for")]
    ZeroBytes,
    /// No free extent is that large.
    #[error("no extent of {bytes} bytes is free: {free} are, {largest_free} in one piece")]
    NoSpace {
        /// Bytes asked for.
        bytes: u64,
        /// Bytes free.
        free: u64,
        /// Bytes of the largest free extent.
        largest_free: u64,
    },
}

/// An extent was given back that is not (or no longer) taken. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{} bytes at offset {} were given back but are not taken", extent.len, extent.offset)]
pub struct FreeError {
    /// What was given back.
    pub extent: Extent,
}

/// What an allocator holds. Byte counts are of whole units, so `used + free == capacity`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocatorStats {
    /// Bytes there are.
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

/// Hands out extents of an arena: the smallest free one that fits, the lowest of those.
///
/// All operations take O(log n) in the number of extents and never rebuild a table, so none is
/// much slower than the others. Offsets and sizes are counted in units of the alignment, in
/// 32 bits: 16 TiB at the default 4096 bytes.
#[derive(Debug)]
pub struct ExtentAllocator {
    /// log2 of the alignment.
    shift: u32,
    /// Units there are.
    capacity: u32,
    /// Units taken.
    used: u32,
    /// Offset to size, in units; no two of these touch each other.
    free_by_offset: BTreeMap<u32, u32>,
    /// The same extents as (size, offset).
    free_by_size: BTreeSet<(u32, u32)>,
    /// Offset to size, in units.
    taken: BTreeMap<u32, u32>,
}

impl ExtentAllocator {
    /// An allocator over `capacity` bytes, aligned to [`DEFAULT_ALIGNMENT`].
    ///
    /// # Errors
    /// [`GeometryError::Capacity`].
    pub fn new(capacity: u64) -> Result<Self, GeometryError> {
        Self::with_alignment(capacity, DEFAULT_ALIGNMENT)
    }

    /// An allocator over `capacity` bytes, of which whole multiples of `alignment` (a power of
    /// two, in bytes) are used.
    ///
    /// # Errors
    /// See [`GeometryError`].
    pub fn with_alignment(capacity: u64, alignment: u64) -> Result<Self, GeometryError> {
        if !alignment.is_power_of_two() {
            return Err(GeometryError::Alignment { alignment });
        }
        let units = u32::try_from(capacity / alignment)
            .ok()
            .filter(|units| *units > 0)
            .ok_or(GeometryError::Capacity {
                capacity,
                alignment,
            })?;
        let mut allocator = Self {
            shift: alignment.trailing_zeros(),
            capacity: units,
            used: 0,
            free_by_offset: BTreeMap::new(),
            free_by_size: BTreeSet::new(),
            taken: BTreeMap::new(),
        };
        allocator.add_free(0, units);
        Ok(allocator)
    }

    /// Takes an extent of `bytes` bytes. Its length is `bytes`; what it takes is that rounded up
    /// to the alignment.
    ///
    /// # Errors
    /// See [`AllocateError`].
    pub fn allocate(&mut self, bytes: u64) -> Result<Extent, AllocateError> {
        if bytes == 0 {
            return Err(AllocateError::ZeroBytes);
        }
        let found = self
            .units(bytes)
            .and_then(|units| Some((units, *self.free_by_size.range((units, 0)..).next()?)));
        let Some((units, (size, offset))) = found else {
            return Err(AllocateError::NoSpace {
                bytes,
                free: self.bytes(self.capacity - self.used),
                largest_free: self.largest_free(),
            });
        };
        self.remove_free(offset, size);
        if size > units {
            self.add_free(offset + units, size - units);
        }
        self.taken.insert(offset, units);
        self.used += units;
        Ok(Extent::new(self.bytes(offset), bytes))
    }

    /// Gives back an extent, exactly as [`allocate`](Self::allocate) gave it out.
    ///
    /// # Errors
    /// [`FreeError`] if no such extent is taken: given back twice, never given out, or changed.
    pub fn free(&mut self, extent: Extent) -> Result<(), FreeError> {
        let error = FreeError { extent };
        let offset = self.unit_of(extent.offset).ok_or(error)?;
        let units = self.units(extent.len).ok_or(error)?;
        match self.taken.get(&offset) {
            Some(taken) if *taken == units => self.taken.remove(&offset),
            _ => return Err(error),
        };
        self.used -= units;
        let (mut start, mut size) = (offset, units);
        if let Some((&before, &before_size)) = self.free_by_offset.range(..offset).next_back()
            && before + before_size == offset
        {
            self.remove_free(before, before_size);
            start = before;
            size += before_size;
        }
        if let Some(&after_size) = self.free_by_offset.get(&(offset + units)) {
            self.remove_free(offset + units, after_size);
            size += after_size;
        }
        self.add_free(start, size);
        Ok(())
    }

    /// Bytes there are.
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
        self.bytes(self.free_by_size.last().map_or(0, |(size, _)| *size))
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
            used_extents: self.taken.len(),
            free_extents: self.free_by_offset.len(),
        }
    }

    /// Checks everything that must always hold; the error names what does not. O(n).
    ///
    /// # Errors
    /// The invariant that is broken, which is a bug here.
    pub fn check_invariants(&self) -> Result<(), &'static str> {
        let mut all: Vec<(u32, u32, bool)> = Vec::new();
        all.extend(self.free_by_offset.iter().map(|(o, s)| (*o, *s, true)));
        all.extend(self.taken.iter().map(|(o, s)| (*o, *s, false)));
        all.sort_unstable();
        let mut expected = 0;
        let mut last_free = false;
        for (offset, size, free) in all {
            if offset != expected || size == 0 {
                return Err("extents tile the arena");
            }
            if free && last_free {
                return Err("free neighbours are joined");
            }
            last_free = free;
            expected = offset + size;
        }
        if expected != self.capacity {
            return Err("extents tile the arena to its end");
        }
        if self.taken.values().sum::<u32>() != self.used {
            return Err("used is the sum of what is taken");
        }
        let same = self.free_by_size.len() == self.free_by_offset.len()
            && self
                .free_by_size
                .iter()
                .all(|(size, offset)| self.free_by_offset.get(offset) == Some(size));
        if !same {
            return Err("both orders of free extents hold the same");
        }
        Ok(())
    }

    fn add_free(&mut self, offset: u32, size: u32) {
        self.free_by_offset.insert(offset, size);
        self.free_by_size.insert((size, offset));
    }

    fn remove_free(&mut self, offset: u32, size: u32) {
        self.free_by_offset.remove(&offset);
        self.free_by_size.remove(&(size, offset));
    }

    fn bytes(&self, units: u32) -> u64 {
        u64::from(units) << self.shift
    }

    /// Units that `bytes` bytes take; `None` if none or more than can be counted.
    fn units(&self, bytes: u64) -> Option<u32> {
        let units = (bytes.checked_sub(1)? >> self.shift) + 1;
        u32::try_from(units).ok()
    }

    /// The unit that begins at `offset`.
    fn unit_of(&self, offset: u64) -> Option<u32> {
        let aligned = offset & (self.alignment() - 1) == 0;
        u32::try_from(offset >> self.shift).ok().filter(|_| aligned)
    }
}
