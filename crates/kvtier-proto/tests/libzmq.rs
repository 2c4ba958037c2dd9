//! Against libzmq over TCP, in both roles, with bytes cut at any place in both directions.
#![expect(clippy::unwrap_used, reason = "test")]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use kvtier_proto::zmtp::{Event, Version, ZmtpLimits, ZmtpSession, write_frame_header};
use proptest::prelude::*;

const LIMITS: ZmtpLimits = ZmtpLimits {
    frame_bytes: 1 << 20,
    message_frames: 20,
    message_bytes: 4 << 20,
    command_bytes: 4096,
};

/// Least bytes for which a body is read in place.
const MIN_IN_PLACE: usize = 1000;

fn write_cut(stream: &mut TcpStream, mut bytes: &[u8], cuts: &mut impl Iterator<Item = usize>) {
    while !bytes.is_empty() {
        let (here, rest) = bytes.split_at(cuts.next().unwrap().min(bytes.len()));
        stream.write_all(here).unwrap();
        bytes = rest;
    }
}

/// Reads a piece and appends the messages that it completes.
fn read_piece(
    stream: &mut TcpStream,
    session: &mut ZmtpSession,
    piece: usize,
    messages: &mut Vec<Vec<Vec<u8>>>,
) {
    let mut buffer = vec![0; piece];
    let mut events = Vec::new();
    let rest = match session.body(MIN_IN_PLACE).unwrap() {
        Some(body) => {
            let at = body.len();
            let limit = piece.min(body.capacity() - at);
            let got = stream.read(&mut buffer[..limit]).unwrap();
            body.extend_from_slice(&buffer[..got]);
            let (event, rest) = session.body_received(at).unwrap();
            events.extend(event);
            rest
        }
        None => {
            let got = stream.read(&mut buffer).unwrap();
            assert!(got > 0, "libzmq closed the connection");
            buffer.truncate(got);
            buffer
        }
    };
    let mut rest = &rest[..];
    while !rest.is_empty() {
        events.extend(session.receive(&mut rest).unwrap());
    }
    for event in events {
        if let Event::Message(message) = event {
            assert_eq!(message.discarded_frames, 0);
            messages.push(message.frames);
        }
    }
}

fn encode(frames: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, frame) in frames.iter().enumerate() {
        write_frame_header(&mut out, frame.len(), number + 1 < frames.len());
        out.extend_from_slice(frame);
    }
    out
}

/// Sends every message back until `count` have come, reading and writing in pieces of these sizes.
fn echo(mut stream: TcpStream, count: usize, pieces: &[usize]) {
    stream.set_nodelay(true).unwrap();
    let mut cuts = pieces.iter().copied().cycle();
    let mut session = ZmtpSession::router(LIMITS);
    let mut echoed = 0;
    while echoed < count {
        let output = std::mem::take(session.output());
        write_cut(&mut stream, &output, &mut cuts);
        let (piece, mut messages) = (cuts.next().unwrap(), Vec::new());
        read_piece(&mut stream, &mut session, piece, &mut messages);
        for frames in messages {
            write_cut(&mut stream, &encode(&frames), &mut cuts);
            echoed += 1;
        }
    }
    // The peer closes first, once it has everything: a close with its PINGs unread would discard what is on the way to it.
    while stream.read(&mut [0; 1000]).is_ok_and(|got| got > 0) {}
}

fn frame() -> impl Strategy<Value = Vec<u8>> {
    let len = prop_oneof![
        Just(0),
        1..10_usize,
        250..260_usize,
        8000..9000_usize,
        Just(60_000)
    ];
    (len, any::<u8>())
        .prop_map(|(len, first)| (0..len).map(|at| first.wrapping_add(at as u8)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn libzmq_messages_are_echoed_unchanged(
        messages in prop::collection::vec(prop::collection::vec(frame(), 1..6), 1..8),
        pieces in prop::collection::vec(prop_oneof![1..9_usize, 60..70_usize, 1000..70_000_usize], 1..12),
        heartbeat in any::<bool>(),
        identity in prop::collection::vec(1..=255_u8, 0..255),
    ) {
        // One byte at a time is slow for long messages.
        let mut pieces = pieces;
        pieces.push(70_000);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let count = messages.len();
        let server = std::thread::spawn(move || echo(listener.accept().unwrap().0, count, &pieces));
        let context = zmq::Context::new();
        let dealer = context.socket(zmq::DEALER).unwrap();
        dealer.set_linger(0).unwrap();
        dealer.set_rcvtimeo(60_000).unwrap();
        if heartbeat {
            dealer.set_heartbeat_ivl(1).unwrap();
            dealer.set_heartbeat_ttl(60_000).unwrap();
            dealer.set_heartbeat_timeout(60_000).unwrap();
        }
        if !identity.is_empty() {
            dealer.set_identity(&identity).unwrap();
        }
        dealer.connect(&format!("tcp://{address}")).unwrap();
        for message in &messages {
            dealer.send_multipart(message, 0).unwrap();
        }
        for message in &messages {
            prop_assert_eq!(&dealer.recv_multipart(0).expect("no echo"), message);
        }
        drop(dealer);
        drop(context);
        server.join().unwrap();
    }

    #[test]
    fn libzmq_router_echoes_what_a_dealer_sends(
        messages in prop::collection::vec(prop::collection::vec(frame(), 1..6), 1..8),
        pieces in prop::collection::vec(prop_oneof![1..9_usize, 60..70_usize, 1000..70_000_usize], 1..12),
        heartbeat in any::<bool>(),
        version in prop_oneof![Just(Version::V3_0), Just(Version::V3_1)],
    ) {
        let mut pieces = pieces;
        pieces.push(70_000);
        let mut cuts = pieces.into_iter().cycle();
        let context = zmq::Context::new();
        let router = context.socket(zmq::ROUTER).unwrap();
        router.set_linger(0).unwrap();
        router.set_rcvtimeo(60_000).unwrap();
        if heartbeat {
            router.set_heartbeat_ivl(1).unwrap();
            router.set_heartbeat_timeout(60_000).unwrap();
        }
        router.bind("tcp://127.0.0.1:*").unwrap();
        let endpoint = router.get_last_endpoint().unwrap().unwrap();
        let mut stream = TcpStream::connect(endpoint.strip_prefix("tcp://").unwrap()).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut session = ZmtpSession::dealer(version, LIMITS);
        for message in &messages {
            // The next message follows the echo, so that neither side waits for the other to read.
            let mut echoes = Vec::new();
            let mut is_sent = false;
            while echoes.is_empty() {
                let output = std::mem::take(session.output());
                write_cut(&mut stream, &output, &mut cuts);
                if session.is_ready() && !is_sent {
                    is_sent = true;
                    write_cut(&mut stream, &encode(message), &mut cuts);
                    let received = router.recv_multipart(0).expect("no message");
                    prop_assert_eq!(&received[1..], &message[..]);
                    router.send_multipart(received, 0).unwrap();
                }
                read_piece(&mut stream, &mut session, cuts.next().unwrap(), &mut echoes);
            }
            prop_assert_eq!(&echoes[..], std::slice::from_ref(message));
        }
    }

    /// However the bytes of a peer are cut, the events are the same, and so is the error.
    // proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
    #[test]
    fn fragmentation_changes_nothing(
        bytes in prop::collection::vec(prop_oneof![Just(0_u8), Just(1), Just(4), any::<u8>()], 0..400),
        good_handshake in any::<bool>(),
        pieces in prop::collection::vec(1..40_usize, 1..10),
    ) {
        let mut input = Vec::new();
        if good_handshake {
            input.extend_from_slice(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL");
            input.resize(64, 0);
            input.extend_from_slice(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER");
        }
        input.extend_from_slice(&bytes);
        let limits = ZmtpLimits { frame_bytes: 100, message_frames: 3, message_bytes: 150, command_bytes: 100 };
        let run = |pieces: &mut dyn Iterator<Item = usize>| {
            let mut session = ZmtpSession::router(limits);
            let (mut left, mut events) = (&input[..], Vec::new());
            while !left.is_empty() {
                let (mut here, rest) = left.split_at(pieces.next().unwrap().min(left.len()));
                left = rest;
                while !here.is_empty() {
                    match session.receive(&mut here) {
                        Ok(event) => events.extend(event),
                        Err(error) => return (events, Some(error)),
                    }
                    assert!(session.held_bytes() <= 150 + 2 * 100);
                }
            }
            (events, None)
        };
        let whole = run(&mut std::iter::repeat(usize::MAX));
        let cut = run(&mut pieces.iter().copied().cycle());
        prop_assert_eq!(whole, cut);
    }
}
