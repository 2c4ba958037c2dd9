//! Clients of releases up to 0.5.2: every answer has the form of that release, and is never a text in place of an operation,
//! which would end such a client's receiving for good. The real clients of all releases are in `tests/conformance`.

use kvtier_client::InstanceId;
use kvtier_client::proto::descriptor::Dtype;
use kvtier_client::proto::generation::{Field, Generation, OperationSpec};
use kvtier_client::proto::key::CacheKey;
use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::pickle::{self, TensorToWrite};
use kvtier_client::proto::request::{
    BlockAllocation, EngineDrivenContext, EngineType, JobRef, LayoutHints, Registration, Request,
    Retrieve, Seconds, Store,
};
use kvtier_client::proto::response::{
    PrepareRetrieve, PrepareStore, Response, ResponseKind, StoreTarget,
};

use crate::support::{CHUNK, Frames, PATIENCE, Raw, TestServer, tokens};

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
        chunk_tokens: None,
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
            chunk_tokens: None,
            num_physical_slots: None,
            takes_pool: true,
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

/// The answer to a request of a worker that is not registered, in the form of the row.
fn refusal(spec: &OperationSpec) -> Option<Response<'static>> {
    Some(match (spec.operation, spec.response) {
        // Its number.
        (Operation::Lookup, ResponseKind::Int) => return None,
        (Operation::GetChunkSize, _) => Response::Int(CHUNK as i64),
        (Operation::Ping | Operation::CommitStore | Operation::CommitRetrieve, _) => {
            Response::Bool(false)
        }
        (_, ResponseKind::Nothing) => Response::Nothing,
        (_, ResponseKind::Int | ResponseKind::OptionalInt) => Response::Int(0),
        (_, ResponseKind::Text) => Response::Text("OK".into()),
        (_, ResponseKind::PrepareStore) => Response::PrepareStore(PrepareStore {
            target: Some(StoreTarget::default()),
        }),
        (operation, kind) => panic!("{} answers with {kind:?}", operation.name()),
    })
}

/// Whether a "no" to this would harm its client: a worker on a GPU dies of an answer without an event, and a refused
/// retrieve is not noticed. Such a request has no answer until a ping was answered "no".
fn is_kept_back(spec: &OperationSpec) -> bool {
    matches!(
        spec.operation,
        Operation::Store | Operation::Retrieve | Operation::PrepareRetrieve
    )
}

fn is_registration(spec: &OperationSpec) -> bool {
    matches!(
        spec.operation,
        Operation::RegisterKvCache | Operation::RegisterEngineDriven
    )
}

fn frames(uid: u8, spec: &OperationSpec) -> Frames {
    frames_of(uid, spec, &request(spec))
}

fn frames_of(uid: u8, spec: &OperationSpec, request: &Request<'_, Vec<u32>>) -> Frames {
    let payloads = request.encode(spec).unwrap();
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

/// Sends a request and returns the payload of its answer.
fn ask(
    client: &Raw,
    uid: u8,
    generation: Generation,
    request: &Request<'_, Vec<u32>>,
) -> Option<Vec<u8>> {
    let spec = generation.spec(request.operation()).unwrap();
    client.send(&frames_of(uid, spec, request));
    let mut answer = client.receive();
    assert_eq!(answer[0], [uid]);
    (answer.len() > 2).then(|| answer.remove(2))
}

fn yes() -> Option<Vec<u8>> {
    Response::Bool(true).encode()
}

fn no() -> Option<Vec<u8>> {
    Response::Bool(false).encode()
}

fn int(value: i64) -> Option<Vec<u8>> {
    Response::Int(value).encode()
}

#[test]
fn requests_are_answered_in_their_releases_form() {
    let server = TestServer::start(&[]);
    for generation in OLDER {
        let client = server.raw();
        hello(&client, generation);
        let specs = generation.specs().iter().filter(|it| !is_registration(it));
        for (uid, spec) in (1..).zip(specs) {
            let request = frames(uid, spec);
            client.send(&request);
            if is_kept_back(spec) {
                continue;
            }
            let answer = client.receive();
            let context = format!("{generation:?} {}: {answer:02x?}", spec.operation.name());
            assert_eq!(answer[..2], request[..2], "{context}");
            let response = Response::decode(spec.response, answer.get(2).map(Vec::as_slice));
            let response = response.unwrap();
            match refusal(spec) {
                Some(refusal) => assert_eq!(response, refusal, "{context}"),
                None => assert!(matches!(response, Response::Int(1..)), "{context}"),
            }
        }
    }
    assert_eq!(server.readings().instances, 0);
    assert_eq!(server.readings().used_bytes, 0);
    server.assert_sound();
}

/// 0.4.2 and 0.4.3.
#[test]
fn early_lookups_are_asked_for_by_number() {
    let (server, _, _worker, _) = crate::support::given_stored("older/model", 2);
    let generation = Generation::G1;
    let client = server.raw();
    hello(&client, generation);
    let row = |operation| generation.spec(operation).unwrap();
    let lookup = request(row(Operation::Lookup));
    let number = |uid| {
        let answer = ask(&client, uid, generation, &lookup).unwrap();
        match Response::decode(ResponseKind::Int, Some(&answer)).unwrap() {
            Response::Int(number) => number,
            other => panic!("{other:?}"),
        }
    };
    let hits = |uid, number| {
        let job = JobRef::Job(number);
        ask(
            &client,
            uid,
            generation,
            &Request::QueryPrefetchStatus { job },
        )
    };
    let first = number(1);
    assert_eq!(hits(2, first), int(2));
    // Taken, and unknown.
    assert_eq!(hits(3, first), int(0));
    assert_eq!(hits(4, first + 1), int(0));
    let second = number(5);
    assert_ne!(first, second);
    assert_eq!(hits(6, second), int(2));
    // Another connection's numbers are its own.
    let other = server.raw();
    hello(&other, generation);
    let third = number(7);
    let job = JobRef::Job(third);
    let asked = ask(&other, 1, generation, &Request::QueryPrefetchStatus { job });
    assert_eq!(asked, int(0));
    let end = request(row(Operation::EndSession));
    assert_eq!(ask(&client, 8, generation, &end), None);
    assert_eq!(hits(9, third), int(0));
    assert_eq!(server.readings().leased_objects, 0);
}

#[test]
fn hits_query_leaves_the_result_for_the_status_query() {
    let (server, _, _worker, _) = crate::support::given_stored("older/model", 2);
    for generation in [Generation::G2, Generation::G5] {
        let client = server.raw();
        hello(&client, generation);
        let row = |operation| request(generation.spec(operation).unwrap());
        let lookup = ask(&client, 1, generation, &row(Operation::Lookup));
        assert_eq!(lookup, None);
        for (uid, operation, hits) in [
            (2, Operation::QueryPrefetchLookupHits, 2),
            (3, Operation::QueryPrefetchLookupHits, 2),
            (4, Operation::QueryPrefetchStatus, 2),
            (5, Operation::QueryPrefetchLookupHits, 0),
        ] {
            let answer = ask(&client, uid, generation, &row(operation));
            assert_eq!(answer, int(hits), "{generation:?} {uid}");
        }
    }
}

/// A registration of an engine-driven worker with its process id.
fn worker<'a>(scope: &'a kvtier_client::Scope, process: i64) -> Request<'a, Vec<u32>> {
    Request::RegisterEngineDriven(crate::support::context(process, scope))
}

#[test]
fn equal_process_ids_of_two_connections_are_two_workers() {
    let server = TestServer::start(&[]);
    for generation in [Generation::G3, Generation::G4, Generation::G5] {
        let scopes = ["older/a", "older/b"].map(kvtier_client::Scope::new);
        let clients = [server.raw(), server.raw()];
        for (client, scope) in clients.iter().zip(&scopes) {
            hello(client, generation);
            ask(client, 1, generation, &worker(scope, 77));
        }
        assert_eq!(server.readings().instances, 2, "{generation:?}");
        // 0.4.6 unregisters every worker by the operation for pages.
        let instance = InstanceId(77);
        let leave = match generation {
            Generation::G3 => Request::UnregisterKvCache { instance },
            _ => Request::UnregisterEngineDriven { instance },
        };
        ask(&clients[0], 2, generation, &leave);
        assert_eq!(server.readings().instances, 1, "{generation:?}");
        let ping = Request::Ping {
            instance: Some(instance),
        };
        assert_eq!(ask(&clients[1], 2, generation, &ping), yes());
        ask(&clients[1], 3, generation, &leave);
        assert_eq!(server.readings().instances, 0, "{generation:?}");
    }
}

/// 0.4.6 learns of no pool; its chunks are those of any other release.
#[test]
fn pickled_chunks_of_early_workers_are_found_by_others() {
    let server = TestServer::start(&[]);
    let (scope, generation) = (kvtier_client::Scope::new("older/model"), Generation::G3);
    let client = server.raw();
    hello(&client, generation);
    let registered = ask(&client, 1, generation, &worker(&scope, INSTANCE.0));
    assert_eq!(registered, None);
    let mut other = server.engine_driven(1 << 40, &scope);
    let (prompt, len) = (tokens(1, 2), other.chunk_bytes());
    let key = |worker_id, request_id| CacheKey {
        model_name: "older/model",
        world_size: 1,
        worker_id,
        tokens: prompt.clone(),
        start: 0,
        end: 2 * CHUNK as u64,
        chunk_tokens: None,
        request_id,
        cache_salt: "",
        request_configs: None,
        num_kv_readers: None,
    };
    let instance = INSTANCE;
    let prepared = Request::PrepareStore {
        key: key(Some(0), "s"),
        instance,
    };
    let prepared = ask(&client, 2, generation, &prepared);
    let pickled = Response::PrepareStore(PrepareStore { target: None });
    assert_eq!(prepared, pickled.encode(), "no slots");
    // K and V, layers, tokens, hidden values of `support::context`.
    let shape = [2, 2, CHUNK as u64, 64];
    let tensor = TensorToWrite {
        dtype: Dtype::BFloat16,
        shape: &shape,
    };
    let data = pickle::write_tensors(&[tensor, tensor], |index, out| {
        out.extend(std::iter::repeat_n(index as u8 + 1, len));
        Ok::<_, pickle::WriteError>(())
    })
    .unwrap();
    let commit = Request::CommitStore {
        key: key(Some(0), "s"),
        instance,
        data: &data,
    };
    assert_eq!(ask(&client, 3, generation, &commit), yes());
    let prompt = crate::support::prompt(1, 2);
    assert_eq!(other.lookup(&prompt, "o").unwrap(), 2);
    let read = other.retrieve(&prompt, crate::support::range(0..2), "o", |index, got| {
        assert_eq!(got, vec![index as u8 + 1; len]);
    });
    assert!(read.unwrap().is_some());
    // And back, pickled.
    let lookup = Request::Lookup {
        key: key(None, "r"),
        tp_size: 1,
    };
    assert_eq!(ask(&client, 4, generation, &lookup), None);
    let retrieve = Request::PrepareRetrieve {
        key: key(Some(0), "r"),
        instance,
    };
    let answer = ask(&client, 5, generation, &retrieve).unwrap();
    match Response::decode(ResponseKind::PrepareRetrieve, Some(&answer)).unwrap() {
        Response::PrepareRetrieve(hit) => {
            assert!(hit.success && hit.slots.is_none() && hit.data.len() > 2 * len);
        }
        other => panic!("{other:?}"),
    }
}

/// Up to 0.4.7 pings name no worker.
#[test]
fn first_ping_of_a_reconnected_client_is_refused() {
    let server = TestServer::start(&[]);
    let ping = Request::Ping { instance: None };
    for generation in [
        Generation::G1,
        Generation::G2,
        Generation::G3,
        Generation::G4,
    ] {
        // One that has a worker registers it again; a scheduler is healthy again one heartbeat later.
        let client = server.raw();
        let mut pings = (5..9).map(|uid| ask(&client, uid, generation, &ping));
        assert_eq!(pings.next(), Some(no()), "{generation:?}");
        assert!(pings.all(|answer| answer == yes()));
        // One that has sent a scheduler's request has no worker.
        let client = server.raw();
        let lookup = request(generation.spec(Operation::Lookup).unwrap());
        ask(&client, 5, generation, &lookup);
        let mut pings = (6..8).map(|uid| ask(&client, uid, generation, &ping));
        assert!(pings.all(|answer| answer == yes()), "{generation:?}");
        // One that began here is known.
        let client = server.raw();
        hello(&client, generation);
        assert_eq!(ask(&client, 1, generation, &ping), yes());
    }
    // Its worker is the last that its connection named.
    let scope = kvtier_client::Scope::new("older/model");
    let client = server.raw();
    hello(&client, Generation::G4);
    ask(&client, 1, Generation::G4, &worker(&scope, 77));
    assert_eq!(ask(&client, 2, Generation::G4, &ping), yes());
    let registered = server.engine().status(true).non_cuda_context_meta;
    let id = registered.keys().next().unwrap().parse().unwrap();
    let newest = server.raw();
    hello(&newest, Generation::G6);
    let instance = InstanceId(id);
    let leave = Request::UnregisterEngineDriven { instance };
    ask(&newest, 1, Generation::G6, &leave);
    assert_eq!(ask(&client, 3, Generation::G4, &ping), no());
}

#[test]
fn refused_ping_precedes_refused_engine_driven_retrieve() {
    let server = TestServer::start(&[]);
    for generation in [Generation::G3, Generation::G4, Generation::G5] {
        let client = server.raw();
        hello(&client, generation);
        let asked = frames(1, generation.spec(Operation::PrepareRetrieve).unwrap());
        client.send(&asked);
        // A ping may pass the request that is refused; then a later one reports it.
        let ping = frames(2, generation.spec(Operation::Ping).unwrap());
        let mut last = None;
        let answer = loop {
            client.send(&ping);
            let message = client.receive();
            if message[0] == asked[0] {
                break message;
            }
            last = message.get(2).cloned();
            server.pass(std::time::Duration::from_secs(1));
        };
        assert_eq!(last, no(), "{generation:?}");
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
        Response::Bool(false).encode()
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
    assert_eq!(worker.lookup(&prompt, "n").unwrap(), 2);
    for generation in OLDER {
        let client = server.raw();
        hello(&client, generation);
        let specs = generation.specs().iter();
        let specs = specs.filter(|spec| spec.operation != Operation::Clear);
        for (uid, spec) in (1..).zip(specs) {
            client.send(&frames(uid, spec));
            if !is_kept_back(spec) && spec.operation != Operation::PrepareRetrieve {
                client.receive();
            }
        }
    }
    // Not even the same instance and prompt in all of their requests did it harm.
    assert_eq!(server.readings().leased_objects, 2);
    let read = worker.retrieve(&prompt, crate::support::range(0..2), "n", |_, got| {
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
    // The refusal is counted before the answer is held: a ping in between would not be the client's notice.
    let started = std::time::Instant::now();
    while !server.engine().holds_answers() {
        assert!(started.elapsed() < PATIENCE, "no answer is held");
        std::thread::yield_now();
    }
    let engine = std::sync::Arc::downgrade(server.engine());
    let stopped = std::thread::spawn(move || drop(server));
    client.send(&ping);
    while client.receive()[0] != asked[0] {}
    stopped.join().unwrap();
    assert!(engine.upgrade().is_none(), "nothing keeps the engine");
}
