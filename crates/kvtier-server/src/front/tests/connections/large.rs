//! Large messages, and the memory that all connections hold.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use kvtier_proto::zmtp::write_frame_header;

use super::super::super::connections::{ConnectionBounds, ROUND_BYTES};
use super::super::super::serve;
use super::super::ByHand;
use super::{end_session, message, patient, shaken, write_all};

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn full_memory_closes_large_messages_not_the_oldest() {
    let bounds = ConnectionBounds {
        held_bytes: 1 << 20,
        ..serve::bounds(100, 1 << 30)
    };
    let mut server = ByHand::with(bounds, 1 << 20);
    let whole = message(&[&[7; 100_000]]);
    let (first, rest) = whole.split_at(20_000);
    let mut slow = shaken(&mut server);
    write_all(&mut server, &mut slow, first);
    let large = message(&[&[7; 10 << 20]]);
    let attackers: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = shaken(&mut server);
            write_all(&mut server, &mut stream, &large[..200_000]);
            stream
        })
        .collect();
    while server.front.connections.counts()[0] > 2 + 10 {
        server.front.turn(Duration::from_millis(1)).unwrap();
    }
    write_all(&mut server, &mut slow, rest);
    while server.metrics().malformed_messages.get() == 0 {
        server.front.turn(Duration::from_millis(1)).unwrap();
    }
    drop(attackers);
}

/// A connection that has sent `len` bytes of the body of a message with one frame of `whole` bytes.
fn amid_message(server: &mut ByHand, len: usize, whole: usize) -> TcpStream {
    let mut stream = patient(server);
    let mut header = Vec::new();
    write_frame_header(&mut header, whole, false);
    write_all(server, &mut stream, &header);
    write_all(server, &mut stream, &vec![7; len]);
    while server.front.connections.unread_bytes() > 0 {
        server.front.turn(Duration::ZERO).unwrap();
    }
    stream
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn large_messages_share_a_round_behind_others() {
    const PART: usize = 50_000;
    let mut server = ByHand::bounded(100, 1 << 20);
    let mut large: Vec<_> = (0..40)
        .map(|_| amid_message(&mut server, 300_000, 64 << 20))
        .collect();
    let mut pinging = patient(&mut server);
    for stream in &mut large {
        // It fits into the system's buffers.
        stream.write_all(&[7; PART]).unwrap();
    }
    let request = message(&[&[1], &[24]]);
    pinging.write_all(&request).unwrap();
    let sent = (large.len() * PART + request.len()) as u64;
    while server.front.connections.unread_bytes() < sent {
        std::thread::yield_now();
    }
    let mut left = sent;
    server.front.turn(Duration::ZERO).unwrap();
    let reply = message(&[&[1], &[24], b"\xa2OK"]);
    let mut got = vec![0; reply.len()];
    pinging.set_nonblocking(false).unwrap();
    pinging.read_exact(&mut got).unwrap();
    assert_eq!(got, reply, "served in the first round");
    while left > 0 {
        let unread = server.front.connections.unread_bytes();
        assert!(left - unread <= ROUND_BYTES as u64, "{left} to {unread}");
        left = unread;
        server.front.turn(Duration::ZERO).unwrap();
    }
}

#[test]
fn other_traffic_leaves_large_messages_a_turn() {
    const PART: usize = 50_000;
    let mut server = ByHand::bounded(100, 1 << 20);
    let mut large = amid_message(&mut server, 300_000, 300_000 + PART);
    let mut others: Vec<_> = (0..2 * ROUND_BYTES / PART)
        .map(|_| amid_message(&mut server, 0, 2 * PART))
        .collect();
    for stream in others.iter_mut().chain([&mut large]) {
        stream.write_all(&[7; PART]).unwrap();
    }
    while server.front.connections.unread_bytes() < ((others.len() + 1) * PART) as u64 {
        std::thread::yield_now();
    }
    server.front.turn(Duration::ZERO).unwrap();
    assert!(server.front.connections.unread_bytes() > 0);
    assert_eq!(server.metrics().malformed_messages.get(), 1, "it is whole");
}

/// A front end whose connections hold at most this.
fn holding(held_bytes: usize) -> ByHand {
    let bounds = ConnectionBounds {
        held_bytes,
        ..serve::bounds(100, 1 << 30)
    };
    ByHand::with(bounds, 1 << 20)
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn large_messages_wait_for_memory_and_all_arrive() {
    const BODY: usize = 8 << 20;
    let mut server = holding(16 << 20);
    let whole = message(&[&[7; BODY]]);
    let mut senders: Vec<_> = (0..8).map(|_| (patient(&mut server), 0)).collect();
    while server.metrics().malformed_messages.get() < 8 {
        for (stream, at) in &mut senders {
            let end = (*at + 100_000).min(whole.len());
            // Nothing while the system's buffers are full.
            *at += stream.write(&whole[*at..end]).unwrap_or_default();
        }
        server.front.turn(Duration::ZERO).unwrap();
        assert!(server.front.connections.bounded_bytes() <= 16 << 20);
        assert_eq!(server.front.connections.counts()[0], 9, "none was closed");
    }
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn stalled_messages_end_while_others_wait() {
    let mut server = holding(6 << 20);
    let [mut stalled, mut slow] = [(); 2].map(|()| amid_message(&mut server, 1_200_000, 64 << 20));
    let mut sender = patient(&mut server);
    let whole = message(&[&[7; 16 << 20]]);
    let (mut at, mut refused) = (0, 0);
    // Until it is not read any more.
    while refused < 1000 {
        match sender.write(&whole[at..]) {
            Ok(len) => (at, refused) = (at + len, 0),
            Err(_) => refused += 1,
        }
        server.front.turn(Duration::ZERO).unwrap();
    }
    assert!(at < whole.len());
    let skip = |server: &mut ByHand, seconds| {
        let clock = server.front.connections.clock();
        clock.skip(Duration::from_secs(seconds));
    };
    skip(&mut server, 5);
    let before = server.front.connections.bounded_bytes();
    slow.write_all(&[7]).unwrap();
    while server.front.connections.bounded_bytes() == before {
        server.front.turn(Duration::ZERO).unwrap();
    }
    skip(&mut server, 6);
    assert_eq!(server.read(&mut stalled), b"");
    assert_eq!(server.front.connections.counts()[0], 3, "it goes on slowly");
    skip(&mut server, 11);
    assert_eq!(server.read(&mut slow), b"");
    write_all(&mut server, &mut sender, &whole[at..]);
    while server.metrics().malformed_messages.get() == 0 {
        server.front.turn(Duration::ZERO).unwrap();
    }
}

/// Set in the process of [`child_runs_out_of_addresses`].
const CHILD: &str = "KVTIER_TEST_OUT_OF_ADDRESSES";

#[test]
fn child_runs_out_of_addresses() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    // Without it, they would wait for each other.
    let mut server = holding(usize::MAX);
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = pages.split(' ').next().unwrap().parse().unwrap();
    let most = (pages * rustix::param::page_size() + (400 << 20)) as u64;
    let limit = Rlimit {
        current: Some(most),
        maximum: Some(most),
    };
    setrlimit(Resource::As, limit).unwrap();
    let mut streams: Vec<_> = (0..8).map(|_| patient(&mut server)).collect();
    let part = vec![7; 1 << 20];
    for stream in &mut streams {
        let mut header = Vec::new();
        write_frame_header(&mut header, 200 << 20, false);
        write_all(&mut server, stream, &header);
        for _ in 0..100 {
            write_all(&mut server, stream, &part);
        }
    }
    assert!(server.front.connections.counts()[0] < 9, "none was closed");
    end_session(&mut server);
    println!("still serving");
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
#[test]
fn frame_without_memory_ends_its_connection_only() {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture"])
        .arg("front::tests::connections::large::child_runs_out_of_addresses")
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{:?}", child.status);
    assert!(text.contains("still serving"), "{text}");
}
