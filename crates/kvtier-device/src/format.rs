//! KV page formats, by LMCache's numbers, and the meaning of their axes.

/// Meaning of one dimension of a registered tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// K (0) and V (1).
    Plane,
    /// Layers, where one tensor holds several.
    Layer,
    /// Blocks (pages): what a block id selects.
    Block,
    /// Token slots inside a block.
    Slot,
    /// Token slots of all blocks, without a block dimension.
    BlockSlot,
    /// Heads.
    Head,
    /// Always of size 1.
    One,
    /// K and V of one head side by side, inside its content.
    Packed,
    /// The content of one head (or of the whole token), contiguous.
    Content,
}

/// Format of an engine's pages. Numbers and names are those of LMCache 0.5.6 (`EngineKVFormat`).
///
/// NB blocks, NL layers, BS slots per block, NH heads, HS head size, CS packed K and V of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(
    non_camel_case_types,
    reason = "the names are data: they are shown to users as they are"
)]
#[repr(u8)]
pub enum KvFormat {
    /// One tensor for all layers, token-major.
    NB_NL_TWO_BS_NH_HS = 0,
    /// Per layer, K plane then V plane, token-major.
    NL_X_TWO_NB_BS_NH_HS = 1,
    /// Per layer, K and V inside each block, token-major.
    NL_X_NB_TWO_BS_NH_HS = 2,
    /// Per layer, one latent vector per token (MLA).
    NL_X_NB_BS_HS = 3,
    /// K tensors then V tensors without a block dimension.
    TWO_X_NL_X_NBBS_NH_HS = 4,
    /// Per layer, one latent vector per token, without a block dimension.
    NL_X_NBBS_ONE_HS = 5,
    /// Head-major form of 1.
    NL_X_TWO_NB_NH_BS_HS = 6,
    /// Head-major form of 2.
    NL_X_NB_TWO_NH_BS_HS = 7,
    /// Head-major form of 0.
    NB_NL_TWO_NH_BS_HS = 8,
    /// K tensors then V tensors, with blocks.
    TWO_X_NL_X_NB_BS_NH_HS = 9,
    /// Packed K and V with a dimension of their own, head-major.
    NL_X_NB_NH_BS_TWO_HS = 10,
    /// Packed K and V with a dimension of their own, token-major.
    NL_X_NB_BS_NH_TWO_HS = 11,
    /// Packed K and V, head-major.
    NL_X_NB_NH_BS_CS = 12,
    /// Packed K and V, token-major.
    NL_X_NB_BS_NH_CS = 13,
    /// Indexer page: the values of all slots, then the scales of all slots.
    NL_X_NB_BSV_BSS = 14,
    /// K plane then V plane, head-major with a dimension of one.
    NL_X_TWO_NB_NH_ONE_BS_HS = 15,
    /// Tuples of K and V per layer; only on unsupported devices.
    NL_X_TWO_X_NB_BS_NH_HS = 16,
    /// Tuples of parts per layer; only on unsupported devices.
    NL_X_NP_X_NB_BS_ONE_HS = 17,
    /// Per layer, one component, token-major.
    NL_X_NB_BS_NH_HS = 18,
}

/// Content of one token in an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenContent {
    /// A row of all heads in the K plane and one in the V plane.
    KeyAndValue,
    /// One latent vector.
    Latent,
    /// One row of all heads, each its K followed by its V.
    PackedHeads,
    /// One row of all heads, of one component.
    OneComponent,
    /// Values followed by their scale.
    ScaledIndex,
}

/// Value bytes of one token in format 14.
pub(crate) const INDEXER_VALUE_BYTES: u64 = 128;
/// Scale bytes of one token in format 14.
pub(crate) const INDEXER_SCALE_BYTES: u64 = 4;

impl KvFormat {
    /// Every format, in the order of the numbers.
    pub const ALL: [Self; 19] = [
        Self::NB_NL_TWO_BS_NH_HS,
        Self::NL_X_TWO_NB_BS_NH_HS,
        Self::NL_X_NB_TWO_BS_NH_HS,
        Self::NL_X_NB_BS_HS,
        Self::TWO_X_NL_X_NBBS_NH_HS,
        Self::NL_X_NBBS_ONE_HS,
        Self::NL_X_TWO_NB_NH_BS_HS,
        Self::NL_X_NB_TWO_NH_BS_HS,
        Self::NB_NL_TWO_NH_BS_HS,
        Self::TWO_X_NL_X_NB_BS_NH_HS,
        Self::NL_X_NB_NH_BS_TWO_HS,
        Self::NL_X_NB_BS_NH_TWO_HS,
        Self::NL_X_NB_NH_BS_CS,
        Self::NL_X_NB_BS_NH_CS,
        Self::NL_X_NB_BSV_BSS,
        Self::NL_X_TWO_NB_NH_ONE_BS_HS,
        Self::NL_X_TWO_X_NB_BS_NH_HS,
        Self::NL_X_NP_X_NB_BS_ONE_HS,
        Self::NL_X_NB_BS_NH_HS,
    ];

    /// The number used on the wire and in logs.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The name used in logs and in `/status`.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// The format with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The shape in symbols, such as `NL x [2, NB, BS, NH, HS]`.
    pub fn symbolic_shape(self) -> &'static str {
        self.row().1
    }

    /// The attention implementation that uses this format.
    pub fn attention_backend(self) -> &'static str {
        self.row().2
    }

    /// The meaning of each dimension of one tensor; empty for formats that cannot be planned.
    pub fn axes(self) -> &'static [Axis] {
        self.row().3
    }

    /// Whether a layer is two tensors: all K tensors come first, then all V tensors.
    pub fn separate_k_and_v(self) -> bool {
        matches!(
            self,
            Self::TWO_X_NL_X_NBBS_NH_HS | Self::TWO_X_NL_X_NB_BS_NH_HS
        )
    }

    /// Content of one token in an object. Formats of equal content write the same object for the same tokens, whatever
    /// the order of heads and slots in their pages and the number of slots per page.
    pub fn token_content(self) -> TokenContent {
        match self {
            Self::NL_X_NB_BS_HS | Self::NL_X_NBBS_ONE_HS | Self::NL_X_NP_X_NB_BS_ONE_HS => {
                TokenContent::Latent
            }
            Self::NL_X_NB_BSV_BSS => TokenContent::ScaledIndex,
            Self::NL_X_NB_NH_BS_TWO_HS
            | Self::NL_X_NB_BS_NH_TWO_HS
            | Self::NL_X_NB_NH_BS_CS
            | Self::NL_X_NB_BS_NH_CS => TokenContent::PackedHeads,
            Self::NL_X_NB_BS_NH_HS => TokenContent::OneComponent,
            _ => TokenContent::KeyAndValue,
        }
    }

    /// Whether a token is one latent vector shared by K and V.
    pub fn is_mla(self) -> bool {
        matches!(
            self,
            Self::NL_X_NB_BS_HS | Self::NL_X_NBBS_ONE_HS | Self::NL_X_NB_BSV_BSS
        )
    }

    /// The one data table: name, symbolic shape, attention backend, axes.
    fn row(self) -> (&'static str, &'static str, &'static str, &'static [Axis]) {
        use Axis::{Block, BlockSlot, Content, Head, Layer, One, Packed, Plane, Slot};
        match self {
            Self::NB_NL_TWO_BS_NH_HS => (
                "NB_NL_TWO_BS_NH_HS",
                "[NB, NL, 2, BS, NH, HS]",
                "vLLM cross-layer",
                &[Block, Layer, Plane, Slot, Head, Content],
            ),
            Self::NL_X_TWO_NB_BS_NH_HS => (
                "NL_X_TWO_NB_BS_NH_HS",
                "NL x [2, NB, BS, NH, HS]",
                "vLLM non-MLA flash attention",
                &[Plane, Block, Slot, Head, Content],
            ),
            Self::NL_X_NB_TWO_BS_NH_HS => (
                "NL_X_NB_TWO_BS_NH_HS",
                "NL x [NB, 2, BS, NH, HS]",
                "vLLM non-MLA flash infer",
                &[Block, Plane, Slot, Head, Content],
            ),
            Self::NL_X_NB_BS_HS => (
                "NL_X_NB_BS_HS",
                "NL x [NB, BS, HS]",
                "vLLM MLA",
                &[Block, Slot, Content],
            ),
            Self::TWO_X_NL_X_NBBS_NH_HS => (
                "TWO_X_NL_X_NBBS_NH_HS",
                "2 x NL x [NB*BS, NH, HS]",
                "SGLang MHA",
                &[BlockSlot, Head, Content],
            ),
            Self::NL_X_NBBS_ONE_HS => (
                "NL_X_NBBS_ONE_HS",
                "NL x [NB*BS, 1, HS]",
                "SGLang MLA",
                &[BlockSlot, One, Content],
            ),
            Self::NL_X_TWO_NB_NH_BS_HS => (
                "NL_X_TWO_NB_NH_BS_HS",
                "NL x [2, NB, NH, BS, HS]",
                "vLLM non-MLA flash attention, HND",
                &[Plane, Block, Head, Slot, Content],
            ),
            Self::NL_X_NB_TWO_NH_BS_HS => (
                "NL_X_NB_TWO_NH_BS_HS",
                "NL x [NB, 2, NH, BS, HS]",
                "vLLM non-MLA flash infer, HND",
                &[Block, Plane, Head, Slot, Content],
            ),
            Self::NB_NL_TWO_NH_BS_HS => (
                "NB_NL_TWO_NH_BS_HS",
                "[NB, NL, 2, NH, BS, HS]",
                "TensorRT-LLM or cross-layer, HND",
                &[Block, Layer, Plane, Head, Slot, Content],
            ),
            Self::TWO_X_NL_X_NB_BS_NH_HS => (
                "TWO_X_NL_X_NB_BS_NH_HS",
                "2 x NL x [NB, BS, NH, HS]",
                "SGLang MHA, paged",
                &[Block, Slot, Head, Content],
            ),
            Self::NL_X_NB_NH_BS_TWO_HS => (
                "NL_X_NB_NH_BS_TWO_HS",
                "NL x [NB, NH, BS, 2, HS]",
                "vLLM packed K/V, HND",
                &[Block, Head, Slot, Packed, Content],
            ),
            Self::NL_X_NB_BS_NH_TWO_HS => (
                "NL_X_NB_BS_NH_TWO_HS",
                "NL x [NB, BS, NH, 2, HS]",
                "vLLM packed K/V",
                &[Block, Slot, Head, Packed, Content],
            ),
            Self::NL_X_NB_NH_BS_CS => (
                "NL_X_NB_NH_BS_CS",
                "NL x [NB, NH, BS, CS]",
                "vLLM packed K/V content, HND",
                &[Block, Head, Slot, Content],
            ),
            Self::NL_X_NB_BS_NH_CS => (
                "NL_X_NB_BS_NH_CS",
                "NL x [NB, BS, NH, CS]",
                "vLLM packed K/V content",
                &[Block, Slot, Head, Content],
            ),
            Self::NL_X_NB_BSV_BSS => (
                "NL_X_NB_BSV_BSS",
                "NL x [NB, BS*V + BS*S]",
                "vLLM sparse attention indexer",
                &[Block, Slot, Content],
            ),
            Self::NL_X_TWO_NB_NH_ONE_BS_HS => (
                "NL_X_TWO_NB_NH_ONE_BS_HS",
                "NL x [2, NB, NH, 1, BS, HS]",
                "RBLN flash attention",
                &[Plane, Block, Head, One, Slot, Content],
            ),
            Self::NL_X_TWO_X_NB_BS_NH_HS => (
                "NL_X_TWO_X_NB_BS_NH_HS",
                "NL x 2 x [NB, BS, NH, HS]",
                "Ascend tuples",
                &[],
            ),
            Self::NL_X_NP_X_NB_BS_ONE_HS => (
                "NL_X_NP_X_NB_BS_ONE_HS",
                "NL x NP x [NB, BS, 1, HS]",
                "Ascend MLA tuples",
                &[],
            ),
            Self::NL_X_NB_BS_NH_HS => (
                "NL_X_NB_BS_NH_HS",
                "NL x [NB, BS, NH, HS]",
                "SGLang unified",
                &[Block, Slot, Head, Content],
            ),
        }
    }
}

impl std::fmt::Display for KvFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
