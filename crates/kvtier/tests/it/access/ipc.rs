//! A request socket that is a file.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::process::Command;

use kvtier_client::{Connection, Options};

use super::served::{Files, KVTIER, Served, Setup, TIMEOUT};

#[test]
fn socket_file_has_its_mode_and_is_removed() {
    let files = Files::new();
    let path = files.path("kvtier.sock:5555");
    let host = format!("ipc://{}", path.display());
    // What a server that was killed leaves.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let mut server = Served::start_in(
        files,
        Setup::Open,
        &["--host", &host, "--ipc-mode", "0660"],
        &[],
    );
    assert_eq!(server.endpoint, host);
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
    let options = Options {
        timeout: TIMEOUT,
        ..Options::default()
    };
    let mut client = Connection::connect_with(&host, options).unwrap();
    assert_eq!(client.get_chunk_size().unwrap(), 256);
    let output = Command::new(KVTIER)
        .args(["ping", "--count", "1", &host])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    // A second server leaves it alone.
    let output = Command::new(KVTIER)
        .args([
            "server",
            "--l1-size-gb",
            "0.01",
            "--shm-name",
            "",
            "--http-port",
            "0",
            "--host",
            &host,
        ])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr.contains("a server listens there already"),
        "{stderr}"
    );
    assert!(client.ping(None).unwrap());
    assert_eq!(server.stop().code(), Some(0));
    assert!(!path.exists());
}

// proves: docs/compare.md#http
#[test]
fn socket_file_without_mode_is_owner_only() {
    let files = Files::new();
    let path = files.path("s");
    let host = format!("ipc://{}", path.display());
    let _server = Served::start_in(files, Setup::Open, &["--host", &host], &[]);
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
}
