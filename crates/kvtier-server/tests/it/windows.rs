//! Workers with sliding windows or recurrent states: they register, and have a cache only where the operator says so.

use kvtier_client::{InstanceId, LmcacheDrivenSpec, LmcacheDrivenWorker, Prompt, Scope};
use serde_json::{Value, json};

use crate::http::{json_of, request};
use crate::support::{CHUNK, TestServer, bytes, prompt, range};

const BLOCKS: [i64; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

/// A worker whose layers have a window of one chunk, or keep a state.
fn windowed(server: &TestServer, instance: i64, recurrent_state: bool) -> LmcacheDrivenWorker {
    let mut spec = spec(instance, CHUNK as i64);
    spec.recurrent_state = recurrent_state;
    LmcacheDrivenWorker::register(server.connect(), spec).unwrap()
}

/// A worker whose layers have a window of this many tokens, and that holds its blocks.
fn held(server: &TestServer, window: i64) -> LmcacheDrivenWorker {
    let mut spec = spec(1, window);
    spec.holds_blocks = true;
    LmcacheDrivenWorker::register(server.connect(), spec).unwrap()
}

/// Blocks of 4 tokens, chunks of 16.
fn spec(instance: i64, window: i64) -> LmcacheDrivenSpec {
    let scope = Scope::new("windows");
    let mut spec = LmcacheDrivenSpec::new(InstanceId(instance), scope, 2, 2, 16, 32);
    spec.block_tokens = 4;
    spec.window_tokens = Some(window);
    spec
}

/// The bytes of some blocks.
fn read(worker: &LmcacheDrivenWorker, blocks: &[i64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    worker.read_chunk(blocks, &mut bytes).unwrap();
    bytes
}

/// Fills blocks 1 to 4 and 5 to 8 with the bytes of two chunks.
fn fill(worker: &mut LmcacheDrivenWorker, seed: u64) {
    for (blocks, seed) in BLOCKS.chunks(4).zip(seed..) {
        let bytes = bytes(seed, 0, worker.chunk_bytes());
        worker.write_chunk(blocks, &bytes).unwrap();
    }
}

fn unserved_because(server: &TestServer, instance: i64) -> Value {
    let (status, answer) = json_of(server, "GET", "/status", "");
    assert_eq!(status, 200);
    answer["unserved_instances"][instance.to_string()].clone()
}

// proves: docs/clients.md#a-model-has-sliding-windows-or-recurrent-states
// proves: docs/compare.md#recurrent-states
#[test]
fn windowed_worker_registers_without_a_cache() {
    let server = TestServer::start(&[]);
    for recurrent_state in [false, true] {
        let mut worker = windowed(&server, 1, recurrent_state);
        assert_eq!(unserved_because(&server, 1), json!("windowed_client"));
        let prompt = prompt(1, 2);
        assert!(!worker.store(&prompt, range(0..2), "s", &BLOCKS).unwrap());
        assert_eq!(worker.lookup(&prompt, "r").unwrap(), 0);
        assert!(
            !worker
                .retrieve(&prompt, range(0..2), "r", &BLOCKS, 0)
                .unwrap()
        );
        assert_eq!(server.readings().objects, 0);
    }
    let (_, _, metrics) = request(&server, "GET", "/metrics", "");
    for line in [
        r#"lmcache_mp_lookup_early_exit_requests_total{cache_salt="",model_name="windows",reason="windowed_client"} 2"#,
        r#"kvtier_refused_requests_total{operation="store",reason="windowed_client"} 2"#,
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    server.assert_sound();
}

// proves: docs/clients.md#a-model-has-sliding-windows-or-recurrent-states
#[test]
fn windowed_worker_leaves_others_their_cache() {
    let server = TestServer::start(&[]);
    let _windowed = windowed(&server, 1, false);
    let mut full = server.lmcache_driven(2, &Scope::new("full"));
    assert_eq!(unserved_because(&server, 2), Value::Null);
    let prompt = prompt(1, 2);
    assert!(full.store(&prompt, range(0..2), "s", &BLOCKS).unwrap());
    assert_eq!(full.lookup(&prompt, "r").unwrap(), 2);
}

// proves: docs/clients.md#a-model-has-sliding-windows-or-recurrent-states
#[test]
fn windowed_worker_is_served_with_allow() {
    let server = TestServer::start(&["--windowed-clients", "allow"]);
    let mut worker = windowed(&server, 1, false);
    assert_eq!(unserved_because(&server, 1), Value::Null);
    let prompt = prompt(1, 2);
    assert!(worker.store(&prompt, range(0..2), "s", &BLOCKS).unwrap());
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 2);
    assert!(
        worker
            .retrieve(&prompt, range(0..2), "r", &BLOCKS, 0)
            .unwrap()
    );
}

// proves: docs/clients.md#a-model-has-sliding-windows-or-recurrent-states
// proves: docs/compare.md#sliding-windows
#[test]
fn held_window_is_served_and_loads_its_blocks() {
    let server = TestServer::start(&[]);
    let mut worker = held(&server, 8);
    assert_eq!(unserved_because(&server, 1), Value::Null);
    fill(&mut worker, 1);
    let prompt = prompt(1, 2);
    // The first blocks of each chunk have left the window, whose last two are stored.
    let stored = [-1, -1, 3, 4, -1, -1, 7, 8];
    assert!(worker.store(&prompt, range(0..2), "s", &stored).unwrap());
    assert_eq!(server.readings().objects, 2);
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 2);
    // The hit needs the end of the last chunk only. Other blocks keep their bytes.
    let untouched = read(&worker, &[9, 10, 11, 12]);
    let (first, second) = (read(&worker, &[3, 4, 3, 4]), read(&worker, &[7, 8, 7, 8]));
    fill(&mut worker, 7);
    let loaded = [-1, -1, 9, 10, -1, -1, 7, 8];
    assert!(
        worker
            .retrieve(&prompt, range(0..2), "r", &loaded, 0)
            .unwrap()
    );
    assert_eq!(read(&worker, &[7, 8, 7, 8]), second);
    assert_ne!(read(&worker, &[3, 4, 3, 4]), first, "not in the window");
    assert_eq!(read(&worker, &[9, 10, 11, 12]), untouched);
    server.assert_sound();
}

// proves: docs/clients.md#a-model-has-sliding-windows-or-recurrent-states
#[test]
fn held_chunk_without_its_window_is_no_end() {
    let server = TestServer::start(&[]);
    let mut worker = held(&server, 8);
    fill(&mut worker, 1);
    let prompt = prompt(1, 2);
    // The second chunk lacks one block in its window.
    let lacking = [-1, -1, 3, 4, 5, 6, -1, 8];
    assert!(worker.store(&prompt, range(0..2), "s", &lacking).unwrap());
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 1);
    // Null blocks are missing ones too.
    let null = [-1, -1, 3, 4, 5, 6, 0, 8];
    assert!(worker.store(&prompt, range(0..2), "s", &null).unwrap());
    assert_eq!(worker.lookup(&prompt, "r2").unwrap(), 1);
    server.assert_sound();
}

// proves: docs/clients.md#a-model-has-sliding-windows-or-recurrent-states
#[test]
fn missing_block_of_a_worker_without_holds_is_refused() {
    let server = TestServer::start(&["--windowed-clients", "allow"]);
    let mut worker = windowed(&server, 1, false);
    let lacking = [-1, 2, 3, 4, 5, 6, 7, 8];
    assert!(
        !worker
            .store(&prompt(1, 2), range(0..2), "s", &lacking)
            .unwrap()
    );
    assert_eq!(server.readings().objects, 0);
}

#[test]
fn objects_by_their_keys_are_read_whatever_the_window() {
    let server = TestServer::start(&[]);
    let mut spec = spec(1, CHUNK as i64);
    spec.holds_blocks = true;
    spec.scope.chunk_tokens = Some(CHUNK as u32);
    let mut worker = LmcacheDrivenWorker::register(server.connect(), spec).unwrap();
    fill(&mut worker, 1);
    let objects = Prompt::of_object_keys(&[[1; 32], [2; 32]], CHUNK);
    assert!(worker.store(&objects, range(0..2), "s", &BLOCKS).unwrap());
    let stored: Vec<_> = BLOCKS.chunks(4).map(|chunk| read(&worker, chunk)).collect();
    fill(&mut worker, 7);
    assert!(
        worker
            .retrieve(&objects, range(0..2), "r", &BLOCKS, 0)
            .unwrap()
    );
    for (chunk, stored) in BLOCKS.chunks(4).zip(stored) {
        assert!(read(&worker, chunk) == stored, "{chunk:?}");
    }
    server.assert_sound();
}
