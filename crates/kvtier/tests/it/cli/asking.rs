//! `kvtier status` and `kvtier ping`.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use serde_json::Value;

use super::{Server, complaint, free_port, kvtier, lines};

// proves: docs/compare.md#command-line
#[test]
fn status_and_ping_of_running_server() {
    let server = Server::start();
    let status = kvtier(&["status", "--url", &server.http]);
    assert!(status.status.success() && status.stderr.is_empty());
    let text = lines(&status.stdout).join("\n");
    for part in [
        "healthy",
        "L1",
        "0 objects",
        "LRU",
        "256 tokens, blake3",
        "sessions  0",
        "workers   0",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let json = kvtier(&["status", "--json", "--url", &server.http]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["is_healthy"], true);
    for url in [&server.requests, &server.http] {
        for count in ["1", "3"] {
            let ping = kvtier(&["ping", "--url", url, "--count", count]);
            assert!(ping.status.success(), "{:?}", lines(&ping.stderr));
            let text = lines(&ping.stdout);
            assert!(
                text.len() == 1 && text[0].contains(url.as_str()) && text[0].contains(" us"),
                "{text:?}"
            );
        }
    }
    // As an argument too; without a scheme each command uses its own port.
    let (requests, http) = (
        &server.requests["tcp://".len()..],
        &server.http["http://".len()..],
    );
    for args in [
        &["status", http][..],
        &["status", &server.http],
        &["status", "--url", http],
        &["quota", "list", http],
        &["quota", "list", "--url", &server.http],
        &["quota", "set", "a", "1GiB", http, "--allow-ineffective"],
        &["quota", "get", "a", http],
        &["quota", "delete", "--url", http, "a"],
        &["ping", requests],
        &["ping", &server.http],
        &["ping", "--url", requests],
        &["bench", requests, "--scenario=ping", "--requests=1"],
        &[
            "bench",
            "--url",
            requests,
            "--scenario=ping",
            "--requests=1",
        ],
    ] {
        let output = kvtier(args);
        assert!(
            output.status.success(),
            "{args:?}: {:?}",
            lines(&output.stderr)
        );
    }
    // Each command with the other port.
    let http_of_requests = server.requests.replace("tcp://", "http://");
    let requests_of_http = server.http.replace("http://", "tcp://");
    for (command, url, hint) in [
        ("status", &http_of_requests, "is that the request port?"),
        ("ping", &http_of_requests, "is that the request port?"),
        ("ping", &requests_of_http, "is that the HTTP port?"),
    ] {
        let line = complaint(&kvtier(&[command, "--timeout", "1", "--url", url]), 1);
        assert!(line.contains(url) && line.contains(hint), "{line}");
    }
}

// proves: docs/hosts.md#all-servers-at-a-glance
#[test]
fn status_of_several_servers_has_a_line_each() {
    let (one, other) = (Server::start_without_pool(), Server::start_without_pool());
    // Accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", silent.local_addr().unwrap());
    let closed = format!("http://127.0.0.1:{}", free_port());
    // One that is given twice, or by two names, counts once.
    let named = one.http.replace("127.0.0.1", "localhost");
    let status = kvtier(&["status", &one.http, &other.http, &one.http, &named]);
    assert!(status.status.success(), "{:?}", lines(&status.stderr));
    let mut text = lines(&status.stdout);
    assert_eq!(text.len(), 4, "{text:?}");
    let same = format!("{named}  the same as {}", one.http);
    assert_eq!(text.remove(2), same);
    let usage = |size: &str| {
        format!("healthy, L1 0 B of {size} in use (0.0 %), objects 0, sessions 0, workers 0")
    };
    let line = format!("{}  {}", one.http, usage("52.00 MiB"));
    assert_eq!(text[0], line);
    let (width, usage) = (one.http.len(), usage("104.00 MiB"));
    let total = format!("{:<width$}  2 {usage}", "2 servers");
    assert_eq!(text[2], total);
    let all = [
        "status",
        &one.http,
        &silent,
        &closed,
        &other.http,
        "--timeout",
        "1",
    ];
    let status = kvtier(&all);
    assert_eq!(status.status.code(), Some(1));
    let complaint = lines(&status.stderr);
    assert_eq!(complaint, ["kvtier status: 2 of 4 servers are healthy"]);
    let text = lines(&status.stdout);
    for (line, part) in [
        (1, "in time (--timeout)"),
        (2, "nothing answers at"),
        (4, "  2 healthy, "),
    ] {
        assert!(text[line].contains(part), "{text:?}");
    }
    let json = kvtier(&[&all[..], &["--json"]].concat());
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json[&other.http]["is_healthy"], true);
    let error = json[&silent]["error"].as_str().unwrap();
    assert!(error.contains("in time"), "{error}");
}

#[test]
fn several_servers_are_asked_at_once() {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let [one, other] = listeners.each_ref().map(|it| it.local_addr().unwrap());
    let servers = std::thread::spawn(move || {
        // Each answers once both are asked.
        for mut stream in listeners.map(|it| it.accept().unwrap().0) {
            let _ = stream.read(&mut [0; 4096]).unwrap();
            let body = r#"{"is_healthy": true}"#;
            let length = body.len();
            write!(
                stream,
                "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}"
            )
            .unwrap();
        }
    });
    let status = kvtier(&["status", &one.to_string(), &other.to_string()]);
    assert!(status.status.success(), "{:?}", lines(&status.stderr));
    servers.join().unwrap();
}

#[test]
fn status_shows_tiers_and_missing_gpus() {
    let directory = tempfile::tempdir().unwrap();
    let adapter = format!(r#"{{"type":"fs","base_path":{:?}}}"#, directory.path());
    let no_gpus = ["--cuda-driver", "off"];
    let server =
        Server::start_with(&[&no_gpus[..], &["--shm-name", "", "--l2-adapter", &adapter]].concat());
    let status = kvtier(&["status", "--url", &server.http]);
    let text = lines(&status.stdout).join("\n");
    for part in [
        "\nL2        1 tier, 0 objects to be stored (0 B), 0 being loaded\n",
        "\n  fs-0: fs, healthy, 0 B in use, 0 objects",
        "\nGPUs      none, this server runs with --cuda-driver off\n",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn status_and_ping_of_a_closed_port() {
    let port = free_port();
    let (http, tcp) = (
        format!("http://127.0.0.1:{port}"),
        format!("tcp://127.0.0.1:{port}"),
    );
    for args in [
        ["status", "--url", &http],
        ["ping", "--url", &http],
        ["ping", "--url", &tcp],
    ] {
        let line = complaint(&kvtier(&args), 1);
        assert!(
            line.contains(args[0]) && line.contains(&port.to_string()),
            "{line}"
        );
    }
}

#[test]
fn timeout_of_http_server_is_reported() {
    // Connections are accepted by the system, and never read.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let http = format!("http://{}", listener.local_addr().unwrap());
    for args in [&["status"][..], &["ping"], &["quota", "list"]] {
        let line = complaint(&kvtier(&[args, &[&http, "--timeout", "50ms"]].concat()), 1);
        let expected = format!("no answer from {http}/");
        assert!(
            line.contains(&expected) && line.contains("--timeout"),
            "{line}"
        );
    }
}

#[test]
fn invalid_addresses_are_usage_errors() {
    for (args, allowed) in [
        (&["status", "tcp://a:1"][..], "http://host:port"),
        (&["status", "--url", "tcp://a:1"], "http://host:port"),
        (&["quota", "list", "tcp://a:1"], "http://host:port"),
        (&["quota", "get", "a", "a:1", "--url", "a:1"], "--url"),
        (&["ping", "a"], "tcp://host:port"),
        (&["ping", "--url", "ftp://a:1"], "http://host:port"),
        (&["bench", "http://a:1"], "tcp://host:port"),
        (&["bench", "--url", "a"], "ipc://path"),
        (
            &["bench", "start", "http://a:1", "--", "x"],
            "tcp://host:port",
        ),
        (&["bench", "start", "--", "x"], "URL"),
        (&["ping", "a:1", "--url", "a:1"], "--url"),
        (&["ping", "--timeout", "0"], "from 1ms"),
    ] {
        let output = kvtier(args);
        let said = lines(&output.stderr).join("\n");
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(allowed), "{args:?}: {said}");
    }
}

#[test]
fn top_shows_the_load_once_or_needs_a_terminal() {
    let server = Server::start_with(&["--shm-name", ""]);
    let ping = kvtier(&["ping", "--url", &server.requests, "--count", "50"]);
    assert!(ping.status.success());
    let shown = kvtier(&["top", "--once", "--interval", "100ms", &server.http]);
    let text = lines(&shown.stdout).join("\n");
    assert!(shown.status.success(), "{shown:?}");
    for part in [
        &format!("kvtier  {}  healthy  ", server.http),
        "L1 [",
        "hit rate ",
        "stores 0.0/s",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let line = complaint(&kvtier(&["top", &server.http]), 1);
    assert!(line.contains("stdout is no terminal; --once"), "{line}");
    let url = format!("127.0.0.1:{}", free_port());
    let line = complaint(&kvtier(&["top", "--once", &url]), 1);
    assert!(line.contains("nothing answers at"), "{line}");
}
