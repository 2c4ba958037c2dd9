//! Pings, and the answers that wait until one was answered "no".

use kvtier_client::InstanceId;
use kvtier_client::proto::generation::Generation;
use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::request::Request;
use kvtier_client::proto::response::{
    PrepareRetrieve, PrepareStore, Response, ResponseKind, StoreTarget,
};

use super::{ask, frames, hello, no, request, worker, yes};
use crate::support::{TestServer, wait_until};

/// Up to 0.4.7 pings name no worker.
// proves: docs/clients.md#refused-retrieves-up-to-054
#[test]
fn first_ping_of_a_reconnected_client_is_refused() {
    let server = TestServer::start(&[]);
    let ping = Request::Ping { instance: None };
    for generation in [
        Generation::G1,
        Generation::G2,
        Generation::G3,
        Generation::G4,
    ] {
        // One that has a worker registers it again; a scheduler is healthy again one heartbeat later.
        let client = server.raw();
        let mut pings = (5..9).map(|uid| ask(&client, uid, generation, &ping));
        assert_eq!(pings.next(), Some(no()), "{generation:?}");
        assert!(pings.all(|answer| answer == yes()));
        // One that has sent a scheduler's request has no worker.
        let client = server.raw();
        let lookup = request(generation.spec(Operation::Lookup).unwrap());
        ask(&client, 5, generation, &lookup);
        let mut pings = (6..8).map(|uid| ask(&client, uid, generation, &ping));
        assert!(pings.all(|answer| answer == yes()), "{generation:?}");
        // One that began here is known.
        let client = server.raw();
        hello(&client, generation);
        assert_eq!(ask(&client, 1, generation, &ping), yes());
    }
    // Its worker is the last that its connection named.
    let scope = kvtier_client::Scope::new("older/model");
    let client = server.raw();
    hello(&client, Generation::G4);
    ask(&client, 1, Generation::G4, &worker(&scope, 77));
    assert_eq!(ask(&client, 2, Generation::G4, &ping), yes());
    let registered = server.engine().admin().status(true).non_cuda_context_meta;
    let id = registered.keys().next().unwrap().parse().unwrap();
    let newest = server.raw();
    hello(&newest, Generation::G6);
    let instance = InstanceId(id);
    let leave = Request::UnregisterEngineDriven { instance };
    ask(&newest, 1, Generation::G6, &leave);
    assert_eq!(ask(&client, 3, Generation::G4, &ping), no());
}

// proves: docs/clients.md#refused-retrieves-up-to-054
#[test]
fn refused_ping_precedes_refused_engine_driven_retrieve() {
    let server = TestServer::start(&[]);
    for generation in [Generation::G3, Generation::G4, Generation::G5] {
        let client = server.raw();
        hello(&client, generation);
        let asked = frames(1, generation.spec(Operation::PrepareRetrieve).unwrap());
        client.send(&asked);
        // A ping may pass the request that is refused; then a later one reports it.
        let ping = frames(2, generation.spec(Operation::Ping).unwrap());
        let mut last = None;
        let answer = loop {
            client.send(&ping);
            let message = client.receive();
            if message[0] == asked[0] {
                break message;
            }
            last = message.get(2).cloned();
            server.pass(std::time::Duration::from_secs(1));
        };
        assert_eq!(last, no(), "{generation:?}");
        assert_eq!(answer[..2], asked[..2], "{generation:?}");
        let miss = Response::PrepareRetrieve(PrepareRetrieve::miss());
        assert_eq!(
            Response::decode(
                ResponseKind::PrepareRetrieve,
                answer.get(2).map(Vec::as_slice)
            )
            .unwrap(),
            miss
        );
    }
}

/// 16 with a key and a worker prepares a store in the newest generation and commits a retrieve in 0.5.0 to 0.5.2. The former
/// dies of an answer without a payload, the latter stops receiving at one of another type.
// proves: docs/clients.md#after-a-reconnect
#[test]
fn ambiguous_request_waits_for_the_ping() {
    let server = TestServer::start(&[]);
    let reconnected = |generation: Generation, operation| {
        let client = server.raw();
        let mut key = frames(8, Generation::G5.spec(Operation::CommitRetrieve).unwrap());
        key[0] = vec![8];
        client.send(&key);
        let ping = frames(9, generation.spec(Operation::Ping).unwrap());
        client.send(&ping);
        let (first, second) = (client.receive(), client.receive());
        assert_eq!(
            (&first[0], &second[0]),
            (&key[0], &ping[0]),
            "{generation:?}"
        );
        let kind = generation.spec(operation).unwrap().response;
        Response::decode(kind, first.get(2).map(Vec::as_slice))
            .unwrap()
            .encode()
    };
    let target = PrepareStore {
        target: Some(StoreTarget::default()),
    };
    assert_eq!(
        reconnected(Generation::G6, Operation::PrepareStore),
        Response::PrepareStore(target).encode()
    );
    assert_eq!(
        reconnected(Generation::G5, Operation::CommitRetrieve),
        Response::Bool(false).encode()
    );
}

// proves: docs/clients.md#refused-retrieves-up-to-054
#[test]
fn held_answer_is_sent_before_the_server_stops() {
    let server = TestServer::start(&[]);
    let client = server.raw();
    hello(&client, Generation::G5);
    let asked = frames(1, Generation::G5.spec(Operation::PrepareRetrieve).unwrap());
    client.send(&asked);
    let ping = frames(2, Generation::G5.spec(Operation::Ping).unwrap());
    // The refusal is counted before the answer is held: a ping in between would not be the client's notice.
    wait_until("an answer that is held", || server.engine().holds_answers());
    let engine = std::sync::Arc::downgrade(server.engine());
    let stopped = std::thread::spawn(move || drop(server));
    client.send(&ping);
    while client.receive()[0] != asked[0] {}
    stopped.join().unwrap();
    assert!(engine.upgrade().is_none(), "nothing keeps the engine");
}
