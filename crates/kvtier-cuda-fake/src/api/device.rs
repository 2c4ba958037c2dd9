//! Devices, primary contexts, errors and the addresses of functions.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::copy::cuMemcpyBatchAsync;
use super::exports;
use crate::abi::*;
use crate::world::{CURRENT, Device, context, only, world};

/// Writes a text about a device.
fn describe(
    device: c_int,
    to: *mut c_char,
    capacity: c_int,
    text: impl Fn(usize) -> String,
) -> CudaResult {
    let device = world().state.lock().device(device)?;
    put_text(&text(device), to, capacity as usize);
    Ok(())
}

fn error(
    code: CUresult,
    to: *mut *const c_char,
    take: impl Fn(&(CUresult, &'static str, &'static str)) -> &'static str,
) -> CudaResult {
    match CODES.iter().find(|known| known.0 == code) {
        Some(known) => put(to, take(known).as_ptr().cast()),
        None => put(to, std::ptr::null()).and(Err(Fault::Code(ERROR_INVALID_VALUE))),
    }
}

exports! {
    fn cuInit(flags: u32) {
        only(flags, 0)?;
        let devices = world().script.lock().devices;
        if devices == 0 {
            return Err(Fault::Code(ERROR_NO_DEVICE));
        }
        // A later script may have added some.
        let mut state = world().state.lock();
        let known = state.devices.get_or_insert_default();
        known.resize_with(devices.max(known.len()), Device::default);
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
        only(flags as u32, 3)?;
        let driver = world().script.lock().driver;
        // The batch copy of 12.8; the one of 13.0 has another signature, and is not here.
        let known = unsafe { CStr::from_ptr(name) } == c"cuMemcpyBatchAsync" && (12080..13000).contains(&version);
        put(status, 0)?;
        if known && driver >= 12080 {
            return put(to, cuMemcpyBatchAsync as *mut c_void);
        }
        put(to, std::ptr::null_mut())?;
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
        describe(device, to, capacity, |_| "kvtier fake GPU".into())
    }

    fn cuDeviceGetPCIBusId(to: *mut c_char, capacity: c_int, device: c_int) {
        // No machine has it.
        describe(device, to, capacity, |device| format!("cafe:{:02x}:00.0", 0x17 + device))
    }

    fn cuDeviceGetUuid_v2(to: *mut [u8; 16], device: c_int) {
        let mut uuid = *b"\x5c\xa1\xab\x1e\0\0\x40\0\x80\0\0\0\0\0\0\0";
        uuid[15] = world().state.lock().device(device)? as u8;
        put(to, uuid)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        world().state.lock().device(device)?;
        put(bytes, world().script.lock().memory as usize)
    }

    // Host pointers of registered memory are the device's own; whatever else is asked is 0.
    fn cuDeviceGetAttribute(value: *mut c_int, of: c_int, device: c_int) {
        world().state.lock().device(device)?;
        put(value, c_int::from(of == 91))
    }

    fn cuDevicePrimaryCtxRetain(to: *mut u64, device: c_int) {
        let mut state = world().state.lock();
        let device = state.device(device)?;
        state.devices()[device].retained += 1;
        put(to, context(device))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let mut state = world().state.lock();
        let device = state.device(device)?;
        let retained = &mut state.devices()[device].retained;
        *retained = retained.checked_sub(1).ok_or_else(|| {
            wrong!(ERROR_INVALID_CONTEXT, "the primary context of device {device} is not retained")
        })?;
        if *retained == 0 {
            let left = state.end_of(device);
            // The driver frees them silently.
            if left > 0 {
                world().journal.violation(format!("the context of device {device} ended with {left} objects left"));
            }
        }
        Ok(())
    }

    // PyTorch asks before it uses a device.
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut u32, active: *mut c_int) {
        let mut state = world().state.lock();
        let device = state.device(device)?;
        put(flags, 0)?;
        put(active, c_int::from(state.devices()[device].retained > 0))
    }

    fn cuCtxSetCurrent(to: u64) {
        if to != 0 && world().state.lock().device_of(to).is_none() {
            return Err(wrong!(ERROR_INVALID_CONTEXT, "{to:#x} is no context that is retained"));
        }
        CURRENT.set(to);
        Ok(())
    }

    fn cuCtxGetCurrent(to: *mut u64) {
        put(to, CURRENT.get())
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
