//! Whole conversations of adapters of LMCache 0.5.6 and 0.5.7rc2, said again to our server: each request gets the answer it got then.

use std::collections::HashMap;

use kvtier_client::proto::chunk::CHUNK_TOKENS_FEATURE;
use kvtier_client::proto::descriptor::Dtype;
use kvtier_client::proto::key::OBJECTS_FEATURE;
use kvtier_client::proto::operation::Operation;
use kvtier_client::proto::pickle::{
    PickleLimits, TensorToWrite, WriteError, read_tensors, write_tensors,
};
use kvtier_client::proto::request::HELD_BLOCKS_FEATURE;
use kvtier_client::proto::response::{
    ChunkSlot, PrepareRetrieve, PrepareStore, Response, ResponseKind, StoreTarget,
};
use kvtier_client::proto::wire;
use kvtier_memory::OwnSegment;

use crate::replay::{Segments, frames, load, operation};
use crate::support::{Frames, Raw, TestServer, bytes};

/// The peer served a retrieve whose leases had been freed an instant before, because nothing there orders two sockets.
/// Here a retrieve without a lookup of its own request is a miss, always.
const RETRIEVED_WITHOUT_A_LOOKUP: &str = "req-f";

/// Files of LMCache 0.5.7rc2, whose data was recorded whole.
const NEWEST: &str = "capture_0_5_7";

/// Replays the conversation, each request after the answer to the one before. `after` sees each request that was answered,
/// with the segments of the conversation.
fn converse(server: &TestServer, file: &str, mut after: impl FnMut(&Frames, &Segments)) {
    let conversation = load(file);
    let exchanged = conversation["frames"].as_array().unwrap();
    let mut segments = Segments::default();
    let mut clients: HashMap<u64, Raw> = HashMap::new();
    let answered = |client: u64, uid: &[u8]| -> Frames {
        let mut answers = exchanged
            .iter()
            .filter(|frame| frame["dir"] == "s2c" && frame["client"] == client);
        frames(
            &answers
                .find(|frame| frames(&frame["frames"])[0] == uid)
                .unwrap()["frames"],
        )
    };
    for frame in exchanged.iter().filter(|frame| frame["dir"] == "c2s") {
        let client = frame["client"].as_u64().unwrap();
        let mut request = segments.patch(frames(&frame["frames"]));
        if let Some(cut) = request.iter_mut().skip(2).find(|frame| frame.is_empty()) {
            *cut = pickled();
        }
        let socket = clients.entry(client).or_insert_with(|| server.raw());
        socket.send(&request);
        let ours = socket.receive();
        let theirs = answered(client, &request[0]);
        let context = format!("{file}: {} {}", frame["op"], frame["payload"]);
        assert_eq!(ours[..2], theirs[..2], "{context}");
        let theirs = match theirs.get(2) {
            // The chunks that were stored come back.
            Some(cut) if cut.is_empty() => Some(retrieved()),
            other => other.cloned(),
        };
        compare(&request, ours.get(2).cloned(), theirs, &context);
        after(&request, &segments);
    }
    assert!(clients.len() >= 2, "{file}");
    for client in clients.values_mut() {
        assert_eq!(
            client.settle(),
            Vec::<Frames>::new(),
            "{file}: more answers than requests"
        );
    }
    let readings = server.readings();
    assert_eq!(
        (
            readings.leased_objects,
            readings.staged_bytes,
            readings.instances
        ),
        (0, 0, 0),
        "{file}"
    );
    server.assert_sound();
}

/// Compares answers. The place of a chunk is ours to choose, and so are the pool and the optional features; all else is equal.
fn compare(request: &Frames, ours: Option<Vec<u8>>, theirs: Option<Vec<u8>>, context: &str) {
    fn read(kind: ResponseKind, payload: &Option<Vec<u8>>) -> Response<'_> {
        Response::decode(kind, payload.as_deref()).unwrap()
    }
    match operation(request).unwrap() {
        Operation::GetExperimental => {
            assert_eq!(
                read(ResponseKind::Texts, &ours),
                Response::Texts(vec![
                    "kv_event_stream".into(),
                    HELD_BLOCKS_FEATURE.into(),
                    CHUNK_TOKENS_FEATURE.into(),
                    OBJECTS_FEATURE.into(),
                ]),
                "{context}"
            );
        }
        Operation::RegisterEngineDriven => {
            let Response::EngineDriven(our) = read(ResponseKind::EngineDriven, &ours) else {
                panic!("{context}")
            };
            let Response::EngineDriven(their) = read(ResponseKind::EngineDriven, &theirs) else {
                panic!("{context}")
            };
            assert_eq!(
                our.shm_name.is_empty(),
                their.shm_name.is_empty(),
                "{context}"
            );
            assert_eq!(our.pool_size == 0, their.pool_size == 0, "{context}");
            assert_eq!(our.null_block_id, their.null_block_id, "{context}");
        }
        Operation::PrepareStore => {
            let stored = |payload| match read(ResponseKind::PrepareStore, payload) {
                Response::PrepareStore(PrepareStore { target }) => {
                    let groups = |target: &StoreTarget<'_>| target.group_ids.clone();
                    target.map(|it| (groups(&it), it.chunk_indices, shapes(Some(it.slots))))
                }
                other => panic!("{context}: {other:?}"),
            };
            assert_eq!(stored(&ours), stored(&theirs), "{context}");
        }
        Operation::PrepareRetrieve if context.starts_with(NEWEST) => {
            let got = |payload| match read(ResponseKind::PrepareRetrieve, payload) {
                Response::PrepareRetrieve(hit) => {
                    let data = hit.data.into_owned();
                    (hit.success, data, shapes(hit.slots), hit.groups)
                }
                other => panic!("{context}: {other:?}"),
            };
            assert_eq!(got(&ours), got(&theirs), "{context}");
        }
        Operation::PrepareRetrieve => {
            let got = |payload| match read(ResponseKind::PrepareRetrieve, payload) {
                Response::PrepareRetrieve(hit) => {
                    (hit.success, chunks(&hit.data), shapes(hit.slots))
                }
                other => panic!("{context}: {other:?}"),
            };
            let mut theirs = got(&theirs);
            // Pickled chunks come back as we stored them, not as they were stored then; ranges end at the last chunk.
            let stored = chunks(&pickled_chunks());
            theirs.1 = stored[stored.len() - theirs.1.len()..].to_vec();
            if context.contains(RETRIEVED_WITHOUT_A_LOOKUP) {
                assert_eq!(got(&ours), (false, Vec::new(), Vec::new()), "{context}")
            } else {
                assert_eq!(got(&ours), theirs, "{context}")
            }
        }
        // Of slots that were not granted.
        Operation::CommitRetrieve
            if context.contains(RETRIEVED_WITHOUT_A_LOOKUP) && context.contains("_shm") =>
        {
            let truth = read(ResponseKind::Bool, &ours);
            assert_eq!(truth, Response::Bool(false), "{context}");
        }
        _ => assert_eq!(ours, theirs, "{context}"),
    }
}

/// Slots without their offsets.
fn shapes(slots: Option<Vec<ChunkSlot<'_>>>) -> Vec<(u64, Vec<u64>, String)> {
    let slots = slots.unwrap_or_default().into_iter();
    slots
        .map(|slot| {
            (
                slot.length,
                slot.shape.into_owned(),
                slot.dtype.into_owned(),
            )
        })
        .collect()
}

/// Two chunks, as the adapter stores them.
fn pickled_chunks() -> Vec<u8> {
    let tensor = TensorToWrite {
        dtype: Dtype::BFloat16,
        shape: &[2, 2, 16, 16],
    };
    let write = |index: usize, out: &mut Vec<u8>| -> Result<(), WriteError> {
        out.extend(bytes(1, index as u64, 2048));
        Ok(())
    };
    write_tensors(&[tensor; 2], write).unwrap()
}

/// The payload of a store's commit.
fn pickled() -> Vec<u8> {
    let mut payload = Vec::new();
    wire::write_bin(&mut payload, &pickled_chunks());
    payload
}

/// The response of a retrieve.
fn retrieved() -> Vec<u8> {
    let hit = PrepareRetrieve {
        success: true,
        data: pickled_chunks().into(),
        slots: None,
        groups: None,
    };
    Response::PrepareRetrieve(hit).encode().unwrap()
}

/// The bytes of pickled chunks.
fn chunks(data: &[u8]) -> Vec<Vec<u8>> {
    if data.is_empty() {
        return Vec::new();
    }
    let tensors = read_tensors(data, &PickleLimits::default()).unwrap();
    tensors
        .iter()
        .map(|tensor| tensor.contiguous_bytes().unwrap().to_vec())
        .collect()
}

// proves: docs/compare.md#engine_driven
#[test]
fn engine_driven_with_a_pool() {
    converse(
        &TestServer::start(&[]),
        "capture_engine_driven_shm.json",
        |_, _| {},
    );
}

// proves: docs/compare.md#engine_driven
#[test]
fn engine_driven_of_0_5_7() {
    let allow = ["--windowed-clients", "allow"];
    for (flags, file) in [
        (&["--shm-name", ""][..], "capture_0_5_7_inline.json"),
        (
            &["--shm-name", "", allow[0], allow[1]],
            "capture_0_5_7_inline_groups.json",
        ),
        (&allow, "capture_0_5_7_shm_groups.json"),
    ] {
        converse(&TestServer::start(flags), file, |_, _| {});
    }
}

// proves: docs/compare.md#engine_driven
#[test]
fn engine_driven_pickled() {
    converse(
        &TestServer::start(&["--shm-name", ""]),
        "capture_engine_driven_pickle.json",
        |_, _| {},
    );
}

/// Bytes of one of the 32 blocks in a layer and plane: 4 tokens of 2 x 8 values.
const PIECE: u64 = 4 * 2 * 8 * 2;

/// What one block holds, in both planes of one layer.
fn block(segment: &OwnSegment, block: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for plane in 0..2 {
        segment
            .as_segment()
            .read_into((plane * 32 + block) * PIECE, PIECE, &mut bytes)
            .unwrap();
    }
    bytes
}

// proves: docs/compare.md#lmcache_driven-in-cpu-memory
#[test]
fn lmcache_driven_with_pages_in_shared_memory() {
    let server = TestServer::start(&[]);
    let mut retrieves = 0;
    converse(
        &server,
        "capture_lmcache_driven_cpu_shm.json",
        |request, segments| match operation(request).unwrap() {
            Operation::RegisterKvCache => {
                for (layer, segment) in (0..).zip(segments.iter()) {
                    let len = segment.as_segment().len();
                    segment
                        .as_segment()
                        .write(0, &bytes(layer, 0, usize::try_from(len).unwrap()))
                        .unwrap();
                }
            }
            Operation::Retrieve => {
                retrieves += 1;
                assert_eq!(segments.iter().count(), 2);
                for (layer, segment) in (0..).zip(segments.iter()) {
                    let before = bytes(
                        layer,
                        0,
                        usize::try_from(segment.as_segment().len()).unwrap(),
                    );
                    segment
                        .as_segment()
                        .write(0, &before[..usize::try_from(8 * PIECE).unwrap()])
                        .unwrap();
                    // The first retrieve copies blocks 0 to 7 into 16 to 23.
                    if retrieves == 1 {
                        assert!(
                            (0..8).all(|index| block(segment, index) == block(segment, 16 + index)),
                            "layer {layer}"
                        );
                    }
                }
            }
            _ => {}
        },
    );
    assert_eq!(retrieves, 3);
}
