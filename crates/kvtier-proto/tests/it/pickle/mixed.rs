//! Every row of `pickles.json`: descriptors, pickled wrappers and pickled tensors, real ones and ones to refuse.

use super::support::{gathered, hex_field};
use kvtier_proto::descriptor::{Dtype, TensorDescriptor};
use kvtier_proto::pickle::{PickleLimits, read_registration, read_tensors};
use kvtier_proto::wire::{Reader, write_array_len};
use serde_json::{Value, json};

fn descriptors(payload: &[u8]) -> Vec<TensorDescriptor> {
    let mut reader = Reader::new(payload);
    let count = reader.array_len().unwrap();
    let all = (0..count)
        .map(|_| TensorDescriptor::read(&mut reader).unwrap())
        .collect();
    reader.finish().unwrap();
    all
}

/// Shape, stride, storage offset and reference counter, as the vectors note them.
fn note(descriptor: &TensorDescriptor) -> Value {
    let TensorDescriptor::Cuda(of) = descriptor else {
        panic!("{descriptor:?}")
    };
    json!([
        of.metadata.shape,
        of.metadata.stride,
        of.metadata.storage_offset,
        of.handle.ref_counter_index
    ])
}

/// What is the same in all rows with pickled wrappers.
fn check_legacy(descriptor: &TensorDescriptor) {
    let TensorDescriptor::Cuda(of) = descriptor else {
        panic!("{descriptor:?}")
    };
    assert_eq!(of.handle.memory.as_deref().unwrap()[..4], [2, b'c', 0, 1]);
    assert_eq!(
        of.handle.ref_counter.as_deref().unwrap(),
        b"/torch_4242_1234567890_0"
    );
    assert_eq!(of.handle.event.as_deref().unwrap()[..2], [64, 65]);
    assert_eq!(of.metadata.shape, [2, 1000, 16, 8, 128]);
    assert_eq!(of.metadata.stride, [16_384_000, 16_384, 1024, 128, 1]);
    assert_eq!(
        of.metadata.device_uuid,
        "a1b2c3d4-0001-0002-0003-0123456789ab"
    );
}

fn check_row(row: &Value) {
    let name = row["name"].as_str().unwrap();
    let bytes = hex_field(row, "hex");
    assert_eq!(json!(bytes.len()), row["len"], "{name}");
    let limits = PickleLimits::default();
    match name.split_once('.').unwrap_or((name, "")) {
        ("reject", "pickle") => {
            // Kept for the pickle reader, which refuses it.
            let TensorDescriptor::Legacy { pickle } = TensorDescriptor::decode(&bytes).unwrap()
            else {
                panic!()
            };
            read_registration(&pickle, &limits).unwrap_err();
        }
        ("reject", "evil_reduce") => {
            let error = read_registration(&bytes, &limits).unwrap_err();
            assert!(error.message.contains("posix"), "{error}");
            read_tensors(&bytes, &limits).unwrap_err();
        }
        ("reject", _) => {
            TensorDescriptor::decode(&bytes).unwrap_err();
        }
        // Not read by this crate: an event is bytes to it.
        ("event", "timeline_semaphore") => assert_eq!(bytes.len(), 1 + 64 + 8 + 8),
        ("event", "cuda") => assert_eq!(bytes.len(), 64),
        ("engine_driven", chunks) => {
            let dtype = Dtype::from_name(chunks.strip_prefix("chunks.").unwrap()).unwrap();
            let tensors = read_tensors(&bytes, &limits).unwrap();
            assert_eq!(tensors.len(), 2, "{name}");
            for tensor in &tensors {
                assert_eq!(
                    (tensor.dtype, tensor.shape.as_slice()),
                    (dtype, [2, 2, 4, 8].as_slice()),
                    "{name}"
                );
                assert!(tensor.is_contiguous());
                assert_eq!(gathered(tensor).len() as u64, 128 * dtype.item_size());
            }
        }
        ("legacy044", "kvcache_list2") => {
            let all = descriptors(&bytes);
            assert_eq!(all.len(), 2);
            for descriptor in all {
                let TensorDescriptor::Legacy { pickle } = descriptor else {
                    panic!("{descriptor:?}")
                };
                check_legacy(&read_registration(&pickle, &limits).unwrap());
            }
        }
        // Protocol 2 has no bytes: it asks for a call that builds them from text. No release sends it.
        ("legacy044", "cuda_wrapper.proto2") => {
            let error = read_registration(&bytes, &limits).unwrap_err();
            assert!(error.message.contains("_codecs"), "{error}");
        }
        ("legacy044", kind) => {
            let descriptor = read_registration(&bytes, &limits).unwrap();
            check_legacy(&descriptor);
            let dtype = match kind.strip_prefix("cuda_wrapper.").unwrap() {
                "pickle" | "proto3" | "proto5" => Dtype::BFloat16,
                named => Dtype::from_name(named).unwrap(),
            };
            assert_eq!(descriptor.metadata().unwrap().dtype, dtype);
        }
        ("real_torch213", layers) => {
            let notes: Vec<_> = descriptors(&bytes).iter().map(note).collect();
            assert_eq!(notes.len(), 2);
            match layers {
                "lbnhc_2layers" => {
                    assert!(notes.iter().all(|note| note[0] == row["fields"]["shape"]));
                    assert!(notes.iter().all(|note| note[1] == row["fields"]["stride"]));
                }
                "blnhc_2layers" => assert_eq!(json!(notes), row["fields"]["wrappers"]),
                other => panic!("unknown row {other}"),
            }
            check_list(&bytes);
        }
        (_, "payload") => {
            let descriptor =
                TensorDescriptor::decode(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
            let mut encoded = Vec::new();
            descriptor.encode(&mut encoded);
            assert_eq!(encoded, bytes, "{name}");
        }
        (_, "kvcache_list1") => check_list(&bytes),
        _ => panic!("unknown row {name}"),
    }
}

/// A list of descriptors decodes and encodes to the same bytes.
fn check_list(bytes: &[u8]) {
    let all = descriptors(bytes);
    let mut encoded = Vec::new();
    write_array_len(&mut encoded, all.len());
    for descriptor in &all {
        descriptor.write(&mut encoded);
    }
    assert_eq!(encoded, bytes);
}

#[test]
fn every_row_is_read_or_refused() {
    let vectors: Value = serde_json::from_str(include_str!("../../vectors/pickles.json")).unwrap();
    for row in vectors["vectors"].as_array().unwrap() {
        check_row(row);
    }
    let names: Vec<_> = Dtype::ALL.iter().map(|dtype| json!(dtype.name())).collect();
    assert_eq!(json!(names), vectors["torch_dtype_names"]);
    for (name, size) in vectors["torch_dtype_itemsize"].as_object().unwrap() {
        assert_eq!(
            json!(Dtype::from_name(name).unwrap().item_size()),
            *size,
            "{name}"
        );
    }
}
