//! `POST /prefix/match`: what a router learns of a prompt.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use crate::explain::{body, request_as};
use crate::http::json_of;
use crate::l2::{fs, hits, settle, store, with_tiers};
use crate::support::{CHUNK, Steps as _, TestServer, prompt, tokens};
use kvtier_client::Scope;

const MATCH: &str = "/prefix/match";

fn ask(server: &TestServer, body: &Value) -> Value {
    let (status, answer) = json_of(server, "POST", MATCH, &body.to_string());
    assert_eq!(status, 200, "{answer}");
    answer
}

fn found(answer: &Value) -> [u64; 2] {
    ["hit_tokens", "hit_tokens_l1"].map(|field| answer[field].as_u64().unwrap())
}

// proves: docs/hosts.md#route-to-where-the-prefix-is
// proves: docs/compare.md#routers
#[test]
fn match_is_what_a_lookup_finds() {
    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path())], &[]);
    let scope = Scope::new("prefix/tier#digest").with_salt("t");
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 4), 1);
    settle(&server);
    server.engine().admin().clear(true);
    assert_eq!(hits(worker.connection(), &scope, &prompt(1, 1), "r"), 1);
    let before = server.readings();
    let question = body("prefix/tier", "t", 1, 6);
    let answer = ask(&server, &question);
    let capacity = before.capacity_bytes as f64;
    assert_eq!(
        answer,
        json!({
            "chunk_size": 16, "chunks": 6, "hit_tokens": 64, "hit_tokens_l1": 16, "refused": null,
            "load": {
                "active_sessions": 1, "pending_transfers": 0, "memory_usage_ratio": before.used_bytes as f64 / capacity,
            },
        })
    );
    let other_salt = body("prefix/tier", "", 1, 6);
    assert_eq!(found(&ask(&server, &other_salt)), [0, 0]);
    // Nothing was loaded, leased or looked up.
    let after = server.readings();
    let counts = |it: &kvtier_observe::metrics::Readings| {
        (it.tiers[0].loaded_objects, it.leased_objects, it.sessions)
    };
    assert_eq!(counts(&after), counts(&before));
    worker.close().unwrap();
    let answer = ask(&server, &question);
    assert_eq!(
        (found(&answer), &answer["refused"]),
        ([0, 0], &json!("no_gpu_context"))
    );
    server.assert_sound();
}

#[test]
fn match_is_no_use_of_an_object() {
    let server = TestServer::start(&["--l1-size-gb", "0.001953125"]);
    let mut worker = server.engine_driven(1, &Scope::new("prefix/use"));
    let fits = server.readings().capacity_bytes / worker.chunk_bytes() as u64;
    for chunk in 0..fits {
        worker.stored(&prompt(1 + chunk as u32, 1), 0..1, 1);
    }
    let oldest = body("prefix/use", "", 1, 1);
    assert_eq!(found(&ask(&server, &oldest)), [16, 16]);
    worker.stored(&prompt(9000, 1), 0..1, 1);
    assert_eq!(found(&ask(&server, &oldest)), [0, 0]);
}

#[test]
fn packed_tokens_are_those_of_the_list() {
    let server = TestServer::start(&[]);
    let mut worker = server.engine_driven(1, &Scope::new("prefix/packed"));
    store(&mut worker, &prompt(1, 3), 1);
    let mut question = body("prefix/packed", "", 1, 4);
    let listed = ask(&server, &question);
    assert_eq!(found(&listed), [48, 48]);
    let bytes = tokens(1, 4).into_iter().flat_map(u32::to_be_bytes);
    let bytes: Vec<_> = bytes.collect();
    question["token_ids"] = json!(BASE64.encode(&bytes));
    assert_eq!(ask(&server, &question), listed);
    for (wrong, value) in [
        (BASE64.encode(&bytes[1..]), "255 bytes".to_owned()),
        ("&".to_owned(), "string \"&\"".to_owned()),
    ] {
        question["token_ids"] = json!(wrong);
        let (status, answer) = json_of(&server, "POST", MATCH, &question.to_string());
        let text = format!(
            "token_ids: invalid value: {value}; allowed: a list of token ids, or base64 of four bytes per id"
        );
        assert_eq!((status, &answer["detail"]), (422, &json!(text)));
    }
    question["token_ids"] = json!(vec![1; 1_000_001]);
    let (status, answer) = json_of(&server, "POST", MATCH, &question.to_string());
    let text = "too many token_ids in a single request (limit=1000000, got=1000001)";
    assert_eq!((status, &answer["detail"]), (400, &json!(text)));
}

#[test]
fn chunk_size_is_chosen_among_several() {
    let server = TestServer::start(&[]);
    let mut large = Scope::new("prefix/sizes");
    large.chunk_tokens = Some(2 * CHUNK as u32);
    let _large = server.engine_driven(1, &large);
    let mut worker = server.engine_driven(2, &Scope::new("prefix/sizes"));
    store(&mut worker, &prompt(1, 3), 1);
    let mut question = body("prefix/sizes", "", 1, 3);
    let (status, answer) = json_of(&server, "POST", MATCH, &question.to_string());
    let text = "chunk_size is left out; allowed for model_name='prefix/sizes': 16, 32";
    assert_eq!((status, &answer["detail"]), (400, &json!(text)));
    for (size, hit) in [(16, 48), (32, 0)] {
        question["chunk_size"] = json!(size);
        let answer = ask(&server, &question);
        assert_eq!(
            (found(&answer), &answer["chunk_size"]),
            ([hit; 2], &json!(size))
        );
    }
}

#[test]
fn reader_may_match_a_prefix() {
    const READER: &str = "reader-0123456789abcdef";
    let server = TestServer::start_with(&[], |config| {
        config.http.tokens = Some(format!("read r {READER}").into());
    });
    let _worker = server.engine_driven(1, &Scope::new("prefix/role"));
    let question = body("prefix/role", "", 1, 1).to_string();
    let line = format!("POST {MATCH}");
    assert_eq!(request_as(&server, READER, &line, &question).0, 200);
    let other = "other-0123456789abcdef";
    assert_eq!(request_as(&server, other, &line, &question).0, 401);
}
