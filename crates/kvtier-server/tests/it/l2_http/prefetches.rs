//! Prefetches without a request.

use std::time::{Duration, Instant};

use kvtier_client::{EngineDrivenWorker, Scope};
use serde_json::{Value, json};

use super::{detail, with_worker};
use crate::http::json_of;
use crate::l2::{fs, settle, store, with_tiers};
use crate::support::{CHUNK, PATIENCE, TestServer, bytes, engine_driven, prompt, range, tokens};

const PREFETCHES: &str = "/cache/prefetches";

/// Waits for a prefetch and gives its result.
fn completed(server: &TestServer, submitted: &Value) -> Value {
    let path = format!("{PREFETCHES}/{}", submitted["request_id"].as_str().unwrap());
    let started = Instant::now();
    loop {
        let (status, answer) = json_of(server, "GET", &path, "");
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["request_id"], submitted["request_id"]);
        match answer["status"].as_str() {
            Some("completed") => return answer,
            Some("pending") => assert!(started.elapsed() < PATIENCE, "it is never completed"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_prompt_is_loaded_before_engines_ask() {
    let directory = tempfile::tempdir().unwrap();
    let mut scope = Scope::new("warm/ranks").with_salt("t");
    scope.world_size = 2;
    let server = with_tiers(
        &[&fs(directory.path())],
        &["--l2-prefetch-policy", "default"],
    );
    let mut workers: Vec<_> = (0..2)
        .map(|rank| {
            let mut spec = engine_driven(i64::from(rank) + 1, &scope);
            spec.worker_id = rank;
            EngineDrivenWorker::register(server.connect(), spec).unwrap()
        })
        .collect();
    let stored = prompt(1, 4);
    for worker in &mut workers {
        store(worker, &stored, 1);
    }
    settle(&server);
    server.engine().admin().clear(true);
    // Two chunks more than were stored, and a few tokens.
    let mut token_ids = tokens(1, 6);
    token_ids.extend([1, 2, 3]);
    let body = json!({
        "model_name": "warm/ranks", "world_size": 2, "token_ids": token_ids, "cache_salt": "t",
        "source_tier": "l2", "target_tier": "l1",
    });
    let submit = |body: &Value| json_of(&server, "POST", PREFETCHES, &body.to_string());
    let (status, submitted) = submit(&body);
    assert_eq!(status, 202, "{submitted}");
    assert_eq!(
        (&submitted["chunks"], &submitted["status"]),
        (&json!(6), &json!("submitted"))
    );
    assert_eq!(submitted["request_id"].as_str().unwrap().len(), 32);
    let result = completed(&server, &submitted);
    let expected = json!({
        "request_id": submitted["request_id"], "status": "completed", "found_keys": 8, "total_keys": 12,
        "chunks": 4, "loaded_keys": 8,
    });
    assert_eq!(result, expected);
    // It stays in L1 without a lease, and the engines find it there.
    let readings = server.readings();
    assert_eq!(
        (
            readings.objects,
            readings.leased_objects,
            readings.staged_bytes
        ),
        (8, 0, 0)
    );
    assert_eq!(readings.tiers[0].loaded_objects, 8);
    assert_eq!(workers[0].lookup(&stored, "r").unwrap(), 4);
    assert_eq!(server.readings().tiers[0].loaded_objects, 8);
    // Another tenant has none of it.
    let mut stranger = body.clone();
    stranger["cache_salt"] = json!("u");
    let (_, other) = submit(&stranger);
    let other = completed(&server, &other);
    assert_eq!(
        (&other["found_keys"], &other["total_keys"]),
        (&json!(0), &json!(12))
    );
    // The result can be read again, for ten minutes.
    assert_eq!(completed(&server, &submitted), result);
    server.pass(Duration::from_secs(599));
    assert_eq!(completed(&server, &submitted), result);
    server.pass(Duration::from_secs(2));
    let id = submitted["request_id"].as_str().unwrap();
    let unknown =
        format!("unknown prefetch request_id='{id}' (already completed or never submitted)");
    let gone = json_of(&server, "GET", &format!("{PREFETCHES}/{id}"), "");
    assert_eq!(gone, (404, detail(&unknown)));
    server.assert_sound();
}

#[test]
fn prefetch_larger_than_l1_loads_partially() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("warm/large");
    let start = |l1_size_gb| with_tiers(&[&fs(directory.path())], &["--l1-size-gb", l1_size_gb]);
    let server = start("0.0078125");
    let mut worker = server.engine_driven(1, &scope);
    let (all, len) = (prompt(1, 400), worker.chunk_bytes());
    for first in (0..400).step_by(50) {
        let stored = worker.store(&all, range(first..first + 50), "s", |chunk| {
            bytes(1, first + chunk, len)
        });
        assert_eq!(stored.unwrap().chunks.len(), 50);
        settle(&server);
    }
    drop((worker, server));
    // 2 MiB of L1, 256 objects.
    let server = start("0.001953125");
    let _worker = server.engine_driven(1, &scope);
    let body = json!({ "model_name": "warm/large", "world_size": 1, "token_ids": tokens(1, 400) });
    let (_, submitted) = json_of(&server, "POST", PREFETCHES, &body.to_string());
    let result = completed(&server, &submitted);
    assert_eq!(result["total_keys"], 400);
    let found = result["found_keys"].as_u64().unwrap();
    assert!((128..=256).contains(&found), "{result}");
    let readings = server.readings();
    assert_eq!((readings.leased_objects, readings.staged_bytes), (0, 0));
    server.assert_sound();
}

#[test]
fn impossible_prefetch_is_refused_with_reason() {
    let directory = tempfile::tempdir().unwrap();
    let (server, _worker) = with_worker(directory.path(), &Scope::new("m"));
    let ids = vec![1; 2 * CHUNK];
    let body = |change: Value| {
        let mut body = json!({ "model_name": "m", "world_size": 1, "token_ids": ids });
        body.as_object_mut()
            .unwrap()
            .extend(change.as_object().unwrap().clone());
        body
    };
    let without = |field: &str| {
        let mut body = body(json!({}));
        body.as_object_mut().unwrap().remove(field);
        body
    };
    let missing = |field: &str| detail(&format!("body: missing field `{field}`"));
    let unregistered = |model: &str, world: i64| {
        detail(&format!(
            "no layout registered for model_name='{model}' world_size={world}; the model has not allocated KV cache on \
             this node yet"
        ))
    };
    let token = |index: u32, value: &str| {
        let allowed = "allowed: an integer from 0 to 4294967295";
        detail(&format!("token_ids[{index}]: invalid {value}; {allowed}"))
    };
    let cases = [
        (
            body(json!({ "token_ids": [1, 2, 3] })),
            202,
            json!({ "chunks": 0, "status": "noop" }),
        ),
        (without("model_name"), 422, missing("model_name")),
        (without("world_size"), 422, missing("world_size")),
        (without("token_ids"), 422, missing("token_ids")),
        (
            body(json!({ "source_tier": "l1" })),
            400,
            detail("unsupported prefetch direction 'l1'->'l1'; only 'l2'->'l1'"),
        ),
        (
            body(json!({ "target_tier": "all" })),
            400,
            detail("unsupported prefetch direction 'l2'->'all'; only 'l2'->'l1'"),
        ),
        (
            body(json!({ "model_name": "n" })),
            503,
            unregistered("n", 1),
        ),
        (body(json!({ "world_size": 2 })), 503, unregistered("m", 2)),
        (
            body(json!({ "world_size": -1 })),
            503,
            unregistered("m", -1),
        ),
        (
            body(json!({ "world_size": 1_i64 << 40 })),
            503,
            unregistered("m", 1 << 40),
        ),
        (
            body(json!({ "cache_salt": "a@b" })),
            400,
            detail(
                r"cache_salt: a cache salt must not contain '@'; '@', '/', '\' and NUL are refused",
            ),
        ),
        (
            body(json!({ "token_ids": vec![0; 1_000_001] })),
            400,
            detail("too many token_ids in a single request (limit=1000000, got=1000001)"),
        ),
        (
            body(json!({ "token_ids": 7 })),
            422,
            detail("token_ids: invalid type: integer `7`; allowed: a sequence"),
        ),
        (
            body(json!({ "token_ids": ["x"] })),
            422,
            token(0, "type: string \"x\""),
        ),
        (
            body(json!({ "token_ids": [1, null] })),
            422,
            token(1, "type: null"),
        ),
        (
            body(json!({ "token_ids": [1, 2, -1] })),
            422,
            token(2, "value: integer `-1`"),
        ),
        (
            body(json!({ "token_ids": [1_u64 << 32] })),
            422,
            token(0, "value: integer `4294967296`"),
        ),
    ];
    for (body, status, expected) in cases {
        let body = body.to_string();
        let answer = json_of(&server, "POST", PREFETCHES, &body);
        assert_eq!(answer, (status, expected), "{:.200}", body);
    }
    let empty = json_of(&server, "POST", PREFETCHES, "");
    assert_eq!(empty, (422, detail("the body is no JSON object")));
    let (status, broken) = json_of(&server, "POST", PREFETCHES, "{bad");
    let text = broken["detail"].as_str().unwrap();
    assert!(
        status == 422 && text.starts_with("the body is not JSON: "),
        "{text}"
    );
    let unknown =
        detail("unknown prefetch request_id='no/pe' (already completed or never submitted)");
    let answer = json_of(&server, "GET", &format!("{PREFETCHES}/no%2Fpe"), "");
    assert_eq!(answer, (404, unknown));
    // Ten digits a token, as many as are allowed, fit.
    let (status, _) = json_of(
        &server,
        "POST",
        PREFETCHES,
        &body(json!({ "token_ids": vec![u32::MAX; 1_000_000] })).to_string(),
    );
    assert_eq!(status, 202);

    let alone = TestServer::start(&[]);
    let _worker = alone.engine_driven(1, &Scope::new("m"));
    let answer = json_of(&alone, "POST", PREFETCHES, &body(json!({})).to_string());
    assert_eq!(answer, (503, detail("no L2 adapters configured")));
}

#[test]
fn prefetch_is_for_one_chunk_size_of_its_model() {
    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path())], &[]);
    let register = |instance, size| {
        let mut scope = Scope::new("sizes");
        scope.chunk_tokens = size;
        server.engine_driven(instance, &scope)
    };
    let submit = |chunk_size: Value| {
        let mut body = json!({ "model_name": "sizes", "world_size": 1, "token_ids": tokens(1, 6) });
        if !chunk_size.is_null() {
            body["chunk_size"] = chunk_size;
        }
        json_of(&server, "POST", PREFETCHES, &body.to_string())
    };
    let mut small = register(1, Some(32));
    // The only size may be left out.
    let (status, answer) = submit(Value::Null);
    assert_eq!((status, &answer["chunks"]), (202, &json!(3)), "{answer}");
    completed(&server, &answer);
    let mut default = register(2, None);
    for (worker, seed) in [(&mut small, 1), (&mut default, 2)] {
        let len = worker.chunk_bytes();
        let stored = worker.store(&prompt(1, 6), 0..96, "s", |chunk| bytes(seed, chunk, len));
        assert!(!stored.unwrap().chunks.is_empty());
    }
    settle(&server);
    for (asked, text) in [
        (Value::Null, "left out"),
        (json!(48), "48"),
        (json!(0), "0"),
    ] {
        let (status, answer) = submit(asked);
        let text = format!("chunk_size is {text}; allowed for model_name='sizes': {CHUNK}, 32,");
        assert_eq!(status, 400, "{answer}");
        assert!(
            answer["detail"].as_str().unwrap().starts_with(&text),
            "{answer}"
        );
    }
    assert_eq!(submit(json!(-1)).0, 422);
    for (size, chunks) in [(32, 3), (CHUNK, 6)] {
        server.engine().admin().clear(true);
        let (status, answer) = submit(json!(size));
        assert_eq!(status, 202, "{answer}");
        let result = completed(&server, &answer);
        assert_eq!(
            (&result["chunks"], &result["loaded_keys"]),
            (&json!(chunks), &json!(chunks)),
            "{size}"
        );
        assert_eq!(server.readings().objects, chunks);
    }
}
