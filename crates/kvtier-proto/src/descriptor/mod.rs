//! Descriptors of the tensors an engine registers: where its cache pages are and how they are laid out.
//!
//! One descriptor is the body of a msgpack extension of type 1 ([`EXT_CODE`]) in the list of a `register_kv_cache`
//! request (LMCache 0.5.6). Releases up to 0.5.5 put a pickled object there; it is kept unread as
//! [`TensorDescriptor::Legacy`] and [`crate::pickle::read_registration`] reads it.
//!
//! Decoding looks at bytes only: nothing is opened or mapped. It is strict, because a wrong number here becomes a wrong
//! address later: unknown keys, other versions, unequal ranks and views that leave their memory are refused.

mod decode;
mod dtype;
mod encode;

pub use dtype::Dtype;

use crate::wire::{DecodeError, Reader, write_ext};

/// Type code of the msgpack extension that carries a descriptor.
pub const EXT_CODE: i8 = 1;

/// Most dimensions a tensor may have. Real caches have at most 6; PyTorch itself stops at 64.
pub const MAX_RANK: usize = 16;

/// Most bytes a descriptor may have. A real one has some 350; an expandable CUDA segment adds 4 to 64 bytes per piece.
pub const MAX_BODY_BYTES: usize = 1 << 20;

/// How the tensor lies in its memory. The axes are in the order the client sorted them, largest stride first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMetadata {
    /// Element type.
    pub dtype: Dtype,
    /// Elements along each axis.
    pub shape: Vec<u64>,
    /// Distance between neighbours along each axis, in elements; as many as `shape` has.
    pub stride: Vec<u64>,
    /// Elements between the start of the memory and the first element of the tensor.
    pub storage_offset: u64,
    /// `cpu`, or the UUID of the GPU with or without the prefix `GPU-` (it varies with PyTorch).
    pub device_uuid: String,
}

impl TensorMetadata {
    /// Bytes from the start of the memory to the end of the last element; 0 for a tensor without elements.
    ///
    /// Errors when a rank is above [`MAX_RANK`], the ranks differ, or the span does not fit 64 bits.
    pub fn byte_span(&self) -> Result<u64, DecodeError> {
        byte_span(
            "metadata",
            self.dtype.item_size(),
            self.storage_offset,
            &self.shape,
            &self.stride,
        )
    }
}

/// Pages in a POSIX shared memory segment of the client (CPU engines).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuShm {
    /// Name with its leading slash (`/lmcache_kv_PID_N`); empty for a tensor without elements.
    pub shm_name: String,
    /// Bytes of the whole segment.
    pub nbytes: u64,
    /// The view into the segment.
    pub metadata: TensorMetadata,
}

/// Pages in CUDA memory, shared the way PyTorch shares storages between processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cuda {
    /// What PyTorch's `UntypedStorage._share_cuda_()` returned.
    pub handle: CudaHandle,
    /// The view into the storage.
    pub metadata: TensorMetadata,
}

/// The eight members of PyTorch's `UntypedStorage._share_cuda_()`, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaHandle {
    /// Ordinal of the device in the exporting process; means nothing elsewhere.
    pub device: i64,
    /// Shareable handle of the allocation: 64 bytes, or a version byte, a kind byte and the rest. None when empty.
    pub memory: Option<Vec<u8>>,
    /// Bytes of the storage.
    pub storage_bytes: u64,
    /// Bytes from the start of what `memory` maps to the start of the storage.
    pub storage_offset_bytes: u64,
    /// Name of the file with the reference counters. None when empty.
    pub ref_counter: Option<Vec<u8>>,
    /// Index of the counter in that file.
    pub ref_counter_index: u64,
    /// 64-byte CUDA event handle. None when empty.
    pub event: Option<Vec<u8>>,
    /// Whether that event must be waited for before the pages are used.
    pub event_sync_required: bool,
}

/// Pages in CUDA memory, shared by the driver's own handle (isolated IPC, TensorRT-LLM).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaRaw {
    /// `cudaIpcMemHandle_t` of the allocation.
    pub ipc_handle: [u8; 64],
    /// Bytes from the start of the allocation to the tensor's memory.
    pub alloc_offset: u64,
    /// Bytes of the tensor's memory.
    pub nbytes: u64,
    /// The view into that memory.
    pub metadata: TensorMetadata,
}

/// How the allocation behind a [`CudaVmm`] is handed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmmHandle {
    /// A file descriptor, sent outside the protocol.
    PosixFd,
    /// A fabric handle (64 bytes today).
    Fabric(Vec<u8>),
}

/// Pages in CUDA memory made by the virtual memory calls of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaVmm {
    /// Name of the allocation among the exporter's.
    pub export_id: [u8; 16],
    /// How the allocation is handed over.
    pub handle: VmmHandle,
    /// Bytes of the allocation.
    pub alloc_size: u64,
    /// Bytes from the start of the allocation to the tensor's memory.
    pub alloc_offset: u64,
    /// Bytes of the tensor's memory.
    pub nbytes: u64,
    /// The view into that memory.
    pub metadata: TensorMetadata,
}

/// Vendors whose descriptors are recognised but not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpaqueVendor {
    /// Moore Threads (`musa`).
    Musa,
    /// Ascend (`npu`).
    Npu,
}

/// One registered tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorDescriptor {
    /// Tag `cpu_shm`.
    CpuShm(CpuShm),
    /// Tag `cuda`.
    Cuda(Cuda),
    /// Tag `cuda_raw`.
    CudaRaw(CudaRaw),
    /// Tag `cuda_vmm`.
    CudaVmm(CudaVmm),
    /// Tag `musa` or `npu`: the whole body, a msgpack map that is well formed and has that tag, otherwise unread.
    Opaque {
        /// Vendor of the descriptor.
        vendor: OpaqueVendor,
        /// The body as received.
        body: Vec<u8>,
    },
    /// A pickled wrapper of releases up to 0.5.5, unread.
    Legacy {
        /// The body as received; its first byte is 0x80.
        pickle: Vec<u8>,
    },
}

impl TensorDescriptor {
    /// Reads the body of an extension of type [`EXT_CODE`].
    ///
    /// Errors name the field, what it holds and what is allowed. A body that starts with 0x80 (the first byte of every
    /// pickle since protocol 2, and an empty map in msgpack) becomes [`TensorDescriptor::Legacy`] unread.
    pub fn decode(body: &[u8]) -> Result<TensorDescriptor, DecodeError> {
        decode::descriptor(body)
    }

    /// Writes the body of the extension at the end of `out`: the same bytes as the Python client's.
    pub fn encode(&self, out: &mut Vec<u8>) {
        encode::descriptor(self, out);
    }

    /// Reads one extension value of a `register_kv_cache` list; any other value or type code is an error.
    pub fn read(reader: &mut Reader<'_>) -> Result<TensorDescriptor, DecodeError> {
        match reader.ext()? {
            (EXT_CODE, body) => TensorDescriptor::decode(body),
            (code, _) => Err(DecodeError::new(format!(
                "an extension of type {code}; allowed is {EXT_CODE}"
            ))),
        }
    }

    /// Writes the descriptor as an extension value at the end of `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mut body = Vec::with_capacity(512);
        self.encode(&mut body);
        write_ext(out, EXT_CODE, &body);
    }

    /// The view, where the descriptor was read.
    pub fn metadata(&self) -> Option<&TensorMetadata> {
        match self {
            TensorDescriptor::CpuShm(of) => Some(&of.metadata),
            TensorDescriptor::Cuda(of) => Some(&of.metadata),
            TensorDescriptor::CudaRaw(of) => Some(&of.metadata),
            TensorDescriptor::CudaVmm(of) => Some(&of.metadata),
            TensorDescriptor::Opaque { .. } | TensorDescriptor::Legacy { .. } => None,
        }
    }

    /// The tag on the wire; `pickle` for [`TensorDescriptor::Legacy`], which has none.
    pub fn kind(&self) -> &'static str {
        match self {
            TensorDescriptor::CpuShm(_) => "cpu_shm",
            TensorDescriptor::Cuda(_) => "cuda",
            TensorDescriptor::CudaRaw(_) => "cuda_raw",
            TensorDescriptor::CudaVmm(_) => "cuda_vmm",
            TensorDescriptor::Opaque {
                vendor: OpaqueVendor::Musa,
                ..
            } => "musa",
            TensorDescriptor::Opaque {
                vendor: OpaqueVendor::Npu,
                ..
            } => "npu",
            TensorDescriptor::Legacy { .. } => "pickle",
        }
    }
}

/// Bytes from the start of the memory to the end of the last element of a view, in checked arithmetic.
pub(crate) fn byte_span(
    field: &'static str,
    item_size: u64,
    storage_offset: u64,
    shape: &[u64],
    stride: &[u64],
) -> Result<u64, DecodeError> {
    if shape.len() > MAX_RANK || shape.len() != stride.len() {
        return Err(DecodeError::at(
            field,
            format!(
                "{} lengths and {} strides; allowed are equally many, at most {MAX_RANK}",
                shape.len(),
                stride.len()
            ),
        ));
    }
    if shape.contains(&0) {
        return Ok(0);
    }
    let last_element = shape
        .iter()
        .zip(stride)
        .try_fold(storage_offset, |sum, (&size, &stride)| {
            sum.checked_add((size - 1).checked_mul(stride)?)
        });
    last_element
        .and_then(|last| last.checked_add(1)?.checked_mul(item_size))
        .ok_or_else(|| {
            DecodeError::at(
                field,
                format!(
                    "offset {storage_offset}, shape {shape:?} and stride {stride:?} reach past 2^64 bytes"
                ),
            )
        })
}

/// The view must end inside its memory of `available` bytes.
pub(crate) fn check_span(
    field: &'static str,
    metadata: &TensorMetadata,
    available: u64,
) -> Result<(), DecodeError> {
    let span = metadata.byte_span()?;
    if span > available {
        return Err(DecodeError::at(
            field,
            format!("the view needs {span} bytes, its memory has {available}"),
        ));
    }
    Ok(())
}

/// The view must end inside its memory, and that inside its allocation.
pub(crate) fn check_allocation(vmm: &CudaVmm) -> Result<(), DecodeError> {
    check_span("nbytes", &vmm.metadata, vmm.nbytes)?;
    let end = vmm.alloc_offset.checked_add(vmm.nbytes);
    if end.is_none_or(|end| end > vmm.alloc_size) {
        return Err(DecodeError::at(
            "alloc_size",
            format!(
                "{} bytes, but {} from {} on are used",
                vmm.alloc_size, vmm.nbytes, vmm.alloc_offset
            ),
        ));
    }
    Ok(())
}
