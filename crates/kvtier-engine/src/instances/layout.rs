//! The objects of a model as the cache sees them: object groups, windows, sizes, and the fingerprint of their bytes.

use kvtier_common::error::{Error, Result};
use kvtier_device::{KernelGroup, KvLayout, is_untyped};
use kvtier_l2::{Element, PAGE_BOUND};
use kvtier_proto::chunk::CHUNK_TOKENS;
use kvtier_proto::descriptor::Dtype;
use kvtier_proto::request::{self, EngineDrivenContext};

use super::fingerprint::{self, Processor};

/// One object group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLayout {
    /// Number of the group, part of the object key.
    pub id: u32,
    /// Chunks needed at the end of a prefix; `None` is all of them.
    pub window: Option<u32>,
    /// Bytes of one object.
    pub object_bytes: u64,
}

/// The objects of a model, for lookups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelLayout {
    /// The object groups.
    pub groups: Vec<GroupLayout>,
    /// [Fingerprint](fingerprint) of everything that changes the bytes of an object or their order. Two workers of different
    /// fingerprints never see each other's objects, even under one model name.
    pub fingerprint: u64,
    /// Tokens of a chunk; in the fingerprint too.
    pub chunk_tokens: u64,
    /// Whether objects fit only pages like those they were stored from. One without a fingerprint, as LMCache's files
    /// are, must then not be loaded: its pages are unknown.
    pub page_bound: bool,
    /// Type of all values of all objects, where tiers can use it.
    pub element: Option<Element>,
    /// Whether some objects are untyped bytes whose kind neither the registration nor the configuration names. Engines
    /// of several kinds then share objects.
    pub unnamed_bytes: bool,
}

impl ModelLayout {
    /// Adds [`PAGE_BOUND`], as `page_bound` says, and the type of the values to the fingerprint, so that tiers know both
    /// wherever the fingerprint is.
    #[must_use]
    pub fn for_tiers(mut self) -> Self {
        self.fingerprint = Element::in_layout(self.fingerprint & !PAGE_BOUND, self.element);
        if self.page_bound {
            self.fingerprint |= PAGE_BOUND;
        }
        self
    }

    /// Adds the kind of untyped bytes to the fingerprint, if the configuration says it.
    #[must_use]
    pub fn with_byte_kind(mut self, kind: Option<&str>) -> Self {
        if let Some(kind) = kind.filter(|_| self.unnamed_bytes) {
            self.fingerprint = fingerprint::of_bytes(self.fingerprint, kind);
            self.unnamed_bytes = false;
        }
        self
    }

    /// Layout of a worker whose pages the server copies.
    pub fn of_pages(layout: &KvLayout) -> Self {
        let groups = layout.object_groups().iter().map(|group| GroupLayout {
            // Both are bounded by the number of layers of a registration.
            id: u32::try_from(group.index).unwrap_or(u32::MAX),
            window: group
                .window_chunks
                .map(|window| u32::try_from(window).unwrap_or(u32::MAX)),
            object_bytes: group.object_bytes,
        });
        let mut kernels = layout.kernel_groups().iter();
        let is_untyped = |group: &KernelGroup| is_untyped(&group.dtype_name);
        Self {
            groups: groups.collect(),
            fingerprint: fingerprint::of_pages(layout, Processor::of_host()),
            chunk_tokens: layout.chunk_tokens(),
            page_bound: kernels.any(|group| layout.is_page_bound(group)),
            element: element_of(layout),
            unnamed_bytes: layout.kernel_groups().iter().any(is_untyped),
        }
    }
}

/// Recurrent states are added to step by step, so a tier that rounds must not take them.
fn element_of(layout: &KvLayout) -> Option<Element> {
    let mut groups = layout.kernel_groups().iter();
    let element = Element::from_name(&groups.as_slice().first()?.dtype_name)?;
    groups
        .all(|group| group.dtype_name == element.name() && !group.recurrent_state)
        .then_some(element)
}

/// Objects of a worker that copies by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineDrivenLayout {
    /// One per object group, at least one.
    pub groups: Vec<EngineDrivenGroup>,
    /// Tokens of a chunk.
    pub chunk_tokens: u64,
    /// Tokens of a block, as registered.
    pub block_size: i64,
    /// MLA flag as registered; "one plane" rather than MLA.
    pub use_mla: bool,
}

/// Objects of one group of layers of such a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineDrivenGroup {
    /// Type of the values.
    pub dtype: Dtype,
    /// `[layers, slots, hidden]` of one plane, `[2, layers, slots, hidden]` of two.
    pub shape: Vec<u64>,
    /// Bytes of one object.
    pub object_bytes: u64,
    /// Tokens of a block of the group, as registered.
    pub tokens_per_block: i64,
    /// Chunks needed at the end of a prefix; `None` is all of them.
    pub window: Option<u32>,
    /// Whether the pages hold states instead of KV of tokens.
    pub is_recurrent: bool,
}

/// Checks a number of a registration that is a length.
fn length(name: &str, value: i64) -> Result<u64> {
    match u64::try_from(value) {
        Ok(value) if value > 0 && value <= 1 << 32 => Ok(value),
        _ => Err(Error::refused(format!(
            "{name} is {value}; allowed: 1 to 4294967296"
        ))),
    }
}

impl EngineDrivenGroup {
    /// Layout of tensors with these planes, layers, slots and values.
    fn new(dtype: &str, extents: [u64; 4], tokens_per_block: i64) -> Result<Self> {
        let dtype = Dtype::from_name(dtype).ok_or_else(|| {
            Error::refused(format!(
                "dtype_str is {dtype:?}; allowed: a torch dtype such as bfloat16"
            ))
        })?;
        let object_bytes = extents
            .iter()
            .try_fold(dtype.item_size(), |bytes, extent| {
                bytes.checked_mul(*extent)
            })
            .filter(|bytes| *bytes <= 1 << 40)
            .ok_or_else(|| {
                Error::refused(
                    "num_layers x slots x hidden_dim_size: an object may have at most 2^40 bytes",
                )
            })?;
        let shape = match extents {
            [1, shape @ ..] => shape.to_vec(),
            shape => shape.to_vec(),
        };
        Ok(Self {
            dtype,
            shape,
            object_bytes,
            tokens_per_block,
            window: None,
            is_recurrent: false,
        })
    }

    fn of_group(
        group: &request::GroupLayout<'_>,
        use_mla: bool,
        chunk_tokens: u64,
    ) -> Result<Self> {
        let planes = match group.kv_size {
            0 if use_mla => 1,
            0 => 2,
            planes @ 1..=2 => planes.unsigned_abs(),
            other => {
                let message = format!("kv_size is {other}; allowed: 0, 1 or 2");
                return Err(Error::refused(message));
            }
        };
        let slots = match group.window_tokens {
            0 => chunk_tokens,
            tokens => length("window_tokens", tokens)?,
        };
        let window = u32::try_from(group.window_chunks).map_err(|_| {
            Error::refused(format!(
                "window_chunks is {}; allowed: 0 to 4294967295",
                group.window_chunks
            ))
        })?;
        let extents = [
            planes,
            length("num_layers", group.num_layers)?,
            slots,
            length("hidden_dim_size", group.hidden_dim_size)?,
        ];
        Ok(Self {
            window: (window > 0).then_some(window),
            is_recurrent: group.recurrent,
            ..Self::new(group.dtype, extents, group.tokens_per_block)?
        })
    }

    /// Whether it keeps only the end of a prompt.
    pub fn is_windowed(&self) -> bool {
        self.window.is_some() || self.is_recurrent
    }
}

impl EngineDrivenLayout {
    /// Checks what a worker registers.
    ///
    /// # Errors
    /// Names the field, its value and what is allowed.
    pub fn new(context: &EngineDrivenContext<'_>, chunk_size: u64) -> Result<Self> {
        let layers = length("num_layers", context.num_layers)?;
        let hidden = length("hidden_dim_size", context.hidden_dim_size)?;
        let slots = match context.num_physical_slots {
            Some(slots) => length("num_physical_slots", slots)?,
            None => chunk_size,
        };
        // A chunk of the default size may be smaller than a block; one that is asked for is whole blocks.
        if context.chunk_tokens.is_some()
            && !u64::try_from(context.block_size)
                .is_ok_and(|block| block > 0 && chunk_size.is_multiple_of(block))
        {
            return Err(Error::refused(format!(
                "{CHUNK_TOKENS} is {chunk_size}; allowed: a multiple of block_size, {}",
                context.block_size
            )));
        }
        let groups = match context.groups.as_deref().unwrap_or_default() {
            [] => {
                let planes = if context.use_mla { 1 } else { 2 };
                let extents = [planes, layers, slots, hidden];
                let group = EngineDrivenGroup::new(context.dtype, extents, context.block_size);
                vec![group?]
            }
            // LMCache's clients send none instead, and what it says may differ from the context.
            [_] => {
                let message = "group_layouts has 1 group; allowed: none, or several";
                return Err(Error::refused(message));
            }
            groups => groups
                .iter()
                .map(|group| EngineDrivenGroup::of_group(group, context.use_mla, chunk_size))
                .collect::<Result<_>>()?,
        };
        Ok(Self {
            groups,
            chunk_tokens: chunk_size,
            block_size: context.block_size,
            use_mla: context.use_mla,
        })
    }

    /// Whether its requests and answers name groups.
    pub fn is_grouped(&self) -> bool {
        self.groups.len() > 1
    }

    /// Layout of these objects for lookups.
    pub fn model(&self) -> ModelLayout {
        let groups = self.groups.iter().zip(0..).map(|(group, id)| GroupLayout {
            id,
            window: group.window,
            object_bytes: group.object_bytes,
        });
        let mut kinds = self.groups.iter();
        let dtype = self.groups[0].dtype;
        let rounds = kinds.all(|group| group.dtype == dtype && !group.is_recurrent);
        ModelLayout {
            groups: groups.collect(),
            fingerprint: fingerprint::of_engine_driven(self, Processor::of_host()),
            chunk_tokens: self.chunk_tokens,
            page_bound: true,
            element: Element::from_name(dtype.name()).filter(|_| rounds),
            unnamed_bytes: self.groups.iter().any(|it| is_untyped(it.dtype.name())),
        }
    }
}
