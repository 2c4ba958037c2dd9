//! Bytes to responses, for clients.

use super::{
    ChannelAddress, ChunkSlot, EngineDriven, EventBatch, EventRecord, MatchedSegment, ModuleCall,
    PrepareRetrieve, PrepareStore, Response, ResponseKind, SlotGroups, StoreTarget, Transfer,
    UnifiedLookup,
};
use crate::lenient;
use crate::wire::fields::read_fields;
use crate::wire::{self, DecodeError, InField, Reader};

/// Fewest bytes of a slot: four names and four values.
const MIN_SLOT: usize = 30;
/// Fewest bytes of an event: the names of its required fields.
const MIN_EVENT: usize = 40;
/// Fewest bytes of an address: two names and two values.
const MIN_ADDRESS: usize = 15;

/// Reads a response of a kind.
pub(super) fn read<'a>(
    kind: ResponseKind,
    reader: &mut Reader<'a>,
) -> Result<Response<'a>, DecodeError> {
    Ok(match kind {
        ResponseKind::Nothing => {
            return Err(DecodeError::new("this operation answers nothing, or nil"));
        }
        ResponseKind::Int => Response::Int(lenient::int(reader)?),
        ResponseKind::OptionalInt => Response::Int(reader.int()?),
        ResponseKind::Bool => Response::Bool(lenient::bool(reader)?),
        ResponseKind::Text => Response::Text(reader.str()?.into()),
        ResponseKind::Texts => Response::Texts(reader.array_of(1, |text| Ok(text.str()?.into()))?),
        ResponseKind::Ints => Response::Ints(reader.ints()?),
        ResponseKind::Bits => Response::Bits(reader.bin()?.into()),
        ResponseKind::Transfer => {
            pair(reader)?;
            Response::Transfer(Transfer {
                event_handle: reader.bin().at_index(0)?.into(),
                ok: reader.bool().at_index(1)?,
            })
        }
        ResponseKind::EngineDriven => Response::EngineDriven(read_pool(reader)?),
        ResponseKind::PrepareStore => Response::PrepareStore(read_prepare_store(reader)?),
        ResponseKind::PrepareRetrieve => Response::PrepareRetrieve(read_prepare_retrieve(reader)?),
        ResponseKind::EventBatch => Response::EventBatch(read_batch(reader)?),
        ResponseKind::UnifiedLookup => Response::UnifiedLookup(read_unified(reader)?),
        ResponseKind::Handshake => {
            pair(reader)?;
            Response::Handshake {
                version: reader.int().at_index(0)?,
                compatible: reader.bool().at_index(1)?,
            }
        }
        ResponseKind::Addresses => Response::Addresses(reader.array_of(MIN_ADDRESS, read_address)?),
        ResponseKind::ModuleCall => Response::ModuleCall(read_module_call(reader)?),
    })
}

fn pair(reader: &mut Reader<'_>) -> Result<(), DecodeError> {
    match reader.array_len()? {
        2 => Ok(()),
        len => Err(DecodeError::new(format!(
            "expected an array of 2 values, found {len}"
        ))),
    }
}

fn read_pool<'a>(reader: &mut Reader<'a>) -> Result<EngineDriven<'a>, DecodeError> {
    read_fields!(reader, |value| {
        shm_name, "shm_name" => value.str()?;
        pool_size, "pool_size" => value.int()?;
        null_block_id = None, "null_block_id" => value.int().map(Some)?;
    });
    Ok(EngineDriven {
        shm_name: shm_name.into(),
        pool_size,
        null_block_id,
    })
}

fn read_slot<'a>(reader: &mut Reader<'a>) -> Result<ChunkSlot<'a>, DecodeError> {
    read_fields!(reader, |value| {
        offset, "offset" => value.int()?;
        length, "length" => value.int()?;
        shape, "shape" => value.ints()?;
        dtype, "dtype" => value.str()?;
    });
    Ok(ChunkSlot {
        offset,
        length,
        shape: shape.into(),
        dtype: dtype.into(),
    })
}

/// What a context map may hold; a context without a list of slots is one without a shared pool.
#[derive(Default)]
struct Context<'a> {
    slots: Option<Vec<ChunkSlot<'a>>>,
    chunk_indices: Vec<u64>,
    group_ids: Option<Vec<u64>>,
}

fn read_context<'a>(reader: &mut Reader<'a>) -> Result<Context<'a>, DecodeError> {
    let mut context = Context::default();
    reader.map(|name, value| {
        match name {
            "slots" if is_array(value)? => {
                context.slots = Some(value.array_of(MIN_SLOT, read_slot)?);
            }
            "chunk_indices" if is_array(value)? => context.chunk_indices = value.ints()?,
            "group_ids" if is_array(value)? => context.group_ids = Some(value.ints()?),
            _ => value.skip()?,
        }
        Ok(())
    })?;
    Ok(context)
}

fn is_array(reader: &Reader<'_>) -> Result<bool, DecodeError> {
    Ok(matches!(reader.peek()?, 0x90..=0x9f | 0xdc | 0xdd))
}

fn read_prepare_store<'a>(reader: &mut Reader<'a>) -> Result<PrepareStore<'a>, DecodeError> {
    read_fields!(reader, |value| {
        context = Context::default(), "context" => read_context(value)?;
    });
    Ok(PrepareStore {
        target: context.slots.map(|slots| StoreTarget {
            slots,
            chunk_indices: context.chunk_indices,
            group_ids: context.group_ids,
        }),
    })
}

fn read_prepare_retrieve<'a>(reader: &mut Reader<'a>) -> Result<PrepareRetrieve<'a>, DecodeError> {
    read_fields!(reader, |value| {
        success, "success" => value.bool()?;
        data = &[][..], "data" => value.bin()?;
        context = Context::default(), "context" => read_context(value)?;
    });
    Ok(PrepareRetrieve {
        success,
        data: data.into(),
        slots: context.slots,
        groups: context.group_ids.map(|group_ids| SlotGroups {
            group_ids,
            chunk_indices: context.chunk_indices,
        }),
    })
}

fn read_batch<'a>(reader: &mut Reader<'a>) -> Result<EventBatch<'a>, DecodeError> {
    read_fields!(reader, |value| {
        enabled, "enabled" => value.bool()?;
        incarnation, "incarnation" => value.int()?;
        next_cursor, "next_cursor" => value.int()?;
        lost = false, "lost" => value.bool()?;
        events = Vec::new(), "events" => value.array_of(MIN_EVENT, read_event)?;
    });
    Ok(EventBatch {
        enabled,
        incarnation,
        next_cursor,
        lost,
        events,
    })
}

fn read_event<'a>(reader: &mut Reader<'a>) -> Result<EventRecord<'a>, DecodeError> {
    read_fields!(reader, |value| {
        seq, "seq" => value.int()?;
        kind, "kind" => value.str()?;
        medium, "medium" => value.str()?;
        model_name, "model_name" => value.str()?;
        block_hashes, "block_hashes" => value.array_of(2, |hash| Ok(hash.bin()?.into()))?;
        parent_block_hash = None, "parent_block_hash" => value.optional_bin()?.map(Into::into);
        token_ids = Vec::new(), "token_ids" => read_tokens(value)?;
    });
    Ok(EventRecord {
        seq,
        kind: kind.into(),
        medium: medium.into(),
        model_name: model_name.into(),
        block_hashes,
        parent_block_hash,
        token_ids: token_ids.into(),
    })
}

fn read_tokens(reader: &mut Reader<'_>) -> Result<Vec<u32>, DecodeError> {
    let mut tokens = Vec::new();
    let count = reader.array_len()?;
    let consumed = wire::decode_tokens(count, reader.rest(), &mut tokens)?;
    reader.advance(consumed)?;
    Ok(tokens)
}

fn read_unified<'a>(reader: &mut Reader<'a>) -> Result<UnifiedLookup<'a>, DecodeError> {
    let segments =
        |value: &mut Reader<'a>| value.array_of(MatchedSegment::MIN_BYTES, MatchedSegment::read);
    read_fields!(reader, |value| {
        prefix_coverage_tokens, "prefix_coverage_tokens" => value.int()?;
        non_prefix_segments = Vec::new(), "non_prefix_segments" => segments(value)?;
        segmented_prefix_segments = Vec::new(), "segmented_prefix_segments" => segments(value)?;
    });
    Ok(UnifiedLookup {
        prefix_coverage_tokens,
        non_prefix_segments,
        segmented_prefix_segments,
    })
}

fn read_address(reader: &mut Reader<'_>) -> Result<ChannelAddress, DecodeError> {
    read_fields!(reader, |value| {
        offset, "offset" => value.int()?;
        size, "size" => value.int()?;
    });
    Ok(ChannelAddress { offset, size })
}

fn read_module_call<'a>(reader: &mut Reader<'a>) -> Result<ModuleCall<'a>, DecodeError> {
    read_fields!(reader, |value| {
        success, "success" => value.bool()?;
        payload = &[][..], "payload" => value.bin()?;
        error = "", "error" => value.str()?;
    });
    Ok(ModuleCall {
        success,
        payload: payload.into(),
        error: error.into(),
    })
}
