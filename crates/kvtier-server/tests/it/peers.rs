//! Reads of L1 by other servers.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use kvtier_client::Scope;
use kvtier_core::ObjectKey;
use kvtier_core::object_key::KeyShape;

use crate::http::request;
use crate::support::{PATIENCE, TestServer, bytes, given_stored_on, wait_until};

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
// proves: docs/l2.md#other-servers
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
