//! The pickled CUDA wrapper that clients up to 0.5.0 register instead of a descriptor.

use super::Limits;
use super::globals::Global;
use super::machine::{Budget, Machine, Value, run};
use super::tensors::read_axes;
use crate::descriptor::{Cuda, CudaHandle, TensorMetadata, check_span};
use crate::wire::{DecodeError, name_shown};

fn error(message: impl Into<String>) -> DecodeError {
    DecodeError::at("pickled wrapper", message)
}

/// Reads the pickle of a `CudaIPCWrapper` into the descriptor that later releases send for the same tensor.
///
/// The same rules as for descriptors: no unknown member, equal ranks, the view inside the storage.
pub fn read_registration(pickle: &[u8], limits: &Limits) -> Result<Cuda, DecodeError> {
    let (machine, object, used) = run(pickle, &mut Budget::new(limits.max_opcodes))?;
    if used != pickle.len() {
        return Err(error(format!(
            "{} bytes follow the pickle",
            pickle.len() - used
        )));
    }
    let call = machine
        .call(object)
        .filter(|call| call.callable == Value::Global(Global::CudaWrapper))
        .filter(|call| machine.tuple(call.arguments).is_some_and(<[_]>::is_empty))
        .ok_or_else(|| error("the result is not a CudaIPCWrapper"))?;
    let members = call
        .state
        .and_then(|state| machine.dict(state))
        .ok_or_else(|| error("the object has no dict of members"))?;

    let mut members = Members::new(members)?;
    let handle = read_handle(&machine, members.take("handle")?)?;
    let dtype = match members.take("dtype")? {
        Value::Global(Global::Dtype(dtype)) => dtype,
        _ => return Err(DecodeError::at("dtype", "not an element type of torch")),
    };
    let metadata = TensorMetadata {
        dtype,
        shape: read_axes(&machine, "shape", members.take("shape")?)?,
        stride: read_axes(&machine, "stride", members.take("stride")?)?,
        storage_offset: unsigned("storage_offset", members.take("storage_offset")?)?,
        device_uuid: match members.take("device_uuid")? {
            Value::Text(uuid) => uuid.to_owned(),
            _ => return Err(DecodeError::at("device_uuid", "not a text")),
        },
    };
    members.finish()?;
    check_span("handle", &metadata, handle.storage_bytes)?;
    Ok(Cuda { handle, metadata })
}

/// The members of the object, each of which must be taken once.
struct Members<'m, 'a> {
    all: &'m [(Value<'a>, Value<'a>)],
    taken: usize,
}

impl<'m, 'a> Members<'m, 'a> {
    /// More than an object of any release has.
    const MOST: usize = 16;

    fn new(all: &'m [(Value<'a>, Value<'a>)]) -> Result<Self, DecodeError> {
        if all.len() > Self::MOST {
            return Err(error(format!(
                "{} members; at most {} are allowed",
                all.len(),
                Self::MOST
            )));
        }
        Ok(Members { all, taken: 0 })
    }

    fn take(&mut self, name: &'static str) -> Result<Value<'a>, DecodeError> {
        let mut found = self.all.iter().filter(|(key, _)| *key == Value::Text(name));
        match (found.next(), found.next()) {
            (Some((_, value)), None) => {
                self.taken += 1;
                Ok(*value)
            }
            (None, _) => Err(DecodeError::at(name, "missing")),
            (Some(_), Some(_)) => Err(DecodeError::at(name, "given twice")),
        }
    }

    fn finish(self) -> Result<(), DecodeError> {
        if self.taken == self.all.len() {
            return Ok(());
        }
        let names: Vec<_> = self
            .all
            .iter()
            .map(|(key, _)| match key {
                Value::Text(name) => name_shown(name),
                _ => "(not a text)",
            })
            .collect();
        Err(error(format!(
            "members {names:?}; allowed are handle, dtype, shape, stride, storage_offset and device_uuid"
        )))
    }
}

fn read_handle<'a>(machine: &Machine<'a>, handle: Value<'a>) -> Result<CudaHandle, DecodeError> {
    let Some(
        &[
            Value::Int(device),
            memory,
            storage_bytes,
            storage_offset_bytes,
            ref_counter,
            ref_counter_index,
            event,
            sync,
        ],
    ) = machine.tuple(handle)
    else {
        return Err(DecodeError::at(
            "handle",
            "not a tuple of 8 that starts with an integer",
        ));
    };
    Ok(CudaHandle {
        device,
        memory: optional_bytes("handle[1]", memory)?,
        storage_bytes: unsigned("handle[2]", storage_bytes)?,
        storage_offset_bytes: unsigned("handle[3]", storage_offset_bytes)?,
        ref_counter: optional_bytes("handle[4]", ref_counter)?,
        ref_counter_index: unsigned("handle[5]", ref_counter_index)?,
        event: optional_bytes("handle[6]", event)?,
        event_sync_required: match sync {
            Value::Bool(required) => required,
            // PyTorch gives None for a storage without memory.
            Value::None => false,
            _ => return Err(DecodeError::at("handle[7]", "not a bool")),
        },
    })
}

fn unsigned(field: &'static str, value: Value<'_>) -> Result<u64, DecodeError> {
    match value {
        Value::Int(number) => u64::try_from(number).ok(),
        _ => None,
    }
    .ok_or_else(|| DecodeError::at(field, "not an integer of 0 or more"))
}

fn optional_bytes(field: &'static str, value: Value<'_>) -> Result<Option<Vec<u8>>, DecodeError> {
    match value {
        Value::None => Ok(None),
        Value::Bytes(bytes) => Ok(Some(bytes.to_owned())),
        _ => Err(DecodeError::at(field, "neither bytes nor None")),
    }
}
