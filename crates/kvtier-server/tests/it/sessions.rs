//! Requests and their lookups: reused ids, tenants, layouts, readers, and what a lookup lets a worker read.

use kvtier_client::proto::descriptor::Dtype;
use kvtier_client::{EngineDrivenSpec, EngineDrivenWorker, InstanceId, Scope};

use crate::l2::{fs, hits, settle, with_tiers};
use crate::log::Log;
use crate::support::{Steps as _, TestServer, bytes, engine_driven, given_stored, prompt, range};

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
#[test]
fn reused_request_id_never_stores_under_old_hashes() {
    let scope = Scope::new("sessions/reused");
    let server = TestServer::start(&[]);
    let mut worker = server.engine_driven(1, &scope);
    let len = worker.chunk_bytes();
    let (first, second) = (prompt(1, 2), prompt(2, 2));
    // The same id without an end in between, as an engine does that aborts a request before it loads.
    worker
        .store(&first, range(0..2), "same", |chunk| bytes(1, chunk, len))
        .unwrap();
    worker
        .store(&second, range(0..2), "same", |chunk| bytes(2, chunk, len))
        .unwrap();
    for (seed, prompt) in [(1, &first), (2, &second)] {
        let request = format!("read {seed}");
        assert_eq!(worker.lookup(prompt, &request).unwrap(), 2);
        worker.assert_reads(prompt, 0..2, &request, seed);
    }
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
#[test]
fn a_lookup_allows_no_read_of_other_tokens() {
    let scope = Scope::new("sessions/other_tokens");
    let server = TestServer::start(&[]);
    let mut worker = server.engine_driven(1, &scope);
    let (first, second) = (prompt(1, 1), prompt(2, 1));
    worker.stored(&first, 0..1, 1);
    worker.stored(&second, 0..1, 2);
    assert_eq!(worker.lookup(&first, "r").unwrap(), 1);
    assert_eq!(worker.retrieved(&second, 0..1, "r"), None);
    worker.assert_reads(&first, 0..1, "r", 1);
}

#[test]
fn answered_store_is_visible_to_every_connection() {
    let scope = Scope::new("sessions/visible");
    let server = TestServer::start(&[]);
    let mut worker = server.engine_driven(1, &scope);
    let mut pages = server.lmcache_driven(2, &Scope::new("sessions/visible/pages"));
    let len = worker.chunk_bytes();
    let mut others: Vec<_> = (0..4).map(|_| server.connect()).collect();
    for round in 0..50 {
        let prompt = prompt(round, 1);
        let request = format!("r{round}");
        worker
            .store(&prompt, range(0..1), &request, |_| bytes(1, 0, len))
            .unwrap();
        assert!(
            pages
                .store(&prompt, range(0..1), &request, &[1, 2, 3, 4])
                .unwrap()
        );
        for (number, other) in others.iter_mut().enumerate() {
            for scope in [&scope, &pages.spec().scope.clone()] {
                let request = format!("{request} {number} {}", scope.model_name);
                assert_eq!(
                    other
                        .lookup_hits(&scope.scheduler_key(&prompt, range(0..1), &request))
                        .unwrap(),
                    1
                );
            }
        }
    }
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
#[test]
fn tenants_with_equal_prompts_share_nothing() {
    let model = "sessions/tenants";
    let server = TestServer::start(&[]);
    let mut tenants: Vec<_> = ["", "alice", "bob"]
        .into_iter()
        .zip(1..)
        .map(|(salt, instance)| server.engine_driven(instance, &Scope::new(model).with_salt(salt)))
        .collect();
    let prompt = prompt(1, 2);
    let len = tenants[0].chunk_bytes();
    for (number, stored) in (0..).zip(0..3) {
        for tenant in &mut tenants[stored..] {
            assert_eq!(tenant.lookup(&prompt, "same").unwrap(), 0);
        }
        let sent = tenants[stored]
            .store(&prompt, range(0..2), "same", |chunk| {
                bytes(number, chunk, len)
            })
            .unwrap();
        assert_eq!(sent.chunks, [0, 1]);
    }
    for (number, tenant) in (0..).zip(&mut tenants) {
        assert_eq!(tenant.lookup(&prompt, "same").unwrap(), 2);
        tenant.assert_reads(&prompt, 0..2, "same", number);
    }
}

#[test]
fn equal_request_ids_of_tenants_are_separate() {
    let server = TestServer::start(&[]);
    let alice = Scope::new("sessions/ids").with_salt("alice");
    let bob = Scope::new("sessions/ids").with_salt("bob");
    let (mut of_alice, mut of_bob) = (
        server.engine_driven(1, &alice),
        server.engine_driven(2, &bob),
    );
    let prompt = prompt(1, 2);
    of_alice.stored(&prompt, 0..2, 1);
    of_bob.stored(&prompt, 0..1, 2);

    // Both look up before either asks.
    of_alice
        .connection()
        .lookup(&alice.scheduler_key(&prompt, range(0..2), "0"))
        .unwrap();
    of_bob
        .connection()
        .lookup(&bob.scheduler_key(&prompt, range(0..2), "0"))
        .unwrap();
    assert_eq!(
        of_bob.connection().query_prefetch_status("0").unwrap(),
        Some(1)
    );
    assert_eq!(
        of_alice.connection().query_prefetch_status("0").unwrap(),
        Some(2)
    );
    // Bob frees and ends; what alice found stays hers.
    of_bob
        .connection()
        .free_lookup_locks(&bob.scheduler_key(&prompt, range(0..2), "0"))
        .unwrap();
    of_bob.connection().end_session("0").unwrap();
    assert_eq!(server.readings().leased_objects, 2);
    assert!(of_alice.retrieved(&prompt, 0..2, "0").is_some());
}

#[test]
fn empty_lookup_takes_nothing_of_equal_id() {
    let (server, scope, mut worker, prompt) = given_stored("sessions/nothing", 1);
    let (mut scheduler, mut stranger) = (server.connect(), server.connect());
    scheduler
        .lookup(&scope.scheduler_key(&prompt, range(0..1), "0"))
        .unwrap();
    // Another engine, with the same id: a model without workers, and a prompt shorter than a chunk.
    let strange = [
        (Scope::new("sessions/unserved"), range(0..1)),
        (scope.clone().with_salt("x"), 0..3),
    ];
    for (scope, tokens) in strange {
        assert_eq!(
            stranger
                .lookup_hits(&scope.scheduler_key(&prompt, tokens, "0"))
                .unwrap(),
            0
        );
        stranger.end_session("0").unwrap();
    }
    assert_eq!(server.readings().leased_objects, 1);
    assert_eq!(scheduler.query_prefetch_status("0").unwrap(), Some(1));
    assert!(worker.retrieved(&prompt, 0..1, "0").is_some());
}

// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn equal_requests_of_two_engines_do_not_meet() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("sessions/engines");
    let mut worker = server.engine_driven(1, &scope);
    let len = worker.chunk_bytes();
    let prompts = [prompt(1, 2), prompt(2, 1)];
    for (number, prompt) in (1..).zip(&prompts) {
        let all = 0..prompt.len() as u64;
        worker
            .store(prompt, all, "s", |chunk| bytes(number, chunk, len))
            .unwrap();
    }
    // Two replicas of one model count their requests from 0.
    let mut schedulers = [server.connect(), server.connect()];
    for (scheduler, prompt) in schedulers.iter_mut().zip(&prompts) {
        let all = 0..prompt.len() as u64;
        scheduler
            .lookup(&scope.scheduler_key(prompt, all, "0"))
            .unwrap();
    }
    for (scheduler, hits) in schedulers.iter_mut().zip([2, 1]) {
        assert_eq!(scheduler.query_prefetch_status("0").unwrap(), Some(hits));
    }
    assert_eq!(server.readings().leased_objects, 3);
    worker.assert_reads(&prompts[1], 0..1, "0", 2);
    schedulers[1].end_session("0").unwrap();
    assert_eq!(server.readings().leased_objects, 2);
    worker.assert_reads(&prompts[0], 0..2, "0", 1);
    assert_eq!(server.readings().leased_objects, 0);
}

#[test]
fn scheduler_takes_nothing_of_a_living_one() {
    let (server, scope, mut worker, prompt) = given_stored("sessions/alive", 1);
    let (mut scheduler, mut stranger) = (server.connect(), server.connect());
    let key = scope.scheduler_key(&prompt, range(0..1), "0");
    scheduler.lookup(&key).unwrap();
    assert!(stranger.ping(None).unwrap());
    assert!(scheduler.ping(None).unwrap());
    // Not one that reconnected: the other is still there.
    assert_eq!(stranger.query_prefetch_status("0").unwrap(), Some(0));
    stranger.free_lookup_locks(&key).unwrap();
    stranger.end_session("0").unwrap();
    assert_eq!(server.readings().leased_objects, 1);
    assert_eq!(scheduler.query_prefetch_status("0").unwrap(), Some(1));
    assert!(worker.retrieved(&prompt, 0..1, "0").is_some());
}

#[test]
fn refused_lookup_has_no_earlier_result() {
    let (server, scope, mut worker, prompt) = given_stored("sessions/refused", 1);
    let mut no_readers = scope.clone();
    no_readers.num_kv_readers = 0;
    let bad_name = Scope::new("sessions@refused");
    let scheduler = worker.connection();
    for bad in [no_readers, bad_name] {
        scheduler
            .lookup(&scope.scheduler_key(&prompt, range(0..1), "r"))
            .unwrap();
        scheduler
            .lookup(&bad.scheduler_key(&prompt, range(0..1), "r"))
            .unwrap();
        assert_eq!(scheduler.query_prefetch_status("r").unwrap(), Some(0));
        assert_eq!(server.readings().leased_objects, 0);
    }
}

#[test]
fn empty_lookup_replaces_earlier_result() {
    let (server, scope, mut worker, prompt) = given_stored("sessions/replaced", 2);
    let connection = worker.connection();
    connection
        .lookup(&scope.scheduler_key(&prompt, range(0..2), "r"))
        .unwrap();
    assert_eq!(
        connection
            .lookup_hits(&scope.scheduler_key(&prompt, 0..3, "r"))
            .unwrap(),
        0
    );
    assert_eq!(server.readings().leased_objects, 0);
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
// proves: docs/identity.md#the-fingerprint
#[test]
fn layouts_of_one_model_are_separate() {
    // As many bytes in another shape: a chunk of one would pass for one of the other.
    never_serve_each_other(|spec| (spec.layers, spec.hidden) = (4, 32));
}

/// Attention kernels for CPUs pack a page: its rows are not tokens.
// proves: docs/identity.md#the-fingerprint
#[test]
fn block_sizes_of_one_model_are_separate() {
    never_serve_each_other(|spec| spec.block_tokens /= 2);
}

/// A worker whose pages are untyped bytes.
fn of_bytes(server: &TestServer, instance: i64, scope: &Scope) -> EngineDrivenWorker {
    let mut spec = engine_driven(instance, scope);
    spec.dtype = Dtype::UInt8;
    EngineDrivenWorker::register(server.connect(), spec).unwrap()
}

/// Engines with fp8_e4m3 and with fp8_e5m2 register the same: only the operator knows which they are.
// proves: docs/identity.md#the-fingerprint
#[test]
fn named_kinds_of_bytes_share_no_object_of_tier() {
    let directory = tempfile::tempdir().unwrap();
    let (scope, prompt) = (Scope::new("sessions/kinds"), prompt(1, 2));
    for (kind, found) in [
        ("fp8_e4m3", 0),
        ("fp8_e4m3", 2),
        ("fp8_e5m2", 0),
        ("fp8_e5m2", 2),
    ] {
        let named = format!("sessions/kinds={kind}");
        let server = with_tiers(&[&fs(directory.path())], &["--byte-pages", &named]);
        let mut worker = of_bytes(&server, 1, &scope);
        let hits = hits(worker.connection(), &scope, &prompt, "r");
        assert_eq!(hits, found, "{kind}");
        if found == 0 {
            worker.stored(&prompt, 0..2, 1);
            settle(&server);
        }
    }
}

#[test]
fn unnamed_bytes_are_shared_with_warning() {
    let log = Log::listen();
    let server = TestServer::start(&["--byte-pages", "bytes/named=fp8"]);
    let unnamed = Scope::new("bytes/unnamed");
    let mut first = of_bytes(&server, 1, &unnamed);
    // Engines of one kind keep their hits.
    first.stored(&prompt(1, 2), 0..2, 1);
    let mut second = of_bytes(&server, 2, &unnamed);
    assert_eq!(second.lookup(&prompt(1, 2), "r").unwrap(), 2);
    let digest = "bytes/digest#0123456789abcdef";
    let quiet = ["bytes/named", digest, "bytes/typed"];
    let _quiet = [
        of_bytes(&server, 3, &Scope::new(quiet[0])),
        of_bytes(&server, 4, &Scope::new(quiet[1])),
        server.engine_driven(5, &Scope::new(quiet[2])),
    ];
    let log = log.text();
    let warned = |model: &str| {
        let of_model = log
            .lines()
            .filter(|line| line.contains(&format!("{model:?}")));
        of_model
            .filter(|line| line.contains("untyped bytes"))
            .count()
    };
    assert_eq!(warned("bytes/unnamed"), 2, "{log}");
    assert_eq!(quiet.map(warned), [0; 3], "{log}");
    assert!(log.contains("--byte-pages MODEL=DTYPE"), "{log}");
}

fn never_serve_each_other(change: fn(&mut EngineDrivenSpec)) {
    let server = TestServer::start(&[]);
    let scope = Scope::new("sessions/layouts");
    let prompt = prompt(1, 2);
    let mut small = server.engine_driven(1, &scope);
    let len = small.chunk_bytes();
    small.stored(&prompt, 0..2, 1);
    assert_eq!(small.lookup(&prompt, "b").unwrap(), 2);

    let mut spec = engine_driven(2, &scope);
    change(&mut spec);
    let mut other = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    assert_eq!(other.chunk_bytes(), len);
    assert_eq!(
        other.retrieved(&prompt, 0..2, "b"),
        None,
        "a lookup made for the other layout"
    );
    // The scheduler's engine is unknown, so a lookup promises only what both layouts have.
    assert_eq!(other.lookup(&prompt, "c").unwrap(), 0);
    assert_eq!(small.lookup(&prompt, "c2").unwrap(), 0);
    assert_eq!(other.stored(&prompt, 0..2, 2), [0, 1]);
    assert_eq!(other.lookup(&prompt, "d").unwrap(), 2);
    other.assert_reads(&prompt, 0..2, "d", 2);

    // Either reads its own.
    assert_eq!(small.lookup(&prompt, "d2").unwrap(), 2);
    small.assert_reads(&prompt, 0..2, "d2", 1);

    // The first one is back: what it stored is still what it stored.
    drop(other);
    let mut small = server.engine_driven(3, &scope);
    small
        .connection()
        .unregister_engine_driven(InstanceId(2))
        .unwrap();
    assert_eq!(small.lookup(&prompt, "e").unwrap(), 2);
    small.assert_reads(&prompt, 0..2, "e", 1);
}

#[test]
fn workers_of_one_model_may_differ_in_layout() {
    let server = TestServer::start(&[]);
    let mut scope = Scope::new("sessions/stages");
    scope.world_size = 2;
    let prompt = prompt(1, 2);
    // Two pipeline stages, of two and of three layers.
    let mut stages: Vec<_> = (0..2)
        .map(|worker| {
            let mut spec = engine_driven(i64::from(worker), &scope);
            (spec.worker_id, spec.layers) = (worker, 2 + u64::from(worker));
            EngineDrivenWorker::register(server.connect(), spec).unwrap()
        })
        .collect();
    for (number, stage) in (0..).zip(&mut stages) {
        stage.stored(&prompt, 0..2, number);
    }
    assert_eq!(stages[0].lookup(&prompt, "r").unwrap(), 2);
    for (number, stage) in (0..).zip(&mut stages) {
        stage.assert_reads(&prompt, 0..2, "r", number);
    }
    assert_eq!(server.readings().leased_objects, 0);
}

#[test]
fn objects_stay_leased_until_last_reader() {
    let server = TestServer::start(&[]);
    let mut scope = Scope::new("sessions/readers");
    scope.num_kv_readers = 3;
    let prompt = prompt(1, 2);
    let mut readers: Vec<_> = (1..=3)
        .map(|instance| server.engine_driven(instance, &scope))
        .collect();
    readers[0].stored(&prompt, 0..2, 1);
    assert_eq!(readers[0].lookup(&prompt, "r").unwrap(), 2);
    for (reader, left) in readers.iter_mut().zip([2, 2, 0]) {
        assert_eq!(server.readings().leased_objects, 2);
        reader.assert_reads(&prompt, 0..2, "r", 1);
        assert_eq!(server.readings().leased_objects, left);
    }
}

#[test]
fn partial_free_keeps_the_rest_retrievable() {
    let (server, scope, mut worker, prompt) = given_stored("sessions/freed", 4);
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 4);
    assert_eq!(server.readings().leased_objects, 4);
    // What the engine has in its own cache, which need not end with a chunk: the rest of that chunk is needed.
    worker
        .connection()
        .free_lookup_locks(&scope.scheduler_key(&prompt, 0..37, "r"))
        .unwrap();
    assert_eq!(server.readings().leased_objects, 2);
    assert_eq!(
        worker.retrieved(&prompt, 1..4, "r"),
        None,
        "freed chunks are not served"
    );
    worker.assert_reads(&prompt, 2..4, "r", 1);
    assert_eq!(server.readings().leased_objects, 0);
}

// proves: docs/troubleshoot.md#the-cache-is-full
#[test]
fn a_lookup_result_waits_and_is_returned_once() {
    let (server, scope, mut worker, prompt) = given_stored("sessions/once", 1);
    worker
        .connection()
        .lookup(&scope.scheduler_key(&prompt, range(0..1), "r"))
        .unwrap();
    // The scheduler's socket was replaced meanwhile.
    let mut scheduler = server.connect();
    assert_eq!(
        scheduler
            .wait_prefetch_status("r", std::time::Duration::from_secs(1))
            .unwrap(),
        Some(1)
    );
    assert_eq!(scheduler.query_prefetch_status("r").unwrap(), Some(0));
}

#[test]
fn reconnected_scheduler_releases_former_leases() {
    let (server, scope, mut worker, prompt) = given_stored("sessions/reconnected", 2);
    let key = |request| scope.scheduler_key(&prompt, range(0..2), request);
    for request in ["freed", "ended", "refused"] {
        worker.connection().lookup(&key(request)).unwrap();
    }
    assert_eq!(server.readings().unread_lookups, 3);
    let mut scheduler = server.connect();
    scheduler.free_lookup_locks(&key("freed")).unwrap();
    scheduler.end_session("ended").unwrap();
    let mut no_readers = scope.clone();
    no_readers.num_kv_readers = 0;
    scheduler
        .lookup(&no_readers.scheduler_key(&prompt, range(0..2), "refused"))
        .unwrap();
    assert_eq!(scheduler.query_prefetch_status("refused").unwrap(), Some(0));
    assert_eq!(server.readings().leased_objects, 0);
}

#[test]
fn returned_result_is_not_replaced_by_another() {
    let (server, scope, _worker, prompt) = given_stored("sessions/returned", 2);
    let (mut silent, mut speaking) = (server.connect(), server.connect());
    silent
        .lookup(&scope.scheduler_key(&prompt, range(0..2), "0"))
        .unwrap();
    let key = scope.scheduler_key(&prompt, range(0..1), "0");
    assert_eq!(speaking.lookup_hits(&key).unwrap(), 1);
    assert_eq!(speaking.query_prefetch_status("0").unwrap(), Some(0));
    assert_eq!(silent.query_prefetch_status("0").unwrap(), Some(2));
}

#[test]
fn retrieve_beyond_hits_misses_for_any_readers() {
    let server = TestServer::start(&[]);
    for readers in [1, 3] {
        let mut scope = Scope::new(format!("sessions/behind/{readers}"));
        scope.num_kv_readers = readers;
        let mut worker = server.engine_driven(readers, &scope);
        let prompt = prompt(1, 4);
        worker.stored(&prompt, 0..1, 1);
        for (request, stored) in [("hit", 1), ("miss", 0)] {
            assert_eq!(worker.lookup(&prompt, request).unwrap(), stored);
            assert_eq!(worker.retrieved(&prompt, 2..4, request), None);
            assert_eq!(worker.retrieved(&prompt, 0..0, request), None);
            worker.connection().end_session(request).unwrap();
            worker.connection().clear(false).unwrap();
        }
        server.assert_sound();
    }
}

#[test]
fn names_of_any_length_are_not_kept() {
    let server = TestServer::start(&[]);
    let prompt = prompt(1, 1);
    let mut connection = server.connect();
    let long = "x".repeat(1 << 20);
    for (model, request) in [("sessions/long", long.as_str()), (&long, "r")] {
        let scope = Scope::new(model);
        assert_eq!(
            connection
                .lookup_hits(&scope.scheduler_key(&prompt, range(0..1), request))
                .unwrap(),
            0
        );
        connection
            .free_lookup_locks(&scope.scheduler_key(&prompt, range(0..1), request))
            .unwrap();
        connection.end_session(request).unwrap();
    }
    let spec = engine_driven(1, &Scope::new(long));
    // A client that may be of 0.5.4 or older is refused without a text: it receives an invalid pool.
    let _refused = EngineDrivenWorker::register(server.connect(), spec);
    let readings = server.readings();
    assert_eq!((readings.sessions, readings.instances), (0, 0));
    server.assert_sound();
}

// proves: docs/clients.md#a-chunk-size-of-ones-own
// proves: docs/identity.md#the-fingerprint
#[test]
fn chunk_sizes_of_one_model_share_a_server_and_no_object() {
    let server = TestServer::start(&[]);
    let sizes = [None, Some(32), Some(48)];
    let prompt = prompt(1, 6);
    let mut workers: Vec<_> = (1..)
        .zip(sizes)
        .map(|(instance, size)| {
            let mut scope = Scope::new("sessions/chunks");
            scope.chunk_tokens = size;
            server.engine_driven(instance, &scope)
        })
        .collect();
    let chunks = |worker: &EngineDrivenWorker| 96 / worker.chunk_tokens() as u64;
    assert_eq!(workers.iter().map(chunks).collect::<Vec<_>>(), [6, 3, 2]);
    for at in 0..workers.len() {
        // Nothing of those before, under the same name and for the same tokens.
        for worker in &mut workers[at..] {
            assert_eq!(worker.lookup(&prompt, "before").unwrap(), 0);
        }
        let (worker, seed) = (&mut workers[at], at as u64);
        let (count, len) = (chunks(worker), worker.chunk_bytes());
        let stored = worker.store(&prompt, 0..96, "s", |chunk| bytes(seed, chunk, len));
        assert_eq!(stored.unwrap().chunks, (0..count).collect::<Vec<_>>());
    }
    for (seed, worker) in (0..).zip(&mut workers) {
        let (count, len) = (chunks(worker), worker.chunk_bytes());
        let request = format!("r{seed}");
        assert_eq!(worker.lookup(&prompt, &request).unwrap(), count);
        let mut read = 0;
        let take = |chunk, found: &[u8]| {
            assert_eq!(found, bytes(seed, chunk, len));
            read += 1;
        };
        assert!(
            worker
                .retrieve(&prompt, 0..96, &request, take)
                .unwrap()
                .is_some()
        );
        assert_eq!(read, count);
    }
}

// proves: docs/clients.md#a-chunk-size-of-ones-own
#[test]
fn transfer_in_chunks_that_were_not_registered_is_refused() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("sessions/other_chunks");
    let mut worker = server.engine_driven(1, &scope);
    let mut other = scope.clone();
    other.chunk_tokens = Some(32);
    let prompt = prompt(1, 2);
    let key = other.worker_key(0, &prompt, 0..32, "r");
    let answer = worker
        .connection()
        .prepare_store(&key, InstanceId(1))
        .unwrap();
    assert_eq!(answer.target.map(|target| target.slots.len()), Some(0));
    let metrics = server.engine().metrics().encode(&server.readings());
    assert!(metrics.contains("kvtier_refused_requests_total{operation=\"prepare_store\""));
    assert_eq!(worker.stored(&prompt, 0..2, 1), [0, 1]);
}

// proves: docs/clients.md#a-chunk-size-of-ones-own
#[test]
fn chunk_that_is_no_multiple_of_the_block_is_refused() {
    let server = TestServer::start(&[]);
    let mut scope = Scope::new("sessions/uneven");
    scope.chunk_tokens = Some(50);
    let error =
        EngineDrivenWorker::register(server.connect(), engine_driven(1, &scope)).unwrap_err();
    let wanted = "kvtier.chunk_tokens is 50; allowed: a multiple of block_size, 4";
    assert!(error.to_string().contains(wanted), "{error}");
}
