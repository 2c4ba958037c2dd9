//! Health of a client, and how it recovers from lost connections and registrations.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use kvtier_client::proto::request::Request;
use kvtier_client::proto::response::Response;
use kvtier_client::{Client, ClientError, Health, InstanceId, Settings};

use super::{MAX_TEST, connect, connect_healthy, default_answers, recoveries, settings, states};
use crate::support::Server;

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
    let client = connect_healthy(&server, settings());
    let states = states(&client);
    drop(server);
    assert_eq!(states.recv().unwrap(), Health::Degraded);
    let future = client.get_chunk_size();
    assert!(future.try_take().is_none());
    let _server = Server::typed_at(&endpoint, default_answers);
    assert_eq!(future.join().unwrap(), 16);
    assert_eq!(states.recv().unwrap(), Health::Recovering);
    assert_eq!(states.recv().unwrap(), Health::Healthy);
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
    let client = connect_healthy(&server, settings());
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
    let client = connect_healthy(&server, quick);
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

#[test]
fn removed_registration_is_renewed_on_same_connection() {
    let server = Server::typed(default_answers);
    let client = connect_healthy(&server, settings());
    let recoveries = recoveries(&client, 1);
    client.recover_again();
    recoveries.recv().unwrap();
    assert!(client.wait_healthy(MAX_TEST));
    assert_eq!(client.connections(), 1);
}

#[test]
fn recover_hook_runs_for_connection_it_missed() {
    let server = Server::typed(default_answers);
    let client = connect_healthy(&server, settings());
    let recoveries = recoveries(&client, 0);
    recoveries.recv().unwrap();
}

#[test]
fn failed_recover_hook_is_retried_with_next_heartbeat() {
    let server = Server::typed(default_answers);
    let quick = Settings {
        heartbeat: Duration::from_millis(5),
        ..settings()
    };
    let client = connect_healthy(&server, quick);
    let states = states(&client);
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
    while states.recv().unwrap() != Health::Healthy {}
    assert_eq!(tries.load(Ordering::Relaxed), 3);
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
    let states = states(&client);
    while states.recv().unwrap() != Health::Degraded {}
    while states.recv().unwrap() != Health::Healthy {}
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
    let states = states(&client);
    swallow.store(true, Ordering::SeqCst);
    while states.recv().unwrap() != Health::Degraded {}
    while states.recv().unwrap() != Health::Healthy {}
    assert!(client.connections() >= 2);
    assert_eq!(client.get_chunk_size().join().unwrap(), 16);
}
