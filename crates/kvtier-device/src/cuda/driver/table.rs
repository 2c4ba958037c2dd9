//! The functions of the driver by exported name, with the signatures of `cuda.h` 12.8.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use libloading::Library;

use crate::cuda::error::{CudaError, code};

/// The driver's opaque handle of a context, stream, event, module or function.
pub(super) type Raw = *mut c_void;

/// Handle of an allocation or event that other processes can open: 64 bytes, opaque to everything but the driver.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

impl std::fmt::Debug for IpcHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IpcHandle({:02x?}..)", &self.0[..8])
    }
}

/// `CUmemLocation`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Location {
    pub kind: c_uint,
    pub id: c_int,
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Access {
    pub location: Location,
    pub flags: c_uint,
}

/// `CUmemcpyAttributes`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct CopyAttributes {
    pub source_order: c_uint,
    pub source: Location,
    pub destination: Location,
    pub flags: c_uint,
}

const _: () = {
    assert!(size_of::<IpcHandle>() == 64);
    assert!(size_of::<Access>() == 12);
    assert!(size_of::<CopyAttributes>() == 24);
};

/// `cuMemcpyBatchAsync` of CUDA 12.8: destinations, sources, sizes, number of copies, attributes, first copy of each
/// attribute, number of attributes, index of the copy that failed (written), stream.
pub(super) type BatchCopy = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const CopyAttributes,
    *const usize,
    usize,
    *mut usize,
    Raw,
) -> c_int;

/// A function that the driver calls in stream order.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

/// `cuGetErrorName` and `cuGetErrorString`: the text of a result code, which is never freed.
pub(super) type ErrorText = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

macro_rules! table {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The address of each function that the library has.
        #[expect(non_snake_case, reason = "the driver's names")]
        pub struct Table {
            $($name: Option<unsafe extern "C" fn($($type),*) -> c_int>,)*
            error_name: Option<ErrorText>,
            error_description: Option<ErrorText>,
        }

        impl Table {
            /// Looks up every function.
            ///
            /// # Safety
            /// The library's functions of these names must have these signatures.
            pub(super) unsafe fn load(library: &Library) -> Self {
                Self {
                    // SAFETY: promised by the caller.
                    $($name: unsafe { library.get(stringify!($name)) }.ok().map(|found| *found),)*
                    // SAFETY: promised by the caller.
                    error_name: unsafe { library.get("cuGetErrorName") }.ok().map(|found| *found),
                    // SAFETY: promised by the caller.
                    error_description: unsafe { library.get("cuGetErrorString") }.ok().map(|found| *found),
                }
            }

            /// Names the library lacks.
            pub(super) fn missing(&self) -> Vec<&'static str> {
                [$((stringify!($name), self.$name.is_none())),*]
                    .into_iter()
                    .filter_map(|(name, missing)| missing.then_some(name))
                    .collect()
            }
        }

        /// The functions, with errors instead of result codes.
        ///
        /// # Safety
        /// For each of them, what the driver's manual demands of the arguments: live addresses and handles.
        #[expect(non_snake_case, reason = "the driver's names")]
        #[expect(clippy::too_many_arguments, reason = "the driver's signatures")]
        impl Table {
            $(pub(super) unsafe fn $name(&self, $($argument: $type),*) -> Result<(), CudaError> {
                const NAME: &str = stringify!($name);
                let function = self.$name.ok_or(CudaError::Missing { function: NAME })?;
                // SAFETY: promised by the caller.
                self.check(NAME, unsafe { function($($argument),*) })
            })*
        }
    };
}

impl Table {
    /// Turns the result code of `function` into an error.
    pub(super) fn check(&self, function: &'static str, code: i32) -> Result<(), CudaError> {
        match code {
            0 => return Ok(()),
            code::NOT_READY => return Err(CudaError::NotReady { function }),
            _ => {}
        }
        let text = |lookup: Option<ErrorText>| {
            let mut text: *const c_char = ptr::null();
            // SAFETY: the address is that of a live pointer.
            if unsafe { lookup?(code, &mut text) } != 0 || text.is_null() {
                return None;
            }
            // SAFETY: the driver's texts end with a zero byte and are never freed.
            Some(unsafe { CStr::from_ptr(text) }.to_string_lossy())
        };
        let name = text(self.error_name).unwrap_or_else(|| "unknown error".into());
        let explained = match text(self.error_description) {
            Some(description) => format!("{name}, {description}"),
            None => name.into_owned(),
        };
        Err(CudaError::Call {
            function,
            code,
            name: explained,
        })
    }
}

/// Turns "not ready" into `Ok(false)`.
pub(super) fn is_ready(result: Result<(), CudaError>) -> Result<bool, CudaError> {
    match result {
        Ok(()) => Ok(true),
        Err(CudaError::NotReady { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

table! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuGetProcAddress_v2(name: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int);

    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut c_int, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: c_int);
    cuDevicePrimaryCtxRetain(context: *mut Raw, device: c_int);
    cuDevicePrimaryCtxRelease_v2(device: c_int);
    cuCtxSetCurrent(context: Raw);
    cuCtxGetCurrent(context: *mut Raw);
    cuCtxSynchronize();

    cuMemAlloc_v2(address: *mut u64, bytes: usize);
    cuMemFree_v2(address: u64);
    cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64);
    cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost(address: *mut c_void);
    cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister(address: *mut c_void);
    cuMemHostGetDevicePointer_v2(device: *mut u64, host: *mut c_void, flags: c_uint);
    cuIpcGetMemHandle(handle: *mut IpcHandle, address: u64);
    cuIpcOpenMemHandle_v2(address: *mut u64, handle: IpcHandle, flags: c_uint);
    cuIpcCloseMemHandle(address: u64);

    cuMemRelease(allocation: u64);
    cuMemImportFromShareableHandle(allocation: *mut u64, handle: *mut c_void, kind: c_uint);
    cuMemAddressReserve(address: *mut u64, bytes: usize, alignment: usize, wanted: u64, flags: u64);
    cuMemAddressFree(address: u64, bytes: usize);
    cuMemMap(address: u64, bytes: usize, offset: usize, allocation: u64, flags: u64);
    cuMemUnmap(address: u64, bytes: usize);
    cuMemSetAccess(address: u64, bytes: usize, access: *const Access, count: usize);

    cuStreamCreateWithPriority(stream: *mut Raw, flags: c_uint, priority: c_int);
    cuStreamDestroy_v2(stream: Raw);
    cuStreamQuery(stream: Raw);
    cuStreamSynchronize(stream: Raw);
    cuStreamWaitEvent(stream: Raw, event: Raw, flags: c_uint);
    cuStreamWriteValue64_v2(stream: Raw, address: u64, value: u64, flags: c_uint);
    cuLaunchHostFunc(stream: Raw, function: HostFunction, argument: *mut c_void);
    cuMemcpyAsync(destination: u64, source: u64, bytes: usize, stream: Raw);
    cuMemcpyHtoDAsync_v2(destination: u64, source: *const c_void, bytes: usize, stream: Raw);
    cuMemcpyDtoHAsync_v2(destination: *mut c_void, source: u64, bytes: usize, stream: Raw);
    cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: Raw);

    cuEventCreate(event: *mut Raw, flags: c_uint);
    cuEventDestroy_v2(event: Raw);
    cuEventRecord(event: Raw, stream: Raw);
    cuEventQuery(event: Raw);
    cuEventSynchronize(event: Raw);
    cuEventElapsedTime(milliseconds: *mut f32, start: Raw, end: Raw);
    cuIpcGetEventHandle(handle: *mut IpcHandle, event: Raw);
    cuIpcOpenEventHandle(event: *mut Raw, handle: IpcHandle);

    cuModuleLoadDataEx(module: *mut Raw, image: *const c_void, options: c_uint, names: *const c_int, values: *const *mut c_void);
    cuModuleUnload(module: Raw);
    cuModuleGetFunction(function: *mut Raw, module: Raw, name: *const c_char);
    cuLaunchKernel(
        function: Raw, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: Raw, arguments: *const *mut c_void, extra: *const *mut c_void
    );
}
