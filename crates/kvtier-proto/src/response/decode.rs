//! Bytes to responses, for clients.

use super::{
    ChannelAddress, EngineDriven, EventBatch, EventRecord, MatchedSegment, ModuleCall,
    PrepareRetrieve, PrepareStore, Response, ResponseKind, Slot, StoreTarget, Transfer,
    UnifiedLookup,
};
use crate::key::required;
use crate::lenient;
use crate::wire::{self, DecodeError, InField, Reader};

/// Fewest bytes of a slot: four names and four values.
const MIN_SLOT: usize = 30;
/// Fewest bytes of an event: the names of its required fields.
const MIN_EVENT: usize = 40;
/// Fewest bytes of an address: two names and two values.
const MIN_ADDRESS: usize = 15;

impl<'a> Response<'a> {
    /// Decodes the third frame of a reply, as the 0.5.6 client does.
    ///
    /// A missing frame is [`Response::Nothing`] whatever `kind` says; nil is, where the kind allows it.
    pub fn decode(kind: ResponseKind, payload: Option<&'a [u8]>) -> Result<Self, DecodeError> {
        let Some(payload) = payload else {
            return Ok(Self::Nothing);
        };
        wire::whole(payload, |reader| {
            if kind.may_be_nil() && reader.nil()? {
                return Ok(Self::Nothing);
            }
            Self::read(kind, reader)
        })
        .in_field("response")
    }

    fn read(kind: ResponseKind, reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        Ok(match kind {
            ResponseKind::Nothing => {
                return Err(DecodeError::new("this operation answers nothing, or nil"));
            }
            ResponseKind::Int => Self::Int(lenient::int(reader)?),
            ResponseKind::OptionalInt => Self::Int(reader.int()?),
            ResponseKind::Bool => Self::Bool(lenient::bool(reader)?),
            ResponseKind::Text => Self::Text(reader.str()?.into()),
            ResponseKind::Texts => Self::Texts(reader.array_of(1, |text| Ok(text.str()?.into()))?),
            ResponseKind::Ints => Self::Ints(reader.ints()?),
            ResponseKind::Transfer => {
                pair(reader)?;
                Self::Transfer(Transfer {
                    event_handle: reader.bin().at_index(0)?.into(),
                    ok: reader.bool().at_index(1)?,
                })
            }
            ResponseKind::EngineDriven => Self::EngineDriven(read_pool(reader)?),
            ResponseKind::PrepareStore => Self::PrepareStore(read_prepare_store(reader)?),
            ResponseKind::PrepareRetrieve => Self::PrepareRetrieve(read_prepare_retrieve(reader)?),
            ResponseKind::EventBatch => Self::EventBatch(read_batch(reader)?),
            ResponseKind::UnifiedLookup => Self::UnifiedLookup(read_unified(reader)?),
            ResponseKind::Handshake => {
                pair(reader)?;
                Self::Handshake {
                    version: reader.int().at_index(0)?,
                    compatible: reader.bool().at_index(1)?,
                }
            }
            ResponseKind::Addresses => Self::Addresses(reader.array_of(MIN_ADDRESS, read_address)?),
            ResponseKind::ModuleCall => Self::ModuleCall(read_module_call(reader)?),
        })
    }
}

impl ResponseKind {
    /// Whether an explicit nil frame may stand for nothing.
    fn may_be_nil(self) -> bool {
        matches!(
            self,
            Self::Nothing | Self::OptionalInt | Self::UnifiedLookup | Self::Addresses
        )
    }
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
    let mut shm_name = None;
    let mut pool_size = None;
    reader.map(|name, value| {
        match name {
            "shm_name" => shm_name = Some(value.str()?),
            "pool_size" => pool_size = Some(value.int()?),
            _ => value.skip()?,
        }
        Ok(())
    })?;
    Ok(EngineDriven {
        shm_name: required(shm_name, "shm_name")?.into(),
        pool_size: required(pool_size, "pool_size")?,
    })
}

fn read_slot<'a>(reader: &mut Reader<'a>) -> Result<Slot<'a>, DecodeError> {
    let mut offset = None;
    let mut length = None;
    let mut shape = None;
    let mut dtype = None;
    reader.map(|name, value| {
        match name {
            "offset" => offset = Some(value.int()?),
            "length" => length = Some(value.int()?),
            "shape" => shape = Some(value.ints()?),
            "dtype" => dtype = Some(value.str()?),
            _ => value.skip()?,
        }
        Ok(())
    })?;
    Ok(Slot {
        offset: required(offset, "offset")?,
        length: required(length, "length")?,
        shape: required(shape, "shape")?.into(),
        dtype: required(dtype, "dtype")?.into(),
    })
}

/// What a context map may hold; a context without a list of slots is one without a shared pool.
#[derive(Default)]
struct Context<'a> {
    slots: Option<Vec<Slot<'a>>>,
    chunk_indices: Vec<u64>,
}

fn read_context<'a>(reader: &mut Reader<'a>) -> Result<Context<'a>, DecodeError> {
    let mut context = Context::default();
    reader.map(|name, value| {
        match name {
            "slots" if is_array(value)? => {
                context.slots = Some(value.array_of(MIN_SLOT, read_slot)?);
            }
            "chunk_indices" if is_array(value)? => context.chunk_indices = value.ints()?,
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
    let mut context = Context::default();
    reader.map(|name, value| {
        match name {
            "context" => context = read_context(value)?,
            _ => value.skip()?,
        }
        Ok(())
    })?;
    let chunk_indices = context.chunk_indices;
    Ok(PrepareStore {
        target: context.slots.map(|slots| StoreTarget {
            slots,
            chunk_indices,
        }),
    })
}

fn read_prepare_retrieve<'a>(reader: &mut Reader<'a>) -> Result<PrepareRetrieve<'a>, DecodeError> {
    let mut success = None;
    let mut data: &[u8] = &[];
    let mut context = Context::default();
    reader.map(|name, value| {
        match name {
            "success" => success = Some(value.bool()?),
            "data" => data = value.bin()?,
            "context" => context = read_context(value)?,
            _ => value.skip()?,
        }
        Ok(())
    })?;
    Ok(PrepareRetrieve {
        success: required(success, "success")?,
        data: data.into(),
        slots: context.slots,
    })
}

fn read_batch<'a>(reader: &mut Reader<'a>) -> Result<EventBatch<'a>, DecodeError> {
    let mut enabled = None;
    let mut incarnation = None;
    let mut next_cursor = None;
    let mut lost = false;
    let mut events = Vec::new();
    reader.map(|name, value| {
        match name {
            "enabled" => enabled = Some(value.bool()?),
            "incarnation" => incarnation = Some(value.int()?),
            "next_cursor" => next_cursor = Some(value.int()?),
            "lost" => lost = value.bool()?,
            "events" => events = value.array_of(MIN_EVENT, read_event)?,
            _ => value.skip()?,
        }
        Ok(())
    })?;
    Ok(EventBatch {
        enabled: required(enabled, "enabled")?,
        incarnation: required(incarnation, "incarnation")?,
        next_cursor: required(next_cursor, "next_cursor")?,
        lost,
        events,
    })
}

fn read_event<'a>(reader: &mut Reader<'a>) -> Result<EventRecord<'a>, DecodeError> {
    let mut seq = None;
    let mut kind = None;
    let mut medium = None;
    let mut model_name = None;
    let mut block_hashes = None;
    let mut parent_block_hash = None;
    let mut token_ids = Vec::new();
    reader.map(|name, value| {
        match name {
            "seq" => seq = Some(value.int()?),
            "kind" => kind = Some(value.str()?),
            "medium" => medium = Some(value.str()?),
            "model_name" => model_name = Some(value.str()?),
            "block_hashes" => {
                block_hashes = Some(value.array_of(2, |hash| Ok(hash.bin()?.into()))?);
            }
            "parent_block_hash" => parent_block_hash = value.optional_bin()?.map(Into::into),
            "token_ids" => {
                let count = value.array_len()?;
                let consumed = wire::decode_tokens(count, value.rest(), &mut token_ids)?;
                value.advance(consumed)?;
            }
            _ => value.skip()?,
        }
        Ok(())
    })?;
    Ok(EventRecord {
        seq: required(seq, "seq")?,
        kind: required(kind, "kind")?.into(),
        medium: required(medium, "medium")?.into(),
        model_name: required(model_name, "model_name")?.into(),
        block_hashes: required(block_hashes, "block_hashes")?,
        parent_block_hash,
        token_ids,
    })
}

fn read_unified<'a>(reader: &mut Reader<'a>) -> Result<UnifiedLookup<'a>, DecodeError> {
    let mut prefix_coverage_tokens = None;
    let mut non_prefix_segments = Vec::new();
    let mut segmented_prefix_segments = Vec::new();
    let segments =
        |value: &mut Reader<'a>| value.array_of(MatchedSegment::MIN_BYTES, MatchedSegment::read);
    reader.map(|name, value| {
        match name {
            "prefix_coverage_tokens" => prefix_coverage_tokens = Some(value.int()?),
            "non_prefix_segments" => non_prefix_segments = segments(value)?,
            "segmented_prefix_segments" => segmented_prefix_segments = segments(value)?,
            _ => value.skip()?,
        }
        Ok(())
    })?;
    Ok(UnifiedLookup {
        prefix_coverage_tokens: required(prefix_coverage_tokens, "prefix_coverage_tokens")?,
        non_prefix_segments,
        segmented_prefix_segments,
    })
}

fn read_address(reader: &mut Reader<'_>) -> Result<ChannelAddress, DecodeError> {
    let mut offset = None;
    let mut size = None;
    reader.map(|name, value| {
        match name {
            "offset" => offset = Some(value.int()?),
            "size" => size = Some(value.int()?),
            _ => value.skip()?,
        }
        Ok(())
    })?;
    Ok(ChannelAddress {
        offset: required(offset, "offset")?,
        size: required(size, "size")?,
    })
}

fn read_module_call<'a>(reader: &mut Reader<'a>) -> Result<ModuleCall<'a>, DecodeError> {
    let mut success = None;
    let mut payload: &[u8] = &[];
    let mut error = "";
    reader.map(|name, value| {
        match name {
            "success" => success = Some(value.bool()?),
            "payload" => payload = value.bin()?,
            "error" => error = value.str()?,
            _ => value.skip()?,
        }
        Ok(())
    })?;
    Ok(ModuleCall {
        success: required(success, "success")?,
        payload: payload.into(),
        error: error.into(),
    })
}
