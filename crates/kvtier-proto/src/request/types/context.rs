//! Registration of a worker that copies by itself.

use super::InstanceId;
use crate::chunk;
use crate::inline::{InlineForm, MAX_GROUPS};
use crate::wire::fields::read_fields;
use crate::wire::{self, DecodeError, Reader, WireValue as _, record};

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
    /// Groups of layers with objects of their own; empty for a worker of one group, absent before 0.5.7.
    pub groups: Option<Vec<GroupLayout<'a>>>,
    /// Whether the worker learns of the shared pool by the answer; 0.4.6 does not, and pickles. Not on the wire.
    pub takes_pool: bool,
}

impl<'a> EngineDrivenContext<'a> {
    /// How the worker sends and expects chunks without the pool.
    #[must_use]
    pub fn inline_form(&self) -> InlineForm {
        match self.groups {
            Some(_) => InlineForm::Envelope,
            None => InlineForm::Pickle,
        }
    }

    /// Reads the fields of any release; groups are there, if only as an empty list.
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
            groups = Vec::new(), "group_layouts" =>
                value.short_array_of(MAX_GROUPS, GroupLayout::read)?;
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
            groups: Some(groups),
            takes_pool: true,
        })
    }

    /// Writes eight fields, or nine with `num_physical_slots`, which releases before 0.5.5 do not have; and the groups and the
    /// chunk size, if there are any.
    pub(crate) fn write(&self, with_slots: bool, out: &mut Vec<u8>) {
        let optional = [
            with_slots,
            self.groups.is_some(),
            self.chunk_tokens.is_some(),
        ];
        let optional = optional.into_iter().filter(|is_there| *is_there);
        wire::write_map_len(out, 8 + optional.count());
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
        if let Some(groups) = &self.groups {
            wire::write_str(out, "group_layouts");
            groups.write(out);
        }
        chunk::write(out, self.chunk_tokens);
    }
}

record! {
    /// A group of layers whose chunks are objects of their own (LMCache 0.5.7).
    pub struct GroupLayout<'a> {
        /// Layers of the group.
        pub num_layers: i64 = "num_layers";
        /// Values of one token in one plane of one layer.
        pub hidden_dim_size: i64 = "hidden_dim_size";
        /// Name of the values' type.
        pub dtype: &'a str = "dtype_str";
        /// Tokens in one block of the group.
        pub tokens_per_block: i64 = "tokens_per_block";
        /// Tokens of a chunk that are stored, its last ones; 0 for all.
        pub window_tokens: i64 = "window_tokens", default 0;
        /// Planes: 2 for keys and values, 1 if they share one; 0 as the context says.
        pub kv_size: i64 = "kv_size", default 0;
        /// Chunks needed at the end of a prefix; 0 for all.
        pub window_chunks: i64 = "window_chunks", default 0;
        /// Whether the pages hold states of the layers instead of KV of tokens.
        pub recurrent: bool = "recurrent", default false;
    }
}
