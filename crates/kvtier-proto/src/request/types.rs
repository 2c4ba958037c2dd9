//! The structures inside payloads, each with its reader and writer side by side.
//!
//! Structures are maps by name (LMCache 0.5.6): unknown fields are skipped, missing ones take their default
//! or are an error, and all fields are written, in declared order.

mod layout;
mod records;

pub use layout::{
    EngineGroupInfo, EngineType, HELD_BLOCKS, HELD_BLOCKS_FEATURE, KvLayoutName, KvListLayout,
    LayoutHints,
};
pub use records::{AllocationRecord, LayoutDescriptor, MatchedSegment, ObjectKeyParts};

use crate::chunk;
use crate::wire::fields::read_fields;
use crate::wire::{self, DecodeError, Reader};

/// Most tensors of one registration. Real ones have a few per layer.
pub const MAX_TENSORS: usize = 4096;
/// Most groups of layers, each with its own block ids. Real models have a few.
pub const MAX_GROUPS: usize = 4096;

/// A registered engine worker, as the engine numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId(pub i64);

impl std::fmt::Display for InstanceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Reference to a lookup.
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
    /// Token slots of one chunk; absent means one per token.
    pub num_physical_slots: Option<i64>,
    /// Tokens per chunk, if the client asks for another size than the server's default; see [`chunk`].
    pub chunk_tokens: Option<u32>,
    /// Whether the worker learns of the shared pool by the answer; 0.4.6 does not, and pickles. Not on the wire.
    pub takes_pool: bool,
}

impl<'a> EngineDrivenContext<'a> {
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        read_fields!(reader, |value| {
            instance, "instance_id" => value.int()?;
            model_name, "model_name" => value.str()?;
            world_size, "world_size" => value.int()?;
            block_size, "block_size" => value.int()?;
            num_layers, "num_layers" => value.int()?;
            hidden_dim_size, "hidden_dim_size" => value.int()?;
            dtype, "dtype_str" => value.str()?;
            use_mla, "use_mla" => value.bool()?;
            num_physical_slots = None, "num_physical_slots" => value.optional_int()?;
            chunk_tokens = None, "kvtier.chunk_tokens" => chunk::read(value).map(Some)?;
        });
        Ok(Self {
            instance: InstanceId(instance),
            model_name,
            world_size,
            block_size,
            num_layers,
            hidden_dim_size,
            dtype,
            use_mla,
            num_physical_slots,
            chunk_tokens,
            takes_pool: true,
        })
    }

    /// Writes eight fields, or nine with `num_physical_slots`, which releases before 0.5.5 do not have; and the chunk size, if
    /// there is one.
    pub(crate) fn write(&self, with_slots: bool, out: &mut Vec<u8>) {
        let fields = if with_slots { 9 } else { 8 };
        wire::write_map_len(out, fields + usize::from(self.chunk_tokens.is_some()));
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
        chunk::write(out, self.chunk_tokens);
    }
}

/// Appends an array of ints.
pub(crate) fn write_ints(out: &mut Vec<u8>, values: &[i64]) {
    wire::write_array_len(out, values.len());
    for &value in values {
        wire::write_int(out, value);
    }
}
