//! What scripts make the fake driver pretend.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

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
        "devices=17",
        "uuid.0=12",
        "uuid.9=5ca1ab1e-0000-4000-8000-000000000000",
        "batch=maybe",
        "h2d=fast",
        "driver",
    ] {
        violated(try_script(wrong), 1, wrong);
    }
    script("# a remark; clear\n");
}

#[test]
fn events_may_never_complete() {
    let _alone = alone();
    let (stream, first, second) = (stream(), event(2), event(2));
    script("event.never=2");
    record(first, stream);
    record(second, stream);
    assert_eq!(OK, sync(stream));
    assert_eq!((OK, 600), (query(first), query(second)));
    record(second, stream);
    assert_eq!(OK, call!(cuEventSynchronize(second => u64)));
}

fn address(name: &str, version: c_int) -> (c_int, *mut c_void, c_int) {
    let name = CString::new(name).unwrap();
    let (mut at, mut status) = (std::ptr::dangling_mut(), -1);
    let code = call!(cuGetProcAddress_v2(
        name.as_ptr() => *const c_char, &mut at => *mut *mut c_void, version => c_int, 0 => u64, &mut status => *mut c_int));
    (code, at, status)
}

#[test]
fn functions_are_found_by_name_and_version() {
    let _alone = alone();
    let none = std::ptr::null_mut();
    assert_eq!(
        (OK, symbol("cuMemAlloc_v2"), 0),
        address("cuMemAlloc", 12080)
    );
    assert_eq!((OK, symbol("cuInit"), 0), address("cuInit", 12080));
    assert_eq!((500, none, 1), address("cuMemAlloc_v2", 12080));
    assert_eq!((500, none, 1), address("cuNothing", 12080));
    assert_eq!(
        (OK, symbol("cuMemcpyBatchAsync"), 0),
        address("cuMemcpyBatchAsync", 12080)
    );
    assert_eq!((500, none, 2), address("cuMemcpyBatchAsync", 12060));
    script("driver=12060");
    assert_eq!((500, none, 2), address("cuMemcpyBatchAsync", 12080));
    script("driver=12080; batch=absent");
    assert_eq!((500, none, 1), address("cuMemcpyBatchAsync", 12080));
    script("batch=present");
    assert_eq!(OK, address("cuMemcpyBatchAsync", 12080).0);
}

#[test]
fn device_matches_its_script() {
    let _alone = alone();
    script(
        "uuid.0=00112233-4455-6677-8899-aabbccddeeff; name.0=Nice GPU; bus.0=0000:aa:00.0; memory=1000000; driver=11040",
    );
    let (mut uuid, mut text, mut bytes, mut version) = ([0_u8; 16], [0_u8; 32], 0, 0);
    let said = |text: &[u8]| {
        CStr::from_bytes_until_nul(text)
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!(
        OK,
        call!(cuDeviceGetUuid_v2(&mut uuid => *mut [u8; 16], 0 => c_int))
    );
    assert_eq!(
        0x0011_2233_4455_6677_8899_aabb_ccdd_eeff,
        u128::from_be_bytes(uuid)
    );
    assert_eq!(
        OK,
        call!(cuDeviceGetName(text.as_mut_ptr() => *mut u8, 32 => c_int, 0 => c_int))
    );
    assert_eq!("Nice GPU", said(&text));
    assert_eq!(
        OK,
        call!(cuDeviceGetPCIBusId(text.as_mut_ptr() => *mut u8, 32 => c_int, 0 => c_int))
    );
    assert_eq!("0000:aa:00.0", said(&text));
    assert_eq!(
        OK,
        call!(cuDeviceTotalMem_v2(&mut bytes => *mut usize, 0 => c_int))
    );
    assert_eq!(OK, call!(cuDriverGetVersion(&mut version => *mut c_int)));
    assert_eq!((1_000_000, 11040), (bytes, version));
    assert_eq!(
        2,
        call!(cuMemAlloc_v2(&mut 0 => *mut u64, 1_000_001 => usize))
    );
    clean();
    violated(
        call!(cuDeviceGetUuid_v2(&mut uuid => *mut [u8; 16], 99 => c_int)),
        101,
        "device 99 of",
    );
    script("uuid.0=5ca1ab1e-0000-4000-8000-000000000000; memory=8589934592");
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

#[test]
fn a_device_has_attributes() {
    let _alone = alone();
    let attribute = |of| {
        let mut value = -1;
        let code = call!(cuDeviceGetAttribute(&mut value => *mut c_int, of => c_int, 0 => c_int));
        (code, value)
    };
    // Compute capability; whether handles of fabric can be exported.
    assert_eq!([(OK, 9), (OK, 0)], [attribute(75), attribute(76)]);
    assert_eq!((OK, 1), attribute(128));
    script("fabric=absent");
    assert_eq!((OK, 0), attribute(128));
    violated(attribute(0).0, 1, "attribute 0");
}
