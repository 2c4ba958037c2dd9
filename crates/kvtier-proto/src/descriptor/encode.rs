//! From [`TensorDescriptor`] to the bytes the Python client sends: tag, own fields, version, metadata.

use super::{CudaHandle, TensorDescriptor, TensorMetadata, VmmHandle};
use crate::wire::{
    write_array_len, write_bin, write_bool, write_int, write_map_len, write_nil, write_str,
    write_uint,
};

pub(super) fn descriptor(descriptor: &TensorDescriptor, out: &mut Vec<u8>) {
    let metadata = match descriptor {
        TensorDescriptor::Opaque { body, .. } => return out.extend_from_slice(body),
        TensorDescriptor::Legacy { pickle } => return out.extend_from_slice(pickle),
        TensorDescriptor::CpuShm(of) => {
            start(out, 2, descriptor.kind());
            write_str(out, "shm_name");
            write_str(out, &of.shm_name);
            unsigned(out, "nbytes", of.nbytes);
            &of.metadata
        }
        TensorDescriptor::Cuda(of) => {
            start(out, 1, descriptor.kind());
            write_str(out, "handle");
            handle(out, &of.handle);
            &of.metadata
        }
        TensorDescriptor::CudaRaw(of) => {
            start(out, 3, descriptor.kind());
            write_str(out, "ipc_handle");
            write_bin(out, &of.ipc_handle);
            unsigned(out, "alloc_offset", of.alloc_offset);
            unsigned(out, "nbytes", of.nbytes);
            &of.metadata
        }
        TensorDescriptor::CudaVmm(of) => {
            let (kind, blob) = match &of.handle {
                VmmHandle::PosixFd => ("posix_fd", None),
                VmmHandle::Fabric(blob) => ("fabric", Some(blob.as_slice())),
            };
            start(out, 6, descriptor.kind());
            write_str(out, "export_id");
            write_bin(out, &of.export_id);
            write_str(out, "kind");
            write_str(out, kind);
            write_str(out, "fabric_blob");
            optional_bin(out, blob);
            unsigned(out, "alloc_size", of.alloc_size);
            unsigned(out, "alloc_offset", of.alloc_offset);
            unsigned(out, "nbytes", of.nbytes);
            &of.metadata
        }
    };
    unsigned(out, "version", 1);
    write_str(out, "metadata");
    view(out, metadata);
}

/// The header of a map with `own` fields besides tag, version and metadata, and the tag.
fn start(out: &mut Vec<u8>, own: usize, kind: &str) {
    write_map_len(out, own + 3);
    write_str(out, "type");
    write_str(out, kind);
}

fn view(out: &mut Vec<u8>, metadata: &TensorMetadata) {
    write_map_len(out, 5);
    write_str(out, "dtype");
    write_str(out, metadata.dtype.name());
    write_str(out, "shape");
    axes(out, &metadata.shape);
    write_str(out, "stride");
    axes(out, &metadata.stride);
    unsigned(out, "storage_offset", metadata.storage_offset);
    write_str(out, "device_uuid");
    write_str(out, &metadata.device_uuid);
}

fn axes(out: &mut Vec<u8>, axes: &[u64]) {
    write_array_len(out, axes.len());
    for &length in axes {
        write_uint(out, length);
    }
}

fn handle(out: &mut Vec<u8>, handle: &CudaHandle) {
    write_array_len(out, 8);
    write_int(out, handle.device);
    optional_bin(out, handle.memory.as_deref());
    write_uint(out, handle.storage_bytes);
    write_uint(out, handle.storage_offset_bytes);
    optional_bin(out, handle.ref_counter.as_deref());
    write_uint(out, handle.ref_counter_index);
    optional_bin(out, handle.event.as_deref());
    write_bool(out, handle.event_sync_required);
}

fn unsigned(out: &mut Vec<u8>, name: &str, value: u64) {
    write_str(out, name);
    write_uint(out, value);
}

fn optional_bin(out: &mut Vec<u8>, bytes: Option<&[u8]>) {
    match bytes {
        Some(bytes) => write_bin(out, bytes),
        None => write_nil(out),
    }
}
