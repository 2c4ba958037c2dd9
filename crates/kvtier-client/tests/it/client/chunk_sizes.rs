//! Chunk sizes of server and engine: whether the one is used, or named.

use std::time::Duration;

use kvtier_client::proto::chunk::CHUNK_TOKENS_FEATURE;
use kvtier_client::proto::request::Request;
use kvtier_client::proto::response::Response;
use kvtier_client::{Health, Settings};

use super::{
    MAX_TEST, connect, connect_healthy, default_answers, recoveries, settings_with, states,
};
use crate::support::Server;

/// Answers pings, and the chunk size with `tokens`.
fn with_chunk(
    tokens: i64,
) -> impl FnMut(&Request<'_, Vec<u32>>) -> Option<Response<'static>> + Send + 'static {
    move |request| match request {
        Request::GetChunkSize => Some(Response::Int(tokens)),
        request => default_answers(request),
    }
}

#[test]
fn server_with_other_chunk_size_is_not_used() {
    let server = Server::typed(with_chunk(16));
    let endpoint = server.endpoint().to_owned();
    let client = connect_healthy(&server, settings_with(4, None));
    assert_eq!(client.chunk_tokens(), Some(16));
    let recoveries = recoveries(&client, 1);
    let states = states(&client);
    drop(server);
    let server = Server::typed_at(&endpoint, with_chunk(8));
    // Once for the lost connection, once for the chunk size; the recover hook is not called.
    assert_eq!(states.recv().unwrap(), Health::Degraded);
    assert_eq!(states.recv().unwrap(), Health::Degraded);
    let obstacle = client.obstacle().unwrap();
    assert!(obstacle.contains("chunks of 8 tokens and this engine works with chunks of 16"));
    assert!(recoveries.try_recv().is_err());
    drop(server);
    let _server = Server::typed_at(&endpoint, with_chunk(16));
    assert!(client.wait_healthy(MAX_TEST));
    assert_eq!(client.obstacle(), None);
    recoveries.recv().unwrap();
}

/// Answers of a server that reads a named size.
fn with_named_chunks(
    tokens: i64,
) -> impl FnMut(&Request<'_, Vec<u32>>) -> Option<Response<'static>> + Send + 'static {
    let mut default = with_chunk(tokens);
    move |request| match request {
        Request::GetExperimental => Some(Response::Texts(vec![CHUNK_TOKENS_FEATURE.into()])),
        request => default(request),
    }
}

// proves: docs/clients.md#a-chunk-size-of-ones-own
#[test]
fn chunk_size_is_named_while_server_reads_it() {
    let server = Server::typed(with_named_chunks(16));
    let endpoint = server.endpoint().to_owned();
    let client = connect_healthy(&server, settings_with(4, None));
    assert_eq!(client.named_chunk_tokens(), Some(16));
    drop(server);
    // The default of the next one does not matter.
    let server = Server::typed_at(&endpoint, with_named_chunks(24));
    while !(client.connections() == 2 && client.wait_healthy(MAX_TEST)) {}
    assert_eq!(client.named_chunk_tokens(), Some(16));
    let states = states(&client);
    drop(server);
    // This one reads no size, and has another.
    let server = Server::typed_at(&endpoint, with_chunk(24));
    assert_eq!(states.recv().unwrap(), Health::Degraded);
    assert_eq!(states.recv().unwrap(), Health::Degraded);
    assert!(client.obstacle().unwrap().contains(CHUNK_TOKENS_FEATURE));
    assert_eq!(client.named_chunk_tokens(), None);
    drop(server);
    // Nor does this one, and it has the same.
    let _server = Server::typed_at(&endpoint, with_chunk(16));
    assert!(client.wait_healthy(MAX_TEST));
    assert_eq!(client.named_chunk_tokens(), None);
    assert_eq!(client.chunk_tokens(), Some(16));
}

#[test]
fn server_without_operation_of_features_has_none() {
    let server = Server::typed(|request| match request {
        Request::GetExperimental => Some(Response::Text("error: no such operation".into())),
        request => default_answers(request),
    });
    let client = connect_healthy(&server, settings_with(4, None));
    assert_eq!(client.chunk_tokens(), Some(16));
    assert_eq!(client.named_chunk_tokens(), None);
}

#[test]
fn unanswered_question_for_terms_is_an_obstacle() {
    for silent in ["get_chunk_size", "get_experimental"] {
        let settings = Settings {
            timeout: Duration::from_millis(200),
            ..settings_with(4, None)
        };
        // Of another generation: it does not know the operation, and drops it.
        let server = Server::typed(move |request| match request {
            request if request.operation().name() == silent => None,
            request => default_answers(request),
        });
        let client = connect(&server, settings);
        let states = states(&client);
        let mut obstacle = client.obstacle();
        while obstacle.is_none() {
            assert_eq!(states.recv().unwrap(), Health::Degraded);
            obstacle = client.obstacle();
        }
        let obstacle = obstacle.unwrap();
        assert!(
            obstacle.contains(silent) && obstacle.contains("before 0.5.5"),
            "{obstacle}"
        );
    }
}
