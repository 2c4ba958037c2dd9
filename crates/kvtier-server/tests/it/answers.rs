//! Answers of the HTTP API that `kvtier` and operators' tools read: every field, its type and the order of the fields.

use kvtier_client::Scope;
use serde_json::{Map, Value, json};

use crate::http::{json_of, request};
use crate::l2::{fs, store, with_tiers};
use crate::support::{TestServer, prompt, range, tokens, wait_until};

/// Fields whose value depends on the machine or the moment.
const VARYING: [&str; 19] = [
    "base_path",
    "bookkeeping_bytes",
    "connections_max",
    "current_size_bytes",
    "current_usage",
    "current_usage_gb",
    "file",
    "incarnation",
    "instance_id",
    "io_engine",
    "io_engine_reason",
    "layout_fingerprint",
    "memory_parts",
    "memory_usage_ratio",
    "open_files_max",
    "request_id",
    "seconds_ago",
    "usage_fraction",
    "used_at",
];

/// Replaces what varies by its type.
fn masked(key: &str, value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter();
            let fields = fields.map(|(key, value)| (key.clone(), masked(&key, value)));
            Value::Object(Map::from_iter(fields))
        }
        Value::Array(_) if VARYING.contains(&key) => json!([]),
        Value::Array(list) => list.into_iter().map(|value| masked("", value)).collect(),
        Value::Number(_) if VARYING.contains(&key) => json!(0),
        Value::String(_) if VARYING.contains(&key) => json!("*"),
        value => value,
    }
}

/// The answer to one request, as far as it is the same each time.
fn answer(server: &TestServer, line: &str) -> Value {
    let mut parts = line.splitn(3, ' ');
    let mut part = || parts.next().unwrap_or_default();
    let (status, _, body) = request(server, part(), part(), part());
    let answer: Value = serde_json::from_str(&body).unwrap();
    // Floats may lose a digit when they are parsed.
    let without_digits = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
    let (body, parsed) = (without_digits(&body), without_digits(&answer.to_string()));
    assert_eq!(body, parsed, "fields are sorted, {line}");
    let answer = masked("", answer);
    let text = answer
        .to_string()
        .replace(env!("CARGO_PKG_VERSION"), "VERSION");
    json!({ "request": line, "status": status, "answer": serde_json::from_str::<Value>(&text).unwrap() })
}

/// A server with three tiers, tenants with and without quota, and workers of both kinds.
#[test]
fn answers_have_the_recorded_fields() {
    let directory = tempfile::tempdir().unwrap();
    let isolated = fs(&directory.path().join("a")).replace(
        '}',
        r#","max_capacity_gb":1,"eviction":{"eviction_policy":"IsolatedLRU"}}"#,
    );
    let faulty = format!(
        r#"{{"type":"fault_inject","rate":0,"inner":{}}}"#,
        fs(&directory.path().join("b"))
    );
    let mock = r#"{"type":"mock","max_size_gb":1,"mock_bandwidth_gb":100}"#;
    let file = directory.path().join("quotas.json");
    let flags = [
        "--eviction-policy",
        "IsolatedLRU",
        "--quota-file",
        file.to_str().unwrap(),
    ];
    let server = with_tiers(&[&isolated, &faulty, mock], &flags);
    let scope = Scope::new("answers").with_salt("alice");
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 3), 1);
    let mut pages = server.lmcache_driven(2, &Scope::new("answers/pages").with_salt("carol"));
    let stored = pages.store(&prompt(2, 1), range(0..1), "s", &[0, 1, 2, 3]);
    assert!(stored.unwrap());
    worker.lookup(&prompt(1, 2), "r").unwrap();
    let is_busy = || {
        let manager = &json_of(&server, "GET", "/status", "").1["storage_manager"];
        let stores = &manager["store_controller"];
        let waiting = [
            &stores["pending_keys_count"],
            &stores["in_flight_task_count"],
        ];
        waiting.iter().any(|count| **count != 0) || manager.to_string().contains("\"running\"")
    };
    wait_until("a server without work", || !is_busy());
    let question = json!({
        "model_name": "answers", "cache_salt": "alice", "token_ids": tokens(1, 4), "world_size": 1, "chunk_size": 16,
    });
    let found = format!("POST /cache/explain {question}");
    let matched = format!("POST /prefix/match {question}");
    let mut answers = Vec::new();
    for line in [
        r#"PUT /quota/alice {"limit_gb": 1, "reserved_gb": "8MiB", "tiers": {"fs-0": {"limit_gb": "unlimited"}}}"#,
        r#"PUT /quota/bob {"limit_gb": "unlimited"}"#,
        r#"PUT /quota {"users": {"dave": {"limit_gb": 2, "tiers": {"l1": {"reserved_gb": "1MiB"}}}}}"#,
        "DELETE /quota/zoe",
        "GET /quota",
        "GET /quota?all=true",
        "GET /quota?all=true&page_size=2",
        "GET /quota/alice",
        "GET /quota/carol",
        "GET /tenants?limit=2",
        "GET /status",
        "GET /healthcheck",
        "GET /",
        "GET /version",
        "GET /lmc_version",
        "GET /config/adapters",
        "GET /cache/objects?tier=l1&page_size=1",
        "GET /cache/objects?model_name=none",
        r#"POST /cache/checksums {"instance_id": 2, "block_ids": [0, 1, 2, 3, 8], "chunk_size": 4}"#,
        r#"POST /cache/checksums {"instance_id": 2, "block_ids": [0, 1], "chunk_size": 2, "layerwise": true}"#,
        r#"POST /cache/prefetches {"model_name": "answers", "world_size": 1, "token_ids": [1, 2]}"#,
        &found,
        &matched,
        r#"POST /cache/explain {"model_name": "answers", "token_ids": [1, 2]}"#,
        r#"DELETE /cache/objects {"keys": [], "tier": "all"}"#,
        "POST /cache/clear",
        &found,
        // Refused.
        "GET /nothing",
        "GET /cache/prefetches/1",
        "GET /cache/objects?tier=l3",
        "GET /cache/objects?page_size=0",
        "GET /cache/objects?page_token=0",
        r#"POST /cache/clear {"tier": "l3"}"#,
        r#"POST /cache/clear {"tier": null}"#,
        r#"POST /cache/clear {"tier": 7}"#,
        r#"POST /cache/clear {"force": "maybe"}"#,
        r#"POST /cache/clear {"force": null, "unknown": 1}"#,
        "POST /cache/clear []",
        "POST /cache/clear {",
        r#"POST /cache/checksums {"block_ids": null}"#,
        r#"POST /cache/checksums {"block_ids": 7}"#,
        r#"POST /cache/checksums {"block_ids": [1, "2"]}"#,
        r#"POST /cache/checksums {"block_ids": [1], "chunk_size": "x"}"#,
        r#"POST /cache/checksums {"block_ids": [1], "instance_id": 1.5}"#,
        "POST /cache/prefetches",
        "POST /cache/prefetches null",
        r#"POST /cache/prefetches {"world_size": 1, "token_ids": [1]}"#,
        r#"POST /cache/prefetches {"model_name": 1, "world_size": 1, "token_ids": [1]}"#,
        r#"POST /cache/prefetches {"model_name": "m", "world_size": "1", "token_ids": [1]}"#,
        r#"POST /cache/prefetches {"model_name": "m", "world_size": 1, "token_ids": {}}"#,
        r#"POST /cache/prefetches {"model_name": "m", "world_size": 1, "token_ids": [1, -1]}"#,
        r#"POST /cache/prefetches {"model_name": "m", "world_size": 1, "token_ids": [4294967296]}"#,
        r#"POST /cache/prefetches {"model_name": "m", "world_size": 1, "token_ids": [1], "source_tier": "l1"}"#,
        r#"POST /cache/prefetches {"model_name": "m", "world_size": 1, "token_ids": [1], "cache_salt": 3}"#,
        "POST /cache/explain",
        r#"POST /cache/explain {"model_name": "m"}"#,
        r#"POST /cache/explain {"model_name": "m", "token_ids": [-1]}"#,
        r#"POST /cache/explain {"model_name": "answers", "token_ids": [1], "chunk_size": 7}"#,
        "POST /prefix/match",
        r#"POST /prefix/match {"model_name": "answers", "token_ids": "AAAAAQ="}"#,
        "DELETE /cache/objects",
        r#"DELETE /cache/objects {"keys": 7}"#,
        r#"DELETE /cache/objects {"keys": [7]}"#,
        r#"DELETE /cache/objects {"keys": [{"chunk_hash_hex": "00"}]}"#,
        r#"DELETE /cache/objects {"keys": [{"chunk_hash_hex": "00", "model_name": "m", "kv_rank": "1"}]}"#,
        r#"DELETE /cache/objects {"keys": [{"chunk_hash_hex": "00", "model_name": "m", "kv_rank": -1}]}"#,
        r#"DELETE /cache/objects {"keys": [{"chunk_hash_hex": "00", "model_name": "m", "kv_rank": 1, "object_group_id": -1}]}"#,
        r#"DELETE /cache/objects {"keys": [], "adapter": 1}"#,
        r#"DELETE /cache/objects {"keys": [], "adapter": "none"}"#,
        r#"PUT /quota/alice {"limit_gb": 1, "limit": 1}"#,
        r#"PUT /quota/alice {"limit_gb": 1, "tiers": {"fs-7": {}}}"#,
        r#"PUT /quota {"users": {"alice": {"limit_gb": "x"}}}"#,
    ] {
        answers.push(answer(&server, line));
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/answers.json");
    if std::env::var_os("KVTIER_WRITE_DOCS").is_some() {
        std::fs::write(path, format!("{:#}\n", json!(answers))).unwrap();
    }
    let recorded: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(recorded.as_array().unwrap().len(), answers.len());
    for (recorded, answer) in recorded.as_array().unwrap().iter().zip(answers) {
        assert_eq!(*recorded, answer, "{}", answer["request"]);
    }
}
