//! Responses to bytes.

use super::{
    EventBatch, EventRecord, MatchedSegment, PrepareRetrieve, PrepareStore, Response, Slot,
};
use crate::request::write_ints;
use crate::wire;

impl Response<'_> {
    /// The third frame of the reply; none for a response of nothing.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        match self {
            Self::Nothing => return None,
            Self::Int(value) => wire::write_int(&mut out, *value),
            Self::Bool(value) => wire::write_bool(&mut out, *value),
            Self::Text(text) => wire::write_str(&mut out, text),
            Self::Texts(texts) => {
                wire::write_array_len(&mut out, texts.len());
                for text in texts {
                    wire::write_str(&mut out, text);
                }
            }
            Self::Ints(values) => write_ints(&mut out, values),
            Self::Transfer(transfer) => {
                wire::write_array_len(&mut out, 2);
                wire::write_bin(&mut out, &transfer.event_handle);
                wire::write_bool(&mut out, transfer.ok);
            }
            Self::EngineDriven(pool) => {
                wire::write_map_len(&mut out, 2);
                wire::write_str(&mut out, "shm_name");
                wire::write_str(&mut out, &pool.shm_name);
                wire::write_str(&mut out, "pool_size");
                wire::write_uint(&mut out, pool.pool_size);
            }
            Self::PrepareStore(prepared) => write_prepare_store(&mut out, prepared),
            Self::PrepareRetrieve(prepared) => write_prepare_retrieve(&mut out, prepared),
            Self::EventBatch(batch) => write_batch(&mut out, batch),
            Self::UnifiedLookup(found) => {
                wire::write_map_len(&mut out, 3);
                wire::write_str(&mut out, "prefix_coverage_tokens");
                wire::write_int(&mut out, found.prefix_coverage_tokens);
                wire::write_str(&mut out, "non_prefix_segments");
                write_segments(&mut out, &found.non_prefix_segments);
                wire::write_str(&mut out, "segmented_prefix_segments");
                write_segments(&mut out, &found.segmented_prefix_segments);
            }
            Self::Handshake {
                version,
                compatible,
            } => {
                wire::write_array_len(&mut out, 2);
                wire::write_int(&mut out, *version);
                wire::write_bool(&mut out, *compatible);
            }
            Self::Addresses(addresses) => {
                wire::write_array_len(&mut out, addresses.len());
                for address in addresses {
                    wire::write_map_len(&mut out, 2);
                    wire::write_str(&mut out, "offset");
                    wire::write_int(&mut out, address.offset);
                    wire::write_str(&mut out, "size");
                    wire::write_uint(&mut out, address.size);
                }
            }
            Self::ModuleCall(answer) => {
                wire::write_map_len(&mut out, 3);
                wire::write_str(&mut out, "success");
                wire::write_bool(&mut out, answer.success);
                wire::write_str(&mut out, "payload");
                wire::write_bin(&mut out, &answer.payload);
                wire::write_str(&mut out, "error");
                wire::write_str(&mut out, &answer.error);
            }
        }
        Some(out)
    }
}

/// The third frame of a prepare_retrieve hit without a shared pool, its data written in place.
///
/// `fill` appends the pickled chunks to the frame, so that bytes of the cache are copied once; about
/// `data_len` bytes are reserved for it. Fails when `fill` does, or when it writes 4 GiB or more, which
/// no frame can hold: the answer is a miss then.
pub fn prepare_retrieve_hit<E>(
    data_len: usize,
    fill: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
) -> Result<Option<Vec<u8>>, E> {
    let mut out = Vec::with_capacity(data_len + 64);
    wire::write_map_len(&mut out, 3);
    wire::write_str(&mut out, "success");
    wire::write_bool(&mut out, true);
    wire::write_str(&mut out, "data");
    // The length is known when the data is written; readers take it in any width.
    out.push(0xc6);
    let length_at = out.len();
    out.extend_from_slice(&[0; 4]);
    let data_at = out.len();
    fill(&mut out)?;
    let Ok(len) = u32::try_from(out.len() - data_at) else {
        return Ok(None);
    };
    out[length_at..data_at].copy_from_slice(&len.to_be_bytes());
    wire::write_str(&mut out, "context");
    wire::write_map_len(&mut out, 0);
    Ok(Some(out))
}

fn write_slots(out: &mut Vec<u8>, slots: &[Slot<'_>]) {
    wire::write_str(out, "slots");
    wire::write_array_len(out, slots.len());
    for slot in slots {
        wire::write_map_len(out, 4);
        wire::write_str(out, "offset");
        wire::write_uint(out, slot.offset);
        wire::write_str(out, "length");
        wire::write_uint(out, slot.length);
        wire::write_str(out, "shape");
        write_uints(out, &slot.shape);
        wire::write_str(out, "dtype");
        wire::write_str(out, &slot.dtype);
    }
}

fn write_prepare_store(out: &mut Vec<u8>, prepared: &PrepareStore<'_>) {
    wire::write_map_len(out, 1);
    wire::write_str(out, "context");
    let Some(target) = &prepared.target else {
        wire::write_map_len(out, 0);
        return;
    };
    wire::write_map_len(out, 2);
    write_slots(out, &target.slots);
    wire::write_str(out, "chunk_indices");
    write_uints(out, &target.chunk_indices);
}

fn write_prepare_retrieve(out: &mut Vec<u8>, prepared: &PrepareRetrieve<'_>) {
    wire::write_map_len(out, 3);
    wire::write_str(out, "success");
    wire::write_bool(out, prepared.success);
    wire::write_str(out, "data");
    wire::write_bin(out, &prepared.data);
    wire::write_str(out, "context");
    match &prepared.slots {
        None => wire::write_map_len(out, 0),
        Some(slots) => {
            wire::write_map_len(out, 1);
            write_slots(out, slots);
        }
    }
}

fn write_batch(out: &mut Vec<u8>, batch: &EventBatch<'_>) {
    wire::write_map_len(out, 5);
    wire::write_str(out, "enabled");
    wire::write_bool(out, batch.enabled);
    wire::write_str(out, "incarnation");
    wire::write_int(out, batch.incarnation);
    wire::write_str(out, "next_cursor");
    wire::write_int(out, batch.next_cursor);
    wire::write_str(out, "lost");
    wire::write_bool(out, batch.lost);
    wire::write_str(out, "events");
    wire::write_array_len(out, batch.events.len());
    for event in &batch.events {
        write_event(out, event);
    }
}

fn write_event(out: &mut Vec<u8>, event: &EventRecord<'_>) {
    wire::write_map_len(out, 7);
    wire::write_str(out, "seq");
    wire::write_int(out, event.seq);
    wire::write_str(out, "kind");
    wire::write_str(out, &event.kind);
    wire::write_str(out, "medium");
    wire::write_str(out, &event.medium);
    wire::write_str(out, "model_name");
    wire::write_str(out, &event.model_name);
    wire::write_str(out, "block_hashes");
    wire::write_array_len(out, event.block_hashes.len());
    for hash in &event.block_hashes {
        wire::write_bin(out, hash);
    }
    wire::write_str(out, "parent_block_hash");
    match &event.parent_block_hash {
        Some(hash) => wire::write_bin(out, hash),
        None => wire::write_nil(out),
    }
    wire::write_str(out, "token_ids");
    wire::write_tokens(out, &event.token_ids);
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
