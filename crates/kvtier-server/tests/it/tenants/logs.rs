//! Nothing above DEBUG tells a salt, whatever goes wrong.

use kvtier_client::{InstanceId, Scope};
use kvtier_core::object_key::ShownSalt;

use super::bed::{files, lookup, read, server, store};
use crate::http::request;
use crate::l2::settle;
use crate::log::Log;
use crate::support::{prompt, range};

/// In no word of the log by chance, and in names of files as it is.
const MARKER: &str = "Markerσalt7";

#[test]
fn no_salt_is_in_the_log() {
    let log = Log::listen();
    let directory = tempfile::tempdir().unwrap();
    let server = server(directory.path(), &["--eviction-policy", "IsolatedLRU"]);
    let mut worker = server.engine_driven(1, &Scope::new("logs"));
    let mut pages = server.lmcache_driven(2, &Scope::new("logs/pages").with_salt(MARKER));
    let prompt = prompt(1, 2);

    // As it should go.
    store(&mut worker, MARKER, &prompt, 1);
    let blocks: Vec<i64> = (0..8).collect();
    pages.store(&prompt, range(0..2), "s", &blocks).unwrap();
    settle(&server);
    assert_eq!(read(&mut worker, MARKER, &prompt, 1, "r"), 2);
    // Percent-encoded as a client would.
    let path = format!("/quota/{}", MARKER.replace('σ', "%CF%83"));
    assert_eq!(request(&server, "PUT", &path, r#"{"limit_gb": 1}"#).0, 200);
    assert_eq!(request(&server, "GET", &path, "").0, 200);
    assert_eq!(
        request(&server, "PUT", &path, r#"{"limit_gb": "much"}"#).0,
        400
    );
    assert_eq!(request(&server, "DELETE", &path, "").0, 200);
    server.pass(std::time::Duration::from_secs(2));

    // As it should not: requests that are refused, files that are damaged, and directories in their place.
    let scope = Scope::new("logs").with_salt(MARKER);
    let key = scope.worker_key(0, &prompt, range(0..2), "r");
    let connection = worker.connection();
    assert!(
        !connection
            .commit_store(&key, InstanceId(1), b"no pickle")
            .unwrap()
    );
    assert!(
        !connection
            .store(&key, InstanceId(2), &[vec![1, 2, 3]])
            .unwrap()
    );
    let bad = Scope::new("logs").with_salt(format!("{MARKER}/"));
    connection
        .lookup(&bad.scheduler_key(&prompt, range(0..2), "r"))
        .unwrap();
    server.engine().admin().clear(false);
    let stored = files(directory.path());
    assert!(
        stored
            .iter()
            .any(|path| path.to_string_lossy().contains(MARKER))
    );
    for path in &stored {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_len(100).unwrap();
    }
    assert_eq!(lookup(&mut worker, MARKER, &prompt, "q"), 0);
    worker.connection().end_session("q").unwrap();
    for path in &stored {
        let _ = std::fs::remove_file(path);
        std::fs::create_dir(path).unwrap();
    }
    server.engine().admin().clear(true);
    store(&mut worker, MARKER, &prompt, 1);
    settle(&server);

    let log = log.text();
    for said in [
        "Stored",
        "audit",
        "the data was refused",
        "is not what was stored",
        "objects cannot be stored",
    ] {
        assert!(log.contains(said), "{said}: {log}");
    }
    assert!(!log.contains(MARKER), "{log}");
    assert!(log.contains(&ShownSalt(MARKER).to_string()), "{log}");
}
