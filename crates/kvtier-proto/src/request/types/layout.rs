//! Description of the tensors of a registration: engine, layout hints, groups of layers.

use crate::chunk::{self, CHUNK_TOKENS};
use crate::wire::{self, DecodeError, Reader, name_shown, record};

/// An enum whose values are texts on the wire.
macro_rules! text_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The value's text on the wire.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text),+
                }
            }

            pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
                let text = reader.str()?;
                Self::ALL.iter().copied().find(|value| value.name() == text).ok_or_else(|| {
                    DecodeError::new(format!(
                        "{:?} is not one of {}",
                        name_shown(text),
                        [$($text),+].join(", ")
                    ))
                })
            }
        }
    };
}

text_enum! {
    /// The engine of a worker.
    EngineType {
        /// vLLM.
        Vllm = "vllm",
        /// ATOM.
        Atom = "atom",
        /// SGLang.
        Sglang = "sglang",
        /// TensorRT-LLM.
        Trtllm = "trtllm",
        /// Tests of the peer.
        Mock = "mock",
    }
}

text_enum! {
    /// Order of the dimensions of a KV tensor, as the engine names it.
    KvLayoutName {
        /// Tokens, heads, values.
        Nhd = "NHD",
        /// Heads, tokens, values.
        Hnd = "HND",
        /// Blocks, layers, heads, tokens, values.
        Blhnc = "BLHNC",
        /// Blocks, layers, tokens, heads, values.
        Blnhc = "BLNHC",
    }
}

text_enum! {
    /// How a list of tensors splits K and V.
    KvListLayout {
        /// All K tensors, then all V tensors.
        KThenV = "k_v",
        /// One tensor holds both.
        Unified = "unified",
    }
}

/// Version of [`LayoutHints::held_blocks`] that this build reads and writes.
pub const HELD_BLOCKS: i64 = 1;

/// Name of the optional feature by which a client recognizes a server that reads [`HELD_BLOCKS`]. Other servers would take the
/// registration for one whose blocks are not held, and the id -1 for a block.
pub const HELD_BLOCKS_FEATURE: &str = "kvtier.held_blocks.1";

/// What an engine knows about its tensors' layout. Absent fields are unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayoutHints {
    /// Order of the dimensions.
    pub kv_layout: Option<KvLayoutName>,
    /// KV heads of one worker.
    pub num_kv_heads: Option<i64>,
    /// Tokens in one block.
    pub tokens_per_block: Option<i64>,
    /// How the list of tensors splits K and V.
    pub kv_list_layout: Option<KvListLayout>,
    /// Values in one head.
    pub head_dim: Option<i64>,
    /// Tokens in one of the engine's blocks, which may take several pages. Only 0.4.5 and 0.4.6 send it; later releases
    /// describe groups.
    pub logical_block_tokens: Option<i64>,
    /// Version of the promise that the engine reuses no block while a transfer of it is in flight; absent if it may. Only
    /// kvtier's clients send it. Version 1:
    ///
    /// * The block id -1 stands for a block that the engine does not have: one that has left its window. A chunk is not stored
    ///   for a group that lacks a needed block, and a retrieve writes nothing for it.
    /// * Each window is an object group of its own, of the last blocks of a chunk that a window shorter than it needs.
    /// * A recurrent state is the last block of a chunk.
    pub held_blocks: Option<i64>,
    /// Tokens per chunk, if the client asks for another size than the server's default; see [`chunk`].
    pub chunk_tokens: Option<u32>,
}

/// Wire name of [`LayoutHints::held_blocks`].
const HELD_BLOCKS_NAME: &str = "kvtier.held_blocks";

impl LayoutHints {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut hints = Self::default();
        reader.map(|name, value| {
            match name {
                "kv_layout" => hints.kv_layout = Some(KvLayoutName::read(value)?),
                "num_kv_heads" => hints.num_kv_heads = Some(value.int()?),
                "tokens_per_block" => hints.tokens_per_block = Some(value.int()?),
                "kv_list_layout" => hints.kv_list_layout = Some(KvListLayout::read(value)?),
                "head_dim" => hints.head_dim = Some(value.int()?),
                "inference_engine_logical_block_size" => {
                    hints.logical_block_tokens = Some(value.int()?);
                }
                HELD_BLOCKS_NAME => hints.held_blocks = Some(value.int()?),
                CHUNK_TOKENS => hints.chunk_tokens = Some(chunk::read(value)?),
                _ => value.skip_unknown(name)?,
            }
            Ok(())
        })?;
        Ok(hints)
    }

    /// Writes the fields that are known; the only structure of the protocol that leaves fields out.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let texts = [
            ("kv_layout", self.kv_layout.map(KvLayoutName::name)),
            (
                "kv_list_layout",
                self.kv_list_layout.map(KvListLayout::name),
            ),
        ];
        let known = [
            self.num_kv_heads,
            self.tokens_per_block,
            self.head_dim,
            self.logical_block_tokens,
            self.held_blocks,
        ];
        let count = known.iter().flatten().count()
            + texts.iter().filter(|(_, text)| text.is_some()).count()
            + usize::from(self.chunk_tokens.is_some());
        let text = |out: &mut Vec<u8>, (name, text): (&str, Option<&str>)| {
            if let Some(text) = text {
                wire::write_str(out, name);
                wire::write_str(out, text);
            }
        };
        let int = |out: &mut Vec<u8>, name: &str, value: Option<i64>| {
            if let Some(value) = value {
                wire::write_str(out, name);
                wire::write_int(out, value);
            }
        };
        wire::write_map_len(out, count);
        text(out, texts[0]);
        int(out, "num_kv_heads", self.num_kv_heads);
        int(out, "tokens_per_block", self.tokens_per_block);
        text(out, texts[1]);
        int(out, "head_dim", self.head_dim);
        let logical = "inference_engine_logical_block_size";
        int(out, logical, self.logical_block_tokens);
        int(out, HELD_BLOCKS_NAME, self.held_blocks);
        chunk::write(out, self.chunk_tokens);
    }
}

record! {
    /// A group of layers with block ids of its own.
    pub struct EngineGroupInfo {
        /// The engine's number of the group.
        pub engine_group_id: i64 = "engine_group_id";
        /// Indices of the registered tensors that belong to the group.
        pub layer_indices: Vec<i64> = "layer_indices", default Vec::new();
        /// Tokens in one block; 0 when unknown.
        pub tokens_per_block: i64 = "tokens_per_block", default 0;
        /// Sliding window in tokens; -1 for none.
        pub sw_size_tokens: i64 = "sw_size_tokens", default -1;
        /// Separates object groups that would otherwise be one.
        pub extra_object_group_tag: i64 = "extra_object_group_tag", default 0;
        /// Whether the layers keep a recurrent state instead of keys and values.
        pub recurrent_state: bool = "recurrent_state", default false;
    }
}
