//! The fields of the tables: what they are called and what they look like on the wire.

use crate::key::KeyForm;
use crate::wire::{Reader, is_int};

macro_rules! fields {
    ($($(#[$doc:meta])* $field:ident $(($form:ty))? = $name:literal,)*) => {
        /// A payload frame: its meaning and its form.
        ///
        /// "int" and "bool" are lenient here, see the table of formats in the crate's documentation.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Field {
            $($(#[$doc])* $field $(($form))?,)*
        }

        impl Field {
            /// The name of the payload, as LMCache 0.5.7 calls it.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$field { .. } => $name,)*
                }
            }
        }
    };
}

fields! {
    /// The key.
    Key(KeyForm) = "key",
    /// An int: the worker.
    InstanceId = "instance_id",
    /// An int or nil: the worker, or nil for a caller that is no worker.
    OptionalInstanceId = "instance_id",
    /// Block ids.
    BlockIds(BlockForm) = "block_ids",
    /// Bytes: a device event.
    EventHandle = "event_ipc_handle",
    /// An int: tokens not to write.
    SkipTokens = "skip_first_n_tokens",
    /// An int: tensor-parallel size.
    TpSize = "tp_size",
    /// A text: the engine's request.
    RequestId = "request_id",
    /// An int: the number a lookup returned.
    JobId = "job_id",
    /// An array of pairs of ints: further token ranges to release.
    ExtraRanges = "extra_ranges",
    /// An array of arrays of ints: per group, the chunks that the worker will not write.
    SkippedChunks = "skipped_chunks",
    /// An int: tokens that a chunk has to be a multiple of.
    ChunkAlignment = "required_chunk_alignment",
    /// A float or int: seconds.
    Timeout = "timeout",
    /// A bool: leases do not protect.
    Force = "force",
    /// Bytes: pickled chunks.
    Data = "data",
    /// An array of extension values of type 1: tensors, pickled up to 0.5.5, described in 0.5.6.
    Tensors = "kv_cache",
    /// A text: the model.
    ModelName = "model_name",
    /// An int: workers that share the model's KV.
    WorldSize = "world_size",
    /// A text: the engine.
    EngineType = "engine_type",
    /// A map: layout hints.
    LayoutHints = "layout_hints",
    /// An array of maps: groups of layers.
    GroupInfos = "engine_group_infos",
    /// A map: geometry of a worker that copies by itself.
    EngineDrivenContext(ContextForm) = "payload",
    /// An array of maps: block allocations.
    AllocationRecords = "records",
    /// An int: first event wanted.
    Cursor = "cursor",
    /// An int: most events in a batch.
    MaxEvents = "max_events",
    /// An int: head size.
    HeadSize = "head_size",
    /// A bool: NeoX rotation.
    IsNeoxStyle = "is_neox_style",
    /// An array of ints: table of each group.
    GroupToCache = "group_to_cache",
    /// An array of arrays of ints: rotated range of each group.
    GroupRot = "group_rot",
    /// An array of ints: head size of each group.
    GroupHeadSize = "group_head_size",
    /// A text: KV quantisation.
    KvQuant = "kv_quant",
    /// An array of maps: matched segments.
    MatchedSegments = "match_results",
    /// An int: segments to keep in front.
    KeepPrefix = "keep_prefix",
    /// An int: milliseconds.
    BudgetMs = "budget_ms",
    /// An int: version of the blending protocol.
    ClientVersion = "client_version",
    /// An array of maps: object keys.
    ObjectKeys = "keys",
    /// A map from object group to its layout.
    LayoutDescriptors = "group_layout_descs",
    /// An int: what a lookup between servers returned.
    TaskId = "task_id",
    /// A map: method and payload of a plug-in call.
    ModuleCall = "request",
}

impl Field {
    /// Whether a real client may have sent `payload` for this field, judged by its first bytes.
    ///
    /// Stricter than decoding: it distinguishes forms that decoding would both accept, and expects ints where
    /// decoding is lenient. Only used to choose between rows that fit otherwise.
    #[must_use]
    pub fn looks_like(self, payload: &[u8]) -> bool {
        let mut reader = Reader::new(payload);
        let Ok(marker) = reader.peek() else {
            return false;
        };
        let is_array = matches!(marker, 0x90..=0x9f | 0xdc | 0xdd);
        match self {
            Self::Key(form) => reader
                .map_len()
                .is_ok_and(|fields| form.may_be(fields, payload)),
            Self::BlockIds(form) => is_array && form.may_be(&mut reader),
            Self::OptionalInstanceId => is_int(marker) || marker == 0xc0,
            Self::InstanceId
            | Self::SkipTokens
            | Self::TpSize
            | Self::JobId
            | Self::ChunkAlignment
            | Self::WorldSize
            | Self::Cursor
            | Self::MaxEvents
            | Self::HeadSize
            | Self::KeepPrefix
            | Self::BudgetMs
            | Self::ClientVersion
            | Self::TaskId => is_int(marker),
            Self::Timeout => is_int(marker) || matches!(marker, 0xca | 0xcb),
            Self::Force | Self::IsNeoxStyle => matches!(marker, 0xc2 | 0xc3),
            Self::EventHandle | Self::Data => matches!(marker, 0xc4..=0xc6),
            Self::RequestId | Self::ModelName | Self::EngineType | Self::KvQuant => {
                matches!(marker, 0xa0..=0xbf | 0xd9..=0xdb)
            }
            Self::EngineDrivenContext(form) => {
                let mut has_groups = false;
                let names = reader.map(|name, value| {
                    has_groups |= name == "group_layouts";
                    value.skip()
                });
                names.is_ok() && has_groups == (form == ContextForm::Groups)
            }
            Self::LayoutHints | Self::LayoutDescriptors | Self::ModuleCall => {
                matches!(marker, 0x80..=0x8f | 0xde | 0xdf)
            }
            Self::Tensors
            | Self::GroupInfos
            | Self::AllocationRecords
            | Self::GroupToCache
            | Self::GroupRot
            | Self::GroupHeadSize
            | Self::MatchedSegments
            | Self::ExtraRanges
            | Self::SkippedChunks
            | Self::ObjectKeys => is_array,
        }
    }
}

/// How block ids are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockForm {
    /// An array of ints, for one group: up to 0.4.6.
    Flat,
    /// An array of arrays of ints, one per group: from 0.4.7.
    Grouped,
}

impl BlockForm {
    /// Whether an array that starts like this may be of this form; an empty one may be of either.
    fn may_be(self, reader: &mut Reader<'_>) -> bool {
        match reader.array_len() {
            Ok(0) => true,
            Ok(_) => {
                let flat = reader.peek().is_ok_and(is_int);
                flat == (self == Self::Flat)
            }
            Err(_) => false,
        }
    }
}

/// The fields that the registration of a worker that copies by itself has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContextForm {
    /// Eight: up to 0.5.2.
    Bare,
    /// With `num_physical_slots`, from 0.5.5.
    Slots,
    /// With `group_layouts` too, from 0.5.7.
    Groups,
}
