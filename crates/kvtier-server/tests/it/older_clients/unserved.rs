//! Clients of releases that are not served: each is one warning, and none waits for an answer that does not come.

use std::time::Duration;

use kvtier_client::Scope;
use kvtier_client::proto::wire::write_str;

use super::*;
use crate::http::json_of;
use crate::support::given_stored_on;

/// The only warning, in the answers of both routes.
fn warning(server: &TestServer) -> String {
    let warnings = server.engine().admin().warnings();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    for path in ["/healthcheck", "/status"] {
        let (status, told) = json_of(server, "GET", path, "");
        assert_eq!(
            (status, &told["warnings"]),
            (200, &serde_json::json!(warnings)),
            "{path}"
        );
    }
    warnings[0].clone()
}

fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// A key with one more field, which is nil.
fn with_field(mut key: Vec<u8>, name: &str) -> Vec<u8> {
    assert!((0x80..0x8f).contains(&key[0]));
    key[0] += 1;
    write_str(&mut key, name);
    key.push(0xc0);
    key
}

fn lookup_frames(uid: u8, generation: Generation) -> Frames {
    frames(uid, generation.spec(Operation::Lookup).unwrap())
}

/// Hits of a lookup with this key, by its number.
fn hits(client: &Raw, key: Vec<u8>) -> Option<Vec<u8>> {
    let mut lookup = lookup_frames(1, Generation::G1);
    lookup[2] = key;
    client.send(&lookup);
    let number = client.receive().remove(2);
    let query = Generation::G1.spec(Operation::QueryPrefetchStatus).unwrap();
    client.send(&[vec![2], query.id().encode(), number]);
    Some(client.receive().remove(2))
}

// proves: docs/clients.md#releases-that-are-not-served
#[test]
fn first_request_before_0_4_is_refused_at_once() {
    for (number, releases) in [(7, "0.3.10 to 0.3.13"), (8, "0.3.14 or 0.3.15")] {
        let server = TestServer::start(&[]);
        for _ in 0..2 {
            let client = server.raw();
            let first: Frames = vec![vec![0], vec![number]];
            client.send(&first);
            // No value, with which the adapter's constructor fails. A value of another type ends its receiving.
            assert_eq!(client.receive(), first);
        }
        assert_contains(&warning(&server), &[releases, "install lmcache 0.4.2 to "]);
        assert_eq!(server.engine().metrics().unknown_requests.get(), 2);
        server.assert_sound();
    }
}

#[test]
fn numbers_of_older_releases_are_others_in_later_requests() {
    let server = TestServer::start(&[]);
    let client = server.raw();
    // A client that came back, and one that has said hello.
    client.send(&[vec![1], vec![7]]);
    assert_ne!(client.receive().len(), 2);
    assert_contains(&warning(&server), &["operation 7 with 0 payloads"]);
}

// proves: docs/clients.md#releases-that-are-not-served
#[test]
fn client_of_0_4_1_has_no_hits() {
    let (server, scope) = (TestServer::start(&[]), Scope::new("older/model"));
    let (server, _scope, _worker, _prompt) = given_stored_on(server, scope, 2);
    let key = lookup_frames(1, Generation::G1).remove(2);
    let [older, newer] = [(); 2].map(|()| server.raw());
    for client in [&older, &newer] {
        hello(client, Generation::G1);
    }
    assert_eq!(hits(&newer, key.clone()), int(2), "0.4.2");
    assert!(server.engine().admin().warnings().is_empty());
    let short = with_field(key.clone(), "chunk_hash");
    let mut long = short.clone();
    long.pop();
    kvtier_client::proto::wire::write_bin(&mut long, &[0; 300_000]);
    for key in [&long, &short, &short] {
        assert_eq!(hits(&older, key.clone()), int(0));
    }
    assert_contains(
        &warning(&server),
        &["LMCache 0.4.1", "install lmcache 0.4.2 to "],
    );
    assert_eq!(hits(&newer, key), int(2));
    server.assert_sound();
}

/// Registrations of a coming release, with the warnings that they cause.
fn registrations_with_new_fields() -> [(Frames, &'static str); 3] {
    let request = |operation| {
        let mut rows = Generation::G6.specs().iter();
        frames(1, rows.rfind(|row| row.operation == operation).unwrap())
    };
    let mut hints = request(Operation::RegisterKvCache);
    hints[7] = with_field(hints[7].clone(), "coming_field");
    let mut group = request(Operation::RegisterKvCache);
    let info = with_field(b"\x81\xafengine_group_id\x00".to_vec(), "coming_field");
    group[8] = [&[0x91], &info[..]].concat();
    let mut layouts = request(Operation::RegisterEngineDriven);
    let layout = b"\x84\xaanum_layers\x02\xafhidden_dim_size\x08\xa9dtype_str\xa8bfloat16\xb0tokens_per_block\x04";
    let layout = with_field(layout.to_vec(), "coming_field");
    let context = layouts[2].clone();
    layouts[2] = with_field(context, "group_layouts");
    layouts[2].pop();
    layouts[2].extend([&[0x91], &layout[..]].concat());
    [
        (
            hints,
            "field \"coming_field\" in layout_hints of operation register_kv_cache",
        ),
        (
            group,
            "field \"coming_field\" in engine_group_infos of operation register_kv_cache",
        ),
        (
            layouts,
            "field \"coming_field\" in payload of operation register_kv_cache_engine_driven_context",
        ),
    ]
}

// proves: docs/clients.md#releases-that-are-not-served
#[test]
fn unknown_requests_are_one_warning_per_kind() {
    let newest = Generation::ALL[Generation::ALL.len() - 1];
    let lookup = |key: Vec<u8>| {
        let mut frames = lookup_frames(1, newest);
        frames[2] = key;
        frames
    };
    let key = lookup_frames(1, newest).remove(2);
    let cases = [
        (
            vec![vec![1], b"\xb0coming_operation".to_vec()],
            "operation \"coming_operation\"",
        ),
        (
            vec![vec![1], lookup(key.clone())[1].clone()],
            "with 0 payloads",
        ),
        (
            lookup(b"\xc1".to_vec()),
            "operation lookup that cannot be decoded (key",
        ),
        (
            lookup(with_field(key, "coming_field")),
            "field \"coming_field\" in key of operation lookup",
        ),
    ];
    for (request, text) in cases.into_iter().chain(registrations_with_new_fields()) {
        let server = TestServer::start(&[]);
        let client = server.raw();
        hello(&client, newest);
        for _ in 0..3 {
            client.send(&request);
            client.receive();
        }
        let served = kvtier_client::proto::generation::served_releases();
        assert_contains(&warning(&server), &[text, &served]);
        // As long as the client is connected, and for ten minutes.
        server.pass(Duration::from_secs(3600));
        assert_contains(&warning(&server), &[text]);
        drop(client);
        wait_until("the end of the warning", || {
            server.pass(Duration::from_secs(601));
            server.engine().admin().warnings().is_empty()
        });
        server.assert_sound();
    }
}
