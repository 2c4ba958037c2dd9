//! Bytes to responses, for clients.

use super::{
    ChunkSlot, PrepareRetrieve, PrepareStore, Response, ResponseKind, SlotGroups, StoreTarget,
    Transfer,
};
use crate::lenient;
use crate::wire::fields::read_fields;
use crate::wire::{DecodeError, InField, Reader, WireValue};

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
        ResponseKind::Texts => Response::Texts(WireValue::read(reader)?),
        ResponseKind::Ints => Response::Ints(reader.ints()?),
        ResponseKind::Bits => Response::Bits(reader.bin()?.into()),
        ResponseKind::Transfer => {
            pair(reader)?;
            Response::Transfer(Transfer {
                event_handle: reader.bin().at_index(0)?.into(),
                ok: reader.bool().at_index(1)?,
            })
        }
        ResponseKind::EngineDriven => Response::EngineDriven(WireValue::read(reader)?),
        ResponseKind::PrepareStore => Response::PrepareStore(read_prepare_store(reader)?),
        ResponseKind::PrepareRetrieve => Response::PrepareRetrieve(read_prepare_retrieve(reader)?),
        ResponseKind::EventBatch => Response::EventBatch(WireValue::read(reader)?),
        ResponseKind::UnifiedLookup => Response::UnifiedLookup(WireValue::read(reader)?),
        ResponseKind::Handshake => {
            pair(reader)?;
            Response::Handshake {
                version: reader.int().at_index(0)?,
                compatible: reader.bool().at_index(1)?,
            }
        }
        ResponseKind::Addresses => Response::Addresses(WireValue::read(reader)?),
        ResponseKind::ModuleCall => Response::ModuleCall(WireValue::read(reader)?),
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
                context.slots = Some(WireValue::read(value)?);
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
