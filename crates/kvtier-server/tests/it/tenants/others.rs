//! Single ways in which one tenant could reach what is another's.

use kvtier_client::{InstanceId, Scope};
use kvtier_core::object_key::EncodedObjectKey;
use kvtier_core::{ObjectKey, kv_rank};

use super::bed::{files, lookup, read, server, store};
use crate::http::request;
use crate::l2::settle;
use crate::support::{TestServer, prompt, range};

#[test]
fn no_tenant_affects_work_of_another() {
    let server = TestServer::start(&[]);
    let scopes = ["a", "b"].map(|salt| Scope::new("others").with_salt(salt));
    let mut worker = server.engine_driven(1, &scopes[0]);
    let mut engines = [server.connect(), server.connect()];
    let (prompt, id) = (prompt(1, 2), InstanceId(1));
    let [a, b] = scopes
        .each_ref()
        .map(|scope| scope.worker_key(0, &prompt, range(0..2), "r"));
    let connection = worker.connection();
    let granted = connection.prepare_store(&a, id).unwrap().target.unwrap();
    assert_eq!(granted.slots.len(), 2);
    assert!(!connection.commit_store(&b, id, b"").unwrap());
    // The other's own store is another one, in other memory.
    let other = connection.prepare_store(&b, id).unwrap().target.unwrap();
    assert!(other.slots.iter().all(|slot| !granted.slots.contains(slot)));
    assert!(connection.commit_store(&b, id, b"").unwrap());
    let [of_a, of_b] = scopes
        .each_ref()
        .map(|scope| scope.scheduler_key(&prompt, range(0..2), "r"));
    for (engine, key, hits) in [(0, &of_a, 0), (1, &of_b, 2)] {
        assert_eq!(engines[engine].lookup_hits(key).unwrap(), hits);
    }
    assert!(connection.commit_store(&a, id, b"").unwrap());
    assert_eq!(engines[0].lookup_hits(&of_a).unwrap(), 2);
    assert_eq!(server.readings().leased_objects, 4);

    // Neither with the other's key nor with the other's request.
    engines[0].free_lookup_locks(&of_b).unwrap();
    engines[1].free_lookup_locks(&of_a).unwrap();
    assert_eq!(server.readings().leased_objects, 4);
    engines[0].end_session("r").unwrap();
    assert_eq!(server.readings().leased_objects, 2);
    // What is read and how it ends is the other's alone too.
    let connection = worker.connection();
    assert!(!connection.prepare_retrieve(&a, id).unwrap().success);
    assert!(connection.prepare_retrieve(&b, id).unwrap().success);
    assert!(!connection.commit_retrieve(&a, id).unwrap());
    assert_eq!(server.readings().leased_objects, 2);
    assert!(connection.commit_retrieve(&b, id).unwrap());
    assert_eq!(server.readings().leased_objects, 0);
    server.assert_sound();
}

#[test]
fn deletion_and_prefetch_affect_only_named_tenant() {
    let directory = tempfile::tempdir().unwrap();
    let server = server(directory.path(), &[]);
    let mut worker = server.engine_driven(1, &Scope::new("others"));
    let prompt = prompt(1, 2);
    for (seed, salt) in ["a", "b", ""].into_iter().enumerate() {
        store(&mut worker, salt, &prompt, seed as u64);
    }
    settle(&server);
    let (objects, _) = server.engine().admin().list_objects(0, None, 100);
    assert_eq!(objects.len(), 6);
    let of_a = objects
        .iter()
        .filter(|object| &**object.namespace.cache_salt() == "a");
    let keys = of_a.map(|object| {
        let key = ObjectKey::new(object.chunk_hash, "others", kv_rank(1, 0), 0, "a").unwrap();
        serde_json::to_value(EncodedObjectKey::from(key.text())).unwrap()
    });
    let body =
        serde_json::json!({ "keys": keys.collect::<Vec<_>>(), "tier": "all", "force": true });
    let (status, _, answer) = request(&server, "DELETE", "/cache/objects", &body.to_string());
    assert_eq!(status, 200, "{answer}");
    assert_eq!(files(directory.path()).len(), 4);
    server.engine().admin().clear(true);
    let warm = server.engine().admin().prefetch_jobs.start(
        "others",
        1,
        "a",
        &crate::support::tokens(1, 2),
        None,
    );
    assert!(warm.unwrap().is_some());
    assert_eq!(lookup(&mut worker, "a", &prompt, "r"), 0);
    assert_eq!(read(&mut worker, "b", &prompt, 1, "r"), 2);
    assert_eq!(read(&mut worker, "", &prompt, 2, "r"), 2);
    server.assert_sound();
}
