//! Registration of an engine's tensors, as Python describes them.

use kvtier_device::{
    Engine, GroupSpec, KvAxisOrder, KvLayout, LayoutHints, MemorySpec, TensorSpec,
};
use kvtier_proto::descriptor::{CpuShm, Cuda, CudaHandle, Dtype, TensorDescriptor, TensorMetadata};
use kvtier_proto::request::{EngineGroupInfo, KvLayoutName};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::pages::{Memory, Pages};

/// A storage: memory of this process, a segment of it that others can open, or CUDA memory.
#[derive(FromPyObject)]
pub enum Storage {
    #[pyo3(transparent)]
    Cuda(CudaStorage),
    #[pyo3(transparent)]
    Cpu(CpuStorage),
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct CpuStorage {
    address: usize,
    bytes: u64,
    /// Empty if only this process can reach it.
    shm_name: String,
}

/// Result of PyTorch's `UntypedStorage._share_cuda_()`.
type Share = (
    i64,
    Option<Vec<u8>>,
    u64,
    u64,
    Option<Vec<u8>>,
    u64,
    Option<Vec<u8>>,
    bool,
);

/// CUDA memory, and the device's UUID.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct CudaStorage {
    share: Share,
    device_uuid: String,
}

/// A view into a storage, in elements.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Tensor {
    storage: usize,
    dtype: String,
    shape: Vec<u64>,
    stride: Vec<u64>,
    storage_offset: u64,
}

/// Layers that share block ids.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Group {
    group_id: i64,
    layers: Vec<i64>,
    tokens_per_block: i64,
    /// -1 for none.
    sliding_window: i64,
    recurrent_state: bool,
}

/// Registration of a worker's pages, kept for registering again.
pub struct Geometry {
    pub descriptors: Vec<TensorDescriptor>,
    pub hint: Option<KvLayoutName>,
    pub groups: Vec<EngineGroupInfo>,
    /// Whether the engine reuses no block while a transfer of it is in flight.
    pub holds_blocks: bool,
    /// None if some page is not in this process's CPU memory.
    pub pages: Option<Pages>,
}

fn value_error(message: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(message.to_string())
}

fn wire_layout(name: &str) -> Option<KvLayoutName> {
    KvLayoutName::ALL
        .iter()
        .copied()
        .find(|layout| layout.name() == name)
}

/// The dimensions from the largest stride to the smallest, as they are in memory.
fn physical_order(tensor: &Tensor) -> Vec<usize> {
    let mut order: Vec<usize> = (0..tensor.shape.len()).collect();
    order.sort_by_key(|&axis| std::cmp::Reverse(tensor.stride[axis]));
    order
}

impl Geometry {
    pub fn new(
        storages: &[Storage],
        tensors: &[Tensor],
        groups: Vec<Group>,
        kv_layout: Option<&str>,
        chunk_tokens: u64,
        holds_blocks: bool,
    ) -> PyResult<Self> {
        let (hint, order) = match kv_layout {
            None => (None, None),
            Some(name) => match (wire_layout(name), KvAxisOrder::from_name(name)) {
                (Some(hint), Some(order)) => (Some(hint), Some(order)),
                _ => {
                    return Err(value_error(format!(
                        "kv_layout: {name:?}; allowed are NHD, HND, BLHNC and BLNHC"
                    )));
                }
            },
        };
        let mut descriptors = Vec::with_capacity(tensors.len());
        let mut specs = Vec::with_capacity(tensors.len());
        for (index, tensor) in tensors.iter().enumerate() {
            let storage = storages.get(tensor.storage).ok_or_else(|| {
                value_error(format!(
                    "tensors[{index}].storage: {}; there are {}",
                    tensor.storage,
                    storages.len()
                ))
            })?;
            if tensor.shape.len() != tensor.stride.len() {
                return Err(value_error(format!(
                    "tensors[{index}]: shape and stride differ in length"
                )));
            }
            let dtype = Dtype::from_name(&tensor.dtype).ok_or_else(|| {
                value_error(format!(
                    "tensors[{index}].dtype: {:?} is no type of torch in the protocol",
                    tensor.dtype
                ))
            })?;
            let axes = physical_order(tensor);
            let shape: Vec<u64> = axes.iter().map(|&axis| tensor.shape[axis]).collect();
            let stride: Vec<u64> = axes.iter().map(|&axis| tensor.stride[axis]).collect();
            let metadata = |device_uuid: &str| TensorMetadata {
                dtype,
                shape: shape.clone(),
                stride: stride.clone(),
                storage_offset: tensor.storage_offset,
                device_uuid: device_uuid.to_owned(),
            };
            let memory = match storage {
                Storage::Cpu(cpu) => {
                    descriptors.push(TensorDescriptor::CpuShm(CpuShm {
                        shm_name: cpu.shm_name.clone(),
                        nbytes: cpu.bytes,
                        metadata: metadata("cpu"),
                    }));
                    // The name only distinguishes storages.
                    MemorySpec::CpuShm {
                        name: format!("/{}", tensor.storage),
                        nbytes: cpu.bytes,
                    }
                }
                Storage::Cuda(cuda) => {
                    let share = cuda.share.clone();
                    descriptors.push(TensorDescriptor::Cuda(Cuda {
                        handle: CudaHandle {
                            device: share.0,
                            memory: share.1,
                            storage_bytes: share.2,
                            storage_offset_bytes: share.3,
                            ref_counter: share.4,
                            ref_counter_index: share.5,
                            event: share.6,
                            event_sync_required: share.7,
                        },
                        metadata: metadata(&cuda.device_uuid),
                    }));
                    MemorySpec::Unsupported {
                        kind: "cuda".to_owned(),
                    }
                }
            };
            specs.push(TensorSpec {
                memory,
                dtype_size: dtype.item_size(),
                dtype_name: dtype.name().to_owned(),
                shape,
                stride,
                storage_offset: tensor.storage_offset,
            });
        }
        let group_specs: Vec<GroupSpec> = groups
            .iter()
            .map(|group| GroupSpec {
                engine_group_id: group.group_id,
                layer_indices: group.layers.clone(),
                tokens_per_block: group.tokens_per_block,
                sliding_window_tokens: group.sliding_window,
                extra_object_group_tag: 0,
                recurrent_state: group.recurrent_state,
            })
            .collect();
        let hints = LayoutHints {
            kv_layout: order,
            held_blocks: holds_blocks,
            ..LayoutHints::default()
        };
        // Also for pages that the server copies: it would refuse an unknown layout without an error text.
        let layout = KvLayout::detect(
            &specs,
            Engine::Vllm,
            &hints,
            &group_specs,
            chunk_tokens,
            false,
        )
        .map_err(value_error)?;
        let memories = layout
            .memories()
            .iter()
            .map(|memory| match memory {
                MemorySpec::CpuShm { name, .. } => {
                    let index: usize = name.get(1..)?.parse().ok()?;
                    match storages.get(index)? {
                        Storage::Cpu(cpu) => {
                            // SAFETY: the caller of `Worker` keeps the tensors alive until it has shut the worker down, as
                            // its documentation demands; only the engine and the connector use them.
                            Some(unsafe { Memory::new(cpu.address, cpu.bytes as usize) })
                        }
                        Storage::Cuda(_) => None,
                    }
                }
                MemorySpec::Cuda(_) | MemorySpec::Unsupported { .. } => None,
            })
            .collect::<Option<Vec<_>>>();
        let groups = groups
            .into_iter()
            .map(|group| EngineGroupInfo {
                engine_group_id: group.group_id,
                layer_indices: group.layers,
                tokens_per_block: group.tokens_per_block,
                sw_size_tokens: group.sliding_window,
                extra_object_group_tag: 0,
                recurrent_state: group.recurrent_state,
            })
            .collect();
        Ok(Self {
            descriptors,
            hint,
            groups,
            holds_blocks,
            pages: memories.map(|memories| Pages::new(layout, memories)),
        })
    }
}
