//! Futures, deadlines, health and recovery of [`Client`].

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::support::{Server, reply};
use kvtier_client::proto::chunk::CHUNK_TOKENS_FEATURE;
use kvtier_client::proto::key::EncodedTokens;
use kvtier_client::proto::request::Request;
use kvtier_client::proto::response::Response;
use kvtier_client::{ChunkTerms, Client, ClientError, Health, InstanceId, Prompt, Scope, Settings};

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

fn connect(server: &Server, settings: Settings) -> Client {
    Client::connect_with(server.endpoint(), settings).unwrap()
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

#[test]
fn result_is_polled_awaited_and_taken_once() {
    let (release, held) = mpsc::channel::<()>();
    let server = Server::typed(move |request| {
        if matches!(request, Request::GetChunkSize) {
            held.recv().unwrap();
        }
        default_answers(request)
    });
    let client = connect(&server, settings());
    assert!(client.wait_healthy(MAX_TEST));
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
fn lost_connection_fails_requests_in_flight_at_once() {
    let (sender, asked) = mpsc::channel();
    let server = Server::typed(move |request| {
        if matches!(request, Request::Noop) {
            sender.send(()).unwrap();
        }
        default_answers(request)
    });
    let client = connect(&server, settings());
    let future = client.noop();
    asked.recv().unwrap();
    drop(server);
    let error = future.join().unwrap_err();
    assert!(matches!(error, ClientError::Disconnected { .. }), "{error}");
}

#[test]
fn request_without_server_is_answered_by_next_one() {
    let server = Server::typed(default_answers);
    let endpoint = server.endpoint().to_owned();
    let client = connect(&server, settings());
    assert!(client.wait_healthy(MAX_TEST));
    let (sender, receiver) = mpsc::channel();
    client.on_health(Box::new(move |health| {
        let _ = sender.send(health);
    }));
    drop(server);
    assert_eq!(receiver.recv().unwrap(), Health::Degraded);
    let future = client.get_chunk_size();
    assert!(future.try_take().is_none());
    let _server = Server::typed_at(&endpoint, default_answers);
    assert_eq!(future.join().unwrap(), 16);
    assert_eq!(receiver.recv().unwrap(), Health::Recovering);
    assert_eq!(receiver.recv().unwrap(), Health::Healthy);
    assert_eq!(client.connections(), 2);
}

/// A connection is lost and tried again in the moment in which its socket is closed: with this many clients in nearly
/// every round.
#[test]
fn clients_reconnect_after_each_restart() {
    let mut server = Server::typed(default_answers);
    let clients: Vec<_> = (0..32).map(|_| connect(&server, settings())).collect();
    for round in 1..=8 {
        for (number, client) in clients.iter().enumerate() {
            let is_back = client.wait_healthy(Duration::from_secs(60));
            assert!(is_back, "client {number} before restart {round}");
        }
        let address = server.endpoint().to_owned();
        drop(server);
        server = Server::typed_at(&address, default_answers);
    }
}

#[test]
fn recover_hook_runs_before_new_connection_is_healthy() {
    let server = Server::typed(default_answers);
    let endpoint = server.endpoint().to_owned();
    let client = connect(&server, settings());
    assert!(client.wait_healthy(MAX_TEST));
    let (sender, receiver) = mpsc::channel();
    client.on_recover(
        1,
        Box::new(move |client| {
            let size = client.get_chunk_size().join().unwrap();
            sender.send((client.health(), size)).unwrap();
            Ok(())
        }),
    );
    drop(server);
    let _server = Server::typed_at(&endpoint, default_answers);
    assert_eq!(receiver.recv().unwrap(), (Health::Recovering, 16));
    assert!(client.wait_healthy(MAX_TEST));
}

#[test]
fn unknown_worker_registers_again() {
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
    assert!(client.wait_healthy(MAX_TEST));
    let (sender, receiver) = mpsc::channel();
    let hook = move |_: &Client| {
        knows.store(true, Ordering::Relaxed);
        sender.send(()).map_err(|_| None)
    };
    client.on_recover(1, Box::new(hook));
    client.set_instance(Some(InstanceId(7)));
    receiver.recv().unwrap();
    assert!(client.wait_healthy(MAX_TEST));
}

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
    assert!(client.wait_healthy(MAX_TEST));
    assert_eq!(client.chunk_tokens(), Some(16));
    let (hooked, hooks) = mpsc::channel();
    client.on_recover(1, Box::new(move |_| hooked.send(()).map_err(|_| None)));
    let (sender, states) = mpsc::channel();
    client.on_health(Box::new(move |health| sender.send(health).unwrap()));
    drop(server);
    let server = Server::typed_at(&endpoint, with_chunk(8));
    // Once for the lost connection, once for the chunk size; the recover hook is not called.
    assert_eq!(states.recv().unwrap(), Health::Degraded);
    assert_eq!(states.recv().unwrap(), Health::Degraded);
    let obstacle = client.obstacle().unwrap();
    assert!(obstacle.contains("chunks of 8 tokens and this engine works with chunks of 16"));
    assert!(hooks.try_recv().is_err());
    drop(server);
    let _server = Server::typed_at(&endpoint, with_chunk(16));
    assert!(client.wait_healthy(MAX_TEST));
    assert_eq!(client.obstacle(), None);
    hooks.recv().unwrap();
}

/// The same for a server that reads a named size.
fn with_named_chunks(
    tokens: i64,
) -> impl FnMut(&Request<'_, Vec<u32>>) -> Option<Response<'static>> + Send + 'static {
    let mut default = with_chunk(tokens);
    move |request| match request {
        Request::GetExperimental => Some(Response::Texts(vec![CHUNK_TOKENS_FEATURE.into()])),
        request => default(request),
    }
}

#[test]
fn chunk_size_is_named_while_server_reads_it() {
    let settings = Settings {
        chunk: Some(ChunkTerms {
            block_tokens: 4,
            chunk_tokens: None,
        }),
        ..settings()
    };
    let server = Server::typed(with_named_chunks(16));
    let endpoint = server.endpoint().to_owned();
    let client = connect(&server, settings);
    assert!(client.wait_healthy(MAX_TEST));
    assert_eq!(client.named_chunk_tokens(), Some(16));
    drop(server);
    // The default of the next one does not matter.
    let server = Server::typed_at(&endpoint, with_named_chunks(24));
    while !(client.connections() == 2 && client.wait_healthy(MAX_TEST)) {}
    assert_eq!(client.named_chunk_tokens(), Some(16));
    let (sender, states) = mpsc::channel();
    client.on_health(Box::new(move |health| sender.send(health).unwrap()));
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
    let settings = Settings {
        chunk: Some(ChunkTerms {
            block_tokens: 4,
            chunk_tokens: None,
        }),
        ..settings()
    };
    let server = Server::typed(|request| match request {
        Request::GetExperimental => Some(Response::Text("error: no such operation".into())),
        request => default_answers(request),
    });
    let client = connect(&server, settings);
    assert!(client.wait_healthy(MAX_TEST));
    assert_eq!(client.chunk_tokens(), Some(16));
    assert_eq!(client.named_chunk_tokens(), None);
}

#[test]
fn unanswered_question_for_terms_is_an_obstacle() {
    for silent in ["get_chunk_size", "get_experimental"] {
        let settings = Settings {
            timeout: Duration::from_millis(200),
            chunk: Some(ChunkTerms {
                block_tokens: 4,
                chunk_tokens: None,
            }),
            ..settings()
        };
        // Of another generation: it does not know the operation, and drops it.
        let server = Server::typed(move |request| match request {
            request if request.operation().name() == silent => None,
            request => default_answers(request),
        });
        let client = connect(&server, settings);
        let (sender, states) = mpsc::channel();
        client.on_health(Box::new(move |health| sender.send(health).unwrap()));
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

#[test]
fn lookup_with_too_many_hits_fails_and_ends_session() {
    let (sender, ended) = mpsc::channel();
    let server = Server::typed(move |request| match request {
        Request::Lookup { .. } => Some(Response::Nothing),
        Request::WaitPrefetchStatus { .. } => Some(Response::Int(4)),
        Request::EndSession { request_id } => {
            sender.send((*request_id).to_owned()).unwrap();
            Some(Response::Nothing)
        }
        request => default_answers(request),
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
fn lookup_counts_chunks_of_the_size_that_its_key_names() {
    let server = Server::typed(|request| match request {
        Request::GetChunkSize => Some(Response::Int(48)),
        Request::Lookup { .. } => Some(Response::Nothing),
        Request::WaitPrefetchStatus { .. } => Some(Response::Int(3)),
        request => default_answers(request),
    });
    let terms = ChunkTerms {
        block_tokens: 16,
        chunk_tokens: None,
    };
    let client = connect(
        &server,
        Settings {
            chunk: Some(terms),
            ..settings()
        },
    );
    assert!(client.wait_healthy(MAX_TEST));
    let (mut scope, prompt) = (Scope::new("model"), Prompt::new(&[1; 48]));
    let key = scope.scheduler_key(&prompt, 0..48, "default");
    let error = client.lookup_hits(&key).join().unwrap_err();
    assert!(error.to_string().contains("1 were asked"), "{error}");
    scope.chunk_tokens = Some(16);
    let key = scope.scheduler_key(&prompt, 0..48, "named");
    assert_eq!(client.lookup_hits(&key).join().unwrap(), 3);
}

#[test]
fn withdrawn_registration_is_renewed_on_same_connection() {
    let server = Server::typed(default_answers);
    let client = connect(&server, settings());
    assert!(client.wait_healthy(MAX_TEST));
    let (sender, receiver) = mpsc::channel();
    client.on_recover(1, Box::new(move |_| sender.send(()).map_err(|_| None)));
    client.recover_again();
    receiver.recv().unwrap();
    assert!(client.wait_healthy(MAX_TEST));
    assert_eq!(client.connections(), 1);
}

#[test]
fn recover_hook_runs_for_connection_it_missed() {
    let server = Server::typed(default_answers);
    let client = connect(&server, settings());
    assert!(client.wait_healthy(MAX_TEST));
    let (sender, receiver) = mpsc::channel();
    client.on_recover(0, Box::new(move |_| sender.send(()).map_err(|_| None)));
    receiver.recv().unwrap();
}

#[test]
fn failed_recover_hook_is_retried_with_next_heartbeat() {
    let server = Server::typed(default_answers);
    let quick = Settings {
        heartbeat: Duration::from_millis(5),
        ..settings()
    };
    let client = connect(&server, quick);
    assert!(client.wait_healthy(MAX_TEST));
    let (sender, receiver) = mpsc::channel();
    client.on_health(Box::new(move |health| {
        let _ = sender.send(health);
    }));
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tries);
    client.on_recover(
        1,
        Box::new(move |_| match counted.fetch_add(1, Ordering::Relaxed) {
            0 => Err(None),
            1 => panic!("a bug of the caller"),
            _ => Ok(()),
        }),
    );
    client.recover_again();
    while receiver.recv().unwrap() != Health::Healthy {}
    assert_eq!(tries.load(Ordering::Relaxed), 3);
}

#[test]
fn panic_in_callback_affects_no_other_request() {
    let server = Server::typed(default_answers);
    let client = connect(&server, settings());
    let (sender, receiver) = mpsc::channel();
    client.on_health(Box::new(|_| panic!("a bug of the caller")));
    client.on_health(Box::new(move |health| {
        let _ = sender.send(health);
    }));
    let ping: Request<'_, EncodedTokens<'_>> = Request::Ping { instance: None };
    client.submit_then(&ping, MAX_TEST, |_| panic!("a bug of the caller"));
    assert_eq!(client.get_chunk_size().join().unwrap(), 16);
    while receiver.recv().unwrap() != Health::Healthy {}
}

#[test]
fn several_threads_wait_and_one_takes_result() {
    let (release, held) = mpsc::channel::<()>();
    let server = Server::typed(move |request| {
        if matches!(request, Request::GetChunkSize) {
            held.recv().unwrap();
        }
        default_answers(request)
    });
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
fn missed_heartbeat_degrades_and_next_one_heals() {
    let pings = AtomicUsize::new(0);
    let server = Server::typed(move |request| match request {
        Request::Ping { .. } if pings.fetch_add(1, Ordering::Relaxed) == 1 => None,
        request => default_answers(request),
    });
    let quick = Settings {
        heartbeat: Duration::from_millis(100),
        ..settings()
    };
    let client = connect(&server, quick);
    let (sender, receiver) = mpsc::channel();
    client.on_health(Box::new(move |health| {
        let _ = sender.send(health);
    }));
    while receiver.recv().unwrap() != Health::Degraded {}
    while receiver.recv().unwrap() != Health::Healthy {}
}

/// Forwards connections to `target`. Once `swallow` is set, it drops the bytes of the first one, which stays open.
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
                    // The end of one side is not forwarded to the other.
                });
            }
        }
    });
    format!("tcp://{address}")
}

#[test]
fn silently_dead_connection_is_replaced() {
    let server = Server::typed(default_answers);
    let swallow = Arc::new(AtomicBool::new(false));
    let quick = Settings {
        heartbeat: Duration::from_millis(50),
        ..settings()
    };
    let client = Client::connect_with(&proxy(server.endpoint(), Arc::clone(&swallow)), quick);
    let client = client.unwrap();
    assert!(client.wait_healthy(MAX_TEST));
    let (sender, receiver) = mpsc::channel();
    client.on_health(Box::new(move |health| {
        let _ = sender.send(health);
    }));
    swallow.store(true, Ordering::SeqCst);
    while receiver.recv().unwrap() != Health::Degraded {}
    while receiver.recv().unwrap() != Health::Healthy {}
    assert!(client.connections() >= 2);
    assert_eq!(client.get_chunk_size().join().unwrap(), 16);
}

#[test]
fn session_end_is_sent_however_late_server_starts() {
    let no_server = Server::typed(|_| None).endpoint().to_owned();
    let brief = Settings {
        timeout: Duration::from_millis(20),
        ..settings()
    };
    let client = Client::connect_with(&no_server, brief).unwrap();
    let late = client.end_session("request").join().unwrap_err();
    assert!(matches!(late, ClientError::Timeout { .. }), "{late}");
    let (sender, ended) = mpsc::channel();
    let _server = Server::typed_at(&no_server, move |request| match request {
        Request::EndSession { request_id } => {
            sender.send((*request_id).to_owned()).unwrap();
            Some(Response::Nothing)
        }
        request => default_answers(request),
    });
    assert_eq!(ended.recv().unwrap(), "request");
}

#[test]
fn lookup_is_polled_until_result_is_known() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let server = Server::typed(move |request| match request {
        Request::Lookup { .. } => Some(Response::Nothing),
        Request::WaitPrefetchStatus { .. } => match count.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => Some(Response::Nothing),
            _ => Some(Response::Int(3)),
        },
        request => default_answers(request),
    });
    let client = connect(&server, settings());
    let (scope, prompt) = (Scope::new("model"), Prompt::new(&[1; 48]));
    let key = scope.scheduler_key(&prompt, 0..48, "request");
    assert_eq!(client.lookup_hits(&key).join().unwrap(), 3);
    assert_eq!(asked.load(Ordering::Relaxed), 3);
}

#[test]
fn timed_out_lookup_ends_its_session() {
    let (sender, ended) = mpsc::channel();
    let server = Server::typed(move |request| match request {
        Request::EndSession { request_id } => {
            sender.send((*request_id).to_owned()).unwrap();
            Some(Response::Nothing)
        }
        request => default_answers(request),
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
fn closing_fails_current_and_later_requests() {
    let server = Server::typed(|request| match request {
        Request::Noop => None,
        request => default_answers(request),
    });
    let client = connect(&server, settings());
    assert!(client.wait_healthy(MAX_TEST));
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
