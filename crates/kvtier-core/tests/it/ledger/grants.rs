//! Memory that clients may still copy, whose record the next process does not have.

use std::sync::Arc;
use std::time::Duration;

use kvtier_core::Namespace;
use kvtier_core::cache::{Cache, GrantOrigin};
use kvtier_core::eviction::EvictionKind;

use super::{ALIGN, CAPACITY, Memory, Shared, config, open, open_for, recorded, space, stored};
use crate::cache_support::{FirstFit, hash, request};

/// Memory that clients may still copy must not be granted to others only because its object is left out.
#[test]
fn left_out_memory_that_clients_may_copy_is_told() {
    let lost = |memory: &Memory, capacity, align| {
        let (_, snapshot) = open_for(&Shared::of(memory), capacity, align).unwrap();
        assert_eq!(snapshot.is_empty(), capacity < 8);
        snapshot.has_lost_granted()
    };
    let words = Shared::default();
    let cache = recorded(&words, EvictionKind::Lru);
    let wanted = [hash(0)];
    let wanted = request(space(0), &wanted, 8);
    let reserved = cache.reserve(Duration::ZERO, &wanted).unwrap();
    reserved.reservation.grant(Duration::ZERO);
    let granted = words.memory();
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

/// Each start finds the same time of a grant, so that none begins it again.
// proves: docs/operate.md#l1-after-a-restart
#[test]
fn grants_keep_their_times_over_restarts() {
    let words = Shared::default();
    let cache = recorded(&words, EvictionKind::Lru);
    let at = Duration::from_secs;
    let reserve = |seconds, salt, number| {
        let wanted = [hash(number)];
        let reserved = cache.reserve(at(seconds), &request(space(salt), &wanted, 4));
        reserved.unwrap().reservation
    };
    // A slot that another object had.
    drop(reserve(1, 0, 0));
    let (first, renewed) = (reserve(5, 0, 1), reserve(5, 0, 2));
    for reservation in [&first, &renewed] {
        reservation.grant(at(5));
    }
    let other = reserve(9, 1, 3);
    other.grant(at(9));
    renewed.grant(at(70));
    reserve(80, 0, 4).commit(at(80));
    let read = cache.lease(at(90), space(0), &[hash(4)]).unwrap();
    read.grant();
    reserve(100, 2, 5).commit(at(100));
    let mut memory = words.memory();
    for _ in 0..3 {
        let shared = Shared::of(&memory);
        let (ledger, snapshot) = open_for(&shared, CAPACITY, ALIGN).unwrap();
        let allocator = FirstFit::new(CAPACITY, ALIGN);
        let (again, restored) =
            Cache::restore(allocator, config(EvictionKind::Lru), ledger, snapshot);
        memory = shared.memory();
        again.detach_ledger();
        let origin = |origin: GrantOrigin| (origin.namespace, origin.granted_at);
        let stores = restored.withheld.by_grant().into_iter();
        let stores: Vec<_> = stores.map(|(of, part)| (origin(of), part.len())).collect();
        let of = |salt, seconds| (Arc::clone(space(salt)), at(seconds));
        let expected = [(of(0, 5), 1), (of(0, 70), 1), (of(1, 9), 1)];
        assert_eq!(stores.len(), expected.len());
        assert!(
            expected.iter().all(|part| stores.contains(part)),
            "{stores:?}"
        );
        let reads = restored.read.by_grant().into_iter();
        let reads: Vec<_> = reads.map(|(of, part)| (origin(of), part.len())).collect();
        assert_eq!(reads, [(of(0, 90), 1)]);
        assert_eq!(again.stats().staged_objects, 0, "parts are freed");
    }
    std::mem::forget((first, renewed, other, read, cache));
}

/// Memory that was granted and has no record is unknown to the next process, which so must not use any of it.
// proves: docs/operate.md#l1-after-a-restart
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
            reserved.grant(Duration::ZERO);
        } else {
            reserved.commit(Duration::ZERO);
            let lease = cache.hold(Duration::ZERO, space, &[hash(0)]).unwrap();
            if grant.is_some() {
                lease.grant();
            }
        }
        let memory = words.memory();
        // Until the next process says otherwise.
        let words = Shared::of(&memory);
        let (mut ledger, snapshot) = open_for(&words, CAPACITY, ALIGN).unwrap();
        ledger.forget_unrecorded_grants();
        let memory = words.memory();
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
