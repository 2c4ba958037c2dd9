//! Requests for more than there is, without end, or with replies that are never read.

use kvtier_client::proto::generation::Generation;
use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::pickle;
use kvtier_client::proto::request::Request;
use kvtier_client::proto::response::{PrepareRetrieve, Response, ResponseKind};
use kvtier_client::proto::tensor::InlineTensor;
use kvtier_client::{EngineDrivenSpec, EngineDrivenWorker, InstanceId, Scope};

use crate::good::{GOOD, pages, round, worker};
use crate::support::{Frames, PATIENCE, Raw, TestServer, bytes, prompt, range};
use crate::{own_memory, turn};

#[test]
fn a_chunk_larger_than_everything_evicts_nothing() {
    let _turn = turn();
    let server = TestServer::start(&[]);
    let mut copies = worker(&server, GOOD[0]);
    let len = copies.chunk_bytes();
    let stored = prompt(1, 3);
    copies
        .store(&stored, range(0..3), "s", |chunk| bytes(1, chunk, len))
        .unwrap();
    for layers in [4096, 1 << 20] {
        // 128 MiB and 32 GiB per chunk, in a cache of 64 MiB.
        let scope = Scope::new("hostile/large");
        let mut spec =
            EngineDrivenSpec::new(InstanceId(layers), scope.clone(), layers as u64, 1024);
        spec.block_tokens = 4;
        let mut large = EngineDrivenWorker::register(server.connect(), spec).unwrap();
        let key = scope.worker_key(0, &stored, range(0..3), "l");
        let target = large
            .connection()
            .prepare_store(&key, InstanceId(layers))
            .unwrap()
            .target
            .unwrap();
        assert!(target.slots.is_empty());
    }
    assert_eq!(copies.lookup(&stored, "r").unwrap(), 3);
    server.assert_sound();
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn flooding_client_does_not_stop_another() {
    let _turn = turn();
    let server = TestServer::start(&[]);
    let (mut copies, mut pages) = (worker(&server, GOOD[0]), pages(&server, GOOD[1]));
    let greedy: Vec<Raw> = (0..4).map(|_| server.raw()).collect();
    // Unanswered, as far as it goes: it never reads, and its requests repeat a prompt of 100 chunks.
    let long = prompt(77, 100);
    let scope = Scope::new("hostile/greedy");
    let spec = Generation::G6.spec(Operation::Lookup).unwrap();
    for number in 0..2000_u32 {
        let request = format!("greedy {number}");
        let key = scope.scheduler_key(&long, range(0..100), &request);
        let lookup = Request::Lookup { key, tp_size: 1 };
        let payloads = lookup.encode(spec).unwrap();
        let frames: Frames = [number.to_le_bytes().to_vec(), vec![8]]
            .into_iter()
            .chain(payloads)
            .collect();
        greedy[number as usize % 4].send(&frames);
        if number % 100 == 0 {
            round(&mut copies, &mut pages, number as usize);
        }
    }
    server.assert_sound();
}

/// The value of a series of `/metrics`, 0 before its first event.
fn counted(server: &TestServer, series: &str) -> u64 {
    let text = server.engine().metrics().encode(&server.readings());
    text.lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))
        .map_or(0, |value| value.parse().unwrap())
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn unread_chunks_hold_back_further_chunks() {
    let _turn = turn();
    // A quarter of L1 may be uncommitted.
    let server = TestServer::start(&["--l1-size-gb", "0.25"]);
    // 8 x 2 x 16 x 2048 values are 1 MiB per chunk; 48 of them are 48 MiB per reply.
    let scope = Scope::new("hostile/unread");
    let (instance, chunks) = (InstanceId(3), 48);
    let mut spec = EngineDrivenSpec::new(instance, scope.clone(), 8, 2048);
    (spec.block_tokens, spec.force_pickle) = (4, true);
    let mut worker = EngineDrivenWorker::register(server.connect(), spec).unwrap();
    assert_eq!(worker.chunk_bytes(), 1 << 20);
    let stored = prompt(1, chunks);
    let all = range(0..chunks as u64);
    let data: Vec<Vec<u8>> = (0..chunks)
        .map(|chunk| {
            (0..1 << 20)
                .map(|at| (at / 251 + at + 7 * chunk) as u8)
                .collect()
        })
        .collect();
    worker
        .store(&stored, all.clone(), "s", |chunk| {
            data[chunk as usize].clone()
        })
        .unwrap();

    // Its socket takes one message at a time from the system.
    let context = zmq::Context::new();
    let greedy = context.socket(zmq::DEALER).unwrap();
    greedy.set_rcvhwm(1).unwrap();
    greedy.set_linger(0).unwrap();
    greedy.set_rcvtimeo(PATIENCE.as_millis() as i32).unwrap();
    greedy.connect(server.endpoint()).unwrap();
    let mut ask = |request: &str| {
        assert_eq!(worker.lookup(&stored, request).unwrap(), chunks as u64);
        let key = scope.worker_key(0, &stored, all.clone(), request);
        let spec = Generation::G6.spec(Operation::PrepareRetrieve).unwrap();
        let prepare = Request::PrepareRetrieve { key, instance };
        let head = [b"uid".to_vec(), spec.id().encode()];
        let frames = head.into_iter().chain(prepare.encode(spec).unwrap());
        greedy.send_multipart(frames, 0).unwrap();
    };
    // They were sent in pieces.
    let hit = |frames: Frames| {
        let answer = Response::decode(ResponseKind::PrepareRetrieve, Some(&frames[2])).unwrap();
        let Response::PrepareRetrieve(PrepareRetrieve {
            success,
            data: pickled,
            ..
        }) = answer
        else {
            panic!("{answer:?}");
        };
        if success {
            let tensors = pickle::read_tensors(&pickled, &pickle::PickleLimits::default()).unwrap();
            assert_eq!(tensors.len(), chunks);
            let is_equal = |(tensor, data): (&InlineTensor<'_>, &Vec<u8>)| {
                tensor.contiguous_bytes().unwrap() == data.as_slice()
            };
            assert!(tensors.iter().zip(&data).all(is_equal));
        }
        success
    };

    let before = own_memory();
    let asked = 20;
    (0..asked).for_each(|number| ask(&format!("unread {number}")));
    let served = "kvtier_requests_total{operation=\"prepare_retrieve\"}";
    while counted(&server, served) < asked {
        std::thread::yield_now();
    }
    let grown = own_memory().saturating_sub(before) >> 20;
    let refused =
        "kvtier_refused_requests_total{operation=\"prepare_retrieve\",reason=\"replies_unread\"}";
    let refused = counted(&server, refused);
    assert!((1..asked).contains(&refused), "{refused} refused");
    // Two replies on the other side. On this one chunks are sent from L1.
    assert!(grown < 4 * 48, "{grown} MiB more than before");
    // Their lookups' leases end, those of the replies do not.
    let mut scheduler = server.connect();
    for number in 0..asked {
        scheduler.end_session(&format!("unread {number}")).unwrap();
    }
    let leased = || counted(&server, "kvtier_l1_leased_objects");
    assert_eq!(leased(), chunks as u64);

    let hits = (0..asked).filter(|_| hit(greedy.recv_multipart(0).unwrap()));
    assert_eq!(hits.count() as u64, asked - refused);
    // It has read all there was.
    ask("read");
    assert!(hit(greedy.recv_multipart(0).unwrap()));
    while leased() > 0 {
        std::thread::yield_now();
    }
    let (mut copies, mut pages) = (self::worker(&server, GOOD[0]), pages(&server, GOOD[1]));
    round(&mut copies, &mut pages, 0);
    server.assert_sound();
}
