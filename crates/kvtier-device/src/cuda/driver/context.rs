//! GPUs and their primary contexts.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::Arc;

use super::Driver;
use super::table::Raw;
use crate::cuda::error::CudaError;

/// Facts about a GPU that are numbers; the value is the driver's number for the fact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Attribute {
    /// Processors (SMs).
    MultiprocessorCount = 16,
    /// First half of the compute capability.
    ComputeCapabilityMajor = 75,
    /// Second half of the compute capability.
    ComputeCapabilityMinor = 76,
    /// 1 when one address space covers host and GPUs.
    UnifiedAddressing = 41,
    /// 1 when the GPU reaches registered memory of the host at the host's own addresses.
    HostPointersOfRegisteredMemory = 91,
    /// Copies that can run at the same time.
    AsyncEngineCount = 40,
}

/// One GPU, not yet in use.
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

    /// Position among the GPUs this process sees.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// What the maker calls it.
    ///
    /// # Errors
    /// What the driver says.
    pub fn name(&self) -> Result<String, CudaError> {
        // SAFETY: the driver writes at most as many bytes as it is told, the last one zero.
        self.text(|at, len| unsafe { self.driver.cuDeviceGetName(at, len, self.raw) })
    }

    /// Domain, bus, device and function in hexadecimal, such as `0000:3b:00.0`, as the driver writes it.
    ///
    /// # Errors
    /// What the driver says.
    pub fn pci_bus_id(&self) -> Result<String, CudaError> {
        // SAFETY: the driver writes at most as many bytes as it is told, the last one zero.
        self.text(|at, len| unsafe { self.driver.cuDeviceGetPCIBusId(at, len, self.raw) })
    }

    /// What tells it from all other GPUs.
    ///
    /// # Errors
    /// What the driver says.
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        let mut uuid = [0; 16];
        // SAFETY: the address is that of 16 live bytes.
        unsafe { self.driver.cuDeviceGetUuid_v2(&mut uuid, self.raw) }?;
        Ok(uuid)
    }

    /// Bytes of its memory.
    ///
    /// # Errors
    /// What the driver says.
    pub fn total_bytes(&self) -> Result<u64, CudaError> {
        let mut bytes = 0;
        // SAFETY: the address is that of a live integer.
        unsafe { self.driver.cuDeviceTotalMem_v2(&mut bytes, self.raw) }?;
        Ok(bytes as u64)
    }

    /// A fact about it.
    ///
    /// # Errors
    /// What the driver says.
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
        ask: impl FnOnce(*mut c_char, c_int) -> Result<(), CudaError>,
    ) -> Result<String, CudaError> {
        let mut bytes = [0u8; 256];
        ask(bytes.as_mut_ptr().cast(), bytes.len() as c_int)?;
        Ok(CStr::from_bytes_until_nul(&bytes)
            .map(|text| text.to_string_lossy().into_owned())
            .unwrap_or_default())
    }
}

/// The primary context of a GPU, which PyTorch in the same process would use too. Released when dropped.
pub struct Context {
    device: PhysicalDevice,
    raw: Raw,
}

// SAFETY: a context is a name; the driver's functions may be called from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Takes the GPU into use: its memory for the context (some hundred MiB) is spent from here on.
    ///
    /// # Errors
    /// What the driver says.
    pub fn retain(device: &PhysicalDevice) -> Result<Arc<Self>, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the address is that of a live pointer.
        unsafe { device.driver.cuDevicePrimaryCtxRetain(&mut raw, device.raw) }?;
        Ok(Arc::new(Self {
            device: device.clone(),
            raw,
        }))
    }

    /// The GPU.
    pub fn device(&self) -> &PhysicalDevice {
        &self.device
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.device.driver
    }

    /// The driver's number of the GPU.
    pub(super) fn raw_device(&self) -> c_int {
        self.device.raw
    }

    /// Makes it the context of the calling thread for good. What copies, launches or records on a stream needs that;
    /// everything else here does it by itself for as long as it takes.
    ///
    /// # Errors
    /// What the driver says.
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        unsafe { self.driver().cuCtxSetCurrent(self.raw) }
    }

    /// Makes it the context of the calling thread until the result is dropped.
    ///
    /// # Errors
    /// What the driver says.
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

    /// Waits for everything on the GPU.
    ///
    /// # Errors
    /// What the driver says, also about work that failed earlier.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.enter()?;
        // SAFETY: takes no addresses.
        unsafe { self.driver().cuCtxSynchronize() }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, and every owner of something in it holds it too.
        let _ = unsafe { self.driver().cuDevicePrimaryCtxRelease_v2(self.device.raw) };
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context({})", self.device.ordinal)
    }
}

/// A context is current; the one before it is again when this is dropped.
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
