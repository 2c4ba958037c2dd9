//! Memory of a GPU, pinned memory of the host, and what other processes share.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::context::Context;
use super::{DevicePtr, IpcHandle};
use crate::cuda::error::CudaError;

/// Opened memory may be of a GPU that reaches another one's memory.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
/// Pinned for all contexts.
const PORTABLE: u32 = 1;
/// Has an address on the GPU.
const DEVICE_MAP: u32 = 2;

/// Memory of the GPU, freed when dropped.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Arc<Context>,
    base: DevicePtr,
    bytes: u64,
}

impl DeviceBuffer {
    /// Its first byte.
    pub fn base(&self) -> DevicePtr {
        self.base
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The context it lives in.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The name by which other processes open it.
    ///
    /// # Errors
    /// What the driver says.
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

/// Pinned memory of the host that the driver allocated, zeroed; freed when dropped.
#[derive(Debug)]
pub struct HostBuffer {
    context: Arc<Context>,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is plain memory; whoever uses the address answers for it.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Its first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// How many bytes it has.
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

/// Memory of the host that others own, pinned for all GPUs until this is dropped.
#[derive(Debug)]
pub struct RegisteredHost {
    context: Arc<Context>,
    base: NonNull<u8>,
}

// SAFETY: as for `HostBuffer`.
unsafe impl Send for RegisteredHost {}
// SAFETY: as above.
unsafe impl Sync for RegisteredHost {}

impl Drop for RegisteredHost {
    fn drop(&mut self) {
        let _current = self.context.enter();
        // SAFETY: registered once and given up once.
        let _ = unsafe {
            self.context
                .driver()
                .cuMemHostUnregister(self.base.as_ptr().cast())
        };
    }
}

impl Context {
    /// Memory of the GPU; what is in it is undefined.
    ///
    /// # Errors
    /// What the driver says; 0 bytes are refused.
    pub fn allocate(self: &Arc<Self>, bytes: u64) -> Result<DeviceBuffer, CudaError> {
        let _current = self.enter()?;
        let mut base = 0;
        // SAFETY: the address is that of a live integer.
        unsafe { self.driver().cuMemAlloc_v2(&mut base, bytes as usize) }?;
        Ok(DeviceBuffer {
            context: self.clone(),
            base: DevicePtr(base),
            bytes,
        })
    }

    /// Pinned memory of the host, zeroed.
    ///
    /// # Errors
    /// What the driver says; 0 bytes are refused.
    pub fn allocate_host(self: &Arc<Self>, bytes: usize) -> Result<HostBuffer, CudaError> {
        let _current = self.enter()?;
        let mut base: *mut c_void = ptr::null_mut();
        // SAFETY: the address is that of a live pointer.
        unsafe {
            self.driver()
                .cuMemHostAlloc(&mut base, bytes, PORTABLE | DEVICE_MAP)
        }?;
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(CudaError::Call {
                function: "cuMemHostAlloc",
                code: super::code::INVALID_VALUE,
                name: format!("no memory for {bytes} bytes"),
            });
        };
        // SAFETY: just allocated, with so many bytes.
        unsafe { base.as_ptr().write_bytes(0, bytes) };
        Ok(HostBuffer {
            context: self.clone(),
            base,
            bytes,
        })
    }

    /// Pins memory of the host for all GPUs and gives it addresses there.
    ///
    /// # Errors
    /// What the driver says, [`super::code::HOST_MEMORY_ALREADY_REGISTERED`] among others.
    ///
    /// # Safety
    /// The memory stays mapped until the result is dropped, and nobody writes it while a copy that was started reads it.
    pub unsafe fn register_host(
        self: &Arc<Self>,
        base: NonNull<u8>,
        bytes: usize,
    ) -> Result<RegisteredHost, CudaError> {
        let _current = self.enter()?;
        // SAFETY: promised by the caller.
        unsafe {
            self.driver()
                .cuMemHostRegister_v2(base.as_ptr().cast(), bytes, PORTABLE | DEVICE_MAP)
        }?;
        Ok(RegisteredHost {
            context: self.clone(),
            base,
        })
    }

    /// The GPU's address of a byte of pinned memory.
    ///
    /// # Errors
    /// Memory that is not pinned, or what the driver says.
    pub fn host_device_pointer(&self, host: NonNull<u8>) -> Result<DevicePtr, CudaError> {
        let _current = self.enter()?;
        let mut device = 0;
        // SAFETY: the first address is that of a live integer; the second is only looked up.
        unsafe {
            self.driver()
                .cuMemHostGetDevicePointer_v2(&mut device, host.as_ptr().cast(), 0)
        }?;
        Ok(DevicePtr(device))
    }

    /// The allocation an address of the GPU lies in: its first byte and its bytes.
    ///
    /// # Errors
    /// What the driver says, about an address of no allocation among others.
    pub fn address_range(&self, address: DevicePtr) -> Result<(DevicePtr, u64), CudaError> {
        let _current = self.enter()?;
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: both addresses are those of live integers; the third is only looked up.
        unsafe {
            self.driver()
                .cuMemGetAddressRange_v2(&mut base, &mut bytes, address.0)
        }?;
        Ok((DevicePtr(base), bytes as u64))
    }

    /// Opens an allocation of another process; gives its first byte. One process cannot open its own.
    ///
    /// # Errors
    /// What the driver says.
    pub fn open_memory(&self, handle: &IpcHandle) -> Result<DevicePtr, CudaError> {
        let _current = self.enter()?;
        let mut base = 0;
        // SAFETY: the address is that of a live integer; the driver looks the handle up.
        unsafe {
            self.driver()
                .cuIpcOpenMemHandle_v2(&mut base, *handle, LAZY_ENABLE_PEER_ACCESS)
        }?;
        Ok(DevicePtr(base))
    }

    /// Closes what [`Context::open_memory`] gave.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// Nothing that was started uses the memory any more, and nobody else closes it.
    pub unsafe fn close_memory(&self, base: DevicePtr) -> Result<(), CudaError> {
        let _current = self.enter()?;
        // SAFETY: promised by the caller.
        unsafe { self.driver().cuIpcCloseMemHandle(base.0) }
    }
}
