//! What the next process finds: at whatever word the one before was killed, and whatever became of the words.

mod continued;
mod damage;
mod grants;
mod identity;
mod kills;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvtier_core::Namespace;
use kvtier_core::cache::{Cache, CacheConfig, Extent, Restored};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::ledger::{Fault, Identity, Ledger, LedgerError, Snapshot, Words};

use crate::cache_support::{FirstFit, hash, namespace, request};

const CAPACITY: u64 = 64;

const ALIGN: u64 = 2;

const ID: u64 = 0x1234_5678_9abc_def0;

const SECOND: u64 = 1_000_000_000;

/// Chunks per tenant.
const KEYS: u32 = 12;

const SALTS: [&str; 3] = ["", "a", "b"];

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

/// [`Memory`] shared with a ledger.
#[derive(Clone, Debug, Default)]
struct Shared(Arc<Mutex<Memory>>);

impl Shared {
    fn of(memory: &Memory) -> Self {
        Self(Arc::new(Mutex::new(memory.clone())))
    }

    fn memory(&self) -> Memory {
        self.0.lock().unwrap().clone()
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
    open_for(&Shared::of(memory), CAPACITY, ALIGN)
}

/// Opens it for an arena of this size and alignment.
fn open_for(
    words: &Shared,
    capacity: u64,
    align: u64,
) -> Result<(Ledger<Shared>, Snapshot), LedgerError> {
    let now = IDENTITY.origin + 1000 * SECOND;
    let opened = Ledger::open(words.clone(), &IDENTITY, now, capacity, align);
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

/// The readable objects, without a use of any.
fn resident(cache: &Cache<FirstFit>) -> BTreeSet<Key> {
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
    words.memory()
}

fn keys(memory: &Memory) -> Vec<Key> {
    let (cache, _restored) = restored(memory, EvictionKind::Lru);
    objects(&cache).into_keys().collect()
}

fn rejected(memory: &Memory) -> Vec<(&'static str, u64)> {
    let (_cache, restored) = restored(memory, EvictionKind::Lru);
    let all = Fault::ALL.map(|fault| (fault.name(), restored.rejected.get(fault)));
    all.into_iter().filter(|(_, count)| *count > 0).collect()
}

/// Places of the words of the slot's record.
fn record(slot: u64) -> std::ops::Range<u64> {
    let start = kvtier_core::ledger::max_words(slot);
    start..start + kvtier_core::ledger::RECORD_BYTES / 8
}
