//! Clients of 0.4.4, as that release's own code frames them.

use crate::support::{bytes, frames, list, load, slices, text};
use kvtier_proto::frames::{ClientMessage, OperationId};
use kvtier_proto::generation::{BlockForm, Candidates, Field, Generation};
use kvtier_proto::key::{CacheKey, KeyForm, VecTokens};
use kvtier_proto::operation::Operation;
use kvtier_proto::request::Request;
use kvtier_proto::response::ResponseKind;

/// The generation that 0.4.4 belongs to.
const G2: Generation = Generation::G2;

// proves: docs/clients.md#releases
#[test]
fn everything_recorded_of_0_4_4_is_understood() {
    for (name, value) in load("older_versions.json").as_object().unwrap() {
        match name.as_str() {
            "request_types" => {
                for (name, number) in value.as_object().unwrap() {
                    check_number(name, number.as_i64().unwrap());
                }
            }
            "payload_classes" => {
                for (name, classes) in value.as_object().unwrap() {
                    check_payloads(name, list(classes).iter().map(text).collect());
                }
            }
            "response_class" => {
                for (name, class) in value.as_object().unwrap() {
                    check_response(name, text(class));
                }
            }
            "samples" => {
                for (name, sample) in value.as_object().unwrap() {
                    check_sample(name, &frames(sample));
                }
            }
            "seed003_illustration_not_run" => {
                for (name, sample) in value.as_object().unwrap() {
                    if name != "note" {
                        // One payload, a list of keys: not a form that is served.
                        assert!(CacheKey::decode(&bytes(sample), &mut VecTokens).is_err());
                    }
                }
            }
            other => panic!("unknown part {other}"),
        }
    }
}

/// Blending before 0.5 is not served: its numbers stay unknown.
fn operation(name: &str) -> Option<Operation> {
    let lower = name.to_lowercase();
    if lower.starts_with("cb_") {
        return None;
    }
    Some(Operation::from_name(&lower).unwrap_or_else(|| panic!("{name} is unknown")))
}

fn check_number(name: &str, number: i64) {
    let rows: Vec<_> = G2.rows(OperationId::Number(number)).collect();
    match operation(name) {
        None => assert!(rows.is_empty(), "{name}"),
        Some(operation) => {
            assert!(!rows.is_empty(), "{name}");
            assert!(rows.iter().all(|row| row.operation == operation), "{name}");
            // Ints only: names came with 0.5.6.
            assert_eq!(G2.rows(OperationId::Name(operation.name())).count(), 0);
        }
    }
}

fn check_payloads(name: &str, classes: Vec<&str>) {
    let Some(operation) = operation(name) else {
        return;
    };
    let expected: Vec<_> = classes
        .into_iter()
        .map(|class| (class, name))
        .map(field)
        .collect();
    let found = G2
        .specs()
        .iter()
        .filter(|row| row.operation == operation)
        .any(|row| {
            row.payloads
                .iter()
                .zip(&expected)
                .all(|(field, kinds)| kinds.contains(field))
                && row.payloads.len() == expected.len()
        });
    assert!(found, "{name}: no row has {expected:?}");
}

fn field((class, name): (&str, &str)) -> Vec<Field> {
    match class.rsplit('.').next().unwrap().trim_end_matches("'>") {
        "<class 'int" => vec![
            Field::InstanceId,
            Field::WorldSize,
            Field::TpSize,
            Field::SkipTokens,
        ],
        "<class 'str" => vec![Field::ModelName, Field::RequestId],
        "<class 'bytes" => vec![Field::EventHandle],
        "list[int]" => vec![Field::BlockIds(BlockForm::Flat)],
        "IPCCacheEngineKey" => vec![Field::Key(KeyForm::Salted)],
        "CudaIPCWrapper]" => vec![Field::Tensors],
        "LayoutHints" => vec![Field::LayoutHints],
        "BlockAllocationRecord]" => vec![Field::AllocationRecords],
        other => panic!("{name}: unknown type {other}"),
    }
}

fn check_response(name: &str, class: &str) {
    let Some(operation) = operation(name) else {
        return;
    };
    let expected = match class {
        "None" => ResponseKind::Nothing,
        "tuple[bytes, bool]" => ResponseKind::Transfer,
        "int | None" => ResponseKind::OptionalInt,
        "<class 'int'>" => ResponseKind::Int,
        "<class 'bool'>" => ResponseKind::Bool,
        "<class 'str'>" => ResponseKind::Text,
        other => panic!("{name}: unknown response {other}"),
    };
    assert_eq!(G2.spec(operation).unwrap().response, expected, "{name}");
}

fn check_sample(name: &str, message: &[Vec<u8>]) {
    let operation = operation(name).unwrap();
    let ClientMessage::Request(request) = ClientMessage::parse(slices(message)).unwrap() else {
        panic!("{name} is no request");
    };
    // Once with the generation known, once as the first frame of a connection that came back to a server
    // which had spoken this generation before.
    let mut known = Candidates::only(G2);
    let mut open = Candidates::all();
    // No adapter sends these on a connection that came back.
    use Operation::{Clear, GetChunkSize, Noop};
    let unsent = matches!(operation, GetChunkSize | Clear | Noop);
    let both = [&mut known, &mut open].into_iter();
    for candidates in both.take(if unsent { 1 } else { 2 }) {
        let resolved = candidates.resolve(&request, &[G2]).unwrap();
        assert_eq!(resolved.generation, G2, "{name}");
        assert_eq!(resolved.spec.operation, operation, "{name}");
        let decoded =
            Request::decode_noting_unknown(resolved.spec, &request.payloads, &mut VecTokens);
        let (decoded, unknown) = decoded.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(unknown, None, "{name}");
        assert_eq!(
            decoded.encode(resolved.spec).unwrap(),
            message[2..],
            "{name}"
        );
        match decoded {
            Request::Store(store) => {
                assert_eq!(store.block_ids, [[1, 2]]);
                assert_eq!(store.key.readers(2), 1);
            }
            Request::Lookup { key, tp_size } => {
                assert_eq!(key.num_kv_readers, None);
                assert_eq!(key.readers(tp_size), 1);
                assert_eq!(key.readers(8), 8);
            }
            Request::Ping { instance } => assert_eq!(instance, None),
            Request::Clear { force } => assert!(force),
            _ => {}
        }
    }
    assert!(open.contains(G2), "{name}");
}
