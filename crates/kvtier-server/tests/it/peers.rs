//! Reads of L1 by other servers.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use kvtier_client::Scope;
use kvtier_core::ObjectKey;
use kvtier_core::object_key::KeyShape;
use kvtier_proto::key_settings::KeySettings;

use crate::http::request;
use crate::l2::{hits, with_tiers};
use crate::support::{PATIENCE, Steps as _, TestServer, bytes, given_stored_on, wait_until, whole};

/// A server whose L1 peers may read.
pub fn with_port(flags: &[&str]) -> TestServer {
    TestServer::start(&[&["--peer-port", "0"], flags].concat())
}

/// The answer to a command; all of it is expected, a value too.
fn ask(stream: &mut TcpStream, words: &[&str], length: usize) -> Vec<u8> {
    let mut command = format!("*{}\r\n", words.len());
    for word in words {
        command += &format!("${}\r\n{word}\r\n", word.len());
    }
    stream.write_all(command.as_bytes()).unwrap();
    let mut answer = vec![0; length];
    stream.read_exact(&mut answer).unwrap();
    answer
}

// proves: docs/compare.md#other-servers
// proves: docs/l2.md#the-port-for-peers
#[test]
fn peers_read_what_l1_holds_under_the_keys_of_tiers() {
    let scope = Scope::new("peers/model").with_salt("t");
    let (server, _, worker, _) = given_stored_on(with_port(&[]), scope, 3);
    let mut stream = TcpStream::connect(server.peer_address().unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let (objects, _) = server.engine().admin().list_objects(0, None, 10);
    let length = worker.chunk_bytes();
    let head = format!("${length}\r\n");
    let mut found: Vec<_> = objects
        .iter()
        .map(|object| {
            let key = ObjectKey::of(&object.namespace, object.chunk_hash);
            let name = key.text().name(KeyShape::Grouped);
            let answer = ask(&mut stream, &["GET", &name], head.len() + length + 2);
            let value = answer.strip_prefix(head.as_bytes()).unwrap();
            let companion = format!("kvtier.sum@{{{name}}}");
            let answer = ask(&mut stream, &["GET", &companion], 5 + 64 + 2);
            assert!(answer.starts_with(b"$64\r\nkvtr"));
            let other = name.replace("@t", "@u");
            assert_eq!(ask(&mut stream, &["GET", &other], 5), b"$-1\r\n");
            value[..length].to_vec()
        })
        .collect();
    let mut stored: Vec<_> = (0..3).map(|chunk| bytes(1, chunk, length)).collect();
    found.sort_unstable();
    stored.sort_unstable();
    assert!(found == stored);
    let metrics = request(&server, "GET", "/metrics", "").2;
    for line in [
        "kvtier_peer_connections 1\n",
        "kvtier_peer_sent_objects_total 3\n",
        &format!("kvtier_peer_sent_bytes_total {}\n", 3 * length),
    ] {
        assert!(metrics.contains(line), "{line}");
    }
    let status = request(&server, "GET", "/status", "").2;
    assert!(
        status.contains("\"peer_port\":{\"connections\":1,"),
        "{status}"
    );
    wait_until("the end of all leases", || {
        server.readings().leased_objects == 0
    });
    drop((stream, worker));
    server.assert_sound();
}

#[test]
fn server_ends_beside_a_peer_that_does_not_read() {
    let scope = Scope::new("peers/stuck");
    let (server, _, worker, _) = given_stored_on(with_port(&[]), scope, 1);
    let (objects, _) = server.engine().admin().list_objects(0, None, 1);
    let key = ObjectKey::of(&objects[0].namespace, objects[0].chunk_hash);
    let get = format!(
        "*2\r\n$3\r\nGET\r\n${}\r\n{}\r\n",
        key.text().name(KeyShape::Grouped).len(),
        key.text().name(KeyShape::Grouped)
    );
    let mut stream = TcpStream::connect(server.peer_address().unwrap()).unwrap();
    stream.set_nonblocking(true).unwrap();
    let requests = get.repeat(10_000);
    // As much as it takes: then it waits for this side to read.
    let _ = stream.write(requests.as_bytes());
    wait_until("an object on its way for ever", || {
        server.readings().leased_objects > 0
    });
    drop((worker, server));
}

/// A server that reads from the other one.
fn reader_of(server: &TestServer, flags: &[&str]) -> TestServer {
    let peer = server.peer_address().unwrap();
    let tier = format!(
        r#"{{"type":"peers","peers":["{peer}"],"first_byte_ms":30000,"lookup_timeout_ms":30000}}"#
    );
    let reader = with_tiers(&[&tier], flags);
    wait_until("a connection to the peer", || {
        let status = request(&reader, "GET", "/status", "").2;
        status.contains("\"connected_peers\":1")
    });
    reader
}

// proves: docs/compare.md#other-servers
// proves: docs/l2.md#other-servers
#[test]
fn a_server_hits_what_only_its_peer_has() {
    let scope = Scope::new("peers/two").with_salt("t");
    let (server, scope, worker, prompt) = given_stored_on(with_port(&[]), scope, 8);
    let reader = reader_of(&server, &[]);
    let mut engine = reader.engine_driven(1, &scope);
    assert_eq!(hits(engine.connection(), &scope, &prompt, "r"), 8);
    engine.assert_reads(&prompt, whole(&prompt), "r", 1);
    engine.connection().end_session("r").unwrap();
    let tier = &reader.readings().tiers[0];
    assert_eq!((tier.loaded_objects, tier.unverified), (8, 0));
    // Nothing is written there, and nothing is known of it but what is in L1 now.
    assert_eq!((tier.stored_objects, tier.objects), (0, 0));
    let stranger = scope.clone().with_salt("u");
    assert_eq!(hits(engine.connection(), &stranger, &prompt, "u"), 0);
    let looked_up = reader.readings().tiers[0].looked_up;
    assert_eq!(hits(engine.connection(), &scope, &prompt, "again"), 8);
    assert_eq!(
        reader.readings().tiers[0].looked_up,
        looked_up,
        "L1 has all of it"
    );
    wait_until("the end of all leases", || {
        server.readings().leased_objects == 0
    });
    server.assert_sound();
    // What the peer had is in L1; what it would have had is a miss.
    drop((worker, server));
    assert_eq!(hits(engine.connection(), &scope, &prompt, "alone"), 8);
    reader.engine().admin().clear(true);
    assert_eq!(hits(engine.connection(), &scope, &prompt, "gone"), 0);
    reader.assert_sound();
}

// proves: docs/l2.md#reading-from-peers
#[test]
fn what_a_peer_has_evicted_is_a_miss() {
    let scope = Scope::new("peers/evicted");
    let (server, scope, worker, prompt) = given_stored_on(with_port(&[]), scope, 4);
    let reader = reader_of(&server, &[]);
    let mut engine = reader.engine_driven(1, &scope);
    assert_eq!(hits(engine.connection(), &scope, &prompt, "r"), 4);
    engine.connection().end_session("r").unwrap();
    server.engine().admin().clear(true);
    reader.engine().admin().clear(true);
    assert_eq!(hits(engine.connection(), &scope, &prompt, "gone"), 0);
    assert_eq!(reader.readings().tiers[0].objects, 0);
    drop((worker, server));
    reader.assert_sound();
}

// proves: docs/vllm.md#parameters-of-a-request
#[test]
fn peer_that_a_lookup_names_is_asked_among_many() {
    let scope = Scope::new("peers/named");
    let server = with_port(&["--peer-host", "127.0.0.2"]);
    let (server, scope, worker, prompt) = given_stored_on(server, scope, 2);
    // Nothing listens there.
    let mut peers: Vec<_> = (1..=40)
        .map(|port| format!("\"127.0.0.1:{port}\""))
        .collect();
    peers.push(format!("\"{}\"", server.peer_address().unwrap()));
    let tier = format!(
        r#"{{"type":"peers","peers":[{}],"first_byte_ms":30000,"lookup_timeout_ms":30000}}"#,
        peers.join(",")
    );
    let reader = with_tiers(&[&tier], &[]);
    wait_until("a connection to the peer", || {
        let status = request(&reader, "GET", "/status", "").2;
        status.contains("\"connected_peers\":1")
    });
    let mut engine = reader.engine_driven(1, &scope);
    let named = scope.clone().with_settings(KeySettings {
        peer: Some("127.0.0.2"),
        ..KeySettings::default()
    });
    assert_eq!(hits(engine.connection(), &named, &prompt, "r"), 2);
    drop((worker, server));
}
