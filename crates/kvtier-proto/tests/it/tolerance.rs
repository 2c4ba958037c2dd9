//! What the 0.5.6 server takes and refuses, value by value.
//!
//! The cases name types; each is decoded through a row that has a payload of that type, so that the code
//! tested is the code that serves.

use crate::support::{bytes, hints_json, key_json, list, load, text};
use kvtier_proto::generation::{BlockForm, ContextForm, Field, OperationSpec};
use kvtier_proto::key::{KeyForm, VecTokens};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{JobRef, Request, Seconds};
use kvtier_proto::response::ResponseKind;
use serde_json::{Value, json};

/// Cases where we differ from the peer on purpose, with the reason.
const DIFFERENT: [(&str, &str); 2] = [
    (
        "key_token_negative",
        "the peer decodes it and fails at hashing",
    ),
    ("key_token_u64", "the peer decodes it and fails at hashing"),
];

#[test]
fn values_are_accepted_as_by_the_peer() {
    for case in list(&load("decode_tolerance.json")) {
        let name = text(&case["name"]);
        let Some(kind) = case.get("type").map(text) else {
            assert_eq!(name, "payload_count_mismatch");
            let spec = row(Operation::Ping, &[Field::OptionalInstanceId]);
            assert!(Request::decode(&spec, &[], &mut VecTokens).is_err());
            assert!(Request::decode(&spec, &[&[0xc0], &[0xc0]], &mut VecTokens).is_err());
            continue;
        };
        let payload = bytes(&case["payload"]);
        let result = decode(kind, &payload);
        if DIFFERENT.iter().any(|(different, _)| *different == name) {
            assert!(case.get("decoded").is_some() && result.is_err(), "{name}");
            continue;
        }
        match (case.get("decoded"), result) {
            (Some(expected), Ok(value)) => assert_eq!(value, *expected, "{name}"),
            (None, Err(error)) => {
                assert!(case["error"].is_string(), "{name}");
                assert!(!error.is_empty());
                // The peer names missing fields; so do we.
                if let Some(field) = text(&case["error"])
                    .split("missing required field `")
                    .nth(1)
                {
                    let field = field.trim_end_matches('`');
                    assert!(error.contains(field), "{name}: {error}");
                }
            }
            (expected, result) => panic!("{name}: {expected:?} but {result:?}"),
        }
    }
}

/// A row with nothing but the payloads to test.
fn row(operation: Operation, payloads: &[Field]) -> OperationSpec {
    OperationSpec {
        number: None,
        operation,
        payloads: Box::leak(payloads.into()),
        response: ResponseKind::Nothing,
    }
}

fn decode(kind: &str, payload: &[u8]) -> Result<Value, String> {
    let class = kind.rsplit('.').next().unwrap().trim_end_matches("'>");
    // An operation, the fields of its row, the payloads around the one to test, and what to show of it.
    let int: &[u8] = &[1];
    let (operation, fields, payloads): (_, &[Field], Vec<&[u8]>) = match class {
        "IPCCacheServerKey" => (
            Operation::Lookup,
            &[Field::Key(KeyForm::Full), Field::TpSize],
            vec![payload, int],
        ),
        "<class 'int" => (
            Operation::UnregisterKvCache,
            &[Field::InstanceId],
            vec![payload],
        ),
        "<class 'bool" => (Operation::Clear, &[Field::Force], vec![payload]),
        "int | None" => (Operation::Ping, &[Field::OptionalInstanceId], vec![payload]),
        "<class 'float" => (
            Operation::WaitPrefetchStatus,
            &[Field::RequestId, Field::Timeout],
            vec![&[0xa1, b'r'], payload],
        ),
        "<class 'str" => (Operation::EndSession, &[Field::RequestId], vec![payload]),
        "<class 'bytes" | "list[list[int]]" => {
            let key = MINIMAL_KEY;
            let (blocks, handle): (&[u8], &[u8]) = if class == "list[list[int]]" {
                (payload, &[0xc4, 0])
            } else {
                (&[0x90], payload)
            };
            (
                Operation::Store,
                &[
                    Field::Key(KeyForm::Full),
                    Field::InstanceId,
                    Field::BlockIds(BlockForm::Grouped),
                    Field::EventHandle,
                ],
                vec![key, int, blocks, handle],
            )
        }
        "<enum 'EngineType" | "LayoutHints" | "EngineGroupInfo" => {
            return decode_registration(class, payload);
        }
        "RegisterEngineDrivenContextPayload" => (
            Operation::RegisterEngineDriven,
            &[Field::EngineDrivenContext(ContextForm::Slots)],
            vec![payload],
        ),
        "ObjectKey" => {
            let keys = [&[0x91], payload].concat();
            return decode_p2p(&keys, &[0x80], |request| match request {
                Request::P2pLookupAndLock { keys, .. } => {
                    let key = &keys[0];
                    json!({"dataclass": "ObjectKey", "fields": {
                        "chunk_hash": {"bytes": hex::encode(key.chunk_hash)},
                        "model_name": key.model_name,
                        "kv_rank": key.kv_rank,
                        "object_group_id": key.object_group_id,
                        "cache_salt": key.cache_salt,
                    }})
                }
                other => panic!("{other:?}"),
            });
        }
        "MemoryLayoutDesc]" => {
            return decode_p2p(&[0x90], payload, |request| match request {
                Request::P2pLookupAndLock { layouts, .. } => {
                    let layouts: Vec<_> = layouts
                        .iter()
                        .map(|(group, layout)| {
                            let dtypes: Vec<_> = layout
                                .dtypes
                                .iter()
                                .map(|name| json!({"dtype": name}))
                                .collect();
                            json!([group, {
                                "dataclass": "MemoryLayoutDesc",
                                "fields": {"shapes": layout.shapes, "dtypes": dtypes},
                            }])
                        })
                        .collect();
                    json!({"map": layouts})
                }
                other => panic!("{other:?}"),
            });
        }
        other => panic!("unknown type {other} ({kind})"),
    };
    let spec = row(operation, fields);
    let request = Request::decode(&spec, &payloads, &mut VecTokens).map_err(|e| e.to_string())?;
    Ok(match request {
        Request::Lookup { key, .. } => key_json(&key),
        Request::UnregisterKvCache { instance } => json!(instance.0),
        Request::Clear { force } => json!(force),
        Request::Ping { instance } => json!(instance.map(|instance| instance.0)),
        Request::WaitPrefetchStatus { timeout, .. } => match timeout {
            Seconds::Whole(_) | Seconds::Fraction(_) => json!(timeout.as_f64()),
        },
        Request::EndSession { request_id } => json!(request_id),
        Request::QueryPrefetchStatus {
            job: JobRef::Request(request_id),
        } => json!(request_id),
        Request::Store(store) if class == "list[list[int]]" => json!(store.block_ids),
        Request::Store(store) => json!({"bytes": hex::encode(store.event_handle)}),
        Request::RegisterEngineDriven(context) => json!({
            "struct": "RegisterEngineDrivenContextPayload",
            "fields": {
                "instance_id": context.instance.0,
                "model_name": context.model_name,
                "world_size": context.world_size,
                "block_size": context.block_size,
                "num_layers": context.num_layers,
                "hidden_dim_size": context.hidden_dim_size,
                "dtype_str": context.dtype,
                "use_mla": context.use_mla,
                "num_physical_slots": context.num_physical_slots,
            },
        }),
        other => panic!("{other:?}"),
    })
}

/// A key with the seven fields that have no default.
const MINIMAL_KEY: &[u8] = b"\x87\xaamodel_name\xa1m\xaaworld_size\x01\xa9worker_id\xc0\
    \xa9token_ids\x90\xa5start\x00\xa3end\x00\xaarequest_id\xa1r";

fn decode_registration(class: &str, payload: &[u8]) -> Result<Value, String> {
    let spec = row(
        Operation::RegisterKvCache,
        &[
            Field::InstanceId,
            Field::Tensors,
            Field::ModelName,
            Field::WorldSize,
            Field::EngineType,
            Field::LayoutHints,
            Field::GroupInfos,
        ],
    );
    let groups = [&[0x91], payload].concat();
    let mut payloads: [&[u8]; 7] = [&[1], &[0x90], b"\xa1m", &[1], b"\xa4vllm", &[0x80], &[0x90]];
    match class {
        "LayoutHints" => payloads[5] = payload,
        "EngineGroupInfo" => payloads[6] = &groups,
        _ => payloads[4] = payload,
    }
    let request = Request::decode(&spec, &payloads, &mut VecTokens).map_err(|e| e.to_string())?;
    let Request::RegisterKvCache(registration) = request else {
        panic!("{request:?}");
    };
    Ok(match class {
        "LayoutHints" => hints_json(&registration.hints),
        "EngineGroupInfo" => {
            let group = &registration.groups[0];
            json!({"struct": "EngineGroupInfo", "fields": {
                "engine_group_id": group.engine_group_id,
                "layer_indices": group.layer_indices,
                "tokens_per_block": group.tokens_per_block,
                "sw_size_tokens": group.sw_size_tokens,
                "extra_object_group_tag": group.extra_object_group_tag,
                "recurrent_state": group.recurrent_state,
            }})
        }
        _ => json!({"enum": registration.engine.name()}),
    })
}

fn decode_p2p(
    keys: &[u8],
    layouts: &[u8],
    show: impl FnOnce(Request<'_, Vec<u32>>) -> Value,
) -> Result<Value, String> {
    let spec = row(
        Operation::P2pLookupAndLock,
        &[Field::ObjectKeys, Field::LayoutDescriptors],
    );
    Request::decode(&spec, &[keys, layouts], &mut VecTokens)
        .map(show)
        .map_err(|error| error.to_string())
}

// proves: docs/clients.md#a-chunk-size-of-ones-own
#[test]
fn chunk_size_of_a_key_is_bounded_and_in_front() {
    let key = |tokens: Option<u32>| {
        let mut bytes = Vec::new();
        let key = kvtier_proto::key::CacheKey {
            model_name: "m",
            world_size: 1,
            worker_id: None,
            chunk_tokens: tokens,
            tokens: vec![1u32, 2],
            start: 0,
            end: 2,
            request_id: "r",
            cache_salt: "",
            request_configs: None,
            num_kv_readers: Some(1),
        };
        key.write(kvtier_proto::key::KeyForm::Full, &mut bytes);
        bytes
    };
    let read = |bytes: &[u8]| {
        kvtier_proto::key::CacheKey::decode(bytes, &mut kvtier_proto::key::VecTokens)
            .map(|key| key.chunk_tokens)
            .map_err(|error| error.to_string())
    };
    for allowed in [None, Some(16), Some(1568), Some(65_536)] {
        assert_eq!(read(&key(allowed)), Ok(allowed));
    }
    for refused in [0, 15, 65_537, u32::MAX] {
        let error = read(&key(Some(refused))).unwrap_err();
        let wanted = format!("{refused} tokens per chunk; allowed: 16 to 65536");
        assert!(
            error.contains("kvtier.chunk_tokens") && error.contains(&wanted),
            "{error}"
        );
    }
    // The tokens are hashed by it, so it has to be known before them.
    let mut late = key(None);
    late[0] += 1;
    late.extend_from_slice(b"\xb3kvtier.chunk_tokens\x20");
    let error = read(&late).unwrap_err();
    assert!(error.contains("in front of"), "{error}");
}

#[test]
fn packed_tokens_are_whole_and_in_order() {
    let packed = |tokens: &[u8]| {
        let mut key = b"\x87\xaamodel_name\xa1m\xaaworld_size\x01\xa9worker_id\xc0".to_vec();
        kvtier_proto::wire::write_str(&mut key, "token_bytes");
        kvtier_proto::wire::write_bin(&mut key, tokens);
        key.extend_from_slice(b"\xa5start\x00\xa3end\x00\xaarequest_id\xa1r");
        key
    };
    let read = |bytes: &[u8]| {
        kvtier_proto::key::CacheKey::decode(bytes, &mut kvtier_proto::key::VecTokens)
            .map(|key| key.tokens)
            .map_err(|error| error.to_string())
    };
    assert_eq!(read(&packed(&[])), Ok(vec![]));
    let two = packed(&[0, 0, 1, 0, 0xff, 0xff, 0xff, 0xfe]);
    assert_eq!(read(&two), Ok(vec![256, u32::MAX - 1]));
    let head = kvtier_proto::key::KeyHead::peek(&two).unwrap();
    assert_eq!((head.model_name, head.token_count), ("m", 2));
    for bytes in [1, 2, 3, 5, 7] {
        let refused = read(&packed(&vec![0; bytes])).unwrap_err();
        let wanted = format!("token_bytes: {bytes} bytes; allowed: a multiple of 4");
        assert!(refused.contains(&wanted), "{refused}");
    }
}
