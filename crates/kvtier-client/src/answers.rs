//! Readers of replies: their contents as plain values that outlive the message.

use kvtier_proto::operation::Operation;
use kvtier_proto::response::{
    ChunkSlot, EngineDriven, PrepareRetrieve, PrepareStore, Response, StoreTarget,
};

use crate::error::ClientError;
use crate::message::ClientReply;

pub(crate) fn unexpected(reply: &ClientReply, message: String) -> ClientError {
    ClientError::Unexpected {
        operation: reply.operation(),
        message,
    }
}

pub(crate) fn wrong(reply: &ClientReply, expected: &str, got: &Response<'_>) -> ClientError {
    let kind = match got {
        Response::Nothing => "nothing",
        _ => "something else",
    };
    unexpected(reply, format!("{expected} was expected, {kind} came"))
}

/// The value of a response of the variant that is expected; `$what` says which.
macro_rules! expect {
    ($reply:expr, $variant:ident, $what:literal) => {
        match $reply.response()? {
            Response::$variant(value) => value,
            other => return Err(wrong($reply, $what, &other)),
        }
    };
}

pub(crate) fn nothing(reply: &ClientReply) -> Result<(), ClientError> {
    match reply.response()? {
        Response::Nothing => Ok(()),
        other => Err(wrong(reply, "nothing", &other)),
    }
}

pub(crate) fn chunk_size(reply: &ClientReply) -> Result<usize, ClientError> {
    let size = expect!(reply, Int, "an int");
    usize::try_from(size)
        .ok()
        .filter(|size| *size > 0)
        .ok_or_else(|| {
            unexpected(
                reply,
                format!("the chunk size is {size}; a positive number is expected"),
            )
        })
}

pub(crate) fn text(reply: &ClientReply) -> Result<String, ClientError> {
    Ok(expect!(reply, Text, "a text").into_owned())
}

pub(crate) fn texts(reply: &ClientReply) -> Result<Vec<String>, ClientError> {
    let names = expect!(reply, Texts, "a list of names");
    Ok(names.into_iter().map(Into::into).collect())
}

pub(crate) fn truth(reply: &ClientReply) -> Result<bool, ClientError> {
    Ok(expect!(reply, Bool, "a bool"))
}

pub(crate) fn optional_count(reply: &ClientReply) -> Result<Option<u64>, ClientError> {
    match reply.response()? {
        Response::Nothing => Ok(None),
        Response::Int(value) => u64::try_from(value)
            .map(Some)
            .map_err(|_| unexpected(reply, format!("{value} is not a number of chunks"))),
        other => Err(wrong(reply, "a number of chunks", &other)),
    }
}

/// The result of a lookup of `limit` chunks.
pub(crate) fn hits(reply: &ClientReply, limit: u64) -> Result<Option<u64>, ClientError> {
    limited(reply.operation(), optional_count(reply)?, limit)
}

/// A lookup's result, which may be `limit` chunks at most.
pub(crate) fn limited(
    operation: Operation,
    hits: Option<u64>,
    limit: u64,
) -> Result<Option<u64>, ClientError> {
    match hits {
        Some(chunks) if chunks > limit => Err(ClientError::Unexpected {
            operation,
            message: format!("the server found {chunks} chunks, {limit} were asked for"),
        }),
        result => Ok(result),
    }
}

/// Whether each of `asked` objects was found.
pub(crate) fn found(reply: &ClientReply, asked: u64) -> Result<Vec<bool>, ClientError> {
    let bits = expect!(reply, Bits, "a bitmap");
    let asked = usize::try_from(asked).unwrap_or(usize::MAX);
    // None at all is the answer to a find that cannot be served.
    if !bits.is_empty() && bits.len() != asked.div_ceil(8) {
        let message = format!("a bitmap of {} bytes came, for {asked} objects", bits.len());
        return Err(unexpected(reply, message));
    }
    let bit = |at: usize| {
        bits.get(at / 8)
            .is_some_and(|byte| byte >> (at % 8) & 1 == 1)
    };
    Ok((0..asked).map(bit).collect())
}

/// Whether a transfer succeeded. Its device event is left out: CPU workers need none.
pub(crate) fn transferred(reply: &ClientReply) -> Result<bool, ClientError> {
    Ok(expect!(reply, Transfer, "an event and a verdict").ok)
}

pub(crate) fn pool(reply: &ClientReply) -> Result<EngineDriven<'static>, ClientError> {
    let pool = expect!(reply, EngineDriven, "a pool's name and size");
    Ok(EngineDriven {
        shm_name: pool.shm_name.into_owned().into(),
        pool_size: pool.pool_size,
        null_block_id: pool.null_block_id,
    })
}

pub(crate) fn prepare_store(reply: &ClientReply) -> Result<PrepareStore<'static>, ClientError> {
    let answer = expect!(reply, PrepareStore, "slots");
    Ok(PrepareStore {
        target: answer.target.map(|target| StoreTarget {
            slots: target.slots.into_iter().map(owned_slot).collect(),
            chunk_indices: target.chunk_indices,
            group_ids: target.group_ids,
        }),
    })
}

pub(crate) fn prepare_retrieve(
    reply: &ClientReply,
) -> Result<PrepareRetrieve<'static>, ClientError> {
    let answer = expect!(reply, PrepareRetrieve, "slots");
    let slots = answer.slots;
    Ok(PrepareRetrieve {
        success: answer.success,
        data: answer.data.into_owned().into(),
        slots: slots.map(|slots| slots.into_iter().map(owned_slot).collect()),
        groups: answer.groups,
    })
}

fn owned_slot(slot: ChunkSlot<'_>) -> ChunkSlot<'static> {
    ChunkSlot {
        offset: slot.offset,
        length: slot.length,
        shape: slot.shape.into_owned().into(),
        dtype: slot.dtype.into_owned().into(),
    }
}
