//! The pickled wrappers that clients up to 0.5.5 register instead of descriptors.
//!
//! Four classes exist: `CudaIPCWrapper` (0.4.2 to 0.5.5), `RawCudaIPCWrapper` (from 0.4.5; with 0.5.5 it has an offset),
//! `CpuShmTensorWrapper` (from 0.4.7) and `VmmCudaIPCWrapper` (0.5.5). Each is an object without arguments whose members
//! follow as a dict.

use super::PickleLimits;
use super::globals::{Global, WrapperClass};
use super::machine::{Budget, Machine, Value, run};
use super::tensors::read_axes;
use crate::descriptor::{
    CpuShm, Cuda, CudaHandle, CudaRaw, CudaVmm, TensorDescriptor, TensorMetadata, VmmHandle,
    check_allocation, check_span,
};
use crate::wire::{DecodeError, name_shown};

fn error(message: impl Into<String>) -> DecodeError {
    DecodeError::at("pickled wrapper", message)
}

/// Reads a pickled wrapper into the descriptor that later releases send for the same tensor.
///
/// The result is never [`TensorDescriptor::Legacy`] or [`TensorDescriptor::Opaque`]. The same rules hold as for
/// descriptors: no unknown member, equal ranks, the view inside its memory.
pub fn read_registration(
    pickle: &[u8],
    limits: &PickleLimits,
) -> Result<TensorDescriptor, DecodeError> {
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
        WrapperClass::VmmCuda => TensorDescriptor::CudaVmm(vmm_cuda(&machine, &mut members)?),
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
    let ipc_handle = exactly("_ipc_handle_reserved", members)?;
    let nbytes = unsigned("_nbytes", members.take("_nbytes")?)?;
    // Absent up to 0.5.4, whose server used the allocation from its first byte on.
    let alloc_offset = match members.take_if_any("_alloc_offset")? {
        Some(offset) => {
            members.take_zero("_opens")?;
            unsigned("_alloc_offset", offset)?
        }
        None => 0,
    };
    members.take_none("handle")?;
    let metadata = metadata_at_start(machine, members)?;
    check_span("_nbytes", &metadata, nbytes)?;
    Ok(CudaRaw {
        ipc_handle,
        alloc_offset,
        nbytes,
        metadata,
    })
}

fn vmm_cuda<'a>(
    machine: &Machine<'a>,
    members: &mut Members<'_, 'a>,
) -> Result<CudaVmm, DecodeError> {
    let export_id = exactly("_export_id", members)?;
    let kind = text("_kind", members.take("_kind")?)?;
    let blob = optional_bytes("_fabric_blob", members.take("_fabric_blob")?)?;
    let handle = match (&*kind, blob) {
        ("posix_fd", None) => VmmHandle::PosixFd,
        ("fabric", Some(blob)) => VmmHandle::Fabric(blob),
        (kind, blob) => {
            return Err(DecodeError::at(
                "_kind",
                format!(
                    "{:?} {} a blob; allowed are posix_fd without and fabric with one",
                    name_shown(kind),
                    if blob.is_some() { "with" } else { "without" },
                ),
            ));
        }
    };
    members.take_none("_fd")?;
    members.take_zero("_opens")?;
    // The same bytes again, for comparing wrappers.
    if members.take("handle")? != Value::Bytes(&export_id) {
        return Err(DecodeError::at("handle", "not the export id"));
    }
    let alloc_size = unsigned("_alloc_size", members.take("_alloc_size")?)?;
    let alloc_offset = unsigned("_alloc_offset", members.take("_alloc_offset")?)?;
    let nbytes = unsigned("_nbytes", members.take("_nbytes")?)?;
    let metadata = metadata_at_start(machine, members)?;
    let descriptor = CudaVmm {
        export_id,
        handle,
        alloc_size,
        alloc_offset,
        nbytes,
        metadata,
    };
    check_allocation(&descriptor)?;
    Ok(descriptor)
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

/// The view of a tensor that begins with its memory.
fn metadata_at_start<'a>(
    machine: &Machine<'a>,
    members: &mut Members<'_, 'a>,
) -> Result<TensorMetadata, DecodeError> {
    let metadata = read_metadata(machine, members)?;
    match metadata.storage_offset {
        0 => Ok(metadata),
        offset => Err(DecodeError::at(
            "storage_offset",
            format!("{offset}; allowed is 0"),
        )),
    }
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

/// The members of the object. Each one must be taken once.
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

    /// A member that only some releases have.
    fn take_if_any(&mut self, name: &'static str) -> Result<Option<Value<'a>>, DecodeError> {
        if self.all.iter().any(|(key, _)| *key == Value::Text(name)) {
            self.take(name).map(Some)
        } else {
            Ok(None)
        }
    }

    /// A count that is 0 on the wire: the sender never opens its own memory.
    fn take_zero(&mut self, name: &'static str) -> Result<(), DecodeError> {
        match self.take(name)? {
            Value::Int(0) => Ok(()),
            _ => Err(DecodeError::at(name, "not 0")),
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

fn exactly<const N: usize>(
    name: &'static str,
    members: &mut Members<'_, '_>,
) -> Result<[u8; N], DecodeError> {
    let bytes = match members.take(name)? {
        Value::Bytes(bytes) => bytes.try_into().ok(),
        _ => None,
    };
    bytes.ok_or_else(|| DecodeError::at(name, format!("not {N} bytes")))
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
