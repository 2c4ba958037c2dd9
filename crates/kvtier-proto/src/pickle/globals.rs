//! The names a pickle may mention. A name outside this list ends the reading.

use crate::descriptor::Dtype;
use crate::wire::{DecodeError, name_shown};

/// A known global: a tag to compare with, never a function to call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    /// `torch._utils._rebuild_tensor_v2`: a tensor over a typed storage.
    RebuildTensorV2,
    /// `torch._utils._rebuild_tensor_v3`: a tensor over an untyped storage, with its element type.
    RebuildTensorV3,
    /// `torch.storage._load_from_bytes`: a storage from a `torch.save` stream.
    LoadFromBytes,
    /// `collections.OrderedDict`: the (empty) hooks of a tensor.
    OrderedDict,
    /// `torch.<dtype>`.
    Dtype(Dtype),
    /// `torch.<Type>Storage`: a storage counted in elements of that type.
    TypedStorage(Dtype),
    /// `torch.storage.UntypedStorage`: a storage counted in bytes.
    UntypedStorage,
    /// A wrapper that clients up to 0.5.5 register for their pages.
    Wrapper(WrapperClass),
}

/// The wrapper classes of releases 0.4.2 to 0.5.5. Those for CUDA moved from `lmcache.v1.multiprocess.custom_types` to
/// `lmcache.v1.platform.cuda.ipc_wrapper` with 0.5.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WrapperClass {
    /// `CudaIPCWrapper`.
    Cuda,
    /// `RawCudaIPCWrapper`.
    RawCuda,
    /// `VmmCudaIPCWrapper`, of 0.5.5 alone.
    VmmCuda,
    /// `lmcache.v1.platform.cpu.shm.CpuShmTensorWrapper`.
    CpuShm,
}

impl WrapperClass {
    fn resolve(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            (CUDA_TO_0_5_0 | CUDA_FROM_0_5_1, "CudaIPCWrapper") => Self::Cuda,
            (CUDA_TO_0_5_0 | CUDA_FROM_0_5_1, "RawCudaIPCWrapper") => Self::RawCuda,
            (CUDA_FROM_0_5_1, "VmmCudaIPCWrapper") => Self::VmmCuda,
            ("lmcache.v1.platform.cpu.shm", "CpuShmTensorWrapper") => Self::CpuShm,
            _ => return None,
        })
    }
}

const CUDA_TO_0_5_0: &str = "lmcache.v1.multiprocess.custom_types";
const CUDA_FROM_0_5_1: &str = "lmcache.v1.platform.cuda.ipc_wrapper";

impl Global {
    pub(super) fn resolve(module: &str, name: &str) -> Result<Global, DecodeError> {
        let found = match (module, name) {
            ("torch._utils", "_rebuild_tensor_v2") => Some(Global::RebuildTensorV2),
            ("torch._utils", "_rebuild_tensor_v3") => Some(Global::RebuildTensorV3),
            ("torch.storage", "_load_from_bytes") => Some(Global::LoadFromBytes),
            ("collections", "OrderedDict") => Some(Global::OrderedDict),
            ("torch.storage" | "torch", "UntypedStorage") => Some(Global::UntypedStorage),
            ("torch", name) => typed_storage(name)
                .map(Global::TypedStorage)
                .or_else(|| Dtype::from_name(name).map(Global::Dtype)),
            _ => WrapperClass::resolve(module, name).map(Global::Wrapper),
        };
        found.ok_or_else(|| {
            DecodeError::at(
                "pickle",
                format!(
                    "the global {:?} of module {:?} is not allowed; known are torch's tensor and storage rebuilders, \
                     element types and storage classes, collections.OrderedDict and LMCache's tensor wrappers",
                    name_shown(name),
                    name_shown(module)
                ),
            )
        })
    }
}

fn typed_storage(name: &str) -> Option<Dtype> {
    Some(match name {
        "BFloat16Storage" => Dtype::BFloat16,
        "HalfStorage" => Dtype::Float16,
        "FloatStorage" => Dtype::Float32,
        "DoubleStorage" => Dtype::Float64,
        "ByteStorage" => Dtype::UInt8,
        "CharStorage" => Dtype::Int8,
        "ShortStorage" => Dtype::Int16,
        "IntStorage" => Dtype::Int32,
        "LongStorage" => Dtype::Int64,
        "BoolStorage" => Dtype::Bool,
        "ComplexFloatStorage" => Dtype::Complex64,
        "ComplexDoubleStorage" => Dtype::Complex128,
        _ => return None,
    })
}

/// The storage class PyTorch names when it pickles a tensor of that type; None where it uses an untyped storage.
pub(super) fn storage_class(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::BFloat16 => "BFloat16Storage",
        Dtype::Float16 => "HalfStorage",
        Dtype::Float32 => "FloatStorage",
        Dtype::Float64 => "DoubleStorage",
        Dtype::UInt8 => "ByteStorage",
        Dtype::Int8 => "CharStorage",
        Dtype::Int16 => "ShortStorage",
        Dtype::Int32 => "IntStorage",
        Dtype::Int64 => "LongStorage",
        Dtype::Bool => "BoolStorage",
        Dtype::Complex64 => "ComplexFloatStorage",
        Dtype::Complex128 => "ComplexDoubleStorage",
        _ => return None,
    })
}
