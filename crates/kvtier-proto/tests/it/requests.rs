//! Every request of the real clients of 0.5.6 and 0.5.7: decoded to what it meant, encoded to the same bytes.

use std::collections::BTreeSet;

use crate::support::{
    files, frames, hex_json, hints_json, key_json, list, load, segment_json, slices, text,
};
use kvtier_proto::descriptor::{EXT_CODE, TensorDescriptor};
use kvtier_proto::frames::{ClientMessage, StreamControl};
use kvtier_proto::generation::{Candidates, Generation, OperationSpec};
use kvtier_proto::key::VecTokens;
use kvtier_proto::operation::Operation;
use kvtier_proto::request::{
    EngineDrivenContext, EngineGroupInfo, JobRef, ObjectKeyParts, Registration, Request, Seconds,
};
use kvtier_proto::wire::Reader;
use serde_json::{Value, json};

#[test]
fn requests_decode_and_encode_like_the_client() {
    let mut seen = 0;
    let vectors = files("requests").into_iter().flat_map(|name| {
        let Value::Object(operations) = load(&name) else {
            panic!("{name} is no object");
        };
        operations
    });
    for (name, cases) in &vectors.collect::<Vec<_>>() {
        let operation = Operation::from_name(name).unwrap_or_else(|| panic!("{name} is unknown"));
        for case in list(cases) {
            let context = format!("{name}/{}", text(&case["name"]));
            let message = frames(&case["frames"]);
            let ClientMessage::Request(request) = ClientMessage::parse(slices(&message)).unwrap()
            else {
                panic!("{context} is no request");
            };
            let mut candidates = Candidates::only(Generation::G6);
            let spec = candidates.resolve(&request, &[]).unwrap().spec;
            assert_eq!(spec.operation, operation, "{context}");

            let decoded = Request::decode_noting_unknown(spec, &request.payloads, &mut VecTokens);
            let (decoded, unknown) = decoded.unwrap_or_else(|error| panic!("{context}: {error}"));
            assert_eq!(unknown, None, "{context}");
            assert_eq!(decoded.operation(), operation, "{context}");
            let mut meant = list(&case["args"]).clone();
            if name == "clear" && meant.is_empty() {
                // The client fills in its default.
                meant.push(json!(false));
            }
            let mut args = args_json(&decoded);
            // What 0.5.7 has behind them is empty.
            args.truncate(spec.payloads.len());
            assert_eq!(args, meant, "{context}");
            assert_eq!(decoded.encode(spec).unwrap(), message[2..], "{context}");
            assert_eq!(spec.id().encode(), message[1], "{context}");

            for control in case["control_frames_after_close"]
                .as_array()
                .into_iter()
                .flatten()
            {
                let message = frames(control);
                let parsed = ClientMessage::parse(slices(&message)).unwrap();
                let uid = &message[0];
                assert_eq!(
                    parsed,
                    ClientMessage::Stream {
                        uid,
                        control: StreamControl::Cancel
                    }
                );
            }
            seen += 1;
        }
    }
    assert!(seen >= 50);
}

/// The payloads of recorded requests, by operation.
fn recorded_payloads() -> Vec<(Operation, Vec<Vec<u8>>)> {
    let mut recorded = Vec::new();
    for name in files("requests") {
        let Value::Object(operations) = load(&name) else {
            panic!("{name} is no object");
        };
        for (name, cases) in &operations {
            let operation = Operation::from_name(name).unwrap();
            let cases = list(cases).iter();
            recorded.extend(cases.map(|case| (operation, frames(&case["frames"]).split_off(2))));
        }
    }
    recorded
}

#[test]
fn new_field_of_any_map_is_noted() {
    let mut seen = BTreeSet::new();
    for (operation, payloads) in recorded_payloads() {
        let rows = Generation::G6.specs().iter();
        let rows = rows.filter(|row| row.operation == operation);
        for (at, payload) in payloads.iter().enumerate() {
            let mut maps = Vec::new();
            find_maps(&mut Reader::new(payload), payload.len(), &mut maps);
            for map in maps {
                let mut changed = payloads.clone();
                changed[at][map] += 1;
                let field = *b"\xaccoming_field\xc0";
                changed[at].splice(map + 1..=map, field);
                let changed: Vec<_> = changed.iter().map(Vec::as_slice).collect();
                let fits = |row: &&OperationSpec| {
                    let fields = row.payloads.iter();
                    row.payloads.len() == payloads.len()
                        && fields
                            .zip(&payloads)
                            .all(|(field, payload)| field.looks_like(payload))
                };
                let row = rows.clone().find(fits).unwrap();
                let (_, unknown) =
                    Request::decode_noting_unknown(row, &changed, &mut VecTokens).unwrap();
                let unknown = unknown.unwrap_or_else(|| panic!("{operation} {map} {payload:02x?}"));
                assert_eq!(unknown.name, "coming_field");
                assert_eq!(unknown.payload, row.payloads[at].name());
                let is_inside = map > 0;
                seen.insert((unknown.payload, is_inside));
            }
        }
    }
    let payloads = [
        ("engine_group_infos", true),
        ("group_layout_descs", true),
        ("key", false),
        ("keys", true),
        ("layout_hints", false),
        ("match_results", true),
        ("payload", false),
        ("records", true),
        ("request", false),
    ];
    assert_eq!(seen, BTreeSet::from(payloads));
}

/// The places of all maps with named fields in a value that ends at `end`, but for the settings of keys, which may have any.
fn find_maps(reader: &mut Reader<'_>, end: usize, found: &mut Vec<usize>) {
    match reader.peek().unwrap() {
        0x80..=0x8f => {
            let at = end - reader.rest().len();
            let fields = reader.map_len().unwrap();
            // The layouts of object groups are numbered.
            let is_named = fields == 0 || matches!(reader.peek(), Ok(0xa0..=0xbf));
            found.extend(is_named.then_some(at));
            for _ in 0..fields {
                if reader.raw().unwrap().ends_with(b"request_configs") {
                    reader.skip().unwrap();
                } else {
                    find_maps(reader, end, found);
                }
            }
        }
        0x90..=0x9f => {
            (0..reader.array_len().unwrap()).for_each(|_| find_maps(reader, end, found));
        }
        _ => reader.skip().unwrap(),
    }
}

fn args_json(request: &Request<'_, Vec<u32>>) -> Vec<Value> {
    match request {
        Request::RegisterKvCache(registration) | Request::RegisterQCache(registration) => {
            registration_json(registration)
        }
        Request::UnregisterKvCache { instance }
        | Request::UnregisterQCache { instance }
        | Request::UnregisterEngineDriven { instance }
        | Request::CbUnregisterRope { instance } => vec![json!(instance.0)],
        Request::Store(store) | Request::StoreQ(store) => vec![
            key_json(&store.key),
            json!(store.instance.0),
            json!(store.block_ids),
            hex_json(store.event_handle),
        ],
        Request::Retrieve(retrieve) => vec![
            key_json(&retrieve.key),
            json!(retrieve.instance.0),
            json!(retrieve.block_ids),
            hex_json(retrieve.event_handle),
            json!(retrieve.skip_first_n_tokens),
        ],
        Request::Lookup { key, tp_size } | Request::CbUnifiedLookup { key, tp_size } => {
            vec![key_json(key), json!(tp_size)]
        }
        Request::FreeLookupLocks {
            key,
            tp_size,
            extra_ranges,
        } => vec![key_json(key), json!(tp_size), json!(extra_ranges)],
        Request::QueryPrefetchStatus { job } | Request::QueryPrefetchLookupHits { job } => {
            vec![job_json(job)]
        }
        Request::WaitPrefetchStatus { job, timeout } => {
            vec![job_json(job), seconds_json(*timeout)]
        }
        Request::Find { key, timeout } => vec![key_json(key), seconds_json(*timeout)],
        Request::EndSession { request_id } => vec![json!(request_id)],
        Request::RegisterEngineDriven(context) => vec![context_json(context)],
        Request::PrepareStore {
            key,
            instance,
            skipped_chunks,
        } => vec![key_json(key), json!(instance.0), json!(skipped_chunks)],
        Request::PrepareRetrieve { key, instance } | Request::CommitRetrieve { key, instance } => {
            vec![key_json(key), json!(instance.0)]
        }
        Request::CommitStore {
            key,
            instance,
            data,
        } => {
            vec![key_json(key), json!(instance.0), hex_json(data)]
        }
        Request::Clear { force } => vec![json!(force)],
        Request::NegotiateChunkSize { alignment } => vec![json!(alignment)],
        Request::GetChunkSize | Request::GetExperimental | Request::Noop => vec![],
        Request::Ping { instance } => vec![json!(instance.map(|instance| instance.0))],
        Request::ReportBlockAllocation(report) => vec![
            json!(report.instance.unwrap().0),
            json!(report.model_name),
            report
                .records
                .iter()
                .map(|record| {
                    json!({
                        "dataclass": "BlockAllocationRecord",
                        "fields": {
                            "req_id": record.request_id,
                            "new_block_ids": record.new_block_ids,
                            "new_token_ids": record.new_token_ids,
                        }
                    })
                })
                .collect(),
        ],
        Request::CbRegisterRope(rope) => vec![
            json!(rope.instance.0),
            rope.caches.iter().map(tensor_json).collect(),
            json!(rope.head_size),
            json!(rope.is_neox_style),
            json!(rope.group_to_cache),
            json!(rope.group_rot),
            json!(rope.group_head_size),
            json!(rope.kv_quant),
        ],
        Request::CbRetrievePreComputed(retrieve) => vec![
            key_json(&retrieve.key),
            retrieve.matches.iter().map(segment_json).collect(),
            json!(retrieve.block_ids),
            json!(retrieve.instance.0),
            hex_json(retrieve.event_handle),
        ],
        Request::CbReorderPlan {
            key,
            keep_prefix,
            budget_ms,
        } => {
            vec![key_json(key), json!(keep_prefix), json!(budget_ms)]
        }
        Request::CbProtocolHandshake { client_version } => vec![json!(client_version)],
        Request::P2pLookupAndLock { keys, layouts } => {
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
            vec![
                keys.iter().map(object_key_json).collect(),
                json!({"map": layouts}),
            ]
        }
        Request::P2pQueryLookupResults { task_id } => vec![json!(task_id)],
        Request::P2pUnlockObjects { keys } => vec![keys.iter().map(object_key_json).collect()],
        Request::SubscribeKvEvents(subscription) => vec![
            json!(subscription.instance.0),
            json!(subscription.model_name),
            json!(subscription.cursor),
            json!(subscription.max_events),
        ],
        Request::ServerModuleCall { method, payload }
        | Request::ServerModuleAffinityCall { method, payload } => vec![json!({
            "struct": "ServerModuleCallRequest",
            "fields": {"method": method, "payload": hex_json(payload)},
        })],
    }
}

fn seconds_json(seconds: Seconds) -> Value {
    match seconds {
        Seconds::Whole(seconds) => json!(seconds),
        Seconds::Fraction(seconds) => json!(seconds),
    }
}

fn job_json(job: &JobRef<'_>) -> Value {
    match job {
        JobRef::Request(request_id) => json!(request_id),
        JobRef::Job(job) => json!(job),
    }
}

fn registration_json(registration: &Registration<'_>) -> Vec<Value> {
    vec![
        json!(registration.instance.0),
        registration.tensors.iter().map(tensor_json).collect(),
        json!(registration.model_name),
        json!(registration.world_size),
        json!({"enum": registration.engine.name()}),
        hints_json(&registration.hints),
        registration.groups.iter().map(group_json).collect(),
    ]
}

fn tensor_json(tensor: &TensorDescriptor) -> Value {
    assert_eq!(EXT_CODE, 1);
    let mut body = Vec::new();
    tensor.encode(&mut body);
    json!({"ext1": hex::encode(body)})
}

fn group_json(group: &EngineGroupInfo) -> Value {
    json!({"struct": "EngineGroupInfo", "fields": {
        "engine_group_id": group.engine_group_id,
        "layer_indices": group.layer_indices,
        "tokens_per_block": group.tokens_per_block,
        "sw_size_tokens": group.sw_size_tokens,
        "extra_object_group_tag": group.extra_object_group_tag,
        "recurrent_state": group.recurrent_state,
    }})
}

fn context_json(context: &EngineDrivenContext<'_>) -> Value {
    json!({"struct": "RegisterEngineDrivenContextPayload", "fields": {
        "instance_id": context.instance.0,
        "model_name": context.model_name,
        "world_size": context.world_size,
        "block_size": context.block_size,
        "num_layers": context.num_layers,
        "hidden_dim_size": context.hidden_dim_size,
        "dtype_str": context.dtype,
        "use_mla": context.use_mla,
        "num_physical_slots": context.num_physical_slots,
    }})
}

fn object_key_json(key: &ObjectKeyParts<'_>) -> Value {
    json!({"dataclass": "ObjectKey", "fields": {
        "chunk_hash": hex_json(key.chunk_hash),
        "model_name": key.model_name,
        "kv_rank": key.kv_rank,
        "object_group_id": key.object_group_id,
        "cache_salt": key.cache_salt,
    }})
}
