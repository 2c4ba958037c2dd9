//! From bytes to [`TensorDescriptor`].

use super::{
    CpuShm, Cuda, CudaHandle, CudaRaw, CudaVmm, Dtype, MAX_BODY_BYTES, MAX_RANK, OpaqueVendor,
    TensorDescriptor, TensorMetadata, VmmHandle, check_allocation, check_span,
};
use crate::wire::{DecodeError, InField, Reader, name_shown};

/// First byte of a pickle of protocol 2 and later.
const PICKLE: u8 = 0x80;

/// The only version of the descriptors so far.
const VERSION: u64 = 1;

/// Most keys a map of a descriptor may have; real ones have at most 9.
const MAX_KEYS: usize = 16;

pub(super) fn descriptor(body: &[u8]) -> Result<TensorDescriptor, DecodeError> {
    if body.len() > MAX_BODY_BYTES {
        return Err(DecodeError::new(format!(
            "a descriptor of {} bytes; at most {MAX_BODY_BYTES} are allowed",
            body.len()
        )));
    }
    if body.first() == Some(&PICKLE) {
        return Ok(TensorDescriptor::Legacy {
            pickle: body.to_owned(),
        });
    }
    let mut reader = Reader::new(body);
    let mut fields = Fields::read(&mut reader)?;
    reader.finish()?;
    match fields.take("type", Reader::str)? {
        "cpu_shm" => cpu_shm(fields).map(TensorDescriptor::CpuShm),
        "cuda" => cuda(fields).map(TensorDescriptor::Cuda),
        "cuda_raw" => cuda_raw(fields).map(TensorDescriptor::CudaRaw),
        "cuda_vmm" => cuda_vmm(fields).map(TensorDescriptor::CudaVmm),
        "musa" => opaque(OpaqueVendor::Musa, fields, body),
        "npu" => opaque(OpaqueVendor::Npu, fields, body),
        other => Err(DecodeError::at(
            "type",
            format!(
                "{:?}; allowed are cpu_shm, cuda, cuda_raw, cuda_vmm, musa and npu",
                name_shown(other)
            ),
        )),
    }
}

fn cpu_shm(mut fields: Fields<'_>) -> Result<CpuShm, DecodeError> {
    let descriptor = CpuShm {
        shm_name: fields.take("shm_name", Reader::str)?.to_owned(),
        nbytes: fields.take("nbytes", Reader::int)?,
        metadata: version_and_metadata(&mut fields)?,
    };
    fields.finish()?;
    check_span("nbytes", &descriptor.metadata, descriptor.nbytes)?;
    Ok(descriptor)
}

fn cuda(mut fields: Fields<'_>) -> Result<Cuda, DecodeError> {
    let descriptor = Cuda {
        handle: fields.take("handle", handle)?,
        metadata: version_and_metadata(&mut fields)?,
    };
    fields.finish()?;
    check_span(
        "handle[2]",
        &descriptor.metadata,
        descriptor.handle.storage_bytes,
    )?;
    Ok(descriptor)
}

fn cuda_raw(mut fields: Fields<'_>) -> Result<CudaRaw, DecodeError> {
    let descriptor = CudaRaw {
        ipc_handle: fields.take("ipc_handle", exactly)?,
        alloc_offset: fields.take("alloc_offset", Reader::int)?,
        nbytes: fields.take("nbytes", Reader::int)?,
        metadata: version_and_metadata(&mut fields)?,
    };
    fields.finish()?;
    check_span("nbytes", &descriptor.metadata, descriptor.nbytes)?;
    Ok(descriptor)
}

fn cuda_vmm(mut fields: Fields<'_>) -> Result<CudaVmm, DecodeError> {
    let kind = fields.take("kind", Reader::str)?;
    let blob = fields.take("fabric_blob", Reader::optional_bin)?;
    let handle = match (kind, blob) {
        ("posix_fd", None) => VmmHandle::PosixFd,
        ("fabric", Some(blob)) => VmmHandle::Fabric(blob.to_owned()),
        ("posix_fd", Some(_)) => {
            return Err(DecodeError::at(
                "fabric_blob",
                "must be nil for the kind posix_fd",
            ));
        }
        ("fabric", None) => {
            return Err(DecodeError::at(
                "fabric_blob",
                "must not be nil for the kind fabric",
            ));
        }
        (other, _) => {
            return Err(DecodeError::at(
                "kind",
                format!("{:?}; allowed are posix_fd and fabric", name_shown(other)),
            ));
        }
    };
    let descriptor = CudaVmm {
        export_id: fields.take("export_id", exactly)?,
        handle,
        alloc_size: fields.take("alloc_size", Reader::int)?,
        alloc_offset: fields.take("alloc_offset", Reader::int)?,
        nbytes: fields.take("nbytes", Reader::int)?,
        metadata: version_and_metadata(&mut fields)?,
    };
    fields.finish()?;
    check_allocation(&descriptor)?;
    Ok(descriptor)
}

/// Checks only the version: the members of these vendors are opaque here.
fn opaque(
    vendor: OpaqueVendor,
    mut fields: Fields<'_>,
    body: &[u8],
) -> Result<TensorDescriptor, DecodeError> {
    version(&mut fields)?;
    Ok(TensorDescriptor::Opaque {
        vendor,
        body: body.to_owned(),
    })
}

fn version(fields: &mut Fields<'_>) -> Result<(), DecodeError> {
    let found: u64 = fields.take("version", Reader::int)?;
    match found {
        VERSION => Ok(()),
        _ => Err(DecodeError::at(
            "version",
            format!("{found}; allowed is {VERSION}"),
        )),
    }
}

fn version_and_metadata(fields: &mut Fields<'_>) -> Result<TensorMetadata, DecodeError> {
    version(fields)?;
    fields.take("metadata", metadata)
}

fn metadata(reader: &mut Reader<'_>) -> Result<TensorMetadata, DecodeError> {
    let mut fields = Fields::read(reader)?;
    let metadata = TensorMetadata {
        dtype: Dtype::parse("dtype", fields.take("dtype", Reader::str)?)?,
        shape: fields.take("shape", axes)?,
        stride: fields.take("stride", axes)?,
        storage_offset: fields.take("storage_offset", Reader::int)?,
        device_uuid: fields.take("device_uuid", Reader::str)?.to_owned(),
    };
    fields.finish()?;
    if metadata.shape.len() != metadata.stride.len() {
        return Err(DecodeError::at(
            "stride",
            format!(
                "{} strides; allowed are as many as the shape has axes, {}",
                metadata.stride.len(),
                metadata.shape.len()
            ),
        ));
    }
    Ok(metadata)
}

fn axes(reader: &mut Reader<'_>) -> Result<Vec<u64>, DecodeError> {
    let rank = reader.array_len()?;
    if rank > MAX_RANK {
        return Err(DecodeError::new(format!(
            "{rank} axes; at most {MAX_RANK} are allowed"
        )));
    }
    (0..rank).map(|axis| reader.int().at_index(axis)).collect()
}

fn handle(reader: &mut Reader<'_>) -> Result<CudaHandle, DecodeError> {
    let members = reader.array_len()?;
    if members != 8 {
        return Err(DecodeError::new(format!(
            "{members} members; allowed are exactly 8"
        )));
    }
    Ok(CudaHandle {
        device: reader.int().at_index(0)?,
        memory: owned(reader).at_index(1)?,
        storage_bytes: reader.int().at_index(2)?,
        storage_offset_bytes: reader.int().at_index(3)?,
        ref_counter: owned(reader).at_index(4)?,
        ref_counter_index: reader.int().at_index(5)?,
        event: owned(reader).at_index(6)?,
        event_sync_required: reader.bool().at_index(7)?,
    })
}

fn owned(reader: &mut Reader<'_>) -> Result<Option<Vec<u8>>, DecodeError> {
    Ok(reader.optional_bin()?.map(<[u8]>::to_owned))
}

fn exactly<const N: usize>(reader: &mut Reader<'_>) -> Result<[u8; N], DecodeError> {
    let bytes = reader.bin()?;
    bytes
        .try_into()
        .map_err(|_| DecodeError::new(format!("{} bytes; allowed are exactly {N}", bytes.len())))
}

/// The entries of a map whose keys must all be known, in any order, each once.
struct Fields<'a> {
    entries: Vec<(&'a str, &'a [u8])>,
}

impl<'a> Fields<'a> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let mut entries: Vec<(&str, &[u8])> = Vec::new();
        reader.map(|name, reader| {
            if entries.len() == MAX_KEYS {
                return Err(DecodeError::new(format!(
                    "more than the allowed {MAX_KEYS} keys"
                )));
            }
            if entries.iter().any(|(known, _)| *known == name) {
                return Err(DecodeError::new("given twice"));
            }
            entries.push((name, reader.raw()?));
            Ok(())
        })?;
        Ok(Fields { entries })
    }

    fn take<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&mut Reader<'a>) -> Result<T, DecodeError>,
    ) -> Result<T, DecodeError> {
        let found = self.entries.iter().position(|(known, _)| *known == name);
        let found = found.ok_or_else(|| DecodeError::at(name, "missing"))?;
        let (_, value) = self.entries.swap_remove(found);
        read(&mut Reader::new(value)).in_field(name)
    }

    /// Whatever was not taken is not a field of this structure.
    fn finish(self) -> Result<(), DecodeError> {
        match self.entries.first() {
            None => Ok(()),
            Some((name, _)) => Err(DecodeError::at(name_shown(name), "this field is not known")),
        }
    }
}
