//! Modules, their kernels, and launches.

use std::ffi::{CStr, c_char, c_uint, c_void};

use super::exports;
use crate::abi::*;
use crate::kernel::{self, Function, Launch, Module};
use crate::world::{only, unknown, world};

const ERROR_LOG: u32 = 5;
const ERROR_LOG_BYTES: u32 = 6;

exports! {
    fn cuModuleLoadDataEx(
        to: *mut u64, image: *const c_void, count: c_uint, options: *mut u32, values: *mut *mut c_void,
    ) {
        let mut state = world().state.lock();
        let device = state.current()?;
        let (options, values) = (array(options, count as usize, "options")?, array(values, count as usize, "values")?);
        let value = |of| options.iter().position(|&o| o == of).map(|at| values[at]);
        // An image is text here, which ends with a NUL.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().unwrap_or_default();
        if !text.contains(".entry ") || text.matches('{').count() != text.matches('}').count() {
            if let (Some(to), Some(capacity)) = (value(ERROR_LOG), value(ERROR_LOG_BYTES)) {
                put_text("no kernel, or not all of it", to.cast(), capacity.addr());
            }
            return Err(Fault::Code(ERROR_INVALID_PTX));
        }
        let handle = state.handle();
        state.modules.insert(handle, Module { device, ptx: text.into() });
        put(to, handle)
    }

    fn cuModuleUnload(module: u64) {
        let mut state = world().state.lock();
        state.current()?;
        state.functions.retain(|_, function| function.module != module);
        state.modules.remove(&module).map(drop).ok_or_else(|| unknown("module", module))
    }

    fn cuModuleGetFunction(to: *mut u64, module: u64, name: *const c_char) {
        let mut state = world().state.lock();
        state.current()?;
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let found = state.modules.get(&module).ok_or_else(|| unknown("module", module))?;
        if !found.ptx.contains(&format!(".entry {name}(")) {
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
        match world().script.lock().act(&function.name).1 {
            Some(SUCCESS) => return Ok(()),
            Some(code) => return Err(Fault::Code(code)),
            None => {}
        }
        if function.device != stream.device {
            return Err(wrong!(ERROR_INVALID_HANDLE, "the kernel is of device {}", function.device));
        }
        if [grid_y, grid_z, block_y, block_z] != [1; 4] || !(1..=1024).contains(&block_x) || grid_x == 0 || !extra.is_null() {
            return Err(wrong!(ERROR_INVALID_VALUE, "{grid_x} blocks of {block_x}, more than one dimension, or `extra`"));
        }
        only(shared, 0)?;
        let unit = kernel::unit(&function.name).ok_or(Fault::Code(ERROR_NOT_FOUND))?;
        let params = array(params, 3, "kernelParams")?;
        // SAFETY: the kernel has these three parameters, so the caller's pointers are to such numbers.
        let (items, tiles, n_tiles) = unsafe {
            (params[0].cast::<u64>().read(), params[1].cast::<u64>().read(), params[2].cast::<u32>().read())
        };
        let launch = Launch { unit, grid: grid_x, block: block_x, items, tiles, n_tiles, device: stream.device };
        stream.push(Box::new(move || launch.run()));
        Ok(())
    }
}
