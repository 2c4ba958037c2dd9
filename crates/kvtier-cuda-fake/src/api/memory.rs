//! Device memory by `cuMemAlloc`, and host memory that is registered or allocated.

use std::ffi::c_void;
use std::sync::Arc;

use super::exports;
use crate::abi::*;
use crate::host;
use crate::segment::{Mapping, Segment};
use crate::space::{GRANULE, Kind};
use crate::world::{only, world};

/// Records memory freed while streams still use it, which the driver may or may not wait for.
pub(super) fn note_use(in_use: bool, function: &str, address: u64) {
    if in_use {
        let line = format!("{function}: a stream still has work on what is at {address:#x}");
        world().journal.violation(line);
    }
}

fn free_host(address: *mut u8, bytes: u64) {
    unsafe { libc::munmap(address.cast(), bytes as usize) };
}

exports! {
    fn cuMemAlloc_v2(to: *mut u64, bytes: usize) {
        let mut state = world().state.lock();
        let device = state.current()?;
        if bytes == 0 {
            return Err(wrong!(ERROR_INVALID_VALUE, "0 bytes"));
        }
        let bytes = bytes as u64;
        let total = world().script.lock().memory;
        let used = state.devices()[device].used;
        if bytes > total.saturating_sub(used) {
            return Err(Fault::Code(ERROR_OUT_OF_MEMORY));
        }
        let id = state.handle();
        let none = || Fault::Code(ERROR_OUT_OF_MEMORY);
        let segment = Segment::create(&format!("m{id:x}"), bytes).ok_or_else(none)?;
        let mapping = Mapping::of(&segment.fd, bytes).ok_or_else(none)?;
        let at = state.space.add(bytes, mapping, Kind::Own { device, id, _segment: segment })?;
        state.devices()[device].used += bytes;
        put(to, at)
    }

    fn cuMemFree_v2(at: u64) {
        let mut state = world().state.lock();
        let current = state.current()?;
        if at == 0 {
            return Ok(());
        }
        match state.space.get(at).map(|region| (&region.kind, region.bytes)) {
            Some((Kind::Own { device, .. }, bytes)) => {
                if *device != current {
                    return Err(wrong!(ERROR_INVALID_CONTEXT, "memory of device {device}, freed in another context"));
                }
                state.devices()[current].used -= bytes;
            }
            _ => return Err(wrong!(ERROR_INVALID_VALUE, "no allocation starts at {at:#x}, or it was freed")),
        }
        let region = state.space.remove(at);
        note_use(region.is_some_and(|region| region.mapping.in_use()), "cuMemFree_v2", at);
        Ok(())
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let mut state = world().state.lock();
        let device = state.current()?;
        let all = world().script.lock().memory;
        put(free, all.saturating_sub(state.devices()[device].used) as usize)?;
        put(total, all as usize)
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, at: u64) {
        let mut state = world().state.lock();
        state.current()?;
        let Some((start, length)) = state.space.range(at) else {
            return Err(wrong!(ERROR_INVALID_VALUE, "{at:#x} is not in a live allocation or mapping"));
        };
        if !base.is_null() {
            put(base, start)?;
        }
        if !bytes.is_null() {
            put(bytes, length as usize)?;
        }
        Ok(())
    }

    fn cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: u32) {
        let mut state = world().state.lock();
        let device = state.current()?;
        only(flags, 0xf)?;
        let base = at as u64;
        let untouched = host::untouched_pages(base, bytes as u64).filter(|_| !state.space.covers(base));
        let Some(untouched) = untouched else {
            return Err(wrong!(ERROR_INVALID_VALUE, "{bytes} bytes at {base:#x} are not host memory"));
        };
        world().journal.add("registered.untouched", untouched);
        state.host.add(device, base, bytes as u64, flags, false)
    }

    fn cuMemHostUnregister(at: *mut c_void) {
        let mut state = world().state.lock();
        state.current()?;
        let range = state.host.remove(at as u64, false)?;
        note_use(range.in_use(), "cuMemHostUnregister", at as u64);
        Ok(())
    }

    fn cuMemHostGetDevicePointer_v2(to: *mut u64, at: *mut c_void, flags: u32) {
        let mut state = world().state.lock();
        let device = state.current()?;
        only(flags, 0)?;
        match state.host.find(at as u64, 1, device, "the pointer")? {
            host::Place::Registered { flags, .. } if flags & HOST_REGISTER_DEVICEMAP != 0 => put(to, at as u64),
            host::Place::Registered { .. } => {
                Err(wrong!(ERROR_INVALID_VALUE, "{at:?} was registered without DEVICEMAP"))
            }
            host::Place::Pageable => Err(wrong!(ERROR_INVALID_VALUE, "{at:?} is not registered")),
        }
    }

    fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, flags: u32) {
        let mut state = world().state.lock();
        let device = state.current()?;
        only(flags, 7)?;
        if bytes == 0 || to.is_null() {
            return Err(wrong!(ERROR_INVALID_VALUE, "{bytes} bytes to {to:?}"));
        }
        let (protection, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, kind, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(Fault::Code(ERROR_OUT_OF_MEMORY));
        }
        state.host.add(device, at as u64, bytes as u64, flags, true)?;
        put(to, at)
    }

    fn cuMemFreeHost(at: *mut c_void) {
        let mut state = world().state.lock();
        state.current()?;
        let range = state.host.remove(at as u64, true)?;
        note_use(range.in_use(), "cuMemFreeHost", at as u64);
        // What a stream still uses is left there.
        if Arc::strong_count(&range.users) == 1 {
            free_host(at.cast(), range.bytes);
        }
        Ok(())
    }

    fn cuMemGetAllocationGranularity(to: *mut usize, prop: *const AllocationProp, option: u32) {
        super::vmm::check(prop)?;
        only(option, 1)?;
        put(to, GRANULE as usize)
    }
}
