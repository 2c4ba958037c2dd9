//! The functions of the driver by exported name, with the signatures of `cuda.h` 12.8.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use super::{Driver, IpcHandle};
use crate::cuda::error::CudaError;

/// An opaque name the driver gave for a context, stream, event, module or function.
pub(super) type Raw = *mut c_void;

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

/// `CUmemAllocationProp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AllocationProperties {
    pub kind: c_uint,
    pub handle_kinds: c_uint,
    pub location: Location,
    pub win32: *mut c_void,
    pub flags: [u8; 8],
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

/// `CUDA_MEMCPY2D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Copy2d {
    pub src_x: usize,
    pub src_y: usize,
    pub src_kind: c_uint,
    pub src_host: *const c_void,
    pub src_device: u64,
    pub src_array: *mut c_void,
    pub src_pitch: usize,
    pub dst_x: usize,
    pub dst_y: usize,
    pub dst_kind: c_uint,
    pub dst_host: *mut c_void,
    pub dst_device: u64,
    pub dst_array: *mut c_void,
    pub dst_pitch: usize,
    pub row_bytes: usize,
    pub rows: usize,
}

const _: () = {
    assert!(size_of::<IpcHandle>() == 64);
    assert!(size_of::<Access>() == 12);
    assert!(size_of::<AllocationProperties>() == 32);
    assert!(size_of::<CopyAttributes>() == 24);
    assert!(size_of::<Copy2d>() == 128);
};

/// `cuMemcpyBatchAsync` as CUDA 12.8 has it: destinations, sources, sizes, how many, attributes, first copy of each
/// attribute, how many, where the index of a copy that failed goes, stream.
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

/// What the driver calls when a stream gets there.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

/// `cuGetErrorName` and `cuGetErrorString`: the text of a result, which is never freed.
pub(super) type ErrorText = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

macro_rules! table {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        /// Where each function is, if the library has it.
        #[expect(non_snake_case, reason = "the driver's names")]
        pub(super) struct Table {
            $(pub(super) $name: Option<unsafe extern "C" fn($($type),*) -> c_int>,)*
            pub(super) error_name: Option<ErrorText>,
            pub(super) error_meaning: Option<ErrorText>,
        }

        impl Table {
            /// # Safety
            /// What the library has under these names must have these signatures.
            pub(super) unsafe fn load(library: &Library) -> Self {
                Self {
                    // SAFETY: promised by the caller.
                    $($name: unsafe { library.get(stringify!($name)) }.ok().map(|found| *found),)*
                    // SAFETY: promised by the caller.
                    error_name: unsafe { library.get("cuGetErrorName") }.ok().map(|found| *found),
                    // SAFETY: promised by the caller.
                    error_meaning: unsafe { library.get("cuGetErrorString") }.ok().map(|found| *found),
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

        /// The functions themselves, with results in place of numbers.
        ///
        /// # Safety
        /// For each of them, what the driver's manual demands of the arguments: live addresses and names.
        #[expect(non_snake_case, reason = "the driver's names")]
        #[expect(clippy::too_many_arguments, reason = "the driver's signatures")]
        impl Driver {
            $(pub(super) unsafe fn $name(&self, $($argument: $type),*) -> Result<(), CudaError> {
                const NAME: &str = stringify!($name);
                let function = self.table.$name.ok_or(CudaError::Missing { function: NAME })?;
                // SAFETY: promised by the caller.
                self.check(NAME, unsafe { function($($argument),*) })
            })*
        }
    };
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

    cuMemCreate(allocation: *mut u64, bytes: usize, properties: *const AllocationProperties, flags: u64);
    cuMemRelease(allocation: u64);
    cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const AllocationProperties, option: c_uint);
    cuMemExportToShareableHandle(handle: *mut c_void, allocation: u64, kind: c_uint, flags: u64);
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
    cuStreamWaitValue64_v2(stream: Raw, address: u64, value: u64, flags: c_uint);
    cuStreamWriteValue64_v2(stream: Raw, address: u64, value: u64, flags: c_uint);
    cuLaunchHostFunc(stream: Raw, function: HostFunction, argument: *mut c_void);
    cuMemcpyAsync(destination: u64, source: u64, bytes: usize, stream: Raw);
    cuMemcpyHtoDAsync_v2(destination: u64, source: *const c_void, bytes: usize, stream: Raw);
    cuMemcpyDtoHAsync_v2(destination: *mut c_void, source: u64, bytes: usize, stream: Raw);
    cuMemcpy2DAsync_v2(copy: *const Copy2d, stream: Raw);
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
