//! The library as a process that loads it sees it: functions by name.

use std::ffi::{CString, c_char, c_int, c_void};

use kvtier_cuda_fake::fake_driver_path;

/// Calls an exported function with arguments that are all numbers or pointers.
macro_rules! call {
    ($name:ident($($arg:expr => $ty:ty),* $(,)?)) => {{
        type Function = extern "C" fn($($ty),*) -> std::ffi::c_int;
        let at = $crate::driver::symbol(stringify!($name));
        // SAFETY: the types are those of the function's name.
        let function: Function = unsafe { std::mem::transmute(at) };
        function($($arg),*)
    }};
}
pub(crate) use call;

pub(crate) fn symbol(name: &str) -> *mut c_void {
    let path = CString::new(fake_driver_path().unwrap().to_str().unwrap()).unwrap();
    let name = CString::new(name).unwrap();
    // SAFETY: both are texts with a NUL; the library is never unloaded.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "{path:?}");
        let at = libc::dlsym(library, name.as_ptr());
        assert!(!at.is_null(), "{name:?}");
        at
    }
}

pub(crate) const OK: c_int = 0;

pub(crate) fn script(text: &str) {
    assert_eq!(OK, try_script(text), "{text}: {:?}", violations());
}

pub(crate) fn try_script(text: &str) -> c_int {
    let text = CString::new(text).unwrap();
    call!(fake_driver_script(text.as_ptr() => *const c_char))
}

pub(crate) fn count(name: &str) -> u64 {
    let name = CString::new(name).unwrap();
    // SAFETY: the type is the function's.
    let function: extern "C" fn(*const c_char) -> u64 =
        unsafe { std::mem::transmute(symbol("fake_driver_count")) };
    function(name.as_ptr())
}

pub(crate) fn violations() -> Vec<String> {
    let mut text = vec![0_u8; 1 << 16];
    call!(fake_driver_violations(text.as_mut_ptr() => *mut u8, text.len() => usize));
    let end = text.iter().position(|&b| b == 0).unwrap();
    String::from_utf8_lossy(&text[..end])
        .lines()
        .map(str::to_owned)
        .collect()
}

/// The one violation since the last call that asked, which names `what`; `code` is what the call answered.
pub(crate) fn violated(code: c_int, want: c_int, what: &str) {
    let all = violations();
    assert_eq!((code, all.len()), (want, 1), "{all:?}");
    assert!(all[0].contains(what), "{all:?} without \"{what}\"");
    script("clear");
}

pub(crate) fn clean() {
    assert_eq!(violations(), Vec::<String>::new());
}

/// Tests of one process share the library, so each has it alone; with device 0's context current.
pub(crate) struct Alone(#[expect(dead_code, reason = "held")] std::sync::MutexGuard<'static, ()>);

pub(crate) fn alone() -> Alone {
    static LOCK: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let guard = LOCK.lock().unwrap_or_else(|e| e.into_inner());
    script("reset; clear; driver=12080");
    current();
    Alone(guard)
}

impl Drop for Alone {
    fn drop(&mut self) {
        script("reset");
    }
}

/// Makes the context of device 0 current on this thread.
pub(crate) fn current() {
    assert_eq!(OK, call!(cuInit(0 => u32)));
    let mut context = 0_u64;
    assert_eq!(
        OK,
        call!(cuDevicePrimaryCtxRetain(&mut context => *mut u64, 0 => c_int))
    );
    assert_eq!(OK, call!(cuCtxSetCurrent(context => u64)));
}

pub(crate) fn stream() -> u64 {
    let mut stream = 0;
    assert_eq!(
        OK,
        call!(cuStreamCreateWithPriority(&mut stream => *mut u64, 1 => u32, 0 => c_int))
    );
    stream
}

pub(crate) fn sync(stream: u64) -> c_int {
    call!(cuStreamSynchronize(stream => u64))
}

pub(crate) fn event(flags: u32) -> u64 {
    let mut event = 0;
    assert_eq!(
        OK,
        call!(cuEventCreate(&mut event => *mut u64, flags => u32))
    );
    event
}

pub(crate) fn record(event: u64, stream: u64) {
    assert_eq!(OK, call!(cuEventRecord(event => u64, stream => u64)));
}

pub(crate) fn query(event: u64) -> c_int {
    call!(cuEventQuery(event => u64))
}

pub(crate) fn device_memory(bytes: usize) -> u64 {
    let mut at = 0;
    assert_eq!(
        OK,
        call!(cuMemAlloc_v2(&mut at => *mut u64, bytes => usize))
    );
    at
}

/// Host memory that the driver allocated, as a slice.
pub(crate) fn host_memory(bytes: usize) -> &'static mut [u8] {
    let mut at: *mut u8 = std::ptr::null_mut();
    assert_eq!(
        OK,
        call!(cuMemHostAlloc(&mut at => *mut *mut u8, bytes => usize, 3 => u32))
    );
    // SAFETY: just allocated, and never freed.
    unsafe { std::slice::from_raw_parts_mut(at, bytes) }
}

pub(crate) fn to_device(at: u64, from: &[u8], stream: u64) -> c_int {
    call!(cuMemcpyHtoDAsync_v2(at => u64, from.as_ptr() => *const u8, from.len() => usize, stream => u64))
}

pub(crate) fn to_host(to: &mut [u8], at: u64, stream: u64) -> c_int {
    call!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr() => *mut u8, at => u64, to.len() => usize, stream => u64))
}

/// What device memory holds.
pub(crate) fn contents(at: u64, bytes: usize) -> Vec<u8> {
    let mut to = vec![0; bytes];
    assert_eq!(
        OK,
        call!(cuMemcpyDtoH_v2(to.as_mut_ptr() => *mut u8, at => u64, bytes => usize))
    );
    to
}
