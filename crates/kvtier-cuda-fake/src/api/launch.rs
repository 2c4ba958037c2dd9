//! Modules, their kernels, and launches.

use std::ffi::{CStr, c_char, c_uint, c_void};

use super::exports;
use crate::abi::*;
use crate::kernel::{self, Function, Launch, Module};
use crate::script::Act;
use crate::world::{only, unknown, world};

const ERROR_LOG: u32 = 5;
const ERROR_LOG_BYTES: u32 = 6;

/// Writes why PTX was refused to where the caller's options say.
fn log(options: &[u32], values: &[*mut c_void], why: &str) {
    let value = |of| options.iter().position(|&o| o == of).map(|at| values[at]);
    if let (Some(to), Some(capacity)) = (value(ERROR_LOG), value(ERROR_LOG_BYTES))
        && !to.is_null()
        && capacity.addr() > 0
    {
        let n = why.len().min(capacity.addr() - 1);
        unsafe {
            std::ptr::copy_nonoverlapping(why.as_ptr(), to.cast(), n);
            to.cast::<u8>().add(n).write(0);
        }
    }
}

exports! {
    fn cuModuleLoadDataEx(
        to: *mut u64, image: *const c_void, count: c_uint, options: *mut u32, values: *mut *mut c_void,
    ) {
        let mut state = world().state.lock();
        let device = state.current()?;
        if image.is_null() {
            return Err(wrong!(ERROR_INVALID_VALUE, "no image"));
        }
        let (options, values) = (array(options, count as usize, "options")?, array(values, count as usize, "values")?);
        // An image is text here, which ends with a NUL.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().unwrap_or_default();
        let script = world().script.lock();
        match kernel::entries(text, script.driver).and_then(|entries| {
            if script.ptx { Ok(entries) } else { Err((ERROR_INVALID_PTX, "the script refuses it".into())) }
        }) {
            Ok(entries) => {
                let handle = state.handle();
                state.modules.insert(handle, Module { device, entries });
                put(to, handle)
            }
            Err((code, why)) => {
                log(options, values, &why);
                Err(Fault::Code(code))
            }
        }
    }

    fn cuModuleLoadData(to: *mut u64, image: *const c_void) {
        match cuModuleLoadDataEx(to, image, 0, std::ptr::null_mut(), std::ptr::null_mut()) {
            SUCCESS => Ok(()),
            code => Err(Fault::Code(code)),
        }
    }

    fn cuModuleUnload(module: u64) {
        let mut state = world().state.lock();
        state.current()?;
        state.modules.remove(&module).ok_or_else(|| unknown("module", module))?;
        state.functions.retain(|_, function| function.module != module);
        Ok(())
    }

    fn cuModuleGetFunction(to: *mut u64, module: u64, name: *const c_char) {
        let mut state = world().state.lock();
        state.current()?;
        if name.is_null() {
            return Err(wrong!(ERROR_INVALID_VALUE, "no name"));
        }
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let found = state.modules.get(&module).ok_or_else(|| unknown("module", module))?;
        if !found.entries.contains(&name) {
            return Err(Fault::Code(ERROR_NOT_FOUND));
        }
        let function = Function { module, device: found.device, name };
        let handle = state.handle();
        state.functions.insert(handle, function);
        put(to, handle)
    }

    fn cuLaunchKernel(
        function: u64, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint,
        stream: u64, params: *mut *mut c_void, extra: *mut *mut c_void,
    ) {
        let mut state = world().state.lock();
        let stream = state.stream(stream)?;
        let function = state.functions.get(&function).ok_or_else(|| unknown("function", function))?;
        match world().script.lock().act(&function.name) {
            Some(Act::Fail(SUCCESS)) => return Ok(()),
            Some(Act::Fail(code)) => return Err(Fault::Code(code)),
            Some(Act::Die) => _ = unsafe { libc::kill(libc::getpid(), libc::SIGKILL) },
            None => {}
        }
        if function.device != stream.device {
            return Err(wrong!(ERROR_INVALID_HANDLE, "the kernel is of device {}", function.device));
        }
        if [grid_x, grid_y, grid_z].contains(&0) || grid_y > 65535 || grid_z > 65535 || grid_x > i32::MAX as u32 {
            return Err(wrong!(ERROR_INVALID_VALUE, "a grid of {grid_x} x {grid_y} x {grid_z}"));
        }
        let threads = [block_x, block_y, block_z].iter().try_fold(1_u32, |n, &d| n.checked_mul(d));
        if !threads.is_some_and(|n| (1..=1024).contains(&n)) {
            return Err(wrong!(ERROR_INVALID_VALUE, "blocks of {block_x} x {block_y} x {block_z}"));
        }
        only(shared, 0)?;
        let Some(unit) = kernel::unit(&function.name) else {
            return Err(wrong!(ERROR_NOT_FOUND, "the fake driver cannot run \"{}\"", function.name));
        };
        if grid_y * grid_z * block_y * block_z != 1 || !extra.is_null() {
            return Err(wrong!(ERROR_INVALID_VALUE, "{}: more than one dimension, or `extra`", function.name));
        }
        let params = array(params, 3, "kernelParams")?;
        if params.iter().any(|p| p.is_null()) {
            return Err(wrong!(ERROR_INVALID_VALUE, "a kernel parameter is null"));
        }
        // SAFETY: the kernel has these three parameters, so the caller's pointers are to such numbers.
        let (items, tiles, n_tiles) = unsafe {
            (params[0].cast::<u64>().read(), params[1].cast::<u64>().read(), params[2].cast::<u32>().read())
        };
        let device = stream.device;
        let engines = state.devices()[device].engines.clone();
        let launch = Launch { unit, grid: grid_x, block: block_x, items, tiles, n_tiles, device, engines };
        stream.push(Box::new(move || launch.run()));
        Ok(())
    }
}
