//! Description of the tensors of a registration: engine, layout hints, groups of layers.

use crate::chunk;
use crate::wire::{self, DecodeError, Reader, WireValue, name_shown, record};

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
        }

        impl<'a> WireValue<'a> for $name {
            fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
                let text = reader.str()?;
                Self::ALL.iter().copied().find(|value| value.name() == text).ok_or_else(|| {
                    DecodeError::new(format!(
                        "{:?} is not one of {}",
                        name_shown(text),
                        [$($text),+].join(", ")
                    ))
                })
            }

            fn write(&self, out: &mut Vec<u8>) {
                wire::write_str(out, self.name());
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

record! {
    /// What an engine knows about its tensors' layout. Absent fields are unknown.
    #[derive(Copy, Default)]
    pub struct LayoutHints {} and {
        /// Order of the dimensions.
        pub kv_layout: KvLayoutName = "kv_layout";
        /// KV heads of one worker.
        pub num_kv_heads: i64 = "num_kv_heads";
        /// Tokens in one block.
        pub tokens_per_block: i64 = "tokens_per_block";
        /// How the list of tensors splits K and V.
        pub kv_list_layout: KvListLayout = "kv_list_layout";
        /// Values in one head.
        pub head_dim: i64 = "head_dim";
        /// Tokens in one of the engine's blocks, which may take several pages. Only 0.4.5 and 0.4.6 send it; later releases
        /// describe groups.
        pub logical_block_tokens: i64 = "inference_engine_logical_block_size";
        /// Version of the promise that the engine reuses no block while a transfer of it is in flight; absent if it may. Only
        /// kvtier's clients send it. Version 1:
        ///
        /// * The block id -1 stands for a block that the engine does not have: one that has left its window. A chunk is not stored
        ///   for a group that lacks a needed block, and a retrieve writes nothing for it.
        /// * Each window is an object group of its own, of the last blocks of a chunk that a window shorter than it needs.
        /// * A recurrent state is the last block of a chunk.
        pub held_blocks: i64 = "kvtier.held_blocks";
        /// Tokens per chunk, if the client asks for another size than the server's default; see [`chunk`].
        pub chunk_tokens: u32 = "kvtier.chunk_tokens", read chunk::read;
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
