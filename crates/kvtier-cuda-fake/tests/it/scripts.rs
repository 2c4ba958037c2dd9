//! What scripts make the fake driver pretend.

use std::ffi::{CStr, c_char, c_int};

use crate::driver::*;

#[test]
fn scripted_call_fails() {
    let _alone = alone();
    let alloc = || call!(cuMemAlloc_v2(&mut 0 => *mut u64, 8 => usize));
    script("fail cuMemAlloc_v2=2@2");
    assert_eq!([OK, 2, OK], [alloc(), alloc(), alloc()]);
    script("fail cuMemAlloc_v2=999@2+");
    assert_eq!([OK, 999, 999], [alloc(), alloc(), alloc()]);
    script("reset; fail cuMemAlloc_v2=700");
    assert_eq!([700, 700], [alloc(), alloc()]);
    script("reset");
    assert_eq!(OK, alloc());
    assert_eq!(9, count("cuMemAlloc_v2"));
    clean();
}

#[test]
fn held_calls_wait_for_release() {
    let _alone = alone();
    let version = || call!(cuDriverGetVersion(&mut 0 => *mut c_int));
    script("hold cuDriverGetVersion@2+");
    assert_eq!(OK, version());
    std::thread::scope(|scope| {
        let held = scope.spawn(version);
        while count("cuDriverGetVersion") == 1 {
            std::thread::yield_now();
        }
        assert_eq!(OK, call!(cuDeviceGetCount(&mut 0 => *mut c_int)));
        assert!(!held.is_finished());
        script("release");
        assert_eq!(OK, held.join().unwrap());
    });
    assert_eq!(OK, version());
    clean();
}

#[test]
fn invalid_script_is_a_violation() {
    let _alone = alone();
    for wrong in [
        "nonsense",
        "fail cuNothing=1@1",
        "fail cuMemAlloc_v2=x",
        "fail cuMemAlloc_v2=1@0",
        "hold pcie",
        "hold cuMemAlloc_v2@x",
        "hold cuMemAlloc_v2=1",
        "devices=17",
        "driver",
    ] {
        violated(try_script(wrong), 1, wrong);
    }
}

#[test]
fn codes_have_names() {
    let _alone = alone();
    let mut text: *const c_char = std::ptr::null();
    assert_eq!(
        OK,
        call!(cuGetErrorName(712 => c_int, &mut text => *mut *const c_char))
    );
    // SAFETY: the driver's texts end with a NUL.
    let name = unsafe { CStr::from_ptr(text) };
    assert_eq!(c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", name);
    assert_eq!(
        1,
        call!(cuGetErrorString(123_456 => c_int, &mut text => *mut *const c_char))
    );
    assert!(text.is_null());
    clean();
}
