//! The fields of the tables: what they are called and what they look like on the wire.

use crate::key::KeyForm;
use crate::wire::{Reader, is_int};

/// A payload frame: its meaning and its form.
///
/// "int" and "bool" are lenient here, see the table of formats in the crate's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Field {
    /// The key.
    Key(KeyForm),
    /// An int: the worker.
    InstanceId,
    /// An int or nil: the worker, or nil for a caller that is no worker.
    OptionalInstanceId,
    /// Block ids.
    BlockIds(BlockForm),
    /// Bytes: a device event.
    EventHandle,
    /// An int: tokens not to write.
    SkipTokens,
    /// An int: tensor-parallel size.
    TpSize,
    /// A text: the engine's request.
    RequestId,
    /// An int: the number a lookup returned.
    JobId,
    /// An array of pairs of ints: further token ranges to release.
    ExtraRanges,
    /// An array of arrays of ints: per group, the chunks that the worker will not write.
    SkippedChunks,
    /// An int: tokens that a chunk has to be a multiple of.
    ChunkAlignment,
    /// A float or int: seconds.
    Timeout,
    /// A bool: leases do not protect.
    Force,
    /// Bytes: pickled chunks.
    Data,
    /// An array of extension values of type 1: tensors, pickled up to 0.5.5, described in 0.5.6.
    Tensors,
    /// A text: the model.
    ModelName,
    /// An int: workers that share the model's KV.
    WorldSize,
    /// A text: the engine.
    EngineType,
    /// A map: layout hints.
    LayoutHints,
    /// An array of maps: groups of layers.
    GroupInfos,
    /// A map: geometry of a worker that copies by itself.
    EngineDrivenContext(ContextForm),
    /// An array of maps: block allocations.
    AllocationRecords,
    /// An int: first event wanted.
    Cursor,
    /// An int: most events in a batch.
    MaxEvents,
    /// An int: head size.
    HeadSize,
    /// A bool: NeoX rotation.
    IsNeoxStyle,
    /// An array of ints: table of each group.
    GroupToCache,
    /// An array of arrays of ints: rotated range of each group.
    GroupRot,
    /// An array of ints: head size of each group.
    GroupHeadSize,
    /// A text: KV quantisation.
    KvQuant,
    /// An array of maps: matched segments.
    MatchedSegments,
    /// An int: segments to keep in front.
    KeepPrefix,
    /// An int: milliseconds.
    BudgetMs,
    /// An int: version of the blending protocol.
    ClientVersion,
    /// An array of maps: object keys.
    ObjectKeys,
    /// A map from object group to its layout.
    LayoutDescriptors,
    /// An int: what a lookup between servers returned.
    TaskId,
    /// A map: method and payload of a plug-in call.
    ModuleCall,
}

impl Field {
    /// The name of the payload, as LMCache 0.5.7 calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Key(_) => "key",
            Self::InstanceId | Self::OptionalInstanceId => "instance_id",
            Self::BlockIds(_) => "block_ids",
            Self::EventHandle => "event_ipc_handle",
            Self::SkipTokens => "skip_first_n_tokens",
            Self::TpSize => "tp_size",
            Self::RequestId => "request_id",
            Self::JobId => "job_id",
            Self::ExtraRanges => "extra_ranges",
            Self::SkippedChunks => "skipped_chunks",
            Self::ChunkAlignment => "required_chunk_alignment",
            Self::Timeout => "timeout",
            Self::Force => "force",
            Self::Data => "data",
            Self::Tensors => "kv_cache",
            Self::ModelName => "model_name",
            Self::WorldSize => "world_size",
            Self::EngineType => "engine_type",
            Self::LayoutHints => "layout_hints",
            Self::GroupInfos => "engine_group_infos",
            Self::EngineDrivenContext(_) => "payload",
            Self::AllocationRecords => "records",
            Self::Cursor => "cursor",
            Self::MaxEvents => "max_events",
            Self::HeadSize => "head_size",
            Self::IsNeoxStyle => "is_neox_style",
            Self::GroupToCache => "group_to_cache",
            Self::GroupRot => "group_rot",
            Self::GroupHeadSize => "group_head_size",
            Self::KvQuant => "kv_quant",
            Self::MatchedSegments => "match_results",
            Self::KeepPrefix => "keep_prefix",
            Self::BudgetMs => "budget_ms",
            Self::ClientVersion => "client_version",
            Self::ObjectKeys => "keys",
            Self::LayoutDescriptors => "group_layout_descs",
            Self::TaskId => "task_id",
            Self::ModuleCall => "request",
        }
    }

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
