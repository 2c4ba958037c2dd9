//! A pickled list of tensors, as engines without shared memory send their chunks.

use super::globals::Global;
use super::machine::{Budget, Machine, Value, run};
use super::{PickleLimits, storage};
use crate::descriptor::{MAX_RANK, byte_span};
use crate::tensor::InlineTensor;
use crate::wire::DecodeError;

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
    limits: &PickleLimits,
) -> Result<Vec<InlineTensor<'a>>, DecodeError> {
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
) -> Result<InlineTensor<'a>, DecodeError> {
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
    let tensor = InlineTensor {
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
    if empty {
        Ok(())
    } else {
        Err(error("the hooks of a tensor are not an empty OrderedDict"))
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

fn check_bounds(tensor: &InlineTensor<'_>) -> Result<(), DecodeError> {
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
    let logical = if tensor.shape.contains(&0) {
        Some(0)
    } else {
        tensor
            .shape
            .iter()
            .try_fold(item, |bytes, &length| bytes.checked_mul(length))
    };
    match logical {
        Some(logical) if logical <= available => Ok(()),
        _ => Err(error(format!(
            "shape {:?} has more elements than its storage of {available} bytes",
            tensor.shape
        ))),
    }
}
