//! Words that are no longer what was written, or contradict each other.

use std::time::Duration;

use kvtier_core::Namespace;
use kvtier_core::cache::{Cache, Extent};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::ledger::{Fault, Journal as _, Ledger, Namespaces, Object, ObjectState};

use super::{
    ALIGN, CAPACITY, ID, IDENTITY, Key, Shared, config, keys, objects, open, open_for, record,
    rejected, restored, space, stored,
};
use crate::cache_support::{FirstFit, hash, request};

/// Every number's namespace is the first.
struct First;

impl Namespaces for First {
    fn namespace(&self, _number: u32) -> Option<&Namespace> {
        Some(space(0))
    }
}

// proves: docs/operate.md#l1-after-a-restart
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
        let words = Shared::of(&memory);
        let (ledger, snapshot) = open_for(&words, capacity, align).unwrap();
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

/// A number whose namespace is another number's too is free, and its reference is not the next namespace's.
// proves: docs/operate.md#l1-after-a-restart
#[test]
fn duplicate_namespace_leaves_no_reference_to_its_number() {
    let words = Shared::default();
    let mut ledger = Ledger::create(words.clone(), ID, &IDENTITY).unwrap();
    for (slot, state) in [(0, ObjectState::Resident), (1, ObjectState::Withheld)] {
        let object = Object {
            hash: &hash(slot),
            namespace: slot,
            extent: Extent {
                offset: 8 * u64::from(slot),
                len: 8,
            },
            used_at: 1,
        };
        ledger.insert(slot, &object, state, &First);
    }
    let memory = words.memory();
    assert!(open(&memory).unwrap().1.has_lost_granted());
    assert_eq!(rejected(&memory), [("namespace", 1)]);
    let words = Shared::of(&memory);
    let (ledger, snapshot) = open_for(&words, CAPACITY, ALIGN).unwrap();
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
    let memory = words.memory();
    assert_eq!(keys(&memory), [(0, 0), (1, 5)]);
}

/// Records that only a bug or an attack could write: sound, and contradicting each other.
#[test]
fn contradicting_objects_are_left_out() {
    let words = Shared::default();
    let mut ledger = Ledger::create(words.clone(), ID, &IDENTITY).unwrap();
    let mut insert = |slot, number, offset, len| {
        let object = Object {
            hash: &hash(number),
            namespace: 0,
            extent: Extent { offset, len },
            used_at: 50 + slot,
        };
        ledger.insert(slot, &object, ObjectState::Resident, &First);
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
    let memory = words.memory();
    let (cache, restored) = restored(&memory, EvictionKind::Lru);
    let faults = Fault::ALL.map(|fault| restored.rejected.get(fault));
    assert_eq!(faults, [0, 0, 3, 0, 5, 1]);
    let found: Vec<_> = objects(&cache).into_iter().collect();
    assert_eq!(found, [((0, 2), Extent { offset: 30, len: 4 })]);
}
