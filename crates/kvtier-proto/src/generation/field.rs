//! What the fields of the tables are called and what they look like on the wire.

use super::{BlockForm, ContextForm, Field};
use crate::key::{FULL_KEY_FIELDS, KeyForm, OWN_KEY_FIELDS, is_packed};
use crate::wire::{Reader, is_int};

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

impl KeyForm {
    /// Whether a key with `fields` fields may be of this form. Full keys of 0.5.3 and 0.5.4 have no more
    /// fields than salted ones; a count that no release sends proves nothing.
    fn may_be(self, fields: usize, key: &[u8]) -> bool {
        match fields {
            7 => self == Self::Unsalted,
            8 => matches!(self, Self::Salted | Self::Full),
            // Eleven fields: only kvtier's own clients ask for a chunk size.
            FULL_KEY_FIELDS | OWN_KEY_FIELDS => match self {
                Self::Unsalted | Self::Salted => false,
                Self::Full => !is_packed(key),
                Self::Packed => is_packed(key),
            },
            _ => true,
        }
    }
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
