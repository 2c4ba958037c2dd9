//! The cache: which objects are resident, who holds them, and who has to leave.
//!
//! One state machine behind one short lock. Calls take the keys of a whole request, so a prefix is held or refused
//! in one moment. Only metadata is touched under the lock; bytes are written and read by the holders of
//! reservations and leases, at the extents they name.
//!
//! An object's life: reserved (private to its [`Reservation`]) → committed (resident, found by lookups, in the
//! eviction order) → leased (held by any number of leases, not in the eviction order) → back in the order → evicted
//! or removed. Objects never move.

mod extent;
mod lease;
mod reservation;
mod slab;
mod space;
mod stats;

pub use extent::{Extent, ExtentAllocator};
pub use lease::{Lookup, LookupRow, PrefixLease, ReadLease};
pub use reservation::{
    Committed, KeyOutcome, Reservation, ReserveError, ReserveRequest, Reserved, Staged,
};
pub use space::{OwnedSpace, Space};
pub use stats::{Page, SaltUsage, Stats, Usage};

use crate::eviction::EvictionKind;
use crate::hashing::ChunkHash;
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How a cache behaves.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheConfig {
    /// Who leaves when room is needed.
    pub eviction: EvictionKind,
    /// In builds with debug assertions: check all invariants after every so many calls. 0 = never. Costs time
    /// proportional to the number of objects.
    pub check_invariants_every: u32,
}

/// Objects and bytes that a call took out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Objects evicted.
    pub objects: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// What `remove` or `clear` did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Objects taken out.
    pub objects: usize,
    /// Their bytes; those of leased objects return with the last lease.
    pub bytes: u64,
    /// Objects left alone because somebody holds a lease and force was not asked for.
    pub kept: usize,
    /// Keys that were not in the cache (`remove` only).
    pub missing: usize,
}

/// A resident object, for listings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResidentObject {
    /// The chunk.
    pub chunk_hash: ChunkHash,
    /// The rest of the key.
    pub space: OwnedSpace,
    /// Its bytes.
    pub bytes: u64,
    /// How many leases are on it.
    pub leases: u32,
}

/// A broken invariant: a bug in the cache.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cache invariant {invariant} is broken: {details}")]
pub struct BrokenInvariant {
    /// The name of the function that checks it.
    pub invariant: &'static str,
    /// What was found.
    pub details: String,
}

/// A handle on the cache; clones share it. All times are since one fixed moment, such as the process's start.
pub struct Cache<A: ExtentAllocator> {
    shared: Arc<Shared<A>>,
}

/// The lock guards everything: metadata only, no bytes, no waiting inside.
struct Shared<A: ExtentAllocator> {
    state: Mutex<A>,
}

impl<A: ExtentAllocator> Clone for Cache<A> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<A: ExtentAllocator> fmt::Debug for Cache<A> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Cache").finish_non_exhaustive()
    }
}

impl<A: ExtentAllocator> Cache<A> {
    /// An empty cache over this memory, which must be all free.
    pub fn new(allocator: A, config: CacheConfig) -> Self {
        let _ = config;
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(allocator),
            }),
        }
    }

    /// Sets memory aside for those of these keys that are not resident, evicting what must leave for it.
    ///
    /// Resident keys count as used and are made young before anything is evicted. A key is refused only when nothing
    /// evictable is left; keys set aside before it stay. An object larger than the whole capacity is refused without
    /// evicting anything.
    ///
    /// # Errors
    /// [`ReserveError::EmptyObject`]: a request has `len` 0; nothing is set aside.
    pub fn reserve(
        &self,
        now: Duration,
        requests: &[ReserveRequest<'_>],
    ) -> Result<Reserved<A>, ReserveError> {
        let _ = (now, requests, &self.shared.state);
        unimplemented!()
    }

    /// The longest prefix of `hashes` that every row can serve, held in the same moment: full-attention rows hold
    /// all its chunks, rows with a window the last of them. A miss holds nothing.
    pub fn lookup(&self, now: Duration, rows: &[LookupRow<'_>], hashes: &[ChunkHash]) -> Lookup<A> {
        let _ = (now, rows, hashes);
        unimplemented!()
    }

    /// A lease on all these objects, in this order, or `None` if one of them is not resident.
    pub fn pin(
        &self,
        now: Duration,
        space: &Space<'_>,
        hashes: &[ChunkHash],
    ) -> Option<ReadLease<A>> {
        let _ = (now, space, hashes);
        unimplemented!()
    }

    /// Which of these objects are resident, in order.
    pub fn contains(&self, space: &Space<'_>, hashes: &[ChunkHash]) -> Vec<bool> {
        let _ = (space, hashes);
        unimplemented!()
    }

    /// Counts these objects as used now; the last chunk stays the first to leave. Gives how many are resident.
    pub fn touch(&self, now: Duration, space: &Space<'_>, hashes: &[ChunkHash]) -> usize {
        let _ = (now, space, hashes);
        unimplemented!()
    }

    /// Takes these objects out. With `force` also leased ones: they disappear at once, their memory returns with
    /// the last lease.
    pub fn remove(&self, space: &Space<'_>, hashes: &[ChunkHash], force: bool) -> Removed {
        let _ = (space, hashes, force);
        unimplemented!()
    }

    /// Takes out everything that was resident at the call, in slices, so that others get in between. Reservations
    /// stay as they are. `force` as in [`remove`](Self::remove).
    pub fn clear(&self, force: bool) -> Removed {
        let _ = force;
        unimplemented!()
    }

    /// Evicts in policy order until `bytes_wanted` bytes of objects or `max_objects` objects are gone, or nothing
    /// evictable is left. One slice of a background pass: keep `max_objects` small (some thousands), so that others
    /// get in between.
    pub fn evict(&self, now: Duration, bytes_wanted: u64, max_objects: usize) -> Evicted {
        let _ = (now, bytes_wanted, max_objects);
        unimplemented!()
    }

    /// Room taken and room there is; cheap.
    pub fn usage(&self) -> Usage {
        unimplemented!()
    }

    /// All counters.
    pub fn stats(&self) -> Stats {
        unimplemented!()
    }

    /// What one tenant has; `None` if nothing.
    pub fn salt_usage(&self, salt: &str) -> Option<SaltUsage> {
        let _ = salt;
        unimplemented!()
    }

    /// What each tenant has, at most `limit` of them; start with `from` 0.
    pub fn salts(&self, from: u32, limit: usize) -> Page<SaltUsage> {
        let _ = (from, limit);
        unimplemented!()
    }

    /// The resident objects, from a look at no more than `limit` slots; start with `from` 0. A page may be empty
    /// and still have a next one.
    pub fn objects(&self, from: u32, limit: usize) -> Page<ResidentObject> {
        let _ = (from, limit);
        unimplemented!()
    }

    /// Checks everything that must always hold. Takes time proportional to the number of objects, under the lock.
    ///
    /// # Errors
    /// The first invariant found broken.
    pub fn check_invariants(&self) -> Result<(), BrokenInvariant> {
        unimplemented!()
    }
}
