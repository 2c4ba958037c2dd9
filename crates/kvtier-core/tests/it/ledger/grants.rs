//! Memory that clients may still copy, whose record the next process does not have.

use std::sync::Arc;
use std::time::Duration;

use kvtier_core::Namespace;
use kvtier_core::eviction::EvictionKind;
use kvtier_core::ledger::Owner;

use super::{ALIGN, CAPACITY, Memory, Shared, open, open_for, recorded, space, stored};
use crate::cache_support::{hash, request};

/// Memory that clients may still copy must not be granted to others only because its object is left out.
#[test]
fn left_out_memory_that_clients_may_copy_is_told() {
    let lost = |memory: &Memory, capacity, align| {
        let (_, snapshot) = open_for(&Shared::of(memory), Owner::Ended, capacity, align).unwrap();
        assert_eq!(snapshot.is_empty(), capacity < 8);
        snapshot.has_lost_granted()
    };
    let words = Shared::default();
    let cache = recorded(&words, EvictionKind::Lru);
    let wanted = [hash(0)];
    let wanted = request(space(0), &wanted, 8);
    let reserved = cache.reserve(Duration::ZERO, &wanted).unwrap();
    reserved.reservation.grant();
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
        let memory = words.memory();
        // Until the next process says otherwise.
        let words = Shared::of(&memory);
        let (mut ledger, snapshot) = open_for(&words, Owner::Ended, CAPACITY, ALIGN).unwrap();
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
