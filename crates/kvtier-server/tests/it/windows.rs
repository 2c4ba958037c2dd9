//! Workers with sliding windows or recurrent states: they register, and have a cache only where the operator says so.

use kvtier_client::{InstanceId, LmcacheDrivenSpec, LmcacheDrivenWorker, Scope};
use serde_json::{Value, json};

use crate::http::{json_of, request};
use crate::support::{CHUNK, TestServer, prompt, range};

const BLOCKS: [i64; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

/// A worker whose layers have a window of one chunk, or keep a state.
fn windowed(server: &TestServer, instance: i64, recurrent_state: bool) -> LmcacheDrivenWorker {
    let scope = Scope::new("windows");
    let mut spec = LmcacheDrivenSpec::new(InstanceId(instance), scope, 2, 2, 16, 32);
    spec.block_tokens = 4;
    spec.window_tokens = Some(CHUNK as i64);
    spec.recurrent_state = recurrent_state;
    LmcacheDrivenWorker::register(server.connect(), spec).unwrap()
}

fn unserved_because(server: &TestServer, instance: i64) -> Value {
    let (status, answer) = json_of(server, "GET", "/status", "");
    assert_eq!(status, 200);
    answer["unserved_instances"][instance.to_string()].clone()
}

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
