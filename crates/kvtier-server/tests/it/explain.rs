//! Why a lookup misses: each reason made for real, and what a reader may learn.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use kvtier_client::{
    EngineDrivenWorker, InstanceId, LmcacheDrivenSpec, LmcacheDrivenWorker, Scope,
};
use serde_json::{Value, json};

use crate::http::{json_of, request};
use crate::l2::{fs, hits, settle, store, with_tiers};
use crate::metrics::parse_metrics;
use crate::support::{CHUNK, PATIENCE, Steps as _, TestServer, engine_driven, prompt, tokens};

const EXPLAIN: &str = "/cache/explain";

pub fn body(model: &str, salt: &str, seed: u32, chunks: usize) -> Value {
    json!({ "model_name": model, "cache_salt": salt, "token_ids": tokens(seed, chunks) })
}

fn explain(server: &TestServer, body: &Value) -> Value {
    let (status, answer) = json_of(server, "POST", EXPLAIN, &body.to_string());
    assert_eq!(status, 200, "{answer}");
    answer
}

/// The error of a body that is refused.
fn refused(server: &TestServer, body: &Value) -> String {
    let (status, answer) = json_of(server, "POST", EXPLAIN, &body.to_string());
    assert_eq!(status, 400, "{answer}");
    answer["detail"].as_str().unwrap().to_owned()
}

/// The runs of the only row: first chunk, number, and state with all that belongs to it.
fn runs(answer: &Value) -> Vec<(u64, u64, String)> {
    assert_eq!(answer["rows"].as_array().unwrap().len(), 1, "{answer}");
    runs_of(&answer["rows"][0])
}

fn runs_of(row: &Value) -> Vec<(u64, u64, String)> {
    let run = |run: &Value| {
        let parts = ["state", "tier", "reason", "cause", "stored_as"];
        let parts = parts.iter().filter_map(|part| run[part].as_str());
        let number = |field: &str| run[field].as_u64().unwrap();
        assert_eq!(number("first_token"), number("first_chunk") * CHUNK as u64);
        assert_eq!(number("tokens"), number("chunks") * CHUNK as u64);
        (
            number("first_chunk"),
            number("chunks"),
            parts.collect::<Vec<_>>().join(" "),
        )
    };
    row["runs"].as_array().unwrap().iter().map(run).collect()
}

fn run(first: u64, chunks: u64, state: &str) -> (u64, u64, String) {
    (first, chunks, state.to_owned())
}

#[test]
fn present_chunks_and_unknown_ones_are_told_apart() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("explain/l1").with_salt("t");
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 3), 1);
    assert_eq!(worker.lookup(&prompt(1, 5), "r").unwrap(), 3);
    let before = server.readings();
    let answer = explain(&server, &body("explain/l1", "t", 1, 5));
    assert_eq!(
        runs(&answer),
        [run(0, 3, "l1"), run(3, 2, "missing never_seen")]
    );
    for (field, value) in [
        ("hit_tokens", json!(48)),
        ("hit_tokens_l1", json!(48)),
        ("tokens", json!(80)),
        ("chunks", json!(5)),
        ("chunk_size", json!(16)),
        ("world_size", json!(1)),
        ("refused", Value::Null),
        ("model_names", json!(["explain/l1"])),
        ("remembered_seconds", json!({ "l1": null })),
    ] {
        assert_eq!(answer[field], value, "{field}");
    }
    let lookups = answer["recent_lookups"].as_array().unwrap();
    let lookup = |lookup: &Value| {
        let number = |field: &str| lookup[field].as_u64().unwrap();
        (
            number("tokens"),
            number("hit_tokens"),
            lookup["same_start"] == true,
        )
    };
    let lookups: Vec<_> = lookups.iter().map(lookup).collect();
    assert_eq!(lookups, [(80, 48, true)]);
    assert_eq!(
        answer["summary"],
        "a lookup finds 48 of 80 tokens: 48 in L1, 0 in tiers; from chunk 3 (token 48) on it misses: \
         never stored, as far back as the server remembers"
    );
    // Other tokens begin otherwise, and a rest has no chunk.
    let mut other = body("explain/l1", "t", 2, 1);
    assert_eq!(
        explain(&server, &other)["recent_lookups"][0]["same_start"],
        false
    );
    other["token_ids"] = json!([1, 2, 3]);
    let short = explain(&server, &other);
    assert_eq!(
        (&short["chunks"], &short["hit_tokens"]),
        (&json!(0), &json!(0))
    );
    // Nothing was asked for or used by this.
    assert_eq!(server.readings().leased_objects, before.leased_objects);
    server.assert_sound();
}

// proves: docs/troubleshoot.md#why-did-it-miss
#[test]
fn evictions_have_their_policy_and_time() {
    let server = TestServer::start(&["--l1-size-gb", "0.001953125"]);
    let scope = Scope::new("explain/evicted");
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 4), 1);
    server.pass(Duration::from_secs(3));
    // Two chunks more than fit.
    let fits = server.readings().capacity_bytes / worker.chunk_bytes() as u64;
    for chunk in 0..fits - 2 {
        worker.stored(&prompt(2 + chunk as u32, 1), 0..1, 2);
    }
    server.pass(Duration::from_secs(200));
    let answer = explain(&server, &body("explain/evicted", "", 1, 5));
    // The last chunk of a prompt is the first to be evicted.
    let expected = [
        run(0, 2, "l1"),
        run(2, 2, "missing l1 evicted space"),
        run(4, 1, "missing never_seen"),
    ];
    assert_eq!(runs(&answer), expected);
    let lost = &answer["rows"][0]["runs"][1];
    let seconds = lost["seconds_ago"].as_u64().unwrap();
    assert!((200..260).contains(&seconds), "{seconds}");
    let text = "evicted from L1 3 min ago to make space (policy LRU)";
    assert_eq!(lost["text"], text);
    let summary = answer["summary"].as_str().unwrap();
    assert!(summary.contains(text), "{summary}");
    assert_eq!(answer["hit_tokens"], 32);
    // It is stored again, and the memory of its eviction does not hide that.
    store(&mut worker, &prompt(1, 4), 1);
    let answer = explain(&server, &body("explain/evicted", "", 1, 4));
    assert_eq!(runs(&answer), [run(0, 4, "l1")]);
}

#[test]
fn misses_are_counted_by_reason() {
    let server = TestServer::start(&["--l1-size-gb", "0.001953125"]);
    let mut worker = server.engine_driven(1, &Scope::new("explain/counted"));
    store(&mut worker, &prompt(1, 4), 1);
    let fits = server.readings().capacity_bytes / worker.chunk_bytes() as u64;
    for chunk in 0..fits - 2 {
        worker.stored(&prompt(2 + chunk as u32, 1), 0..1, 2);
    }
    server.pass(Duration::from_secs(3));
    let lookup = |worker: &mut EngineDrivenWorker, seed, chunks, found| {
        assert_eq!(worker.lookup(&prompt(seed, chunks), "r").unwrap(), found);
        worker.connection().end_session("r").unwrap();
    };
    lookup(&mut worker, 1, 4, 2);
    lookup(&mut worker, 1, 2, 2);
    lookup(&mut worker, 9000, 1, 0);
    // Stored and removed behind the lookup, which is no reason of it.
    lookup(&mut worker, 9001, 1, 0);
    server.pass(Duration::from_secs(3));
    worker.stored(&prompt(9001, 1), 0..1, 3);
    let (status, _) = json_of(&server, "POST", "/cache/clear", "");
    assert_eq!(status, 200);
    let (_, _, text) = request(&server, "GET", "/metrics", "");
    let metrics = parse_metrics(&text);
    let counted = metrics
        .iter()
        .filter(|metric| metric.name == "kvtier_lookup_misses_total")
        .map(|metric| (metric.labels.as_str(), metric.value));
    let mut counted: Vec<_> = counted.collect();
    counted.sort_by(|one, other| one.0.cmp(other.0));
    let expected = [
        (r#"cause="",reason="never_seen",tier="""#, 2.0),
        (r#"cause="space",reason="evicted",tier="l1""#, 1.0),
    ];
    assert_eq!(counted, expected);
}

#[test]
fn quotas_and_requests_are_named_as_causes() {
    let server = TestServer::start(&["--eviction-policy", "IsolatedLRU", "--quota-mode", "strict"]);
    let limit = json!({ "limit_gb": 2.0 * 8192.0 / f64::from(1 << 30) });
    let (status, _) = json_of(&server, "PUT", "/quota/t", &limit.to_string());
    assert_eq!(status, 200);
    let scope = Scope::new("explain/quota").with_salt("t");
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 2), 1);
    worker.stored(&prompt(2, 1), 0..1, 2);
    let answer = explain(&server, &body("explain/quota", "t", 1, 2));
    assert_eq!(
        runs(&answer),
        [run(0, 1, "l1"), run(1, 1, "missing l1 evicted quota")]
    );
    // Leased objects cannot be evicted for others.
    assert_eq!(worker.lookup(&prompt(1, 1), "r1").unwrap(), 1);
    assert_eq!(worker.lookup(&prompt(2, 1), "r2").unwrap(), 1);
    worker.stored(&prompt(3, 1), 0..1, 3);
    let answer = explain(&server, &body("explain/quota", "t", 3, 1));
    assert_eq!(runs(&answer), [run(0, 1, "missing l1 store_refused quota")]);
    worker.connection().end_session("r1").unwrap();
    worker.connection().end_session("r2").unwrap();
    let (status, _) = json_of(&server, "POST", "/cache/clear", "");
    assert_eq!(status, 200);
    let answer = explain(&server, &body("explain/quota", "t", 2, 1));
    assert_eq!(runs(&answer), [run(0, 1, "missing l1 removed")]);
    assert!(answer["summary"].as_str().unwrap().contains("on request"));
}

#[test]
fn chunks_are_found_in_their_tier() {
    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path())], &[]);
    let scope = Scope::new("explain/tier");
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 4), 1);
    settle(&server);
    server.engine().admin().clear(true);
    // One of them is in L1 again.
    assert_eq!(hits(worker.connection(), &scope, &prompt(1, 1), "r"), 1);
    let loaded = server.readings().tiers[0].loaded_objects;
    let answer = explain(&server, &body("explain/tier", "", 1, 6));
    let expected = [
        run(0, 1, "l1"),
        run(1, 3, "tier fs-0"),
        run(4, 2, "missing never_seen"),
    ];
    assert_eq!(runs(&answer), expected);
    assert_eq!(
        (&answer["hit_tokens"], &answer["hit_tokens_l1"]),
        (&json!(64), &json!(16))
    );
    assert_eq!(server.readings().tiers[0].loaded_objects, loaded);
    // What a lookup finds, it has foretold, and says so afterwards.
    assert_eq!(hits(worker.connection(), &scope, &prompt(1, 6), "q"), 4);
    let answer = explain(&server, &body("explain/tier", "", 1, 6));
    assert_eq!(answer["recent_lookups"][0]["hit_tokens"], 64);
    // Deleted from the tier, it is remembered there.
    worker.close().unwrap();
    let (_, listed) = json_of(&server, "GET", "/cache/objects", "");
    let keys = listed["entries"].as_array().unwrap().iter();
    let keys: Vec<_> = keys.map(|entry| entry["key"].clone()).collect();
    let delete = json!({ "keys": keys, "tier": "all", "force": true });
    json_of(&server, "DELETE", "/cache/objects", &delete.to_string());
    let _worker = server.engine_driven(1, &scope);
    let answer = explain(&server, &body("explain/tier", "", 1, 4));
    assert!(
        runs(&answer)
            .iter()
            .all(|(_, _, state)| state.contains("removed")),
        "{answer}"
    );
    assert_eq!(
        answer["remembered_seconds"],
        json!({ "fs-0": null, "l1": null })
    );
}

#[test]
fn tier_that_others_write_is_asked() {
    let directory = tempfile::tempdir().unwrap();
    let shared = fs(directory.path());
    let scope = Scope::new("explain/shared");
    let reader = with_tiers(&[&shared], &[]);
    let _worker = reader.engine_driven(1, &scope);
    let writer = with_tiers(&[&shared], &[]);
    let mut worker = writer.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 3), 1);
    settle(&writer);
    let answer = explain(&reader, &body("explain/shared", "", 1, 100));
    let found = runs(&answer);
    assert_eq!(found[0], run(0, 3, "tier fs-0"), "{answer}");
    assert_eq!(found[1].2, "missing never_seen");
    assert_eq!(found.last().unwrap().2, "missing not_asked");
}

// proves: docs/troubleshoot.md#why-did-it-miss
#[test]
fn same_tokens_under_another_identity_are_found() {
    let server = TestServer::start(&[]);
    let stored =
        |instance: i64, scope: &Scope, change: fn(&mut kvtier_client::EngineDrivenSpec)| {
            let mut spec = engine_driven(instance, scope);
            change(&mut spec);
            let mut worker = EngineDrivenWorker::register(server.connect(), spec).unwrap();
            let chunks = (4 * CHUNK / worker.chunk_tokens()) as u64;
            let (tokens, len) = (0..4 * CHUNK as u64, worker.chunk_bytes());
            let sent = worker.store(&prompt(1, 4), tokens, "s", |_| vec![7; len]);
            assert_eq!(sent.unwrap().chunks.len() as u64, chunks);
            worker
        };
    // Another chunk size, whose worker is there.
    let mut large = Scope::new("explain/other#a");
    large.chunk_tokens = Some(32);
    let _large = stored(1, &large, |_| {});
    let small = Scope::new("explain/other#a");
    let worker = server.engine_driven(2, &small);
    let mut ask = body("explain/other", "", 1, 5);
    let sizes = "chunk_size is left out; allowed for model_name='explain/other': 16, 32";
    assert_eq!(refused(&server, &ask), sizes);
    ask["chunk_size"] = json!(16);
    let expected = [
        run(0, 4, "missing other_chunk_size 32"),
        run(4, 1, "missing never_seen"),
    ];
    let answer = explain(&server, &ask);
    assert_eq!(runs(&answer), expected);
    assert_eq!(answer["model_name"], "explain/other#a");
    // Another full name.
    let _other = stored(3, &Scope::new("explain/other#b"), |_| {});
    let names = "model_name is left out; allowed for model_name='explain/other': explain/other#a, explain/other#b";
    assert_eq!(refused(&server, &ask), names);
    ask["model_name"] = json!("explain/other#a");
    let answer = explain(&server, &ask);
    assert_eq!(runs(&answer), expected, "the own model comes first");
    ask["model_name"] = json!("explain/other#c");
    let answer = explain(&server, &ask);
    assert_eq!(answer["refused"], "no_gpu_context");
    assert_eq!(
        runs(&answer)[0],
        run(0, 4, "missing other_model explain/other#b")
    );
    // Another layout, whose worker has left.
    worker.close().unwrap();
    let scope = Scope::new("explain/layout");
    let other = stored(4, &scope, |spec| spec.layers = 4);
    other.close().unwrap();
    let _now = server.engine_driven(5, &scope);
    let answer = explain(&server, &body("explain/layout", "", 1, 4));
    let [(0, 4, state)] = &runs(&answer)[..] else {
        panic!("{answer}");
    };
    assert!(state.starts_with("missing other_layout "), "{state}");
    assert_ne!(
        state.split(' ').next_back(),
        answer["rows"][0]["layout_fingerprint"].as_str()
    );
    // Another number of workers.
    let mut two = Scope::new("explain/layout");
    two.world_size = 2;
    let mut spec = engine_driven(6, &two);
    spec.worker_id = 1;
    let _second = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    let mut ask = body("explain/layout", "", 1, 4);
    let sizes = "world_size is left out; allowed for model_name='explain/layout': 1, 2";
    assert_eq!(refused(&server, &ask), sizes);
    ask["world_size"] = json!(2);
    let answer = explain(&server, &ask);
    assert_eq!(answer["rows"][0]["workers"], json!([0, 1]));
    assert_eq!(runs(&answer), [run(0, 4, "missing other_world_size 1")]);
    server.assert_sound();
}

#[test]
fn numbers_are_not_compared_with_the_name_of_the_model() {
    let server = TestServer::start(&[]);
    let one = Scope::new("2");
    let mut two = Scope::new("2");
    two.world_size = 2;
    let _one = server.engine_driven(1, &one);
    let _two = server.engine_driven(2, &two);
    let sizes = "world_size is left out; allowed for model_name='2': 1, 2";
    assert_eq!(refused(&server, &body("2", "", 1, 1)), sizes);
}

#[test]
fn without_a_worker_it_says_so_and_shows_what_is_stored() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("explain/left#d");
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 2), 1);
    worker.close().unwrap();
    let answer = explain(&server, &body("explain/left", "", 1, 3));
    assert_eq!(answer["refused"], "no_gpu_context");
    assert_eq!(
        answer["summary"],
        "a lookup finds nothing, whatever is stored: no worker of model explain/left#d is registered with world size 1 and chunks of 16 tokens; \
         those that stored its objects in L1 have left, and the next ones find these"
    );
    assert_eq!(answer["hit_tokens"], 0);
    assert_eq!(
        runs(&answer),
        [run(0, 2, "l1"), run(2, 1, "missing never_seen")]
    );
}

#[test]
fn rows_with_windows_hit_as_in_a_lookup() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("explain/windows");
    let mut spec = LmcacheDrivenSpec::new(InstanceId(1), scope, 2, 2, 16, 32);
    spec.block_tokens = 4;
    spec.window_tokens = Some(8);
    spec.holds_blocks = true;
    let mut worker = LmcacheDrivenWorker::register(server.connect(), spec).unwrap();
    let (mut hits, prompt) = (Vec::new(), prompt(1, 2));
    for deleted in 0..2 {
        let blocks = [1, 2, 3, 4, 5, 6, 7, 8];
        worker.store(&prompt, 0..32, "s", &blocks).unwrap();
        let (_, listed) = json_of(&server, "GET", "/cache/objects?tier=l1", "");
        let mut keys: Vec<_> = listed["entries"].as_array().unwrap().clone();
        assert_eq!(keys.len(), 2);
        keys.sort_by_key(|entry| entry["key"]["chunk_hash_hex"].to_string());
        let delete = json!({ "keys": [keys[deleted]["key"]], "tier": "l1", "force": true });
        json_of(&server, "DELETE", "/cache/objects", &delete.to_string());
        let answer = explain(&server, &body("explain/windows", "", 1, 2));
        assert_eq!(answer["rows"][0]["window"], 1);
        let found = worker.lookup(&prompt, &deleted.to_string()).unwrap();
        assert_eq!(answer["hit_tokens"], 16 * found, "{answer}");
        hits.push(found);
    }
    // The window needs no chunk but the last.
    hits.sort_unstable();
    assert_eq!(hits, [1, 2]);
}

/// Status and body for a client with this token, of a request such as `GET /quota`.
pub fn request_as(server: &TestServer, token: &str, line: &str, body: &str) -> (u16, Value) {
    let mut stream = TcpStream::connect(server.http_address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    write!(
        stream,
        "{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {token}\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap())
}

/// Asks for an explanation with a token.
fn ask_as(server: &TestServer, token: &str, body: &Value) -> (u16, Value) {
    request_as(server, token, &format!("POST {EXPLAIN}"), &body.to_string())
}

// proves: docs/troubleshoot.md#why-did-it-miss
#[test]
fn reader_learns_nothing_of_other_salts() {
    const READER: &str = "reader-0123456789abcdef";
    const ADMIN: &str = "admin-0123456789abcdef";
    let server = TestServer::start_with(&[], |config| {
        let tokens = format!("read r {READER}; admin a {ADMIN}");
        config.http.tokens = Some(tokens.into());
    });
    // A worker without objects; another tenant has them, also under a name and ranks of its own.
    let _own = server.engine_driven(1, &Scope::new("explain/tenants"));
    let foreign = [
        Scope::new("explain/tenants").with_salt("them"),
        Scope::new("explain/tenants#x").with_salt("them"),
    ];
    let ask = body("explain/tenants", "us", 1, 4);
    let before = ask_as(&server, READER, &ask);
    let nothing = ask_as(&server, ADMIN, &ask);
    assert_eq!(before.0, 200, "{}", before.1);
    assert_eq!(runs(&before.1), [run(0, 4, "missing never_seen")]);
    assert_eq!(before, nothing);
    for (instance, scope) in (2..).zip(&foreign) {
        let mut worker = server.engine_driven(instance, scope);
        store(&mut worker, &prompt(1, 4), 1);
        assert_eq!(worker.lookup(&prompt(1, 4), "r").unwrap(), 4);
        worker.close().unwrap();
    }
    assert_eq!(ask_as(&server, READER, &ask), before);
    // The admin sees where they are, and nothing else of it.
    let (status, answer) = ask_as(&server, ADMIN, &ask);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(runs(&answer), [run(0, 4, "missing other_salt them")]);
    assert_eq!(answer["recent_lookups"], json!([]));
    assert_eq!(answer["model_names"], json!(["explain/tenants"]));
    // Lost objects of another tenant are not told either.
    server.engine().admin().clear(true);
    assert_eq!(ask_as(&server, READER, &ask), before);
    assert_eq!(ask_as(&server, ADMIN, &ask), nothing);
    assert_eq!(ask_as(&server, "wrong-0123456789abcdef", &ask).0, 401);
}

#[test]
fn hostile_bodies_are_refused() {
    let server = TestServer::start(&[]);
    let _worker = server.engine_driven(1, &Scope::new("explain/hostile"));
    let model = "explain/hostile";
    for (body, error) in [
        (
            json!({ "model_name": "a@b", "token_ids": [1] }),
            "model_name must not contain '@'",
        ),
        (
            json!({ "model_name": "x".repeat(1025), "token_ids": [1] }),
            "model_name has 1025 bytes; allowed: at most 1024",
        ),
        (
            json!({ "model_name": model, "token_ids": [1], "cache_salt": "a/b" }),
            "cache_salt: a cache salt must not contain '/'",
        ),
        (
            json!({ "model_name": model, "token_ids": [1], "world_size": 0 }),
            "world_size must be between 1 and 256 (got 0)",
        ),
        (
            json!({ "model_name": "none", "token_ids": [1], "chunk_size": 0 }),
            "chunk_size is 0; allowed for model_name='none': at least 1",
        ),
        (
            json!({ "model_name": model, "token_ids": [1], "chunk_size": 17 }),
            "chunk_size is 17; allowed for model_name='explain/hostile': 16",
        ),
        (
            json!({ "model_name": model, "token_ids": vec![1; 1_000_001] }),
            "too many token_ids in a single request (limit=1000000, got=1000001)",
        ),
        (
            json!({ "model_name": "none", "token_ids": vec![1; 300_000], "chunk_size": 1 }),
            "token_ids make 300000 chunks of each of 1 ranks and object groups; allowed: at most 262144 objects together",
        ),
    ] {
        let found = refused(&server, &body);
        assert!(found.starts_with(error), "{found}");
    }
    for body in [
        "",
        "null",
        "[]",
        "{",
        r#"{"model_name": "m"}"#,
        r#"{"token_ids": [1]}"#,
        r#"{"model_name": "m", "token_ids": [-1]}"#,
        r#"{"model_name": "m", "token_ids": [4294967296]}"#,
        r#"{"model_name": "m", "token_ids": "1"}"#,
        r#"{"model_name": 1, "token_ids": [1]}"#,
        r#"{"model_name": "m", "token_ids": [1], "world_size": -1}"#,
        r#"{"model_name": "m", "token_ids": [1], "chunk_size": 1.5}"#,
        r#"{"model_name": "m", "token_ids": [1], "cache_salt": 7}"#,
    ] {
        let (status, answer) = json_of(&server, "POST", EXPLAIN, body);
        assert_eq!(status, 422, "{body}: {answer}");
    }
    // A world of 256 workers without one that is registered.
    let mut large = body(model, "", 1, 2);
    large["world_size"] = json!(256);
    let answer = explain(&server, &large);
    assert_eq!(answer["refused"], "no_gpu_context");
    assert_eq!(answer["rows"][0]["workers"].as_array().unwrap().len(), 256);
    server.assert_sound();
}
