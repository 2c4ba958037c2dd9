//! An engine's description of its tensors, as plain, unchecked values.

use crate::cuda::handle::{SegmentHandles, ShareableHandle};

/// Kind of the engine, which decides how [`crate::KvLayout::detect`] interprets the shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Engine {
    /// vLLM: one tensor per layer, or one tensor for all layers.
    Vllm,
    /// ATOM: only its MLA layout is supported.
    Atom,
    /// SGLang: K and V lists, or one tensor per layer.
    Sglang,
    /// TensorRT-LLM: one pool tensor.
    Trtllm,
    /// The protocol's test engine; has no known tensor layout.
    Mock,
}

impl Engine {
    /// The name used on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Atom => "atom",
            Self::Sglang => "sglang",
            Self::Trtllm => "trtllm",
            Self::Mock => "mock",
        }
    }

    /// The engine with this wire name.
    pub fn from_name(name: &str) -> Option<Self> {
        [
            Self::Vllm,
            Self::Atom,
            Self::Sglang,
            Self::Trtllm,
            Self::Mock,
        ]
        .into_iter()
        .find(|engine| engine.name() == name)
    }
}

/// The `kv_layout` hint: whether heads come before or after the tokens of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvAxisOrder {
    /// Token-major blocks.
    Nhd,
    /// Head-major blocks.
    Hnd,
    /// Head-major blocks; all layers of a block adjoin in memory.
    Blhnc,
    /// Token-major blocks; all layers of a block adjoin in memory.
    Blnhc,
}

impl KvAxisOrder {
    /// The name used on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nhd => "NHD",
            Self::Hnd => "HND",
            Self::Blhnc => "BLHNC",
            Self::Blnhc => "BLNHC",
        }
    }

    /// The order with this wire name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Nhd, Self::Hnd, Self::Blhnc, Self::Blnhc]
            .into_iter()
            .find(|order| order.name() == name)
    }

    /// Whether heads come before tokens inside a block.
    pub fn heads_first(self) -> bool {
        matches!(self, Self::Hnd | Self::Blhnc)
    }
}

/// The `kv_list_layout` hint of SGLang.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvListLayout {
    /// Wire name `k_v`: all K tensors, then all V tensors.
    Separate,
    /// Wire name `unified`: one tensor per layer.
    Unified,
}

impl KvListLayout {
    /// The name used on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Separate => "k_v",
            Self::Unified => "unified",
        }
    }

    /// The layout with this wire name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Separate, Self::Unified]
            .into_iter()
            .find(|layout| layout.name() == name)
    }
}

/// Optional hints that an engine adds to its shapes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayoutHints {
    /// `kv_layout`. If absent, tensors in CPU memory are heads-first and all others tokens-first, as in LMCache's server.
    pub kv_layout: Option<KvAxisOrder>,
    /// `num_kv_heads` (TensorRT-LLM).
    pub num_kv_heads: Option<u64>,
    /// `tokens_per_block` (SGLang, TensorRT-LLM).
    pub tokens_per_block: Option<u64>,
    /// `kv_list_layout` (SGLang).
    pub kv_list_layout: Option<KvListLayout>,
    /// `head_dim` (TensorRT-LLM).
    pub head_dim: Option<u64>,
    /// `kvtier.held_blocks`: the engine reuses no block while it is copied, and says which blocks of a window it does not have.
    /// Each window is then an object group, of the blocks that a hit can use.
    pub held_blocks: bool,
}

/// Memory of a tensor's storage.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum MemorySpec {
    /// A POSIX shared-memory segment.
    CpuShm {
        /// Name with its leading slash, such as `/lmcache_kv_12_0`.
        name: String,
        /// Size of the whole segment in bytes, as stated by the engine.
        nbytes: u64,
    },
    /// Memory of an NVIDIA GPU.
    Cuda(Box<CudaStorage>),
    /// Memory that no backend of this build can open.
    Unsupported {
        /// Wire name of the descriptor, such as `cuda`.
        kind: String,
    },
}

impl MemorySpec {
    /// Wire name of the descriptor kind.
    pub fn kind(&self) -> &str {
        match self {
            Self::CpuShm { .. } => "cpu_shm",
            Self::Cuda(storage) => storage.allocation.kind(),
            Self::Unsupported { kind } => kind,
        }
    }

    /// Whether another process of the server can open it again by the same description. File descriptors of the engine's
    /// process are named by numbers that it may have given to others since.
    pub fn is_lasting(&self) -> bool {
        let storage = match self {
            Self::CpuShm { .. } => return true,
            Self::Cuda(storage) => storage,
            Self::Unsupported { .. } => return false,
        };
        match &storage.allocation {
            CudaAllocation::Raw { .. } => true,
            CudaAllocation::Vmm { fabric, .. } => fabric.is_some(),
            CudaAllocation::Torch { handle, .. } => {
                let handle = handle.as_deref().map(ShareableHandle::parse);
                handle.is_some_and(|handle| match handle {
                    Ok(ShareableHandle::Legacy(_)) => true,
                    Ok(ShareableHandle::Expandable { handles, .. }) => {
                        matches!(handles, SegmentHandles::Fabric(_))
                    }
                    Err(_) => false,
                })
            }
        }
    }
}

/// A storage in GPU memory: part of an allocation of another process. Several storages may share an allocation, and
/// several tensors a storage; that is known only when they are opened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CudaStorage {
    /// UUID of the GPU, as written by the engine.
    pub device_uuid: String,
    /// The allocation.
    pub allocation: CudaAllocation,
    /// Bytes from the start of the mapped allocation to the start of the storage.
    pub offset: u64,
    /// Bytes of the storage, as stated by the engine.
    pub bytes: u64,
}

/// How a process shares a GPU allocation. All values are as received.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CudaAllocation {
    /// As PyTorch does (`cuda`, `UntypedStorage._share_cuda_()`).
    Torch {
        /// Shareable handle; `None` for a storage without bytes.
        handle: Option<Vec<u8>>,
        /// File of the reference counter of this use of the storage, and the counter's index.
        ref_counter: Option<(Vec<u8>, u64)>,
        /// Event that must be complete before the storage is used; `None` if there is nothing to wait for.
        event: Option<Vec<u8>>,
    },
    /// By the driver's own handle (`cuda_raw`).
    Raw {
        /// `cudaIpcMemHandle_t` of the allocation.
        handle: [u8; 64],
    },
    /// By a handle of the driver's virtual memory management (`cuda_vmm`).
    Vmm {
        /// The fabric handle; `None` if the allocation is exported as a file descriptor.
        fabric: Option<Vec<u8>>,
        /// Bytes of the allocation, as stated by the engine.
        bytes: u64,
    },
}

impl CudaAllocation {
    /// Wire name of the descriptor kind.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Torch { .. } => "cuda",
            Self::Raw { .. } => "cuda_raw",
            Self::Vmm { .. } => "cuda_vmm",
        }
    }
}

/// One registered tensor: a strided view of some storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The storage.
    pub memory: MemorySpec,
    /// Bytes per element.
    pub dtype_size: u64,
    /// Torch's name without prefix, such as `bfloat16`.
    pub dtype_name: String,
    /// Elements per dimension, outermost first in memory.
    pub shape: Vec<u64>,
    /// Elements between neighbours of each dimension.
    pub stride: Vec<u64>,
    /// Elements from the start of the storage to the first element.
    pub storage_offset: u64,
}

/// An engine's description of one group of layers (`EngineGroupInfo`). Their order is that of the block-id lists of
/// every store and retrieve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    /// The engine's group number.
    pub engine_group_id: i64,
    /// Positions in the registered tensor list.
    pub layer_indices: Vec<i64>,
    /// Tokens per block id; 0 = the tensor's slots per block.
    pub tokens_per_block: i64,
    /// Sliding window in tokens; -1 = none.
    pub sliding_window_tokens: i64,
    /// Non-zero for additional groups, whose objects are stored separately and last.
    pub extra_object_group_tag: i64,
    /// Recurrent state: only the newest block matters.
    pub recurrent_state: bool,
}

impl GroupSpec {
    /// One group of full-attention layers in engine group 0.
    pub fn full_attention(layer_indices: Vec<i64>, tokens_per_block: i64) -> Self {
        Self {
            engine_group_id: 0,
            layer_indices,
            tokens_per_block,
            sliding_window_tokens: -1,
            extra_object_group_tag: 0,
            recurrent_state: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cuda(allocation: CudaAllocation) -> bool {
        let memory = MemorySpec::Cuda(Box::new(CudaStorage {
            device_uuid: String::new(),
            allocation,
            offset: 0,
            bytes: 1,
        }));
        memory.is_lasting()
    }

    fn torch(handle: Option<Vec<u8>>) -> bool {
        cuda(CudaAllocation::Torch {
            handle,
            ref_counter: None,
            event: None,
        })
    }

    /// An expandable segment of version 3 with one piece of 2 MiB.
    fn expandable(kind: i32, piece: &[u8]) -> Vec<u8> {
        let mut handle = b"\x03e".to_vec();
        handle.extend(7_i32.to_le_bytes());
        handle.extend([0; 4]);
        handle.extend((2_u64 << 20).to_le_bytes());
        handle.extend(1_u64.to_le_bytes());
        handle.extend(kind.to_le_bytes());
        handle.extend([0; 4]);
        handle.extend(piece);
        handle
    }

    // proves: docs/operate.md#workers-after-a-restart
    #[test]
    fn descriptors_of_an_engine_do_not_last() {
        let segment = MemorySpec::CpuShm {
            name: "/lmcache_kv_1_0".into(),
            nbytes: 1,
        };
        assert!(segment.is_lasting());
        assert!(cuda(CudaAllocation::Raw { handle: [1; 64] }));
        assert!(torch(Some(vec![1; 64])));
        assert!(torch(Some(expandable(2, &[1; 64]))));
        assert!(!torch(Some(expandable(1, &3_i32.to_le_bytes()))));
        assert!(!torch(Some(vec![1; 3])) && !torch(None));
        for (fabric, lasts) in [(Some(vec![1; 64]), true), (None, false)] {
            assert_eq!(cuda(CudaAllocation::Vmm { fabric, bytes: 1 }), lasts);
        }
    }
}
