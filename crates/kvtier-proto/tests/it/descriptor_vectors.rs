//! Every row of `ipc_wrappers.json`: descriptors the real client made, and ones the real server refuses.

use kvtier_proto::descriptor::{Dtype, OpaqueVendor, TensorDescriptor, TensorMetadata, VmmHandle};
use kvtier_proto::pickle::{PickleLimits, read_registration};
use kvtier_proto::wire::{Reader, write_array_len};
use serde_json::{Value, json};

fn vectors() -> Value {
    serde_json::from_str(include_str!("../vectors/ipc_wrappers.json")).unwrap()
}

fn bytes(row: &Value, key: &str) -> Vec<u8> {
    hex::decode(
        row[key]
            .as_str()
            .unwrap_or_else(|| panic!("{key} of {row}")),
    )
    .unwrap()
}

fn hex_or_null(bytes: Option<&[u8]>) -> Value {
    bytes.map_or(Value::Null, |bytes| json!({ "bytes": hex::encode(bytes) }))
}

fn metadata_fields(metadata: &TensorMetadata) -> Value {
    json!({"struct": "TensorMetadata", "fields": {
        "dtype": metadata.dtype.name(),
        "shape": metadata.shape,
        "stride": metadata.stride,
        "storage_offset": metadata.storage_offset,
        "device_uuid": metadata.device_uuid,
    }})
}

/// The descriptor in the notation of the vectors.
fn described(descriptor: &TensorDescriptor) -> Value {
    let (name, mut fields) = match descriptor {
        TensorDescriptor::CpuShm(of) => (
            "CpuShmIPCData",
            json!({"shm_name": of.shm_name, "nbytes": of.nbytes}),
        ),
        TensorDescriptor::Cuda(of) => {
            let handle = &of.handle;
            let members = json!([
                handle.device,
                hex_or_null(handle.memory.as_deref()),
                handle.storage_bytes,
                handle.storage_offset_bytes,
                hex_or_null(handle.ref_counter.as_deref()),
                handle.ref_counter_index,
                hex_or_null(handle.event.as_deref()),
                handle.event_sync_required,
            ]);
            ("CudaIPCData", json!({"handle": members}))
        }
        TensorDescriptor::CudaRaw(of) => (
            "RawCudaIPCData",
            json!({
                "ipc_handle": hex_or_null(Some(&of.ipc_handle)),
                "alloc_offset": of.alloc_offset,
                "nbytes": of.nbytes,
            }),
        ),
        TensorDescriptor::CudaVmm(of) => {
            let (kind, blob) = match &of.handle {
                VmmHandle::PosixFd => ("posix_fd", None),
                VmmHandle::Fabric(blob) => ("fabric", Some(blob.as_slice())),
            };
            (
                "VmmCudaIPCData",
                json!({
                    "export_id": hex_or_null(Some(&of.export_id)),
                    "kind": kind,
                    "fabric_blob": hex_or_null(blob),
                    "alloc_size": of.alloc_size,
                    "alloc_offset": of.alloc_offset,
                    "nbytes": of.nbytes,
                }),
            )
        }
        other => panic!("no notation for {other:?}"),
    };
    fields["version"] = json!(1);
    fields["metadata"] = metadata_fields(descriptor.metadata().unwrap());
    json!({"struct": name, "fields": fields})
}

#[test]
fn valid_descriptors_round_trip_to_same_bytes() {
    for row in vectors()["valid"].as_array().unwrap() {
        let body = bytes(row, "descriptor_msgpack");
        let descriptor = TensorDescriptor::decode(&body).unwrap();
        assert_eq!(described(&descriptor), row["descriptor"], "{}", row["name"]);
        let mut encoded = Vec::new();
        descriptor.encode(&mut encoded);
        assert_eq!(encoded, body, "{}", row["name"]);

        let payload = bytes(row, "payload_list_of_one");
        let mut reader = Reader::new(&payload);
        assert_eq!(reader.array_len().unwrap(), 1);
        assert_eq!(TensorDescriptor::read(&mut reader).unwrap(), descriptor);
        reader.finish().unwrap();
        let mut encoded = Vec::new();
        write_array_len(&mut encoded, 1);
        descriptor.write(&mut encoded);
        assert_eq!(encoded, payload, "{}", row["name"]);
    }
}

#[test]
fn invalid_descriptors_are_refused_naming_the_field() {
    for row in vectors()["invalid"].as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        // Rows without bytes are about the extension around the descriptor.
        if row.get("descriptor").is_none() {
            let outside: &[u8] = match name {
                "wrong_ext_code" => b"\xd4\x02\x80",
                "not_ext" => b"\x81\xa4type\xa7cpu_shm",
                other => panic!("unknown row {other}"),
            };
            TensorDescriptor::read(&mut Reader::new(outside)).unwrap_err();
            continue;
        }
        let body = bytes(row, "descriptor");
        let wrong = match name {
            "legacy_pickle" => {
                // Kept for the pickle reader, which knows no such object.
                let descriptor = TensorDescriptor::decode(&body).unwrap();
                assert_eq!(
                    descriptor,
                    TensorDescriptor::Legacy {
                        pickle: body.clone()
                    }
                );
                read_registration(&body, &PickleLimits::default()).unwrap_err();
                continue;
            }
            "unknown_tag" | "missing_tag" => "type",
            "version2" => "version",
            "unknown_field" => "q",
            "too_small" => "nbytes",
            "bad_dtype" => "metadata.dtype",
            "rank_mismatch" => "metadata.stride",
            "negative_dim" => "metadata.shape[0]",
            "raw_short_handle" => "ipc_handle",
            "metadata_extra_field" => "metadata.z",
            other => panic!("unknown row {other}"),
        };
        let error = TensorDescriptor::decode(&body).unwrap_err();
        assert_eq!(error.field, wrong, "{name}: {error}");
    }
}

#[test]
fn element_types_are_those_of_the_peer() {
    let vectors = vectors();
    let theirs: Vec<_> = vectors["dtypes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap())
        .collect();
    let ours: Vec<_> = Dtype::ALL.iter().map(|dtype| dtype.name()).collect();
    assert_eq!(ours, theirs);
    for &dtype in Dtype::ALL {
        assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
    }
}

/// A valid descriptor to take apart.
fn sample() -> TensorDescriptor {
    let vectors = vectors();
    TensorDescriptor::decode(&bytes(&vectors["valid"][0], "descriptor_msgpack")).unwrap()
}

#[test]
fn overflowing_views_are_refused() {
    let cases: [(&[u64], &[u64], u64); 5] = [
        (&[u64::MAX], &[u64::MAX], 0),
        (&[2, 2], &[u64::MAX, 1], 1),
        (&[1], &[1], u64::MAX),
        (&[1 << 63], &[1], 0),
        (&[1; 17], &[1; 17], 0),
    ];
    for (shape, stride, storage_offset) in cases {
        let TensorDescriptor::CpuShm(mut of) = sample() else {
            panic!()
        };
        of.nbytes = u64::MAX;
        of.metadata.shape = shape.to_vec();
        of.metadata.stride = stride.to_vec();
        of.metadata.storage_offset = storage_offset;
        let mut body = Vec::new();
        TensorDescriptor::CpuShm(of).encode(&mut body);
        TensorDescriptor::decode(&body).unwrap_err();
    }
}

#[test]
fn truncated_or_extended_descriptor_is_refused() {
    let mut body = Vec::new();
    sample().encode(&mut body);
    for end in 0..body.len() {
        TensorDescriptor::decode(&body[..end]).unwrap_err();
    }
    body.push(0xc0);
    TensorDescriptor::decode(&body).unwrap_err();
}

#[test]
fn a_key_given_twice_is_refused() {
    let body = b"\x82\xa4type\xa7cpu_shm\xa4type\xa7cpu_shm";
    assert_eq!(TensorDescriptor::decode(body).unwrap_err().field, "type");
}

#[test]
fn other_vendors_are_kept_as_they_are() {
    let body = b"\x83\xa4type\xa3npu\xa7version\x01\xa5other\x93\x01\x02\x03";
    let descriptor = TensorDescriptor::decode(body).unwrap();
    let expected = TensorDescriptor::Opaque {
        vendor: OpaqueVendor::Npu,
        body: body.to_vec(),
    };
    assert_eq!(descriptor, expected);
    let mut encoded = Vec::new();
    descriptor.encode(&mut encoded);
    assert_eq!(encoded, body);
}
