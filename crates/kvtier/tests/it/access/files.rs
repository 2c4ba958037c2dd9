//! Files that are replaced while the server runs, and files that cannot be used.

use std::process::Command;

use super::served::{ADMIN, Files, KVTIER, READER, Served, Setup};

const NEW: &str = "another-0123456789abcdef";

const RELOAD: &str = "POST /config/reload";

#[test]
fn tokens_reload_without_restart_unless_invalid() {
    let server = Served::start(Setup::Tokens, &[]);
    let status = |token: &str| server.ask_as(token, "GET /version", "").status;
    server
        .files
        .put("tokens", &format!("admin new {NEW}\nread old {READER}\n"));
    assert_eq!((status(ADMIN), status(NEW)), (200, 401));
    let answer = server.ask_as(ADMIN, RELOAD, "");
    assert!(
        answer.status == 200 && answer.body.contains("the tokens of HTTP"),
        "{answer:?}"
    );
    assert_eq!((status(ADMIN), status(NEW)), (401, 200));
    server
        .files
        .put("tokens", &format!("admin a {ADMIN}\nnonsense {READER}\n"));
    let refused = |status: u16, text: &str| {
        let answer = server.ask_as(NEW, RELOAD, "");
        assert!(
            answer.status == status
                && answer.body.contains(text)
                && answer.body.contains("the previous version stays in use"),
            "{answer:?}"
        );
    };
    refused(400, "line 2: 2 words");
    let line = server.wait_for_line("reload failed; keeping the previous version");
    assert!(
        line.contains("line 2: 2 words") && line.contains("\"ERROR\""),
        "{line}"
    );
    assert_eq!((status(ADMIN), status(NEW)), (401, 200));
    std::fs::remove_file(server.files.path("tokens")).unwrap();
    refused(500, "tokens cannot be read: ");
    assert_eq!((status(READER), status(NEW)), (200, 200));
    for token in [ADMIN, READER, NEW] {
        assert!(!server.log().contains(token));
    }
}

#[test]
fn certificate_reloads_only_with_its_key() {
    let flags = "--peer-port 0 --peer-tls-cert cert.pem --peer-tls-key key.pem";
    let flags: Vec<_> = flags.split(' ').collect();
    let server = Served::start(Setup::Tls, &flags);
    let key = std::fs::read_to_string(server.files.path("key.pem")).unwrap();
    let version = || server.ask_as(READER, "GET /version", "").status;
    assert_eq!(version(), 200);
    // The client trusts what is in the file now, so it can ask only after a signal.
    server.files.certify();
    server.signal("HUP");
    server.wait_for_line("the certificate and key of HTTP read again");
    server.wait_for_line("the certificate and key for peers read again");
    assert_eq!(version(), 200);
    server.files.put("key.pem", &key);
    let answer = server.ask_as(ADMIN, RELOAD, "");
    assert!(
        answer.status == 400
            && answer
                .body
                .contains("key.pem is not the key of the certificate of"),
        "{answer:?}"
    );
    assert_eq!(version(), 200);
}

/// The one line with which a server with these flags does not start.
fn refused(files: &Files, flags: &[&str]) -> String {
    let mut stderr = Vec::new();
    for check in [&["--check-config"][..], &[]] {
        let output = Command::new(KVTIER)
            .args([
                "server",
                "--l1-size-gb",
                "0.01",
                "--shm-name",
                "",
                "--port",
                "0",
                "--http-port",
                "0",
            ])
            .args(flags)
            .args(check)
            .env_remove("KVTIER_HTTP_TOKENS")
            .current_dir(files.0.path())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(output.stdout.is_empty());
        stderr.push(String::from_utf8(output.stderr).unwrap());
    }
    assert_eq!(stderr[0], stderr[1]);
    assert_eq!(stderr[0].lines().count(), 1, "{stderr:?}");
    stderr.swap_remove(0)
}

#[test]
fn unusable_files_are_refused_before_start() {
    let files = Files::new();
    files.put("empty", "");
    for (flags, expected) in [
        (
            vec!["--http-host", "0.0.0.0"],
            "--http-host: 0.0.0.0 is reachable from other hosts",
        ),
        (
            vec![
                "--http-host",
                "0.0.0.0",
                "--http-tls-cert",
                "cert.pem",
                "--http-tls-key",
                "key.pem",
            ],
            "--http-token-file FILE (or tokens in the environment variable KVTIER_HTTP_TOKENS)",
        ),
        (
            vec!["--http-token-file", "empty"],
            "--http-token-file empty: there is no token in it",
        ),
        (
            vec!["--http-token-file", "no"],
            "--http-token-file: no cannot be read",
        ),
        (
            vec!["--http-token-file", "key.pem"],
            "--http-token-file key.pem: line 1: ",
        ),
        (vec!["--http-tls-cert", "cert.pem"], "give both"),
        (
            vec!["--http-tls-cert", "cert.pem", "--http-tls-key", "cert.pem"],
            "--http-tls-key cert.pem: there is no private key in it",
        ),
        (
            vec!["--host", "ipc://@x"],
            "--host: \"ipc://@x\" is not allowed",
        ),
    ] {
        let stderr = refused(&files, &flags);
        assert!(stderr.contains(expected), "{stderr}");
    }
}

// proves: docs/compare.md#http
#[test]
fn tokens_allow_hosts_beyond_loopback_with_warnings() {
    let files = Files::new();
    let check = |more: &[&str]| {
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
            .args(["--http-host", "0.0.0.0", "--http-token-file", "tokens"])
            .args(more)
            .current_dir(files.0.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let stderr = check(&["--host", "0.0.0.0"]);
    assert!(
        stderr.contains("warning: --http-host 0.0.0.0: tokens travel in clear"),
        "{stderr}"
    );
    assert!(
        stderr.contains("warning: --host 0.0.0.0: the request port is reachable"),
        "{stderr}"
    );
    let stderr = check(&["--http-tls-cert", "cert.pem", "--http-tls-key", "key.pem"]);
    assert!(!stderr.contains("warning"), "{stderr}");
}

#[test]
fn metrics_port_requires_a_token() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    drop(listener);
    let mut server = Served::start(Setup::Tls, &["--prometheus-port", &port]);
    server.http = format!("https://127.0.0.1:{port}");
    assert_eq!(server.ask("GET /metrics", &[], "").status, 401);
    assert_eq!(server.ask_as(READER, "GET /status", "").status, 404);
    let answer = server.ask_as(READER, "GET /metrics", "");
    assert!(
        answer.status == 200 && answer.body.contains("kvtier_"),
        "{answer:?}"
    );
}
