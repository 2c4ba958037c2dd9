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
