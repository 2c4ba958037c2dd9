//! States of one key whose stores and deletes overlap.

use kvtier_core::ChunkHash;
use kvtier_core::object_key::Namespace;

use super::*;

const BYTES: u64 = 8;

const OF_INDEX: Removed = Removed {
    objects: 1,
    bytes: BYTES,
    kept: 0,
    missing: 0,
};

const FAILED: DeleteEnd = DeleteEnd::Failed { is_late: false };

fn key() -> ObjectKey {
    let namespace = Namespace::new("model", 0, 0, 0, "").unwrap();
    ObjectKey::of(&Arc::new(namespace), ChunkHash([1; 32]))
}

fn start(states: &KeyStates, removed: Removed) -> DeleteBytes {
    states.with(|table| table.start_delete(&key(), removed))
}

fn end(states: &KeyStates, bytes: DeleteBytes, end: DeleteEnd) {
    states.with(|table| table.end_delete(&key(), bytes, end));
}

fn bytes(states: &KeyStates) -> u64 {
    states.read(|| ()).1.deleting
}

#[test]
fn unanswered_store_during_a_delete_is_indeterminate() {
    let states = KeyStates::default();
    let delete = start(&states, Removed::default());
    states.set_indeterminate(&key());
    assert!(states.is_indeterminate(&key()));
    end(&states, delete, DeleteEnd::Deleted);
    assert!(states.is_indeterminate(&key()));
}

#[test]
fn failed_second_delete_counts_after_first_answer() {
    let states = KeyStates::default();
    let first = start(&states, Removed::default());
    let second = start(&states, OF_INDEX);
    end(&states, second, FAILED);
    end(&states, first, DeleteEnd::Deleted);
    assert_eq!(bytes(&states), BYTES);
    assert!(states.has_pending());
}

#[test]
fn removal_by_name_ends_the_indeterminate_state() {
    for (second_end, left) in [(DeleteEnd::Deleted, 0), (FAILED, BYTES)] {
        let states = KeyStates::default();
        let first = start(&states, Removed::default());
        states.set_indeterminate(&key());
        let second = start(&states, OF_INDEX);
        assert!(!states.is_indeterminate(&key()));
        end(&states, first, FAILED);
        end(&states, second, second_end);
        assert_eq!(bytes(&states), left);
    }
}

#[tokio::test]
async fn late_delete_refuses_stores_whatever_another_store_left() {
    let states = KeyStates::default();
    states.add_pending(|| vec![(key(), BYTES)]);
    let late = start(&states, Removed::default());
    end(&states, late, DeleteEnd::Failed { is_late: true });
    states.set_indeterminate(&key());
    assert_eq!(states.claim(&key()).await, Claim::Refused);
    // Evicted again, it is as late as before.
    states.add_pending(|| vec![(key(), BYTES)]);
    assert_eq!(states.claim(&key()).await, Claim::Refused);
}

#[tokio::test]
async fn refused_store_leaves_another_ones_indeterminate_state() {
    let states = KeyStates::default();
    states.add_pending(|| vec![(key(), BYTES)]);
    assert_eq!(states.claim(&key()).await, Claim::Cancelled(BYTES));
    states.set_indeterminate(&key());
    states.add_pending(|| vec![(key(), BYTES)]);
    assert!(states.is_indeterminate(&key()));
}

#[test]
fn object_without_bytes_is_deleted_again_after_failure() {
    let states = KeyStates::default();
    states.add_pending(|| vec![(key(), 0)]);
    let delete = start(&states, Removed::default());
    assert_eq!(delete, Some(0));
    end(&states, delete, FAILED);
    assert!(states.has_pending());
}

#[test]
fn answered_deletes_leave_no_key_state() {
    let states = KeyStates::default();
    let deletes = [Removed::default(), OF_INDEX].map(|removed| start(&states, removed));
    deletes
        .into_iter()
        .for_each(|delete| end(&states, delete, DeleteEnd::Deleted));
    let is_empty = states.with(|table| table.states.is_empty() && table.tenants.is_empty());
    assert!(is_empty && states.with(|table| table.is_idle(None)));
}
