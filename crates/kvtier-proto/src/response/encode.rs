//! Responses to bytes.

use super::{PrepareRetrieve, PrepareStore, Response};
use crate::inline::{ChunksToWrite, InlineForm};
use crate::pickle::WriteError;
use crate::wire::{self, WireValue as _};

/// Encodes the third frame of a reply.
pub(super) fn encode(response: &Response<'_>) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    match response {
        Response::Nothing => return None,
        Response::Int(value) => wire::write_int(&mut out, *value),
        Response::Bool(value) => wire::write_bool(&mut out, *value),
        Response::Text(text) => wire::write_str(&mut out, text),
        Response::Texts(texts) => texts.write(&mut out),
        Response::Ints(values) => values.write(&mut out),
        Response::Bits(bits) => wire::write_bin(&mut out, bits),
        Response::Transfer(transfer) => {
            wire::write_array_len(&mut out, 2);
            wire::write_bin(&mut out, &transfer.event_handle);
            wire::write_bool(&mut out, transfer.ok);
        }
        Response::EngineDriven(pool) => pool.write(&mut out),
        Response::PrepareStore(prepared) => write_prepare_store(&mut out, prepared),
        Response::PrepareRetrieve(prepared) => write_prepare_retrieve(&mut out, prepared),
        Response::EventBatch(batch) => batch.write(&mut out),
        Response::UnifiedLookup(found) => found.write(&mut out),
        Response::Handshake {
            version,
            compatible,
        } => {
            wire::write_array_len(&mut out, 2);
            wire::write_int(&mut out, *version);
            wire::write_bool(&mut out, *compatible);
        }
        Response::Addresses(addresses) => addresses.write(&mut out),
        Response::ModuleCall(answer) => answer.write(&mut out),
    }
    Some(out)
}

/// The third frame of a prepare_retrieve hit without a shared pool, but for the bytes of its chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InlineHit {
    /// All other bytes.
    pub text: Vec<u8>,
    /// Positions in `text` that the bytes of each chunk belong at.
    pub places: Vec<usize>,
}

impl InlineHit {
    /// The frame for the chunks of each group; `None` if it would be larger than a frame can be, 4 GiB.
    ///
    /// # Errors
    /// Tensors that cannot be sent in this form.
    pub fn new(form: InlineForm, groups: &[ChunksToWrite<'_>]) -> Result<Option<Self>, WriteError> {
        let mut text = Vec::new();
        wire::write_map_len(&mut text, 3);
        wire::write_str(&mut text, "success");
        wire::write_bool(&mut text, true);
        wire::write_str(&mut text, "data");
        // The length is known when the data is written; readers take it in any width.
        text.push(0xc6);
        let length_at = text.len();
        text.extend_from_slice(&[0; 4]);
        let data_at = text.len();
        let Some((places, size)) = form.write_around(&mut text, groups)? else {
            return Ok(None);
        };
        text[length_at..data_at].copy_from_slice(&size.to_be_bytes());
        wire::write_str(&mut text, "context");
        wire::write_map_len(&mut text, 0);
        Ok(Some(Self { text, places }))
    }
}

fn write_prepare_store(out: &mut Vec<u8>, prepared: &PrepareStore<'_>) {
    wire::write_map_len(out, 1);
    wire::write_str(out, "context");
    let Some(target) = &prepared.target else {
        wire::write_map_len(out, 0);
        return;
    };
    wire::write_map_len(out, 2 + usize::from(target.group_ids.is_some()));
    wire::write_str(out, "slots");
    target.slots.write(out);
    wire::write_str(out, "chunk_indices");
    target.chunk_indices.write(out);
    if let Some(group_ids) = &target.group_ids {
        wire::write_str(out, "group_ids");
        group_ids.write(out);
    }
}

fn write_prepare_retrieve(out: &mut Vec<u8>, prepared: &PrepareRetrieve<'_>) {
    wire::write_map_len(out, 3);
    wire::write_str(out, "success");
    wire::write_bool(out, prepared.success);
    wire::write_str(out, "data");
    wire::write_bin(out, &prepared.data);
    wire::write_str(out, "context");
    let Some(slots) = &prepared.slots else {
        wire::write_map_len(out, 0);
        return;
    };
    wire::write_map_len(out, if prepared.groups.is_some() { 3 } else { 1 });
    wire::write_str(out, "slots");
    slots.write(out);
    if let Some(groups) = &prepared.groups {
        wire::write_str(out, "group_ids");
        groups.group_ids.write(out);
        wire::write_str(out, "chunk_indices");
        groups.chunk_indices.write(out);
    }
}
