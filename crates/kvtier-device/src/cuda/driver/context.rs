//! GPUs and their primary contexts.

use std::ffi::{CStr, c_char, c_int};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::table::{IpcHandle, Raw};
use super::{DevicePtr, Driver};
use crate::cuda::error::CudaError;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: opened memory may be on a peer GPU.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

/// Numeric attributes of a GPU, by the driver's attribute number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Attribute {
    /// Streaming multiprocessors.
    MultiprocessorCount = 16,
    /// Major number of the compute capability.
    ComputeCapabilityMajor = 75,
    /// Minor number of the compute capability.
    ComputeCapabilityMinor = 76,
    /// 1 if one address space covers host and GPUs.
    UnifiedAddressing = 41,
    /// 1 if the GPU accesses registered host memory at the host's addresses.
    HostPointersOfRegisteredMemory = 91,
    /// Copy engines: copies that can run concurrently.
    AsyncEngineCount = 40,
}

/// A GPU without a context.
#[derive(Debug, Clone)]
pub struct PhysicalDevice {
    driver: Arc<Driver>,
    ordinal: i32,
    raw: c_int,
}

impl PhysicalDevice {
    pub(super) fn get(driver: &Arc<Driver>, ordinal: i32) -> Result<Self, CudaError> {
        let mut raw = 0;
        // SAFETY: the address is that of a live integer.
        unsafe { driver.cuDeviceGet(&mut raw, ordinal) }?;
        Ok(Self {
            driver: driver.clone(),
            ordinal,
            raw,
        })
    }

    /// Index among the GPUs visible to this process.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The driver that listed the GPU.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Product name.
    ///
    /// # Errors
    /// The driver's error.
    pub fn name(&self) -> Result<String, CudaError> {
        // SAFETY: the driver writes at most `len` bytes, the last one zero.
        self.text(|at, len| unsafe { self.driver.cuDeviceGetName(at, len, self.raw) })
    }

    /// Domain, bus, device and function in hexadecimal, such as `0000:3b:00.0`, as the driver writes it.
    ///
    /// # Errors
    /// The driver's error.
    pub fn pci_bus_id(&self) -> Result<String, CudaError> {
        // SAFETY: the driver writes at most `len` bytes, the last one zero.
        self.text(|at, len| unsafe { self.driver.cuDeviceGetPCIBusId(at, len, self.raw) })
    }

    /// UUID of the GPU.
    ///
    /// # Errors
    /// The driver's error.
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        let mut uuid = [0; 16];
        // SAFETY: the address is that of 16 live bytes.
        unsafe { self.driver.cuDeviceGetUuid_v2(&mut uuid, self.raw) }?;
        Ok(uuid)
    }

    /// Bytes of GPU memory.
    ///
    /// # Errors
    /// The driver's error.
    pub fn total_bytes(&self) -> Result<u64, CudaError> {
        let mut bytes = 0;
        // SAFETY: the address is that of a live integer.
        unsafe { self.driver.cuDeviceTotalMem_v2(&mut bytes, self.raw) }?;
        Ok(bytes as u64)
    }

    /// Value of an attribute.
    ///
    /// # Errors
    /// The driver's error.
    pub fn attribute(&self, attribute: Attribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: the address is that of a live integer.
        unsafe {
            self.driver
                .cuDeviceGetAttribute(&mut value, attribute as c_int, self.raw)
        }?;
        Ok(value)
    }

    fn text(
        &self,
        read: impl FnOnce(*mut c_char, c_int) -> Result<(), CudaError>,
    ) -> Result<String, CudaError> {
        let mut bytes = [0u8; 256];
        read(bytes.as_mut_ptr().cast(), bytes.len() as c_int)?;
        Ok(CStr::from_bytes_until_nul(&bytes)
            .map(|text| text.to_string_lossy().into_owned())
            .unwrap_or_default())
    }
}

/// The primary context of a GPU, shared by all libraries of the process. Released when dropped.
pub struct Context {
    device: PhysicalDevice,
    raw: Raw,
}

// SAFETY: a context is a handle; the driver's functions may be called from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Creates or retains the context, which takes some hundred MiB of GPU memory.
    ///
    /// # Errors
    /// The driver's error.
    pub fn retain(device: &PhysicalDevice) -> Result<Arc<Self>, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the address is that of a live pointer.
        unsafe { device.driver.cuDevicePrimaryCtxRetain(&mut raw, device.raw) }?;
        Ok(Arc::new(Self {
            device: device.clone(),
            raw,
        }))
    }

    /// GPU of the context.
    pub fn device(&self) -> &PhysicalDevice {
        &self.device
    }

    /// Driver of the context.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.device.driver
    }

    /// The driver's handle of the GPU.
    pub(super) fn raw_device(&self) -> c_int {
        self.device.raw
    }

    /// Makes it the calling thread's context permanently. Copies, launches and records on a stream need that; all other
    /// functions here make it current for the duration of the call.
    ///
    /// # Errors
    /// The driver's error.
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        unsafe { self.driver().cuCtxSetCurrent(self.raw) }
    }

    /// Makes it the calling thread's context until the result is dropped.
    ///
    /// # Errors
    /// The driver's error.
    pub fn enter(&self) -> Result<Current<'_>, CudaError> {
        let mut previous = ptr::null_mut();
        // SAFETY: the address is that of a live pointer.
        unsafe { self.driver().cuCtxGetCurrent(&mut previous) }?;
        let previous = (previous != self.raw).then_some(previous);
        if previous.is_some() {
            self.make_current()?;
        }
        Ok(Current {
            driver: self.driver(),
            previous,
        })
    }

    /// Waits for all work of the context.
    ///
    /// # Errors
    /// The driver's error, possibly of earlier asynchronous work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.enter()?;
        // SAFETY: takes no addresses.
        unsafe { self.driver().cuCtxSynchronize() }
    }

    /// The GPU's address of a byte of pinned host memory.
    ///
    /// # Errors
    /// The driver's error, for example for memory that is not pinned.
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

    /// Start and size of the allocation that contains a GPU address.
    ///
    /// # Errors
    /// The driver's error, for example for an address outside all allocations.
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

    /// Opens an allocation of another process and returns its address. A process cannot open its own.
    ///
    /// # Errors
    /// The driver's error.
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

    /// Closes memory that [`Context::open_memory`] opened.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// No started work uses the memory any more, and it is closed only once.
    pub unsafe fn close_memory(&self, base: DevicePtr) -> Result<(), CudaError> {
        let _current = self.enter()?;
        // SAFETY: promised by the caller.
        unsafe { self.driver().cuIpcCloseMemHandle(base.0) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, and every object of the context holds a reference to this.
        let _ = unsafe { self.driver().cuDevicePrimaryCtxRelease_v2(self.device.raw) };
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context({})", self.device.ordinal)
    }
}

/// Guard of a current context; the previous one is restored when this is dropped.
pub struct Current<'a> {
    driver: &'a Driver,
    previous: Option<Raw>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: it was current before; null means none.
            let _ = unsafe { self.driver.cuCtxSetCurrent(previous) };
        }
    }
}
