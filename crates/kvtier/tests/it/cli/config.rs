//! `kvtier config` against a running server.

use super::{Server, complaint, free_port, kvtier, lines};

// proves: docs/operate.md#reload
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

// proves: docs/operate.md#reload
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

// proves: docs/compare.md#command-line
// proves: docs/operate.md#reload
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

// proves: docs/operate.md#reload
#[test]
fn reload_changes_limits_of_tiers() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kvtier.toml");
    let (fs, device) = (directory.path().join("fs"), directory.path().join("device"));
    let written = |limits: &str, device_gb: f64| {
        let text = format!(
            "[[l2-adapter]]\ntype = \"fs\"\nbase_path = {fs:?}\n{limits}\n\
             [[l2-adapter]]\ntype = \"raw_block\"\ndevice_path = {device:?}\nmax_capacity_gb = {device_gb}\n"
        );
        std::fs::write(&file, text).unwrap();
    };
    let eviction = "eviction = {eviction_policy = \"LRU\", trigger_watermark";
    written(&format!("max_capacity_gb = 1\n{eviction} = 0.5}}"), 0.01);
    let server = Server::start_with(&["--shm-name", "", "--config", file.to_str().unwrap()]);
    let reload = || kvtier(&["config", "reload", &server.http]);
    let limits = || {
        let output = kvtier(&["status", "--json", &server.http]);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let manager = &status["storage_manager"];
        let evicts = &manager["l2_eviction_controller"]["adapters"][0];
        let capacity = &manager["l2_adapters"][0]["max_capacity_bytes"];
        assert_eq!(*capacity, evicts["total_capacity_bytes"]);
        let metrics = ureq::get(format!("{}/metrics", server.http)).call();
        let metrics = metrics.unwrap().body_mut().read_to_string().unwrap();
        let line = format!("kvtier_l2_capacity_bytes{{l2_name=\"fs-0\"}} {capacity}");
        assert!(metrics.contains(&line), "{line}");
        (
            capacity.as_u64().unwrap(),
            evicts["trigger_watermark"].as_f64().unwrap(),
        )
    };
    assert_eq!(limits(), (1 << 30, 0.5));
    let changed = format!("max_capacity_gb = 2\n{eviction} = 0.75}}");
    written(&changed, 0.01);
    let output = reload();
    assert!(output.status.success(), "{output:?}");
    let expected = [
        "l2-adapter fs-0 eviction.trigger_watermark: 0.5 -> 0.75",
        "l2-adapter fs-0 max_capacity_gb: 1 -> 2",
    ];
    assert_eq!(lines(&output.stdout), expected);
    assert_eq!(limits(), (2 << 30, 0.75));
    assert_eq!(lines(&reload().stdout), ["nothing has changed"]);
    // The space of a device is divided at the start. Nothing else changes either.
    written(&changed.replace("= 2", "= 3"), 0.02);
    let line = complaint(&reload(), 1);
    assert!(
        line.contains("l2-adapter raw_block-1 max_capacity_gb cannot be changed"),
        "{line}"
    );
    written(&format!("{eviction} = 0.75}}"), 0.01);
    let line = complaint(&reload(), 1);
    assert!(
        line.contains("l2-adapter fs-0 max_capacity_gb can be changed only by a restart"),
        "{line}"
    );
    assert_eq!(limits(), (2 << 30, 0.75));
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
