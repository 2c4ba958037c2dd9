//! Transfers that do not go as they should: nothing half-written becomes readable, and no memory stays behind.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use kvtier_client::proto::pickle;
use kvtier_client::proto::request::ABORT_STORE;
use kvtier_client::proto::response::{PrepareStore, Slot};
use kvtier_client::{EngineDrivenWorker, InstanceId, Key, Scope};

use crate::support::{TestServer, bytes, engine_driven, prompt, range};

/// Slots of a prepared store, with the chunks they are for.
fn slots(prepared: PrepareStore<'static>) -> Vec<(u64, Slot<'static>)> {
    let target = prepared.target.expect("the server has a pool");
    target.chunk_indices.into_iter().zip(target.slots).collect()
}

/// The server's pool, as a worker of its own opens it.
fn pool(server: &TestServer, scope: &Scope) -> File {
    let context = kvtier_client::proto::request::EngineDrivenContext {
        instance: InstanceId(99),
        model_name: &scope.model_name,
        world_size: 1,
        block_size: 4,
        num_layers: 2,
        hidden_dim_size: 64,
        dtype: "bfloat16",
        use_mla: false,
        num_physical_slots: None,
    };
    let mut connection = server.connect();
    let told = connection.register_engine_driven(context).unwrap();
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

#[test]
fn what_is_prepared_and_not_committed_is_not_readable() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/prepared");
    let mut worker = server.engine_driven(1, &scope);
    let prompt = prompt(1, 2);
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    let lent = slots(
        worker
            .connection()
            .prepare_store(&key, InstanceId(1))
            .unwrap(),
    );
    assert_eq!(lent.len(), 2);
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

/// Slots that a worker is lent for a store.
fn lend(worker: &mut EngineDrivenWorker, key: &Key<'_>) -> Vec<(u64, Slot<'static>)> {
    let instance = worker.spec().instance;
    slots(worker.connection().prepare_store(key, instance).unwrap())
}

fn commit(worker: &mut EngineDrivenWorker, key: &Key<'_>) -> bool {
    let instance = worker.spec().instance;
    worker
        .connection()
        .commit_store(key, instance, b"")
        .unwrap()
}

#[test]
fn a_transfer_under_way_is_not_lent_twice() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/twice");
    let mut worker = server.engine_driven(1, &scope);
    let (prompt, len) = (prompt(1, 2), worker.chunk_bytes());
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    let first = lend(&mut worker, &key);
    let staged = server.readings().staged_bytes;
    // The commit could mean either: only one of them is there to be written.
    assert_eq!(lend(&mut worker, &key), []);
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
    let read = worker.retrieve(&prompt, range(0..2), "q", |chunk, got| {
        assert!(got == bytes(7, chunk, len))
    });
    assert_eq!(read.unwrap().unwrap().chunks, 2);
}

#[test]
fn a_store_that_others_overtook_keeps_its_memory_to_its_commit() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/overtaken");
    let (mut slow, mut fast) = (
        server.engine_driven(1, &scope),
        server.engine_driven(2, &scope),
    );
    let (prompt, len) = (prompt(1, 2), slow.chunk_bytes());
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    assert_eq!(lend(&mut slow, &key).len(), 2);
    let staged = server.readings().staged_bytes;
    fast.store(&prompt, range(0..2), "other", |chunk| bytes(1, chunk, len))
        .unwrap();
    assert_eq!(lend(&mut slow, &key), []);
    assert_eq!(
        server.readings().staged_bytes,
        staged,
        "it may still be writing"
    );
    assert!(commit(&mut slow, &key));
    assert_eq!(server.readings().staged_bytes, 0);
}

#[test]
fn a_retrieve_prepared_twice_is_leased_to_its_last_commit() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/reread");
    let mut worker = server.engine_driven(1, &scope);
    let (prompt, len) = (prompt(1, 2), worker.chunk_bytes());
    worker
        .store(&prompt, range(0..2), "s", |chunk| bytes(1, chunk, len))
        .unwrap();
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
    // Whoever reads now reads what nobody holds.
    assert!(!connection.commit_retrieve(&key, InstanceId(1)).unwrap());
}

#[test]
fn of_two_stores_of_the_same_chunks_the_first_commit_counts_whole() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/race");
    let (mut one, mut two) = (
        server.engine_driven(1, &scope),
        server.engine_driven(2, &scope),
    );
    let (prompt, len) = (prompt(1, 2), one.chunk_bytes());
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    let pool = pool(&server, &scope);
    let lend = |worker: &mut EngineDrivenWorker, seed: u64| {
        let instance = worker.spec().instance;
        for (chunk, slot) in slots(worker.connection().prepare_store(&key, instance).unwrap()) {
            pool.write_all_at(&bytes(seed, chunk, len), slot.offset)
                .unwrap();
        }
    };
    lend(&mut one, 1);
    lend(&mut two, 2);
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
    let read = one.retrieve(&prompt, range(0..2), "q", |chunk, got| {
        assert_eq!(got, bytes(2, chunk, len))
    });
    assert!(read.unwrap().is_some());
    assert_eq!(server.readings().staged_bytes, 0);
}

#[test]
fn memory_of_an_instance_that_left_is_kept_while_it_may_still_copy() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "600"]);
    let scope = Scope::new("transfers/left");
    let (mut worker, mut other) = (
        server.engine_driven(1, &scope),
        server.engine_driven(2, &scope),
    );
    let (stored, unfinished, len) = (prompt(1, 2), prompt(2, 2), worker.chunk_bytes());
    worker
        .store(&stored, range(0..2), "s", |chunk| bytes(1, chunk, len))
        .unwrap();
    let used = server.readings().used_bytes;

    let write = scope.worker_key(0, &unfinished, range(0..2), "w");
    assert_eq!(lend(&mut worker, &write).len(), 2);
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

    // LMCache's client ends its copies after it was told that it is unregistered.
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

#[test]
fn a_store_that_its_worker_gives_up_gives_its_memory_back_at_once() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/aborted");
    let mut worker = server.engine_driven(1, &scope);
    let prompt = prompt(1, 2);
    let key = scope.worker_key(0, &prompt, range(0..2), "w");
    assert_eq!(lend(&mut worker, &key).len(), 2);
    let connection = worker.connection();
    let mut abort = || {
        let told = connection.commit_store(&key, InstanceId(1), ABORT_STORE);
        assert!(!told.unwrap());
    };
    abort();
    assert_eq!(held(&server), (0, 0, 0));
    // There may be nothing to give up, as after a commit whose answer was lost.
    abort();
    assert_eq!(lend(&mut worker, &key).len(), 2);
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
fn a_registration_in_the_place_of_another_commits_none_of_its_transfers() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "600"]);
    let scope = Scope::new("transfers/replaced");
    let mut worker = server.engine_driven(1, &scope);
    let prompt = prompt(1, 2);
    let key = scope.worker_key(0, &prompt, range(0..2), "w");
    assert_eq!(lend(&mut worker, &key).len(), 2);
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

#[test]
fn memory_of_a_vanished_worker_comes_back_after_its_death_and_the_write_ttl() {
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
    // It may only be stopped and still write: its memory is not given to anybody yet, and not to be committed.
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

#[test]
fn a_prepared_store_that_nobody_commits_is_given_up_and_its_memory_kept_from_others() {
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
    assert_eq!(lend(&mut worker, &late).len(), 2);
    let staged = server.readings().staged_bytes;
    assert_eq!(lend(&mut worker, &never).len(), 2);
    server.pass(Duration::from_secs(59));
    server.pass(Duration::from_secs(2));
    server.pass(Duration::from_secs(3600));
    assert_eq!(
        server.readings().staged_bytes,
        2 * staged,
        "no clock can tell that the worker has stopped writing"
    );
    // A commit that is still to come could mean either, so the transfer does not begin again.
    assert_eq!(lend(&mut worker, &late), []);
    // Its own word can.
    assert!(!commit(&mut worker, &late));
    assert_eq!(server.readings().staged_bytes, staged);
    assert_eq!(lend(&mut worker, &late).len(), 2);
    assert!(commit(&mut worker, &late));
    worker.close().unwrap();
    assert_eq!(server.readings().staged_bytes, staged);
    server.pass(Duration::from_secs(61));
    assert_eq!(held(&server), (0, 0, staged));
}

#[test]
fn a_worker_that_never_commits_does_not_fill_the_cache_for_others() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "60"]);
    let scope = Scope::new("transfers/leaky");
    let (mut leaky, mut other) = (
        server.engine_driven(1, &scope),
        server.engine_driven(2, &scope),
    );
    let mut lent = Vec::new();
    for seed in 1.. {
        // Of 64 MiB, 1 MiB at a time.
        let prompt = prompt(seed, 128);
        let key = scope.worker_key(0, &prompt, range(0..128), "w");
        lent.push(lend(&mut leaky, &key).len());
        server.pass(Duration::from_secs(61));
        // As a worker does that lives.
        assert!(leaky.connection().ping(Some(InstanceId(1))).unwrap());
        assert!(other.connection().ping(Some(InstanceId(2))).unwrap());
        if lent.last() == Some(&0) {
            break;
        }
    }
    // Seven eighths of a quarter are its share.
    assert_eq!(lent.len(), 15);
    let (prompt, len) = (prompt(1000, 128), other.chunk_bytes());
    let stored = other.store(&prompt, range(0..128), "s", |chunk| bytes(1, chunk, len));
    assert_eq!(stored.unwrap().chunks.len(), 128);
    assert_eq!(other.lookup(&prompt, "r").unwrap(), 128);
    // What it has kept comes back when it registers anew, as another worker.
    let mut spec = engine_driven(1, &scope);
    spec.hidden = 32;
    let mut again = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    server.pass(Duration::from_secs(61));
    assert_eq!(server.readings().staged_bytes, 0);
    let key = scope.worker_key(0, &prompt, range(0..128), "x");
    assert_eq!(lend(&mut again, &key).len(), 128);
}

#[test]
fn a_worker_that_never_commits_does_not_get_out_of_it_by_new_instance_ids() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "60"]);
    let scope = Scope::new("transfers/renewing");
    let mut lent = Vec::new();
    for seed in 1..40u32 {
        // Of 64 MiB, 1 MiB at a time, each under an id of its own that leaves.
        let mut leaky = server.engine_driven(i64::from(seed), &scope);
        let prompt = prompt(seed, 128);
        let key = scope.worker_key(0, &prompt, range(0..128), "w");
        lent.push(lend(&mut leaky, &key).len());
        leaky.close().unwrap();
    }
    // Seven eighths of a quarter are its share.
    assert_eq!(lent.iter().filter(|slots| **slots > 0).count(), 14);
    // Other workers of the model get on, and so does this one when the memory has come back.
    let prompt = prompt(1000, 128);
    let mut again = server.engine_driven(100, &scope);
    let key = scope.worker_key(0, &prompt, range(0..128), "w");
    assert_eq!(lend(&mut again, &key).len(), 0);
    server.pass(Duration::from_secs(61));
    assert_eq!(lend(&mut again, &key).len(), 128);
}

/// A quarter of the 64 MiB of a [`TestServer`].
const STAGING_LIMIT: u64 = 16 << 20;

/// Prepares 1 MiB for each of these seeds and commits none; gives the slots lent.
fn hog(
    connection: &mut kvtier_client::Connection,
    instance: i64,
    scope: &Scope,
    seeds: std::ops::Range<u32>,
) -> usize {
    let lent = seeds.map(|seed| {
        let prompt = prompt(seed, 128);
        let key = scope.worker_key(0, &prompt, range(0..128), "hog");
        let prepared = connection.prepare_store(&key, InstanceId(instance));
        slots(prepared.unwrap()).len()
    });
    lent.sum()
}

/// Stores and finds again prompts of 8 KiB chunks.
fn stores_and_finds(worker: &mut EngineDrivenWorker, seeds: std::ops::Range<u32>) {
    let len = worker.chunk_bytes();
    for seed in seeds {
        let prompt = prompt(seed, 64);
        let stored = worker.store(&prompt, range(0..64), "s", |chunk| bytes(1, chunk, len));
        assert_eq!(stored.unwrap().chunks.len(), 64, "prompt {seed}");
        assert_eq!(worker.lookup(&prompt, "l").unwrap(), 64);
        worker.connection().end_session("l").unwrap();
    }
}

#[test]
fn worker_that_never_commits_holds_at_most_a_quarter() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "60"]);
    let scope = Scope::new("staging/hog");
    let mut leaky = server.engine_driven(1, &scope);
    let mut other = server.engine_driven(2, &scope);
    let mut tenant = server.engine_driven(3, &Scope::new("staging/tenant").with_salt("t"));
    // 64 MiB of others' objects, of which the last 8 are the tenant's.
    stores_and_finds(&mut other, 1000..1112);
    stores_and_finds(&mut tenant, 2000..2016);
    let lent = hog(leaky.connection(), 1, &scope, 0..256);
    assert_eq!(lent, 14 * 128, "seven eighths of a quarter");
    for passed in 0..4 {
        assert!(server.readings().staged_bytes <= STAGING_LIMIT);
        for seed in 2000..2016 {
            assert_eq!(tenant.lookup(&prompt(seed, 64), "l").unwrap(), 64);
            tenant.connection().end_session("l").unwrap();
        }
        stores_and_finds(&mut other, 3000 + passed * 40..3040 + passed * 40);
        assert_eq!(hog(leaky.connection(), 1, &scope, 300..320), 0);
        server.pass(Duration::from_secs(61));
        for (worker, id) in [(&mut leaky, 1), (&mut other, 2), (&mut tenant, 3)] {
            assert!(worker.connection().ping(Some(InstanceId(id))).unwrap());
        }
    }
    assert_eq!(server.engine().status(true)["withheld_bytes"], 14 << 20);
    server.assert_sound();
}

#[test]
fn thousand_instances_stage_at_most_a_quarter() {
    let server = TestServer::start(&[]);
    let mut tenant = server.engine_driven(5000, &Scope::new("staging/tenant").with_salt("t"));
    stores_and_finds(&mut tenant, 2000..2096);
    let mut connection = server.connect();
    for instance in 0..1000 {
        let scope = Scope::new(format!("staging/{instance}"));
        let context = kvtier_client::proto::request::EngineDrivenContext {
            instance: InstanceId(instance),
            model_name: &scope.model_name,
            world_size: 1,
            block_size: 4,
            num_layers: 2,
            hidden_dim_size: 64,
            dtype: "bfloat16",
            use_mla: false,
            num_physical_slots: None,
        };
        connection.register_engine_driven(context).unwrap();
        hog(&mut connection, instance, &scope, 1..2);
    }
    let staged = server.readings().staged_bytes;
    assert!((14 << 20..=STAGING_LIMIT).contains(&staged), "{staged}");
    assert_eq!(server.readings().evicted_objects, 0);
    for seed in 2000..2096 {
        assert_eq!(tenant.lookup(&prompt(seed, 64), "l").unwrap(), 64);
    }
}

#[test]
fn tenant_with_a_soft_limit_stages_no_more_than_that() {
    let server = TestServer::start(&["--eviction-policy", "IsolatedLRU"]);
    let limit = serde_json::json!({ "limit_gb": 4.0 / 1024.0 }).to_string();
    let (status, told) = crate::http::json_of(&server, "PUT", "/quota/small", &limit);
    assert_eq!(status, 200, "{told}");
    let scope = Scope::new("staging/quota");
    let mut neighbour = server.engine_driven(2, &scope.clone().with_salt("n"));
    // 63 MiB.
    stores_and_finds(&mut neighbour, 1000..1126);
    let small = scope.with_salt("small");
    let mut leaky = server.engine_driven(1, &small);
    assert_eq!(hog(leaky.connection(), 1, &small, 0..64), 4 * 128);
    assert_eq!(server.readings().staged_bytes, 4 << 20);
    assert!(server.readings().evicted_bytes <= 3 << 20);
    stores_and_finds(&mut neighbour, 2000..2010);
}

#[test]
fn pickled_store_counts_in_the_share_of_its_worker() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("staging/pickled");
    let mut leaky = server.engine_driven(1, &scope);
    let mut other = server.engine_driven(2, &scope);
    assert_eq!(hog(leaky.connection(), 1, &scope, 0..64), 14 * 128);
    let (prompt, len) = (prompt(1000, 2), leaky.chunk_bytes());
    let send = |worker: &mut EngineDrivenWorker, request: &str| {
        let key = scope.worker_key(0, &prompt, range(0..2), request);
        let chunks: Vec<_> = (0..2).map(|chunk| bytes(1, chunk, len)).collect();
        let tensors = [0, 1].map(|_| pickle::TensorToWrite {
            dtype: kvtier_client::proto::descriptor::Dtype::BFloat16,
            shape: &[2, 2, 16, 64],
        });
        let data = pickle::write_tensors(&tensors, |index, out| {
            out.extend_from_slice(&chunks[index]);
            Ok::<(), pickle::WriteError>(())
        });
        let instance = worker.spec().instance;
        let stored = worker
            .connection()
            .commit_store(&key, instance, &data.unwrap());
        stored.unwrap()
    };
    assert!(!send(&mut leaky, "p"));
    assert!(send(&mut other, "p"));
}

#[test]
fn retrieves_that_are_never_committed_do_not_keep_all_from_eviction() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "60"]);
    let scope = Scope::new("staging/reader");
    let mut leaky = server.engine_driven(1, &scope);
    stores_and_finds(&mut leaky, 0..100);
    let mut read = 0;
    for seed in 0..100 {
        let prompt = prompt(seed, 64);
        assert_eq!(leaky.lookup(&prompt, "r").unwrap(), 64);
        let key = scope.worker_key(0, &prompt, range(0..64), "r");
        let answer = leaky.connection().prepare_retrieve(&key, InstanceId(1));
        read += usize::from(answer.unwrap().success);
        leaky.connection().end_session("r").unwrap();
    }
    // Half a MiB each.
    assert_eq!(read, 32);
}

#[test]
fn a_worker_that_only_loads_and_cannot_map_the_pool_is_sent_its_chunks() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/reader");
    let mut writer = server.engine_driven(1, &scope);
    let (prompt, len) = (prompt(1, 2), writer.chunk_bytes());
    writer
        .store(&prompt, range(0..2), "s", |chunk| bytes(1, chunk, len))
        .unwrap();
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
    let limits = pickle::Limits::default();
    let tensors = pickle::read_tensors(&answer.data, &limits).unwrap();
    assert_eq!(tensors.len(), 2);
    assert_eq!(server.readings().leased_objects, 0);
}

#[test]
fn a_worker_that_sends_its_data_along_leaves_no_slots_behind() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/pickled");
    let mut spec = engine_driven(1, &scope);
    spec.force_pickle = true;
    let mut worker = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    let (prompt, len) = (prompt(1, 2), worker.chunk_bytes());
    worker
        .store(&prompt, range(0..2), "s", |chunk| bytes(1, chunk, len))
        .unwrap();
    assert_eq!(server.readings().staged_bytes, 0);
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 2);
    let read = worker.retrieve(&prompt, range(0..2), "r", |chunk, got| {
        assert_eq!(got, bytes(1, chunk, len))
    });
    assert!(read.unwrap().is_some());
    assert_eq!(server.readings().leased_objects, 0);
}

#[test]
fn a_worker_that_registers_again_is_offered_the_pool_again() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("transfers/again");
    let mut spec = engine_driven(1, &scope);
    spec.force_pickle = true;
    let mut worker = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    let (prompt, len) = (prompt(1, 4), worker.chunk_bytes());
    worker
        .store(&prompt, range(0..2), "s", |chunk| bytes(1, chunk, len))
        .unwrap();
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

#[test]
fn a_copy_that_fails_in_the_middle_stores_nothing() {
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

#[test]
fn a_client_that_truncates_its_pages_harms_only_itself() {
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
