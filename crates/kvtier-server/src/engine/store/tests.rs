//! Where what is stored goes, and how much may be on its way.

use std::ops::Range;

use kvtier_proto::request::{InstanceId, Retrieve};

use super::super::testing::{CALLER, TestPages, answers, copies_itself, engine, key, store};
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

/// An engine with an L1 of 12 chunks that is full, of which stores under way may have 3; and the pages of two workers.
fn full() -> (Arc<Engine>, [Arc<TestPages>; 2]) {
    let engine = Arc::new(engine(&[]));
    let pages = [0, 1].map(|id| TestPages::new(MIB).register(&engine, id));
    for chunk in 100..112 {
        let stored = store(&engine, 0, chunk..chunk + 1);
        assert_eq!(stored.try_recv().unwrap().refused, None);
    }
    assert_eq!(evicted(&engine), 0);
    (engine, pages)
}

fn evicted(engine: &Engine) -> u64 {
    engine.l1.cache.stats().evicted_objects_total
}

/// Has no transfer of these workers end.
fn hold(pages: &[Arc<TestPages>]) {
    for pages in pages {
        *pages.held.lock() = Some(Vec::new());
    }
}

/// Has those end that were held; gives how many.
fn end(pages: &[Arc<TestPages>]) -> usize {
    let held = pages.iter().filter_map(|pages| pages.held.lock().take());
    let held: Vec<_> = held.flatten().collect();
    let ended = held.len();
    held.into_iter().for_each(|done| done(Ok(1)));
    ended
}

/// Has a worker store a chunk each; which are refused at once.
fn refused(engine: &Arc<Engine>, id: i64, chunks: Range<u8>) -> Vec<u8> {
    let mut refused = Vec::new();
    for chunk in chunks {
        if let Ok(answer) = store(engine, id, chunk..chunk + 1).try_recv() {
            assert_eq!(answer.refused, Some("lane_full"));
            refused.push(chunk);
        }
    }
    refused
}

/// Registers workers that never store anything that we copy.
fn idle(engine: &Engine) {
    for id in 10..20 {
        TestPages::new(MIB).register(engine, id);
        copies_itself(engine, 10 + id);
    }
}

#[test]
fn a_worker_on_a_slow_device_has_all_that_is_for_stores_while_no_other_needs_it_and_no_more() {
    let (engine, slow) = full();
    idle(&engine);
    hold(&slow);
    assert_eq!(refused(&engine, 0, 0..6), [4, 5]);
    assert_eq!(evicted(&engine), 4, "nothing made room for what is refused");
    assert_eq!(end(&slow), 4);

    // Nothing is left of what has ended, well or not.
    hold(&slow);
    assert_eq!(refused(&engine, 0, 10..15), [14]);
    let held = slow[0].held.lock().take().unwrap();
    let failed = |done: kvtier_device::Done| done(Err(DeviceError::Stopped));
    held.into_iter().for_each(failed);
    hold(&slow);
    assert_eq!(refused(&engine, 0, 20..25), [24]);
    assert_eq!(end(&slow), 4);
}

/// With two that store, a part is 1.5 chunks.
#[test]
fn a_worker_is_served_beside_one_that_has_set_all_aside() {
    for others in [false, true] {
        let (engine, slow) = full();
        if others {
            idle(&engine);
        }
        hold(&slow);
        assert_eq!(refused(&engine, 0, 0..5), [4]);
        assert_eq!(refused(&engine, 1, 10..13), [12]);
        assert_eq!(refused(&engine, 0, 5..6), [5]);
        assert_eq!(end(&slow[..1]), 4);
        // Now there is enough for it.
        assert_eq!(refused(&engine, 1, 13..16), [15]);
        assert_eq!(end(&slow[1..]), 4);
    }
}

/// A store that is larger than all that may be set aside is one store.
#[test]
fn what_is_here_already_is_stored_whatever_is_set_aside() {
    let (engine, slow) = full();
    hold(&slow);
    let resident = [0, 1, 2].map(|_| store(&engine, 0, 109..112));
    let stores = [store(&engine, 0, 0..3), store(&engine, 0, 3..6)];
    let evicted_so_far = evicted(&engine);
    assert_eq!(evicted_so_far, 6);
    let again = store(&engine, 0, 109..112);
    let more = store(&engine, 0, 111..113);
    assert_eq!(more.try_recv().unwrap().refused, Some("lane_full"));
    assert_eq!(evicted(&engine), evicted_so_far);
    assert_eq!(end(&slow), 6);
    for stored in resident.into_iter().chain(stores).chain([again]) {
        assert_eq!(stored.try_recv().unwrap().refused, None);
    }
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
    for refused in [refused, answers(engine.retrieve(CALLER, &retrieve))] {
        assert_eq!(refused.try_recv().unwrap().refused, Some("lane_full"));
    }
    assert_eq!(evicted(&engine), 0);
    assert_eq!(store(&engine, 1, 0..1).try_recv().unwrap().refused, None);
    all.pop();
    assert_eq!(store(&engine, 0, 1..2).try_recv().unwrap().refused, None);
}
