//! The front end without its thread: a test takes each step, and its pools run jobs when the test asks for it.

mod connections;

use std::io::{ErrorKind, Read as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use kvtier_core::prompt::Prompt;
use kvtier_engine::{Caller, EngineAnswer, Reply};
use kvtier_proto::frames::ClientMessage;
use kvtier_proto::generation::{Generation, Release};
use kvtier_proto::key::{CacheKey, KeyForm};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{EngineDrivenContext, InstanceId, Request};

use super::client::Client;
use super::connections::ConnectionBounds;
use super::limits::{JOB_BYTES, MAX_HEAD};
use super::request::{RequestJob, RequestSender, error_frame};
use super::*;
use crate::inherited::Inherited;
use kvtier_observe::metrics::Metrics;

struct ByHand {
    /// Lets one job run for each message, and all once it is dropped. First, so that nothing waits for it at the end.
    gate: Option<Sender<()>>,
    client: zmq::Socket,
    /// Answers to the client that are not yet asked for.
    answered: Vec<Vec<Vec<u8>>>,
    another: Client,
    front: Front,
}

/// Uid of the request that follows each message, answered at once: the message has been taken by then.
const BARRIER: &[u8] = b"barrier";

impl ByHand {
    /// A front end with one client, which has said hello, and `request_bytes` for requests that wait.
    fn new(request_bytes: u64) -> Self {
        Self::bounded(10, request_bytes)
    }

    /// Starts a server for at most `connections` clients.
    fn bounded(connections: usize, request_bytes: u64) -> Self {
        Self::with(serve::bounds(connections, 1 << 30), request_bytes)
    }

    /// Starts a server with these bounds.
    fn with(bounds: ConnectionBounds, request_bytes: u64) -> Self {
        let flags = ["--port", "0", "--http-port", "0", "--l1-size-gb", "0.0625"];
        let pickled = ["--no-l1-prefault", "--shm-name", ""];
        let patient = ["--stop-timeout-seconds", "600"];
        let config = ServerConfig::from_flags(&[&flags[..], &pickled, &patient].concat()).unwrap();
        let socket = RequestSocket::bind(&config, &mut Inherited::default()).unwrap();
        let engine = Engine::new(Arc::new(config), Arc::new(Metrics::new())).unwrap();
        let (outbox, inbox) = outbox::outbox().unwrap();
        let server = Arc::new(RequestServer::new(Arc::new(engine), Arc::default(), outbox));
        let (gate, told) = bounded::<()>(0);
        let pool = |name| {
            let (server, told) = (Arc::clone(&server), told.clone());
            LanePool::start(name, 1, move |job, turn| {
                // An error is the gate that was dropped.
                let _ = told.recv();
                server.serve(job, Some(turn));
            })
            .unwrap()
        };
        let client = zmq::Context::new().socket(zmq::DEALER).unwrap();
        client.connect(socket.endpoint()).unwrap();
        let pools = [pool("transfer"), pool("control")];
        let server = Arc::clone(&server);
        let front = Front::new(
            Arc::new(socket),
            server,
            inbox,
            pools,
            bounds,
            request_bytes,
        )
        .unwrap();
        let mut by_hand = Self {
            gate: Some(gate),
            client,
            answered: Vec::new(),
            another: front.budgets.client(u64::MAX),
            front,
        };
        by_hand.send(&[&[0], &[21]]);
        assert_eq!(by_hand.answers().len(), 1);
        by_hand
    }

    /// Sends a message and waits until it has been taken.
    fn send(&mut self, frames: &[&[u8]]) {
        self.client.send_multipart(frames, 0).unwrap();
        self.client.send_multipart([BARRIER, &[24]], 0).unwrap();
        self.turn_until(|answered| answered.iter().any(|answer| answer[0] == BARRIER));
        self.answered.retain(|answer| answer[0] != BARRIER);
    }

    fn turn_until(&mut self, done: impl Fn(&[Vec<Vec<u8>>]) -> bool) {
        while !done(&self.answered) {
            self.front.turn(Duration::from_millis(1)).unwrap();
            while let Ok(answer) = self.client.recv_multipart(zmq::DONTWAIT) {
                self.answered.push(answer);
            }
        }
    }

    /// A connection that says nothing.
    fn connect(&self) -> TcpStream {
        let endpoint = self.client.get_last_endpoint().unwrap().unwrap();
        let stream = TcpStream::connect(endpoint.strip_prefix("tcp://").unwrap()).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    }

    /// Turns until `stream` has something to read, or has ended, and returns what it has.
    fn read(&mut self, stream: &mut TcpStream) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        loop {
            self.front.turn(Duration::from_millis(1)).unwrap();
            match stream.read(&mut bytes) {
                Ok(len) => return bytes[..len].to_vec(),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
    }

    /// A request as it is when it has been taken and was not queued.
    fn job(&mut self, frames: &[&[u8]]) -> RequestJob {
        let Ok(ClientMessage::Request(message)) = ClientMessage::parse(frames.iter().copied())
        else {
            panic!("no request");
        };
        let resolved = self
            .another
            .candidates
            .resolve(&message, &[Generation::G6])
            .unwrap();
        let payloads: Vec<_> = frames[2..].iter().map(|payload| payload.to_vec()).collect();
        let sender = RequestSender {
            peer: Arc::clone(&self.another.peer),
            uid: frames[0].to_vec(),
            op: frames[1].to_vec(),
            bytes: payloads.iter().map(|payload| payload.len() as u64).sum(),
            charge: None,
            resolved,
            lookup_number: None,
            received: Instant::now(),
        };
        RequestJob { sender, payloads }
    }

    /// What has been answered since the last look.
    fn answers(&mut self) -> Vec<Vec<Vec<u8>>> {
        std::mem::take(&mut self.answered)
    }

    /// Lets the jobs that wait run, and gives their answers.
    fn run(&mut self, jobs: usize) -> Vec<Vec<Vec<u8>>> {
        self.gate = None;
        self.turn_until(|answered| answered.len() >= jobs);
        self.answers()
    }

    /// How often an operation was refused for this reason.
    fn refused(&self, operation: &str, reason: &str) -> u64 {
        let text = self.metrics().encode(&Default::default());
        let series = format!(
            "kvtier_refused_requests_total{{operation=\"{operation}\",reason=\"{reason}\"}} "
        );
        text.lines()
            .find_map(|line| line.strip_prefix(&series))
            .map_or(0, |count| count.parse().unwrap())
    }

    fn metrics(&self) -> &Metrics {
        self.front.server.engine.metrics()
    }
}

/// A text of `len` bytes in MessagePack.
fn text(len: usize) -> Vec<u8> {
    error_text(&"x".repeat(len))
}

fn error_text(text: &str) -> Vec<u8> {
    let mut frame = Vec::new();
    kvtier_proto::wire::write_str(&mut frame, text);
    frame
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn requests_beyond_the_budget_are_refused_at_once_and_later_ones_are_not() {
    // A connection may have half of it: two of these requests, not three.
    let mut server = ByHand::new(2 * 60_000);
    let payload = text(20_000);
    for uid in 1..=3 {
        server.send(&[&[uid], &[15], &payload]);
    }
    assert_eq!(server.answers(), [[[3], [15]]]);
    assert_eq!(
        server.refused("unregister_kv_cache_engine_driven_context", "queue_full"),
        1
    );
    assert_eq!(server.run(2).len(), 2);
    server.send(&[&[4], &[15], &payload]);
    server.run(1);
    assert_eq!(
        server.refused("unregister_kv_cache_engine_driven_context", "queue_full"),
        1
    );
}

#[test]
fn many_small_requests_are_counted_by_what_they_hold() {
    let mut server = ByHand::new(2 * 10 * JOB_BYTES);
    let payload = text(3);
    for uid in 1..=20 {
        server.send(&[&[uid], &[15], &payload]);
    }
    assert_eq!(server.answers().len(), 11);
    assert_eq!(
        server.refused("unregister_kv_cache_engine_driven_context", "queue_full"),
        11
    );
    server.run(9);
}

#[test]
fn requests_whose_answers_are_to_come_are_counted_until_they_have_come() {
    let mut by_hand = ByHand::new(2 * 2 * (JOB_BYTES + 4));
    let server = Arc::clone(&by_hand.front.server);
    let mut wait = |uid| {
        let job = by_hand.job(&[&[uid], &[13], &text(3)]);
        let mut reply = server.reply(job.sender, None);
        reply.later().then_some(reply)
    };
    let waiting = [wait(1), wait(2)];
    assert!(waiting.iter().all(Option::is_some) && wait(3).is_none());
    drop(waiting);
    assert!(wait(4).is_some());
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
#[test]
fn only_a_commit_may_be_large() {
    let mut server = ByHand::new(1 << 30);
    let large = text((64 << 20) + 1);
    server.send(&[&[1], &[13], &large]);
    assert_eq!(server.answers(), [[[1], [13]]]);
    assert_eq!(server.refused("end_session", "request_too_large"), 1);
    server.send(&[&[2], &[17], b"\x80", &[1], &large]);
    assert_eq!(server.run(1), [[[2], [17], [0xc2]]]);
    assert_eq!(server.refused("commit_store", "undecodable"), 1);
}

/// A lookup of `count` one-byte token ids by the scheduler of a model with this world size.
fn lookup(count: usize, world_size: u32) -> Vec<u8> {
    let key = CacheKey {
        model_name: "wide",
        world_size,
        worker_id: None,
        tokens: vec![1_u32; count],
        start: 0,
        end: count as u64,
        chunk_tokens: None,
        request_id: "r",
        cache_salt: "",
        request_configs: None,
        num_kv_readers: Some(1),
    };
    let mut payload = Vec::new();
    key.write(KeyForm::Full, &mut payload);
    payload
}

/// Whether the last of these requests of one client waits for another thread. A worker of a world of 64 is registered.
fn last_waits(is_alone: bool, requests: &[[&[u8]; 2]]) -> bool {
    let mut server = ByHand::new(1 << 30);
    let worker = Request::<Prompt>::RegisterEngineDriven(EngineDrivenContext {
        instance: InstanceId(1),
        model_name: "wide",
        world_size: 64,
        block_size: 16,
        num_layers: 1,
        hidden_dim_size: 1,
        dtype: "float32",
        use_mla: false,
        chunk_tokens: None,
        num_physical_slots: None,
        groups: None,
        takes_pool: false,
    });
    let engine = Arc::clone(&server.front.server.engine);
    let caller = Caller {
        connection: 0,
        release: Release::Since0_5_5,
        releases: "0.5.6",
        knows_chunk_size: true,
        negotiates_chunk_size: false,
        registers_again: Some(true),
        names_workers: true,
    };
    engine.handle(caller, &worker, Reply::new(|_: Option<EngineAnswer>| {}));
    assert!(engine.is_registered(InstanceId(1)));
    let Front {
        connections,
        budgets,
        ..
    } = &mut server.front;
    let is_known = |id: &u64| connections.client(*id, || budgets.client(*id)).is_some();
    let id = (0..10).find(is_known).unwrap();
    server.front.is_alone = is_alone;
    for [op, payload] in requests {
        let mut frames = vec![b"uid".to_vec(), op.to_vec(), payload.to_vec()];
        // The second payload of a lookup.
        frames.extend((op[0] == 8).then(|| vec![1]));
        server.front.take(id, frames);
    }
    let client = server.front.connections.client(id, || unreachable!());
    let waits = !client.unwrap().control.is_idle();
    server.run(0);
    waits
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn lookups_are_served_at_once_by_their_work() {
    // Token ids, and ranks of one object group each: whether they wait beside others, and without.
    for (count, ranks, beside, alone) in [
        (60_000, 1, false, false),
        (80_000, 1, true, false),
        (300_000, 1, true, true),
        // 64 and 240 chunks of 64 objects.
        (16_384, 64, true, false),
        (61_440, 64, true, true),
        (1024, 64, false, false),
    ] {
        let payload = lookup(count, ranks);
        let request: [&[u8]; 2] = [&[8], &payload];
        let waits = [false, true].map(|is_alone| last_waits(is_alone, &[request]));
        assert_eq!(waits, [beside, alone], "{count} token ids, {ranks} ranks");
    }
    // The end of a session releases what a lookup has found.
    let end: [&[u8]; 2] = [&[13], b"\xa1r"];
    let [short, long] = [1024, 16_384].map(|count| lookup(count, 64));
    assert!(!last_waits(false, &[[&[8], &short], end]));
    assert!(!last_waits(true, &[[&[8], &long], end]));
}

#[test]
fn end_of_a_session_is_the_work_of_its_longest_lookup() {
    let mut client = ByHand::new(1 << 30).another;
    assert_eq!(client.work(Operation::EndSession, 3), 3);
    assert_eq!(client.work(Operation::Lookup, 1000), 1000);
    assert_eq!(client.work(Operation::Lookup, 10), 10);
    assert_eq!(client.work(Operation::EndSession, 3), 1000);
}

// proves: docs/clients.md#a-client-sends-malformed-or-hostile-messages
#[test]
fn message_with_too_many_frames_is_malformed_and_the_next_is_served() {
    let mut server = ByHand::new(1 << 20);
    server.send(&[&[7_u8][..]; 1000]);
    assert_eq!(server.answers(), Vec::<Vec<Vec<u8>>>::new());
    assert_eq!(server.metrics().malformed_messages.get(), 1);
}

#[test]
fn what_is_sent_back_as_it_came_is_small() {
    let mut server = ByHand::new(1 << 20);
    let long = [1; MAX_HEAD];
    server.send(&[&long, &[24]]);
    server.send(&[&[1], &long]);
    assert_eq!(server.answers(), Vec::<Vec<Vec<u8>>>::new());
    assert_eq!(server.metrics().malformed_messages.get(), 2);
    server.send(&[&long[1..], &[24]]);
    assert_eq!(server.answers().len(), 1);
    // An error repeats what it is about, but not all of it.
    assert!(error_frame(&"é".repeat(1 << 20)).len() < 1100);
    assert_eq!(error_frame("short"), error_text("short"));
}

/// Lines of the log.
#[derive(Default)]
struct Log(kvtier_common::sync::Mutex<Vec<u8>>);

impl std::io::Write for &Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

// proves: docs/troubleshoot.md#the-log
#[test]
fn no_client_fills_the_log() {
    let log = Arc::new(Log::default());
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_writer(Arc::clone(&log))
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let mut server = ByHand::new(0);
        for _ in 0..1000 {
            // No request; an unknown operation; one that has to wait, without memory for it; invalid payloads.
            server.send(&[&[1]]);
            server.send(&[&[2], &[99]]);
            server.send(&[&[3], &[15], b"\xa1x"]);
            server.send(&[&[4], &[9], b"\xc1"]);
            server.answers();
        }
    });
    let log = String::from_utf8(log.0.lock().clone()).unwrap();
    for said in [
        "a message that is no request was dropped",
        "a request that no table knows",
        "a client's request was refused",
        "that cannot be decoded",
    ] {
        // One a second; this does not take 50.
        let times = log.lines().filter(|line| line.contains(said)).count();
        assert!((1..50).contains(&times), "{times} times: {said}");
    }
}

#[test]
fn the_limit_of_a_frame_is_told() {
    // MessagePack's, whatever the flag says.
    assert_eq!(limits::max_frame(u64::MAX) >> 30, 4);
    let reference = kvtier_config::reference_markdown();
    let mut lines = reference.lines();
    let flag = lines.find(|line| line.contains("`--max-message-gb`"));
    assert!(flag.unwrap().contains("frames above 4 GiB"));
}

/// A client would wait for ever for the answer to a request that a stopping server does not read.
#[test]
fn stop_serves_until_nothing_is_in_flight() {
    let mut server = ByHand::new(1 << 20);
    let payload = text(3);
    server.send(&[&[1], &[15], &payload]);
    let ByHand {
        gate,
        client,
        front,
        ..
    } = server;
    front.stop.store(true, Ordering::Release);
    let stopping = std::thread::spawn(|| front.run());
    client.set_rcvtimeo(60_000).unwrap();
    let uid = || client.recv_multipart(0).unwrap().remove(0);
    client.send_multipart([&[2], &[15], &*payload], 0).unwrap();
    client.send_multipart([BARRIER, &[24]], 0).unwrap();
    assert_eq!(uid(), BARRIER);
    drop(gate);
    assert_eq!([uid(), uid()], [[1], [2]]);
    stopping.join().unwrap();
}
