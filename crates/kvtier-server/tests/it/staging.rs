//! Staging budget: what workers have reserved and not committed, and what their uncommitted retrieves lease, is bounded.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use kvtier_client::proto::pickle;
use kvtier_client::proto::request::EngineDrivenContext;
use kvtier_client::{Connection, EngineDrivenWorker, InstanceId, Scope};

use crate::support::{
    TestServer, bytes, context, engine_driven, prompt, range, reserve, slots, wait_until,
};

/// A quarter of the 64 MiB of a [`TestServer`].
const STAGING_LIMIT: u64 = 16 << 20;

/// Prepares 1 MiB for each of these seeds and commits none; returns how many slots were granted.
fn hog(connection: &mut Connection, instance: i64, scope: &Scope, seeds: Range<u32>) -> usize {
    let granted = seeds.map(|seed| {
        let prompt = prompt(seed, 128);
        let key = scope.worker_key(0, &prompt, range(0..128), "hog");
        let prepared = connection.prepare_store(&key, InstanceId(instance));
        slots(prepared.unwrap()).len()
    });
    granted.sum()
}

/// Stores and finds again prompts of 8 KiB chunks.
fn stores_and_finds(worker: &mut EngineDrivenWorker, seeds: Range<u32>) {
    let len = worker.chunk_bytes();
    for seed in seeds {
        let prompt = prompt(seed, 64);
        let stored = worker.store(&prompt, range(0..64), "s", |chunk| bytes(1, chunk, len));
        assert_eq!(stored.unwrap().chunks.len(), 64, "prompt {seed}");
        assert_eq!(worker.lookup(&prompt, "l").unwrap(), 64);
        worker.connection().end_session("l").unwrap();
    }
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn uncommitted_stores_do_not_fill_the_cache() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "60"]);
    let scope = Scope::new("transfers/leaky");
    let (mut leaky, mut other) = (
        server.engine_driven(1, &scope),
        server.engine_driven(2, &scope),
    );
    let mut granted = Vec::new();
    for seed in 1.. {
        // Of 64 MiB, 1 MiB at a time.
        let prompt = prompt(seed, 128);
        let key = scope.worker_key(0, &prompt, range(0..128), "w");
        granted.push(reserve(&mut leaky, &key).len());
        server.pass(Duration::from_secs(61));
        // As a worker does that lives.
        assert!(leaky.connection().ping(Some(InstanceId(1))).unwrap());
        assert!(other.connection().ping(Some(InstanceId(2))).unwrap());
        if granted.last() == Some(&0) {
            break;
        }
    }
    // Seven eighths of a quarter are its share.
    assert_eq!(granted.len(), 15);
    let (prompt, len) = (prompt(1000, 128), other.chunk_bytes());
    let stored = other.store(&prompt, range(0..128), "s", |chunk| bytes(1, chunk, len));
    assert_eq!(stored.unwrap().chunks.len(), 128);
    assert_eq!(other.lookup(&prompt, "r").unwrap(), 128);
    // What it has kept comes back when it registers again, as another worker.
    let mut spec = engine_driven(1, &scope);
    spec.hidden = 32;
    let mut again = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    server.pass(Duration::from_secs(61));
    assert_eq!(server.readings().staged_bytes, 0);
    let key = scope.worker_key(0, &prompt, range(0..128), "x");
    assert_eq!(reserve(&mut again, &key).len(), 128);
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn new_instance_ids_do_not_reset_staging_share() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "60"]);
    let scope = Scope::new("transfers/renewing");
    let mut granted = Vec::new();
    for seed in 1..40u32 {
        // Of 64 MiB, 1 MiB at a time, each under an id of its own that leaves.
        let mut leaky = server.engine_driven(i64::from(seed), &scope);
        let prompt = prompt(seed, 128);
        let key = scope.worker_key(0, &prompt, range(0..128), "w");
        granted.push(reserve(&mut leaky, &key).len());
        leaky.close().unwrap();
    }
    // Seven eighths of a quarter are its share; then each registration has its first object.
    assert_eq!(granted[..14], [128; 14]);
    assert_eq!(granted[14..], [1; 25]);
    // Other workers of the model get on, and so does this one when the memory has come back.
    let prompt = prompt(1000, 128);
    let mut again = server.engine_driven(100, &scope);
    let key = scope.worker_key(0, &prompt, range(0..128), "w");
    assert_eq!(reserve(&mut again, &key).len(), 1);
    server.pass(Duration::from_secs(61));
    let key = scope.worker_key(0, &prompt, range(0..128), "x");
    assert_eq!(reserve(&mut again, &key).len(), 128);
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn replica_of_a_departed_impostor_stores_and_retrieves() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("staging/impostor");
    let mut impostor = server.engine_driven(1, &scope);
    let mut replica = server.engine_driven(2, &scope);
    // 20 MiB of 64, all of it retrieved by an instance that leaves, and then its share of the stores.
    stores_and_finds(&mut replica, 1000..1040);
    for seed in 1000..1040 {
        assert_eq!(impostor.lookup(&prompt(seed, 64), "r").unwrap(), 64);
        let prompt = prompt(seed, 64);
        let key = scope.worker_key(0, &prompt, range(0..64), "r");
        let answer = impostor.connection().prepare_retrieve(&key, InstanceId(1));
        assert_eq!(answer.unwrap().success, seed < 1032);
        impostor.connection().end_session("r").unwrap();
    }
    assert_eq!(hog(impostor.connection(), 1, &scope, 0..64), 14 * 128);
    impostor.close().unwrap();
    let len = replica.chunk_bytes();
    for seed in 0..4 {
        let one = prompt(5000 + seed, 1);
        let stored = replica.store(&one, range(0..1), "s", |chunk| bytes(1, chunk, len));
        assert_eq!(stored.unwrap().chunks.len(), 1);
    }
    let all = prompt(1000, 64);
    assert_eq!(replica.lookup(&all, "l").unwrap(), 64);
    let read = replica.retrieve(&all, range(0..64), "l", |_, _| {});
    assert_eq!(read.unwrap().unwrap().chunks, 64);
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn worker_that_never_commits_holds_at_most_a_quarter() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "60"]);
    let scope = Scope::new("staging/hog");
    let mut leaky = server.engine_driven(1, &scope);
    let mut other = server.engine_driven(2, &scope);
    let mut tenant = server.engine_driven(3, &Scope::new("staging/tenant").with_salt("t"));
    // 64 MiB of objects: 56 MiB without a salt, then 8 MiB of the tenant.
    stores_and_finds(&mut other, 1000..1112);
    stores_and_finds(&mut tenant, 2000..2016);
    let granted = hog(leaky.connection(), 1, &scope, 0..256);
    assert_eq!(granted, 14 * 128, "seven eighths of a quarter");
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
    assert_eq!(
        server.engine().admin().status(true).withheld_bytes,
        14 << 20
    );
    server.assert_sound();
}

/// Starts a server that goes on with the L1 of the one before, or `restore` is `off`.
fn start_kept(base: &Path, pool: &str, restore: &str, write_ttl: &str) -> TestServer {
    let state = ["--state-dir", base.to_str().unwrap()];
    let kept = ["--shm-name", pool, "--l1-restore", restore];
    let instance = ["--instance-id", "a", "--l1-write-ttl-seconds", write_ttl];
    TestServer::start(&[&state[..], &kept, &instance].concat())
}

/// Servers start more often than every two write TTLs.
#[test]
fn restarts_do_not_prolong_what_is_withheld() {
    let base = tempfile::tempdir().unwrap();
    let pool = format!("kvtier_prolonged_{}", std::process::id());
    let start = |restore| start_kept(base.path(), &pool, restore, "1");
    let server = start("on");
    let scope = Scope::new("staging/prolonged");
    // It maps the pool until the end.
    let mut leaky = server.engine_driven(1, &scope);
    assert!(hog(leaky.connection(), 1, &scope, 0..1) > 0);
    drop(server);
    wait_until("the end of what is withheld", || {
        let server = start("on");
        server.pass(Duration::ZERO);
        server.readings().withheld_bytes == 0
    });
    drop(start("off"));
}

/// Each start finds what the workers of all servers before were granted and did not commit.
// proves: docs/operate.md#l1-after-a-restart
#[test]
fn restarts_withhold_at_most_a_quarter() {
    let base = tempfile::tempdir().unwrap();
    let pool = format!("kvtier_withheld_{}", std::process::id());
    let start = |restore| start_kept(base.path(), &pool, restore, "60");
    let mut workers = Vec::new();
    let mut withheld = Vec::new();
    let mut server = start("on");
    for round in 0..5 {
        // Of 16 MiB: the first one's share is 14 of them, then that of others is 7 eighths of the rest.
        let scope = Scope::new("staging/restarts").with_salt(format!("t{}", round % 2));
        let mut leaky = server.engine_driven(1 + round, &scope);
        hog(leaky.connection(), 1 + round, &scope, 0..32);
        workers.push(leaky);
        drop(server);
        server = start("on");
        server.pass(Duration::ZERO);
        withheld.push(server.readings().withheld_bytes);
        let status = server.engine().admin().status(true);
        let l1 = &status.storage_manager.l1_manager;
        assert_eq!(l1.staging_uncommitted_bytes, status.withheld_bytes);
    }
    // One chunk per instance that has nothing of its own, as without a restart.
    let chunks = withheld.iter().map(|bytes| bytes / (8 << 10));
    let chunks: Vec<_> = chunks.collect();
    assert_eq!(chunks, [1792, 1793, 1794, 1795, 1796]);
    // Others have what is left of the quarter.
    let other = Scope::new("staging/other").with_salt("other");
    let mut other = server.engine_driven(100, &other);
    stores_and_finds(&mut other, 1000..1010);
    // Two write TTLs after the grants; clients still map the pool.
    server.pass(Duration::from_secs(110));
    assert!(other.connection().ping(Some(InstanceId(100))).unwrap());
    assert_eq!(server.readings().withheld_bytes, withheld[4]);
    let warnings = server.engine().admin().warnings();
    assert!(warnings.iter().any(|it| it.contains("an eighth of L1")));
    server.pass(Duration::from_secs(11));
    assert!(server.engine().admin().warnings().is_empty());
    assert_eq!(server.readings().withheld_bytes, 0);
    assert_eq!(server.readings().staged_bytes, 0);
    server.assert_sound();
    drop((server, workers, other));
    drop(start("off"));
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn thousand_instances_stage_at_most_a_quarter() {
    let server = TestServer::start(&[]);
    let mut tenant = server.engine_driven(5000, &Scope::new("staging/tenant").with_salt("t"));
    stores_and_finds(&mut tenant, 2000..2096);
    let mut connection = server.connect();
    for instance in 0..1000 {
        let scope = Scope::new(format!("staging/{instance}"));
        connection
            .register_engine_driven(context(instance, &scope))
            .unwrap();
        hog(&mut connection, instance, &scope, 1..2);
    }
    let staged = server.readings().staged_bytes;
    assert!((14 << 20..=STAGING_LIMIT).contains(&staged), "{staged}");
    assert_eq!(server.readings().evicted_objects, 0);
    for seed in 2000..2096 {
        assert_eq!(tenant.lookup(&prompt(seed, 64), "l").unwrap(), 64);
    }
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn tenant_stages_no_more_than_soft_limit() {
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

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn small_aligned_objects_hold_at_most_a_quarter() {
    // 32 units of 2 MiB; an object of 8 KiB takes one.
    let server = TestServer::start(&["--l1-align-bytes", "2097152"]);
    let scope = Scope::new("staging/small");
    let mut leaky = server.engine_driven(1, &scope);
    let mut other = server.engine_driven(2, &scope);
    assert_eq!(hog(leaky.connection(), 1, &scope, 0..64), 7);
    assert_eq!(server.readings().used_bytes, 14 << 20);
    // The share of a pickled store is in the same bytes.
    assert!(!commit_pickled(&mut leaky, &scope));
    assert!(commit_pickled(&mut other, &scope));
}

/// Stores two chunks pickled.
fn commit_pickled(worker: &mut EngineDrivenWorker, scope: &Scope) -> bool {
    commit_many_pickled(worker, scope, 2)
}

/// Stores a prompt of this many chunks pickled.
fn commit_many_pickled(worker: &mut EngineDrivenWorker, scope: &Scope, chunks: u64) -> bool {
    let (prompt, len) = (prompt(1000, chunks as usize), worker.chunk_bytes());
    let key = scope.worker_key(0, &prompt, range(0..chunks), "p");
    let chunks: Vec<_> = (0..chunks).map(|chunk| bytes(1, chunk, len)).collect();
    let tensors: Vec<_> = chunks
        .iter()
        .map(|_| pickle::TensorToWrite {
            dtype: kvtier_client::proto::descriptor::Dtype::BFloat16,
            shape: &[2, 2, 16, 64],
        })
        .collect();
    let data = pickle::write_tensors(&tensors, |index, out| {
        out.extend_from_slice(&chunks[index]);
        Ok::<(), pickle::WriteError>(())
    });
    let (instance, data) = (worker.spec().instance, data.unwrap());
    let stored = worker.connection().commit_store(&key, instance, &data);
    stored.unwrap()
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn pickled_store_counts_in_worker_share() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("staging/pickled");
    let mut leaky = server.engine_driven(1, &scope);
    let mut other = server.engine_driven(2, &scope);
    assert_eq!(hog(leaky.connection(), 1, &scope, 0..64), 14 * 128);
    assert!(!commit_pickled(&mut leaky, &scope));
    assert!(commit_pickled(&mut other, &scope));
}

/// A worker's share of an L1 of 64 MiB is 14 MiB, and the prompt takes 31.
#[test]
fn pickled_store_larger_than_its_share_is_stored_at_once() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("staging/large");
    let mut worker = server.engine_driven(1, &scope);
    assert!(commit_many_pickled(&mut worker, &scope, 4000));
    assert_eq!(worker.lookup(&prompt(1000, 4000), "l").unwrap(), 4000);
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn uncommitted_retrieves_do_not_block_all_eviction() {
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

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn uncommitted_retrieve_ends_after_two_write_ttls() {
    let server = TestServer::start(&["--l1-write-ttl-seconds", "60"]);
    let scope = Scope::new("staging/overdue");
    let mut leaky = server.engine_driven(1, &scope);
    // 40 MiB of 64, in one prompt: the first retrieve of an instance may be as large as a prompt.
    let (all, len) = (prompt(1, 5120), leaky.chunk_bytes());
    for first in (0..5120).step_by(1024) {
        let chunks = range(first..first + 1024);
        let stored = leaky.store(&all, chunks, "s", |chunk| bytes(1, chunk, len));
        assert_eq!(stored.unwrap().chunks.len(), 1024);
    }
    let key = scope.worker_key(0, &all, range(0..5120), "r");
    let instance = InstanceId(1);
    for commits_late in [true, false] {
        assert_eq!(leaky.lookup(&all, "r").unwrap(), 5120);
        let connection = leaky.connection();
        assert!(connection.prepare_retrieve(&key, instance).unwrap().success);
        connection.end_session("r").unwrap();
        server.pass(Duration::from_secs(61));
        assert!(connection.ping(Some(instance)).unwrap());
        assert_eq!(server.readings().leased_objects, 5120);
        if commits_late {
            assert!(connection.commit_retrieve(&key, instance).unwrap());
            assert_eq!(server.readings().leased_objects, 0);
        }
    }
    server.pass(Duration::from_secs(61));
    assert_eq!(server.readings().leased_objects, 0);
    let connection = leaky.connection();
    assert!(!connection.commit_retrieve(&key, instance).unwrap());
    server.assert_sound();
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn object_larger_than_a_quarter_is_refused() {
    let server = TestServer::start(&[]);
    let mut other = server.engine_driven(2, &Scope::new("staging/ordinary"));
    stores_and_finds(&mut other, 0..120);
    // 2 x 2 x 16 tokens x 131,072 values x 2 bytes are 16 MiB, and half as much again is more than a quarter.
    let scope = Scope::new("staging/huge");
    let mut connection = server.connect();
    for (instance, hidden_dim_size, granted) in [(3, 131_072 * 3 / 2, 0), (4, 131_072, 1)] {
        let context = EngineDrivenContext {
            hidden_dim_size,
            ..context(instance, &scope)
        };
        connection.register_engine_driven(context).unwrap();
        assert_eq!(hog(&mut connection, instance, &scope, 0..2), granted);
        let evicted = server.readings().evicted_objects;
        assert_eq!(evicted > 0, granted > 0, "{evicted}");
    }
}

// proves: docs/troubleshoot.md#uncommitted-stores
#[test]
fn background_pass_evicts_nothing_for_staged_bytes() {
    let server = TestServer::start(&[
        "--eviction-trigger-watermark",
        "0.8",
        "--eviction-ratio",
        "0.2",
    ]);
    let scope = Scope::new("staging/watermark");
    let mut leaky = server.engine_driven(1, &scope);
    let mut other = server.engine_driven(2, &scope);
    // 39 MiB beside 14 MiB: more than 0.8 of the 64, less than 0.8 of the 50 that are left.
    assert_eq!(hog(leaky.connection(), 1, &scope, 0..64), 14 * 128);
    stores_and_finds(&mut other, 1000..1078);
    server.pass(Duration::from_secs(1));
    assert_eq!(server.readings().evicted_objects, 0);
    stores_and_finds(&mut other, 2000..2004);
    server.pass(Duration::from_secs(1));
    assert!(server.readings().evicted_objects > 0);
}
