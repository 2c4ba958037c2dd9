//! Futures, deadlines and callbacks of [`Client`]; below, its health, chunk sizes and lookups.

mod chunk_sizes;
mod health;
mod kv_events;
mod lookups;

use std::sync::mpsc;
use std::time::Duration;

use kvtier_client::proto::key::EncodedTokens;
use kvtier_client::proto::request::Request;
use kvtier_client::proto::response::Response;
use kvtier_client::{ChunkTerms, Client, ClientError, Health, InstanceId, Prompt, Scope, Settings};

use crate::support::{Server, reply};

/// Longer than any test may take.
const MAX_TEST: Duration = Duration::from_secs(600);

fn settings() -> Settings {
    Settings {
        timeout: MAX_TEST,
        heartbeat: MAX_TEST,
        reconnect: Duration::from_millis(1),
        ..Settings::default()
    }
}

/// Settings of an engine with these blocks and chunks.
fn settings_with(block_tokens: u64, chunk_tokens: Option<u64>) -> Settings {
    let terms = ChunkTerms {
        block_tokens,
        chunk_tokens,
    };
    Settings {
        chunk: Some(terms),
        ..settings()
    }
}

fn connect(server: &Server, settings: Settings) -> Client {
    Client::connect_with(server.endpoint(), settings).unwrap()
}

/// Connects a client, and waits until it is healthy.
fn connect_healthy(server: &Server, settings: Settings) -> Client {
    let client = connect(server, settings);
    assert!(client.wait_healthy(MAX_TEST));
    client
}

/// Answers pings, and the chunk size with 16.
fn default_answers(request: &Request<'_, Vec<u32>>) -> Option<Response<'static>> {
    match request {
        Request::Ping { .. } => Some(Response::Bool(true)),
        Request::GetChunkSize => Some(Response::Int(16)),
        Request::GetExperimental => Some(Response::Texts(Vec::new())),
        _ => None,
    }
}

/// A server that answers each request for its chunk size once it is released.
fn server_with_held_chunk_size() -> (Server, mpsc::Sender<()>) {
    let (release, held) = mpsc::channel::<()>();
    let server = Server::typed(move |request| {
        if matches!(request, Request::GetChunkSize) {
            held.recv().unwrap();
        }
        default_answers(request)
    });
    (server, release)
}

/// Each state that the client reports from now on.
fn states(client: &Client) -> mpsc::Receiver<Health> {
    let (sender, receiver) = mpsc::channel();
    client.on_health(Box::new(move |health| {
        let _ = sender.send(health);
    }));
    receiver
}

/// Each call of a recover hook that knows of `connections`.
fn recoveries(client: &Client, connections: u64) -> mpsc::Receiver<()> {
    let (sender, receiver) = mpsc::channel();
    let hook = move |_: &Client| sender.send(()).map_err(|_| None);
    client.on_recover(connections, Box::new(hook));
    receiver
}

#[test]
fn result_is_polled_awaited_and_taken_once() {
    let (server, release) = server_with_held_chunk_size();
    let client = connect_healthy(&server, settings());
    let future = client.get_chunk_size();
    assert!(!future.is_ready());
    assert!(future.try_take().is_none());
    assert!(future.wait(Duration::ZERO).is_none());
    assert_eq!(client.in_flight(), 1);
    release.send(()).unwrap();
    assert_eq!(future.wait(MAX_TEST).unwrap().unwrap(), 16);
    assert!(future.try_take().is_none(), "given once");
    assert!(matches!(future.join(), Err(ClientError::Cancelled { .. })));
    assert_eq!(client.in_flight(), 0);
}

#[test]
fn threads_receive_their_own_answers() {
    let server = Server::typed(|request| match request {
        Request::Ping { .. } => Some(Response::Bool(true)),
        Request::EndSession { .. } => Some(Response::Nothing),
        Request::QueryPrefetchStatus { job } => {
            let kvtier_client::proto::request::JobRef::Request(id) = job else {
                return None;
            };
            Some(Response::Int(id.parse().unwrap()))
        }
        _ => None,
    });
    let client = connect(&server, settings());
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let client = client.clone();
            scope.spawn(move || {
                for number in 0..50 {
                    let number = thread * 1000 + number;
                    let asked = client.query_prefetch_status(&number.to_string());
                    assert_eq!(asked.join().unwrap(), Some(number));
                }
            });
        }
    });
}

#[test]
fn silent_server_is_timeout_at_deadline() {
    let server = Server::typed(|_| None);
    let brief = Settings {
        timeout: Duration::from_millis(50),
        ..settings()
    };
    let client = connect(&server, brief);
    let error = client.get_chunk_size().join().unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
}

#[test]
fn requests_without_server_end_at_deadline() {
    let no_server = {
        let server = Server::typed(|_| None);
        server.endpoint().to_owned()
    };
    let brief = Settings {
        timeout: Duration::from_millis(50),
        ..settings()
    };
    let client = Client::connect_with(&no_server, brief).unwrap();
    let futures: Vec<_> = (0..10).map(|_| client.noop()).collect();
    for future in futures {
        let error = future.join().unwrap_err();
        assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    }
    assert_eq!(client.health(), Health::Degraded);
}

#[test]
fn panic_in_callback_affects_no_other_request() {
    let server = Server::typed(default_answers);
    let client = connect(&server, settings());
    client.on_health(Box::new(|_| panic!("a bug of the caller")));
    let states = states(&client);
    let ping: Request<'_, EncodedTokens<'_>> = Request::Ping { instance: None };
    client.submit_then(&ping, MAX_TEST, |_| panic!("a bug of the caller"));
    assert_eq!(client.get_chunk_size().join().unwrap(), 16);
    while states.recv().unwrap() != Health::Healthy {}
}

#[test]
fn several_threads_wait_and_one_takes_result() {
    let (server, release) = server_with_held_chunk_size();
    let client = connect(&server, settings());
    let future = client.get_chunk_size();
    std::thread::scope(|scope| {
        let waiting = [(); 2].map(|()| scope.spawn(|| future.wait_ready(MAX_TEST)));
        release.send(()).unwrap();
        for thread in waiting {
            thread.join().unwrap();
        }
    });
    assert!(future.is_ready());
    assert_eq!(future.try_take().unwrap().unwrap(), 16);
}

#[test]
fn closing_fails_current_and_later_requests() {
    let server = Server::typed(|request| match request {
        Request::Noop => None,
        request => default_answers(request),
    });
    let client = connect_healthy(&server, settings());
    let future = client.noop();
    client.close();
    assert!(matches!(future.join(), Err(ClientError::Closed { .. })));
    assert!(matches!(
        client.noop().join(),
        Err(ClientError::Closed { .. })
    ));
}

#[test]
fn cancelled_result_is_dropped_and_later_ones_arrive() {
    let server = Server::typed(default_answers);
    let client = connect(&server, settings());
    client.get_chunk_size().cancel();
    assert_eq!(client.get_chunk_size().join().unwrap(), 16);
}

#[test]
fn garbage_from_server_is_skipped() {
    let server = Server::raw_at(crate::support::ANYWHERE, |request| {
        let (uid, op) = (request[0].clone(), request[1].clone());
        vec![
            vec![vec![]],
            vec![b"not msgpack \xc1".to_vec(), op.clone()],
            vec![vec![0xcd, 0xff, 0xff], op.clone(), vec![0x10]],
            // Of another operation, which is an error of this request only.
            vec![uid.clone(), vec![0x7f], vec![0x10]],
            vec![uid, op, vec![0x10]],
        ]
    });
    let client = connect(&server, settings());
    let error = client.get_chunk_size().join().unwrap_err();
    assert!(matches!(error, ClientError::Unexpected { .. }), "{error}");
    assert!(client.get_chunk_size().join().is_err());
}

#[test]
fn invalid_address_is_error() {
    let error = Client::connect("bogus://x").unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error}");
}

#[test]
fn large_requests_do_not_wait_for_replies_to_those_before_them() {
    const REQUESTS: usize = 12;
    let mut arrived = Vec::new();
    let server = Server::raw_at(crate::support::ANYWHERE, move |frames| {
        if frames.iter().any(|frame| frame.len() > 1 << 20) {
            arrived.push(frames);
        }
        match arrived.len() {
            REQUESTS => arrived
                .drain(..)
                .map(|request| reply(&request, Some(vec![0xc3])))
                .collect(),
            _ => Vec::new(),
        }
    });
    let settings = Settings {
        heartbeat: Duration::from_secs(600),
        timeout: Duration::from_secs(60),
        ..Settings::default()
    };
    let client = connect(&server, settings);
    let (scope, prompt, data) = (Scope::new("m"), Prompt::new(&[1]), vec![7; 2 << 20]);
    let (sender, results) = std::sync::mpsc::channel();
    for _ in 0..REQUESTS {
        let request = Request::CommitStore {
            key: scope.scheduler_key(&prompt, 0..1, "r"),
            instance: InstanceId(1),
            data: &data,
        };
        let sender = sender.clone();
        client.submit_then(&request, client.timeout(), move |result| {
            sender.send(result.is_ok()).unwrap();
        });
    }
    assert!(results.iter().take(REQUESTS).all(|is_ok| is_ok));
}
