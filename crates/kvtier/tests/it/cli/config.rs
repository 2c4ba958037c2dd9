//! `kvtier config` against a running server.

use super::{Server, complaint, free_port, kvtier, lines};

#[test]
fn show_prints_every_flag() {
    let server = Server::start_with(&["--shm-name", "", "--chunk-size", "64"]);
    let output = kvtier(&["config", "show", &server.http]);
    let shown = lines(&output.stdout);
    assert!(output.status.success() && output.stderr.is_empty());
    for line in [
        "chunk-size = 64",
        "l1-size-gb = 0.05",
        "shm-name = \"\"",
        "quota-file = null",
        "l2-adapter = []",
    ] {
        assert!(shown.iter().any(|shown| shown == line), "{line}: {shown:?}");
    }
}

#[test]
fn diff_names_what_a_restart_would_change() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kvtier.toml");
    let path = file.to_str().unwrap();
    let port = free_port();
    let written = |more: &str| {
        let text = format!("l1-size-gb = 0.05\nshm-name = \"\"\nport = {port}\n{more}");
        std::fs::write(&file, text).unwrap();
    };
    written("");
    let server = Server::start_with(&["--config", path]);
    let diff = || kvtier(&["config", "diff", "--config", path, &server.http]);
    // The helper gives both ports on the command line, which wins.
    let ports = ["http-port: ", "port: "];
    let changes = |output: &std::process::Output| {
        assert!(output.stderr.is_empty());
        let mut found = lines(&output.stdout);
        found.retain(|line| !ports.iter().any(|port| line.starts_with(port)));
        found
    };
    assert!(changes(&diff()).is_empty());
    written("chunk-size = 16\nl2-adapter = [{type = \"fs\", base_path = \"/tier\"}]\n");
    let output = diff();
    assert_eq!(output.status.code(), Some(3));
    let expected = [
        "chunk-size: 256 -> 16",
        r#"l2-adapter: [] -> [{"base_path":"/tier","type":"fs"}]"#,
    ];
    assert_eq!(changes(&output), expected);
    // Nothing differs: its own file, all of it.
    let [http, requests] = [server.http.as_str(), server.requests.as_str()]
        .map(|url| url.rsplit_once(':').unwrap().1.to_owned());
    let own =
        format!("l1-size-gb = 0.05\nshm-name = \"\"\nport = {requests}\nhttp-port = {http}\n");
    std::fs::write(&file, own).unwrap();
    let output = diff();
    assert!(
        output.status.success() && output.stdout.is_empty(),
        "{output:?}"
    );
}

#[test]
fn reload_applies_what_may_change_and_refuses_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kvtier.toml");
    let written = |more: &str| {
        let text = format!("l1-size-gb = 0.05\neviction-policy = \"IsolatedLRU\"\n{more}");
        std::fs::write(&file, text).unwrap();
    };
    written("");
    let server = Server::start_with(&["--shm-name", "", "--config", file.to_str().unwrap()]);
    let reload = || kvtier(&["config", "reload", &server.http]);
    let shown = |flag: &str| {
        let found = lines(&kvtier(&["config", "show", &server.http]).stdout);
        found
            .into_iter()
            .find(|line| line.starts_with(flag))
            .unwrap()
    };
    let status = || {
        let output = kvtier(&["status", "--json", &server.http]);
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let output = reload();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines(&output.stdout), ["nothing has changed"]);
    let live = "eviction-ratio = 0.5\neviction-trigger-watermark = 0.6\nquota-default = \"1MiB\"\n\
                worker-reap-timeout-seconds = 40\nl1-read-ttl-seconds = 77\nlog-level = \"debug\"\n";
    written(live);
    let output = reload();
    assert!(output.status.success(), "{output:?}");
    let mut changed = lines(&output.stdout);
    changed.sort();
    let expected = [
        "eviction-ratio: 0.2 -> 0.5",
        "eviction-trigger-watermark: 0.8 -> 0.6",
        "l1-read-ttl-seconds: 300 -> 77",
        r#"log-level: "info" -> "debug""#,
        r#"quota-default: "unlimited" -> "1MiB""#,
        "worker-reap-timeout-seconds: 120 -> 40",
    ];
    assert_eq!(changed, expected);
    assert_eq!(shown("eviction-ratio"), "eviction-ratio = 0.5");
    let now = status();
    let eviction = &now["storage_manager"]["eviction_controller"];
    assert_eq!(eviction["trigger_watermark"], 0.6);
    assert_eq!(now["storage_manager"]["l1_manager"]["read_ttl_seconds"], 77);
    assert_eq!(now["quotas"]["default_limit_bytes"], 1 << 20);
    assert_eq!(now["worker_liveness"]["reap_timeout_seconds"], 40.0);
    assert_eq!(lines(&reload().stdout), ["nothing has changed"]);
    // One that needs a restart: none of them changes.
    written(&format!("{live}chunk-size = 512\n").replace("0.5", "0.4"));
    let line = complaint(&reload(), 1);
    assert!(
        line.contains("chunk-size can be changed only by a restart"),
        "{line}"
    );
    assert_eq!(shown("eviction-ratio"), "eviction-ratio = 0.5");
    written("eviction-ratio = 7\n");
    let line = complaint(&reload(), 1);
    assert!(line.contains("eviction-ratio"), "{line}");
    std::fs::remove_file(&file).unwrap();
    let line = complaint(&reload(), 1);
    assert!(line.contains("kvtier.toml"), "{line}");
    assert_eq!(shown("eviction-ratio"), "eviction-ratio = 0.5");
}

#[test]
fn bad_file_and_absent_server_are_errors() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kvtier.toml");
    std::fs::write(&file, "chunk-size = 0\n").unwrap();
    let url = format!("127.0.0.1:{}", free_port());
    let diff = ["config", "diff", "--config", file.to_str().unwrap(), &url];
    let line = complaint(&kvtier(&diff), 1);
    assert!(line.contains("chunk-size") && line.contains("0"), "{line}");
    let line = complaint(&kvtier(&["config", "show", &url]), 1);
    assert!(line.contains("nothing answers at"), "{line}");
}
