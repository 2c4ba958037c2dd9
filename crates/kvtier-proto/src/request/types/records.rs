//! Records that travel in lists: telemetry, blending, and servers among each other.

use super::{MAX_GROUPS, write_ints};
use crate::key::check_salt;
use crate::wire::fields::{read_fields, write_fields};
use crate::wire::{self, DecodeError, Reader, name_shown};

/// Blocks that one request got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocationRecord<'a> {
    /// The engine's request.
    pub request_id: &'a str,
    /// Blocks it got.
    pub new_block_ids: Vec<i64>,
    /// Tokens that will fill them.
    pub new_token_ids: Vec<i64>,
}

impl<'a> AllocationRecord<'a> {
    /// Fewest bytes one takes on the wire: three names and three values.
    pub(crate) const MIN_BYTES: usize = 39;

    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        read_fields!(reader, |value| {
            request_id, "req_id" => value.str()?;
            new_block_ids, "new_block_ids" => value.ints()?;
            new_token_ids, "new_token_ids" => value.ints()?;
        });
        Ok(Self {
            request_id,
            new_block_ids,
            new_token_ids,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        write_fields!(out, {
            "req_id", wire::write_str, self.request_id;
            "new_block_ids", write_ints, &self.new_block_ids;
            "new_token_ids", write_ints, &self.new_token_ids;
        });
    }
}

/// Blending: a segment of another prompt that fits this one. Positions are tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatchedSegment<'a> {
    /// Start in the prompt it was computed for.
    pub old_start: i64,
    /// End there.
    pub old_end: i64,
    /// Start in this prompt.
    pub start: i64,
    /// End in this prompt.
    pub end: i64,
    /// Hash of the segment.
    pub hash: std::borrow::Cow<'a, [u8]>,
}

impl<'a> MatchedSegment<'a> {
    /// Fewest bytes one takes on the wire: five names and five values.
    pub(crate) const MIN_BYTES: usize = 40;

    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        read_fields!(reader, |value| {
            old_start, "old_st" => value.int()?;
            old_end, "old_ed" => value.int()?;
            start, "cur_st" => value.int()?;
            end, "cur_ed" => value.int()?;
            hash, "hash" => value.bin()?;
        });
        Ok(Self {
            old_start,
            old_end,
            start,
            end,
            hash: hash.into(),
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        write_fields!(out, {
            "old_st", wire::write_int, self.old_start;
            "old_ed", wire::write_int, self.old_end;
            "cur_st", wire::write_int, self.start;
            "cur_ed", wire::write_int, self.end;
            "hash", wire::write_bin, &self.hash;
        });
    }
}

/// An object's key as servers send it to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectKeyParts<'a> {
    /// Hash of the chunk and everything before it.
    pub chunk_hash: &'a [u8],
    /// Model name, without `@`.
    pub model_name: &'a str,
    /// World size and rank, packed.
    pub kv_rank: u64,
    /// The object group.
    pub object_group_id: u64,
    /// The tenant; empty for none.
    pub cache_salt: &'a str,
}

impl<'a> ObjectKeyParts<'a> {
    /// Fewest bytes one takes on the wire: three names and three values.
    pub(crate) const MIN_BYTES: usize = 35;

    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        read_fields!(reader, |value| {
            chunk_hash, "chunk_hash" => value.bin()?;
            model_name, "model_name" => read_model_name(value)?;
            kv_rank, "kv_rank" => value.int()?;
            object_group_id = 0, "object_group_id" => value.int()?;
            cache_salt = "", "cache_salt" => read_salt(value)?;
        });
        Ok(Self {
            chunk_hash,
            model_name,
            kv_rank,
            object_group_id,
            cache_salt,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        write_fields!(out, {
            "chunk_hash", wire::write_bin, self.chunk_hash;
            "model_name", wire::write_str, self.model_name;
            "kv_rank", wire::write_uint, self.kv_rank;
            "object_group_id", wire::write_uint, self.object_group_id;
            "cache_salt", wire::write_str, self.cache_salt;
        });
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

/// Shapes and types of one object group's tensors, as servers tell each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutDescriptor<'a> {
    /// Shape of each tensor.
    pub shapes: Vec<Vec<i64>>,
    /// Name of each tensor's type.
    pub dtypes: Vec<&'a str>,
}

impl<'a> LayoutDescriptor<'a> {
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        read_fields!(reader, |value| {
            shapes, "shapes" => value.short_array_of(MAX_GROUPS, Reader::ints)?;
            dtypes, "dtypes" => value.short_array_of(MAX_GROUPS, Reader::str)?;
        });
        Ok(Self { shapes, dtypes })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        wire::write_map_len(out, 2);
        wire::write_str(out, "shapes");
        wire::write_array_len(out, self.shapes.len());
        for shape in &self.shapes {
            write_ints(out, shape);
        }
        wire::write_str(out, "dtypes");
        wire::write_array_len(out, self.dtypes.len());
        for dtype in &self.dtypes {
            wire::write_str(out, dtype);
        }
    }
}
