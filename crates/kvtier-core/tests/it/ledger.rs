//! What the next process finds: at whatever word the one before was killed, and whatever became of the words.

use crate::cache_support::{FirstFit, hash, namespace, request};
use kvtier_core::Namespace;
use kvtier_core::cache::{Cache, CacheConfig, Extent, ReadLease, Reservation, Restored};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::ledger::{
    FORMAT_VERSION, Fault, Identity, Ledger, LedgerError, Owner, Snapshot, Words,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const CAPACITY: u64 = 64;
const ALIGN: u64 = 2;
const ID: u64 = 0x1234_5678_9abc_def0;
const SECOND: u64 = 1_000_000_000;

const IDENTITY: Identity = Identity {
    arena: [25, 7],
    chunk_size: 256,
    hash_algorithm: 1,
    tenants: 3,
    instance: 9,
    origin: 5 * SECOND,
};

/// Words that remember each of their writes.
#[derive(Clone, Debug, Default)]
struct Memory {
    len: u64,
    words: HashMap<u64, u64>,
    log: Vec<(u64, u64)>,
}

impl Memory {
    fn write(&mut self, at: u64, word: u64) {
        match word {
            0 => self.words.remove(&at),
            word => self.words.insert(at, word),
        };
    }
}

#[derive(Clone, Debug, Default)]
struct Shared(Arc<Mutex<Memory>>);

impl Shared {
    fn of(memory: &Memory) -> Self {
        Self(Arc::new(Mutex::new(memory.clone())))
    }

    fn position(&self) -> usize {
        self.0.lock().unwrap().log.len()
    }
}

impl Words for Shared {
    fn get(&self, at: u64) -> u64 {
        let memory = self.0.lock().unwrap();
        memory.words.get(&at).copied().unwrap_or(0)
    }

    fn set(&mut self, at: u64, word: u64) {
        let mut memory = self.0.lock().unwrap();
        assert!(at < memory.len);
        memory.write(at, word);
        memory.log.push((at, word));
    }

    fn end(&self) -> u64 {
        self.0.lock().unwrap().len
    }

    fn reach(&mut self, words: std::ops::Range<u64>) -> bool {
        let mut memory = self.0.lock().unwrap();
        memory.len = memory.len.max(words.end);
        true
    }
}

fn config(eviction: EvictionKind) -> CacheConfig {
    CacheConfig {
        eviction,
        check_invariants_every: 1,
        ..CacheConfig::default()
    }
}

fn recorded(words: &Shared, eviction: EvictionKind) -> Cache<FirstFit> {
    let ledger = Ledger::create(words.clone(), ID, &IDENTITY).unwrap();
    Cache::with_ledger(FirstFit::new(CAPACITY, ALIGN), config(eviction), ledger)
}

fn open(memory: &Memory) -> Result<(Ledger<Shared>, Snapshot), LedgerError> {
    open_for(memory, CAPACITY, ALIGN)
}

/// Opens it for an arena of this size and alignment.
fn open_for(
    memory: &Memory,
    capacity: u64,
    align: u64,
) -> Result<(Ledger<Shared>, Snapshot), LedgerError> {
    let now = IDENTITY.origin + 1000 * SECOND;
    let opened = Ledger::open(
        Shared::of(memory),
        Owner::Ended,
        &IDENTITY,
        now,
        capacity,
        align,
    );
    opened.map_err(|(error, _)| error)
}

fn restored(memory: &Memory, eviction: EvictionKind) -> (Cache<FirstFit>, Restored<FirstFit>) {
    let (ledger, snapshot) = open(memory).unwrap();
    let (cache, restored) = Cache::restore(
        FirstFit::new(CAPACITY, ALIGN),
        config(eviction),
        ledger,
        snapshot,
    );
    cache.check_invariants().unwrap();
    (cache, restored)
}

type Key = (usize, u32);

const SALTS: [&str; 3] = ["", "a", "b"];

fn space(key: usize) -> &'static Arc<Namespace> {
    namespace(0, SALTS[key])
}

/// The readable objects and their memory.
fn objects(cache: &Cache<FirstFit>) -> BTreeMap<Key, Extent> {
    let mut found = BTreeMap::new();
    for salt in 0..SALTS.len() {
        for number in 0..KEYS {
            if let Some(lease) = cache.hold(Duration::ZERO, space(salt), &[hash(number)]) {
                found.insert((salt, number), lease.extents()[0]);
            }
        }
    }
    found
}

/// Chunks per tenant.
const KEYS: u32 = 12;

/// Steps of a random walk.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Memory that a client has, from one word to another.
struct Grant {
    extents: Vec<Extent>,
    from: usize,
    to: usize,
}

/// A cache whose history is known.
struct Walk {
    words: Shared,
    cache: Cache<FirstFit>,
    now: Duration,
    /// Memory, key, and the words that were written before.
    writes: Vec<(usize, Extent, Key)>,
    grants: Vec<Grant>,
    stores: Vec<(Reservation<FirstFit>, Vec<Key>, Option<usize>)>,
    reads: Vec<(ReadLease<FirstFit>, Option<usize>)>,
    /// Readable objects after each step, and the words by then.
    steps: Vec<(usize, BTreeSet<Key>)>,
}

impl Walk {
    fn new(eviction: EvictionKind) -> Self {
        let words = Shared::default();
        Self {
            cache: recorded(&words, eviction),
            steps: vec![(words.position(), BTreeSet::new())],
            words,
            now: Duration::from_secs(1),
            writes: Vec::new(),
            grants: Vec::new(),
            stores: Vec::new(),
            reads: Vec::new(),
        }
    }

    fn granted(&mut self, extents: Vec<Extent>) -> usize {
        self.grants.push(Grant {
            extents,
            from: self.words.position(),
            to: usize::MAX,
        });
        self.grants.len() - 1
    }

    fn step(&mut self, random: &mut Random) {
        self.now += Duration::from_secs(random.below(4));
        let salt = random.below(3) as usize;
        let first = random.below(u64::from(KEYS) - 3) as u32;
        let numbers: Vec<_> = (first..=first + random.below(3) as u32).collect();
        let hashes: Vec<_> = numbers.iter().map(|number| hash(*number)).collect();
        match random.below(10) {
            0..=3 => {
                let len = 1 + random.below(7);
                let wanted = request(space(salt), &hashes, len);
                let reservation = self.cache.reserve(self.now, &wanted).unwrap().reservation;
                let keys: Vec<_> = reservation
                    .staged()
                    .iter()
                    .map(|staged| (salt, numbers[staged.position as usize]))
                    .collect();
                let grant = (random.below(2) == 0).then(|| {
                    reservation.grant();
                    let extents = reservation.extents().collect();
                    self.granted(extents)
                });
                for (extent, key) in reservation.extents().zip(&keys) {
                    self.writes.push((self.words.position(), extent, *key));
                }
                self.stores.push((reservation, keys, grant));
            }
            4..=5 if !self.stores.is_empty() => {
                let at = random.below(self.stores.len() as u64) as usize;
                let (reservation, keys, grant) = self.stores.swap_remove(at);
                // The client has stopped: its commit says so.
                if let Some(grant) = grant {
                    self.grants[grant].to = self.words.position();
                }
                // It writes until then.
                for (extent, key) in reservation.extents().zip(keys) {
                    self.writes.push((self.words.position(), extent, key));
                }
                match random.below(4) {
                    0 => drop(reservation),
                    1 => drop(reservation.commit_leased(self.now)),
                    _ => drop(reservation.commit(self.now)),
                }
            }
            6 => {
                if let Some(lease) = self.cache.pin(self.now, space(salt), &hashes[..1]) {
                    let grant = (random.below(2) == 0).then(|| {
                        lease.grant();
                        self.granted(lease.extents().to_vec())
                    });
                    self.reads.push((lease, grant));
                }
            }
            7 if !self.reads.is_empty() => {
                let at = random.below(self.reads.len() as u64) as usize;
                let (lease, grant) = self.reads.swap_remove(at);
                if let Some(grant) = grant {
                    self.grants[grant].to = self.words.position();
                }
                drop(lease);
            }
            8 => {
                self.cache
                    .remove(space(salt), &hashes, random.below(2) == 0);
            }
            _ => {
                self.cache.evict(self.now, 1 + random.below(20), 8);
            }
        }
        let resident = objects(&self.cache).into_keys().collect();
        self.steps.push((self.words.position(), resident));
    }

    /// Checks what is restored after the first `position` words.
    fn check(&self, position: usize, memory: &Memory, eviction: EvictionKind) {
        let (cache, restored) = restored(memory, eviction);
        assert_eq!(restored.rejected.total(), 0, "nothing is torn");
        let found = objects(&cache);
        for (key, extent) in &found {
            let mut writes = self.writes.iter().rev();
            let last = writes.find(|(at, it, _)| *at <= position && it.overlaps(extent));
            let (at, written, owner) = last.expect("an object without a write");
            assert!(at < &position, "{key:?} is readable before it is written");
            assert_eq!(
                (owner, written),
                (key, extent),
                "bytes of {key:?} after {position} words"
            );
        }
        let next = self.steps.partition_point(|(at, _)| *at < position);
        let after = self.steps.get(next).map(|(_, resident)| resident);
        let before = next.checked_sub(1).map(|at| &self.steps[at].1);
        if let (Some(before), Some(after)) = (before, after) {
            for key in before.intersection(after) {
                // One that was replaced in the same step may be missing between.
                let is_kept = !self.writes.iter().any(|(at, _, owner)| {
                    owner == key && *at >= self.steps[next - 1].0 && *at <= position
                });
                assert!(
                    !is_kept || found.contains_key(key),
                    "{key:?} after {position} words"
                );
            }
            if self.steps[next].0 == position {
                assert_eq!(&found.keys().copied().collect::<BTreeSet<_>>(), after);
            }
        }
        let read = restored.read.extents().iter().copied();
        let kept: Vec<_> = restored.withheld.extents().chain(read).collect();
        for grant in &self.grants {
            if (grant.from..grant.to).contains(&position) {
                for extent in &grant.extents {
                    assert!(
                        kept.contains(extent),
                        "{extent:?} after {position} words: {kept:?}"
                    );
                }
            }
        }
        // All of it can be used, and the parts in use by clients are free once they are done.
        drop(restored);
        cache.evict(Duration::from_secs(2000), u64::MAX, usize::MAX);
        assert_eq!(cache.usage().used_bytes, 0);
        cache.check_invariants().unwrap();
    }
}

/// A process that is killed between any two words: each readable object has its own bytes, each committed one is there,
/// and what clients may be copying is kept from others.
#[test]
fn kill_at_any_word_restores_what_was_committed() {
    for seed in 0..24 {
        let eviction = [
            EvictionKind::Lru,
            EvictionKind::IsolatedLru,
            EvictionKind::Arc,
        ];
        let eviction = eviction[seed as usize % 3];
        let mut random = Random(seed);
        let mut walk = Walk::new(eviction);
        let start = walk.words.position();
        for _ in 0..60 {
            walk.step(&mut random);
        }
        let whole = walk.words.0.lock().unwrap().clone();
        let mut memory = Memory {
            len: whole.len,
            ..Memory::default()
        };
        for (position, (at, word)) in whole.log.iter().enumerate() {
            if position >= start {
                walk.check(position, &memory, eviction);
            }
            memory.write(*at, *word);
        }
        walk.check(whole.log.len(), &memory, eviction);
    }
}

/// Before the header is whole, nothing is believed.
#[test]
fn kill_while_the_header_is_written_leaves_no_ledger() {
    let words = Shared::default();
    drop(recorded(&words, EvictionKind::Lru));
    let whole = words.0.lock().unwrap().clone();
    // Over an older ledger, too, whose header was sound.
    for older in [Memory::default(), whole.clone()] {
        let mut memory = Memory {
            len: whole.len,
            ..older
        };
        let (last, others) = whole.log.split_last().unwrap();
        for (at, word) in others {
            memory.write(*at, *word);
            assert_eq!(open(&memory).err(), Some(LedgerError::Absent));
        }
        memory.write(last.0, last.1);
        assert!(open(&memory).is_ok());
    }
}

/// Three objects of two tenants, each in 8 bytes.
fn stored() -> Memory {
    let words = Shared::default();
    let cache = recorded(&words, EvictionKind::Lru);
    for (seconds, (salt, number)) in (1..).zip([(0, 0), (0, 1), (1, 2)]) {
        let wanted = [hash(number)];
        let wanted = request(space(salt), &wanted, 8);
        let now = Duration::from_secs(seconds);
        let reserved = cache.reserve(now, &wanted).unwrap();
        assert_eq!(reserved.reservation.commit(now).inserted, 1);
    }
    drop(cache);
    Arc::into_inner(words.0).unwrap().into_inner().unwrap()
}

fn keys(memory: &Memory) -> Vec<Key> {
    let (cache, _restored) = restored(memory, EvictionKind::Lru);
    objects(&cache).into_keys().collect()
}

/// Places of the words of the slot's record.
fn record(slot: u64) -> std::ops::Range<u64> {
    let start = kvtier_core::ledger::max_words(slot);
    start..start + kvtier_core::ledger::RECORD_BYTES / 8
}

#[test]
fn each_flipped_bit_leaves_out_what_it_belongs_to() {
    let memory = stored();
    assert_eq!(keys(&memory), [(0, 0), (0, 1), (1, 2)]);
    let mut places: Vec<_> = memory.words.keys().copied().collect();
    // Zero words of the records, too.
    places.extend(record(1));
    places.sort_unstable();
    places.dedup();
    let mut whole = 0;
    for at in places {
        for bit in 0..64 {
            let mut damaged = memory.clone();
            let word = damaged.words.get(&at).copied().unwrap_or(0);
            damaged.write(at, word ^ 1 << bit);
            if let Err(error) = open(&damaged) {
                assert!(at < 512, "{error} for a flip in word {at}");
                whole += 1;
                continue;
            }
            let left = keys(&damaged);
            let lost: &[Key] = match at {
                // The flipped mark is no ledger, and everything else of the header has a checksum.
                0..512 => panic!("word {at} of the header, bit {bit}: {left:?}"),
                at if record(0).contains(&at) => &[(0, 1), (1, 2)],
                at if record(1).contains(&at) => &[(0, 0), (1, 2)],
                at if record(2).contains(&at) => &[(0, 0), (0, 1)],
                at if at < 512 + 256 => &[(1, 2)],
                _ => &[(0, 0), (0, 1)],
            };
            assert_eq!(left, lost, "word {at}, bit {bit}");
        }
    }
    assert!(whole >= 12 * 64);
}

fn rejected(memory: &Memory) -> Vec<(&'static str, u64)> {
    let (_cache, restored) = restored(memory, EvictionKind::Lru);
    let all = Fault::ALL.map(|fault| (fault.name(), restored.rejected.get(fault)));
    all.into_iter().filter(|(_, count)| *count > 0).collect()
}

#[test]
fn left_out_objects_are_counted_by_reason() {
    let memory = stored();
    assert_eq!(rejected(&memory), []);
    let mut damaged = memory.clone();
    damaged.write(record(0).start + 3, 7);
    assert_eq!(rejected(&damaged), [("checksum", 1)]);
    // A record in another slot is no record there, nor are the words of another ledger.
    let mut pasted = memory.clone();
    for (from, to) in record(0).zip(record(1)) {
        pasted.write(to, memory.words.get(&from).copied().unwrap_or(0));
    }
    assert_eq!(rejected(&pasted), [("checksum", 1)]);
    assert_eq!(keys(&pasted), [(0, 0), (1, 2)]);
    let mut nameless = memory.clone();
    nameless.write(512, 0);
    assert_eq!(rejected(&nameless), [("namespace", 2)]);
    // Smaller, or with another alignment.
    let open = |capacity, align| {
        let now = IDENTITY.origin + 1000 * SECOND;
        let words = Shared::of(&memory);
        let (ledger, snapshot) = Ledger::open(words, Owner::Ended, &IDENTITY, now, capacity, align)
            .map_err(|(error, _)| error)
            .unwrap();
        let allocator = FirstFit::new(capacity, align);
        let (cache, restored) =
            Cache::restore(allocator, config(EvictionKind::Lru), ledger, snapshot);
        cache.check_invariants().unwrap();
        let faults = Fault::ALL.map(|fault| restored.rejected.get(fault));
        (objects(&cache).len(), faults)
    };
    assert_eq!(open(16, ALIGN), (2, [0, 0, 1, 0, 0, 0]));
    assert_eq!(open(CAPACITY, 16), (2, [0, 0, 0, 1, 0, 0]));
    assert_eq!(open(2 * CAPACITY, ALIGN), (3, [0; 6]));
}

/// Memory that clients may still copy must not be granted to others only because its object is left out.
#[test]
fn left_out_memory_that_clients_may_copy_is_told() {
    let lost = |memory: &Memory, capacity, align| {
        let (_, snapshot) = open_for(memory, capacity, align).unwrap();
        assert_eq!(snapshot.is_empty(), capacity < 8);
        snapshot.has_lost_granted()
    };
    let words = Shared::default();
    let cache = recorded(&words, EvictionKind::Lru);
    let wanted = [hash(0)];
    let wanted = request(space(0), &wanted, 8);
    let reserved = cache.reserve(Duration::ZERO, &wanted).unwrap();
    reserved.reservation.grant();
    let granted = words.0.lock().unwrap().clone();
    assert_eq!(
        [CAPACITY, 4].map(|it| lost(&granted, it, ALIGN)),
        [false, true]
    );
    // No client copies memory of what was only stored.
    assert_eq!(
        [CAPACITY, 4].map(|it| lost(&stored(), it, ALIGN)),
        [false; 2]
    );
}

/// Memory that was granted and has no record is unknown to the next process, which so must not use any of it.
#[test]
fn grant_without_record_is_known_to_next_process() {
    let long = Arc::new(Namespace::new("m".repeat(3000), 0, 0, 0, "").unwrap());
    let has_unrecorded = |space: &Arc<Namespace>, grant: Option<bool>| {
        let words = Shared::default();
        let cache = recorded(&words, EvictionKind::Lru);
        let wanted = [hash(0)];
        let wanted = request(space, &wanted, 8);
        let reserved = cache.reserve(Duration::ZERO, &wanted).unwrap().reservation;
        if grant == Some(true) {
            reserved.grant();
        } else {
            reserved.commit(Duration::ZERO);
            let lease = cache.hold(Duration::ZERO, space, &[hash(0)]).unwrap();
            if grant.is_some() {
                lease.grant();
            }
        }
        let memory = words.0.lock().unwrap().clone();
        // Until the next process says otherwise.
        let words = Shared::of(&memory);
        let now = IDENTITY.origin + 1000 * SECOND;
        let opened = Ledger::open(words.clone(), Owner::Ended, &IDENTITY, now, CAPACITY, ALIGN);
        let (mut ledger, snapshot) = opened.unwrap();
        ledger.forget_unrecorded_grants();
        let memory = words.0.lock().unwrap().clone();
        assert!(!open(&memory).unwrap().1.has_unrecorded_grant());
        snapshot.has_unrecorded_grant()
    };
    for (space, is_recorded) in [(space(0), true), (&long, false)] {
        assert!(!has_unrecorded(space, None), "readable only");
        for is_written in [true, false] {
            assert_eq!(has_unrecorded(space, Some(is_written)), !is_recorded);
        }
    }
}

/// A cache that takes over from one that still runs writes no word before it attaches the ledger, whatever becomes of it, and has
/// all leases and reservations.
#[test]
fn adopted_cache_leaves_ledger_to_the_earlier_one() {
    use kvtier_core::GroupRow;
    let words = Shared::default();
    let cache = recorded(&words, EvictionKind::Lru);
    let now = Duration::from_secs(1);
    let store = |number: u32| {
        let wanted = [hash(number)];
        let reserved = cache.reserve(now, &request(space(0), &wanted, 8)).unwrap();
        reserved.reservation
    };
    for number in 0..3 {
        assert_eq!(store(number).commit(now).inserted, 1);
    }
    // A namespace that has no object any more.
    let gone = [hash(9)];
    let gone = cache.reserve(now, &request(space(1), &gone, 8)).unwrap();
    gone.reservation.grant();
    drop(gone);
    let rows: Arc<[GroupRow]> = [GroupRow {
        namespace: Arc::clone(space(0)),
        window: None,
        object_bytes: 8,
    }]
    .into();
    let hashes = [hash(0), hash(1), hash(2)];
    let mut lookup = cache.lookup(now, &rows, &hashes).lease;
    assert_eq!(lookup.release_range(0..1, 0..1), 1);
    let read = cache.pin(now, space(0), &hashes[1..2]).unwrap();
    read.grant();
    let written = store(3);
    written.grant();
    let held = lookup.held_chunks(0);
    assert_eq!(held.held, [false, true, true]);
    let (places, slots): (Vec<_>, Vec<_>) = (written.places().collect(), read.slots().collect());
    let at = words.position();
    for goes_on in [false, true] {
        let later = IDENTITY.origin + 2000 * SECOND;
        let opened = Ledger::open(
            words.clone(),
            Owner::Running,
            &IDENTITY,
            later,
            CAPACITY,
            ALIGN,
        );
        let (ledger, snapshot) = opened.unwrap();
        let allocator = FirstFit::new(CAPACITY, ALIGN);
        let (adopted, restored, ledger) =
            Cache::adopt(allocator, config(EvictionKind::Lru), ledger, snapshot);
        let Restored {
            mut withheld,
            mut read,
            ..
        } = restored;
        let hold = |held: &[kvtier_core::cache::HeldRow]| {
            adopted.hold_rows(Arc::clone(&rows), &hashes, held)
        };
        let lease = hold(std::slice::from_ref(&held)).unwrap();
        assert_eq!(lease.held(), 2);
        assert!(hold(&[]).is_none());
        let mut behind = held.clone();
        behind.start = usize::MAX;
        assert!(hold(&[behind]).is_none());
        assert!(withheld.split_off(&[places[0], places[0]]).is_none());
        let stored = withheld.split_off(&places).unwrap();
        assert!(withheld.is_empty());
        assert!(read.claim(&[places[0].0]).is_empty());
        let claimed = read.claim(&slots);
        read.release(&slots.iter().copied().collect());
        assert_eq!((claimed.len(), read.len()), (1, 0));
        assert_eq!(adopted.stats().leased_objects, 2);
        if goes_on {
            adopted.attach_ledger(ledger);
            assert_eq!(stored.commit(now).inserted, 1);
            drop((claimed, lease));
            let wanted = [hash(4)];
            let other = adopted
                .reserve(now, &request(space(1), &wanted, 8))
                .unwrap();
            assert_eq!(other.reservation.commit(now).inserted, 1);
            let memory = words.0.lock().unwrap().clone();
            let (_, snapshot) = open(&memory).unwrap();
            assert_eq!((snapshot.len(), snapshot.granted().count()), (5, 0));
            assert_eq!(snapshot.rejected().total(), 0);
        } else {
            drop((claimed, lease, stored, read, withheld, adopted));
        }
        assert_eq!(words.position() > at, goes_on);
    }
    // The earlier process ends without a word.
    std::mem::forget((lookup, read, written, cache));
}

/// What a process leaves out, the one that still runs may have.
#[test]
fn ledger_of_running_process_is_not_written() {
    let memory = stored();
    let mut damaged = memory.clone();
    damaged.write(record(0).start + 3, 7);
    let mut nameless = memory.clone();
    nameless.write(512, 0);
    // The end of the arena is behind the second object.
    for (memory, capacity) in [(&damaged, CAPACITY), (&nameless, CAPACITY), (&memory, 16)] {
        let words = Shared::of(memory);
        let now = IDENTITY.origin + 1000 * SECOND;
        let opened = Ledger::open(
            words.clone(),
            Owner::Running,
            &IDENTITY,
            now,
            capacity,
            ALIGN,
        );
        let (ledger, snapshot) = opened.unwrap();
        let allocator = FirstFit::new(capacity, ALIGN);
        let adopted = Cache::adopt(allocator, config(EvictionKind::Lru), ledger, snapshot);
        assert!(adopted.1.rejected.total() > 0);
        drop(adopted);
        assert_eq!(words.position(), memory.log.len());
    }
}

/// A number whose namespace is another number's too is free, and its reference is not the next namespace's.
#[test]
fn duplicate_namespace_leaves_no_reference_to_its_number() {
    use kvtier_core::ledger::{Journal as _, Object, ObjectState};
    let words = Shared::default();
    let mut ledger = Ledger::create(words.clone(), ID, &IDENTITY).unwrap();
    for (slot, state) in [(0, ObjectState::Resident), (1, ObjectState::Withheld)] {
        let object = Object {
            hash: &hash(slot),
            number: slot,
            namespace: space(0),
            extent: Extent {
                offset: 8 * u64::from(slot),
                len: 8,
            },
            used_at: 1,
        };
        ledger.insert(slot, &object, state);
    }
    let memory = words.0.lock().unwrap().clone();
    assert!(open(&memory).unwrap().1.has_lost_granted());
    assert_eq!(rejected(&memory), [("namespace", 1)]);
    let words = Shared::of(&memory);
    let now = IDENTITY.origin + 1000 * SECOND;
    let (ledger, snapshot) =
        Ledger::open(words.clone(), Owner::Ended, &IDENTITY, now, CAPACITY, ALIGN).unwrap();
    let allocator = FirstFit::new(CAPACITY, ALIGN);
    let (cache, _restored) = Cache::restore(allocator, config(EvictionKind::Lru), ledger, snapshot);
    // Of another tenant, under the number that is free.
    let wanted = [hash(5)];
    let reserved = cache.reserve(Duration::ZERO, &request(space(1), &wanted, 8));
    assert_eq!(
        reserved
            .unwrap()
            .reservation
            .commit(Duration::ZERO)
            .inserted,
        1
    );
    let memory = words.0.lock().unwrap().clone();
    assert_eq!(keys(&memory), [(0, 0), (1, 5)]);
}

/// Records that only a bug or an attack could write: sound, and contradicting each other.
#[test]
fn contradicting_objects_are_left_out() {
    let words = Shared::default();
    let mut ledger = Ledger::create(words.clone(), ID, &IDENTITY).unwrap();
    use kvtier_core::ledger::{Journal as _, Object, ObjectState};
    let mut insert = |slot, number, offset, len| {
        let object = Object {
            hash: &hash(number),
            number: 0,
            namespace: space(0),
            extent: Extent { offset, len },
            used_at: 50 + slot,
        };
        ledger.insert(slot, &object, ObjectState::Resident);
    };
    insert(0, 0, 0, 10);
    insert(1, 1, 8, 4);
    insert(2, 2, 20, 4);
    // The same key, used later.
    insert(3, 2, 30, 4);
    insert(4, 3, CAPACITY - 2, 4);
    insert(5, 4, u64::MAX - 1, 4);
    insert(6, 5, 40, 0);
    // Inside another.
    insert(7, 6, 44, 12);
    insert(8, 7, 46, 2);
    insert(9, 8, 50, 2);
    let memory = words.0.lock().unwrap().clone();
    let (cache, restored) = restored(&memory, EvictionKind::Lru);
    let faults = Fault::ALL.map(|fault| restored.rejected.get(fault));
    assert_eq!(faults, [0, 0, 3, 0, 5, 1]);
    let found: Vec<_> = objects(&cache).into_iter().collect();
    assert_eq!(found, [((0, 2), Extent { offset: 30, len: 4 })]);
}

#[test]
fn ledger_of_another_server_is_not_read() {
    let memory = stored();
    let open = |identity: Identity, now| {
        let opened = Ledger::open(
            Shared::of(&memory),
            Owner::Ended,
            &identity,
            now,
            CAPACITY,
            ALIGN,
        );
        opened.map(|_| ()).map_err(|(error, _)| error.to_string())
    };
    let later = IDENTITY.origin + SECOND;
    assert_eq!(open(IDENTITY, later), Ok(()));
    // Tick 0 is the ledger's.
    assert_eq!(
        open(
            Identity {
                origin: 1,
                ..IDENTITY
            },
            later
        ),
        Ok(())
    );
    for (identity, told) in [
        (
            Identity {
                arena: [25, 8],
                ..IDENTITY
            },
            "arena",
        ),
        (
            Identity {
                arena: [24, 7],
                ..IDENTITY
            },
            "arena",
        ),
        (
            Identity {
                chunk_size: 16,
                ..IDENTITY
            },
            "chunk size",
        ),
        (
            Identity {
                hash_algorithm: 2,
                ..IDENTITY
            },
            "hash algorithm",
        ),
        (
            Identity {
                tenants: 4,
                ..IDENTITY
            },
            "--hash-salts",
        ),
        (
            Identity {
                instance: 8,
                ..IDENTITY
            },
            "instance",
        ),
    ] {
        let error = open(identity, later).unwrap_err();
        assert!(error.contains(told), "{error}");
    }
    assert_eq!(
        open(IDENTITY, IDENTITY.origin - 1),
        Err("its clock is ahead".to_owned())
    );
    let mut newer = memory.clone();
    newer.write(1, FORMAT_VERSION + 1);
    let told = super::ledger::open(&newer).unwrap_err().to_string();
    let version = format!("format version {}", FORMAT_VERSION + 1);
    assert!(told.contains(&version), "{told}");
    for len in [0, 1, 511] {
        let truncated = Memory {
            len,
            ..memory.clone()
        };
        assert_eq!(
            super::ledger::open(&truncated).err(),
            Some(LedgerError::Absent)
        );
    }
    // Records that are not there any more are objects that are not.
    let truncated = Memory {
        len: record(1).end - 1,
        ..memory.clone()
    };
    assert_eq!(keys(&truncated), [(0, 0)]);
    let zeroed = Memory {
        len: memory.len,
        ..Memory::default()
    };
    assert_eq!(
        super::ledger::open(&zeroed).err(),
        Some(LedgerError::Absent)
    );
}

#[test]
fn eviction_goes_on_in_the_order_of_use() {
    for eviction in [EvictionKind::Lru, EvictionKind::IsolatedLru] {
        let words = Shared::default();
        let cache = recorded(&words, eviction);
        let store = |seconds, salt: usize, numbers: std::ops::Range<u32>| {
            let now = Duration::from_secs(seconds);
            let wanted: Vec<_> = numbers.map(hash).collect();
            let reserved = cache
                .reserve(now, &request(space(salt), &wanted, 2))
                .unwrap();
            reserved.reservation.commit(now);
        };
        store(1, 0, 0..3);
        store(2, 1, 3..4);
        store(3, 0, 4..5);
        // A use is known within 6.4 seconds.
        cache.touch(Duration::from_secs(20), space(0), &[hash(1)]);
        let order = |cache: &Cache<FirstFit>| {
            let mut order = Vec::new();
            let mut left: BTreeSet<_> = objects_only(cache);
            while !left.is_empty() {
                cache.evict(Duration::from_secs(30), 1, 1);
                let now = objects_only(cache);
                order.extend(left.difference(&now).copied());
                left = now;
            }
            order
        };
        let memory = words.0.lock().unwrap().clone();
        let (again, _restored) = restored(&memory, eviction);
        // The end of a prefix goes first.
        let expected = [(0, 2), (0, 0), (1, 3), (0, 4), (0, 1)];
        assert_eq!(order(&again), expected, "{eviction:?}");
        assert_eq!(
            order(&cache),
            expected,
            "{eviction:?}: as without a restart"
        );
    }
}

/// The readable objects, without a use of any.
fn objects_only(cache: &Cache<FirstFit>) -> BTreeSet<Key> {
    let mut found = BTreeSet::new();
    for salt in 0..SALTS.len() {
        let wanted: Vec<_> = (0..KEYS).map(hash).collect();
        let resident = cache.contains(space(salt), &wanted);
        found.extend(
            (0..KEYS)
                .filter(|n| resident[*n as usize])
                .map(|n| (salt, n)),
        );
    }
    found
}

#[test]
fn usage_of_tenants_is_exact_from_the_start() {
    let words = Shared::default();
    let cache = recorded(&words, EvictionKind::IsolatedLru);
    let now = Duration::from_secs(1);
    for (salt, len) in [(0, 3), (1, 8), (2, 5)] {
        let wanted = [hash(salt as u32)];
        let reserved = cache
            .reserve(now, &request(space(salt), &wanted, len))
            .unwrap();
        reserved.reservation.commit(now);
    }
    // The third is in the course of a store.
    let wanted = [hash(9)];
    let staged = cache
        .reserve(now, &request(space(2), &wanted, 6))
        .unwrap()
        .reservation;
    staged.grant();
    cache.remove(space(1), &[hash(1)], false);
    let usage = |cache: &Cache<FirstFit>| {
        let (stats, salts) = cache.stats_with(&SALTS);
        let salts = salts
            .into_iter()
            .map(|usage| usage.map(|usage| (usage.bytes, usage.staged_bytes, usage.objects)));
        (stats.used_bytes, stats.objects, salts.collect::<Vec<_>>())
    };
    let before = usage(&cache);
    assert_eq!(before.0, 4 + 6 + 6);
    let memory = words.0.lock().unwrap().clone();
    let (again, restored) = restored(&memory, EvictionKind::IsolatedLru);
    assert_eq!(usage(&again), before);
    assert_eq!((restored.objects, restored.bytes), (2, 10));
    assert_eq!(restored.withheld.len(), 1);
    drop(restored);
    assert_eq!(
        usage(&again).0,
        10,
        "memory of a client that is done is free"
    );
    drop(staged);
}

/// An object whose namespace or record has no words is not recorded, and no later process sees words of others there.
#[test]
fn unrecorded_objects_are_counted_and_absent() {
    let words = Shared::default();
    let cache = recorded(&words, EvictionKind::Lru);
    let long = Arc::new(Namespace::new("m".repeat(3000), 0, 0, 0, "").unwrap());
    let now = Duration::from_secs(1);
    let wanted = [hash(1)];
    let store = |space: &Arc<Namespace>| {
        cache
            .reserve(now, &request(space, &wanted, 4))
            .unwrap()
            .reservation
            .commit(now);
    };
    store(space(0));
    cache.clear(true);
    store(&long);
    assert_eq!(cache.unrecorded(), 1);
    cache.touch(Duration::from_secs(100), &long, &wanted);
    let memory = words.0.lock().unwrap().clone();
    assert_eq!(keys(&memory), []);
}
