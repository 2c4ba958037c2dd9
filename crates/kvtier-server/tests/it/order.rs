//! What waits for what: transfers of one connection keep their order, everything else waits for no copy.

use kvtier_client::proto::request::{JobRef, Request, Seconds, Store};
use kvtier_client::proto::response::Response;
use kvtier_client::{InstanceId, LmcacheDrivenSpec, LmcacheDrivenWorker, Scope, Ticket};

use crate::support::{TestServer, bytes, context, prompt, range};

/// Pipelines stores of 16 MiB each, of different prompts.
fn send_stores(worker: &mut LmcacheDrivenWorker, scope: &Scope, count: u32) -> Vec<Ticket> {
    let blocks: Vec<i64> = (0..64).collect();
    (0..count)
        .map(|seed| {
            let prompt = prompt(seed, 16);
            let store = Store {
                key: scope.worker_key(0, &prompt, range(0..16), "r"),
                instance: InstanceId(1),
                block_ids: vec![blocks.clone()],
                event_handle: b"stub_ipc_handle",
            };
            worker.connection().send(&Request::Store(store)).unwrap()
        })
        .collect()
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn control_requests_do_not_wait_for_copies() {
    // One thread copies and one does the rest, so nothing but the lanes lets them pass each other.
    let server = TestServer::start(&["--max-gpu-workers", "1", "--max-cpu-workers", "1"]);
    let scope = Scope::new("order/lanes");
    // 64 blocks of 4 tokens; 2 x 8 layers x 16 tokens x 16 x 128 values x 2 bytes are 1 MiB per chunk.
    let mut spec = LmcacheDrivenSpec::new(InstanceId(1), scope.clone(), 8, 16, 128, 64);
    spec.block_tokens = 4;
    let mut worker = LmcacheDrivenWorker::register(server.connect(), spec).unwrap();
    assert_eq!(worker.chunk_bytes(), 1 << 20);
    // Over a second of copying in the lane of this connection.
    let stores = send_stores(&mut worker, &scope, 200);
    let absent = prompt(5000, 1);
    let connection = worker.connection();
    let others = [
        connection
            .send::<Vec<u32>>(&Request::Ping {
                instance: Some(InstanceId(1)),
            })
            .unwrap(),
        connection.send::<Vec<u32>>(&Request::GetChunkSize).unwrap(),
        connection
            .send(&Request::Lookup {
                key: scope.scheduler_key(&absent, range(0..1), "q"),
                tp_size: 1,
            })
            .unwrap(),
        connection
            .send::<Vec<u32>>(&Request::EndSession { request_id: "q" })
            .unwrap(),
        connection
            .send::<Vec<u32>>(&Request::WaitPrefetchStatus {
                job: JobRef::Request("unknown"),
                timeout: Seconds::Whole(50),
            })
            .unwrap(),
    ];
    let last = *stores.last().unwrap();
    let mut waited_for = Vec::new();
    for ticket in others {
        let reply = connection.receive(ticket).unwrap();
        waited_for.push(reply.received());
    }
    let copied = connection.receive(last).unwrap().received();
    assert!(
        waited_for.iter().all(|received| *received < copied),
        "a reply waited for all the copies"
    );
    for ticket in &stores[..199] {
        assert!(
            connection.receive(*ticket).unwrap().received() <= copied,
            "stores are answered in order"
        );
    }
    server.assert_sound();
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn other_connection_does_not_wait_for_copies() {
    let server = TestServer::start(&["--max-gpu-workers", "1", "--max-cpu-workers", "1"]);
    let scope = Scope::new("order/turns");
    let mut spec = LmcacheDrivenSpec::new(InstanceId(1), scope.clone(), 8, 16, 128, 64);
    spec.block_tokens = 4;
    let mut busy = LmcacheDrivenWorker::register(server.connect(), spec).unwrap();
    let stores = send_stores(&mut busy, &scope, 200);
    // Its transfers take turns with those of the busy one, even on one thread.
    let mut stranger = server.lmcache_driven(2, &Scope::new("order/stranger"));
    let prompt = prompt(9000, 1);
    assert!(
        stranger
            .store(&prompt, range(0..1), "r", &[1, 2, 3, 4])
            .unwrap()
    );
    let served = std::time::Instant::now();
    let last = busy
        .connection()
        .receive(*stores.last().unwrap())
        .unwrap()
        .received();
    assert!(served < last, "the stranger waited for all the copies");
}

// proves: docs/clients.md#one-client-is-slow-or-floods-the-server
#[test]
fn transfers_of_one_connection_keep_their_order() {
    let server = TestServer::start(&["--max-gpu-workers", "4"]);
    let scope = Scope::new("order/kept");
    let instance = InstanceId(1);
    let mut connection = server.connect();
    let mut tickets = Vec::new();
    let prompts: Vec<_> = (0..200).map(|seed| prompt(seed, 1)).collect();
    for prompt in &prompts {
        let key = scope.worker_key(0, prompt, range(0..1), "r");
        let commit = Request::CommitStore {
            key: key.clone(),
            instance,
            data: b"",
        };
        // Each is answered like this only behind the one before it. None waits for an answer.
        let in_order = [
            (
                Request::RegisterEngineDriven(context(instance.0, &scope)),
                None,
            ),
            (
                Request::PrepareStore {
                    key: key.clone(),
                    instance,
                    skipped_chunks: Vec::new(),
                },
                None,
            ),
            (commit.clone(), Some(true)),
            (commit.clone(), Some(false)),
            (Request::PrepareRetrieve { key, instance }, None),
            (Request::UnregisterEngineDriven { instance }, None),
            (commit, Some(false)),
        ];
        for (request, verdict) in &in_order {
            tickets.push((connection.send(request).unwrap(), *verdict));
        }
    }
    for (number, (ticket, verdict)) in tickets.into_iter().enumerate() {
        let reply = connection.receive(ticket).unwrap();
        match (reply.response().unwrap(), verdict) {
            (Response::Bool(answer), Some(expected)) => {
                assert_eq!(answer, expected, "request {number}")
            }
            (Response::PrepareStore(answer), None) => {
                assert_eq!(answer.target.unwrap().slots.len(), 1, "request {number}");
            }
            (_, expected) => assert_eq!(expected, None, "request {number}"),
        }
    }
    let readings = server.readings();
    assert_eq!(
        (readings.objects, readings.staged_bytes, readings.instances),
        (200, 0, 0)
    );
}

#[test]
fn concurrent_stores_of_many_connections_are_correct() {
    let server = TestServer::start(&["--max-workers", "4"]);
    let scope = Scope::new("order/many");
    std::thread::scope(|threads| {
        for thread in 0..6_u32 {
            let (server, scope) = (&server, &scope);
            threads.spawn(move || {
                let mut worker = server.engine_driven(i64::from(thread) + 1, scope);
                let len = worker.chunk_bytes();
                for round in 0..60 {
                    // Half of the prompts are shared between all threads, and every thread stores the same bytes.
                    let seed = if round % 2 == 0 {
                        round
                    } else {
                        (thread + 1) * 1000 + round
                    };
                    let (prompt, request) = (prompt(seed, 3), format!("{thread} {round}"));
                    worker
                        .store(&prompt, range(0..3), &request, |chunk| {
                            bytes(u64::from(seed), chunk, len)
                        })
                        .unwrap();
                    assert_eq!(worker.lookup(&prompt, &request).unwrap(), 3);
                    let check =
                        |chunk, got: &[u8]| assert_eq!(got, bytes(u64::from(seed), chunk, len));
                    assert!(
                        worker
                            .retrieve(&prompt, range(0..3), &request, check)
                            .unwrap()
                            .is_some()
                    );
                    worker.connection().end_session(&request).unwrap();
                }
            });
        }
    });
    let readings = server.readings();
    assert_eq!(
        (
            readings.leased_objects,
            readings.staged_bytes,
            readings.sessions
        ),
        (0, 0, 0)
    );
    server.assert_sound();
}
