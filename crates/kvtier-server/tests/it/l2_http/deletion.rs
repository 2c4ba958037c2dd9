//! Objects that are deleted.

use kvtier_client::Scope;
use serde_json::{Value, json};

use super::{MOCK, OBJECTS, counts, delete, detail, list, with_worker};
use crate::http::{json_of, send};
use crate::l2::{fs, hits, settle, store, with_tiers};
use crate::log::Log;
use crate::support::{TestServer, prompt, wait_until};

#[test]
fn deletion_counts_objects_really_deleted() {
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

/// The client of a deletion disconnects before the first of two tiers answers.
#[test]
fn deletion_whose_client_disconnects_runs_to_its_end() {
    let log = Log::listen();
    let directory = tempfile::tempdir().unwrap();
    let slow = format!(
        r#"{{"type":"fault_inject","faults":[{{"kind":"delay","operation":"delete","delay_ms":5000}}],"inner":{MOCK}}}"#
    );
    let server = with_tiers(&[&slow, &fs(directory.path())], &[]);
    let mut worker = server.engine_driven(1, &Scope::new("delete/disconnects"));
    store(&mut worker, &prompt(1, 1), 1);
    settle(&server);
    let key = list(&server, "adapter=fs-1")[0]["key"].clone();
    let client = send(
        &server,
        "DELETE",
        OBJECTS,
        &json!({ "keys": [key] }).to_string(),
    );
    wait_until("a deletion in the first tier", || {
        let (_, status) = json_of(&server, "GET", "/status", "");
        status["storage_manager"]["l2_adapters"][0]["fault_inject"]["faults"][0]["faults"] == 1
    });
    client.shutdown(std::net::Shutdown::Both).unwrap();
    let said = "the client did not wait for the end";
    wait_until("its line in the log", || log.text().contains(said));
    let text = log.text();
    let line = text.lines().find(|line| line.contains(said)).unwrap();
    assert!(line.contains("did=\"1 keys in l2, force false\""), "{line}");
    wait_until("the deletion in the second tier", || {
        list(&server, "adapter=fs-1").is_empty()
    });
}

#[test]
fn tier_unable_to_delete_is_reported() {
    // Its one slot for stores and deletes is taken for hours by a store that has timed out.
    let busy = r#"{"type":"mock","max_size_gb":1,"mock_bandwidth_gb":1e-9,"store_timeout_ms":1,"max_in_flight":1}"#;
    let flags = ["--l2-drain-timeout-seconds", "0"];
    let server = with_tiers(&[busy], &flags);
    let mut worker = server.engine_driven(1, &Scope::new("delete/fails"));
    store(&mut worker, &prompt(1, 1), 1);
    wait_until("the deadline of the store", || {
        !server.readings().tiers[0].store_failures.is_empty()
    });
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
fn impossible_deletion_is_refused_with_reason() {
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
    let missing = |field: &str| detail(&format!("keys[1]: missing field `{field}`"));
    let cases = [
        (Value::Null, 422, detail("the body is no JSON object")),
        (json!({}), 422, detail("body: missing field `keys`")),
        (
            json!({ "keys": 1 }),
            422,
            detail("keys: invalid type: integer `1`; allowed: a sequence"),
        ),
        (
            json!({ "keys": ["k"] }),
            422,
            detail("keys[0]: invalid type: string \"k\"; allowed: an object"),
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
            detail("keys[1].model_name: invalid type: integer `7`; allowed: a string"),
        ),
        (
            with("kv_rank", json!(1.5)),
            422,
            detail("keys[1].kv_rank: invalid type: floating point `1.5`; allowed: an integer"),
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
            detail("tier: \"zzz\"; allowed: l1, l2, all"),
        ),
        (
            json!({ "keys": [good], "force": "maybe" }),
            422,
            detail("force: invalid type: string \"maybe\"; allowed: a boolean"),
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
