//! Places of stored objects, and limits of what is staged.

use std::ops::Range;
use std::sync::mpsc::Receiver;

use kvtier_core::cache::LossCause;
use kvtier_core::object_key::KeyScope;
use kvtier_device::{DeviceError, Direction, Done};
use kvtier_proto::key::CacheKey;
use kvtier_proto::request::{InstanceId, Retrieve, Store};

use super::super::super::{Engine, EngineAnswer};
use super::super::prepared::{Grant, TransferId};
use super::super::skipped::Skipped;

use super::super::super::testing::{
    CALLER, TestPages, copies_itself, engine, engine_with, key, reply, store,
};
use super::*;

const MIB: u64 = 1 << 20;

#[test]
fn store_goes_to_the_part_beside_its_device() {
    let engine = engine_with(&[], |context| Context {
        l1: context.l1.in_parts(&[3, 5]),
        ..context
    });
    let half = 6 * MIB;
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

/// An engine with a full L1 of 12 chunks and a staging limit of 3 chunks; and the pages of two workers.
fn full() -> (Engine, [Arc<TestPages>; 2]) {
    let engine = engine(&[]);
    let pages = [0, 1].map(|id| TestPages::new(MIB).register(&engine, id));
    for chunk in 100..112 {
        let stored = store(&engine, 0, chunk..chunk + 1);
        assert_eq!(stored.try_recv().unwrap().refused, None);
    }
    assert_eq!(evicted(&engine), 0);
    (engine, pages)
}

fn evicted(engine: &Engine) -> u64 {
    engine.context.l1.cache.stats().evicted_objects_total
}

/// Holds all transfers of these workers.
fn hold(pages: &[Arc<TestPages>]) {
    for pages in pages {
        *pages.held.lock() = Some(Vec::new());
    }
}

/// Ends the transfers that were held; returns their number.
fn end(pages: &[Arc<TestPages>]) -> usize {
    let held = pages.iter().filter_map(|pages| pages.held.lock().take());
    let held: Vec<_> = held.flatten().collect();
    let ended = held.len();
    held.into_iter().for_each(|done| done(Ok(1)));
    ended
}

/// A worker stores a prompt of 20 chunks part by part, where L1 has space for 12, and other prompts in between.
#[test]
fn prompt_longer_than_l1_keeps_its_beginning() {
    let (engine, _pages) = full();
    for others in [0, 3, 1] {
        drop(store(&engine, 0, 200..200 + others));
        for chunk in 0..20 {
            store_behind(&engine, chunk);
        }
        assert_eq!(prefix(&engine), 12);
    }
}

/// Eviction to the watermark runs while a prompt is stored part by part.
#[test]
fn watermark_keeps_the_beginning_of_a_prompt() {
    let engine = engine(&[
        "--eviction-trigger-watermark",
        "0.5",
        "--eviction-ratio",
        "0.3",
    ]);
    TestPages::new(MIB).register(&engine, 0);
    for (chunk, kept) in (0..12).zip([1, 2, 3, 4, 5, 4, 4, 4, 4, 4, 4, 4]) {
        store_behind(&engine, chunk);
        engine.admin.evict();
        assert_eq!(prefix(&engine), kept, "chunk {chunk}");
    }
}

/// Stores one chunk of a prompt.
fn store_behind(engine: &Engine, chunk: u8) {
    let store = Store {
        block_ids: vec![vec![1]],
        key: CacheKey {
            start: chunk.into(),
            ..key(0..chunk + 1)
        },
        instance: InstanceId(0),
        event_handle: b"",
    };
    let (reply, answers) = reply();
    engine.transfers.store(CALLER, &store, reply);
    assert_eq!(answers.try_recv().unwrap().refused, None);
}

fn prompt_namespace(engine: &Engine) -> Arc<Namespace> {
    let instance = engine.context.instances.get(InstanceId(0)).unwrap();
    let scope = KeyScope::new("model", "", 1, None).unwrap();
    scope.namespace(kvtier_core::kv_rank(1, 0), 0, instance.layout.fingerprint)
}

/// Causes of the last losses of a prompt of 20.
fn losses(engine: &Engine) -> Vec<Option<LossCause>> {
    let hashes = key(0..20).tokens.hashes;
    let asked = (&prompt_namespace(engine), &hashes[..]);
    let losses = engine.context.l1.cache.losses(&[asked]).remove(0);
    losses.into_iter().map(|loss| Some(loss?.cause)).collect()
}

/// Chunks at the start of a prompt of 20 that are resident.
fn prefix(engine: &Engine) -> usize {
    let hashes = key(0..20).tokens.hashes;
    let namespace = prompt_namespace(engine);
    let resident = engine.context.l1.cache.contains(&namespace, &hashes);
    resident.iter().take_while(|is| **is).count()
}

/// Stores these chunks from one page. The answer comes when it is there.
fn store_many(engine: &Engine, chunks: Range<u8>) -> Receiver<EngineAnswer> {
    let store = Store {
        block_ids: vec![vec![1; chunks.len()]],
        key: key(chunks),
        instance: InstanceId(0),
        event_handle: b"",
    };
    let (reply, answers) = reply();
    engine.transfers.store(CALLER, &store, reply);
    answers
}

/// A worker's share of what may be staged are 2 chunks.
#[test]
fn store_larger_than_its_share_is_stored_at_once() {
    let (engine, [pages, _]) = full();
    let stored = store_many(&engine, 0..20);
    assert_eq!(stored.try_recv().unwrap().refused, None);
    assert!(stored.try_recv().is_err(), "answered once");
    assert_eq!(prefix(&engine), 12);
    let refused = Some(LossCause::RefusedSpace);
    assert_eq!(
        losses(&engine),
        [vec![None; 12], vec![refused], vec![None; 7]].concat()
    );
    // Each chunk was copied once, behind the 12 that L1 had.
    assert_eq!(pages.places.lock().len(), 24);
    assert_eq!(engine.transfers.staging.staged_bytes(), 0);
    let metrics = engine
        .context
        .metrics
        .encode(&kvtier_observe::metrics::Readings::default());
    assert!(!metrics.contains("over_staging_chunks_total{"), "{metrics}");
}

#[test]
fn piece_of_a_store_that_fails_ends_it() {
    let (engine, pages) = full();
    hold(&pages);
    let stored = store_many(&engine, 0..20);
    for committed in [2, 4] {
        let done = pages[0].held.lock().as_mut().unwrap().remove(0);
        done(Ok(1));
        assert_eq!(prefix(&engine), committed);
        assert!(stored.try_recv().is_err());
    }
    let done = pages[0].held.lock().as_mut().unwrap().remove(0);
    done(Err(DeviceError::Stopped));
    assert_eq!(stored.try_recv().unwrap().refused, Some("store_failed"));
    assert_eq!(prefix(&engine), 4);
    assert_eq!(engine.transfers.staging.staged_bytes(), 0);
    assert_eq!(end(&pages), 0);
}

#[test]
fn only_the_last_piece_is_answered_when_it_is_begun() {
    let engine = engine(&["--gpu-reply", "event"]);
    let pages = [TestPages::new(MIB).register(&engine, 0)];
    hold(&pages);
    let stored = store_many(&engine, 0..4);
    assert!(stored.try_recv().is_err());
    let done = pages[0].held.lock().as_mut().unwrap().remove(0);
    done(Ok(1));
    assert_eq!(stored.try_recv().unwrap().refused, None);
    assert_eq!(prefix(&engine), 2);
    assert_eq!(end(&pages), 1);
    assert_eq!(prefix(&engine), 4);
}

/// Another worker holds 2 of the 3 chunks that may be staged, so a piece has one.
#[test]
fn pieces_stay_within_the_limit_of_all_workers() {
    let (engine, pages) = full();
    hold(&pages);
    let other = store(&engine, 1, 50..52);
    let stored = store_many(&engine, 0..4);
    for committed in 1..4 {
        let staging = &engine.transfers.staging;
        assert_eq!(staging.staged_bytes(), staging.limit());
        let done = pages[0].held.lock().as_mut().unwrap().remove(0);
        done(Ok(1));
        assert_eq!(prefix(&engine), committed);
    }
    assert_eq!(end(&pages), 2);
    assert_eq!(prefix(&engine), 4);
    for answers in [other, stored] {
        assert_eq!(answers.try_recv().unwrap().refused, None);
    }
}

/// Stores each chunk by itself; returns those that are refused at once.
fn refused(engine: &Engine, id: i64, chunks: Range<u8>) -> Vec<u8> {
    let mut refused = Vec::new();
    for chunk in chunks {
        if let Ok(answer) = store(engine, id, chunk..chunk + 1).try_recv() {
            assert_eq!(answer.refused, Some("staging_full"));
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

fn objects(engine: &Engine) -> u64 {
    engine.context.l1.cache.stats().objects
}

/// An unhealthy client up to 0.5.4 drops its stores in flight, and vLLM may fill their blocks again.
#[test]
fn dropped_store_is_not_committed() {
    let engine = engine(&[]);
    let pages = [TestPages::new(16).register(&engine, 0)];
    hold(&pages);
    let dropped = store(&engine, 0, 0..1);
    engine.refuse_by_ping(CALLER, None);
    let ping = engine.workers.ping(CALLER, Some(InstanceId(0)));
    assert_eq!(ping.refused, Some("refused_retrieve"));
    // Until it is healthy again, what it had sent before is dropped too.
    let later = store(&engine, 0, 1..2).try_recv().unwrap();
    assert_eq!(later.refused, Some("not_held"));
    assert_eq!(end(&pages), 1);
    assert_eq!(dropped.try_recv().unwrap().refused, Some("not_held"));
    assert_eq!(objects(&engine), 0);
}

#[test]
fn lost_worker_stores_nothing_and_is_removed() {
    let engine = engine(&[]);
    let pages = [TestPages::new(16).register(&engine, 0)];
    hold(&pages);
    let dropped = store(&engine, 0, 0..1);
    engine.lose_workers(&[InstanceId(0)]);
    let later = store(&engine, 0, 1..2).try_recv().unwrap();
    assert_eq!(later.refused, Some("store_failed"));
    assert_eq!(end(&pages), 1);
    assert_eq!(dropped.try_recv().unwrap().refused, Some("not_held"));
    assert_eq!(objects(&engine), 0);
    assert!(engine.is_registered(InstanceId(0)));
    engine.workers.expire(engine.context.now());
    assert!(!engine.is_registered(InstanceId(0)));
}

#[test]
fn grant_of_another_layout_is_not_committed() {
    let engine = engine(&[]);
    // Its new layout has no group.
    copies_itself(&engine, 1);
    let id = InstanceId(1);
    let key = CacheKey {
        model_name: "other",
        ..key(0..1)
    };
    let (transfers, hashes) = (&engine.transfers, &key.tokens.hashes);
    let instance = engine.context.instances.get(id).unwrap();
    let range = WorkerRange::of_worker(&engine.context, &instance, &key).unwrap();
    let group = GroupChunks {
        namespace: range.scope.namespace(range.kv_rank, 0, 1),
        object_bytes: 16,
        chunks: vec![0],
        hashes: hashes.clone(),
    };
    let plan = StorePlan {
        tokens: None,
        prompt: range.prompt(&key),
        groups: vec![group],
        near: None,
        further_pieces: 0,
    };
    let staged = plan.stage(transfers, &instance, &range);
    let StagedStore {
        reservation,
        charge,
        ..
    } = staged.unwrap();
    let transfer = TransferId::new(Direction::Store, id, &key, Some(hashes[0]));
    let grant = Grant::Store(reservation, charge, Skipped::default());
    assert!(
        transfers
            .prepared
            .begin(transfer, grant, engine.context.now())
    );
    let committed = transfers.engine_driven(&key, id).commit_store(b"");
    assert_eq!(committed.refused, Some("not_prepared"));
    assert_eq!(objects(&engine), 0);
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn worker_on_a_slow_device_stages_most_of_the_limit_and_no_more() {
    let (engine, slow) = full();
    idle(&engine);
    hold(&slow);
    assert_eq!(refused(&engine, 0, 0..6), [2, 3, 4, 5]);
    assert_eq!(
        evicted(&engine),
        2,
        "nothing is evicted for what is refused"
    );
    assert_eq!(end(&slow), 2);

    // Nothing is left of what has ended, well or not.
    hold(&slow);
    assert_eq!(refused(&engine, 0, 10..13), [12]);
    let held = slow[0].held.lock().take().unwrap();
    let failed = |done: Done| done(Err(DeviceError::Stopped));
    held.into_iter().for_each(failed);
    assert_eq!(engine.transfers.staging.staged_bytes(), 0);
    hold(&slow);
    assert_eq!(refused(&engine, 0, 20..23), [22]);
    assert_eq!(end(&slow), 2);
}

/// A store's memory is bounded by what the allocator takes: a whole MiB for an object of 16 bytes.
#[test]
fn small_objects_count_rounded_to_the_alignment() {
    let engine = engine(&["--l1-align-bytes", "1048576"]);
    let slow = [TestPages::new(16).register(&engine, 0)];
    hold(&slow);
    assert_eq!(refused(&engine, 0, 0..6), [2, 3, 4, 5]);
    assert_eq!(engine.transfers.staging.staged_bytes(), 2 * MIB);
    assert_eq!(engine.context.l1.cache.usage().used_bytes, 2 * MIB);
    assert_eq!(end(&slow), 2);
    assert_eq!(engine.transfers.staging.staged_bytes(), 0);
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn worker_is_served_beside_one_at_its_share() {
    for others in [false, true] {
        let (engine, slow) = full();
        if others {
            idle(&engine);
        }
        hold(&slow);
        assert_eq!(refused(&engine, 0, 0..3), [2]);
        assert_eq!(refused(&engine, 1, 10..12), [11]);
        assert_eq!(refused(&engine, 0, 5..6), [5]);
        assert_eq!(
            engine.transfers.staging.staged_bytes(),
            engine.transfers.staging.limit()
        );
        assert_eq!(end(&slow[..1]), 2);
        // Now there is enough for it.
        assert_eq!(refused(&engine, 1, 13..15), [14]);
        assert_eq!(end(&slow[1..]), 2);
    }
}

#[test]
fn resident_chunks_are_stored_whatever_is_staged() {
    let (engine, slow) = full();
    hold(&slow);
    let resident = [0, 1, 2].map(|_| store(&engine, 0, 109..112));
    // The first two chunks of it.
    let stored = store(&engine, 0, 0..3);
    let evicted_so_far = evicted(&engine);
    assert_eq!(evicted_so_far, 2);
    let again = store(&engine, 0, 109..112);
    let more = store(&engine, 0, 111..113);
    assert_eq!(more.try_recv().unwrap().refused, Some("staging_full"));
    assert_eq!(evicted(&engine), evicted_so_far);
    assert_eq!(end(&slow), 5);
    for stored in resident.into_iter().chain([stored, again]) {
        assert_eq!(stored.try_recv().unwrap().refused, None);
    }
    let l1 = engine.admin.status(true).storage_manager.l1_manager;
    assert_eq!(l1.staging_limit_bytes, 3 * MIB);
    assert_eq!(l1.staging_uncommitted_bytes, 0);
    assert_eq!(l1.memory_largest_free_bytes, 0);
}

#[test]
fn a_worker_at_its_limit_of_transfers_is_refused() {
    let (engine, _) = full();
    let instance = engine.context.instances.get(InstanceId(0)).unwrap();
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
    let (reply, refused_retrieve) = reply();
    engine.transfers.retrieve(CALLER, &retrieve, reply);
    for refused in [refused, refused_retrieve] {
        assert_eq!(refused.try_recv().unwrap().refused, Some("lane_full"));
    }
    assert_eq!(evicted(&engine), 0);
    assert_eq!(store(&engine, 1, 0..1).try_recv().unwrap().refused, None);
    all.pop();
    assert_eq!(store(&engine, 0, 1..2).try_recv().unwrap().refused, None);
}
