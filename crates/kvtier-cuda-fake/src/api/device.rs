//! Devices, primary contexts, errors and the addresses of functions.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::exports;
use crate::abi::*;
use crate::world::{CURRENT, Device, context, device_of, only, world};

fn text(of: &str, to: *mut c_char, capacity: c_int) -> Outcome {
    if to.is_null() || capacity <= 0 {
        return Err(wrong!(
            ERROR_INVALID_VALUE,
            "{capacity} bytes at {to:?} for text"
        ));
    }
    let n = of.len().min(capacity as usize - 1);
    unsafe {
        std::ptr::copy_nonoverlapping(of.as_ptr(), to.cast(), n);
        to.add(n).write(0);
    }
    Ok(())
}

/// Compute capability 9.0; whatever is not here is 0, as the bits of stream memory operations are on drivers that have
/// them.
fn attribute(of: c_int, ordinal: usize) -> Outcome<c_int> {
    if !(1..=200).contains(&of) {
        return Err(wrong!(ERROR_INVALID_VALUE, "attribute {of}"));
    }
    Ok(match of {
        1 | 2 => 1024,
        10 => 32,
        16 => 132,
        33 => 0x17 + ordinal as c_int,
        40 => 3,
        75 => 9,
        15 | 19 | 31 | 41 | 78 | 91 | 99 | 102 | 103 | 125 => 1,
        128 => c_int::from(world().script.lock().fabric),
        _ => 0,
    })
}

/// The script's words about a device.
fn described<T>(device: c_int, take: impl FnOnce(&crate::script::DeviceText) -> T) -> Outcome<T> {
    let ordinal = world().state.lock().device(device)?;
    let script = world().script.lock();
    script
        .devices
        .get(ordinal)
        .map(take)
        .ok_or(Fault::Code(ERROR_INVALID_DEVICE))
}

fn error(
    code: CUresult,
    to: *mut *const c_char,
    take: impl Fn(&(CUresult, &'static str, &'static str)) -> &'static str,
) -> Outcome {
    match CODES.iter().find(|known| known.0 == code) {
        Some(known) => put(to, take(known).as_ptr().cast()),
        None => {
            put(to, std::ptr::null())?;
            Err(Fault::Code(ERROR_INVALID_VALUE))
        }
    }
}

exports! {
    fn cuInit(flags: u32) {
        only(flags, 0)?;
        let devices = world().script.lock().devices.len();
        if devices == 0 {
            return Err(Fault::Code(ERROR_NO_DEVICE));
        }
        let new = || Device { retained: 0, used: 0, engines: Default::default(), default: None };
        // A later script may have added some.
        let mut state = world().state.lock();
        let known = state.devices.get_or_insert_default();
        known.resize_with(devices.max(known.len()), new);
        Ok(())
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        put(version, world().script.lock().driver)
    }

    fn cuGetErrorName(code: CUresult, to: *mut *const c_char) {
        error(code, to, |known| known.1)
    }

    fn cuGetErrorString(code: CUresult, to: *mut *const c_char) {
        error(code, to, |known| known.2)
    }

    fn cuGetProcAddress_v2(name: *const c_char, to: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int) {
        if name.is_null() {
            return Err(wrong!(ERROR_INVALID_VALUE, "no name"));
        }
        only(flags as u32, 3)?;
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let driver = world().script.lock().driver;
        // The batch copy of 12.8; the one of 13.0 has another signature, and is not here.
        let since = if name == "cuMemcpyBatchAsync" { 12080..13000 } else { 2000..i32::MAX };
        let batch = name != "cuMemcpyBatchAsync" || world().script.lock().batch;
        let newest = format!("{name}_v2");
        let found = super::table()
            .find(|known| known.0 == newest)
            .or_else(|| super::table().find(|known| known.0 == name && !name.ends_with("_v2")));
        let why = match found {
            Some((_, pointer)) if batch && driver >= since.start && since.contains(&version) && version <= driver => {
                if !status.is_null() {
                    put(status, 0)?;
                }
                return put(to, pointer.0.cast_mut());
            }
            Some(_) if batch => 2,
            _ => 1,
        };
        put(to, std::ptr::null_mut())?;
        if !status.is_null() {
            put(status, why)?;
        }
        Err(Fault::Code(ERROR_NOT_FOUND))
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        put(count, world().state.lock().devices().len() as c_int)
    }

    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        world().state.lock().device(ordinal)?;
        put(device, ordinal)
    }

    fn cuDeviceGetName(to: *mut c_char, capacity: c_int, device: c_int) {
        text(&described(device, |d| d.name.clone())?, to, capacity)
    }

    fn cuDeviceGetPCIBusId(to: *mut c_char, capacity: c_int, device: c_int) {
        text(&described(device, |d| d.bus.clone())?, to, capacity)
    }

    fn cuDeviceGetUuid_v2(to: *mut [u8; 16], device: c_int) {
        put(to, described(device, |d| d.uuid)?)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        world().state.lock().device(device)?;
        put(bytes, world().script.lock().memory as usize)
    }

    fn cuDeviceGetAttribute(value: *mut c_int, of: c_int, device: c_int) {
        let ordinal = world().state.lock().device(device)?;
        put(value, attribute(of, ordinal)?)
    }

    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        let mut state = world().state.lock();
        state.device(device)?;
        state.device(peer)?;
        put(can, 0)
    }

    fn cuDevicePrimaryCtxRetain(to: *mut u64, device: c_int) {
        let mut state = world().state.lock();
        let device = state.device(device)?;
        put(to, context(device))?;
        state.devices()[device].retained += 1;
        Ok(())
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let mut state = world().state.lock();
        let device = state.device(device)?;
        let retained = &mut state.devices()[device].retained;
        *retained = retained.checked_sub(1).ok_or_else(|| {
            wrong!(ERROR_INVALID_CONTEXT, "the primary context of device {device} is not retained")
        })?;
        if *retained > 0 {
            return Ok(());
        }
        let left = state.end_of(device);
        if left.is_empty() {
            return Ok(());
        }
        // The driver frees them silently.
        world().journal.violation(format!(
            "cuDevicePrimaryCtxRelease_v2: the context of device {device} ended with {} left", left.join(", ")
        ));
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut u32, active: *mut c_int) {
        let mut state = world().state.lock();
        let device = state.device(device)?;
        put(flags, 0)?;
        put(active, c_int::from(state.devices()[device].retained > 0))
    }

    fn cuCtxSetCurrent(to: u64) {
        let mut state = world().state.lock();
        if to != 0 {
            let device = device_of(to).filter(|&d| state.devices().get(d).is_some_and(|d| d.retained > 0));
            if device.is_none() {
                return Err(wrong!(ERROR_INVALID_CONTEXT, "{to:#x} is no context that is retained"));
            }
        }
        CURRENT.set(to);
        Ok(())
    }

    fn cuCtxGetCurrent(to: *mut u64) {
        put(to, CURRENT.get())
    }

    fn cuCtxGetDevice(to: *mut c_int) {
        put(to, world().state.lock().current()? as c_int)
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        world().state.lock().current()?;
        put(least, 0)?;
        put(greatest, -5)
    }

    fn cuCtxSynchronize() {
        let mut state = world().state.lock();
        let device = state.current()?;
        let streams = state.streams_of(device);
        drop(state);
        for stream in streams {
            stream.wait(stream.last());
        }
        world().state.lock().current().map(drop)
    }
}
