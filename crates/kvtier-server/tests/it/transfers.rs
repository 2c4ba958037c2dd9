//! Transfers that do not go as they should: nothing half-written becomes readable, and no memory stays behind.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use kvtier_client::proto::pickle;
use kvtier_client::proto::request::ABORT_STORE;
use kvtier_client::{EngineDrivenWorker, InstanceId, Key, Scope};

use crate::support::{
    Steps as _, TestServer, bytes, context, engine_driven, given_stored, prompt, range, reserve,
    slots,
};

/// A worker that sends and receives its chunks pickled.
fn pickling(server: &TestServer, scope: &Scope) -> EngineDrivenWorker {
    let mut spec = engine_driven(1, scope);
    spec.force_pickle = true;
    EngineDrivenWorker::register(server.connect(), spec).unwrap()
}

/// The server's pool, as a worker of its own opens it.
fn pool(server: &TestServer, scope: &Scope) -> File {
    let mut connection = server.connect();
    let told = connection
        .register_engine_driven(context(99, scope))
        .unwrap();
    connection.unregister_engine_driven(InstanceId(99)).unwrap();
    let path = format!("/dev/shm/{}", told.shm_name);
    let pool = File::options().read(true).write(true).open(path).unwrap();
    assert_eq!(pool.metadata().unwrap().len(), told.pool_size);
    pool
}

/// Bytes staged, objects leased, bytes in use.
fn held(server: &TestServer) -> (u64, u64, u64) {
    let readings = server.readings();
    (
        readings.staged_bytes,
        readings.leased_objects,
        readings.used_bytes,
    )
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn a_commit_without_a_prepare_stores_nothing() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/unprepared");
    let mut worker = server.engine_driven(1, &scope);
    let prompt = prompt(1, 2);
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    assert!(
        !worker
            .connection()
            .commit_store(&key, InstanceId(1), b"")
            .unwrap()
    );
    assert_eq!(worker.lookup(&prompt, "q").unwrap(), 0);
    assert_eq!(held(&server), (0, 0, 0));
    server.assert_sound();
}

// proves: docs/compare.md#hits
// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn prepared_store_is_not_readable_before_commit() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/prepared");
    let mut worker = server.engine_driven(1, &scope);
    let prompt = prompt(1, 2);
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    let granted = slots(
        worker
            .connection()
            .prepare_store(&key, InstanceId(1))
            .unwrap(),
    );
    assert_eq!(granted.len(), 2);
    assert_eq!(worker.lookup(&prompt, "q").unwrap(), 0);
    assert!(
        worker
            .connection()
            .commit_store(&key, InstanceId(1), b"")
            .unwrap()
    );
    assert_eq!(worker.lookup(&prompt, "q2").unwrap(), 2);
    // A second commit of the same has nothing to commit.
    assert!(
        !worker
            .connection()
            .commit_store(&key, InstanceId(1), b"")
            .unwrap()
    );
    assert_eq!(server.readings().staged_bytes, 0);
}

fn commit(worker: &mut EngineDrivenWorker, key: &Key<'_>) -> bool {
    let instance = worker.spec().instance;
    worker
        .connection()
        .commit_store(key, instance, b"")
        .unwrap()
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn a_store_in_flight_is_not_granted_twice() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/twice");
    let mut worker = server.engine_driven(1, &scope);
    let (prompt, len) = (prompt(1, 2), worker.chunk_bytes());
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    let first = reserve(&mut worker, &key);
    let staged = server.readings().staged_bytes;
    // The commit could mean either: only one of them is there to be written.
    assert_eq!(reserve(&mut worker, &key), []);
    assert_eq!(server.readings().staged_bytes, staged);
    let pool = pool(&server, &scope);
    for (chunk, slot) in &first {
        pool.write_all_at(&bytes(7, *chunk, len), slot.offset)
            .unwrap();
    }
    assert!(commit(&mut worker, &key));
    assert!(!commit(&mut worker, &key));
    assert_eq!(server.readings().staged_bytes, 0);
    assert_eq!(worker.lookup(&prompt, "q").unwrap(), 2);
    worker.assert_reads(&prompt, 0..2, "q", 7);
}

#[test]
fn overtaken_store_keeps_memory_until_commit() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/overtaken");
    let (mut slow, mut fast) = (
        server.engine_driven(1, &scope),
        server.engine_driven(2, &scope),
    );
    let (prompt, len) = (prompt(1, 2), slow.chunk_bytes());
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    assert_eq!(reserve(&mut slow, &key).len(), 2);
    let staged = server.readings().staged_bytes;
    fast.store(&prompt, range(0..2), "other", |chunk| bytes(1, chunk, len))
        .unwrap();
    assert_eq!(reserve(&mut slow, &key), []);
    assert_eq!(
        server.readings().staged_bytes,
        staged,
        "it may still be writing"
    );
    assert!(commit(&mut slow, &key));
    assert_eq!(server.readings().staged_bytes, 0);
}

#[test]
fn twice_prepared_retrieve_is_leased_until_last_commit() {
    let (server, scope, mut worker, prompt) = given_stored("transfers/reread", 2);
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 2);
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    let connection = worker.connection();
    for _ in 0..2 {
        let prepared = connection.prepare_retrieve(&key, InstanceId(1)).unwrap();
        assert!(prepared.success);
    }
    // Clients commit after a miss too; that commit is not the other one's.
    let freed = scope.scheduler_key(&prompt, range(0..2), "r");
    connection.free_lookup_locks(&freed).unwrap();
    let missed = connection.prepare_retrieve(&key, InstanceId(1)).unwrap();
    assert!(!missed.success);
    connection.end_session("r").unwrap();
    for leased in [2, 2, 0] {
        assert!(connection.commit_retrieve(&key, InstanceId(1)).unwrap());
        assert_eq!(server.readings().leased_objects, leased);
    }
    // A worker that reads now reads memory without a lease.
    assert!(!connection.commit_retrieve(&key, InstanceId(1)).unwrap());
}

#[test]
fn first_commit_of_equal_stores_counts_whole() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/race");
    let (mut one, mut two) = (
        server.engine_driven(1, &scope),
        server.engine_driven(2, &scope),
    );
    let (prompt, len) = (prompt(1, 2), one.chunk_bytes());
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    let pool = pool(&server, &scope);
    let fill = |worker: &mut EngineDrivenWorker, seed: u64| {
        let instance = worker.spec().instance;
        for (chunk, slot) in slots(worker.connection().prepare_store(&key, instance).unwrap()) {
            pool.write_all_at(&bytes(seed, chunk, len), slot.offset)
                .unwrap();
        }
    };
    fill(&mut one, 1);
    fill(&mut two, 2);
    assert!(
        two.connection()
            .commit_store(&key, InstanceId(2), b"")
            .unwrap()
    );
    let used = server.readings().used_bytes;
    assert!(
        one.connection()
            .commit_store(&key, InstanceId(1), b"")
            .unwrap()
    );
    assert!(
        server.readings().used_bytes < used,
        "the second copy is dropped"
    );
    assert_eq!(one.lookup(&prompt, "q").unwrap(), 2);
    one.assert_reads(&prompt, 0..2, "q", 2);
    assert_eq!(server.readings().staged_bytes, 0);
}

// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn unregistered_instance_keeps_memory_it_may_copy() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "600"]);
    let scope = Scope::new("transfers/left");
    let (mut worker, mut other) = (
        server.engine_driven(1, &scope),
        server.engine_driven(2, &scope),
    );
    let (stored, unfinished) = (prompt(1, 2), prompt(2, 2));
    worker.stored(&stored, 0..2, 1);
    let used = server.readings().used_bytes;

    let write = scope.worker_key(0, &unfinished, range(0..2), "w");
    assert_eq!(reserve(&mut worker, &write).len(), 2);
    assert_eq!(worker.lookup(&stored, "r").unwrap(), 2);
    let read = scope.worker_key(0, &stored, range(0..2), "r");
    assert!(
        worker
            .connection()
            .prepare_retrieve(&read, InstanceId(1))
            .unwrap()
            .success
    );
    assert_eq!(held(&server), (used, 2, 2 * used));

    // LMCache's client ends its copies after the reply to its unregistration.
    let mut connection = worker.close().unwrap();
    assert_eq!(held(&server), (used, 2, 2 * used));
    assert!(!connection.commit_store(&write, InstanceId(1), b"").unwrap());
    assert!(!connection.commit_retrieve(&read, InstanceId(1)).unwrap());
    assert_eq!(other.lookup(&unfinished, "q").unwrap(), 0);
    server.pass(Duration::from_secs(599));
    assert_eq!(held(&server), (used, 2, 2 * used));
    server.pass(Duration::from_secs(2));
    assert_eq!(held(&server), (0, 0, used));
    server.assert_sound();
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn abandoned_store_frees_memory_at_once() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/aborted");
    let mut worker = server.engine_driven(1, &scope);
    let prompt = prompt(1, 2);
    let key = scope.worker_key(0, &prompt, range(0..2), "w");
    assert_eq!(reserve(&mut worker, &key).len(), 2);
    let connection = worker.connection();
    let mut abort = || {
        let told = connection.commit_store(&key, InstanceId(1), ABORT_STORE);
        assert!(!told.unwrap());
    };
    abort();
    assert_eq!(held(&server), (0, 0, 0));
    // There may be nothing to abort, as after a commit whose answer was lost.
    abort();
    assert_eq!(reserve(&mut worker, &key).len(), 2);
    assert!(commit(&mut worker, &key));
    let connection = worker.connection();
    assert!(
        !connection
            .commit_store(&key, InstanceId(1), ABORT_STORE)
            .unwrap()
    );
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 2);
}

#[test]
fn replacing_registration_commits_no_former_transfers() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "600"]);
    let scope = Scope::new("transfers/replaced");
    let mut worker = server.engine_driven(1, &scope);
    let prompt = prompt(1, 2);
    let key = scope.worker_key(0, &prompt, range(0..2), "w");
    assert_eq!(reserve(&mut worker, &key).len(), 2);
    let staged = server.readings().staged_bytes;
    let mut spec = engine_driven(1, &scope);
    spec.hidden = 32;
    let mut successor = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    // The earlier process may still be writing.
    assert_eq!(server.readings().staged_bytes, staged);
    assert!(!commit(&mut worker, &key));
    assert_eq!(successor.lookup(&prompt, "q").unwrap(), 0);
    assert_eq!(server.readings().staged_bytes, staged);
    server.pass(Duration::from_secs(601));
    assert_eq!(held(&server), (0, 0, 0));
}

// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn vanished_workers_memory_returns_after_write_ttl() {
    let server = TestServer::start(&[
        "--worker-reap-timeout-seconds",
        "120",
        "--l1-write-ttl-seconds",
        "600",
    ]);
    let scope = Scope::new("transfers/vanished");
    let mut worker = server.engine_driven(1, &scope);
    assert!(worker.connection().ping(Some(InstanceId(1))).unwrap());
    let prompt = prompt(1, 2);
    let key = scope.worker_key(0, &prompt, range(0..2), "w");
    assert_eq!(
        slots(
            worker
                .connection()
                .prepare_store(&key, InstanceId(1))
                .unwrap()
        )
        .len(),
        2
    );
    let staged = server.readings().staged_bytes;

    server.pass(Duration::from_secs(130));
    assert_eq!(server.readings().instances, 0);
    // It may only be stopped and still write: its memory is quarantined and cannot be committed.
    assert_eq!(server.readings().staged_bytes, staged);
    assert!(
        !worker
            .connection()
            .commit_store(&key, InstanceId(1), b"")
            .unwrap()
    );
    server.pass(Duration::from_secs(610));
    assert_eq!(held(&server), (0, 0, 0));
    server.assert_sound();
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn uncommitted_store_expires_into_quarantine() {
    let server = TestServer::start(&[
        "--worker-reap-timeout-seconds",
        "0",
        "--l1-write-ttl-seconds",
        "60",
    ]);
    let scope = Scope::new("transfers/forgotten");
    let mut worker = server.engine_driven(1, &scope);
    let (late, never) = (prompt(1, 2), prompt(2, 2));
    let late = scope.worker_key(0, &late, range(0..2), "w");
    let never = scope.worker_key(0, &never, range(0..2), "w");
    assert_eq!(reserve(&mut worker, &late).len(), 2);
    let staged = server.readings().staged_bytes;
    assert_eq!(reserve(&mut worker, &never).len(), 2);
    server.pass(Duration::from_secs(59));
    server.pass(Duration::from_secs(2));
    server.pass(Duration::from_secs(3600));
    assert_eq!(
        server.readings().staged_bytes,
        2 * staged,
        "no clock can tell that the worker has stopped writing"
    );
    // A commit that is still to come could mean either, so the transfer does not begin again.
    assert_eq!(reserve(&mut worker, &late), []);
    // Its own word can.
    assert!(!commit(&mut worker, &late));
    assert_eq!(server.readings().staged_bytes, staged);
    assert_eq!(reserve(&mut worker, &late).len(), 2);
    assert!(commit(&mut worker, &late));
    worker.close().unwrap();
    assert_eq!(server.readings().staged_bytes, staged);
    server.pass(Duration::from_secs(61));
    assert_eq!(held(&server), (0, 0, staged));
}

#[test]
fn load_only_worker_without_pool_receives_chunks() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/reader");
    let mut writer = server.engine_driven(1, &scope);
    let prompt = prompt(1, 2);
    writer.stored(&prompt, 0..2, 1);
    let mut reader = server.engine_driven(2, &scope);
    let nothing = scope.worker_key(0, &prompt, 0..0, "nothing");
    let none = pickle::write_tensors(&[], |_, _| Ok::<(), pickle::WriteError>(())).unwrap();
    let connection = reader.connection();
    assert!(
        connection
            .commit_store(&nothing, InstanceId(2), &none)
            .unwrap()
    );
    assert_eq!(reader.lookup(&prompt, "r").unwrap(), 2);
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    let answer = reader
        .connection()
        .prepare_retrieve(&key, InstanceId(2))
        .unwrap();
    assert!(answer.success && answer.slots.is_none_or(|slots| slots.is_empty()));
    let limits = pickle::PickleLimits::default();
    let tensors = pickle::read_tensors(&answer.data, &limits).unwrap();
    assert_eq!(tensors.len(), 2);
    assert_eq!(server.readings().leased_objects, 0);
}

// proves: docs/troubleshoot.md#shared-memory
#[test]
fn pickled_store_leaves_no_slots() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/pickled");
    let mut worker = pickling(&server, &scope);
    let prompt = prompt(1, 2);
    worker.stored(&prompt, 0..2, 1);
    assert_eq!(server.readings().staged_bytes, 0);
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 2);
    worker.assert_reads(&prompt, 0..2, "r", 1);
    assert_eq!(server.readings().leased_objects, 0);
}

// proves: docs/troubleshoot.md#shared-memory
#[test]
fn chunk_on_lost_pages_is_no_hit() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/lost");
    let mut worker = pickling(&server, &scope);
    let prompt = prompt(1, 2);
    worker.stored(&prompt, 0..2, 1);
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 2);
    worker.assert_reads(&prompt, 0..2, "r", 1);
    pool(&server, &scope).set_len(0).unwrap();
    // Again, when the pages have been replaced.
    for request in ["lost", "replaced"] {
        assert_eq!(worker.lookup(&prompt, request).unwrap(), 2);
        let read = worker.retrieve(&prompt, range(0..2), request, |_, _| panic!("a chunk"));
        assert!(read.unwrap().is_none(), "{request}");
    }
    assert_eq!(server.readings().leased_objects, 0);
}

#[test]
fn reregistered_worker_is_offered_the_pool() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/again");
    let mut worker = pickling(&server, &scope);
    let prompt = prompt(1, 4);
    worker.stored(&prompt, 0..2, 1);
    let key = scope.worker_key(0, &prompt, range(2..4), "t");
    let prepared = |worker: &mut EngineDrivenWorker| {
        let connection = worker.connection();
        connection.prepare_store(&key, InstanceId(1)).unwrap()
    };
    assert_eq!(prepared(&mut worker).target, None);
    // The same registration, of a worker that can map the pool now.
    let mut again = server.engine_driven(1, &scope);
    assert_eq!(slots(prepared(&mut again)).len(), 2);
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn copy_failing_midway_stores_nothing() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/half");
    let mut worker = server.lmcache_driven(1, &scope);
    let prompt = prompt(1, 2);
    for blocks in [
        [1, 2, 3, 4, 5, 6, 7, 32],
        [1, 2, 3, 4, 5, 6, 7, -1],
        [1, 2, 3, 4, 5, 6, 7, i64::MAX],
    ] {
        assert!(!worker.store(&prompt, range(0..2), "s", &blocks).unwrap());
        assert_eq!(worker.lookup(&prompt, "q").unwrap(), 0);
        assert_eq!(held(&server), (0, 0, 0));
    }
    assert!(
        worker
            .store(&prompt, range(0..2), "s", &[1, 2, 3, 4, 5, 6, 7, 8])
            .unwrap()
    );
    assert_eq!(worker.lookup(&prompt, "q2").unwrap(), 2);
    server.assert_sound();
}

#[test]
fn pages_come_back_as_they_were_stored() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/pages");
    let mut worker = server.lmcache_driven(1, &scope);
    let (prompt, len) = (prompt(1, 2), worker.chunk_bytes());
    let chunks = [bytes(1, 0, len), bytes(1, 1, len)];
    worker.write_chunk(&[4, 9, 2, 7], &chunks[0]).unwrap();
    worker.write_chunk(&[8, 3, 5, 1], &chunks[1]).unwrap();
    assert!(
        worker
            .store(&prompt, range(0..2), "s", &[4, 9, 2, 7, 8, 3, 5, 1])
            .unwrap()
    );
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 2);
    assert!(
        worker
            .retrieve(
                &prompt,
                range(0..2),
                "r",
                &[20, 21, 22, 23, 16, 17, 18, 19],
                0
            )
            .unwrap()
    );
    let mut got = Vec::new();
    worker.read_chunk(&[20, 21, 22, 23], &mut got).unwrap();
    assert_eq!(got, chunks[0]);
    worker.read_chunk(&[16, 17, 18, 19], &mut got).unwrap();
    assert_eq!(got, chunks[1]);
}

// proves: docs/troubleshoot.md#shared-memory
#[test]
fn client_truncating_its_pages_harms_only_itself() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/truncated");
    let (mut victim, mut other) = (
        server.lmcache_driven(1, &scope),
        server.lmcache_driven(2, &scope),
    );
    let prompt = prompt(1, 1);
    let path = format!("/dev/shm{}", victim.segment_name());
    std::fs::OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(0)
        .unwrap();
    assert!(
        !victim
            .store(&prompt, range(0..1), "s", &[1, 2, 3, 4])
            .unwrap()
    );
    assert_eq!(held(&server), (0, 0, 0));
    assert!(
        other
            .store(&prompt, range(0..1), "s", &[1, 2, 3, 4])
            .unwrap()
    );
    assert_eq!(other.lookup(&prompt, "q").unwrap(), 1);
    server.assert_sound();
}
