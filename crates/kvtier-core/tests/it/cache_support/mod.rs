//! Shared by the cache's tests: an allocator that fragments, and short constructors.

pub mod model;

use kvtier_core::cache::{ArenaPiece, Cache, CacheConfig, Extent, ExtentAllocator, ReserveRequest};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::{ChunkHash, GroupRow, Namespace};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// First fit by address, so it fragments; rounds up to `align`; checks what is freed.
#[derive(Debug)]
pub struct FirstFit {
    capacity: u64,
    align: u64,
    /// Allocated extents and their owners, by offset.
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
        assert!(bytes > 0, "an empty extent was requested");
        let taken_bytes = bytes.next_multiple_of(self.align);
        let mut offset = 0;
        let mut at = 0;
        for (taken, _) in &self.taken {
            if taken.offset - offset >= taken_bytes {
                break;
            }
            offset = taken.offset + taken.len.next_multiple_of(self.align);
            at += 1;
        }
        if offset + taken_bytes > self.capacity {
            return None;
        }
        let extent = Extent { offset, len: bytes };
        self.taken.insert(at, (extent, owner));
        self.used += taken_bytes;
        Some(extent)
    }

    fn take_all(&mut self, extents: &[(Extent, u32)]) -> Vec<bool> {
        let mut end = 0;
        let mut take = |(extent, owner): &(Extent, u32)| {
            let after = extent.offset + extent.len.next_multiple_of(self.align);
            let fits = extent.offset >= end && after <= self.capacity;
            if fits {
                self.taken.push((*extent, *owner));
                self.used += after - extent.offset;
                end = after;
            }
            fits
        };
        extents.iter().map(&mut take).collect()
    }

    fn free(&mut self, extent: Extent) {
        let at = self.taken.binary_search_by_key(&extent, |taken| taken.0);
        self.taken
            .remove(at.expect("an extent was freed that is not taken"));
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

    fn pieces_up(&self, from: u64, visit: &mut dyn FnMut(ArenaPiece) -> bool) {
        let mut pieces = self.pieces().into_iter();
        pieces.all(|piece| piece.extent.offset < from || visit(piece));
    }

    fn pieces_down(&self, from: u64, visit: &mut dyn FnMut(ArenaPiece) -> bool) {
        let mut pieces = self.pieces().into_iter().rev();
        pieces.all(|piece| piece.extent.offset >= from || visit(piece));
    }
}

impl FirstFit {
    /// All pieces, taken and free, by offset.
    pub fn pieces(&self) -> Vec<ArenaPiece> {
        let (mut pieces, mut end) = (Vec::new(), 0);
        let mut push = |offset, len, owner| {
            let extent = Extent { offset, len };
            pieces.push(ArenaPiece { extent, owner });
        };
        for (taken, owner) in &self.taken {
            if taken.offset > end {
                push(end, taken.offset - end, None);
            }
            let len = taken.len.next_multiple_of(self.align);
            push(taken.offset, len, Some(*owner));
            end = taken.offset + len;
        }
        // A rest of less than a unit is not used.
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

/// The namespace of a group and a tenant, which lives as long as the tests.
pub fn namespace(group: u32, salt: &str) -> &'static Arc<Namespace> {
    static KNOWN: Mutex<BTreeMap<(u32, String), &'static Arc<Namespace>>> =
        Mutex::new(BTreeMap::new());
    KNOWN
        .lock()
        .unwrap()
        .entry((group, salt.to_owned()))
        .or_insert_with(|| {
            let namespace = Namespace::new("some/model", 0x0101_0000, group, 0, salt);
            Box::leak(Box::new(Arc::new(namespace.unwrap())))
        })
}

pub fn row(group: u32, salt: &str, window: Option<u32>) -> GroupRow {
    GroupRow {
        namespace: Arc::clone(namespace(group, salt)),
        window,
        object_bytes: 1,
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

pub fn request<'a>(
    namespace: &'a Arc<Namespace>,
    hashes: &'a [ChunkHash],
    len: u64,
) -> [ReserveRequest<'a>; 1] {
    [ReserveRequest {
        namespace,
        hashes,
        len,
    }]
}

/// Reserves and commits; returns how many became resident.
pub fn store(
    cache: &Cache<FirstFit>,
    namespace: &Arc<Namespace>,
    hashes: &[ChunkHash],
    len: u64,
) -> usize {
    let reserved = cache
        .reserve(NOW, &request(namespace, hashes, len))
        .unwrap();
    reserved.reservation.commit(NOW).inserted
}

/// The numbers of the resident chunks of a namespace, out of `0..count`.
pub fn resident(cache: &Cache<FirstFit>, namespace: &Namespace, count: u32) -> Vec<u32> {
    let contains = cache.contains(namespace, &hashes(0..count));
    (0..count).filter(|&n| contains[n as usize]).collect()
}
