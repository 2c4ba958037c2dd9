//! The tiers below L1: what is stored comes back from them, whatever happens to L1, to them or to the server.

use std::path::Path;
use std::time::{Duration, Instant};

use kvtier_client::proto::request::{JobRef, Request, Seconds};
use kvtier_client::{Connection, EngineDrivenWorker, InstanceId, Prompt, Scope};

use crate::http::request;
use crate::metrics::parse_metrics;
use crate::support::{
    PATIENCE, Steps as _, TestServer, bytes, given_stored_on, prompt, range, wait_until, whole,
};

/// A server with these tiers.
pub fn with_tiers(adapters: &[&str], flags: &[&str]) -> TestServer {
    let mut all = vec!["--l2-min-free-gb", "0"];
    if adapters.contains(&STALLED) {
        all.extend(["--l2-drain-timeout-seconds", "0"]);
    }
    for adapter in adapters {
        all.extend(["--l2-adapter", adapter]);
    }
    all.extend(flags);
    TestServer::start(&all)
}

pub fn fs(directory: &Path) -> String {
    format!(r#"{{"type":"fs","base_path":"{}"}}"#, directory.display())
}

/// A server with one tier in a directory.
fn with_fs(directory: &Path, flags: &[&str]) -> TestServer {
    with_tiers(&[&fs(directory)], flags)
}

/// A tier that takes hours for one object.
const STALLED: &str = r#"{"type":"mock","max_size_gb":1,"mock_bandwidth_gb":1e-9,"store_timeout_ms":86400000,"load_timeout_ms":86400000}"#;

/// Waits until nothing waits to be stored in a tier.
pub fn settle(server: &TestServer) {
    wait_until("a tier with nothing to store", || {
        server.readings().l2_queued_bytes == 0
    });
}

pub fn store(worker: &mut EngineDrivenWorker, prompt: &Prompt, seed: u64) {
    worker.stored(prompt, whole(prompt), seed);
}

/// Hits of a lookup, waited for in the server.
pub fn hits(connection: &mut Connection, scope: &Scope, prompt: &Prompt, request: &str) -> u64 {
    let all = 0..prompt.len() as u64;
    connection
        .lookup(&scope.scheduler_key(prompt, all, request))
        .unwrap();
    connection
        .wait_prefetch_status(request, PATIENCE)
        .unwrap()
        .expect("a result within the deadlines of the tiers")
}

fn assert_reads(worker: &mut EngineDrivenWorker, prompt: &Prompt, seed: u64, request: &str) {
    worker.assert_reads(prompt, whole(prompt), request, seed);
}

/// A server with a tier in this directory, a scope, a worker of it, and a prompt that is in the tier, not in L1.
fn given_in_tier(
    directory: &Path,
    model: &str,
    chunks: usize,
) -> (TestServer, Scope, EngineDrivenWorker, Prompt) {
    let given = given_stored_on(with_fs(directory, &[]), Scope::new(model), chunks);
    settle(&given.0);
    given.0.engine().admin().clear(true);
    given
}

/// Stores chunks, and restarts the server.
fn given_restarted(
    directory: &Path,
    scope: Scope,
    chunks: usize,
) -> (TestServer, Scope, EngineDrivenWorker, Prompt) {
    let (server, scope, worker, prompt) = given_stored_on(with_fs(directory, &[]), scope, chunks);
    settle(&server);
    assert_eq!(server.readings().tiers[0].stored_objects, chunks as u64);
    drop((worker, server));
    let server = with_fs(directory, &[]);
    let worker = server.engine_driven(1, &scope);
    (server, scope, worker, prompt)
}

#[test]
fn stored_objects_return_after_restart() {
    let directory = tempfile::tempdir().unwrap();
    let (server, scope, mut worker, prompt) =
        given_restarted(directory.path(), Scope::new("l2/restart").with_salt("t"), 8);
    assert_eq!(hits(worker.connection(), &scope, &prompt, "r"), 8);
    assert_reads(&mut worker, &prompt, 1, "r");
    worker.connection().end_session("r").unwrap();
    let readings = server.readings();
    assert_eq!((readings.leased_objects, readings.staged_bytes), (0, 0));
    assert_eq!(readings.tiers[0].loaded_objects, 8);
    assert_eq!(readings.tiers[0].unverified, 0);
    // It is in L1 now.
    assert_eq!(hits(worker.connection(), &scope, &prompt, "again"), 8);
    assert_eq!(server.readings().tiers[0].loaded_objects, 8);
    // No other tenant has it.
    let stranger = scope.clone().with_salt("u");
    assert_eq!(hits(worker.connection(), &stranger, &prompt, "u"), 0);
    server.assert_sound();
}

#[test]
fn tier_hits_count_once_as_found() {
    let directory = tempfile::tempdir().unwrap();
    let (server, scope, mut worker, prompt) =
        given_restarted(directory.path(), Scope::new("l2/counted").with_salt("t"), 8);
    for (request_id, lookups) in [("first", 1), ("second", 2)] {
        assert_eq!(hits(worker.connection(), &scope, &prompt, request_id), 8);
        let quota = request(&server, "GET", "/quota/t", "").2;
        let quota: serde_json::Value = serde_json::from_str(&quota).unwrap();
        let counts = (&quota["requested_chunks"], &quota["hit_chunks"]);
        assert_eq!(
            counts,
            (&(8 * lookups).into(), &(8 * lookups).into()),
            "{quota}"
        );
        worker.connection().end_session(request_id).unwrap();
    }
    server.assert_sound();
}

#[test]
fn queued_stores_finish_before_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("l2/end");
    let prompt = prompt(1, 200);
    {
        let server = with_fs(directory.path(), &[]);
        let mut worker = server.engine_driven(1, &scope);
        store(&mut worker, &prompt, 1);
    }
    let server = with_fs(directory.path(), &[]);
    let mut worker = server.engine_driven(1, &scope);
    assert_eq!(hits(worker.connection(), &scope, &prompt, "r"), 200);
    assert_reads(&mut worker, &prompt, 1, "r");
}

#[test]
fn a_prefix_is_served_from_both_tiers_together() {
    let directory = tempfile::tempdir().unwrap();
    let (server, scope, mut worker, prompt) =
        given_restarted(directory.path(), Scope::new("l2/mixed"), 6);
    let len = worker.chunk_bytes();
    // Chunks 0, 1 and 4 are in L1.
    for chunks in [0..2, 4..5] {
        let first = chunks.start;
        worker
            .store(&prompt, range(chunks), "s", |chunk| {
                bytes(1, first + chunk, len)
            })
            .unwrap();
    }
    assert_eq!(hits(worker.connection(), &scope, &prompt, "r"), 6);
    assert_reads(&mut worker, &prompt, 1, "r");
    assert_eq!(server.readings().tiers[0].loaded_objects, 3);
}

#[test]
fn a_gap_ends_the_prefix() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("l2/gap");
    let prompt = prompt(1, 4);
    let server = with_fs(directory.path(), &[]);
    let mut worker = server.engine_driven(1, &scope);
    let len = worker.chunk_bytes();
    for chunks in [0..1, 2..4] {
        worker
            .store(&prompt, range(chunks), "s", |chunk| bytes(1, chunk, len))
            .unwrap();
    }
    settle(&server);
    assert!(server.engine().admin().clear(true).objects == 3);
    assert_eq!(hits(worker.connection(), &scope, &prompt, "r"), 1);
    assert_eq!(server.readings().tiers[0].loaded_objects, 1);
}

#[test]
fn pending_result_is_none_then_returned_once() {
    let directory = tempfile::tempdir().unwrap();
    let (_server, _, mut worker, prompt) = given_in_tier(directory.path(), "l2/pending", 3);
    assert_eq!(worker.lookup(&prompt, "polled").unwrap(), 3);
    assert_reads(&mut worker, &prompt, 1, "polled");
    let connection = worker.connection();
    assert_eq!(connection.query_prefetch_status("polled").unwrap(), Some(0));
    let waited = connection.wait_prefetch_status("polled", Duration::from_secs(1));
    assert_eq!(waited.unwrap(), Some(0));
}

// proves: docs/troubleshoot.md#second-tiers
#[test]
fn early_end_of_request_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (server, scope, mut worker, prompt) =
        given_stored_on(with_fs(directory.path(), &[]), Scope::new("l2/early"), 64);
    settle(&server);
    for round in 0..20 {
        server.engine().admin().clear(true);
        let request = format!("r{round}");
        let all = 0..prompt.len() as u64;
        let connection = worker.connection();
        connection
            .lookup(&scope.scheduler_key(&prompt, all, &request))
            .unwrap();
        connection.end_session(&request).unwrap();
    }
    let started = Instant::now();
    loop {
        let readings = server.readings();
        if (
            readings.l2_loading_objects,
            readings.leased_objects,
            readings.staged_bytes,
        ) == (0, 0, 0)
        {
            break;
        }
        assert!(started.elapsed() < PATIENCE, "{readings:?}");
        std::thread::yield_now();
    }
    server.assert_sound();
}

// proves: docs/troubleshoot.md#second-tiers
#[test]
fn cold_prefix_is_loaded_once_for_all_lookups() {
    let directory = tempfile::tempdir().unwrap();
    let (server, scope, mut worker, prompt) = given_in_tier(directory.path(), "l2/flights", 100);
    let mut schedulers: Vec<_> = (0..4).map(|_| server.connect()).collect();
    for (number, scheduler) in schedulers.iter_mut().enumerate() {
        let all = 0..prompt.len() as u64;
        let key = format!("r{number}");
        scheduler
            .lookup(&scope.scheduler_key(&prompt, all, &key))
            .unwrap();
    }
    for (number, scheduler) in schedulers.iter_mut().enumerate() {
        let hit = scheduler.wait_prefetch_status(&format!("r{number}"), PATIENCE);
        assert_eq!(hit.unwrap(), Some(100));
    }
    assert_eq!(server.readings().tiers[0].loaded_objects, 100);
    assert_reads(&mut worker, &prompt, 1, "r2");
}

#[test]
fn loaded_objects_end_with_request_under_policy() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("l2/temporary");
    let prompt = prompt(1, 5);
    for (policy, left) in [("default", 0), ("retain", 5)] {
        let server = with_fs(directory.path(), &["--l2-prefetch-policy", policy]);
        let mut worker = server.engine_driven(1, &scope);
        store(&mut worker, &prompt, 1);
        settle(&server);
        server.engine().admin().clear(true);
        assert_eq!(hits(worker.connection(), &scope, &prompt, "r"), 5);
        assert_reads(&mut worker, &prompt, 1, "r");
        worker.connection().end_session("r").unwrap();
        assert_eq!(server.readings().objects, left, "{policy}");
    }
}

#[test]
fn stored_objects_leave_l1_under_policy() {
    let directory = tempfile::tempdir().unwrap();
    let (server, scope, mut worker, prompt) = given_stored_on(
        with_fs(directory.path(), &["--l2-store-policy", "skip_l1"]),
        Scope::new("l2/skip"),
        5,
    );
    settle(&server);
    assert_eq!(server.readings().objects, 0);
    assert_eq!(hits(worker.connection(), &scope, &prompt, "r"), 5);
    assert_reads(&mut worker, &prompt, 1, "r");
    worker
        .connection()
        .unregister_engine_driven(InstanceId(1))
        .unwrap();
    server.assert_sound();
}

#[test]
fn prompt_larger_than_l1_is_stored_completely() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("l2/pressure");
    // 16 MiB of L1, twice as much of objects.
    let server = with_fs(directory.path(), &["--l1-size-gb", "0.015625"]);
    let mut worker = server.engine_driven(1, &scope);
    let prompts: Vec<_> = (0..16).map(|seed| prompt(seed, 256)).collect();
    for (seed, prompt) in (0..).zip(&prompts) {
        let len = worker.chunk_bytes();
        let all = 0..prompt.len() as u64;
        let stored = worker.store(prompt, all, "s", |chunk| bytes(seed, chunk, len));
        assert_eq!(stored.unwrap().chunks.len(), 256);
        settle(&server);
    }
    assert_eq!(server.readings().l2_dropped_objects, 0);
    for (seed, prompt) in (0..).zip(&prompts) {
        let request = format!("r{seed}");
        assert_eq!(hits(worker.connection(), &scope, prompt, &request), 256);
        assert_reads(&mut worker, prompt, seed, &request);
        worker.connection().end_session(&request).unwrap();
    }
    server.assert_sound();
}

// proves: docs/troubleshoot.md#second-tiers
#[test]
fn l1_hits_do_not_wait_for_silent_tier() {
    let scope = Scope::new("l2/stalled");
    let server = with_tiers(&[STALLED], &["--l2-prefetch-max-in-flight", "1"]);
    let mut worker = server.engine_driven(1, &scope);
    let (there, not_there) = (prompt(1, 8), prompt(2, 8));
    store(&mut worker, &there, 1);
    for round in 0..50 {
        let all = 0..there.len() as u64;
        let request = format!("r{round}");
        let connection = worker.connection();
        connection
            .lookup(&scope.scheduler_key(&there, all.clone(), &request))
            .unwrap();
        // At once, not when asked again.
        assert_eq!(connection.query_prefetch_status(&request).unwrap(), Some(8));
        // Others wait for the tier meanwhile; this one's tier has nothing.
        let key = scope.scheduler_key(&not_there, all, "cold");
        connection.lookup(&key).unwrap();
    }
    assert_eq!(server.readings().l2_dropped_objects, 0);
    server.assert_sound();
}

// proves: docs/troubleshoot.md#second-tiers
#[test]
fn endless_load_ends_at_deadline_with_l1_hits() {
    let directory = tempfile::tempdir().unwrap();
    let tiers = [STALLED, &fs(directory.path())];
    let (server, scope, mut worker, prompt) = given_stored_on(
        with_tiers(&tiers, &["--l2-load-timeout-seconds", "5"]),
        Scope::new("l2/deadline"),
        4,
    );
    // The other tier stores by itself.
    wait_until("the objects in the other tier", || {
        server.readings().tiers[1].stored_objects >= 4
    });
    // The stalled tier holds its leases, so the objects stay; a forced clear hides them all the same.
    server.engine().admin().clear(true);
    assert_eq!(hits(worker.connection(), &scope, &prompt, "r"), 4);
    assert_reads(&mut worker, &prompt, 1, "r");
    assert!(server.readings().l2_queued_bytes > 0);
}

// proves: docs/operate.md#restart-and-upgrade
#[test]
fn stop_answers_request_waiting_for_tier() {
    let directory = tempfile::tempdir().unwrap();
    let stalling = format!(
        r#"{{"type":"fault_inject","load_timeout_ms":86400000,"faults":[{{"kind":"stall","operation":"load"}}],"inner":{}}}"#,
        fs(directory.path())
    );
    let flags = [
        "--l2-load-timeout-seconds",
        "3600",
        "--l2-drain-timeout-seconds",
        "0",
    ];
    let (server, scope, _worker, prompt) =
        given_stored_on(with_tiers(&[&stalling], &flags), Scope::new("l2/stop"), 4);
    settle(&server);
    server.engine().admin().clear(true);
    let mut connection = server.connect();
    let key = scope.scheduler_key(&prompt, 0..prompt.len() as u64, "r");
    connection.lookup(&key).unwrap();
    let wait: Request<'_, Vec<u32>> = Request::WaitPrefetchStatus {
        job: JobRef::Request("r"),
        timeout: Seconds::Whole(500),
    };
    let tickets: Vec<_> = (0..3).map(|_| connection.send(&wait).unwrap()).collect();
    // Answered after the server has read them.
    assert!(connection.ping(None).unwrap());
    assert_eq!(connection.query_prefetch_status("r").unwrap(), None);
    drop(server);
    for ticket in tickets {
        let reply = connection.receive(ticket).unwrap();
        assert_eq!(reply.payload(), None, "the result is not there yet");
    }
}

// proves: docs/operate.md#restart-and-upgrade
#[test]
fn port_is_freed_after_pool_name() {
    let scope = Scope::new("l2/successor");
    // As STALLED, but the stop waits for it a while.
    let slow = STALLED.replace("1e-9", "1e-8");
    let server = with_tiers(&[&slow], &["--l2-drain-timeout-seconds", "1"]);
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 4), 1);
    let address = server.endpoint().strip_prefix("tcp://").unwrap().to_owned();
    let pool = server.engine().config().shm_name.clone().unwrap();
    let pool = format!("/dev/shm/lmcache_l1_pool_{pool}");
    assert!(std::fs::exists(&pool).unwrap());
    let stopped = std::thread::spawn(move || drop(server));
    // A successor, trying again and again.
    while std::net::TcpListener::bind(&address).is_err() {
        std::thread::yield_now();
    }
    assert!(
        !std::fs::exists(&pool).unwrap(),
        "the pool outlives the port"
    );
    stopped.join().unwrap();
}

// proves: docs/troubleshoot.md#second-tiers
#[test]
fn next_tier_loads_after_a_failure() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let failing = format!(
        r#"{{"type":"fault_inject","rate":0.5,"seed":1,"inner":{}}}"#,
        fs(first.path())
    );
    let (server, scope, mut worker, prompt) = given_stored_on(
        with_tiers(&[&failing, &fs(second.path())], &[]),
        Scope::new("l2/fallback"),
        12,
    );
    settle(&server);
    server.engine().admin().clear(true);
    assert_eq!(hits(worker.connection(), &scope, &prompt, "r"), 12);
    assert_reads(&mut worker, &prompt, 1, "r");
    let readings = server.readings();
    let loaded: Vec<_> = readings
        .tiers
        .iter()
        .map(|tier| tier.loaded_objects)
        .collect();
    assert_eq!(loaded.iter().sum::<u64>(), 12);
    assert!(loaded.iter().all(|loaded| *loaded > 0), "{loaded:?}");
}

// proves: docs/troubleshoot.md#second-tiers
#[test]
fn unloadable_objects_shorten_the_prefix() {
    let directory = tempfile::tempdir().unwrap();
    let failing = format!(
        r#"{{"type":"fault_inject","gap_indices":[5],"inner":{}}}"#,
        fs(directory.path())
    );
    let (server, scope, mut worker, prompt) =
        given_stored_on(with_tiers(&[&failing], &[]), Scope::new("l2/lost"), 12);
    settle(&server);
    server.engine().admin().clear(true);
    assert_eq!(hits(worker.connection(), &scope, &prompt, "r"), 5);
    worker.connection().end_session("r").unwrap();
    let readings = server.readings();
    assert_eq!((readings.leased_objects, readings.staged_bytes), (0, 0));
    server.assert_sound();
}

// proves: docs/troubleshoot.md#second-tiers
#[test]
fn stores_beyond_queue_are_dropped_and_counted() {
    let scope = Scope::new("l2/queue");
    // 8 objects of 8 KiB.
    let queue = (64.0 / 1024.0 / 1024.0).to_string();
    let server = with_tiers(&[STALLED], &["--l2-store-queue-gb", &queue]);
    let mut worker = server.engine_driven(1, &scope);
    for seed in 1..=5 {
        store(&mut worker, &prompt(seed, 2), 1);
    }
    let readings = server.readings();
    assert_eq!(readings.l2_queued_bytes, 64 << 10);
    assert_eq!(readings.l2_dropped_objects, 2);
    // Everything is in L1 all the same.
    assert_eq!(worker.lookup(&prompt(5, 2), "r").unwrap(), 2);
}

/// A tier for some 63 objects of 8 KiB and a trailer.
pub fn small_tier(directory: &Path) -> String {
    format!(
        r#"{{"type":"fs","base_path":"{}","max_capacity_gb":{}}}"#,
        directory.display(),
        0.5 / 1024.0
    )
}

#[test]
fn full_tier_keeps_the_beginning_of_a_long_prompt() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("l2/long");
    let server = with_tiers(&[&small_tier(directory.path())], &[]);
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 20), 1);
    settle(&server);
    let (long, len) = (prompt(2, 120), worker.chunk_bytes());
    for first in (0..120).step_by(10) {
        let part = range(first..first + 10);
        let stored = worker.store(&long, part, "s", |chunk| bytes(2, chunk, len));
        assert_eq!(stored.unwrap().chunks.len(), 10);
        settle(&server);
    }
    server.engine().admin().clear(true);
    // All but the last part that came.
    let kept = hits(worker.connection(), &scope, &long, "long");
    assert!((50..=63).contains(&kept), "{kept}");
}

#[test]
fn full_tier_keeps_most_recently_used() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("l2/full");
    let adapter = small_tier(directory.path());
    let server = with_tiers(&[&adapter], &[]);
    let mut worker = server.engine_driven(1, &scope);
    for seed in 1..=6 {
        store(&mut worker, &prompt(seed, 20), seed.into());
        settle(&server);
        let tier = &server.readings().tiers[0];
        assert!(tier.used_bytes <= 512 << 10, "{}", tier.used_bytes);
        assert_eq!(tier.store_failures, []);
    }
    let evicted = server.readings().tiers[0].evicted_objects;
    assert!(evicted >= 57);
    let (_, _, text) = request(&server, "GET", "/metrics", "");
    let metrics = parse_metrics(&text);
    let by_tenant = "lmcache_mp_l2_evicted_objects_chunks_total";
    let by_tenant: Vec<_> = metrics
        .iter()
        .filter(|metric| metric.name == by_tenant)
        .collect();
    assert_eq!(by_tenant.len(), 1);
    assert_eq!(by_tenant[0].labels, r#"cache_salt="""#);
    assert!(by_tenant[0].value >= evicted as f64);
    server.engine().admin().clear(true);
    assert_eq!(hits(worker.connection(), &scope, &prompt(6, 20), "new"), 20);
    assert_reads(&mut worker, &prompt(6, 20), 6, "new");
    assert_eq!(hits(worker.connection(), &scope, &prompt(1, 20), "old"), 0);
    let files = std::fs::read_dir(directory.path()).unwrap();
    let bytes: u64 = files
        .map(|file| file.unwrap().metadata().unwrap())
        .filter(std::fs::Metadata::is_file)
        .map(|file| file.len())
        .sum();
    assert!(bytes <= 512 << 10, "{bytes}");
}
