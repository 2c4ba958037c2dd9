//! What the cache's tests share: an allocator that fragments, and short ways to name things.

pub mod model;

use kvtier_core::ChunkHash;
use kvtier_core::cache::{
    Cache, CacheConfig, Extent, ExtentAllocator, Piece, ReserveRequest, Space,
};
use kvtier_core::eviction::EvictionKind;
use std::time::Duration;

/// First fit by address, so it fragments; rounds up to `align`; checks what it is given back.
#[derive(Debug)]
pub struct FirstFit {
    capacity: u64,
    align: u64,
    /// Handed-out extents and their owners, by offset.
    taken: Vec<(Extent, u32)>,
    used: u64,
}

impl FirstFit {
    pub fn new(capacity: u64, align: u64) -> Self {
        Self {
            capacity,
            align,
            taken: Vec::new(),
            used: 0,
        }
    }
}

impl ExtentAllocator for FirstFit {
    fn allocate(&mut self, bytes: u64, owner: u32) -> Option<Extent> {
        assert!(bytes > 0, "asked for an empty extent");
        let room = bytes.next_multiple_of(self.align);
        let mut offset = 0;
        let mut at = 0;
        for (taken, _) in &self.taken {
            if taken.offset - offset >= room {
                break;
            }
            offset = taken.offset + taken.len.next_multiple_of(self.align);
            at += 1;
        }
        if offset + room > self.capacity {
            return None;
        }
        let extent = Extent { offset, len: bytes };
        self.taken.insert(at, (extent, owner));
        self.used += room;
        Some(extent)
    }

    fn free(&mut self, extent: Extent) {
        let at = self.taken.binary_search_by_key(&extent, |taken| taken.0);
        self.taken.remove(at.expect("freed what was not taken"));
        self.used -= extent.len.next_multiple_of(self.align);
    }

    fn footprint(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.align)
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn used(&self) -> u64 {
        self.used
    }

    fn is_addressed(&self) -> bool {
        true
    }

    fn pieces_up(&self, from: u64, visit: &mut dyn FnMut(Piece) -> bool) {
        let mut pieces = self.pieces().into_iter();
        pieces.all(|piece| piece.extent.offset < from || visit(piece));
    }

    fn pieces_down(&self, from: u64, visit: &mut dyn FnMut(Piece) -> bool) {
        let mut pieces = self.pieces().into_iter().rev();
        pieces.all(|piece| piece.extent.offset >= from || visit(piece));
    }
}

impl FirstFit {
    /// All pieces, taken and free, by offset.
    pub fn pieces(&self) -> Vec<Piece> {
        let (mut pieces, mut end) = (Vec::new(), 0);
        let mut push = |offset, len, owner| {
            let extent = Extent { offset, len };
            pieces.push(Piece { extent, owner });
        };
        for (taken, owner) in &self.taken {
            if taken.offset > end {
                push(end, taken.offset - end, None);
            }
            let len = taken.len.next_multiple_of(self.align);
            push(taken.offset, len, Some(*owner));
            end = taken.offset + len;
        }
        // What is less than a unit is nothing.
        let units = self.capacity / self.align * self.align;
        if units > end {
            push(end, units - end, None);
        }
        pieces
    }
}

pub const NOW: Duration = Duration::from_secs(1);

pub fn hash(number: u32) -> ChunkHash {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    ChunkHash(bytes)
}

pub fn hashes(numbers: std::ops::Range<u32>) -> Vec<ChunkHash> {
    numbers.map(hash).collect()
}

pub fn space(group: u32, salt: &str) -> Space<'_> {
    Space {
        model_name: "some/model",
        kv_rank: 0x0101_0000,
        object_group_id: group,
        layout: 0,
        cache_salt: salt,
    }
}

pub fn cache(capacity: u64) -> Cache<FirstFit> {
    cache_with(capacity, EvictionKind::Lru)
}

pub fn cache_with(capacity: u64, eviction: EvictionKind) -> Cache<FirstFit> {
    let config = CacheConfig {
        eviction,
        check_invariants_every: 1,
        ..CacheConfig::default()
    };
    Cache::new(FirstFit::new(capacity, 1), config)
}

pub fn request<'a>(space: Space<'a>, hashes: &'a [ChunkHash], len: u64) -> [ReserveRequest<'a>; 1] {
    [ReserveRequest { space, hashes, len }]
}

/// Reserves and commits; gives how many became resident.
pub fn store(cache: &Cache<FirstFit>, space: Space<'_>, hashes: &[ChunkHash], len: u64) -> usize {
    let reserved = cache.reserve(NOW, &request(space, hashes, len)).unwrap();
    reserved.reservation.commit(NOW).inserted
}

/// The numbers of the resident chunks of a space, out of `0..count`.
pub fn resident(cache: &Cache<FirstFit>, space: Space<'_>, count: u32) -> Vec<u32> {
    let contains = cache.contains(&space, &hashes(0..count));
    (0..count).filter(|&n| contains[n as usize]).collect()
}
