//! Clients of releases that are recognised and not served: every request gets its "no" in the form of that release, and
//! never a text in place of an operation, which would end such a client's receiving for good.

use kvtier_client::InstanceId;
use kvtier_client::proto::generation::{Field, Generation, OperationSpec};
use kvtier_client::proto::key::CacheKey;
use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::request::{
    BlockAllocation, EngineDrivenContext, EngineType, JobRef, LayoutHints, Registration, Request,
    Retrieve, Seconds, Store,
};
use kvtier_client::proto::response::{
    EngineDriven, PrepareRetrieve, PrepareStore, Response, ResponseKind, StoreTarget,
};

use crate::support::{CHUNK, Frames, Raw, TestServer, tokens};

const OLDER: [Generation; 5] = [
    Generation::G1,
    Generation::G2,
    Generation::G3,
    Generation::G4,
    Generation::G5,
];

const INSTANCE: InstanceId = InstanceId(4711);

/// A request of this row, as its release sends it.
fn request(spec: &OperationSpec) -> Request<'static, Vec<u32>> {
    let key = |worker_id| CacheKey {
        model_name: "older/model",
        world_size: 1,
        worker_id,
        tokens: tokens(1, 2),
        start: 0,
        end: 2 * CHUNK as u64,
        request_id: "r",
        cache_salt: "",
        request_configs: None,
        num_kv_readers: None,
    };
    let job = match spec.payloads.first() {
        Some(Field::JobId) => JobRef::Job(3),
        _ => JobRef::Request("r"),
    };
    let (instance, block_ids) = (INSTANCE, vec![vec![1, 2, 3, 4]]);
    match spec.operation {
        Operation::RegisterKvCache => Request::RegisterKvCache(Registration {
            instance,
            tensors: Vec::new(),
            model_name: "older/model",
            world_size: 1,
            engine: EngineType::Vllm,
            hints: LayoutHints::default(),
            groups: Vec::new(),
        }),
        Operation::UnregisterKvCache => Request::UnregisterKvCache { instance },
        Operation::Store => Request::Store(Store {
            key: key(Some(0)),
            instance,
            block_ids,
            event_handle: b"event",
        }),
        Operation::Retrieve => Request::Retrieve(Retrieve {
            key: key(Some(0)),
            instance,
            block_ids,
            event_handle: b"event",
            skip_first_n_tokens: 0,
        }),
        Operation::Lookup => Request::Lookup {
            key: key(None),
            tp_size: 1,
        },
        Operation::QueryPrefetchStatus => Request::QueryPrefetchStatus { job },
        Operation::QueryPrefetchLookupHits => Request::QueryPrefetchLookupHits { job },
        Operation::WaitPrefetchStatus => Request::WaitPrefetchStatus {
            job,
            timeout: Seconds::Whole(60),
        },
        Operation::FreeLookupLocks => Request::FreeLookupLocks {
            key: key(None),
            tp_size: 1,
        },
        Operation::EndSession => Request::EndSession { request_id: "r" },
        Operation::RegisterEngineDriven => Request::RegisterEngineDriven(EngineDrivenContext {
            instance,
            model_name: "older/model",
            world_size: 1,
            block_size: 4,
            num_layers: 2,
            hidden_dim_size: 8,
            dtype: "bfloat16",
            use_mla: false,
            num_physical_slots: None,
        }),
        Operation::UnregisterEngineDriven => Request::UnregisterEngineDriven { instance },
        Operation::PrepareStore => Request::PrepareStore {
            key: key(Some(0)),
            instance,
        },
        Operation::CommitStore => Request::CommitStore {
            key: key(Some(0)),
            instance,
            data: b"pickle",
        },
        Operation::PrepareRetrieve => Request::PrepareRetrieve {
            key: key(Some(0)),
            instance,
        },
        Operation::CommitRetrieve => Request::CommitRetrieve {
            key: key(Some(0)),
            instance,
        },
        Operation::Clear => Request::Clear { force: false },
        Operation::GetChunkSize => Request::GetChunkSize,
        Operation::Ping => Request::Ping {
            instance: Some(instance),
        },
        Operation::ReportBlockAllocation => Request::ReportBlockAllocation(BlockAllocation {
            instance: Some(instance),
            model_name: Some("older/model"),
            records: Vec::new(),
        }),
        Operation::Noop => Request::Noop,
        other => panic!("no older release asks for {}", other.name()),
    }
}

/// The "no" of an operation, in the form of the row.
fn refusal(spec: &OperationSpec) -> Response<'static> {
    match (spec.operation, spec.response) {
        (Operation::GetChunkSize, _) => Response::Int(CHUNK as i64),
        (Operation::CommitRetrieve, _) => Response::Bool(true),
        // Unhealthy, they send nothing and wait for nothing.
        (Operation::Ping | Operation::CommitStore, _) => Response::Bool(false),
        (_, ResponseKind::Nothing) => Response::Nothing,
        (_, ResponseKind::Int | ResponseKind::OptionalInt) => Response::Int(0),
        (_, ResponseKind::Text) => Response::Text("OK".into()),
        (_, ResponseKind::EngineDriven) => Response::EngineDriven(EngineDriven {
            shm_name: "".into(),
            pool_size: 0,
        }),
        (_, ResponseKind::PrepareStore) => Response::PrepareStore(PrepareStore {
            target: Some(StoreTarget::default()),
        }),
        (operation, kind) => panic!("{} answers with {kind:?}", operation.name()),
    }
}

/// Whether a "no" to this would harm its client: a worker on a GPU dies of an answer without an event, and a refused
/// retrieve is not noticed. Such a request has no answer until a ping was answered "no".
fn is_kept_back(spec: &OperationSpec) -> bool {
    matches!(
        spec.operation,
        Operation::Store | Operation::Retrieve | Operation::PrepareRetrieve
    )
}

fn frames(uid: u8, spec: &OperationSpec) -> Frames {
    let payloads = request(spec).encode(spec).unwrap();
    [vec![uid], spec.id().encode()]
        .into_iter()
        .chain(payloads)
        .collect()
}

/// Sends the first request of every adapter.
fn hello(client: &Raw, generation: Generation) {
    let hello = frames(0, generation.spec(Operation::GetChunkSize).unwrap());
    client.send(&hello);
    assert_eq!(
        client.receive(),
        [hello[0].clone(), hello[1].clone(), vec![16]],
        "{generation:?}"
    );
}

#[test]
fn requests_are_answered_in_their_releases_form() {
    let server = TestServer::start(&[]);
    for generation in OLDER {
        let client = server.raw();
        hello(&client, generation);
        for (uid, spec) in (1..).zip(generation.specs()) {
            let request = frames(uid, spec);
            client.send(&request);
            if is_kept_back(spec) {
                continue;
            }
            let answer = client.receive();
            let context = format!("{generation:?} {}: {answer:02x?}", spec.operation.name());
            assert_eq!(answer[..2], request[..2], "{context}");
            let response = Response::decode(spec.response, answer.get(2).map(Vec::as_slice));
            assert_eq!(response.unwrap(), refusal(spec), "{context}");
        }
    }
    assert_eq!(server.readings().instances, 0);
    assert_eq!(server.readings().used_bytes, 0);
    server.assert_sound();
}

#[test]
fn refused_ping_precedes_refused_engine_driven_retrieve() {
    let server = TestServer::start(&[]);
    for generation in [Generation::G3, Generation::G4, Generation::G5] {
        let client = server.raw();
        hello(&client, generation);
        let asked = frames(1, generation.spec(Operation::PrepareRetrieve).unwrap());
        client.send(&asked);
        // The ping may pass the request that is refused; then the next one reports it.
        let ping = frames(2, generation.spec(Operation::Ping).unwrap());
        let answer = loop {
            client.send(&ping);
            let message = client.receive();
            if message[0] == asked[0] {
                break message;
            }
            assert_eq!((&message[0], &message[2]), (&vec![2], &vec![0xc2]));
            server.pass(std::time::Duration::from_secs(1));
        };
        assert_eq!(answer[..2], asked[..2], "{generation:?}");
        let miss = Response::PrepareRetrieve(PrepareRetrieve::miss());
        assert_eq!(
            Response::decode(
                ResponseKind::PrepareRetrieve,
                answer.get(2).map(Vec::as_slice)
            )
            .unwrap(),
            miss
        );
    }
}

/// 16 with a key and a worker prepares a store in the newest generation and commits a retrieve in 0.5.0 to 0.5.2. The former
/// dies of an answer without a payload, the latter stops receiving at one of another type.
#[test]
fn ambiguous_request_waits_for_the_ping() {
    let server = TestServer::start(&[]);
    let reconnected = |generation: Generation, operation| {
        let client = server.raw();
        let mut key = frames(8, Generation::G5.spec(Operation::CommitRetrieve).unwrap());
        key[0] = vec![8];
        client.send(&key);
        let ping = frames(9, generation.spec(Operation::Ping).unwrap());
        client.send(&ping);
        let (first, second) = (client.receive(), client.receive());
        assert_eq!(
            (&first[0], &second[0]),
            (&key[0], &ping[0]),
            "{generation:?}"
        );
        let kind = generation.spec(operation).unwrap().response;
        Response::decode(kind, first.get(2).map(Vec::as_slice))
            .unwrap()
            .encode()
    };
    let target = PrepareStore {
        target: Some(StoreTarget::default()),
    };
    assert_eq!(
        reconnected(Generation::G6, Operation::PrepareStore),
        Response::PrepareStore(target).encode()
    );
    assert_eq!(
        reconnected(Generation::G5, Operation::CommitRetrieve),
        Response::Bool(true).encode()
    );
}

#[test]
fn nonsense_gets_no_text_either() {
    let server = TestServer::start(&[]);
    for generation in OLDER {
        let client = server.raw();
        hello(&client, generation);
        let number = |operation| generation.spec(operation).unwrap().id().encode();
        let nonsense: [Frames; 9] = [
            vec![vec![1], vec![99]],
            vec![vec![2], b"\xa4ping".to_vec()],
            vec![vec![3], b"\xc1".to_vec()],
            vec![vec![4], number(Operation::GetChunkSize), vec![1]],
            vec![vec![5], number(Operation::Store)],
            vec![
                vec![6],
                number(Operation::Lookup),
                b"\x80".to_vec(),
                vec![1],
            ],
            vec![vec![7], number(Operation::EndSession), b"\xc1".to_vec()],
            vec![vec![8], number(Operation::RegisterKvCache), vec![1]],
            vec![vec![9]],
        ];
        for message in &nonsense {
            client.send(message);
        }
        // Whatever is answered to that is answered by the time of these.
        let lanes = [
            Operation::Noop,
            Operation::EndSession,
            Operation::UnregisterKvCache,
        ];
        for (uid, operation) in (100..).zip(lanes) {
            client.send(&frames(uid, generation.spec(operation).unwrap()));
        }
        let mut left = lanes.len();
        while left > 0 {
            let answer = client.receive();
            if answer[0][0] >= 100 {
                left -= 1;
                continue;
            }
            let request = nonsense
                .iter()
                .find(|message| message[0] == answer[0])
                .unwrap();
            assert_eq!(
                answer[1], request[1],
                "{generation:?}: another operation frame in {answer:02x?}"
            );
        }
    }
    server.assert_sound();
}

#[test]
fn an_operation_of_no_table_is_answered_too() {
    let server = TestServer::start(&[]);
    let by_name: Frames = vec![vec![7], b"\xb0future_operation".to_vec(), vec![0x80]];
    let by_number: Frames = vec![vec![8], vec![99], vec![0x80]];
    // A connection that came back may begin with anything; a fresh one says hello.
    for decided in [false, true] {
        let client = server.raw();
        if decided {
            hello(&client, Generation::G6);
        }
        // A client that calls by name takes a text.
        client.send(&by_name);
        let answer = client.receive();
        assert_eq!((answer.len(), &answer[0]), (2, &by_name[0]), "{decided}");
        let text = String::from_utf8_lossy(&answer[1]);
        assert!(
            text.contains("future_operation") && text.contains("unknown"),
            "{text}"
        );
        // A number says nothing of the kind: its own frames come back.
        let client = server.raw();
        if decided {
            hello(&client, Generation::G6);
        }
        client.send(&by_number);
        assert_eq!(client.receive(), by_number[..2], "{decided}");
    }
    for generation in OLDER {
        let client = server.raw();
        hello(&client, generation);
        for request in [&by_name, &by_number] {
            client.send(request);
            assert_eq!(client.receive(), request[..2], "{generation:?}");
        }
    }
    server.assert_sound();
}

#[test]
fn a_newer_client_beside_them_is_served() {
    let server = TestServer::start(&[]);
    let scope = kvtier_client::Scope::new("older/model");
    let mut worker = server.engine_driven(INSTANCE.0, &scope);
    let (prompt, len) = (crate::support::prompt(1, 2), worker.chunk_bytes());
    let stored = worker
        .store(&prompt, crate::support::range(0..2), "r", |_| vec![7; len])
        .unwrap();
    assert_eq!(stored.chunks.len(), 2);
    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 2);
    for generation in OLDER {
        let client = server.raw();
        hello(&client, generation);
        for (uid, spec) in (1..).zip(generation.specs()) {
            client.send(&frames(uid, spec));
            if !is_kept_back(spec) {
                client.receive();
            }
        }
    }
    // Not even the same instance, request and prompt in all of their requests did it harm.
    assert_eq!(server.readings().leased_objects, 2);
    let read = worker.retrieve(&prompt, crate::support::range(0..2), "r", |_, got| {
        assert_eq!(got, vec![7; len])
    });
    assert!(read.unwrap().is_some());
}

#[test]
fn held_answer_is_sent_before_the_server_stops() {
    let server = TestServer::start(&[]);
    let client = server.raw();
    hello(&client, Generation::G5);
    let asked = frames(1, Generation::G5.spec(Operation::PrepareRetrieve).unwrap());
    client.send(&asked);
    let ping = frames(2, Generation::G5.spec(Operation::Ping).unwrap());
    while server
        .engine()
        .metrics()
        .encode(&server.readings())
        .lines()
        .all(|line| {
            !line.starts_with("kvtier_refused_requests_total{operation=\"prepare_retrieve\"")
        })
    {
        client.send(&ping);
        client.receive();
    }
    let engine = std::sync::Arc::downgrade(server.engine());
    let stopped = std::thread::spawn(move || drop(server));
    client.send(&ping);
    while client.receive()[0] != asked[0] {}
    stopped.join().unwrap();
    assert!(engine.upgrade().is_none(), "nothing keeps the engine");
}
