//! Every response the real 0.5.6 client accepted, and the odd ones it was given.

use crate::support::{frames, g6_row, hex_json, list, load, segment_json, slices, text};
use kvtier_proto::frames::{OperationId, ReplyFrames};
use kvtier_proto::generation::Generation;
use kvtier_proto::operation::{Lane, Operation};
use kvtier_proto::response::{ChunkSlot, Response};
use serde_json::{Value, json};

#[test]
fn responses_decode_and_encode_like_the_peer() {
    let vectors = load("responses.json");
    let mut seen = 0;
    for (name, cases) in vectors.as_object().unwrap() {
        let operation = Operation::from_name(name).unwrap_or_else(|| panic!("{name} is unknown"));
        let spec = Generation::G6.spec(operation).unwrap();
        for case in list(cases) {
            let context = format!("{name}/{}", text(&case["name"]));
            let mut reply = list(&case["frames"]).clone();
            // Streams were recorded without the uid.
            if reply[0] == json!("<uid>") {
                reply[0] = json!("00");
            }
            let reply = frames(&json!(reply));
            let parsed = ReplyFrames::parse(slices(&reply)).unwrap();
            assert_eq!(g6_row(parsed.op).operation, operation, "{context}");

            let response = Response::decode(spec.response, parsed.payload)
                .unwrap_or_else(|error| panic!("{context}: {error}"));
            assert_eq!(response_json(&response), case["value"], "{context}");
            assert_eq!(response.encode().as_deref(), parsed.payload, "{context}");
            seen += 1;
        }
    }
    assert!(seen >= 50);
}

#[test]
fn odd_replies_parse_as_in_the_client() {
    for (index, case) in list(&load("client_tolerance.json")).iter().enumerate() {
        let name = text(&case["name"]);
        let operation = Operation::from_name(text(&case["operation"])).unwrap();
        let spec = Generation::G6.spec(operation).unwrap();
        let reply = frames(&case["reply_frames"]);
        let result = take_reply(&reply, operation, spec.response, 0x73 + index as u64);
        match (case.get("client_result"), result) {
            (Some(expected), Ok(value)) => {
                // The recording client shows an empty context as it found it.
                assert_eq!(value, *expected, "{name}");
            }
            (None, Err(error)) => {
                let client = text(&case["client_error"]);
                assert_eq!(
                    client.contains("does not match"),
                    error.contains("not the reply"),
                    "{name}"
                );
            }
            (_, result) => panic!("{name}: {result:?}"),
        }
    }
}

/// What our client does with a reply: the value, or why the request gets none.
fn take_reply(
    reply: &[Vec<u8>],
    operation: Operation,
    kind: kvtier_proto::response::ResponseKind,
    uid: u64,
) -> Result<Value, String> {
    let parsed = ReplyFrames::parse(slices(reply)).map_err(|error| error.to_string())?;
    if parsed.uid_number().map_err(|error| error.to_string())? != uid {
        return Err("no request has this uid".to_owned());
    }
    let id = OperationId::decode(parsed.op).map_err(|error| error.to_string())?;
    if !Generation::G6
        .rows(id)
        .any(|row| row.operation == operation)
    {
        return Err(format!("{id} is not the reply to {operation}"));
    }
    let response = Response::decode(kind, parsed.payload).map_err(|error| error.to_string())?;
    Ok(response_json(&response))
}

#[test]
fn tricks_on_the_client() {
    for (name, value) in load("client_tricks.json").as_object().unwrap() {
        match name.as_str() {
            "error_text_as_operation" => {
                let error = "error: layout not supported";
                assert!(text(value).contains(error));
                let op = OperationId::Name(error).encode();
                assert_eq!(OperationId::decode(&op).unwrap(), OperationId::Name(error));
            }
            "handler_pools" => {
                for (name, pool) in value.as_object().unwrap() {
                    check_pool(Operation::from_name(name).unwrap(), text(&pool["runs_on"]));
                }
            }
            // Behaviour over time: no bytes to check.
            "ping_answers" | "health_timeline" | "ttl_lock" => {}
            other => panic!("unknown trick {other}"),
        }
    }
}

/// Our lanes keep every order that the peer's pools keep.
fn check_pool(operation: Operation, pool: &str) {
    let lane = operation.lane();
    match pool {
        "AFFINITY" => assert_eq!(lane, Lane::Transfer, "{operation}"),
        "NORMAL" => assert_ne!(lane, Lane::Transfer, "{operation}"),
        "SYNC" => {
            let registers = operation.name().contains("register");
            assert_eq!(lane == Lane::Transfer, registers, "{operation}");
        }
        other => panic!("unknown pool {other}"),
    }
}

fn response_json(response: &Response<'_>) -> Value {
    match response {
        Response::Nothing => Value::Null,
        Response::Int(value) => json!(value),
        Response::Bool(value) => json!(value),
        Response::Text(text) => json!(text),
        Response::Texts(texts) => json!(texts),
        Response::Ints(values) => json!(values),
        Response::Bits(bits) => hex_json(bits),
        Response::Transfer(transfer) => json!([hex_json(&transfer.event_handle), transfer.ok]),
        Response::EngineDriven(pool) => json!({
            "dataclass": "RegisterEngineDrivenContextResponse",
            "fields": {"shm_name": pool.shm_name, "pool_size": pool.pool_size},
        }),
        Response::PrepareStore(prepared) => {
            let context = match &prepared.target {
                None => vec![],
                Some(target) => vec![
                    json!(["slots", slots_json(&target.slots)]),
                    json!(["chunk_indices", target.chunk_indices]),
                ],
            };
            json!({"dataclass": "PrepareStoreResponse", "fields": {"context": {"map": context}}})
        }
        Response::PrepareRetrieve(prepared) => {
            let context: Vec<_> = prepared
                .slots
                .iter()
                .map(|slots| json!(["slots", slots_json(slots)]))
                .collect();
            json!({"dataclass": "PrepareRetrieveResponse", "fields": {
                "success": prepared.success,
                "data": hex_json(&prepared.data),
                "context": {"map": context},
            }})
        }
        Response::EventBatch(batch) => {
            let events: Vec<_> = batch
                .events
                .iter()
                .map(|event| {
                    let hashes: Vec<_> = event
                        .block_hashes
                        .iter()
                        .map(|hash| hex_json(hash))
                        .collect();
                    json!({"dataclass": "KVEventRecord", "fields": {
                        "seq": event.seq,
                        "kind": event.kind,
                        "medium": event.medium,
                        "model_name": event.model_name,
                        "block_hashes": hashes,
                        "parent_block_hash": event.parent_block_hash.as_deref().map(hex_json),
                        "token_ids": event.token_ids,
                    }})
                })
                .collect();
            json!({"dataclass": "KVEventBatch", "fields": {
                "enabled": batch.enabled,
                "incarnation": batch.incarnation,
                "next_cursor": batch.next_cursor,
                "lost": batch.lost,
                "events": events,
            }})
        }
        Response::UnifiedLookup(found) => {
            let segments = |segments: &[_]| segments.iter().map(segment_json).collect::<Value>();
            json!({"dataclass": "CBUnifiedLookupResult", "fields": {
                "prefix_coverage_tokens": found.prefix_coverage_tokens,
                "non_prefix_segments": segments(&found.non_prefix_segments),
                "segmented_prefix_segments": segments(&found.segmented_prefix_segments),
            }})
        }
        Response::Handshake {
            version,
            compatible,
        } => json!([version, compatible]),
        Response::Addresses(addresses) => addresses
            .iter()
            .map(|address| {
                json!({
                    "dataclass": "TransferChannelAddress",
                    "fields": {"offset": address.offset, "size": address.size},
                })
            })
            .collect(),
        Response::ModuleCall(answer) => json!({
            "struct": "ServerModuleCallResponse",
            "fields": {
                "success": answer.success,
                "payload": hex_json(&answer.payload),
                "error": answer.error,
            },
        }),
    }
}

fn slots_json(slots: &[ChunkSlot<'_>]) -> Value {
    slots
        .iter()
        .map(|slot| {
            json!({"map": [
                ["offset", slot.offset],
                ["length", slot.length],
                ["shape", slot.shape],
                ["dtype", slot.dtype],
            ]})
        })
        .collect()
}
