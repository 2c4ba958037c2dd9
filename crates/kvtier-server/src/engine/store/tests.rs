//! Where what is stored goes, and how much may be on its way.

use kvtier_proto::request::{InstanceId, Retrieve};

use super::super::testing::{TestPages, answers, engine, key, store};
use super::*;

const MIB: u64 = 1 << 20;

#[test]
fn what_a_worker_stores_goes_to_the_part_beside_its_device() {
    let mut engine = engine(&[]);
    engine.l1 = engine.l1.in_parts(&[3, 5]);
    let (engine, half) = (Arc::new(engine), 6 * MIB);
    for (id, numa_node) in [(0, Some(3)), (1, Some(5))] {
        let pages = TestPages {
            numa_node,
            ..TestPages::new(16)
        };
        let pages = pages.register(&engine, id);
        let first = 10 * id as u8;
        let stored = store(&engine, id, first..first + 2);
        assert_eq!(stored.try_recv().unwrap().refused, None);
        let places = pages.places.lock();
        assert_eq!(places.len(), 2);
        let is_second = numa_node == Some(5);
        let right = |place: &u64| (*place >= half) == is_second;
        assert!(places.iter().all(right), "{places:?}");
    }
}

/// An engine with an L1 of 12 chunks that is full, and two workers; gives the pages of the first.
fn full() -> (Arc<Engine>, Arc<TestPages>) {
    let engine = Arc::new(engine(&[]));
    let pages = [0, 1].map(|id| TestPages::new(MIB).register(&engine, id));
    for chunk in 100..112 {
        let stored = store(&engine, 0, chunk..chunk + 1);
        assert_eq!(stored.try_recv().unwrap().refused, None);
    }
    assert_eq!(evicted(&engine), 0);
    let [first, _] = pages;
    (engine, first)
}

fn evicted(engine: &Engine) -> u64 {
    engine.l1.cache.stats().evicted_objects_total
}

/// A quarter of L1 for two workers is 1.5 chunks for each.
#[test]
fn a_worker_on_a_slow_device_has_its_share_of_l1_set_aside_and_no_more() {
    let (engine, slow) = full();
    *slow.held.lock() = Some(Vec::new());
    let [first, second, third] = [0, 1, 2].map(|chunk| store(&engine, 0, chunk..chunk + 1));
    assert_eq!(third.try_recv().unwrap().refused, Some("lane_full"));
    assert_eq!(evicted(&engine), 2, "nothing made room for the third");
    let other = store(&engine, 1, 3..4);
    assert_eq!(other.try_recv().unwrap().refused, None);

    let held = slow.held.lock().take().unwrap();
    assert_eq!(held.len(), 2);
    held.into_iter().for_each(|done| done(Ok(1)));
    for stored in [first, second, store(&engine, 0, 2..3)] {
        assert_eq!(stored.try_recv().unwrap().refused, None);
    }
    assert_eq!(evicted(&engine), 4);
}

/// What is here already needs no room, and a store larger than a share is one store.
#[test]
fn a_share_is_of_what_is_really_set_aside() {
    let (engine, slow) = full();
    *slow.held.lock() = Some(Vec::new());
    let resident = [0, 1, 2].map(|_| store(&engine, 0, 109..112));
    let large = store(&engine, 0, 0..3);
    let held = slow.held.lock().take().unwrap();
    assert_eq!(held.len(), 4);
    held.into_iter().for_each(|done| done(Ok(1)));
    for stored in resident.into_iter().chain([large]) {
        assert_eq!(stored.try_recv().unwrap().refused, None);
    }
    assert_eq!(evicted(&engine), 3);
}

#[test]
fn a_worker_may_have_so_many_transfers_under_way() {
    let (engine, _) = full();
    let instance = engine.instances.get(InstanceId(0)).unwrap();
    let mut all: Vec<_> = std::iter::from_fn(|| instance.copying().ok()).collect();
    assert_eq!(all.len(), 4096);
    let refused = store(&engine, 0, 0..1);
    let retrieve = Retrieve {
        key: key(100..101),
        instance: instance.id,
        block_ids: vec![vec![1]],
        event_handle: b"",
        skip_first_n_tokens: 0,
    };
    for refused in [refused, answers(engine.retrieve(&retrieve))] {
        assert_eq!(refused.try_recv().unwrap().refused, Some("lane_full"));
    }
    assert_eq!(evicted(&engine), 0);
    assert_eq!(store(&engine, 1, 0..1).try_recv().unwrap().refused, None);
    all.pop();
    assert_eq!(store(&engine, 0, 1..2).try_recv().unwrap().refused, None);
}
