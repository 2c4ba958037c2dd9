//! No secret is revealed, and every change is logged.

use std::process::Command;

use serde_json::{Value, json};

use super::served::{Files, KVTIER, Served, Setup, bearer};

/// In every secret, and nowhere else.
const MARK: &str = "MARK5ecret";

/// A path with a password in it: an unusual one, and shown wherever an adapter shows a URL.
fn at(files: &Files) -> String {
    format!("{}/password={MARK}", files.0.path().display())
}

/// A token with the mark, of a line with it.
fn token(name: &str) -> String {
    format!("{name}-{MARK}-0123456789abcdef")
}

#[test]
fn secrets_appear_in_no_answer_or_log() {
    let files = Files::new();
    let (ops, watcher, more) = (token("ops"), token("watcher"), token("more"));
    files.put(
        "tokens",
        &format!("# {MARK}\nadmin ops {ops}\nread watcher {watcher}\n"),
    );
    let key = std::fs::read_to_string(files.path("key.pem")).unwrap();
    let of_key = key.lines().nth(1).unwrap().to_owned();
    let adapter = json!({ "type": "fs", "base_path": at(&files) }).to_string();
    let server = Served::start_in(
        files,
        Setup::Tls,
        &["--log-level", "trace", "--l2-adapter", &adapter],
        &[("KVTIER_HTTP_TOKENS", &format!("admin more {more}"))],
    );
    let mut text = String::new();
    let mut ask = |headers: &[(String, String)], request: &str, body: &str| {
        let answer = server.ask(request, headers, body);
        text += &format!("{}\n{}\n", answer.head, answer.body);
        answer.status
    };
    let description = server.ask_as(&ops, "GET /openapi.json", "");
    let description: Value = serde_json::from_str(&description.body).unwrap();
    let mut asked = 0;
    for (path, methods) in description["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            let method = method.to_uppercase();
            for token in [&ops, &watcher, &more, &format!("{MARK}-wrong-0123456789")] {
                for body in [
                    "",
                    "{}",
                    &format!("{{\"tier\": \"l1\", \"password\": \"{MARK}\""),
                ] {
                    ask(
                        &[bearer(token)],
                        &format!("{method} {path}?token={MARK}"),
                        body,
                    );
                    asked += 1;
                }
            }
        }
    }
    assert!(asked > 100, "{asked}");
    for headers in [
        vec![("authorization".to_owned(), format!("Basic {MARK}"))],
        vec![("authorization".to_owned(), MARK.to_owned())],
        vec![("cookie".to_owned(), MARK.to_owned())],
    ] {
        assert_eq!(
            ask(&headers, &format!("GET /status?access_token={MARK}"), ""),
            401
        );
    }
    assert_eq!(ask(&[bearer(&ops)], &format!("DELETE /{MARK}"), ""), 404);
    assert_eq!(ask(&[bearer(&more)], "GET /config", ""), 200);
    // Bad files are logged, too.
    server.files.put("tokens", &format!("admin {MARK}\n"));
    server.files.put(
        "key.pem",
        &key.replace("-----END", &format!("{MARK}\n-----END")),
    );
    assert_eq!(ask(&[bearer(&ops)], "POST /config/reload", ""), 400);
    assert_eq!(ask(&[bearer(&ops)], "GET /version", ""), 200);
    for what in ["tokens", "certificate and key"] {
        server.wait_for_line(&format!("the {what} of HTTP: reload failed"));
    }
    let log = server.log();
    assert!(
        log.contains("\"TRACE\""),
        "it is not as talkative as it could be"
    );
    assert!(text.contains("/password=***"), "{text}");
    for secret in [MARK, &of_key] {
        assert!(
            !text.to_lowercase().contains(&secret.to_lowercase()),
            "{text}"
        );
        let line = log.lines().find(|line| line.contains(secret));
        assert_eq!(line, None);
    }
}

#[test]
fn secrets_appear_in_no_error_or_check() {
    let files = Files::new();
    files.put("tokens", &format!("admin a {MARK}\n"));
    files.put(
        "key.pem",
        &format!("-----BEGIN PRIVATE KEY-----\n{MARK}\n-----END PRIVATE KEY-----\n"),
    );
    files.put("config.toml", &format!("password = \"{MARK}\"\n"));
    files.put("broken.toml", &format!("password = \"{MARK}\n"));
    files.put(
        "table.toml",
        &format!("l1-use-hugepages = {{ password = \"{MARK}\" }}\n"),
    );
    let cases = [
        json!({ "type": "fs", "password": MARK }),
        json!({ "type": "fs", "base_path": { "password": MARK } }),
        json!({ "type": { "password": MARK } }),
        json!({ "type": "fs", "base_path": "x", "serde": { "type": "encrypt", "secret": MARK } }),
        json!({ "type": "fs", "base_path": "x", "eviction": [{ "password": MARK }] }),
        json!({ "type": "redis", "url": format!("redis://:{MARK}@h") }),
        json!({ "type": "fs", "base_path": 1, "url": format!("redis://:{MARK}@h") }),
        json!([{ "access_key": MARK }]),
    ];
    let mut runs: Vec<Vec<String>> = Vec::new();
    for case in &cases {
        runs.push(vec!["--l2-adapter".into(), case.to_string()]);
    }
    let good = json!({ "type": "fs", "base_path": at(&files) }).to_string();
    for flags in [
        &["--l2-adapter", &format!("{{type:redis,password:{MARK}}}")][..],
        &["--l2-adaptor", &format!("{{\"password\":\"{MARK}\"}}")],
        &[&format!("{{\"password\":\"{MARK}\"}}")],
        &["--http-token-file", "tokens"],
        &["--http-tls-cert", "cert.pem", "--http-tls-key", "key.pem"],
        &["--config", "config.toml"],
        &["--config", "broken.toml"],
        &["--config", "table.toml"],
        &["--l2-adapter", &good, "--chunk-size", "0"],
    ] {
        runs.push(flags.iter().map(|flag| (*flag).to_owned()).collect());
    }
    let check = |flags: &[String]| {
        let output = Command::new(KVTIER)
            .args([
                "server",
                "--check-config",
                "--l1-size-gb",
                "0.01",
                "--shm-name",
                "",
                "--port",
                "0",
            ])
            .args(flags)
            .current_dir(files.0.path())
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).unwrap();
        assert!(!text.contains(MARK), "{flags:?}: {text}");
        (output.status.success(), text)
    };
    for flags in &runs {
        assert!(!check(flags).0, "{flags:?} is taken");
    }
    let (is_good, text) = check(&["--l2-adapter".into(), good]);
    assert!(is_good && text.contains("/password=***"), "{text}");
}

// proves: docs/compare.md#http
#[test]
fn every_change_is_logged_with_caller_and_result() {
    let server = Served::start(
        Setup::Tokens,
        &["--log-level", "warn,audit=info,kvtier::server=info"],
    );
    let (ops, watcher) = (super::served::ADMIN, super::served::READER);
    let salt = "tenant-in-clear";
    let entry = |message: &str| -> Value {
        let line = server.wait_for_line(message);
        serde_json::from_str(&line).unwrap()
    };
    assert_eq!(
        server
            .ask_as(ops, "POST /cache/clear", "{\"force\": true}")
            .status,
        200
    );
    let line = entry("\"done\"");
    assert_eq!(line["target"], "audit");
    let fields = &line["fields"];
    assert_eq!(
        (
            &fields["who"],
            &fields["role"],
            &fields["method"],
            &fields["route"],
            &fields["status"]
        ),
        (
            &json!("ops"),
            &json!("admin"),
            &json!("POST"),
            &json!("/cache/clear"),
            &json!(200)
        )
    );
    assert!(fields["peer"].as_str().unwrap().starts_with("127.0.0.1:"));
    assert!(
        fields["did"].as_str().unwrap().starts_with("force true: {"),
        "{fields}"
    );
    let body = json!({ "model_name": "m", "world_size": 1, "token_ids": [], "cache_salt": salt })
        .to_string();
    let status = server.ask_as(ops, "POST /cache/prefetches", &body).status;
    let line = entry("\"route\":\"/cache/prefetches\"");
    assert_eq!(line["fields"]["status"], json!(status));
    let request = format!("PUT /quota/{salt}");
    assert_eq!(
        server.ask_as(ops, &request, "{\"limit_gb\": 1}").status,
        200
    );
    let line = entry("\"route\":\"/quota/{salt}\"");
    let names = line["fields"]["names"].as_str().unwrap();
    assert!(
        names.starts_with("salt=~") && names.len() == "salt=~".len() + 8,
        "{names}"
    );
    let set = "set to {\"limit\":1073741824,\"reserved\":0}";
    assert_eq!(line["fields"]["did"], set);
    let many = format!("{{\"users\": {{\"{salt}\": {{\"limit_gb\": 2}}}}}}");
    assert_eq!(server.ask_as(ops, "PUT /quota", &many).status, 200);
    assert_eq!(
        entry("\"route\":\"/quota\"")["fields"]["did"],
        "1 quotas set"
    );
    let request = format!("DELETE /quota/{salt}");
    assert_eq!(server.ask_as(ops, &request, "").status, 200);
    let line = entry("\"did\":\"removed\"");
    assert_eq!(line["fields"]["route"], "/quota/{salt}");
    assert_eq!(server.ask_as(watcher, "POST /cache/clear", "").status, 403);
    let line = entry("that takes the role admin");
    assert_eq!(
        (&line["fields"]["who"], &line["target"]),
        (&json!("watcher"), &json!("audit"))
    );
    assert_eq!(server.ask("GET /status", &[], "").status, 401);
    let line = entry("refused: no token that is known");
    assert_eq!(
        (&line["fields"]["requests"], &line["target"]),
        (&json!(1), &json!("audit"))
    );
    // Reading is not logged.
    assert_eq!(server.ask_as(watcher, "GET /version", "").status, 200);
    assert!(!server.log().contains("/version") && !server.log().contains(salt));
}
