//! The state directory: what a restart keeps without a flag of its own, and directories that are not used.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use kvtier_common::error::Error;
use kvtier_observe::api::StateStatus;
use kvtier_server::{Server, ServerConfig};
use serde_json::{Value, json};

use crate::http::json_of;
use crate::log::Log;
use crate::support::TestServer;

const ISOLATED: [&str; 2] = ["--eviction-policy", "IsolatedLRU"];

fn put(server: &TestServer, path: &str, body: &Value) -> (u16, Value) {
    json_of(server, "PUT", path, &body.to_string())
}

fn flags<'a>(base: &'a Path, id: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let own = ["--state-dir", base.to_str().unwrap(), "--instance-id", id];
    [&own[..], &ISOLATED, more].concat()
}

fn limit(server: &TestServer, salt: &str) {
    let (status, told) = put(server, &format!("/quota/{salt}"), &json!({ "limit_gb": 1 }));
    assert_eq!((status, &told["persisted"]), (200, &Value::Null), "{told}");
}

fn state(server: &TestServer) -> StateStatus {
    server.engine().admin().status(true).state
}

/// Why a second server does not start beside this one.
fn refusal(base: &Path, id: &str) -> String {
    let all = [
        "--port",
        "0",
        "--http-port",
        "0",
        "--l1-size-gb",
        "0.01",
        "--shm-name",
        "",
    ];
    let config = ServerConfig::from_flags(&[&all[..], &flags(base, id, &[])].concat()).unwrap();
    Server::start(config).err().unwrap().to_string()
}

#[test]
fn quotas_survive_a_restart_without_a_flag() {
    let base = tempfile::tempdir().unwrap();
    let server = TestServer::start(&flags(base.path(), "a", &[]));
    limit(&server, "alice");
    let folder = base.path().join("a");
    assert_eq!(state(&server).directory.as_deref(), folder.to_str());
    let (_, told) = json_of(&server, "GET", "/status", "");
    assert_eq!(told["quotas"]["file"], json!(folder.join("quotas")));
    assert_eq!(told["quotas"]["persisted"], json!(true));
    drop(server);
    let again = TestServer::start(&flags(base.path(), "a", &[]));
    assert!(again.engine().quotas().table().get("alice").is_some());
    // Another instance is another server.
    let other = TestServer::start(&flags(base.path(), "b", &[]));
    assert_eq!(other.engine().quotas().table().len(), 0);
    // A file of its own takes precedence.
    drop(again);
    let file = base.path().join("own");
    let own = ["--quota-file", file.to_str().unwrap()];
    let own = TestServer::start(&flags(base.path(), "a", &own));
    assert_eq!(own.engine().quotas().table().len(), 0);
    limit(&own, "bob");
    assert!(file.exists());
    drop(own);
    let again = TestServer::start(&flags(base.path(), "a", &[]));
    assert!(again.engine().quotas().table().get("alice").is_some());
    assert!(again.engine().quotas().table().get("bob").is_none());
}

#[test]
fn second_server_of_an_instance_is_refused() {
    let base = tempfile::tempdir().unwrap();
    let first = TestServer::start(&flags(base.path(), "a", &[]));
    let told = refusal(base.path(), "a");
    for part in [
        "--state-dir",
        "/a: in use",
        &format!("process {}", std::process::id()),
    ] {
        assert!(told.contains(part), "{told}");
    }
    drop(first);
    TestServer::start(&flags(base.path(), "a", &[]));
}

#[test]
fn directory_that_cannot_be_used_is_one_warning() {
    let base = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let link = base.path().join("link");
    symlink(elsewhere.path(), &link).unwrap();
    let open = base.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
    for (base, id) in [
        (base.path(), "link"),
        (base.path(), "open"),
        (Path::new("/proc/no"), "x"),
    ] {
        let log = Log::listen();
        let server = TestServer::start(&flags(base, id, &[]));
        let path = base.join(id).display().to_string();
        let warnings = log.text();
        let warnings = warnings
            .lines()
            .filter(|line| line.contains(&path) && line.contains("WARN"));
        assert_eq!(warnings.count(), 1, "{}", log.text());
        let found = state(&server);
        assert!(found.reason.unwrap().contains(&path));
        assert_eq!(found.directory, None);
        let (status, told) = put(&server, "/quota/alice", &json!({ "limit_gb": 1 }));
        assert_eq!((status, &told["persisted"]), (200, &json!(false)));
    }
    for path in [elsewhere.path(), &open] {
        assert!(
            path.read_dir().unwrap().next().is_none(),
            "nothing is written in {path:?}"
        );
    }
}

// proves: docs/operate.md#l1-after-a-restart
#[test]
fn l1_that_cannot_be_kept_is_one_warning_with_reason() {
    let base = tempfile::tempdir().unwrap();
    let restore = ["--l1-restore", "on"];
    let with_directory = flags(Path::new("/proc/no"), "x", &restore);
    let usable = flags(base.path(), "x", &restore);
    // It asks for no more than a line.
    let automatic = flags(base.path(), "x", &["--l1-restore", "auto"]);
    let log = Log::listen();
    let server = TestServer::start_with(&automatic, |config| {
        config.state.base = Err(Error::refused("as the test has it"));
    });
    let text = log.text();
    let mut lines = text.lines().filter(|line| line.contains("L1 starts empty"));
    let line = lines.next().unwrap();
    assert!(
        line.contains("INFO") && line.contains("as the test has it"),
        "{text}"
    );
    assert!(lines.next().is_none() && !line.contains("WARN"), "{text}");
    let found = state(&server);
    assert_eq!(found.l1_file, None);
    assert_eq!(found.l1_reason.as_deref(), Some("as the test has it"));
    drop((server, log));
    for (flags, base, reason) in [
        (&with_directory, None, Some("/proc/no/x: cannot be created")),
        (
            &usable,
            Some("as the test has it"),
            Some("as the test has it"),
        ),
        (&usable, None, None),
    ] {
        let log = Log::listen();
        let server = TestServer::start_with(flags, |config| {
            if let Some(reason) = base {
                config.state.base = Err(Error::refused(reason));
            }
        });
        let text = log.text();
        let warnings = text
            .lines()
            .filter(|line| line.contains("WARN") && line.contains("L1"));
        let warnings: Vec<_> = warnings.collect();
        assert_eq!(warnings.len(), usize::from(reason.is_some()), "{text}");
        assert!(
            warnings.iter().all(|line| line.contains(reason.unwrap())),
            "{text}"
        );
        let pool = server.engine().config().shm_name.clone().unwrap();
        let file = format!("/dev/shm/lmcache_l1_pool_{pool}");
        let found = state(&server);
        assert_eq!(found.l1_file, reason.is_none().then(|| file.clone()));
        assert_eq!(found.l1_reason.is_some(), reason.is_some());
        drop(server);
        // The line that says how to free the memory.
        let freed = log.text().contains("L1 is left to the next server");
        assert_eq!(freed && log.text().contains(&file), reason.is_none());
        for end in ["", ".ledger"] {
            let is_kept = std::fs::remove_file(format!("/dev/shm/lmcache_l1_pool_{pool}{end}"));
            assert_eq!(is_kept.is_ok(), reason.is_none());
        }
    }
}

#[test]
fn damaged_quotas_stop_the_start_by_name() {
    let base = tempfile::tempdir().unwrap();
    limit(&TestServer::start(&flags(base.path(), "a", &[])), "alice");
    let file = base.path().join("a/quotas");
    let good = std::fs::read(&file).unwrap();
    let victim = base.path().join("victim");
    std::fs::write(&victim, &good).unwrap();
    std::fs::write(&file, &good[..good.len() - 1]).unwrap();
    let told = refusal(base.path(), "a");
    assert!(
        told.contains("--state-dir") && told.contains("a/quotas: it is damaged"),
        "{told}"
    );
    std::fs::remove_file(&file).unwrap();
    symlink(&victim, &file).unwrap();
    let told = refusal(base.path(), "a");
    assert!(told.contains("a/quotas: is a symbolic link"), "{told}");
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, &good).unwrap();
    let server = TestServer::start(&flags(base.path(), "a", &[]));
    assert!(server.engine().quotas().table().get("alice").is_some());
}
