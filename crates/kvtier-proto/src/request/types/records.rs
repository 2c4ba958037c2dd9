//! Records that travel in lists: telemetry, blending, and servers among each other.

use std::borrow::Cow;

use super::MAX_GROUPS;
use crate::key::check_salt;
use crate::wire::{DecodeError, Reader, name_shown, record};

record! {
    /// Blocks that one request got.
    pub struct AllocationRecord<'a> {
        /// The engine's request.
        pub request_id: &'a str = "req_id";
        /// Blocks it got.
        pub new_block_ids: Vec<i64> = "new_block_ids";
        /// Tokens that will fill them.
        pub new_token_ids: Vec<i64> = "new_token_ids";
    }
}

record! {
    /// Blending: a segment of another prompt that fits this one. Positions are tokens.
    pub struct MatchedSegment<'a> {
        /// Start in the prompt it was computed for.
        pub old_start: i64 = "old_st";
        /// End there.
        pub old_end: i64 = "old_ed";
        /// Start in this prompt.
        pub start: i64 = "cur_st";
        /// End in this prompt.
        pub end: i64 = "cur_ed";
        /// Hash of the segment.
        pub hash: Cow<'a, [u8]> = "hash";
    }
}

record! {
    /// An object's key as servers send it to each other.
    pub struct ObjectKeyParts<'a> {
        /// Hash of the chunk and everything before it.
        pub chunk_hash: &'a [u8] = "chunk_hash";
        /// Model name, without `@`.
        pub model_name: &'a str = "model_name", read read_model_name;
        /// World size and rank, packed.
        pub kv_rank: u64 = "kv_rank";
        /// The object group.
        pub object_group_id: u64 = "object_group_id", default 0;
        /// The tenant; empty for none.
        pub cache_salt: &'a str = "cache_salt", default "", read read_salt;
    }
}

fn read_model_name<'a>(reader: &mut Reader<'a>) -> Result<&'a str, DecodeError> {
    let model = reader.str()?;
    if model.contains('@') {
        return Err(DecodeError::new(format!(
            "a model name must not contain '@', found {:?}",
            name_shown(model)
        )));
    }
    Ok(model)
}

fn read_salt<'a>(reader: &mut Reader<'a>) -> Result<&'a str, DecodeError> {
    let salt = reader.str()?;
    check_salt(salt)?;
    Ok(salt)
}

record! {
    /// Shapes and types of one object group's tensors, as servers tell each other.
    pub struct LayoutDescriptor<'a> {
        /// Shape of each tensor.
        pub shapes: Vec<Vec<i64>> = "shapes", read |value: &mut Reader<'a>| value.short_array_of(MAX_GROUPS, Reader::ints);
        /// Name of each tensor's type.
        pub dtypes: Vec<&'a str> = "dtypes", read |value: &mut Reader<'a>| value.short_array_of(MAX_GROUPS, Reader::str);
    }
}
