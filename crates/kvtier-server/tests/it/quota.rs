//! What tenants may have, over HTTP: LMCache's answers, what we tell beyond them, and what limits do to stores.

use std::path::Path;

use kvtier_client::Scope;
use serde_json::{Value, json};

use crate::http::{covers, json_of, request};
use crate::l2::{settle, store, with_tiers};
use crate::log::Log;
use crate::metrics::parse_metrics;
use crate::support::{TestServer, bytes, prompt, range, wait_until};

const ISOLATED: [&str; 2] = ["--eviction-policy", "IsolatedLRU"];

const GIB: u64 = 1 << 30;

/// Bytes of a chunk of an engine-driven worker here.
const LEN: u64 = 8192;

fn mock() -> String {
    r#"{"type":"mock","max_size_gb":1,"mock_bandwidth_gb":100,"eviction":{"eviction_policy":"IsolatedLRU"}}"#.into()
}

fn isolated_fs(directory: &Path) -> String {
    format!(
        r#"{{"type":"fs","base_path":"{}","eviction":{{"eviction_policy":"IsolatedLRU"}}}}"#,
        directory.display()
    )
}

fn put(server: &TestServer, salt: &str, body: &Value) -> (u16, Value) {
    json_of(server, "PUT", &format!("/quota/{salt}"), &body.to_string())
}

fn get(server: &TestServer, salt: &str) -> Value {
    let (status, told) = json_of(server, "GET", &format!("/quota/{salt}"), "");
    assert_eq!(status, 200, "{told}");
    told
}

/// Sets a limit of `chunks`.
fn limit(server: &TestServer, salt: &str, chunks: u64) {
    let size = (chunks * LEN) as f64 / GIB as f64;
    let (status, told) = put(server, salt, &json!({ "limit_gb": size }));
    assert_eq!((status, &told["status"]), (200, &json!("ok")), "{told}");
}

#[test]
fn removal_of_no_quota_is_not_logged() {
    let (server, log) = (TestServer::start(&[]), Log::listen());
    limit(&server, "a", 1);
    for (status, logged) in [("removed", 1), ("not_found", 1)] {
        let (_, told) = json_of(&server, "DELETE", "/quota/a", "");
        let removed = log.text().matches("a tenant's quota was removed").count();
        assert_eq!((&told["status"], removed), (&json!(status), logged));
    }
}

#[test]
fn answers_are_lmcaches() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("quotas");
    let flags = [&ISOLATED[..], &["--quota-file", file.to_str().unwrap()]].concat();
    let with_tiers = with_tiers(&[&mock(), &mock()], &flags);
    // What the tenant without a salt had there: 8 MiB in each of two tiers.
    let mut worker = with_tiers.engine_driven(1, &Scope::new("m"));
    store(&mut worker, &prompt(1, 1024), 1);
    settle(&with_tiers);
    let file = directory.path().join("others");
    let alone =
        TestServer::start(&[&ISOLATED[..], &["--quota-file", file.to_str().unwrap()]].concat());
    // Ours, where no key can have such a salt.
    let no_tenant = |path: &str| path.contains("a%40b") || path.len() > 150;
    let mut refused = 0;
    let recorded = include_str!("../vectors/quota_exchanges.json");
    let recorded: Value = serde_json::from_str(recorded).unwrap();
    for exchange in recorded["exchanges"].as_array().unwrap() {
        let server = match exchange["server"].as_str() {
            Some("A") => &with_tiers,
            _ => &alone,
        };
        let (asked, expected) = (&exchange["request"], &exchange["response"]);
        let (method, path) = (
            asked["method"].as_str().unwrap(),
            asked["path"].as_str().unwrap(),
        );
        let body = match &asked["body"] {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            body => body.to_string(),
        };
        // No client of LMCache sends a slash at the end.
        if expected["location"].is_string() {
            continue;
        }
        let (status, _, answer) = request(server, method, path, &body);
        let context = format!("{method} {path} {body}: {status} {answer}");
        if no_tenant(path) {
            assert_eq!(status, 400, "{context}");
            assert!(answer.starts_with(r#"{"error":"cache_salt: "#), "{context}");
            refused += 1;
            continue;
        }
        assert_eq!(json!(status), expected["status"], "{context}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        // The texts of refusals are our own.
        if expected["status"] == 400 {
            assert!(answer["error"].is_string(), "{context}");
            continue;
        }
        let mut body = expected["body"].clone();
        if let Some(users) = body.get_mut("users").and_then(Value::as_object_mut) {
            users.retain(|salt, _| salt != "a@b" && salt.len() < 150);
            // Not one more either.
            assert_eq!(Value::Object(users.clone()), answer["users"], "{context}");
        }
        assert!(covers(&body, &answer), "{context}, expected {body}");
        // A tenant is reported in full; every other answer has no key that LMCache's lacks.
        if method != "GET" || path == "/quota" {
            assert_eq!(answer, body, "{context}");
        }
    }
    assert_eq!(refused, 4);
    worker.close().unwrap();
    with_tiers.assert_sound();
}

/// Salts that tenants could try, by path, and the answers to `PUT`, `GET` and `DELETE`.
#[test]
fn hostile_salts_have_exact_answers() {
    let server = TestServer::start(&[]);
    let long = "x".repeat(4096);
    let most = "%C3%A9".repeat(128);
    let forbidden = |c: &str| json!({ "error": format!("cache_salt: a cache salt must not contain {c}; '@', '/', '\\' and NUL are refused") });
    let at_most = |count| json!({ "error": format!("cache_salt: a cache salt has at most 128 characters, this one has {count}") });
    let no_text = json!({ "error": "cache_salt: it is not UTF-8" });
    let nowhere = json!({ "detail": "Not Found" });
    for (path, status, refusal) in [
        ("a%40b", 400, forbidden("'@'")),
        ("a%5Cb", 400, forbidden("'\\\\'")),
        ("%00", 400, forbidden("'\\0'")),
        ("a%00", 400, forbidden("'\\0'")),
        (&*long, 400, at_most(4096)),
        (&*format!("{most}x"), 400, at_most(129)),
        ("%FF", 400, no_text),
        ("a%2Fb", 404, nowhere.clone()),
        ("a/b", 404, nowhere.clone()),
        ("%2e%2e%2fetc", 404, nowhere.clone()),
    ] {
        for (method, body) in [("PUT", r#"{"limit_gb": 1}"#), ("GET", ""), ("DELETE", "")] {
            let told = json_of(&server, method, &format!("/quota/{path}"), body);
            assert_eq!(told, (status, refusal.clone()), "{method} {path}");
        }
    }
    for (path, salt) in [
        ("..", ".."),
        ("%2e%2e", ".."),
        (".", "."),
        ("_default", "_default"),
        ("a%0Ab", "a\nb"),
        ("a+b%20c", "a+b c"),
        ("%C3%A9", "é"),
        ("%25", "%"),
        ("%22", "\""),
        ("@_default", "@_default"),
        ("@.", "."),
        ("@..", ".."),
        (&*most, &*"é".repeat(128)),
        ("%F0%9F%A6%80", "🦀"),
    ] {
        let told = put(&server, path, &json!({ "limit_gb": 1 }));
        let ok = json!({ "cache_salt": salt, "limit_gb": 1.0, "status": "ok", "persisted": false,
            "enforced": false });
        assert_eq!(told, (200, ok));
        assert_eq!(get(&server, path)["exists"], true);
        let listed = json_of(&server, "GET", "/quota", "").1;
        assert_eq!(
            listed["users"],
            json!({ salt: { "limit_gb": 1.0, "current_usage_gb": 0.0 } })
        );
        let told = json_of(&server, "DELETE", &format!("/quota/{path}"), "");
        let gone = json!({ "cache_salt": salt, "status": "removed", "persisted": false, "enforced": false });
        assert_eq!(told, (200, gone));
    }
    let told = json_of(&server, "POST", "/quota", "{}");
    assert_eq!(told, (405, json!({ "detail": "Method Not Allowed" })));
    // The tenant whose salt is really that is another one than the one without a salt.
    put(&server, "_default", &json!({ "limit_gb": 1 }));
    put(&server, "%40_default", &json!({ "limit_gb": 2 }));
    let (_, listed) = json_of(&server, "GET", "/quota?all=true", "");
    assert_eq!(listed["users"]["_default"]["limit_gb"], 1.0);
    assert_eq!(listed["users"]["@_default"]["limit_gb"], 2.0);
    let table = server.engine().quotas().table();
    let limits = ["", "_default"].map(|salt| table.get(salt).unwrap().limit.0);
    assert_eq!(limits, [Some(GIB), Some(2 * GIB)]);
    for name in ["_default", "@_default"] {
        json_of(&server, "DELETE", &format!("/quota/{name}"), "");
    }
    assert_eq!(server.engine().quotas().table().len(), 0);
}

#[test]
fn tenant_report_lists_every_tier() {
    let flags = [&ISOLATED[..], &["--quota-default", "1GiB"]].concat();
    let server = with_tiers(&[&mock()], &flags);
    let scope = Scope::new("m").with_salt("alice");
    let mut worker = server.engine_driven(1, &scope);
    store(&mut worker, &prompt(1, 4), 1);
    settle(&server);
    let in_tier = |limit: Option<u64>, reserved: u64| {
        json!({
            "limit_bytes": limit, "reserved_bytes": reserved, "enforced": true, "usage_bytes": 4 * LEN, "objects": 4,
            "over_quota": false, "refused_over_quota": 0, "refused_no_room": 0, "evicted_objects": 0, "evicted_bytes": 0,
        })
    };
    let told = |exists: bool, limit: Value, l1: Value, mock: Value| {
        json!({
            "cache_salt": "alice", "limit_gb": limit, "current_usage_gb": (4 * LEN) as f64 / GIB as f64, "exists": exists,
            "persisted": false, "tiers": { "l1": l1, "mock-0": mock },
            "requested_chunks": 0, "hit_chunks": 0, "hit_rate": null,
        })
    };
    let default = || in_tier(Some(GIB), 0);
    assert_eq!(
        get(&server, "alice"),
        told(false, json!(0.0), default(), default())
    );
    let body = json!({ "limit_gb": "unlimited", "reserved_gb": 0.0078125,
        "tiers": { "l1": { "limit_gb": 0.03125, "reserved_gb": 0 } } });
    let ok = json!({ "cache_salt": "alice", "limit_gb": "unlimited", "status": "ok", "persisted": false });
    assert_eq!(put(&server, "alice", &body), (200, ok));
    let (mut l1, mock) = (in_tier(Some(GIB / 32), 0), in_tier(None, GIB / 128));
    // What is its own there, as it was set.
    (l1["limit_gb"], l1["reserved_gb"]) = (json!(0.03125), json!(0.0));
    let mut expected = told(true, json!("unlimited"), l1, mock);
    expected["reserved_gb"] = json!(0.0078125);
    assert_eq!(get(&server, "alice"), expected);
    // Lookups count for the tenant.
    let all = 0..prompt(1, 8).len() as u64;
    let mut connection = server.connect();
    connection
        .lookup(&scope.scheduler_key(&prompt(1, 8), all, "r"))
        .unwrap();
    wait_until("the count of the lookup", || {
        get(&server, "alice")["hit_chunks"] != 0
    });
    connection.end_session("r").unwrap();
    let (status, told) = put(
        &server,
        "alice",
        &json!({ "limit_gb": 2, "reserved_gb": 1 }),
    );
    let error = "l1: 1GiB reserved for all tenants together is more than the 64MiB it has";
    assert_eq!((status, told), (400, json!({ "error": error })));
    let (_, told) = json_of(&server, "GET", "/status", "");
    let quotas = json!({ "mode": "soft", "default_limit_bytes": GIB, "enforced_by": ["l1", "mock-0"],
        "num_tenants": 1, "persisted": false, "file": null });
    assert_eq!(told["quotas"], quotas);
    let eviction = &told["storage_manager"]["l2_eviction_controller"]["adapters"][0];
    for (key, value) in [
        ("eviction_policy", json!("IsolatedLRU")),
        ("num_cache_salt_buckets", json!(1)),
    ] {
        assert_eq!(eviction[key], value);
    }
    worker.close().unwrap();
    server.assert_sound();
}

#[test]
fn tenants_are_listed_page_by_page() {
    let server = with_tiers(&[&mock()], &ISOLATED);
    let mut worker = server.engine_driven(1, &Scope::new("m").with_salt("stores only"));
    store(&mut worker, &prompt(1, 1), 1);
    for number in 0..7 {
        limit(&server, &format!("t{number}"), number);
    }
    limit(&server, "_default", 1);
    let pages = |query: &str| {
        let (mut pages, mut token) = (Vec::new(), String::new());
        loop {
            let (status, page) = json_of(&server, "GET", &format!("/quota?{query}{token}"), "");
            assert_eq!(status, 200, "{page}");
            let users = page["users"].as_object().unwrap().clone();
            pages.push(users.keys().cloned().collect::<Vec<_>>());
            match page["next_page_token"].as_str() {
                Some(next) => token = format!("&page_token={next}"),
                None => return pages,
            }
        }
    };
    let expected = [
        &["_default", "t0", "t1"][..],
        &["t2", "t3", "t4"],
        &["t5", "t6"],
    ];
    assert_eq!(pages("page_size=3"), expected);
    assert_eq!(pages("page_size=8").len(), 1);
    let all = pages("page_size=5&all=true").concat();
    assert_eq!(all.len(), 9);
    assert!(all.contains(&"stores only".to_owned()), "{all:?}");
    let (_, page) = json_of(&server, "GET", "/quota?page_size=1&page_token=s7435", "");
    let told = &page["users"]["t6"];
    assert_eq!(told["tiers"]["l1"]["limit_bytes"], 6 * LEN);
    assert_eq!(told["exists"], true);
    let told = json_of(&server, "GET", "/quota?page_token=x", "");
    let error = json!({ "error": "page_token: it is not of this listing" });
    assert_eq!(told, (400, error));
    for query in ["page_size=0", "page_size=5001", "page_size=x", "all=1"] {
        let (status, told) = json_of(&server, "GET", &format!("/quota?{query}"), "");
        assert_eq!(status, 422, "{told}");
        let told = told["detail"].as_str().unwrap();
        assert!(told.contains("; allowed: "), "{told}");
    }
    worker.close().unwrap();
}

#[test]
fn unwritable_change_is_refused_without_effect() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("quotas");
    let server = TestServer::start(&["--quota-file", file.to_str().unwrap()]);
    limit(&server, "a", 5);
    std::fs::write(&file, "").unwrap();
    let (status, told) = put(&server, "a", &json!({ "limit_gb": 1 }));
    assert_eq!(status, 500);
    let error = told["error"].as_str().unwrap();
    assert!(error.contains("nothing was changed"), "{error}");
    let (status, told) = json_of(&server, "DELETE", "/quota/a", "");
    assert_eq!((status, told), (500, json!({ "error": error })));
    assert_eq!(get(&server, "a")["tiers"]["l1"]["limit_bytes"], 5 * LEN);
}

#[test]
fn a_lower_limit_holds_at_once() {
    let flags = [
        &ISOLATED[..],
        &[
            "--eviction-trigger-watermark",
            "0.8",
            "--eviction-ratio",
            "0.2",
        ],
    ]
    .concat();
    let server = with_tiers(&[&mock()], &flags);
    let (steady, greedy) = (
        Scope::new("m").with_salt("steady"),
        Scope::new("m").with_salt("greedy"),
    );
    let mut worker = server.engine_driven(1, &steady);
    store(&mut worker, &prompt(1, 20), 1);
    let mut other = server.engine_driven(2, &greedy);
    store(&mut other, &prompt(2, 100), 2);
    settle(&server);
    limit(&server, "greedy", 50);
    let used = |salt: &str, tier: &str| {
        get(&server, salt)["tiers"][tier]["usage_bytes"]
            .as_u64()
            .unwrap()
            / LEN
    };
    // Below 80 % of the limit by 20 % of that, and L1 is there when the change has been answered.
    assert_eq!(used("greedy", "l1"), 32);
    wait_until("the eviction in the tier", || {
        used("greedy", "mock-0") == 32
    });
    for tier in ["l1", "mock-0"] {
        assert_eq!(used("steady", tier), 20);
        let told = get(&server, "greedy");
        assert_eq!(told["tiers"][tier]["evicted_objects"], 68, "{told}");
        assert_eq!(told["tiers"][tier]["over_quota"], false);
    }
    // A soft limit refuses nothing; the next round brings the tenant back.
    store(&mut other, &prompt(3, 30), 3);
    settle(&server);
    server.engine().housekeep();
    assert_eq!(used("greedy", "l1"), 32);
    for worker in [worker, other] {
        worker.close().unwrap();
    }
    server.assert_sound();
}

#[test]
fn strict_limit_holds_and_counts_refusals() {
    let flags = [
        &ISOLATED[..],
        &["--quota-mode", "strict", "--quota-default", "32KiB"],
    ]
    .concat();
    let server = TestServer::start(&flags);
    let mut worker = server.engine_driven(1, &Scope::new("m").with_salt("a"));
    let used = || {
        get(&server, "a")["tiers"]["l1"]["usage_bytes"]
            .as_u64()
            .unwrap()
    };
    store(&mut worker, &prompt(1, 4), 1);
    assert_eq!(used(), 4 * LEN);
    // In place of its own oldest.
    store(&mut worker, &prompt(2, 2), 2);
    assert_eq!(used(), 4 * LEN);
    limit(&server, "a", 0);
    assert_eq!(used(), 0);
    let refused = worker.store(&prompt(3, 2), range(0..2), "s", |chunk| {
        bytes(3, chunk, LEN as usize)
    });
    drop(refused);
    assert_eq!(used(), 0);
    assert_eq!(get(&server, "a")["tiers"]["l1"]["refused_over_quota"], 2);
    let (_, _, text) = request(&server, "GET", "/metrics", "");
    let metrics = parse_metrics(&text);
    let counted = metrics
        .iter()
        .find(|metric| metric.name == "kvtier_l1_over_quota_chunks_total")
        .unwrap();
    assert_eq!(counted.labels, r#"cache_salt="a",during="l1_store""#);
    assert_eq!(counted.value, 2.0);
    worker.close().unwrap();
    server.assert_sound();
}

#[test]
fn allow_list_removes_missing_tenants_across_restarts() {
    let directory = tempfile::tempdir().unwrap();
    let (tier, file) = (
        directory.path().join("tier"),
        directory.path().join("quotas"),
    );
    let flags = [
        "--quota-default",
        "0",
        "--quota-file",
        file.to_str().unwrap(),
    ];
    let start = || with_tiers(&[&isolated_fs(&tier)], &flags);
    let server = start();
    limit(&server, "known", 1000);
    let used = |server: &TestServer, salt: &str| {
        get(server, salt)["tiers"]["fs-0"]["usage_bytes"]
            .as_u64()
            .unwrap()
    };
    for (number, salt) in [(1, "known"), (2, "unknown")] {
        let mut worker = server.engine_driven(number, &Scope::new("m").with_salt(salt));
        store(&mut worker, &prompt(number as u32, 4), 1);
        worker.close().unwrap();
    }
    settle(&server);
    wait_until("the eviction of the stranger", || {
        used(&server, "unknown") == 0
    });
    let known = used(&server, "known");
    assert!(known >= 4 * LEN);
    drop(server);
    let server = start();
    wait_until("the recovery of the tier", || {
        let (_, told) = json_of(&server, "GET", "/status", "");
        told["storage_manager"]["l2_adapters"][0]["recovery"]["state"] == "done"
    });
    assert_eq!(get(&server, "known")["exists"], true);
    assert_eq!(used(&server, "known"), known);
    // Nothing of it goes in the rounds to come, which take whatever is left of the stranger.
    limit(&server, "known", 999);
    wait_until("the absence of the stranger", || {
        used(&server, "unknown") == 0
    });
    assert_eq!(used(&server, "known"), known);
    server.assert_sound();
}

#[test]
fn listed_quotas_can_be_set_again() {
    let first = with_tiers(&[&mock()], &ISOLATED);
    let share = 1.0 / 1024.0;
    put(
        &first,
        "alice",
        &json!({ "limit_gb": 1.5, "reserved_gb": share, "tiers": {
        "l1": { "limit_gb": "unlimited" }, "mock-0": { "reserved_gb": 0 } } }),
    );
    put(&first, "_default", &json!({ "limit_gb": "unlimited" }));
    put(&first, "none", &json!({ "limit_gb": 0 }));
    let mut worker = first.engine_driven(1, &Scope::new("m").with_salt("stores only"));
    store(&mut worker, &prompt(1, 1), 1);
    let table = first.engine().quotas().table();
    for query in ["", "?page_size=100", "?all=true", "?all=true&page_size=100"] {
        let second = with_tiers(&[&mock()], &ISOLATED);
        put(&second, "stays", &json!({ "limit_gb": 1 }));
        let (_, _, listed) = request(&first, "GET", &format!("/quota{query}"), "");
        let told = json_of(&second, "PUT", "/quota", &listed);
        assert_eq!(
            told,
            (200, json!({ "set": 3, "status": "ok", "persisted": false })),
            "{listed}"
        );
        let now = second.engine().quotas().table();
        assert!(now.get("stays").is_some());
        for (salt, entry) in table.iter() {
            assert_eq!(now.get(salt), Some(entry), "{query}: {salt}");
        }
    }
    worker.close().unwrap();
}

#[test]
fn quotas_of_a_body_are_set_atomically() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("quotas");
    let flags = [&ISOLATED[..], &["--quota-file", file.to_str().unwrap()]].concat();
    let server = TestServer::start(&flags);
    let put_all = |users: Value| {
        json_of(
            &server,
            "PUT",
            "/quota",
            &json!({ "users": users }).to_string(),
        )
    };
    let good = json!({ "limit_gb": 1 });
    for (users, error) in [
        (
            json!({ "a": good, "b": { "limit_gb": "x" } }),
            r#"users.b.limit_gb: "x"; allowed: GiB from 0 to 1073741824, a size such as "512MiB", or "unlimited""#,
        ),
        (
            json!({ "a": good, "b": { "limit_gb": 1, "tiers": { "l1": { "reserved_gb": 2 } } } }),
            "users.b: l1: 2GiB reserved is more than the limit of 1GiB",
        ),
        (
            json!({ "a": good, "b@c": good }),
            "users.b@c: cache_salt: a cache salt must not contain '@'; '@', '/', '\\' and NUL are refused",
        ),
        (
            json!({ "a": good, "": good }),
            "users.: cache_salt: give _default for requests without one",
        ),
        (
            json!({ "a": good, "b": { "limit_gb": 2, "reserved_gb": 2 } }),
            "l1: 2GiB reserved for all tenants together is more than the 64MiB it has",
        ),
    ] {
        assert_eq!(put_all(users), (400, json!({ "error": error })));
        assert_eq!(server.engine().quotas().table().len(), 0);
        assert!(!file.exists());
    }
    assert_eq!(
        put_all(json!({ "a": good, "_default": good })),
        (200, json!({ "set": 2, "status": "ok" }))
    );
    // One call for very many tenants: a body as large as that of 100,000, which a debug build needs too long for.
    let users: serde_json::Map<_, _> = (0..20_000)
        .map(|number| {
            (
                format!("tenant-{number:06}-{}", "x".repeat(100)),
                json!({ "limit_gb": 1.5, "reserved_gb": 0,
            "current_usage_gb": 0.0, "tiers": { "l1": { "limit_gb": 0.25, "reserved_gb": 0 } } }),
            )
        })
        .collect();
    let mut body = json!({ "users": users }).to_string();
    body.push_str(&" ".repeat((300 * 100_000) - body.len()));
    assert_eq!(
        json_of(&server, "PUT", "/quota", &body),
        (200, json!({ "set": 20_000, "status": "ok" }))
    );
    let table = server.engine().quotas().table();
    assert_eq!(table.len(), 20_002);
    assert_eq!(
        kvtier_server::quota::QuotaFile::peek(&file).as_ref(),
        Ok(&*table)
    );
}
