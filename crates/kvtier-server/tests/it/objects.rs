//! Objects by their keys: found one by one, stored and read without a prompt, apart by tenant, leased until the session ends.

use kvtier_client::proto::key::OBJECTS_FEATURE;
use kvtier_client::proto::request::{Request, Seconds};
use kvtier_client::proto::response::Response;
use kvtier_client::proto::wire;
use kvtier_client::{Client, EngineDrivenWorker, Prompt, Scope};

use crate::l2::{fs, settle, with_tiers};
use crate::support::{CHUNK, PATIENCE, Raw, Steps as _, TestServer, wait_until, whole};

type ObjectKey = [u8; 32];

fn keys<const N: usize>(numbers: [u8; N]) -> [ObjectKey; N] {
    numbers.map(|number| [number; 32])
}

fn objects(keys: &[ObjectKey]) -> Prompt {
    Prompt::of_object_keys(keys, CHUNK)
}

fn scope(model: &str) -> Scope {
    Scope {
        chunk_tokens: Some(u32::try_from(CHUNK).unwrap()),
        ..Scope::new(model)
    }
}

fn given(server: &TestServer, scope: &Scope) -> (Client, EngineDrivenWorker) {
    let worker = server.engine_driven(1, scope);
    (Client::connect(server.endpoint()).unwrap(), worker)
}

fn find(client: &Client, scope: &Scope, keys: &[ObjectKey], request: &str) -> Vec<bool> {
    let prompt = objects(keys);
    let key = scope.scheduler_key(&prompt, 0..prompt.len() as u64, request);
    client.find(&key, PATIENCE).join().unwrap()
}

/// Stores one object per key; its bytes are those of a chunk of this seed at the key's position.
fn put(worker: &mut EngineDrivenWorker, keys: &[ObjectKey], seed: u64) -> Vec<u64> {
    let prompt = objects(keys);
    worker.stored(&prompt, whole(&prompt), seed)
}

#[test]
fn objects_are_found_one_by_one_and_read_without_a_lookup() {
    let server = TestServer::start(&[]);
    let scope = scope("objects");
    let (client, mut worker) = given(&server, &scope);
    let features = worker.connection().get_experimental().unwrap();
    assert!(features.iter().any(|name| name == OBJECTS_FEATURE));

    assert_eq!(put(&mut worker, &keys([1, 2, 3]), 7), [0, 1, 2]);
    // What is there is not written again.
    assert_eq!(put(&mut worker, &keys([2, 4]), 8), [1]);
    let asked = keys([9, 3, 8, 1, 4, 9]);
    assert_eq!(
        find(&client, &scope, &asked, "f"),
        [false, true, false, true, true, false]
    );
    // In another order than they were stored, and each with its own bytes.
    for (key, seed, position) in [(3, 7, 2), (1, 7, 0), (4, 8, 1)] {
        let read = worker.retrieved(&objects(&keys([key])), 0..1, "r").unwrap();
        let expected = crate::support::bytes(seed, position, read[0].len());
        assert!(read[0] == expected, "key {key}");
    }
    assert!(
        worker
            .retrieved(&objects(&keys([3, 9])), 0..2, "r")
            .is_none()
    );
    // Another tenant has none of them.
    let stranger = scope.clone().with_salt("t");
    assert_eq!(find(&client, &stranger, &keys([1, 2]), "s"), [false, false]);
    client.end_session("f").join().unwrap();
    assert_eq!(server.readings().leased_objects, 0);
    server.assert_sound();
}

#[test]
fn find_leases_until_its_session_ends() {
    let server = TestServer::start(&[]);
    let scope = scope("objects/leased");
    let (client, mut worker) = given(&server, &scope);
    put(&mut worker, &keys([1, 2]), 1);
    assert_eq!(find(&client, &scope, &keys([2, 5]), "f"), [true, false]);
    assert_eq!(server.readings().leased_objects, 1);
    server.engine().admin().clear(false);
    // A read takes a lease of its own and leaves that of the find.
    assert!(worker.retrieved(&objects(&keys([2])), 0..1, "f").is_some());
    assert_eq!(server.readings().leased_objects, 1);
    assert_eq!(find(&client, &scope, &keys([1, 2]), "g"), [false, true]);
    for request in ["f", "g"] {
        client.end_session(request).join().unwrap();
    }
    server.engine().admin().clear(false);
    assert_eq!(find(&client, &scope, &keys([2]), "h"), [false]);
    server.assert_sound();
}

#[test]
fn objects_come_from_tiers_whatever_is_missing_before_them() {
    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path())], &[]);
    let scope = scope("objects/tier").with_salt("t");
    let (client, mut worker) = given(&server, &scope);
    let stored: Vec<ObjectKey> = (0..40).map(|number| [number; 32]).collect();
    put(&mut worker, &stored, 3);
    settle(&server);
    server.engine().admin().clear(true);
    let asked = keys([90, 39, 91, 0, 20]);
    assert_eq!(
        find(&client, &scope, &asked, "f"),
        [false, true, false, true, true]
    );
    assert_eq!(server.readings().tiers[0].loaded_objects, 3);
    let read = worker.retrieved(&objects(&keys([39])), 0..1, "r").unwrap();
    assert!(read[0] == crate::support::bytes(3, 39, read[0].len()));
    client.end_session("f").join().unwrap();
    // Without time for a tier the answer is what L1 has.
    let prompt = objects(&keys([39, 7]));
    let find = Request::Find {
        key: scope.scheduler_key(&prompt, 0..prompt.len() as u64, "n"),
        timeout: Seconds::Whole(0),
    };
    let answer = worker.connection().call(&find).unwrap();
    assert_eq!(answer.response().unwrap(), Response::Bits(vec![1].into()));
    worker.connection().end_session("n").unwrap();
    assert_eq!(server.readings().leased_objects, 0);
    server.assert_sound();
}

#[test]
fn session_that_ends_during_a_find_holds_nothing() {
    // A tenth of a second for each object.
    let tier = r#"{"type":"mock","max_size_gb":1,"mock_bandwidth_gb":0.00015}"#;
    let server = with_tiers(&[tier], &[]);
    let scope = scope("objects/ended");
    let (client, mut worker) = given(&server, &scope);
    put(&mut worker, &keys([1, 2, 3]), 1);
    settle(&server);
    server.engine().admin().clear(true);
    put(&mut worker, &keys([4]), 1);
    let prompt = objects(&keys([1, 2, 3, 4]));
    let key = scope.scheduler_key(&prompt, 0..prompt.len() as u64, "f");
    let found = client.find(&key, PATIENCE);
    // Read behind the find, and answered before it.
    client.end_session("f").join().unwrap();
    assert!(!found.is_ready());
    assert_eq!(found.join().unwrap(), [true; 4]);
    wait_until("no leases", || server.readings().leased_objects == 0);
    server.assert_sound();
}

/// A key with these fields between the worker and the range.
fn key_frame(fields: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    let text = |out: &mut Vec<u8>, name: &str, value: &str| {
        wire::write_str(out, name);
        wire::write_str(out, value);
    };
    wire::write_map_len(&mut out, 9 + fields.len());
    text(&mut out, "model_name", "objects/hostile");
    wire::write_str(&mut out, "world_size");
    wire::write_uint(&mut out, 1);
    wire::write_str(&mut out, "worker_id");
    wire::write_nil(&mut out);
    for (name, value) in fields {
        wire::write_str(&mut out, name);
        out.extend(value);
    }
    for name in ["start", "end"] {
        wire::write_str(&mut out, name);
        wire::write_uint(&mut out, if name == "end" { u64::MAX } else { 0 });
    }
    text(&mut out, "request_id", "f");
    text(&mut out, "cache_salt", "");
    wire::write_str(&mut out, "request_configs");
    wire::write_nil(&mut out);
    wire::write_str(&mut out, "num_kv_readers");
    wire::write_uint(&mut out, 1);
    out
}

#[test]
fn hostile_finds_are_answered() {
    let server = TestServer::start(&[]);
    let scope = scope("objects/hostile");
    let (client, mut worker) = given(&server, &scope);
    put(&mut worker, &keys([1]), 1);
    let raw = Raw::connect(server.endpoint());
    let bin = |bytes: &[u8]| {
        let mut out = Vec::new();
        wire::write_bin(&mut out, bytes);
        out
    };
    let size = |tokens: u64| {
        let mut out = Vec::new();
        wire::write_uint(&mut out, tokens);
        ("kvtier.chunk_tokens", out)
    };
    let tokens = || {
        let mut out = Vec::new();
        wire::write_tokens(&mut out, &[7; CHUNK]);
        ("token_ids", out)
    };
    let key = ("kvtier.keys", bin(&[1; 32]));
    type Fields = Vec<(&'static str, Vec<u8>)>;
    let cases: [(&str, Fields, &[u8]); 6] = [
        (
            "a good one",
            vec![size(CHUNK as u64), key.clone()],
            b"\xc4\x01\x01",
        ),
        (
            "half a key",
            vec![size(CHUNK as u64), ("kvtier.keys", bin(&[1; 33]))],
            b"\xc4\x00",
        ),
        ("no size", vec![key.clone()], b"\xc4\x00"),
        ("tokens", vec![size(CHUNK as u64), tokens()], b"\xc4\x00"),
        (
            "no keys",
            vec![size(CHUNK as u64), ("kvtier.keys", bin(&[]))],
            b"\xc4\x00",
        ),
        (
            "another size",
            vec![size(CHUNK as u64 * 64), key],
            b"\xc4\x00",
        ),
    ];
    for (name, fields, expected) in cases {
        let mut op = Vec::new();
        wire::write_str(&mut op, "kvtier.find");
        let frames = [
            name.as_bytes().to_vec(),
            op,
            key_frame(&fields),
            b"\xcb\x3f\xf0\0\0\0\0\0\0".to_vec(),
        ];
        raw.send(&frames);
        let answer = raw.receive();
        assert_eq!(answer[0], name.as_bytes());
        // A request that cannot be read is answered with a text in place of the operation.
        let payload = answer.get(2).map_or(&b"\xc4\x00"[..], Vec::as_slice);
        assert_eq!(payload, expected, "{name}: {answer:?}");
    }
    assert_eq!(find(&client, &scope, &keys([1]), "g"), [true]);
    server.assert_sound();
}
