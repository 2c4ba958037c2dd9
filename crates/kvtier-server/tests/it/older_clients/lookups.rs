//! Lookups that are asked for by number, and queries for hits.

use kvtier_client::proto::generation::Generation;
use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::request::{JobRef, Request};
use kvtier_client::proto::response::{Response, ResponseKind};

use super::{ask, hello, int, request};

/// 0.4.2 and 0.4.3.
// proves: docs/clients.md#releases
#[test]
fn early_lookups_are_asked_for_by_number() {
    let (server, _, _worker, _) = crate::support::given_stored("older/model", 2);
    let generation = Generation::G1;
    let client = server.raw();
    hello(&client, generation);
    let row = |operation| generation.spec(operation).unwrap();
    let lookup = request(row(Operation::Lookup));
    let number = |uid| {
        let answer = ask(&client, uid, generation, &lookup).unwrap();
        match Response::decode(ResponseKind::Int, Some(&answer)).unwrap() {
            Response::Int(number) => number,
            other => panic!("{other:?}"),
        }
    };
    let hits = |uid, number| {
        let job = JobRef::Job(number);
        ask(
            &client,
            uid,
            generation,
            &Request::QueryPrefetchStatus { job },
        )
    };
    let first = number(1);
    assert_eq!(hits(2, first), int(2));
    // Taken, and unknown.
    assert_eq!(hits(3, first), int(0));
    assert_eq!(hits(4, first + 1), int(0));
    let second = number(5);
    assert_ne!(first, second);
    assert_eq!(hits(6, second), int(2));
    // Another connection's numbers are its own.
    let other = server.raw();
    hello(&other, generation);
    let third = number(7);
    let job = JobRef::Job(third);
    let asked = ask(&other, 1, generation, &Request::QueryPrefetchStatus { job });
    assert_eq!(asked, int(0));
    let end = request(row(Operation::EndSession));
    assert_eq!(ask(&client, 8, generation, &end), None);
    assert_eq!(hits(9, third), int(0));
    assert_eq!(server.readings().leased_objects, 0);
}

#[test]
fn hits_query_leaves_the_result_for_the_status_query() {
    let (server, _, _worker, _) = crate::support::given_stored("older/model", 2);
    for generation in [Generation::G2, Generation::G5] {
        let client = server.raw();
        hello(&client, generation);
        let row = |operation| request(generation.spec(operation).unwrap());
        let lookup = ask(&client, 1, generation, &row(Operation::Lookup));
        assert_eq!(lookup, None);
        for (uid, operation, hits) in [
            (2, Operation::QueryPrefetchLookupHits, 2),
            (3, Operation::QueryPrefetchLookupHits, 2),
            (4, Operation::QueryPrefetchStatus, 2),
            (5, Operation::QueryPrefetchLookupHits, 0),
        ] {
            let answer = ask(&client, uid, generation, &row(operation));
            assert_eq!(answer, int(hits), "{generation:?} {uid}");
        }
    }
}
