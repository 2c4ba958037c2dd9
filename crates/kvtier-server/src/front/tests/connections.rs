//! Connections: how many there are, what they may hold, and what time does to them.

mod large;

use kvtier_common::sync::budget::{Budget, Charge};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvtier_proto::generation::Release;
use kvtier_proto::zmtp::write_frame_header;

use super::super::connection::{Closed, Connection, SCRATCH_BYTES, TURN_BYTES};
use super::super::connections::TURN_INTERVAL;
use super::super::{outbox, serve};
use super::{Arc, ByHand};
use kvtier_engine::{Caller, Reply};

// proves: docs/clients.md#too-many-connections
// proves: docs/compare.md#hostile-peers
#[test]
fn full_port_closes_the_oldest_connection_without_a_request() {
    let mut server = ByHand::bounded(3, 1 << 20);
    let mut silent: Vec<_> = (0..2).map(|_| server.connect()).collect();
    for stream in &mut silent {
        assert_eq!(server.read(stream)[0], 0xff);
    }
    let mut third = server.connect();
    assert_eq!(server.read(&mut third)[0], 0xff);
    assert_eq!(server.read(&mut silent[0]), b"", "the oldest one has ended");
    assert_eq!(server.metrics().request_connections.get(), 3);
    // The client has sent a request before any of them, and stays.
    server.send(&[&[1], &[24]]);
    assert_eq!(server.answers().len(), 1);
}

/// Ends a session, as a client does that uses the cache.
fn end_session(server: &mut ByHand) {
    server.send(&[&[1], &[13], b"\xa1r"]);
    assert_eq!(server.answers().len(), 1);
}

// proves: docs/clients.md#too-many-connections
// proves: docs/compare.md#hostile-peers
#[test]
fn full_port_closes_the_oldest_connection_that_only_pings() {
    let mut server = ByHand::bounded(3, 1 << 20);
    end_session(&mut server);
    let mut pinging: Vec<_> = (0..2).map(|_| patient(&mut server)).collect();
    let (request, reply) = (message(&[&[1], &[24]]), message(&[&[1], &[24], b"\xa2OK"]));
    for stream in &mut pinging {
        write_all(&mut server, stream, &request);
        read_until(&mut server, stream, &reply);
    }
    let mut silent = server.connect();
    assert_eq!(server.read(&mut silent)[0], 0xff);
    assert_eq!(
        server.read(&mut pinging[0]),
        b"",
        "the oldest one has ended"
    );
    // One that has asked nothing gives way before the others.
    let mut last = server.connect();
    assert_eq!(server.read(&mut last)[0], 0xff);
    assert_eq!(server.read(&mut silent), b"");
    write_all(&mut server, &mut pinging[1], &request);
    read_until(&mut server, &mut pinging[1], &reply);
    end_session(&mut server);
}

// proves: docs/clients.md#too-many-connections
// proves: docs/compare.md#hostile-peers
#[test]
fn port_full_of_clients_pauses_accepting_until_one_ends() {
    let mut server = ByHand::bounded(1, 1 << 20);
    end_session(&mut server);
    let mut waiting = server.connect();
    while server.front.connections.is_accepting() {
        server.front.turn(Duration::from_millis(1)).unwrap();
    }
    server.send(&[&[1], &[24]]);
    assert_eq!(server.answers().len(), 1);
    let mut bytes = [0];
    assert_eq!(
        waiting.read(&mut bytes).unwrap_err().kind(),
        ErrorKind::WouldBlock
    );
    // Closes the client's connection.
    server.client = zmq::Context::new().socket(zmq::DEALER).unwrap();
    assert_eq!(server.read(&mut waiting)[0], 0xff);
    assert!(server.front.connections.is_accepting());
}

/// Greeting and READY of a DEALER.
fn handshake() -> Vec<u8> {
    let mut bytes = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL".to_vec();
    bytes.resize(64, 0);
    bytes.extend_from_slice(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER");
    bytes
}

fn connection(now: Instant) -> (Connection, UnixStream) {
    let (socket, peer) = UnixStream::pair().unwrap();
    for stream in [&socket, &peer] {
        stream.set_nonblocking(true).unwrap();
    }
    let limits = serve::bounds(1, 1 << 30).session;
    (Connection::new(socket.into(), limits, now), peer)
}

/// A reply with a payload of that length.
fn reply(len: usize, charge: Option<Charge>) -> outbox::Outgoing {
    outbox::Outgoing {
        connection: 0,
        uid: vec![1],
        op: vec![1],
        payload: Some(vec![0; len].into()),
        charge,
    }
}

// proves: docs/clients.md#too-many-connections
#[test]
fn connection_ends_without_a_handshake_and_without_a_sign_of_life() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let (mut mute, _peer) = connection(start);
    mute.tick(after(9)).unwrap();
    assert!(matches!(mute.tick(after(10)), Err(Closed::Handshake)));

    let (mut silent, mut peer) = connection(start);
    let (mut scratch, mut messages) = (vec![0; SCRATCH_BYTES], Vec::new());
    peer.write_all(&handshake()).unwrap();
    silent
        .read(&mut scratch, &mut messages, TURN_BYTES, after(5))
        .unwrap();
    silent.write(after(5)).unwrap();
    for (seconds, is_asked) in [(34, false), (35, true), (36, false), (64, false)] {
        silent.tick(after(seconds)).unwrap();
        assert_eq!(silent.has_output(), is_asked, "after {seconds} s");
        silent.write(after(seconds)).unwrap();
    }
    assert!(matches!(silent.tick(after(65)), Err(Closed::Silent)));

    // A PING may say that silence is to be taken for the end earlier.
    peer.write_all(b"\x04\x07\x04PING\x00\x0a").unwrap();
    silent
        .read(&mut scratch, &mut messages, TURN_BYTES, after(80))
        .unwrap();
    silent.tick(after(80)).unwrap();
    assert!(matches!(silent.tick(after(81)), Err(Closed::Silent)));
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn client_that_takes_nothing_for_a_minute_is_closed() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let (mut deaf, mut peer) = connection(start);
    let (mut scratch, mut messages) = (vec![0; SCRATCH_BYTES], Vec::new());
    peer.write_all(&handshake()).unwrap();
    deaf.read(&mut scratch, &mut messages, TURN_BYTES, start)
        .unwrap();
    while deaf.held_bytes() < 1 << 20 {
        deaf.push(reply(1000, None), start);
        deaf.write(start).unwrap();
    }
    // It goes on sending.
    peer.write_all(b"\x00\x01x").unwrap();
    deaf.read(&mut scratch, &mut messages, TURN_BYTES, after(59))
        .unwrap();
    deaf.tick(after(59)).unwrap();
    assert!(matches!(deaf.tick(after(60)), Err(Closed::Unread)));
    while deaf.write(start).is_ok() {
        deaf.push(reply(1000, None), start);
    }
    assert!(deaf.held_bytes() < 20 << 20, "what is not read is bounded");
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn client_that_takes_a_large_reply_slowly_is_closed() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let (mut slow, mut peer) = connection(start);
    let (mut scratch, mut messages) = (vec![0; SCRATCH_BYTES], Vec::new());
    peer.write_all(&handshake()).unwrap();
    slow.read(&mut scratch, &mut messages, TURN_BYTES, start)
        .unwrap();
    let budget = Budget::new(1 << 30);
    let charge = budget.take_anyway(64 << 20);
    slow.push(reply(64 << 20, Some(charge)), start);
    let mut bytes = vec![0; 1 << 20];
    for seconds in (0..300).step_by(20) {
        // It lives, and reads some.
        peer.write_all(b"\x00\x01x").unwrap();
        slow.read(&mut scratch, &mut messages, TURN_BYTES, after(seconds))
            .unwrap();
        slow.write(after(seconds)).unwrap();
        assert!(peer.read(&mut bytes).unwrap() > 0);
        slow.tick(after(seconds)).unwrap();
    }
    slow.write(after(299)).unwrap();
    assert!(slow.due() <= after(300));
    assert!(matches!(slow.tick(after(300)), Err(Closed::Unread)));
}

#[test]
fn one_turn_reads_its_bytes_of_a_large_message() {
    let (mut large, mut peer) = connection(Instant::now());
    let (mut scratch, mut messages) = (vec![0; SCRATCH_BYTES], Vec::new());
    let sent = [&handshake()[..], &message(&[&[7; 100_000]])[..90_000]].concat();
    peer.write_all(&sent).unwrap();
    let mut read = |turn_bytes| {
        large
            .read(&mut scratch, &mut messages, turn_bytes, Instant::now())
            .unwrap()
    };
    // What is behind is read into the message itself.
    let first = read(60_000);
    assert!(first <= 60_000);
    assert_eq!([read(1000), read(1), read(5000)], [1000, 1, 5000]);
    assert_eq!(messages, []);
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn one_turn_reads_a_bounded_part_of_what_has_arrived() {
    let (mut busy, mut peer) = connection(Instant::now());
    let (mut scratch, mut messages) = (vec![0; SCRATCH_BYTES], Vec::new());
    let small = [&handshake()[..], &b"\x00\x02xx".repeat(10_000)].concat();
    peer.write_all(&small).unwrap();
    busy.read(&mut scratch, &mut messages, TURN_BYTES, Instant::now())
        .unwrap();
    assert!((1..=SCRATCH_BYTES / 4).contains(&messages.len()));
    let mut last = 0;
    while messages.len() < 10_000 {
        let before = messages.len();
        busy.read(&mut scratch, &mut messages, TURN_BYTES, Instant::now())
            .unwrap();
        last = messages.len() - before;
    }
    // A flood is read in ever smaller parts.
    assert!(last <= 32, "{last}");
    // A large frame arrives as it was sent, whatever part of it is there at a time.
    let body: Vec<u8> = (0..1_000_000_u32)
        .map(|index| (index % 251) as u8)
        .collect();
    let mut sent = vec![2];
    sent.extend_from_slice(&(body.len() as u64).to_be_bytes());
    sent.extend_from_slice(&body);
    sent.extend_from_slice(b"\x00\x01z");
    let (mut at, mut steps) = (0, 0);
    while messages.len() < 10_002 {
        let end = (at + 30_000 + 7 * steps).min(sent.len());
        // Nothing while the socket is full.
        at += peer.write(&sent[at..end]).unwrap_or_default();
        steps += 1;
        busy.read(&mut scratch, &mut messages, TURN_BYTES, Instant::now())
            .unwrap();
    }
    assert_eq!(messages[10_001].frames, [b"z"]);
    assert!(messages[10_000].frames == [body]);
}

/// A message of these frames.
fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (index, frame) in frames.iter().enumerate() {
        write_frame_header(&mut bytes, frame.len(), index + 1 < frames.len());
        bytes.extend_from_slice(frame);
    }
    bytes
}

/// A PING with a TTL of one second.
const PING: &[u8] = b"\x04\x07\x04PING\x00\x0a";
const PONG: &[u8] = b"\x04\x05\x04PONG";

/// A connection after its handshake, to which the server has said all that it had to say.
fn shaken(server: &mut ByHand) -> TcpStream {
    shaken_by(server, PING)
}

/// Connects a client that may be silent.
fn patient(server: &mut ByHand) -> TcpStream {
    shaken_by(server, b"\x04\x07\x04PING\x00\x00")
}

fn shaken_by(server: &mut ByHand, ping: &[u8]) -> TcpStream {
    let mut stream = server.connect();
    stream
        .write_all(&[&handshake()[..], ping].concat())
        .unwrap();
    read_until(server, &mut stream, PONG);
    stream
}

fn read_until(server: &mut ByHand, stream: &mut TcpStream, wanted: &[u8]) {
    let mut bytes = Vec::new();
    while !bytes.windows(wanted.len()).any(|at| at == wanted) {
        let read = server.read(stream);
        assert_ne!(read, b"", "closed after {bytes:?}");
        bytes.extend(read);
    }
}

/// Sends all of it, unless the connection is closed before.
fn write_all(server: &mut ByHand, stream: &mut TcpStream, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(len) => bytes = &bytes[len..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
        server.front.turn(Duration::ZERO).unwrap();
    }
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn held_bytes_cost_by_their_age_however_they_move() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let (mut scratch, mut messages) = (vec![0; SCRATCH_BYTES], Vec::new());
    let mut holding = |bytes: usize, now| {
        let (mut held, mut peer) = connection(now);
        let large = message(&[&[7; 1 << 20]]);
        let sent = [&handshake()[..], &large[..bytes]].concat();
        let mut at = 0;
        while at < sent.len() {
            at += peer.write(&sent[at..]).unwrap_or_default();
            held.read(&mut scratch, &mut messages, TURN_BYTES, now)
                .unwrap();
        }
        (held, peer)
    };
    let (mut small, mut dribbles) = holding(50_000, start);
    let (large, _peer) = holding(500_000, after(1));
    assert!(small.held_cost(after(1)) < large.held_cost(after(1)));
    dribbles.write_all(b"x").unwrap();
    let mut scratch = vec![0; SCRATCH_BYTES];
    small
        .read(&mut scratch, &mut Vec::new(), TURN_BYTES, after(59))
        .unwrap();
    let (large, _peer) = holding(500_000, after(60));
    assert!(small.held_cost(after(60)) > large.held_cost(after(60)));
}

// proves: docs/clients.md#too-many-connections
#[test]
fn ended_connections_leave_no_entry() {
    let mut server = ByHand::new(1 << 20);
    for _ in 0..50 {
        let stream = shaken(&mut server);
        assert_eq!(server.front.connections.counts(), [2, 1, 2]);
        drop(stream);
        while server.front.connections.counts()[0] > 1 {
            server.front.turn(Duration::from_millis(1)).unwrap();
        }
    }
    assert_eq!(server.front.connections.counts(), [1, 0, 1]);
}

// proves: docs/clients.md#after-a-reconnect
#[test]
fn engine_forgets_a_connection_that_ends() {
    let mut server = ByHand::new(1 << 20);
    let engine = Arc::clone(&server.front.server.engine);
    let caller = Caller {
        connection: 0,
        release: Release::Before0_5_5,
        releases: "0.5.4",
        knows_chunk_size: false,
        negotiates_chunk_size: false,
        registers_again: Some(true),
        names_workers: true,
    };
    let is_sent = Arc::new(AtomicBool::new(false));
    let held = Arc::clone(&is_sent);
    let held = Reply::new(move |_: Option<kvtier_engine::EngineAnswer>| {
        held.store(true, Ordering::Relaxed)
    });
    engine.refuse_by_ping(caller, Some(held));
    assert_eq!(engine.known_connections(), 1);
    server.client = zmq::Context::new().socket(zmq::DEALER).unwrap();
    while server.front.connections.counts()[0] > 0 {
        server.front.turn(Duration::from_millis(1)).unwrap();
    }
    assert_eq!(engine.known_connections(), 0);
    assert!(is_sent.load(Ordering::Relaxed), "what was held is freed");
}

// proves: docs/clients.md#too-many-connections
#[test]
fn stopped_process_closes_no_connection() {
    let mut server = ByHand::new(1 << 20);
    let mut stream = shaken(&mut server);
    // It has arrived while the process was stopped.
    stream.write_all(PING).unwrap();
    let clock = server.front.connections.clock();
    clock.stop_process_for(Duration::from_secs(3600));
    read_until(&mut server, &mut stream, PONG);
    server
        .front
        .connections
        .clock()
        .skip(Duration::from_secs(2));
    assert_eq!(server.read(&mut stream), b"", "beyond its TTL");
    server.send(&[&[1], &[24]]);
    assert_eq!(server.answers().len(), 1, "the other client is there");
}

// proves: docs/clients.md#too-many-connections
#[test]
fn client_that_has_read_meanwhile_is_written_to() {
    let start = Instant::now();
    let (mut slow, mut peer) = connection(start);
    let (mut scratch, mut messages) = (vec![0; SCRATCH_BYTES], Vec::new());
    peer.write_all(&handshake()).unwrap();
    slow.read(&mut scratch, &mut messages, TURN_BYTES, start)
        .unwrap();
    while slow.held_bytes() < 1 << 20 {
        slow.push(reply(1000, None), start);
        slow.write(start).unwrap();
    }
    let before = slow.held_bytes();
    let mut bytes = vec![0; 1 << 20];
    while peer.read(&mut bytes).is_ok() {}
    slow.tick(start + Duration::from_secs(3600)).unwrap();
    assert!(slow.held_bytes() < before);
}

// proves: docs/clients.md#after-a-reconnect
#[test]
fn undecided_request_is_answered_after_a_minute() {
    let mut server = ByHand::new(1 << 20);
    let mut stream = shaken(&mut server);
    // Prepares a store or commits a retrieve, depending on the release.
    stream
        .write_all(&message(&[&[8], &[16], b"\x80", &[1]]))
        .unwrap();
    while server.front.connections.undecided().is_empty() {
        server.front.turn(Duration::from_millis(1)).unwrap();
    }
    server
        .front
        .connections
        .clock()
        .skip(Duration::from_secs(60));
    read_until(&mut server, &mut stream, &message(&[&[8], &[16]]));
    assert!(server.front.connections.undecided().is_empty());
    assert_eq!(server.refused("prepare_store", "uncertain_generation"), 1);
}

#[test]
fn heartbeat_announces_no_further_work() {
    let mut server = ByHand::new(1 << 20);
    let mut stream = shaken(&mut server);
    let patient = Duration::from_secs(60);
    stream.write_all(PONG).unwrap();
    assert!(!server.front.turn(patient).unwrap());
    stream.write_all(&message(&[&[1], &[24]])[..3]).unwrap();
    assert!(server.front.turn(patient).unwrap());
}

// proves: docs/clients.md#after-a-reconnect
#[test]
fn undecided_requests_leave_most_memory_to_others() {
    let mut server = ByHand::new(1 << 20);
    // Requests that do not wait are served.
    server.gate = None;
    let large = vec![0x80; 60_000];
    let streams: Vec<_> = (0..4)
        .map(|_| {
            let mut stream = shaken(&mut server);
            // The first ones wait, the others are answered at once.
            for uid in 1..9 {
                let request = message(&[&[uid], &[16], &large, &[1]]);
                write_all(&mut server, &mut stream, &request);
            }
            write_all(&mut server, &mut stream, &message(&[&[9], &[24]]));
            read_until(&mut server, &mut stream, &message(&[&[8], &[16]]));
            stream
        })
        .collect();
    let another = server.front.budgets.client(1000);
    assert!(another.peer.requests.take(512 << 10).is_some());
    drop(streams);
}

/// Turns that have passed by the server's clock since `start`, the one that was due then included.
fn turns_since(server: &mut ByHand, start: Instant) -> u64 {
    let passed = server.front.connections.now() - start;
    1 + passed.as_micros() as u64 / TURN_INTERVAL.as_micros() as u64
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn senders_of_stray_frames_share_one_turn() {
    let mut server = ByHand::new(1 << 20);
    let mut floods: Vec<_> = (0..3).map(|_| shaken(&mut server)).collect();
    let stray = message(&[b"x"]).repeat(10_000);
    for flood in &mut floods {
        write_all(&mut server, flood, &stray);
    }
    while server.front.connections.excessive() < floods.len() {
        server.front.turn(Duration::ZERO).unwrap();
    }
    let read = |server: &ByHand| server.metrics().malformed_messages.get();
    let (start, before) = (server.front.connections.now(), read(&server));
    for _ in 0..300 {
        server.front.turn(Duration::ZERO).unwrap();
    }
    let turns = turns_since(&mut server, start);
    // A turn reads 128 bytes.
    assert!(read(&server) - before <= turns * 43, "{turns} turns");
    server.send(&[&[1], &[24]]);
    assert_eq!(server.answers().len(), 1, "others are served");

    // Requests behind stray frames are answered too, and so are heartbeats.
    drop(floods.split_off(1));
    let clock = server.front.connections.clock();
    clock.skip(Duration::from_secs(1));
    let request = message(&[&[1], &[24]]);
    let reply = message(&[&[1], &[24], b"\xa2OK"]);
    for (command, answer) in [(&request[..], &reply[..]), (PING, PONG)] {
        write_all(&mut server, &mut floods[0], command);
        read_until(&mut server, &mut floods[0], answer);
    }
}

#[test]
fn commands_and_discarded_frames_are_stray() {
    for stray in [PONG.repeat(1000), b"\x01\x01x".repeat(1000)] {
        let mut server = ByHand::new(1 << 20);
        let mut flood = shaken(&mut server);
        write_all(&mut server, &mut flood, &stray);
        while server.front.connections.excessive() == 0 {
            server.front.turn(Duration::ZERO).unwrap();
        }
    }
}

#[test]
fn parked_connection_that_was_reset_is_closed() {
    let mut server = ByHand::new(1 << 20);
    let mut flood = shaken(&mut server);
    write_all(&mut server, &mut flood, &message(&[b"x"]).repeat(10_000));
    while server.front.connections.excessive() == 0 {
        server.front.turn(Duration::ZERO).unwrap();
    }
    server.front.turn(Duration::ZERO).unwrap();
    rustix::net::sockopt::set_socket_linger(&flood, Some(Duration::ZERO)).unwrap();
    drop(flood);
    while server.front.connections.counts()[0] > 1 {
        server.front.turn(Duration::from_millis(1)).unwrap();
    }
    assert_eq!(server.front.connections.counts(), [1, 0, 1]);
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn connections_are_accepted_singly_while_many_end_without_a_request() {
    let mut server = ByHand::bounded(100, 1 << 20);
    server.front.connections.count_vain(512);
    let start = server.front.connections.now();
    let waiting: Vec<_> = (0..30).map(|_| server.connect()).collect();
    while server.front.connections.counts()[0] < 1 + waiting.len() {
        server.front.turn(Duration::from_millis(1)).unwrap();
        let accepted = server.front.connections.counts()[0] as u64 - 1;
        assert!(accepted <= turns_since(&mut server, start));
    }
}

#[test]
fn full_port_has_a_place_for_the_next_one_while_many_end_without_a_request() {
    let mut server = ByHand::bounded(3, 1 << 20);
    let mut silent: Vec<_> = (0..2).map(|_| server.connect()).collect();
    for stream in &mut silent {
        assert_eq!(server.read(stream)[0], 0xff);
    }
    server.front.connections.count_vain(512);
    // They displace those, and each other, in turns.
    let mut next: Vec<_> = (0..4).map(|_| server.connect()).collect();
    assert_eq!(server.read(next.last_mut().unwrap())[0], 0xff);
}

#[test]
fn connections_that_end_without_a_request_are_counted() {
    let mut server = ByHand::bounded(100, 1 << 20);
    while server.front.connections.is_accepting() {
        let mut ended: Vec<_> = (0..50).map(|_| server.connect()).collect();
        for stream in &mut ended {
            stream.write_all(b"GET /").unwrap();
        }
        while server.front.connections.counts()[0] > 1 {
            server.front.turn(Duration::ZERO).unwrap();
        }
        ended.clear();
        server.connect();
        server.front.turn(Duration::from_millis(1)).unwrap();
    }
    // It goes on by itself.
    let mut late = server.connect();
    assert_eq!(server.read(&mut late)[0], 0xff);
}
