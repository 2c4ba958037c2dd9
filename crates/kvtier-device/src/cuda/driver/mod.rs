//! The CUDA driver library: its functions as a table, and small owning types over them.
//!
//! Functions are bound by exported name when the library is loaded. A missing one is an error of the call that needs it,
//! so an old driver serves what it can. Nothing here decides anything; the driver's manual says what a call does.
//!
//! Why not `cudarc::driver::sys` (0.19), which has all of these functions:
//! - It panics where the library or a function is missing; here that is an error, and the server starts without a GPU.
//! - It searches fixed file names and keeps one library per process: no `--cuda-driver PATH`, no fake driver in tests.
//! - Its results are a Rust enum: a code that a newer driver returns and the enum lacks is undefined behaviour.
//! - It binds `cuMemcpyBatchAsync` by plain name with the signature of one CUDA version, not by the version asked for.

mod context;
mod event;
mod memory;
mod module;
mod stream;
mod table;
mod vmm;

use std::ffi::c_void;
use std::ops::Deref;
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use libloading::Library;

use super::error::CudaError;
use table::{BatchCopy, Table};

pub use context::{Attribute, Context, Current, PhysicalDevice};
pub use event::{Event, EventFlags};
pub use memory::{DeviceBuffer, HostBuffer, RegisteredHost};
pub use module::{Grid, Kernel, Module};
pub use stream::{CopyBatch, SourceOrder, Stream};
pub use table::IpcHandle;
pub use vmm::{Allocation, HandleKind, Reservation};

/// File name of the installed driver library.
pub const LIBRARY: &str = "libcuda.so.1";

/// First driver version (1000 x major + 10 x minor) with batched copies, and the version whose signature is used.
const BATCH_COPY_VERSION: i32 = 12080;

/// An address of GPU memory, valid in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

/// The loaded and initialised driver.
pub struct Driver {
    table: Table,
    batch_copy: Option<BatchCopy>,
    version: i32,
}

impl Driver {
    /// Loads and initialises the library. `None` means [`LIBRARY`], wherever the dynamic linker finds it.
    ///
    /// The library stays loaded until the process ends, because it starts its own threads.
    ///
    /// # Errors
    /// The library does not exist, is not a driver, or finds no usable GPU.
    pub fn load(path: Option<&Path>) -> Result<Arc<Self>, CudaError> {
        let path = path.unwrap_or(Path::new(LIBRARY));
        // SAFETY: the path is the operator's or the driver's own name; a driver's initialisers have no conditions.
        let library = unsafe { Library::new(path) }.map_err(|error| CudaError::Library {
            library: path.display().to_string(),
            // The dynamic linker's message is the source of this error.
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

    /// Newest CUDA version the driver supports: 1000 x major + 10 x minor.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Whether the driver has [`Stream::copy_batch`].
    pub fn has_batch_copy(&self) -> bool {
        self.batch_copy.is_some()
    }

    /// Names of the functions this driver lacks; none since CUDA 12.0.
    pub fn missing(&self) -> Vec<&'static str> {
        self.table.missing()
    }

    /// Every GPU visible to this process.
    ///
    /// # Errors
    /// The driver's error.
    pub fn devices(self: &Arc<Self>) -> Result<Vec<PhysicalDevice>, CudaError> {
        let mut count = 0;
        // SAFETY: the address is that of a live integer.
        unsafe { self.cuDeviceGetCount(&mut count) }?;
        (0..count)
            .map(|ordinal| PhysicalDevice::get(self, ordinal))
            .collect()
    }

    /// Looks the function up by name and version, because later drivers have the same name with other arguments.
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
}

/// The driver's functions are called on the driver.
impl Deref for Driver {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.table
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version)
            .field("has_batch_copy", &self.has_batch_copy())
            .finish()
    }
}
