//! Layout description for `/status`, with its field names.

use crate::layout::KvLayout;

/// `kv_cache_layout` of one instance, as LMCache 0.5.6 reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutDescription {
    /// Layers in all groups.
    pub num_layers: usize,
    /// Blocks every group has.
    pub num_blocks: u64,
    /// Bytes of one token in all layers.
    pub cache_size_per_token: u64,
    /// One entry per kernel group.
    pub kernel_groups: Vec<KernelGroupDescription>,
}

/// One kernel group of a [`LayoutDescription`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelGroupDescription {
    /// Position among the kernel groups.
    pub kernel_group_idx: usize,
    /// The engine's group number.
    pub engine_group_idx: i64,
    /// Object group it is stored in.
    pub object_group_idx: usize,
    /// Layers of the group.
    pub num_layers: usize,
    /// Their positions in the registration.
    pub layer_indices: Vec<usize>,
    /// Tokens per block id.
    pub tokens_per_block: u64,
    /// Token slots per block.
    pub slots_per_block: u64,
    /// Torch's name, such as `torch.float16`.
    pub dtype: String,
    /// Such as `4 x [2, 256, 16, 2, 64]`.
    pub engine_kv_concrete_shape: String,
    /// One latent vector per token.
    pub is_mla: bool,
    /// Name of the format.
    pub engine_kv_format: &'static str,
    /// The shape in symbols.
    pub engine_kv_shape: &'static str,
    /// The attention implementation, in words.
    pub attention_backend: &'static str,
}

impl KvLayout {
    /// Describes this layout for `/status`.
    pub fn describe(&self) -> LayoutDescription {
        let kernel_groups = self
            .kernel_groups()
            .iter()
            .map(|group| {
                let layers = group.layer_indices.len();
                let prefix = if group.format.separate_k_and_v() {
                    format!("2 x {layers} x ")
                } else if group.format.axes().contains(&crate::Axis::Layer) {
                    String::new()
                } else {
                    format!("{layers} x ")
                };
                KernelGroupDescription {
                    kernel_group_idx: group.index,
                    engine_group_idx: group.engine_group_id,
                    object_group_idx: group.object_group,
                    num_layers: layers,
                    layer_indices: group.layer_indices.clone(),
                    tokens_per_block: group.tokens_per_block,
                    slots_per_block: group.slots_per_block,
                    dtype: format!("torch.{}", group.dtype_name),
                    engine_kv_concrete_shape: format!("{prefix}{:?}", group.tensor_shape),
                    is_mla: group.format.is_mla(),
                    engine_kv_format: group.format.name(),
                    engine_kv_shape: group.format.symbolic_shape(),
                    attention_backend: group.format.attention_backend(),
                }
            })
            .collect();
        LayoutDescription {
            num_layers: self.num_layers(),
            num_blocks: self.num_blocks(),
            cache_size_per_token: self.bytes_per_token(),
            kernel_groups,
        }
    }
}
