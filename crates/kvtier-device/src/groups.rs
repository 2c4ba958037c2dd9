//! Kernel groups (layers with the same copy geometry) and object groups (layers stored as one object).

use std::collections::HashSet;

use crate::error::LayoutError;
use crate::format::KvFormat;
use crate::geometry::{Layer, Plane};
use crate::spec::GroupSpec;

/// Layers with the same planes, heads, head size, block size, engine group, dtype and format.
/// Stores and retrieves carry one list of block ids per kernel group.
#[derive(Debug, Clone)]
pub struct KernelGroup {
    /// Position in [`crate::KvLayout::kernel_groups`].
    pub index: usize,
    /// The engine's group number.
    pub engine_group_id: i64,
    /// Object group that holds these layers.
    pub object_group: usize,
    /// Page format.
    pub format: KvFormat,
    /// Torch's name without prefix.
    pub dtype_name: String,
    /// Bytes per element.
    pub dtype_size: u64,
    /// Planes per layer: 2 for separate K and V, else 1.
    pub kv_size: u64,
    /// Heads (1 for latent formats).
    pub heads: u64,
    /// Elements of one head; K and V together in packed formats.
    pub head_size: u64,
    /// Token slots of one block in the tensors.
    pub slots_per_block: u64,
    /// Tokens per block id.
    pub tokens_per_block: u64,
    /// Blocks of every layer of the group.
    pub num_blocks: u64,
    /// Blocks of one chunk, in the lists of block ids.
    pub blocks_per_chunk: usize,
    /// Blocks at the start of a chunk that no object has: no hit at its end needs them. Only where blocks are
    /// [held](crate::LayoutHints::held_blocks).
    pub unneeded_blocks: usize,
    /// Whether the id -1 stands for a block that the engine does not have.
    pub may_lack_blocks: bool,
    /// Slots of one chunk in an object: rows of one (plane, layer).
    pub slots_per_chunk: u64,
    /// Sliding window in tokens.
    pub window_tokens: Option<u64>,
    /// Recurrent state: the last block of a chunk holds the whole state.
    pub recurrent_state: bool,
    /// Positions of the layers in the registration, in object order.
    pub layer_indices: Vec<usize>,
    /// Shape of the first layer's tensor.
    pub tensor_shape: Vec<u64>,
    /// Location of the blocks; entry `kv * layers + layer`.
    pub planes: Vec<Plane>,
    /// Bytes from the start of an object to this group's array.
    pub object_offset: u64,
}

impl KernelGroup {
    /// Elements of one token of one plane.
    pub fn hidden_size(&self) -> u64 {
        self.heads * self.head_size
    }

    /// Shape of this group's part of an object: `[kv_size, layers, slots, NH * HS]`, row-major.
    pub fn object_shape(&self) -> [u64; 4] {
        [
            self.kv_size,
            self.layer_indices.len() as u64,
            self.slots_per_chunk,
            self.hidden_size(),
        ]
    }

    /// Leaves only the blocks of a chunk that a hit at its end needs: the last of a window shorter than a chunk, or the state.
    fn keep_needed_blocks(&mut self) {
        let needed = match (self.recurrent_state, self.window_tokens) {
            (true, _) => 1,
            (false, Some(tokens)) => usize::try_from(tokens.div_ceil(self.tokens_per_block))
                .map_or(self.blocks_per_chunk, |blocks| {
                    blocks.min(self.blocks_per_chunk)
                }),
            (false, None) => return,
        };
        self.may_lack_blocks = true;
        self.unneeded_blocks = self.blocks_per_chunk - needed;
        self.slots_per_chunk = needed as u64 * self.slots_per_block;
    }

    /// Bytes of one slot of one plane.
    pub fn row_bytes(&self) -> u64 {
        self.hidden_size() * self.dtype_size
    }

    /// Bytes of this group's part of an object.
    pub fn object_bytes(&self) -> u64 {
        self.planes.len() as u64 * self.slots_per_chunk * self.row_bytes()
    }
}

/// Kernel groups stored as one object per chunk and rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectGroup {
    /// Number of the group, part of the object key.
    pub index: usize,
    /// Kernel groups of the object group, in object order.
    pub kernel_groups: Vec<usize>,
    /// Chunks needed at the end of a prefix; `None` = all.
    pub window_chunks: Option<u64>,
    /// Recurrent state.
    pub recurrent_state: bool,
    /// Non-zero for additional groups.
    pub extra_tag: i64,
    /// Bytes of one object.
    pub object_bytes: u64,
}

/// Maximum number of groups per registration: above any model, and it bounds the matching.
const MAX_GROUPS: usize = 1024;

/// Whether two layers of an engine group belong to one kernel group.
fn same_kernel_group(a: &Layer, b: &Layer) -> bool {
    a.planes.len() == b.planes.len()
        && a.heads == b.heads
        && a.head_size == b.head_size
        && a.slots == b.slots
        && a.dtype_name == b.dtype_name
        && a.dtype_size == b.dtype_size
        && a.format == b.format
}

/// The group infos with their layers as checked positions; an empty list means one group of all layers.
pub(crate) fn checked_infos(
    infos: &[GroupSpec],
    layers: usize,
    one_tensor: bool,
) -> Result<Vec<(GroupSpec, Vec<usize>)>, LayoutError> {
    if infos.is_empty() {
        let everything = GroupSpec::full_attention(Vec::new(), 0);
        return Ok(vec![(everything, (0..layers).collect())]);
    }
    if infos.len() > MAX_GROUPS {
        return Err(LayoutError::new(
            "engine_group_infos",
            format!("{} groups", infos.len()),
            format!("at most {MAX_GROUPS} groups"),
        ));
    }
    let mut taken = HashSet::new();
    let mut checked = Vec::with_capacity(infos.len());
    for (at, info) in infos.iter().enumerate() {
        let field = format!("engine_group_infos[{at}].layer_indices");
        if info.layer_indices.is_empty() {
            return Err(LayoutError::new(field, "empty", "at least one layer"));
        }
        let whole_tensor = one_tensor && infos.len() == 1 && info.layer_indices == [0];
        let mut indices = Vec::with_capacity(info.layer_indices.len());
        for index in &info.layer_indices {
            let position = usize::try_from(*index)
                .ok()
                .filter(|position| *position < layers);
            let Some(position) = position else {
                return Err(LayoutError::new(
                    field,
                    index,
                    format!("0 to {}", layers - 1),
                ));
            };
            if !taken.insert(position) {
                return Err(LayoutError::new(field, index, "every layer at most once"));
            }
            indices.push(position);
        }
        if whole_tensor {
            // The engine counts tensors; here one tensor holds all layers.
            indices = (0..layers).collect();
        }
        checked.push((info.clone(), indices));
    }
    Ok(checked)
}

/// Makes one kernel group per info. The layers of an info must be all equal layers of its engine group, and infos must
/// be ordered by their first layers, as the lists of block ids are.
pub(crate) fn kernel_groups(
    layers: &[Layer],
    infos: &[(GroupSpec, Vec<usize>)],
    chunk_tokens: u64,
    held_blocks: bool,
) -> Result<Vec<KernelGroup>, LayoutError> {
    let mut groups: Vec<KernelGroup> = Vec::with_capacity(infos.len());
    let mut previous_start = None;
    for (at, (info, indices)) in infos.iter().enumerate() {
        let field = format!("engine_group_infos[{at}].layer_indices");
        let first = &layers[indices[0]];
        if let Some(odd) = indices
            .iter()
            .find(|index| !same_kernel_group(first, &layers[**index]))
        {
            return Err(LayoutError::new(
                field,
                format!("a group of unlike layers: {} and {odd}", indices[0]),
                "layers of equal planes, heads, head size, block size, dtype and format",
            ));
        }
        for (earlier, other) in infos[..at].iter().enumerate() {
            if other.0.engine_group_id == info.engine_group_id
                && same_kernel_group(first, &layers[other.1[0]])
            {
                return Err(LayoutError::new(
                    field,
                    format!(
                        "a second group like group {earlier} of engine group {}",
                        info.engine_group_id
                    ),
                    "one group for all equal layers of an engine group",
                ));
            }
        }
        let start = indices.iter().min();
        if start < previous_start {
            return Err(LayoutError::new(
                field,
                format!("behind group {}, whose layers start later", at - 1),
                "groups in the order of their first layers",
            ));
        }
        previous_start = start;
        let mut group = kernel_group(at, info, indices, layers, chunk_tokens)?;
        if held_blocks {
            group.keep_needed_blocks();
        }
        groups.push(group);
    }
    Ok(groups)
}

fn kernel_group(
    at: usize,
    info: &GroupSpec,
    indices: &[usize],
    layers: &[Layer],
    chunk_tokens: u64,
) -> Result<KernelGroup, LayoutError> {
    let field = |name: &str| format!("engine_group_infos[{at}].{name}");
    let first = &layers[indices[0]];
    let tokens_per_block = match u64::try_from(info.tokens_per_block) {
        Ok(0) => first.slots,
        Ok(tokens) if tokens % first.slots == 0 => tokens,
        _ => {
            return Err(LayoutError::new(
                field("tokens_per_block"),
                info.tokens_per_block,
                format!("0, or a multiple of {}, the slots of a block", first.slots),
            ));
        }
    };
    if !chunk_tokens.is_multiple_of(tokens_per_block) {
        return Err(LayoutError::new(
            field("tokens_per_block"),
            tokens_per_block,
            format!("a divisor of {chunk_tokens}, the tokens of a chunk"),
        ));
    }
    let window_tokens = match info.sliding_window_tokens {
        -1 => None,
        tokens => {
            let whole = u64::try_from(tokens).ok().filter(|tokens| {
                *tokens > 0 && (*tokens >= chunk_tokens || *tokens % tokens_per_block == 0)
            });
            Some(whole.ok_or_else(|| {
                LayoutError::new(
                    field("sw_size_tokens"),
                    tokens,
                    format!(
                        "-1, at least {chunk_tokens} (a chunk), or a multiple of \
                         {tokens_per_block} (a block)"
                    ),
                )
            })?)
        }
    };
    let kv_size = first.planes.len();
    let planes: Vec<Plane> = (0..kv_size)
        .flat_map(|kv| {
            indices
                .iter()
                .map(move |index| layers[*index].planes[kv].clone())
        })
        .collect();
    let blocks_per_chunk = chunk_tokens / tokens_per_block;
    // At most chunk_tokens, because tokens_per_block is a multiple of slots.
    let slots_per_chunk = blocks_per_chunk * first.slots;
    let too_large = || {
        LayoutError::new(
            field("object size"),
            "more than 2^63 bytes",
            "at most 2^63 bytes in a chunk",
        )
    };
    (planes.len() as u64)
        .checked_mul(slots_per_chunk)
        .and_then(|rows| rows.checked_mul(first.heads * first.head_size * first.dtype_size))
        .filter(|bytes| *bytes <= i64::MAX as u64)
        .ok_or_else(too_large)?;
    Ok(KernelGroup {
        index: at,
        engine_group_id: info.engine_group_id,
        object_group: 0,
        format: first.format,
        dtype_name: first.dtype_name.clone(),
        dtype_size: first.dtype_size,
        kv_size: kv_size as u64,
        heads: first.heads,
        head_size: first.head_size,
        slots_per_block: first.slots,
        tokens_per_block,
        // Layers of one group share block ids, so an id must exist in each of them.
        num_blocks: indices
            .iter()
            .map(|index| layers[*index].num_blocks)
            .min()
            .unwrap_or(0),
        blocks_per_chunk: usize::try_from(blocks_per_chunk).map_err(|_| too_large())?,
        unneeded_blocks: 0,
        may_lack_blocks: false,
        slots_per_chunk,
        window_tokens,
        recurrent_state: info.recurrent_state,
        layer_indices: indices.to_vec(),
        tensor_shape: first.shape.clone(),
        planes,
        object_offset: 0,
    })
}

/// Assigns kernel groups to objects and fixes their offsets.
///
/// By default everything is one object, which needs every chunk of a prefix. Separated, there is one object per (extra
/// tag, recurrent, window in chunks), ordered by first kernel group, tagged ones last. Unless blocks are held, a window shorter
/// than a chunk does not shrink the object: as in the CPU context of LMCache's server, the whole chunk is stored.
pub(crate) fn object_groups(
    groups: &mut [KernelGroup],
    infos: &[(GroupSpec, Vec<usize>)],
    chunk_tokens: u64,
    separate: bool,
) -> Result<Vec<ObjectGroup>, LayoutError> {
    let mut objects: Vec<ObjectGroup> = Vec::new();
    for (group, (info, _)) in groups.iter().zip(infos) {
        let window = if info.recurrent_state {
            Some(1)
        } else {
            group
                .window_tokens
                .map(|tokens| tokens.div_ceil(chunk_tokens))
        };
        let key = if separate {
            (info.extra_object_group_tag, info.recurrent_state, window)
        } else {
            (0, false, None)
        };
        let found = objects.iter_mut().find(|object| {
            (
                object.extra_tag,
                object.recurrent_state,
                object.window_chunks,
            ) == key
        });
        match found {
            Some(object) => object.kernel_groups.push(group.index),
            None => objects.push(ObjectGroup {
                index: 0,
                kernel_groups: vec![group.index],
                window_chunks: key.2,
                recurrent_state: key.1,
                extra_tag: key.0,
                object_bytes: 0,
            }),
        }
    }
    objects.sort_by_key(|object| object.extra_tag != 0);
    for (index, object) in objects.iter_mut().enumerate() {
        object.index = index;
        for kernel in &object.kernel_groups {
            let group = &mut groups[*kernel];
            group.object_group = index;
            group.object_offset = object.object_bytes;
            object.object_bytes = object
                .object_bytes
                .checked_add(group.object_bytes())
                .filter(|bytes| *bytes <= i64::MAX as u64)
                .ok_or_else(|| {
                    LayoutError::new(
                        format!("object group {index}"),
                        "more than 2^63 bytes",
                        "at most 2^63 bytes in a chunk",
                    )
                })?;
        }
    }
    Ok(objects)
}
