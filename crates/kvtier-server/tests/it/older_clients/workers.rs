//! Workers of older clients: their process ids, and their pickled chunks.

use kvtier_client::InstanceId;
use kvtier_client::proto::descriptor::Dtype;
use kvtier_client::proto::generation::Generation;
use kvtier_client::proto::key::CacheKey;
use kvtier_client::proto::pickle::{self, TensorToWrite};
use kvtier_client::proto::request::Request;
use kvtier_client::proto::response::{PrepareStore, Response, ResponseKind};

use super::{INSTANCE, ask, hello, worker, yes};
use crate::support::{CHUNK, TestServer, tokens};

// proves: docs/clients.md#releases
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
// proves: docs/clients.md#releases
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
        skipped_chunks: Vec::new(),
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
