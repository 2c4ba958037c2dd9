//! `--hash-salts`: no salt is on disk, in metrics or in listings, and tenants keep their identity.

use kvtier_client::Scope;
use kvtier_core::object_key::SaltKey;

use super::bed::{files, lookup, read, server, store};
use crate::explain::request_as;
use crate::http::{json_of, request};
use crate::l2::settle;
use crate::support::{TestServer, prompt, range};

const SECRET: &str = "a secret of the operator";

// proves: docs/compare.md#tenants
#[test]
fn hashed_tenants_are_the_same_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let (tier, secret) = (
        directory.path().join("tier"),
        directory.path().join("secret"),
    );
    let quotas = directory.path().join("quotas");
    std::fs::write(&secret, format!("{SECRET}\n")).unwrap();
    let flags = [
        "--eviction-policy",
        "IsolatedLRU",
        "--hash-salts",
        secret.to_str().unwrap(),
        "--quota-file",
        quotas.to_str().unwrap(),
    ];
    let (prompt, hashed) = (prompt(1, 2), SaltKey::new(SECRET.as_bytes()).hashed("acme"));
    let told = |server: &_| {
        let mut all = std::fs::read_to_string(&quotas).unwrap_or_default();
        for path in files(&tier) {
            all.push_str(&path.to_string_lossy());
        }
        for path in [
            "/metrics",
            "/quota",
            "/cache/objects",
            "/cache/objects?tier=l1",
            "/status",
        ] {
            all.push_str(&request(server, "GET", path, "").2);
        }
        all
    };
    {
        let server = server(&tier, &flags);
        let mut worker = server.engine_driven(1, &Scope::new("hashed"));
        store(&mut worker, "acme", &prompt, 1);
        store(&mut worker, &hashed, &prompt, 2);
        store(&mut worker, "", &prompt, 3);
        settle(&server);
        assert_eq!(
            request(&server, "PUT", "/quota/acme", r#"{"limit_gb": 1}"#).0,
            200
        );
        assert_eq!(read(&mut worker, "acme", &prompt, 1, "r"), 2);
        // A salt that is another's hash is a tenant of its own.
        assert_eq!(read(&mut worker, &hashed, &prompt, 2, "r"), 2);
        let told = told(&server);
        assert!(told.contains(&hashed) && !told.contains("acme"), "{told}");
    }
    let server = server(&tier, &flags);
    let mut worker = server.engine_driven(1, &Scope::new("hashed"));
    assert_eq!(read(&mut worker, "acme", &prompt, 1, "r"), 2);
    assert_eq!(read(&mut worker, &hashed, &prompt, 2, "r"), 2);
    assert_eq!(read(&mut worker, "", &prompt, 3, "r"), 2);
    // The quota and what the tier holds are the tenant's, by its salt and by the hash that listings show.
    let by_salt = json_of(&server, "GET", "/quota/acme", "");
    assert_eq!(
        by_salt,
        json_of(&server, "GET", &format!("/quota/{hashed}"), "")
    );
    assert_eq!(by_salt.1["exists"], true, "{by_salt:?}");
    let chunk = worker.chunk_bytes() as u64;
    let look = server.engine().quotas().look();
    let usage: Vec<_> = look.tenant(&hashed).iter().map(|tier| tier.bytes).collect();
    let own = files(&tier)
        .into_iter()
        .filter(|path| path.to_string_lossy().contains(&hashed));
    let on_disk: u64 = own.map(|path| path.metadata().unwrap().len()).sum();
    assert_eq!(usage, [2 * chunk, on_disk]);
    let told = told(&server);
    assert!(told.contains(&hashed) && !told.contains("acme"), "{told}");
}

#[test]
fn another_secret_makes_other_tenants() {
    let directory = tempfile::tempdir().unwrap();
    let (tier, secret) = (
        directory.path().join("tier"),
        directory.path().join("secret"),
    );
    let prompt = prompt(1, 2);
    for content in [SECRET, "another secret of the operator"] {
        std::fs::write(&secret, content).unwrap();
        let server = server(&tier, &["--hash-salts", secret.to_str().unwrap()]);
        let mut worker = server.engine_driven(1, &Scope::new("hashed"));
        assert_eq!(lookup(&mut worker, "acme", &prompt, "r"), 0);
        store(&mut worker, "acme", &prompt, 1);
        settle(&server);
        let scope = Scope::new("hashed").with_salt("acme");
        let key = scope.scheduler_key(&prompt, range(0..2), "r");
        worker.connection().free_lookup_locks(&key).unwrap();
    }
    assert_eq!(files(&tier).len(), 4);
}

#[test]
fn reader_names_tenants_by_hash_only() {
    const READER: &str = "reader-0123456789abcdef";
    const ADMIN: &str = "admin-0123456789abcdef";
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    std::fs::write(&secret, SECRET).unwrap();
    let hashed = SaltKey::new(SECRET.as_bytes()).hashed("acme");
    let ask = |server: &TestServer, token: &str, name: &str| {
        let explain =
            serde_json::json!({ "model_name": "m", "token_ids": [1], "cache_salt": name });
        let answers = [
            request_as(server, token, &format!("GET /quota/{name}"), ""),
            request_as(server, token, "POST /cache/explain", &explain.to_string()),
            request_as(server, token, "POST /prefix/match", &explain.to_string()),
        ];
        answers.map(|(status, answer)| (status, answer.to_string()))
    };
    let start = |flags: &[&str]| {
        TestServer::start_with(flags, |config| {
            config.http.tokens = Some(format!("read r {READER}; admin a {ADMIN}").into());
        })
    };
    let server = start(&["--hash-salts", secret.to_str().unwrap()]);
    for (status, answer) in ask(&server, READER, "acme") {
        assert_eq!(status, 400, "{answer}");
        assert!(answer.contains("h1- and 32 hex digits"), "{answer}");
        assert!(!answer.contains(&hashed), "{answer}");
    }
    for (token, name) in [(READER, hashed.as_str()), (ADMIN, &hashed), (ADMIN, "acme")] {
        let [(quota, told), (explain, why), (matched, _)] = ask(&server, token, name);
        assert_eq!((quota, explain, matched), (200, 200, 200), "{told} {why}");
        assert!(told.contains(&hashed), "{told}");
    }
    let line = "GET /quota/_default";
    assert_eq!(request_as(&server, READER, line, "").0, 200);
    let plain = start(&[]);
    let [(quota, _), (explain, _), (matched, _)] = ask(&plain, READER, "acme");
    assert_eq!((quota, explain, matched), (200, 200, 200));
}
