//! Geometry of one layer: its addresses in memory, from a tensor's shape and strides and the axes of its format.
//!
//! All arithmetic on the engine's numbers is checked here: offsets of block ids below the number of blocks cannot
//! overflow later.

use kvtier_memory::CopyLoop;

use crate::error::LayoutError;
use crate::format::{Axis, INDEXER_SCALE_BYTES, INDEXER_VALUE_BYTES, KvFormat};

/// Most dimensions any known format has.
const MAX_RANK: usize = 6;
/// Most layers one registration may have: above any model, and it bounds what is allocated.
pub(crate) const MAX_LAYERS: u64 = 1 << 16;

/// Location of the blocks of one (K/V plane, layer).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plane {
    /// Index into [`crate::KvLayout::memories`].
    pub memory: usize,
    /// Bytes from the start of that memory to block 0.
    pub base: u64,
    /// Bytes from block to block.
    pub block_stride: u64,
    /// Parts of a block.
    pub parts: Vec<BlockPart>,
}

/// Part of a block that one copy moves: two loops (outer first) around one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockPart {
    /// Bytes from the start of the block.
    pub engine_offset: u64,
    /// Bytes from the start of the block's first row in the object.
    pub object_offset: u64,
    /// Contiguous bytes on both sides.
    pub bytes: u64,
    /// Loops around the run, outermost first; a count of 1 is no loop.
    pub loops: [CopyLoop; 2],
}

/// A view of one tensor: the engine's numbers, possibly re-viewed by a hint.
#[derive(Debug, Clone)]
pub(crate) struct View {
    /// Position in the registered list, for messages.
    pub tensor: usize,
    pub memory: usize,
    /// Size the engine gave for the storage, if its kind has one.
    pub memory_bytes: Option<u64>,
    pub dtype_size: u64,
    pub dtype_name: String,
    pub shape: Vec<u64>,
    pub stride: Vec<u64>,
    pub storage_offset: u64,
}

/// One layer: the properties that select its kernel group, and its planes.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub format: KvFormat,
    pub dtype_size: u64,
    pub dtype_name: String,
    pub num_blocks: u64,
    pub slots: u64,
    pub heads: u64,
    /// Elements of one head (of one token, for latent formats).
    pub head_size: u64,
    /// One per K/V plane.
    pub planes: Vec<Plane>,
    /// Shape of the tensor this layer is in.
    pub shape: Vec<u64>,
}

impl View {
    fn field(&self, name: &str) -> String {
        format!("kv_caches[{}].{name}", self.tensor)
    }

    /// Checks ranks, sizes, strides and that the whole view lies inside its storage.
    pub fn check(&self) -> Result<(), LayoutError> {
        let rank = self.shape.len();
        if rank == 0 || rank > MAX_RANK {
            return Err(LayoutError::new(
                self.field("shape"),
                format!("{:?}", truncated(&self.shape)),
                format!("1 to {MAX_RANK} dimensions"),
            ));
        }
        if self.stride.len() != rank {
            return Err(LayoutError::new(
                self.field("stride"),
                format!("{:?}", truncated(&self.stride)),
                format!("{rank} values, one per dimension of shape {:?}", self.shape),
            ));
        }
        if self.dtype_size == 0 || self.dtype_size > 16 {
            return Err(LayoutError::new(
                self.field("dtype size"),
                self.dtype_size,
                "1 to 16 bytes",
            ));
        }
        if self.shape.contains(&0) {
            return Err(LayoutError::new(
                self.field("shape"),
                format!("{:?}", self.shape),
                "no dimension of size 0",
            ));
        }
        for (size, stride) in self.shape.iter().zip(&self.stride) {
            if *size > 1 && *stride == 0 {
                return Err(LayoutError::new(
                    self.field("stride"),
                    format!("{:?}", self.stride),
                    "at least 1 for every dimension larger than 1",
                ));
            }
        }
        let most = self
            .memory_bytes
            .unwrap_or(i64::MAX as u64)
            .min(i64::MAX as u64);
        match self.span() {
            Some(span) if span <= most => Ok(()),
            span => Err(LayoutError::new(
                self.field("byte span"),
                span.map_or_else(|| "more than 2^64".to_owned(), |span| span.to_string()),
                format!("at most {most}, the bytes of its memory"),
            )),
        }
    }

    /// Bytes from the start of the storage to the end of its last element.
    fn span(&self) -> Option<u64> {
        let mut last = self.storage_offset;
        let mut count = 1u64;
        for (size, stride) in self.shape.iter().zip(&self.stride) {
            last = last.checked_add((size - 1).checked_mul(*stride)?)?;
            count = count.checked_mul(*size)?;
        }
        // The element count also has to be addressable: object sizes are made from it.
        count.checked_mul(self.dtype_size)?;
        last.checked_add(1)?.checked_mul(self.dtype_size)
    }

    /// Splits dimension `at` into `inner`-sized pieces; `false` if it is not divisible.
    pub fn split(&mut self, at: usize, inner: u64) -> bool {
        let (Some(&size), Some(&stride)) = (self.shape.get(at), self.stride.get(at)) else {
            return false;
        };
        if inner == 0 || size % inner != 0 {
            return false;
        }
        let Some(outer_stride) = stride.checked_mul(inner) else {
            return false;
        };
        self.shape[at] = size / inner;
        self.stride[at] = outer_stride;
        self.shape.insert(at + 1, inner);
        self.stride.insert(at + 1, stride);
        true
    }

    /// Removes a dimension of size 1.
    pub fn drop_singleton(&mut self, at: usize) {
        self.shape.remove(at);
        self.stride.remove(at);
    }

    /// Size and stride of an axis; an absent axis has size 1. The stride of a single element is meaningless and becomes
    /// 0.
    fn axis(&self, format: KvFormat, axis: Axis) -> (u64, u64) {
        let at = format
            .axes()
            .iter()
            .position(|candidate| *candidate == axis);
        match at.map(|at| (self.shape[at], self.stride[at])) {
            Some((size, stride)) if size > 1 => (size, stride),
            _ => (1, 0),
        }
    }

    /// The layers of this view read as `format`. [`View::check`] must have passed.
    pub fn layers(&self, format: KvFormat) -> Result<Vec<Layer>, LayoutError> {
        let axes = format.axes();
        if axes.is_empty() || axes.contains(&Axis::BlockSlot) || axes.len() != self.shape.len() {
            return Err(LayoutError::new(
                self.field("shape"),
                format!("{:?} for format {format}", self.shape),
                format!("{} dimensions: {}", axes.len(), format.symbolic_shape()),
            ));
        }
        let (kv_size, kv_stride) = self.axis(format, Axis::Plane);
        let (one, _) = self.axis(format, Axis::One);
        if one != 1 || (axes.contains(&Axis::Plane) && kv_size != 2) {
            return Err(LayoutError::new(
                self.field("shape"),
                format!("{:?} for format {format}", self.shape),
                format.symbolic_shape(),
            ));
        }
        let (num_layers, layer_stride) = self.axis(format, Axis::Layer);
        if num_layers > MAX_LAYERS {
            return Err(LayoutError::new(
                self.field("shape"),
                format!("{:?}, so {num_layers} layers", self.shape),
                format!("at most {MAX_LAYERS} layers"),
            ));
        }
        let (num_blocks, block_stride) = self.axis(format, Axis::Block);
        if num_blocks > u64::from(u32::MAX) {
            return Err(LayoutError::new(
                self.field("shape"),
                format!("{:?}, so {num_blocks} blocks", self.shape),
                format!("at most {} blocks", u32::MAX),
            ));
        }
        let (slots, slot_stride) = self.axis(format, Axis::Slot);
        let (heads, head_stride) = self.axis(format, Axis::Head);
        let head_size = self.content(format)?;
        let es = self.dtype_size;
        let parts = if format == KvFormat::NL_X_NB_BSV_BSS {
            self.indexer_parts(slots, slot_stride, head_size)?
        } else {
            vec![BlockPart::collapsed(
                0,
                0,
                head_size * es,
                CopyLoop {
                    count: slots,
                    segment_stride: slot_stride * es,
                    arena_stride: heads * head_size * es,
                },
                CopyLoop {
                    count: heads,
                    segment_stride: head_stride * es,
                    arena_stride: head_size * es,
                },
            )]
        };
        let plane = |kv: u64, layer: u64| Plane {
            memory: self.memory,
            // Inside the checked span, so none of this overflows.
            base: (self.storage_offset + kv * kv_stride + layer * layer_stride) * es,
            block_stride: block_stride * es,
            parts: parts.clone(),
        };
        Ok((0..num_layers)
            .map(|layer| Layer {
                format,
                dtype_size: es,
                dtype_name: self.dtype_name.clone(),
                num_blocks,
                slots,
                heads,
                head_size,
                planes: (0..kv_size).map(|kv| plane(kv, layer)).collect(),
                shape: self.shape.clone(),
            })
            .collect())
    }

    /// Elements of one head, which must be contiguous.
    fn content(&self, format: KvFormat) -> Result<u64, LayoutError> {
        let (content, content_stride) = self.axis(format, Axis::Content);
        let (packed, packed_stride) = self.axis(format, Axis::Packed);
        let tight =
            (content == 1 || content_stride == 1) && (packed == 1 || packed_stride == content);
        if !tight {
            return Err(LayoutError::new(
                self.field("stride"),
                format!("{:?} for shape {:?}", self.stride, self.shape),
                format!("a contiguous last dimension (format {format})"),
            ));
        }
        Ok(content * packed)
    }

    /// Indexer pages keep the values of all slots first, then the scales of all slots; a row of the
    /// object is a slot's values followed by its scale.
    fn indexer_parts(
        &self,
        slots: u64,
        slot_stride: u64,
        row: u64,
    ) -> Result<Vec<BlockPart>, LayoutError> {
        if slots > 1 && slot_stride != row {
            return Err(LayoutError::new(
                self.field("stride"),
                format!("{:?} for shape {:?}", self.stride, self.shape),
                "contiguous pages (format NL_X_NB_BSV_BSS)",
            ));
        }
        let part = |engine_offset, object_offset, bytes| {
            BlockPart::collapsed(
                engine_offset,
                object_offset,
                bytes,
                CopyLoop {
                    count: slots,
                    segment_stride: bytes,
                    arena_stride: row,
                },
                CopyLoop::ONCE,
            )
        };
        Ok(vec![
            part(0, 0, INDEXER_VALUE_BYTES),
            part(
                slots * INDEXER_VALUE_BYTES,
                INDEXER_VALUE_BYTES,
                INDEXER_SCALE_BYTES,
            ),
        ])
    }
}

impl Plane {
    /// End offset of `num_blocks` blocks; `None` if it overflows.
    pub(crate) fn end(&self, num_blocks: u64) -> Option<u64> {
        let last = num_blocks.checked_sub(1)?.checked_mul(self.block_stride)?;
        let mut end = 0;
        for part in &self.parts {
            let mut part_end = part.engine_offset.checked_add(part.bytes)?;
            for step in &part.loops {
                let steps = (step.count - 1).checked_mul(step.segment_stride)?;
                part_end = part_end.checked_add(steps)?;
            }
            end = part_end.max(end);
        }
        self.base.checked_add(last)?.checked_add(end)
    }
}

impl BlockPart {
    /// Merges loops whose steps are contiguous on both sides into longer runs.
    fn collapsed(
        engine_offset: u64,
        object_offset: u64,
        bytes: u64,
        outer: CopyLoop,
        inner: CopyLoop,
    ) -> Self {
        let mut part = Self {
            engine_offset,
            object_offset,
            bytes,
            loops: [outer, inner],
        };
        if adjoins(&part.loops[1], part.bytes) {
            part.bytes *= part.loops[1].count;
            part.loops[1] = CopyLoop::ONCE;
        }
        if part.loops[1].count == 1 && adjoins(&part.loops[0], part.bytes) {
            part.bytes *= part.loops[0].count;
            part.loops[0] = CopyLoop::ONCE;
        }
        part
    }

    /// The part of `count` slots from `first` on; its object offset counts from the row of the first of them, and a row has
    /// `row` bytes.
    pub(crate) fn slots(&self, first: u64, count: u64, row: u64) -> Self {
        let mut part = *self;
        let slots = &mut part.loops[0];
        if slots.count > 1 {
            part.engine_offset += first * slots.segment_stride;
            slots.count = count;
        } else if part.bytes > row {
            // The rows of all slots are one run.
            part.engine_offset += first * row;
            part.bytes = count * row;
        }
        part
    }

    /// Whether the part is a single run.
    pub fn is_one_run(&self) -> bool {
        self.loops.iter().all(|step| step.count == 1)
    }
}

/// Whether a loop around a run of `bytes` is one longer run on both sides.
pub(crate) fn adjoins(step: &CopyLoop, bytes: u64) -> bool {
    step.count == 1 || (step.segment_stride == bytes && step.arena_stride == bytes)
}

/// The first few values of a list that may be long and hostile.
pub(crate) fn truncated(values: &[u64]) -> &[u64] {
    &values[..values.len().min(MAX_RANK + 2)]
}
