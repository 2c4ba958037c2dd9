//! Clients of releases up to 0.5.2: every answer has the form of that release, and is never a text in place of an operation,
//! which would end such a client's receiving for good. The real clients of all releases are in `tests/conformance`.

mod lookups;
mod pings;
mod unserved;
mod workers;

use kvtier_client::InstanceId;
use kvtier_client::proto::generation::{Field, Generation, OperationSpec};
use kvtier_client::proto::key::CacheKey;
use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::request::{
    BlockAllocation, EngineDrivenContext, EngineType, JobRef, LayoutHints, Registration, Request,
    Retrieve, Seconds, Store,
};
use kvtier_client::proto::response::{PrepareStore, Response, ResponseKind, StoreTarget};

use crate::support::{CHUNK, Frames, Raw, TestServer, tokens, wait_until};

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
            extra_ranges: Vec::new(),
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
            groups: None,
            takes_pool: true,
        }),
        Operation::UnregisterEngineDriven => Request::UnregisterEngineDriven { instance },
        Operation::PrepareStore => Request::PrepareStore {
            key: key(Some(0)),
            instance,
            skipped_chunks: Vec::new(),
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

/// A registration of an engine-driven worker with its process id.
fn worker<'a>(scope: &'a kvtier_client::Scope, process: i64) -> Request<'a, Vec<u32>> {
    Request::RegisterEngineDriven(crate::support::context(process, scope))
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

// proves: docs/clients.md#releases
// proves: docs/compare.md#hostile-peers
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
            let mut answer = client.receive();
            if spec.operation == Operation::Ping {
                // The retrieve before it has a lane of its own, and no answer: pings are refused once it is.
                let yes = yes();
                wait_until("a refused ping", || {
                    let is_refused = answer.get(2) != yes.as_ref();
                    if !is_refused {
                        client.send(&request);
                        answer = client.receive();
                    }
                    is_refused
                });
            }
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

// proves: docs/clients.md#releases-that-are-not-served
// proves: docs/compare.md#not-there-yet
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

// proves: docs/clients.md#releases
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
