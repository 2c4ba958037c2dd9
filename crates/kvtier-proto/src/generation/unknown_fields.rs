//! Fields that no served release sends: decoding skips them, and they show a client of another release.

use super::{Field, OperationSpec};
use crate::chunk::CHUNK_TOKENS;
use crate::wire::{DecodeError, Reader, name_shown};

/// Most bytes of a request that is searched: it may be searched on the thread that serves all connections.
pub const MAX_SEARCHED_BYTES: usize = 256 << 10;

const KEY: &[&str] = &[
    "model_name",
    "world_size",
    "worker_id",
    CHUNK_TOKENS,
    "token_ids",
    "token_bytes",
    "start",
    "end",
    "request_id",
    "cache_salt",
    "request_configs",
    "num_kv_readers",
];

const ENGINE_DRIVEN_CONTEXT: &[&str] = &[
    "instance_id",
    "model_name",
    "world_size",
    "block_size",
    "num_layers",
    "hidden_dim_size",
    "dtype_str",
    "use_mla",
    "num_physical_slots",
    "group_layouts",
    CHUNK_TOKENS,
];

impl Field {
    /// The names of its map's fields; empty for a field that is no map, or one that may have any.
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Key(_) => KEY,
            Self::EngineDrivenContext { .. } => ENGINE_DRIVEN_CONTEXT,
            _ => &[],
        }
    }
}

impl OperationSpec {
    /// The first field of a request that no served release sends, with its name as far as it is shown. `None` also for a request that is too long to be searched, or
    /// cannot be decoded.
    #[must_use]
    pub fn unknown_field<'a>(
        &self,
        payloads: impl IntoIterator<Item = &'a [u8]>,
    ) -> Option<(Field, &'a str)> {
        let mut fields = self.payloads.iter().zip(payloads);
        fields.find_map(|(field, payload)| {
            let names = field.names();
            let is_searched = !names.is_empty() && payload.len() <= MAX_SEARCHED_BYTES;
            let unknown = is_searched.then(|| unknown_name(names, payload));
            unknown?.ok()?.map(|name| (*field, name_shown(name)))
        })
    }
}

fn unknown_name<'a>(names: &[&str], payload: &'a [u8]) -> Result<Option<&'a str>, DecodeError> {
    let mut unknown = None;
    Reader::new(payload).map(|name, value| {
        if !names.contains(&name) {
            unknown.get_or_insert(name);
        }
        value.skip()
    })?;
    Ok(unknown)
}
