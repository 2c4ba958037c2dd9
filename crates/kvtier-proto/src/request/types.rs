//! The structures inside payloads, each with its reader and writer side by side.
//!
//! Structures are maps by name (LMCache 0.5.6): unknown fields are skipped, missing ones take their default
//! or are an error, and all fields are written, in declared order.

use crate::key::{check_salt, required};
use crate::wire::{self, DecodeError, Reader, name_shown};

/// A registered engine worker, as the engine numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId(pub i64);

impl std::fmt::Display for InstanceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Which lookup a query is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JobRef<'a> {
    /// By the engine's request: from 0.4.4.
    Request(&'a str),
    /// By the number that the lookup returned: 0.4.2 and 0.4.3.
    Job(i64),
}

/// A time span in seconds; clients send whichever number they hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Seconds {
    /// Whole seconds, an int on the wire.
    Whole(i64),
    /// A float on the wire.
    Fraction(f64),
}

impl Seconds {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        if wire::is_int(reader.peek()?) {
            return reader.int().map(Self::Whole);
        }
        reader.f64().map(Self::Fraction)
    }

    /// The span as a float; may be negative or not finite.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Whole(seconds) => seconds as f64,
            Self::Fraction(seconds) => seconds,
        }
    }

    /// The span as a duration of at most `limit`; negative and undefined spans are none.
    #[must_use]
    pub fn clamped(self, limit: std::time::Duration) -> std::time::Duration {
        let seconds = self.as_f64();
        if seconds.is_nan() || seconds <= 0.0 {
            return std::time::Duration::ZERO;
        }
        std::time::Duration::try_from_secs_f64(seconds).map_or(limit, |span| span.min(limit))
    }
}

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
}

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
                _ => value.skip()?,
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
        let known = [self.num_kv_heads, self.tokens_per_block, self.head_dim];
        let count = known.iter().flatten().count()
            + texts.iter().filter(|(_, text)| text.is_some()).count();
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
    }
}

/// A group of layers with block ids of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineGroupInfo {
    /// The engine's number of the group.
    pub engine_group_id: i64,
    /// Which of the registered tensors belong to it.
    pub layer_indices: Vec<i64>,
    /// Tokens in one block; 0 when unknown.
    pub tokens_per_block: i64,
    /// Sliding window in tokens; -1 for none.
    pub sw_size_tokens: i64,
    /// Keeps object groups apart that would otherwise be one.
    pub extra_object_group_tag: i64,
    /// Whether the layers keep a recurrent state instead of keys and values.
    pub recurrent_state: bool,
}

impl EngineGroupInfo {
    /// Fewest bytes one takes on the wire: a map with one name.
    pub(crate) const MIN_BYTES: usize = 18;

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut engine_group_id = None;
        let mut info = Self {
            engine_group_id: 0,
            layer_indices: Vec::new(),
            tokens_per_block: 0,
            sw_size_tokens: -1,
            extra_object_group_tag: 0,
            recurrent_state: false,
        };
        reader.map(|name, value| {
            match name {
                "engine_group_id" => engine_group_id = Some(value.int()?),
                "layer_indices" => info.layer_indices = value.ints()?,
                "tokens_per_block" => info.tokens_per_block = value.int()?,
                "sw_size_tokens" => info.sw_size_tokens = value.int()?,
                "extra_object_group_tag" => info.extra_object_group_tag = value.int()?,
                "recurrent_state" => info.recurrent_state = value.bool()?,
                _ => value.skip()?,
            }
            Ok(())
        })?;
        info.engine_group_id = required(engine_group_id, "engine_group_id")?;
        Ok(info)
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        wire::write_map_len(out, 6);
        wire::write_str(out, "engine_group_id");
        wire::write_int(out, self.engine_group_id);
        wire::write_str(out, "layer_indices");
        write_ints(out, &self.layer_indices);
        wire::write_str(out, "tokens_per_block");
        wire::write_int(out, self.tokens_per_block);
        wire::write_str(out, "sw_size_tokens");
        wire::write_int(out, self.sw_size_tokens);
        wire::write_str(out, "extra_object_group_tag");
        wire::write_int(out, self.extra_object_group_tag);
        wire::write_str(out, "recurrent_state");
        wire::write_bool(out, self.recurrent_state);
    }
}

/// The geometry of a worker that copies by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineDrivenContext<'a> {
    /// The worker.
    pub instance: InstanceId,
    /// Model name, as the client decorated it.
    pub model_name: &'a str,
    /// Workers that share the model's KV.
    pub world_size: u32,
    /// Tokens in one block of the engine.
    pub block_size: i64,
    /// Layers of this worker.
    pub num_layers: i64,
    /// Values of one token in one plane of one layer.
    pub hidden_dim_size: i64,
    /// Name of the values' type, such as `bfloat16`.
    pub dtype: &'a str,
    /// Whether K and V share one plane (MLA, or fused).
    pub use_mla: bool,
    /// Token slots of one chunk; absent means one a token.
    pub num_physical_slots: Option<i64>,
}

impl<'a> EngineDrivenContext<'a> {
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let mut instance = None;
        let mut model_name = None;
        let mut world_size = None;
        let mut block_size = None;
        let mut num_layers = None;
        let mut hidden_dim_size = None;
        let mut dtype = None;
        let mut use_mla = None;
        let mut num_physical_slots = None;
        reader.map(|name, value| {
            match name {
                "instance_id" => instance = Some(value.int()?),
                "model_name" => model_name = Some(value.str()?),
                "world_size" => world_size = Some(value.int()?),
                "block_size" => block_size = Some(value.int()?),
                "num_layers" => num_layers = Some(value.int()?),
                "hidden_dim_size" => hidden_dim_size = Some(value.int()?),
                "dtype_str" => dtype = Some(value.str()?),
                "use_mla" => use_mla = Some(value.bool()?),
                "num_physical_slots" => num_physical_slots = value.optional_int()?,
                _ => value.skip()?,
            }
            Ok(())
        })?;
        Ok(Self {
            instance: InstanceId(required(instance, "instance_id")?),
            model_name: required(model_name, "model_name")?,
            world_size: required(world_size, "world_size")?,
            block_size: required(block_size, "block_size")?,
            num_layers: required(num_layers, "num_layers")?,
            hidden_dim_size: required(hidden_dim_size, "hidden_dim_size")?,
            dtype: required(dtype, "dtype_str")?,
            use_mla: required(use_mla, "use_mla")?,
            num_physical_slots,
        })
    }

    /// Writes eight fields, or nine with `num_physical_slots`, which releases before 0.5.5 do not have.
    pub(crate) fn write(&self, with_slots: bool, out: &mut Vec<u8>) {
        wire::write_map_len(out, if with_slots { 9 } else { 8 });
        wire::write_str(out, "instance_id");
        wire::write_int(out, self.instance.0);
        wire::write_str(out, "model_name");
        wire::write_str(out, self.model_name);
        wire::write_str(out, "world_size");
        wire::write_uint(out, u64::from(self.world_size));
        wire::write_str(out, "block_size");
        wire::write_int(out, self.block_size);
        wire::write_str(out, "num_layers");
        wire::write_int(out, self.num_layers);
        wire::write_str(out, "hidden_dim_size");
        wire::write_int(out, self.hidden_dim_size);
        wire::write_str(out, "dtype_str");
        wire::write_str(out, self.dtype);
        wire::write_str(out, "use_mla");
        wire::write_bool(out, self.use_mla);
        if with_slots {
            wire::write_str(out, "num_physical_slots");
            match self.num_physical_slots {
                Some(slots) => wire::write_int(out, slots),
                None => wire::write_nil(out),
            }
        }
    }
}

/// Which blocks one request got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocationRecord<'a> {
    /// The engine's request.
    pub request_id: &'a str,
    /// Blocks it got.
    pub new_block_ids: Vec<i64>,
    /// Tokens that will fill them.
    pub new_token_ids: Vec<i64>,
}

impl<'a> AllocationRecord<'a> {
    /// Fewest bytes one takes on the wire: three names and three values.
    pub(crate) const MIN_BYTES: usize = 39;

    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let mut request_id = None;
        let mut new_block_ids = None;
        let mut new_token_ids = None;
        reader.map(|name, value| {
            match name {
                "req_id" => request_id = Some(value.str()?),
                "new_block_ids" => new_block_ids = Some(value.ints()?),
                "new_token_ids" => new_token_ids = Some(value.ints()?),
                _ => value.skip()?,
            }
            Ok(())
        })?;
        Ok(Self {
            request_id: required(request_id, "req_id")?,
            new_block_ids: required(new_block_ids, "new_block_ids")?,
            new_token_ids: required(new_token_ids, "new_token_ids")?,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        wire::write_map_len(out, 3);
        wire::write_str(out, "req_id");
        wire::write_str(out, self.request_id);
        wire::write_str(out, "new_block_ids");
        write_ints(out, &self.new_block_ids);
        wire::write_str(out, "new_token_ids");
        write_ints(out, &self.new_token_ids);
    }
}

/// Blending: a segment of another prompt that fits this one. Positions are tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatchedSegment<'a> {
    /// Start in the prompt it was computed for.
    pub old_start: i64,
    /// End there.
    pub old_end: i64,
    /// Start in this prompt.
    pub start: i64,
    /// End in this prompt.
    pub end: i64,
    /// Hash of the segment.
    pub hash: std::borrow::Cow<'a, [u8]>,
}

impl<'a> MatchedSegment<'a> {
    /// Fewest bytes one takes on the wire: five names and five values.
    pub(crate) const MIN_BYTES: usize = 40;

    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let mut positions = [None; 4];
        let mut hash = None;
        reader.map(|name, value| {
            match name {
                "old_st" => positions[0] = Some(value.int()?),
                "old_ed" => positions[1] = Some(value.int()?),
                "cur_st" => positions[2] = Some(value.int()?),
                "cur_ed" => positions[3] = Some(value.int()?),
                "hash" => hash = Some(value.bin()?),
                _ => value.skip()?,
            }
            Ok(())
        })?;
        Ok(Self {
            old_start: required(positions[0], "old_st")?,
            old_end: required(positions[1], "old_ed")?,
            start: required(positions[2], "cur_st")?,
            end: required(positions[3], "cur_ed")?,
            hash: required(hash, "hash")?.into(),
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        wire::write_map_len(out, 5);
        let positions = [
            ("old_st", self.old_start),
            ("old_ed", self.old_end),
            ("cur_st", self.start),
            ("cur_ed", self.end),
        ];
        for (name, position) in positions {
            wire::write_str(out, name);
            wire::write_int(out, position);
        }
        wire::write_str(out, "hash");
        wire::write_bin(out, &self.hash);
    }
}

/// An object's key as servers send it to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectKeyParts<'a> {
    /// Hash of the chunk and everything before it.
    pub chunk_hash: &'a [u8],
    /// Model name, without `@`.
    pub model_name: &'a str,
    /// World size and rank, packed.
    pub kv_rank: u64,
    /// The object group.
    pub object_group_id: u64,
    /// The tenant; empty for none.
    pub cache_salt: &'a str,
}

impl<'a> ObjectKeyParts<'a> {
    /// Fewest bytes one takes on the wire: three names and three values.
    pub(crate) const MIN_BYTES: usize = 35;

    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let mut chunk_hash = None;
        let mut model_name = None;
        let mut kv_rank = None;
        let mut object_group_id = 0;
        let mut cache_salt = "";
        reader.map(|name, value| {
            match name {
                "chunk_hash" => chunk_hash = Some(value.bin()?),
                "model_name" => {
                    let model = value.str()?;
                    if model.contains('@') {
                        return Err(DecodeError::new(format!(
                            "a model name must not contain '@', found {:?}",
                            name_shown(model)
                        )));
                    }
                    model_name = Some(model);
                }
                "kv_rank" => kv_rank = Some(value.int()?),
                "object_group_id" => object_group_id = value.int()?,
                "cache_salt" => {
                    cache_salt = value.str()?;
                    check_salt(cache_salt)?;
                }
                _ => value.skip()?,
            }
            Ok(())
        })?;
        Ok(Self {
            chunk_hash: required(chunk_hash, "chunk_hash")?,
            model_name: required(model_name, "model_name")?,
            kv_rank: required(kv_rank, "kv_rank")?,
            object_group_id,
            cache_salt,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        wire::write_map_len(out, 5);
        wire::write_str(out, "chunk_hash");
        wire::write_bin(out, self.chunk_hash);
        wire::write_str(out, "model_name");
        wire::write_str(out, self.model_name);
        wire::write_str(out, "kv_rank");
        wire::write_uint(out, self.kv_rank);
        wire::write_str(out, "object_group_id");
        wire::write_uint(out, self.object_group_id);
        wire::write_str(out, "cache_salt");
        wire::write_str(out, self.cache_salt);
    }
}

/// Shapes and types of one object group's tensors, as servers tell each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutDescriptor<'a> {
    /// Shape of each tensor.
    pub shapes: Vec<Vec<i64>>,
    /// Name of each tensor's type.
    pub dtypes: Vec<&'a str>,
}

impl<'a> LayoutDescriptor<'a> {
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let mut shapes = None;
        let mut dtypes = None;
        reader.map(|name, value| {
            match name {
                "shapes" => shapes = Some(value.array_of(1, Reader::ints)?),
                "dtypes" => dtypes = Some(value.array_of(1, Reader::str)?),
                _ => value.skip()?,
            }
            Ok(())
        })?;
        Ok(Self {
            shapes: required(shapes, "shapes")?,
            dtypes: required(dtypes, "dtypes")?,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        wire::write_map_len(out, 2);
        wire::write_str(out, "shapes");
        wire::write_array_len(out, self.shapes.len());
        for shape in &self.shapes {
            write_ints(out, shape);
        }
        wire::write_str(out, "dtypes");
        wire::write_array_len(out, self.dtypes.len());
        for dtype in &self.dtypes {
            wire::write_str(out, dtype);
        }
    }
}

/// Appends an array of ints.
pub(crate) fn write_ints(out: &mut Vec<u8>, values: &[i64]) {
    wire::write_array_len(out, values.len());
    for &value in values {
        wire::write_int(out, value);
    }
}
