//! The cache: which objects are resident, who holds them, and who has to leave.
//!
//! One state machine behind one short lock. Calls take the keys of a whole request, so a prefix is held or refused
//! in one moment. Only metadata is touched under the lock; bytes are written and read by the holders of
//! reservations and leases, at the extents they name.
//!
//! An object's life: reserved (private to its [`Reservation`]) → committed (resident, found by lookups, in the
//! eviction order) → leased (held by any number of leases, not in the eviction order) → back in the order → evicted
//! or removed. Objects never move.

mod counters;
mod extent;
mod index;
mod invariants;
mod lease;
mod lookup;
mod numbered;
mod removal;
mod reservation;
mod reserve;
mod room;
mod run;
mod slab;
mod space;
mod state;
mod stats;
mod tenant;

pub use extent::{Extent, ExtentAllocator, FreeSpace, Piece};
pub use lease::{Counted, Lookup, LookupRow, PrefixLease, ReadLease};
pub use reservation::{
    Committed, KeyOutcome, Reservation, ReserveError, ReserveRequest, Reserved, Staged,
};
pub use space::{OwnedSpace, Space};
pub use stats::{Page, SaltUsage, Stats, Usage};

use crate::eviction::EvictionKind;
use crate::hashing::ChunkHash;
use crate::quota::{Grant, QuotaConfig};
use lease::OrderedHold;
use lookup::LookupBatch;
use parking_lot::Mutex;
use reserve::ReserveBatch;
use slab::SlotRef;
use state::State;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How a cache behaves.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheConfig {
    /// Who leaves when room is needed.
    pub eviction: EvictionKind,
    /// Keep a list of what was evicted, for [`Cache::take_evicted`]: where the bytes have to be deleted too.
    pub report_evicted: bool,
    /// What limits mean, and what holds for tenants without a grant.
    pub quotas: QuotaConfig,
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

/// A resident object, or one that was resident until it was evicted.
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

struct Shared<A: ExtentAllocator> {
    /// Guards everything there is: metadata only, no bytes, no waiting inside.
    state: Mutex<State<A>>,
    /// See [`CacheConfig::check_invariants_every`].
    check_every: u32,
    calls: AtomicU32,
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
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(State::new(allocator, config)),
                check_every: config.check_invariants_every,
                calls: AtomicU32::new(0),
            }),
        }
    }

    /// One step under the lock.
    fn locked<T>(&self, step: impl FnOnce(&mut State<A>) -> T) -> T {
        let mut state = self.shared.state.lock();
        let result = step(&mut state);
        // A second panic while one unwinds would end the process without a word.
        let checks = cfg!(debug_assertions) && !std::thread::panicking();
        if checks && self.shared.check_every > 0 {
            let calls = self.shared.calls.fetch_add(1, Ordering::Relaxed);
            if calls.is_multiple_of(self.shared.check_every) {
                let broken = state.check_invariants().err();
                drop(state);
                assert!(broken.is_none(), "{broken:?}");
            }
        }
        result
    }

    /// Sets memory aside for those of these keys that are not resident, evicting what must leave for it.
    ///
    /// Resident keys count as used, and are never evicted to make room for other keys of the same call. A key is
    /// refused only when no eviction makes a free range as large that the search finds (see `run.rs` for its bounds);
    /// nothing is evicted for it then, and keys set aside before it stay.
    ///
    /// # Errors
    /// [`ReserveError::EmptyObject`]: a request has `len` 0; nothing is set aside.
    pub fn reserve(
        &self,
        now: Duration,
        requests: &[ReserveRequest<'_>],
    ) -> Result<Reserved<A>, ReserveError> {
        self.reserve_near(now, requests, None)
    }

    /// [`Cache::reserve`] in a part of the memory, as far as that can be had; see [`ExtentAllocator::allocate_near`].
    ///
    /// # Errors
    /// As [`Cache::reserve`].
    pub fn reserve_near(
        &self,
        now: Duration,
        requests: &[ReserveRequest<'_>],
        near: Option<u32>,
    ) -> Result<Reserved<A>, ReserveError> {
        self.reserve_bounded(now, requests, near, None)
    }

    /// [`Cache::reserve_near`] for a writer that may never commit: reserves at most `max_bytes`, rounding included, and of
    /// a tenant with a limit, soft ones too, no more than that limit staged at once. The keys beyond are refused, and
    /// evict nothing.
    ///
    /// # Errors
    /// As [`Cache::reserve`].
    pub fn reserve_staged(
        &self,
        now: Duration,
        requests: &[ReserveRequest<'_>],
        near: Option<u32>,
        max_bytes: u64,
    ) -> Result<Reserved<A>, ReserveError> {
        self.reserve_bounded(now, requests, near, Some(max_bytes))
    }

    fn reserve_bounded(
        &self,
        now: Duration,
        requests: &[ReserveRequest<'_>],
        near: Option<u32>,
        staging: Option<u64>,
    ) -> Result<Reserved<A>, ReserveError> {
        if let Some(request) = requests.iter().position(|request| request.len == 0) {
            return Err(ReserveError::EmptyObject { request });
        }
        let mut batch = ReserveBatch::new(requests);
        self.locked(|state| {
            state.tell_time(now);
            state.reserve(requests, near, staging, &mut batch);
        });
        Ok(Reserved {
            reservation: Reservation::new(self.clone(), batch.staged),
            outcomes: batch.outcomes,
        })
    }

    /// The longest prefix of `hashes` that every row can serve, held in the same moment: full-attention rows hold
    /// all its chunks, rows with a window the last of them. A miss holds nothing; so does a lookup without rows.
    pub fn lookup(&self, now: Duration, rows: &[LookupRow<'_>], hashes: &[ChunkHash]) -> Lookup<A> {
        self.look(now, rows, hashes, |state, hit| {
            state.count_lookup(rows, hashes.len(), hit)
        })
    }

    /// The same for a lookup that has had brought what it did not find: only what it finds beyond is counted.
    pub fn look_again(
        &self,
        now: Duration,
        rows: &[LookupRow<'_>],
        hashes: &[ChunkHash],
        before: Counted,
    ) -> Lookup<A> {
        self.look(now, rows, hashes, |state, hit| {
            state.count_again(rows, hashes.len(), hit, before)
        })
    }

    fn look(
        &self,
        now: Duration,
        rows: &[LookupRow<'_>],
        hashes: &[ChunkHash],
        count: impl FnOnce(&mut State<A>, usize) -> Counted,
    ) -> Lookup<A> {
        let mut batch = LookupBatch::new(rows, hashes.len());
        let (hit_chunks, counted) = self.locked(|state| {
            state.tell_time(now);
            let hit = state.lookup(rows, hashes, &mut batch);
            (hit, count(state, hit))
        });
        Lookup {
            hit_chunks,
            counted,
            lease: PrefixLease::new(self.clone(), batch.holds),
        }
    }

    /// A lease on all these objects, in this order, or `None` if one of them is not resident. Counts as a use.
    pub fn pin(
        &self,
        now: Duration,
        space: &Space<'_>,
        hashes: &[ChunkHash],
    ) -> Option<ReadLease<A>> {
        self.lease(now, space, hashes, State::pin)
    }

    /// The same for the cache's own ends, such as writing objects elsewhere: counts as no use.
    pub fn hold(
        &self,
        now: Duration,
        space: &Space<'_>,
        hashes: &[ChunkHash],
    ) -> Option<ReadLease<A>> {
        self.lease(now, space, hashes, State::hold)
    }

    fn lease(
        &self,
        now: Duration,
        space: &Space<'_>,
        hashes: &[ChunkHash],
        one: fn(&mut State<A>, u32) -> SlotRef,
    ) -> Option<ReadLease<A>> {
        let mut hold = OrderedHold {
            slots: Vec::with_capacity(hashes.len()),
            extents: Vec::with_capacity(hashes.len()),
        };
        let pinned = self.locked(|state| {
            state.tell_time(now);
            let pinned = match state.spaces.find(space) {
                Some(space) => state.lease_all(space, hashes, one, &mut hold.slots),
                None => hashes.is_empty(),
            };
            if pinned {
                let extent = |held: &SlotRef| state.slab.at(held.slot).extent;
                hold.extents.extend(hold.slots.iter().map(extent));
            }
            pinned
        });
        pinned.then(|| ReadLease::new(self.clone(), hold))
    }

    /// Which of these objects are resident, in order.
    pub fn contains(&self, space: &Space<'_>, hashes: &[ChunkHash]) -> Vec<bool> {
        let mut resident = Vec::with_capacity(hashes.len());
        self.locked(|state| {
            let space = state.spaces.find(space);
            let is_resident = |hash| space.is_some_and(|space| state.find(space, hash).is_some());
            resident.extend(hashes.iter().map(is_resident));
        });
        resident
    }

    /// Counts these objects as used now; the last chunk stays the first to leave. Gives how many are resident.
    pub fn touch(&self, now: Duration, space: &Space<'_>, hashes: &[ChunkHash]) -> usize {
        self.locked(|state| {
            state.tell_time(now);
            let Some(space) = state.spaces.find(space) else {
                return 0;
            };
            let mut touched = 0;
            for hash in hashes.iter().rev() {
                if let Some(number) = state.find(space, hash) {
                    state.touch(number);
                    touched += 1;
                }
            }
            touched
        })
    }

    /// Takes these objects out. With `force` also leased ones: they disappear at once, their memory returns with
    /// the last lease.
    pub fn remove(&self, space: &Space<'_>, hashes: &[ChunkHash], force: bool) -> Removed {
        self.locked(|state| state.remove(space, hashes, force))
    }

    /// Takes out everything that was resident at the call, in slices, so that others get in between; what they
    /// store meanwhile may stay or go. Reservations stay as they are. `force` as in [`remove`](Self::remove).
    pub fn clear(&self, force: bool) -> Removed {
        const SLICE: u32 = 4096;
        let slots = self.locked(|state| state.slab.slots() as u32);
        let mut removed = Removed::default();
        for start in (0..slots).step_by(SLICE as usize) {
            let slice = start..slots.min(start + SLICE);
            self.locked(|state| state.clear(slice, force, &mut removed));
        }
        removed
    }

    /// Evicts in policy order until `bytes_wanted` bytes of objects or `max_objects` objects are gone, or nothing
    /// evictable is left. One slice of a background pass: keep `max_objects` small (some hundreds), so that others
    /// get in between.
    pub fn evict(&self, now: Duration, bytes_wanted: u64, max_objects: usize) -> Evicted {
        self.locked(|state| {
            state.tell_time(now);
            state.evict(bytes_wanted, max_objects)
        })
    }

    /// Evicts from tenants that have too much, their own least recently used first, until none has or `max_objects`
    /// are gone. One slice of a background pass; constant time when nobody has too much.
    pub fn evict_over_quota(&self, now: Duration, max_objects: usize) -> Evicted {
        self.locked(|state| {
            state.tell_time(now);
            state.evict_over_quota(max_objects)
        })
    }

    /// Sets what a tenant may have, or with `None` takes that back, so that the default holds. Nothing is evicted
    /// by this call: where a limit sinks, follow it by [`evict_over_quota`](Self::evict_over_quota).
    pub fn set_grant(&self, salt: &str, grant: Option<Grant>) {
        self.locked(|state| state.set_grant(salt, grant));
    }

    /// What was evicted since the last call, in order; always empty without [`CacheConfig::report_evicted`]. A cache
    /// that reports must be asked after each `reserve` and `evict`: the list is kept until then.
    pub fn take_evicted(&self) -> Vec<ResidentObject> {
        self.locked(|state| state.evicted.as_mut().map(std::mem::take))
            .unwrap_or_default()
    }

    /// Room taken and room there is; cheap.
    pub fn usage(&self) -> Usage {
        self.locked(|state| Usage {
            used_bytes: state.allocator.used(),
            capacity_bytes: state.allocator.capacity(),
        })
    }

    /// Bytes that objects of these lengths take of the memory, rounding included.
    pub fn footprint(&self, lens: impl IntoIterator<Item = u64>) -> u64 {
        self.locked(|state| {
            let taken = lens.into_iter().map(|len| state.allocator.footprint(len));
            taken.sum()
        })
    }

    /// Free space of each part of the memory.
    pub fn free_space(&self) -> Vec<FreeSpace> {
        self.locked(|state| state.allocator.free_space())
    }

    /// All counters.
    pub fn stats(&self) -> Stats {
        self.locked(|state| state.stats())
    }

    /// What one tenant has; `None` for a tenant that has nothing, not even a grant.
    pub fn salt_usage(&self, salt: &str) -> Option<SaltUsage> {
        self.locked(|state| state.salt_usage(salt))
    }

    /// All counters and those of some tenants, taken at one moment, so that these are parts of those.
    pub fn stats_with<S: AsRef<str>>(&self, salts: &[S]) -> (Stats, Vec<Option<SaltUsage>>) {
        self.locked(|state| {
            let usages = salts.iter().map(|salt| state.salt_usage(salt.as_ref()));
            (state.stats(), usages.collect())
        })
    }

    /// What each tenant has that has anything or a grant, at most `limit` of them; start with `from` 0.
    pub fn salts(&self, from: u32, limit: usize) -> Page<SaltUsage> {
        self.locked(|state| {
            let mut salts = state.spaces.tenants.from(from);
            let entries = salts.by_ref().take(limit);
            let entries = entries.map(|(_, salt)| SaltUsage::of(salt)).collect();
            let next = salts.next().map(|(number, _)| number);
            Page { entries, next }
        })
    }

    /// The spaces that have anything, at most `limit` of them; start with `from` 0.
    pub fn spaces(&self, from: u32, limit: usize) -> Page<OwnedSpace> {
        self.locked(|state| {
            let mut spaces = state.spaces.spaces_from(from);
            let entries = spaces.by_ref().take(limit);
            let entries = entries.map(|(_, space)| space).collect();
            let next = spaces.next().map(|(number, _)| number);
            Page { entries, next }
        })
    }

    /// The resident objects, from a look at no more than `limit` slots; start with `from` 0. A page may be empty
    /// and still have a next one.
    pub fn objects(&self, from: u32, limit: usize) -> Page<ResidentObject> {
        self.locked(|state| state.objects(from, limit))
    }

    /// Checks everything that must always hold. Takes time proportional to the number of objects, under the lock.
    ///
    /// # Errors
    /// The first invariant found broken.
    pub fn check_invariants(&self) -> Result<(), BrokenInvariant> {
        self.shared.state.lock().check_invariants()
    }
}
