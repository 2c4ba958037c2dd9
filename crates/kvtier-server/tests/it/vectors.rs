//! What LMCache 0.5.6's server was probed with, sent to ours: the answers are the same, or the difference stands here
//! with its reason.

use kvtier_client::proto::frames::OperationId;
use kvtier_client::proto::pickle::{PickleLimits, read_tensors};
use kvtier_client::proto::response::{EventRecord, Response, ResponseKind};

use crate::replay::{Segments, frames, load};
use crate::support::{Frames, Raw, TestServer};

/// What we answer where the peer answers otherwise.
#[derive(Debug)]
enum Ours {
    /// The response "nothing": no third frame.
    Nothing,
    /// Response, in hex.
    Response(&'static str),
    /// A text with these words in place of the operation.
    Text(&'static str),
    /// Name and size of a pool.
    Pool,
    /// A hit of this number of pickled chunks.
    Chunks(usize),
    /// A batch of events, each with its number, its kind and the number of its chunks; and a response to the request, in hex.
    Events(&'static [(i64, &'static str, usize)], Option<&'static str>),
}

use Ours::{Chunks, Events, Nothing, Pool, Response as Is, Text};

/// Rows with another answer: their name, our answer, and why.
type Differences = &'static [(&'static str, Ours, &'static str)];

const FALSE: Ours = Is("c2");
const TRUE: Ours = Is("c3");
const ZERO: Ours = Is("00");
const NO_SLOTS: Ours = Is("81a7636f6e7465787482a5736c6f747390ad6368756e6b5f696e646963657390");
const MISS: Ours = Is("83a773756363657373c2a464617461c400a7636f6e7465787480");
/// The client's event handle, and "no".
const NOT_DONE: Ours = Is("92c40f737475625f6970635f68616e646c65c2");
/// The client's event handle, and "yes".
const DONE_HEX: &str = "92c40f737475625f6970635f68616e646c65c3";
const DONE: Ours = Is(DONE_HEX);

const SILENT: &str = "the peer says nothing and its client waits for its timeout; we say no in the form the operation has";
const SILENT_TEXT: &str =
    "the peer says nothing; this client raises our text where it made the call";
const EVENTS: &str = "other incarnation; stores by workers that copy themselves and chunks that are hits only are announced, each once";

/// The two files of errors, with and without a pool, differ in this from the peer.
const ERRORS: Differences = &[
    (
        "get_experimental",
        Is(
            "94af6b765f6576656e745f73747265616db46b76746965722e68656c645f626c6f636b732e31b56b76746965722e6368756e6b5f746f6b656e732e31b06b76746965722e6f626a656374732e31",
        ),
        "kvtier.held_blocks.1, kvtier.chunk_tokens.1 and kvtier.objects.1 are on too",
    ),
    (
        "ping_unknown_instance",
        FALSE,
        "so that a worker of a server that restarted quickly registers again",
    ),
    ("unknown_id", Text("operation 99 is unknown"), SILENT_TEXT),
    ("unknown_name", Text("\"nope\" is unknown"), SILENT_TEXT),
    (
        "blend_op_on_default_engine",
        Is("9201c2"),
        "a handshake that does not fit, so that the client goes on without blending",
    ),
    (
        "retired_id_11",
        ZERO,
        "0.5.3 still asked for hits under this number",
    ),
    (
        "too_few_payloads",
        TRUE,
        "a ping that cannot be read still proves that the server is there",
    ),
    (
        "too_many_payloads",
        Text("does not have 1 payloads"),
        SILENT_TEXT,
    ),
    ("malformed_payload", Nothing, SILENT),
    ("wrong_type_payload", Nothing, SILENT),
    ("trailing_bytes_in_payload", Nothing, SILENT),
    ("prepare_store_unregistered", NO_SLOTS, SILENT),
    ("prepare_retrieve_unregistered", MISS, SILENT),
    ("commit_store_unregistered", FALSE, SILENT),
    ("commit_retrieve_unregistered", FALSE, SILENT),
    (
        "register_ed_bad_dtype",
        Text("dtype_str is \"nope\""),
        SILENT_TEXT,
    ),
    (
        "register_ed_zero_slots",
        Text("num_physical_slots is 0"),
        SILENT_TEXT,
    ),
    ("lookup_readers_0", Nothing, SILENT),
    ("lookup_token_over_u32", Nothing, SILENT),
    ("commit_store_bad_pickle", FALSE, SILENT),
    ("prepare_store_unaligned_start", NO_SLOTS, SILENT),
    ("prepare_store_unaligned_end", NO_SLOTS, SILENT),
    ("prepare_store_end_past_tokens", NO_SLOTS, SILENT),
    ("prepare_store_worker_none", NO_SLOTS, SILENT),
    (
        "server_module_call",
        Text("server_module_call is not served"),
        SILENT_TEXT,
    ),
    (
        "subscribe",
        Events(&[(1, "stored", 1), (2, "stored", 1)], None),
        EVENTS,
    ),
    (
        "stream_ack",
        Events(&[(3, "removed", 2), (4, "stored", 1)], None),
        EVENTS,
    ),
    ("stream_ack2", Events(&[(5, "stored", 1)], None), EVENTS),
];

/// Differences in both files: a failed commit leaves the chunks it had no data for reserved at the peer, for minutes.
const NOTHING_STAYS_RESERVED: Differences = &[
    (
        "query_hit",
        Is("02"),
        "the next store of those chunks stored them",
    ),
    ("prepare_retrieve_hit", Chunks(2), "both chunks are there"),
    (
        "prepare_retrieve_hit_again",
        Chunks(2),
        "while its session lives, a request may read again what is there",
    ),
    (
        "prepare_retrieve_after_release",
        Chunks(2),
        "while its session lives, a request may read again what is there",
    ),
    ("query_dup", Is("02"), "both chunks are there"),
    (
        "query_after_clear",
        ZERO,
        "a lookup in the place of another releases the leases of that one, so nothing stays leased",
    ),
];

/// Without a pool.
const ERRORS_PICKLED: Differences = &[
    ("commit_store_without_prepare_empty", FALSE, SILENT),
    ("commit_store_fresh", FALSE, SILENT),
    ("commit_store_twice", FALSE, SILENT),
    ("commit_store_start_eq_end", FALSE, SILENT),
];

const PICKLES: &str =
    "a worker that sent its data along cannot map the pool: it is granted no more slots";

/// With a pool.
const ERRORS_POOLED: Differences = &[
    ("register_ed", Pool, "our own name and size"),
    (
        "register_ed_again_different_layout_ignored",
        Pool,
        "our own name and size",
    ),
    ("prepare_store_fresh", Is("81a7636f6e7465787480"), PICKLES),
    (
        "prepare_store_again_same_key",
        Is("81a7636f6e7465787480"),
        PICKLES,
    ),
    (
        "prepare_store_start_eq_end",
        Is("81a7636f6e7465787480"),
        PICKLES,
    ),
];

/// A worker whose pages the server copies.
const PAGES: Differences = &[
    (
        "register_empty_list",
        Text("the list of tensors is empty"),
        SILENT_TEXT,
    ),
    (
        "register_missing_shm",
        Text("layer_indices is 1"),
        SILENT_TEXT,
    ),
    (
        "register_wrong_group_count",
        Text("engine_group_infos[2]"),
        SILENT_TEXT,
    ),
    (
        "register_bad_tokens_per_block",
        Text("tokens_per_block is 24"),
        SILENT_TEXT,
    ),
    ("subscribe", Events(&[], None), EVENTS),
    (
        "store_ok",
        Events(&[(1, "stored", 1), (2, "stored", 1)], Some(DONE_HEX)),
        EVENTS,
    ),
    (
        "store_extra_blocks_multiple_of_chunk",
        Events(&[(3, "stored", 1), (4, "stored", 1)], Some(DONE_HEX)),
        EVENTS,
    ),
    ("store_extra_blocks_not_multiple", NOT_DONE, SILENT),
    ("store_no_groups", NOT_DONE, SILENT),
    ("store_two_groups_given", NOT_DONE, SILENT),
    ("store_worker_none", NOT_DONE, SILENT),
    ("store_unaligned", NOT_DONE, SILENT),
    (
        "store_event_empty_handle",
        Is("92c400c3"),
        "the handle that came goes back; an empty one means that all is done",
    ),
    (
        "retrieve_again_no_locks",
        DONE,
        "while its session lives, a request may read again what is there",
    ),
    (
        "retrieve_known_after_release",
        DONE,
        "while its session lives, a request may read again what is there",
    ),
    (
        "store_one_null_chunk",
        Events(&[(5, "stored", 1)], Some(DONE_HEX)),
        EVENTS,
    ),
    (
        "stream_ack_after_clear",
        Events(
            &[(6, "stored", 1), (7, "stored", 1), (8, "removed", 7)],
            None,
        ),
        EVENTS,
    ),
];

/// Reused request ids and short messages.
const MISC: Differences = &[
    (
        "query B",
        Is("01"),
        "the peer stored these tokens under the hash of others",
    ),
    ("bad model @", FALSE, SILENT),
    (
        "noop after one_frame",
        Is("a24f4b"),
        "the peer answers no client any more",
    ),
];

/// A registration that the peer ignores because the instance is known takes the place of the earlier one here: the
/// memory it tells of is what the worker has now. The rows behind it need the earlier one again.
const REPLACED: [&str; 2] = [
    "register_ed_again_different_layout_ignored",
    "register_same_instance_again_is_noop",
];

fn replay(server: &TestServer, file: &str, differences: &[Differences]) {
    let vectors = load(file);
    let mut differences: Vec<_> = differences.iter().copied().flatten().collect();
    let mut client = worker(server);
    let mut segments = Segments::default();
    let mut registration: Frames = Vec::new();
    let mut names = Vec::new();
    let mut wrong = Vec::new();
    for row in vectors["rows"].as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        assert!(!names.contains(&name), "{file}: two rows are called {name}");
        names.push(name);
        let request = segments.patch(frames(&row["request"]));
        client.send(&request);
        let ours = client.settle();
        let theirs: Vec<_> = row["replies"]
            .as_array()
            .unwrap()
            .iter()
            .map(frames)
            .collect();
        let listed = differences
            .iter()
            .position(|(row, ..)| *row == name)
            .map(|index| differences.remove(index));
        let right = match listed {
            Some((_, expected, _)) => ours != theirs && is(expected, &request, &ours),
            None => ours == theirs,
        };
        if !right {
            let hex: Vec<Vec<_>> = ours
                .iter()
                .map(|frames| frames.iter().map(hex::encode).collect())
                .collect();
            wrong.push(format!(
                "{name}: {hex:?}, listed: {listed:?}, the peer: {}",
                row["replies"]
            ));
        }
        if REPLACED.contains(&name) {
            client.send(&registration);
            client.settle();
        } else if matches!(request.get(1).map(Vec::as_slice), Some([1 | 14])) {
            registration = request;
        }
    }
    assert!(wrong.is_empty(), "{file}:\n{}", wrong.join("\n"));
    assert!(
        differences.is_empty(),
        "{file} has no rows for {differences:?}"
    );
    server.assert_sound();
}

/// A worker's socket, as far as its first requests go.
fn worker(server: &TestServer) -> Raw {
    let mut client = server.raw();
    client.send(&[[0xf0], [21]]);
    client.send(&[[0xf1], [32]]);
    assert_eq!(client.settle().len(), 2);
    client
}

/// Whether these answers to a request are the expected ones.
fn is(expected: &Ours, request: &Frames, answers: &[Frames]) -> bool {
    let echoed = |answer: &Frames| answer[..2] == request[..2];
    let response = |kind| match answers {
        [answer] if echoed(answer) && answer.len() == 3 => {
            Response::decode(kind, Some(&answer[2])).ok()
        }
        _ => None,
    };
    match expected {
        Nothing => matches!(answers, [answer] if *answer == request[..2]),
        Is(payload) => {
            matches!(answers, [answer] if echoed(answer) && answer.len() == 3 && hex::encode(&answer[2]) == *payload)
        }
        Text(words) => match answers {
            [answer] if answer.len() == 2 && answer[0] == request[0] => {
                let text = OperationId::decode(&answer[1]);
                matches!(text, Ok(OperationId::Name(text)) if text.starts_with("error: ") && text.contains(words))
            }
            _ => false,
        },
        Pool => match response(ResponseKind::EngineDriven) {
            Some(Response::EngineDriven(pool)) => {
                pool.shm_name.starts_with("lmcache_l1_pool_") && pool.pool_size == 64 << 20
            }
            _ => false,
        },
        Chunks(count) => match response(ResponseKind::PrepareRetrieve) {
            Some(Response::PrepareRetrieve(hit)) => {
                hit.success
                    && read_tensors(&hit.data, &PickleLimits::default())
                        .is_ok_and(|chunks| chunks.len() == *count)
            }
            _ => false,
        },
        Events(expected, answer) => {
            let is_batch = |it: &&Frames| it[1].ends_with(b"subscribe_kv_events");
            let (batches, others): (Vec<_>, Vec<_>) = answers.iter().partition(is_batch);
            let [batch] = batches[..] else { return false };
            let batch = Response::decode(ResponseKind::EventBatch, batch.get(2).map(Vec::as_slice));
            let Ok(Response::EventBatch(batch)) = batch else {
                return false;
            };
            let shape = |event: &EventRecord<'_>| (event.seq, event.block_hashes.len());
            let shapes = batch.events.iter().map(shape);
            batch.enabled
                && !batch.lost
                && shapes.eq(expected.iter().map(|(seq, _, hashes)| (*seq, *hashes)))
                && batch
                    .events
                    .iter()
                    .zip(*expected)
                    .all(|(event, (_, kind, _))| event.kind == *kind)
                && match (answer, &others[..]) {
                    (Some(answer), [other]) => echoed(other) && hex::encode(&other[2]) == *answer,
                    (None, []) => true,
                    _ => false,
                }
        }
    }
}

#[test]
fn errors_with_a_pool() {
    replay(
        &TestServer::start(&[]),
        "server_errors_shm.json",
        &[ERRORS, NOTHING_STAYS_RESERVED, ERRORS_POOLED],
    );
}

#[test]
fn errors_without_a_pool() {
    replay(
        &TestServer::start(&["--shm-name", ""]),
        "server_errors_pickle.json",
        &[ERRORS, NOTHING_STAYS_RESERVED, ERRORS_PICKLED],
    );
}

#[test]
fn pages_of_a_worker() {
    replay(
        &TestServer::start(&[]),
        "server_probes_lmcache_driven_cpu.json",
        &[PAGES],
    );
}

#[test]
fn reused_requests_and_short_messages() {
    replay(
        &TestServer::start(&["--shm-name", ""]),
        "server_probes_misc.json",
        &[MISC],
    );
}
