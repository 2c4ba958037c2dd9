//! Futures, deadlines, health and recovery of [`Client`].

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::support::Server;
use kvtier_client::proto::key::EncodedTokens;
use kvtier_client::proto::request::Request;
use kvtier_client::proto::response::Response;
use kvtier_client::{ChunkTerms, Client, ClientError, Health, InstanceId, Prompt, Scope, Settings};

/// Longer than any test may take.
const FOR_EVER: Duration = Duration::from_secs(600);

fn settings() -> Settings {
    Settings {
        timeout: FOR_EVER,
        heartbeat: FOR_EVER,
        reconnect: Duration::from_millis(1),
        ..Settings::default()
    }
}

fn connect(server: &Server, settings: Settings) -> Client {
    Client::connect_with(server.endpoint(), settings).unwrap()
}

/// Answers pings, and the chunk size with 16.
fn obliging(request: &Request<'_, Vec<u32>>) -> Option<Response<'static>> {
    match request {
        Request::Ping { .. } => Some(Response::Bool(true)),
        Request::GetChunkSize => Some(Response::Int(16)),
        _ => None,
    }
}

#[test]
fn a_result_is_polled_waited_for_and_taken_once() {
    let (release, held) = mpsc::channel::<()>();
    let server = Server::typed(move |request| {
        if matches!(request, Request::GetChunkSize) {
            held.recv().unwrap();
        }
        obliging(request)
    });
    let client = connect(&server, settings());
    assert!(client.wait_healthy(FOR_EVER));
    let future = client.get_chunk_size();
    assert!(!future.is_ready());
    assert!(future.try_take().is_none());
    assert!(future.wait(Duration::ZERO).is_none());
    assert_eq!(client.in_flight(), 1);
    release.send(()).unwrap();
    assert_eq!(future.wait(FOR_EVER).unwrap().unwrap(), 16);
    assert!(future.try_take().is_none(), "given once");
    assert!(matches!(future.join(), Err(ClientError::Cancelled { .. })));
    assert_eq!(client.in_flight(), 0);
}

#[test]
fn requests_of_many_threads_get_their_own_answers() {
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
fn a_silent_server_is_a_timeout_at_the_deadline() {
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
fn without_a_server_requests_end_at_their_deadline() {
    let nobody = {
        let server = Server::typed(|_| None);
        server.endpoint().to_owned()
    };
    let brief = Settings {
        timeout: Duration::from_millis(50),
        ..settings()
    };
    let client = Client::connect_with(&nobody, brief).unwrap();
    let futures: Vec<_> = (0..10).map(|_| client.noop()).collect();
    for future in futures {
        let error = future.join().unwrap_err();
        assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    }
    assert_eq!(client.health(), Health::Degraded);
}

#[test]
fn a_lost_connection_fails_what_was_under_way_at_once() {
    let (told, asked) = mpsc::channel();
    let server = Server::typed(move |request| {
        if matches!(request, Request::Noop) {
            told.send(()).unwrap();
        }
        obliging(request)
    });
    let client = connect(&server, settings());
    let future = client.noop();
    asked.recv().unwrap();
    drop(server);
    let error = future.join().unwrap_err();
    assert!(matches!(error, ClientError::Disconnected { .. }), "{error}");
}

#[test]
fn a_request_made_while_the_server_is_away_is_answered_by_the_next() {
    let server = Server::typed(obliging);
    let endpoint = server.endpoint().to_owned();
    let client = connect(&server, settings());
    assert!(client.wait_healthy(FOR_EVER));
    let (told, heard) = mpsc::channel();
    client.on_health(Box::new(move |health| {
        let _ = told.send(health);
    }));
    drop(server);
    assert_eq!(heard.recv().unwrap(), Health::Degraded);
    let future = client.get_chunk_size();
    assert!(future.try_take().is_none());
    let _server = Server::typed_at(&endpoint, obliging);
    assert_eq!(future.join().unwrap(), 16);
    assert_eq!(heard.recv().unwrap(), Health::Recovering);
    assert_eq!(heard.recv().unwrap(), Health::Healthy);
    assert_eq!(client.connections(), 2);
}

/// A connection is lost and tried again in the moment in which its socket is closed: with this many clients in nearly
/// every round.
#[test]
fn clients_reconnect_after_each_restart() {
    let mut server = Server::typed(obliging);
    let clients: Vec<_> = (0..32).map(|_| connect(&server, settings())).collect();
    for round in 1..=8 {
        for (number, client) in clients.iter().enumerate() {
            let is_back = client.wait_healthy(Duration::from_secs(60));
            assert!(is_back, "client {number} before restart {round}");
        }
        let address = server.endpoint().to_owned();
        drop(server);
        server = Server::typed_at(&address, obliging);
    }
}

#[test]
fn the_recover_hook_runs_on_a_new_connection_before_the_client_is_healthy() {
    let server = Server::typed(obliging);
    let endpoint = server.endpoint().to_owned();
    let client = connect(&server, settings());
    assert!(client.wait_healthy(FOR_EVER));
    let (told, heard) = mpsc::channel();
    client.on_recover(
        1,
        Box::new(move |client| {
            let size = client.get_chunk_size().join().unwrap();
            told.send((client.health(), size)).unwrap();
            Ok(())
        }),
    );
    drop(server);
    let _server = Server::typed_at(&endpoint, obliging);
    assert_eq!(heard.recv().unwrap(), (Health::Recovering, 16));
    assert!(client.wait_healthy(FOR_EVER));
}

#[test]
fn a_server_that_does_not_know_the_worker_makes_it_register_again() {
    let knows = Arc::new(AtomicBool::new(false));
    let known = Arc::clone(&knows);
    let server = Server::typed(move |request| match request {
        // As after a restart that was faster than a heartbeat: the worker's pings are answered with no.
        Request::Ping { instance: Some(_) } => Some(Response::Bool(known.load(Ordering::Relaxed))),
        Request::Ping { instance: None } => Some(Response::Bool(true)),
        _ => None,
    });
    let quick = Settings {
        heartbeat: Duration::from_millis(20),
        ..settings()
    };
    let client = connect(&server, quick);
    assert!(client.wait_healthy(FOR_EVER));
    let (told, heard) = mpsc::channel();
    let hook = move |_: &Client| {
        knows.store(true, Ordering::Relaxed);
        told.send(()).map_err(|_| None)
    };
    client.on_recover(1, Box::new(hook));
    client.set_instance(Some(InstanceId(7)));
    heard.recv().unwrap();
    assert!(client.wait_healthy(FOR_EVER));
}

/// Answers pings, and the chunk size with `tokens`.
fn with_chunk(
    tokens: i64,
) -> impl FnMut(&Request<'_, Vec<u32>>) -> Option<Response<'static>> + Send + 'static {
    move |request| match request {
        Request::GetChunkSize => Some(Response::Int(tokens)),
        request => obliging(request),
    }
}

#[test]
fn server_with_another_chunk_size_is_not_used_until_it_matches() {
    let terms = ChunkTerms {
        block_tokens: 4,
        chunk_tokens: None,
    };
    let settings = Settings {
        chunk: Some(terms),
        ..settings()
    };
    let server = Server::typed(with_chunk(16));
    let endpoint = server.endpoint().to_owned();
    let client = connect(&server, settings);
    assert!(client.wait_healthy(FOR_EVER));
    assert_eq!(client.chunk_tokens(), Some(16));
    let (hooked, hooks) = mpsc::channel();
    client.on_recover(1, Box::new(move |_| hooked.send(()).map_err(|_| None)));
    let (told, states) = mpsc::channel();
    client.on_health(Box::new(move |health| told.send(health).unwrap()));
    drop(server);
    let server = Server::typed_at(&endpoint, with_chunk(8));
    // Once for the lost connection, once for the chunk size; the hook that registers is not called.
    assert_eq!(states.recv().unwrap(), Health::Degraded);
    assert_eq!(states.recv().unwrap(), Health::Degraded);
    let obstacle = client.obstacle().unwrap();
    assert!(obstacle.contains("chunks of 8 tokens and this engine works with chunks of 16"));
    assert!(hooks.try_recv().is_err());
    drop(server);
    let _server = Server::typed_at(&endpoint, with_chunk(16));
    assert!(client.wait_healthy(FOR_EVER));
    assert_eq!(client.obstacle(), None);
    hooks.recv().unwrap();
}

#[test]
fn lookup_that_claims_more_than_asked_fails_and_ends_its_session() {
    let (told, ended) = mpsc::channel();
    let server = Server::typed(move |request| match request {
        Request::Lookup { .. } => Some(Response::Nothing),
        Request::WaitPrefetchStatus { .. } => Some(Response::Int(4)),
        Request::EndSession { request_id } => {
            told.send((*request_id).to_owned()).unwrap();
            Some(Response::Nothing)
        }
        request => obliging(request),
    });
    let terms = ChunkTerms {
        block_tokens: 16,
        chunk_tokens: Some(16),
    };
    let client = connect(
        &server,
        Settings {
            chunk: Some(terms),
            ..settings()
        },
    );
    let (scope, prompt) = (Scope::new("model"), Prompt::new(&[1; 48]));
    let key = scope.scheduler_key(&prompt, 0..48, "request");
    let error = client.lookup_hits(&key).join().unwrap_err();
    assert!(
        error.to_string().contains("4 chunks, 3 were asked"),
        "{error}"
    );
    assert_eq!(ended.recv().unwrap(), "request");
}

#[test]
fn what_was_taken_back_is_told_again_on_the_same_connection() {
    let server = Server::typed(obliging);
    let client = connect(&server, settings());
    assert!(client.wait_healthy(FOR_EVER));
    let (told, heard) = mpsc::channel();
    client.on_recover(1, Box::new(move |_| told.send(()).map_err(|_| None)));
    client.recover_again();
    heard.recv().unwrap();
    assert!(client.wait_healthy(FOR_EVER));
    assert_eq!(client.connections(), 1);
}

#[test]
fn a_hook_that_is_set_behind_a_connection_it_has_not_told_is_called() {
    let server = Server::typed(obliging);
    let client = connect(&server, settings());
    assert!(client.wait_healthy(FOR_EVER));
    let (told, heard) = mpsc::channel();
    client.on_recover(0, Box::new(move |_| told.send(()).map_err(|_| None)));
    heard.recv().unwrap();
}

#[test]
fn a_hook_that_fails_or_panics_is_tried_again_with_the_next_heartbeat() {
    let server = Server::typed(obliging);
    let quick = Settings {
        heartbeat: Duration::from_millis(5),
        ..settings()
    };
    let client = connect(&server, quick);
    assert!(client.wait_healthy(FOR_EVER));
    let (told, heard) = mpsc::channel();
    client.on_health(Box::new(move |health| {
        let _ = told.send(health);
    }));
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tries);
    client.on_recover(
        1,
        Box::new(move |_| match counted.fetch_add(1, Ordering::Relaxed) {
            0 => Err(None),
            1 => panic!("a bug of the caller's"),
            _ => Ok(()),
        }),
    );
    client.recover_again();
    while heard.recv().unwrap() != Health::Healthy {}
    assert_eq!(tries.load(Ordering::Relaxed), 3);
}

#[test]
fn a_panic_of_the_callers_harms_nobody_else() {
    let server = Server::typed(obliging);
    let client = connect(&server, settings());
    let (told, heard) = mpsc::channel();
    client.on_health(Box::new(|_| panic!("a bug of the caller's")));
    client.on_health(Box::new(move |health| {
        let _ = told.send(health);
    }));
    let ping: Request<'_, EncodedTokens<'_>> = Request::Ping { instance: None };
    client.submit_then(&ping, FOR_EVER, |_| panic!("a bug of the caller's"));
    assert_eq!(client.get_chunk_size().join().unwrap(), 16);
    while heard.recv().unwrap() != Health::Healthy {}
}

#[test]
fn several_threads_wait_for_one_result_and_one_takes_it() {
    let (release, held) = mpsc::channel::<()>();
    let server = Server::typed(move |request| {
        if matches!(request, Request::GetChunkSize) {
            held.recv().unwrap();
        }
        obliging(request)
    });
    let client = connect(&server, settings());
    let future = client.get_chunk_size();
    std::thread::scope(|scope| {
        let waiting = [(); 2].map(|()| scope.spawn(|| future.wait_ready(FOR_EVER)));
        release.send(()).unwrap();
        for thread in waiting {
            thread.join().unwrap();
        }
    });
    assert!(future.is_ready());
    assert_eq!(future.try_take().unwrap().unwrap(), 16);
}

#[test]
fn a_missed_heartbeat_makes_the_server_degraded_and_the_next_good_one_healthy() {
    let pings = AtomicUsize::new(0);
    let server = Server::typed(move |request| match request {
        Request::Ping { .. } if pings.fetch_add(1, Ordering::Relaxed) == 1 => None,
        request => obliging(request),
    });
    let quick = Settings {
        heartbeat: Duration::from_millis(100),
        ..settings()
    };
    let client = connect(&server, quick);
    let (told, heard) = mpsc::channel();
    client.on_health(Box::new(move |health| {
        let _ = told.send(health);
    }));
    while heard.recv().unwrap() != Health::Degraded {}
    while heard.recv().unwrap() != Health::Healthy {}
}

/// Passes connections on to `target`; the first one it swallows from the moment when `swallow` is set: both sides live on.
fn proxy(target: &str, swallow: Arc<AtomicBool>) -> String {
    let target = target.strip_prefix("tcp://").unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for (number, near) in listener.incoming().enumerate() {
            let near = near.unwrap();
            let far = TcpStream::connect(&target).unwrap();
            for (mut from, mut to) in [
                (near.try_clone().unwrap(), far.try_clone().unwrap()),
                (far, near),
            ] {
                let swallow = Arc::clone(&swallow);
                std::thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        let is_swallowed = number == 0 && swallow.load(Ordering::SeqCst);
                        if !is_swallowed && to.write_all(&bytes[..count]).is_err() {
                            return;
                        }
                    }
                    // The end of one side is not told to the other.
                });
            }
        }
    });
    format!("tcp://{address}")
}

#[test]
fn a_connection_that_died_silently_is_replaced() {
    let server = Server::typed(obliging);
    let swallow = Arc::new(AtomicBool::new(false));
    let quick = Settings {
        heartbeat: Duration::from_millis(50),
        ..settings()
    };
    let client = Client::connect_with(&proxy(server.endpoint(), Arc::clone(&swallow)), quick);
    let client = client.unwrap();
    assert!(client.wait_healthy(FOR_EVER));
    let (told, heard) = mpsc::channel();
    client.on_health(Box::new(move |health| {
        let _ = told.send(health);
    }));
    swallow.store(true, Ordering::SeqCst);
    while heard.recv().unwrap() != Health::Degraded {}
    while heard.recv().unwrap() != Health::Healthy {}
    assert!(client.connections() >= 2);
    assert_eq!(client.get_chunk_size().join().unwrap(), 16);
}

#[test]
fn the_end_of_a_session_leaves_when_there_is_a_connection_however_late() {
    let nobody = Server::typed(|_| None).endpoint().to_owned();
    let brief = Settings {
        timeout: Duration::from_millis(20),
        ..settings()
    };
    let client = Client::connect_with(&nobody, brief).unwrap();
    let late = client.end_session("request").join().unwrap_err();
    assert!(matches!(late, ClientError::Timeout { .. }), "{late}");
    let (told, ended) = mpsc::channel();
    let _server = Server::typed_at(&nobody, move |request| match request {
        Request::EndSession { request_id } => {
            told.send((*request_id).to_owned()).unwrap();
            Some(Response::Nothing)
        }
        request => obliging(request),
    });
    assert_eq!(ended.recv().unwrap(), "request");
}

#[test]
fn a_lookup_is_asked_for_until_its_result_is_known() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let server = Server::typed(move |request| match request {
        Request::Lookup { .. } => Some(Response::Nothing),
        Request::WaitPrefetchStatus { .. } => match count.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => Some(Response::Nothing),
            _ => Some(Response::Int(3)),
        },
        request => obliging(request),
    });
    let client = connect(&server, settings());
    let (scope, prompt) = (Scope::new("model"), Prompt::new(&[1; 48]));
    let key = scope.scheduler_key(&prompt, 0..48, "request");
    assert_eq!(client.lookup_hits(&key).join().unwrap(), 3);
    assert_eq!(asked.load(Ordering::Relaxed), 3);
}

#[test]
fn a_lookup_that_is_given_up_has_its_session_ended() {
    let (told, ended) = mpsc::channel();
    let server = Server::typed(move |request| match request {
        Request::EndSession { request_id } => {
            told.send((*request_id).to_owned()).unwrap();
            Some(Response::Nothing)
        }
        request => obliging(request),
    });
    let brief = Settings {
        timeout: Duration::from_millis(50),
        ..settings()
    };
    let client = connect(&server, brief);
    let (scope, prompt) = (Scope::new("model"), Prompt::new(&[1; 48]));
    let key = scope.scheduler_key(&prompt, 0..48, "request");
    let error = client.lookup_hits(&key).join().unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    assert_eq!(ended.recv().unwrap(), "request");
}

#[test]
fn closing_fails_what_is_under_way_and_all_that_comes_later() {
    let server = Server::typed(|request| match request {
        Request::Noop => None,
        request => obliging(request),
    });
    let client = connect(&server, settings());
    assert!(client.wait_healthy(FOR_EVER));
    let future = client.noop();
    client.close();
    assert!(matches!(future.join(), Err(ClientError::Closed { .. })));
    assert!(matches!(
        client.noop().join(),
        Err(ClientError::Closed { .. })
    ));
}

#[test]
fn a_cancelled_result_is_dropped_and_later_ones_still_come() {
    let server = Server::typed(obliging);
    let client = connect(&server, settings());
    client.get_chunk_size().cancel();
    assert_eq!(client.get_chunk_size().join().unwrap(), 16);
}

#[test]
fn garbage_from_the_server_is_skipped() {
    let server = Server::raw_at(crate::support::ANYWHERE, |request| {
        let (uid, op) = (request[0].clone(), request[1].clone());
        vec![
            vec![vec![]],
            vec![b"not msgpack \xc1".to_vec(), op.clone()],
            vec![vec![0xcd, 0xff, 0xff], op.clone(), vec![0x10]],
            // Of another operation, which is an error of this request alone.
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
fn an_address_that_is_none_is_an_error() {
    let error = Client::connect("bogus://x").unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error}");
}
