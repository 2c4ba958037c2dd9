//! The ledger of a process that still runs, as one that takes over reads it.

use std::sync::Arc;
use std::time::Duration;

use kvtier_core::GroupRow;
use kvtier_core::cache::{Cache, HeldRow, Restored};
use kvtier_core::eviction::EvictionKind;
use kvtier_core::ledger::Owner;

use super::{ALIGN, CAPACITY, Shared, config, open, open_for, record, recorded, space, stored};
use crate::cache_support::{FirstFit, hash, request};

/// A cache that takes over from one that still runs writes no word before it attaches the ledger, whatever becomes of it, and has
/// all leases and reservations.
#[test]
fn adopted_cache_leaves_ledger_to_the_earlier_one() {
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
    gone.reservation.grant(now);
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
    let read = cache.lease(now, space(0), &hashes[1..2]).unwrap();
    read.grant();
    let written = store(3);
    written.grant(now);
    let held = lookup.held_chunks(0);
    assert_eq!(held.held, [false, true, true]);
    let (places, slots): (Vec<_>, Vec<_>) = (written.places().collect(), read.slots().collect());
    let at = words.position();
    for goes_on in [false, true] {
        let opened = open_for(&words, Owner::Running, CAPACITY, ALIGN);
        let (ledger, snapshot) = opened.unwrap();
        let allocator = FirstFit::new(CAPACITY, ALIGN);
        let (adopted, restored, ledger) =
            Cache::adopt(allocator, config(EvictionKind::Lru), ledger, snapshot);
        let Restored {
            mut withheld,
            mut read,
            ..
        } = restored;
        let hold = |held: &[HeldRow]| adopted.hold_rows(Arc::clone(&rows), &hashes, held);
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
            let memory = words.memory();
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
        let opened = open_for(&words, Owner::Running, capacity, ALIGN);
        let (ledger, snapshot) = opened.unwrap();
        let allocator = FirstFit::new(capacity, ALIGN);
        let adopted = Cache::adopt(allocator, config(EvictionKind::Lru), ledger, snapshot);
        assert!(adopted.1.rejected.total() > 0);
        drop(adopted);
        assert_eq!(words.position(), memory.log.len());
    }
}
