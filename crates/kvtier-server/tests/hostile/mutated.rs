//! Captured requests with flipped bytes, wrong frames and values that claim more than they hold.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use kvtier_client::proto::frames::OperationId;
use kvtier_client::proto::generation::Generation;
use kvtier_client::proto::operation::Operation;
use kvtier_core::random::SplitMix64;

use crate::good::{GOOD, pages, round, work, worker};
use crate::support::{Frames, TestServer};
use crate::{own_memory, replay, turn};

/// Random numbers, bytes and choices, the same in every run.
pub struct Random(SplitMix64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.0.below(limit as u64)).unwrap()
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        self.0.bytes(len)
    }

    fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        self.0.choose(items)
    }
}

/// Every request of the vectors but those that clear the cache, which every client may do. Registrations name segments
/// that are there.
fn requests(segments: &mut replay::Segments) -> Vec<Frames> {
    let mut names: Vec<_> = std::fs::read_dir(replay::EXCHANGES)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let mut requests = Vec::new();
    for name in names
        .iter()
        .filter(|name| name.starts_with("server_") || name.starts_with("capture_"))
    {
        let vectors = replay::load(name);
        let rows = vectors["rows"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|row| &row["request"]);
        let sent = vectors["frames"].as_array().into_iter().flatten();
        let sent = sent
            .filter(|frame| frame["dir"] == "c2s")
            .map(|frame| &frame["frames"]);
        let all = rows.chain(sent).map(replay::frames);
        requests.extend(
            all.filter(|request| !clears(request))
                .map(|request| segments.patch(request)),
        );
    }
    assert!(requests.len() > 250);
    requests
}

/// Whether a client of any release would clear the cache by this.
fn clears(request: &Frames) -> bool {
    let Some(Ok(id)) = request.get(1).map(|op| OperationId::decode(op)) else {
        return false;
    };
    let mut rows = Generation::ALL.into_iter().flat_map(|it| it.rows(id));
    rows.any(|row| row.operation == Operation::Clear)
}

/// Values that claim more than they hold, nest deeply, or are none.
fn bomb(random: &mut Random) -> Vec<u8> {
    let header = *random.pick(&[0xdd_u8, 0xdf, 0xdb, 0xc6, 0xc9]);
    match random.below(8) {
        // Array, map, text, bytes or extension of 4 Gi entries or bytes, and nothing or a little behind it.
        0 => [&[header, 0xff, 0xff, 0xff, 0xff][..], &random.bytes(20)].concat(),
        1 => [&[header, 0x00, 0xff, 0xff, 0xff][..], &random.bytes(2000)].concat(),
        // Arrays in arrays, maps in maps.
        2 => vec![0x91; 100_000],
        3 => [0x81, 0xa1, b'x'].repeat(50_000),
        // A key with a prompt that claims 4 Gi tokens.
        4 => [
            &b"\x87\xaamodel_name\xa1m\xa9token_ids\xdd\xff\xff\xff\xff"[..],
            &[7; 5000],
        ]
        .concat(),
        // A pickle that claims 4 GiB.
        5 => b"\xc4\x0b\x80\x04\x8e\xff\xff\xff\xff\x00\x00\x00\x00".to_vec(),
        6 => Vec::new(),
        _ => random.bytes(1 << 20),
    }
}

fn mutate(random: &mut Random, requests: &[Frames]) -> Frames {
    let mut frames = random.pick(requests).clone();
    for _ in 0..1 + random.below(3) {
        let at = random.below(frames.len().max(1));
        let Some(frame) = frames.get_mut(at) else {
            break;
        };
        match random.below(14) {
            0..=3 if !frame.is_empty() => {
                for _ in 0..1 + random.below(4) {
                    let at = random.below(frame.len());
                    frame[at] ^= 1 << random.below(8);
                }
            }
            4 => frame.truncate(random.below(frame.len() + 1)),
            5 => frame.extend(random.bytes(1 + 7 * (at % 3))),
            6 => drop(frames.remove(at)),
            7 => frames.insert(at, frames[at].clone()),
            8 => {
                let other = random.below(frames.len());
                frames.swap(at, other);
            }
            9 => frames = vec![frames.swap_remove(at)],
            10 => *frame = bomb(random),
            11 => {
                let other = random.pick(requests);
                *frame = random.pick(other).clone();
            }
            // Another operation with these payloads, by number.
            12 if frames.len() > 1 => frames[1] = vec![u8::try_from(random.below(45)).unwrap()],
            13 => frames.extend((0..random.below(40)).map(|_| vec![0xc0])),
            _ => {}
        }
    }
    if frames.is_empty() || clears(&frames) {
        // A message has a frame.
        return vec![Vec::new()];
    }
    frames
}

/// Sends `messages` mutated requests over sockets that come and go; some of the sockets are never read.
fn attack(server: &TestServer, requests: &[Frames], seed: u64, messages: usize) {
    let mut random = Random::new(seed);
    let mut sent = 0;
    while sent < messages {
        let socket = server.raw();
        let reads = random.below(3) > 0;
        let hello = random.below(4) > 0;
        if hello {
            // Its further requests are read as those of the newest release.
            socket.send(&[[0], [21]]);
            socket.receive();
        }
        for _ in 0..1 + random.below(400) {
            socket.send(&mutate(&mut random, requests));
            sent += 1;
            if reads {
                socket.take();
            }
        }
        if reads && hello {
            // All of it has arrived and was answered before the socket goes.
            let mut socket = socket;
            socket.settle();
        }
    }
}

/// Attacks from several sockets at once, with the good client at work from the first message to the last.
fn attack_beside_work(
    server: &TestServer,
    requests: &[Frames],
    seed: u64,
    messages: usize,
) -> usize {
    const ATTACKERS: usize = 3;
    let stop = AtomicBool::new(false);
    let running = AtomicUsize::new(ATTACKERS);
    std::thread::scope(|threads| {
        let good = threads.spawn(|| work(server, &stop));
        for attacker in 0..ATTACKERS {
            let (stop, running) = (&stop, &running);
            threads.spawn(move || {
                // Also when an attacker fails, lest the good client work for ever.
                struct Done<'a>(&'a AtomicBool, &'a AtomicUsize);
                impl Drop for Done<'_> {
                    fn drop(&mut self) {
                        if self.1.fetch_sub(1, Ordering::AcqRel) == 1 {
                            self.0.store(true, Ordering::Release);
                        }
                    }
                }
                let _done = Done(stop, running);
                attack(
                    server,
                    requests,
                    seed + attacker as u64,
                    messages / ATTACKERS,
                );
            });
        }
        good.join().unwrap()
    })
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
// proves: docs/compare.md#hostile-peers
#[test]
fn good_client_is_served_among_mutated_requests() {
    let _turn = turn();
    let server = TestServer::start(&["--l1-size-gb", "0.25"]);
    let mut segments = replay::Segments::default();
    let requests = requests(&mut segments);
    // As many as it takes to have every table, thread and buffer in use.
    let rounds = attack_beside_work(&server, &requests, 1, 3000);
    assert!(rounds > 0);
    let before = own_memory();
    let malformed = server.engine().metrics().malformed_messages.get();
    let rounds = attack_beside_work(&server, &requests, 1000, 24_000);
    assert!(rounds > 10, "{rounds}");
    assert!(
        server.engine().metrics().malformed_messages.get() > malformed + 1000,
        "the attack did not arrive"
    );
    let grown = own_memory().saturating_sub(before);
    assert!(grown < 48 << 20, "{} MiB more than before", grown >> 20);
    server.assert_sound();

    // Whatever they left behind goes by the clock.
    for _ in 0..2 {
        server.pass(Duration::from_secs(2 * 3600));
    }
    let left = server.readings();
    assert_eq!(
        (
            left.instances,
            left.sessions,
            left.leased_objects,
            left.staged_bytes
        ),
        (0, 0, 0, 0)
    );
    let (mut copies, mut pages) = (worker(&server, GOOD[0]), pages(&server, GOOD[1]));
    round(&mut copies, &mut pages, 0);
    server.assert_sound();
}
