//! Responses to bytes.

use std::borrow::Cow;

use super::{
    ChunkSlot, EventBatch, EventRecord, MatchedSegment, PrepareRetrieve, PrepareStore, Response,
};
use crate::inline::{ChunksToWrite, InlineForm};
use crate::pickle::WriteError;
use crate::request::write_ints;
use crate::wire;
use crate::wire::fields::write_fields;

/// Encodes the third frame of a reply.
pub(super) fn encode(response: &Response<'_>) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    match response {
        Response::Nothing => return None,
        Response::Int(value) => wire::write_int(&mut out, *value),
        Response::Bool(value) => wire::write_bool(&mut out, *value),
        Response::Text(text) => wire::write_str(&mut out, text),
        Response::Texts(texts) => {
            wire::write_array_len(&mut out, texts.len());
            for text in texts {
                wire::write_str(&mut out, text);
            }
        }
        Response::Ints(values) => write_ints(&mut out, values),
        Response::Bits(bits) => wire::write_bin(&mut out, bits),
        Response::Transfer(transfer) => {
            wire::write_array_len(&mut out, 2);
            wire::write_bin(&mut out, &transfer.event_handle);
            wire::write_bool(&mut out, transfer.ok);
        }
        Response::EngineDriven(pool) => {
            wire::write_map_len(&mut out, 2 + usize::from(pool.null_block_id.is_some()));
            wire::write_str(&mut out, "shm_name");
            wire::write_str(&mut out, &pool.shm_name);
            wire::write_str(&mut out, "pool_size");
            wire::write_uint(&mut out, pool.pool_size);
            if let Some(null_block_id) = pool.null_block_id {
                wire::write_str(&mut out, "null_block_id");
                wire::write_int(&mut out, null_block_id);
            }
        }
        Response::PrepareStore(prepared) => write_prepare_store(&mut out, prepared),
        Response::PrepareRetrieve(prepared) => write_prepare_retrieve(&mut out, prepared),
        Response::EventBatch(batch) => write_batch(&mut out, batch),
        Response::UnifiedLookup(found) => {
            write_fields!(&mut out, {
                "prefix_coverage_tokens", wire::write_int, found.prefix_coverage_tokens;
                "non_prefix_segments", write_segments, &found.non_prefix_segments;
                "segmented_prefix_segments", write_segments, &found.segmented_prefix_segments;
            });
        }
        Response::Handshake {
            version,
            compatible,
        } => {
            wire::write_array_len(&mut out, 2);
            wire::write_int(&mut out, *version);
            wire::write_bool(&mut out, *compatible);
        }
        Response::Addresses(addresses) => {
            wire::write_array_len(&mut out, addresses.len());
            for address in addresses {
                write_fields!(&mut out, {
                    "offset", wire::write_int, address.offset;
                    "size", wire::write_uint, address.size;
                });
            }
        }
        Response::ModuleCall(answer) => {
            write_fields!(&mut out, {
                "success", wire::write_bool, answer.success;
                "payload", wire::write_bin, &answer.payload;
                "error", wire::write_str, &answer.error;
            });
        }
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

fn write_slots(out: &mut Vec<u8>, slots: &[ChunkSlot<'_>]) {
    wire::write_str(out, "slots");
    wire::write_array_len(out, slots.len());
    for slot in slots {
        write_fields!(out, {
            "offset", wire::write_uint, slot.offset;
            "length", wire::write_uint, slot.length;
            "shape", write_uints, &slot.shape;
            "dtype", wire::write_str, &slot.dtype;
        });
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
    write_slots(out, &target.slots);
    wire::write_str(out, "chunk_indices");
    write_uints(out, &target.chunk_indices);
    if let Some(group_ids) = &target.group_ids {
        wire::write_str(out, "group_ids");
        write_uints(out, group_ids);
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
    write_slots(out, slots);
    if let Some(groups) = &prepared.groups {
        wire::write_str(out, "group_ids");
        write_uints(out, &groups.group_ids);
        wire::write_str(out, "chunk_indices");
        write_uints(out, &groups.chunk_indices);
    }
}

fn write_batch(out: &mut Vec<u8>, batch: &EventBatch<'_>) {
    write_fields!(out, {
        "enabled", wire::write_bool, batch.enabled;
        "incarnation", wire::write_int, batch.incarnation;
        "next_cursor", wire::write_int, batch.next_cursor;
        "lost", wire::write_bool, batch.lost;
        "events", wire::write_array_len, batch.events.len();
    });
    for event in &batch.events {
        write_event(out, event);
    }
}

fn write_event(out: &mut Vec<u8>, event: &EventRecord<'_>) {
    write_fields!(out, {
        "seq", wire::write_int, event.seq;
        "kind", wire::write_str, &event.kind;
        "medium", wire::write_str, &event.medium;
        "model_name", wire::write_str, &event.model_name;
        "block_hashes", write_bins, &event.block_hashes;
        "parent_block_hash", write_optional_bin, event.parent_block_hash.as_deref();
        "token_ids", wire::write_tokens, &event.token_ids;
    });
}

fn write_bins(out: &mut Vec<u8>, values: &[Cow<'_, [u8]>]) {
    wire::write_array_len(out, values.len());
    for value in values {
        wire::write_bin(out, value);
    }
}

fn write_optional_bin(out: &mut Vec<u8>, value: Option<&[u8]>) {
    match value {
        Some(value) => wire::write_bin(out, value),
        None => wire::write_nil(out),
    }
}

fn write_segments(out: &mut Vec<u8>, segments: &[MatchedSegment<'_>]) {
    wire::write_array_len(out, segments.len());
    for segment in segments {
        segment.write(out);
    }
}

fn write_uints(out: &mut Vec<u8>, values: &[u64]) {
    wire::write_array_len(out, values.len());
    for &value in values {
        wire::write_uint(out, value);
    }
}
