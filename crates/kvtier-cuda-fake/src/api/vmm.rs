//! Virtual memory management: physical allocations, reservations, mappings, and their shareable handles.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;

use super::exports;
use super::ipc::{Handle, MEMORY_FABRIC};
use super::memory::note_use;
use crate::abi::*;
use crate::segment::{self, Mapping, Segment};
use crate::space::{GRANULE, Kind, Physical, PhysicalFile, Piece, Space};
use crate::world::{State, only, unknown, world};

/// The allocation properties of a caller: pinned memory of a device.
pub(super) fn check<'a>(prop: *const AllocationProp) -> Outcome<&'a AllocationProp> {
    let prop = &array(prop, 1, "the allocation properties")?[0];
    if prop.kind != 1 || prop.location.kind != LOCATION_DEVICE {
        return Err(wrong!(
            ERROR_INVALID_VALUE,
            "allocation of type {} at a location of type {}",
            prop.kind,
            prop.location.kind
        ));
    }
    world().state.lock().device(prop.location.id)?;
    if prop.handle_types & HANDLE_FABRIC != 0 {
        fabric()?;
    }
    Ok(prop)
}

fn fabric() -> Outcome {
    if world().script.lock().fabric {
        Ok(())
    } else {
        Err(Fault::Code(ERROR_NOT_PERMITTED))
    }
}

fn physical(state: &State, handle: u64) -> Outcome<&Arc<Physical>> {
    state
        .physical
        .get(&handle)
        .ok_or_else(|| unknown("physical allocation", handle))
}

exports! {
    fn cuMemCreate(to: *mut u64, bytes: usize, prop: *const AllocationProp, flags: u64) {
        let prop = check(prop)?;
        only(flags as u32, 0)?;
        let (device, bytes) = (prop.location.id as usize, bytes as u64);
        if bytes == 0 || !bytes.is_multiple_of(GRANULE) {
            return Err(wrong!(ERROR_INVALID_VALUE, "{bytes} bytes: not a multiple of the granularity, {GRANULE}"));
        }
        let mut state = world().state.lock();
        let total = world().script.lock().memory;
        let used = &mut state.devices()[device].used;
        if bytes > total.saturating_sub(*used) {
            return Err(Fault::Code(ERROR_OUT_OF_MEMORY));
        }
        *used += bytes;
        let id = state.handle();
        let segment = Segment::create(&format!("p{id:x}"), bytes).ok_or(Fault::Code(ERROR_OUT_OF_MEMORY))?;
        let physical = Physical {
            id, device, bytes, segment: PhysicalFile::Own(segment), shareable: prop.handle_types,
        };
        state.physical.insert(id, Arc::new(physical));
        put(to, id)
    }

    fn cuMemRelease(handle: u64) {
        let mut state = world().state.lock();
        match state.physical.remove(&handle) {
            Some(physical) => {
                // What is mapped stays; the bytes are counted until here, which is close enough.
                if matches!(physical.segment, PhysicalFile::Own(_)) {
                    state.devices()[physical.device].used -= physical.bytes;
                }
                Ok(())
            }
            None => Err(unknown("physical allocation", handle)),
        }
    }

    fn cuMemExportToShareableHandle(to: *mut std::ffi::c_void, handle: u64, kind: u32, flags: u64) {
        only(flags as u32, 0)?;
        let state = world().state.lock();
        let physical = physical(&state, handle)?;
        if physical.shareable & kind == 0 {
            return Err(wrong!(ERROR_INVALID_VALUE, "not created to be shared by handles of type {kind}"));
        }
        match kind {
            HANDLE_POSIX_FD => {
                let fd = physical.fd().try_clone().map_err(|_| Fault::Code(ERROR_OPERATING_SYSTEM))?;
                put(to.cast(), fd.as_raw_fd())?;
                std::mem::forget(fd);
                Ok(())
            }
            HANDLE_FABRIC => {
                fabric()?;
                let handle = Handle::ours(MEMORY_FABRIC, physical.id, physical.bytes, physical.device)?;
                put(to.cast(), handle.to_bytes())
            }
            _ => Err(wrong!(ERROR_INVALID_VALUE, "handles of type {kind}")),
        }
    }

    fn cuMemImportFromShareableHandle(to: *mut u64, from: *mut std::ffi::c_void, kind: u32) {
        let mut state = world().state.lock();
        // Imported memory belongs to the device whose context imports it.
        let device = state.current()?;
        let (fd, shareable) = match kind {
            HANDLE_POSIX_FD => {
                let number = from.addr() as i32;
                if !segment::is_ours(number) {
                    return Err(wrong!(ERROR_INVALID_VALUE, "descriptor {number} is no exported allocation"));
                }
                let fd = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned();
                (fd.ok(), HANDLE_POSIX_FD)
            }
            HANDLE_FABRIC => {
                fabric()?;
                let handle = Handle::parse(from.cast_const().cast(), MEMORY_FABRIC)?;
                (segment::open_of(&handle.owner, &format!("p{:x}", handle.id)), HANDLE_FABRIC)
            }
            _ => return Err(wrong!(ERROR_INVALID_VALUE, "handles of type {kind}")),
        };
        let fd = fd.ok_or(Fault::Code(ERROR_INVALID_HANDLE))?;
        let bytes = segment::bytes_of(fd.as_raw_fd());
        let id = state.handle();
        let physical = Physical { id, device, bytes, segment: PhysicalFile::Imported(fd), shareable };
        state.physical.insert(id, Arc::new(physical));
        put(to, id)
    }

    fn cuMemAddressReserve(to: *mut u64, bytes: usize, align: usize, hint: u64, flags: u64) {
        only(flags as u32, 0)?;
        let bytes = bytes as u64;
        if bytes == 0 || !bytes.is_multiple_of(GRANULE) || (align != 0 && !align.is_power_of_two()) || align as u64 > GRANULE {
            return Err(wrong!(ERROR_INVALID_VALUE, "{bytes} bytes aligned to {align}; the granularity is {GRANULE}"));
        }
        _ = hint;
        let mapping = Mapping::reserve(bytes).ok_or(Fault::Code(ERROR_OUT_OF_MEMORY))?;
        let kind = Kind::Reserved { pieces: BTreeMap::new() };
        put(to, world().state.lock().space.add(bytes, mapping, kind)?)
    }

    fn cuMemAddressFree(at: u64, bytes: usize) {
        let mut state = world().state.lock();
        match state.space.get(at).map(|region| (region.bytes, &region.kind)) {
            Some((whole, Kind::Reserved { pieces })) if whole == bytes as u64 => {
                if !pieces.is_empty() {
                    return Err(wrong!(ERROR_INVALID_VALUE, "{at:#x} still has {} mappings", pieces.len()));
                }
            }
            _ => return Err(wrong!(ERROR_INVALID_VALUE, "no reservation of {bytes} bytes starts at {at:#x}")),
        }
        state.space.remove(at);
        Ok(())
    }

    fn cuMemMap(at: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        only(flags as u32, 0)?;
        let mut state = world().state.lock();
        let physical = physical(&state, handle)?.clone();
        let bytes = bytes as u64;
        if offset != 0 || bytes > physical.bytes {
            return Err(wrong!(
                ERROR_INVALID_VALUE, "{bytes} bytes from {offset} of an allocation of {}", physical.bytes
            ));
        }
        let (start, mapping, pieces) = state.space.reservation(at, bytes)?;
        if pieces.range(..start + bytes).next_back().is_some_and(|(o, piece)| o + piece.bytes > start) {
            return Err(wrong!(ERROR_ALREADY_MAPPED, "something is mapped within {bytes} bytes at {at:#x}"));
        }
        if !mapping.place(start, bytes, physical.fd()) {
            return Err(Fault::Code(ERROR_MAP_FAILED));
        }
        pieces.insert(start, Piece { bytes, _physical: physical, devices: Vec::new() });
        Ok(())
    }

    fn cuMemUnmap(at: u64, bytes: usize) {
        let mut state = world().state.lock();
        let (start, mapping, pieces) = state.space.reservation(at, bytes as u64)?;
        for piece in Space::pieces(pieces, start, bytes as u64)? {
            pieces.remove(&piece);
        }
        note_use(mapping.in_use(), "cuMemUnmap", at);
        mapping.clear(start, bytes as u64);
        Ok(())
    }

    fn cuMemSetAccess(at: u64, bytes: usize, access: *const AccessDesc, count: usize) {
        let mut state = world().state.lock();
        let access = array(access, count, "the access descriptors")?;
        for a in access {
            if a.location.kind != LOCATION_DEVICE || !matches!(a.flags, 0 | 1 | ACCESS_READ_WRITE) {
                return Err(wrong!(ERROR_INVALID_VALUE, "access {} at a location of type {}", a.flags, a.location.kind));
            }
            state.device(a.location.id)?;
        }
        let (start, _, pieces) = state.space.reservation(at, bytes as u64)?;
        for offset in Space::pieces(pieces, start, bytes as u64)? {
            let Some(piece) = pieces.get_mut(&offset) else { continue };
            for a in access {
                piece.devices.retain(|d| *d != a.location.id as usize);
                if a.flags == ACCESS_READ_WRITE {
                    piece.devices.push(a.location.id as usize);
                }
            }
        }
        Ok(())
    }
}
