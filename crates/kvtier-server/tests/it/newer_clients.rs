//! Clients of LMCache 0.5.7: they pack token ids, negotiate a chunk size, and look up what lies behind what their engine has.
//! The real client is in `tests/conformance`.

use kvtier_client::proto::generation::{Generation, OperationSpec};
use kvtier_client::proto::key::CacheKey;
use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::request::{JobRef, Request};
use kvtier_client::proto::response::Response;
use kvtier_client::{EngineDrivenWorker, Scope};

use crate::support::{
    CHUNK, Raw, Steps, TestServer, bytes, engine_driven, given_stored, prompt, tokens,
};

/// The row that a client of 0.5.7 uses, which is the last one of its operation.
fn row(operation: Operation) -> &'static OperationSpec {
    let id = Generation::G6.spec(operation).unwrap().id();
    Generation::G6.rows(id).last().unwrap()
}

/// A scheduler.
struct Scheduler {
    client: Raw,
    uid: u8,
    model: &'static str,
}

impl Scheduler {
    /// One whose first request has this uid: 0 on a new connection, another one after a reconnect.
    fn connect(server: &TestServer, model: &'static str, uid: u8) -> Self {
        let client = server.raw();
        Self { client, uid, model }
    }

    /// The operation frame and the payload of the answer.
    fn ask(&mut self, request: &Request<'_, Vec<u32>>) -> (Vec<u8>, Option<Vec<u8>>) {
        let spec = row(request.operation());
        let mut frames = vec![vec![self.uid], spec.id().encode()];
        frames.extend(request.encode(spec).unwrap());
        self.client.send(&frames);
        let mut answer = self.client.receive().into_iter();
        assert_eq!(answer.next(), Some(vec![self.uid]));
        self.uid += 1;
        (answer.next().unwrap(), answer.next())
    }

    fn int(&mut self, request: &Request<'_, Vec<u32>>) -> i64 {
        let (_, payload) = self.ask(request);
        match Response::decode(row(request.operation()).response, payload.as_deref()) {
            Ok(Response::Int(value)) => value,
            other => panic!("{other:?}"),
        }
    }

    /// The text that refuses an alignment.
    fn refused(&mut self, alignment: i64) -> String {
        let (op, payload) = self.ask(&Request::NegotiateChunkSize { alignment });
        assert_eq!(payload, None);
        String::from_utf8_lossy(&op).into_owned()
    }

    fn negotiate(&mut self, alignment: i64) -> i64 {
        self.int(&Request::NegotiateChunkSize { alignment })
    }

    fn key<'a>(&self, tokens: &[u32], start: u64, request_id: &'a str) -> CacheKey<'a, Vec<u32>> {
        CacheKey {
            model_name: self.model,
            world_size: 1,
            worker_id: None,
            tokens: tokens.to_vec(),
            start,
            end: tokens.len() as u64,
            chunk_tokens: None,
            request_id,
            cache_salt: "",
            request_configs: None,
            num_kv_readers: Some(1),
        }
    }

    /// The result of a lookup, in chunks.
    fn hits(&mut self, key: CacheKey<'_, Vec<u32>>) -> i64 {
        let job = JobRef::Request(key.request_id);
        let query = Request::QueryPrefetchStatus { job };
        let lookup = Request::Lookup { key, tp_size: 1 };
        assert_eq!(self.ask(&lookup).1, None);
        self.int(&query)
    }
}

// proves: docs/clients.md#from-057-on
#[test]
fn packed_tokens_are_those_of_earlier_clients() {
    const MODEL: &str = "newer/packed";
    let (server, _, mut worker, prompt) = given_stored(MODEL, 3);
    let mut scheduler = Scheduler::connect(&server, MODEL, 0);
    assert_eq!(scheduler.negotiate(16), 16);
    // Twice: the second time from the memory of prompts.
    for request in ["a", "b"] {
        let key = scheduler.key(&tokens(1, 3), 0, request);
        assert_eq!(scheduler.hits(key), 3);
        worker.assert_reads(&prompt, 0..3, request, 1);
    }
    let other = scheduler.key(&tokens(2, 3), 0, "other");
    assert_eq!(scheduler.hits(other), 0);
    server.assert_sound();
}

// proves: docs/clients.md#from-057-on
#[test]
fn negotiated_chunk_size_holds_for_its_connection() {
    const MODEL: &str = "newer/chunks";
    let server = TestServer::start(&[]);
    let prompt = prompt(1, 6);
    let mut scope = Scope::new(MODEL);
    scope.chunk_tokens = Some(32);
    let mut worker = server.engine_driven(1, &scope);
    let len = worker.chunk_bytes();
    let stored = worker.store(&prompt, 0..96, "s", |chunk| bytes(1, chunk, len));
    assert_eq!(stored.unwrap().chunks, [0, 1, 2]);

    let mut scheduler = Scheduler::connect(&server, MODEL, 0);
    assert_eq!(scheduler.negotiate(32), 32);
    assert_eq!(scheduler.int(&Request::GetChunkSize), 32);
    let key = scheduler.key(&tokens(1, 6), 0, "r");
    assert_eq!(scheduler.hits(key), 3);
    // The other half of the engine asks alike, and so does this one after the server was away.
    assert_eq!(scheduler.negotiate(32), 32);
    assert_eq!(scheduler.negotiate(16), 32);
    let refused = scheduler.refused(48);
    assert!(
        refused.contains("required_chunk_alignment: 48; allowed: a divisor of 32"),
        "{refused}"
    );
    assert_eq!(scheduler.int(&Request::GetChunkSize), 32);

    // Another connection has its own.
    let mut other = Scheduler::connect(&server, MODEL, 0);
    for alignment in [0, -1, 65_537] {
        let refused = other.refused(alignment);
        assert!(refused.contains("allowed: from 1 on"), "{refused}");
    }
    assert_eq!(other.negotiate(48), 48);
    let key = other.key(&tokens(1, 6), 0, "r");
    assert_eq!(other.hits(key), 0);
    server.assert_sound();
}

// proves: docs/clients.md#from-057-on
#[test]
fn reconnected_client_finds_nothing_until_it_negotiates() {
    const MODEL: &str = "newer/reconnected";
    let (server, _, _worker, _) = given_stored(MODEL, 6);
    let mut scope = Scope::new(MODEL);
    scope.chunk_tokens = Some(32);
    let mut worker = server.engine_driven(2, &scope);
    let len = worker.chunk_bytes();
    worker
        .store(&prompt(1, 6), 0..96, "s", |chunk| bytes(1, chunk, len))
        .unwrap();
    let mut scheduler = Scheduler::connect(&server, MODEL, 7);
    for request in ["a", "b", "c"] {
        let key = scheduler.key(&tokens(1, 6), 0, request);
        assert_eq!(scheduler.hits(key), 0);
    }
    assert_eq!(scheduler.negotiate(32), 32);
    let key = scheduler.key(&tokens(1, 6), 0, "d");
    assert_eq!(scheduler.hits(key), 3);
}

#[test]
fn negotiated_chunk_size_is_kept_for_the_next_server() {
    let base = tempfile::tempdir().unwrap();
    let state = ["--state-dir", base.path().to_str().unwrap()];
    let server = TestServer::start(&[&state[..], &["--instance-id", "a"]].concat());
    let kept = || std::fs::read_to_string(base.path().join("a/chunk-sizes")).unwrap();
    let mut scheduler = Scheduler::connect(&server, "newer/kept", 0);
    assert_eq!(scheduler.negotiate(48), 48);
    assert!(kept().ends_with("\n48"));
}

/// A chunk of one block: no smaller size is a multiple of it.
#[test]
fn reconnected_client_is_served_if_blocks_allow_no_other_chunk_size() {
    const MODEL: &str = "newer/blocks";
    let server = TestServer::start(&[]);
    let mut spec = engine_driven(1, &Scope::new(MODEL));
    spec.block_tokens = CHUNK as u64;
    let mut worker = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    worker.stored(&prompt(1, 1), 0..1, 1);
    let mut scheduler = Scheduler::connect(&server, MODEL, 7);
    for request in ["a", "b"] {
        let key = scheduler.key(&tokens(1, 1), 0, request);
        assert_eq!(scheduler.hits(key), 1);
    }
}

#[test]
fn worker_of_a_negotiated_chunk_size_registers_with_it() {
    let scope = Scope::new("newer/worker");
    let server = TestServer::start(&[]);
    let mut worker = Scheduler::connect(&server, "newer/worker", 0);
    assert_eq!(worker.negotiate(48), 48);
    worker.ask(&Request::RegisterEngineDriven(crate::support::context(
        1, &scope,
    )));
    let status = server.engine().admin().status(true);
    let sizes: Vec<_> = status
        .non_cuda_context_meta
        .values()
        .map(|worker| worker.chunk_size)
        .collect();
    assert_eq!(sizes, [48]);
}

// proves: docs/clients.md#from-057-on
#[test]
fn lookup_behind_engine_s_prefix_counts_from_the_start() {
    const MODEL: &str = "newer/start";
    let server = TestServer::start(&[]);
    let mut worker = server.engine_driven(1, &Scope::new(MODEL));
    let prompt = prompt(1, 6);
    // Of what the engine has, the server has nothing.
    worker.stored(&prompt, 2..5, 1);
    let mut scheduler = Scheduler::connect(&server, MODEL, 0);
    assert_eq!(scheduler.negotiate(16), 16);
    let mut hits = |start, request| {
        let key = scheduler.key(&tokens(1, 6), start, request);
        scheduler.hits(key)
    };
    assert_eq!(hits(0, "whole"), 0);
    assert_eq!(hits(16, "gap"), 1);
    assert_eq!(server.readings().leased_objects, 0);
    // An engine's blocks may end inside a chunk.
    for (start, request) in [(32, "aligned"), (47, "inside")] {
        assert_eq!(hits(start, request), 5);
        assert_eq!(server.readings().leased_objects, 3);
        worker.assert_reads(&prompt, 2..5, request, 1);
        assert_eq!(server.readings().leased_objects, 0);
    }
    for (start, request) in [(96, "all"), (u64::MAX, "beyond")] {
        assert_eq!(hits(start, request), 6);
        assert_eq!(server.readings().leased_objects, 0);
    }
    server.assert_sound();
}

#[test]
fn abandoned_lookup_s_ranges_free_nothing_of_the_next() {
    const MODEL: &str = "newer/abandoned";
    let (server, _, mut worker, prompt) = given_stored(MODEL, 4);
    let mut scheduler = Scheduler::connect(&server, MODEL, 0);
    assert_eq!(scheduler.negotiate(16), 16);
    for (start, held) in [(0, 4), (16, 3)] {
        let key = scheduler.key(&tokens(1, 4), start, "r");
        assert_eq!(scheduler.hits(key), 4);
        assert_eq!(server.readings().leased_objects, held);
    }
    let mut key = scheduler.key(&tokens(1, 4), 0, "r");
    key.end = 0;
    scheduler.ask(&Request::FreeLookupLocks {
        key: key.clone(),
        tp_size: 1,
        extra_ranges: vec![(0, 64)],
    });
    assert_eq!(server.readings().leased_objects, 3);
    // What the engine computed meanwhile is freed from the prompt's start on.
    key.end = 32;
    scheduler.ask(&Request::FreeLookupLocks {
        key,
        tp_size: 1,
        extra_ranges: Vec::new(),
    });
    assert_eq!(server.readings().leased_objects, 2);
    worker.assert_reads(&prompt, 2..4, "r", 1);
    assert_eq!(worker.retrieved(&prompt, 1..2, "r"), None, "freed");
}

// proves: docs/clients.md#from-057-on
#[test]
fn lookup_that_skips_loading_finds_nothing() {
    const MODEL: &str = "newer/skip";
    let (server, _, _worker, _) = given_stored(MODEL, 2);
    let mut scheduler = Scheduler::connect(&server, MODEL, 0);
    assert_eq!(scheduler.negotiate(16), 16);
    for (skip, expected) in [(0xc3, 0), (0xc2, 2)] {
        let mut settings = b"\x81\xb1lmcache.skip_load".to_vec();
        settings.push(skip);
        let mut key = scheduler.key(&tokens(1, 2), 0, "r");
        key.request_configs = Some(&settings);
        assert_eq!(scheduler.hits(key), expected);
    }
}
