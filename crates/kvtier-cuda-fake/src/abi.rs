//! The ABI of `cuda.h`: result codes, constants and structures.

#![expect(
    dead_code,
    reason = "a script may answer with any of the codes, so they have names"
)]

use std::ffi::{c_char, c_void};

pub(crate) type CUresult = i32;

/// Every result code that the fake driver returns, with the name the driver has for it.
macro_rules! codes {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        $(pub(crate) const $name: CUresult = $code;)*
        /// Name and description of a code, both with a closing NUL.
        pub(crate) const CODES: &[(CUresult, &str, &str)] =
            &[$(($code, concat!("CUDA_", stringify!($name), "\0"), concat!($text, "\0")),)*];
    };
}
codes! {
    SUCCESS = 0, "no error";
    ERROR_INVALID_VALUE = 1, "invalid argument";
    ERROR_OUT_OF_MEMORY = 2, "out of memory";
    ERROR_NOT_INITIALIZED = 3, "initialization error";
    ERROR_NO_DEVICE = 100, "no CUDA-capable device is detected";
    ERROR_INVALID_DEVICE = 101, "invalid device ordinal";
    ERROR_INVALID_CONTEXT = 201, "invalid device context";
    ERROR_ALREADY_MAPPED = 208, "resource already mapped";
    ERROR_NOT_MAPPED = 211, "resource not mapped";
    ERROR_PEER_ACCESS_UNSUPPORTED = 217, "peer access is not supported between these two devices";
    ERROR_INVALID_PTX = 218, "a PTX JIT compilation failed";
    ERROR_INVALID_HANDLE = 400, "invalid resource handle";
    ERROR_NOT_FOUND = 500, "named symbol not found";
    ERROR_NOT_READY = 600, "device not ready";
    ERROR_ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    ERROR_CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    ERROR_HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    ERROR_MISALIGNED_ADDRESS = 716, "misaligned address";
    ERROR_LAUNCH_FAILED = 719, "unspecified launch failure";
    ERROR_NOT_PERMITTED = 800, "operation not permitted";
    ERROR_NOT_SUPPORTED = 801, "operation not supported";
    ERROR_UNKNOWN = 999, "unknown error";
}

pub(crate) const IPC_LAZY_PEER: u32 = 1;
pub(crate) const EVENT_DISABLE_TIMING: u32 = 2;
pub(crate) const EVENT_INTERPROCESS: u32 = 4;
pub(crate) const HOST_REGISTER_PORTABLE: u32 = 1;
pub(crate) const HOST_REGISTER_DEVICEMAP: u32 = 2;
pub(crate) const HANDLE_POSIX_FD: u32 = 1;
pub(crate) const HANDLE_FABRIC: u32 = 8;
pub(crate) const ACCESS_READ_WRITE: u32 = 3;
pub(crate) const LOCATION_DEVICE: u32 = 1;
pub(crate) const ORDER_ANY: u32 = 3;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    pub kind: u32,
    pub id: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub(crate) struct AllocationProp {
    pub kind: u32,
    pub handle_types: u32,
    pub location: Location,
    pub win32: *mut c_void,
    pub flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct AccessDesc {
    pub location: Location,
    pub flags: u32,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
pub(crate) struct CopyAttributes {
    pub order: u32,
    pub src: Location,
    pub dst: Location,
    pub flags: u32,
}

/// What a call may answer instead of success.
pub(crate) enum Fault {
    /// A code that a correct caller meets too: not ready, out of memory, a dead exporter.
    Code(CUresult),
    /// A code for an incorrect call; the text goes into the journal.
    Wrong(CUresult, String),
}

pub(crate) type CudaResult<T = ()> = Result<T, Fault>;

/// A fault that is noted as a violation.
macro_rules! wrong {
    ($code:expr, $($text:tt)*) => { $crate::abi::Fault::Wrong($code, format!($($text)*)) };
}
pub(crate) use wrong;

/// Writes through a pointer of the caller, which by the C contract is null or valid.
pub(crate) fn put<T>(to: *mut T, value: T) -> CudaResult {
    if to.is_null() {
        return Err(wrong!(ERROR_INVALID_VALUE, "a result pointer is null"));
    }
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes as much of a text as fits, with a closing NUL.
pub(crate) fn put_text(text: &str, to: *mut c_char, capacity: usize) {
    if to.is_null() || capacity == 0 {
        return;
    }
    let n = text.len().min(capacity - 1);
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), n);
        to.add(n).write(0);
    }
}

/// The array of a caller, which by the C contract is null or valid.
pub(crate) fn array<'a, T>(at: *const T, n: usize, what: &str) -> CudaResult<&'a [T]> {
    if n == 0 {
        return Ok(&[]);
    }
    if at.is_null() || !at.is_aligned() {
        return Err(wrong!(ERROR_INVALID_VALUE, "{what} is {at:?}"));
    }
    Ok(unsafe { std::slice::from_raw_parts(at, n) })
}
