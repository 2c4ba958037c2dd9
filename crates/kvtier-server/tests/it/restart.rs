//! A server that came back faster than a heartbeat: its workers learn that they must register again.

use std::time::Duration;

use kvtier_client::{InstanceId, Scope};

use crate::support::{TestServer, bytes, prompt, range};

const UNKNOWN: Option<InstanceId> = Some(InstanceId(5));

// proves: docs/operate.md#restart-and-upgrade
#[test]
fn unknown_worker_first_ping_fails_next_succeeds() {
    let server = TestServer::start(&[]);
    let mut worker = server.connect();
    // "No" makes the client unhealthy, the "yes" behind it makes it register; "no" again would only keep it waiting.
    assert_eq!(
        [worker.ping(UNKNOWN).unwrap(), worker.ping(UNKNOWN).unwrap()],
        [false, true]
    );
    // A worker that does not register after that receives the same answer again.
    assert!(!worker.ping(UNKNOWN).unwrap());
    // Each worker receives it once for itself; schedulers and probes have nothing to register.
    assert!(!worker.ping(Some(InstanceId(6))).unwrap());
    assert!(worker.ping(None).unwrap());
}

#[test]
fn reregistered_worker_is_served() {
    let scope = Scope::new("restart/registered");
    let prompt = prompt(1, 1);
    let server = TestServer::start(&[]);
    let mut worker = server.connect();
    assert!(!worker.ping(UNKNOWN).unwrap());
    assert!(worker.ping(UNKNOWN).unwrap());
    let mut worker = server.engine_driven(5, &scope);
    let len = worker.chunk_bytes();
    assert!(worker.connection().ping(UNKNOWN).unwrap());
    assert_eq!(
        worker
            .store(&prompt, range(0..1), "r", |_| bytes(1, 0, len))
            .unwrap()
            .chunks,
        [0]
    );
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 1);
}

#[test]
fn unregistered_worker_is_unknown() {
    let scope = Scope::new("restart/left");
    let server = TestServer::start(&[]);
    let mut connection = server.engine_driven(5, &scope).close().unwrap();
    assert!(!connection.ping(UNKNOWN).unwrap());
    assert!(connection.ping(UNKNOWN).unwrap());
}

// proves: docs/troubleshoot.md#an-engine-dies
#[test]
fn worker_considered_dead_is_notified() {
    let scope = Scope::new("restart/reaped");
    let server = TestServer::start(&["--worker-reap-timeout-seconds", "120"]);
    let mut worker = server.engine_driven(5, &scope);
    assert!(worker.connection().ping(UNKNOWN).unwrap());
    server.pass(Duration::from_secs(119));
    assert_eq!(server.readings().instances, 1);
    assert!(worker.connection().ping(UNKNOWN).unwrap());
    server.pass(Duration::from_secs(121));
    assert_eq!(server.readings().instances, 0);
    assert!(!worker.connection().ping(UNKNOWN).unwrap());
    assert!(worker.connection().ping(UNKNOWN).unwrap());
}

#[test]
fn worker_without_pings_has_longer_timeout() {
    let scope = Scope::new("restart/quiet");
    let server = TestServer::start(&["--worker-registration-grace-seconds", "3600"]);
    let _worker = server.engine_driven(5, &scope);
    server.pass(Duration::from_secs(3590));
    assert_eq!(server.readings().instances, 1);
    server.pass(Duration::from_secs(20));
    assert_eq!(server.readings().instances, 0);
}
