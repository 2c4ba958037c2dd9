//! Every row of `legacy_wrappers.json`: wrappers as LMCache up to 0.5.5 pickles them.

use super::support::hex_field;
use kvtier_proto::descriptor::{TensorDescriptor, VmmHandle};
use kvtier_proto::pickle::{PickleLimits, read_registration};
use serde_json::{Value, json};

/// The members the Python object has, from what we read.
fn members(release: &Value, descriptor: &TensorDescriptor) -> Value {
    let mut members = match descriptor {
        TensorDescriptor::CpuShm(of) => {
            json!({"shm_name": of.shm_name, "nbytes": of.nbytes, "handle": null})
        }
        TensorDescriptor::CudaRaw(of) => {
            let mut members = json!({"_ipc_handle_reserved": hex::encode(of.ipc_handle), "_nbytes": of.nbytes, "handle": null});
            if release == "0.5.5" {
                members["_alloc_offset"] = json!(of.alloc_offset);
                members["_opens"] = json!(0);
            }
            members
        }
        TensorDescriptor::CudaVmm(of) => {
            let (kind, blob) = match &of.handle {
                VmmHandle::PosixFd => ("posix_fd", None),
                VmmHandle::Fabric(blob) => ("fabric", Some(hex::encode(blob))),
            };
            json!({
                "_export_id": hex::encode(of.export_id),
                "_kind": kind,
                "_fabric_blob": blob,
                "_fd": null,
                "_alloc_size": of.alloc_size,
                "_alloc_offset": of.alloc_offset,
                "_nbytes": of.nbytes,
                "handle": hex::encode(of.export_id),
                "_opens": 0,
            })
        }
        TensorDescriptor::Cuda(of) => {
            let handle = &of.handle;
            json!({"handle": [
                handle.device,
                handle.memory.as_deref().map(hex::encode),
                handle.storage_bytes,
                handle.storage_offset_bytes,
                handle.ref_counter.as_deref().map(hex::encode),
                handle.ref_counter_index,
                handle.event.as_deref().map(hex::encode),
                handle.event_sync_required,
            ]})
        }
        other => panic!("no wrapper is a {}", other.kind()),
    };
    let metadata = descriptor.metadata().unwrap();
    members["dtype"] = json!(metadata.dtype.name());
    members["shape"] = json!(metadata.shape);
    members["stride"] = json!(metadata.stride);
    members["storage_offset"] = json!(metadata.storage_offset);
    members["device_uuid"] = json!(metadata.device_uuid);
    members
}

// proves: docs/clients.md#after-a-reconnect
// proves: docs/compare.md#clients-of-lmcache
#[test]
fn every_wrapper_reads_as_its_members() {
    let vectors: Value =
        serde_json::from_str(include_str!("../../vectors/legacy_wrappers.json")).unwrap();
    for row in vectors["rows"].as_array().unwrap() {
        let body = hex_field(row, "pickle");
        let TensorDescriptor::Legacy { pickle } = TensorDescriptor::decode(&body).unwrap() else {
            panic!("{} is not kept for the pickle reader", row["name"]);
        };
        let descriptor = read_registration(&pickle, &PickleLimits::default()).unwrap();
        assert_eq!(
            members(&row["release"], &descriptor),
            row["members"],
            "{} {}",
            row["release"],
            row["name"]
        );
        for end in 0..body.len() {
            read_registration(&body[..end], &PickleLimits::default()).unwrap_err();
        }
    }
}
