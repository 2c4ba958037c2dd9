//! The newest table against the registries of operations of 0.5.6 and 0.5.7.

use crate::support::{bytes, files, list, load, text};
use kvtier_proto::frames::OperationId;
use kvtier_proto::generation::{BlockForm, ContextForm, Field, Generation};
use kvtier_proto::key::KeyForm;
use kvtier_proto::operation::Operation;
use kvtier_proto::response::ResponseKind;

/// Operations of the newest generation that neither has: one that has ended, and kvtier's own.
const IN_NEITHER: [Operation; 2] = [Operation::QueryPrefetchLookupHits, Operation::Find];

#[test]
fn every_operation_has_its_row() {
    let mut seen = Vec::new();
    for file in files("operations") {
        for case in list(&load(&file)["operations"]) {
            let name = text(&case["operation"]);
            let context = format!("{file} {name}");
            let operation = Operation::from_name(name).unwrap_or_else(|| panic!("{name}?"));
            seen.push(operation);
            let names = list(&case["payload_names"]);
            let id = Generation::G6.spec(operation).unwrap().id();
            let spec = Generation::G6
                .rows(id)
                .find(|row| row.payloads.len() == names.len())
                .unwrap_or_else(|| panic!("{context} has no row of {} payloads", names.len()));

            let number = spec.number.map(u64::from);
            assert_eq!(case["legacy_id"].as_u64(), number, "{context}");
            assert_eq!(bytes(&case["operation_frame"]), id.encode(), "{context}");
            let response = response_of(text(&case["response_type"]));
            assert_eq!(response, spec.response, "{context}");

            let types = list(&case["payload_types"]);
            for ((wire_name, kind), &field) in names.iter().zip(types).zip(spec.payloads) {
                let wire_name = text(wire_name);
                // Three names for the same kind of payload.
                let wire_name = match wire_name {
                    "q_cache" | "cos_sin_caches_ipc" => "kv_cache",
                    other => other,
                };
                assert_eq!(wire_name, field.name(), "{context}");
                assert!(
                    fields_of(text(kind)).contains(&field),
                    "{context}: {field:?} is no {kind}"
                );
            }
        }
    }
    for operation in Operation::all() {
        let expected = !IN_NEITHER.contains(&operation);
        assert_eq!(seen.contains(&operation), expected, "{operation}");
    }
}

#[test]
fn op_frames_parse_as_in_the_peer() {
    for case in list(&load("operations.json")["decode_operation"]) {
        let frame = bytes(&case["frame"]);
        let decoded = OperationId::decode(&frame);
        let row = decoded
            .as_ref()
            .ok()
            .and_then(|id| Generation::G6.rows(*id).next());
        match case["operation"].as_str() {
            Some(name) => match (decoded.unwrap(), row) {
                (_, Some(row)) => assert_eq!(row.operation.name(), name),
                // The peer passes unknown names on and fails later.
                (id, None) => {
                    assert_eq!(id, OperationId::Name(name));
                    assert_eq!(Operation::from_name(name), None);
                }
            },
            // Number 11 was taken until 0.5.5, whose clients are served too.
            None if frame == [11] => {
                assert_eq!(row.unwrap().operation, Operation::QueryPrefetchLookupHits);
            }
            None => {
                assert!(case["error"].is_string(), "{case}");
                assert!(row.is_none(), "{case}");
            }
        }
    }
}

fn response_of(kind: &str) -> ResponseKind {
    match kind {
        "<class 'NoneType'>" => ResponseKind::Nothing,
        "<class 'int'>" => ResponseKind::Int,
        "int | None" => ResponseKind::OptionalInt,
        "<class 'bool'>" => ResponseKind::Bool,
        "<class 'str'>" => ResponseKind::Text,
        "list[str]" => ResponseKind::Texts,
        "list[int]" => ResponseKind::Ints,
        "tuple[bytes, bool]" => ResponseKind::Transfer,
        "tuple[int, bool]" => ResponseKind::Handshake,
        other => match class_name(other) {
            "RegisterEngineDrivenContextResponse" => ResponseKind::EngineDriven,
            "PrepareStoreResponse" => ResponseKind::PrepareStore,
            "PrepareRetrieveResponse" => ResponseKind::PrepareRetrieve,
            "CBUnifiedLookupResult | None" => ResponseKind::UnifiedLookup,
            "TransferChannelAddress] | None" => ResponseKind::Addresses,
            "KVEventBatch" => ResponseKind::EventBatch,
            "ServerModuleCallResponse" => ResponseKind::ModuleCall,
            _ => panic!("unknown response type {other}"),
        },
    }
}

/// The last part of a dotted class, without the decoration around it.
fn class_name(kind: &str) -> &str {
    kind.rsplit('.').next().unwrap().trim_end_matches("'>")
}

fn fields_of(kind: &str) -> &'static [Field] {
    match kind {
        "<class 'int'>" => &[
            Field::InstanceId,
            Field::WorldSize,
            Field::SkipTokens,
            Field::TpSize,
            Field::HeadSize,
            Field::KeepPrefix,
            Field::BudgetMs,
            Field::ClientVersion,
            Field::TaskId,
            Field::Cursor,
            Field::MaxEvents,
            Field::ChunkAlignment,
        ],
        "int | None" => &[Field::OptionalInstanceId],
        "<class 'bool'>" => &[Field::Force, Field::IsNeoxStyle],
        "<class 'float'>" => &[Field::Timeout],
        "<class 'str'>" => &[Field::RequestId, Field::ModelName, Field::KvQuant],
        "<class 'bytes'>" => &[Field::EventHandle, Field::Data],
        "<enum 'EngineType'>" => &[Field::EngineType],
        "tuple[tuple[int, int], ...]" => &[Field::ExtraRanges],
        "tuple[tuple[int, ...], ...]" => &[Field::SkippedChunks],
        "list[int]" => &[Field::GroupToCache, Field::GroupHeadSize],
        "list[list[int]]" => &[Field::BlockIds(BlockForm::Grouped), Field::GroupRot],
        other => match class_name(other) {
            "IPCCacheServerKey" => &[Field::Key(KeyForm::Full), Field::Key(KeyForm::Packed)],
            "DeviceIPCWrapper]" => &[Field::Tensors],
            "LayoutHints" => &[Field::LayoutHints],
            "EngineGroupInfo]" => &[Field::GroupInfos],
            "RegisterEngineDrivenContextPayload" => {
                &[Field::EngineDrivenContext(ContextForm::Slots)]
            }
            "BlockAllocationRecord]" => &[Field::AllocationRecords],
            "CBMatchResult]" => &[Field::MatchedSegments],
            "ObjectKey]" => &[Field::ObjectKeys],
            "MemoryLayoutDesc]" => &[Field::LayoutDescriptors],
            "ServerModuleCallRequest" => &[Field::ModuleCall],
            _ => panic!("unknown payload type {other}"),
        },
    }
}
