//! Memory of L1 for the cache: the whole arena, or one part of it for each NUMA node that has GPUs.
//!
//! A worker's objects go to the part beside its GPU, so that their bytes cross no link between processors, now or when they
//! are read again. The index is one, and so is the eviction order: if a part is full, the next objects are evicted
//! until one of that part was. The space that this frees in other parts serves their own workers, and if much of it is
//! free, this one too.

use std::ops::Range;

use kvtier_common::extent::{ArenaPiece, Extent, FreeExtents, GeometryError};
use kvtier_core::cache;
use kvtier_memory::Arena;

/// Share of another part (1/64) that stays free while a worker evicts from its own part.
const SPARE: u64 = 64;

/// Bytes of the arena for each of `count` parts, which begin at whole pages and multiples of `align`, a power of two.
pub fn parts(arena: &Arena, align: u64, count: usize) -> Vec<Range<u64>> {
    divide(arena.len(), arena.page_bytes().max(align), count)
}

fn divide(bytes: u64, unit: u64, count: usize) -> Vec<Range<u64>> {
    let count = count.max(1) as u64;
    let border = |part| match part {
        part if part == count => bytes,
        part => bytes / count * part / unit * unit,
    };
    (0..count)
        .map(|part| border(part)..border(part + 1))
        .collect()
}

struct ArenaPart {
    start: u64,
    extents: FreeExtents,
}

impl ArenaPart {
    fn free(&self) -> u64 {
        self.extents.capacity() - self.extents.used()
    }

    fn allocate(&mut self, bytes: u64, owner: u32) -> Option<Extent> {
        let extent = self.extents.allocate_for(bytes, owner).ok()?;
        Some(self.in_arena(extent))
    }

    /// An extent of this part, counted from the start of the arena.
    fn in_arena(&self, extent: Extent) -> Extent {
        Extent::new(self.start + extent.offset, extent.len)
    }

    fn piece(&self, piece: ArenaPiece) -> ArenaPiece {
        ArenaPiece {
            extent: self.in_arena(piece.extent),
            ..piece
        }
    }
}

/// The arena's allocator as the cache wants it.
pub struct L1Allocator {
    /// Parts of the arena, by start.
    parts: Vec<ArenaPart>,
}

impl L1Allocator {
    /// Allocator over these parts of an arena, which adjoin from its start on, see [`parts`].
    ///
    /// # Errors
    /// A size or an alignment that cannot be.
    pub fn over(parts: Vec<Range<u64>>, align: u64) -> Result<Self, GeometryError> {
        let part = |range: Range<u64>| {
            let extents = FreeExtents::with_alignment(range.end - range.start, align)?;
            Ok(ArenaPart {
                start: range.start,
                extents,
            })
        };
        let parts = parts.into_iter().map(part).collect::<Result<_, _>>()?;
        Ok(Self { parts })
    }

    /// Allocator for a cache without an arena.
    #[cfg(any(test, feature = "testing"))]
    pub fn of_bytes(bytes: u64) -> Self {
        Self::over(divide(bytes, 1, 1), 1).expect("a size that can be")
    }

    /// The number of the part in which this address is. The first part starts at 0.
    fn part_at(&self, offset: u64) -> usize {
        let after = self.parts.partition_point(|part| part.start <= offset);
        after.saturating_sub(1)
    }

    /// Whether all of an extent is in the same part.
    pub fn is_in_one_part(&self, extent: Extent) -> bool {
        let last = extent.offset + extent.len.saturating_sub(1);
        self.part_at(extent.offset) == self.part_at(last)
    }

    /// Allocates in the part with the most free space that keeps the free bytes `spare` returns for it. If the
    /// allocation fails there, parts with less follow.
    fn allocate_in(
        &mut self,
        bytes: u64,
        owner: u32,
        spare: impl Fn(&ArenaPart) -> u64,
    ) -> Option<Extent> {
        let has_space = |part: &&mut ArenaPart| part.free() >= bytes.saturating_add(spare(part));
        let mut fitting: Vec<_> = self.parts.iter_mut().filter(has_space).collect();
        fitting.sort_by_key(|part| std::cmp::Reverse(part.free()));
        fitting
            .into_iter()
            .find_map(|part| part.allocate(bytes, owner))
    }
}

impl cache::ExtentAllocator for L1Allocator {
    fn allocate(&mut self, bytes: u64, owner: u32) -> Option<Extent> {
        match &mut *self.parts {
            [part] => part.allocate(bytes, owner),
            _ => self.allocate_in(bytes, owner, |_| 0),
        }
    }

    fn allocate_near(&mut self, bytes: u64, part: u32, owner: u32) -> Option<Extent> {
        let own = self.parts.get_mut(part as usize);
        own.and_then(|own| own.allocate(bytes, owner))
            .or_else(|| self.allocate_in(bytes, owner, |part| part.extents.capacity() / SPARE))
    }

    fn take_all(&mut self, extents: &[(Extent, u32)]) -> Vec<bool> {
        let mut taken = Vec::with_capacity(extents.len());
        let mut rest = extents;
        for part in &mut self.parts {
            let end = part.start + part.extents.capacity();
            let (own, others) = rest.split_at(rest.partition_point(|(it, _)| it.offset < end));
            rest = others;
            let in_part =
                |(it, owner): &(Extent, u32)| (Extent::new(it.offset - part.start, it.len), *owner);
            let own: Vec<_> = own.iter().map(in_part).collect();
            taken.extend(part.extents.take_all(&own));
        }
        taken.resize(extents.len(), false);
        taken
    }

    fn free(&mut self, extent: Extent) {
        let part = self.part_at(extent.offset);
        let part = &mut self.parts[part];
        let inner = Extent::new(extent.offset - part.start, extent.len);
        if let Err(error) = part.extents.free(inner) {
            // The cache frees what it got, and nothing twice. Anything else is a bug that must be seen.
            tracing::error!(%error, offset = extent.offset, len = extent.len, "an extent of L1 could not be freed");
            debug_assert!(false, "an extent of L1 could not be freed: {error}");
        }
    }

    fn footprint(&self, bytes: u64) -> u64 {
        let part = self.parts.first();
        part.map_or(bytes, |part| part.extents.footprint(bytes))
    }

    fn capacity(&self) -> u64 {
        self.parts.iter().map(|part| part.extents.capacity()).sum()
    }

    fn largest(&self) -> u64 {
        let whole = self.parts.iter().map(|part| part.extents.capacity());
        whole.max().unwrap_or_default()
    }

    fn used(&self) -> u64 {
        self.parts.iter().map(|part| part.extents.used()).sum()
    }

    fn is_addressed(&self) -> bool {
        true
    }

    fn pieces_up(&self, from: u64, visit: &mut dyn FnMut(ArenaPiece) -> bool) {
        let part = &self.parts[self.part_at(from)];
        let mut pieces = part.extents.pieces_up(from - part.start);
        pieces.all(|piece| visit(part.piece(piece)));
    }

    fn pieces_down(&self, from: u64, visit: &mut dyn FnMut(ArenaPiece) -> bool) {
        let part = &self.parts[self.part_at(from)];
        let mut pieces = part.extents.pieces_down(from - part.start);
        pieces.all(|piece| visit(part.piece(piece)));
    }

    fn free_space(&self) -> Vec<cache::FreeSpace> {
        let parts = self.parts.iter().map(|part| part.extents.stats());
        let free = parts.map(|stats| cache::FreeSpace {
            capacity_bytes: stats.capacity,
            free_bytes: stats.free,
            largest_free_bytes: stats.largest_free,
            free_extents: stats.free_extents as u64,
        });
        free.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use kvtier_core::cache::{Cache, CacheConfig, ReserveOptions, ReserveRequest, Reserved};
    use kvtier_core::eviction::EvictionKind;
    use kvtier_core::quota::Grant;
    use kvtier_core::{ChunkHash, Namespace};

    use super::*;

    const NOW: Duration = Duration::from_secs(1);
    /// Objects that a part holds.
    const PART: u64 = 128;
    fn namespace(salt: &str) -> Arc<Namespace> {
        Arc::new(Namespace::new("m", 0, 0, 0, salt).unwrap())
    }

    fn cache() -> Cache<L1Allocator> {
        let allocator = L1Allocator::over(divide(2 * PART, 1, 2), 1).unwrap();
        Cache::new(allocator, CacheConfig::default())
    }

    fn in_part(near: Option<u32>) -> ReserveOptions<'static> {
        ReserveOptions {
            near,
            ..ReserveOptions::default()
        }
    }

    fn reserve(
        cache: &Cache<L1Allocator>,
        number: u64,
        near: Option<u32>,
    ) -> Reserved<L1Allocator> {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.to_le_bytes());
        let request = ReserveRequest {
            namespace: &namespace(""),
            hashes: &[ChunkHash(hash)],
            len: 1,
        };
        cache.reserve_with(NOW, &[request], &in_part(near)).unwrap()
    }

    /// Stores one object; returns the part that it is in.
    fn store(cache: &Cache<L1Allocator>, number: u64, near: Option<u32>) -> Option<u64> {
        let reserved = reserve(cache, number, near);
        let at = reserved
            .reservation
            .staged()
            .first()
            .map(|staged| staged.extent.offset);
        reserved.reservation.commit(NOW);
        at.map(|at| at / PART)
    }

    #[test]
    fn parts_are_whole_pages_and_all_of_the_arena() {
        assert_eq!(divide(20_480, 4096, 2), [0..8192, 8192..20_480]);
        assert_eq!(divide(12_288, 4096, 3), [0..4096, 4096..8192, 8192..12_288]);
    }

    #[test]
    fn a_lone_worker_fills_both_parts_own_first() {
        let cache = cache();
        let placed = |from: u64, count| -> Vec<_> {
            (from..from + count)
                .map(|number| store(&cache, number, Some(1)).unwrap())
                .collect()
        };
        assert!(placed(0, PART).iter().all(|part| *part == 1));
        // Of the other part, what is spare stays free.
        let spare = PART / SPARE;
        assert!(placed(PART, PART - spare).iter().all(|part| *part == 0));
        assert_eq!(cache.stats().evicted_objects_total, 0);
        // The oldest are in its own part: one leaves for one.
        assert!(placed(2 * PART, 64).iter().all(|part| *part == 1));
        assert_eq!(cache.stats().evicted_objects_total, 64);
    }

    /// A cache that is full and in use from both sides, where the next to leave are of the other side first: nothing
    /// crosses, and but for what is spare no more leaves than comes.
    #[test]
    fn in_a_full_cache_each_side_keeps_to_its_part() {
        let cache = cache();
        for number in 0..2 * PART {
            store(&cache, number, Some((number / 2 % 2) as u32));
        }
        for number in 2 * PART..8 * PART {
            let side = (number / 2 + 1) % 2;
            let part = store(&cache, number, Some(side as u32));
            assert_eq!(part, Some(side), "object {number}");
        }
        let spare = 2 * PART / SPARE;
        let stats = cache.stats();
        assert!(stats.evicted_objects_total <= 6 * PART + spare, "{stats:?}");
        assert!(stats.used_bytes >= 2 * PART - spare, "{stats:?}");
    }

    #[test]
    fn what_no_part_can_hold_is_refused_before_anything_leaves() {
        let cache = cache();
        for number in 0..2 * PART {
            store(&cache, number, Some((number % 2) as u32));
        }
        let request = ReserveRequest {
            namespace: &namespace(""),
            hashes: &[ChunkHash([9; 32])],
            len: PART + 1,
        };
        for near in [None, Some(0)] {
            let reserved = cache.reserve_with(NOW, &[request], &in_part(near)).unwrap();
            assert!(reserved.reservation.staged().is_empty());
        }
        assert_eq!(cache.stats().evicted_objects_total, 0);
    }

    /// Both tenants are within their reserved shares, so the one that stores could only evict its own objects.
    #[test]
    fn free_space_elsewhere_is_used_before_own_eviction() {
        let allocator = L1Allocator::over(divide(2 * PART, 1, 2), 1).unwrap();
        let eviction = EvictionKind::IsolatedLru;
        let cache = Cache::new(
            allocator,
            CacheConfig {
                eviction,
                ..CacheConfig::default()
            },
        );
        for salt in ["full", "small"] {
            let grant = Grant {
                limit: None,
                reserved: 2 * PART,
            };
            cache.set_grant(salt, Some(grant));
        }
        let store = |number: u8, salt, len, near| {
            let request = ReserveRequest {
                namespace: &namespace(salt),
                hashes: &[ChunkHash([number; 32])],
                len,
            };
            let reserved = cache
                .reserve_with(NOW, &[request], &in_part(Some(near)))
                .unwrap();
            let staged = reserved.reservation.staged();
            let at = staged.first().map(|staged| staged.extent.offset / PART);
            reserved.reservation.commit(NOW);
            at
        };
        assert_eq!(store(1, "full", PART, 0), Some(0));
        assert_eq!(store(2, "small", PART - 5, 1), Some(1));
        // Of 5 that are free beside it, 2 are spare.
        assert_eq!(store(3, "small", 4, 0), Some(1));
        assert_eq!(cache.stats().evicted_objects_total, 0);
    }

    /// Objects that cannot be evicted free no space; the other part is used then, to its last byte.
    #[test]
    fn a_part_without_evictable_objects_is_skipped() {
        let cache = cache();
        let all: Vec<_> = (0..2 * PART)
            .map(|number| reserve(&cache, number, Some(0)))
            .collect();
        let staged = all
            .iter()
            .flat_map(|reserved| reserved.reservation.staged());
        assert_eq!(staged.count() as u64, 2 * PART);
        assert!(
            reserve(&cache, 2 * PART, Some(0))
                .reservation
                .staged()
                .is_empty()
        );
    }

    #[test]
    fn without_a_side_the_emptier_part_is_taken() {
        let cache = cache();
        let parts: Vec<_> = (0..4)
            .map(|number| store(&cache, number, None).unwrap())
            .collect();
        assert_eq!(parts.iter().sum::<u64>(), 2);
        // A part that there is not is no part.
        assert!(store(&cache, 4, Some(7)).is_some());
    }
}
