//! A client that blends, at a server that does not: every request has an answer, and the prefix is found.

use kvtier_client::Connection;
use kvtier_client::proto::request::{InstanceId, Request, RetrieveMatched, RopeRegistration};
use kvtier_client::proto::response::{Response, UnifiedLookup};

use crate::l2::{fs, settle, with_tiers};
use crate::support::{CHUNK, given_stored_on, prompt, range, wait_until};

fn answer<T: kvtier_client::proto::key::TokenWriter>(
    connection: &mut Connection,
    request: &Request<'_, T>,
) -> Response<'static> {
    match connection.call(request).unwrap().response().unwrap() {
        Response::Nothing => Response::Nothing,
        Response::Handshake {
            version,
            compatible,
        } => Response::Handshake {
            version,
            compatible,
        },
        Response::Ints(order) => Response::Ints(order),
        Response::Transfer(verdict) => Response::transfer(Vec::new(), verdict.ok),
        Response::UnifiedLookup(UnifiedLookup {
            prefix_coverage_tokens,
            non_prefix_segments,
            segmented_prefix_segments,
        }) => {
            assert!(non_prefix_segments.is_empty() && segmented_prefix_segments.is_empty());
            Response::Int(prefix_coverage_tokens)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn client_that_blends_goes_on_with_its_prefix() {
    let directory = tempfile::tempdir().unwrap();
    let server = with_tiers(&[&fs(directory.path())], &[]);
    let (server, scope, mut worker, stored) =
        given_stored_on(server, kvtier_client::Scope::new("blend"), 3);
    settle(&server);
    server.engine().admin().clear(true);
    let connection = worker.connection();
    let (instance, key) = (InstanceId(1), |request| {
        scope.scheduler_key(&stored, range(0..3), request)
    });
    let handshake: Request<'_, Vec<u32>> = Request::CbProtocolHandshake { client_version: 1 };
    let no = Response::Handshake {
        version: 1,
        compatible: false,
    };
    assert_eq!(answer(connection, &handshake), no);
    let rope: Request<'_, Vec<u32>> = Request::CbRegisterRope(RopeRegistration {
        instance,
        caches: Vec::new(),
        head_size: 64,
        is_neox_style: true,
        group_to_cache: Vec::new(),
        group_rot: Vec::new(),
        group_head_size: Vec::new(),
        kv_quant: "",
    });
    assert_eq!(answer(connection, &rope), Response::Nothing);
    let reorder = Request::CbReorderPlan {
        key: key("o"),
        keep_prefix: 0,
        budget_ms: 10,
    };
    assert_eq!(answer(connection, &reorder), Response::Ints(Vec::new()));
    let lookup = Request::CbUnifiedLookup {
        key: key("r"),
        tp_size: 1,
    };
    let mut found = Response::Nothing;
    wait_until("the prefix from the tier", || {
        found = answer(connection, &lookup);
        found != Response::Nothing
    });
    assert_eq!(found, Response::Int(3 * CHUNK as i64));
    let retrieve = Request::CbRetrievePreComputed(RetrieveMatched {
        key: scope.worker_key(0, &stored, range(0..3), "r"),
        matches: Vec::new(),
        block_ids: vec![vec![0]],
        instance,
        event_handle: b"",
    });
    assert_eq!(
        answer(connection, &retrieve),
        Response::transfer(Vec::new(), false)
    );
    connection.end_session("r").unwrap();
    assert_eq!(server.readings().leased_objects, 0);
    let absent = prompt(77, 2);
    let lookup = Request::CbUnifiedLookup {
        key: scope.scheduler_key(&absent, range(0..2), "absent"),
        tp_size: 1,
    };
    wait_until("a miss", || answer(connection, &lookup) == Response::Int(0));
    let unregister: Request<'_, Vec<u32>> = Request::CbUnregisterRope { instance };
    assert_eq!(answer(connection, &unregister), Response::Nothing);
    server.assert_sound();
}
