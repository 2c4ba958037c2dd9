//! Which objects there are.

use std::collections::BTreeSet;

use kvtier_client::Scope;
use serde_json::{Value, json};

use super::{MOCK, OBJECTS, detail, list};
use crate::http::json_of;
use crate::l2::{fs, settle, store, with_tiers};
use crate::support::{TestServer, prompt};

fn keys(entries: &[Value]) -> BTreeSet<String> {
    let keys = entries.iter().map(|entry| entry["key"].to_string());
    keys.collect()
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
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
fn impossible_listing_is_refused_with_reason() {
    let alone = TestServer::start(&[]);
    let none = detail("no L2 adapters configured");
    for query in ["", "?adapter=fs", "?tier=l2"] {
        let answer = json_of(&alone, "GET", &format!("{OBJECTS}{query}"), "");
        assert_eq!(answer, (503, none.clone()), "{query}");
    }
    assert!(list(&alone, "tier=l1").is_empty());

    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path()), MOCK], &[]);
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
    let cases = [
        (
            "tier=all",
            400,
            detail("tier 'all' not supported; only 'l2' and 'l1'"),
        ),
        ("tier=l9", 422, detail("tier: \"l9\"; allowed: l1, l2, all")),
        (
            "adapter=nope",
            404,
            detail("no L2 adapter with type_name='nope'"),
        ),
        (
            "page_size=0",
            422,
            detail("page_size: \"0\"; allowed: an integer from 1 to 5000"),
        ),
        (
            "page_size=5001",
            422,
            detail("page_size: \"5001\"; allowed: an integer from 1 to 5000"),
        ),
        (
            "page_size=abc",
            422,
            detail("page_size: \"abc\"; allowed: an integer from 1 to 5000"),
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

#[test]
fn a_page_is_empty_only_at_the_end() {
    let server = TestServer::start(&[]);
    let scope = Scope::new("list/sparse");
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 400), 1);
    let all = list(&server, "tier=l1&page_size=5000");
    assert_eq!(all.len(), 400);
    // Those that are listed first.
    let keys: Vec<_> = all[..390].iter().map(|entry| &entry["key"]).collect();
    let body = json!({ "keys": keys, "tier": "l1" }).to_string();
    let (status, answer) = json_of(&server, "DELETE", OBJECTS, &body);
    assert_eq!((status, &answer["deleted"]), (200, &json!(390)));
    let (_, page) = json_of(
        &server,
        "GET",
        &format!("{OBJECTS}?tier=l1&page_size=2"),
        "",
    );
    assert_eq!(page["entries"].as_array().unwrap().len(), 2);
}
