//! The HTTP API, as a client sees it: the shapes of LMCache 0.5.6's, and what we say otherwise with its reason.

use std::io::{Read, Write};
use std::net::TcpStream;

use kvtier_client::proto::descriptor::Dtype;
use kvtier_client::{InstanceId, LmcacheDrivenSpec, LmcacheDrivenWorker, Scope};
use md5::{Digest, Md5};
use serde_json::{Value, json};

use crate::replay::load;
use crate::support::{PATIENCE, TestServer, bytes, prompt, range};

/// One request on a connection of its own: status, header lines in lower case, body.
fn request(server: &TestServer, method: &str, path: &str, body: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(server.http_address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let head = head.to_lowercase();
    assert!(
        !head.contains("transfer-encoding"),
        "this client reads no chunks: {head}"
    );
    (status, head, body.to_string())
}

/// Status and body of a request whose answer is JSON.
fn json_of(server: &TestServer, method: &str, path: &str, body: &str) -> (u16, Value) {
    let (status, head, body) = request(server, method, path, body);
    assert!(
        head.contains("\r\ncontent-type: application/json"),
        "{method} {path}: {head}"
    );
    (
        status,
        serde_json::from_str(&body)
            .unwrap_or_else(|error| panic!("{method} {path}: {error} in {body:?}")),
    )
}

/// Answers that are not LMCache's, by method, path and body: ours, and why. Keys of ours that LMCache lacks are no
/// difference.
fn differences() -> Vec<(&'static str, &'static str, Value, u16, Value, &'static str)> {
    let service = "the service's own name";
    let words = "our own words; type, place and value are the same";
    vec![
        (
            "GET",
            "/",
            Value::Null,
            200,
            json!({ "status": "ok", "service": "kvtier HTTP API" }),
            service,
        ),
        (
            "POST",
            "/cache/clear",
            json!({ "force": "maybe" }),
            422,
            json!({ "detail": [{ "type": "bool_parsing", "loc": ["body", "force"],
                "msg": "Input should be true or false", "input": "maybe" }] }),
            words,
        ),
        (
            "POST",
            "/cache/clear",
            json!("notjson"),
            422,
            json!({ "detail": [{ "type": "json_invalid", "loc": ["body", 2],
                "msg": "JSON decode error: expected ident at line 1 column 2", "input": {} }] }),
            "our own words, and the column where they were of no use",
        ),
    ]
}

#[test]
fn routes_answer_as_lmcache_answers() {
    let server = TestServer::start(&[]);
    let mut differences = differences();
    for exchange in load("http_exchanges.json")["exchanges"].as_array().unwrap() {
        let (asked, expected) = (&exchange["request"], &exchange["response"]);
        let (method, path) = (
            asked["method"].as_str().unwrap(),
            asked["path"].as_str().unwrap(),
        );
        if path == "/status" && method == "GET"
            || path == "/cache/checksums" && expected["status"] == 200
        {
            // Have tests of their own below; the worker they need is not registered here.
            continue;
        }
        let body = match &asked["body"] {
            Value::Null => String::new(),
            // The one body that is no JSON was captured as the text it was.
            Value::String(text) => text.clone(),
            body => body.to_string(),
        };
        let (status, answer) = json_of(&server, method, path, &body);
        let context = format!("{method} {path} {body}: {answer}");
        let listed = differences
            .iter()
            .position(|row| (row.0, row.1, &row.2) == (method, path, &asked["body"]));
        if let Some(index) = listed {
            let (.., our_status, ours, _) = differences.remove(index);
            assert_eq!((status, &answer), (our_status, &ours), "{context}");
            continue;
        }
        if path == "/cache/checksums" && expected["status"] != 404 {
            // Refused before the values are looked at: there is no such worker here.
            assert_eq!(status, 404, "{context}");
            continue;
        }
        assert_eq!(json!(status), expected["status"], "{context}");
        let extra = missing_keys(&expected["body"], &answer);
        assert!(extra.is_empty(), "{context} lacks {extra:?}");
        assert!(covers(&expected["body"], &answer), "{context}");
    }
    assert!(differences.is_empty(), "{differences:?}");
}

/// Whether every value of `expected` is in `answer`; objects may have more keys.
fn covers(expected: &Value, answer: &Value) -> bool {
    match (expected, answer) {
        (Value::Object(expected), Value::Object(answer)) => expected
            .iter()
            .all(|(key, value)| answer.get(key).is_some_and(|own| covers(value, own))),
        _ => expected == answer,
    }
}

/// Paths of the keys of `expected` that `answer` does not have.
fn missing_keys(expected: &Value, answer: &Value) -> Vec<String> {
    let mut missing = Vec::new();
    if let Value::Object(expected) = expected {
        for (key, value) in expected {
            match answer.get(key) {
                None => missing.push(key.clone()),
                Some(own) => missing.extend(
                    missing_keys(value, own)
                        .into_iter()
                        .map(|rest| format!("{key}.{rest}")),
                ),
            }
        }
    }
    missing
}

#[test]
fn status_has_every_key_of_lmcaches_that_means_something_here() {
    let server = TestServer::start(&["--chunk-size", "256"]);
    let spec = LmcacheDrivenSpec::new(InstanceId(1000), Scope::new("test-model"), 4, 2, 64, 256);
    let _worker = LmcacheDrivenWorker::register(server.connect(), spec).unwrap();
    let (status, ours) = json_of(&server, "GET", "/status", "");
    assert_eq!(status, 200);
    let samples = load("http_exchanges.json");
    let mut captured = samples["exchanges"].as_array().unwrap().iter();
    let theirs = &captured
        .find(|exchange| exchange["request"]["path"] == "/status")
        .unwrap()["response"]["body"];
    let missing = missing_keys(theirs, &ours);
    // There is no log of events whose state could be told.
    assert!(
        !missing.is_empty() && missing.iter().all(|key| key.starts_with("kv_events.")),
        "{missing:?}"
    );
    for key in [
        "registered_gpu_ids",
        "hash_algorithm",
        "engine_type",
        "chunk_size",
        "worker_liveness",
        "is_healthy",
    ] {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    let mut layout = theirs["cache_context_meta"]["1000"].clone();
    // The sample's worker had half floats, ours bfloat16, as many bytes.
    layout["kv_cache_layout"]["kernel_groups"][0]["dtype"] = json!("torch.bfloat16");
    assert_eq!(ours["cache_context_meta"]["1000"], layout);
}

#[test]
fn status_tells_what_is_there() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("http/status");
    let mut worker = server.engine_driven(7, &scope);
    let len = worker.chunk_bytes();
    let l1 = |server: &TestServer| {
        json_of(server, "GET", "/status", "").1["storage_manager"]["l1_manager"].clone()
    };
    assert_eq!(l1(&server)["total_object_count"], 0);
    worker
        .store(&prompt(1, 3), range(0..3), "s", |chunk| {
            bytes(1, chunk, len)
        })
        .unwrap();
    worker.lookup(&prompt(1, 2), "r").unwrap();
    let unwritten = prompt(2, 1);
    let key = scope.worker_key(0, &unwritten, range(0..1), "w");
    worker
        .connection()
        .prepare_store(&key, InstanceId(7))
        .unwrap();
    let l1 = l1(&server);
    assert_eq!(l1["total_object_count"], 3);
    assert_eq!(l1["read_locked_count"], 2);
    assert_eq!(l1["write_locked_count"], 1);
    assert_eq!(l1["staging_bytes"], len);
    assert_eq!(l1["memory_used_bytes"], 4 * len);
    assert_eq!(l1["memory_total_bytes"], 64 << 20);
    let status = json_of(&server, "GET", "/status", "").1;
    assert_eq!(status["registered_non_cuda_instance_ids"], json!([7]));
    assert_eq!(
        status["non_cuda_context_meta"]["7"]["model_name"],
        "http/status"
    );
    assert_eq!(status["active_sessions"], 1);
}

#[test]
fn a_clear_says_what_went_and_what_stayed() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("http/clear");
    let mut worker = server.engine_driven(7, &scope);
    let len = worker.chunk_bytes();
    worker
        .store(&prompt(1, 3), range(0..3), "s", |chunk| {
            bytes(1, chunk, len)
        })
        .unwrap();
    worker.lookup(&prompt(1, 2), "r").unwrap();
    let cleared = |body: &str| {
        let (status, answer) = json_of(&server, "POST", "/cache/clear", body);
        assert_eq!(
            (status, &answer["status"], &answer["cleared"]["tier"]),
            (200, &json!("ok"), &json!("l1"))
        );
        [
            &answer["cleared"]["objects"],
            &answer["cleared"]["bytes"],
            &answer["cleared"]["kept"],
        ]
        .map(Value::clone)
    };
    assert_eq!(cleared(""), [json!(1), json!(len), json!(2)]);
    assert_eq!(
        cleared(r#"{"force": false, "tier": "l1"}"#),
        [json!(0), json!(0), json!(2)]
    );
    assert_eq!(cleared(r#"{"force": true}"#)[0], json!(2));
    worker.connection().end_session("r").unwrap();
    assert_eq!(server.readings().used_bytes, 0);
}

#[test]
fn bodies_of_the_wrong_shape_are_refused() {
    let server = TestServer::start(&[]);
    for (path, body, place) in [
        ("/cache/clear", r#"{"tier": 7}"#, "tier"),
        ("/cache/clear", r#"{"force": 1}"#, "force"),
        ("/cache/clear", "[]", "body"),
        ("/cache/clear", "{", "body"),
        ("/cache/clear", "\u{0}", "body"),
        ("/cache/checksums", r#"{"block_ids": 7}"#, "block_ids"),
        (
            "/cache/checksums",
            r#"{"block_ids": [1, "2"]}"#,
            "block_ids",
        ),
        ("/cache/checksums", r#"{"block_ids": [1.5]}"#, "block_ids"),
        ("/cache/checksums", r#"{"chunk_size": "x"}"#, "chunk_size"),
        (
            "/cache/checksums",
            r#"{"instance_id": 99999999999999999999999}"#,
            "instance_id",
        ),
        ("/cache/checksums", r#"{"layerwise": "no"}"#, "layerwise"),
    ] {
        let (status, answer) = json_of(&server, "POST", path, body);
        assert_eq!(status, 422, "{path} {body}: {answer}");
        assert!(
            answer["detail"][0]["loc"].to_string().contains(place),
            "{path} {body}: {answer}"
        );
    }
    let (status, _) = json_of(&server, "POST", "/cache/clear", r#"{"tier": "all"}"#);
    assert_eq!(status, 400);
    let large = format!(r#"{{"block_ids": [{}1]}}"#, "1,".repeat(5 << 20));
    assert_eq!(request(&server, "POST", "/cache/checksums", &large).0, 413);
    server.assert_sound();
}

#[test]
fn unknown_paths_and_methods_are_refused_with_a_body() {
    let server = TestServer::start(&[]);
    assert_eq!(
        json_of(&server, "GET", "/nope", ""),
        (404, json!({ "detail": "Not Found" }))
    );
    for (method, path) in [
        ("POST", "/status"),
        ("DELETE", "/"),
        ("GET", "/cache/clear"),
        ("PUT", "/metrics"),
    ] {
        let (status, head, body) = request(&server, method, path, "");
        assert_eq!(
            (status, body.as_str()),
            (405, r#"{"detail":"Method Not Allowed"}"#),
            "{method} {path}"
        );
        assert!(head.contains("\r\nallow: "), "{method} {path}: {head}");
    }
}

#[test]
fn versions_are_texts_that_tools_can_compare() {
    let server = TestServer::start(&[]);
    let version = json_of(&server, "GET", "/version", "").1;
    let version = version.as_str().unwrap();
    assert!(
        version.starts_with("0.5.6") && version.contains(env!("CARGO_PKG_VERSION")),
        "{version}"
    );
    assert_eq!(
        json_of(&server, "GET", "/lmc_version", ""),
        (200, json!("0.5.6"))
    );
}

#[test]
fn the_description_lists_every_route_and_each_is_there() {
    let server = TestServer::start(&[]);
    let (_, description) = json_of(&server, "GET", "/openapi.json", "");
    let paths = description["paths"].as_object().unwrap();
    let expected = [
        "/",
        "/healthcheck",
        "/status",
        "/version",
        "/lmc_version",
        "/metrics",
        "/cache/clear",
        "/cache/checksums",
    ];
    let mut described: Vec<_> = paths.keys().map(String::as_str).collect();
    described.sort_unstable();
    let mut expected_sorted = expected.to_vec();
    expected_sorted.sort_unstable();
    assert_eq!(described, expected_sorted);
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().unwrap() {
            let (status, ..) = request(&server, &method.to_uppercase(), path, "");
            assert!(
                !matches!(status, 404 | 405) || path == "/cache/checksums",
                "{method} {path}: {status}"
            );
            assert!(
                operation["responses"].get(status.to_string()).is_some(),
                "{method} {path}: {status} is not described"
            );
        }
    }
}

/// Checksums of some blocks of a worker's layers, computed from the segment's own bytes.
fn checksum(
    worker: &LmcacheDrivenWorker,
    layers: std::ops::Range<usize>,
    blocks: &[usize],
) -> String {
    let spec = worker.spec();
    let segment = std::fs::read(format!("/dev/shm{}", worker.segment_name())).unwrap();
    let piece =
        usize::try_from(spec.block_tokens * spec.heads * spec.head_size * spec.dtype.item_size())
            .unwrap();
    let plane = piece * usize::try_from(spec.blocks).unwrap();
    let mut hash = Md5::new();
    for layer in layers {
        for kv in 0..2 {
            for block in blocks {
                let start = (layer * 2 + kv) * plane + block * piece;
                let values = &segment[start..start + piece];
                match spec.dtype {
                    // A float32 whose upper half is the bfloat16.
                    Dtype::BFloat16 => values.chunks_exact(2).for_each(|value| {
                        let half = u16::from_le_bytes([value[0], value[1]]);
                        hash.update(f32::from_bits(u32::from(half) << 16).to_le_bytes());
                    }),
                    _ => hash.update(values),
                }
            }
        }
    }
    hex::encode(hash.finalize())
}

#[test]
fn checksums_are_those_of_the_workers_blocks() {
    let server = TestServer::start(&[]);
    for (instance, dtype) in [(1, Dtype::BFloat16), (2, Dtype::Float32)] {
        let mut spec = LmcacheDrivenSpec::new(
            InstanceId(instance),
            Scope::new("http/checksums"),
            3,
            2,
            8,
            16,
        );
        (spec.block_tokens, spec.dtype) = (4, dtype);
        let mut worker = LmcacheDrivenWorker::register(server.connect(), spec).unwrap();
        let len = worker.chunk_bytes();
        for chunk in 0..4 {
            let blocks: Vec<i64> = (chunk * 4..chunk * 4 + 4).collect();
            worker
                .write_chunk(&blocks, &bytes(instance as u64, chunk as u64, len))
                .unwrap();
        }
        let asked =
            json!({ "instance_id": instance, "block_ids": [0, 1, 2, 3, 9], "chunk_size": 2 });
        let (status, answer) = json_of(&server, "POST", "/cache/checksums", &asked.to_string());
        let sums = [&[0, 1][..], &[2, 3], &[9]].map(|blocks| checksum(&worker, 0..3, blocks));
        let expected = json!({
            "status": "success", "chunk_size": 2, "num_chunks": 3, "chunk_checksums": sums, "layerwise": false,
            "block_id_ranges": [[0, 3], 9],
        });
        assert_eq!((status, answer), (200, expected));

        let asked = json!({ "instance_id": instance, "block_ids": [5, 4], "chunk_size": 2, "layerwise": true });
        let (_, answer) = json_of(&server, "POST", "/cache/checksums", &asked.to_string());
        let layers: serde_json::Map<_, _> = (0..3)
            .map(|layer| {
                (
                    format!("layer_{layer}"),
                    json!([checksum(&worker, layer..layer + 1, &[5, 4])]),
                )
            })
            .collect();
        assert_eq!(answer["chunk_checksums"], Value::Object(layers));
        assert_eq!(answer["block_id_ranges"], json!([5, 4]));

        for (body, error) in [
            (
                json!({ "instance_id": instance, "block_ids": [], "chunk_size": 2 }),
                "block_ids is required",
            ),
            (
                json!({ "instance_id": instance, "block_ids": [1], "chunk_size": 0 }),
                "chunk_size must be positive",
            ),
            (
                json!({ "instance_id": instance, "block_ids": [1], "chunk_size": -1 }),
                "chunk_size must be positive",
            ),
            (
                json!({ "instance_id": instance, "block_ids": [16], "chunk_size": 1 }),
                "16",
            ),
            (
                json!({ "instance_id": instance, "block_ids": [-1], "chunk_size": 1 }),
                "-1",
            ),
        ] {
            let (status, answer) = json_of(&server, "POST", "/cache/checksums", &body.to_string());
            assert_eq!(status, 400, "{body}: {answer}");
            assert!(
                answer["detail"].as_str().unwrap().contains(error),
                "{body}: {answer}"
            );
        }
    }
    let unknown = json_of(
        &server,
        "POST",
        "/cache/checksums",
        r#"{"instance_id": 77, "block_ids": [1], "chunk_size": 1}"#,
    );
    assert_eq!(
        unknown,
        (404, json!({ "detail": "instance_id 77 not registered" }))
    );
    let _own = server.engine_driven(3, &Scope::new("http/own"));
    let (status, _) = json_of(
        &server,
        "POST",
        "/cache/checksums",
        r#"{"instance_id": 3, "block_ids": [1], "chunk_size": 1}"#,
    );
    assert_eq!(status, 501);
}

#[test]
fn a_server_that_stops_says_that_it_is_not_healthy() {
    let server = TestServer::start(&[]);
    assert_eq!(
        json_of(&server, "GET", "/healthcheck", ""),
        (200, json!({ "status": "healthy" }))
    );
    server.health().poison("copies");
    let (status, answer) = json_of(&server, "GET", "/healthcheck", "");
    assert_eq!(status, 503);
    assert_eq!(
        answer,
        json!({ "status": "unhealthy", "reason": "failed components: copies" })
    );
    assert_eq!(
        json_of(&server, "GET", "/status", "").1["is_healthy"],
        false
    );
}

/// Why a metric of LMCache's busy server is absent after a store, a lookup and a retrieve here; none if it must be there.
fn absent(name: &str) -> Option<&'static str> {
    let reasons = [
        ("python_", "of another language"),
        (
            "process_",
            "of another language's library; the system tells the same",
        ),
        ("target_info", "of the telemetry library"),
        ("lmcache_mp_l2_", "there is no second tier"),
        ("lmcache_mp_lookup_hit_l2_", "there is no second tier"),
        ("lmcache_mp_event_bus_", "there is no bus of events"),
        ("lmcache_mp_kv_events_", "there is no log of events"),
        ("lmcache_mp_active_p2p_", "there are no other servers"),
        (
            "lmcache_mp_l0_l1_",
            "request latencies tell it, without sampling",
        ),
        ("lmcache_mp_l1_chunk_", "sampled lives of chunks"),
        ("lmcache_mp_real_reuse_", "sampled lives of chunks"),
        (
            "lmcache_mp_l1_evicted_chunks",
            "counted without tenants, under our own name",
        ),
    ];
    reasons
        .into_iter()
        .find(|(prefix, _)| name.starts_with(prefix))
        .map(|(_, reason)| reason)
}

#[test]
fn metrics_have_the_names_of_lmcaches_and_count() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("http/metrics").with_salt("tenant \"one\"\n");
    let mut worker = server.engine_driven(1, &scope);
    let mut pages = server.lmcache_driven(2, &scope.clone().with_salt("pages"));
    let len = worker.chunk_bytes();
    let prompt = prompt(1, 2);
    worker
        .store(&prompt, range(0..2), "s", |chunk| bytes(1, chunk, len))
        .unwrap();
    assert!(
        pages
            .store(&prompt, range(0..2), "s", &[1, 2, 3, 4, 5, 6, 7, 8])
            .unwrap()
    );
    assert_eq!(pages.lookup(&prompt, "p").unwrap(), 2);
    assert!(
        pages
            .retrieve(&prompt, range(0..2), "p", &[1, 2, 3, 4, 5, 6, 7, 8], 0)
            .unwrap()
    );
    // The newest registration decides which objects a lookup means.
    drop(pages);
    worker
        .connection()
        .unregister_kv_cache(InstanceId(2))
        .unwrap();
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 2);
    assert!(
        worker
            .retrieve(&prompt, range(0..2), "r", |_, _| {})
            .unwrap()
            .is_some()
    );

    let (status, head, text) = request(&server, "GET", "/metrics", "");
    assert_eq!(status, 200);
    assert!(
        head.contains("\r\ncontent-type: application/openmetrics-text"),
        "{head}"
    );
    let metrics = parse_metrics(&text);
    let names = std::fs::read_to_string(format!(
        "{}/tests/vectors/metrics_names.txt",
        env!("CARGO_MANIFEST_DIR")
    ));
    for line in names.unwrap().lines() {
        let (name, kind) = line.split_once(' ').unwrap();
        match absent(name) {
            Some(reason) => assert!(
                !metrics.iter().any(|metric| metric.name == name),
                "{name} is there: {reason}"
            ),
            None => assert!(
                metrics
                    .iter()
                    .any(|metric| metric.name == name && metric.kind == kind),
                "{name} is missing, or no {kind}"
            ),
        }
    }
    let value = |name: &str, label: &str| -> f64 {
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
    let tenant = r#"cache_salt="tenant \"one\"\n""#;
    for (name, expected) in [
        ("lmcache_mp_lookup_requested_tokens_total", 32.0),
        ("lmcache_mp_lookup_hit_tokens_total", 32.0),
        ("lmcache_mp_lookup_hit_l1_tokens_total", 32.0),
        ("lmcache_mp_lookup_hit_l1_keys_total", 2.0),
        ("lmcache_mp_lookups_requests_total", 1.0),
        ("lmcache_mp_l1_read_chunks_total", 2.0),
        ("lmcache_mp_l1_write_chunks_total", 2.0),
        ("lmcache_mp_num_chunks_loaded_total", 2.0),
    ] {
        assert_eq!(value(name, tenant), expected, "{name}");
    }
    for name in [
        "submitted_stores",
        "finished_stores",
        "submitted_retrieves",
        "finished_retrieves",
    ] {
        assert_eq!(
            value(&format!("lmcache_mp_num_{name}_total"), r#"device="cpu""#),
            2.0,
            "{name}"
        );
    }
    assert_eq!(
        value("lmcache_mp_l1_memory_usage_bytes", "dram"),
        server.readings().used_bytes as f64
    );
    assert_eq!(value("kvtier_accounting_errors_total", ""), 0.0);
    for operation in [
        "lookup",
        "store",
        "retrieve",
        "prepare_store",
        "commit_store",
        "prepare_retrieve",
    ] {
        let label = format!(r#"operation="{operation}""#);
        assert!(
            value("kvtier_request_duration_seconds_count", &label) >= 1.0,
            "{operation}"
        );
    }
}

#[test]
fn names_that_clients_choose_do_not_fill_the_metrics() {
    let server = TestServer::start(&[]);
    let mut client = server.connect();
    let prompt = prompt(1, 1);
    for number in 0..3000 {
        let scope = Scope::new(format!("model {number}")).with_salt(format!("salt {number}"));
        client
            .lookup(&scope.scheduler_key(&prompt, range(0..1), "r"))
            .unwrap();
    }
    let (_, _, text) = request(&server, "GET", "/metrics", "");
    let series = text.lines().filter(|line| line.contains("model ")).count();
    assert!((1..=1100).contains(&series), "{series} series");
}

struct Metric {
    name: String,
    kind: String,
    labels: String,
    value: f64,
}

/// Every sample, with the kind of its family. Fails for text that Prometheus would refuse.
fn parse_metrics(text: &str) -> Vec<Metric> {
    let mut kinds: Vec<(String, String)> = Vec::new();
    let mut metrics = Vec::new();
    let mut ended = false;
    for line in text.lines() {
        assert!(!ended, "{line:?} behind the end");
        ended = line == "# EOF";
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(
                !kinds.iter().any(|(known, _)| known == name),
                "{name} is described twice"
            );
            kinds.push((name.into(), kind.into()));
        } else if !line.starts_with("# ") {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = match series.split_once('{') {
                Some((name, labels)) => (name, labels.strip_suffix('}').unwrap()),
                None => (series, ""),
            };
            assert!(
                name.chars()
                    .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':'),
                "{line:?}"
            );
            let family = kinds.iter().find(|(family, kind)| {
                let suffixes: &[&str] = match kind.as_str() {
                    "counter" => &["_total"],
                    "histogram" => &["_bucket", "_sum", "_count"],
                    _ => &[""],
                };
                suffixes
                    .iter()
                    .any(|suffix| name.strip_suffix(suffix) == Some(family))
            });
            let (_, kind) = family.unwrap_or_else(|| panic!("{line:?} belongs to no family"));
            let metric = Metric {
                name: name.into(),
                kind: kind.clone(),
                labels: labels.into(),
                value: value.parse().unwrap(),
            };
            metrics.push(metric);
        }
    }
    assert!(ended, "no end");
    metrics
}
