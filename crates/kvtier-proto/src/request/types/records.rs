//! Records that travel in lists: telemetry, blending, and servers among each other.

use super::{MAX_GROUPS, write_ints};
use crate::key::{check_salt, required};
use crate::wire::{self, DecodeError, Reader, name_shown};

/// Which blocks one request got.
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
        let mut request_id = None;
        let mut new_block_ids = None;
        let mut new_token_ids = None;
        reader.map(|name, value| {
            match name {
                "req_id" => request_id = Some(value.str()?),
                "new_block_ids" => new_block_ids = Some(value.ints()?),
                "new_token_ids" => new_token_ids = Some(value.ints()?),
                _ => value.skip()?,
            }
            Ok(())
        })?;
        Ok(Self {
            request_id: required(request_id, "req_id")?,
            new_block_ids: required(new_block_ids, "new_block_ids")?,
            new_token_ids: required(new_token_ids, "new_token_ids")?,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        wire::write_map_len(out, 3);
        wire::write_str(out, "req_id");
        wire::write_str(out, self.request_id);
        wire::write_str(out, "new_block_ids");
        write_ints(out, &self.new_block_ids);
        wire::write_str(out, "new_token_ids");
        write_ints(out, &self.new_token_ids);
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
        let mut positions = [None; 4];
        let mut hash = None;
        reader.map(|name, value| {
            match name {
                "old_st" => positions[0] = Some(value.int()?),
                "old_ed" => positions[1] = Some(value.int()?),
                "cur_st" => positions[2] = Some(value.int()?),
                "cur_ed" => positions[3] = Some(value.int()?),
                "hash" => hash = Some(value.bin()?),
                _ => value.skip()?,
            }
            Ok(())
        })?;
        Ok(Self {
            old_start: required(positions[0], "old_st")?,
            old_end: required(positions[1], "old_ed")?,
            start: required(positions[2], "cur_st")?,
            end: required(positions[3], "cur_ed")?,
            hash: required(hash, "hash")?.into(),
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        wire::write_map_len(out, 5);
        let positions = [
            ("old_st", self.old_start),
            ("old_ed", self.old_end),
            ("cur_st", self.start),
            ("cur_ed", self.end),
        ];
        for (name, position) in positions {
            wire::write_str(out, name);
            wire::write_int(out, position);
        }
        wire::write_str(out, "hash");
        wire::write_bin(out, &self.hash);
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
        let mut chunk_hash = None;
        let mut model_name = None;
        let mut kv_rank = None;
        let mut object_group_id = 0;
        let mut cache_salt = "";
        reader.map(|name, value| {
            match name {
                "chunk_hash" => chunk_hash = Some(value.bin()?),
                "model_name" => {
                    let model = value.str()?;
                    if model.contains('@') {
                        return Err(DecodeError::new(format!(
                            "a model name must not contain '@', found {:?}",
                            name_shown(model)
                        )));
                    }
                    model_name = Some(model);
                }
                "kv_rank" => kv_rank = Some(value.int()?),
                "object_group_id" => object_group_id = value.int()?,
                "cache_salt" => {
                    cache_salt = value.str()?;
                    check_salt(cache_salt)?;
                }
                _ => value.skip()?,
            }
            Ok(())
        })?;
        Ok(Self {
            chunk_hash: required(chunk_hash, "chunk_hash")?,
            model_name: required(model_name, "model_name")?,
            kv_rank: required(kv_rank, "kv_rank")?,
            object_group_id,
            cache_salt,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        wire::write_map_len(out, 5);
        wire::write_str(out, "chunk_hash");
        wire::write_bin(out, self.chunk_hash);
        wire::write_str(out, "model_name");
        wire::write_str(out, self.model_name);
        wire::write_str(out, "kv_rank");
        wire::write_uint(out, self.kv_rank);
        wire::write_str(out, "object_group_id");
        wire::write_uint(out, self.object_group_id);
        wire::write_str(out, "cache_salt");
        wire::write_str(out, self.cache_salt);
    }
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
        let mut shapes = None;
        let mut dtypes = None;
        reader.map(|name, value| {
            match name {
                "shapes" => shapes = Some(value.short_array_of(MAX_GROUPS, Reader::ints)?),
                "dtypes" => dtypes = Some(value.short_array_of(MAX_GROUPS, Reader::str)?),
                _ => value.skip()?,
            }
            Ok(())
        })?;
        Ok(Self {
            shapes: required(shapes, "shapes")?,
            dtypes: required(dtypes, "dtypes")?,
        })
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
