//! Device memory by `cuMemAlloc`, and host memory that is registered or allocated.

use std::ffi::c_void;

use super::exports;
use crate::abi::*;
use crate::host::{Registration, untouched_pages};
use crate::segment::{Mapping, Segment};
use crate::space::{Region, RegionKind};
use crate::world::{MemoryKind, only, world};

/// Records memory freed while streams still use it, which the driver may or may not wait for.
pub(super) fn note_use(in_use: bool, function: &str, address: u64) {
    if in_use {
        let line = format!("{function}: a stream still has work on what is at {address:#x}");
        world().journal.violation(line);
    }
}

exports! {
    fn cuMemAlloc_v2(to: *mut u64, bytes: usize) {
        let mut state = world().state.lock();
        let device = state.current()?;
        if bytes == 0 {
            return Err(wrong!(ERROR_INVALID_VALUE, "0 bytes"));
        }
        let bytes = bytes as u64;
        state.allocate(device, bytes)?;
        let (segment, fd) = Segment::create('m', state.handle(), bytes)?;
        put(to, state.space.add(bytes, Mapping::of(&fd)?, RegionKind::Own(device, segment))?)
    }

    fn cuMemFree_v2(at: u64) {
        let mut state = world().state.lock();
        let current = state.current()?;
        match state.space.regions.get(&at) {
            _ if at == 0 => return Ok(()),
            Some(Region { kind: RegionKind::Own(device, _), .. }) if *device != current => {
                return Err(wrong!(ERROR_INVALID_CONTEXT, "memory of device {device}, freed in another context"));
            }
            Some(region @ Region { kind: RegionKind::Own(..), .. }) => {
                note_use(region.in_use(), "cuMemFree_v2", at);
                let bytes = region.bytes;
                state.devices()[current].used -= bytes;
            }
            _ => return Err(wrong!(ERROR_INVALID_VALUE, "no allocation starts at {at:#x}, or it was freed")),
        }
        state.space.regions.remove(&at);
        Ok(())
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, at: u64) {
        let mut state = world().state.lock();
        state.current()?;
        let Some((start, length)) = state.space.range(at) else {
            return Err(wrong!(ERROR_INVALID_VALUE, "{at:#x} is not in a live allocation or mapping"));
        };
        put(base, start)?;
        put(bytes, length as usize)
    }

    fn cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: u32) {
        let mut state = world().state.lock();
        let device = state.current()?;
        only(flags, 0xf)?;
        let (base, bytes) = (at as u64, bytes as u64);
        let Some(untouched) = untouched_pages(base, bytes).filter(|_| !state.space.covers(base)) else {
            return Err(wrong!(ERROR_INVALID_VALUE, "{bytes} bytes at {base:#x} are not host memory"));
        };
        world().journal.add("registered.untouched", untouched as u64);
        state.host.add(base, Registration { bytes, device, flags, owned: false, users: Default::default() })
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
        match state.touch(device, at as u64, 1, "the pointer")?.kind {
            MemoryKind::Registered(flags) if flags & HOST_REGISTER_DEVICEMAP != 0 => put(to, at as u64),
            MemoryKind::Registered(_) => Err(wrong!(ERROR_INVALID_VALUE, "{at:?} was registered without DEVICEMAP")),
            _ => Err(wrong!(ERROR_INVALID_VALUE, "{at:?} is not registered")),
        }
    }

    fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, flags: u32) {
        let mut state = world().state.lock();
        let device = state.current()?;
        only(flags, 7)?;
        let (protection, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, kind, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(Fault::Code(ERROR_OUT_OF_MEMORY));
        }
        let bytes = bytes as u64;
        state.host.add(at as u64, Registration { bytes, device, flags, owned: true, users: Default::default() })?;
        put(to, at)
    }

    fn cuMemFreeHost(at: *mut c_void) {
        let mut state = world().state.lock();
        state.current()?;
        let range = state.host.remove(at as u64, true)?;
        note_use(range.in_use(), "cuMemFreeHost", at as u64);
        // What a stream still uses is left there.
        if !range.in_use() {
            unsafe { libc::munmap(at, range.bytes as usize) };
        }
        Ok(())
    }
}
