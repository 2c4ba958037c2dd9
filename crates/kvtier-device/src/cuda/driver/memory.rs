//! GPU memory, pinned host memory, and the memory of other processes.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::DevicePtr;
use super::context::Context;
use super::table::IpcHandle;
use crate::cuda::error::{CudaError, code};

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all contexts.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`: mapped into the GPU's address space.
const DEVICE_MAP: u32 = 2;

/// GPU memory, freed when dropped.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Arc<Context>,
    base: DevicePtr,
    bytes: u64,
}

impl DeviceBuffer {
    /// Allocates GPU memory, uninitialised.
    ///
    /// # Errors
    /// The driver's error; 0 bytes are refused.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        let mut base = 0;
        // SAFETY: the address is that of a live integer.
        unsafe { context.driver().cuMemAlloc_v2(&mut base, bytes as usize) }?;
        Ok(Self {
            context: context.clone(),
            base: DevicePtr(base),
            bytes,
        })
    }

    /// Address of the first byte.
    pub fn base(&self) -> DevicePtr {
        self.base
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Context of the memory.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Handle by which other processes open the memory.
    ///
    /// # Errors
    /// The driver's error.
    pub fn ipc_handle(&self) -> Result<IpcHandle, CudaError> {
        let _current = self.context.enter()?;
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: the address of the handle is live, the other one is that of an allocation.
        unsafe {
            self.context
                .driver()
                .cuIpcGetMemHandle(&mut handle, self.base.0)
        }?;
        Ok(handle)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let _current = self.context.enter();
        // SAFETY: allocated once and freed once.
        let _ = unsafe { self.context.driver().cuMemFree_v2(self.base.0) };
    }
}

/// Pinned host memory that the driver allocated, zeroed; freed when dropped.
#[derive(Debug)]
pub struct HostBuffer {
    context: Arc<Context>,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is plain memory; users of the address answer for their accesses.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Allocates pinned host memory, zeroed.
    ///
    /// # Errors
    /// The driver's error; 0 bytes are refused.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        let mut base: *mut c_void = ptr::null_mut();
        // SAFETY: the address is that of a live pointer.
        unsafe {
            context
                .driver()
                .cuMemHostAlloc(&mut base, bytes, PORTABLE | DEVICE_MAP)
        }?;
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(CudaError::Call {
                function: "cuMemHostAlloc",
                code: code::INVALID_VALUE,
                name: format!("no memory for {bytes} bytes"),
            });
        };
        // SAFETY: just allocated with this size.
        unsafe { base.as_ptr().write_bytes(0, bytes) };
        Ok(Self {
            context: context.clone(),
            base,
            bytes,
        })
    }

    /// Address of the first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let _current = self.context.enter();
        // SAFETY: allocated once and freed once.
        let _ = unsafe {
            self.context
                .driver()
                .cuMemFreeHost(self.base.as_ptr().cast())
        };
    }
}

/// Host memory of another owner, pinned for all GPUs until this is dropped.
#[derive(Debug)]
pub struct RegisteredHost {
    context: Arc<Context>,
    base: NonNull<u8>,
}

// SAFETY: as for `HostBuffer`.
unsafe impl Send for RegisteredHost {}
// SAFETY: as above.
unsafe impl Sync for RegisteredHost {}

impl RegisteredHost {
    /// Pins host memory for all GPUs and maps it into their address spaces.
    ///
    /// # Errors
    /// The driver's error, for example for memory that is registered already.
    ///
    /// # Safety
    /// The memory stays mapped until this is dropped, and is not written while a started copy reads it.
    pub unsafe fn new(
        context: &Arc<Context>,
        base: NonNull<u8>,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        // SAFETY: promised by the caller.
        unsafe {
            context.driver().cuMemHostRegister_v2(
                base.as_ptr().cast(),
                bytes,
                PORTABLE | DEVICE_MAP,
            )
        }?;
        Ok(Self {
            context: context.clone(),
            base,
        })
    }
}

impl Drop for RegisteredHost {
    fn drop(&mut self) {
        let _current = self.context.enter();
        // SAFETY: registered once and unregistered once.
        let _ = unsafe {
            self.context
                .driver()
                .cuMemHostUnregister(self.base.as_ptr().cast())
        };
    }
}
