//! Chunks of workers without the shared pool, which travel inside messages.
//!
//! | form | one group of layers | several groups |
//! | --- | --- | --- |
//! | [`InlineForm::Pickle`]: up to LMCache 0.5.6 | a pickled list of tensors | - |
//! | [`InlineForm::Envelope`]: from 0.5.7 | `{"version": 1, "tensors": [T, ..]}` | `{"version": 1, "groups": [{"chunk_indices": [int, ..], "tensors": [T, ..]}, ..]}` |
//!
//! `T` is `{"dtype": str, "shape": [int, ..], "data": bin}`, its elements contiguous and row-major. Envelopes are MessagePack; unlike
//! elsewhere in the protocol, a field that is not named here is an error. Chunk indices count from the start of the range and
//! increase. Which form a client uses is known from its generation; no form is tried for another.

use std::ops::Range;

use crate::descriptor::{Dtype, MAX_RANK};
use crate::pickle::{self, PickleLimits, WriteError, write_around_elements};
use crate::tensor::{InlineTensor, TensorToWrite};
use crate::wire::{self, DecodeError, Reader, name_shown};

/// Most groups of one envelope (LMCache 0.5.7).
pub const MAX_GROUPS: usize = 64;

/// Most tensors of one envelope (LMCache 0.5.7). One takes at most 400 bytes while it is read.
pub const MAX_TENSORS: usize = 65_536;

/// Bytes of the shortest tensor.
const MIN_TENSOR_BYTES: usize = 24;

/// The only version of envelopes.
const VERSION: u64 = 1;

/// How a client sends and expects chunks inside messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InlineForm {
    /// Python pickles.
    Pickle,
    /// MessagePack.
    Envelope,
}

/// Chunks of one group of layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InlineGroup<'a> {
    /// Positions of the chunks in the range, increasing; `None` for all of them.
    pub positions: Option<Vec<u64>>,
    /// One tensor per chunk.
    pub tensors: Vec<InlineTensor<'a>>,
}

impl InlineForm {
    /// Reads the chunks of a message, one group or more. The tensors borrow their bytes from `message`.
    ///
    /// # Errors
    /// The field, what it is, and what is allowed.
    pub fn read(self, message: &[u8]) -> Result<Vec<InlineGroup<'_>>, DecodeError> {
        match self {
            Self::Pickle => {
                let tensors = pickle::read_tensors(message, &PickleLimits::default())?;
                let positions = None;
                Ok(vec![InlineGroup { positions, tensors }])
            }
            Self::Envelope => wire::whole(message, read_envelope),
        }
    }

    /// Appends a message of these chunks but for the bytes of their elements. Returns the places in `out` where those belong, one per
    /// chunk, and the size of the whole message; `None` if it is 4 GiB or more, which no frame holds.
    ///
    /// # Errors
    /// A shape or type that the form cannot have.
    pub(crate) fn write_around(
        self,
        out: &mut Vec<u8>,
        groups: &[ChunksToWrite<'_>],
    ) -> Result<Option<(Vec<usize>, u32)>, WriteError> {
        let chunks: Vec<_> = groups.iter().flat_map(ChunksToWrite::tensors).collect();
        if self == Self::Pickle {
            let (places, size) = write_around_elements(out, &chunks)?;
            return Ok(u32::try_from(size).ok().map(|size| (places, size)));
        }
        let lengths = chunks.iter().enumerate().map(|(index, tensor)| {
            let len = tensor.byte_len();
            len.filter(|_| tensor.shape.len() <= MAX_RANK)
                .ok_or_else(|| WriteError::Shape {
                    index,
                    shape: tensor.shape.iter().take(MAX_RANK).copied().collect(),
                })
        });
        let lengths = lengths.collect::<Result<Vec<_>, _>>()?;
        let elements = lengths.into_iter().try_fold(0_usize, usize::checked_add);
        let Some(elements) = elements.filter(|&bytes| u32::try_from(bytes).is_ok()) else {
            return Ok(None);
        };
        let (start, mut places) = (out.len(), Vec::new());
        wire::write_map_len(out, 2);
        wire::write_str(out, "version");
        wire::write_uint(out, VERSION);
        match groups {
            [group] => write_tensors(out, group, &mut places),
            groups => {
                wire::write_str(out, "groups");
                wire::write_array_len(out, groups.len());
                for group in groups {
                    wire::write_map_len(out, 2);
                    wire::write_str(out, "chunk_indices");
                    wire::write_array_len(out, group.tensors().count());
                    for position in group.positions.clone() {
                        wire::write_uint(out, position);
                    }
                    write_tensors(out, group, &mut places);
                }
            }
        }
        let size = u32::try_from(out.len() - start + elements).ok();
        Ok(size.map(|size| (places, size)))
    }
}

/// Chunks of one group to write, all of one form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunksToWrite<'s> {
    /// Type and shape of each.
    pub tensor: TensorToWrite<'s>,
    /// Positions of the chunks in the range.
    pub positions: Range<u64>,
}

impl<'s> ChunksToWrite<'s> {
    fn tensors(&self) -> impl Iterator<Item = TensorToWrite<'s>> + use<'s> {
        let tensor = self.tensor;
        self.positions.clone().map(move |_| tensor)
    }
}

fn write_tensors(out: &mut Vec<u8>, group: &ChunksToWrite<'_>, places: &mut Vec<usize>) {
    wire::write_str(out, "tensors");
    wire::write_array_len(out, group.tensors().count());
    for tensor in group.tensors() {
        wire::write_map_len(out, 3);
        wire::write_str(out, "dtype");
        wire::write_str(out, tensor.dtype.name());
        wire::write_str(out, "shape");
        wire::write_array_len(out, tensor.shape.len());
        for &length in tensor.shape {
            wire::write_uint(out, length);
        }
        wire::write_str(out, "data");
        wire::write_bin_len(out, tensor.byte_len().unwrap_or_default());
        places.push(out.len());
    }
}

fn read_envelope<'a>(reader: &mut Reader<'a>) -> Result<Vec<InlineGroup<'a>>, DecodeError> {
    let (mut version, mut groups) = (None, None);
    let mut left = MAX_TENSORS;
    reader.map(|name, value| {
        match name {
            "version" => version = Some(value.int::<u64>()?),
            "tensors" if groups.is_none() => {
                let tensors = read_tensors(value, &mut left)?;
                let positions = None;
                groups = Some(vec![InlineGroup { positions, tensors }]);
            }
            "groups" if groups.is_none() => {
                let read = |value: &mut Reader<'a>| read_group(value, &mut left);
                groups = Some(value.short_array_of(MAX_GROUPS, read)?);
            }
            name => return Err(unknown(name, "version, and either tensors or groups")),
        }
        Ok(())
    })?;
    match crate::key::required(version, "version")? {
        VERSION => crate::key::required(groups, "tensors"),
        other => Err(DecodeError::at(
            "version",
            format!("{other}; allowed: {VERSION}"),
        )),
    }
}

fn read_group<'a>(
    reader: &mut Reader<'a>,
    left: &mut usize,
) -> Result<InlineGroup<'a>, DecodeError> {
    let (mut positions, mut tensors) = (None, None);
    reader.map(|name, value| {
        match name {
            "chunk_indices" => {
                positions = Some(value.short_array_of(MAX_TENSORS, Reader::int::<u64>)?);
            }
            "tensors" if tensors.is_none() => tensors = Some(read_tensors(value, left)?),
            name => return Err(unknown(name, "chunk_indices and tensors, once")),
        }
        Ok(())
    })?;
    let positions = crate::key::required(positions, "chunk_indices")?;
    let tensors = crate::key::required(tensors, "tensors")?;
    if positions.len() != tensors.len() || !positions.is_sorted_by(|one, next| one < next) {
        return Err(DecodeError::at(
            "chunk_indices",
            format!(
                "{} positions for {} tensors; allowed: one per tensor, each larger than the one before",
                positions.len(),
                tensors.len()
            ),
        ));
    }
    let positions = Some(positions);
    Ok(InlineGroup { positions, tensors })
}

/// At most `left` tensors, which are subtracted from it.
fn read_tensors<'a>(
    reader: &mut Reader<'a>,
    left: &mut usize,
) -> Result<Vec<InlineTensor<'a>>, DecodeError> {
    let count = reader.clone().array_len()?;
    *left = left.checked_sub(count).ok_or_else(|| {
        DecodeError::new(format!("more than {MAX_TENSORS} tensors; allowed: no more"))
    })?;
    reader.array_of(MIN_TENSOR_BYTES, read_tensor)
}

fn read_tensor<'a>(reader: &mut Reader<'a>) -> Result<InlineTensor<'a>, DecodeError> {
    let (mut dtype, mut shape, mut data) = (None, None, None);
    reader.map(|name, value| {
        match name {
            "dtype" => {
                let name = value.str()?;
                let known = Dtype::from_name(name);
                let refused = || {
                    format!(
                        "{:?}; allowed: a torch dtype such as bfloat16",
                        name_shown(name)
                    )
                };
                dtype = Some(known.ok_or_else(|| DecodeError::new(refused()))?);
            }
            "shape" => shape = Some(value.short_array_of(MAX_RANK, Reader::int::<u64>)?),
            "data" => data = Some(value.bin()?),
            name => return Err(unknown(name, "dtype, shape and data")),
        }
        Ok(())
    })?;
    let dtype = crate::key::required(dtype, "dtype")?;
    let shape: Vec<u64> = crate::key::required(shape, "shape")?;
    let data = crate::key::required(data, "data")?;
    let tensor = TensorToWrite {
        dtype,
        shape: &shape,
    };
    if tensor.byte_len() != Some(data.len()) {
        return Err(DecodeError::at(
            "data",
            format!(
                "{} bytes for {dtype} of shape {shape:?}; allowed: as many as its elements have",
                data.len()
            ),
        ));
    }
    Ok(InlineTensor::contiguous(dtype, shape, data))
}

fn unknown(name: &str, allowed: &str) -> DecodeError {
    DecodeError::new(format!(
        "the field {:?} is unknown or there twice; allowed: {allowed}",
        name_shown(name)
    ))
}
