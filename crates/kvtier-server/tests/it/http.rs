//! The HTTP API, as a client sees it: the shapes of LMCache 0.5.6's, and what we say otherwise with its reason.

use std::io::{Read, Write};
use std::net::TcpStream;

use kvtier_client::{InstanceId, LmcacheDrivenSpec, LmcacheDrivenWorker, Scope};
use serde_json::{Value, json};

use crate::support::{PATIENCE, TestServer, bytes, prompt, range};

/// One request on a connection of its own: status, header lines in lower case, body.
pub fn request(server: &TestServer, method: &str, path: &str, body: &str) -> (u16, String, String) {
    let mut stream = send(server, method, path, body);
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

/// Sends a request; returns the connection on which its answer arrives.
pub fn send(server: &TestServer, method: &str, path: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.http_address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    stream
}

/// Status and body of a request whose answer is JSON.
pub fn json_of(server: &TestServer, method: &str, path: &str, body: &str) -> (u16, Value) {
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
    let words = "our own text, with the same status";
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
            "/cache/checksums",
            json!({}),
            400,
            json!({ "detail": "block_ids is required" }),
            "the field that is missing, not an instance that is not in the request",
        ),
        (
            "POST",
            "/cache/clear",
            json!({ "force": "maybe" }),
            422,
            json!({ "detail": "force: invalid type: string \"maybe\"; allowed: a boolean" }),
            words,
        ),
        (
            "POST",
            "/cache/clear",
            json!({ "tier": "bad" }),
            422,
            json!({ "detail": "tier: \"bad\"; allowed: l1, l2, all" }),
            words,
        ),
        (
            "POST",
            "/cache/clear",
            json!("notjson"),
            422,
            json!({ "detail": "the body is no JSON object" }),
            words,
        ),
    ]
}

/// What LMCache's server answered.
fn recorded() -> Value {
    serde_json::from_str(include_str!("../vectors/http_exchanges.json")).unwrap()
}

// proves: docs/compare.md#http
#[test]
fn routes_answer_as_lmcache_answers() {
    let server = TestServer::start(&[]);
    let mut differences = differences();
    for exchange in recorded()["exchanges"].as_array().unwrap() {
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
pub fn covers(expected: &Value, answer: &Value) -> bool {
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
fn status_has_lmcaches_applicable_keys() {
    let server = TestServer::start(&["--chunk-size", "256"]);
    let spec = LmcacheDrivenSpec::new(InstanceId(1000), Scope::new("test-model"), 4, 2, 64, 256);
    let _worker = LmcacheDrivenWorker::register(server.connect(), spec).unwrap();
    let (status, ours) = json_of(&server, "GET", "/status", "");
    assert_eq!(status, 200);
    let samples = recorded();
    let mut captured = samples["exchanges"].as_array().unwrap().iter();
    let theirs = &captured
        .find(|exchange| exchange["request"]["path"] == "/status")
        .unwrap()["response"]["body"];
    let missing = missing_keys(theirs, &ours);
    assert!(missing.is_empty(), "{missing:?}");
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
    // kvtier's own.
    layout["client_releases"] = json!("0.5.5 to 0.5.7");
    layout["chunk_size"] = json!(256);
    assert_eq!(ours["cache_context_meta"]["1000"], layout);
}

#[test]
fn status_reports_objects_and_workers() {
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
fn clear_reports_removed_and_kept_objects() {
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
            answer["detail"].to_string().contains(place),
            "{path} {body}: {answer}"
        );
    }
    let (status, _) = json_of(&server, "POST", "/cache/clear", r#"{"tier": "all"}"#);
    assert_eq!(status, 400);
    // One byte more than is read, so that all of it is read before it is refused.
    let large = format!("{}{{}}", " ".repeat((8 << 20) - 1));
    assert_eq!(request(&server, "POST", "/cache/checksums", &large).0, 413);
    assert_eq!(request(&server, "POST", "/cache/clear", &large[1..]).0, 200);
    server.assert_sound();
}

#[test]
fn unknown_paths_and_methods_are_refused() {
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
fn versions_are_comparable_by_tools() {
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
fn description_lists_every_existing_route() {
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
        "/prefix/match",
        "/cache/clear",
        "/cache/checksums",
        "/cache/explain",
        "/cache/objects",
        "/cache/prefetches",
        "/cache/prefetches/{request_id}",
        "/cache/sessions",
        "/config",
        "/config/adapters",
        "/config/reload",
        "/quota",
        "/quota/{salt}",
        "/tenants",
        "/ui/events",
    ];
    let mut described: Vec<_> = paths.keys().map(String::as_str).collect();
    described.sort_unstable();
    let mut expected_sorted = expected.to_vec();
    expected_sorted.sort_unstable();
    assert_eq!(described, expected_sorted);
    // Its answer has no end; `dashboard.rs` reads it.
    let finite = paths.iter().filter(|(path, _)| *path != "/ui/events");
    for (path, methods) in finite {
        for (method, operation) in methods.as_object().unwrap() {
            let (status, ..) = request(&server, &method.to_uppercase(), path, "");
            assert!(
                !matches!(status, 404 | 405)
                    || path == "/cache/checksums"
                    || path.contains("{request_id}"),
                "{method} {path}: {status}"
            );
            assert!(
                operation["responses"].get(status.to_string()).is_some(),
                "{method} {path}: {status} is not described"
            );
        }
    }
}

#[test]
fn bodies_of_every_route_have_described_schemas() {
    let description = json!(kvtier_server::http::openapi());
    let schemas = description["components"]["schemas"].as_object().unwrap();
    let check = |body: &Value, place: &str| {
        for content in body["content"].as_object().into_iter().flatten() {
            let schema = &content.1["schema"];
            assert!(
                !schema["$ref"].is_null()
                    || !schema["type"].is_null()
                    || !schema["oneOf"].is_null(),
                "{place}: {schema}"
            );
        }
        assert!(body["content"].is_object(), "{place} has no schema");
    };
    for (path, methods) in description["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let place = format!("{method} {path}");
            let takes_body = !matches!(
                (method.as_str(), path.as_str()),
                ("get", _) | ("delete", "/quota/{salt}") | ("post", "/config/reload")
            );
            if takes_body {
                check(&operation["requestBody"], &place);
            }
            for (status, answer) in operation["responses"].as_object().unwrap() {
                check(answer, &format!("{place} {status}"));
            }
        }
    }
    assert!(schemas.len() > 40, "{}", schemas.len());
    // Fields whose type is a parameter lose their comments.
    let schemas = schemas
        .iter()
        .filter(|(name, _)| !name.starts_with("ByDirection"));
    for (name, schema) in schemas {
        for (field, schema) in schema["properties"].as_object().into_iter().flatten() {
            let is_described = schema.to_string().contains(r#""description":"#);
            assert!(is_described, "{name}.{field}: {schema}");
        }
    }
}

#[test]
fn stopping_server_reports_unhealthy() {
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

#[test]
fn bodies_above_total_limit_are_refused() {
    let server = TestServer::start(&[]);
    let body = " ".repeat(28 << 20);
    let mut slow = TcpStream::connect(server.http_address()).unwrap();
    let head = format!(
        "PUT /quota HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    slow.write_all(head.as_bytes()).unwrap();
    // More than sockets hold by so much that the server has more than half of what all bodies may have.
    slow.write_all(&body.as_bytes()[..body.len() - 1]).unwrap();
    let (status, answer) = json_of(&server, "PUT", "/quota", &body[..17 << 20]);
    assert_eq!(status, 503, "{answer}");
    let told = answer["detail"].as_str().unwrap();
    assert!(told.contains("at most 40 MiB together"), "{told}");
    assert_eq!(request(&server, "GET", "/healthcheck", "").0, 200);
    assert_eq!(request(&server, "POST", "/cache/clear", "{}").0, 200);
    drop(slow);
    server.assert_sound();
}
