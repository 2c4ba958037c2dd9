//! The cache: resident objects, their leases and their eviction.
//!
//! One state machine behind one short lock. Calls take the keys of a whole request, so a prefix is held or refused
//! in one step. Only metadata is touched under the lock; bytes are written and read by the holders of
//! reservations and leases, at the extents they name.
//!
//! An object's life: reserved (private to its [`Reservation`]) → committed (resident, found by lookups, in the
//! eviction order) → leased (held by any number of leases, not in the eviction order) or pinned (until a deadline, not
//! in it either) → back in the order → evicted or removed. Objects never move.
//!
//! The lock guards all metadata of a cache; no other lock is acquired inside.

mod allocator;
mod clock;
mod counters;
mod events;
mod eviction;
mod index;
mod interner;
mod invariants;
mod lease;
mod lookup;
mod losses;
mod namespaces;
mod pins;
mod refusal;
mod reservation;
mod reserve;
mod restore;
mod run;
mod slab;
mod state;
mod stats;
mod tenant;
mod warm;

pub use allocator::{ExtentAllocator, FreeSpace};
pub use events::{ChunkEvent, ChunkTokens, EventLogState, Events, Rows, StoredChunk, counted};
pub use invariants::BrokenInvariant;
pub use kvtier_common::extent::{ArenaPiece, Extent};
pub use lease::{Counted, Lookup, PrefixLease, ReadLease};
pub use losses::{Loss, LossCause};
pub use reservation::{
    Committed, KeyOutcome, Reservation, ReserveError, ReserveRequest, Reserved, StagedObject,
};
pub use reserve::ReservedPrompt;
pub use restore::Restored;
pub use slab::GrantOrigin;
pub use stats::{Page, SaltUsage, Stats, Usage};

use crate::eviction::EvictionKind;
use crate::group_row::GroupRow;
use crate::hashing::ChunkHash;
use crate::ledger::{Ledger, Snapshot, Words};
use crate::object_key::{Namespace, ObjectKey};
use crate::quota::{Grant, QuotaConfig};
use crate::window::ChunkBitmap;
use events::EventLog;
use kvtier_common::sync::Mutex;
use kvtier_common::sync::atomic::{AtomicU32, Ordering};
use lease::OrderedHold;
use lookup::LookupBatch;
use reserve::ReserveBatch;
use slab::SlotRef;
use state::CacheState;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Configuration of a cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheConfig {
    /// Eviction policy.
    pub eviction: EvictionKind,
    /// Whether to list evicted objects for [`Cache::take_evicted`], for a backend whose bytes have to be deleted too.
    pub report_evicted: bool,
    /// Meaning of limits, and the default for tenants without a grant.
    pub quotas: QuotaConfig,
    /// Share of the capacity, and of each tenant's limit, that pinned objects may take, 0 to 1. With 0 there are no pins.
    pub max_pinned_share: f64,
    /// Events that the log keeps for [`Cache::events`]; with 0 there is none.
    pub event_log_size: usize,
    /// In builds with debug assertions: check all invariants once per this many calls; 0 = never. Takes time proportional
    /// to the number of objects.
    pub check_invariants_every: u32,
}

/// How memory is reserved.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReserveOptions<'a> {
    /// The part of the memory to use, if possible; see [`ExtentAllocator::allocate_near`].
    pub near: Option<u32>,
    /// For a writer that may never commit: reserves at most these bytes, rounding included, and for a tenant with a limit, also
    /// a soft one, at most that limit staged at once. Keys beyond that are refused, and evict nothing.
    pub max_staged_bytes: Option<u64>,
    /// Whether what `max_staged_bytes` refuses is reserved by a later call, if this one reserves anything: it is not lost then.
    pub has_further_pieces: bool,
    /// The prompt that the objects are of. Keys are reserved chunk by chunk, and none behind one that is refused.
    pub prompt: Option<ReservedPrompt<'a>>,
}

/// Objects and bytes that a call evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Objects evicted.
    pub objects: usize,
    /// Bytes of the evicted objects.
    pub bytes: u64,
}

/// Result of `remove` or `clear`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Objects removed.
    pub objects: usize,
    /// Bytes of the removed objects; those of leased ones are freed with the last lease.
    pub bytes: u64,
    /// Objects kept because they are leased, without `force`.
    pub kept: usize,
    /// Keys that were not in the cache (`remove` only).
    pub missing: usize,
}

/// A resident or just evicted object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResidentObject {
    /// The chunk.
    pub chunk_hash: ChunkHash,
    /// The rest of the key.
    pub namespace: Arc<Namespace>,
    /// Bytes of the object.
    pub bytes: u64,
    /// Number of leases on it.
    pub leases: u32,
}

/// Handle to a cache; clones share it. All times are since one fixed moment, such as the process's start.
///
/// ```
/// # use kvtier_core::cache::{Cache, CacheConfig, Extent, ExtentAllocator, ReserveRequest};
/// # use kvtier_core::{ChunkHash, Namespace};
/// # use std::{sync::Arc, time::Duration};
/// # struct Bytes(u64);
/// # impl ExtentAllocator for Bytes {
/// #     fn allocate(&mut self, bytes: u64, _: u32) -> Option<Extent> {
/// #         self.0 += bytes;
/// #         Some(Extent::new(self.0 - bytes, bytes))
/// #     }
/// #     fn free(&mut self, extent: Extent) {
/// #         self.0 -= extent.len;
/// #     }
/// #     fn capacity(&self) -> u64 {
/// #         4096
/// #     }
/// #     fn used(&self) -> u64 {
/// #         self.0
/// #     }
/// # }
/// let cache = Cache::new(Bytes(0), CacheConfig::default());
/// let namespace = Arc::new(Namespace::new("some/model", 0, 0, 0, "")?);
/// let (now, hashes) = (Duration::ZERO, [ChunkHash([7; 32])]);
/// let request = ReserveRequest { namespace: &namespace, hashes: &hashes, len: 1024 };
/// let reserved = cache.reserve(now, &[request])?;
/// // The object is found only once its bytes are written.
/// assert!(cache.lease(now, &namespace, &hashes).is_none());
/// reserved.reservation.commit(now);
/// assert_eq!(cache.lease(now, &namespace, &hashes).map(|lease| lease.len()), Some(1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Cache<A: ExtentAllocator> {
    shared: Arc<LockedCache<A>>,
}

struct LockedCache<A: ExtentAllocator> {
    /// Guards all metadata. No bytes are touched and nothing waits under it.
    state: Mutex<CacheState<A>>,
    /// See [`CacheConfig::check_invariants_every`].
    check_every: u32,
    calls: AtomicU32,
    /// See [`Cache::wake_by_events`].
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
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
    /// An empty cache over this memory, which must be entirely free.
    pub fn new(allocator: A, config: CacheConfig) -> Self {
        Self::over(CacheState::new(allocator, config), config)
    }

    fn over(state: CacheState<A>, config: CacheConfig) -> Self {
        Self {
            shared: Arc::new(LockedCache {
                state: Mutex::new(state),
                check_every: config.check_invariants_every,
                calls: AtomicU32::new(0),
                wake: OnceLock::new(),
            }),
        }
    }

    /// An empty cache over this memory, which must be entirely free, that records its objects in a ledger.
    pub fn with_ledger<W: Words + 'static>(
        allocator: A,
        config: CacheConfig,
        ledger: Ledger<W>,
    ) -> Self {
        let mut state = CacheState::new(allocator, config);
        state.journal = Some(Box::new(ledger));
        Self::over(state, config)
    }

    /// A cache over this memory, which must be entirely free, with the objects of a snapshot and its ledger. They have the order
    /// of their last uses, as exactly as the ledger knows them, and of equally old ones that of their commits, so that a
    /// prefix loses its end first. Writes to the ledger only what is left out. Names of namespaces without objects are forgotten:
    /// their numbers are reused.
    pub fn restore<W: Words + 'static>(
        allocator: A,
        config: CacheConfig,
        mut ledger: Ledger<W>,
        mut snapshot: Snapshot,
    ) -> (Self, Restored<A>) {
        let mut state = CacheState::new(allocator, config);
        let granted = restore::restore(&mut state, &mut ledger, &mut snapshot);
        state.journal = Some(Box::new(ledger));
        let resident = state.counters.resident;
        let cache = Self::over(state, config);
        let restored = Restored {
            objects: resident.objects,
            bytes: resident.bytes,
            rejected: snapshot.rejected,
            withheld: Reservation::new(cache.clone(), granted.withheld),
            read: ReadLease::new(cache.clone(), granted.read),
        };
        (cache, restored)
    }

    /// Writes nothing to the ledger from here on: its objects are the next process's.
    pub fn detach_ledger(&self) {
        let journal = self.locked(|state| state.journal.take());
        drop(journal);
    }

    /// Whether objects are recorded.
    pub fn has_ledger(&self) -> bool {
        self.locked(|state| state.journal.is_some())
    }

    /// Objects that the ledger could not record so far.
    pub fn unrecorded(&self) -> u64 {
        self.locked(|state| {
            state
                .journal
                .as_ref()
                .map_or(0, |journal| journal.unrecorded())
        })
    }

    /// Wakes the reader that awaits events.
    #[cold]
    fn wake(&self) {
        if let Some(wake) = self.shared.wake.get() {
            wake();
        }
    }

    /// Runs one step under the lock.
    #[inline]
    fn locked<T>(&self, step: impl FnOnce(&mut CacheState<A>) -> T) -> T {
        let mut state = self.shared.state.lock();
        let result = step(&mut state);
        let must_wake = match &mut state.events {
            Some(log) => std::mem::take(&mut log.must_wake),
            None => false,
        };
        let mut broken = None;
        // A second panic while one unwinds would abort the process without a message.
        let checks = cfg!(debug_assertions) && !std::thread::panicking();
        if checks && self.shared.check_every > 0 {
            let calls = self.shared.calls.fetch_add(1, Ordering::Relaxed);
            if calls.is_multiple_of(self.shared.check_every) {
                broken = invariants::check(&*state).err();
            }
        }
        drop(state);
        assert!(broken.is_none(), "{broken:?}");
        if must_wake {
            self.wake();
        }
        result
    }

    /// Reserves memory for those of these keys that are not resident, evicting others for it.
    ///
    /// Resident keys count as used, and are never evicted for other keys of the same call. A key is refused only if the
    /// search (see `run.rs` for its bounds) finds no eviction that frees a range large enough; then nothing is evicted
    /// for it, and the keys reserved before it stay reserved.
    ///
    /// # Errors
    /// [`ReserveError::EmptyObject`]: a request has `len` 0; nothing is reserved.
    pub fn reserve(
        &self,
        now: Duration,
        requests: &[ReserveRequest<'_>],
    ) -> Result<Reserved<A>, ReserveError> {
        self.reserve_with(now, requests, &ReserveOptions::default())
    }

    /// [`Cache::reserve`] with options.
    ///
    /// # Errors
    /// As [`Cache::reserve`].
    pub fn reserve_with(
        &self,
        now: Duration,
        requests: &[ReserveRequest<'_>],
        options: &ReserveOptions<'_>,
    ) -> Result<Reserved<A>, ReserveError> {
        if let Some(request) = requests.iter().position(|request| request.len == 0) {
            return Err(ReserveError::EmptyObject { request });
        }
        let mut batch = ReserveBatch::new(requests, options.prompt);
        self.locked(|state| {
            state.advance_clock(now);
            batch.reserve(state, requests, options);
        });
        Ok(Reserved {
            reservation: Reservation::new(self.clone(), batch.staged),
            bytes: batch.bytes,
            outcomes: batch.outcomes,
        })
    }

    /// Finds the longest prefix of `hashes` that every row can serve, and leases it in the same step: full-attention rows
    /// hold all its chunks, rows with a window the last of them. A miss holds nothing; so does a lookup without rows.
    pub fn lookup(&self, now: Duration, rows: &Arc<[GroupRow]>, hashes: &[ChunkHash]) -> Lookup<A> {
        self.lookup_counted(now, rows, hashes, |state, hit| {
            lookup::count(state, rows, hashes.len(), hit)
        })
    }

    /// [`lookup`](Self::lookup), repeated after missing objects were loaded: only what it finds beyond `before` is counted.
    pub fn lookup_again(
        &self,
        now: Duration,
        rows: &Arc<[GroupRow]>,
        hashes: &[ChunkHash],
        before: Counted,
    ) -> Lookup<A> {
        self.lookup_counted(now, rows, hashes, |state, hit| {
            lookup::count_again(state, rows, hashes.len(), hit, before)
        })
    }

    /// Finds those of `hashes` that every row has, each an object of its own whatever the windows of the rows, and leases them
    /// in the same step; returns which they are, and how many as the hit. The lease counts them alone.
    pub fn find(
        &self,
        now: Duration,
        rows: &Arc<[GroupRow]>,
        hashes: &[ChunkHash],
        before: Option<Counted>,
    ) -> (ChunkBitmap, Lookup<A>) {
        let mut batch = LookupBatch::new(rows, hashes.len());
        let mut found = ChunkBitmap::with_capacity(hashes.len());
        let (hit_chunks, counted, may_be_unstored) = self.locked(|state| {
            state.advance_clock(now);
            let hit = batch.find(state, rows, hashes, &mut found);
            let counted = match before {
                None => lookup::count(state, rows, hashes.len(), hit),
                Some(before) => lookup::count_again(state, rows, hashes.len(), hit, before),
            };
            (hit, counted, state.unstored > 0)
        });
        let lease = PrefixLease::new(self.clone(), Arc::clone(rows), batch.holds);
        let lookup = Lookup {
            hit_chunks,
            counted,
            may_be_unstored,
            lease,
        };
        (found, lookup)
    }

    fn lookup_counted(
        &self,
        now: Duration,
        rows: &Arc<[GroupRow]>,
        hashes: &[ChunkHash],
        count: impl FnOnce(&mut CacheState<A>, usize) -> Counted,
    ) -> Lookup<A> {
        let mut batch = LookupBatch::new(rows, hashes.len());
        let (hit_chunks, counted, may_be_unstored) = self.locked(|state| {
            state.advance_clock(now);
            let hit = batch.lookup(state, rows, hashes);
            (hit, count(state, hit), state.unstored > 0)
        });
        Lookup {
            hit_chunks,
            counted,
            may_be_unstored,
            lease: PrefixLease::new(self.clone(), Arc::clone(rows), batch.holds),
        }
    }

    /// Leases all these objects, in this order; `None` if one of them is not resident. Counts as a use.
    pub fn lease(
        &self,
        now: Duration,
        namespace: &Namespace,
        hashes: &[ChunkHash],
    ) -> Option<ReadLease<A>> {
        self.lease_by(now, namespace, hashes, CacheState::lease)
    }

    /// [`lease`](Self::lease) for the server's own purposes, such as writing objects to a tier: does not count as a use.
    pub fn hold(
        &self,
        now: Duration,
        namespace: &Namespace,
        hashes: &[ChunkHash],
    ) -> Option<ReadLease<A>> {
        self.lease_by(now, namespace, hashes, CacheState::hold)
    }

    /// [`hold`](Self::hold) of the object of a key that has no layout, in whichever layout it is resident. Returns its namespace
    /// too.
    pub fn hold_any_layout(
        &self,
        now: Duration,
        key: &ObjectKey,
    ) -> Option<(Arc<Namespace>, ReadLease<A>)> {
        let hash = key.chunk_hash();
        let found = self.locked(|state| {
            let mut numbers = state.namespaces.of_any_layout(key.namespace());
            let number = numbers.find(|number| state.find(*number, &hash).is_some())?;
            state.namespaces.get(number).cloned()
        })?;
        let lease = self.hold(now, &found, &[hash])?;
        Some((found, lease))
    }

    fn lease_by(
        &self,
        now: Duration,
        namespace: &Namespace,
        hashes: &[ChunkHash],
        one: fn(&mut CacheState<A>, u32) -> SlotRef,
    ) -> Option<ReadLease<A>> {
        let mut hold = OrderedHold {
            slots: Vec::with_capacity(hashes.len()),
            extents: Vec::with_capacity(hashes.len()),
        };
        let is_leased = self.locked(|state| {
            state.advance_clock(now);
            let is_leased = match state.namespaces.find(namespace) {
                Some(namespace) => {
                    lookup::lease_all(state, namespace, hashes, one, &mut hold.slots)
                }
                None => hashes.is_empty(),
            };
            if is_leased {
                let extent = |held: &SlotRef| state.slab.at(held.slot).extent;
                hold.extents.extend(hold.slots.iter().map(extent));
            }
            is_leased
        });
        is_leased.then(|| ReadLease::new(self.clone(), hold))
    }

    /// Pins those of these objects that are resident for this time from `now` on, so that no other object evicts them, or
    /// extends their pins; it shortens none. Requests count as one: if [`CacheConfig::max_pinned_share`] does not allow all, the
    /// first chunks are pinned. Removal ends a pin, and so does a store for which there are no other victims.
    pub fn pin(&self, now: Duration, requests: &[ReserveRequest<'_>], time: Duration) {
        let deadline = pins::deadline(now, time);
        let longest = requests.iter().map(|request| request.hashes.len()).max();
        self.locked(|state| {
            for position in 0..longest.unwrap_or(0) {
                for request in requests {
                    let namespace = state.namespaces.find(request.namespace);
                    let hash = request.hashes.get(position);
                    let found = namespace
                        .zip(hash)
                        .and_then(|(namespace, hash)| state.find(namespace, hash));
                    if let Some(number) = found {
                        state.pin(number, deadline);
                    }
                }
            }
        });
    }

    /// Ends at most `limit` of the pins whose deadline has passed; returns how many. One slice of a background pass, which is to
    /// run every second or so.
    pub fn end_pins(&self, now: Duration, limit: usize) -> usize {
        self.locked(|state| state.end_pins(clock::ticks(now), limit))
    }

    /// Notes that a tier could not store these objects, as far as they are resident: the next lookup that hits them finds that.
    pub fn set_unstored(&self, namespace: &Namespace, hashes: &[ChunkHash]) {
        self.locked(|state| {
            let Some(namespace) = state.namespaces.find(namespace) else {
                return;
            };
            for hash in hashes {
                if let Some(number) = state.find(namespace, hash) {
                    state.unstored += usize::from(state.slab.at_mut(number).set_unstored());
                }
            }
        });
    }

    /// Whether each of these objects is resident.
    pub fn contains(&self, namespace: &Namespace, hashes: &[ChunkHash]) -> Vec<bool> {
        let mut resident = Vec::with_capacity(hashes.len());
        self.locked(|state| {
            let number = state.namespaces.find(namespace);
            let is_resident =
                |hash| number.is_some_and(|number| state.find(number, hash).is_some());
            resident.extend(hashes.iter().map(is_resident));
        });
        resident
    }

    /// Records a use of these chunks in all these namespaces; the last chunk becomes the oldest. Returns how many objects are
    /// resident.
    pub fn touch<'n>(
        &self,
        now: Duration,
        namespaces: impl IntoIterator<Item = &'n Arc<Namespace>>,
        hashes: &[ChunkHash],
    ) -> usize {
        self.reorder(now, namespaces, hashes, CacheState::touch)
    }

    /// Orders these chunks in all these namespaces as [`Cache::touch`] does, without a use.
    pub fn renew<'n>(
        &self,
        now: Duration,
        namespaces: impl IntoIterator<Item = &'n Arc<Namespace>>,
        hashes: &[ChunkHash],
    ) {
        self.reorder(now, namespaces, hashes, CacheState::renew);
    }

    /// Makes those of these chunks that are neither leased nor pinned the first to be evicted, until they are used. Returns how
    /// many were not, and how many are leased or pinned.
    pub fn evict_first<'n>(
        &self,
        now: Duration,
        namespaces: impl IntoIterator<Item = &'n Arc<Namespace>>,
        hashes: &[ChunkHash],
    ) -> (usize, usize) {
        let (mut first, mut held) = (0, 0);
        self.reorder(now, namespaces, hashes, |state, number| {
            match state.put_first(number) {
                Some(is_new) => first += usize::from(is_new),
                None => held += 1,
            }
        });
        (first, held)
    }

    fn reorder<'n>(
        &self,
        now: Duration,
        namespaces: impl IntoIterator<Item = &'n Arc<Namespace>>,
        hashes: &[ChunkHash],
        mut one: impl FnMut(&mut CacheState<A>, u32),
    ) -> usize {
        let namespaces: Vec<_> = namespaces.into_iter().collect();
        self.locked(|state| {
            state.advance_clock(now);
            let found = namespaces.iter().filter_map(|it| state.namespaces.find(it));
            let found: Vec<_> = found.collect();
            let mut resident = 0;
            for hash in hashes.iter().rev() {
                for namespace in &found {
                    if let Some(number) = state.find(*namespace, hash) {
                        one(state, number);
                        resident += 1;
                    }
                }
            }
            resident
        })
    }

    /// Announces those of these chunks that are resident in all of `rows` that they need, unless they are: see `events.rs`. To be
    /// called when objects of them were committed, with the rows of all ranks and groups. Does nothing without a log, or for a
    /// tenant.
    pub fn announce(&self, rows: &Arc<[GroupRow]>, hashes: &[ChunkHash], known: &ChunkTokens) {
        let salt = rows.first().map(|row| row.namespace.cache_salt());
        if salt.is_none_or(|salt| !salt.is_empty()) {
            return;
        }
        let chunks = events::chunks(hashes, known);
        self.locked(|state| state.announce(rows, hashes, chunks));
    }

    /// The events of a model behind `cursor`, at most `max`; `None` without a log. Large ones may be fewer. If there are none,
    /// the next one of any model [wakes](Self::wake_by_events).
    ///
    /// The lock is held for a slice of the log at a time.
    pub fn events(&self, model_name: &str, cursor: u64, max: usize) -> Option<Events> {
        let mut read = Events {
            next_cursor: cursor,
            ..Events::default()
        };
        while self.locked(|state| Some(state.events.as_mut()?.read(&mut read, model_name, max)))? {}
        Some(read)
    }

    /// The next event of objects of a model that were removed or evicted behind `cursor`, like [`Cache::events`]. They are logged from
    /// the first call on. For a cache without a log of chunks.
    pub fn removals(&self, model_name: &str, cursor: u64) -> Events {
        let mut read = Events {
            next_cursor: cursor,
            ..Events::default()
        };
        while self.locked(|state| {
            let log = || Box::new(EventLog::of_objects());
            let log = state.events.get_or_insert_with(log);
            log.read(&mut read, model_name, 1)
        }) {}
        read
    }

    /// Calls `wake`, without the lock, at the first event after a reader of [`Cache::events`] found none. One such call is
    /// enough for a cache; later ones change nothing.
    pub fn wake_by_events(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.shared.wake.set(Box::new(wake));
    }

    /// State of the log of events, if there is one.
    pub fn event_log(&self) -> Option<EventLogState> {
        self.locked(|state| Some(state.events.as_ref()?.state()))
    }

    /// Removes these objects. With `force` also leased ones: they disappear at once, their memory is freed with the last
    /// lease.
    pub fn remove(&self, namespace: &Namespace, hashes: &[ChunkHash], force: bool) -> Removed {
        let cause = Some(LossCause::Removed);
        self.locked(|state| state.remove(namespace, hashes, force, cause))
    }

    /// [`Cache::remove`] without `force`, of objects that a tier below has: nothing is lost, so nothing is noted for
    /// [`Cache::losses`].
    pub fn unload(&self, namespace: &Namespace, hashes: &[ChunkHash]) -> Removed {
        self.locked(|state| state.remove(namespace, hashes, false, None))
    }

    /// The last loss of each of these objects, as far as it is remembered: the ring has the latest 65,536 of all objects. An
    /// object that is resident again may still have one.
    ///
    /// The ring is read once, however many objects and namespaces are asked for: ask for all in one call. The lock is held
    /// while a slice of the ring is copied; keys are computed and compared without it.
    pub fn losses(&self, asked: &[(&Arc<Namespace>, &[ChunkHash])]) -> Vec<Vec<Option<Loss>>> {
        let (seed, clock, known) = self.locked(|state| {
            let known = state.losses.first()..state.losses.total();
            (state.namespaces.seed.clone(), state.clock, known)
        });
        let mut question = losses::LossQuestion::new(&seed, asked);
        let mut copied = Vec::with_capacity(losses::SLICE);
        for from in known.clone().step_by(losses::SLICE) {
            let to = known.end.min(from + losses::SLICE as u64);
            self.locked(|state| state.losses.copy(from, to, &mut copied));
            question.note(&copied);
            copied.clear();
        }
        question.answer(clock)
    }

    /// How far back [`Cache::losses`] remembers; `None` if nothing was forgotten yet.
    pub fn losses_since(&self) -> Option<Duration> {
        self.locked(|state| state.losses.since(state.clock))
    }

    /// Removes everything that is resident at the call, in slices, so that other calls get in between; objects that they
    /// store meanwhile may stay or be removed. Reservations stay. `force` as in [`remove`](Self::remove).
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

    /// Evicts in policy order until `bytes_wanted` bytes of objects or `max_objects` objects are evicted, or nothing
    /// evictable is left. One slice of a background pass: keep `max_objects` small (some hundreds), so that other calls
    /// get in between.
    pub fn evict(&self, now: Duration, bytes_wanted: u64, max_objects: usize) -> Evicted {
        self.locked(|state| {
            state.advance_clock(now);
            eviction::evict(state, bytes_wanted, max_objects)
        })
    }

    /// Evicts from tenants over quota, their own least recently used first, until none is or `max_objects` are evicted. One
    /// slice of a background pass; constant time if no tenant is over quota.
    pub fn evict_over_quota(&self, now: Duration, max_objects: usize) -> Evicted {
        self.locked(|state| {
            state.advance_clock(now);
            eviction::evict_over_quota(state, max_objects)
        })
    }

    /// Sets a tenant's grant; `None` removes it, so that the default applies. Nothing is evicted by this call: after
    /// lowering a limit, call [`evict_over_quota`](Self::evict_over_quota).
    pub fn set_grant(&self, salt: &str, grant: Option<Grant>) {
        self.locked(|state| {
            let changed = state.namespaces.tenants.set_grant(salt, grant);
            if let Some((tenant, protected)) = changed {
                state.policy.protect(tenant, protected);
            }
        });
    }

    /// Changes how limits are enforced, for all tenants at once; takes time by their number. Nothing is evicted by this
    /// call, as with [`set_grant`](Self::set_grant).
    pub fn configure_quotas(&self, change: impl FnOnce(&mut QuotaConfig)) {
        self.locked(|state| state.namespaces.tenants.configure(change));
    }

    /// Changes settings of the allocator, such as the capacity of a byte sum. Nothing is evicted by this call: after lowering
    /// a capacity, call [`evict`](Self::evict).
    pub fn configure_allocator(&self, change: impl FnOnce(&mut A)) {
        self.locked(|state| change(&mut state.allocator));
    }

    /// How limits are enforced.
    pub fn quotas(&self) -> QuotaConfig {
        self.locked(|state| state.namespaces.tenants.config())
    }

    /// Takes the list of objects evicted since the last call, in order; always empty without
    /// [`CacheConfig::report_evicted`]. With it, call this after each `reserve` and `evict`: the list grows until then.
    pub fn take_evicted(&self) -> Vec<ResidentObject> {
        self.locked(|state| state.evicted.as_mut().map(std::mem::take))
            .unwrap_or_default()
    }

    /// Used and total capacity; cheap.
    pub fn usage(&self) -> Usage {
        self.locked(|state| Usage {
            used_bytes: state.allocator.used(),
            pinned_bytes: state.pinned.tally.bytes,
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

    /// Most bytes that these chunks in these rows can have beside what may not be evicted, rounding included. Fragments and
    /// reserved shares of other tenants may leave less.
    pub fn capacity_for(&self, rows: &[GroupRow], hashes: &[ChunkHash]) -> u64 {
        self.locked(|state| lookup::capacity_for(state, rows, hashes))
    }

    /// Free space of each part of the memory.
    pub fn free_space(&self) -> Vec<FreeSpace> {
        self.locked(|state| state.allocator.free_space())
    }

    /// All counters.
    pub fn stats(&self) -> Stats {
        self.locked(|state| Stats::of(state))
    }

    /// Usage of one tenant; `None` for one with neither objects nor a grant.
    pub fn salt_usage(&self, salt: &str) -> Option<SaltUsage> {
        self.locked(|state| SaltUsage::find(&state.namespaces.tenants, salt))
    }

    /// All counters and those of some tenants, taken at one moment, so that they add up.
    pub fn stats_with<S: AsRef<str>>(&self, salts: &[S]) -> (Stats, Vec<Option<SaltUsage>>) {
        self.locked(|state| {
            let tenants = &state.namespaces.tenants;
            let usages = salts
                .iter()
                .map(|salt| SaltUsage::find(tenants, salt.as_ref()));
            (Stats::of(state), usages.collect())
        })
    }

    /// Usage of tenants with objects or a grant, at most `limit` of them; start with `from` 0.
    pub fn salts(&self, from: u32, limit: usize) -> Page<SaltUsage> {
        self.locked(|state| {
            let mut salts = state.namespaces.tenants.from(from);
            let entries = salts.by_ref().take(limit);
            let entries = entries.map(|(_, salt)| SaltUsage::of(salt)).collect();
            let next = salts.next().map(|(number, _)| number);
            Page { entries, next }
        })
    }

    /// The namespaces with objects, at most `limit` of them; start with `from` 0.
    pub fn namespaces(&self, from: u32, limit: usize) -> Page<Arc<Namespace>> {
        self.locked(|state| {
            let mut namespaces = state.namespaces.from(from);
            let entries = namespaces.by_ref().take(limit);
            let entries = entries
                .map(|(_, namespace)| Arc::clone(namespace))
                .collect();
            let next = namespaces.next().map(|(number, _)| number);
            Page { entries, next }
        })
    }

    /// The resident objects among at most `limit` slots; start with `from` 0. A page may be empty and still have a next
    /// one.
    pub fn objects(&self, from: u32, limit: usize) -> Page<ResidentObject> {
        self.locked(|state| state.objects(from, limit))
    }

    /// Checks all invariants. Takes time proportional to the number of objects, under the lock.
    ///
    /// # Errors
    /// The first invariant found broken.
    pub fn check_invariants(&self) -> Result<(), BrokenInvariant> {
        invariants::check(&*self.shared.state.lock())
    }
}
