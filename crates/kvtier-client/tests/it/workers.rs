//! Both kinds of worker against a small cache behind a ROUTER: real pools, real segments, real pickles.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::Server;
use kvtier_client::proto::descriptor::{Dtype, TensorDescriptor};
use kvtier_client::proto::key::CacheKey;
use kvtier_client::proto::pickle::{self, PickleLimits, TensorToWrite, WriteError};
use kvtier_client::proto::request::{ABORT_STORE, Request};
use kvtier_client::proto::response::{
    ChunkSlot, EngineDriven, PrepareRetrieve, PrepareStore, Response, StoreTarget,
};
use kvtier_client::{
    ClientError, Connection, EngineDrivenSpec, EngineDrivenWorker, InstanceId, LmcacheDrivenSpec,
    LmcacheDrivenWorker, Options, Prompt, Scope, Transport,
};
use kvtier_memory::{Arena, ArenaKind, Extent, ForeignSegment};

/// Tokens per chunk of the small cache.
const CHUNK: usize = 8;
/// Bytes per chunk in the geometry of the tests: 2 planes, 3 layers, 8 tokens, 5 values of 2 bytes.
const CHUNK_BYTES: usize = 2 * 3 * CHUNK * 5 * 2;
const SHAPE: [u64; 4] = [2, 3, CHUNK as u64, 5];

/// Chunks by salt and prefix.
type Chunks = HashMap<(String, Vec<u32>), Vec<u8>>;

/// State of the small cache that tests inspect.
#[derive(Default)]
struct Seen {
    chunks: Chunks,
    unregistered: Vec<InstanceId>,
    commits: usize,
    aborted_stores: usize,
    /// Answers for tests of bad servers.
    slot_length: Option<u64>,
    refuse_commits: bool,
}

/// The prefixes of a key's chunks.
fn prefixes(key: &CacheKey<'_, Vec<u32>>) -> Vec<(String, Vec<u32>)> {
    (key.start as usize..key.end as usize)
        .step_by(CHUNK)
        .map(|start| {
            (
                key.cache_salt.to_owned(),
                key.tokens[..start + CHUNK].to_vec(),
            )
        })
        .collect()
}

fn slot(index: usize, length: u64) -> ChunkSlot<'static> {
    ChunkSlot {
        offset: (index * CHUNK_BYTES) as u64,
        length,
        shape: SHAPE.to_vec().into(),
        dtype: "bfloat16".into(),
    }
}

/// A cache for one worker: prepared chunks lie at the start of the pool, in order.
fn serve(seen: Arc<Mutex<Seen>>, pool: Option<Arena>) -> Server {
    let mut segment: Option<(ForeignSegment, Vec<TensorDescriptor>)> = None;
    Server::typed(move |request| {
        let mut seen = seen.lock().unwrap();
        Some(match request {
            Request::GetChunkSize => Response::Int(CHUNK as i64),
            Request::RegisterEngineDriven(context) => {
                assert_eq!((context.num_layers, context.hidden_dim_size), (3, 5));
                assert_eq!((context.dtype, context.use_mla), ("bfloat16", false));
                Response::EngineDriven(EngineDriven {
                    shm_name: pool
                        .as_ref()
                        .and_then(Arena::shm_name)
                        .unwrap_or_default()
                        .to_owned()
                        .into(),
                    pool_size: pool.as_ref().map_or(0, Arena::len),
                    null_block_id: None,
                })
            }
            Request::UnregisterEngineDriven { instance }
            | Request::UnregisterKvCache { instance } => {
                seen.unregistered.push(*instance);
                segment = None;
                Response::Nothing
            }
            Request::Lookup { .. } | Request::EndSession { .. } => Response::Nothing,
            // The tests know what they stored.
            Request::QueryPrefetchStatus { .. } => Response::Int(seen.chunks.len() as i64),
            Request::PrepareStore { key, .. } => {
                let length = seen.slot_length.unwrap_or(CHUNK_BYTES as u64);
                let target = pool.as_ref().map(|_| {
                    let wanted = (0..)
                        .zip(prefixes(key))
                        .filter(|(_, prefix)| !seen.chunks.contains_key(prefix));
                    let chunk_indices: Vec<u64> = wanted.map(|(index, _)| index).collect();
                    StoreTarget {
                        slots: (0..chunk_indices.len())
                            .map(|index| slot(index, length))
                            .collect(),
                        chunk_indices,
                        group_ids: None,
                    }
                });
                Response::PrepareStore(PrepareStore { target })
            }
            Request::CommitStore { data, .. } if *data == ABORT_STORE => {
                seen.aborted_stores += 1;
                Response::Bool(true)
            }
            Request::CommitStore { key, data, .. } => {
                seen.commits += 1;
                commit(&mut seen.chunks, key, data, pool.as_ref());
                Response::Bool(!seen.refuse_commits)
            }
            Request::PrepareRetrieve { key, .. } => {
                Response::PrepareRetrieve(prepare_retrieve(&seen.chunks, key, pool.as_ref()))
            }
            Request::CommitRetrieve { .. } => Response::Bool(true),
            Request::RegisterKvCache(registration) => {
                let TensorDescriptor::CpuShm(first) = &registration.tensors[0] else {
                    panic!("a tensor in a segment was expected");
                };
                let opened = ForeignSegment::open(&first.shm_name, first.nbytes).unwrap();
                segment = Some((opened, registration.tensors.clone()));
                Response::Nothing
            }
            Request::Store(store) => {
                let (segment, tensors) = segment.as_ref().unwrap();
                let blocks = store.block_ids[0].chunks_exact(2);
                for (prefix, blocks) in prefixes(&store.key).into_iter().zip(blocks) {
                    let mut bytes = Vec::new();
                    for offset in pieces(tensors, blocks) {
                        segment.read_into(offset, 40, &mut bytes).unwrap();
                    }
                    seen.chunks.insert(prefix, bytes);
                }
                Response::transfer(store.event_handle.to_vec(), true)
            }
            Request::Retrieve(retrieve) => {
                let (segment, tensors) = segment.as_ref().unwrap();
                let blocks = retrieve.block_ids[0].chunks_exact(2);
                for (prefix, blocks) in prefixes(&retrieve.key).into_iter().zip(blocks) {
                    let Some(bytes) = seen.chunks.get(&prefix) else {
                        return Some(Response::transfer(Vec::new(), false));
                    };
                    for (offset, piece) in pieces(tensors, blocks).zip(bytes.chunks_exact(40)) {
                        segment.write(offset, piece).unwrap();
                    }
                }
                Response::transfer(Vec::new(), true)
            }
            other => panic!("{:?} was not expected", other.operation()),
        })
    })
}

fn commit(chunks: &mut Chunks, key: &CacheKey<'_, Vec<u32>>, data: &[u8], pool: Option<&Arena>) {
    match pool {
        Some(pool) if data.is_empty() => {
            let wanted: Vec<_> = prefixes(key)
                .into_iter()
                .filter(|prefix| !chunks.contains_key(prefix))
                .collect();
            for (index, prefix) in wanted.into_iter().enumerate() {
                let extent = Extent::new((index * CHUNK_BYTES) as u64, CHUNK_BYTES as u64);
                let mut bytes = Vec::new();
                pool.read_into(extent, 0, extent.len, &mut bytes).unwrap();
                chunks.insert(prefix, bytes);
            }
        }
        _ => {
            let tensors = pickle::read_tensors(data, &PickleLimits::default()).unwrap();
            for (prefix, tensor) in prefixes(key).into_iter().zip(tensors) {
                assert_eq!(tensor.shape, SHAPE);
                chunks.insert(prefix, tensor.contiguous_bytes().unwrap().to_vec());
            }
        }
    }
}

fn prepare_retrieve(
    chunks: &Chunks,
    key: &CacheKey<'_, Vec<u32>>,
    pool: Option<&Arena>,
) -> PrepareRetrieve<'static> {
    let found: Option<Vec<_>> = prefixes(key)
        .iter()
        .map(|prefix| chunks.get(prefix))
        .collect();
    let Some(found) = found else {
        return PrepareRetrieve::miss();
    };
    if let Some(pool) = pool {
        for (index, bytes) in found.iter().enumerate() {
            let extent = Extent::new((index * CHUNK_BYTES) as u64, CHUNK_BYTES as u64);
            pool.write(extent, 0, bytes).unwrap();
        }
        return PrepareRetrieve {
            success: true,
            data: Vec::new().into(),
            slots: Some(
                (0..found.len())
                    .map(|index| slot(index, CHUNK_BYTES as u64))
                    .collect(),
            ),
            groups: None,
        };
    }
    let tensor = TensorToWrite {
        dtype: Dtype::BFloat16,
        shape: &SHAPE,
    };
    let data = pickle::write_tensors::<WriteError>(&vec![tensor; found.len()], |index, out| {
        out.extend_from_slice(found[index]);
        Ok(())
    });
    PrepareRetrieve {
        success: true,
        data: data.unwrap().into(),
        slots: None,
        groups: None,
    }
}

/// Offsets of a chunk's pieces: 2 planes, 3 layers, 2 blocks of 4 tokens of 5 values of 2 bytes.
fn pieces<'a>(
    tensors: &'a [TensorDescriptor],
    blocks: &'a [i64],
) -> impl Iterator<Item = u64> + use<'a> {
    (0..2).flat_map(move |plane| {
        tensors.iter().flat_map(move |tensor| {
            let view = tensor.metadata().unwrap();
            blocks.iter().map(move |block| {
                2 * (view.storage_offset + plane * view.stride[0] + *block as u64 * view.stride[1])
            })
        })
    })
}

fn connect(server: &Server) -> Connection {
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    Connection::connect_with(server.endpoint(), options).unwrap()
}

fn spec() -> EngineDrivenSpec {
    let mut spec = EngineDrivenSpec::new(InstanceId(5), Scope::new("m").with_salt("t"), 3, 5);
    spec.block_tokens = 4;
    spec
}

fn shared_pool(name: &str) -> Arena {
    let name = format!("client_test_{}_{name}", std::process::id());
    Arena::create(ArenaKind::Shm { name }, 1 << 16).unwrap()
}

fn chunk_of(number: u64) -> Vec<u8> {
    (0..CHUNK_BYTES)
        .map(|index| (index as u64 * 7 + number * 31) as u8)
        .collect()
}

fn prompt() -> Prompt {
    Prompt::new(&(0..30).collect::<Vec<u32>>())
}

/// Stores three chunks, again (nothing is sent), and retrieves the last two.
fn store_and_retrieve(worker: &mut EngineDrivenWorker) -> usize {
    let prompt = prompt();
    let range = prompt.whole_chunks(CHUNK);
    assert_eq!(worker.chunk_bytes(), CHUNK_BYTES);
    let stored = worker.store(&prompt, range.clone(), "r", chunk_of).unwrap();
    assert_eq!(stored.chunks, [0, 1, 2]);
    assert_eq!(stored.bytes, 3 * CHUNK_BYTES as u64);
    let again = worker.store(&prompt, range, "r", chunk_of).unwrap();

    assert_eq!(worker.lookup(&prompt, "r").unwrap(), 3);
    let mut taken = Vec::new();
    let got = worker
        .retrieve(&prompt, 8..24, "r", |index, bytes| {
            assert_eq!(bytes, chunk_of(index + 1));
            taken.push(index);
        })
        .unwrap()
        .unwrap();
    assert_eq!((got.chunks, got.bytes), (2, 2 * CHUNK_BYTES as u64));
    assert_eq!(taken, [0, 1]);
    again.chunks.len()
}

#[test]
fn chunks_are_copied_through_shared_pool() {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let server = serve(Arc::clone(&seen), Some(shared_pool("shm")));
    let mut worker = EngineDrivenWorker::register(connect(&server), spec()).unwrap();
    assert_eq!(worker.transport(), Transport::SharedPool);
    assert_eq!(store_and_retrieve(&mut worker), 0);
    assert_eq!(seen.lock().unwrap().commits, 1);
    worker.close().unwrap();
    assert_eq!(seen.lock().unwrap().unregistered, [InstanceId(5)]);
}

#[test]
fn chunks_are_pickled_without_pool() {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let server = serve(Arc::clone(&seen), None);
    let mut worker = EngineDrivenWorker::register(connect(&server), spec()).unwrap();
    assert_eq!(worker.transport(), Transport::Pickle);
    assert_eq!(store_and_retrieve(&mut worker), 3);
}

#[test]
fn miss_takes_no_chunk() {
    for pool in [None, Some(shared_pool("miss"))] {
        let server = serve(Arc::default(), pool);
        let mut worker = EngineDrivenWorker::register(connect(&server), spec()).unwrap();
        let got = worker.retrieve(&prompt(), 0..24, "r", |_, _| panic!("nothing is cached"));
        assert_eq!(got.unwrap(), None);
    }
}

#[test]
fn invalid_arguments_commit_nothing_and_free_slots() {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let server = serve(Arc::clone(&seen), Some(shared_pool("args")));
    let mut worker = EngineDrivenWorker::register(connect(&server), spec()).unwrap();
    for range in [1..8, 0..7, 0..30] {
        let error = worker.store(&prompt(), range, "r", chunk_of).unwrap_err();
        assert!(matches!(error, ClientError::Argument { .. }), "{error}");
    }
    let short = worker.store(&prompt(), 0..8, "r", |_| vec![1; 3]);
    assert!(short.unwrap_err().to_string().contains("3 bytes"));
    // A round trip after the abort shows that it was served.
    worker.connection().get_chunk_size().unwrap();
    let seen = seen.lock().unwrap();
    assert_eq!((seen.commits, seen.aborted_stores), (0, 1));
}

#[test]
fn invalid_answers_of_server_are_errors() {
    let seen = Arc::new(Mutex::new(Seen {
        slot_length: Some(7),
        ..Seen::default()
    }));
    let server = serve(Arc::clone(&seen), Some(shared_pool("odd")));
    let mut worker = EngineDrivenWorker::register(connect(&server), spec()).unwrap();
    let error = worker.store(&prompt(), 0..8, "r", chunk_of).unwrap_err();
    assert!(error.to_string().contains("7 bytes"), "{error}");

    *seen.lock().unwrap() = Seen {
        refuse_commits: true,
        ..Seen::default()
    };
    let error = worker.store(&prompt(), 0..8, "r", chunk_of).unwrap_err();
    assert!(matches!(error, ClientError::Refused { .. }), "{error}");
}

#[test]
fn chunks_are_pickled_if_pool_cannot_be_opened() {
    let server = Server::typed(|request| {
        Some(match request {
            Request::GetChunkSize => Response::Int(CHUNK as i64),
            Request::RegisterEngineDriven(_) => Response::EngineDriven(EngineDriven {
                shm_name: "../etc/passwd".into(),
                pool_size: 1,
                null_block_id: None,
            }),
            _ => Response::Nothing,
        })
    });
    let worker = EngineDrivenWorker::register(connect(&server), spec()).unwrap();
    assert_eq!(worker.transport(), Transport::Pickle);
}

#[test]
fn server_copies_blocks_of_worker() {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let server = serve(Arc::clone(&seen), None);
    let mut spec = LmcacheDrivenSpec::new(InstanceId(9), Scope::new("m"), 3, 1, 5, 13);
    spec.block_tokens = 4;
    let mut worker = LmcacheDrivenWorker::register(connect(&server), spec).unwrap();
    let segment = worker.segment_name().to_owned();
    assert_eq!(
        (worker.chunk_bytes(), worker.blocks_per_chunk()),
        (CHUNK_BYTES, 2)
    );

    let prompt = prompt();
    let (from, to) = ([3, 1, 2, 4, 12, 5], [6, 8, 7, 11, 9, 10]);
    for (number, blocks) in (0..).zip(from.chunks_exact(2)) {
        worker.write_chunk(blocks, &chunk_of(number)).unwrap();
    }
    assert!(worker.store(&prompt, 0..24, "r", &from).unwrap());
    {
        // The server has the bytes in the order in which they were written as chunks.
        let seen = seen.lock().unwrap();
        let first = (String::new(), (0..8).collect::<Vec<u32>>());
        assert_eq!(seen.chunks[&first], chunk_of(0));
    }
    assert!(worker.retrieve(&prompt, 0..24, "r", &to, 0).unwrap());
    let mut bytes = Vec::new();
    for (number, blocks) in (0..).zip(to.chunks_exact(2)) {
        worker.read_chunk(blocks, &mut bytes).unwrap();
        assert_eq!(bytes, chunk_of(number));
    }
    let other = Prompt::new(&[1; 8]);
    assert!(!worker.retrieve(&other, 0..8, "r", &to[..2], 0).unwrap());
    for bad in [&[1][..], &[1, 13], &[-1, 1]] {
        let error = worker.read_chunk(bad, &mut bytes).unwrap_err();
        assert!(matches!(error, ClientError::Argument { .. }), "{error}");
    }
    worker.close().unwrap();
    assert_eq!(seen.lock().unwrap().unregistered, [InstanceId(9)]);
    assert!(ForeignSegment::open(&segment, 1).is_err());
}

#[test]
fn dropped_worker_unregisters() {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let server = serve(Arc::clone(&seen), None);
    drop(EngineDrivenWorker::register(connect(&server), spec()).unwrap());
    // Dropping waits only until the request is sent; a round trip after it shows that it was served.
    let mut spec = LmcacheDrivenSpec::new(InstanceId(9), Scope::new("m"), 1, 1, 5, 2);
    spec.block_tokens = 4;
    drop(LmcacheDrivenWorker::register(connect(&server), spec).unwrap());
    let mut connection = connect(&server);
    while seen.lock().unwrap().unregistered.len() < 2 {
        connection.get_chunk_size().unwrap();
    }
    assert_eq!(
        seen.lock().unwrap().unregistered,
        [InstanceId(5), InstanceId(9)]
    );
}

/// Other servers would skip the size, and keep these chunks under hashes of their own.
#[test]
fn chunk_size_is_named_only_to_a_server_that_reads_it() {
    let server = Server::typed(|request| match request {
        Request::GetExperimental => Some(Response::Texts(vec!["another".into()])),
        _ => None,
    });
    let mut scope = Scope::new("model");
    scope.chunk_tokens = Some(32);
    let spec = EngineDrivenSpec::new(InstanceId(1), scope.clone(), 3, 5);
    let copies = EngineDrivenWorker::register(connect(&server), spec).map(drop);
    let spec = LmcacheDrivenSpec::new(InstanceId(1), scope, 2, 2, 16, 64);
    let is_copied = LmcacheDrivenWorker::register(connect(&server), spec).map(drop);
    for refused in [copies, is_copied] {
        let error = refused.unwrap_err();
        assert!(
            matches!(
                error,
                ClientError::Argument {
                    field: "chunk_tokens",
                    ..
                }
            ),
            "{error}"
        );
    }
}
