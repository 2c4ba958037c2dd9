//! Writes a pickled list of tensors: what `pickle.dumps` of contiguous CPU tensors says, without its memo.
//!
//! The pickle has protocol 4 and calls what PyTorch's own pickles call, so a client that only trusts those can read it.
//! The caller writes the elements straight into the message, whose exact size is known beforehand, or sends them between its
//! parts from where they are.

use super::globals::storage_class;
use super::storage::PREAMBLE;
use crate::descriptor::{Dtype, MAX_RANK};
use crate::tensor::TensorToWrite;

/// System info of the stream inside: protocol_version 1001, little_endian, sizes of short, int and long.
const SYSTEM: &[u8] = b"\x80\x02}q\x00(X\x10\x00\x00\x00protocol_versionq\x01M\xe9\x03X\x0d\x00\x00\x00little_endianq\x02\x88\
    X\x0a\x00\x00\x00type_sizesq\x03}q\x04(X\x05\x00\x00\x00shortq\x05K\x02X\x03\x00\x00\x00intq\x06K\x04\
    X\x04\x00\x00\x00longq\x07K\x04uu.";

/// The list of storage keys; our only storage is called "0".
const KEYS: &[u8] = b"\x80\x02]q\x00X\x01\x00\x00\x000q\x01a.";

/// `collections.OrderedDict()`, the hooks of every tensor.
const NO_HOOKS: &[u8] = b"\x8c\x0bcollections\x8c\x0bOrderedDict\x93)R";

/// Why a list of tensors was not written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The shape has too many axes or too many elements.
    #[error("tensor {index}: the shape {shape:?} has more than {MAX_RANK} axes or 2^63 bytes")]
    Shape {
        /// Position in the list.
        index: usize,
        /// The shape, cut behind the axes that are allowed.
        shape: Vec<u64>,
    },
    /// PyTorch cannot load the type from such a pickle.
    #[error(
        "tensor {index}: PyTorch pickles {dtype} differently; allowed are plain numbers and the float8 types"
    )]
    Dtype {
        /// Position in the list.
        index: usize,
        /// The type.
        dtype: Dtype,
    },
    /// The caller did not append the bytes of the tensor, neither more nor fewer.
    #[error("tensor {index}: {written} bytes were written, {expected} are needed")]
    Elements {
        /// Position in the list.
        index: usize,
        /// Bytes the tensor has.
        expected: usize,
        /// Bytes that were appended; 0 when the buffer shrank.
        written: usize,
    },
}

/// Everything of one tensor but its elements.
struct PickleFrame {
    head: Vec<u8>,
    elements: usize,
    tail: Vec<u8>,
}

impl PickleFrame {
    fn size(&self) -> usize {
        self.head.len() + self.elements + self.tail.len()
    }
}

/// Writes a list of tensors into a buffer of exactly its size.
///
/// `elements` is called once for each tensor, in order, with its position; it must append exactly the tensor's bytes
/// ([`TensorToWrite::byte_len`]) to the buffer.
pub fn write_tensors<E: From<WriteError>>(
    tensors: &[TensorToWrite<'_>],
    mut elements: impl FnMut(usize, &mut Vec<u8>) -> Result<(), E>,
) -> Result<Vec<u8>, E> {
    let (frames, size) = frames(tensors)?;
    let mut out = Vec::with_capacity(size);
    out.extend_from_slice(LIST_START);
    for (index, frame) in frames.iter().enumerate() {
        out.extend_from_slice(&frame.head);
        let start = out.len();
        elements(index, &mut out)?;
        let written = out.len().saturating_sub(start);
        if written != frame.elements {
            return Err(WriteError::Elements {
                index,
                expected: frame.elements,
                written,
            }
            .into());
        }
        out.extend_from_slice(&frame.tail);
    }
    out.extend_from_slice(LIST_END);
    Ok(out)
}

/// Appends what [`write_tensors`] writes but for the tensors' elements. Returns the places in `out` where they belong, one for each
/// tensor, and the size of the whole pickle.
///
/// # Errors
/// [`WriteError`]; nothing is appended then.
pub fn write_around_elements(
    out: &mut Vec<u8>,
    tensors: &[TensorToWrite<'_>],
) -> Result<(Vec<usize>, usize), WriteError> {
    let (frames, size) = frames(tensors)?;
    out.extend_from_slice(LIST_START);
    let places = frames
        .iter()
        .map(|frame| {
            out.extend_from_slice(&frame.head);
            let place = out.len();
            out.extend_from_slice(&frame.tail);
            place
        })
        .collect();
    out.extend_from_slice(LIST_END);
    Ok((places, size))
}

/// Protocol 4, a list, and a mark for its members.
const LIST_START: &[u8] = b"\x80\x04](";
/// The members into the list, and the end.
const LIST_END: &[u8] = b"e.";

/// All frames, and the size of the message.
fn frames(tensors: &[TensorToWrite<'_>]) -> Result<(Vec<PickleFrame>, usize), WriteError> {
    let frames = tensors
        .iter()
        .enumerate()
        .map(|(index, tensor)| frame(index, tensor))
        .collect::<Result<Vec<_>, _>>()?;
    let members = frames
        .iter()
        .try_fold(LIST_START.len() + LIST_END.len(), |sum, frame| {
            sum.checked_add(frame.size())
        });
    match members {
        Some(size) => Ok((frames, size)),
        None => Err(shape_error(
            0,
            tensors.first().map_or(&[], |tensor| tensor.shape),
        )),
    }
}

fn shape_error(index: usize, shape: &[u64]) -> WriteError {
    WriteError::Shape {
        index,
        shape: shape.iter().take(MAX_RANK).copied().collect(),
    }
}

fn frame(index: usize, tensor: &TensorToWrite<'_>) -> Result<PickleFrame, WriteError> {
    let representable = |shape: &[u64]| {
        shape.len() <= MAX_RANK && shape.iter().all(|&length| i64::try_from(length).is_ok())
    };
    let elements = tensor.byte_len().filter(|_| representable(tensor.shape));
    let elements = elements.ok_or_else(|| shape_error(index, tensor.shape))?;
    // Row-major strides as PyTorch counts them: an empty axis counts like one of length 1.
    let mut strides = vec![1; tensor.shape.len()];
    for axis in (1..tensor.shape.len()).rev() {
        strides[axis - 1] = u64::checked_mul(strides[axis], tensor.shape[axis].max(1))
            .filter(|&stride| i64::try_from(stride).is_ok())
            .ok_or_else(|| shape_error(index, tensor.shape))?;
    }
    if !is_loadable(tensor.dtype) {
        return Err(WriteError::Dtype {
            index,
            dtype: tensor.dtype,
        });
    }
    let class = storage_class(tensor.dtype);
    let stream = stream_head(class, elements, tensor.dtype);

    let mut head = Vec::with_capacity(stream.len() + 128);
    let rebuild = match class {
        Some(_) => "_rebuild_tensor_v2",
        None => "_rebuild_tensor_v3",
    };
    global(&mut head, "torch._utils", rebuild);
    head.push(b'(');
    global(&mut head, "torch.storage", "_load_from_bytes");
    let stream_bytes = stream.len() as u64 + elements as u64;
    match u32::try_from(stream_bytes) {
        Ok(short) => {
            head.push(b'B');
            head.extend_from_slice(&short.to_le_bytes());
        }
        Err(_) => {
            head.push(0x8e);
            head.extend_from_slice(&stream_bytes.to_le_bytes());
        }
    }
    head.extend_from_slice(&stream);

    let mut tail = Vec::with_capacity(128);
    // Tuple of one, and the call of _load_from_bytes.
    tail.extend_from_slice(b"\x85R");
    integer(&mut tail, 0);
    axes(&mut tail, tensor.shape);
    axes(&mut tail, &strides);
    // No gradient.
    tail.push(0x89);
    tail.extend_from_slice(NO_HOOKS);
    if class.is_none() {
        global(&mut tail, "torch", tensor.dtype.name());
    }
    tail.extend_from_slice(b"tR");
    Ok(PickleFrame {
        head,
        elements,
        tail,
    })
}

/// The torch.save stream up to its elements.
fn stream_head(class: Option<&str>, elements: usize, dtype: Dtype) -> Vec<u8> {
    // Types without a storage class lie in a storage of bytes. PyTorch itself names an untyped storage there, and then
    // (seen up to 2.13) fails to load its own pickle; over a typed storage of bytes the same rebuilding works.
    let (class, count) = match class {
        Some(class) => (class, elements as u64 / dtype.item_size()),
        None => ("ByteStorage", elements as u64),
    };
    let mut stream = Vec::with_capacity(PREAMBLE.len() + SYSTEM.len() + KEYS.len() + 128);
    stream.extend_from_slice(PREAMBLE);
    stream.extend_from_slice(SYSTEM);
    // The persistent id ("storage", class, "0", "cpu", count, None).
    stream.extend_from_slice(b"\x80\x02(X\x07\x00\x00\x00storageq\x00ctorch\n");
    stream.extend_from_slice(class.as_bytes());
    stream.extend_from_slice(b"\nq\x01X\x01\x00\x00\x000q\x02X\x03\x00\x00\x00cpuq\x03");
    integer(&mut stream, count);
    stream.extend_from_slice(b"Ntq\x04Q.");
    stream.extend_from_slice(KEYS);
    stream.extend_from_slice(&count.to_le_bytes());
    stream
}

/// Whether PyTorch loads such a pickle of that type: quantized types need their scales.
fn is_loadable(dtype: Dtype) -> bool {
    !matches!(
        dtype,
        Dtype::QInt32 | Dtype::QInt8 | Dtype::QUInt2x4 | Dtype::QUInt4x2 | Dtype::QUInt8
    )
}

/// A global by its two names, each shorter than 256 bytes.
fn global(out: &mut Vec<u8>, module: &str, name: &str) {
    for text in [module, name] {
        out.extend_from_slice(&[0x8c, text.len() as u8]);
        out.extend_from_slice(text.as_bytes());
    }
    out.push(0x93);
}

fn axes(out: &mut Vec<u8>, axes: &[u64]) {
    out.push(b'(');
    for &length in axes {
        integer(out, length);
    }
    out.push(b't');
}

/// A number of 0 to 2^63 - 1, as short as pickle has it.
fn integer(out: &mut Vec<u8>, number: u64) {
    if let Ok(number) = u8::try_from(number) {
        out.extend_from_slice(&[b'K', number]);
    } else if let Ok(number) = u16::try_from(number) {
        out.push(b'M');
        out.extend_from_slice(&number.to_le_bytes());
    } else if let Ok(number) = i32::try_from(number) {
        out.push(b'J');
        out.extend_from_slice(&number.to_le_bytes());
    } else {
        // LONG1: the top bit of the last byte is the sign, so 8 bytes do for i64.
        out.extend_from_slice(&[0x8a, 8]);
        out.extend_from_slice(&number.to_le_bytes());
    }
}
