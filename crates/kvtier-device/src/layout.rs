//! The checked layout of one registration.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::detect::detect;
use crate::error::{LayoutError, PlanError};
use crate::format::Axis;
use crate::geometry::Plane;
use crate::groups::{KernelGroup, ObjectGroup, checked_infos, kernel_groups, object_groups};
use crate::spec::{Engine, GroupSpec, LayoutHints, MemorySpec, TensorSpec};

/// Layout of one registered worker, for the planner and the backends.
///
/// An object of an object group is the concatenation, without padding, of each kernel group's
/// array `[kv_size, layers, slots, NH * HS]`, row-major, and token-major for any page format.
///
/// ```
/// use kvtier_device::{
///     BlockTable, ChunkRequest, Engine, KvLayout, LayoutHints, MemorySpec, PlannedCopy, TensorSpec,
/// };
///
/// // Keys and values of 4 blocks: 2 heads, 16 tokens, 8 elements.
/// let tensor = TensorSpec {
///     memory: MemorySpec::CpuShm { name: "/pages".into(), nbytes: 4096 },
///     dtype_size: 2,
///     dtype_name: "bfloat16".into(),
///     shape: vec![2, 4, 2, 16, 8],
///     stride: vec![1024, 256, 128, 8, 1],
///     storage_offset: 0,
/// };
/// let hints = LayoutHints::default();
/// let layout = KvLayout::detect(&[tensor], Engine::Vllm, &hints, &[], 32, false)?;
/// let blocks = BlockTable::check(&layout, &[[3, 0]], 1)?;
/// let (mut copies, request) = (Vec::new(), ChunkRequest { object_group: 0, chunk: 0, skip_tokens: 0 });
/// request.plan(&layout, &blocks, &mut copies)?;
/// let bytes: u64 = copies.iter().map(PlannedCopy::bytes).sum();
/// assert_eq!(bytes, layout.object_groups()[0].object_bytes);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct KvLayout {
    pub(crate) id: u64,
    engine: Engine,
    chunk_tokens: u64,
    num_layers: usize,
    memories: Vec<MemorySpec>,
    kernel_groups: Vec<KernelGroup>,
    object_groups: Vec<ObjectGroup>,
    /// Location of each registered layer: (kernel group, position in it).
    layers: Vec<Option<(usize, usize)>>,
}

impl KvLayout {
    /// Determines the layout of a registration.
    ///
    /// An empty `groups` means one group of all tensors. `chunk_tokens` is the server's chunk size. Nothing is opened:
    /// memory sizes are the engine's, and [`crate::Device::open`] compares them with the real ones.
    ///
    /// # Errors
    /// Unknown shapes, sizes that overflow or exceed their memory, groups that do not match the tensors, block and window
    /// sizes that do not divide a chunk.
    pub fn detect(
        tensors: &[TensorSpec],
        engine: Engine,
        hints: &LayoutHints,
        groups: &[GroupSpec],
        chunk_tokens: u64,
        separate_object_groups: bool,
    ) -> Result<Self, LayoutError> {
        if chunk_tokens == 0 || chunk_tokens > u64::from(u32::MAX) {
            return Err(LayoutError::new(
                "chunk size",
                chunk_tokens,
                format!("1 to {} tokens", u32::MAX),
            ));
        }
        let detected = detect(tensors, engine, hints)?;
        let infos = checked_infos(groups, detected.layers.len(), detected.one_tensor)?;
        let mut kernel_groups =
            kernel_groups(&detected.layers, &infos, chunk_tokens, hints.held_blocks)?;
        let object_groups = object_groups(
            &mut kernel_groups,
            &infos,
            chunk_tokens,
            separate_object_groups || hints.held_blocks,
        )?;
        let mut layers = vec![None; detected.layers.len()];
        for group in &kernel_groups {
            for (position, layer) in group.layer_indices.iter().enumerate() {
                layers[*layer] = Some((group.index, position));
            }
        }
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            engine,
            chunk_tokens,
            num_layers: kernel_groups
                .iter()
                .map(|group| group.layer_indices.len())
                .sum(),
            memories: detected.memories,
            kernel_groups,
            object_groups,
            layers,
        })
    }

    /// Kind of the engine.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// Tokens of a chunk.
    pub fn chunk_tokens(&self) -> u64 {
        self.chunk_tokens
    }

    /// Layers that are part of a group.
    pub fn num_layers(&self) -> usize {
        self.num_layers
    }

    /// Blocks common to all groups.
    pub fn num_blocks(&self) -> u64 {
        self.kernel_groups
            .iter()
            .map(|group| group.num_blocks)
            .min()
            .unwrap_or(0)
    }

    /// The distinct memories that contain the tensors.
    pub fn memories(&self) -> &[MemorySpec] {
        &self.memories
    }

    /// Kernel groups, in the order of the block-id lists.
    pub fn kernel_groups(&self) -> &[KernelGroup] {
        &self.kernel_groups
    }

    /// Object groups, by number.
    pub fn object_groups(&self) -> &[ObjectGroup] {
        &self.object_groups
    }

    /// Whether the pages of a group are in CPU memory. Attention kernels for CPUs pack pages for the processor's
    /// instructions, independently of the registered shape.
    pub fn is_in_cpu_memory(&self, group: &KernelGroup) -> bool {
        let in_cpu = |plane: &Plane| !matches!(self.memories[plane.memory], MemorySpec::Cuda(_));
        group.planes.iter().any(in_cpu)
    }

    /// Whether an object of this group fits only pages with the number of slots and the format that it was stored from.
    /// Otherwise its rows are tokens, and pages of any block size and of any format with the same
    /// [`TokenContent`](crate::TokenContent) can be filled from it.
    ///
    /// The registered shape is trusted only for pages on a GPU with floating-point elements: untyped bytes may contain
    /// the scales of a whole page, and pages of states or of several tokens per slot have an engine-specific layout.
    pub fn is_page_bound(&self, group: &KernelGroup) -> bool {
        self.is_in_cpu_memory(group)
            || group.recurrent_state
            || group.slots_per_block != group.tokens_per_block
            || is_untyped(&group.dtype_name)
    }

    /// Bytes per token in the objects of all groups.
    pub fn bytes_per_token(&self) -> u64 {
        let bytes: u64 = self
            .object_groups
            .iter()
            .map(|group| group.object_bytes)
            .sum();
        bytes / self.chunk_tokens
    }

    /// Positions of the grouped layers, ascending.
    pub fn grouped_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layers.len()).filter(|layer| self.layers[*layer].is_some())
    }

    /// The kernel group of a registered layer.
    ///
    /// # Errors
    /// [`PlanError::NoSuchLayer`] if the layer does not exist or is in no group.
    pub fn group_of_layer(&self, layer: usize) -> Result<&KernelGroup, PlanError> {
        self.layer(layer).map(|(group, _)| group)
    }

    fn layer(&self, layer: usize) -> Result<(&KernelGroup, usize), PlanError> {
        let (group, position) =
            self.layers
                .get(layer)
                .copied()
                .flatten()
                .ok_or(PlanError::NoSuchLayer {
                    layer,
                    layers: self.layers.len(),
                })?;
        Ok((&self.kernel_groups[group], position))
    }

    /// Checks that every block of every plane is inside the opened memories, whose sizes `bytes_of` returns by index of
    /// [`KvLayout::memories`]. [`KvLayout::detect`] has checked the sizes that the engine stated.
    ///
    /// # Errors
    /// Names the first layer that exceeds its memory.
    pub(crate) fn check_memories(
        &self,
        bytes_of: impl Fn(usize) -> u64,
    ) -> Result<(), LayoutError> {
        for group in self.kernel_groups() {
            for (index, plane) in group.planes.iter().enumerate() {
                let limit = bytes_of(plane.memory);
                let end = plane.end(group.num_blocks);
                if end.is_none_or(|end| end > limit) {
                    let layer = group.layer_indices[index % group.layer_indices.len()];
                    return Err(LayoutError::new(
                        format!("kv_caches[{layer}]"),
                        format!("{end:?} bytes into its memory"),
                        format!("at most {limit}, the bytes there are"),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that an object of a group fits an extent of `len` bytes. The plan refuses groups that do not exist.
    ///
    /// # Errors
    /// [`PlanError::ExtentTooSmall`].
    pub(crate) fn check_extent(&self, object_group: usize, len: u64) -> Result<(), PlanError> {
        match self.object_groups().get(object_group) {
            Some(object) if len < object.object_bytes => Err(PlanError::ExtentTooSmall {
                len,
                needed: object.object_bytes,
                group: object.index,
            }),
            _ => Ok(()),
        }
    }

    /// The planes of one layer, for reading it in its tensor's order.
    pub(crate) fn layer_planes(&self, layer: usize) -> Result<LayerPlanes<'_>, PlanError> {
        let (group, position) = self.layer(layer)?;
        let axes = group.format.axes();
        let place = |wanted| axes.iter().position(|axis| *axis == wanted);
        Ok(LayerPlanes {
            group: group.index,
            num_blocks: group.num_blocks,
            planes: group
                .planes
                .iter()
                .skip(position)
                .step_by(group.layer_indices.len())
                .collect(),
            planes_outside_blocks: group.format.separate_k_and_v()
                || place(Axis::Plane) < place(Axis::Block),
        })
    }
}

/// The planes of one layer, and whether the plane dimension of its tensor is outside the block dimension.
pub(crate) struct LayerPlanes<'a> {
    pub group: usize,
    pub num_blocks: u64,
    pub planes: Vec<&'a Plane>,
    pub planes_outside_blocks: bool,
}

impl LayerPlanes<'_> {
    /// Calls `visit` with the plane and number of every block, in the order of the tensor's dimensions.
    ///
    /// # Errors
    /// An id outside the blocks, before anything is visited, or the error of `visit`.
    pub fn visit_blocks<E: From<PlanError>>(
        &self,
        block_ids: &[i64],
        mut visit: impl FnMut(&Plane, u32) -> Result<(), E>,
    ) -> Result<(), E> {
        let checked = |(position, id): (usize, &i64)| {
            checked_id(*id, self.num_blocks).ok_or(PlanError::BlockOutOfRange {
                group: self.group,
                position,
                id: *id,
                num_blocks: self.num_blocks,
            })
        };
        let ids: Vec<u32> = block_ids
            .iter()
            .enumerate()
            .map(checked)
            .collect::<Result<_, _>>()?;
        if self.planes_outside_blocks {
            for plane in &self.planes {
                ids.iter().try_for_each(|id| visit(plane, *id))?;
            }
        } else {
            for id in &ids {
                let mut planes = self.planes.iter();
                planes.try_for_each(|plane| visit(plane, *id))?;
            }
        }
        Ok(())
    }
}

/// The id as a block number, if the block exists (there are at most `u32::MAX`).
pub(crate) fn checked_id(id: i64, num_blocks: u64) -> Option<u32> {
    u32::try_from(id)
        .ok()
        .filter(|id| u64::from(*id) < num_blocks)
}

/// Whether elements of a dtype are bytes whose meaning only the engine knows: fp8 of either kind, codes, scales.
#[must_use]
pub fn is_untyped(dtype_name: &str) -> bool {
    const TYPED: [&str; 8] = [
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    ];
    !TYPED.contains(&dtype_name)
}
