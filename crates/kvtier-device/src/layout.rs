//! The checked layout of one registration.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::detect::detect;
use crate::error::{LayoutError, PlanError};
use crate::format::Axis;
use crate::geometry::Plane;
use crate::groups::{KernelGroup, ObjectGroup, checked_infos, kernel_groups, object_groups};
use crate::spec::{Engine, GroupSpec, LayoutHints, MemorySpec, TensorSpec};

/// Everything the planner and the backends need to know about one registered worker.
///
/// An object of an object group is the concatenation, without padding, of each kernel group's
/// array `[kv_size, layers, slots, NH * HS]`, row-major, always token-major whatever the pages are.
#[derive(Debug, Clone)]
pub struct KvLayout {
    pub(crate) id: u64,
    engine: Engine,
    chunk_tokens: u64,
    num_layers: usize,
    memories: Vec<MemorySpec>,
    kernel_groups: Vec<KernelGroup>,
    object_groups: Vec<ObjectGroup>,
    /// Where each registered layer is: (kernel group, position in it).
    layers: Vec<Option<(usize, usize)>>,
}

impl KvLayout {
    /// Works out the layout of a registration.
    ///
    /// `groups` may be empty: one group of all tensors. `chunk_tokens` is the chunk size of the
    /// server. Nothing is opened: memory sizes are those the engine gave, and
    /// [`crate::Device::open`] compares them with the real ones.
    ///
    /// # Errors
    /// Names the field, its value and what is allowed: unknown shapes, sizes that overflow or lie
    /// outside their memory, groups that do not match the tensors, block and window sizes that do
    /// not divide a chunk.
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
        let mut kernel_groups = kernel_groups(&detected.layers, &infos, chunk_tokens)?;
        let object_groups = object_groups(
            &mut kernel_groups,
            &infos,
            chunk_tokens,
            separate_object_groups,
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

    /// The engine that registered.
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

    /// Blocks that every group has.
    pub fn num_blocks(&self) -> u64 {
        self.kernel_groups
            .iter()
            .map(|group| group.num_blocks)
            .min()
            .unwrap_or(0)
    }

    /// The distinct memories the tensors lie in.
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

    /// Whether the pages of a group are in the memory of the CPU. Attention kernels for CPUs pack a page as suits the
    /// processor's instructions, whatever the registered shape says.
    pub fn is_in_cpu_memory(&self, group: &KernelGroup) -> bool {
        let in_cpu = |plane: &Plane| !matches!(self.memories[plane.memory], MemorySpec::Cuda(_));
        group.planes.iter().any(in_cpu)
    }

    /// Whether an object of this group fits only pages like those it was stored from: of as many slots, in the same
    /// format. Otherwise its rows are tokens, and pages of any block size and of any format with the same
    /// [`TokenContent`](crate::TokenContent) can be filled from it.
    ///
    /// A registered shape is believed only for pages on a GPU whose elements are floating-point numbers: bytes without
    /// a type may hold scales of a whole page, and pages that hold states or several tokens per slot are the engine's
    /// own.
    pub fn is_page_bound(&self, group: &KernelGroup) -> bool {
        const TOKEN_MAJOR: [&str; 8] = [
            "bfloat16",
            "float16",
            "float32",
            "float64",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
        ];
        self.is_in_cpu_memory(group)
            || group.recurrent_state
            || group.slots_per_block != group.tokens_per_block
            || !TOKEN_MAJOR.contains(&group.dtype_name.as_str())
    }

    /// Bytes one token takes in all groups together, in the objects.
    pub fn bytes_per_token(&self) -> u64 {
        let bytes: u64 = self
            .object_groups
            .iter()
            .map(|group| group.object_bytes)
            .sum();
        bytes / self.chunk_tokens
    }

    /// Positions of the layers that are part of a group, ascending.
    pub fn grouped_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layers.len()).filter(|layer| self.layers[*layer].is_some())
    }

    /// The kernel group of a registered layer.
    ///
    /// # Errors
    /// [`PlanError::NoSuchLayer`] when the layer does not exist or is in no group.
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

    /// Every block of every plane lies inside what was really opened, which `bytes_of` tells for each of
    /// [`KvLayout::memories`]. The layout proved it for the sizes the engine stated.
    ///
    /// # Errors
    /// Names the first layer that does not.
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

    /// One layer as its tensor has it.
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

/// The planes of one layer, and whether its tensor has them outside the blocks or inside.
pub(crate) struct LayerPlanes<'a> {
    pub group: usize,
    pub num_blocks: u64,
    pub planes: Vec<&'a Plane>,
    pub planes_outside_blocks: bool,
}
