//! A pickled list of tensors, as engines without shared memory send their chunks.

use super::globals::Global;
use super::machine::{Budget, Machine, Value, run};
use super::{Limits, storage};
use crate::descriptor::{Dtype, MAX_RANK, byte_span};
use crate::wire::DecodeError;

/// One tensor of a pickled list: a view into bytes of the message.
///
/// Checked on reading: the ranks agree (at most [`MAX_RANK`]), every element lies inside `data`, and there are at most
/// as many elements as `data` holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PickledTensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Elements along each axis.
    pub shape: Vec<u64>,
    /// Distance between neighbours along each axis, in elements.
    pub strides: Vec<u64>,
    /// Elements of `data` before the first element of the tensor.
    pub storage_offset: u64,
    /// The whole storage.
    pub data: &'a [u8],
}

impl<'a> PickledTensor<'a> {
    /// Bytes of the tensor's elements, without gaps.
    pub fn byte_len(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        // Checked on reading: not more than `data` has.
        self.shape.iter().product::<u64>() as usize * self.dtype.item_size() as usize
    }

    /// Whether the elements lie without gaps in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.solid_axes().0 == 0
    }

    /// The elements in row-major order, if they lie so in the message. None asks for [`Self::for_each_run`].
    pub fn contiguous_bytes(&self) -> Option<&'a [u8]> {
        self.is_contiguous().then(|| {
            let start = self.storage_offset as usize * self.dtype.item_size() as usize;
            match self.byte_len() {
                0 => &[],
                len => &self.data[start..start + len],
            }
        })
    }

    /// Passes on all bytes of the tensor in row-major order, in the longest pieces that lie together in the message.
    pub fn for_each_run(&self, mut take: impl FnMut(&'a [u8])) {
        if self.shape.contains(&0) {
            return;
        }
        let (outer_axes, run_elements) = self.solid_axes();
        let item = self.dtype.item_size();
        let run_bytes = (run_elements * item) as usize;
        let outer = &self.shape[..outer_axes];
        let mut index = [0u64; MAX_RANK];
        let mut element = self.storage_offset;
        loop {
            let start = (element * item) as usize;
            take(&self.data[start..start + run_bytes]);
            // The next position of the outer axes, counting like an odometer.
            let mut axis = outer_axes;
            loop {
                if axis == 0 {
                    return;
                }
                axis -= 1;
                index[axis] += 1;
                element += self.strides[axis];
                if index[axis] < outer[axis] {
                    break;
                }
                element -= self.strides[axis] * index[axis];
                index[axis] = 0;
            }
        }
    }

    /// Appends all bytes of the tensor in row-major order: [`Self::byte_len`] bytes.
    pub fn gather_into(&self, out: &mut Vec<u8>) {
        out.reserve(self.byte_len());
        self.for_each_run(|run| out.extend_from_slice(run));
    }

    /// How many leading axes must be walked, and how many elements the axes behind them have without a gap.
    fn solid_axes(&self) -> (usize, u64) {
        if self.shape.contains(&0) {
            return (0, 0);
        }
        let mut elements = 1;
        for axis in (0..self.shape.len()).rev() {
            // The stride of an axis of length 1 is never used.
            if self.shape[axis] != 1 && self.strides[axis] != elements {
                return (axis + 1, elements);
            }
            elements *= self.shape[axis];
        }
        (0, elements)
    }
}

fn error(message: impl Into<String>) -> DecodeError {
    DecodeError::at("pickled tensors", message)
}

/// Reads `pickle.dumps(list_of_cpu_tensors)`, protocols 3 to 5.
///
/// The tensors borrow their bytes from `message`; together they have at most as many bytes as it, so copying them out never
/// costs more than it cost to send them. Nothing may follow the pickle. Errors name what is wrong and what is
/// allowed; a pickle that mentions anything but tensors is refused, and nothing in it is ever called.
pub fn read_tensors<'a>(
    message: &'a [u8],
    limits: &Limits,
) -> Result<Vec<PickledTensor<'a>>, DecodeError> {
    let mut budget = Budget::new(limits.max_opcodes);
    let (machine, list, used) = run(message, &mut budget)?;
    if used != message.len() {
        return Err(error(format!(
            "{} bytes follow the pickle",
            message.len() - used
        )));
    }
    let list = machine
        .list(list)
        .ok_or_else(|| error("the result is not a list"))?;
    if list.len() > limits.max_tensors {
        return Err(error(format!(
            "a list of {}; at most {} are allowed",
            list.len(),
            limits.max_tensors
        )));
    }
    let mut tensors = Vec::new();
    let mut bytes = 0;
    for &value in list {
        let tensor = read_tensor(&machine, value, &mut budget)?;
        // One storage under many tensors would be a small message that is large once it is copied out.
        bytes += tensor.byte_len();
        if bytes > message.len() {
            return Err(error(format!(
                "the tensors have more bytes than the {} of the message",
                message.len()
            )));
        }
        tensors.push(tensor);
    }
    Ok(tensors)
}

fn read_tensor<'a>(
    machine: &Machine<'a>,
    value: Value<'a>,
    budget: &mut Budget,
) -> Result<PickledTensor<'a>, DecodeError> {
    let call = machine
        .call(value)
        .filter(|call| call.state.is_none())
        .ok_or_else(|| error("a member of the list is not a rebuilt tensor"))?;
    let arguments = machine.tuple(call.arguments).unwrap_or_default();
    let (arguments, named_dtype) = match (call.callable, arguments) {
        (Value::Global(Global::RebuildTensorV2), [first @ .., Value::None] | first @ [..])
            if first.len() == 6 =>
        {
            (first, None)
        }
        (
            Value::Global(Global::RebuildTensorV3),
            [first @ .., Value::Global(Global::Dtype(dtype))]
            | [first @ .., Value::Global(Global::Dtype(dtype)), Value::None],
        ) if first.len() == 6 => (first, Some(*dtype)),
        _ => {
            return Err(error(format!(
                "{:?} with {} arguments; allowed are _rebuild_tensor_v2 with 6 and _rebuild_tensor_v3 with 7",
                call.callable,
                arguments.len()
            )));
        }
    };
    let &[
        memory,
        Value::Int(offset),
        shape,
        strides,
        Value::Bool(_),
        hooks,
    ] = arguments
    else {
        return Err(error(
            "the arguments of a tensor are not (storage, offset, shape, strides, bool, hooks)",
        ));
    };
    check_hooks(machine, hooks)?;
    let memory = read_memory(machine, memory, budget)?;
    // A named type reads the storage as plain bytes, whatever type that has itself.
    let dtype = named_dtype
        .or(memory.dtype)
        .ok_or_else(|| error("neither the tensor nor its storage has an element type"))?;
    let tensor = PickledTensor {
        dtype,
        shape: read_axes(machine, "shape", shape)?,
        strides: read_axes(machine, "strides", strides)?,
        storage_offset: u64::try_from(offset)
            .map_err(|_| error(format!("a storage offset of {offset}")))?,
        data: memory.data,
    };
    check_bounds(&tensor)?;
    Ok(tensor)
}

/// Hooks are an `OrderedDict()`: a call without arguments.
fn check_hooks<'a>(machine: &Machine<'a>, hooks: Value<'a>) -> Result<(), DecodeError> {
    let empty = machine.call(hooks).is_some_and(|call| {
        call.callable == Value::Global(Global::OrderedDict)
            && call.state.is_none()
            && machine.tuple(call.arguments).is_some_and(<[_]>::is_empty)
    });
    match empty {
        true => Ok(()),
        false => Err(error("the hooks of a tensor are not an empty OrderedDict")),
    }
}

fn read_memory<'a>(
    machine: &Machine<'a>,
    memory: Value<'a>,
    budget: &mut Budget,
) -> Result<storage::Storage<'a>, DecodeError> {
    let call = machine.call(memory).filter(|call| {
        call.callable == Value::Global(Global::LoadFromBytes) && call.state.is_none()
    });
    match call.and_then(|call| machine.tuple(call.arguments)) {
        Some(&[Value::Bytes(stream)]) => storage::read(stream, budget),
        _ => Err(error(
            "the storage of a tensor is not torch.storage._load_from_bytes(bytes)",
        )),
    }
}

pub(super) fn read_axes<'a>(
    machine: &Machine<'a>,
    field: &'static str,
    axes: Value<'a>,
) -> Result<Vec<u64>, DecodeError> {
    let axes = machine
        .tuple(axes)
        .ok_or_else(|| DecodeError::at(field, "not a tuple"))?;
    if axes.len() > MAX_RANK {
        return Err(DecodeError::at(
            field,
            format!("{} axes; at most {MAX_RANK} are allowed", axes.len()),
        ));
    }
    axes.iter()
        .map(|axis| match axis {
            Value::Int(length) => u64::try_from(*length).ok(),
            _ => None,
        })
        .collect::<Option<_>>()
        .ok_or_else(|| {
            DecodeError::at(field, "holds something that is not an integer of 0 or more")
        })
}

fn check_bounds(tensor: &PickledTensor<'_>) -> Result<(), DecodeError> {
    let item = tensor.dtype.item_size();
    let span = byte_span(
        "pickled tensors",
        item,
        tensor.storage_offset,
        &tensor.shape,
        &tensor.strides,
    )?;
    let available = tensor.data.len() as u64;
    if span > available {
        return Err(error(format!(
            "a view of {span} bytes into a storage of {available}"
        )));
    }
    let logical = match tensor.shape.contains(&0) {
        true => Some(0),
        false => tensor
            .shape
            .iter()
            .try_fold(item, |bytes, &length| bytes.checked_mul(length)),
    };
    match logical {
        Some(logical) if logical <= available => Ok(()),
        _ => Err(error(format!(
            "shape {:?} has more elements than its storage of {available} bytes",
            tensor.shape
        ))),
    }
}
