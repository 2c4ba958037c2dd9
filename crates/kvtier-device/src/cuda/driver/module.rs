//! GPU code: modules and kernels.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use super::context::Context;
use super::stream::Stream;
use super::table::Raw;
use crate::cuda::error::CudaError;

/// `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
const ERROR_LOG: [c_int; 2] = [5, 6];

/// A loaded module; unloaded when dropped.
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    raw: Raw,
}

// SAFETY: a module is a handle; the driver's functions may be called from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads PTX text, which the driver compiles for this GPU (and caches on disk).
    ///
    /// # Errors
    /// The driver's error, with the log of its compiler.
    ///
    /// # Safety
    /// Loaded code can be launched, so the text must be trusted.
    pub unsafe fn load(context: &Arc<Context>, ptx: &CStr) -> Result<Arc<Self>, CudaError> {
        let _current = context.enter()?;
        let mut log = vec![0u8; 4096];
        let values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), log.len() as *mut c_void];
        let mut raw = ptr::null_mut();
        // SAFETY: the text ends with a zero byte, and the lists have the stated number of entries.
        let loaded = unsafe {
            context.driver().cuModuleLoadDataEx(
                &mut raw,
                ptx.as_ptr().cast(),
                ERROR_LOG.len() as u32,
                ERROR_LOG.as_ptr(),
                values.as_ptr(),
            )
        };
        loaded.map_err(|error| {
            let text = CStr::from_bytes_until_nul(&log).unwrap_or_default();
            error.with_details(text.to_string_lossy().trim())
        })?;
        Ok(Arc::new(Self {
            context: context.clone(),
            raw,
        }))
    }

    /// Looks up a kernel by name.
    ///
    /// # Errors
    /// The driver's error, for example for an unknown name.
    pub fn kernel(self: &Arc<Self>, name: &CStr) -> Result<Kernel, CudaError> {
        let _current = self.context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module lives, the name ends with a zero byte, and the address is that of a live pointer.
        unsafe {
            self.context
                .driver()
                .cuModuleGetFunction(&mut raw, self.raw, name.as_ptr())
        }?;
        Ok(Kernel {
            module: self.clone(),
            raw,
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _current = self.context.enter();
        // SAFETY: loaded once and unloaded once; kernels hold it.
        let _ = unsafe { self.context.driver().cuModuleUnload(self.raw) };
    }
}

/// Blocks and threads of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks.
    pub blocks: u32,
    /// Threads per block, at most 1024.
    pub threads: u32,
}

/// A function of a module that runs on the GPU.
#[derive(Debug, Clone)]
pub struct Kernel {
    module: Arc<Module>,
    raw: Raw,
}

// SAFETY: as for `Module`.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Launches the kernel on a stream. `arguments` are the addresses of the arguments, which are read before the call
    /// returns. The stream's context must be current.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// The arguments have the number and types that the kernel expects; the memory they point to, and the module, live
    /// until the launch is done.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: Grid,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe {
            self.module.context.driver().cuLaunchKernel(
                self.raw,
                grid.blocks,
                1,
                1,
                grid.threads,
                1,
                1,
                0,
                stream.raw(),
                arguments.as_ptr(),
                ptr::null(),
            )
        }
    }
}
