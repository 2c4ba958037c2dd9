//! Virtual memory management: physical allocations, reservations, mappings, and their shareable handles.

use std::os::fd::{BorrowedFd, IntoRawFd as _};

use super::exports;
use super::memory::note_use;
use crate::abi::*;
use crate::segment::{self, Mapping, Segment};
use crate::space::{GRANULE, MappedPart, RegionKind};
use crate::world::{Physical, WorldState, only, unknown, world};

fn physical(state: &WorldState, handle: u64) -> CudaResult<&Physical> {
    let found = state.physical.get(&handle);
    found.ok_or_else(|| unknown("physical allocation", handle))
}

exports! {
    fn cuMemCreate(to: *mut u64, bytes: usize, prop: *const AllocationProp, flags: u64) {
        only(flags as u32, 0)?;
        let prop = &array(prop, 1, "the allocation properties")?[0];
        let mut state = world().state.lock();
        let device = state.device(prop.location.id)?;
        if prop.kind != 1 || prop.location.kind != LOCATION_DEVICE || bytes == 0 || !(bytes as u64).is_multiple_of(GRANULE) {
            return Err(wrong!(ERROR_INVALID_VALUE, "{bytes} bytes: not pinned memory of a device in granules of {GRANULE}"));
        }
        let id = state.handle();
        let (segment, fd) = Segment::create('p', id, bytes as u64)?;
        state.physical.insert(id, Physical { device, fd, segment: Some(segment) });
        put(to, id)
    }

    fn cuMemRelease(handle: u64) {
        // What is mapped stays.
        let released = world().state.lock().physical.remove(&handle);
        released.map(drop).ok_or_else(|| unknown("physical allocation", handle))
    }

    fn cuMemExportToShareableHandle(to: *mut std::ffi::c_void, handle: u64, kind: u32, flags: u64) {
        only(flags as u32, 0)?;
        let state = world().state.lock();
        let physical = physical(&state, handle)?;
        match (kind, &physical.segment) {
            (HANDLE_POSIX_FD, _) => match physical.fd.try_clone() {
                Ok(fd) => put(to.cast(), fd.into_raw_fd()),
                Err(_) => Err(Fault::Code(ERROR_OUT_OF_MEMORY)),
            },
            (HANDLE_FABRIC, Some(segment)) => put(to.cast(), segment.handle(physical.device)),
            _ => Err(wrong!(ERROR_INVALID_VALUE, "a handle of type {kind}, or of imported memory")),
        }
    }

    fn cuMemImportFromShareableHandle(to: *mut u64, from: *mut std::ffi::c_void, kind: u32) {
        let mut state = world().state.lock();
        // Imported memory belongs to the device whose context imports it.
        let device = state.current()?;
        let number = from.addr() as i32;
        let fd = match kind {
            HANDLE_POSIX_FD if segment::is_ours(number) => {
                let fd = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned();
                fd.map_err(|_| Fault::Code(ERROR_INVALID_HANDLE))?
            }
            HANDLE_FABRIC => segment::open_handle(&array(from.cast_const().cast(), 1, "the handle")?[0], 'p')?,
            _ => return Err(wrong!(ERROR_INVALID_VALUE, "{number}, of type {kind}, is no exported allocation")),
        };
        let id = state.handle();
        state.physical.insert(id, Physical { device, fd, segment: None });
        put(to, id)
    }

    fn cuMemAddressReserve(to: *mut u64, bytes: usize, align: usize, hint: u64, flags: u64) {
        only(flags as u32, 0)?;
        let bytes = bytes as u64;
        if bytes == 0 || !bytes.is_multiple_of(GRANULE) || align as u64 > GRANULE {
            return Err(wrong!(ERROR_INVALID_VALUE, "{bytes} bytes aligned to {align}; the granularity is {GRANULE}"));
        }
        _ = hint;
        let kind = RegionKind::Reserved(Default::default());
        put(to, world().state.lock().space.add(bytes, Mapping::reserve(bytes)?, kind)?)
    }

    fn cuMemAddressFree(at: u64, bytes: usize) {
        let mut state = world().state.lock();
        let region = state.space.regions.get(&at).filter(|region| region.bytes == bytes as u64);
        match region.map(|region| &region.kind) {
            Some(RegionKind::Reserved(parts)) if parts.is_empty() => {}
            Some(RegionKind::Reserved(parts)) => {
                return Err(wrong!(ERROR_INVALID_VALUE, "{at:#x} still has {} mappings", parts.len()));
            }
            _ => return Err(wrong!(ERROR_INVALID_VALUE, "no reservation of {bytes} bytes starts at {at:#x}")),
        }
        state.space.regions.remove(&at);
        Ok(())
    }

    fn cuMemMap(at: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        only(flags as u32, 0)?;
        let mut state = world().state.lock();
        let fd = physical(&state, handle)?.fd.try_clone().map_err(|_| Fault::Code(ERROR_OUT_OF_MEMORY))?;
        let (bytes, whole) = (bytes as u64, segment::bytes_of(&fd));
        if offset != 0 || bytes > whole {
            return Err(wrong!(ERROR_INVALID_VALUE, "{bytes} bytes from {offset} of an allocation of {whole}"));
        }
        let (start, mapping, parts) = state.space.reservation(at, bytes)?;
        if parts.range(..start + bytes).next_back().is_some_and(|(o, part)| o + part.bytes > start) {
            return Err(wrong!(ERROR_ALREADY_MAPPED, "something is mapped within {bytes} bytes at {at:#x}"));
        }
        mapping.place(start, bytes, Some(&fd));
        parts.insert(start, MappedPart { bytes, devices: Vec::new() });
        Ok(())
    }

    fn cuMemUnmap(at: u64, bytes: usize) {
        let mut state = world().state.lock();
        let (start, mapping, parts) = state.space.reservation(at, bytes as u64)?;
        if parts.get(&start).is_none_or(|part| part.bytes != bytes as u64) {
            return Err(wrong!(ERROR_NOT_MAPPED, "no mapping of {bytes} bytes starts at {at:#x}"));
        }
        parts.remove(&start);
        let in_use = std::sync::Arc::strong_count(mapping) > 1;
        note_use(in_use, "cuMemUnmap", at);
        if !in_use {
            mapping.place(start, bytes as u64, None);
        }
        Ok(())
    }

    fn cuMemSetAccess(at: u64, bytes: usize, access: *const AccessDesc, count: usize) {
        let access = array(access, count, "the access descriptors")?;
        let mut state = world().state.lock();
        for a in access {
            state.device(a.location.id)?;
        }
        let bytes = bytes as u64;
        let (start, _, parts) = state.space.reservation(at, bytes)?;
        if parts.range(start..start + bytes).map(|(_, part)| part.bytes).sum::<u64>() != bytes {
            return Err(wrong!(ERROR_NOT_MAPPED, "the range does not consist of whole mappings"));
        }
        for (_, part) in parts.range_mut(start..start + bytes) {
            let allowed = access.iter().filter(|a| a.location.kind == LOCATION_DEVICE && a.flags == ACCESS_READ_WRITE);
            part.devices.extend(allowed.map(|a| a.location.id as usize));
        }
        Ok(())
    }
}
