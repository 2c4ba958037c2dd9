//! The pickled wrappers that clients up to 0.5.0 register instead of descriptors.
//!
//! Three classes exist: `CudaIPCWrapper` (all releases since 0.4.2), `RawCudaIPCWrapper` and `CpuShmTensorWrapper` (0.4.7 and
//! 0.5.0). Each is an object without arguments whose members follow as a dict.

use super::Limits;
use super::globals::{Global, WrapperClass};
use super::machine::{Budget, Machine, Value, run};
use super::tensors::read_axes;
use crate::descriptor::{
    CpuShm, Cuda, CudaHandle, CudaRaw, TensorDescriptor, TensorMetadata, check_span,
};
use crate::wire::{DecodeError, name_shown};

fn error(message: impl Into<String>) -> DecodeError {
    DecodeError::at("pickled wrapper", message)
}

/// Reads a pickled wrapper into the descriptor that later releases send for the same tensor.
///
/// The result is [`TensorDescriptor::Cuda`], [`TensorDescriptor::CudaRaw`] or [`TensorDescriptor::CpuShm`]. The same rules
/// hold as for descriptors: no unknown member, equal ranks, the view inside its memory.
pub fn read_registration(pickle: &[u8], limits: &Limits) -> Result<TensorDescriptor, DecodeError> {
    let (machine, object, used) = run(pickle, &mut Budget::new(limits.max_opcodes))?;
    if used != pickle.len() {
        return Err(error(format!(
            "{} bytes follow the pickle",
            pickle.len() - used
        )));
    }
    let call = machine
        .call(object)
        .filter(|call| machine.tuple(call.arguments).is_some_and(<[_]>::is_empty))
        .ok_or_else(|| error("the result is not an object made without arguments"))?;
    let Value::Global(Global::Wrapper(class)) = call.callable else {
        return Err(error("the result is not one of LMCache's tensor wrappers"));
    };
    let members = call
        .state
        .and_then(|state| machine.dict(state))
        .ok_or_else(|| error("the object has no dict of members"))?;
    let mut members = Members::new(members)?;
    let descriptor = match class {
        WrapperClass::Cuda => TensorDescriptor::Cuda(cuda(&machine, &mut members)?),
        WrapperClass::RawCuda => TensorDescriptor::CudaRaw(raw_cuda(&machine, &mut members)?),
        WrapperClass::CpuShm => TensorDescriptor::CpuShm(cpu_shm(&machine, &mut members)?),
    };
    members.finish()?;
    Ok(descriptor)
}

fn cuda<'a>(machine: &Machine<'a>, members: &mut Members<'_, 'a>) -> Result<Cuda, DecodeError> {
    let handle = read_handle(machine, members.take("handle")?)?;
    let metadata = read_metadata(machine, members)?;
    check_span("handle[2]", &metadata, handle.storage_bytes)?;
    Ok(Cuda { handle, metadata })
}

fn raw_cuda<'a>(
    machine: &Machine<'a>,
    members: &mut Members<'_, 'a>,
) -> Result<CudaRaw, DecodeError> {
    const HANDLE: &str = "_ipc_handle_reserved";
    let ipc_handle = match members.take(HANDLE)? {
        Value::Bytes(bytes) => bytes.try_into().ok(),
        _ => None,
    };
    let ipc_handle = ipc_handle.ok_or_else(|| DecodeError::at(HANDLE, "not 64 bytes"))?;
    let nbytes = unsigned("_nbytes", members.take("_nbytes")?)?;
    members.take_none("handle")?;
    let metadata = read_metadata(machine, members)?;
    // The server of that time mapped the allocation and used it from its first byte on.
    if metadata.storage_offset != 0 {
        return Err(DecodeError::at(
            "storage_offset",
            format!("{}; allowed is 0", metadata.storage_offset),
        ));
    }
    check_span("_nbytes", &metadata, nbytes)?;
    Ok(CudaRaw {
        ipc_handle,
        alloc_offset: 0,
        nbytes,
        metadata,
    })
}

fn cpu_shm<'a>(
    machine: &Machine<'a>,
    members: &mut Members<'_, 'a>,
) -> Result<CpuShm, DecodeError> {
    let shm_name = text("shm_name", members.take("shm_name")?)?;
    let nbytes = unsigned("nbytes", members.take("nbytes")?)?;
    members.take_none("handle")?;
    let metadata = read_metadata(machine, members)?;
    check_span("nbytes", &metadata, nbytes)?;
    Ok(CpuShm {
        shm_name,
        nbytes,
        metadata,
    })
}

fn read_metadata<'a>(
    machine: &Machine<'a>,
    members: &mut Members<'_, 'a>,
) -> Result<TensorMetadata, DecodeError> {
    Ok(TensorMetadata {
        dtype: match members.take("dtype")? {
            Value::Global(Global::Dtype(dtype)) => dtype,
            _ => return Err(DecodeError::at("dtype", "not an element type of torch")),
        },
        shape: read_axes(machine, "shape", members.take("shape")?)?,
        stride: read_axes(machine, "stride", members.take("stride")?)?,
        storage_offset: unsigned("storage_offset", members.take("storage_offset")?)?,
        device_uuid: text("device_uuid", members.take("device_uuid")?)?,
    })
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

    /// A member that these classes inherit and do not use.
    fn take_none(&mut self, name: &'static str) -> Result<(), DecodeError> {
        match self.take(name)? {
            Value::None => Ok(()),
            _ => Err(DecodeError::at(name, "not None")),
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
        Err(error(format!("one of the members {names:?} is not known")))
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

fn text(field: &'static str, value: Value<'_>) -> Result<String, DecodeError> {
    match value {
        Value::Text(text) => Ok(text.to_owned()),
        _ => Err(DecodeError::at(field, "not a text")),
    }
}

fn optional_bytes(field: &'static str, value: Value<'_>) -> Result<Option<Vec<u8>>, DecodeError> {
    match value {
        Value::None => Ok(None),
        Value::Bytes(bytes) => Ok(Some(bytes.to_owned())),
        _ => Err(DecodeError::at(field, "neither bytes nor None")),
    }
}
