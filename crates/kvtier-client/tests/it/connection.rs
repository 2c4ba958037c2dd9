//! The connection against a server that follows a script.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::support::proxy::{Direction, Proxy};
use crate::support::{Server, reply};
use kvtier_client::proto::key::{CacheKey, TokenWriter};
use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::request::{AllocationRecord, JobRef, Request};
use kvtier_client::proto::response::Response;
use kvtier_client::{ClientError, Connection, InstanceId, Options, Prompt, Scope};

/// Long enough for any machine: the tests that need a timeout choose a short one.
fn connect(server: &Server) -> Connection {
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    Connection::connect_with(server.endpoint(), options).unwrap()
}

fn with_short_timeout(server: &Server) -> Connection {
    let options = Options {
        timeout: Duration::from_millis(20),
        ..Options::default()
    };
    Connection::connect_with(server.endpoint(), options).unwrap()
}

type Plain<'a> = Request<'a, Vec<u32>>;

#[test]
fn calls_without_worker_are_typed() {
    let mut queries = 0;
    let server = Server::typed(move |request| {
        Some(match request {
            Request::GetChunkSize => Response::Int(256),
            Request::GetExperimental => Response::Texts(vec!["kv_event_stream".into()]),
            Request::Noop => Response::Text("OK".into()),
            Request::Ping { instance } => Response::Bool(*instance != Some(InstanceId(7))),
            Request::Clear { force } => {
                assert!(*force);
                Response::Nothing
            }
            Request::ReportBlockAllocation(report) => {
                assert_eq!(report.model_name, Some("m"));
                assert_eq!(report.records[0].new_block_ids, [1, 2]);
                Response::Nothing
            }
            Request::Lookup { key, tp_size } => {
                assert_eq!((key.tokens.len(), key.worker_id, *tp_size), (600, None, 2));
                assert_eq!((key.start, key.end, key.cache_salt), (0, 512, "tenant"));
                Response::Nothing
            }
            Request::QueryPrefetchStatus { job } => {
                assert_eq!(*job, JobRef::Request("r"));
                queries += 1;
                match queries {
                    1 | 2 => Response::Nothing,
                    _ => Response::Int(2),
                }
            }
            Request::WaitPrefetchStatus { timeout, .. } => {
                assert!((timeout.as_f64() - 0.5).abs() < 1e-9);
                Response::Nothing
            }
            Request::FreeLookupLocks { .. }
            | Request::EndSession { .. }
            | Request::UnregisterKvCache { .. }
            | Request::UnregisterEngineDriven { .. } => Response::Nothing,
            other => panic!("{:?} was not expected", other.operation()),
        })
    });
    let mut connection = connect(&server);
    assert_eq!(connection.get_chunk_size().unwrap(), 256);
    assert_eq!(connection.get_experimental().unwrap(), ["kv_event_stream"]);
    assert_eq!(connection.noop().unwrap(), "OK");
    assert!(connection.ping(None).unwrap());
    assert!(!connection.ping(Some(InstanceId(7))).unwrap());
    connection.clear(true).unwrap();
    let record = AllocationRecord {
        request_id: "r",
        new_block_ids: vec![1, 2],
        new_token_ids: vec![],
    };
    connection
        .report_block_allocation(InstanceId(1), "m", vec![record])
        .unwrap();

    let scope = Scope {
        world_size: 2,
        ..Scope::new("m").with_salt("tenant")
    };
    let tokens: Vec<u32> = (0..600).collect();
    let prompt = Prompt::new(&tokens);
    let range = prompt.whole_chunks(256);
    assert_eq!(range, 0..512);
    let key = scope.scheduler_key(&prompt, range, "r");
    // Twice unknown, then known.
    assert_eq!(connection.lookup_hits(&key).unwrap(), 2);
    let waited = connection.wait_prefetch_status("r", Duration::from_millis(500));
    assert_eq!(waited.unwrap(), None);
    connection.free_lookup_locks(&key).unwrap();
    connection.end_session("r").unwrap();
    connection.unregister_kv_cache(InstanceId(1)).unwrap();
    connection.unregister_engine_driven(InstanceId(1)).unwrap();
}

#[test]
fn prompt_is_encoded_as_its_tokens() {
    let tokens = [0, 127, 128, 255, 256, 65_535, 65_536, u32::MAX];
    let prompt = Prompt::new(&tokens);
    let mut plain = Vec::new();
    tokens.as_slice().write(&mut plain);
    let mut encoded = Vec::new();
    prompt.encoded().write(&mut encoded);
    assert_eq!(plain, encoded);
    assert_eq!(prompt.len(), tokens.len());

    // A key over it is a key over its tokens.
    let scope = Scope::new("m");
    let key = scope.worker_key(3, &prompt, 0..8, "r");
    let mut payload = Vec::new();
    key.write(kvtier_client::proto::key::KeyForm::Full, &mut payload);
    let decoded = CacheKey::decode(&payload, &mut kvtier_client::proto::key::VecTokens).unwrap();
    assert_eq!(decoded.tokens, tokens);
    assert_eq!(
        (decoded.worker_id, decoded.num_kv_readers),
        (Some(3), Some(1))
    );
}

#[test]
fn silent_server_is_timeout_that_names_operation() {
    let server = Server::typed(|_| None);
    let mut connection = with_short_timeout(&server);
    let error = connection.get_chunk_size().unwrap_err();
    assert!(
        matches!(
            error,
            ClientError::Timeout {
                operation: Operation::GetChunkSize,
                ..
            }
        ),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains("get_chunk_size") && text.contains(server.endpoint()),
        "{text}"
    );
}

#[test]
fn missing_server_is_timeout() {
    let endpoint = Server::typed(|_| None).endpoint().to_owned();
    let options = Options {
        timeout: Duration::from_millis(20),
        linger: Duration::ZERO,
        ..Options::default()
    };
    let mut connection = Connection::connect_with(&endpoint, options).unwrap();
    let error = connection.ping(None).unwrap_err();
    let Some(address) = endpoint.strip_prefix("tcp://") else {
        panic!("{endpoint}");
    };
    let text = error.to_string();
    assert!(
        text.contains(&format!("no connection: {address}: ")),
        "{text}"
    );
    assert!(
        matches!(
            error,
            ClientError::Timeout {
                operation: Operation::Ping,
                ..
            }
        ),
        "{text}"
    );
}

#[test]
fn invalid_address_is_refused_at_once() {
    for bad in ["tcp://", "gopher://x:1", "tcp://127.0.0.1:notaport"] {
        let error = Connection::connect(bad).unwrap_err();
        assert!(matches!(error, ClientError::Connect { .. }), "{error}");
        assert!(error.to_string().contains(bad), "{error}");
    }
}

#[test]
fn error_text_instead_of_operation_is_reported() {
    let server = Server::raw_at(crate::support::ANYWHERE, |frames| {
        let mut text = Vec::new();
        kvtier_client::proto::wire::write_str(&mut text, "error: no such model");
        vec![vec![frames[0].clone(), text]]
    });
    let error = connect(&server).noop().unwrap_err();
    assert_eq!(
        error.to_string(),
        "noop: the server says: error: no such model"
    );
}

#[test]
fn reply_may_name_operation_in_any_encoding() {
    for op in [vec![0x18], vec![0xcd, 0, 0x18], b"\xa4noop".to_vec()] {
        let server = Server::raw_at(crate::support::ANYWHERE, move |frames| {
            vec![vec![frames[0].clone(), op.clone(), b"\xa2OK".to_vec()]]
        });
        assert_eq!(connect(&server).noop().unwrap(), "OK");
    }
    // The number of another operation is no answer to this request.
    let server = Server::raw_at(crate::support::ANYWHERE, |frames| {
        vec![vec![frames[0].clone(), vec![0x15], b"\xa2OK".to_vec()]]
    });
    let error = connect(&server).noop().unwrap_err();
    assert!(matches!(error, ClientError::Unexpected { .. }), "{error}");
}

#[test]
fn reply_of_other_type_fails_only_its_request() {
    let server = Server::typed(|request| match request {
        Request::GetChunkSize => Some(Response::Int(-1)),
        Request::Noop => Some(Response::Nothing),
        _ => Some(Response::Bool(true)),
    });
    let mut connection = connect(&server);
    let error = connection.get_chunk_size().unwrap_err();
    assert!(error.to_string().contains("-1"), "{error}");
    let error = connection.noop().unwrap_err();
    assert!(error.to_string().starts_with("noop: "), "{error}");
    assert!(connection.ping(None).unwrap());
}

#[test]
fn replies_are_matched_by_number_in_any_order() {
    // Holds requests back until there are three, then answers the last one first.
    let mut held = Vec::new();
    let server = Server::raw_at(crate::support::ANYWHERE, move |frames| {
        held.push(frames);
        if held.len() < 3 {
            return Vec::new();
        }
        held.drain(..)
            .rev()
            .map(|request| {
                let number = request[0].clone();
                reply(&request, Some(number))
            })
            .collect()
    });
    let mut connection = connect(&server);
    let tickets: Vec<_> = (0..3)
        .map(|_| connection.send(&Plain::GetChunkSize).unwrap())
        .collect();
    for (number, ticket) in tickets.iter().enumerate() {
        let reply = connection.receive(*ticket).unwrap();
        assert_eq!(reply.response().unwrap(), Response::Int(number as i64));
        assert_eq!(reply.ticket(), *ticket);
    }
    // A ticket can be used once.
    assert!(matches!(
        connection.receive(tickets[0]),
        Err(ClientError::UnknownTicket { uid: 0 })
    ));
}

#[test]
fn forgotten_and_late_replies_are_dropped() {
    // Answers nothing but the third request; then everything, twice.
    let mut held = Vec::new();
    let server = Server::raw_at(crate::support::ANYWHERE, move |frames| {
        held.push(frames);
        match held.len() {
            1 | 2 => Vec::new(),
            _ => held
                .iter()
                .chain(&held)
                .map(|request| reply(request, Some(vec![0xc3])))
                .collect(),
        }
    });
    let mut connection = connect(&server);
    let forgotten = connection.send(&Plain::Ping { instance: None }).unwrap();
    connection.forget(forgotten);
    connection.set_timeout(Duration::from_millis(20));
    assert!(matches!(
        connection.ping(None),
        Err(ClientError::Timeout { .. })
    ));
    connection.set_timeout(Duration::from_secs(60));
    assert!(connection.ping(None).unwrap());
    assert!(connection.ping(None).unwrap());
    assert!(format!("{connection:?}").contains("in_flight: 0"));
}

#[test]
fn garbage_from_server_is_skipped() {
    let server = Server::raw_at(crate::support::ANYWHERE, |frames| {
        vec![
            vec![vec![]],
            vec![vec![0xc1], vec![0xc1]],
            vec![b"\xa3uid".to_vec(), frames[1].clone()],
            reply(&frames, Some(b"\xa2OK".to_vec())),
        ]
    });
    assert_eq!(connect(&server).noop().unwrap(), "OK");
}

#[test]
fn lost_connection_fails_sent_requests_and_next_call_connects_again() {
    let mut answers = [Some(Response::Text("OK".into())), None].into_iter();
    let silent = Server::typed(move |_| answers.next().flatten());
    let endpoint = silent.endpoint().to_owned();
    let mut connection = connect(&silent);
    assert_eq!(connection.noop().unwrap(), "OK");
    let sent = connection.send(&Plain::Noop).unwrap();
    drop(silent);
    let error = connection.receive(sent).unwrap_err();
    assert!(matches!(error, ClientError::Disconnected { .. }), "{error}");
    let _server = Server::typed_at(&endpoint, |_| Some(Response::Text("OK".into())));
    assert_eq!(connection.noop().unwrap(), "OK");
}

#[test]
fn reset_at_any_byte_fails_at_most_the_request_that_was_sent() {
    let server = Server::typed(|_| Some(Response::Text("OK".into())));
    let proxy = Proxy::new(server.endpoint());
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    let connect = || Connection::connect_with(&proxy.endpoint, options).unwrap();
    assert_eq!(connect().noop().unwrap(), "OK");
    let session = proxy
        .forwarded
        .each_ref()
        .map(|bytes| bytes.load(Ordering::Relaxed));
    // A greeting has 64 bytes, and READY and the request follow.
    assert!(session.iter().all(|bytes| *bytes > 64), "{session:?}");
    for (direction, bytes) in [Direction::ToServer, Direction::ToClient]
        .into_iter()
        .zip(session)
    {
        let mut failed = 0;
        // Each byte behind the greeting, whose places are alike.
        for reached in (0..64).step_by(8).chain(64..=bytes) {
            let resets = proxy.resets.load(Ordering::Relaxed);
            proxy.reset_next(direction, reached);
            let mut connection = connect();
            match connection.noop() {
                Ok(text) => assert_eq!(text, "OK"),
                Err(ClientError::Disconnected { .. }) => failed += 1,
                Err(error) => panic!("{direction:?}, {reached} bytes: {error}"),
            }
            // A reply may arrive before the reset behind it.
            proxy.wait_for_resets(resets + 1);
            let second = connection.noop();
            assert_eq!(second.unwrap(), "OK", "{direction:?}, {reached} bytes");
            assert_eq!(proxy.resets.load(Ordering::Relaxed), resets + 1);
        }
        assert!(
            0 < failed && failed < bytes,
            "{direction:?}: {failed} of {bytes}"
        );
    }
}

#[test]
fn connection_closed_while_idle_is_made_again_by_next_call() {
    let answer = |_: &Plain<'_>| Some(Response::Text("OK".into()));
    let first = Server::typed(answer);
    let endpoint = first.endpoint().to_owned();
    let mut connection = connect(&first);
    assert_eq!(connection.noop().unwrap(), "OK");
    drop(first);
    let _second = Server::typed_at(&endpoint, answer);
    assert_eq!(connection.noop().unwrap(), "OK");
}

#[test]
fn messages_larger_than_the_sockets_buffers_arrive_whole() {
    let large: Vec<u8> = (0..20_000_000_u32).map(|at| at as u8).collect();
    let payload = large.clone();
    let server = Server::raw_at(crate::support::ANYWHERE, move |frames| {
        assert!(frames.iter().any(|frame| frame.ends_with(&payload)));
        let mut answer = vec![0xc6];
        answer.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        answer.extend_from_slice(&payload);
        vec![reply(&frames, Some(answer))]
    });
    let mut connection = connect(&server);
    let (scope, prompt) = (Scope::new("m"), Prompt::new(&[1]));
    for _ in 0..2 {
        let request = Request::CommitStore {
            key: scope.scheduler_key(&prompt, 0..1, "r"),
            instance: InstanceId(1),
            data: &large,
        };
        let reply = connection.call(&request).unwrap();
        assert!(
            reply
                .payload()
                .is_some_and(|answer| answer.ends_with(&large))
        );
    }
}

#[test]
fn server_is_reached_by_path_and_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = format!("ipc://{}/s", directory.path().display());
    let answer = |_: &Plain<'_>| Some(Response::Text("OK".into()));
    let by_path = Server::typed_at(&path, answer);
    assert_eq!(connect(&by_path).noop().unwrap(), "OK");
    let by_name = Server::typed(answer);
    let named = by_name.endpoint().replace("127.0.0.1", "localhost");
    assert_eq!(Connection::connect(&named).unwrap().noop().unwrap(), "OK");
}

#[test]
fn request_that_is_sent_first_arrives_without_a_receive() {
    let (sender, arrived) = std::sync::mpsc::channel();
    let server = Server::typed(move |_| {
        sender.send(()).unwrap();
        None
    });
    let mut connection = connect(&server);
    let _ticket = connection.send(&Plain::Noop).unwrap();
    arrived.recv().unwrap();
}
