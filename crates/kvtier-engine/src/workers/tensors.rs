//! From the descriptors that an engine registers to the shapes and places of its tensors.

use kvtier_common::error::{Error, Result};
use kvtier_device::{CudaAllocation, CudaStorage, MemorySpec, TensorSpec};
use kvtier_proto::descriptor::{Cuda, TensorDescriptor, VmmHandle};
use kvtier_proto::pickle::{PickleLimits, read_registration};

/// Reads a descriptor, or the pickled wrapper that clients up to 0.5.0 send in its place.
pub(super) fn tensor_spec(descriptor: &TensorDescriptor) -> Result<TensorSpec> {
    if let TensorDescriptor::Legacy { pickle } = descriptor {
        let read = read_registration(pickle, &PickleLimits::default());
        return tensor_spec(&read.map_err(Error::refused)?);
    }
    let Some(metadata) = descriptor.metadata() else {
        return Err(Error::refused(format!(
            "tensors of kind {} cannot be registered; allowed: cpu_shm, cuda, cuda_raw and cuda_vmm",
            descriptor.kind()
        )));
    };
    let cuda = |allocation, offset, bytes| {
        MemorySpec::Cuda(Box::new(CudaStorage {
            device_uuid: metadata.device_uuid.clone(),
            allocation,
            offset,
            bytes,
        }))
    };
    let memory = match descriptor {
        TensorDescriptor::CpuShm(shm) => MemorySpec::CpuShm {
            name: shm.shm_name.clone(),
            nbytes: shm.nbytes,
        },
        TensorDescriptor::Cuda(Cuda { handle, .. }) => cuda(
            CudaAllocation::Torch {
                handle: handle.memory.clone(),
                ref_counter: handle
                    .ref_counter
                    .clone()
                    .map(|name| (name, handle.ref_counter_index)),
                event: handle.event.clone().filter(|_| handle.event_sync_required),
            },
            handle.storage_offset_bytes,
            handle.storage_bytes,
        ),
        TensorDescriptor::CudaRaw(raw) => cuda(
            CudaAllocation::Raw {
                handle: raw.ipc_handle,
            },
            raw.alloc_offset,
            raw.nbytes,
        ),
        TensorDescriptor::CudaVmm(vmm) => cuda(
            CudaAllocation::Vmm {
                fabric: match &vmm.handle {
                    VmmHandle::Fabric(handle) => Some(handle.clone()),
                    VmmHandle::PosixFd => None,
                },
                bytes: vmm.alloc_size,
            },
            vmm.alloc_offset,
            vmm.nbytes,
        ),
        // `TensorDescriptor` may grow; what has metadata and no arm here is refused when it is opened.
        other => MemorySpec::Unsupported {
            kind: other.kind().to_string(),
        },
    };
    Ok(TensorSpec {
        memory,
        dtype_size: metadata.dtype.item_size(),
        dtype_name: metadata.dtype.name().to_string(),
        shape: metadata.shape.clone(),
        stride: metadata.stride.clone(),
        storage_offset: metadata.storage_offset,
    })
}

#[cfg(test)]
mod tests {
    use kvtier_proto::descriptor::{CudaHandle, CudaRaw, CudaVmm, Dtype, TensorMetadata};

    use super::*;

    fn metadata() -> TensorMetadata {
        TensorMetadata {
            dtype: Dtype::BFloat16,
            shape: vec![4, 2, 8],
            stride: vec![16, 8, 1],
            storage_offset: 16,
            device_uuid: "a1b2".into(),
        }
    }

    fn torch(event_sync_required: bool) -> TensorDescriptor {
        TensorDescriptor::Cuda(Cuda {
            handle: CudaHandle {
                device: 3,
                memory: Some(vec![1; 66]),
                storage_bytes: 4096,
                storage_offset_bytes: 512,
                ref_counter: Some(b"/torch_1_2_3".to_vec()),
                ref_counter_index: 7,
                event: Some(vec![2; 64]),
                event_sync_required,
            },
            metadata: metadata(),
        })
    }

    fn storage(descriptor: &TensorDescriptor) -> CudaStorage {
        let spec = tensor_spec(descriptor).unwrap();
        assert_eq!((spec.dtype_size, &*spec.dtype_name), (2, "bfloat16"));
        assert_eq!((spec.shape, spec.stride), (vec![4, 2, 8], vec![16, 8, 1]));
        // Inside the storage; the storage's own offset in the allocation is a separate field.
        assert_eq!(spec.storage_offset, 16);
        match spec.memory {
            MemorySpec::Cuda(storage) => *storage,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_form_of_gpu_memory_is_a_storage_in_an_allocation() {
        let of = |allocation, offset, bytes| CudaStorage {
            device_uuid: "a1b2".into(),
            allocation,
            offset,
            bytes,
        };
        for (sync, event) in [(true, Some(vec![2; 64])), (false, None)] {
            let expected = CudaAllocation::Torch {
                handle: Some(vec![1; 66]),
                ref_counter: Some((b"/torch_1_2_3".to_vec(), 7)),
                event,
            };
            assert_eq!(storage(&torch(sync)), of(expected, 512, 4096));
        }
        let raw = TensorDescriptor::CudaRaw(CudaRaw {
            ipc_handle: [5; 64],
            alloc_offset: 1024,
            nbytes: 2048,
            metadata: metadata(),
        });
        let expected = CudaAllocation::Raw { handle: [5; 64] };
        assert_eq!(storage(&raw), of(expected, 1024, 2048));
        for (handle, fabric) in [
            (VmmHandle::PosixFd, None),
            (VmmHandle::Fabric(vec![9; 64]), Some(vec![9; 64])),
        ] {
            let vmm = TensorDescriptor::CudaVmm(CudaVmm {
                export_id: [0; 16],
                handle,
                alloc_size: 8192,
                alloc_offset: 4096,
                nbytes: 2048,
                metadata: metadata(),
            });
            let expected = CudaAllocation::Vmm {
                fabric,
                bytes: 8192,
            };
            assert_eq!(storage(&vmm), of(expected, 4096, 2048));
        }
    }

    /// `pickle.dumps(CudaIPCWrapper)` of LMCache 0.4.4, with its members in another order than ours.
    #[test]
    fn the_pickled_wrapper_of_early_clients_is_the_same_storage() {
        let mut pickle =
            b"\x80\x04clmcache.v1.multiprocess.custom_types\nCudaIPCWrapper\n)\x81}(".to_vec();
        let text = |pickle: &mut Vec<u8>, text: &str| {
            pickle.extend([0x8c, text.len() as u8]);
            pickle.extend(text.bytes());
        };
        let bytes = |pickle: &mut Vec<u8>, bytes: &[u8]| {
            pickle.extend([b'C', bytes.len() as u8]);
            pickle.extend(bytes);
        };
        text(&mut pickle, "handle");
        pickle.extend(b"(K\x03");
        bytes(&mut pickle, &[1; 66]);
        pickle.extend(b"M\x00\x10M\x00\x02");
        bytes(&mut pickle, b"/torch_1_2_3");
        pickle.extend(b"K\x07");
        bytes(&mut pickle, &[2; 64]);
        pickle.extend(b"\x88t");
        text(&mut pickle, "dtype");
        pickle.extend(b"ctorch\nbfloat16\n");
        text(&mut pickle, "shape");
        pickle.extend(b"K\x04K\x02K\x08\x87");
        text(&mut pickle, "stride");
        pickle.extend(b"K\x10K\x08K\x01\x87");
        text(&mut pickle, "storage_offset");
        pickle.extend(b"K\x10");
        text(&mut pickle, "device_uuid");
        text(&mut pickle, "a1b2");
        pickle.extend(b"ub.");
        let legacy = TensorDescriptor::Legacy { pickle };
        assert_eq!(storage(&legacy), storage(&torch(true)));

        let hostile = TensorDescriptor::Legacy {
            pickle: b"\x80\x04cposix\nsystem\n.".to_vec(),
        };
        let error = tensor_spec(&hostile).unwrap_err().to_string();
        assert!(error.contains("posix"), "{error}");
    }

    #[test]
    fn other_vendors_are_refused_by_name() {
        let npu = TensorDescriptor::Opaque {
            vendor: kvtier_proto::descriptor::OpaqueVendor::Npu,
            body: vec![0x80],
        };
        let error = tensor_spec(&npu).unwrap_err().to_string();
        assert!(
            error.contains("npu") && error.contains("cuda_vmm"),
            "{error}"
        );
    }
}
