//! The tiers below L1 over HTTP: objects, prefetches without a request, state and figures.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use kvtier_client::{EngineDrivenWorker, Scope};
use serde_json::{Value, json};

use crate::http::{json_of, request};
use crate::l2::{fs, hits, settle, store, with_tiers};
use crate::metrics::parse_metrics;
use crate::support::{CHUNK, PATIENCE, TestServer, bytes, engine_driven, prompt, range, tokens};

const MOCK: &str = r#"{"type":"mock","max_size_gb":1,"mock_bandwidth_gb":100}"#;

const OBJECTS: &str = "/cache/objects";
const PREFETCHES: &str = "/cache/prefetches";

/// A server with a directory as its tier, and a worker.
fn with_worker(directory: &Path, scope: &Scope) -> (TestServer, EngineDrivenWorker) {
    let server = with_tiers(&[&fs(directory)], &[]);
    let worker = server.engine_driven(1, scope);
    (server, worker)
}

/// Every entry of a listing, page by page.
fn list(server: &TestServer, query: &str) -> Vec<Value> {
    let (mut entries, mut token) = (Vec::new(), String::new());
    loop {
        let path = format!("{OBJECTS}?{query}{token}");
        let (status, page) = json_of(server, "GET", &path, "");
        assert_eq!(status, 200, "{path}: {page}");
        entries.extend(page["entries"].as_array().unwrap().iter().cloned());
        match page["next_page_token"].as_str() {
            Some(next) => token = format!("&page_token={next}"),
            None => return entries,
        }
    }
}

fn keys(entries: &[Value]) -> BTreeSet<String> {
    let keys = entries.iter().map(|entry| entry["key"].to_string());
    keys.collect()
}

fn delete(server: &TestServer, body: &Value) -> Value {
    let (status, answer) = json_of(server, "DELETE", OBJECTS, &body.to_string());
    assert_eq!(status, 200, "{body}: {answer}");
    answer
}

/// Deleted, skipped and whether all went well.
fn counts(answer: &Value) -> (u64, u64, bool) {
    let count = |key: &str| answer[key].as_u64().unwrap();
    (
        count("deleted"),
        count("skipped"),
        answer["ok"].as_bool().unwrap(),
    )
}

fn detail(text: &str) -> Value {
    json!({ "detail": text })
}

fn wrong(kind: &str, location: Value, message: &str, input: Value) -> Value {
    json!({ "detail": [{ "type": kind, "loc": location, "msg": message, "input": input }] })
}

fn with_context(mut wrong: Value, key: &str, value: Value) -> Value {
    wrong["detail"][0]["ctx"] = json!({ key: value });
    wrong
}

#[test]
fn adapters_are_told_in_their_order() {
    let adapters = |server: &TestServer| json_of(server, "GET", "/config/adapters", "");
    let alone = TestServer::start(&[]);
    assert_eq!(adapters(&alone), (200, json!({ "adapters": [] })));
    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path()), MOCK], &[]);
    let expected = json!({ "adapters": [
        { "index": 0, "type_name": "fs", "name": "fs-0", "tier": "l2", "primary": true, "reconfigurable": false },
        { "index": 1, "type_name": "mock", "name": "mock-1", "tier": "l2", "primary": false, "reconfigurable": false },
    ] });
    assert_eq!(adapters(&server), (200, expected));
}

#[test]
fn every_object_is_listed_once_page_by_page() {
    let directory = tempfile::tempdir().unwrap();
    let (one, other) = (
        Scope::new("list/one"),
        Scope::new("list/other").with_salt("t"),
    );
    let server = with_tiers(&[&fs(directory.path()), MOCK], &[]);
    let mut worker = server.engine_driven(1, &one);
    store(&mut worker, &prompt(1, 7), 1);
    let mut tenant = server.engine_driven(2, &other);
    store(&mut tenant, &prompt(2, 4), 2);
    settle(&server);
    let (_, page) = json_of(&server, "GET", OBJECTS, "");
    assert_eq!(
        [
            &page["adapter"],
            &page["name"],
            &page["shared"],
            &page["next_page_token"]
        ],
        [&json!("fs"), &json!("fs-0"), &json!(false), &Value::Null]
    );
    let all = keys(page["entries"].as_array().unwrap());
    assert_eq!(all.len(), 11);
    let len = worker.chunk_bytes() as u64;
    for entry in page["entries"].as_array().unwrap() {
        assert!(entry["size_bytes"].as_u64().unwrap() >= len, "{entry}");
        assert!(entry["used_at"].as_u64().unwrap() > 0, "{entry}");
    }
    for query in [
        "page_size=1",
        "page_size=2&tier=l2",
        "adapter=fs-0&page_size=3",
        "adapter=mock&page_size=4",
        "adapter=mock-1",
        "tier=l1&page_size=3",
        "tier=l1",
    ] {
        let listed = list(&server, query);
        assert_eq!(listed.len(), 11, "{query}");
        assert_eq!(keys(&listed), all, "{query}");
    }
    for tier in ["l1", "l2"] {
        let listed = list(
            &server,
            &format!("model_name=list/other&page_size=3&tier={tier}"),
        );
        assert_eq!(listed.len(), 4, "{tier}");
        for entry in listed {
            let key = &entry["key"];
            assert_eq!(key["chunk_hash_hex"].as_str().unwrap().len(), 64);
            assert_eq!(
                [
                    &key["model_name"],
                    &key["kv_rank"],
                    &key["object_group_id"],
                    &key["cache_salt"]
                ],
                [
                    &json!("list/other"),
                    &json!(0x0100_0100),
                    &json!(0),
                    &json!("t")
                ]
            );
        }
        assert!(list(&server, &format!("tier={tier}&model_name=list")).is_empty());
    }
}

#[test]
fn a_listing_that_cannot_be_says_why() {
    let alone = TestServer::start(&[]);
    let none = detail("no L2 adapters configured");
    for query in ["", "?adapter=fs", "?tier=l2"] {
        let answer = json_of(&alone, "GET", &format!("{OBJECTS}{query}"), "");
        assert_eq!(answer, (503, none.clone()), "{query}");
    }
    assert!(list(&alone, "tier=l1").is_empty());

    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path()), MOCK], &[]);
    let at = |name: &str| json!(["query", name]);
    let token = |parts: Value| hex(&parts.to_string());
    let bad = |token: &str| {
        detail(&format!(
            "page_token is not one that this listing gave (got '{token}')"
        ))
    };
    let (of_mock, of_l1, odd) = (
        token(json!(["mock-1", null, null])),
        token(json!(["l1", "-1", null])),
        token(json!(["fs-0"])),
    );
    let int = "Input should be a valid integer, unable to parse string as an integer";
    let cases = [
        (
            "tier=all",
            400,
            detail("tier 'all' not supported; only 'l2' and 'l1'"),
        ),
        (
            "tier=l9",
            422,
            with_context(
                wrong(
                    "enum",
                    at("tier"),
                    "Input should be 'l1', 'l2' or 'all'",
                    json!("l9"),
                ),
                "expected",
                json!("'l1', 'l2' or 'all'"),
            ),
        ),
        (
            "adapter=nope",
            404,
            detail("no L2 adapter with type_name='nope'"),
        ),
        (
            "page_size=0",
            422,
            with_context(
                wrong(
                    "greater_than_equal",
                    at("page_size"),
                    "Input should be greater than or equal to 1",
                    json!("0"),
                ),
                "ge",
                json!(1),
            ),
        ),
        (
            "page_size=5001",
            422,
            with_context(
                wrong(
                    "less_than_equal",
                    at("page_size"),
                    "Input should be less than or equal to 5000",
                    json!("5001"),
                ),
                "le",
                json!(5000),
            ),
        ),
        (
            "page_size=abc",
            422,
            wrong("int_parsing", at("page_size"), int, json!("abc")),
        ),
        ("page_token=@@@", 400, bad("@@@")),
        ("page_token=00", 400, bad("00")),
        (&*format!("page_token={of_mock}"), 400, bad(&of_mock)),
        (&*format!("page_token={odd}"), 400, bad(&odd)),
        (&*format!("tier=l1&page_token={of_l1}"), 400, bad("-1")),
    ];
    for (query, status, expected) in cases {
        let answer = json_of(&server, "GET", &format!("{OBJECTS}?{query}"), "");
        assert_eq!(answer, (status, expected), "{query}");
    }
    // Only the adapter knows its positions.
    let strange = token(json!(["fs-0", "nowhere", null]));
    let (status, answer) = json_of(
        &server,
        "GET",
        &format!("{OBJECTS}?page_token={strange}"),
        "",
    );
    let text = answer["detail"].as_str().unwrap();
    assert_eq!(status, 400, "{text}");
    assert!(
        text.starts_with("page_token is not one that this listing gave"),
        "{text}"
    );
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_deletion_counts_what_really_went() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("delete/counts");
    let (server, mut worker) = with_worker(directory.path(), &scope);
    let (first, second) = (prompt(1, 3), prompt(2, 3));
    store(&mut worker, &first, 1);
    settle(&server);
    let of_first: Vec<_> = list(&server, "")
        .iter()
        .map(|entry| entry["key"].clone())
        .collect();
    store(&mut worker, &second, 2);
    settle(&server);
    assert_eq!(list(&server, "").len(), 6);

    // Of the tiers, which is what is meant when nothing is said.
    let answer = delete(&server, &json!({ "keys": of_first }));
    assert_eq!(counts(&answer), (3, 0, true));
    assert_eq!(
        answer["by_tier"],
        json!({ "fs-0": { "deleted": 3, "skipped": 0, "failed": 0 } })
    );
    assert!(answer.get("error").is_none());
    assert_eq!(
        (list(&server, "").len(), list(&server, "tier=l1").len()),
        (3, 6)
    );
    assert_eq!(server.readings().tiers[0].objects, 3);
    // Twice, and never there.
    assert_eq!(
        counts(&delete(&server, &json!({ "keys": of_first }))),
        (0, 0, true)
    );
    for tier in ["l1", "l2", "all"] {
        let absent = json!({ "chunk_hash_hex": "00ff", "model_name": "m", "kv_rank": 1 });
        let body = json!({ "keys": [absent], "tier": tier });
        assert_eq!(counts(&delete(&server, &body)), (0, 0, true), "{tier}");
    }
    assert_eq!(
        counts(&delete(&server, &json!({ "keys": [] }))),
        (0, 0, true)
    );

    // What an engine reads stays, unless it is forced.
    assert_eq!(worker.lookup(&first, "r").unwrap(), 3);
    let in_l1 = json!({ "keys": of_first, "tier": "l1" });
    assert_eq!(counts(&delete(&server, &in_l1)), (0, 3, true));
    worker.connection().end_session("r").unwrap();
    assert_eq!(counts(&delete(&server, &in_l1)), (3, 0, true));

    let all: Vec<_> = list(&server, "")
        .iter()
        .map(|entry| entry["key"].clone())
        .collect();
    assert_eq!(worker.lookup(&second, "s").unwrap(), 3);
    let everywhere =
        |force: bool| json!({ "keys": all, "tier": "all", "force": force, "adapter": "fs-0" });
    let answer = delete(&server, &everywhere(false));
    assert_eq!(counts(&answer), (3, 3, true));
    assert_eq!(
        answer["by_tier"],
        json!({
            "l1": { "deleted": 0, "skipped": 3, "failed": 0 },
            "fs-0": { "deleted": 3, "skipped": 0, "failed": 0 },
        })
    );
    assert_eq!(counts(&delete(&server, &everywhere(true))), (3, 0, true));
    worker.connection().end_session("s").unwrap();
    assert_eq!(server.readings().objects, 0);
    assert_eq!(hits(worker.connection(), &scope, &second, "t"), 0);
    server.assert_sound();
}

#[test]
fn a_deletion_without_an_adapter_means_every_tier() {
    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path()), MOCK], &[]);
    let mut worker = server.engine_driven(1, &Scope::new("delete/all"));
    store(&mut worker, &prompt(1, 2), 1);
    settle(&server);
    let keys: Vec<_> = list(&server, "")
        .iter()
        .map(|entry| entry["key"].clone())
        .collect();
    let one = delete(&server, &json!({ "keys": [keys[0]], "adapter": "mock" }));
    assert_eq!(counts(&one), (1, 0, true));
    assert_eq!(
        counts(&delete(&server, &json!({ "keys": keys }))),
        (3, 0, true)
    );
    assert!(list(&server, "adapter=fs").is_empty() && list(&server, "adapter=mock").is_empty());
}

#[test]
fn a_tier_that_cannot_delete_is_told_of() {
    // Its one place for stores and deletes is taken for hours by a store that nobody waits for any more.
    let busy = r#"{"type":"mock","max_size_gb":1,"mock_bandwidth_gb":1e-9,"store_timeout_ms":1,"max_in_flight":1}"#;
    let flags = ["--l2-drain-timeout-seconds", "0"];
    let server = with_tiers(&[busy], &flags);
    let mut worker = server.engine_driven(1, &Scope::new("delete/fails"));
    store(&mut worker, &prompt(1, 1), 1);
    let started = Instant::now();
    while server.readings().tiers[0].store_failures.is_empty() {
        assert!(started.elapsed() < PATIENCE, "the store is not given up");
        std::thread::yield_now();
    }
    let key = list(&server, "tier=l1")[0]["key"].clone();
    let answer = delete(&server, &json!({ "keys": [key, key] }));
    assert_eq!(counts(&answer), (0, 0, false));
    assert_eq!(
        answer["by_tier"],
        json!({ "mock-0": { "deleted": 0, "skipped": 0, "failed": 2 } })
    );
    let error = answer["error"].as_str().unwrap();
    assert!(error.starts_with("mock-0: "), "{answer}");
}

#[test]
fn a_deletion_that_cannot_be_says_why_and_deletes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (server, mut worker) = with_worker(directory.path(), &Scope::new("delete/refused"));
    store(&mut worker, &prompt(1, 2), 1);
    settle(&server);
    let good = list(&server, "tier=l1")[0]["key"].clone();
    let alone = TestServer::start(&[]);
    for tier in ["l2", "all"] {
        let body = json!({ "keys": [good], "tier": tier }).to_string();
        let answer = json_of(&alone, "DELETE", OBJECTS, &body);
        assert_eq!(answer, (503, detail("no L2 adapters configured")), "{tier}");
    }
    let body = json!({ "keys": [good], "tier": "l1" });
    assert_eq!(counts(&delete(&alone, &body)), (0, 0, true));

    let with = |field: &str, value: Value| {
        let mut key = good.clone();
        key[field] = value;
        json!({ "keys": [good, key], "tier": "all" })
    };
    let without = |field: &str| {
        let mut key = good.clone();
        key.as_object_mut().unwrap().remove(field);
        key
    };
    let at = |field: &str| json!(["body", "keys", 1, field]);
    let missing = |field: &str| wrong("missing", at(field), "Field required", without(field));
    let cases = [
        (
            Value::Null,
            422,
            wrong("missing", json!(["body"]), "Field required", Value::Null),
        ),
        (
            json!({}),
            422,
            wrong(
                "missing",
                json!(["body", "keys"]),
                "Field required",
                json!({}),
            ),
        ),
        (
            json!({ "keys": 1 }),
            422,
            wrong(
                "list_type",
                json!(["body", "keys"]),
                "Input should be a valid list",
                json!(1),
            ),
        ),
        (
            json!({ "keys": ["k"] }),
            422,
            wrong(
                "dict_type",
                json!(["body", "keys", 0]),
                "Input should be a JSON object",
                json!("k"),
            ),
        ),
        (
            json!({ "keys": [good, without("kv_rank")] }),
            422,
            missing("kv_rank"),
        ),
        (
            json!({ "keys": [good, without("model_name")] }),
            422,
            missing("model_name"),
        ),
        (
            json!({ "keys": [good, without("chunk_hash_hex")] }),
            422,
            missing("chunk_hash_hex"),
        ),
        (
            with("model_name", json!(7)),
            422,
            wrong(
                "string_type",
                at("model_name"),
                "Input should be a valid string",
                json!(7),
            ),
        ),
        (
            with("kv_rank", json!(1.5)),
            422,
            wrong(
                "int_type",
                at("kv_rank"),
                "Input should be a valid integer",
                json!(1.5),
            ),
        ),
        (
            with("chunk_hash_hex", json!("zz")),
            400,
            detail(r#"keys[1]: chunk_hash_hex must be pairs of hex digits (got "zz")"#),
        ),
        (
            with("model_name", json!("a@b")),
            400,
            detail(
                r#"keys[1]: model_name must not contain '@', which separates the fields of a key's text forms (got "a@b")"#,
            ),
        ),
        (
            with("cache_salt", json!("a/b")),
            400,
            detail(
                r"keys[1]: cache_salt: a cache salt must not contain '/'; '@', '/', '\' and NUL are refused",
            ),
        ),
        (
            with("kv_rank", json!(-1)),
            400,
            detail("keys[1]: kv_rank must be at least 0 (got -1)"),
        ),
        (
            with("object_group_id", json!(-1)),
            400,
            detail("keys[1]: object_group_id must be between 0 and 4294967295 (got -1)"),
        ),
        (
            json!({ "keys": vec![&good; 10_001], "tier": "all" }),
            400,
            detail("too many keys in a single request (limit=10000, got=10001)"),
        ),
        (
            json!({ "keys": [good], "tier": "all", "adapter": "nope" }),
            404,
            detail("no L2 adapter with type_name='nope'"),
        ),
        (
            json!({ "keys": [good], "tier": "zzz" }),
            422,
            with_context(
                wrong(
                    "enum",
                    json!(["body", "tier"]),
                    "Input should be 'l1', 'l2' or 'all'",
                    json!("zzz"),
                ),
                "expected",
                json!("'l1', 'l2' or 'all'"),
            ),
        ),
        (
            json!({ "keys": [good], "force": "maybe" }),
            422,
            wrong(
                "bool_parsing",
                json!(["body", "force"]),
                "Input should be true or false",
                json!("maybe"),
            ),
        ),
    ];
    for (body, status, expected) in cases {
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let answer = json_of(&server, "DELETE", OBJECTS, &body);
        assert_eq!(answer, (status, expected), "{:.200}", body);
    }
    assert_eq!(
        (list(&server, "").len(), list(&server, "tier=l1").len()),
        (2, 2)
    );
}

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
fn a_prompt_is_loaded_before_anybody_asks_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("warm/ranks").with_salt("t").with_world_size(2);
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
    server.engine().clear(true);
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
    // It is in L1 to stay, held by nobody, and the engines find it there.
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
fn more_than_l1_holds_is_loaded_as_far_as_it_goes() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("warm/large");
    // 2 MiB of L1, 256 objects.
    let server = with_tiers(&[&fs(directory.path())], &["--l1-size-gb", "0.001953125"]);
    let mut worker = server.engine_driven(1, &scope);
    let (all, len) = (prompt(1, 400), worker.chunk_bytes());
    for first in (0..400).step_by(50) {
        let stored = worker.store(&all, range(first..first + 50), "s", |chunk| {
            bytes(1, first + chunk, len)
        });
        assert_eq!(stored.unwrap().chunks.len(), 50);
        settle(&server);
    }
    server.engine().clear(true);
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
fn a_prefetch_that_cannot_be_says_why() {
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
    let missing = |field: &str| {
        wrong(
            "missing",
            json!(["body", field]),
            "Field required",
            without(field),
        )
    };
    let unregistered = |model: &str, world: i64| {
        detail(&format!(
            "no layout registered for model_name='{model}' world_size={world}; the model has not allocated KV cache on \
             this node yet"
        ))
    };
    let token = |index: u32| json!(["body", "token_ids", index]);
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
            wrong(
                "list_type",
                json!(["body", "token_ids"]),
                "Input should be a valid list",
                json!(7),
            ),
        ),
        (
            body(json!({ "token_ids": ["x"] })),
            422,
            wrong(
                "int_parsing",
                token(0),
                "Input should be a valid integer, unable to parse string as an integer",
                json!("x"),
            ),
        ),
        (
            body(json!({ "token_ids": [1, null] })),
            422,
            wrong(
                "int_type",
                token(1),
                "Input should be a valid integer",
                Value::Null,
            ),
        ),
        (
            body(json!({ "token_ids": [1, 2, -1] })),
            422,
            with_context(
                wrong(
                    "greater_than_equal",
                    token(2),
                    "Input should be greater than or equal to 0",
                    json!(-1),
                ),
                "ge",
                json!(0),
            ),
        ),
        (
            body(json!({ "token_ids": [1_u64 << 32] })),
            422,
            with_context(
                wrong(
                    "less_than_equal",
                    token(0),
                    "Input should be less than or equal to 4294967295",
                    json!(1_u64 << 32),
                ),
                "le",
                json!(u32::MAX),
            ),
        ),
    ];
    for (body, status, expected) in cases {
        let body = body.to_string();
        let answer = json_of(&server, "POST", PREFETCHES, &body);
        assert_eq!(answer, (status, expected), "{:.200}", body);
    }
    let empty = json_of(&server, "POST", PREFETCHES, "");
    let expected = wrong("missing", json!(["body"]), "Field required", Value::Null);
    assert_eq!(empty, (422, expected));
    let broken = json_of(&server, "POST", PREFETCHES, "{bad");
    assert_eq!(
        (broken.0, &broken.1["detail"][0]["type"]),
        (422, &json!("json_invalid"))
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
fn status_tells_how_each_tier_is() {
    let directory = tempfile::tempdir().unwrap();
    let bounded = json!({
        "type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 100,
        "eviction": { "eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.3 },
    });
    let server = with_tiers(&[&fs(directory.path()), &bounded.to_string()], &[]);
    let mut worker = server.engine_driven(1, &Scope::new("status").with_salt("t"));
    store(&mut worker, &prompt(1, 3), 1);
    settle(&server);
    let started = Instant::now();
    let manager = loop {
        let status = json_of(&server, "GET", "/status", "").1;
        let manager = status["storage_manager"].clone();
        if manager["l2_adapters"][0]["recovery"]["state"] == "done" {
            break manager;
        }
        assert!(started.elapsed() < PATIENCE, "{status}");
    };
    let len = worker.chunk_bytes() as u64;
    let [fs, mock] = [0, 1].map(|number| &manager["l2_adapters"][number]);
    // Those of LMCache's that are known to be read.
    for (status, key, expected) in [
        (fs, "is_healthy", json!(true)),
        (fs, "type", json!("FSL2Adapter")),
        (fs, "base_path", json!(directory.path())),
        (fs, "use_odirect", json!(false)),
        (mock, "type", json!("MockL2Adapter")),
        (mock, "stored_object_count", json!(3)),
        (mock, "locked_key_count", json!(0)),
        (mock, "max_capacity_bytes", json!(1 << 30)),
        (fs, "type_name", json!("fs")),
        (fs, "name", json!("fs-0")),
        (fs, "stored_object_count", json!(3)),
        (fs, "max_capacity_bytes", json!(0)),
        (fs, "usage_fraction", json!(-1.0)),
        (fs, "cache_salt_count", json!(1)),
        (fs, "is_full", json!(false)),
        (fs, "pending_objects", json!(0)),
        (fs, "dropped_objects", json!(0)),
        (fs, "stores_in_flight", json!(0)),
        (fs, "loads_in_flight", json!(0)),
        (fs, "store_failures", json!({})),
        (fs, "load_failures", json!({})),
    ] {
        assert_eq!(status[key], expected, "{key} of {}", status["name"]);
    }
    assert!(mock["current_size_bytes"].as_u64().unwrap() >= 3 * len);
    assert_eq!(fs["breaker"]["load"]["state"], "closed");
    assert_eq!(manager["num_l2_adapters"], 2);
    let eviction = &manager["l2_eviction_controller"]["adapters"];
    assert_eq!(eviction.as_array().unwrap().len(), 1);
    for (key, expected) in [
        ("adapter", json!("mock-1")),
        ("eviction_policy", json!("LRU")),
        ("trigger_watermark", json!(0.9)),
        ("eviction_ratio", json!(0.3)),
        ("total_bytes_used", mock["current_size_bytes"].clone()),
        ("total_capacity_bytes", json!(1 << 30)),
        ("num_cache_salt_buckets", json!(1)),
        ("current_usage", mock["usage_fraction"].clone()),
    ] {
        assert_eq!(eviction[0][key], expected, "{key}");
    }
}

#[test]
fn what_the_tiers_do_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("metrics/tiers").with_salt("t");
    let server = with_tiers(&[&fs(directory.path()), MOCK], &[]);
    let mut worker = server.engine_driven(1, &scope);
    let known = prompt(1, 4);
    store(&mut worker, &known, 1);
    settle(&server);
    server.engine().clear(true);
    assert_eq!(hits(worker.connection(), &scope, &known, "r"), 4);
    // In L1 from now on.
    assert_eq!(hits(worker.connection(), &scope, &known, "s"), 4);
    let (_, _, text) = request(&server, "GET", "/metrics", "");
    let metrics = parse_metrics(&text);
    let value = |name: &str, label: &str| {
        let mut found = metrics
            .iter()
            .filter(|metric| metric.name == name && metric.labels.contains(label));
        let value = found
            .next()
            .unwrap_or_else(|| panic!("no {name} with {label}"))
            .value;
        assert!(found.next().is_none(), "{name} with {label} is there twice");
        value
    };
    let names = include_str!("../vectors/metrics_names.txt").lines();
    for line in names.filter(|line| line.contains("_l2_")) {
        let (name, kind) = line.split_once(' ').unwrap();
        if name == "lmcache_mp_l2_evicted_objects_chunks_total" {
            // Nothing was evicted here.
            continue;
        }
        let there = metrics.iter().any(|metric| {
            let base = metric.name.strip_suffix("_count").unwrap_or(&metric.name);
            base == name && metric.kind == kind
        });
        assert!(there, "{name} is missing, or no {kind}");
    }
    let (tenant, fs, mock) = (
        r#"cache_salt="t""#,
        r#"l2_name="fs-0""#,
        r#"l2_name="mock-1""#,
    );
    let tokens = (4 * CHUNK) as f64;
    for (name, label, expected) in [
        ("lmcache_mp_lookup_hit_tokens_total", tenant, 2.0 * tokens),
        ("lmcache_mp_lookup_hit_l1_tokens_total", tenant, tokens),
        ("lmcache_mp_lookup_hit_l2_tokens_total", tenant, tokens),
        ("lmcache_mp_lookup_hit_l1_keys_total", tenant, 4.0),
        ("lmcache_mp_lookup_hit_l2_keys_total", tenant, 4.0),
        // Both tiers store, the first one loads.
        ("lmcache_mp_l2_store_submitted_requests_total", "", 2.0),
        (
            "lmcache_mp_l2_store_submitted_objects_chunks_total",
            tenant,
            8.0,
        ),
        (
            "lmcache_mp_l2_store_completed_objects_chunks_total",
            tenant,
            8.0,
        ),
        ("lmcache_mp_l2_store_completed_requests_total", fs, 1.0),
        ("lmcache_mp_l2_store_completed_requests_total", mock, 1.0),
        (
            "lmcache_mp_l2_store_throughput_GB_per_second_count",
            mock,
            1.0,
        ),
        ("lmcache_mp_l2_prefetch_lookup_requests_total", "", 1.0),
        (
            "lmcache_mp_l2_prefetch_lookup_objects_chunks_total",
            tenant,
            4.0,
        ),
        (
            "lmcache_mp_l2_prefetch_load_submitted_requests_total",
            "",
            1.0,
        ),
        (
            "lmcache_mp_l2_prefetch_load_submitted_objects_chunks_total",
            tenant,
            4.0,
        ),
        (
            "lmcache_mp_l2_prefetch_load_completed_chunks_total",
            tenant,
            4.0,
        ),
        ("lmcache_mp_l2_load_completed_requests_total", fs, 1.0),
        ("lmcache_mp_l2_load_throughput_GB_per_second_count", fs, 1.0),
        ("lmcache_mp_num_inflight_l2_stores", fs, 0.0),
        (
            "lmcache_mp_num_inflight_l2_loads",
            r#"adapter_index="1""#,
            0.0,
        ),
        ("lmcache_mp_inflight_load_memory_usage_bytes", fs, 0.0),
        ("lmcache_mp_l2_store_adapters", r#"state="active""#, 2.0),
        (
            "lmcache_mp_l2_prefetch_adapters",
            r#"state="draining""#,
            0.0,
        ),
        ("kvtier_l2_objects", fs, 4.0),
        ("kvtier_l2_stored_objects_total", mock, 4.0),
        ("kvtier_l2_looked_up_objects_total", fs, 4.0),
        ("kvtier_l2_looked_up_objects_total", mock, 0.0),
        ("kvtier_l2_found_objects_total", fs, 4.0),
        ("kvtier_l2_loaded_objects_total", fs, 4.0),
        ("kvtier_l2_unverified_objects_total", fs, 0.0),
        ("kvtier_l2_dropped_objects_total", fs, 0.0),
        ("kvtier_l2_queued_bytes", fs, 0.0),
        ("kvtier_l2_capacity_bytes", mock, f64::from(1 << 30)),
        ("kvtier_l2_full", fs, 0.0),
        ("kvtier_l2_prefetches", r#"phase="load""#, 0.0),
        (
            "kvtier_l2_call_duration_seconds_count",
            r#"call="lookup",l2_name="fs-0""#,
            1.0,
        ),
        (
            "kvtier_l2_call_duration_seconds_count",
            r#"call="store",l2_name="mock-1""#,
            1.0,
        ),
        (
            "kvtier_l2_breaker_open",
            r#"call="store",l2_name="fs-0""#,
            0.0,
        ),
        (
            "kvtier_l2_late_calls_total",
            r#"call="load",l2_name="fs-0""#,
            0.0,
        ),
    ] {
        assert_eq!(value(name, label), expected, "{name} {label}");
    }
    let used = server.readings().tiers[0].used_bytes as f64;
    assert_eq!(value("lmcache_mp_l2_usage_bytes", fs), used);
    assert!(used >= 4.0 * worker.chunk_bytes() as f64);
}

#[test]
fn what_a_tier_fails_to_do_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    let scope = Scope::new("metrics/failures");
    let failing = format!(
        r#"{{"type":"fault_inject","gap_indices":[1],"inner":{}}}"#,
        fs(directory.path())
    );
    let server = with_tiers(&[&failing], &[]);
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 3), 1);
    settle(&server);
    server.engine().clear(true);
    assert_eq!(hits(worker.connection(), &scope, &prompt(1, 3), "r"), 1);
    let (_, _, text) = request(&server, "GET", "/metrics", "");
    let metrics = parse_metrics(&text);
    let sum = |name: &str| -> f64 {
        let found = metrics.iter().filter(|metric| metric.name == name);
        found.map(|metric| metric.value).sum()
    };
    assert_eq!(sum("lmcache_mp_l2_prefetch_failure_chunks_total"), 1.0);
    assert!(sum("kvtier_l2_load_failures_total") >= 1.0);
    let (_, status) = json_of(&server, "GET", "/status", "");
    let tier = &status["storage_manager"]["l2_adapters"][0];
    assert!(
        !tier["load_failures"].as_object().unwrap().is_empty(),
        "{tier}"
    );
}
