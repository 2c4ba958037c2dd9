//! The stream inside a pickled CPU tensor: what `torch.save` wrote before its zip format.
//!
//! Five pickles back to back (magic number, stream version, system info, storage record, list of storage keys), then the
//! element count as u64 and the elements, both little-endian. The elements are borrowed from the stream, never copied.

use super::globals::Global;
use super::machine::{Budget, Machine, Value, run};
use crate::descriptor::Dtype;
use crate::wire::{DecodeError, name_shown};

/// The first two pickles: the magic number 0x1950a86a20f9469cfc6c and the stream version 1001, as protocol 2 writes them.
pub(super) const PREAMBLE: &[u8] =
    b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.";

/// Version of the stream, repeated in the system info.
const STREAM_VERSION: i64 = 1001;

/// The memory of one pickled tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Storage<'a> {
    /// Element type; None for untyped memory, where the tensor names it.
    pub(super) dtype: Option<Dtype>,
    /// All elements of the storage.
    pub(super) data: &'a [u8],
}

fn error(message: impl Into<String>) -> DecodeError {
    DecodeError::at("pickle storage", message)
}

pub(super) fn read<'a>(stream: &'a [u8], budget: &mut Budget) -> Result<Storage<'a>, DecodeError> {
    let rest = stream.strip_prefix(PREAMBLE).ok_or_else(|| {
        error("it does not start with the magic number and version of a torch.save stream")
    })?;
    let (machine, info, used) = run(rest, budget)?;
    check_system(&machine, info)?;
    let rest = &rest[used..];

    let (machine, record, used) = run(rest, budget)?;
    let record = read_record(&machine, record)?;
    let rest = &rest[used..];

    let (machine, keys, used) = run(rest, budget)?;
    if machine.list(keys) != Some(&[Value::Text(record.key)]) {
        return Err(error(format!(
            "its list of keys is not just {:?}",
            name_shown(record.key)
        )));
    }
    let rest = &rest[used..];

    let Some((count, data)) = rest.split_first_chunk::<8>() else {
        return Err(error(format!(
            "8 bytes of element count wanted, {} are left",
            rest.len()
        )));
    };
    let count = u64::from_le_bytes(*count);
    if count != record.count {
        return Err(error(format!(
            "{count} elements follow a record of {}",
            record.count
        )));
    }
    let wanted = count.checked_mul(record.dtype.map_or(1, Dtype::item_size));
    if wanted != Some(data.len() as u64) {
        return Err(error(format!(
            "{} bytes follow for {count} elements",
            data.len()
        )));
    }
    Ok(Storage {
        dtype: record.dtype,
        data,
    })
}

fn check_system<'a>(machine: &Machine<'a>, info: Value<'a>) -> Result<(), DecodeError> {
    let info = machine
        .dict(info)
        .ok_or_else(|| error("its system info is not a dict"))?;
    for (name, wanted) in [
        ("protocol_version", Value::Int(STREAM_VERSION)),
        ("little_endian", Value::Bool(true)),
    ] {
        let found = info.iter().rev().find(|(key, _)| *key == Value::Text(name));
        if found.map(|(_, value)| *value) != Some(wanted) {
            return Err(error(format!("{name} is not {wanted:?}")));
        }
    }
    Ok(())
}

struct StorageRecord<'a> {
    dtype: Option<Dtype>,
    key: &'a str,
    count: u64,
}

fn read_record<'a>(
    machine: &Machine<'a>,
    record: Value<'a>,
) -> Result<StorageRecord<'a>, DecodeError> {
    let members = machine.persistent(record).and_then(|id| machine.tuple(id));
    let Some(
        &[
            Value::Text("storage"),
            Value::Global(class),
            Value::Text(key),
            Value::Text(location),
            Value::Int(count),
            Value::None,
        ],
    ) = members
    else {
        return Err(error(
            "its record is not (\"storage\", class, key, location, count, None)",
        ));
    };
    let dtype = match class {
        Global::TypedStorage(dtype) => Some(dtype),
        Global::UntypedStorage => None,
        other => return Err(error(format!("{other:?} is not a storage class"))),
    };
    if location != "cpu" {
        return Err(error(format!(
            "its memory is on {:?}; allowed is \"cpu\"",
            name_shown(location)
        )));
    }
    let count = u64::try_from(count).map_err(|_| error(format!("an element count of {count}")))?;
    Ok(StorageRecord { dtype, key, count })
}
