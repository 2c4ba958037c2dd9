//! A full L1: what is evicted, in which order, and when leases are released.

use std::time::Duration;

use kvtier_client::{EngineDrivenSpec, EngineDrivenWorker, InstanceId, Scope};

use crate::support::{TestServer, bytes, prompt, range};

/// Chunks of 1 MiB that fit into L1.
const CAPACITY: usize = 64;

/// A worker with chunks of 1 MiB.
fn worker(server: &TestServer, instance: i64, scope: &Scope) -> EngineDrivenWorker {
    // 2 planes x 4 layers x 16 tokens x 4096 values x 2 bytes.
    let mut spec = EngineDrivenSpec::new(InstanceId(instance), scope.clone(), 4, 4096);
    spec.block_tokens = 4;
    let worker = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    assert_eq!(worker.chunk_bytes() * CAPACITY, 64 << 20);
    worker
}

/// Chunks that one store brings here: less than may be uncommitted.
const STEP: usize = 8;

/// Stores a whole prompt in steps, as engines do, and holds what is there until the last one; returns which chunks fit.
fn store(worker: &mut EngineDrivenWorker, seed: u32, chunks: usize) -> Vec<u64> {
    let len = worker.chunk_bytes();
    let whole = prompt(seed, chunks);
    let filler = bytes(u64::from(seed), 0, len);
    let mut stored = Vec::new();
    for first in (0..chunks).step_by(STEP) {
        let end = chunks.min(first + STEP);
        let request = format!("store {seed}");
        let step = worker.store(&whole, range(first as u64..end as u64), &request, |_| {
            &filler
        });
        let step = step.unwrap().chunks.into_iter();
        stored.extend(step.map(|chunk| first as u64 + chunk));
        if chunks > STEP {
            worker.lookup(&prompt(seed, end), "storing").unwrap();
        }
    }
    if chunks > STEP {
        worker.connection().end_session("storing").unwrap();
    }
    stored
}

/// Chunks of a prompt that are there, without holding them.
fn resident(worker: &mut EngineDrivenWorker, seed: u32, chunks: usize) -> u64 {
    let found = worker.lookup(&prompt(seed, chunks), "resident").unwrap();
    worker.connection().end_session("resident").unwrap();
    found
}

// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn last_chunk_of_oldest_prefix_is_evicted_first() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("leases/order");
    let mut worker = worker(&server, 1, &scope);
    for seed in 0..4 {
        assert_eq!(store(&mut worker, seed, CAPACITY / 4).len(), CAPACITY / 4);
    }
    assert_eq!(
        server.readings().used_bytes,
        server.readings().capacity_bytes
    );
    // No lookup touches anything in between: each store takes as much as it needs from the oldest prompt's end.
    for (new, needed) in [(10, 1), (11, 2), (12, 5)] {
        assert_eq!(store(&mut worker, new, needed).len(), needed);
    }
    let left: Vec<_> = (0..4)
        .map(|seed| resident(&mut worker, seed, CAPACITY / 4))
        .collect();
    assert_eq!(left, [8, 16, 16, 16]);
    for (new, needed) in [(10, 1), (11, 2), (12, 5)] {
        assert_eq!(resident(&mut worker, new, needed), needed as u64);
    }
    server.assert_sound();
}

#[test]
fn most_recently_used_prompt_stays() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("leases/used");
    let mut worker = worker(&server, 1, &scope);
    for seed in 0..4 {
        store(&mut worker, seed, CAPACITY / 4);
    }
    assert_eq!(resident(&mut worker, 0, CAPACITY / 4), 16);
    assert_eq!(store(&mut worker, 10, CAPACITY / 4).len(), CAPACITY / 4);
    let left: Vec<_> = [0, 2, 3, 10]
        .into_iter()
        .map(|seed| resident(&mut worker, seed, CAPACITY / 4))
        .collect();
    assert_eq!(left, [16, 16, 16, 16]);
    assert_eq!(resident(&mut worker, 1, CAPACITY / 4), 0);
}

// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn store_is_refused_only_by_leases_or_staging() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("leases/refused");
    let mut worker = worker(&server, 1, &scope);
    assert_eq!(store(&mut worker, 1, CAPACITY - 2).len(), CAPACITY - 2);
    assert_eq!(store(&mut worker, 2, 2).len(), 2);
    assert_eq!(
        worker.lookup(&prompt(1, CAPACITY - 2), "held").unwrap(),
        CAPACITY as u64 - 2
    );
    // Only the two chunks of prompt 2 can go, and they do, at once; the third does not fit.
    assert_eq!(store(&mut worker, 3, 3), [0, 1]);
    assert_eq!(resident(&mut worker, 2, 2), 0);
    assert_eq!(worker.lookup(&prompt(3, 2), "held too").unwrap(), 2);
    assert!(store(&mut worker, 4, 1).is_empty());
    assert_eq!(server.readings().leased_objects, CAPACITY as u64);
    assert_eq!(
        server.readings().used_bytes,
        server.readings().capacity_bytes
    );
    server.assert_sound();
}

/// An L1 exactly full of chunks that one lookup holds.
fn full_and_held(server: &TestServer, scope: &Scope) -> EngineDrivenWorker {
    let mut worker = worker(server, 1, scope);
    assert_eq!(store(&mut worker, 1, CAPACITY).len(), CAPACITY);
    assert_eq!(
        worker.lookup(&prompt(1, CAPACITY), "held").unwrap(),
        CAPACITY as u64
    );
    assert_eq!(server.readings().leased_objects, CAPACITY as u64);
    assert!(store(&mut worker, 2, 1).is_empty());
    worker
}

// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn session_end_releases_leases_at_once() {
    let server = TestServer::start(&[]);
    let mut worker = full_and_held(&server, &Scope::new("leases/ended"));
    worker.connection().end_session("held").unwrap();
    assert_eq!(server.readings().leased_objects, 0);
    assert_eq!(store(&mut worker, 3, CAPACITY).len(), CAPACITY);
}

#[test]
fn replacing_lookup_releases_the_former_at_once() {
    let server = TestServer::start(&[]);
    let mut worker = full_and_held(&server, &Scope::new("leases/replaced"));
    assert_eq!(worker.lookup(&prompt(1, 3), "held").unwrap(), 3);
    assert_eq!(server.readings().leased_objects, 3);
    assert_eq!(store(&mut worker, 3, CAPACITY).len(), CAPACITY - 3);
}

#[test]
fn free_releases_leases_at_once() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("leases/freed");
    let mut worker = full_and_held(&server, &scope);
    let held = prompt(1, CAPACITY);
    worker
        .connection()
        .free_lookup_locks(&scope.scheduler_key(&held, range(10..CAPACITY as u64), "held"))
        .unwrap();
    assert_eq!(server.readings().leased_objects, 10);
    assert_eq!(store(&mut worker, 3, CAPACITY).len(), CAPACITY - 10);
}

#[test]
fn retrieve_releases_leases_at_its_end() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("leases/retrieved");
    let mut worker = full_and_held(&server, &scope);
    let held = prompt(1, CAPACITY);
    let key = scope.worker_key(0, &held, range(0..CAPACITY as u64), "held");
    assert!(
        worker
            .connection()
            .prepare_retrieve(&key, InstanceId(1))
            .unwrap()
            .success
    );
    // While the worker reads, neither the end of its session nor a forced clear frees its memory.
    worker.connection().end_session("held").unwrap();
    assert!(store(&mut worker, 2, 1).is_empty());
    worker.connection().clear(true).unwrap();
    assert!(store(&mut worker, 2, 1).is_empty());
    assert!(
        worker
            .connection()
            .commit_retrieve(&key, InstanceId(1))
            .unwrap()
    );
    assert_eq!(store(&mut worker, 3, CAPACITY).len(), CAPACITY);
    server.assert_sound();
}

/// The engine of a refused retrieve computes. A retrieve that asks again succeeds as long as the objects are there.
// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn refused_retrieve_releases_leases_at_once() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("leases/refused retrieve");
    let mut worker = server.lmcache_driven(1, &scope);
    let _copies_itself = server.engine_driven(2, &Scope::new("leases/other"));
    let (prompt, chunks) = (prompt(1, 2), range(0..2));
    let blocks: Vec<i64> = (1..9).collect();
    assert!(
        worker
            .store(&prompt, chunks.clone(), "stored", &blocks)
            .unwrap()
    );
    for instance in [1, 2, 3] {
        for prepares in [false, true] {
            let request = format!("{instance} {prepares}");
            assert_eq!(worker.lookup(&prompt, &request).unwrap(), 2);
            assert_eq!(server.readings().leased_objects, 2);
            let key = scope.worker_key(0, &prompt, chunks.clone(), &request);
            let (connection, instance) = (worker.connection(), InstanceId(instance));
            let too_few = [blocks[..4].to_vec()];
            let refused = if prepares {
                !connection.prepare_retrieve(&key, instance).unwrap().success
            } else {
                !connection.retrieve(&key, instance, &too_few, 0).unwrap()
            };
            assert!(refused, "{request}");
            assert_eq!(server.readings().leased_objects, 0, "{request}");
            let again = worker.retrieve(&prompt, chunks.clone(), &request, &blocks, 0);
            assert!(again.unwrap());
        }
    }
}

/// Two workers read the same objects. One is refused and asks again, however often: the other has still to read.
// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn retrying_worker_is_one_reader() {
    let server = TestServer::start(&[]);
    let mut scope = Scope::new("leases/readers");
    scope.num_kv_readers = 2;
    let mut workers = [1, 2].map(|instance| server.lmcache_driven(instance, &scope));
    let (prompt, chunks) = (prompt(1, 2), range(0..2));
    let blocks: Vec<i64> = (1..9).collect();
    let stored = workers[0].store(&prompt, chunks.clone(), "stored", &blocks);
    assert!(stored.unwrap());
    for request in ["refused", "read twice"] {
        assert_eq!(workers[0].lookup(&prompt, request).unwrap(), 2);
        let key = scope.worker_key(0, &prompt, chunks.clone(), request);
        if request == "refused" {
            let too_few = [blocks[..4].to_vec()];
            let connection = workers[0].connection();
            let instance = InstanceId(1);
            assert!(!connection.retrieve(&key, instance, &too_few, 0).unwrap());
            assert!(!connection.prepare_retrieve(&key, instance).unwrap().success);
        }
        for (reader, left) in [(0, 2), (0, 2), (1, 0)] {
            let read = workers[reader].retrieve(&prompt, chunks.clone(), request, &blocks, 0);
            assert!(read.unwrap());
            assert_eq!(server.readings().leased_objects, left, "{request} {reader}");
        }
    }
    server.assert_sound();
}

/// What was found can be read in parts, by each of its readers.
#[test]
fn every_part_read_by_worker_counts() {
    let server = TestServer::start(&[]);
    let mut scope = Scope::new("leases/parts");
    scope.num_kv_readers = 2;
    let mut workers = [1, 2].map(|instance| server.lmcache_driven(instance, &scope));
    let prompt = prompt(1, 2);
    let blocks: Vec<i64> = (1..9).collect();
    let stored = workers[0].store(&prompt, range(0..2), "stored", &blocks);
    assert!(stored.unwrap());
    assert_eq!(workers[0].lookup(&prompt, "parts").unwrap(), 2);
    for (reader, chunk, left) in [(0, 0, 2), (0, 1, 2), (1, 1, 1), (1, 0, 0)] {
        let part = range(chunk..chunk + 1);
        let read = workers[reader].retrieve(&prompt, part, "parts", &blocks[..4], 0);
        assert!(read.unwrap());
        assert_eq!(server.readings().leased_objects, left, "{reader} {chunk}");
    }
}

// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn death_of_last_worker_releases_leases() {
    let server = TestServer::start(&[
        "--worker-reap-timeout-seconds",
        "120",
        "--l1-read-ttl-seconds",
        "3000",
    ]);
    let scope = Scope::new("leases/dead");
    let mut dead = full_and_held(&server, &scope);
    assert!(dead.connection().ping(Some(InstanceId(1))).unwrap());
    server.pass(Duration::from_secs(119));
    assert_eq!(server.readings().leased_objects, CAPACITY as u64);
    server.pass(Duration::from_secs(2));
    assert_eq!(server.readings().leased_objects, 0);
    let mut other = worker(&server, 2, &Scope::new("leases/living"));
    assert_eq!(store(&mut other, 3, CAPACITY).len(), CAPACITY);
}

#[test]
fn unregistration_of_last_worker_releases_leases() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("leases/left");
    let leaving = full_and_held(&server, &scope);
    leaving.close().unwrap();
    assert_eq!(server.readings().leased_objects, 0);
}

// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn silent_scheduler_releases_leases() {
    let server = TestServer::start(&[
        "--worker-reap-timeout-seconds",
        "120",
        "--l1-read-ttl-seconds",
        "3000",
    ]);
    let scope = Scope::new("leases/scheduler");
    let mut worker = worker(&server, 1, &scope);
    store(&mut worker, 1, 2);
    let (mut silent, mut alive) = (server.connect(), server.connect());
    let held = prompt(1, 2);
    for (scheduler, request) in [(&mut silent, "silent"), (&mut alive, "alive")] {
        assert!(scheduler.ping(None).unwrap());
        assert_eq!(
            scheduler
                .lookup_hits(&scope.scheduler_key(&held, range(0..2), request))
                .unwrap(),
            2
        );
    }
    server.pass(Duration::from_secs(60));
    assert!(alive.ping(None).unwrap());
    assert!(worker.connection().ping(Some(InstanceId(1))).unwrap());
    server.pass(Duration::from_secs(61));
    // The other one's lookup is still served.
    assert_eq!(server.readings().sessions, 1);
    assert_eq!(server.readings().leased_objects, 2);
    let read = worker
        .retrieve(&held, range(0..2), "alive", |_, _| {})
        .unwrap();
    assert_eq!(read.unwrap().chunks, 2);
    assert_eq!(server.readings().leased_objects, 0);
}

// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn an_unread_lookup_expires_after_the_read_ttl() {
    let server = TestServer::start(&[
        "--l1-read-ttl-seconds",
        "300",
        "--worker-reap-timeout-seconds",
        "0",
    ]);
    let scope = Scope::new("leases/unread");
    let mut worker = full_and_held(&server, &scope);
    server.pass(Duration::from_secs(299));
    assert_eq!(server.readings().leased_objects, CAPACITY as u64);
    server.pass(Duration::from_secs(2));
    assert_eq!(server.readings().leased_objects, 0);
    assert_eq!(store(&mut worker, 3, 1), [0]);
}

// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn background_pass_evicts_down_from_the_watermark() {
    let server = TestServer::start(&[
        "--eviction-trigger-watermark",
        "0.5",
        "--eviction-ratio",
        "0.25",
    ]);
    let scope = Scope::new("leases/watermark");
    let mut worker = worker(&server, 1, &scope);
    store(&mut worker, 1, CAPACITY / 2 - 1);
    server.engine().housekeep();
    assert_eq!(
        resident(&mut worker, 1, CAPACITY / 2 - 1),
        CAPACITY as u64 / 2 - 1
    );
    assert_eq!(worker.lookup(&prompt(1, 4), "held").unwrap(), 4);
    store(&mut worker, 2, CAPACITY / 2 - 4);
    server.engine().housekeep();
    // A quarter of the 59 MiB in use, from the end of the older prompt; more if the server's own pass came between.
    let left = resident(&mut worker, 1, CAPACITY / 2 - 1);
    assert!((4..=CAPACITY as u64 / 2 - 1 - 15).contains(&left), "{left}");
    assert_eq!(server.readings().leased_objects, 4);
    assert!(server.readings().used_bytes < 45 << 20);
}
