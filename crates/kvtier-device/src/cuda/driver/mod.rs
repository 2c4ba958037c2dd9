//! The driver's library: its functions as a table, and small owned types over them.
//!
//! Functions are bound by exported name when the library is loaded. One that is missing is an error of the call that
//! needs it, so that an old driver serves for what it can do. Nothing here decides anything; what a call does and when
//! it may be made is written in the driver's manual.

mod context;
mod event;
mod memory;
mod module;
mod stream;
mod table;
mod vmm;

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use libloading::Library;

use super::error::CudaError;
use table::{BatchCopy, ErrorText, Table};

pub use context::{Attribute, Context, Current, PhysicalDevice};
pub use event::{Event, EventFlags};
pub use memory::{DeviceBuffer, HostBuffer, RegisteredHost};
pub use module::{Grid, Kernel, Module};
pub use stream::{CopyBatch, Rows, SourceOrder, Stream};
pub use vmm::{Allocation, HandleKind, Reservation};

/// What the driver is called where it is installed.
pub const LIBRARY: &str = "libcuda.so.1";

/// First driver version (1000 x major + 10 x minor) with copies in batches, and the version whose signature is used.
const BATCH_COPY_VERSION: i32 = 12080;

/// The driver's numbers that are looked at; all others are only shown.
pub mod code {
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const INVALID_VALUE: i32 = 1;
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// `CUDA_ERROR_NO_DEVICE`.
    pub const NO_DEVICE: i32 = 100;
    /// `CUDA_ERROR_INVALID_CONTEXT`: among others, memory of the own process was to be opened by its handle.
    pub const INVALID_CONTEXT: i32 = 201;
    /// `CUDA_ERROR_INVALID_HANDLE`.
    pub const INVALID_HANDLE: i32 = 400;
    /// `CUDA_ERROR_NOT_READY`: not an error, but "not yet".
    pub const NOT_READY: i32 = 600;
    /// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
    pub const HOST_MEMORY_ALREADY_REGISTERED: i32 = 712;
    /// `CUDA_ERROR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: i32 = 801;
}

/// An address in the memory of a GPU, as the driver gives it in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

/// Name of an allocation or an event that other processes can open: 64 bytes that mean something to the driver only.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

impl std::fmt::Debug for IpcHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IpcHandle({:02x?}..)", &self.0[..8])
    }
}

/// The loaded and initialised driver.
pub struct Driver {
    table: Table,
    batch_copy: Option<BatchCopy>,
    version: i32,
}

impl Driver {
    /// Loads the library and initialises it. `None` means [`LIBRARY`], wherever the dynamic linker finds it.
    ///
    /// The library stays loaded until the process ends: it starts threads of its own.
    ///
    /// # Errors
    /// No such library, one that is no driver, or one that finds no GPU it can use.
    pub fn load(path: Option<&Path>) -> Result<Arc<Self>, CudaError> {
        let path = path.unwrap_or(Path::new(LIBRARY));
        // SAFETY: the path is the operator's or the driver's own name; a driver's initialisers have no conditions.
        let library = unsafe { Library::new(path) }.map_err(|error| CudaError::Library {
            library: path.display().to_string(),
            // What the dynamic linker says is behind the error's own text.
            why: std::error::Error::source(&error)
                .unwrap_or(&error)
                .to_string(),
        })?;
        let mut driver = Self {
            // SAFETY: what has the driver's names has the driver's signatures.
            table: unsafe { Table::load(&library) },
            batch_copy: None,
            version: 0,
        };
        std::mem::forget(library);
        // SAFETY: takes no addresses.
        unsafe { driver.cuInit(0) }?;
        let mut version = 0;
        // SAFETY: the address is that of a live integer.
        unsafe { driver.cuDriverGetVersion(&mut version) }?;
        driver.version = version;
        driver.batch_copy = driver.find_batch_copy();
        Ok(Arc::new(driver))
    }

    /// Version of CUDA the driver serves: 1000 x major + 10 x minor.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Whether [`Stream::copy_batch`] exists.
    pub fn copies_in_batches(&self) -> bool {
        self.batch_copy.is_some()
    }

    /// Names of the functions this driver lacks; empty for every driver since CUDA 12.0.
    pub fn missing(&self) -> Vec<&'static str> {
        self.table.missing()
    }

    /// Every GPU the driver shows to this process.
    ///
    /// # Errors
    /// What the driver says.
    pub fn devices(self: &Arc<Self>) -> Result<Vec<PhysicalDevice>, CudaError> {
        let mut count = 0;
        // SAFETY: the address is that of a live integer.
        unsafe { self.cuDeviceGetCount(&mut count) }?;
        (0..count)
            .map(|ordinal| PhysicalDevice::get(self, ordinal))
            .collect()
    }

    /// A later driver has the same name with other arguments, so the version is asked for with the name.
    fn find_batch_copy(&self) -> Option<BatchCopy> {
        if self.version < BATCH_COPY_VERSION {
            return None;
        }
        let mut function: *mut c_void = ptr::null_mut();
        let mut status = 0;
        // SAFETY: the name ends with a zero byte, and both addresses are those of live variables.
        unsafe {
            self.cuGetProcAddress_v2(
                c"cuMemcpyBatchAsync".as_ptr(),
                &mut function,
                BATCH_COPY_VERSION,
                0,
                &mut status,
            )
        }
        .ok()?;
        if function.is_null() {
            return None;
        }
        // SAFETY: not null, and of the signature of the version that was asked for.
        Some(unsafe { std::mem::transmute::<*mut c_void, BatchCopy>(function) })
    }

    /// What a function returned as a result.
    fn check(&self, function: &'static str, code: i32) -> Result<(), CudaError> {
        match code {
            0 => return Ok(()),
            code::NOT_READY => return Err(CudaError::NotReady { function }),
            _ => {}
        }
        let text = |ask: Option<ErrorText>| {
            let mut text: *const c_char = ptr::null();
            // SAFETY: the address is that of a live pointer.
            if unsafe { ask?(code, &mut text) } != 0 || text.is_null() {
                return None;
            }
            // SAFETY: the driver's texts end with a zero byte and are never freed.
            Some(unsafe { CStr::from_ptr(text) }.to_string_lossy())
        };
        let name = text(self.table.error_name).unwrap_or_else(|| "unknown error".into());
        let explained = match text(self.table.error_meaning) {
            Some(meaning) => format!("{name}, {meaning}"),
            None => name.into_owned(),
        };
        Err(CudaError::Call {
            function,
            code,
            name: explained,
        })
    }

    /// `Ok(false)` for "not yet".
    fn ready(&self, result: Result<(), CudaError>) -> Result<bool, CudaError> {
        match result {
            Ok(()) => Ok(true),
            Err(CudaError::NotReady { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version)
            .field("copies_in_batches", &self.copies_in_batches())
            .finish()
    }
}
